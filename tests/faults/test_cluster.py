"""launch.sh on hosts of its own: static, elastic, late, slow, cut off, silent, come back.

`make cluster`; a few in `make test`.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.harness.hosts import hosts, remembering
from tests.harness.launches import STEPS, WORDS, assert_gone, messages
from tests.harness.run_directory import outcome, status, trained_steps
from utils.errors import Exit
from utils.files import CACHED_S

SHORT = ["--step-timeout", 7]
MASTER = "10.77.0.1"  # the first host
FLAGS = {"--nnodes": 2, "--master-addr": MASTER}
PLATFORMS = {  # which say the same by variables
    "PET": lambda rank: {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank),
                         "PET_MASTER_ADDR": MASTER, "PET_MASTER_PORT": "29400"},  # Kubeflow Trainer v2
    "node-style": lambda rank: {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": MASTER,
                                "MASTER_PORT": "23456"},  # PyTorchJob
    "NNODES": lambda rank: {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": "n1", "NPROC_PER_NODE": "1"}}


@pytest.fixture
def words(photos, run_dir):
    return [*WORDS, "--data", photos, "--run-dir", run_dir, "--save-every", 1]


@pytest.fixture
def start_on(start_launcher):
    """start_on(host, *words, rank=None, nnodes=2, master=MASTER, **environment): launch.sh there.

    rank=None: others than flags say who it is.
    """
    def start(host, *words, rank=None, nnodes=2, master=MASTER, **environment):
        flags = [] if rank is None else ["--nnodes", nnodes, "--node-rank", rank, "--master-addr", master]
        return start_launcher(*flags, *words, inside=host.inside(), env=environment)
    return start


def assert_finished(launches, run, undisturbed):
    results = [launch.wait() for launch in launches]
    assert [result.returncode for result in results] == [0] * len(results), [result.text for result in results]
    assert outcome(run) == outcome(undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("platform", [
    name if name == "PET" else pytest.param(name, marks=pytest.mark.slow) for name in PLATFORMS])
def test_two_hosts_compute_what_one_does_with_as_many_processes(platform, words, run_dir, start_on, undisturbed):
    with hosts(2) as pair:
        launches = [start_on(host, *words, **PLATFORMS[platform](rank)) for rank, host in enumerate(pair)]
        assert_finished(launches, run_dir, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(("nnodes", "master"), [(2, "fd77::1"), ("2:2", "[fd77::1]")])
def test_hosts_that_know_ipv6_alone_compute_the_same(nnodes, master, words, run_dir, start_on, undisturbed):
    with hosts(2, "fd77::") as pair:
        assert_finished([start_on(host, *words, rank=rank, nnodes=nnodes, master=master)
                         for rank, host in enumerate(pair)], run_dir, undisturbed)


@pytest.mark.slow
def test_three_hosts_compute_what_one_does_with_as_many_processes(words, run_dir, start_on, run_torchrun):
    straight = run_dir.with_name("straight")
    assert run_torchrun(3, *words, "--run-dir", straight).returncode == 0
    with hosts(3) as three:
        assert_finished([start_on(host, *words, rank=rank, nnodes=3) for rank, host in enumerate(three)],
                        run_dir, straight)


@pytest.mark.slow
@pytest.mark.parametrize("elastic", [False, True])
def test_a_late_host_and_a_slow_link_change_nothing(elastic, words, run_dir, start_on, undisturbed):
    with hosts(2) as pair:
        pair[1].slow("100mbit")
        nnodes = "2:2" if elastic else 2
        first = start_on(pair[0], *words, rank=0, nnodes=nnodes)
        first.wait_for(lambda: any("torchrun.py" in name for name in first.commands()),
                       "torchrun on the first host")
        assert_finished([first, start_on(pair[1], *words, rank=1, nnodes=nnodes)], run_dir, undisturbed)


@pytest.mark.parametrize(("fault", "lost"), [
    ("silence", 1), ("silence", 0), ("cut", 1), ("cut", 0), ("drop", 1)])
@pytest.mark.slow
def test_hosts_that_lose_each_other_are_76_and_the_same_command_goes_on(
        fault, lost, words, run_dir, start_on, undisturbed):
    with hosts(2) as pair:
        launches = [start_on(host, *words, *SHORT, rank=rank) for rank, host in enumerate(pair)]
        launches[0].wait_for(lambda: trained_steps(run_dir) >= 2, "two steps")
        getattr(pair[lost], fault)()
        results = [assert_gone(launch, run_dir) for launch in launches]
        assert [result.returncode for result in results] == [Exit.LOST_PEERS] * 2, [result.text for result in results]
        assert 2 <= trained_steps(run_dir) < STEPS, "too late to test anything"
        pair[lost].plug()
        assert_finished([start_on(host, *words, rank=rank) for rank, host in enumerate(pair)], run_dir, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_dies_ends_the_others_with_76(lost, words, run_dir, start_on):
    with hosts(2) as pair:
        launches = [start_on(host, *words, *SHORT, rank=rank) for rank, host in enumerate(pair)]
        launches[0].wait_for(lambda: trained_steps(run_dir) >= 2, "two steps")
        launches[lost].kill_all()
        survivor = assert_gone(launches[1 - lost], run_dir)
        assert survivor.returncode == Exit.LOST_PEERS, survivor.text
        assert 2 <= trained_steps(run_dir) < STEPS, "too late to test anything"


@pytest.mark.slow
def test_retries_meet_again_after_a_host_was_lost(words, run_dir, start_on, undisturbed):
    with hosts(2) as pair:
        launches = [start_on(host, "--retries", 3, *words, *SHORT, rank=rank) for rank, host in enumerate(pair)]
        launches[0].wait_for(lambda: trained_steps(run_dir) >= 2, "two steps")
        launches[1].kill_rank(1)
        assert_finished(launches, run_dir, undisturbed)
        assert "retry 1 of 3" in launches[0].wait().err


@pytest.mark.slow
def test_an_elastic_run_that_loses_and_regains_a_host_ends_as_on_1_process(
        words, run_dir, start_on, run_train):
    words = [*words, "--strategy", "exact", "--epochs", 40, "--eval-every", 1000, "--save-every", 5, "--fresh"]
    with hosts(2) as pair:
        first, second = (start_on(host, *words, rank=rank, nnodes="1:2") for rank, host in enumerate(pair))
        first.wait_for(lambda: trained_steps(run_dir) >= 20, "20 steps on two hosts")
        second.kill_all()
        first.wait_for(lambda: status(run_dir)["processes"] == 1, "the first goes on alone")
        alone = trained_steps(run_dir)
        first.wait_for(lambda: trained_steps(run_dir) >= alone + 5, "five steps alone")
        second = start_on(pair[1], *words, rank=1, nnodes="1:2")
        first.wait_for(lambda: status(run_dir)["processes"] == 2, "they go on together")
        results = [launch.wait() for launch in (first, second)]
    assert [result.returncode for result in results] == [0, 0], [result.text for result in results]
    assert status(run_dir)["start"] == 3 and not (run_dir.parent / ".old").exists()
    straight = run_dir.with_name("straight")
    assert run_train(*words, "--run-dir", straight).returncode == 0
    assert outcome(run_dir) == outcome(straight)


@pytest.mark.slow
def test_a_host_that_does_not_share_the_run_directory_is_refused(words, run_dir, start_launcher):
    with hosts(2) as pair:
        own = ["sh", "-c", f"mount -t tmpfs none {run_dir.parent} && exec \"$@\"", "sh"]  # a disk of its own there
        launches = [start_launcher("--nnodes", 2, "--node-rank", rank, "--master-addr", MASTER, *words,
                                   inside=host.inside(*own[:5 * rank])) for rank, host in enumerate(pair)]
        for result in [assert_gone(launch, run_dir, CACHED_S + 60) for launch in launches]:
            assert result.returncode == Exit.IO, result.text
        said = [line for launch in launches for line in messages(launch.wait())]
    assert len(said) == 1 and (
        f"does not see {run_dir}/" in said[0] and "on several nodes the run directory must be shared" in said[0]), said
    assert trained_steps(run_dir) == 0


@pytest.mark.slow
def test_a_disk_that_remembers_what_was_not_there_is_a_shared_one(texts, run_dir, start_launcher):
    """As NFS does: a new run, the same command once it is finished, and --fresh, whose data would be the old run's."""
    words = ["--task", "text-classification", "--data", texts, "--model", "bert-tiny", "--max-steps", 2,
             "--run-dir", run_dir, "--vocab-size"]
    with hosts(2) as pair, remembering(run_dir.parent, 20) as view:
        for more, part in ([300], "does not see"), ([300], "is finished"), ([200, "--fresh"], "the old run is in"):
            launches = [start_launcher("--nnodes", 2, "--node-rank", rank, "--master-addr", MASTER, *words, *more,
                                       inside=host.inside(*view[:4 * rank])) for rank, host in enumerate(pair)]
            results = [launch.wait() for launch in launches]
            assert [result.returncode for result in results] == [0, 0], [result.text for result in results]
            assert part in "".join(result.text for result in results)


