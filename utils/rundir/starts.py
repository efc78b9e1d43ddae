"""RUN/starts.jsonl: what each start of a run computes with. Whoever computes a step again takes it from here.

config.yaml and auto.json hold the first start alone; tolerated settings, processes and hardware may change later.
"""

import json
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import utils
from utils.distributed.world import World
from utils.files import lines_of, write_atomically
from utils.hardware.devices import hardware_of
from utils.rundir.identity import code_digest, kept_settings
from utils.rundir.run import Run
from utils.settings.config import Config

FILE = "starts.jsonl"
PACKAGES = ("torch", "torchvision", "transformers", "numpy", "pillow", "simplejpeg", "timm")  # what bits may depend on


def note_start(config: Config, run: Run, world: World, step: int) -> None:
    """Write down this start, whose first step comes after `step` others. Collective."""
    line = describe(world) | {"start": run.start, "step": step, "settings": kept_settings(config),
                              "resolved": run.resolved.as_dict(),
                              "time": datetime.now(UTC).isoformat(timespec="seconds")}

    def append() -> None:
        before = lines_of(run.path / FILE) if (run.path / "auto.json").exists() else []  # else no start has begun
        write_atomically(run.path / FILE, b"\n".join([*before, json.dumps(line).encode(), b""]))

    world.on_rank_zero(lambda: run.writes and append())  # Collective.


def describe(world: World) -> dict[str, Any]:
    """What bits depend on besides settings and data: the processes, the program, versions, hardware. Collective."""
    hardware = world.gather(hardware_of(world.device))  # Collective.
    return {"processes": world.world_size, "devices_per_process": len(world.devices),
            "threads": torch.get_num_threads(),
            "program": code_digest(), "version": utils.__version__, **versions(),
            "hardware": [each for index, each in enumerate(hardware) if each not in hardware[:index]]}


def versions() -> dict[str, Any]:
    """Of Python and of the packages that bits may depend on."""
    return {"python": platform.python_version(),
            "packages": {name: found.version for name in PACKAGES
                         for found in [*metadata.distributions(name=name)][:1]}}


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """The starts of a run, the first one first; none if a version before 0.11 began and ended it."""
    return [json.loads(line) for line in lines_of(run_dir / FILE)]
