"""A run of transformers.Trainer or of Lightning, for benchmarks/exactness.py: a small BERT on the CPU, by SGD.

    torchrun --nproc-per-node 2 -m benchmarks.exactness_peers trainer --model BERT --folder RUN --batch 4 --accumulate 2

RUN/steps counts optimizer steps. A RUN with a checkpoint is continued. At the end rank 0 writes the weights into
RUN/weights.pt. --evaluate: the figures of an evaluation of these into RUN/evaluation.json, and nothing else.
"""

import argparse
import json
import os
import random
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TRAIN, VAL, VOCABULARY, EPOCHS, SAVE_EVERY = 250, 147, 200, 4, 10  # a batch of 16, and of 10 at the end of an epoch
LR = 0.05
IS_MAIN = os.environ.get("RANK", "0") == "0"


def samples(count: int, seed: int) -> list[dict]:
    """Texts of 3 to 20 tokens, of three classes that prefer other tokens."""
    draw = random.Random(seed)
    return [{"input_ids": draw.choices(range(5 + 30 * (number % 3), VOCABULARY // 2 + 30 * (number % 3)),
                                       k=draw.randint(3, 20)), "labels": number % 3} for number in range(count)]


def collate(rows: list[dict]) -> dict[str, Tensor]:
    """Pad to the longest."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def build(options: argparse.Namespace) -> nn.Module:
    """The model, with the same weights at each start."""
    from transformers import BertForSequenceClassification
    return BertForSequenceClassification.from_pretrained(options.model)


def trainer(options: argparse.Namespace) -> None:
    """transformers.Trainer as its documentation uses it."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Counter(TrainerCallback):
        def on_step_end(self, arguments: object, state: object, control: object, **rest: object) -> None:
            count(options, state.global_step)

    model = build(options)
    if options.evaluate:
        model.load_state_dict(torch.load(options.folder / "weights.pt"))
    arguments = TrainingArguments(
        output_dir=str(options.folder), per_device_train_batch_size=options.batch, num_train_epochs=EPOCHS,
        gradient_accumulation_steps=options.accumulate, optim="sgd", learning_rate=LR, save_steps=SAVE_EVERY,
        lr_scheduler_type="constant", max_grad_norm=0,
        use_cpu=True, report_to="none", disable_tqdm=True, seed=0)
    run = Trainer(model, arguments, train_dataset=samples(TRAIN, 0), eval_dataset=samples(VAL, 1),
                  data_collator=collate, callbacks=[Counter()], compute_metrics=lambda found: {
                      "top1": float((found.predictions.argmax(1) == found.label_ids).mean())})
    if options.evaluate:
        figures = run.evaluate()
        write_evaluation(options, {"loss": figures["eval_loss"], "top1": figures["eval_top1"]})
    else:
        run.train(resume_from_checkpoint=any(options.folder.glob("checkpoint-*")))
        write_weights(options, model)


def lightning(options: argparse.Namespace) -> None:
    """Lightning as its documentation uses it."""
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = build(options)

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.net(**batch).loss

        def on_train_batch_end(self, *rest: object) -> None:
            count(options, self.trainer.global_step)

        def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
            logits, labels = self.net(**batch).logits, batch["labels"]
            for name, value in (("loss", F.cross_entropy(logits, labels)),
                                ("top1", (logits.argmax(1) == labels).float().mean())):
                self.log(name, value, sync_dist=True, batch_size=len(labels))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), LR)

    L.seed_everything(0, verbose=False)
    module = Module()
    if options.evaluate:
        module.net.load_state_dict(torch.load(options.folder / "weights.pt"))
    loaders = {split: torch.utils.data.DataLoader(samples(number, seed), options.batch, shuffle=split == "train",
                                                  collate_fn=collate)
               for split, number, seed in (("train", TRAIN, 0), ("val", VAL, 1))}
    run = L.Trainer(
        accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), strategy="ddp", max_epochs=EPOCHS,
        accumulate_grad_batches=options.accumulate, logger=False, enable_progress_bar=False, num_sanity_val_steps=0,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(options.folder, every_n_train_steps=SAVE_EVERY, save_last=True)])
    if options.evaluate:
        run.validate(module, loaders["val"], verbose=False)
        write_evaluation(options, {name: float(value) for name, value in run.callback_metrics.items()})
    else:
        last = options.folder / "last.ckpt"
        run.fit(module, loaders["train"], ckpt_path=str(last) if last.exists() else None)
        write_weights(options, module.net)


def count(options: argparse.Namespace, step: int) -> None:
    """Say how many steps are done; a kill in between leaves the last number."""
    if IS_MAIN:
        (partial := options.folder / "steps.partial").write_text(str(step))
        partial.rename(options.folder / "steps")


def write_weights(options: argparse.Namespace, model: nn.Module) -> None:
    """At the end of training."""
    if IS_MAIN:
        torch.save(model.state_dict(), options.folder / "weights.pt")


def write_evaluation(options: argparse.Namespace, figures: dict[str, float]) -> None:
    """loss and top1."""
    if IS_MAIN:
        (options.folder / "evaluation.json").write_text(json.dumps(figures))


PEERS = {"trainer": trainer, "lightning": lightning}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactness_peers")
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--evaluate", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    PEERS[arguments.peer](arguments)
