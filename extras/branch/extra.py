"""A branch's first words, and its best model before it, if only the checkpoint of that is left.

Tests: extras/branch/tests/test_launches.py
"""

import torch
from safetensors.torch import load_file

from engine.training import Extra, Training
from utils.errors import UserError, some
from utils.rundir.checkpoint_folder import CheckpointFolder, step_of
from utils.rundir.resolved import UNSET


class EXTRA(Extra):
    """Looks at the first start of a branch."""

    def opened(self, t: Training) -> None:
        """Raise UserError (64) if a sample that the branch leaves out was used before it. Collective."""
        branch, digests = t.run.resolved.branch, t.state.digests.get("train")
        if branch is UNSET or "without" not in branch["changed"] or t.state.progress.step > branch["step"]:
            return
        is_noted, left_out = digests is not None and t.state.noted_since == 0, t.task.named[0].left_out
        if used := digests.used(left_out) if is_noted else ["which samples were used is not noted"]:
            raise UserError(f"--without: its samples were used before step {branch['step']}, where this branch begins:"
                            f" {some(used)}; ask.replay RUN --first-use FILE says when; begin before that, or anew")

    def began(self, t: Training) -> None:
        """What the learning rate does, and RUN/model, at the step with which a branch begins. Rank 0."""
        branch, step = t.run.resolved.branch, t.state.progress.step
        if branch is UNSET or step != branch["step"]:
            return
        if step < t.total_steps:
            t.log.note(f"the learning rate goes on with {t.schedule(step):.3g}: that of step {step + 1} of"
                       f" {t.total_steps} by --schedule {t.config.optim.schedule}; --lr gives another")
        if not t.state.best:
            t.log.note(f"the best model up to step {step} is gone; the best one is looked for from this step on")
        elif not (t.run.path / "model").exists():
            export_best(t)


def export_best(t: Training) -> None:
    """Write RUN/model from the checkpoint of the best evaluation. Rank 0."""
    folder, best = CheckpointFolder(t.run.path / "checkpoints", 1, t.log.note), t.state.best
    name = next(name for name in folder.names() if step_of(name) == best["step"])
    weights = load_file(folder.path / name / "model.safetensors")
    if best.get("weights") == "ema":
        state = torch.load(folder.path / name / "state.pt", map_location="cpu", weights_only=True)
        weights |= state["ema"]
    t.run.replace_folder("model", lambda place: t.task.save_model(weights, place))
