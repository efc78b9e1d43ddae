"""utils/errors.py: what an error becomes for the user: words, and an exit code. Leaving with it: test_run.py."""

import os
import signal
import socket

import pytest
import torch
from torch.utils.data import DataLoader

from utils.errors import Exit, explain

KILLED = "a data loading process (pid {pid}) of rank 2 was killed (out of memory?); the same command continues; fewer --workers need less"
class Killed:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_data_loading_process_that_was_killed_is_74_with_its_pid(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    iterator = iter(DataLoader(Killed(), num_workers=1, multiprocessing_context="fork"))
    [worker] = iterator._workers
    with pytest.raises(RuntimeError) as error:
        next(iterator)
    message, code = explain(error.value)
    assert (code, message.startswith(KILLED.format(pid=worker.pid))) == (Exit.IO, True), message


@pytest.mark.parametrize("text, pids", [
    ("DataLoader worker (pid 71) is killed by signal: Killed. ", "71"),
    ("DataLoader worker (pid(s) 71, 72) exited unexpectedly", "71, 72")])
def test_both_of_torchs_ways_to_say_so_are_understood(monkeypatch, text, pids):
    monkeypatch.setenv("RANK", "2")
    message, code = explain(RuntimeError(text))
    assert (code, message.startswith(KILLED.format(pid=pids))) == (Exit.IO, True), message


@pytest.mark.parametrize("error, found", [
    (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4711"),
     "Connection closed by peer"),
    (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 100000ms for recv"),
     "Timed out waiting 100000ms"),
    (RuntimeError("Rank 1 failed to pass monitoredBarrier in 300 ms\\nmore"), "monitoredBarrier in 300 ms"),
    (torch.distributed.DistNetworkError("The server socket has failed\nand more"), "The server socket has failed")])
def test_a_lost_peer_is_76_and_says_who_lost_it(monkeypatch, error, found):
    monkeypatch.setenv("RANK", "2")
    message, code = explain(error)
    assert (code, message.startswith(f"rank 2 on {socket.gethostname()} lost its peers ({found}")) == (Exit.LOST_PEERS, True), message
