"""--check on a device: it says what the device computes and how much of its memory a micro-batch takes, and ends."""

import json

import pytest


@pytest.mark.long
@pytest.mark.parametrize("task", ["image-classification", "text-classification"])
@pytest.mark.parametrize("processes", [None, pytest.param(2, marks=pytest.mark.needs("two devices"))])
def test_a_check_measures_the_device_and_leaves_nothing(accelerator, runs, run_dir, figure, task, processes):
    output = run_dir.parent / "check.json"
    result = accelerator.run(processes, *runs.words(task), "--check", "--run-dir", run_dir, "--output", output)
    assert result.returncode == 0, result.text
    found = json.loads(output.read_text())
    figure(f"{found['machine']['computed_per_s']:.0f} samples/s, {found['machine']['memory']:.0f} MiB")
    assert f" on {processes or 1} x {accelerator.name};" in "".join(found["notes"]), result.text
    assert min(found["machine"][name] for name in ("loaded_per_s", "computed_per_s", "memory", "run_s")) > 0
    assert (found["machine"]["sum_s"] > 0) == (processes is not None)
    assert not run_dir.exists() and not [*run_dir.parent.glob("lockstep-*")]
