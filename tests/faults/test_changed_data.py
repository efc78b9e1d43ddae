"""Data that are not what they were: a run names the sample and ends, before a step or an evaluation has used it."""

import csv
import json
import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.harness.launches import (
    EPOCHS,
    NUM_TRAIN,
    WORDS,
    HeldImage,
    assert_as_undisturbed,
    assert_failed,
    image_of,
    trained,
)
from tests.harness.run_directory import newest_checkpoint, outcome, records
from utils.errors import Exit
from utils.rundir.chain import digest_of

CHANGED = "is not what it was when this run used it: its name, label or bytes have changed; restore it"
TEXTS = ["--task", "text-classification", "--model", "bert-tiny", "--vocab-size", "200", "--max-length", "32",
         "--global-batch-size", "24", "--micro-batch-size", "4", "--epochs", "3", "--threads", "1"]


@pytest.fixture
def words(own_photos, run_dir):
    return [*WORDS, "--data", own_photos, "--run-dir", run_dir, "--workers", 0, "--save-every", 1000]


def overwrite(file):
    """Change one byte: of a file, or of an image's pixels; returns what makes it as it was."""
    data = file.read_bytes()
    if file.suffix == ".png":
        pixels = np.array(Image.open(file))
        pixels[5, 5, 0] ^= 1
        Image.fromarray(pixels).save(file)
    else:
        file.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
    return lambda: file.write_bytes(data)


def exchange(image):
    """Exchange the content of an image and of the one after it; returns what does it again."""
    other = sorted(image.parent.iterdir())[(sorted(image.parent.iterdir()).index(image) + 1)]
    one, two = image.read_bytes(), other.read_bytes()
    image.write_bytes(two)
    other.write_bytes(one)
    return lambda: exchange(image)


def as_table(root):
    """Two images a sample, in tables beside the folder; returns --data and its settings."""
    for split in ("train", "val"):
        paths = sorted((root / split).rglob("*.png"))
        with (root.parent / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["image", "mask", "label"], *(
                [os.path.relpath(each, root.parent) for each in (path, paths[number - 1])] + [path.parent.name]
                for number, path in enumerate(paths))])
    return ["--data", root.parent, "--image-column", "image,mask"]


KINDS = {"folder": lambda root: [], "cache": lambda root: ["--cache", "jpeg"], "table": as_table}


@pytest.mark.rows(2)
@pytest.mark.parametrize("kind, processes, change", [
    ("cache", 3, overwrite), ("table", 1, overwrite), ("folder", 3, exchange), ("folder", 1, overwrite),
    ("folder", 3, overwrite), ("cache", 1, exchange), ("table", 3, exchange)])
def test_an_image_that_changed_after_a_stop_is_named_at_the_start(
        words, own_photos, run_dir, start_torchrun, run_torchrun, kind, processes, change):
    """Before anything is trained, and also with --bad-samples skip. Restored, with other times, it continues."""
    words = [*words, *KINDS[kind](own_photos), "--bad-samples", "skip"]
    assert run_torchrun(processes, *words, "--stop-after", 4).code == Exit.STOPPED
    restore = change(image := image_of(own_photos, "train", 5))
    assert_failed(start_torchrun(processes, *words), run_dir, Exit.BAD_DATA,
                  f"{image if change is overwrite else image.parent}", CHANGED)  # of two exchanged ones, either
    assert newest_checkpoint(run_dir).name == "step-0000000004-g1"
    restore()
    result = run_torchrun(processes, *words)
    assert result.returncode == 0 and trained(run_dir) == [NUM_TRAIN] * EPOCHS, result.text


@pytest.mark.rows(2)
@pytest.mark.parametrize("processes, split, audit_every", [
    (3, "train", 1), (2, "val", 0), (1, "train", 0), (2, "train", 0), (1, "val", 0), (3, "val", 0)])
def test_an_image_that_changes_while_the_run_trains_ends_it_with_its_name(
        words, own_photos, run_dir, start_torchrun, run_torchrun, undisturbed, processes, split, audit_every):
    """Between the first epoch and the second, in the middle of the evaluation, which had read it already.

    Of several ranks another one reads that training image in the second epoch. An audit names no device for it.
    """
    words = [*words, "--audit-every", audit_every] if audit_every else words
    held = HeldImage(image_of(own_photos, "val", 60))
    live = start_torchrun(processes, *words)
    live.wait_for(held.is_wanted, "the evaluation of the first epoch")
    restore = overwrite(image := image_of(own_photos, split, 5))
    held.give()
    assert_failed(live, run_dir, Exit.BAD_DATA, f"{image} {CHANGED}")
    evaluated = [record["step"] for record in records(run_dir) if record["split"] == "val"]
    assert evaluated == [3]  # nothing is recorded of the second evaluation
    restore()
    result = run_torchrun(processes, *words)
    if processes == 2:
        assert_as_undisturbed(result, run_dir, undisturbed)
    assert result.returncode == 0, result.text


