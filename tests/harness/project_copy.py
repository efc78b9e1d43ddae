"""Copies of the project, in which tests type what its pages say."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def copy_project(folder: Path) -> Path:
    """The files that git tracks or would, in a `folder` of their own, with this environment as its .venv."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(Path(sys.executable).parent.parent)
    return folder


def run_in(folder: Path, line: str, cache: Path, limit_s: float = 900) -> subprocess.CompletedProcess[str]:
    """What became of a line of a shell in `folder`."""
    inherited = {name: value for name, value in os.environ.items()
                 if not name.startswith(("LOCKSTEP", "MAKE")) and "RANK" not in name}
    env = inherited | {"LOCKSTEP_CACHE": str(cache), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=limit_s)
