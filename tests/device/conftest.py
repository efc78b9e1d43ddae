"""One suite for every accelerator: the simulated one (tests/harness/accelerator), a real one by --device cuda.

A row says what it needs: @pytest.mark.needs("simulation"), "hardware", "two devices", or a type of device. One whose
needs are met and that skips itself all the same has failed. With --device each row is printed when it ends: result,
time, item, figure; $LOCKSTEP_ROWS names a file that gets the lines, too, for a machine that may be taken away.
--device sim-other: one device whose random numbers differ from the CPU's, as a real one's do ("other numbers").
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Launch
from tests.device.runs import OBJECTIVES, Accelerator, Runs
from tests.harness import accelerator as simulated
from tests.harness.run_directory import records

LACKING = pytest.StashKey[str]()


SIMULATED = {"sim": {"simulation", "two devices"}, "sim-other": {"other numbers"}}  # and what rows may need of them
TELLING = (  # rows of one device by how much they tell; the others come before those that are compiled
    "test_the_digits_train", "test_a_batch_is_copied", "test_a_step_makes_no_call", "test_two_processes_share",
    "test_losses_are_close", "test_low_precision", "test_deterministic", "test_memory_that_really", "test_a_compiled")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a device that is not there: a suite that runs no row proves nothing."""
    if (name := config.getoption("--device")) in SIMULATED and (reason := simulated.missing()):
        raise pytest.UsageError(f"--device {name}: {reason}")
    found = torch.accelerator.current_accelerator(check_available=True)
    if name not in (None, *SIMULATED) and (found is None or found.type != name):
        raise pytest.UsageError(f"--device {name}: torch finds {found.type if found else 'no accelerator'} here")
    if name and not hasattr(config, "workerinput"):  # else it is a process of pytest-xdist, which reports to another
        config.pluginmanager.register(Rows(name))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the rows whose needs are not met, or leave them out if the user named a device. The telling ones first."""
    name = config.getoption("--device") or "sim"
    there = SIMULATED.get(name, {"hardware", "other numbers", name})
    if name not in SIMULATED and torch.accelerator.device_count() > 1:
        there.add("two devices")
    left_out: list[pytest.Item] = []
    for item in items:
        if Path(__file__).parent in item.path.parents:
            needs = {need for marker in item.iter_markers("needs") for need in marker.args}
            lacking = simulated.missing() if name == "sim" and simulated.missing() else ", ".join(sorted(needs - there))
            if lacking and config.getoption("--device"):
                left_out.append(item)
            elif lacking:
                item.stash[LACKING] = lacking
                item.add_marker(pytest.mark.skip(
                    reason=f"needs {lacking}" if needs - there else f"no simulated accelerator: {lacking}"))
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    if name != "sim":
        items.sort(key=telling)


def telling(item: pytest.Item) -> float:
    """A row's place by TELLING."""
    places = [place for place, start in enumerate(TELLING) if item.name.startswith(start)]
    return places[0] if places else len(TELLING) - 1.5


