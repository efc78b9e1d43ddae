"""The pipes of a rank are its own in its forks, too, such as workers of a DataLoader: torchrun ... check_forks.py."""

import os


def named(numbers: list[int]) -> list[str]:
    """What each file is: pipe:[inode]."""
    return [os.readlink(f"/proc/self/fd/{number}") for number in numbers]


numbers = [number for _ in range(100) for number in os.pipe()]
expected = named(numbers)
if (child := os.fork()) == 0:
    os._exit(named(numbers) != expected)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
