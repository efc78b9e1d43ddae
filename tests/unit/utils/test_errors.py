"""utils/errors.py: the message and the exit code of an error, and how a process exits with them."""

import contextlib
import io
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from utils.errors import Exit, counted, explain, forget_exit_code, record_exit, rounded, say

ROOT = Path(__file__).parents[3]
KILLED = ("data loading process {pid} of rank 2 was killed ({reason}); the same command continues the run;"
          " fewer --workers need less memory")
FULL = "/dev/shm is full: use docker run --ipc=host (or --shm-size), or fewer --workers"


class Killed:
    def __init__(self, number):
        self.index = number

    def __len__(self):
        return 1

    def __getitem__(self, index):
        os.kill(os.getpid(), self.index)


@pytest.mark.parametrize("number, reason, code", [
    (signal.SIGKILL, "probably out of memory", Exit.HARDWARE), (signal.SIGBUS, FULL, Exit.IO)])
def test_a_killed_data_loading_process_is_71_or_74_with_pid_and_reason(monkeypatch, number, reason, code):
    """74 where /dev/shm is full. What was noted of it, the samples, stands at the end."""
    monkeypatch.setenv("RANK", "2")
    iterator = iter(DataLoader(Killed(number), num_workers=1, multiprocessing_context="fork"))
    [worker] = iterator._workers
    with pytest.raises(RuntimeError) as error:
        next(iterator)
    error.value.add_note(" (a.png is being read)")
    assert explain(error.value) == (KILLED.format(pid=worker.pid, reason=reason) + " (a.png is being read)", code)


@pytest.mark.parametrize("text, pids, reason, code", [
    ("DataLoader worker (pid 71) is killed by signal: Killed. ", "71", "probably out of memory", Exit.HARDWARE),
    ("DataLoader worker (pid 71) is killed by signal: Bus error. It is possible that", "71", FULL, Exit.IO),
    ("DataLoader worker (pid(s) 71, 72) exited unexpectedly", "71, 72", "probably out of memory", Exit.HARDWARE)])
def test_both_of_torchs_messages_for_that_are_recognised(monkeypatch, text, pids, reason, code):
    monkeypatch.setenv("RANK", "2")
    assert explain(RuntimeError(text)) == (KILLED.format(pid=pids, reason=reason), code)


BROKEN = [  # cudaGetErrorString of libcudart 13; the driver's words, as nvidia-smi and the kernel's log have them
    "uncorrectable ECC error encountered", "uncorrectable NVLink error detected during the execution",
    "Invalid access of peer GPU memory over nvlink or a hardware error", "hardware stack error",
    "CUDA-capable device(s) is/are busy or unavailable"]
AS_TORCH = """CUDA error: {}
Search for `cudaErrorX' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
"""
NCCL = """\
NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, {} (run with NCCL_DEBUG=WARN for details), \
NCCL version 2.28.9
{}
Last error:
{}"""
USAGE = ("invalid usage", "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.")
REMOTE = ("remote process exited or there was a network error",
          "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.")
CUDA = ("unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed.")


@pytest.mark.parametrize("words", BROKEN)
def test_a_device_that_failed_is_71_and_named(monkeypatch, words):
    monkeypatch.setenv("RANK", "10")
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert explain(torch.AcceleratorError(AS_TORCH.format(words))) == (
        f"device 2 of {socket.gethostname()} (rank 10) failed (CUDA error: {words}); the same command continues the run"
        " on a device that works", Exit.HARDWARE)


@pytest.mark.parametrize("words", [
    "an illegal memory access was encountered", "device-side assert triggered", "unspecified launch failure"])
def test_what_a_program_may_cause_on_a_device_is_70(words):
    assert explain(torch.AcceleratorError(AS_TORCH.format(words)))[1] == Exit.INTERNAL


def test_an_operator_that_cannot_be_deterministic_is_64_and_named():
    text = "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you set 'torch.use_d..."
    message, code = explain(RuntimeError(text))
    assert code == Exit.USAGE and message.startswith("--deterministic: adaptive_avg_pool2d_backward_cuda has no ")


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("Tried to allocate 20.00 MiB"), MemoryError(),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate memory")])
def test_lack_of_memory_is_64_in_whatever_words(error):
    message, code = explain(error)
    assert code == Exit.USAGE and message.startswith("out of memory: use a smaller --micro-batch-size")
    assert "--precision" not in message


def test_what_cudnn_cannot_compute_may_be_memory_or_the_precision():
    message, code = explain(RuntimeError("GET was unable to find an engine to execute this computation"))
    assert (code, "--micro-batch-size" in message, "--precision fp32" in message) == (Exit.USAGE, True, True)


