"""The files of texts in a data folder: .csv, .tsv, .jsonl or .txt, by split.

    files, notes = find_tables("reviews")                       # {"train": [train.csv], "val": [val.csv]}
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from data.splits import SPLIT_NAMES, VAL_NAMES, splits_in
from data.tables.table import column_names
from utils.errors import Exit, UserError, counted, some
from utils.files import is_users

MANY = 10_000  # files that are looked at to find out what a folder holds
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
SUFFIXES = (".csv", ".tsv", ".jsonl", ".txt")


def find_tables(root: str, labels: Sequence[str] = ()) -> tuple[dict[str, list[Path]], list[str]]:
    """The files of each split (train and, if there are such, val and test), and notes for the user.

    root: a file; or a folder with train.csv, val.csv, ... (any of SUFFIXES) or with train/, val/, ... that hold such
    files; or a folder that holds such files directly, all for training. labels: columns without which test is not used
    for validation. Raises UserError (65, 66).
    """
    # a file
    top = Path(root)
    if not top.exists():
        raise UserError(f"--data {root}: there is no such file or folder", Exit.NO_INPUT)
    if not top.is_dir():
        return {"train": [table_at(root)]}, []

    # a folder with splits
    if train := _files_of(top, "train"):
        val = next((name for name in VAL_NAMES if _files_of(top, name)), "test")
        files = {"train": train} | {name: found for name in (val, "test") if (found := _files_of(top, name))}
        named, notes = splits_in(files), []
        if named.get("val") == "test" and (lacking := [
                name for name in labels if name not in (column_names(files["test"][0]) or labels)]):
            named = {"train": "train", "test": "test"}
            notes.append(f"{files['test'][0].name} has no column {some(lacking)}, so it is not used for validation")
        if (val := named.get("val", "val")) != "val":
            notes.append(f"there is no val, so {val} is used for validation")
        return {split: files[name] for split, name in named.items()}, notes

    # a folder without splits
    names = sorted(path.name for path in top.iterdir() if is_users(path.name))
    tables = [top / name for name in names if _is_table(top / name)]
    files = islice(top.rglob("*"), 0 if tables else MANY)
    if image := next((path for path in files if path.suffix.lower() in IMAGE_SUFFIXES), None):
        raise UserError(f"--data {root}: it holds no texts for training, but images ({image.relative_to(top)}); for"
                        " images give --task image-classification", Exit.BAD_DATA)
    if similar := [name for name in names if Path(name).stem.lower() in SPLIT_NAMES
                   and (top / name in tables or (top / name).is_dir())]:
        raise UserError(f"--data {root}: has {some(similar)} but no texts for training; name the training file"
                        " train.csv (or .tsv, .jsonl, .txt), or put such files into train/", Exit.BAD_DATA)
    if not tables:
        raise UserError(f"--data {root}: it holds {some(names)}, and no table or text file; put train.csv (or .tsv,"
                        " .jsonl, .txt) into this folder", Exit.BAD_DATA)
    return {"train": tables}, [
        f"there is no train, so all of --data is training data ({counted(len(tables), 'file')})"]


def table_at(name: str) -> Path:
    """The file of texts with this name. Raises UserError: 66 if there is none, 65 if it has none of SUFFIXES."""
    path = Path(name)
    if not path.is_file():
        raise UserError(f"{name}: there is no such file", Exit.NO_INPUT)
    if not _is_table(path):
        way_out = "; for images give --task image-classification" if path.suffix.lower() in IMAGE_SUFFIXES else ""
        raise UserError(f"{name}: a file of texts ends in {', '.join(SUFFIXES)}{way_out}", Exit.BAD_DATA)
    return path


def _files_of(top: Path, split: str) -> list[Path]:
    """The files of a split: top/split.csv, or those in top/split/. Raises UserError if there are several kinds."""
    inside = sorted(path for path in (top / split).rglob("*") if _is_table(path)
                    and all(map(is_users, path.relative_to(top).parts)))
    found = [top / f"{split}{suffix}" for suffix in SUFFIXES if _is_table(top / f"{split}{suffix}")]
    if len(kinds := found + ([top / split] if inside else [])) > 1:
        raise UserError(f"--data {top}: {' and '.join(path.name for path in kinds)} are both {split}; keep one",
                        Exit.BAD_DATA)
    return inside or found


def _is_table(path: Path) -> bool:
    return path.suffix in SUFFIXES and path.is_file()
