"""Every task and technique under ask.replay: a step computed again has the bits of its record, sample by sample."""

import pytest

from tests.conftest import COUNTS
from tests.contracts.test_exactness import AUGMENTED, COMMON, WORDS
from tests.contracts.test_techniques import TASKS, TECHNIQUES
from tests.harness.launches import WORDS as PHOTOS
from tests.harness.run_directory import rows_of, written
from utils.errors import Exit

REPLAY = {"script": "ask/replay.py"}
WEIGHTS = {f"tint{label}": sum(COUNTS["train"]) / 3 / count for label, count in enumerate(COUNTS["train"])}  # balanced
KINDS = {task: (task, ["--task", task, *words]) for task, words in WORDS.items()}
KINDS |= {name: (task, [*TASKS[task], *words]) for name, (task, words) in TECHNIQUES.items()}
KINDS["augmented"] = "image-classification", [*KINDS["image-classification"][1], *AUGMENTED]
KINDS["fp16"] = "image-classification", [*KINDS["image-classification"][1], "--precision", "fp16"]
SOON = "augmented", "masked-lm"


@pytest.mark.long
@pytest.mark.parametrize("kind", [
    kind if kind in SOON else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def test_a_step_of_any_task_and_technique_is_that_of_the_record(kind, data_of, run_dir, run_train):
    """And the losses of its samples add up to its loss, and each has a gradient."""
    task, words = KINDS[kind]
    result = run_train("--data", data_of[task], *COMMON, *words, "--epochs", 1, "--workers", 0, "--early-stop-patience",
                       0, "--run-dir", run_dir)
    assert result.returncode == 0, result.text
    before, output = written(run_dir), run_dir.parent / "output"
    result = run_train(run_dir, "--step", 2, "--grad-norms", "--output", output, **REPLAY)
    assert result.returncode == 0, result.text
    assert "the same bits as recorded: loss, grad_norm and lr of step" in result.out, result.text
    assert written(run_dir) == before
    assert "24 backward passes more in a step that is asked for" in result.err

    rows, [figures] = rows_of(output), rows_of(output, "steps")
    normalizer = sum(row["loss"] for row in rows) / figures["loss"]
    weights = [WEIGHTS[row["label"]] if kind == "augmented" else 1 for row in rows]
    expected = round(normalizer) if kind == "masked-lm" else sum(weights)  # there it is the number of predicted tokens
    assert normalizer == pytest.approx(expected, rel=1e-5)
    assert all(row["grad_norm"] > 0 for row in rows if kind != "fp16")  # there null: it is beyond fp16's range
    assert all("seen" in row for row in rows)
    assert all(row["update_by_weights"] >= 0 for row in rows_of(output, "blocks"))


@pytest.mark.slow
@pytest.mark.parametrize("words, processes", [
    (["--strategy", "fsdp"], 2), (["--strategy", "dp", "--devices-per-process", 2], 1),
    (["--strategy", "model-parallel", "--devices-per-process", 2], 1)], ids=["fsdp", "dp", "model-parallel"])
def test_a_step_of_other_strategies_is_that_of_the_record(
        words, processes, photos, run_dir, run_train, run_torchrun):
    start = run_train if processes == 1 else lambda *words, **more: run_torchrun(processes, *words, **more)
    result = start("--data", photos, *PHOTOS, *words, "--device", "cpu", "--epochs", 1, "--run-dir", run_dir)
    assert result.returncode == 0, result.text
    more = ["--grad-norms"] if processes == 1 else []
    result = start(run_dir, "--step", 2, *more, **REPLAY)
    assert result.code == 0 and "the same bits as recorded" in result.out, result.text
    if processes > 1:
        result = start(run_dir, "--step", 2, "--grad-norms", **REPLAY)
        assert (result.code, result.err.count("cannot be computed alone; leave")) == (Exit.USAGE, 1), result.text
