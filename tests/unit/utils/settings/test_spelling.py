"""utils/settings/habits.py, spelling.py: other trainers' flags, typing errors and wrong values get one line each."""

import re
from pathlib import Path

import pytest

from data import demo
from utils.settings.command_line import parse_command_line
from utils.settings.config import CONFIGS, facts, flag
from utils.settings.habits import answer, answers

TABLE = Path(answer.__code__.co_filename).with_suffix(".tsv").read_text()
PEERS = (Path(__file__).parent / "peers.txt").read_text()
FLAGS = {flag(name) for config in CONFIGS.values() for name in facts(config())}


@pytest.fixture(autouse=True)
def _outside_torchrun(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def message(capsys):
    """What a command line is refused with, in one line."""
    def refused(*words):
        with pytest.raises(SystemExit) as left:
            parse_command_line(words, demo.SETTINGS)
        printed = capsys.readouterr()
        [line] = printed.err.splitlines()
        assert (left.value.code, printed.out) == (64, "")
        return line
    return refused


@pytest.mark.parametrize("task", CONFIGS)
def test_every_habitual_spelling_is_answered_by_name(task, message):
    wrong = []
    for spelling, said in answers().items():
        word = f"-{spelling}" if len(spelling) == 1 else f"--{spelling}"
        if flag(spelling) in FLAGS:
            continue  # ours now
        line, expected = message("--task", task, word, "3"), answer(spelling, task)
        is_right = line == f"train.py: {word}: {expected}" and said in expected
        wrong += [] if is_right else [line]
    assert wrong == []


def test_the_table_names_flags_that_exist_and_each_spelling_once():
    rows = [line.split("\t") for line in TABLE.splitlines() if line and not line.startswith("#")]
    named = {word for said, _ in rows for word in re.findall("--[a-z-]+", said)}
    spelled = [spelling for _, spellings in rows for spelling in spellings.split()]
    assert (named - FLAGS, len(spelled) - len(set(spelled)), len(spelled) > 400) == (set(), 0, True)


def test_each_name_in_the_argument_lists_of_peers_is_ours_or_answered():
    names = {word for line in PEERS.splitlines() if not line.startswith("#") for word in line.split()}
    names -= {"local-rank"}  # which old launchers give each process: accepted
    unanswered = [name for name in sorted(names) if flag(name) not in FLAGS and name not in answers()]
    assert (unanswered, len(names) > 400) == ([], True)


@pytest.mark.parametrize("words, said", [
    ("--learning_rate 0.1", "--learning_rate: use --lr"),
    ("--learning-rate=0.1 --amp", "--learning-rate: use --lr; --amp: use --precision"),
    ("--trainer.max_epochs 3", "--trainer.max_epochs: use --epochs"),
    ("--lerning-rate 0.1", "--lerning-rate: use --lr"),
    ("--epoch 3", "--epoch: did you mean --epochs?"),
    ("--aml", "--aml: unknown; `train.py --task image-classification --help-all` lists the settings"),
    ("--max-seq-length 8", "--max-seq-length: use --max-length, with --task text-classification or text-regression or"
     " masked-lm"),
    ("--max-length 8", "--max-length: a setting of --task text-classification and text-regression and masked-lm;"
     " this is --task image-classification"),
    ("--epochs 1.5", "--epochs 1.5: must be a whole number"), ("--lr", "--lr: must be a number or auto"),
    ("--split dev", "--split dev: must be train, val or test"), ("--mean 1 2", "--mean 1 2: must be 3 numbers or auto"),
    ("--workers few", "--workers few: must be a whole number or auto"), ("--data", "--data: give a value"),
    ("--pretrained True", "--pretrained True: a switch is --pretrained or --no-pretrained; in a file true or false"),
    ("--lr 1 2", "2: this belongs to no setting; a setting is --name value"),
    ("epochs=3", "epochs=3: this belongs to no setting; write --epochs=3"),
    ("imgsz=640", "imgsz=640: this belongs to no setting; use --image-size")])
def test_what_cannot_be_read_gets_one_line_with_the_way_out(words, said, message):
    assert message(*words.split()) == f"train.py: {said}"


PART_OF_VAL = "not available: every sample is evaluated; give --data with a smaller val"


@pytest.mark.parametrize("word, said", [
    ("--max_train_samples", "not a setting: give --data a smaller folder or table; --max-steps ends a run early"),
    ("--limit_train_batches", "use --max-steps (the evaluations still take all of val)"),
    ("--trainer.fast_dev_run", "use --max-steps (the evaluations still take all of val)"),
    ("--max-eval-samples", PART_OF_VAL), ("--limit-val-batches", PART_OF_VAL),
    ("--gp", "not a setting: the model pools as its library built it"),
    ("--eval_accumulation_steps", "not needed: what an evaluation keeps of each sample takes little memory"),
    ("--backbone-lr", "use --lr (the backbone's) and --head-lr-factor (the head's is --lr times this)"),
    ("--accelerator", "use --device"), ("--devices", "use --nproc-per-node"),
    ("--color-jitter", "not available; --auto-augment trivialaugment changes colours, and shapes as well"),
    ("--crop-pct", "not needed: an evaluation crops as the weights were evaluated; a new model sees 7/8 of a photo's"
     " shorter side"),
    ("--ra-magnitude", "use --randaugment-magnitude"), ("--bce-loss", "use --loss bce"),
    ("--in-chans", "not needed: images are read as RGB; --image-column A,B gives the model several images per sample"),
    ("--project", "use --run-dir"), ("--name", "use --run-dir"),
    ("--adam_epsilon", "not a setting: it is 1e-8, torch's default")])
def test_answers_to_what_exists_under_another_meaning_or_not_at_all(word, said, message):
    """Written here apart from the table: close spellings had found other settings for some of them."""
    assert message(word, "5") == f"train.py: {word}: {said}"


@pytest.mark.parametrize("words, copy", [
    ("--data s3://bucket/x", "aws s3 sync s3://bucket/x DIR"),
    ("--data gs://bucket/x", "gcloud storage rsync --recursive gs://bucket/x DIR"),
    ("--weights https://host/x.pth", "curl -LO https://host/x.pth"),
    ("--data hf://datasets/a/b", "hf download --repo-type dataset a/b --local-dir DIR")])
def test_an_address_must_be_copied_first_and_the_message_says_how(words, copy, message):
    assert message(*words.split()) == f"train.py: {words}: must be on this machine; copy it first, for example: {copy}"


@pytest.mark.parametrize("address, said", [
    ("s3a://bucket/x", "must be on this machine; copy it first"),
    ("hdfs://host/x", "must be on this machine; copy it first"),
    ("git+ssh://host/x", "must be on this machine; copy it first"), ("file:///data/x", "give the path alone: /data/x")])
def test_no_command_is_named_for_an_address_that_curl_does_not_know(address, said, message):
    assert message("--data", address) == f"train.py: --data {address}: {said}"


@pytest.mark.parametrize("key, said", [
    ("learning_rate", "use lr"), ("lerning_rate", "use lr"), ("global_batch_sise", "did you mean global_batch_size?"),
    ("resume", "not needed: the same command continues the run, from the exact sample on"),
    ("per_device_train_batch_size", "use global_batch_size (samples per optimizer step, over all processes) and"
     " micro_batch_size (samples that a process computes at once)")])
def test_a_file_is_answered_in_the_spelling_of_files(key, said, message, tmp_path):
    (tmp_path / "a.yaml").write_text(f"{key}: 1\n")
    assert message(f"--config={tmp_path / 'a.yaml'}") == f"train.py: {tmp_path / 'a.yaml'}: {key}: unknown key; {said}"
