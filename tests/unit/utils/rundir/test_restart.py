"""utils/rundir/restart.py: what a start learns of the one before: finished, no use to restart, of the same launch."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.utils.conftest import config_of, start
from utils.rundir import run as run_module
from utils.rundir.restart import acts_fresh, device_of_run, finish_early, launch_id, words_if_finished
from utils.rundir.run import open_run

ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.usefixtures("first_start_in_a_new_folder")


@pytest.mark.parametrize("before, now, restarts, expected", [
    (None, [None], 0, True),  # without torchrun
    ("a 7 100", ["a 7 200"], 0, True),  # another torchrun, whatever its --rdzv-id is
    ("a 7 100", ["a 7 200"], 1, True),  # its first start ended before it opened the run
    ("a 7 100", ["a 7 100"], 1, False),  # torchrun restarted its workers
    ("a 7 100", ["a 7 100"], 0, False),  # which does not count as a restart if nodes joined or left
    ("a 7 100", ["b 9 300", "a 7 100"], 0, False)])  # and rank 0 may be on the new one
def test_fresh_acts_at_the_first_start_of_a_launch_only(world, monkeypatch, before, now, restarts, expected):
    monkeypatch.setattr(run_module, "launch_id", lambda: before)
    start(world, "--run-dir=run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    assert acts_fresh(config_of("--run-dir=run", "--fresh"), now) == expected


def test_a_torchrun_is_its_host_its_process_id_and_its_start_time(monkeypatch):
    assert launch_id() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    host, process, began = launch_id().split()
    assert (host, process) == (socket.gethostname(), str(os.getppid()))
    with open(f"/proc/{os.getppid()}/stat") as file:
        assert f" {began} " in file.read()


def test_a_launch_of_launch_sh_is_known_by_its_id(world, monkeypatch):
    """Retries have the same id, also with a new torchrun or without one; the same command typed again has another."""
    monkeypatch.setenv("LOCKSTEP_LAUNCH_ID", "one")
    start(world, "--run-dir=run")
    acted = []
    for name, torchrun in (("one", None), ("one", "none"), ("two", None)):
        monkeypatch.setenv("LOCKSTEP_LAUNCH_ID", name)
        if torchrun:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", torchrun)
        acted.append(acts_fresh(config_of("--run-dir=run", "--fresh")))
    assert acted == [False, False, True]


@pytest.mark.parametrize("before, now, expected", [
    (("7", "0"), ("7", "1"), False), (("7", None), ("7", "1"), False),
    (("7", "0"), ("7", "3"), False),  # the starts between them never reached the run
    (("7", "1"), ("7", "1"), True),  # a second srun in the same job
    (("7", "0"), ("8", "1"), True),  # the run was another job's: this one never reached it before
    ((None, None), ("7", "1"), True), (("7", "0"), (None, None), True)])
def test_fresh_does_not_act_when_slurm_starts_the_job_again(world, monkeypatch, before, now, expected):
    def set_job(number, restarts):
        for name, value in (("SLURM_JOB_ID", number), ("SLURM_RESTART_COUNT", restarts)):
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)

    set_job(*before)
    start(world, "--run-dir=run")
    set_job(*now)
    assert acts_fresh(config_of("--run-dir=run", "--fresh")) == expected

def test_the_device_of_a_run_is_known_before_the_process_group_exists(world):
    before = device_of_run(config_of("--run-dir=run"))
    with open_run(config_of("--run-dir=run"), world, print) as run:
        run.resolve("device", "auto", lambda: "cpu")
        run.keep_resolved()
    words = [["--run-dir=run"], ["--run-dir=run", "--device=cuda"], ["--run-dir=run", "--fresh"]]
    assert [before, *(device_of_run(config_of(*each)) for each in words)] == ["auto", "cpu", "cuda", "auto"]


# --- a finished run


@pytest.fixture
def finished(world):
    with open_run(config_of("--run-dir=run"), world, print) as run:
        run.keep_resolved()
        run.write_json("summary.json", {"step": 12, "top1": 0.97, "best": {}})
        run.status("finished", 0)


def test_a_finished_run_says_so_and_exits_with_0(finished, capsys):
    with pytest.raises(SystemExit) as left:
        finish_early(config_of("--run-dir=run"))
    text = capsys.readouterr().out
    assert (left.value.code, "step 12, top1 0.9700" in text, "--fresh" in text) == (0, True, True)


def test_on_several_nodes_rank_0_decides_whether_the_run_is_finished(finished, monkeypatch):
    """The others may not see it yet: one would end, and another wait for it."""
    config = config_of("--run-dir=run")
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    assert finish_early(config) is None
    assert "step 12, top1 0.9700" in words_if_finished(config)


@pytest.mark.parametrize("words", [["--fresh"], ["--eval-only"], ["--epochs=40"], ["--data=moved"]])
def test_a_finished_run_does_not_answer_another_command(finished, words):
    assert finish_early(config_of("--run-dir=run", *words)) is None


@pytest.mark.parametrize("name", ["summary.json", "status.json", "config.yaml"])
def test_a_damaged_record_of_a_finished_run_is_reported_later(finished, name):
    Path("run", name).write_text("{")
    assert finish_early(config_of("--run-dir=run")) is None


def test_an_unfinished_run_continues(world):
    start(world, "--run-dir=run")
    assert finish_early(config_of("--run-dir=run")) is None


# --- a restart by torchrun


RESTARTS = """
import json, os, sys
from utils.settings.command_line import parse_command_line
from utils.rundir.restart import finish_early
for line in sys.stdin:
    if (child := os.fork()) == 0:
        folder, environment = json.loads(line)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        finish_early(parse_command_line(["--run-dir=run"], {}))
        sys.exit(print("goes on"))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory):
    """A process that starts ranks, its forks, as lines on its standard input say. It cannot import torch."""
    torch_is_not_there = tmp_path_factory.mktemp("modules") / "torch.py"
    torch_is_not_there.write_text("raise ImportError('no torch here')")
    process = subprocess.Popen([sys.executable, "-c", RESTARTS], text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE,
                               env=os.environ | {"PYTHONPATH": f"{torch_is_not_there.parent}:{ROOT}"})
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def restart(world, monkeypatch, torchrun):
    """restart(exit_code, message): what a start by torchrun does after one that ended like this.

    Its code, out, err, and the code for launch.sh.
    """
    def restarted(exit_code, message, restarts=1, is_same_launch=True, rank="0"):
        if is_same_launch:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
            monkeypatch.setattr(os, "getppid", lambda: torchrun.pid)  # it is the torchrun of both
        with open_run(config_of("--run-dir=run"), world, print) as run:
            run.keep_resolved()
            run.status("failed", exit_code, message)
        environment = os.environ | {
            "TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": str(restarts), "RANK": rank,
            "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCKSTEP_EXIT_FILE": "exit"}
        print(json.dumps([os.getcwd(), environment]), file=torchrun.stdin, flush=True)
        code = int(torchrun.stdout.readline())
        return code, *(Path(name).read_text() if Path(name).exists() else "" for name in ("out", "err", "exit"))
    return restarted


