"""Processes that start again find each other, every time: on the store of dead ones, in other numbers, late."""

import os
import random
import time

import pytest
import torch.distributed as dist

LIMIT_S = 5  # from the last process being ready to the group standing


def test_50_restarts_in_a_row_on_one_store_come_up_with_late_ranks_and_other_numbers_of_them(tmp_path):
    # The store is torchrun's: it outlives the workers, and each start finds what all before have left in it. Workers are forked
    # from here, for 50 times the imports would take minutes; with them, under torchrun: the slow test below.
    store, draw = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), random.Random(0)
    took_s = []
    for start in range(50):
        world_size = draw.choice((2, 3, 4))
        late_s = [draw.choice((0, 0, draw.uniform(0, 0.2))) for _ in range(world_size)]
        workers = [meet_in_a_fork(rank, world_size, store.port, late_s[rank], tmp_path / f"{start}-{rank}") for rank in range(world_size)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) for worker in workers]
        assert codes == [13] * world_size, f"start {start} on {world_size}"
        times = [list(map(float, (tmp_path / f"{start}-{rank}").read_text().split())) for rank in range(world_size)]
        took_s.append(max(stood for _, stood in times) - max(ready for ready, _ in times))
    assert max(took_s) < LIMIT_S


def meet_in_a_fork(rank, world_size, port, late_s, file):
    """The process id of a worker that meets the others, writes when it was ready and when it met them, and crashes."""
    if child := os.fork():
        return child
    code = 1
    try:
        from utils.distributed import World
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
        time.sleep(late_s)
        ready = time.monotonic()
        world = World.from_env("cpu")
        told = world.gather(rank)
        stood = time.monotonic()
        if told == list(range(world_size)):
            file.write_text(f"{ready} {stood}")
            code = 13
    finally:
        os._exit(code)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_50_restarts_in_a_row_come_up_under_torchrun(processes, tmp_path, start_torchrun):
    launch = start_torchrun(processes, tmp_path / "times", 50, script="tests/faults/restart.py",
                            torchrun=("--max-restarts=50", "--monitor-interval=0.1"))
    result = launch.wait(limit_s=900)
    assert result.returncode == 0, result.text
    rows = [line.split() for line in (tmp_path / "times").read_text().splitlines()]
    by_start = {start: [(float(imported), float(stood)) for number, _, imported, stood in rows if int(number) == start]
                for start in range(51)}
    assert {len(times) for times in by_start.values()} == {processes}
    assert max(max(stood for _, stood in times) - max(imported for imported, _ in times) for times in by_start.values()) < LIMIT_S
