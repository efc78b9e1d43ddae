"""The simulated accelerator keeps its promises: check_simulation.py, in processes of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT
from tests.harness import accelerator

pytestmark = pytest.mark.needs("simulation")
CHECKS = ROOT / "tests/device/check_simulation.py"
MODULE = "tests.harness.accelerator"


@pytest.fixture(scope="module")
def simulated(launch, tmp_path_factory) -> SimpleNamespace:
    """All checks in one process, `first`, and its report; environment: its settings."""
    folder = tmp_path_factory.mktemp("simulated")
    settings = {"memory": 2**26, "report": str(folder / "report"), "hangs": {"device": 2, "operation": 10},
                "fails": {"device": 3, "operation": 10, "once": str(folder / "struck")}}
    environment = {"SIMULATED_ACCELERATOR": json.dumps(settings)}
    command = (sys.executable, "-m", MODULE, CHECKS)  # whose frames then have absolute paths
    first = launch(None, command=command, env=environment).wait()
    assert first.returncode == 0, first.text
    report = json.loads((folder / "report/rank-0.json").read_text())
    outcomes = json.loads(first.out)
    return SimpleNamespace(first=outcomes, report=report, environment=environment, command=command, folder=folder)


@pytest.mark.parametrize("promise", re.findall(r"^@check\ndef (\w+)", CHECKS.read_text(), re.M))
def test_promise(simulated, promise):
    assert not simulated.first[promise], simulated.first[promise]


def test_the_report_tells_what_the_host_and_the_devices_did(simulated):
    assert simulated.report.keys() == {"waits", "operations", "flipped", "peak", "copies_to_device",
                                            "copies_to_host"}
    kinds = {kind for kind, frames, count in simulated.report["waits"] if frames and count}
    assert {"item", "event", "synchronize", "masked index"} <= kinds
    assert simulated.report["operations"].keys() == simulated.report["peak"].keys() == {"0", "1", "2", "3"}
    assert simulated.report["copies_to_device"] > 100 < simulated.report["copies_to_host"]
    assert 2**25 < simulated.report["peak"]["1"] <= 2**26


def test_a_fault_strikes_once_and_a_copy_that_raced_ends_in_code_1(simulated, launch):
    (simulated.folder / "report/rank-0.json").unlink()
    result = launch(None, "after_a_fault", command=simulated.command, env=simulated.environment).wait()
    assert result.returncode == 1 and "memory was written while it was being copied to sim:0" in result.err, result.text
    assert (simulated.folder / "report/rank-0.json").exists()


def test_collectives_and_ddp_give_the_cpus_weights_on_two_processes(run_torchrun, tmp_path):
    settings = {"SIMULATED_ACCELERATOR": json.dumps({"report": str(tmp_path)})}
    result = run_torchrun(2, CHECKS.relative_to(ROOT), "together", script=MODULE, torchrun=("-m",), env=settings)
    assert result.returncode == 0, result.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.json", "rank-1.json"]


@pytest.mark.parametrize("script, found", [("train_this.py", "sim"), ("that.py", "None")])
def test_the_interpreter_gives_the_device_to_training_scripts_alone(tmp_path, script, found):
    program = "import sys, torch; print(torch.accelerator.current_accelerator(True), sys.argv[1:])"
    (tmp_path / script).write_text(program)
    words = [Path(accelerator.__file__).with_name("python"), "-u", tmp_path / script, "a b"]
    environment = os.environ | {"LOCKSTEP_SIM_PYTHON": sys.executable}
    result = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert result.stdout == f"{found} ['a b']\n", result.stderr


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert accelerator.missing() == "no C++ compiler (g++)"
