"""--compile on the CPU: a run in two starts ends with the bits of one, and says that it is compiled."""

import json

import pytest

from tests.conftest import LIMIT_S
from tests.contracts.test_exactness import COMMON, WORDS
from tests.harness.run_directory import outcome
from utils.errors import Exit

# of the first start: with torch's cache empty, and another test on the same two cores, 240 s were too few (n = 1)
COMPILING_S = 420


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_without_a_compiler_all_ranks_refuse_and_one_says_so(processes, run_torchrun, photos, run_dir):
    result = run_torchrun(processes, "--data", photos, "--run-dir", run_dir, "--device", "cpu", "--compile",
                          env={"CXX": "no-compiler"})
    assert result.code == Exit.USAGE and not run_dir.exists(), result.text
    assert result.text.count("--compile needs a compiler, and there is no no-compiler") == 1


@pytest.mark.slow
@pytest.mark.timeout(COMPILING_S + 2 * LIMIT_S)
@pytest.mark.parametrize("task", ["image-classification", "masked-lm"])
def test_two_starts_end_with_the_bits_of_one(task, launch, run_torchrun, photos, texts, run_dir):
    data = photos if task == "image-classification" else texts
    words = ["--task", task, "--data", data, *WORDS[task], *COMMON, "--compile"]
    straight, halves = run_dir.parent / "straight", run_dir.parent / "halves"
    whole = launch(2, *words, "--run-dir", straight).wait(COMPILING_S)
    assert whole.returncode == 0 and ", compiled;" in whole.out, whole.text
    assert "recompile_limit" not in whole.text  # from there on torch would not compile
    run_torchrun(2, *words, "--run-dir", halves, "--stop-after", 4)
    second = run_torchrun(2, *words, "--run-dir", halves)
    assert second.returncode == 0 and "resumed at step 4" in second.out, second.text
    assert outcome(halves) == outcome(straight)


@pytest.mark.slow
@pytest.mark.timeout(COMPILING_S + LIMIT_S)
def test_gradients_are_sent_while_others_are_still_computed(launch, photos, run_dir):
    """torch compiles a graph for each of DDP's buckets; with one graph all gradients would come at its end."""
    result = launch(2, "--data", photos, "--run-dir", run_dir, "--device", "cpu", "--compile", "--model", "resnet18",
                    "--image-size", 32, "--micro-batch-size", 4, "--global-batch-size", 8, "--epochs", 4,
                    "--max-steps", 4, "--profile", 1).wait(COMPILING_S)
    assert result.returncode == 0, result.text
    events = json.loads((run_dir / "profile/rank-0.pt.trace.json").read_text())["traceEvents"]
    sent = min(event["ts"] for event in events if event.get("name") == "gloo:all_reduce")
    computed = [event["ts"] for event in events if event.get("name") == "CompiledFunctionBackward"]
    assert len(computed) == 3 and sent < max(computed)
