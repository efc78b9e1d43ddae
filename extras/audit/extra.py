"""Audits: a device that computes wrongly, without an error, is found and named (--audit-every).

A micro-batch does not know its rank. So in every Nth step each rank computes the first micro-batch of another rank
again, and compares checksums with what that rank put into the sums. If they differ, a third rank decides; of two ranks
the one that contradicts itself is named. The optimizer has changed nothing by then. In an audit the host waits.
"""

import socket
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from data.batch import Batch, GlobalBatch
from engine.start import Start
from engine.step import forward
from engine.training import Extra, Training
from engine.wrong import odd_ones
from extras.audit import OPTIONS
from utils.errors import Exit, UserError
from utils.hardware.devices import Arriving, hardware_of
from utils.rundir.starts import versions
from utils.strategies import STRATEGIES, load_strategy
from utils.strategies.checksum import checksum

WAY_OUT = ("; this step has changed nothing, and nothing was saved: the same command continues from the newest"
           " checkpoint; leave such a host out (extras/audit/README.md)")


class Account(NamedTuple):
    """What a rank tells the others in an audit. Figures of a micro-batch: checksums of its loss and its gradient."""

    place: str  # the rank, its host and its device
    weights: int  # the checksum of what all ranks have alike
    own: str  # figures of its first micro-batch, as they went into the sums; "" = none to compare
    audited: str  # figures of another rank's first micro-batch; "" = none to compare


class EXTRA(Extra):
    """See above."""

    def asked(self, start: Start) -> None:
        """Collective. Raises UserError (64) on every rank where two ranks need not compute the same bits."""
        require_comparable(start)  # Collective.

    def opened(self, t: Training) -> None:
        """Audit once without a comparison, and say whether the first step is audited."""
        if t.config.extra(OPTIONS).audit_every:  # once now: if memory ends, it ends before the first step
            t.strategy.module.train()
            example = t.task.example(t.feed.plan.sizes[1]).to(t.world.device)
            t.strategy.again(forward(t, t.strategy.module, example, step=0), t.precision.scale)
        t.strategy.is_audited = is_audited(t)

    def summed(self, t: Training, batch: GlobalBatch, losses: Tensor) -> None:
        """Collective in an audited step. Raises UserError (71) on every rank."""
        if is_audited(t):
            end_if_audit_differs(t, batch, losses)  # Collective.

    def stepped(self, t: Training) -> None:
        """The next step may be audited."""
        t.strategy.is_audited = is_audited(t)


def is_audited(t: Training) -> bool:
    """Whether ranks compute micro-batches of one another again in the next optimizer step."""
    every = t.config.extra(OPTIONS).audit_every
    return every > 0 and (t.state.progress.step + 1) % every == 0


def audited_by(t: Training, rank: int) -> int | None:
    """Of an audited step: the first micro-batch of which rank `rank` computes again: both have the same number.

    None if that rank has no work. From audit to audit a rank goes through all others in turn.
    """
    turn = (t.state.progress.step + 1) // t.config.extra(OPTIONS).audit_every % (t.world.world_size - 1)
    owner = (rank + 1 + turn) % t.world.world_size
    return owner if owner < t.feed.plan.num_micro_batches else None


def require_comparable(start: Start) -> None:
    """Raise UserError (64) where --audit-every is given and two ranks need not compute the same bits. Collective."""
    config, world, every = start.config.device, start.world, start.config.extra(OPTIONS).audit_every
    if not every:
        return
    flag = f"--audit-every {every}"
    if not load_strategy(config.strategy).can_audit:
        able = " or ".join(name for name in STRATEGIES if load_strategy(name).can_audit)
        raise UserError(f"{flag}: with --strategy {config.strategy} no process can compute alone what another one"
                        f" computes; use --strategy {able}, or leave it out")
    if world.world_size == 1:
        raise UserError(f"{flag}: processes check one another, and there is one; start two or more, or leave it out")
    if config.compile:
        raise UserError(f"{flag}: with --compile the bits depend on the shapes that a process has met before; leave one"
                        " of the two out")
    if world.device.type != "cpu" and not config.deterministic:
        raise UserError(f"{flag} compares bits, and {world.device.type} repeats them with --deterministic alone; give"
                        " that, too, or leave both out")
    here = hardware_of(world.device) | {"threads": torch.get_num_threads()} | versions()
    (first, expected), *others = world.gather([socket.gethostname(), here])  # Collective.
    for host, found in others:
        for name in expected:
            if found[name] != expected[name]:
                raise UserError(f"{flag} compares bits, and those of {first} and {host} may differ: {name}"
                                f" {expected[name]} and {found[name]}; use hosts that are alike, or leave it out")


