"""utils/run.py: the same command continues the same run, and no other one."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import yaml

from utils import run as run_module
from utils.checkpoint import Progress
from utils.command_line import parse_command_line
from utils.config import OPERATIONAL, kinds, settings
from utils.errors import Exit, PeerError, UserError, begin_start, record_exit
from utils.run import Run, acts_fresh, cache_path, early_device, finish_early, open_run, run_path, write_atomically

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _first_start_in_a_new_folder(tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_module, "LOCK_WAIT_S", 0.2)


def config_of(*words):
    return parse_command_line(words, {})[0]


def start(world, *words):
    """One start of a run, opened and left; returns what the user was told."""
    notes = []
    with open_run(config_of(*words), world, notes.append) as run:
        run.keep_settled()
    return notes


def refusal(world, *words):
    with pytest.raises(UserError) as refused:
        start(world, *words)
    return refused.value


def status():
    return json.loads(Path("run/status.json").read_text())


def changed(config, name):
    """The config with another value of setting `name`."""
    for part in fields(config):
        group = getattr(config, part.name)
        if is_dataclass(group) and hasattr(group, name):
            value = getattr(group, name)
            if isinstance(value, bool):
                other = not value
            elif isinstance(value, int | float):
                other = value + 1
            elif isinstance(value, tuple):
                other = tuple(number / 2 for number in value)
            else:
                other = {"model": "resnet50", "data": "photos", "weights": "file.pth"}.get(name, "1")
            return replace(config, **{part.name: replace(group, **{name: other})})
    raise AssertionError(name)


# --- name


def test_a_runs_name_says_task_model_and_data_and_ends_in_a_hash():
    path = run_path(config_of("--data=/srv/my photos!", "--model=resnet50"))
    assert re.fullmatch(r"runs/image-classification-resnet50-my-photos--[0-9a-f]{8}", str(path))


def test_defining_and_tolerated_settings_change_the_hash_and_operational_ones_do_not():
    config = config_of()
    names = set(settings(config)) - {"run_dir"}  # which is the name
    found = {name for name in names if run_path(changed(config, name)).name[-8:] != run_path(config).name[-8:]}
    assert found == {name for name in names if kinds(config)[name] != OPERATIONAL}


@pytest.mark.parametrize("flag, path", [("data", "photos"), ("model", "old/model"), ("weights", "file.pth")])
def test_a_relative_and_an_absolute_path_are_one_run(tmp_path, flag, path):
    (tmp_path / path).mkdir(parents=True)  # a name with a slash that is no path is a library's
    assert run_path(config_of(f"--{flag}={path}")) == run_path(config_of(f"--{flag}={tmp_path / path}"))


def test_a_path_seen_from_another_folder_is_another_run(tmp_path, monkeypatch):
    here = run_path(config_of("--data=photos"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert run_path(config_of("--data=photos")) != here


def test_a_given_run_dir_is_the_run_dir():
    assert run_path(config_of("--run-dir=here/there")) == Path("here/there")


def test_the_hash_does_not_depend_on_the_process():
    program = ("from utils.command_line import parse_command_line; from utils.run import run_path\n"
               "print(run_path(parse_command_line(['--data=/x'], {})[0]))")
    other = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert other == str(run_path(config_of("--data=/x")))


# --- settings


@pytest.mark.parametrize("words", [
    (), ("--data=photos", "--weights=file.pth", "--max-steps=7", "--mean", "0.1", "0.2", "0.3", "--lr=1e-05", "--pretrained", "--seed=3"),
    ("--micro-batch-size=8", "--precision=fp16", "--warmup-steps=4", "--eval-every=5", "--save-every=5min", "--threads=2")])
def test_config_yaml_gives_the_same_run_again_by_config(world, tmp_path, monkeypatch, words):
    start(world, *words)
    path = run_path(config_of(*words))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")  # paths in it are absolute
    assert run_path(config_of(f"--config={tmp_path / path / 'config.yaml'}")) == path


def test_config_yaml_holds_operational_settings_too_but_not_how_this_start_ran(world):
    start(world, "--run-dir=run", "--keep=7", "--fresh")
    kept = yaml.safe_load(Path("run/config.yaml").read_text())
    assert (kept["keep"], {"run_dir", "config", "fresh", "eval_only", "split", "nproc_per_node"} & set(kept)) == (7, set())


@pytest.mark.parametrize("first, then, message", [
    (["--lr=1e-05"], ["--lr=0.3"], "lr is 1e-05 there and 0.3 here"),
    (["--epochs=3"], ["--epochs=4"], "epochs is 3 there and 4 here"),
    ([], ["--max-steps=4"], "max_steps is None there and 4 here"),
    (["--max-steps=4"], [], "max_steps is 4 there and None here"),
    ([], ["--mean", "0.1", "0.2", "0.3"], "mean is [0.485, 0.456, 0.406] there and [0.1, 0.2, 0.3] here"),
    ([], ["--pretrained"], "pretrained is False there and True here")])
def test_another_defining_value_in_a_given_run_dir_is_78_with_the_key_and_both_values(world, first, then, message):
    start(world, "--run-dir=run", *first)
    error = refusal(world, "--run-dir=run", *then)
    assert (error.code, message in str(error)) == (Exit.OTHER_RUN, True)


def test_the_refusal_of_another_end_says_how_to_train_past_it(world):
    start(world, "--run-dir=run")
    assert "--model RUN/model --pretrained" in str(refusal(world, "--run-dir=run", "--epochs=40"))


def test_a_refused_start_changes_nothing_in_the_run(world):
    start(world, "--run-dir=run")
    before = {path: path.read_bytes() for path in Path("run").iterdir() if path.name != ".lock"}
    refusal(world, "--run-dir=run", "--lr=0.3")
    assert {path: path.read_bytes() for path in Path("run").iterdir() if path.name != ".lock"} == before


@pytest.mark.parametrize("word, name", [("--compile", "compile"), ("--strategy=exact", "strategy"), ("--deterministic", "deterministic")])
def test_another_tolerated_value_is_taken_with_one_note(world, word, name):
    start(world, "--run-dir=run")
    [note] = start(world, "--run-dir=run", word)
    assert (name in note, "not bit-exact from here" in note) == (True, True)


def test_another_operational_value_is_taken_without_a_word(world):
    start(world, "--run-dir=run")
    assert start(world, "--run-dir=run", "--keep=9", "--save-every=5min", "--workers=1") == []


def test_before_training_began_other_settings_take_the_place_of_the_first(world):
    with open_run(config_of("--run-dir=run", "--lr=300"), world, print):
        pass  # whatever was wrong came out before keep_settled
    notes = start(world, "--run-dir=run", "--lr=0.3")
    assert (notes, yaml.safe_load(Path("run/config.yaml").read_text())["lr"]) == ([], 0.3)


@pytest.mark.parametrize("name", ["auto.json", "status.json"])
def test_a_damaged_record_is_74_and_named(world, name):
    start(world, "--run-dir=run")
    Path("run", name).write_text("{")
    error = refusal(world, "--run-dir=run")
    assert (error.code, f"run/{name} is damaged" in str(error)) == (Exit.IO, True)


def test_a_folder_with_checkpoints_and_no_settings_is_78(world):
    Path("run/checkpoints/step-0000000001-g1").mkdir(parents=True)
    assert refusal(world, "--run-dir=run").code == Exit.OTHER_RUN


def test_data_are_compared_by_content_and_not_by_path(world):
    with open_run(config_of("--run-dir=run", "--data=photos"), world, print) as run:
        run.require_same("data", "fingerprint", "the data set")
        run.keep_settled()
    with open_run(config_of("--run-dir=run", "--data=moved"), world, print) as run:
        run.require_same("data", "fingerprint", "the data set")
        with pytest.raises(UserError, match="the data set changed since run began") as refused:
            run.require_same("data", "another", "the data set")
    assert refused.value.code == Exit.OTHER_RUN


def test_another_number_of_processes_is_noted_under_ddp_alone(world):
    notes = []
    for strategy in ("ddp", "exact"):
        words = (f"--run-dir={strategy}", f"--strategy={strategy}")
        start(world, *words)
        file = Path(strategy, "status.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | {"processes": 3}))
        notes.append(start(world, *words))
    assert (len(notes[0]), notes[0][0][:28], notes[1]) == (1, "3 processes before, 1 now: u", [])


def test_a_program_that_changed_is_warned_of_once(world):
    start(world, "--run-dir=run")
    for name in ("auto.json", "status.json"):
        file = Path("run", name)
        file.write_text(json.dumps(json.loads(file.read_text()) | {"code": "as it was"}))
    assert [start(world, "--run-dir=run"), start(world, "--run-dir=run")] == [["warning: the program changed since run began"], []]


# --- auto


def settle_in(kept, given, derived="derived"):
    notes = []
    run = Run(Path("run"), kept, writes=False, note=notes.append, facts={"start": 1, "cores_per_process": 1})
    return run.settle("threads", given, lambda: derived), run.kept["threads"], len(notes)


@pytest.mark.parametrize("kept, given, expected", [
    ({}, "auto", ("derived", "derived", 0)), ({"threads": 4}, "auto", (4, 4, 0)), ({}, 2, (2, 2, 0)),
    ({"threads": 2}, 2, (2, 2, 0)), ({"threads": 4}, 2, (2, 2, 1))])
def test_auto_is_resolved_once_and_a_given_value_that_differs_is_taken_with_a_note(kept, given, expected):
    assert settle_in(kept, given) == expected


def test_what_auto_became_is_kept_for_the_next_start(world):
    with open_run(config_of("--run-dir=run"), world, print) as run:
        run.settle("threads", "auto", lambda: 3)
        run.keep_settled()
    with open_run(config_of("--run-dir=run"), world, print) as run:
        assert run.settle("threads", "auto", lambda: 5) == 3


def test_the_device_that_auto_became_is_known_before_there_is_a_process_group(world):
    before = early_device(config_of("--run-dir=run"))
    with open_run(config_of("--run-dir=run"), world, print) as run:
        run.settle("device", "auto", lambda: "cpu")
        run.keep_settled()
    words = [["--run-dir=run"], ["--run-dir=run", "--device=cuda"], ["--run-dir=run", "--fresh"]]
    assert [before, *(early_device(config_of(*each)) for each in words)] == ["auto", "cpu", "cuda", "auto"]


# --- --fresh


def test_fresh_moves_the_old_run_aside_and_deletes_nothing(world):
    start(world, "--run-dir=runs/run")
    Path("runs/run/treasure").write_text("gold")
    start(world, "--run-dir=runs/run", "--fresh")
    [old] = Path("runs/.old").iterdir()
    assert ((old / "treasure").read_text(), Path("runs/run/treasure").exists(), old.name[:4]) == ("gold", False, "run-")


def test_fresh_takes_other_settings_and_counts_its_starts_anew(world):
    start(world, "--run-dir=run")
    start(world, "--run-dir=run")
    start(world, "--run-dir=run", "--fresh", "--lr=0.3")
    assert status()["start"] == 1


def test_fresh_in_a_new_folder_moves_nothing(world):
    assert start(world, "--run-dir=run", "--fresh") == []


@pytest.mark.parametrize("before, now, restarts, expected", [
    (None, None, 0, True),  # without torchrun
    ("a", "b", 0, True),
    ("a", "b", 1, False),  # torchrun restarted its workers
    ("a", "a", 0, False),  # another node's agent, or an elastic one that came later
    ("none", "none", 0, True),  # torchrun's name where it was given none
    ("none", "none", 2, False)])
def test_fresh_acts_at_the_first_start_of_a_launch_only(world, monkeypatch, before, now, restarts, expected):
    if before:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", before)
    start(world, "--run-dir=run")
    if now:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", now)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    assert acts_fresh(config_of("--run-dir=run", "--fresh")) == expected


# --- lock


@pytest.fixture
def another_process(world):
    """Hold run/ in a process of its own for so many seconds."""
    start(world, "--run-dir=run")
    processes = []

    def hold(seconds):
        program = ("import sys, time; from pathlib import Path; from utils.run import _acquire; lock = _acquire(Path(sys.argv[1]));"
                   f"print('held', flush=True); time.sleep({seconds})")
        processes.append(subprocess.Popen([sys.executable, "-c", program, Path("run").resolve()], cwd=ROOT, stdout=subprocess.PIPE))
        assert processes[-1].stdout.readline() == b"held\n"
        return processes[-1].pid
    yield hold
    for process in processes:
        process.kill()
        process.communicate()


def test_a_run_in_use_is_78_and_names_its_holder(world, another_process):
    holder = another_process(60)
    error = refusal(world, "--run-dir=run")
    assert (error.code, f"run is in use by process {holder} on " in str(error)) == (Exit.OTHER_RUN, True)


def test_a_run_in_use_is_not_moved_by_fresh(world, another_process):
    another_process(60)
    refusal(world, "--run-dir=run", "--fresh")
    assert not Path(".old").exists()


def test_a_start_waits_for_one_that_is_leaving(world, another_process, monkeypatch):
    monkeypatch.setattr(run_module, "LOCK_WAIT_S", 30)
    another_process(0.5)
    assert start(world, "--run-dir=run") == []


def test_a_killed_holder_leaves_no_lock(world, another_process):
    os.kill(another_process(60), 9)
    time.sleep(0.1)
    assert start(world, "--run-dir=run") == []


def test_a_run_that_was_left_can_be_opened_by_another_process(world, another_process):
    assert another_process(0) > 0


def test_eval_only_takes_no_lock_and_writes_nothing(world, another_process):
    another_process(60)
    before = sorted(Path("run").iterdir()), status()
    start(world, "--run-dir=run", "--eval-only")
    assert (sorted(Path("run").iterdir()), status()) == before


def test_eval_only_with_another_defining_value_is_78(world):
    start(world, "--run-dir=run")
    assert refusal(world, "--run-dir=run", "--eval-only", "--image-size=99").code == Exit.OTHER_RUN


# --- status and records


def test_status_counts_the_starts_and_names_the_process(world):
    start(world, "--run-dir=run")
    start(world, "--run-dir=run")
    found = {name: status()[name] for name in ("state", "start", "processes", "pid", "exit_code")}
    assert found == {"state": "running", "start": 2, "processes": 1, "pid": os.getpid(), "exit_code": None}


@pytest.mark.parametrize("error, code", [(UserError("no", Exit.BAD_DATA), 65), (RuntimeError("a bug"), 70), (OSError(28, "full"), 74)])
def test_an_error_is_a_failed_status_with_its_code(world, error, code):
    with pytest.raises(type(error)), open_run(config_of("--run-dir=run"), world, print):
        raise error
    assert (status()["state"], status()["exit_code"]) == ("failed", code)


def test_a_stop_by_another_rank_is_a_stopped_status(world):
    with pytest.raises(PeerError), open_run(config_of("--run-dir=run"), world, print):
        raise PeerError("rank 1: stopped (SIGTERM); there was nothing to save", Exit.STOPPED)
    assert (status()["state"], status()["exit_code"]) == ("stopped", 75)


def test_a_status_that_was_written_stays_after_leaving(world):
    with open_run(config_of("--run-dir=run"), world, print) as run:
        run.where = lambda: Progress(step=7, epoch=1)
        run.status("stopped", Exit.STOPPED, "SIGTERM")
    assert {name: status()[name] for name in ("state", "exit_code", "step", "epoch", "message")} == {
        "state": "stopped", "exit_code": 75, "step": 7, "epoch": 1, "message": "SIGTERM"}


def test_each_start_adds_its_command(world, monkeypatch):
    for words in (["train.py", "--run-dir=run"], ["train.py", "--run-dir=run", "--workers", "1 "]):
        monkeypatch.setattr(sys, "argv", words)
        start(world, "--run-dir=run")
    lines = Path("run/command.txt").read_text().splitlines()
    assert [shlex.split(line) for line in lines if line[0] != "#"] == [["train.py", "--run-dir=run"],
                                                                      ["train.py", "--run-dir=run", "--workers", "1 "]]


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
    assert f"torch {torch.__version__.split('+')[0]}" in Path("run/env.txt").read_text()


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

    events, sync, rename = [], run_module.sync, os.rename
    monkeypatch.setattr(run_module, "sync", lambda path: (events.append(f"sync {path}"), sync(path)))
    monkeypatch.setattr(os, "rename", lambda old, new: (events.append(f"rename {old} {new}"), rename(old, new)))
    with open_run(config_of("--run-dir=run"), world, print) as run:
        run.replace_folder("model", write)
    *synced, renamed, last = events
    parts = ("", "/vocabulary", "/vocabulary/words", "/weights")
    assert (sorted(synced), renamed, last) == (
        [f"sync run/.tmp-model{part}" for part in parts], "rename run/.tmp-model run/model", "sync run")


def test_a_run_directory_is_its_owners_alone_also_after_fresh(world):
    start(world, "--run-dir=run")
    first = Path("run").stat().st_mode & 0o777
    start(world, "--run-dir=run", "--fresh")
    assert (first, Path("run").stat().st_mode & 0o777) == (0o700, 0o700)


def test_a_small_file_is_written_whole(tmp_path):
    for text in ("a long first content", "short"):
        write_atomically(tmp_path / "file", text)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "short")]


@pytest.mark.parametrize("environment, expected", [
    ({"LOCKSTEP_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"), ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/lockstep"),
    ({"HOME": "/c"}, "/c/.cache/lockstep"), ({"LOCKSTEP_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/lockstep")])
def test_the_cache_is_where_the_environment_says(monkeypatch, environment, expected):
    for name in ("LOCKSTEP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(cache_path()) == expected


# --- a finished run


@pytest.fixture
def finished(world):
    with open_run(config_of("--run-dir=run"), world, print) as run:
        run.keep_settled()
        run.write_json("summary.json", {"step": 12, "top1": 0.97, "best": {}})
        run.status("finished", 0)


def test_a_finished_run_says_so_and_leaves_with_0(finished, capsys):
    with pytest.raises(SystemExit) as left:
        finish_early(config_of("--run-dir=run"))
    text = capsys.readouterr().out
    assert (left.value.code, "step 12, top1 0.9700" in text, "--fresh" in text) == (0, True, True)


@pytest.mark.parametrize("words", [["--fresh"], ["--eval-only"], ["--epochs=40"], ["--data=moved"]])
def test_a_finished_run_does_not_answer_for_another_wish(finished, words):
    assert finish_early(config_of("--run-dir=run", *words)) is None


def test_a_run_that_is_not_finished_goes_on(world):
    start(world, "--run-dir=run")
    assert finish_early(config_of("--run-dir=run")) is None


# --- a restart by torchrun


RESTART = """
import sys
from utils.command_line import parse_command_line
from utils.run import finish_early
finish_early(parse_command_line(sys.argv[1:], {})[0])
print("goes on")
"""


def restart(world, monkeypatch, exit_code, message, restarts=1, launch="a", rank="0"):
    """What a start does that torchrun makes after one that ended so: (code, out, err), and the code that launch.sh would see."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")  # on one node the launch has torchrun's process id in it, which is not this test's
    with open_run(config_of("--run-dir=run"), world, print) as run:
        run.keep_settled()
        run.status("failed", exit_code, message)
    exit_file, torch_is_not_there = Path("exit").resolve(), Path("torch.py")
    torch_is_not_there.write_text("raise ImportError('no torch here')")
    done = subprocess.run(
        [sys.executable, "-c", RESTART, "--run-dir=run"], capture_output=True, text=True, timeout=60,
        env=os.environ | {"TORCHELASTIC_RUN_ID": launch, "TORCHELASTIC_RESTART_COUNT": str(restarts), "RANK": rank, "WORLD_SIZE": "2",
                          "LOCAL_RANK": rank, "LOCKSTEP_EXIT_FILE": str(exit_file), "PYTHONPATH": f".:{ROOT}"})
    return done.returncode, done.stdout, done.stderr, exit_file.read_text() if exit_file.exists() else ""


