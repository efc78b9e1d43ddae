"""The coverage line: at an epoch's end, how many samples reached a backward and how many were evaluated."""

import pytest

from tests.conftest import COUNTS
from tests.harness.run_directory import records
from utils.errors import Exit

WORDS = ["--model", "mobilenet_v3_small", "--image-size", "32", "--global-batch-size", "24", "--micro-batch-size", "4",
         "--epochs", "2", "--threads", "1", "--workers", "0", "--strategy", "exact", "--bad-samples", "skip",
         "--save-every", "1"]
NUM_TRAIN, NUM_VAL = sum(COUNTS["train"]), sum(COUNTS["val"])


@pytest.mark.long
def test_what_is_left_out_or_unreadable_is_not_counted_also_after_a_kill(own_photos, run_dir, run_torchrun, run_train):
    """Three steps an epoch: two processes end in the middle of the first epoch, and one goes on."""
    [bad, *_], [unseen, *_] = (sorted((own_photos / split).glob("*/*.png")) for split in ("train", "val"))
    bad.write_bytes(b"")
    unseen.write_bytes(b"")
    words = [*WORDS, "--data", own_photos, "--run-dir", run_dir]
    options = {"script": "tests/end_to_end/train_without_a_sample.py"}
    begun = run_torchrun(2, *words, "--stop-after", "2", **options)
    assert begun.code == Exit.STOPPED and "epoch 1: trained" not in begun.out, begun.text
    result = run_train(*words, **options)
    assert result.returncode == 0, result.text
    for epoch in (1, 2):
        assert (f"epoch {epoch}: trained on {NUM_TRAIN - 2} of {NUM_TRAIN} samples, evaluated {NUM_VAL - 1} of"
                f" {NUM_VAL}; the others were left out, or could not be read\n") in result.out, result.text
    counts = [(record["split"], record.get("trained", record.get("evaluated"))) for record in records(run_dir)
              if record["split"] != "train"]
    assert counts == [("epoch", NUM_TRAIN - 2), ("val", NUM_VAL - 1)] * 2
