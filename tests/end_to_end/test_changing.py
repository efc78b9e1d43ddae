"""The changes of docs/changing.md, applied to copies of the project and run as the page says."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.harness.project_copy import copy_project, run_in
from tests.harness.run_directory import weights_sha256
from utils.errors import Exit

PAGE = (ROOT / "docs" / "changing.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M))
# a block, or a link to a file with a long diff
STEP = re.compile(r"^```(diff|sh)\n(.*?)^```|\]\((changes/[^)]+\.diff)\)", re.S | re.M)
CHANGES = {title: text for title, text in SECTIONS.items() if "```diff" in text or ".diff)" in text}
SMALL = " --device cpu --precision fp32 --workers 0 --threads 1 --log-every 1 --max-steps 5 --image-size 16"


@pytest.fixture(scope="module")
def changed(session_dir):
    """changed(title): a copy of the project with that section's change, and the command that tries it."""
    copies = {}

    def make(title: str) -> tuple[Path, str]:
        if title not in copies:
            folder = copy_project(Path(tempfile.mkdtemp(prefix="changed-", dir=session_dir)))
            steps = STEP.findall(CHANGES[title])
            for language, text, file in steps[:-1]:
                text = (ROOT / "docs" / file).read_text() if file else text
                words = ["bash", "-e"] if language == "sh" else ["git", "apply", "-"]
                done = subprocess.run(words, input=text, cwd=folder, capture_output=True, text=True)
                assert done.returncode == 0, f"{title}: {done.stderr}"
            copies[title] = (folder, steps[-1][1].strip())
        return copies[title]

    yield make
    for folder, _ in copies.values():
        shutil.rmtree(folder)


@pytest.fixture
def train(changed, session_dir, run_dir):
    """train(title, words): the run of the section's command with more words, in a folder of its own."""
    def start(title: str, words: str, name: str = "run", command: str = "") -> Path:
        folder, own = changed(title)
        done = run_in(folder, f"{command or own} {words} --run-dir {run_dir / name}", session_dir / "cache")
        assert done.returncode == 0, done.stdout + done.stderr
        return run_dir / name

    return start


def values(run: Path, split: str) -> list[dict[str, float]]:
    """The records of a split."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


def test_every_change_has_a_test():
    assert set(CHANGES) == {"Train your own network", "Add a loss", "Add a metric", "Add a task", "Add a strategy",
                            "Delete the text tasks"}


@pytest.mark.parametrize("title", CHANGES)
def test_a_changed_program_has_the_projects_style(title, changed):
    folder, _ = changed(title)
    program = ["train.py", "engine", "extras", "models", "data", "utils"]
    done = subprocess.run([Path(sys.executable).with_name("ruff"), "check", *program], cwd=folder, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_an_own_network_learns_resumes_and_predicts(train, changed, session_dir):
    title = "Train your own network"
    folder, _ = changed(title)
    assert len(re.search(r"```diff\n(.*?)```", SECTIONS[title], re.S)[1].splitlines()) <= 15
    stopped = run_in(folder, f"{changed(title)[1]} --run-dir own --stop-after 30 --device cpu", session_dir / "cache")
    assert stopped.returncode == Exit.STOPPED, stopped.stdout + stopped.stderr
    finished = run_in(folder, f"{changed(title)[1]} --run-dir own --device cpu", session_dir / "cache")
    assert finished.returncode == 0 and "resumed at step 30" in finished.stdout, finished.stdout + finished.stderr
    assert values(folder / "own", "val")[-1]["top1"] > 0.8
    [predict] = re.findall(r"^predict +(.*)$", finished.stdout, re.M)
    predicted = run_in(folder, predict, session_dir / "cache")
    assert predicted.returncode == 0 and len(predicted.stdout.splitlines()) == 2, predicted.stderr


@pytest.mark.slow
def test_focal_loss_counts_what_is_sure_less(train):
    focal, plain = train("Add a loss", SMALL), train("Add a loss", f"{SMALL} --focal-gamma 0", "plain")
    losses, plain_losses = ([record["loss"] for record in values(run, "train")] for run in (focal, plain))
    # ten classes and an untrained model: (1 - 0.1)^2 of the cross-entropy, roughly
    assert 0.7 < losses[0] / plain_losses[0] < 0.9
    assert np.isfinite(losses).all()


@pytest.mark.slow
def test_the_metric_is_on_record_and_is_what_eval_only_prints(train, changed, session_dir):
    title = "Add a metric"
    run = train(title, SMALL)
    [record] = values(run, "val")
    evaluated = run_in(changed(title)[0], f"python train.py --eval-only --run-dir {run}", session_dir / "cache")
    assert 0 < record["calibration_error"] < 1
    assert json.loads(evaluated.stdout)["calibration_error"] == record["calibration_error"]


@pytest.mark.slow
def test_best_by_the_metric_keeps_the_model_with_the_lowest_error(train):
    """It is better when it is lower, as the page's diff says. An early stop goes by it, too."""
    words = f"{SMALL.replace('--max-steps 5', '--max-steps 12')} --eval-every 2 --early-stop-patience 3"
    run = train("Add a metric", words, "best")
    errors = {record["step"]: record["calibration_error"] for record in values(run, "val")}
    lowest = min(errors, key=errors.get)
    assert errors[lowest] < errors[max(errors)] < max(errors.values())
    assert json.loads((run / "summary.json").read_text())["best"] == {
        "metric": "calibration_error", "step": lowest, "value": errors[lowest]}
    assert json.loads((run / "eval" / "classes.json").read_text())["step"] == lowest
    assert max(errors) == min(12, lowest + 6)  # three evaluations after the last gain


