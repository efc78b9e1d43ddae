"""`python -m benchmarks.fine_tuning DIR`: pretrained weights by train.py's defaults, and by those of timm's train.py.

EfficientNet-Lite0's ImageNet weights, 500 photos of CIFAR-10 (DIR/cifar10) at 224 px, 12 epochs, each seed on one core:
an hour on two cores. timm's loop takes 11 GiB of memory at its batch of 128.
timm's train.py is in no package: what it does by default stands here, by timm's own loader, optimizer, schedule, loss.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.in_turn import about, append
from benchmarks.pretrained import write_lite0
from benchmarks.processes import output
from benchmarks.recipes import RUNS, lay_out, shown, verdict

NAME, EPOCHS = "tf_efficientnet_lite0", 12
DATA = RUNS / "data" / "cifar"


def main(data: Path, seeds: int) -> None:
    """Train both on all seeds, as many at a time as there are cores, and print accuracies in percent."""
    lay_out("cifar", data)
    with tempfile.TemporaryDirectory() as temporary:
        write_lite0(weights := f"{temporary}/lite0.pth")

        def ours(seed: int) -> float:
            return trained("train.py", "--model", f"timm/{NAME}", "--weights", weights, "--data", DATA, "--epochs",
                           EPOCHS, "--eval-every", 10**6, "--seed", seed, "--precision", "fp32")

        def timms(seed: int) -> float:
            words = [sys.executable, "-m", "benchmarks.fine_tuning", DATA, "--weights", weights, "--seed", seed]
            return float(output(words, 1))

        compare("fine-tuning EfficientNet-Lite0, photos at 224 px", "top1 in %", {"ours": ours, "timm": timms}, seeds)


def compare(what: str, figure: str, trainings: dict[str, Callable[[int], float]], seeds: int) -> None:
    """Train two, seed by seed, as many at a time as there are cores; print the figures, and whether the first's differ.

    figure: its name and unit. trainings: by name, from a seed to the figure. The figures of all seeds are appended to
    results.jsonl.
    """
    def told(name: str, train: Callable[[int], float], seed: int) -> float:
        value = train(seed)
        print(f"{name}, seed {seed}: {value:.1f}", file=sys.stderr, flush=True)
        return value

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = {name: [pool.submit(told, name, train, seed) for seed in range(seeds)]
                 for name, train in trainings.items()}
        figures = {name: [each.result() for each in runs] for name, runs in found.items()}
    print(f"{figure}; n = {seeds}; {about()}")
    for name, each in figures.items():
        print(f"{name}: {shown(each)}")
    differences = [mine - other for mine, other in zip(*figures.values(), strict=True)]
    print(f"{next(iter(figures))}: {verdict(differences)} ({shown(differences, '+')})")
    append(what, figure, figures)


def trained(*words: object, figure: str = "top1") -> float:
    """100 times the figure at the end of a run of train.py on one core, so an accuracy in percent."""
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        output([sys.executable, *words, "--run-dir", run, "--device", "cpu", "--threads", 1, "--workers", 0], 1)
        return 100 * json.loads((run / "summary.json").read_text())[figure]


def timm_defaults(data: Path, weights: str, seed: int) -> float:
    """Accuracy in percent after EPOCHS of timm's train.py, all other options at their defaults."""
    from timm import create_model
    from timm.data import create_dataset, create_loader, resolve_data_config
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    torch.manual_seed(seed)
    batch = 128
    sets = {split: create_dataset("", root=str(data), split=split, is_training=split == "train")
            for split in ("train", "val")}
    model = create_model(NAME, pretrained=True, pretrained_cfg_overlay={"file": weights},
                         num_classes=len(sets["train"].reader.class_to_idx))
    config = resolve_data_config({}, model=model)
    shared = {"mean": config["mean"], "std": config["std"], "num_workers": 0, "device": torch.device("cpu"),
              "persistent_workers": False}
    train = create_loader(sets["train"], config["input_size"], batch, is_training=True, color_jitter=0.4, hflip=0.5,
                          scale=(0.08, 1), ratio=(3 / 4, 4 / 3), interpolation="random", **shared)
    val = create_loader(sets["val"], config["input_size"], batch, interpolation=config["interpolation"],
                        crop_pct=config["crop_pct"], **shared)
    optimizer = create_optimizer_v2(model, "sgd", lr=0.1 * batch / 256, momentum=0.9, weight_decay=2e-5)
    schedule, _ = create_scheduler_v2(optimizer, "cosine", num_epochs=EPOCHS, warmup_epochs=5, warmup_lr=1e-5,
                                      updates_per_epoch=len(train))
    loss_of = LabelSmoothingCrossEntropy(0.1)
    schedule.step(0)
    for epoch in range(EPOCHS):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            loss_of(model(images), labels).backward()
            optimizer.step()
        schedule.step(epoch + 1)
    model.eval()
    with torch.inference_mode():
        right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in val)
    return 100 * right / len(sets["val"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fine_tuning")
    parser.add_argument("data", type=Path, help="a folder with cifar10, as for make accuracy")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--weights", help="train timm's alone with these, on the folder of images `data`")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.weights:
        print(timm_defaults(arguments.data, arguments.weights, arguments.seed))
    else:
        main(arguments.data, arguments.seeds)