@pytest.mark.long
def test_a_sample_that_was_not_used_yet_may_change(words, own_photos, run_dir, run_torchrun):
    assert run_torchrun(2, *words, "--stop-after", 1).code == Exit.STOPPED
    used = set(torch.nonzero(noted(run_dir)["train"].any(dim=1)).flatten().tolist())
    assert len(used) == 24 and not noted(run_dir)["val"].any()
    exchange_of = next(index for index in range(16) if not {index, index + 1} & used)
    exchange(image_of(own_photos, "train", exchange_of))
    assert run_torchrun(3, *words).returncode == 0
    assert noted(run_dir)["train"].any(dim=1).all() and noted(run_dir)["val"].any(dim=1).all()


@pytest.mark.rows(1)
@pytest.mark.parametrize("kind, processes", [("folder", 3), ("cache", 1), ("table", 3), ("folder", 1)])
def test_a_moved_folder_with_other_times_is_the_same_data(words, own_photos, run_dir, run_torchrun, kind, processes):
    moved = run_dir.parent / "elsewhere" / "photos"
    more = KINDS[kind](own_photos)
    assert run_torchrun(processes, *words, *more, "--stop-after", 4).code == Exit.STOPPED
    before = noted(run_dir)
    shutil.copytree(own_photos, moved, copy_function=shutil.copyfile)  # with the times of now
    shutil.rmtree(own_photos)
    result = run_torchrun(processes, *words, "--data", moved, *KINDS[kind](moved))
    assert result.returncode == 0 and trained(run_dir) == [NUM_TRAIN] * EPOCHS, result.text
    assert torch.equal(noted(run_dir)["train"], before["train"]) and int(noted(run_dir)["since"]) == 0


def noted(run):
    """What the newest checkpoint says of the samples."""
    return load_file(newest_checkpoint(run) / "samples.safetensors")


@pytest.mark.rows(1)
@pytest.mark.parametrize("task, processes", [("text-classification", 3), ("masked-lm", 1)])
def test_tokens_in_the_cache_that_changed_are_named(texts, run_dir, run_torchrun, start_torchrun, task, processes):
    """Other texts are refused as another data set (78); these are what was made of them at the first start."""
    cache = run_dir.parent / "cache"
    words = [*TEXTS, "--task", task, "--data", texts, "--run-dir", run_dir, "--workers", 0]
    environment = {"LOCKSTEP_CACHE": str(cache)}
    assert run_torchrun(processes, *words, "--stop-after", 4, env=environment).code == Exit.STOPPED
    [ids] = cache.glob("texts-*/train.ids")
    restore = overwrite(ids)
    assert_failed(start_torchrun(processes, *words, env=environment), run_dir, Exit.BAD_DATA, "text ", CHANGED)
    restore()
    assert run_torchrun(processes, *words, env=environment).returncode == 0


@pytest.mark.long
def test_a_run_that_did_not_note_its_samples_is_bound_from_its_next_start(
        words, own_photos, run_dir, run_torchrun, start_torchrun):
    """As version 0.13 left it."""
    assert run_torchrun(2, *words, "--stop-after", 4).code == Exit.STOPPED
    (newest := newest_checkpoint(run_dir)).joinpath("samples.safetensors").unlink()
    manifest = json.loads((newest / "MANIFEST.json").read_text())
    del manifest["files"]["samples.safetensors"]
    manifest["sha256"] = digest_of(manifest, "sha256")
    (newest / "MANIFEST.json").write_text(json.dumps(manifest, indent=1))
    overwrite(image_of(own_photos, "train", 5))
    assert run_torchrun(2, *words, "--stop-after", 3).code == Exit.STOPPED
    table = noted(run_dir)
    assert int(table["since"]) == 4
    overwrite(image := image_of(own_photos, "train", int(table["train"].any(dim=1).nonzero()[0])))
    assert_failed(start_torchrun(2, *words), run_dir, Exit.BAD_DATA, f"{image} {CHANGED}")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_initial_weights_that_changed_are_refused(own_photos, run_dir, run_train, kind):
    """They are known by their content, not by their path. A file that is gone is in no way: checkpoints have them."""
    model = ["--model", "small-cnn", "--image-size", 32, "--max-steps", 2, "--threads", 1, "--data", own_photos]
    assert run_train(*model, "--run-dir", run_dir.parent / "first").returncode == 0
    weights = run_dir.parent / "first/model/model.safetensors"
    given = ["--weights", weights] if kind == "file" else ["--model", weights.parent]
    words = [*model, *given, "--max-steps", 4, "--run-dir", run_dir]
    assert run_train(*words, "--stop-after", 1).returncode == Exit.STOPPED
    before = outcome(run_dir)["contents"]
    restore = overwrite(weights)
    result = run_train(*words)
    assert result.returncode == Exit.OTHER_RUN, result.text
    assert f"what {given[1]} holds changed since {run_dir} was created" in result.err
    restore()
    assert run_train(*words).returncode == 0 and outcome(run_dir)["contents"][0] == before[0]
