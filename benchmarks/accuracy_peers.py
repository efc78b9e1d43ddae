"""What others would train to an accuracy with: a process that evaluates as it goes and writes the accuracy down.

    python -m benchmarks.accuracy_peers timm --data DIR --epochs 10 --batch 64 --precision bf16 --seed 1 --run-dir RUN
    python -m benchmarks.accuracy_peers trainer --model FOLDER --eval-every STEPS --data DIR ...

Those of images evaluate after each epoch. Each evaluation is a line of RUN/metrics.jsonl, as train.py writes it:
{"split": "val", "top1": 0.62}.
AdamW after 5 % of warm-up, with a cosine schedule for images and a linear one for texts, as in train.py. Images are
32 px, moved by up to 4 px and mirrored.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from benchmarks.peers import sentences, training_arguments, update

SIZE = 32  # px
IMAGE_LR, TEXT_LR, IMAGE_DECAY, TEXT_DECAY, WARM_UP = 1e-3, 5e-5, 0.05, 0.01, 0.05  # as train.py's
EVAL_BATCH, LENGTH = 64, 128  # samples; tokens
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def bare(options: argparse.Namespace) -> None:
    """A plain loop with torchvision's model and transforms: channels_last, autocast, a fused optimizer."""
    from torchvision import datasets, models, transforms
    end = [transforms.PILToTensor(), transforms.ConvertImageDtype(torch.float), transforms.Normalize(MEAN, STD)]
    begin = {"train": [transforms.RandomCrop(SIZE, SIZE // 8), transforms.RandomHorizontalFlip()], "val": []}
    loaders = {split: torch.utils.data.DataLoader(
        datasets.ImageFolder(options.data / split, transforms.Compose([*begin[split], *end])), options.batch,
        shuffle=split == "train", drop_last=split == "train", num_workers=1, persistent_workers=True)
        for split in ("train", "val")}
    model = models.resnet18(num_classes=len(loaders["train"].dataset.classes))
    optimizer = torch.optim.AdamW(model.parameters(), IMAGE_LR, weight_decay=IMAGE_DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, IMAGE_LR, options.epochs * len(loaders["train"]), pct_start=WARM_UP, cycle_momentum=False)
    train_images(options, model, loaders, optimizer, lambda step: schedule.step())


def timm_loop(options: argparse.Namespace) -> None:
    """timm's model, loader, optimizer and schedule in a loop like its train.py: --channels-last --amp."""
    import timm
    from timm.data import create_dataset, create_loader
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from torchvision.transforms import RandomCrop
    data = {split: create_dataset("", root=str(options.data), split=split, is_training=split == "train")
            for split in ("train", "val")}
    loaders = {split: create_loader(
        each, (3, SIZE, SIZE), options.batch, is_training=split == "train", color_jitter=None, crop_pct=1.0,
        num_workers=1, device=torch.device("cpu")) for split, each in data.items()}
    # A random resized crop is for photos. DeiT, which trains with timm's transforms, does this with CIFAR's images.
    data["train"].transform.transforms[0] = RandomCrop(SIZE, SIZE // 8)
    model = timm.create_model("resnet18", num_classes=len(data["train"].reader.class_to_idx))
    optimizer = create_optimizer_v2(model, "adamw", lr=IMAGE_LR, weight_decay=IMAGE_DECAY, fused=True)
    schedule, _ = create_scheduler_v2(
        optimizer, "cosine", num_epochs=options.epochs, warmup_epochs=WARM_UP * options.epochs, warmup_lr=1e-5,
        step_on_epochs=False, updates_per_epoch=len(loaders["train"]))
    train_images(options, model, loaders, optimizer, schedule.step_update)


def train_images(options: argparse.Namespace, model: nn.Module, loaders: dict[str, Iterable],
                 optimizer: torch.optim.Optimizer, set_lr: Callable[[int], None]) -> None:
    """The loop that the two share. set_lr is called with the number of steps that are done."""
    model.to(memory_format=torch.channels_last)
    step = 0
    for _ in range(options.epochs):
        # train
        model.train()
        for images, labels in loaders["train"]:
            update(model, optimizer, images.to(memory_format=torch.channels_last), labels, options.precision)
            step += 1
            set_lr(step)

        # evaluate
        model.eval()
        right = count = 0
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16"):
            for images, labels in loaders["val"]:
                logits = model(images.to(memory_format=torch.channels_last))                # [B, C]
                right, count = right + int((logits.argmax(1) == labels).sum()), count + len(labels)
        record(options.run_dir, right / count)


def trainer(options: argparse.Namespace) -> None:
    """transformers.Trainer: batches of similar lengths, a linear schedule."""
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = {split: sentences(options.data / f"{split}.tsv", tokenizer, LENGTH) for split in ("train", "val")}
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2)

    class Recorder(TrainerCallback):
        def on_evaluate(self, *args: object, metrics: dict[str, float], **kwargs: object) -> None:
            record(options.run_dir, metrics["eval_top1"])

    arguments = training_arguments(
        options.run_dir / "trainer", options.batch, options.precision, num_train_epochs=options.epochs,
        learning_rate=TEXT_LR, weight_decay=TEXT_DECAY, warmup_steps=WARM_UP, seed=options.seed, eval_strategy="steps",
        eval_steps=options.eval_every, per_device_eval_batch_size=EVAL_BATCH, train_sampling_strategy="group_by_length")
    Trainer(model, arguments, DataCollatorWithPadding(tokenizer), rows["train"], rows["val"],
            compute_metrics=lambda found: {"top1": (found.predictions.argmax(1) == found.label_ids).mean()},
            callbacks=[Recorder()]).train()


def record(run_dir: Path, top1: float) -> None:
    """Write an evaluation down."""
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"split": "val", "top1": float(top1)}) + "\n")


PEERS = {"bare": bare, "timm": timm_loop, "trainer": trainer}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy_peers")
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", help="a folder, of trainer")
    parser.add_argument("--eval-every", type=int, help="steps, of trainer")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.run_dir.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    PEERS[arguments.peer](arguments)
