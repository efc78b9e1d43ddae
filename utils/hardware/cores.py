"""How many CPU cores a process may use: by its affinity and by the CPU quotas of its control groups.

All processes of a container share one quota (docker run --cpus, limits.cpu of Kubernetes), and nproc ignores it.
This file imports no package, because launch.sh runs it at every start.
"""

import math
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_cores(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """Cores that this process may use, at least 1; a quota is rounded down."""
    allowed = os.sched_getaffinity(0)
    return fair_share(allowed, [allowed], cpu_quota(cgroups, own))


def fair_share(allowed: Collection[int], affinities: Sequence[Collection[int]], quota: float) -> int:
    """Cores for one process of a node, at least 1.

    allowed: indices of the cores that it may use. affinities: the same for every process of the node, itself included;
    they differ if processes are bound to NUMA nodes. quota: cores that all these processes together may use.
    """
    sharing = sum(not set(allowed).isdisjoint(other) for other in affinities)
    return max(1, int(min(len(allowed) / sharing, quota / len(affinities))))


def cpu_quota(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> float:
    """Cores that the control groups of this process may use: the smallest limit of them and their parents, or inf.

    cgroups: where cgroup versions 1 and 2 are mounted. own: the file that lists this process's groups (cgroups(7)).
    Inside a container the mount may lack that path: the container's own group is then the root of the mount.
    """
    groups = []
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "cpu" in controllers.split(","):  # version 2; 1 by its usual link
                groups.append((cgroups / ("cpu" if controllers else "")).joinpath(*path.split("/")))
    return min((_quota(folder) for group in groups for folder in (group, *group.parents)), default=math.inf)


def _quota(folder: Path) -> float:
    """The limit of one control group, without its parents: cores, or inf."""
    with suppress(OSError):
        quota, period = (folder / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    with suppress(OSError):
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 else math.inf
    return math.inf
