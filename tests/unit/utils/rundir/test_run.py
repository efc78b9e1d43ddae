"""utils/rundir/run.py: the same command continues the same run, and no other one."""

import json
import os
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.unit.utils.conftest import config_of, refusal, start, status
from utils import __version__, files
from utils.errors import Exit, PeerError, UserError
from utils.rundir import run as run_module
from utils.rundir.lock import RunLock
from utils.rundir.run import Run, open_run, require_shared
from utils.rundir.state import Progress

pytestmark = pytest.mark.usefixtures("first_start_in_a_new_folder")


# --- what is kept


def test_config_yaml_holds_every_setting_but_those_of_one_start(world):
    start(world, "--run-dir=run", "--keep=7", "--fresh")
    kept = yaml.safe_load(Path("run/config.yaml").read_text())
    of_one_start = {"run_dir", "config", "fresh", "eval_only", "check", "split", "output", "nproc_per_node"}
    assert (kept["keep"], of_one_start & set(kept)) == (7, set())


@pytest.mark.parametrize("name", ["auto.json", "status.json", "config.yaml"])
def test_a_damaged_record_is_74_and_named_and_fresh_is_a_way_out(world, name):
    start(world, "--run-dir=run")
    Path("run", name).write_text("{")
    error = refusal(world, "--run-dir=run")
    assert (error.code, f"run/{name} is damaged" in str(error)) == (Exit.IO, True)
    assert "--fresh: the old run is in " in start(world, "--run-dir=run", "--fresh")[0]


def test_data_are_compared_by_fingerprint_and_not_by_path(world):
    with open_run(config_of("--run-dir=run", "--data=photos"), world, print) as run:
        run.require_same("data", "fingerprint", "the data set")
        run.keep_resolved()
    with open_run(config_of("--run-dir=run", "--data=moved"), world, print) as run:
        run.require_same("data", "fingerprint", "the data set")
        with pytest.raises(UserError, match="the data set changed since run was created") as refused:
            run.require_same("data", "another", "the data set")
    assert refused.value.code == Exit.OTHER_RUN


@pytest.mark.parametrize("code, is_blamed", [(None, False), ("of an earlier version", True)])
def test_other_data_after_a_change_of_the_program_may_be_its_doing(world, code, is_blamed):
    with open_run(config_of("--run-dir=run"), world, print) as run:
        run.require_same_data("fingerprint", world)
        run.keep(code=code or run.resolved.code)
        with pytest.raises(UserError) as refused:
            run.require_same_data("another", world)
    assert (refused.value.code, "this version of the program" in str(refused.value)) == (Exit.OTHER_RUN, is_blamed)


@pytest.mark.parametrize("what", ["processes", "devices_per_process"])
@pytest.mark.parametrize("strategy, is_noted", [("ddp", True), ("exact", False)])
def test_another_number_of_processes_or_devices_is_noted_unless_exact(world, what, strategy, is_noted):
    words = ("--run-dir=run", f"--strategy={strategy}")
    start(world, *words)
    file = Path("run", "status.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {what: 3}))
    found = [note.partition(": with")[0] for note in start(world, *words)]
    expected = {"processes": "3 processes before, 1 now", "devices_per_process": "devices per process: 3 before, 1 now"}
    assert found == [expected[what]] * is_noted


def test_a_program_that_changed_is_warned_of_once(world):
    start(world, "--run-dir=run")
    for name in ("auto.json", "status.json"):
        file = Path("run", name)
        file.write_text(json.dumps(json.loads(file.read_text()) | {"code": "as it was"}))
    notes = [start(world, "--run-dir=run"), start(world, "--run-dir=run")]
    assert [[note.partition(";")[0] for note in found] for found in notes] == [
        ["warning: the program changed since run was created"], []]


def test_an_evaluation_by_another_program_than_the_last_start_is_warned_of(world):
    start(world, "--run-dir=run")
    Path("run", "auto.json").write_text("{}")
    words = ["--run-dir=run", "--eval-only"]
    assert [note for note in start(world, *words) if "the program changed" in note] == []
    file = Path("run", "status.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"code": "as it was"}))
    assert [note.partition(";")[0] for note in start(world, *words)] == [
        "warning: the program changed since the last start of run"]


@pytest.mark.parametrize("kept", [
    {}, {"fast_convolutions": True}, {"fast_convolutions": True, "names_as_written": True}])
def test_a_run_of_an_older_version_is_refused_and_stays_as_it_is(world, kept):
    """Whatever its settings are; also if a later version continued it."""
    start(world, "--run-dir=run", "--lr=0.5")
    file = Path("run", "auto.json")
    file.write_text(json.dumps({"code": "old", "data": "hash", "lr": 0.1, "fast_dropout": True} | kept))
    before = {path.name: path.read_bytes() for path in Path("run").iterdir() if path.name != ".lock"}
    error = refusal(world, "--run-dir=run")
    assert error.code == Exit.OTHER_RUN and "a version before 0.10" in str(error) and "--fresh" in str(error)
    assert {path.name: path.read_bytes() for path in Path("run").iterdir() if path.name != ".lock"} == before


def test_a_run_of_version_0_10_or_later_goes_on(world):
    start(world, "--run-dir=run")
    Path("run", "auto.json").write_text(json.dumps({"code": "old", "data": "hash", "names_as_written": False}))
    start(world, "--run-dir=run")
    assert json.loads(Path("run", "status.json").read_text())["start"] == 2


@pytest.mark.parametrize("setting", ["--output=rows.csv", "--split=test"])
def test_what_is_for_eval_only_is_refused_without_it_and_leaves_nothing(world, setting):
    error, name = refusal(world, "--run-dir=run", setting), setting.partition("=")[0]
    assert (error.code, f"{name} is for --eval-only" in str(error), os.listdir()) == (Exit.USAGE, True, [])


# --- several nodes, whose file system remembers what was there


@pytest.mark.parametrize("before", [None, "of the run that --fresh moved away"])
def test_a_node_looks_again_until_it_sees_what_rank_0_wrote(world, monkeypatch, capsys, before):
    looks = iter(["new", *[before] * 100, "new"])  # the first is rank 0's
    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=iter(range(10**6)).__next__, sleep=lambda s: None))
    monkeypatch.setattr(files, "CACHED_S", 10**6)
    assert require_shared(Path("run"), looks.__next__, world) == "new"
    assert list(looks) == [] and capsys.readouterr().err.count("does not see") == 1


