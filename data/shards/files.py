"""Which files of a set are of which split: by the folder that they lie in, or by their names.

Tests: tests/end_to_end/test_shards.py
"""

import glob
import os
import re
from collections import defaultdict

from data.splits import SPLIT_NAMES

_SPLIT = re.compile(rf"(?:^|[-_.])({'|'.join(SPLIT_NAMES)})(?=[-_.\d])")  # in the name of a file


def files_by_split(root: str, ending: str) -> dict[str, list[str]]:
    """{split, as the data call it: its files with this ending}; all are of train if no name says a split.

    root: a folder, a file or a pattern. Empty if there are none.
    """
    alone = sorted(filter(os.path.isfile, glob.glob(root))) if root.endswith(ending) else []
    if os.path.isdir(root):
        of_folder = {name: _listed(root, name, ending) for name in (*SPLIT_NAMES, "data")}  # there may be many folders
        if found := {name: paths for name, paths in of_folder.items() if paths and name in SPLIT_NAMES}:
            return found
        alone = _listed(root, "", ending) or of_folder.get("data", [])  # where the hub has them
    named = defaultdict(list)
    for path in alone:
        word = _SPLIT.search(os.path.basename(path))
        named[word[1] if word else ""].append(path)
    return dict(named) if alone and "" not in named and "train" in named else {"train": alone} if alone else {}


def _listed(root: str, name: str, ending: str) -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(os.path.join(root, name)), f"*{ending}")))
