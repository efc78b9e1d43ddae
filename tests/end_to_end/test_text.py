"""A text run's life in real launches: pretrained, tuned, stopped, continued, evaluated, refused; and text deleted."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.conftest import COUNTS
from tests.harness.encoders import write_encoder
from tests.harness.run_directory import newest_checkpoint, records, status
from utils.errors import Exit

SMALL = ["--max-length", "32", "--global-batch-size", "24", "--micro-batch-size", "8", "--threads", "1",
         "--log-every", "1", "--precision", "fp32"]
SMALL_VOCABULARY = ["--model", "bert-tiny", "--vocab-size", "200"]
CLASSES = [f"topic{number}" for number in range(len(COUNTS["train"]))]
COMMIT = "0123456789" * 4
STEPS = 3  # an epoch of 57 samples


@pytest.fixture(scope="module")
def life(session_dir, run_train, texts):
    """The launches of one story, and what the files held then; data, model and runs lie in `root`."""
    root = session_dir / "text-life"
    shutil.copytree(texts, root / "texts")
    pretraining, run = root / "pretraining", root / "run"
    tuning = ["--task", "text-classification", "--data", root / "texts", "--model", "org/name", "--pretrained",
              "--epochs", "1", "--text-column", "text,more", *SMALL, "--workers", "0", "--run-dir", run]
    cache, offline = root / "hub/models--org--name", {"HF_HUB_CACHE": str(root / "hub"), "HF_HUB_OFFLINE": "1"}
    told = {"pretrained": run_train("--task", "masked-lm", "--data", root / "texts", *SMALL_VOCABULARY, *SMALL,
                                    "--workers", "2", "--epochs", "1", "--run-dir", pretraining)}
    assert told["pretrained"].returncode == 0, told["pretrained"].text
    (cache / "refs").mkdir(parents=True)
    (cache / "refs/main").write_text(COMMIT)
    shutil.copytree(pretraining / "model", cache / "snapshots" / COMMIT)
    told["stopped"] = run_train(*tuning, "--stop-after", "1", "--lr", "0", env=offline)
    first = load_file(newest_checkpoint(run) / "model.safetensors")
    tokenizer = (run / "tokenizer/tokenizer.json").read_bytes()
    shutil.rmtree(root / "hub")
    told["continued"] = run_train(*tuning, "--lr", "0", env=offline)
    told["again"] = run_train(*tuning, "--lr", "0", env={"PYTHONPROFILEIMPORTTIME": "1"})
    (root / "texts").rename(root / "moved")
    told["evaluated without data"] = run_train("--eval-only", "--run-dir", run)
    told["evaluated elsewhere"] = run_train("--eval-only", "--run-dir", run, "--data", root / "moved", "--workers", "2",
                                            env=offline)
    return SimpleNamespace(root=root, pretraining=pretraining, run=run, told=told, first=first, tokenizer=tokenizer)


def test_nothing_is_written_to_stderr_also_with_loading_processes(life):
    # transformers warns of weights that are missing, tokenizers before 0.23 of a fork after it has used its threads.
    normal = ("pretrained", "stopped", "continued", "evaluated elsewhere")
    evaluated = life.told[normal[-1]].err
    assert [life.told[name].err for name in normal[:-1]] == [""] * (len(normal) - 1)
    assert evaluated.startswith("evaluating the best checkpoint of ") and evaluated.count("\n") == 1


def test_masked_lm_packs_its_texts(life):
    assert json.loads((life.pretraining / "auto.json").read_text())["first_position"] == 0


def test_a_pretrained_model_loads_in_transformers_and_says_how_to_tune_it(life):
    model, found = transformers.AutoModelForMaskedLM.from_pretrained(
        life.pretraining / "model", output_loading_info=True)
    assert not any(found.values())
    tokens = transformers.AutoTokenizer.from_pretrained(life.pretraining / "model")(["a text"], return_tensors="pt")
    assert model(**tokens).logits.shape[2] == model.config.vocab_size
    assert f"--model {life.pretraining}/model" in life.told["pretrained"].out
    assert records(life.pretraining)[-1]["perplexity"] > 1


def test_fine_tuning_starts_from_the_pretrained_encoder(life):
    assert life.told["stopped"].code == Exit.STOPPED, life.told["stopped"].text
    [line] = [line for line in life.told["stopped"].out.splitlines() if line.startswith(f"{life.run}: ")]
    assert ", org/name with the weights of org/name, " in line and line.endswith(", learning rate 0; a new run")
    pretrained = load_file(life.pretraining / "model/model.safetensors")
    # The rate is 0.
    kept = {name for name in life.first if name in pretrained and torch.equal(life.first[name], pretrained[name])}
    assert {name.removeprefix("bert.").split(".")[0] for name in set(life.first) - kept} == {"pooler", "classifier"}


def test_a_run_is_continued_without_the_hub_and_its_cache(life):
    """With its own tokenizer and config; the commit is in auto.json. --eval-only is another test."""
    assert json.loads((life.run / "auto.json").read_text())["hub"] == {"org/name": COMMIT}
    assert life.told["continued"].returncode == 0, life.told["continued"].text
    assert status(life.run)["step"] == STEPS and "resumed at step 1" in life.told["continued"].out
    assert {(life.run / part / "tokenizer.json").read_bytes() for part in ("tokenizer", "model")} == {life.tokenizer}


def test_a_fine_tuned_model_loads_in_transformers_with_its_classes(life):
    model, found = transformers.AutoModelForSequenceClassification.from_pretrained(
        life.run / "model", output_loading_info=True)
    assert not any(found.values()) and list(model.config.id2label.values()) == CLASSES
    [scores] = transformers.pipeline("text-classification", str(life.run / "model"), top_k=None)(
        [{"text": "abcd", "text_pair": "ab"}])
    assert {score["label"] for score in scores} == set(CLASSES)


def test_the_command_of_a_finished_run_says_so_without_torch(life):
    result = life.told["again"]
    assert result.returncode == 0 and f"{life.run} is finished: step {STEPS}" in result.out, result.text
    assert " torch" not in result.err and " transformers" not in result.err and "utils.rundir.restart" in result.err


def test_an_evaluation_without_data_is_66_and_takes_them_from_elsewhere(life):
    result = life.told["evaluated without data"]
    assert (result.code, result.out) == (Exit.NO_INPUT, ""), result.text
    assert result.err == f"train.py: --data {life.root}/texts: there is no such file or folder\n"
    told = json.loads(life.told["evaluated elsewhere"].out)
    assert {name: told[name] for name in ("loss", "top1")} == {
        name: records(life.run)[-1][name] for name in ("loss", "top1")}


@pytest.mark.rows(1)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_that_cannot_compute_in_bf16_is_64_on_two_processes(strategy, life, run_dir, run_torchrun):
    """Before a strategy divides it: nobody waits for a rank that failed alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(life.pretraining / "model")
    write_encoder(run_dir.parent / "model", "deberta", transformers.AutoModel, tokenizer)
    result = run_torchrun(2, "--task", "text-classification", "--data", life.root / "moved", "--workers", "0", *SMALL,
                          "--model", run_dir.parent / "model", "--precision", "bf16", "--strategy", strategy,
                          "--run-dir", run_dir)
    assert result.code == Exit.USAGE
    assert result.text.count("cannot compute in bf16") == 1 and "use --precision fp32" in result.text


@pytest.mark.long
@pytest.mark.parametrize("case", ["a ragged row", "a name without network"])
def test_wrong_input_is_refused_once_on_two_processes(case, texts, run_dir, run_torchrun):
    data = Path(shutil.copytree(texts, run_dir.parent / "texts"))
    words, code = ["--model", "bert-tinny"], Exit.NO_INPUT
    parts = ["did you mean bert-tiny? It is", "cannot be fetched from the hub"]
    if case == "a ragged row":
        with (data / "val.csv").open("a") as file:
            file.write("one, two, three, four,topic0\n")
        line = sum(COUNTS["val"]) + 2
        words, code, parts = SMALL_VOCABULARY, Exit.BAD_DATA, [
            f"{data}/val.csv line {line}: has 5 fields, the header 3"]
    result = run_torchrun(2, "--task", "text-classification", "--data", data, *words, *SMALL, "--workers", "0",
                          "--run-dir", run_dir,
                          env={"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(run_dir.parent / "hub")})
    messages = [line for line in (result.out + result.err).splitlines() if line.startswith("train.py: ")]
    assert result.code == code and len(messages) == 1 and all(part in messages[0] for part in parts), result.text
    assert "rank0]: Traceback" not in result.err and not run_dir.exists()
