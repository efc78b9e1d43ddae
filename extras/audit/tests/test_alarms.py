"""`make alarms`: a thousand audited steps of each task and strategy, on 2 and 3 ranks, raise no false alarm."""

import pytest

from extras.audit.tests.test_contracts import ALL
from tests.contracts.test_exactness import COMMON, WORDS
from tests.harness.run_directory import trained_steps

STEPS = 1000
LIMIT_S = 3600

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S)]


@pytest.mark.parametrize("task, strategy, processes", ALL)
def test_a_thousand_audited_steps_are_no_alarm(task, strategy, processes, data_of, launch, run_dir):
    words = ["--task", task, "--data", data_of[task], *WORDS[task], *COMMON, "--workers", 0, "--strategy", strategy]
    words += ["--epochs", STEPS, "--max-steps", STEPS, "--eval-every", STEPS, "--save-every", STEPS]
    result = launch(processes, *words, "--log-every", 100, "--run-dir", run_dir, "--audit-every", 1).wait(LIMIT_S)
    assert result.returncode == 0 and trained_steps(run_dir) == STEPS, result.text
