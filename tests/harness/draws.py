"""`make draws DRAWS=20 SEED=0`: runs with settings drawn at random, so that features meet that no test brings together.

A run trains, or is refused in one message. One that trained is trained again, stopped or killed on the way, and must
end the same (under exact, on another number of processes). --eval-only must print the run's best figure, models.predict
must take its model, and ask.verify or ask.replay must find the same bits. What is drawn is a function of a number: it
is repeated with SEED=N DRAWS=1, but for the moment of a kill.
"""

import argparse
import csv
import json
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, ROOT, TORCHRUN, Launch, Result, write_photos, write_texts
from tests.harness.forked import forking_torchrun_main, script_main
from tests.harness.launches import OWN_STACK, messages
from tests.harness.run_directory import outcome, trained_steps
from utils.errors import Exit

REFUSED = {Exit.USAGE: "refused", Exit.BAD_DATA: "refused", Exit.DIVERGED: "diverged"}
ON_ONE_PROCESS = ("dp", "dp-classic")
Pool = tuple[tuple[float, str, tuple[object, ...]], ...]  # (chance to be given, setting, values); () is a switch

EVERY: Pool = (
    (1, "--strategy", ("ddp", "ddp", "exact", "exact", "fsdp", *ON_ONE_PROCESS)),
    (1, "--eval-every", (4, 8, "epoch")), (1, "--save-every", (2, 3, 1000)),
    (.6, "--precision", ("fp32", "bf16", "fp16")), (.5, "--global-batch-size", (8, 13, 30, 32)),
    (.4, "--micro-batch-size", (1, 2, 3, 5, 8, 16)), (.2, "--eval-batch-size", (1, 7)), (.3, "--workers", (0, 1, 2)),
    (.3, "--optimizer", ("sgd", "adam")), (.3, "--lr", (0.01,)), (.2, "--warmup-steps", (0, 3, 20)),
    (.3, "--schedule", ("cosine", "linear", "step", "constant")), (.25, "--max-grad-norm", (0.5,)),
    (.25, "--freeze", ("backbone", 1, 2)), (.2, "--layer-decay", (0.7,)), (.3, "--ema-decay", (0.5, 0.99)),
    (.15, "--checkpoint-activations", ()), (.15, "--cpu-kernels", ("off",)), (.1, "--profile", (3,)),
    (.15, "--early-stop-patience", (1,)), (.15, "--keep", (1,)), (.15, "--keep-every", (0, 2)),
    (.1, "--report", ("off",)), (.1, "--bad-samples", ("skip",)), (.2, "--val-fraction", (0.2, 0.5)),
    (.2, "--seed", (7,)), (.1, "--max-nonfinite", (3,)), (.05, "--find-unused-parameters", ()))
IMAGES: Pool = (
    (1, "--image-size", (32, 48)),
    (1, "--model", ("small-cnn", "small-cnn", "resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "efficientnet_b0",
                    "squeezenet1_1", "googlenet", "regnet_y_400mf")),
    (.3, "--cache", ("jpeg", "raw")), (.3, "--augmentation", ("photo", "crop", "small", "shift", "none")),
    (.2, "--auto-augment", ("randaugment", "trivialaugment")), (.2, "--random-erasing", (0.5,)))
TEXTS: Pool = (
    (1, "--vocab-size", (200,)), (1, "--max-length", (16, 32, 128)), (.2, "--dropout", (0.3,)),
    (1, "--model", ("bert-tiny", "bert-tiny", "bert-mini")))
CLASSES: Pool = (
    (.2, "--label-smoothing", (0.1,)), (.2, "--class-weights", ("balanced",)), (.15, "--loss", ("bce",)),
    (.2, "--best", ("macro_f1", "loss", "top1", "map")))
