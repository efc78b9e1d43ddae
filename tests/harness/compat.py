"""`make compat`: the present program goes on with runs of an older one, and answers for them, bit for bit.

Commit OLD makes each run of CASES twice: one undisturbed, one that is stopped in mid-epoch or killed. The present
program gets the same command, and must end the second run as OLD ended the first. It evaluates and predicts as OLD
does, and ask.verify, ask.replay and ask.compare must find the same bits. What is computed is compared, not how files
are laid out. A refusal (78) is a failure, too, unless ALLOWED_REFUSALS has it. Both programs are copies, with the same
models/own.py.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.records.log import TIMING
from tests.conftest import ROOT
from tests.harness.compat_old import done, launch, run_in, side_by_side
from tests.harness.draws import IMAGE_TABLE, PHOTOS, TEXT_TABLE, write_data
from tests.harness.project_copy import copy_project
from tests.harness.run_directory import outcome
from utils.errors import Exit
from utils.rundir.chain import files_in
from utils.rundir.starts import read_starts

OLD = "463e08d"
ALLOWED_REFUSALS: dict[tuple[str, str], str] = {}  # (name of a case, what is asked): why the present program refuses
STOP_AFTER, KILL_AT, REPLAYED = 5, 6, "8:12"  # steps; an epoch has 4 and a run 12, the first case's 23 and 12
# Appended to models/own.py of both programs.
NETWORKS = '''

class CompatImages(nn.Module):
    def __init__(self, num_outputs: int):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.GELU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, num_outputs)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.first(images).mean(dim=(2, 3)))


class CompatTexts(nn.Module):
    def __init__(self, num_outputs: int, vocab_size: int):
        super().__init__()
        self.embedding, self.drop = nn.Embedding(vocab_size, 16), nn.Dropout(0.2)
        self.head = nn.Linear(16, num_outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.drop((self.embedding(input_ids) * attention_mask[:, :, None]).sum(dim=1)))


IMAGE_MODELS["compat-images"] = CompatImages
TEXT_MODELS["compat-texts"] = CompatTexts
'''
SHORT = "--global-batch-size 16 --epochs 3 --log-every 1 --save-every 3"
TEXTS = f"{SHORT} --vocab-size 200 --max-length 32"
DEFAULTS = ("--seed 0 --optimizer adamw --lr auto --schedule cosine --warmup-steps auto --betas 0.9 0.999 --ema-decay 0"
            " --max-grad-norm 0 --precision auto --strategy ddp --micro-batch-size auto --eval-batch-size auto"
            " --threads auto --workers auto --keep 3 --keep-every auto --best auto --eval-every epoch")
OF_DEMO = (f"{DEFAULTS} --task image-classification --data demo --model resnet18 --epochs 8 --global-batch-size 64"
           " --image-size 32 --augmentation shift --mean 0.287 0.287 0.287 --std 0.354 0.354 0.354 --mixup 0"
           " --label-smoothing 0 --loss auto --weight-decay 0.05 --log-every 10 --save-every 1000 --val-fraction 0.1")


@dataclass(frozen=True)
class Case:
    """A run: its settings, and what is typed besides by one program alone: settings at their defaults."""

    name: str
    end: str  # of the disturbed one: "stopped" or "killed"
    processes: int  # of the older program; of the present one:
    later: int
    words: str
    data: str = ""
    typed_then: str = ""
    typed_now: str = ""


CASES = (
    Case("images, all by default", "stopped", 2, 2, "--max-steps 12", typed_now=OF_DEMO),
    Case("images, exact, EMA", "killed", 2, 3, f"{SHORT} --strategy exact --model mobilenet_v3_small --image-size 32"
         " --ema-decay 0.5", PHOTOS),
    Case("images, several labels", "stopped", 1, 2, f"{SHORT} --strategy exact --model small-cnn --image-size 32"
         " --multi-label --label-column labels --precision bf16", IMAGE_TABLE),
    Case("numbers of images, own network", "killed", 1, 1, f"{SHORT} --task image-regression --model compat-images"
         " --label-column x,y --image-size 32", IMAGE_TABLE, typed_then=DEFAULTS),
    Case("texts, exact, EMA", "stopped", 2, 1, f"{TEXTS} --task text-classification --strategy exact --model bert-tiny"
         " --ema-decay 0.5", TEXT_TABLE),
    Case("texts, own network", "killed", 2, 2, f"{TEXTS} --task text-classification --model compat-texts", TEXT_TABLE),
    Case("numbers of texts", "stopped", 1, 1, f"{TEXTS} --task text-regression --model bert-tiny --text-column text"
         " --label-column x", TEXT_TABLE),
    Case("masked tokens, exact", "killed", 1, 2, f"{TEXTS} --task masked-lm --strategy exact --model bert-tiny"
         " --text-column text", TEXT_TABLE),
    Case("masked tokens", "stopped", 2, 2, f"{TEXTS} --task masked-lm --model bert-tiny --text-column text",
         TEXT_TABLE))


class Compared:
    """What the present program makes of a case. folder: what the older one left."""

    def __init__(self, case: Case, folder: Path):
        self.case, self.folder = case, folder
        self.words = words_of(case, folder.parent / "data")
        self.undisturbed, self.disturbed = (run_in(folder / name) for name in ("undisturbed", "disturbed"))

    def failures(self) -> int:
        """How many questions failed; prints a row for each."""
        failed = 0
        for what, seen, verdict in self.rows():
            print(f"{self.case.name:<30}  {what:<21}  {verdict:<7}  {seen}", flush=True)
            failed += verdict == "FAILED"
        return failed

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """What is asked, what was seen, and "ok", "refused" or "FAILED"."""
        if (reason := self.folder / "failed").exists():
            yield "made", reason.read_text(), "FAILED"
            return
        for what, ask in (("continued", self.go_on), ("evaluated", self.evaluate), ("predicted", self.predict),
                          ("verified", self.verify), ("verified by its files", self.verify_files),
                          ("replayed", self.replay), ("compared", self.compare)):
            if what == "predicted" and not inputs_of(self.case, self.folder):
                continue
            try:
                yield what, ask(), "ok"
            except BaseException as error:  # pytest's failures are no Exception
                reason = ALLOWED_REFUSALS.get((self.case.name, what), "")
                is_allowed = reason and str(error).startswith(f"exit code {Exit.OTHER_RUN.value}\n")
                yield (what, reason, "refused") if is_allowed else (what, f"{type(error).__name__}: {error}", "FAILED")

    def go_on(self) -> str:
        """The same command ends the run as the older program ended the other one. Without --run-dir it finds it."""
        words, run = ["train.py", *self.words, *self.case.typed_now.split()], self.disturbed
        if self.case.data:
            words += ["--run-dir", run]
        else:
            (ROOT / "runs").mkdir()
            run = self.disturbed = run.rename(ROOT / "runs" / run.name)
        said = done(launch(self.folder, self.case.later, words))
        assert run_in(run.parent) == run and read_starts(run)[-1]["step"], f"it does not go on with the run\n{said}"
        expected, found = (outcome(run) | {"model": files_in(run / "model")} for run in (self.undisturbed, run))
        require(found, expected)
        return f"{self.case.end}, on {self.case.processes} and {self.case.later}: weights {found['weights'][:16]}"

    def evaluate(self) -> str:
        """Figures, and a row for each sample."""
        file, has_rows = self.folder / "rows-now.csv", has_rows_of(self.case)
        words = ["train.py", *self.words, "--run-dir", self.undisturbed, "--eval-only"]
        said = done(launch(self.folder, self.case.processes, [*words, *["--output", file][:2 * has_rows]]))
        now, then = (json.loads(text.splitlines()[-1]) for text in (said, (self.folder / "said").read_text()))
        require(*({name: value for name, value in figures.items() if name not in TIMING} for figures in (now, then)))
        if has_rows:
            require({"rows": file.read_bytes()}, {"rows": (self.folder / "rows.csv").read_bytes()})
        return f"loss {now['loss']}"

    def predict(self) -> str:
        """The same bytes."""
        file = self.folder / "predicted-now.csv"
        words = ["models/predict.py", self.undisturbed, inputs_of(self.case, self.folder.parent / "data")]
        done(launch(self.folder, 1, [*words, "--output", file]))
        require({"rows": file.read_bytes()}, {"rows": (self.folder / "predicted.csv").read_bytes()})
        return f"{len(file.read_bytes().splitlines()) - 1} rows, {file.stat().st_size} bytes"

    def verify(self) -> str:
        """All that both programs computed for one run is computed again."""
        return self.answer(self.case.later, "verified: ", "ask/verify.py", self.disturbed)

    def verify_files(self) -> str:
        """Of a run that the present program has not gone on with."""
        return self.answer(1, "the files of ", "ask/verify.py", self.undisturbed, "--chain-only")

    def replay(self) -> str:
        """Steps of a run that the present program has not gone on with."""
        words = ["ask/replay.py", self.undisturbed, "--steps", REPLAYED]
        processes = 1 if "exact" in self.words else self.case.processes
        return self.answer(processes, "the same bits as recorded: ", *words)

    def compare(self) -> str:
        """Both runs, by what is written down."""
        return self.answer(1, "the same, bit for bit: ", "ask/compare.py", self.undisturbed, self.disturbed)

    def answer(self, processes: int, begins: str, *words: Any) -> str:
        """The line of the answer. Nothing is taken from the cache of the runs."""
        said = done(launch(self.folder, processes, [*words], cache="another-cache"))
        lines = [line for line in said.splitlines() if line.startswith(begins)]
        assert lines, said
        return lines[0].replace(f"{self.folder}/", "").replace(f"{ROOT}/", "")


def require(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise AssertionError with the names of what differs."""
    apart = [name for name in expected | found if expected.get(name) != found.get(name)]
    assert not apart, "; ".join(f"{name}: {str(found.get(name))[:300]} and not {str(expected.get(name))[:300]}"
                                for name in apart)


