"""What the rows of benchmarks/gpu.py compute: the models, the data that both sides read, and the bare loop's batches.

Legend: B samples, T tokens, P predicted tokens.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from torchvision import datasets, transforms
from transformers import PreTrainedTokenizerFast

from benchmarks.peers import num_loaders
from data.texts.tokenizer import SPECIAL, load_tokenizer
from models.tasks import load_task
from models.text.bert import EncoderSpec, build_encoder
from models.text.sparse_prediction import SparsePrediction
from models.vision.classifier import build_classifier
from utils.settings.text_options import TextModelOptions

TASKS = {"text": "text-classification", "mlm": "masked-lm"}
VIT, TIMMS = "vit_b_16", {"vit_b_16": "vit_base_patch16_224"}  # torchvision's name; timm's where it is another
Batch = tuple[dict[str, Tensor], Tensor]  # inputs by name, targets


@dataclass(frozen=True)
class Sizes:
    """Sizes of models and data, and how much is measured."""

    image_model: str = "resnet50"
    side: int = 224  # px
    classes: int = 1000
    image_batch: int = 256
    vit_batch: int = 128
    text_model: str = "bert-base"
    tokens: int = 128
    vocabulary: int = 30522
    text_batch: int = 128
    masked_tokens: int = 512
    masked_batch: int = 32
    precision: str = "bf16"
    steps: int = 40
    loaded_steps: int = 120  # of rows whose data are decoded: what was loaded before the first step is soon used up
    text_steps: int = 160  # they are short
    rounds: int = 2


TINY = Sizes("resnet18", 32, 10, 8, 8, "bert-tiny", 16, 200, 8, 32, 4, "fp32", steps=8,
             loaded_steps=8, text_steps=8, rounds=1)


@dataclass(frozen=True)
class Row:
    """What is measured: [vit-]KIND[-compiled]. kind: image, jpeg, packed, text or mlm."""

    name: str

    @property
    def kind(self) -> str:
        """What is trained, and from what."""
        return next(part for part in self.name.split("-") if part not in ("vit", "compiled"))

    @property
    def is_compiled(self) -> bool:
        """Whether the model is compiled."""
        return self.name.endswith("-compiled")

    def steps(self, sizes: Sizes) -> int:
        """Optimizer steps of a turn."""
        return sizes.text_steps if self.kind in TASKS else sizes.steps if self.kind == "image" else sizes.loaded_steps

    def sizes(self, sizes: Sizes) -> Sizes:
        """Those of this row."""
        if self.kind == "mlm":
            return replace(sizes, tokens=sizes.masked_tokens, text_batch=sizes.masked_batch)
        return replace(sizes, image_model=VIT, image_batch=sizes.vit_batch) if self.name.startswith("vit-") else sizes


def write_texts(root: Path, sizes: Sizes, count: int, is_labelled: bool) -> None:
    """Write train.tsv, val.tsv (without labels train.txt, val.txt) and tokenizer/.

    Each word is one token, and each text fills the model's input.
    """
    rng, words = np.random.default_rng(0), [f"w{index}" for index in range(sizes.vocabulary - len(SPECIAL))]
    root.mkdir()
    for name, rows in (("train", count), ("val", 8)):
        texts = rng.choice(words, (rows, sizes.tokens - 2))  # [CLS] and [SEP] are the other two
        lines = [" ".join(text) for text in texts]
        if is_labelled:
            lines = ["label\ttext", *(f"{index % 2}\t{line}" for index, line in enumerate(lines))]
        (root / f"{name}.{'tsv' if is_labelled else 'txt'}").write_text("\n".join(lines) + "\n")
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*SPECIAL, *words])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, SPECIAL.index(name)) for name in ("[CLS]", "[SEP]")])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name.strip('[]').lower()}_token": name for name in SPECIAL},
        model_input_names=["input_ids", "token_type_ids", "attention_mask"]).save_pretrained(root / "tokenizer")


def build_model(kind: str, sizes: Sizes, data: Path) -> nn.Module:
    """The model that Lockstep trains in a row; on the CPU."""
    if kind not in TASKS:
        return build_classifier(sizes.image_model, sizes.classes, sizes.side).to(memory_format=torch.channels_last)
    spec = EncoderSpec(load_task(TASKS[kind]).head, load_tokenizer(str(data / "tokenizer")), sizes.tokens,
                       ("0", "1") if kind == "text" else ())
    model, _ = build_encoder(spec, TextModelOptions(model=sizes.text_model), None, None)
    if kind == "mlm":
        SparsePrediction.add_to(model)
    return model


def write_model(kind: str, sizes: Sizes, data: Path) -> None:
    """Write model/ into a folder of texts, in the Hugging Face format."""
    build_model(kind, sizes, data).save_pretrained(data / "model")
    load_tokenizer(str(data / "tokenizer")).save_pretrained(data / "model")


def example(kind: str, sizes: Sizes, size: int) -> Batch:
    """A batch of noise with the shapes that Lockstep's batches of the row's data have. size: B."""
    if kind not in TASKS:
        images = torch.randn(size, 3, sizes.side, sizes.side).to(memory_format=torch.channels_last)
        return {"images": images}, torch.randint(sizes.classes, (size,))
    ids = torch.randint(len(SPECIAL), sizes.vocabulary, (size, sizes.tokens))
    inputs = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}  # nothing is padded: no mask, as in training
    if kind == "text":
        return inputs, torch.randint(2, (size,))
    predicted = 1 + torch.arange(max(1, round(0.15 * (sizes.tokens - 2))))  # of each text
    positions = (torch.arange(size)[:, None] * sizes.tokens + predicted).flatten()  # [P], into the flattened [B x T]
    return inputs | {"positions": positions}, torch.randint(sizes.vocabulary, positions.shape)


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    """The same batch on `device`; copies from pinned memory do not wait."""
    inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch[0].items()}
    return inputs, batch[1].to(device, non_blocking=True)


def loss_of(model: nn.Module, inputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    """Mean cross-entropy in float32."""
    logits = model(inputs["images"]) if "images" in inputs else model(**inputs).logits
    return F.cross_entropy(logits.float(), targets)


def jpeg_batches(folder: Path, sizes: Sizes, batch: int, device: torch.device) -> Iterator[Batch]:
    """Endless batches by torchvision's usual augmentation and torch's DataLoader."""
    prepare = transforms.Compose([
        transforms.RandomResizedCrop(sizes.side), transforms.RandomHorizontalFlip(), transforms.PILToTensor()])
    loader = DataLoader(datasets.ImageFolder(folder / "train", prepare), batch, shuffle=True, drop_last=True,
                        num_workers=num_loaders(device), persistent_workers=True, pin_memory=device.type != "cpu")
    while True:
        for images, targets in loader:
            inputs, targets = to_device(({"images": images}, targets), device)
            yield {"images": (inputs["images"] / 127.5 - 1).to(memory_format=torch.channels_last)}, targets


def flop_per_sample(model: nn.Module, batch: Batch) -> float:
    """FLOP of one forward and backward, divided by B; counted on the meta device, which computes nothing."""
    inputs, targets = to_device(batch, "meta")
    with FlopCounterMode(display=False) as counter:
        loss_of(copy.deepcopy(model).to("meta"), inputs, targets).backward()
    return counter.get_total_flops() / len(next(iter(batch[0].values())))
