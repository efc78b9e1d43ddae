"""How many CPU cores a process may keep busy: by its affinity, and by the CPU quotas of its control groups.

A quota (docker run --cpus, limits.cpu of Kubernetes) is one for all processes of a container together, and nproc does
not know of it. No package is imported: launch.sh asks too, at every start.
"""

import math
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_cores(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """Cores that this process may use, a quota rounded down; at least 1."""
    allowed = os.sched_getaffinity(0)
    return fair_share(allowed, [allowed], cpu_quota(cgroups, own))


def fair_share(allowed: Collection[int], affinities: Sequence[Collection[int]], quota: float) -> int:
    """Cores for one process of a node, at least 1.

    allowed: numbers of the cores that it may use. affinities: the same of every process of the node, itself too; where
    processes are bound to NUMA nodes they differ. quota: cores that all of these processes together may keep busy.
    """
    sharing = sum(not set(allowed).isdisjoint(other) for other in affinities)
    return max(1, int(min(len(allowed) / sharing, quota / len(affinities))))


def cpu_quota(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> float:
    """Cores that the control groups of this process may keep busy: the least of them and their parents, or infinite.

    cgroups: where both versions are mounted. own: this process's groups, as in cgroups(7). In a container the path may
    be one that the mount does not show, because the container's own group is the root there.
    """
    groups = []
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "cpu" in controllers.split(","):  # version 2; version 1, by its usual link
                groups.append((cgroups / ("cpu" if controllers else "")).joinpath(*path.split("/")))
    return min((_quota(folder) for group in groups for folder in (group, *group.parents)), default=math.inf)


def _quota(folder: Path) -> float:
    """Of one control group alone."""
    with suppress(OSError):
        quota, period = (folder / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    with suppress(OSError):
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 else math.inf
    return math.inf
