"""The checkpoints of steps that are computed again: instead of being written, each is compared with the run's link.

    kind = partial(ComparedCheckpoints, folder=ComparedFolder(path, links, end, seen, note))
    with place.opened(part, run, kind) as t: train(t)

A difference ends the training as a disk that cannot be written would, with another code.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from ask.integrity import Link
from utils.distributed.world import World
from utils.errors import Exit, UserError
from utils.rundir.checkpoint import Checkpoints
from utils.rundir.checkpoint_folder import CheckpointFolder
from utils.rundir.run import Run
from utils.rundir.state import TrainState
from utils.settings.run_options import RecordOptions


class ComparedFolder(CheckpointFolder):
    """Compares what it is given with what the run saved. It writes only the checkpoint that the next part begins with.

    links: of the run, by step. end: the step of that checkpoint; None: there is no next part. seen: gets what was
    computed here of each step that was compared.
    """

    def __init__(self, path: Path, links: Mapping[int, Link], end: int | None, seen: dict[int, Link],
                 note: Callable[[str], None]):
        super().__init__(path, 1, note)
        self.of_run, self.end, self.seen = links, end, seen

    def write(self, name: str, files: Mapping[str, Callable], best_step: int | None, link: Link) -> None:
        """Raises UserError (83) at a difference."""
        self.compare(link)
        if link["step"] == self.end:
            super().write(name, files, best_step, link)

    def compare(self, link: Link) -> None:
        """Raise UserError (83) if a link that was computed here means something else than the run's."""
        step = link["step"]
        if step not in self.of_run:
            return
        self.seen[step] = link
        then, here = ({f"RUN/model/{file}": digest for file, digest in each.get("model", {}).items()}
                      | {"the content": each["content"]} for each in (self.of_run[step], link))
        if differ := [name for name in {**then, **here} if then.get(name) != here.get(name)]:
            raise UserError(f"step {step} differs: {', '.join(differ)}", Exit.DIFFERS)
        self._note(f"step {step}: the same, {link['content'][:16]}")


class ComparedCheckpoints(Checkpoints):
    """Saves where the run did, into a ComparedFolder."""

    def __init__(self, run: Run, world: World, config: RecordOptions, folder: ComparedFolder):
        super().__init__(run, world, config)
        self._folder = folder

    def is_due(self, step: int) -> bool:
        """Whether the run has a link of this step."""
        return step in self._folder.of_run

    def is_due_by_clock(self) -> bool:
        """The links alone say when."""
        return False

    def save(self, state: TrainState, beside: Callable, awaits_evaluation: bool = False) -> None:
        """Where a step is saved before and after its evaluation: the one that the run's link is of. Collective."""
        progress, link = state.progress, self._folder.of_run.get(state.progress.step)
        is_end = progress.step == self._folder.end and progress.evaluated_step < progress.step
        if link["awaits_evaluation"] == awaits_evaluation if link else is_end:
            super().save(state, beside, awaits_evaluation)  # Collective.
