"""train.py with a rank that computes wrongly, or ends in an audit: FAULT='{"rank": 1, "kind": "always"}' torchrun ...

always: all its losses from step 2 on are wrong, in the same way. once: the first one of micro-batch `index` in `step`
(1, 2, ...). weights: its weights change in `step`. in_audit: `signal`, SIGKILL or SIGTERM, as it computes what it
audits in `step`. A file `until`: once it exists, the rank is well.
"""

import json
import os
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import extras
import train
from data import demo
from extras.audit import extra as audit
from utils.distributed.watchdog import Watchdog
from utils.errors import exit_after
from utils.settings.command_line import parse_command_line

FAULT, RANK = json.loads(os.environ["FAULT"]), int(os.environ["RANK"])
IS_WELL = "until" in FAULT and Path(FAULT["until"]).exists()
seen = Counter()  # forwards by step and micro-batch


def wrong(compute, start, model, micro_batch, step, in_audit=False):
    """What `compute` returns, unless this rank is at fault."""
    here, kind = (step + 1, micro_batch.index), FAULT["kind"]
    seen[here] += 1
    is_there = FAULT["rank"] == RANK and step + 1 == FAULT.get("step", step + 1) and not IS_WELL
    if is_there and kind == "weights" and seen[here] == 1:
        next(model.parameters()).data += 1
    if is_there and kind == "in_audit" and in_audit:
        os.kill(os.getpid(), getattr(signal, FAULT["signal"]))
    is_wrong = is_there and {"always": step > 0, "once": here[1] == FAULT.get("index") and seen[here] == 1}.get(kind)
    if is_wrong and "until" in FAULT:
        Path(FAULT["until"]).touch()
    return compute(start, model, micro_batch, step) * (1 + 2**-20 if is_wrong else 1)


if __name__ == "__main__":
    watchdog = Watchdog()
    train.forward, audit.forward = (partial(wrong, module.forward) for module in (train, audit))
    audit.forward = partial(audit.forward, in_audit=True)
    exit_after(partial(train.main, parse_command_line(sys.argv[1:], demo.SETTINGS, extras.pages()), watchdog))