def test_a_run_directory_that_is_not_shared_is_74_and_leaves_nothing(world, monkeypatch):
    monkeypatch.setattr(run_module, "wait_to_see", lambda is_seen, path: False)
    error = refusal(world, "--run-dir=run")
    assert (error.code, "run directory must be shared" in str(error), os.listdir()) == (Exit.IO, True, [])


# --- auto


def resolved_in(kept, given, derived="derived"):
    notes = []
    run = Run(Path("run"), kept, {"start": 1, "cores_per_process": 1}, notes.append, lock=None)
    return run.resolve("threads", given, lambda: derived), run.resolved.threads, len(notes)


@pytest.mark.parametrize("kept, given, expected", [
    ({}, "auto", ("derived", "derived", 0)), ({"threads": 4}, "auto", (4, 4, 0)), ({}, 2, (2, 2, 0)),
    ({"threads": 2}, 2, (2, 2, 0)), ({"threads": 4}, 2, (2, 2, 1))])
def test_auto_is_resolved_once_and_another_value_is_taken_with_a_note(kept, given, expected):
    assert resolved_in(kept, given) == expected


def test_what_auto_became_is_kept_for_the_next_start(world):
    with open_run(config_of("--run-dir=run"), world, print) as run:
        run.resolve("threads", "auto", lambda: 3)
        run.keep_resolved()
    with open_run(config_of("--run-dir=run"), world, print) as run:
        assert run.resolve("threads", "auto", lambda: 5) == 3


# --- --fresh


def test_fresh_moves_the_old_run_aside_and_deletes_nothing(world):
    start(world, "--run-dir=runs/run")
    Path("runs/run/treasure").write_text("gold")
    start(world, "--run-dir=runs/run", "--fresh")
    [old] = Path("runs/.old").iterdir()
    assert ((old / "treasure").read_text(), Path("runs/run/treasure").exists(), old.name[:4]) == ("gold", False, "run-")


def test_fresh_leaves_a_link_to_a_run_and_the_old_run_on_its_disk(world):
    Path("scratch/first").mkdir(parents=True)
    Path("runs").mkdir()
    Path("runs/run").symlink_to("../scratch/first")
    start(world, "--run-dir=runs/run")
    Path("runs/run/treasure").write_text("gold")
    [note] = start(world, "--run-dir=runs/run", "--fresh")
    [old] = Path("scratch/.old").iterdir()
    assert ((old / "treasure").read_text(), str(old.resolve()) in note) == ("gold", True)
    assert (os.readlink("runs/run"), Path("scratch/first/treasure").exists(), Path("runs/.old").exists()) == (
        "../scratch/first", False, False)


def test_fresh_takes_other_settings_and_counts_its_starts_anew(world):
    start(world, "--run-dir=run")
    start(world, "--run-dir=run")
    start(world, "--run-dir=run", "--fresh", "--lr=0.3")
    assert status()["start"] == 1


def test_fresh_in_a_new_folder_moves_nothing(world):
    assert start(world, "--run-dir=run", "--fresh") == []