@pytest.mark.slow
def test_two_hosts_verify_a_run_in_a_folder_that_both_share(words, run_dir, run_train, start_launcher, tmp_path):
    """The disk remembers what was not there, as NFS does; without a shared TMPDIR they refuse."""
    run = run_train(*words, "--strategy", "exact", "--epochs", 1)
    assert run.returncode == 0, run.text
    own = ["sh", "-c", f'mount -t tmpfs none {tmp_path} && exec "$@"', "sh"]
    with hosts(2) as pair, remembering(run_dir.parent, 20) as view:
        for folder, code in ((run_dir.parent, Exit.DONE), (tmp_path, Exit.CANNOT_CREATE)):
            environment = {"LOCKSTEP_SCRIPT": str(ROOT / "ask/verify.py"), "TMPDIR": str(folder)}
            launches = [start_launcher("--nnodes", 2, "--node-rank", rank, "--master-addr", MASTER, run_dir,
                                       inside=host.inside(*own, *view[:4 * rank]), env=environment)
                        for rank, host in enumerate(pair)]
            results = [launch.wait() for launch in launches]
            text = "".join(result.text for result in results)
            assert [result.returncode for result in results] == [code, code], text
            assert text.count("verified: " if code == Exit.DONE else "TMPDIR must name a folder that all") == 1, text


