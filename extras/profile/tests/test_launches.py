"""--profile N: each rank writes what N steps of this start did; the run computes what it computes without."""

import json
from collections import Counter

import pytest

from tests.harness.run_directory import outcome


@pytest.mark.long
@pytest.mark.parametrize("asked, recorded", [(2, 2), (9, 5)])  # 9: four of the six, and what follows the last
def test_each_rank_writes_the_steps_and_the_run_is_the_same(run_torchrun, photos, run_dir, asked, recorded):
    runs = {name: run_dir.parent / name for name in ("with", "without")}
    for name, words in (("with", ["--profile", asked]), ("without", [])):
        result = run_torchrun(2, "--data", photos, "--model", "mobilenet_v3_small", "--image-size", 32, "--epochs", 2,
                              "--global-batch-size", 24, "--threads", 1, "--run-dir", runs[name], *words)
        assert result.returncode == 0, result.text
        assert result.out.count("https://ui.perfetto.dev") == len(words) / 2
    for rank in range(2):
        trace = json.loads((runs["with"] / "profile" / f"rank-{rank}.pt.trace.json").read_text())
        found = Counter(event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation")
        assert sum(count for name, count in found.items() if name.startswith("ProfilerStep#")) == recorded
    assert "aten::mkldnn_convolution" in (runs["with"] / "profile/operators.txt").read_text()
    assert outcome(runs["with"]) == outcome(runs["without"]) and not (runs["without"] / "profile").exists()
