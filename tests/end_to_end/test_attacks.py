"""ask.verify cannot be deceived: what was changed in a run directory, with all hashes made anew, and what it says then.

The table of docs/asking.md is made of ATTACKS.
"""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from ask.integrity import findings
from tests.harness.forging import changed_weights, link_of, model_anew, rehash, seal
from tests.harness.run_directory import newest_checkpoint, written
from utils.errors import Exit
from utils.files import folder_digest
from utils.rundir.chain import FILE, read_lines

WORDS = ["--model", "small-cnn", "--image-size", "16", "--epochs", "4", "--global-batch-size", "24",
         "--micro-batch-size", "4", "--save-every", "2", "--keep-every", "4", "--log-every", "1", "--threads", "1",
         "--workers", "0", "--precision", "fp32", "--strategy", "exact"]
VERIFY = {"script": "ask/verify.py"}


@pytest.fixture(scope="module")
def honest(session_dir, run_train, photos):
    """A run of two starts, finished."""
    run = session_dir / "to-attack"
    assert run_train(*WORDS, "--data", photos, "--run-dir", run, "--stop-after", 5).returncode == Exit.STOPPED
    assert run_train(*WORDS, "--data", photos, "--run-dir", run).returncode == 0
    return run


def best_step(run):
    return json.loads((run / "summary.json").read_text())["best"]["step"]


def negated(file):
    weights = load_file(file)
    name = [*weights][-1]
    weights[name] = -weights[name]
    save_file(weights, file, metadata={"format": "pt"})


def edit_lines(file, change):
    """change: from the records to the lines that take their place."""
    lines = file.read_text().splitlines()
    file.write_text("".join(f"{line}\n" for line in change(lines)))


def edit_json(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content, indent=1))


# --- the attacks: each changes the run directory `run`


def other_weights_by_another_start(run):
    """The best checkpoint and RUN/model get negated weights; its link names a start that is made up."""
    step = best_step(run)
    edit_lines(run / "starts.jsonl", lambda lines: [
        *lines, json.dumps(json.loads(lines[-1]) | {"start": 3, "step": step})])
    for path in (run / "checkpoints").glob(f"step-{step:010d}-*"):
        negated(path / "model.safetensors")
    negated(run / "model" / "model.safetensors")
    link_of(run, step, start=3)
    for path in sorted((run / "checkpoints").glob(f"step-{step:010d}-g?")):
        path.rename(path.with_name(f"{path.name[:-1]}3"))
    model_anew(run, step)
    rehash(run)


def records_behind_the_end(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"split": "val", "step": 13, "epoch": 4.3, "samples": 230, "loss": 0.1, "top1": 0.99}\n')


def records_behind_the_end_of_a_killed_run(run):
    records_behind_the_end(run)
    edit_json(run / "status.json", lambda status: status.update(state="failed"))


def a_hidden_end(run):
    """The last link ends before its own records, so that others can stand there."""
    records_behind_the_end(run)
    last = read_lines(run)[-1]["step"]
    rehash(run)
    link_of(run, last, metrics=read_lines(run)[-2]["metrics"])
    from tests.harness import forging
    kept, forging.records_up_to = forging.records_up_to, lambda run, step, **more: (
        kept(run, step if step < last else last - 1, **more))
    try:
        rehash(run)
    finally:
        forging.records_up_to = kept


def a_record_of_another_split(run):
    edit_lines(run / "metrics.jsonl", lambda lines: [
        lines[0], json.dumps({"split": "test", "step": 1, "top1": 0.99}), *lines[1:]])
    rehash(run)


def a_doubled_key(run):
    edit_lines(run / "metrics.jsonl", lambda lines: [
        line.replace('"top1": ', '"top1": 0.99, "top1": ') for line in lines])
    rehash(run)


def better_figures(run):
    def change(lines):
        records = [json.loads(line) for line in lines]
        return [json.dumps(record | {"top1": 0.99} if "top1" in record else record) for record in records]

    edit_lines(run / "metrics.jsonl", change)
    rehash(run)


def an_evaluation_less(run):
    """The evaluation of step 6 was bad: its record goes, and its link."""
    edit_lines(run / "metrics.jsonl", lambda lines: [
        line for line in lines if not ('"val"' in line and json.loads(line)["step"] == 6)])
    edit_lines(run / FILE, lambda lines: [line for line in lines if json.loads(line).get("step") != 6])
    for path in (run / "checkpoints").glob("step-0000000006-*"):
        shutil.rmtree(path)
    rehash(run)


def another_model(run):
    """RUN/model alone, and what the link says of it."""
    changed_weights(run / "model" / "model.safetensors")
    model_anew(run, best_step(run))
    rehash(run)


def a_model_of_no_link(run):
    """No link says that there is a model."""
    changed_weights(run / "model" / "model.safetensors")
    lines = read_lines(run)
    for line in lines:
        if "model" in line:
            link_of(run, line["step"], model={})
    rehash(run)


def a_better_best(run):
    for path in (run / "checkpoints").glob("step-*/trainer.json"):
        edit_json(path, lambda trainer: trainer["best"].update(value=0.99) if trainer["best"] else None)
    rehash(run)


def other_samples(run):
    """The table of samples is empty, and the manifest is made anew."""
    checkpoint = newest_checkpoint(run)
    link = json.loads((checkpoint / "MANIFEST.json").read_text())["link"]
    table = load_file(checkpoint / "samples.safetensors")
    save_file({name: value * 0 for name, value in table.items()}, checkpoint / "samples.safetensors")
    seal(checkpoint, link)


