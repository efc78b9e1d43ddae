"""utils/rundir/checkpoint.py: each checkpoint has a link of the run's chain, in its manifest and in chain.jsonl."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch

from tests.harness.run_directory import begins_with
from tests.unit.utils.rundir.conftest import build_state, flip, names_in, save, train_step
from utils.errors import Exit, UserError
from utils.rundir.chain import FILE, NO_RECORDS, content_hash, digest_of, read_lines, valid_links
from utils.rundir.checkpoint_folder import CheckpointFolder
from utils.rundir.snapshot import Beside


@pytest.fixture
def start(world, checkpoints_of, folder):
    """start(number) -> the state and checkpoints of that start of the run."""
    def begin(number=1):
        folder.parent.mkdir(exist_ok=True)
        state, (checkpoints, _) = build_state(world), checkpoints_of(start=number)
        checkpoints.restore(state)
        checkpoints.follow(state, 9)
        return state, checkpoints
    return begin


def train(state, checkpoints, steps=1):
    """Steps that are saved one by one; the same ones in every start."""
    for _ in range(steps):
        torch.manual_seed(state.progress.step)
        train_step(state)
        save(checkpoints, state)


def links_of(run):
    return {link["step"]: link for link in valid_links(read_lines(run))}


def test_the_initial_weights_have_a_link_before_the_first_step(start, folder):
    state, _ = start()
    [link] = read_lines(folder.parent)
    assert (link["step"], link["start"], link["previous"]) == (0, 1, "")
    assert link["metrics"] == {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    assert link["content"] == content_hash(
        state.weights(), state.state_dict(), {"progress": {"epoch": 0, "sample_offset": 0, "step": 0,
                                                           "evaluated_step": 0, "skipped": 0}, "best": {}})


def test_a_manifest_and_the_file_hold_the_same_link(start, folder):
    train(*start(), steps=3)
    manifests = CheckpointFolder(folder, 3, print).links()
    assert manifests == [links_of(folder.parent)[step] for step in (3, 2, 1)]


def test_a_link_is_of_the_records_as_they_were_when_the_save_began(start, folder):
    state, checkpoints = start()
    metrics = folder.parent / "metrics.jsonl"
    metrics.write_text("as it was\n")

    def write_more(weights):
        metrics.write_text("as it was\nmore\n")

    train_step(state)
    save(checkpoints, state, write_more, records=begins_with(metrics, 10))
    assert links_of(folder.parent)[1]["metrics"] == {
        "bytes": 10, "sha256": hashlib.sha256(b"as it was\n").hexdigest()}


def test_a_link_names_the_files_of_the_model_if_that_is_this_steps(start, folder):
    state, checkpoints = start()

    def export(weights):
        (folder.parent / "model").mkdir(exist_ok=True)
        (folder.parent / "model" / "weights").write_text("abc")

    train_step(state)
    state.best = {"step": 1, "metric": "top1", "value": 0.5}
    save(checkpoints, state, export, has_model=True)
    train(state, checkpoints)
    first, second = (links_of(folder.parent)[step] for step in (1, 2))
    assert (first["model"], "model" in second) == ({"weights": hashlib.sha256(b"abc").hexdigest()}, False)


def test_a_kill_between_a_checkpoints_name_and_its_line_loses_no_link(start, folder):
    train(*start(), steps=3)
    path = folder.parent / FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:whole.rindex(b"\n", 0, -1) + 20])
    start(2)
    assert path.read_bytes().splitlines()[-1] == whole.splitlines()[-1]


def test_a_damaged_checkpoints_links_are_abandoned_and_repeated_alike(start, folder):
    train(*start(), steps=4)
    before = links_of(folder.parent)
    for step in (3, 4):
        flip(folder / f"step-{step:010d}-g1" / "state.pt", 100)
    state, checkpoints = start(2)
    assert (state.progress.step, sorted(links_of(folder.parent))) == (2, [0, 1, 2])
    train(state, checkpoints, 2)
    after = links_of(folder.parent)
    assert {step: link["content"] for step, link in after.items()} == {
        step: link["content"] for step, link in before.items()}
    assert [after[step]["start"] for step in sorted(after)] == [1, 1, 1, 2, 2]
    assert after[3]["previous"] == before[2]["link"]


@pytest.mark.parametrize("damage", ["{", "[]", "{}", None])
def test_an_older_checkpoint_with_a_damaged_manifest_stops_no_start(start, folder, damage):
    train(*start(), steps=3)
    manifest = folder / "step-0000000002-g1" / "MANIFEST.json"
    manifest.unlink() if damage is None else manifest.write_text(damage)
    state, _ = start(2)
    assert (state.progress.step, sorted(links_of(folder.parent))) == (3, [0, 1, 2, 3])


def test_checkpoints_of_a_version_without_links_are_continued(start, folder):
    train(*start(), steps=2)
    (folder.parent / FILE).unlink()
    for name in names_in(folder):
        path = folder / name / "MANIFEST.json"
        manifest = {key: value for key, value in json.loads(path.read_text()).items() if key not in ("link", "sha256")}
        path.write_text(json.dumps(manifest | {"sha256": digest_of(manifest, "sha256")}, indent=1))
    state, checkpoints = start(2)
    assert state.progress.step == 2 and not (folder.parent / FILE).exists()
    train(state, checkpoints)
    assert {step: link["previous"] for step, link in links_of(folder.parent).items()} == {3: ""}


def test_a_start_again_before_the_first_checkpoint_begins_the_chain_again(start, folder):
    start()
    train(*start(2))
    links = links_of(folder.parent)
    assert {step: link["start"] for step, link in links.items()} == {0: 2, 1: 2}
    assert links[1]["previous"] == links[0]["link"]


def test_a_copy_before_an_evaluation_has_its_link_in_its_manifest_alone(start, folder):
    state, checkpoints = start()
    train_step(state)
    checkpoints.save(state, Beside(NO_RECORDS), awaits_evaluation=True)
    state.progress = replace(state.progress, evaluated_step=1)
    save(checkpoints, state)
    lines, manifests = read_lines(folder.parent), CheckpointFolder(folder, 3, print).links()
    assert [(line["step"], line["awaits_evaluation"]) for line in lines] == [(0, False), (1, False)]
    assert [(link["awaits_evaluation"], link["previous"]) for link in manifests] == [
        (False, lines[0]["link"]), (True, lines[0]["link"])]
    assert links_of(folder.parent)[1] == lines[1] == manifests[0]


def test_a_save_without_its_line_fails_and_the_next_start_adds_the_line(start, folder):
    state, checkpoints = start()
    (folder.parent / FILE).rename(folder.parent / "kept")
    (folder.parent / FILE).mkdir()
    with pytest.raises(UserError, match="Is a directory") as raised:
        train(state, checkpoints)
    (folder.parent / FILE).rmdir()
    (folder.parent / "kept").rename(folder.parent / FILE)
    start(2)
    assert (raised.value.code, [*links_of(folder.parent)]) == (Exit.IO, [0, 1])