def words_of(case: Case, data: Path) -> list[str]:
    """The settings of a case, but for those at their defaults."""
    return [*case.words.split(), *(["--data", str(data / case.data)] if case.data else [])]


def has_rows_of(case: Case) -> bool:
    """Whether the task says something about each sample."""
    return "masked-lm" not in case.words


def inputs_of(case: Case, data: Path) -> str:
    """What models.predict gets; "" if there is nothing."""
    if not has_rows_of(case) or not case.data:
        return ""
    return str(data / (case.data if case.data != PHOTOS else "photos/val"))


def make_programs(folder: Path) -> tuple[Path, Path]:
    """The older program and the present one."""
    archive = subprocess.run(["git", "archive", OLD], cwd=ROOT, capture_output=True)
    if archive.returncode:
        sys.exit(f"compat: needs commit {OLD}, in a clone with its history (git fetch --unshallow):"
                 f" {archive.stderr.decode().strip()}")
    old, new = folder / "old", folder / "new"
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(old, filter="data")
    new.mkdir()
    copy_project(new)
    script = "tests/harness/compat_old.py"
    (old / script).write_bytes((new / script).read_bytes())
    own = (old / "models/own.py").read_text() + NETWORKS
    for program in (old, new):
        (program / "models/own.py").write_text(own)
    return old, new


