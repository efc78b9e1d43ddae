"""Computes two runs again, side by side, to the first thing that differs between them.

Each must repeat its own records here. Their states are compared after each step, from the newest checkpoints of a step
at which they agreed; then the first step that differs is computed once more in both, and what it computes is compared.

Tests: tests/end_to_end/test_compare.py
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from ask.record import Part, Record, checkpoint_before, parts_of, read_trained
from ask.repeat import Place, differences, figures_of
from ask.rounding import not_as_recorded
from ask.trace import Found, Key, Trace, far_apart, first_difference, sentence, trace_step
from data.batch import GlobalBatch
from engine.training import Training
from train import train_step
from utils.distributed.world import World
from utils.errors import Exit, RankError, UserError
from utils.rundir.chain import content_hash
from utils.rundir.checkpoint_folder import step_of

NAMES = ("RUN1", "RUN2")
UNREPEATABLE = (Exit.USAGE, Exit.BAD_DATA, Exit.NO_INPUT, Exit.OTHER_RUN, Exit.DIFFERS)  # the same on all ranks


def locate(place: Place, runs: Sequence[Record], agreed: int, differs: int) -> Iterator[str]:
    """Compute both from step `agreed`, or an earlier checkpoint, to `differs`; say what differs first. Collective."""
    # both, each beside its own records
    world, begin, found = place.world, common_step(runs, agreed, place.world), []  # Collective.
    yield f"computing steps {begin + 1} to {differs} of both again"
    for name, run in zip(NAMES, runs, strict=True):
        parts: list[Part] = []
        try:
            parts = parts_of(run, begin, differs, world)  # Collective.
            found.append(states(place, name, run, parts))  # Collective.
        except UserError as error:
            if not is_an_answer(error):
                raise
            yield f"{name} cannot be repeated here: {error}"
            for part in parts:
                yield from (f"  {text}" for text in differences(part.line, world).values())  # Collective.
            return

    # the first step that differs, once more
    one, two = found
    step = next((step for step in one if one[step] != two[step]), None)
    if step is None:
        yield ("both repeat their records, and their weights are the same after each of these steps: what differs is an"
               " evaluation, or what the chain keeps beside the weights")
        return
    yield f"both repeat their records; the first step that differs is step {step}"
    yield first_thing(place, runs, [parts_of(run, begin, step, world) for run in runs])  # Collective.


def is_an_answer(error: UserError) -> bool:
    """Whether an error says that a run cannot be repeated here, on all ranks alike; else it ends the command."""
    return error.code in UNREPEATABLE and not isinstance(error, RankError)


def common_step(runs: Sequence[Record], step: int, world: World) -> int:
    """The last step up to `step` of which both have a checkpoint to begin from; 0: the beginning. Collective."""
    while True:
        paths = [checkpoint_before(run, step, world) for run in runs]  # Collective.
        steps = {step_of(path.name) if path else 0 for path in paths}
        if len(steps) == 1:
            return steps.pop()
        step = min(steps)


def states(place: Place, name: str, run: Record, parts: Sequence[Part]) -> dict[int, tuple[str, str]]:
    """By step: loss, norm of the gradient and learning rate, in words, and the hash of what it left. Collective.

    Raises UserError (83) for a figure that is not the record's.
    """
    found: dict[int, tuple[str, str]] = {}
    trained = read_trained(run, place.world, parts)  # Collective.

    def visit(t: Training, batch: GlobalBatch) -> None:
        """Collective."""
        figures, step = figures_of(t, *train_step(t, batch)), t.state.progress.step  # Collective.
        if step in trained and (words := not_as_recorded(trained[step], figures, t.precision.name)):
            raise UserError(words[0], Exit.DIFFERS)
        weights, state = t.state.weights(), {**t.state.state_dict(), "coverage": {}}  # Collective.
        left = t.world.on_rank_zero(lambda: content_hash(weights, state, {"progress": {}, "best": {}}))  # Collective.
        found[step] = str(figures), left

    place.walk(run, parts, visit, name)  # Collective.
    return found


def trace(place: Place, name: str, run: Record, parts: Sequence[Part]) -> tuple[Found, dict[Key, Tensor]]:
    """What the last step of the parts computes on all ranks; the tensors that this rank keeps of it. Collective."""
    seen = Trace()

    def visit(t: Training, batch: GlobalBatch) -> None:
        if t.state.progress.step + 1 < parts[-1].last:
            train_step(t, batch)  # Collective.
        else:
            trace_step(t, batch, seen)  # Collective.

    place.walk(run, parts, visit, f"{name}-traced")  # Collective.
    by_rank = place.world.gather([*seen.found.items()])  # Collective.
    return {tuple(key): tuple(value) for found in reversed(by_rank) for key, value in found}, seen.kept


def first_thing(place: Place, runs: Sequence[Record], parts: Sequence[list[Part]]) -> str:
    """The first thing that differs in the last step of the parts, in words. parts: of each run. Collective."""
    (one, kept), (two, others) = (trace(place, *each) for each in zip(NAMES, runs, parts, strict=True))  # Collective.
    key, step, line = first_difference(one, two), parts[0][-1].last, parts[0][-1].line
    if key is None:
        return "computed again with hooks, the step is the same in both: the difference could not be reproduced"
    far = far_apart(key, one, (kept, others), line["resolved"]["precision"])
    far = next(filter(None, place.world.gather(far)), "")  # Collective: one rank keeps both tensors.
    return f"the first thing that differs is {sentence(key, step, one, two)}{far}"
