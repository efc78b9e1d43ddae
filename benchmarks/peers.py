"""What others would train with, by their own libraries: a process that prints its speed.

    python -m benchmarks.peers torchvision --data DIR --model resnet18 --batch 64 --steps 4 --precision fp32
    python -m benchmarks.peers trainer --data DIR --model FOLDER --batch 32 --steps 20 --precision bf16

Each peer's function says with which options it trains.
It prints {"samples_per_s": ..., "first_step_s": ...}: over --steps steps, after --warm-up others; and seconds from the
start of the process to the end of the first step. On an accelerator, too: --device.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from utils.hardware.cores import available_cores
from utils.rundir.clock import process_began

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TrainingArguments


class Steps:
    """The time of each step. On an accelerator only those where measuring begins and ends are waited for."""

    def __init__(self, options: argparse.Namespace):
        self._batch, self._warm_up, self._ends = options.batch, options.warm_up, []
        self.number = options.warm_up + options.steps  # in all
        self._waits = {1, options.warm_up, self.number} if options.device.type != "cpu" else set()

    def done(self) -> None:
        """A step is done."""
        if len(self._ends) + 1 in self._waits:
            torch.accelerator.synchronize()
        self._ends.append(time.perf_counter())

    def print(self) -> None:
        """The result."""
        measured, taken_s = len(self._ends) - self._warm_up, self._ends[-1] - self._ends[self._warm_up - 1]
        print(json.dumps({"samples_per_s": measured * self._batch / taken_s,
                          "first_step_s": self._ends[0] - process_began()}))


def torchvision_reference(options: argparse.Namespace) -> None:
    """references/classification/train.py: SGD with momentum, contiguous float32; --amp is not for the CPU."""
    from torchvision import models
    loader = image_loader(options)
    model = models.get_model(options.model, num_classes=len(loader.dataset.classes))
    train_images(options, model, loader, torch.contiguous_format, is_fused=False)


def bare(options: argparse.Namespace) -> None:
    """A plain loop with the right flags: channels_last, autocast."""
    from torchvision import models
    loader = image_loader(options)
    model = models.get_model(options.model, num_classes=len(loader.dataset.classes))
    train_images(options, model, loader, torch.channels_last)


def timm_loop(options: argparse.Namespace) -> None:
    """timm's train.py (which is in no package): its model, loader and options, with --channels-last --amp.

    Its prefetcher normalizes the images, which come as uint8, on the device: on an accelerator on a stream of its own.
    """
    import timm
    from timm.data import create_dataset, create_loader
    data = create_dataset("", root=str(options.data), split="train", is_training=True)
    loader = create_loader(data, (3, options.side, options.side), options.batch, is_training=True, color_jitter=None,
                           num_workers=num_loaders(options.device), device=options.device,
                           pin_memory=options.device.type != "cpu")
    size = {"img_size": options.side} if options.model.startswith("vit") else {}
    model = timm.create_model(options.model, num_classes=len(data.reader.class_to_idx), **size)
    train_images(options, model, loader, torch.channels_last)


def image_loader(options: argparse.Namespace) -> torch.utils.data.DataLoader:
    """torchvision's ImageFolder with the reference's transforms."""
    from torchvision import datasets, transforms
    prepare = transforms.Compose([
        transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.PILToTensor(),
        transforms.ConvertImageDtype(torch.float), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
    return torch.utils.data.DataLoader(datasets.ImageFolder(options.data / "train", prepare), options.batch,
                                       shuffle=True, drop_last=True, num_workers=1, persistent_workers=True)


def train_images(options: argparse.Namespace, model: nn.Module, loader: Iterator, memory: torch.memory_format,
                 is_fused: bool = True) -> None:
    """The loop that the three share. is_fused: the optimizer is torch's fastest."""
    model.to(options.device, memory_format=memory).train()
    if options.compile:
        model.compile()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, fused=is_fused)
    steps, number = Steps(options), 0
    while True:
        for images, labels in loader:
            images = images.to(options.device, memory_format=memory, non_blocking=True)
            update(model, optimizer, images, labels.to(options.device, non_blocking=True), options.precision)
            steps.done()
            number += 1
            if number == steps.number:
                return steps.print()