class Rows:
    """What is printed of the rows: each when it ends, and after the last one those that did not run to their end."""

    def __init__(self, device: str):
        self._device, self._file = device, os.environ.get("LOCKSTEP_ROWS")
        self._planned: list[str] = []
        self._ended: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Rows that this process will run."""
        self._planned += [item.nodeid for item in session.items]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Rows that processes of pytest-xdist will run."""
        self._planned = list(ids)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No letter for a row."""
        return (report.outcome, "", "") if report.when == "call" else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print a row."""
        if report.nodeid in self._ended or not (report.when == "call" or report.failed or report.skipped):
            return
        self._ended.add(report.nodeid)
        figure = dict(report.user_properties).get("figure", "")
        why = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else ""
        line = (f"{report.outcome:<8}{report.duration:6.1f} s  {report.nodeid.rpartition('/')[2]}  {figure}{why}")
        if self._file:
            with open(self._file, "a") as rows:
                rows.write(f"{line}\n{report.longreprtext[-4000:]}\n" if report.failed else f"{line}\n")
        if not report.skipped:
            print(line, flush=True)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Rows that were not run, or not to their end."""
        terminalreporter.section(f"{self._device}, torch {torch.__version__}")
        for row in self._planned:
            if row not in self._ended:
                terminalreporter.write_line(f"not run           {row.rpartition('/')[2]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    """A row that skips itself has failed."""
    report = yield
    if report.skipped and LACKING not in item.stash and Path(__file__).parent in item.path.parents:
        report.outcome, report.longrepr = "failed", (
            f"{item.nodeid}: its needs are met, and it was skipped: {call.excinfo.value}")
    return report


@pytest.fixture(scope="session")
def accelerator(request, launch) -> Accelerator:
    """The device that the suite runs on."""
    name = request.config.getoption("--device") or "sim"
    return Accelerator(name in SIMULATED, name.partition("-")[0], launch,
                       (("devices", 1), ("generator", 1)) if name == "sim-other" else ())


@pytest.fixture(scope="session")
def runs(accelerator, run_train, run_torchrun, photos, texts, photo_tables, text_tables, session_dir) -> Runs:
    """Undisturbed runs on the device and on the CPU."""
    (folder := session_dir / "device").mkdir()
    data = {"image-classification": photos, "text-classification": texts, "masked-lm": texts} | {
        name: photo_tables if name.startswith("image") else text_tables for name in OBJECTIVES}
    return Runs(accelerator, run_train, run_torchrun, data, folder)


@pytest.fixture(scope="session")
def no_dropout(session_dir, runs) -> dict[str, list[object]]:
    """Words for each task: models whose steps draw no random numbers, which differ between kinds of devices.

    And without BatchNorm: of four small images it makes gradients so steep that rounding grows to 0.1 in 20 steps.
    """
    folder = session_dir / "no-dropout"
    shutil.copytree(runs.on_cpu(1, "masked-lm", "ddp") / "model", folder)  # for its tokenizer
    described = json.loads((folder / "config.json").read_text())
    described |= {name: 0.0 for name in described if name.endswith("dropout_prob")}
    (folder / "config.json").write_text(json.dumps(described))
    image, text = ["--model", "squeezenet1_1", "--dropout", "0"], ["--model", folder]
    return {"image-classification": image, "text-classification": text, "masked-lm": text}


@pytest.fixture
def live(accelerator) -> Iterator[Callable[..., Launch]]:
    """Accelerator.start; what it started is killed when the test ends."""
    started: list[Launch] = []

    def start(on: Accelerator, *arguments: Any, **options: Any) -> Launch:
        started.append(on.start(*arguments, **options))
        return started[-1]

    yield start
    for one in started:
        one.kill_all()


@pytest.fixture
def losses_beside_the_cpu(accelerator, run_train, run_dir, figure) -> Callable[..., tuple[list[float], list[float]]]:
    """(words, processes, script=...) -> all losses of a run on the device, and of one process on the CPU."""
    def beside(words: list[object], processes: int | None = None, **options: Any) -> tuple[list[float], list[float]]:
        others = run_dir.parent / "cpu"
        for result in (run_train(*words, "--run-dir", others, "--device", "cpu"),
                       accelerator.run(processes, *words, "--run-dir", run_dir, **options)):
            assert result.returncode == 0, result.text
        found, expected = ([record["loss"] for record in records(run) if record["split"] in ("train", "val")]
                           for run in (run_dir, others))
        figure(f"largest difference {max(abs(a - b) for a, b in zip(found, expected, strict=True)):.1e}")
        return found, expected

    return beside


@pytest.fixture
def figure(record_property) -> Callable[[str], None]:
    """figure("98 ms"): what is printed beside the row's result."""
    return lambda text: record_property("figure", text)