NOT_RESTARTED = "train.py: not restarted, because a restart would end in the same way:"


@pytest.mark.rows(3)
@pytest.mark.parametrize("exit_code, message", [
    (80, "it diverged"), (65, "cannot read a.png"), (64, "m"), (66, "m"), (73, "m"), (78, "m"), (82, "m"),
    (75, "SIGUSR1"), (75, "SIGINT"), (75, "--stop-after")])
def test_a_restart_that_cannot_help_exits_with_the_same_code(restart, exit_code, message):
    """Before torch is imported."""
    assert restart(exit_code, message) == (
        exit_code, "", f"{NOT_RESTARTED} failed, {message}\n", f"{exit_code}\n")


def test_only_rank_0_says_that_a_restart_cannot_help(restart):
    assert restart(80, "it diverged", rank="1") == (80, "", "", "80\n")


@pytest.mark.parametrize("exit_code, message", [
    (None, ""), (75, "SIGTERM"), (76, "m"), (70, "m"), (74, "m"),
    (75, "stopped (SIGTERM); there was nothing to save")])
def test_a_restart_that_may_help_continues(restart, exit_code, message):
    assert restart(exit_code, message) == (0, "goes on\n", "", "")


@pytest.mark.parametrize("restarts, is_same_launch", [(0, True), (1, False)])
def test_a_new_launch_continues_however_the_last_one_ended(restart, restarts, is_same_launch):
    assert restart(80, "it diverged", restarts, is_same_launch) == (0, "goes on\n", "", "")
