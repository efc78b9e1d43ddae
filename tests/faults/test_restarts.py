"""Processes that start again find each other, every time: on the store of dead ones, in other numbers, late."""

import json

import pytest
import torch.distributed as dist

LIMIT_S = 5  # from the last process being ready to the group standing


@pytest.mark.long
def test_50_restarts_on_one_store_come_up_with_late_and_varying_ranks(run_train):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    result = run_train(50, store.port, script="tests/faults/meet_again.py", real=True)
    assert result.returncode == 0, result.text
    took_s = json.loads(result.out)
    assert (len(took_s), max(took_s) < LIMIT_S) == (50, True), took_s


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
    assert max(max(stood for _, stood in times) - max(imported for imported, _ in times)
               for times in by_start.values()) < LIMIT_S