def update(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor, precision: str) -> None:
    """A step. images: [B, 3, H, W]; labels: [B]."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bf16"):
        logits = model(images)                            # [B, C]
    F.cross_entropy(logits.float(), labels).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def trainer(options: argparse.Namespace) -> None:
    """transformers.Trainer, batches of similar lengths; --task masked-lm: texts joined to blocks, as in run_mlm.py.

    Which attention is faster on the CPU depends on the task: torch has no kernel for attention with dropout there, and
    sdpa composes it in float32.
    """
    from transformers import (
        AutoModelForMaskedLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
    )
    tokenizer, is_masked = AutoTokenizer.from_pretrained(options.model), options.task == "masked-lm"
    is_cpu = options.device.type == "cpu"
    if is_masked:
        ids = tokenizer((options.data / "train.txt").read_text(), add_special_tokens=False)["input_ids"]
        width = options.length - 2
        rows = [{"input_ids": [tokenizer.cls_token_id, *ids[at:at + width], tokenizer.sep_token_id]}
                for at in range(0, len(ids) - width + 1, width)]
        model = AutoModelForMaskedLM.from_pretrained(options.model, attn_implementation=options.attention)
        collate = DataCollatorForLanguageModeling(tokenizer)
    else:
        rows = sentences(options.data / "train.tsv", tokenizer, options.length)
        model = AutoModelForSequenceClassification.from_pretrained(
            options.model, num_labels=2, attn_implementation=options.attention)
        collate = DataCollatorWithPadding(tokenizer)
    steps = Steps(options)

    class Timer(TrainerCallback):
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            steps.done()

    arguments = training_arguments(
        options.scratch, options.batch, options.precision, is_cpu, max_steps=steps.number,
        torch_compile=options.compile, dataloader_num_workers=0 if is_cpu else num_loaders(options.device),
        dataloader_persistent_workers=not is_cpu, dataloader_drop_last=True,
        train_sampling_strategy="random" if is_masked else "group_by_length")
    Trainer(model, arguments, train_dataset=rows, data_collator=collate, callbacks=[Timer()]).train()
    steps.print()


def sentences(table: Path, tokenizer: "PreTrainedTokenizerBase", length: int) -> list[dict[str, Any]]:
    """Token ids and labels of a .tsv with the columns text and label."""
    lines = [line.split("\t") for line in table.read_text().splitlines()]
    at, label = lines[0].index("text"), lines[0].index("label")
    ids = tokenizer([line[at] for line in lines[1:]], truncation=True, max_length=length)["input_ids"]
    return [{"input_ids": each, "labels": int(line[label])} for each, line in zip(ids, lines[1:], strict=True)]


def num_loaders(device: torch.device) -> int:
    """How many processes load data: as --workers auto."""
    return max(1, min(1 if device.type == "cpu" else 8, available_cores() - 1))


def training_arguments(scratch: Path, batch: int, precision: str, is_cpu: bool = True,
                       **more: object) -> "TrainingArguments":
    """Of the Trainer, without what takes time beside the training: checkpoints, logs, a progress bar."""
    from transformers import TrainingArguments
    return TrainingArguments(output_dir=str(scratch), per_device_train_batch_size=batch, use_cpu=is_cpu,
                             bf16=precision == "bf16", report_to="none", save_strategy="no", logging_strategy="no",
                             logging_nan_inf_filter=False, disable_tqdm=True, **more)


PEERS = {"torchvision": torchvision_reference, "bare": bare, "timm": timm_loop, "trainer": trainer}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers")
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--task", default="")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--length", type=int, default=128, help="tokens of a text at most")
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa", help="of trainer")
    parser.add_argument("--side", type=int, default=224, help="px of timm's images")
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--warm-up", type=int, default=2, help="steps, 1 or more")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/trainer"))
    arguments = parser.parse_args()
    if arguments.device.type != "cpu":  # as timm's train.py
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    PEERS[arguments.peer](arguments)
