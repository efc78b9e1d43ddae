"""A branch's first words, and its best model before it, if only the checkpoint of that is left.

Tests: extras/branch/tests/test_launches.py
"""

import torch
from safetensors.torch import load_file

from data.images.index import ImageIndex, without_left_out
from data.left_out import named
from engine.training import Extra, Training
from models.vision.preprocessing import size_for, white_for
from utils.errors import UserError, some
from utils.rundir.checkpoint_folder import CheckpointFolder, step_of
from utils.rundir.resolved import UNSET


class EXTRA(Extra):
    """Looks at the first start of a branch."""

    def opened(self, t: Training) -> None:
        """Raise UserError (64) if RUN has used, or measured, a sample that the branch leaves out. Collective."""
        branch, index, digests = t.run.resolved.branch, named(t.task.train_set), t.state.digests.get("train")
        if branch is UNSET or "without" not in branch["changed"] or t.state.progress.step > branch["step"]:
            return
        problem = ""
        if digests is None or t.state.noted_since:
            problem = "it is not noted which samples RUN has used"
        elif used := digests.used(index.left_out):
            problem = (f"RUN has used {some(used)} up to step {branch['step']}; ask.replay RUN --first-use FILE says in"
                       " which step")
        elif isinstance(index, ImageIndex) and t.world.on_rank_zero(lambda: _is_measured(t, index)):  # Collective.
            problem = "the image size, or what is white in its files, comes from them"
        if index.left_out and problem:
            raise UserError(f"--without: this branch cannot leave these samples out, because {problem}; begin at an"
                            " earlier step, or start a new run")

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


def _is_measured(t: Training, index: ImageIndex) -> bool:
    """Whether the run's sizes are those of its files, and would be others without the samples that are left out."""
    resolved = t.run.resolved
    return any(kept == find(index) != find(without_left_out(index))
               for kept, find in ((resolved.image_size, size_for), (resolved.white_value, white_for)))


def export_best(t: Training) -> None:
    """Write RUN/model from the checkpoint of the best evaluation. Rank 0."""
    folder, best = CheckpointFolder(t.run.path / "checkpoints", 1, t.log.note), t.state.best
    name = next(name for name in folder.names() if step_of(name) == best["step"])
    weights = load_file(folder.path / name / "model.safetensors")
    if best.get("weights") == "ema":
        state = torch.load(folder.path / name / "state.pt", map_location="cpu", weights_only=True)
        weights |= state["ema"]
    t.run.replace_folder("model", lambda place: t.task.save_model(weights, place))