def end_if_audit_differs(t: Training, batch: GlobalBatch, losses: Tensor) -> None:
    """In an audited step, compare what ranks computed; the gradients are summed, and the optimizer has not used them.

    losses: [micro-batches of all ranks] float64, this rank's filled in. A micro-batch with samples that cannot be read
    is not compared. Raises UserError (71) on every rank if something differs. Collective in an audited step.
    """
    # compute
    t.watchdog.enter("auditing", t.config.faults.section_timeout, t.feed.samples.reading)
    rank, step, own, audited = t.world.rank, t.state.progress.step, "", ""
    if len(batch) and not batch.bad:
        own = _figures(losses[rank], t.strategy.entered)
    if (index := audited_by(t, rank)) is not None:
        audited = _compute(t, index, batch.normalizer)
    [weights] = Arriving(t.strategy.weights_checksum()).wait()
    place = f"rank {rank} on {socket.gethostname()} ({t.world.device})"
    accounts = [Account(*each) for each in t.world.gather([place, int(weights), own, audited])]  # Collective.

    # compare
    if suspects := odd_ones({rank: account.weights for rank, account in enumerate(accounts)}):
        raise UserError(f"before optimizer step {step + 1} {_places(accounts, suspects)} has other weights than the"
                        f" other ranks{WAY_OUT}", Exit.HARDWARE)
    disputed = {index: auditor for auditor, account in enumerate(accounts)
                if (index := audited_by(t, auditor)) is not None
                and account.audited and accounts[index].own and account.audited != accounts[index].own}
    if disputed:
        _end(t, batch, accounts, disputed)  # Collective.


def _end(t: Training, batch: GlobalBatch, accounts: list[Account], disputed: dict[int, int]) -> NoReturn:
    """Compute micro-batches once more, and raise UserError (71). disputed: {index: its auditor}. Collective."""
    progress, ranks, again = t.state.progress, range(len(accounts)), {}
    judges = {index: [rank for rank in ranks if rank not in (index, auditor)][:1] or ranks
              for index, auditor in disputed.items()}
    for index in disputed:
        if t.world.rank in judges[index]:
            again[index] = _compute(t, index, batch.normalizer)
    t.watchdog.enter("auditing", t.config.faults.section_timeout)
    found = t.world.gather([again.get(index, "") for index in disputed])  # Collective.

    words = []
    for number, (index, auditor) in enumerate(disputed.items()):
        before = {index: accounts[index].own, auditor: accounts[auditor].audited}
        later = {rank: found[rank][number] for rank in judges[index]}
        if len(ranks) == 2:
            changed = [rank for rank in ranks if before[rank] != later[rank]]
            suspects, why = changed if len(changed) == 1 else [*ranks], "its bits were others when it repeated it"
        else:
            suspects, why = odd_ones(before | later), "two other ranks agree on other bits"
        why = why if len(suspects) == 1 else "their bits differ"
        words.append(f"{_places(accounts, suspects)} computed micro-batch {index} of optimizer step"
                     f" {progress.step + 1} wrongly: {why}")
    raise UserError("; ".join(words) + WAY_OUT, Exit.HARDWARE)


def _places(accounts: list[Account], ranks: list[int]) -> str:
    return " or ".join(accounts[rank].place for rank in ranks)


def _compute(t: Training, index: int, normalizer: float) -> str:
    """The figures of a micro-batch of this step, as the rank computes them that has it; the step stays as it is."""
    at = t.state.progress
    micro_batch: Batch = t.feed.samples[t.feed.sampler.micro_batch(at.epoch, at.sample_offset, index)]
    if micro_batch.bad:
        return ""
    loss = forward(t, t.strategy.module, micro_batch.to(t.world.device), t.state.progress.step)
    entered = t.strategy.again(loss / normalizer, t.precision.scale)
    return _figures(loss.detach().double() / normalizer, entered)


def _figures(loss: Tensor, entered: Tensor) -> str:
    return " ".join(str(int(value)) for value in Arriving(checksum([(0, loss)]), entered).wait())
