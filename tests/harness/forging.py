"""What somebody does who changes a run directory and computes all hashes anew."""

import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from utils.rundir.chain import FILE, content_hash, digest_of, files_in, read_lines, starts_hash
from utils.rundir.checkpoint_folder import CheckpointFolder


def rehash(run: Path) -> None:
    """All hashes anew, in every manifest and link, of the files as they are."""
    manifests = {json.loads(path.read_text())["link"]["link"]: path
                 for path in (run / "checkpoints").glob("step-*/MANIFEST.json")}
    lines, previous = read_lines(run), {}
    copies = [json.loads(path.read_text())["link"] for path in manifests.values()]
    copies = [link for link in copies if link["awaits_evaluation"] and link not in lines]
    for link in sorted([*lines, *copies], key=lambda link: (link["step"], not link["awaits_evaluation"])):
        path = manifests.get(link["link"])
        link["metrics"] = records_up_to(run, link["step"], with_evaluation=not link["awaits_evaluation"])
        link["starts"] = starts_hash(run, link["start"])
        if path:
            link["content"] = content_of(path.parent)
        before = [each for step, each in previous.items() if step < link["step"]]
        link["previous"] = before[-1] if before else ""
        link["link"] = digest_of(link)
        if link in lines:
            previous[link["step"]] = link["link"]
        if path:
            seal(path.parent, link)
    (run / FILE).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def records_up_to(run: Path, step: int, with_evaluation: bool = True) -> dict:
    """The bytes of metrics.jsonl that a link of this step is of."""
    kept = b""
    for line in (run / "metrics.jsonl").read_bytes().splitlines(keepends=True):
        record = json.loads(line)
        if record["step"] > step or (record["step"] == step and record["split"] == "val" and not with_evaluation):
            break
        kept += line
    return {"bytes": len(kept), "sha256": hashlib.sha256(kept).hexdigest()}


def content_of(checkpoint: Path) -> str:
    """What it means."""
    state = torch.load(checkpoint / "state.pt", weights_only=True)
    trainer = json.loads((checkpoint / "trainer.json").read_text())
    return content_hash(load_file(checkpoint / "model.safetensors"), state, trainer)


def seal(checkpoint: Path, link: dict | None) -> None:
    """The manifest anew, as the program writes it; None: as a version before 0.11 did."""
    names = [path.name for path in checkpoint.iterdir() if path.name != "MANIFEST.json"]
    files = {name: (checkpoint / name).read_bytes() for name in sorted(names)}
    new = CheckpointFolder(checkpoint.parent.parent / "sealed", 9, print)
    new.write(checkpoint.name, {name: lambda path, data=data: path.write_bytes(data) for name, data in files.items()},
              None, link or {})
    manifest = json.loads((new.path / checkpoint.name / "MANIFEST.json").read_text())
    if link is None:
        del manifest["link"], manifest["sha256"]
        manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest, indent=1))
    shutil.rmtree(new.path)


def changed_weights(file: Path, factor: float = 1.001) -> None:
    """The largest tensor, times a factor."""
    weights = load_file(file)
    max(weights.values(), key=torch.Tensor.numel).mul_(factor)
    save_file(weights, file, metadata={"format": "pt"})


def link_of(run: Path, step: int, **values: object) -> None:
    """Change the line of a step in the chain, and in its manifest."""
    lines = read_lines(run)
    old = next(line for line in lines if line.get("step") == step)
    new = old | values
    (run / FILE).write_text("".join(f"{json.dumps(new if line is old else line)}\n" for line in lines))
    for path in (run / "checkpoints").glob("step-*/MANIFEST.json"):
        manifest = json.loads(path.read_text())
        if manifest["link"] == old:
            path.write_text(json.dumps(manifest | {"link": new | {"link": old["link"]}}, indent=1))


def model_anew(run: Path, step: int) -> None:
    """The link of this step is of RUN/model as it is now."""
    link_of(run, step, model=files_in(run / "model"))
