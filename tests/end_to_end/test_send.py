"""ask.send: what a run has written down reaches MLflow once, beside the training and afterwards; kills, resumes."""

import json
import math
import os
import shutil
import signal
import time

import pytest

from tests.conftest import ROOT
from tests.harness.run_directory import trained_steps
from utils.errors import Exit

SEND = {"script": "ask/send.py"}
WORDS = ["--model", "small-cnn", "--image-size", "16", "--epochs", "3", "--global-batch-size", "24", "--log-every", "1",
         "--threads", "1", "--workers", "0", "--precision", "fp32"]
LIMIT_S = 120


@pytest.fixture(scope="module")
def client(session_dir):
    """A client of MLflow's store in a file; what it makes at first takes some seconds."""
    import mlflow

    return mlflow.MlflowClient(f"sqlite:///{session_dir}/mlflow.db")


@pytest.fixture
def tracker(client, request):
    """The environment of ask.send, and read(): what it sent, {name: [(step, value), ...]}, and the run, or None."""
    name = request.node.name

    def read():
        experiment = client.get_experiment_by_name(name)
        runs = client.search_runs([experiment.experiment_id]) if experiment else []
        if not runs:
            return {}, None
        [run] = runs
        points = {metric: client.get_metric_history(run.info.run_id, metric) for metric in run.data.metrics}
        return {metric: sorted((point.step, point.value) for point in found) for metric, found in points.items()}, run

    return {"MLFLOW_TRACKING_URI": client.tracking_uri, "MLFLOW_EXPERIMENT_NAME": name}, read


@pytest.fixture(scope="module")
def finished(session_dir, run_train, photos):
    """A run that has ended."""
    run = session_dir / "to-send"
    result = run_train(*WORDS, "--data", photos, "--run-dir", run)
    assert result.returncode == 0, result.text
    return run


@pytest.fixture
def copied(finished, run_dir):
    """A copy that the test may change, and its lines."""
    run = shutil.copytree(finished, run_dir)
    return run, (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)


def expected(run):
    """The points that a run's records are."""
    points = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name in record.keys() - {"split", "step", "time"}:
            group = "progress" if name in ("epoch", "samples") else record["split"]
            points.setdefault(f"{group}/{name}", {})[record["step"]] = record[name]
    return {name: sorted(steps.items()) for name, steps in points.items()}


def say_state(run, state):
    """As a run says it in status.json."""
    (run / "status.json").write_text(json.dumps({"state": state}))