TARGETS: Pool = ((.5, "--loss", ("l1", "huber")), (.2, "--best", ("mae", "rmse", "r2")))
MIXED: Pool = ((.25, "--mixup", (0.3,)), (.25, "--cutmix", (0.5,)))
PHOTOS, IMAGE_TABLE, TEXT_TABLE = "photos", "photos/images.csv", "texts.csv"
# task, data, further words, and the pools besides EVERY
KINDS: tuple[tuple[str, str, tuple[str, ...], tuple[Pool, ...]], ...] = (
    ("image-classification", PHOTOS, (), (IMAGES, CLASSES, MIXED)),
    ("image-classification", IMAGE_TABLE, ("--group-column", "group"), (IMAGES, CLASSES, MIXED)),
    ("image-classification", IMAGE_TABLE, ("--multi-label", "--label-column", "labels"), (IMAGES, MIXED)),
    ("image-classification", IMAGE_TABLE, ("--image-column", "image,other"), (IMAGES, CLASSES, MIXED)),
    ("image-regression", IMAGE_TABLE, ("--label-column", "x,y"), (IMAGES, TARGETS)),
    ("text-classification", TEXT_TABLE, (), (TEXTS, CLASSES)),
    ("text-classification", TEXT_TABLE, ("--text-column", "text,more", "--group-column", "group"), (TEXTS, CLASSES)),
    ("text-classification", TEXT_TABLE, ("--multi-label", "--label-column", "labels"), (TEXTS,)),
    ("text-classification", TEXT_TABLE, ("--model", "bag-of-words"), (CLASSES,)),
    ("text-regression", TEXT_TABLE, ("--text-column", "text", "--label-column", "x"), (TEXTS, TARGETS)),
    ("masked-lm", TEXT_TABLE, ("--text-column", "text"), (TEXTS,)))


def write_data(folder: Path) -> None:
    """What KINDS name: photos, and a table of them and one of texts with labels and numbers of every kind."""
    write_photos(folder / "photos")
    write_texts(folder / "texts")
    images = sorted(path.relative_to(folder / "photos") for path in (folder / "photos/train").rglob("*.png"))
    with (folder / "texts/train.csv").open(encoding="utf-8") as file:
        texts = [(row["text"], row["more"]) for row in csv.DictReader(file)]
    for table, names, inputs in ((IMAGE_TABLE, ("image", "other"), [*zip(images, images[::-1], strict=True)]),
                                 (TEXT_TABLE, ("text", "more"), texts)):
        with (folder / table).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*names, "label", "labels", "x", "y", "group"])
            for number, pair in enumerate(inputs):
                labels = "|".join(name for bit, name in enumerate("pqr") if number >> bit & 1)
                writer.writerow([*pair, "abc"[number % 3], labels, number % 5, number / 7, f"g{number // 3}"])


