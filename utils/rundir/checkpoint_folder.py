"""The files of a run's checkpoints: a kill at any moment leaves them valid, and every byte is checked when read.

    RUN/checkpoints/step-0000000120-g1/  model.safetensors  state.pt  samples.safetensors  trainer.json  MANIFEST.json

MANIFEST.json is written last and holds a sha256 of every chunk of every file: torch.load and safetensors accept flipped
bits silently. Then the folder is renamed into place, so nothing unfinished is named step-*. g counts the starts of the
run. A save before an evaluation is named ...-unevaluated: it stays until there are two other checkpoints.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from utils.errors import Exit, UserError, counted
from utils.files import sync
from utils.rundir.chain import digest_of

FORMAT = 1
CHUNK = 16 * 2**20  # bytes hashed at once; sha256 does 1.3 GB/s per core, and chunks run in parallel
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)  # errors of reading an incomplete checkpoint
_UNEVALUATED = "-unevaluated"
_NAME = re.compile(rf"step-\d+-g\d+({_UNEVALUATED})?")
LEAST_KEPT = 2  # valid ones, whatever --keep says: one may become damaged


class CheckpointFolder:
    """RUN/checkpoints. One process at a time writes."""

    def __init__(self, path: Path, keep: int, note: Callable[[str], None]):
        self.path, self._keep, self._note = path, keep, note
        self.is_landmark: Callable[[int], bool] = lambda step: False  # whether its checkpoint stays
        self._damage = cache(lambda name: find_damage(path / name))  # each checkpoint is read back once

    def names(self) -> list[str]:
        """Names of finished checkpoints, the newest (step, then start, then the evaluated one) first."""

        def age(name: str) -> tuple[int, ...]:
            return *map(int, re.findall(r"\d+", name)), not name.endswith(_UNEVALUATED)

        return sorted(filter(_NAME.fullmatch, (path.name for path in self.path.glob("step-*"))), key=age, reverse=True)

    def num_bytes(self) -> int:
        """Size of all checkpoints together."""
        total = 0
        for file in self.path.glob("step-*/*"):
            with suppress(FileNotFoundError):  # a training may remove old ones while --eval-only reads
                total += file.stat().st_size
        return total

    def write(self, name: str, files: Mapping[str, Callable[[Path], Any]], best_step: int | None,
              link: dict[str, Any]) -> None:
        """Write a checkpoint, then remove those that are no longer kept. name: by name_of. files: how each is written.

        link: of the run's chain (utils/rundir/chain.py), for the manifest. Raises UserError (74) if the checkpoint
        cannot be written; the others stay as they are.
        """
        partial = self.path / f".tmp-{name}"
        try:
            # the files, under a temporary name
            shutil.rmtree(partial, ignore_errors=True)
            if not self.path.exists():
                self.path.mkdir(parents=True)
                sync(self.path.parent)
            partial.mkdir()
            for file, write in files.items():
                write(partial / file)
                sync(partial / file)

            # the manifest; then the name
            manifest = {"format": FORMAT, "chunk": CHUNK, "link": link,
                        "files": {file: _digest(partial / file) for file in files}}
            manifest["sha256"] = digest_of(manifest, "sha256")
            (partial / "MANIFEST.json").write_text(json.dumps(manifest, indent=1))
            sync(partial / "MANIFEST.json")
            sync(partial)
            os.rename(partial, self.path / name)
            sync(self.path)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch.save and safetensors wrap a full disk's error
            free = shutil.disk_usage(self.path).free >> 20 if self.path.is_dir() else 0
            shutil.rmtree(partial, ignore_errors=True)
            raise UserError(
                f"cannot save {self.path / name}: {error} ({free} MiB free); earlier checkpoints are unchanged; make"
                " room or repair the disk, and the same command continues the run", Exit.IO) from error

        # remove old ones
        try:
            self._remove_old(best_step)
        except OSError as error:  # the new one is safe
            self._note(f"cannot remove old checkpoints: {error}")

    def links(self) -> list[dict[str, Any]]:
        """The links in the manifests that are not damaged; those of a version before 0.11 hold none."""
        links = []
        for name in self.names():
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                manifest = json.loads((self.path / name / "MANIFEST.json").read_bytes())
                if manifest["sha256"] == digest_of(manifest, "sha256"):
                    links.append(manifest["link"])
        return links

    def newest_valid(self) -> str | None:
        """The checkpoint to continue from; None if there has never been one.

        Removes unfinished ones and renames damaged ones. Raises UserError (82) if there are checkpoints, damaged ones
        included, and none is valid.
        """
        for leftover in self.path.glob(".tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)

        # rename damaged ones until one is valid
        damaged = {}
        for name in self.names():
            problem = self._damage(name)
            if problem is None:
                break
            try:
                os.rename(self.path / name, self.path / f"damaged-{name}")
            except OSError as error:
                raise UserError(f"{self.path / name} is damaged ({problem}) and cannot be renamed: {error}",
                                Exit.IO) from error
            damaged[name] = problem
        else:
            name = None

        # tell what is lost
        for other, problem in damaged.items():
            lost = (f"using {name}, to repeat {counted(step_of(other) - step_of(name), 'step')}" if name
                    else "no older one is valid")
            self._note(f"checkpoint {other} is damaged ({problem}) and was renamed to damaged-{other}; {lost}")
        aside = sorted(path.name for path in self.path.glob("damaged-*"))
        if name is None and aside:
            raise UserError(
                f"{self.path} holds {counted(len(aside), 'checkpoint')} and none is valid ({aside[-1]} is the newest);"
                " start over with --fresh, or restore the folder from a backup", Exit.NO_CHECKPOINT)
        return name

    def best(self) -> str:
        """The valid checkpoint of the best evaluation, the newest if none was evaluated. Changes nothing on disk.

        Raises UserError (66) if there is none.
        """

        def newest_of(names: list[str]) -> str | None:
            return next((name for name in names if find_damage(self.path / name) is None), None)

        names = self.names()
        newest = newest_of(names)
        if newest is None:
            raise UserError(f"{self.path} holds no valid checkpoint: train first", Exit.NO_INPUT)
        best = json.loads((self.path / newest / "trainer.json").read_text())["best"]
        found = newest_of([name for name in names if step_of(name) == best["step"]]) if best else newest
        if found is None:
            self._note(f"the checkpoint of the best evaluation, at step {best['step']}, is damaged or missing; using"
                       f" {newest}")
        return found or newest

    def _remove_old(self, best_step: int | None) -> None:
        names = self.names()
        by_step = {step_of(name): name for name in reversed(names)}  # the newest of each step
        newest = sorted(by_step, reverse=True)[:self._keep]
        landmarks = [name for step, name in by_step.items() if self.is_landmark(step)]
        spared = [by_step[step] for step in dict.fromkeys([*newest, best_step]) if step in by_step]
        doomed = [name for name in names if name not in spared and name not in landmarks]
        # A new one is read back before an old one is removed because of it.
        while doomed and [self._damage(name) for name in spared].count(None) < LEAST_KEPT:
            spared.append(doomed.pop(0))
        for name in doomed:
            removed = self.path / f".tmp-removed-{name}"
            os.rename(self.path / name, removed)  # a partly removed one must not look like a checkpoint
            shutil.rmtree(removed)


def find_damage(folder: Path) -> str | None:
    """What is wrong with the checkpoint in `folder`, in words; None if no byte has changed.

    Raises UserError (78) if a newer version of this program wrote it.
    """
    try:
        # the manifest itself
        written = (folder / "MANIFEST.json").read_bytes()
        manifest = json.loads(written)
        if manifest["sha256"] != digest_of(manifest, "sha256"):
            return "MANIFEST.json: checksum differs"
        if manifest["format"] > FORMAT:
            raise UserError(f"{folder} has format {manifest['format']}, and this program reads formats up to {FORMAT}:"
                            " use the newer program that wrote it", Exit.OTHER_RUN)
        if written != json.dumps(manifest, indent=1).encode():
            return "MANIFEST.json: not as it was written"

        # the files that it lists
        for file, expected in manifest["files"].items():
            size = (folder / file).stat().st_size
            if size != expected["bytes"]:
                return f"{file}: {size} of {expected['bytes']} bytes"
            if _digest(folder / file, manifest["chunk"]) != expected:
                return f"{file}: checksum differs"
    except OSError as error:
        if error.errno not in _DAMAGE:  # too many open files, no answer from a file server: it may be valid
            raise UserError(f"cannot read the checkpoint {folder}: {error}", Exit.IO) from error
        return f"{type(error).__name__}: {error}"
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def name_of(step: int, start: int, awaits_evaluation: bool) -> str:
    """The name of the checkpoint after `step`, written by that start of the run."""
    return f"step-{step:010d}-g{start}{_UNEVALUATED if awaits_evaluation else ''}"


def step_of(name: str) -> int:
    """The optimizer step of a checkpoint, by its name."""
    return int(name.split("-")[1])


def _digest(path: Path, chunk: int = CHUNK) -> dict[str, Any]:
    size = path.stat().st_size

    def hashed(start: int) -> str:
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(chunk)).hexdigest()

    with ThreadPoolExecutor() as pool:
        return {"bytes": size, "sha256": list(pool.map(hashed, range(0, size, chunk)))}