def test_an_own_address_that_no_interface_has_needs_a_word(start_torchrun):
    with hosts(1) as [host]:
        for route in ("local 10.99.0.0/24 dev lo", "10.88.0.0/24 dev eth0 src 10.99.0.5"):
            subprocess.run(host.inside("ip", "route", "add", *route.split()), check=True)
        ask = host.inside(sys.executable, "-m", "utils.distributed.network", "10.88.0.1", 0, 0)
        refused = start_torchrun(None, command=ask).wait()
        assert (refused.returncode, "no network interface has the address 10.99.0.5 of the route to other hosts:"
                " set GLOO_SOCKET_IFNAME" in refused.err) == (64, True), refused.text
        told = start_torchrun(None, command=ask, env={"GLOO_SOCKET_IFNAME": "eth0"}).wait()
    assert told.out == "10.99.0.5 eth0 10.88.0.1 0\n", told.text


def test_without_the_launcher_a_name_that_leads_home_is_refused_at_once(words, run_dir, start_torchrun):
    with hosts(2) as pair:
        launches = [start_torchrun(None, "--nnodes=2", f"--node-rank={rank}", f"--master-addr={MASTER}", "train.py",
                                   *words, command=[*host.inside(), Path(sys.executable).with_name("torchrun")])
                    for rank, host in enumerate(pair)]
        results = [assert_gone(launch, run_dir) for launch in launches]
    for result in results:
        assert (result.code, "resolves to 127.0.1.1, which other hosts cannot reach: start with ./launch.sh"
                in result.err) == (64, True), result.text
    assert not run_dir.exists()
