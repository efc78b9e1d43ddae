"""What can be wrong with a step, and is known late: all ranks judge it together, and none acts on what it alone knows.

A rank that sees something raises a flag (Agreement). Once that is up all ranks gather what they saw, and decide alike:
71 where a sum changed on its way or ranks disagree, 65 for an unreadable sample, 80 for a gradient that is not finite.
A step whose gradient is not finite changed nothing: Precision.step applied no update. One that ends with 71 may have,
and is never saved. This module owns --max-nonfinite, too.
"""

import shlex
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import replace

from engine.saving import save, wait_for_save
from engine.step import Facts
from engine.training import Training
from utils.errors import Exit, UserError, some
from utils.rundir.run import command
from utils.rundir.state import Progress

WAY_OUT = ("; a link, a device or memory has changed it; nothing of this step was saved, and the same command continues"
           " the run; if it happens again, leave out these hosts one by one")


def end_if_wrong(t: Training, waits: bool = False) -> None:
    """Exchange flags, and end the run on all ranks if a step before was not as it should be. Collective.

    waits: judge the last step, too, as before a save, an evaluation or a record; else nobody waits, and a step is
    judged two steps later, before that update. Raises UserError: 71, 65, 80.
    """
    t.flags.exchange()  # Collective.
    if waits:
        t.flags.wait()  # Collective.
    for at, facts in void_steps(t):  # Collective.
        if not (t.flags.bad_sample and at == t.outcome.position):  # that one is why
            _end_or_go_on(t, at, facts)
    if t.flags.bad_sample:  # in the last step: saved as it was before that
        t.state.go_back(replace(t.outcome.position, skipped=t.state.progress.skipped))
        t.precision.undo()
        save(t)  # Collective.
        wait_for_save(t)  # Collective.
        t.bad_samples.stop(t.world)  # Collective.


def void_steps(t: Training) -> list[tuple[Progress, list[Facts]]]:
    """The positions of steps that all ranks found not finite, and what each rank saw. Collective if a flag is up.

    Each is returned once. Raises UserError (71) if a sum changed on its way, or the ranks disagree.
    """
    if not (t.flags.wrong or t.flags.bad_sample):
        return []
    seen, t.outcome.seen, found = t.outcome.seen, [], []
    by_rank = t.world.gather([facts for _, facts in seen])  # Collective.
    for (at, _), *others in zip(seen, *by_rank, strict=True):
        facts = [Facts(*each) for each in others]
        if corrupted := [each.place for each in facts if each.is_corrupted]:
            raise UserError(f"the sum of the gradients of optimizer step {at.step + 1} is not the sum of what the ranks"
                            f" sent: its checksum is wrong on {some(corrupted)}{WAY_OUT}", Exit.HARDWARE)
        if odd := odd_ones({rank: (each.is_finite, each.loss_scale) for rank, each in enumerate(facts)}):
            places = " or ".join(facts[rank].place for rank in odd)
            raise UserError(f"the ranks disagree about optimizer step {at.step + 1}: whether its gradient is finite, or"
                            f" what the loss scale is; {places} is wrong{WAY_OUT}", Exit.HARDWARE)
        if not facts[0].is_usual:  # nor are the others
            found.append((at, facts))
    return found


def _end_or_go_on(t: Training, at: Progress, facts: list[Facts]) -> None:
    """End the run (80) where a gradient was not finite, or go over the step: --max-nonfinite. The same on all ranks."""
    suspects = [each.place for each in facts if not each.is_own_finite]
    what = (f"the gradient of optimizer step {at.step + 1} {t.strategy.not_finite}"
            f"{f'; it comes from {some(suspects)}' if suspects else '; the losses are finite'}")
    samples = (f"its samples, the highest loss first: {command('python')} -m ask.replay {shlex.quote(str(t.run.path))}"
               f" --step {at.step + 1}; --grad-norms adds the norm of each one's gradient")
    t.state.progress = progress = replace(t.state.progress, skipped=t.state.progress.skipped + 1)
    most = t.config.faults.max_nonfinite
    if progress.skipped > most:
        raise UserError(f"{what}; the training diverged; this step changed neither weights nor checkpoints; use a"
                        " smaller --lr, --max-grad-norm 1 or --precision fp32, or skip a few such steps with"
                        f" --max-nonfinite; {samples}", Exit.DIVERGED)
    t.log.note(f"{what}; the step changed nothing (--max-nonfinite: {progress.skipped} of {most}); {samples}")


def odd_ones(found: Mapping[int, Hashable]) -> list[int]:
    """The ranks whose value is not the one that most have; all of them where no value has a majority."""
    [(value, count)] = Counter(found.values()).most_common(1)
    return [rank for rank, each in found.items() if each != value or 2 * count <= len(found)]