@pytest.mark.parametrize("kind, last, code, shown", [
    (USAGE, "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device ac000", Exit.USAGE, "device ac000: each"),
    (USAGE, "Bootstrap : no socket interface found", Exit.USAGE, "no socket interface found: "),
    (REMOTE, "socketProgressOpt: Call to recv from 10.0.0.12<36311> failed : Connection reset by peer " + 100 * ".",
     Exit.LOST_PEERS, 100 * "."),
    (REMOTE, "", Exit.LOST_PEERS, REMOTE[1]),
    (CUDA, "Cuda failure 'out of range'", Exit.LOST_PEERS, "Cuda failure 'out of range'"),
    (CUDA, "Cuda failure 'uncorrectable ECC error encountered'", Exit.HARDWARE, "uncorrectable ECC error encountered")])
def test_an_error_of_nccl_has_its_last_line_and_the_code_of_its_cause(kind, last, code, shown):
    message, found = explain(torch.distributed.DistBackendError(NCCL.format(*kind, last)))
    assert (found, shown in message, "\n" in message) == (code, True, False), message


@pytest.mark.parametrize("error, found", [
    (RuntimeError("[/pytorch/third_party/gloo/gloo/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4711"),
     "Connection closed by peer"),
    (RuntimeError("[/pytorch/third_party/gloo/gloo/tcp/unbound_buffer.cc:81] Timed out waiting 100000ms for recv"),
     "Timed out waiting 100000ms"),
    (RuntimeError("Rank 1 failed to pass monitoredBarrier in 300 ms\\nmore"), "monitoredBarrier in 300 ms"),
    (torch.distributed.DistNetworkError("The server socket has failed\nand more"), "The server socket has failed")])
def test_a_lost_peer_is_76_and_names_who_lost_it(monkeypatch, error, found):
    monkeypatch.setenv("RANK", "2")
    message, code = explain(error)
    assert code == Exit.LOST_PEERS
    assert message.startswith(f"rank 2 on {socket.gethostname()} lost its peers ({found}"), message


@pytest.mark.parametrize("text", [
    'Caught RuntimeError in DataLoader worker process 0.\n  File "/home/gloo/data.py", line 1\nRuntimeError: boom',
    "Caught ConnectionResetError in DataLoader worker process 0.\nConnectionResetError: Connection reset by peer",
    "igloo.png: boom", "cannot decode /data/igloos/1.png"])
def test_an_error_that_only_sounds_like_a_backends_is_no_lost_peer(text):
    assert explain(RuntimeError(text)) == (text, Exit.INTERNAL)


# --- a console that takes no more


@contextlib.contextmanager
def stream_to(end):
    """A stream that writes to a pipe without a reader, or to a disk that is full."""
    if end == "a closed pipe":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open("/dev/full", os.O_WRONLY)
    stream = os.fdopen(writing, "w")
    yield stream
    with contextlib.suppress(OSError):
        stream.close()


ENDS = ("a closed pipe", "a full disk")


@pytest.mark.parametrize("end", ENDS)
def test_a_line_that_cannot_be_printed_is_no_error(end):
    with stream_to(end) as stream:
        for _ in range(3):
            say("hello", stream)


def test_a_line_is_printed_at_once_by_default_on_standard_error(capsys):
    stream = io.StringIO()
    say("there", stream)
    say("here")
    assert (stream.getvalue(), *capsys.readouterr()) == ("there\n", "", "here\n")


@pytest.mark.parametrize("work, code", [
    ("print('a' * 100) or Exit.DONE", 0), ("Exit.STOPPED", 75), ("fail(UserError('no such', Exit.NO_INPUT))", 66),
    ("fail(RankError('unreadable', Exit.BAD_DATA))", 65), ("fail(OSError(28, 'No space left'))", 74),
    ("fail(KeyError('x'))", 70)])
@pytest.mark.parametrize("end", ENDS)
def test_a_process_leaves_with_its_code_though_its_console_takes_no_more(tmp_path, work, code, end):
    program = f"from utils.errors import *\ndef fail(error): raise error\nexit_after(lambda: {work})"
    with stream_to(end) as stream:
        # The flush at the end is to meet the console.
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        environment = kept | {"LOCKSTEP_EXIT_FILE": str(tmp_path / "exit"), "RANK": "0"}
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, stdout=stream, stderr=stream)
    recorded = (tmp_path / "exit").read_text() if (tmp_path / "exit").exists() else ""
    assert (done.returncode, recorded) == (code, f"{code}\n" if code else "")


