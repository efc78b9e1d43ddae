"""utils/hardware/cores.py: the cores that affinity and CPU quotas allow, and how processes of a node share them."""

import math
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from utils.hardware.cores import available_cores, cpu_quota, fair_share


def printed(program, within=lambda *words: words):
    """What a Python program of the project prints; within: wraps its command in another one."""
    command = within(sys.executable, "-c", program)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_without_a_quota_the_affinity_counts(tmp_path):
    (tmp_path / "self").write_text("0::/\n")
    assert available_cores(tmp_path, tmp_path / "self") == len(os.sched_getaffinity(0))


def test_a_narrowed_affinity_counts():
    first = min(os.sched_getaffinity(0))
    assert printed(f"import os; os.sched_setaffinity(0, {{{first}}})\n"
                   "from utils.hardware.cores import available_cores; print(available_cores())") == "1\n"


QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"
V2, V1 = "0::/kubepods/pod1/main\n", "9:name=systemd:/x\n5:cpuset:/y\n1:cpu,cpuacct:/kubepods/pod1/main\n0::/\n"


@pytest.mark.parametrize("own, files, expected", [
    (V2, {"kubepods/pod1/main/cpu.max": "250000 100000"}, 2.5),
    (V2, {"kubepods/pod1/main/cpu.max": "max 100000"}, math.inf),
    (V2, {"kubepods/pod1/main/cpu.max": "max 100000", "kubepods/pod1/cpu.max": "150000 50000",
          "kubepods/cpu.max": "800000 100000"}, 3),
    ("0::/\n", {"cpu.max": "100000 100000"}, 1),
    ("0::/../other\n", {"cpu.max": "100000 100000"}, 1),
    (V1, {f"cpu/kubepods/pod1/main/{QUOTA}": "200000", f"cpu/kubepods/pod1/main/{PERIOD}": "100000"}, 2),
    (V1, {f"cpu/kubepods/pod1/main/{QUOTA}": "-1", f"cpu/kubepods/pod1/main/{PERIOD}": "100000"}, math.inf),
    (V1, {f"cpu/{QUOTA}": "50000", f"cpu/{PERIOD}": "100000"}, 0.5),
    (None, {}, math.inf),
], ids=["v2", "v2 without a limit", "v2, a parent's", "v2, a container's own root", "v2, outside the namespace",
        "v1", "v1 without a limit", "v1, a container that sees its own group as the root", "no control groups"])
def test_a_quota_is_the_smallest_of_the_group_and_its_parents(tmp_path, own, files, expected):
    """The folder imitates /sys/fs/cgroup."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    if own is not None:
        (tmp_path / "self").write_text(own)
    assert cpu_quota(tmp_path, tmp_path / "self") == expected


@pytest.mark.parametrize("quota, expected", [(0.5, 1), (1, 1), (1.9, 1)])
def test_a_real_quota_limits_the_cores_to_at_least_one(in_control_group, quota, expected):
    program = "from utils.hardware.cores import available_cores, cpu_quota; print(available_cores(), cpu_quota())"
    assert printed(program, lambda *words: in_control_group(quota, *words)) == f"{expected} {float(quota)}\n"


NODES = [list(range(16 * node, 16 * node + 16)) for node in range(4)]  # cores


@pytest.mark.parametrize("affinities, quota, expected", [
    ([list(range(64))] * 8, math.inf, 8),
    ([NODES[gpu // 2] for gpu in range(8)], math.inf, 8),  # bound: two processes share a NUMA node's cores, not eight
    ([NODES[gpu] for gpu in range(4)], math.inf, 16),
    ([[0], [1], [2]], math.inf, 1), ([[0, 1]] * 4, math.inf, 1),
    ([NODES[gpu // 2] for gpu in range(8)], 32, 4),  # all processes share one quota
    ([list(range(64))] * 2, 5, 2), ([list(range(64))] * 8, 2, 1)])
def test_processes_share_the_cores_that_they_have_in_common(affinities, quota, expected):
    assert {fair_share(allowed, affinities, quota) for allowed in affinities} == {expected}


def test_a_process_shares_with_those_that_may_use_its_cores():
    affinities = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [8, 9]]
    assert [fair_share(allowed, affinities, math.inf) for allowed in affinities] == [3, 3, 2]


def test_counting_cores_imports_nothing_heavy():
    program = "import sys, utils.hardware.cores; print({'torch', 'numpy', 'yaml'} & set(sys.modules))"
    assert printed(program) == "set()\n"
