"""benchmarks/in_turn.py: contenders take turns, and ratios are made round by round."""

import json
import platform
import subprocess
from importlib.metadata import version

import pytest

from benchmarks import in_turn as module
from benchmarks.in_turn import in_turn, report
from utils.hardware.cores import available_cores


def test_every_second_round_goes_backwards_and_the_first_does_not_count():
    """Otherwise each contender would always follow the same one, and run in the state that it leaves behind."""
    order = []

    def contender(name, figures):
        return lambda: order.append(name) or figures.pop(0)

    contenders = {name: contender(name, [9, first, first + 1]) for name, first in (("a", 1), ("b", 3), ("c", 5))}
    found = in_turn(contenders, rounds=2)
    assert "".join(order) == "cba" "abc" "cba" and found == {"a": [1, 2], "b": [3, 4], "c": [5, 6]}


@pytest.mark.long
def test_ratios_are_those_of_each_round_and_are_kept_with_the_hardware(tmp_path, monkeypatch, capsys):
    """A machine that becomes slower changes no ratio."""
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results.jsonl")
    for _ in range(2):
        report("input", "images/s", {"ours": [30, 20, 6], "theirs": [10, 10, 2], "old": [5, 5, 3]}, "theirs", "old")
    assert "| ours | 20 | 3.00 (2.00 to 3.00) | 4.00 (2.00 to 6.00) |" in capsys.readouterr().out
    first, second = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert first["ratios"] == second["ratios"] == {"ours": [3, 2, 3], "theirs": [1, 1, 1], "old": [0.5, 0.5, 1.5]}
    assert first["commit"] == module.commit() and first["products"]["fp32"] > 1e9
    assert first["hardware"] == module.hardware() and first["versions"]["torch"] == version("torch")
    assert first["rounds"] == 3


@pytest.mark.parametrize("lines, said", [
    ("model name : AMD EPYC\ncpu family : 26\nmodel : 2\nflags : fpu avx2 avx512f avx512_bf16",
     "AMD EPYC (family 26, model 2), avx512_bf16, "),
    ("model name : Xeon\ncpu family : 6\nmodel : 143\nflags : avx512_bf16 amx_bf16",
     "Xeon (family 6, model 143), amx_bf16, "),
    ("processor : 0\nFeatures : fp asimd", f"{platform.machine()}, no AVX2, ")])
def test_hardware_is_named_by_what_decides_its_speed(tmp_path, lines, said):
    """One name may stand for several CPUs, and not every system names its own."""
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{lines}\n\nprocessor : 1\n{lines}\n")
    assert module.hardware(tmp_path / "cpuinfo") == f"{said}{available_cores()} cores"


def test_a_commit_is_marked_where_a_file_other_than_results_is_changed(tmp_path, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    files = [tmp_path / "train.py", tmp_path / "benchmarks" / "results.jsonl"]
    for file in files:
        file.write_text("")
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    clean = module.commit()
    files[1].write_text("{}")
    assert clean and module.commit() == clean
    files[0].write_text("#")
    assert module.commit() == f"{clean}+"


def test_outside_a_repository_and_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert module.commit() == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module.commit() == ""
