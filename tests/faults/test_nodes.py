"""Two nodes (torchruns on one machine), one of which has an error: both end with its code, and one message names it."""

import socket
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.harness.launches import WORDS, assert_gone, messages
from utils.errors import Exit


@pytest.fixture
def on_two_nodes(run_dir, start_torchrun):
    """on_two_nodes(*words): what both came to; each has a working directory of its own, folders[0] and folders[1]."""
    folders = [run_dir.with_name(f"node{rank}") for rank in range(2)]
    for folder in folders:
        folder.mkdir()

    def start(*words):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        torchrun = [Path(sys.executable).with_name("torchrun"), "--nnodes=2", "--nproc-per-node=1",
                    "--master-addr=127.0.0.1", f"--master-port={port}"]
        launches = [start_torchrun(None, f"--node-rank={rank}", ROOT / "train.py", *words, "--run-dir", run_dir,
                                   command=["env", "-C", folder, *torchrun], env={"GLOO_SOCKET_IFNAME": "lo"})
                    for rank, folder in enumerate(folders)]
        return [assert_gone(launch, run_dir) for launch in launches]

    start.folders = folders
    return start


def assert_refused(results, code, *parts):
    assert [result.code for result in results] == [code] * 2, [result.text for result in results]
    said = [line for result in results for line in messages(result)]
    assert len(said) == 1 and all(part in said[0] for part in parts), [result.text for result in results]


@pytest.mark.long
def test_weights_that_one_node_lacks_are_named_once(on_two_nodes, photos):
    torch.save({}, on_two_nodes.folders[0] / "w.pth")
    results = on_two_nodes(*WORDS, "--data", photos, "--weights", "w.pth")
    assert_refused(results, Exit.NO_INPUT, f"{socket.gethostname()}: --weights: there is no file w.pth")


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--task", "text-classification"], WORDS])
def test_a_model_folder_that_one_node_lacks_is_named_once(words, on_two_nodes, photos, texts):
    """Nothing waits: the node that has it does not go on to what the other one takes no part in."""
    (on_two_nodes.folders[0] / "m").mkdir()
    results = on_two_nodes(*words, "--data", photos if words is WORDS else texts, "--model", "m")
    assert_refused(results, Exit.NO_INPUT, "has no folder m, but other nodes have")