# --- --eval-only


def test_eval_only_with_another_defining_value_is_78(world):
    start(world, "--run-dir=run")
    assert refusal(world, "--run-dir=run", "--eval-only", "--image-size=99").code == Exit.OTHER_RUN


# --- status and records


def test_status_counts_the_starts_and_names_the_process(world):
    start(world, "--run-dir=run")
    start(world, "--run-dir=run")
    found = {name: status()[name] for name in ("state", "start", "processes", "pid", "exit_code")}
    assert found == {"state": "running", "start": 2, "processes": 1, "pid": os.getpid(), "exit_code": None}


@pytest.mark.parametrize("error, code", [
    (UserError("no", Exit.BAD_DATA), 65), (RuntimeError("a bug"), 70), (OSError(28, "full"), 74)])
def test_an_error_is_a_failed_status_with_its_code(world, error, code):
    start(world, "--run-dir=run")
    with pytest.raises(type(error)), open_run(config_of("--run-dir=run"), world, print):
        raise error
    assert (status()["state"], status()["exit_code"]) == ("failed", code)


def test_a_stop_by_another_rank_is_a_stopped_status(world):
    start(world, "--run-dir=run")
    with pytest.raises(PeerError), open_run(config_of("--run-dir=run"), world, print):
        raise PeerError("rank 1: stopped (SIGTERM); there was nothing to save", Exit.STOPPED)
    assert (status()["state"], status()["exit_code"]) == ("stopped", 75)


def fail(world, *words, steps=0, evaluated=False):
    """A start that fails after so many steps; evaluated: the beginning."""
    with pytest.raises(UserError), open_run(config_of(*words), world, print) as run:
        run.replace_folder("tokenizer", lambda folder: (folder / "words").write_text("a b c"))
        run.follow(SimpleNamespace(progress=Progress(step=steps), best={"step": 0} if evaluated else {}))
        run.keep_resolved()
        raise UserError("no such model")


def names_below(folder):
    return sorted(str(path) for path in Path(folder).rglob("*"))


@pytest.mark.parametrize("fresh", [(), ("--fresh",)])
def test_a_start_that_fails_before_a_step_leaves_no_new_folder(world, fresh):
    Path("there").mkdir()
    fail(world, "--run-dir=there/a/run", *fresh)
    assert names_below(".") == ["there"]


def test_a_start_that_fails_before_a_step_leaves_an_empty_folder_empty(world):
    Path("run").mkdir()
    fail(world, "--run-dir=run")
    assert names_below(".") == ["run"]


def test_a_start_that_fails_before_a_step_leaves_a_run_in_its_place(world):
    start(world, "--run-dir=run")
    before = {name: Path(name).read_bytes() for name in names_below("run") if Path(name).name != ".lock"}
    fail(world, "--run-dir=run", "--fresh", "--lr=0.3")
    after = {name: Path(name).read_bytes() for name in names_below("run") if Path(name).name != ".lock"}
    fail(world, "--run-dir=run")
    assert (after, names_below(".")[:1], status()["state"]) == (before, ["run"], "failed")


def test_a_run_whose_beginning_is_evaluated_stays(world):
    fail(world, "--run-dir=run", evaluated=True)
    assert status()["state"] == "failed"


def test_a_start_that_fails_before_a_step_leaves_what_others_put_there(world):
    with pytest.raises(UserError), open_run(config_of("--run-dir=a/run"), world, print):
        Path("a/notes").write_text("mine")
        raise UserError("no such model")
    assert names_below("a") == ["a/notes"]


def test_a_start_that_fails_after_a_step_leaves_its_run(world):
    fail(world, "--run-dir=run", steps=1)
    assert (status()["state"], status()["step"]) == ("failed", 1)


def test_a_second_start_waits_while_the_first_removes_its_folder(world, monkeypatch):
    """It may come between the folder and its lock."""
    unlink = Path.unlink
    others = []

    def slow(path, missing_ok=False):
        unlink(path, missing_ok=missing_ok)
        if path.name == ".lock" and not others:
            others.append(RunLock())
            others[0].acquire(path.parent)

    monkeypatch.setattr(Path, "unlink", slow)
    fail(world, "--run-dir=run")
    assert (others[0].is_held, names_below("run")) == (True, ["run/.lock"])


def test_a_status_that_was_written_stays_after_closing(world):
    with open_run(config_of("--run-dir=run"), world, print) as run:
        run.follow(SimpleNamespace(progress=Progress(step=7, epoch=1)))
        run.status("stopped", Exit.STOPPED, "SIGTERM")
    assert {name: status()[name] for name in ("state", "exit_code", "step", "epoch", "message")} == {
        "state": "stopped", "exit_code": 75, "step": 7, "epoch": 1, "message": "SIGTERM"}


