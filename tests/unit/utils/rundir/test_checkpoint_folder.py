"""utils/rundir/checkpoint_folder.py: the files of checkpoints: damage is found, and enough valid ones are kept."""

import hashlib
import json
import struct

import pytest
from torch import nn

from tests.unit.utils.rundir.conftest import FILES, build_net, build_state, flip, names_in, save, train_step
from utils.errors import Exit, UserError
from utils.rundir.checkpoint_folder import CHUNK, find_damage
from utils.rundir.state import Progress

# --- format


def test_the_bytes_of_the_weights_are_a_pure_function_of_the_weights(world, checkpoints_of, folder):
    state, (checkpoints, _) = build_state(world), checkpoints_of()
    train_step(state)
    save(checkpoints, state)
    model = build_net()
    model.load_state_dict(state.strategy.module.state_dict())
    other = build_state(world, "adamw", model)  # contiguous weights, another optimizer, another step
    other.progress = Progress(step=2)
    save(checkpoints_of(start=2)[0], other)
    files = [(folder / name / "model.safetensors").read_bytes() for name in names_in(folder)]
    assert len(files) == 2 and files[0] == files[1]


def test_the_header_of_the_weights_holds_no_more_than_their_format(saved):
    data = (saved[0] / "model.safetensors").read_bytes()
    [length] = struct.unpack("<Q", data[:8])
    assert json.loads(data[8:8 + length])["__metadata__"] == {"format": "pt"}


def test_a_checkpoint_holds_its_five_files_and_nothing_else(saved):
    found = {name: names_in(saved[0].parent / name) for name in names_in(saved[0].parent)}
    assert found == {path.name: sorted(FILES) for path in saved}


# --- damage


@pytest.mark.parametrize("file", FILES)
def test_any_flipped_byte_is_found(saved, file):
    path = saved[0] / file
    size = path.stat().st_size
    step = 1 if file == "MANIFEST.json" else 997
    missed = []
    for place in {*range(0, size, step), size - 1}:
        flip(path, place)
        if find_damage(saved[0]) is None:
            missed.append(place)
        flip(path, place)
    assert (missed, find_damage(saved[0])) == ([], None)


@pytest.mark.parametrize("mask", [0x02, 0x20, 0x80, 0xFF])
def test_other_flips_of_the_manifest_are_found(saved, mask):
    path, missed = saved[0] / "MANIFEST.json", []
    for place in range(path.stat().st_size):
        flip(path, place, mask)
        if find_damage(saved[0]) is None:
            missed.append(place)
        flip(path, place, mask)
    assert missed == []


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["truncate", "empty", "grow", "remove"])
def test_a_file_that_lost_or_gained_bytes_is_found(saved, file, damage):
    path = saved[0] / file
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes({"truncate": data[:-1], "empty": b"", "grow": data + b"x"}[damage])
    assert find_damage(saved[0]) is not None


def test_a_file_larger_than_a_chunk_is_hashed_to_its_end(world, checkpoints_of, folder):
    state = build_state(world, model=nn.Linear(CHUNK // 4 // 1000, 1001))
    state.progress = Progress(step=1)
    save(checkpoints_of()[0], state)
    [path] = folder.iterdir()
    chunks = json.loads((path / "MANIFEST.json").read_text())["files"]["model.safetensors"]["sha256"]
    flip(path / "model.safetensors", -1)
    assert (len(chunks), find_damage(path)) == (2, "model.safetensors: checksum differs")


def test_the_newest_valid_one_is_loaded_and_the_damaged_one_renamed(world, checkpoints_of, saved, folder):
    flip(saved[2] / "state.pt", 100)
    state, (checkpoints, notes) = build_state(world), checkpoints_of(start=2)
    checkpoints.restore(state)
    expected = [f"damaged-{saved[2].name}", saved[0].name, saved[1].name]
    assert (state.progress.step, names_in(folder), len(notes)) == (2, expected, 1)
    assert "state.pt: checksum differs" in notes[0] and "to repeat 1 step" in notes[0]


def test_a_run_that_fell_back_saves_the_same_step_again(world, checkpoints_of, saved, folder):
    flip(saved[2] / "state.pt", 100)
    state, (checkpoints, _) = build_state(world), checkpoints_of(start=2)
    checkpoints.restore(state)
    train_step(state)
    save(checkpoints, state)
    assert checkpoints_of(start=3)[0].restore(build_state(world)) and "step-0000000003-g2" in names_in(folder)


def test_of_two_starts_at_the_same_step_the_later_one_is_loaded(world, checkpoints_of, saved):
    state, (first, _), (later, _) = build_state(world), checkpoints_of(start=9), checkpoints_of(start=10)
    train_step(state)
    for checkpoints, value in ((first, 0.1), (later, 0.2)):
        state.progress, state.best = Progress(step=7), {"step": 7, "metric": "top1", "value": value}
        save(checkpoints, state)
    other = build_state(world)
    checkpoints_of(start=11)[0].restore(other)
    assert other.best["value"] == 0.2


def test_if_all_are_damaged_82_says_so_and_nothing_is_deleted(world, checkpoints_of, saved, folder):
    for path in saved:
        flip(path / "model.safetensors", -1)
    codes = []
    for _ in range(2):  # a second start must not start over either
        with pytest.raises(UserError) as refused:
            checkpoints_of(start=2)[0].restore(build_state(world))
        codes.append(refused.value.code)
    assert (codes, names_in(folder)) == ([Exit.NO_CHECKPOINT] * 2, [f"damaged-{path.name}" for path in saved])


def test_what_was_not_finished_is_removed(world, checkpoints_of, saved, folder):
    for name in (".tmp-step-0000000004-g1", ".tmp-removed-step-0000000000-g1"):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_text("half")
    state = build_state(world)
    checkpoints_of(start=2)[0].restore(state)
    assert (state.progress.step, names_in(folder)) == (3, [path.name for path in saved])


def test_a_checkpoint_of_a_newer_program_is_78_and_stays(world, checkpoints_of, saved, folder):
    manifest = json.loads((saved[2] / "MANIFEST.json").read_text()) | {"format": 2}
    del manifest["sha256"]
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (saved[2] / "MANIFEST.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError) as refused:
        checkpoints_of(start=2)[0].restore(build_state(world))
    assert (refused.value.code, names_in(folder)) == (Exit.OTHER_RUN, [path.name for path in saved])


def test_each_damaged_one_is_named_with_the_steps_to_be_repeated(world, checkpoints_of, saved, folder):
    flip(saved[2] / "state.pt", 100)
    (saved[1] / "trainer.json").unlink()
    (state, (checkpoints, notes)) = build_state(world), checkpoints_of(start=2)
    checkpoints.restore(state)
    missing = f"FileNotFoundError: [Errno 2] No such file or directory: '{saved[1] / 'trainer.json'}'"
    assert (state.progress.step, notes) == (1, [
        f"checkpoint {path.name} is damaged ({problem}) and was renamed to damaged-{path.name}; using {saved[0].name},"
        f" to repeat {steps} step{'s' * (steps > 1)}"
        for path, problem, steps in ((saved[2], "state.pt: checksum differs", 2), (saved[1], missing, 1))])


@pytest.mark.parametrize("model", [build_net(channels=3), nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Linear(2, 2)])
def test_a_checkpoint_of_another_model_is_78(world, checkpoints_of, saved, model):
    with pytest.raises(UserError, match=r"holds another model: .*models/own\.py") as refused:
        checkpoints_of(start=2)[0].restore(build_state(world, model=model))
    assert refused.value.code == Exit.OTHER_RUN
