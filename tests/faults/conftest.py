"""The run that all faults are measured by."""

from pathlib import Path

import pytest

from tests.harness.launches import STEPS, WORDS
from tests.harness.run_directory import trained_steps


@pytest.fixture(scope="session")
def undisturbed(session_dir, run_torchrun, photos) -> Path:
    """The directory of a run that nothing disturbed, on two processes."""
    run = session_dir / "undisturbed"
    result = run_torchrun(2, *WORDS, "--data", photos, "--run-dir", run)
    assert result.returncode == 0, result.text
    assert trained_steps(run) == STEPS
    return run
