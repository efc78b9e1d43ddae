"""How to train on from the end of a run: what a refusal and a finished run say can be pasted into a shell."""

import json
from pathlib import Path

import pytest
import yaml

import extras
from utils.errors import UserError
from utils.rundir.identity import compare, kept_settings
from utils.rundir.restart import words_if_finished
from utils.settings.command_line import parse_command_line

pytestmark = pytest.mark.unit


def config_of(*words):
    return parse_command_line(["--run-dir=my run", *words], {}, extras.pages())


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """A run directory that has trained, as far as these words look at it."""
    monkeypatch.chdir(tmp_path)
    run = Path("my run")
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(kept_settings(config_of("--max-steps", "12"))))
    for name, content in (("auto", {"names_as_written": False}), ("status", {"state": "finished"}),
                          ("summary", {"step": 12, "top1": 0.97, "best": {}})):
        (run / f"{name}.json").write_text(json.dumps(content))
    return run


@pytest.mark.parametrize("words, command", [
    (["--epochs", "40"], "--epochs 40 --max-steps None"), (["--max-steps", "40"], "--max-steps 40"),
    (["--max-steps", "12", "--early-stop-patience", "3"], "--early-stop-patience 3")])
def test_the_refusal_of_another_end_has_the_command(words, command, finished):
    with pytest.raises(UserError) as raised:
        compare(config_of(*words), finished)
    assert str(raised.value).endswith(f"; to train on from its end: python train.py --branch 'my run' {command}")


def test_the_refusal_of_another_model_has_none(finished):
    with pytest.raises(UserError) as raised:
        compare(config_of("--max-steps", "12", "--model", "resnet50"), finished)
    assert "--branch" not in str(raised.value)


def test_what_a_finished_run_says_has_the_setting_that_ended_it(finished):
    words = words_if_finished(config_of("--max-steps", "12"))
    assert words.endswith("; to train on from its end: python train.py --branch 'my run' --max-steps N")