def main() -> None:
    """Print a row for each question; exit with 1 if one failed."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="lockstep-compat-") as scratch:
        folder = Path(scratch)
        old, new = make_programs(folder)
        write_data(data := folder / "data")
        cases = [{"words": words_of(case, data) + case.typed_then.split(), "has_run_dir": bool(case.data),
                  "inputs": inputs_of(case, data), "has_rows": has_rows_of(case), "processes": case.processes,
                  "end": case.end, "step": STOP_AFTER if case.end == "stopped" else KILL_AT} for case in CASES]
        (folder / "cases.json").write_text(json.dumps(cases))
        for program, words in ((old, ["tests.harness.compat_old", folder]), (new, ["tests.harness.compat", folder])):
            environment = os.environ | {"PYTHONPATH": str(program)}
            with subprocess.Popen([sys.executable, "-m", *words], cwd=program, env=environment) as process:
                try:
                    code = process.wait()
                except KeyboardInterrupt:
                    process.wait()  # it has the signal, too
                    raise
            if code:
                break
    print(f"{'FAILED' if code else 'all the same'}, in {time.monotonic() - began:.0f} s")
    sys.exit(code)


if __name__ == "__main__":
    if sys.argv[1:]:  # in the copy of the present program
        sys.exit(sum(side_by_side(lambda number: Compared(CASES[number], Path(sys.argv[1], str(number))).failures(),
                                  [*range(len(CASES))])) > 0)
    main()
