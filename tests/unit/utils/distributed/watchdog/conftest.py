"""What the tests of utils/distributed/watchdog.py share: processes of their own, for a Watchdog blocks the signals of its process for good."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[5]
LIMIT_S = 60  # of one process
BEGINNING = f"""
import ctypes, json, os, signal, sys, threading, time
from types import SimpleNamespace
from utils import errors
from utils.distributed import watchdog as module
from utils.distributed.watchdog import SIGNALS, Watchdog, end_with_parent

signal.alarm({LIMIT_S})  # whatever goes wrong: it ends, and the test with it (a child needs its own)
module.BEAT_S = 0.01
told = lambda *words: print(*words, flush=True)

class Clock:  # an hour passes when a test says so; `looks` counts how often it was looked at
    now = looks = 0.0
    sleep = staticmethod(time.sleep)

    def monotonic(self):
        self.looks += 1
        return self.now

    def passes(self, seconds):
        self.now, looks = self.now + seconds, self.looks
        while self.looks < looks + 2:  # one more look that began after it
            time.sleep(0.001)

class Store:  # the part of torch.distributed.Store that one process alone needs
    values = {{}}
    clone = lambda self: self
    set = lambda self, name, value: self.values.__setitem__(name, value)
    get = lambda self, name: self.values[name]
    multi_get = lambda self, names: [self.get(name).encode() if self.check([name]) else b"null" for name in names]
    check = lambda self, names: all(name in self.values for name in names)

class Peers(Store):  # ranks 1 and 2; of these, the `living` ones show a sign of life whenever one looks
    beats, living = {{1: 5, 2: 5}}, (1, 2)

    def get(self, name):
        kind, rank = name.split("/")
        if kind == "left" or int(rank) not in self.beats:
            return super().get(name)
        self.beats[int(rank)] += int(rank) in self.living
        return json.dumps({{"beat": self.beats[int(rank)], "host": "h", "state": "s"}})

    def check(self, names):
        return names[0] in ("alive/1", "alive/2") or super().check(names)

def told_at_end(state, code, message):
    told(f"at_end {{state}} {{int(code)}} {{message}}")

def until(is_so):
    while not is_so():
        time.sleep(0.001)
"""
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}  # the test is the parent, as torchrun would be


@pytest.fixture
def start(tmp_path):
    """start(program, **environment): a process that runs it; killed at the end. Its exit file is tmp_path / "exit"."""
    processes = []

    def started(program, **environment):
        inherited = {name: value for name, value in os.environ.items() if name != "RANK" and not name.startswith("TORCHELASTIC")}
        processes.append(subprocess.Popen(
            [sys.executable, "-c", BEGINNING + program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOCKSTEP_EXIT_FILE": str(tmp_path / "exit")} | environment))
        return processes[-1]

    yield started
    for process in processes:
        process.kill()
        process.communicate()


def late(limit_s, state, rank=0, host="host"):
    """What a process says that did not get on."""
    return (f"rank {rank} on {host} does not get on for {limit_s} s: {state}"
            " (--start-timeout, --step-timeout and --section-timeout are the limits)")


def line_of(process):
    """The next line that it says."""
    return process.stdout.readline().rstrip("\n")
