"""A real TensorBoard server shows a run."""

import json
import socket
import urllib.parse
import urllib.request

import pytest

from tests.harness.run_directory import records

START_S = 60


@pytest.fixture(scope="module")
def ask(demo_run, launch):
    """ask(path, **query): the server's answer to a GET, after it has read the run.

    The command is that of the run's closing lines.
    """
    run, _ = demo_run
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = launch(None, "tensorboard.main", "--logdir", run, "--port", port, "--host", "127.0.0.1",
                    "--load_fast=false", script="-m")

    def get(path: str, **query: object) -> bytes:
        words = urllib.parse.urlencode(query)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/plugin/{path}?{words}", timeout=START_S) as answer:
            return answer.read()

    def is_ready() -> bool:
        try:
            return bool(json.loads(get("scalars/tags")))
        except OSError:
            return False

    server.wait_for(is_ready, "TensorBoard has read the run", START_S)
    yield get
    server.kill_all()


@pytest.mark.parametrize(("split", "name", "tag"), [
    ("train", "loss", "train/loss"), ("train", "grad_norm", "train/grad_norm"), ("train", "lr", "train/lr"),
    ("val", "loss", "val/loss"), ("val", "top1", "val/top1"),
])
def test_a_chart_shows_the_records_over_optimizer_steps(ask, demo_run, split, name, tag):
    points = json.loads(ask("scalars/scalars", run="tb", tag=tag))  # [wall time, step, value as float32]
    expected = [(record["step"], record[name]) for record in records(demo_run[0]) if record["split"] == split]
    assert len(expected) > 1
    assert [step for _, step, _ in points] == [step for step, _ in expected]
    assert [value for _, _, value in points] == pytest.approx([value for _, value in expected], rel=1e-6)


def test_every_tag_is_grouped_by_concern_and_loss_and_metrics_come_first(ask):
    """TensorBoard sorts the groups by name."""
    [tags] = json.loads(ask("scalars/tags")).values()
    assert sorted({tag.partition("/")[0] for tag in tags}) == [
        "train", "val", "wall", "wall_of_epoch"]


def test_the_table_of_hparams_has_the_settings_as_resolved_and_the_metrics(ask, demo_run):
    query = {"colParams": [], "startIndex": 0, "sliceSize": 9, "allowedStatuses": ["STATUS_UNKNOWN", "STATUS_RUNNING"]}
    [group] = json.loads(ask("hparams/session_groups", request=json.dumps(query)))["sessionGroups"]
    resolved = json.loads((demo_run[0] / "auto.json").read_text())
    hparams, last = group["hparams"], [record for record in records(demo_run[0]) if record["split"] == "val"][-1]
    assert (hparams["lr"], hparams["precision"], hparams["optimizer"]) == (
        resolved["lr"], resolved["precision"], "adamw")
    values = {value["name"]["tag"]: value["value"] for value in group["metricValues"]}
    assert values["val/top1"] == pytest.approx(last["top1"])
    assert set(values) == {"val/loss", "val/top1", "train/loss"}


def test_the_settings_are_a_text(ask, demo_run):
    [text] = json.loads(ask("text/text", run="tb", tag="settings/text_summary"))
    assert "optimizer: adamw" in text["text"] and "image_size: 32" in text["text"]
