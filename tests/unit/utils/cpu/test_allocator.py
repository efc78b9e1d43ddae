"""utils/cpu/allocator.py: memory that a step has freed is that of the next one."""

import subprocess
import sys

import pytest

SCRIPT = """if True:
    import sys, torch
    from resource import RUSAGE_SELF, getpagesize, getrusage
    from utils.cpu.allocator import keep_freed_memory
    if sys.argv[1] == "kept":
        keep_freed_memory()
    before, rounds, size = getrusage(RUSAGE_SELF).ru_minflt, 20, 10**8
    for _ in range(rounds):
        torch.ones(size // 4)  # freed at once
    print((getrusage(RUSAGE_SELF).ru_minflt - before) / (rounds * size / getpagesize()))
"""


def share_of_faults(word: str) -> float:
    """Page faults, as a share of the pages that 20 tensors of 100 MB have."""
    return float(subprocess.check_output([sys.executable, "-c", SCRIPT, word], text=True))


@pytest.mark.long
def test_pages_of_freed_tensors_are_used_again():
    """Without it every page of every tensor is a fault; with it 0.4 of them, for small blocks break large ones up."""
    without = share_of_faults("given back")
    if without < 0.5:
        pytest.skip("the kernel gives huge pages to all, or the C library keeps such memory by itself")
    assert share_of_faults("kept") < 0.7 * without


@pytest.mark.long
def test_a_fork_does_not_inherit_freed_memory():
    """The child's resident memory is far below the gigabyte that its parent has freed."""
    script = """if True:
        import os, torch
        from utils.cpu.allocator import keep_freed_memory
        keep_freed_memory()
        held = torch.ones(250_000_000)
        wall = bytearray(1000)  # above it
        del held
        if os.fork() == 0:
            print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")][0], flush=True)
            os._exit(0)
        os.wait()
    """
    kilobytes = int(subprocess.check_output([sys.executable, "-c", script], text=True))
    assert kilobytes < 900_000