def fewer_figures(run):
    """As if another program had computed them."""
    edit_lines(run / "starts.jsonl", lambda lines: [
        json.dumps(json.loads(line) | {"program": "0" * 16}) for line in lines])
    edit_lines(run / "metrics.jsonl", lambda lines: [
        json.dumps({name: value for name, value in json.loads(line).items() if name not in ("top1", "auroc")})
        for line in lines])
    rehash(run)


def other_hardware(run):
    edit_lines(run / "starts.jsonl", lambda lines: [
        json.dumps(json.loads(line) | {"hardware": [{"device": "cpu", "cpu": "another"}]}) for line in lines])
    better_figures(run)


def another_rate(run):
    """As if the run had been trained with it."""
    for file in ("starts.jsonl", "auto.json", "config.yaml"):
        text = (run / file).read_text()
        (run / file).write_text(text.replace('"lr": 0.0', '"lr": 0.1'))
    rehash(run)


def another_seed(run):
    for file in ("starts.jsonl", "config.yaml"):
        text = (run / file).read_text()
        (run / file).write_text(text.replace('"seed": 0', '"seed": 1').replace("seed: 0", "seed: 1"))
    rehash(run)


def other_initial_weights(run):
    link_of(run, 0, content="0" * 64)
    rehash(run)


def a_doubled_start(run):
    edit_lines(run / "starts.jsonl", lambda lines: [*lines, lines[-1]])
    rehash(run)


def a_lost_start(run):
    edit_lines(run / "starts.jsonl", lambda lines: lines[1:])
    rehash(run)


class Attack(NamedTuple):
    """What verify says: without computing, if that is enough, or else when it computes. code: its exit code."""

    change: object
    files: str  # "" = the files belong together
    computed: str
    code: int = Exit.DIFFERS


ATTACKS = {
    "other weights, by a start that is made up": Attack(
        other_weights_by_another_start, "by chain.jsonl a start computed steps that it did not come to", ""),
    "records behind the end": Attack(records_behind_the_end, "1 record behind step 12", ""),
    "the same, as if the run had been killed": Attack(
        records_behind_the_end_of_a_killed_run, "", "not verified: 1 record behind step 12", 0),
    "the same, behind a link that ends too early": Attack(a_hidden_end, "record", ""),
    "a record of another split": Attack(a_record_of_another_split, "", "the test record of step 1 differs"),
    "a figure that is there twice": Attack(a_doubled_key, "", "the unreadable record of step ? differs"),
    "better figures": Attack(better_figures, "", "differs: top1 0.99 in the run"),
    "an evaluation less": Attack(an_evaluation_less, "", "differs"),
    "another RUN/model": Attack(another_model, "", "differs: RUN/model/model.safetensors"),
    "a RUN/model that no link is of": Attack(a_model_of_no_link, "model: ", ""),
    "a better best result": Attack(a_better_best, "", "differs: the content"),
    "what the samples were": Attack(other_samples, "what its samples were was edited", ""),
    "fewer figures, by another program": Attack(fewer_figures, "", "not verified: auroc", 0),
    "better figures, on other hardware": Attack(other_hardware, "", "cannot be compared here", Exit.OTHER_RUN),
    "another learning rate": Attack(another_rate, "", "differs"),
    "another seed": Attack(another_seed, "", "step 0 differs: the content"),
    "other initial weights": Attack(other_initial_weights, "", "step 0 differs: the content"),
    "a start twice": Attack(a_doubled_start, "starts.jsonl: a line is there twice", ""),
    "a start less": Attack(a_lost_start, "starts.jsonl: ", ""),
}


@pytest.mark.rows(3)
@pytest.mark.parametrize("name", ATTACKS)
def test_whoever_makes_all_hashes_anew_is_found(name, honest, run_dir, run_train):
    attack, run = ATTACKS[name], shutil.copytree(honest, run_dir)
    attack.change(run)
    assert written(run) != {run / path.relative_to(honest): content for path, content in written(honest).items()}
    found = findings(run)
    assert (attack.files in "\n".join(found)) if attack.files else found == [], found
    if not attack.files:
        result = run_train(run, **VERIFY)
        assert (result.returncode, attack.computed in result.out) == (attack.code, True), result.text
        assert f"verified: {run}" not in result.out


TEXT_WORDS = ["--task", "text-classification", "--model", "bert-tiny", "--vocab-size", "120", "--epochs", "1",
              "--global-batch-size", "8", "--workers", "0", "--threads", "1", "--precision", "fp32"]


@pytest.mark.long
def test_another_tokenizer_is_found_also_with_its_digest(data_of, run_dir, run_train):
    """Two words change places: then the data are not those that the run was trained on."""
    result = run_train(*TEXT_WORDS, "--data", data_of["text-classification"], "--run-dir", run_dir)
    assert result.returncode == 0, result.text
    file = run_dir / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    one, two = [*vocabulary][-2:]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    file.write_text(json.dumps(content))
    assert findings(run_dir) == [f"{run_dir}/tokenizer: not what the run was created with"]
    digest = folder_digest(file.parent)
    edit_json(run_dir / "auto.json", lambda auto: auto.update(tokenizer=digest))
    edit_lines(run_dir / "starts.jsonl", lambda lines: [json.dumps(start | {
        "resolved": start["resolved"] | {"tokenizer": digest}}) for start in map(json.loads, lines)])
    rehash(run_dir)
    assert findings(run_dir) == []
    result = run_train(run_dir, **VERIFY)
    assert result.returncode == Exit.OTHER_RUN and "does not hold the data of" in result.err, result.text


def test_the_page_has_a_row_for_each_attack():
    page = Path("docs/asking.md").read_text()
    assert [name for name in ATTACKS if f"\n| {name} | " not in page] == []