def wait_until(holds):
    """Until holds() is true. Fails after LIMIT_S."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


def test_a_finished_run_arrives_once_with_all_digits(finished, tracker, run_train):
    env, read = tracker
    for _ in range(2):
        result = run_train(finished, "--to", "mlflow", env=env, **SEND)
        assert result.returncode == 0, result.text
        points, run = read()
        assert points == expected(finished)
        assert (run.info.status, run.info.run_name) == ("FINISHED", finished.name)
        assert run.data.params["model"] == "small-cnn" and float(run.data.params["auto.lr"]) > 0
        assert 0 < run.info.end_time - run.info.start_time < 1000 * LIMIT_S  # of the records, not of now
        count = sum(map(len, points.values()))
        assert result.out == (f"{finished} is finished: mlflow has its {count} figures and"
                              f" {len(run.data.params)} settings\n")


@pytest.mark.long
def test_a_training_is_followed_to_its_end_across_a_kill(tracker, start_torchrun, photos, run_dir):
    env, read = tracker
    words = [*WORDS, "--data", photos, "--run-dir", run_dir, "--save-every", "2"]
    training = start_torchrun(None, *words)
    wait_until((run_dir / "command.txt").exists)
    following = start_torchrun(None, run_dir, "--to", "mlflow", "--follow", env=env, **SEND)
    wait_until(lambda: trained_steps(run_dir) >= 3)
    training.kill_all()
    wait_until(lambda: len(read()[0].get("train/loss", ())) >= 3)
    assert read()[1].info.status == "RUNNING"
    result = start_torchrun(None, *words).wait()
    assert result.returncode == 0, result.text
    result = following.wait()
    assert result.returncode == 0, result.text
    points, run = read()
    assert run.info.status == "FINISHED"
    for name in ("train/loss", "val/top1", "progress/epoch"):
        assert points[name] == expected(run_dir)[name]
    assert {name: [step for step, _ in steps] for name, steps in points.items()} == {
        name: [step for step, _ in steps] for name, steps in expected(run_dir).items()}


@pytest.mark.long
def test_a_kill_and_a_line_that_is_being_written_double_and_lose_nothing(copied, tracker, start_torchrun):
    env, read = tracker
    run, lines = copied
    say_state(run, "running")
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:30])
    follow = [None, run, "--to", "mlflow", "--follow"]
    sending = start_torchrun(*follow, env=env, **SEND)
    wait_until(lambda: len(read()[0].get("train/loss", ())) == 3)  # and a record of an epoch or an evaluation
    sending.process.send_signal(signal.SIGKILL)
    assert sending.wait().returncode == -signal.SIGKILL
    before = read()[0]

    # it goes on
    (run / "metrics.jsonl").write_bytes(b"".join(lines))
    sending = start_torchrun(*follow, env=env, **SEND)
    wait_until(lambda: read()[0] == expected(run))
    say_state(run, "stopped")
    assert sending.wait().returncode == 0
    points, tracked = read()
    assert points == expected(run) and all(set(before[name]) <= set(points[name]) for name in before)
    assert tracked.info.status == "KILLED"


def test_ctrl_c_ends_the_following_without_a_traceback(copied, tracker, start_torchrun):
    env, read = tracker
    run, _ = copied
    say_state(run, "running")
    sending = start_torchrun(None, run, "--to", "mlflow", "--follow", env=env, **SEND, real=True)
    wait_until(lambda: read()[0] == expected(run))
    sending.process.send_signal(signal.SIGINT)
    result = sending.wait()
    assert result.returncode == 128 + signal.SIGINT and "Traceback" not in result.text, result.text


@pytest.mark.long
def test_steps_that_are_computed_again_keep_their_first_points(copied, tracker, run_train):
    """A resume writes them again, with other times."""
    env, read = tracker
    run, lines = copied
    assert run_train(run, "--to", "mlflow", env=env, **SEND).returncode == 0
    before, _ = read()
    again = [json.dumps(json.loads(line) | {"time": "2030-01-01T00:00:00+00:00"}) + "\n" for line in lines[-4:]]
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:-4]) + "".join(again).encode())
    assert run_train(run, "--to", "mlflow", env=env, **SEND).returncode == 0
    assert read()[0] == before


@pytest.mark.long
def test_a_run_that_was_begun_anew_is_another_one(copied, tracker, run_train, client):
    env, read = tracker
    run, _ = copied
    assert run_train(run, "--to", "mlflow", env=env, **SEND).returncode == 0
    _, tracked = read()
    (run / "command.txt").write_text("# 2030-01-01 00:00:00 UTC, 1 processes\ntrain.py\n")
    assert run_train(run, "--to", "mlflow", env=env, **SEND).returncode == 0
    assert len(client.search_runs([tracked.info.experiment_id])) == 2


def test_what_is_not_finite_and_what_is_no_line_is_no_obstacle(copied, tracker, run_train):
    env, read = tracker
    run, lines = copied
    record = json.loads(lines[0]) | {"loss": None, "step": 99}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f"{json.dumps(record)}\n3\n{{}}\nno JSON\n")
    say_state(run, "failed")
    assert run_train(run, "--to", "mlflow", env=env, **SEND).returncode == 0
    points, tracked = read()
    [value] = [value for step, value in points["train/loss"] if step == 99]
    assert math.isnan(value) and tracked.info.status == "FAILED"


@pytest.mark.parametrize(("env", "code", "words"), [
    ({"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}, Exit.IO,
     "; the same command continues\n"),
    ({}, Exit.USAGE, "send: --to mlflow: No module named 'mlflow': pip install mlflow\n")])
def test_a_tracker_that_fails_is_named_in_words(env, code, words, finished, run_train, tmp_path):
    if not env:
        (tmp_path / "mlflow.py").write_text("raise ModuleNotFoundError(\"No module named 'mlflow'\")")
        env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    result = run_train(finished, "--to", "mlflow", env=env, **SEND)
    assert result.returncode == code and "Traceback" not in result.text, result.text
    assert result.err.splitlines(keepends=True)[-1].startswith("send: --to mlflow: ") and result.err.endswith(words)


def test_what_is_no_run_is_66_and_the_help_needs_no_tracker(run_train, tmp_path):
    result = run_train(tmp_path, "--to", "mlflow", real=True, **SEND)
    assert (result.returncode, result.err) == (
        Exit.NO_INPUT, f"send: {tmp_path} is not the directory of a run of train.py\n")
    assert run_train("--help", real=True, **SEND).out.startswith("usage: python -m ask.send ")


@pytest.mark.long
def test_a_run_that_is_about_to_go_on_is_followed(copied, tracker, start_torchrun):
    """Its command was started just before this one."""
    env, read = tracker
    run, lines = copied
    say_state(run, "stopped")
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))
    sending = start_torchrun(None, run, "--to", "mlflow", "--follow", env=env, **SEND)
    wait_until(lambda: read()[0] and read()[1].info.status == "KILLED")
    say_state(run, "running")
    wait_until(lambda: read()[1].info.status == "RUNNING")
    (run / "metrics.jsonl").write_bytes(b"".join(lines))
    say_state(run, "finished")
    assert sending.wait().returncode == 0
    assert read()[0] == expected(run) and read()[1].info.status == "FINISHED"
