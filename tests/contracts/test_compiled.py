"""--compile on the CPU: a run of two starts ends with the bits of one, and each says that it is compiled."""

import pytest

from tests.contracts.test_exactness import COMMON, WORDS
from tests.harness.run_directory import outcome
from utils.errors import Exit


@pytest.mark.slow
@pytest.mark.parametrize(("task", "processes"), [("image-classification", 2), ("masked-lm", 1)])
def test_two_starts_end_with_the_bits_of_one(run_train, run_torchrun, photos, texts, run_dir, task, processes):
    data = photos if task == "image-classification" else texts
    words = ["--task", task, *WORDS[task], "--data", data, *COMMON, "--compile"]
    straight, halves = run_dir.parent / "straight", run_dir.parent / "halves"

    def start(*more):
        return run_train(*words, *more) if processes == 1 else run_torchrun(processes, *words, *more)

    whole = start("--run-dir", straight)
    assert whole.returncode == 0 and ", compiled;" in whole.out, whole.text
    first = start("--run-dir", halves, "--stop-after", 4)
    assert first.returncode == Exit.STOPPED or processes == 2, first.text  # torchrun gives 1 for any code
    second = start("--run-dir", halves)
    assert second.returncode == 0 and "resumed at step 4" in second.out, second.text
    assert outcome(halves) == outcome(straight)