class Drawn:
    """One draw: its words and numbers of processes, and what becomes of it in a folder."""

    def __init__(self, number: int, data: Path, folder: Path):
        draw = random.Random(f"draw {number}")
        task, self.place, further, pools = draw.choice(KINDS)
        self.words = ["--task", task, "--data", str(data / self.place), *further, "--max-steps", "8", "--log-every",
                      "1", "--threads", "1"]
        for chance, setting, values in (pair for pool in (EVERY, *pools) for pair in pool):
            if draw.random() < chance:
                self.words += [setting, *([str(draw.choice(values))] if values else [])]
        strategy = self.words[self.words.index("--strategy") + 1]
        self.is_on_one = strategy in ON_ONE_PROCESS
        self.processes = 1 if self.is_on_one else draw.choice((1, 2, 2, 3))
        self.later = draw.choice((1, 2, 3)) if strategy == "exact" else self.processes
        if strategy in ("ddp", "exact") and min(self.processes, self.later) > 1 and draw.random() < 0.3:
            self.words += ["--audit-every", "2"]
        self.draw, self.data, self.folder = draw, data, folder
        folder.mkdir()

    def follow(self) -> str:
        """Train, and all that follows. Returns how it ended. Raises AssertionError if anything is not as it should be.
        """
        # once, undisturbed
        run, again = self.folder / "run", self.folder / "again"
        result = self.train(run, self.processes).wait()
        if result.returncode:
            assert result.code in REFUSED and len(messages(result)) == 1 and OWN_STACK not in result.err, result.text
            return f"{REFUSED[result.code]}: {messages(result)[0]}"

        # again, disturbed
        stop_at = self.draw.randint(1, 8)
        if self.draw.random() < 0.3:
            result = self.train(again, self.processes, "--stop-after", str(stop_at)).wait()
            assert result.code in (Exit.DONE, Exit.STOPPED) and not messages(result), result.text
        else:
            launch, deadline = self.train(again, self.processes), time.monotonic() + LIMIT_S
            while launch.process.poll() is None and trained_steps(again) < stop_at and time.monotonic() < deadline:
                time.sleep(0.005)
            launch.kill_all()
            assert time.monotonic() < deadline, f"no step {stop_at} within {LIMIT_S} s"
        require_success(self.train(again, self.later).wait())
        expected, found = outcome(run), outcome(again)
        apart = [name for name, value in expected.items() if value != found[name]]
        assert not apart, f"disturbed at step {stop_at} and continued on {self.later}, it differs in {', '.join(apart)}"

        # what the run is asked
        processes = 1 if self.is_on_one else self.draw.choice((1, 2))
        words = ["train.py", "--eval-only", "--run-dir", run]
        best = json.loads((run / "summary.json").read_text())["best"]
        said = json.loads(require_success(self.launch(processes, words).wait()).out.splitlines()[-1])
        assert said[best["metric"]] == best["value"], f"{said} is not {best}"
        step = self.draw.randint(1, trained_steps(run))
        question, answer = self.draw.choice(((["ask.verify", run], "verified: "),
                                             (["ask.replay", run, "--step", step], "the same bits as recorded: ")))
        result = require_success(self.launch(self.later, ["-m", *question]).wait())
        assert answer in result.out, result.text
        if "masked-lm" not in self.words:
            inputs = self.data / (self.place if self.place != PHOTOS else "photos/val")
            require_success(self.launch(1, ["-m", "models.predict", run, inputs]).wait())
        return f"trained on {self.processes} and {self.later}"

    def train(self, run: Path, processes: int, *words: str) -> Launch:
        """A launch of the run."""
        return self.launch(processes, ["train.py", *self.words, *words, "--run-dir", run])

    def launch(self, processes: int, words: list[object]) -> Launch:
        """A launch of a script, or of a module by -m."""
        several = [] if processes == 1 else [*TORCHRUN, f"--nproc-per-node={processes}"]
        if words[0] == "-m":
            torchrun = ["-m", "torch.distributed.run", *several] if several else []
            program, words = None, [sys.executable, *torchrun, *words]
        else:
            program, words = forking_torchrun_main if several else script_main, [*several, *words]
        environment = os.environ | {"LOCKSTEP_CACHE": str(self.folder / "cache"), "OMP_NUM_THREADS": "1",
                                    "PYTHONPATH": str(ROOT)}
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        return Launch(program, [str(word) for word in words], environment, folder)


def require_success(result: Result) -> Result:
    """The result of a launch that must have succeeded."""
    assert result.returncode == 0, result.text
    return result


def main() -> None:
    """Follow the draws; exits with 1 if one failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first draw")
    given, ends = parser.parse_args(), Counter()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="lockstep-draws-") as folder:
        write_data(data := Path(folder))
        for number in range(given.seed, given.seed + given.draws):
            drawn = Drawn(number, data, data / f"draw-{number}")
            try:
                end = drawn.follow()
            except (Exception, pytest.fail.Exception) as error:
                end = (f"FAILED on {drawn.processes} and {drawn.later}: {shlex.join(drawn.words)}\n"
                       f"{type(error).__name__}: {error}")
            ends[end.split()[0].strip(":")] += 1
            print(f"{number}: {end}", flush=True)
            shutil.rmtree(drawn.folder)
    print(", ".join(f"{count} {end}" for end, count in ends.items()))
    sys.exit(ends["FAILED"] > 0)


if __name__ == "__main__":
    main()
