"""docs/learning.md: its commands are run in order, in one shell and a fresh copy, and print what the page quotes."""

import json
import re
import socket
from dataclasses import dataclass

import pytest

from tests.conftest import ROOT
from tests.harness.project_copy import copy_project, run_in
from tests.harness.quoted import is_printed

PAGE = (ROOT / "docs" / "learning.md").read_text()
OTHERS = "--master-addr HOST"  # the one block that needs further machines; tests/faults/test_cluster.py has such


@dataclass(frozen=True)
class Block:
    """Commands, and what the page quotes of their output."""

    commands: str
    quoted: tuple[str, ...] = ()


def blocks(page: str) -> list[Block]:
    """```sh blocks; a block without a language that follows one quotes its output."""
    found: list[Block] = []
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```", page, re.S | re.M):
        if language == "sh":
            found.append(Block(text))
        elif not language:
            found[-1] = Block(found[-1].commands, tuple(text.splitlines()))
    return found


@pytest.fixture(scope="module")
def outputs(session_dir) -> dict[str, list[str]]:
    """What each block printed, by its commands."""
    folder, run_blocks = copy_project(session_dir / "learning"), [b for b in blocks(PAGE) if OTHERS not in b.commands]
    script = "".join(f"{{\n{block.commands}wait\n}} > printed-{i} 2>&1\n" for i, block in enumerate(run_blocks))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]  # instead of 29500, which another test may have
    run_in(folder, f"export PET_MASTER_PORT={port}\n{script}", session_dir / "cache", limit_s=1200)
    return {block.commands: (folder / f"printed-{i}").read_text().splitlines() for i, block in enumerate(run_blocks)}


@pytest.mark.slow
@pytest.mark.timeout(1260)
def test_every_command_prints_what_the_page_quotes(outputs):
    names = {}
    wrong = [(block.quoted, outputs[block.commands]) for block in blocks(PAGE)
             if block.commands in outputs and not is_printed(block.quoted, outputs[block.commands], names)]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.timeout(1260)
def test_evaluations_differ_in_their_time_alone(outputs):
    [printed] = [lines for commands, lines in outputs.items() if "--eval-only" in commands]
    first, second = ({name: value for name, value in json.loads(line).items() if name != "time"}
                     for line in printed if line.startswith("{"))
    assert first == second


@pytest.mark.slow
@pytest.mark.timeout(1260)
def test_of_five_processes_one_is_idle_with_a_way_out(outputs):
    [printed] = [lines for commands, lines in outputs.items() if "runs/five" in commands]
    assert any("--micro-batch-size" in line for line in printed)


def test_a_quotation_must_be_what_was_printed():
    printed = ["runs/one: 3 samples", "loss 2.61 grad 3", f"{64 * 'a'}  x", f"{64 * 'b'}  y"]
    right = [("loss 2.66 ...",), ("runs/one: ...", "...", "HASH  x"), ("HASH  x",), ("HASH  y",)]
    wrong = [("loss 3.66 ...",), ("HASH  x", "runs/one: ..."), ("HASH  x", "HASH  y"), ("loss 2.61",), ("step 2",)]
    assert [is_printed(quoted, printed, {}) for quoted in right + wrong] == [True] * 4 + [False] * 5