def test_each_start_adds_its_command(world, monkeypatch):
    commands = [["train.py", "--run-dir=run"], ["train.py", "--run-dir=run", "--workers", "1 "]]
    for words in commands:
        monkeypatch.setattr(sys, "argv", words)
        start(world, "--run-dir=run")
    lines = Path("run/command.txt").read_text().splitlines()
    assert [shlex.split(line) for line in lines if line[0] != "#"] == commands


def test_paths_that_are_not_utf_8_are_no_error(world, monkeypatch):
    """As Python has them: bytes that are no text are halves of surrogate pairs."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", "caf\udce9"])
    monkeypatch.setenv("LOCKSTEP_CACHE", "caf\udce9")
    start(world, "--run-dir=run", "--data=caf\udce9")
    assert shlex.split(Path("run/command.txt").read_text().splitlines()[1])[2] == r"caf\udce9"
    assert r"LOCKSTEP_CACHE=caf\udce9" in Path("run/env.txt").read_text().splitlines()
    assert start(world, "--run-dir=run", "--data=caf\udce9") == []
    assert yaml.safe_load(Path("run/config.yaml").read_text())["data"].endswith("/caf\udce9")


def test_secrets_in_the_environment_are_not_written(world, monkeypatch):
    secrets = ("LOCKSTEP_TOKEN", "SLURM_JWT_KEY", "NCCL_SECRET", "TORCH_PASSWORD")
    for name in (*secrets, "NCCL_ALGO", "HOME_OF_SECRETS"):
        monkeypatch.setenv(name, f"value-of-{name}")
    start(world, "--run-dir=run")
    text = Path("run/env.txt").read_text()
    found = [name for name in (*secrets, "NCCL_ALGO", "HOME_OF_SECRETS") if f"value-of-{name}" in text]
    assert (found, [name for name in secrets if f"{name}=(redacted)" not in text]) == (["NCCL_ALGO"], [])


def test_versions_are_written(world):
    import torch

    start(world, "--run-dir=run")
    lines = Path("run/env.txt").read_text().splitlines()
    assert {f"lockstep {__version__}", f"torch {torch.__version__.split('+')[0]}"} <= set(lines)
    assert status()["version"] == __version__


def test_a_run_dir_that_cannot_be_made_is_73(world):
    Path("file").write_text("in the way")
    assert refusal(world, "--run-dir=file/run").code == Exit.CANNOT_CREATE


def test_a_folder_is_replaced_whole_or_not_at_all(world):
    def broken(folder):
        (folder / "weights").write_text("half")
        raise RuntimeError

    with open_run(config_of("--run-dir=run"), world, print) as run:
        run.replace_folder("model", lambda folder: (folder / "weights").write_text("first"))
        with pytest.raises(RuntimeError):
            run.replace_folder("model", broken)
        first = (run.path / "model" / "weights").read_text()
        run.replace_folder("model", lambda folder: (folder / "weights").write_text("second"))
    names = [path.name for path in Path("run").iterdir() if "model" in path.name]
    assert (first, Path("run/model/weights").read_text(), names) == ("first", "second", ["model"])


def test_a_folder_is_on_the_disk_before_it_takes_the_place_of_the_old_one(world, monkeypatch):
    def write(folder):
        (folder / "vocabulary").mkdir()
        (folder / "vocabulary" / "words").write_text("a b c")
        (folder / "weights").write_text("1 2 3")

    events, sync, rename = [], files.sync, os.rename
    monkeypatch.setattr(files, "sync", lambda path: (events.append(f"sync {path}"), sync(path)))
    monkeypatch.setattr(os, "rename", lambda old, new: (events.append(f"rename {old} {new}"), rename(old, new)))
    with open_run(config_of("--run-dir=run"), world, print) as run:
        run.replace_folder("model", write)
    *synced, renamed, last = events
    parts = ("", "/vocabulary", "/vocabulary/words", "/weights")
    assert (sorted(synced), renamed, last) == (
        [f"sync run/.tmp-model{part}" for part in parts], "rename run/.tmp-model run/model", "sync run")


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_the_umask_says_who_may_read_a_run_also_after_fresh(world, umask):
    """A colleague, or a container with TensorBoard. The environment is its owner's alone."""
    before = os.umask(umask)
    try:
        for words in ([], ["--fresh"]):
            start(world, "--run-dir=run", *words)
            modes = {name: Path("run", name).stat().st_mode & 0o777 for name in (".", "config.yaml", "env.txt")}
            assert modes == {".": 0o777 & ~umask, "config.yaml": 0o666 & ~umask, "env.txt": 0o600}
    finally:
        os.umask(before)
