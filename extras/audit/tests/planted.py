"""How many planted errors audits find: a row of the table, from one run that goes on after each that is found.

    PLANTED=unit torchrun --standalone --nproc-per-node=3 extras/audit/tests/planted.py --audit-every 5 \
        --max-steps 500 --lr 0 --max-nonfinite 500 SETTINGS of train.py

One bit is flipped in the output of a layer, or in the gradient that comes back to it; the layer, value and bit are
random. unit: one rank does so in every micro-batch of the steps up to an audit, in the same way. once: in one
micro-batch of each step. audit: in one that is computed again. weights: a bit of one rank's weights, before an audit.
With --lr 0 the weights stay. Each rank prints how many were planted, found, named right, and in what is audited; and
"without effect": its own flips there that changed no bit of the loss or the gradient, as in what a ReLU makes zero.
"""

import json
import os
import sys
from collections import Counter
from functools import partial, partialmethod
from random import Random

import torch

import extras
import train
from data import demo
from extras.audit import OPTIONS
from extras.audit import extra as audit
from utils.distributed.watchdog import Watchdog
from utils.errors import UserError, exit_after
from utils.settings.command_line import parse_command_line

KIND, RANK, WORLD = os.environ["PLANTED"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
counts = Counter({"planted": 0, "audited": 0, "found": 0, "named": 0, "without effect": 0})
computed = set()  # (step, micro-batch) that this rank has computed again


class Flip(torch.autograd.Function):
    """The same values; a bit is flipped in one of them, or in one of their gradient."""

    @staticmethod
    def forward(context, values, place, bit, is_backward):
        context.flip = place, bit, is_backward
        return values.clone() if is_backward else flipped(values, place, bit)

    @staticmethod
    def backward(context, grad):
        place, bit, is_backward = context.flip
        return flipped(grad, place, bit) if is_backward else grad, None, None, None


def flipped(values, place, bit):
    values = values.contiguous().clone()
    integers = values.view(-1).view(torch.int32 if values.itemsize == 4 else torch.int16)
    integers[int(place * len(integers))] ^= 1 << bit % (8 * values.itemsize - 1)
    return values


def plan(t, step):
    """(whose error, in which micro-batch, where, which bit, whether in the gradient); the same on every rank."""
    every = t.config.extra(OPTIONS).audit_every
    drawn = Random(f"{KIND}/{step // every if KIND in ('unit', 'weights') else step}")
    index = drawn.randrange(t.feed.plan.num_micro_batches if KIND == "once" else WORLD)
    return index % WORLD, index, drawn.random(), drawn.randrange(31), drawn.random() < 0.5


def forward(compute, is_audit, t, model, micro_batch, step):
    """The loss; wrong if it is the turn of this rank and micro-batch."""
    victim, index, place, bit, is_backward = plan(t, step)
    again = (step, micro_batch.index) in computed
    if is_audit:
        computed.add((step, micro_batch.index))
    is_first = is_audit and not again and audit.is_audited(t)
    is_struck = victim == RANK and {
        "unit": True, "once": not is_audit and micro_batch.index == index, "audit": is_first}.get(KIND, False)
    if not is_struck:
        return compute(t, model, micro_batch, step)
    expected = loss_and_grads(compute, t, micro_batch, step)
    layers = [each for each in t.strategy.module.modules() if not list(each.children())]
    hook = layers[int(place * len(layers))].register_forward_hook(
        lambda layer, args, output: Flip.apply(output, place, bit, is_backward))
    if is_first or (audit.is_audited(t) and micro_batch.index == index < WORLD):
        wrong = loss_and_grads(compute, t, micro_batch, step)
        counts["without effect"] += all(map(torch.equal, wrong, expected))
    try:
        return compute(t, model, micro_batch, step)
    finally:
        hook.remove()


def loss_and_grads(compute, t, micro_batch, step):
    """What an audit compares; buffers stay as they are."""
    module = t.strategy.module
    buffers = [buffer.clone() for buffer in module.buffers()]
    loss = compute(t, module, micro_batch, step)
    grads = torch.autograd.grad(loss, [param for param in module.parameters() if param.requires_grad])
    for buffer, value in zip(module.buffers(), buffers, strict=True):
        buffer.data.copy_(value)
    return [loss.detach(), *grads]


def summed(compare, self, t, batch, losses):
    """The audit; what it finds is counted, and the run goes on."""
    step = t.state.progress.step
    victim, index, place, bit, _ = plan(t, step)
    is_audited = audit.is_audited(t)
    counts["planted"] += KIND == "once" or is_audited
    counts["audited"] += is_audited and (KIND != "once" or index < WORLD)
    changed = None
    if KIND == "weights" and victim == RANK and is_audited:
        params = list(t.strategy.module.parameters())
        param = params[int(place * len(params))]
        changed = param, param.data.clone()
        param.data.copy_(flipped(param.data, place, bit).view_as(param))
    try:
        compare(self, t, batch, losses)
    except UserError as error:
        counts["found"] += 1
        named = [rank for rank in range(WORLD) if f"rank {rank} on" in str(error)]
        counts["named"] += named == [victim]
    finally:
        if changed:
            changed[0].data.copy_(changed[1])


def main(config, watchdog):
    code = train.main(config, watchdog)
    print(json.dumps({"kind": KIND, "processes": WORLD, "rank": RANK} | counts), flush=True)
    return code


if __name__ == "__main__":
    watchdog = Watchdog()
    train.forward, audit.forward = (
        partial(forward, module.forward, module is audit) for module in (train, audit))
    audit.EXTRA.summed = partialmethod(partial(summed, audit.EXTRA.summed))
    exit_after(partial(main, parse_command_line(sys.argv[1:], demo.SETTINGS, extras.pages()), watchdog))
