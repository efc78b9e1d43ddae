"""What others would start with: a process of several that ends with the first step on the digits.

    torchrun --nproc-per-node=2 -m benchmarks.startup_peers timm --data DIR --precision bf16 --run-dir RUN

Rank 0 writes a line to RUN/metrics.jsonl when the first step is done, as train.py does. Model, batch and precision are
those of train.py; without loader processes, as there, on two cores.
"""

import argparse
import os
from pathlib import Path

import torch

SIZE, GLOBAL_BATCH = 32, 128  # px; samples, as in data/demo.py


def timm_step(options: argparse.Namespace) -> None:
    """timm's model, loader and optimizer in DistributedDataParallel, as in its train.py. Collective."""
    import timm
    import torch.distributed as dist
    from timm.data import create_dataset, create_loader
    from timm.optim import create_optimizer_v2

    from benchmarks.peers import update
    dist.init_process_group("gloo")
    data = create_dataset("", root=str(options.data), split="train", is_training=True)
    loader = create_loader(data, (3, SIZE, SIZE), options.batch, is_training=True, color_jitter=None, distributed=True,
                           num_workers=0, persistent_workers=False, device=torch.device("cpu"))
    model = timm.create_model("resnet18", num_classes=len(data.reader.class_to_idx))
    model = torch.nn.parallel.DistributedDataParallel(model.to(memory_format=torch.channels_last))
    optimizer = create_optimizer_v2(model, "sgd", lr=0.05, momentum=0.9, weight_decay=5e-4)
    images, labels = next(iter(loader))
    update(model, optimizer, images.to(memory_format=torch.channels_last), labels, options.precision)
    write_down(options.run_dir)
    dist.destroy_process_group()


def trainer_step(options: argparse.Namespace) -> None:
    """transformers.Trainer with a ResNet of ResNet-18's sizes and torchvision's ImageFolder. Collective."""
    from torchvision import datasets, transforms
    from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainerCallback

    from benchmarks.peers import training_arguments
    prepare = transforms.Compose([
        transforms.Resize(SIZE), transforms.PILToTensor(), transforms.ConvertImageDtype(torch.float),
        transforms.Normalize((0.287, 0.287, 0.287), (0.354, 0.354, 0.354))])
    data = datasets.ImageFolder(options.data / "train", prepare)
    config = ResNetConfig(embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic",
                          num_labels=len(data.classes))
    model = ResNetForImageClassification(config).to(memory_format=torch.channels_last)

    class Recorder(TrainerCallback):
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            write_down(options.run_dir)

    arguments = training_arguments(options.run_dir / "trainer", options.batch, options.precision, max_steps=1,
                                   remove_unused_columns=False, ddp_find_unused_parameters=False)
    Trainer(model, arguments, train_dataset=data, callbacks=[Recorder()], data_collator=lambda samples: {
        "pixel_values": torch.stack([image for image, _ in samples]).to(memory_format=torch.channels_last),
        "labels": torch.tensor([label for _, label in samples])}).train()


def write_down(run_dir: Path) -> None:
    """The first step is done."""
    if os.environ["RANK"] == "0":
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "metrics.jsonl").write_text("{}\n")


PEERS = {"timm": timm_step, "trainer": trainer_step}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup_peers")
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.batch = GLOBAL_BATCH // int(os.environ["WORLD_SIZE"])
    PEERS[arguments.peer](arguments)
