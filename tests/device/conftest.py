"""One suite for every accelerator: the simulated one (tests/harness/accelerator), a real one by --device cuda.

A row says what it needs: @pytest.mark.needs("simulation"), "hardware", "two devices", or a type of device. One whose
needs are met and that skips itself all the same has failed. With --device there is a table at the end: item, result,
figure.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Launch
from tests.device.runs import OBJECTIVES, Accelerator, Runs
from tests.harness import accelerator as simulated

LACKING = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a device that is not there: a suite that runs no row proves nothing."""
    if (name := config.getoption("--device")) == "sim" and (reason := simulated.missing()):
        raise pytest.UsageError(f"--device sim: {reason}")
    found = torch.accelerator.current_accelerator(check_available=True)
    if name not in (None, "sim") and (found is None or found.type != name):
        raise pytest.UsageError(f"--device {name}: torch finds {found.type if found else 'no accelerator'} here")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the rows whose needs are not met."""
    name = config.getoption("--device") or "sim"
    there = {"simulation", "two devices"} if name == "sim" else {"hardware", name}
    if name != "sim" and torch.accelerator.device_count() > 1:
        there.add("two devices")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            needs = {need for marker in item.iter_markers("needs") for need in marker.args}
            lacking = simulated.missing() if name == "sim" and simulated.missing() else ", ".join(sorted(needs - there))
            if lacking:
                item.stash[LACKING] = lacking
                item.add_marker(pytest.mark.skip(
                    reason=f"needs {lacking}" if needs - there else f"no simulated accelerator: {lacking}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    """A row that skips itself has failed."""
    report = yield
    if report.skipped and LACKING not in item.stash and Path(__file__).parent in item.path.parents:
        report.outcome, report.longrepr = "failed", (
            f"{item.nodeid}: its needs are met, and it was skipped: {call.excinfo.value}")
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The table."""
    if not config.getoption("--device"):
        return
    rows = [(report, outcome) for outcome in ("passed", "failed", "error", "skipped")
            for report in terminalreporter.stats.get(outcome, [])
            if "tests/device/" in report.nodeid and (report.when == "call" or outcome != "passed")]
    terminalreporter.section(f"{config.getoption('--device')}, torch {torch.__version__}")
    for report, outcome in sorted(rows, key=lambda row: row[0].nodeid):
        figure = dict(report.user_properties).get("figure", "")
        why = report.longrepr[2].removeprefix("Skipped: ") if outcome == "skipped" else ""
        terminalreporter.write_line(f"{report.nodeid.partition('::')[2]:<100} {outcome:<8}"
                                    f" {report.duration:6.1f} s  {figure}{why}")


@pytest.fixture(scope="session")
def accelerator(request, launch) -> Accelerator:
    """The device that the suite runs on."""
    name = request.config.getoption("--device") or "sim"
    return Accelerator(name == "sim", name, launch)


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
def figure(record_property) -> Callable[[str], None]:
    """figure("98 ms"): what the table shows beside the row's result."""
    return lambda text: record_property("figure", text)
