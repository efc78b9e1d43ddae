"""Which files of a set are of which split: by the folder that they lie in, or by their names.

Tests: tests/end_to_end/test_shards.py
"""

import glob
import os
import re
from collections import defaultdict
from collections.abc import Mapping

from data.splits import SPLIT_NAMES, VAL_NAMES, splits_in
from utils.errors import Exit, UserError, some
from utils.files import is_users

_SPLIT = re.compile(rf"(?:^|[-_.])({'|'.join(SPLIT_NAMES)})(?=[-_.\d])")  # in the name of a file


def files_by_split(root: str, ending: str) -> dict[str, list[str]]:
    """{split, as the data call it: its files with this ending}; all are of train if no name says a split.

    root: a folder, a file or a pattern. The files of a folder lie in it, in the folders of its splits, or in its only
    folder; beside other folders they do not count, which may be classes. Empty if there are none. Raises UserError (65)
    if some names say a split, and others do not.
    """
    if not os.path.isdir(root):
        alone = [root] if os.path.isfile(root) else sorted(filter(os.path.isfile, glob.glob(root)))
        alone = alone if root.endswith(ending) else []
    else:
        folders, alone = _listed(root, ending)
        alone = alone if {*folders} <= {"data"} else []
        for name in folders if len(folders) == 1 else [name for name in folders if name in (*SPLIT_NAMES, "data")]:
            inside, files = _listed(os.path.join(root, name), ending)  # the hub has data/train-0.parquet
            alone += files if not inside else []

    named = defaultdict(list)
    for path in alone:
        place, file = os.path.split(os.path.normpath(path))
        folder, word = os.path.basename(place), ["", *_SPLIT.findall(file)][-1]
        is_below = os.path.isdir(root) and place != os.path.normpath(root)  # else --data itself may be called train
        name = folder if folder in SPLIT_NAMES and (is_below or not word) else word
        named["train" if name == "training" else name].append(path)
    if "" in named and len(named) > 1:
        raise UserError(f"--data {root}: the name of {some(named[''])} says no split, and others do; rename it, move it"
                        " away, or give a pattern", Exit.BAD_DATA)
    return {name or "train": paths for name, paths in named.items()}


def used_splits(root: str, by_split: Mapping[str, list[str]], only: str = "") -> tuple[dict[str, list[str]], list[str]]:
    """The files of train and, if they are there, val and test; and notes for the user. Raises UserError (65).

    by_split: those of files_by_split(). only: see ValSplit.
    """
    names = splits_in(by_split, (*VAL_NAMES[:-1], "eval", VAL_NAMES[-1]))
    if "train" not in by_split:
        if names.get(only, only) not in by_split:
            raise UserError(f"--data {root}: has files of {some(by_split)}, but none of train; name the files for"
                            " training, or their folder, train", Exit.BAD_DATA)
        names = {only: names.get(only, only)}
    notes = [f"the files of {name} are not used" for name in by_split if name not in names.values()]
    if names.get("val", "val") != "val":
        notes.append(f"there is no val, so {names['val']} is used for validation")
    return {split: by_split[name] for split, name in names.items()}, notes


def _listed(folder: str, ending: str) -> tuple[list[str], list[str]]:
    """The names of the folders in it, and the paths of its files with this ending, sorted."""
    with os.scandir(folder) as entries:
        every = sorted((entry.name, entry.is_dir()) for entry in entries if is_users(entry.name))
    return ([name for name, is_folder in every if is_folder],
            [os.path.join(folder, name) for name, is_folder in every if not is_folder and name.endswith(ending)])
