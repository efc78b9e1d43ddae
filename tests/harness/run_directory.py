"""What tests read from a run directory."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import yaml

from engine.records.log import TIMING
from utils.rundir.chain import hashed, read_lines, valid_links
from utils.rundir.checkpoint_folder import CheckpointFolder


def newest_checkpoint(run: Path) -> Path:
    """The newest finished checkpoint."""
    folder = run / "checkpoints"
    return folder / CheckpointFolder(folder, 1, print).names()[0]


def weights_sha256(run: Path) -> str:
    """sha256 of the newest checkpoint's model.safetensors."""
    return hashlib.sha256((newest_checkpoint(run) / "model.safetensors").read_bytes()).hexdigest()


def records(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the fields that hold times."""
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return [{name: value for name, value in json.loads(line).items() if name not in TIMING} for line in lines]


def trained_steps(run: Path) -> int:
    """Optimizer steps on record; lines that are being written do not count."""
    text = (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""
    return max((json.loads(line)["step"] for line in text.splitlines(keepends=True) if line.endswith("\n")), default=0)


def curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    """The points that TensorBoard shows, but for those of times."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tb"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
            if tag.startswith(("train/", "val/")) or tag in ("wall/epoch", "wall/samples", "wall/trained")}


def status(run: Path) -> dict[str, Any]:
    """status.json."""
    return json.loads((run / "status.json").read_text())


def outcome(run: Path) -> dict[str, Any]:
    """All that must be equal where two runs computed the same: weights, records, evaluation, state.pt by tensor; and
    the content hashes of the beginning and of each evaluated step, where every run has a link.
    """
    state = torch.load(newest_checkpoint(run) / "state.pt", weights_only=True)
    steps = {0, *(record["step"] for record in records(run) if record["split"] == "val")}
    return {"weights": weights_sha256(run), "records": records(run), "state": _described(state),
            "evaluation": _evaluation_sha256(run),
            "contents": {step: content for step, content in contents(run).items() if step in steps}}


def written(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """{file: its content and time}: of all files below."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*")) if path.is_file()}


def rows_of(folder: Path, name: str = "samples") -> list[dict[str, Any]]:
    """The rows of a table that ask.replay wrote."""
    return json.loads((folder / f"{name}.json").read_text())


def contents(run: Path) -> dict[int, str]:
    """The content hash of each step that has a link which counts."""
    return {link["step"]: link["content"] for link in valid_links(read_lines(run))}


def _evaluation_sha256(run: Path) -> dict[str, str]:
    """sha256 of each file of RUN/eval, but for the place of the data and a HeldImage's name: some tests copy them."""
    data = str(yaml.safe_load((run / "config.yaml").read_text())["data"]).encode()
    return {file.name: hashlib.sha256(file.read_bytes().replace(data, b"DATA").replace(b".jpg,", b".png,")).hexdigest()
            for file in sorted(run.glob("eval/*"))}


def _described(value: Any) -> Any:
    """The same nest with every tensor as its type, shape and the sha256 of its bytes, so that == compares bits."""
    if isinstance(value, torch.Tensor):
        data = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return [str(value.dtype), list(value.shape), hashlib.sha256(data).hexdigest()]
    if isinstance(value, dict):
        return {name: _described(part) for name, part in value.items()}
    return [_described(part) for part in value] if isinstance(value, list | tuple) else value


def begins_with(path: Path, size: int) -> dict[str, Any]:
    """The first `size` bytes of a file, as a link has them."""
    digest, done = hashed(path, size)
    return {"bytes": done, "sha256": digest.hexdigest()}
