"""Every architecture of text encoders: trained for two steps, evaluated, saved, and asked for predictions; make zoo.

No run ends in an internal error (70). What does not run is refused in words, which stand below.
"""

import csv
import os
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import transformers

from data.texts.tokenizer import train_tokenizer
from models.tasks import load_task
from tests.harness.encoders import ARCHITECTURES, WITHOUT_MASKED_LM, write_encoder
from tests.harness.run_directory import newest_checkpoint
from utils.errors import Exit

pytestmark = pytest.mark.slow
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "train", "transformers", "models.predict", "models.tasks.masked_lm",
                              "models.tasks.text_classification", __name__])
SMALL = ["--max-length", "32", "--max-steps", "2", "--global-batch-size", "8", "--threads", "1", "--workers", "0"]
NOT_IN_BF16 = {"deberta": "without overflow", "xmod": "dtypes match"}
# of probabilities: sums over other shapes (YOSO: 4e-5); 8 bits of mantissa. FNet has no mask: padding counts.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.02}
DEPENDS_ON_PADDING = {"fnet": 0.02}


def _call(kind: str, words: list[str], environment: dict[str, str], out: Path) -> None:
    """train.py or models.predict in this process, a fork."""
    from engine.begin import begin
    from models import predict
    from train import main
    from utils.errors import exit_after

    os.environ.update(environment)
    for number in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if kind == "predict":
        exit_after(partial(predict.main, words), "predict", **predict.WAYS_OUT)
    exit_after(partial(main, *begin(words)))


@pytest.fixture
def call(run_dir, session_dir):
    """call("train" or "predict", *words): the exit code, and everything that was printed."""

    def called(kind, *words):
        out = run_dir.parent / "out"
        out.write_text("")
        environment = {"LOCKSTEP_CACHE": str(session_dir / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        fork = FORKS.Process(target=_call, args=(kind, [str(word) for word in words], environment, out))
        fork.start()
        fork.join()
        return fork.exitcode, out.read_text()

    return called


@pytest.fixture(scope="module")
def tokenizer(texts):
    with (texts / "train.csv").open() as file:
        return train_tokenizer([row["text"] for row in csv.DictReader(file)], 200)


def refused(code, text, expected, *words):
    """Whether a run was refused (64, 65, 66) by one message with these words."""
    messages = [line for line in text.splitlines() if line.startswith("train.py: ")]
    return code == expected and len(messages) == 1 and all(word in messages[0] for word in words)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("task", ["text-classification", "masked-lm"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_trains_evaluates_and_predicts(name, task, precision, texts, tokenizer, run_dir, call):
    folder = run_dir.parent / "model"
    write_encoder(folder, name, transformers.AutoModel, tokenizer)
    code, text = call("train", "--task", task, "--data", texts, "--model", folder, "--run-dir", run_dir, *SMALL,
                      "--precision", precision)
    if task == "masked-lm" and name in WITHOUT_MASKED_LM:
        assert refused(code, text, Exit.USAGE, "does not suit this task"), text
        return
    if precision == "bf16" and name in NOT_IN_BF16:
        assert refused(code, text, Exit.USAGE, "use --precision fp32", NOT_IN_BF16[name]), text
        return
    ties_all = task == "masked-lm" and name in ("bart", "mbart")  # their head is the embedding
    assert code == 0 and ("new weights in the head: " in text) != ties_all, text
    _, found = load_task(task).head.from_pretrained(run_dir / "model", output_loading_info=True)
    assert not any(found.values())
    if task == "masked-lm":
        return
    code, text = call("predict", run_dir, texts / "val.csv", "--output", run_dir.parent / "out.csv")
    assert code == 0, text
    with (run_dir / "eval/samples.csv").open() as ours, (run_dir.parent / "out.csv").open() as theirs:
        pairs = list(zip(csv.DictReader(ours), csv.DictReader(theirs), strict=True))
    limit = max(TOLERANCE[precision], DEPENDS_ON_PADDING.get(name, 0))
    far = max(abs(float(row["probability"]) - float(other[row["prediction"]])) for row, other in pairs)
    assert all(row["input"] == other["input"] for row, other in pairs) and far <= limit, far


def test_exact_computes_one_hash_from_weights_without_a_head(texts, tokenizer, run_dir, run_torchrun):
    """Longformer's masked-lm head has a bias that transformers leaves as the memory was."""
    folder, hashes = run_dir.parent / "model", set()
    write_encoder(folder, "longformer", transformers.AutoModel, tokenizer)
    for processes in (1, 2):
        run = run_dir.parent / f"run-{processes}"
        result = run_torchrun(processes, "--task", "masked-lm", "--data", texts, "--model", folder, "--run-dir", run,
                              *SMALL, "--strategy", "exact", "--precision", "fp32")
        assert result.returncode == 0, result.text
        hashes.add((newest_checkpoint(run) / "model.safetensors").read_bytes())
    assert len(hashes) == 1


def test_auto_falls_back_to_fp32_and_keeps_it(texts, tokenizer, run_dir, call):
    folder = run_dir.parent / "model"
    write_encoder(folder, "deberta", transformers.AutoModel, tokenizer)
    words = ["--task", "text-classification", "--data", texts, "--model", folder, "--run-dir", run_dir, *SMALL]
    code, text = call("train", *words, "--stop-after", "1")
    assert code == Exit.STOPPED and ", fp32 on 1 x cpu; " in text, text
    code, text = call("train", *words)
    assert code == 0 and ", fp32 on 1 x cpu; " in text and "new weights" not in text, text
