"""Every way to start two processes is the same run: torchrun, its older name, --nproc-per-node, by hand."""

import socket
import sys

import pytest

from tests.harness.run_directory import weights_sha256

WORDS = ["--model", "mobilenet_v3_small", "--image-size", "32", "--max-steps", "2", "--global-batch-size", "24",
         "--micro-batch-size", "4", "--threads", "1", "--workers", "0", "--precision", "fp32"]


@pytest.fixture(scope="module")
def expected(run_torchrun, photos, session_dir):
    """The hash of the weights that torchrun's run ends with."""
    run = session_dir / "by-torchrun"
    result = run_torchrun(2, *WORDS, "--data", photos, "--run-dir", run)
    assert result.returncode == 0 and " on 2 x cpu;" in result.out, result.text
    return weights_sha256(run)


@pytest.mark.long
def test_processes_started_by_hand_meet_by_the_environment(expected, launch, photos, run_dir):
    """As docs/launching.md says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2",
                  "LOCAL_WORLD_SIZE": "2"}
    ranks = [launch(None, *WORDS, "--data", photos, "--run-dir", run_dir,
                    env=common | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    results = [rank.wait() for rank in ranks]
    assert [result.returncode for result in results] == [0, 0], results[0].text + results[1].text
    assert " on 2 x cpu;" in results[0].out and not results[1].out
    assert weights_sha256(run_dir) == expected


@pytest.mark.slow
@pytest.mark.parametrize("command", [
    ["train.py", "--nproc-per-node", "2"],
    ["-m", "torch.distributed.launch", "--use-env", "--nproc-per-node=2", "train.py"],
    ["-m", "torch.distributed.launch", "--nproc-per-node=2", "train.py"]], ids=" ".join)
def test_other_starters_give_the_weights_of_torchrun(expected, launch, photos, run_dir, command):
    result = launch(None, *WORDS, "--data", photos, "--run-dir", run_dir, command=(sys.executable, *command)).wait()
    assert result.returncode == 0 and " on 2 x cpu;" in result.out, result.text
    assert weights_sha256(run_dir) == expected