@pytest.mark.parametrize("exit_code, message", [
    (80, "it diverged"), (65, "cannot read a.png"), (64, "m"), (66, "m"), (73, "m"), (78, "m"), (82, "m"), (75, "SIGUSR1"),
    (75, "SIGINT"), (75, "--stop-after")])
def test_a_restart_after_what_no_restart_mends_leaves_with_the_same_code_and_without_torch(world, monkeypatch, exit_code, message):
    assert restart(world, monkeypatch, exit_code, message) == (
        exit_code, "", f"train.py: no restart: failed, {message}\n", f"{exit_code}\n")


def test_of_a_restart_that_is_none_only_rank_0_speaks(world, monkeypatch):
    assert restart(world, monkeypatch, 80, "it diverged", rank="1") == (80, "", "", "80\n")


@pytest.mark.parametrize("exit_code, message", [
    (None, ""), (75, "SIGTERM"), (76, "m"), (70, "m"), (74, "m"),
    (75, "stopped (SIGTERM); there was nothing to save")])
def test_a_restart_after_what_may_be_mended_goes_on(world, monkeypatch, exit_code, message):
    assert restart(world, monkeypatch, exit_code, message) == (0, "goes on\n", "", "")


@pytest.mark.parametrize("restarts, launch", [(0, "a"), (1, "b")])
def test_a_new_launch_goes_on_whatever_the_last_one_came_to(world, monkeypatch, restarts, launch):
    assert restart(world, monkeypatch, 80, "it diverged", restarts, launch) == (0, "goes on\n", "", "")


