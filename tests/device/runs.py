"""What the rows launch: nine steps of each task, three an epoch, and the same on the CPU; each computed once.

24, 17 and 16 samples in six micro-batches: two processes share them unevenly. BatchNorm, dropout, padding, a tied
weight.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.conftest import ROOT, Launch, Result

PYTHON = ROOT / "tests/harness/accelerator/python"
IMAGES = ["--model", "mobilenet_v3_small", "--image-size", "32"]
TEXTS = ["--model", "bert-tiny", "--vocab-size", "200", "--max-length", "32"]
TASKS = {
    "image-classification": [*IMAGES, "--mixup", "0.8", "--cutmix", "1", "--class-weights", "1,2,3"],
    "text-classification": [*TEXTS, "--text-column", "text,more"],
    "masked-lm": TEXTS,
}
OBJECTIVES = {  # beside one class of a sample, from tables: numbers, several labels
    "image-regression": ["--task", "image-regression", *IMAGES, "--image-column", "image,mask",
                         "--label-column", "brightness,number", "--loss", "huber"],
    "text-regression": ["--task", "text-regression", *TEXTS, "--text-column", "text", "--label-column", "length"],
    "image-labels": ["--task", "image-classification", *IMAGES, "--label-column", "labels", "--multi-label",
                     "--class-weights", "balanced"],
    "text-labels": ["--task", "text-classification", *TEXTS, "--text-column", "text", "--label-column", "labels",
                    "--multi-label"],
}
COMMON = ["--global-batch-size", "24", "--micro-batch-size", "4", "--epochs", "3", "--threads", "1", "--log-every", "3",
          "--workers", "1", "--save-every", "2"]
TECHNIQUES = {task: [  # of docs/recipes.md
    "--ema-decay", "0.9", "--freeze", "1", "--layer-decay", "0.8", "--checkpoint-activations",
    "--early-stop-patience", "1", *words] for task, words in {
        "image-classification": ["--auto-augment", "randaugment"], "text-classification": []}.items()}
STEPS, EVALUATIONS, RECORDED = 9, 3, (1, 3, 6, 9)
COARSE = {"bf16": 0.05, "fp16": 0.02}  # 8 and 11 bits of mantissa, after nine steps
CLOSE = 1e-3  # between losses in fp32 on different devices, over 20 steps


@dataclass(frozen=True)
class Accelerator:
    """Launches on the suite's device. simulation: settings of the simulated one (tests/harness/accelerator)."""

    is_simulated: bool
    name: str
    launch: Callable[..., Launch]
    simulation: tuple[tuple[str, Any], ...] = ()

    def simulating(self, **settings: Any) -> "Accelerator":
        """The same with other settings of the simulated device; a real one knows none."""
        return replace(self, simulation=tuple((dict(self.simulation) | settings).items()))

    @property
    def has_the_cpus_bits(self) -> bool:
        """Whether its results, and its random numbers, are those of the CPU."""
        return self.is_simulated and "generator" not in dict(self.simulation)

    @property
    def environment(self) -> dict[str, str]:
        """What has programs that are launched find the device."""
        settings = json.dumps(dict(self.simulation), default=str)
        return {} if not self.is_simulated else {
            "PYTHON_EXEC": str(PYTHON), "LOCKSTEP_PYTHON": str(PYTHON), "LOCKSTEP_SIM_PYTHON": sys.executable,
            "SIMULATED_ACCELERATOR": settings}

    def start(self, processes: int | None, *words: object, script: str = "train.py", **options: Any) -> Launch:
        """A live launch; processes: as in tests/conftest.py."""
        if processes is None and self.is_simulated and "command" not in options:
            options["command"] = (PYTHON, script)
        return self.launch(processes, *words, script=script, env=self.environment | options.pop("env", {}), **options)

    def run(self, processes: int | None, *words: object, **options: Any) -> Result:
        """The same, once it has ended."""
        return self.start(processes, *words, **options).wait()


class Runs:
    """Run directories under `folder`."""

    def __init__(self, accelerator: Accelerator, run_train: Callable[..., Result], run_torchrun: Callable[..., Result],
                 data: dict[str, Path], folder: Path):
        self.accelerator, self.folder = accelerator, folder
        self._on_cpu: dict[bool, Callable[..., Result]] = {True: run_torchrun, False: run_train}
        self._data = data

    def words(self, task: str, strategy: str = "ddp", precision: str = "fp32", *techniques: str) -> list[object]:
        """A command line without its run directory, of a task or an objective. techniques: nothing, or "techniques"."""
        return [*OBJECTIVES.get(task, ["--task", task, *TASKS.get(task, [])]), "--data", self._data[task], *COMMON,
                "--strategy", strategy, "--precision", precision, *(TECHNIQUES[task] if techniques else [])]

    def on_cpu(self, processes: int, *key: str) -> Path:
        """The undisturbed run of words(*key) on the CPU."""
        run = self.folder / "-".join(("cpu", str(processes), *key))
        if not run.exists():
            number = [processes] if processes > 1 else []
            result = self._on_cpu[processes > 1](*number, *self.words(*key), "--run-dir", run, "--device", "cpu")
            assert result.returncode == 0, result.text
        return run

    def on_device(self, processes: int, *key: str) -> Path:
        """The same on the device. The simulated one leaves a report beside it."""
        run = self.folder / "-".join(("device", str(processes), *key))
        if not run.exists():
            device = self.accelerator.simulating(report=self.report_folder(run))
            result = device.run(processes if processes > 1 else None, *self.words(*key), "--run-dir", run)
            assert result.returncode == 0, result.text
            assert f" on {processes} x {self.accelerator.name};" in result.out, result.text
        return run

    def report(self, run: Path, rank: int) -> dict[str, Any]:
        """What a rank of on_device did to its simulated device."""
        return json.loads((self.report_folder(run) / f"rank-{rank}.json").read_text())

    @staticmethod
    def report_folder(run: Path) -> Path:
        """Where."""
        return run.with_name(f"{run.name}-report")
