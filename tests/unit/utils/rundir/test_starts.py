"""utils/rundir/starts.py: what each start of a run computes with, a line for each."""

import json
from types import SimpleNamespace

import pytest
import torch

from tests.unit.utils.conftest import config_of
from utils import __version__
from utils.rundir.chain import starts_hash
from utils.rundir.identity import code_digest
from utils.rundir.starts import FILE, describe, note_start, read_starts


def note(world, run_dir, start, step, *words, writes=True):
    """A start of the run in `run_dir`."""
    run = SimpleNamespace(path=run_dir, start=start, writes=writes,
                          resolved=SimpleNamespace(as_dict=lambda: {"micro_batches": 8}))
    note_start(config_of(*words), run, world, step)
    if writes:
        (run_dir / "auto.json").touch()  # a start writes it next


def test_a_line_has_the_settings_what_auto_became_and_what_bits_depend_on(world, tmp_path):
    note(world, tmp_path, 1, 0, "--lr=0.5", "--strategy=exact")
    [found] = read_starts(tmp_path)
    settings = found["settings"]
    assert (found["start"], found["step"], settings["lr"], settings["strategy"]) == (1, 0, 0.5, "exact")
    assert found["resolved"] == {"micro_batches": 8}
    assert found["time"].endswith("+00:00") and found.items() >= describe(world).items()


def test_it_describes_processes_program_versions_and_hardware(world):
    found = describe(world)
    [hardware] = found["hardware"]
    assert (found["processes"], found["devices_per_process"], found["threads"]) == (1, 1, torch.get_num_threads())
    assert (found["program"], found["version"], found["packages"]["torch"]) == (
        code_digest(), __version__, torch.__version__.partition("+")[0])
    assert (hardware["device"], bool(hardware["cpu"])) == ("cpu", True)
    assert hardware["instructions"] == torch.backends.cpu.get_cpu_capability()


def test_what_limits_the_cpus_instructions_is_kept(world, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert describe(world)["hardware"][0]["limits"]["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_nodes_that_are_alike_are_described_once(world, monkeypatch):
    monkeypatch.setattr(type(world), "gather", lambda self, value: [value, value, value | {"device": "other"}])
    assert [each["device"] for each in describe(world)["hardware"]] == ["cpu", "other"]


def test_a_start_that_ended_before_the_run_had_begun_leaves_no_line(world, tmp_path):
    """Its settings may still be corrected, and config.yaml is that of the first line."""
    note(world, tmp_path, 1, 0)
    (tmp_path / "auto.json").unlink()
    note(world, tmp_path, 2, 0)
    assert [each["start"] for each in read_starts(tmp_path)] == [2]


def test_later_starts_come_after_and_change_no_byte_of_earlier_ones(world, tmp_path):
    note(world, tmp_path, 1, 0)
    first, digest = (tmp_path / FILE).read_bytes(), starts_hash(tmp_path, 1)
    note(world, tmp_path, 3, 20, "--precision=bf16")  # the second one failed before it was noted
    assert (tmp_path / FILE).read_bytes().startswith(first)
    assert [(each["start"], each["step"]) for each in read_starts(tmp_path)] == [(1, 0), (3, 20)]
    assert (starts_hash(tmp_path, 1), starts_hash(tmp_path, 2)) == (digest, digest) != (starts_hash(tmp_path, 3),) * 2


def test_who_does_not_write_the_run_writes_no_start(world, tmp_path):
    note(world, tmp_path, 1, 0, writes=False)
    assert (list(tmp_path.iterdir()), read_starts(tmp_path)) == ([], [])


def test_a_disk_that_fails_is_said_on_every_rank_and_the_file_stays(world, tmp_path, monkeypatch):
    note(world, tmp_path, 1, 0)
    before = (tmp_path / FILE).read_bytes()
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ValueError, match="No space left") as refused:  # UserError
        note(world, tmp_path, 2, 10)
    assert (refused.value.code, (tmp_path / FILE).read_bytes()) == (74, before)


def test_a_line_is_one_object_in_plain_json(world, tmp_path):
    note(world, tmp_path, 1, 0, "--run-dir=ü\u2028")
    [line] = (tmp_path / FILE).read_text().splitlines()
    assert line.isascii() and set(json.loads(line)) >= {"start", "step", "settings", "resolved", "hardware"}