def test_a_loading_process_that_dies_during_the_message_changes_nothing():
    """torch's handler of SIGCHLD raises in the main thread, wherever it is."""
    program = """
import os, signal
from utils.errors import UserError, exit_after

class Dying(UserError):
    def __str__(self):
        os.kill(os.getpid(), signal.SIGCHLD)
        return "the words"

def fail():
    raise Dying("")

def handle(number, frame):
    raise RuntimeError("a worker was killed")

signal.signal(signal.SIGCHLD, handle)
exit_after(fail)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (64, "train.py: the words\n")


def test_a_process_without_standard_output_leaves_with_its_code():
    program = "from utils.errors import *\nexit_after(lambda: Exit.STOPPED)"
    assert subprocess.run(["sh", "-c", '"$0" -c "$1" >&-', sys.executable, program], cwd=ROOT).returncode == 75


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:strict"])
def test_a_character_that_the_console_lacks_is_escaped_and_ends_nothing(encoding):
    """A class may be called anything; the second is the name of a folder in Latin-1."""
    program = "from utils.errors import *\nexit_after(lambda: say('\\u732b \\udce9', sys.stdout) or Exit.DONE)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"PYTHONIOENCODING": encoding})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("\\u732b \\udce9\n" if encoding == "ascii" else "\u732b \\udce9\n")


# --- leaving


def leave(work, **environment):
    program = f"from utils.errors import *\ndef fail(error): raise error\nexit_after(lambda: {work})"
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCKSTEP_EXIT_FILE")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=kept | environment, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("work, rank, code, message", [
    ("Exit.DONE", "0", 0, ""), ("Exit.STOPPED", "0", 75, ""),
    ("fail(UserError('no such', Exit.NO_INPUT))", "0", 66, "train.py: no such\n"),
    ("fail(UserError('no such', Exit.NO_INPUT))", "1", 66, ""),  # rank 0 says what all know
    ("fail(RankError('unreadable', Exit.BAD_DATA))", "1", 65, "train.py: unreadable\n"),
    ("fail(PeerError('rank 1: it ended', Exit.STOPPED))", "0", 75, ""),  # which has said so itself
    ("fail(PeerError('rank 1: no such', Exit.NO_INPUT, is_shown=False))", "0", 66, "train.py: rank 1: no such\n"),
    ("fail(PeerError('rank 1: no such', Exit.NO_INPUT, is_shown=False))", "2", 66, ""),
    ("fail(PeerError('rank 1: a bug', Exit.INTERNAL))", "0", 70, ""),
    ("fail(KeyboardInterrupt())", "0", 130, ""),
    ("fail(OSError(28, 'No space left'))", "1", 74,
     "train.py: OSError: [Errno 28] No space left; free some space, and the same command continues the run\n")])
def test_a_process_leaves_with_its_code_and_one_message(work, rank, code, message):
    assert leave(work, RANK=rank) == (code, message)


def test_a_count_has_its_noun():
    assert [counted(1, "step"), counted(2, "step"), counted(0, "class"), counted(1, "micro-batch"),
            counted(3, "micro-batch")] == ["1 step", "2 steps", "0 classes", "1 micro-batch", "3 micro-batches"]


@pytest.mark.parametrize("value, shown", [
    (0.12345, "0.1235"), (-3.0, "-3.0000"), (999_999.0, "999999.0000"), (math.exp(700), "1.01423e+304"),
    (-12_345_678.9, "-1.23457e+07"), (math.inf, "inf"), (None, "not finite")])
def test_a_figure_has_a_length_that_people_can_read(value, shown):
    assert rounded(value) == shown


def test_a_bug_leaves_with_70_and_a_traceback():
    code, message = leave("fail(KeyError('x'))", RANK="1")
    assert (code, "Traceback" in message) == (70, True)


def test_the_first_abnormal_end_of_a_node_names_the_exit_code(tmp_path):
    file = tmp_path / "exit"
    codes = [leave(work, LOCKSTEP_EXIT_FILE=str(file))[0] for work in ("Exit.DONE", "Exit.BAD_DATA", "Exit.LOST_PEERS")]
    assert (codes, file.read_text()) == ([0, 65, 76], "65\n")


@pytest.mark.parametrize("environment, first, then", [
    ({}, "76\n", "65\n"), ({"LOCAL_RANK": "0"}, "76\n", "65\n"), ({"LOCAL_RANK": "1"}, "76\n", "76\n"),
    ({"LOCAL_RANK": "0"}, None, "65\n")])
def test_the_first_process_of_a_node_deletes_the_last_exit_code(tmp_path, monkeypatch, environment, first, then):
    """That of torchrun's start before this one."""
    for name in ("LOCKSTEP_EXIT_FILE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    forget_exit_code()  # without launch.sh there is no such file
    file = tmp_path / "exit"
    for name, value in (environment | {"LOCKSTEP_EXIT_FILE": str(file)}).items():
        monkeypatch.setenv(name, value)
    if first:
        file.write_text(first)
    forget_exit_code()
    record_exit(Exit.BAD_DATA)
    assert file.read_text() == then