def table_in(folder, num_train=1000):
    """A product of two columns to learn."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    for split, rows in (("train", num_train), ("val", 200)):
        features = generator.normal(size=(rows, 4))
        target = features[:, :1] * features[:, 1:2] + 3
        np.savetxt(folder / f"{split}.csv", np.hstack([features, target]), delimiter=",", header="a,b,c,d,target")
    return folder


@pytest.mark.long
def test_a_model_without_a_config_has_a_card(train, run_dir):
    """Task.save_model promises no config.json."""
    words = f"--data {table_in(run_dir.parent / 'table', 64)} --device cpu --workers 0"
    run = train("Add a task", words, "card", "python train.py --task table-regression --data TABLE --epochs 1")
    assert not (run / "model" / "config.json").exists()
    assert "library_name: lockstep" in (run / "model" / "README.md").read_text()


@pytest.mark.long
def test_a_task_that_leaves_no_sample_out_says_so(changed, run_dir, session_dir):
    (run_dir.parent / "names.txt").write_text("0\n")
    words = f"--data {table_in(run_dir.parent / 'table', 64)} --without {run_dir.parent / 'names.txt'} --device cpu"
    done = run_in(changed("Add a task")[0], f"python train.py --task table-regression {words} --run-dir {run_dir}",
                  session_dir / "cache")
    assert done.returncode == 64 and "--without: this task leaves no sample out" in done.stderr


@pytest.mark.slow
def test_the_task_learns_and_gives_one_hash_on_one_and_two_processes(train, run_dir):
    words = f"--data {table_in(run_dir.parent / 'table')} --lr 0.01 --device cpu --workers 0"
    command = "--task table-regression --data TABLE --epochs 5 --strategy exact"
    runs = [train("Add a task", words), train("Add a task", words, "alone", f"python train.py {command}")]
    assert values(runs[0], "val")[-1]["loss"] < 0.5  # 1: always the mean
    assert weights_sha256(runs[0]) == weights_sha256(runs[1])


@pytest.mark.slow
def test_the_strategy_computes_what_ddp_computes(train):
    losses = [[record["loss"] for record in values(train("Add a strategy", f"{SMALL} {words}", name), "train")]
              for name, words in (("plain", ""), ("ddp", "--strategy ddp"))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and len(losses[0]) == 5


@pytest.mark.long
def test_without_the_text_tasks_images_train_and_help_names_no_other(train, changed, session_dir):
    title = "Delete the text tasks"
    assert len(values(train(title, SMALL), "train")) == 5
    helped = run_in(changed(title)[0], "python train.py --help", session_dir / "cache")
    assert "image-classification" in helped.stdout and "masked-lm" not in helped.stdout
    left = subprocess.run(["grep", "-rlE", r"transformers|masked-lm|text-classification", "--include=*.py",
                           "--exclude-dir=tests", "train.py", "engine", "extras", "models", "data", "utils"],
                          cwd=changed(title)[0], capture_output=True, text=True)
    words_alone = {"extras/card/extra.py", "models/exported.py",
                   "engine/warm_up.py", "models/own.py", "models/blocks.py", "models/activations.py",
                   "data/images/scan.py", "data/images/table.py", "utils/settings/spelling.py",
                   "utils/settings/habits.py", "utils/rundir/starts.py", "utils/strategies/dp_classic.py"}
    assert set(left.stdout.split()) == words_alone