# --- leaving


def leave(work, **environment):
    program = f"from utils.errors import *\ndef fail(error): raise error\nexit_after(lambda: {work})"
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCKSTEP_EXIT_FILE")}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=kept | environment, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("work, rank, code, message", [
    ("Exit.DONE", "0", 0, ""), ("Exit.STOPPED", "0", 75, ""),
    ("fail(UserError('no such', Exit.NO_INPUT))", "0", 66, "train.py: no such\n"),
    ("fail(UserError('no such', Exit.NO_INPUT))", "1", 66, ""),  # rank 0 says what all know
    ("fail(RankError('unreadable', Exit.BAD_DATA))", "1", 65, "train.py: unreadable\n"),
    ("fail(PeerError('rank 1: it ended', Exit.STOPPED))", "0", 75, ""),  # which has said so itself
    ("fail(OSError(28, 'No space left'))", "1", 74,
     "train.py: OSError: [Errno 28] No space left; make room, and the same command continues\n")])
def test_a_process_leaves_with_its_code_and_one_message(work, rank, code, message):
    assert leave(work, RANK=rank) == (code, message)


def test_a_bug_leaves_with_70_and_a_traceback():
    code, message = leave("fail(KeyError('x'))", RANK="1")
    assert (code, "Traceback" in message) == (70, True)


def test_the_first_abnormal_end_of_a_node_names_the_exit_code(tmp_path):
    file = tmp_path / "exit"
    codes = [leave(work, LOCKSTEP_EXIT_FILE=str(file))[0] for work in ("Exit.DONE", "Exit.BAD_DATA", "Exit.LOST_PEERS")]
    assert (codes, file.read_text()) == ([0, 65, 76], "65\n")


@pytest.mark.parametrize("environment, first, then", [({}, "76\n", "65\n"), ({"LOCAL_RANK": "0"}, "76\n", "65\n"),
                                                      ({"LOCAL_RANK": "1"}, "76\n", "76\n"), ({"LOCAL_RANK": "0"}, None, "65\n")])
def test_how_the_start_before_ended_is_forgotten_by_the_first_process_of_a_node_alone(monkeypatch, environment, first, then):
    monkeypatch.delenv("LOCKSTEP_EXIT_FILE", raising=False)
    begin_start()  # without launch.sh there is no such file
    for name, value in (environment | {"LOCKSTEP_EXIT_FILE": "exit"}).items():
        monkeypatch.setenv(name, value)
    if first:
        Path("exit").write_text(first)
    begin_start()
    record_exit(Exit.BAD_DATA)
    assert Path("exit").read_text() == then
