"""What the time of a run is spent on, and which rank is slow."""

import json
import re

import pytest

from utils.rundir.clock import SHARES


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("exact", marks=pytest.mark.slow)])
def test_a_slow_rank_is_found_and_named_and_the_shares_make_up_the_whole(run_torchrun, photos, run_dir, strategy):
    result = run_torchrun(
        2, "--data", photos, "--model", "mobilenet_v3_small", "--image-size", 32, "--epochs", 2, "--log-every", 1,
        "--global-batch-size", 24, "--micro-batch-size", 12, "--threads", 1, "--workers", 0, "--run-dir", run_dir,
        "--strategy", strategy, script="tests/end_to_end/train_with_a_slow_rank.py")
    assert result.returncode == 0, result.text
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    train = [record for record in records if record["split"] == "train"]
    assert {record["slowest_rank"] for record in train[1:]} == {1}, train
    assert all(record["slowest_step_s"] > 1 for record in train), train
    assert sum(record["communication"] > 0.1 for record in train) >= 5, train  # of rank 0 more, of rank 1 nothing
    assert result.out.count("rank 1 is slow, and the others wait for it") == 1, result.text
    last = [record for record in records if record["split"] == "epoch"][-1]
    assert sum(last[name] for name in SHARES) == pytest.approx(1) and min(last[name] for name in SHARES) >= 0, last
    assert all(last[name] > 0 for name in ("starting", "computing", "communication", "evaluation", "checkpoints")), last
    [shown] = re.findall(r"in all.*: (.* %)", result.out)
    assert 95 <= sum(map(int, re.findall(r"(\d+) %", shown))) <= 103, shown
