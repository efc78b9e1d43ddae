"""Pack images with classes into tar files, which train.py reads as the folder that they were.

    python -m data.pack DATA --output OUT [--shard-size 500MB]
    python train.py --data OUT              # with --strategy exact: the hash of --data DATA

OUT gets SPLIT/00000.tar, ..., classes.txt, and beside each tar file a table of its images with their sizes and
sha256. A member is CLASS/NAME.jpg; CLASS/NAME.cls beside it has the number of its class, by the lines of classes.txt. A
dot in NAME is written %2E, because the first dot ends the name of a sample. The same DATA give the same bytes. The same
command continues after a kill.

Tests: tests/end_to_end/test_shards.py
"""

import argparse
import csv
import hashlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.images.decode import opened
from data.images.index import EXTENSIONS, FolderIndex, ImageIndex
from data.images.table import build_table_index, is_table
from data.shards.headers import MAX_NAME
from data.shards.index import build_image_index
from data.shards.shard import ENDING, member_of, stat_of
from data.shards.writing import CLASSES, write_classes, write_shard
from data.splits import ValSplit, plain
from data.tables.source import TableSource
from data.tables.table import IMAGES
from utils.array_folder import digest_of
from utils.errors import Exit, Parser, UserError, counted, exit_after, say, some
from utils.files import cache_path, lines_of, write_atomically

PARSER = Parser("data.pack", __doc__)
PARSER.add_argument("data", metavar="DATA", help="a folder, a table (train and val of it) or tar files, as train.py"
                    " --data takes them")
PARSER.add_argument("--output", metavar="OUT", required=True, help="folder for the tar files")
PARSER.add_argument("--image-column", metavar="NAME", default="auto", help="as of train.py (default: auto)")
PARSER.add_argument("--label-column", metavar="NAME", default="label", help="as of train.py (default: label)")
PARSER.add_argument("--shard-size", metavar="SIZE", default="1GB",
                    help="of a tar file, about; such as 500MB (default: 1GB)")
UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Packed:
    """A sample, as it will lie in a tar file."""

    member: str  # CLASS/NAME.jpg
    label: int
    path: str
    stat: tuple[int, int]  # size, time


def main(given: argparse.Namespace) -> int:
    """Pack each split. Returns the exit code. Raises UserError."""
    size = re.fullmatch(rf"(\d+)({'|'.join(UNITS)})", given.shard_size)
    if not size or size[1].strip("0") == "":
        raise UserError(f"--shard-size {given.shard_size}: give a whole number of {', '.join(UNITS)}, such as 500MB")
    index, output = index_of(given.data, (given.image_column, given.label_column)), Path(given.output)
    for text in index.notes:
        say(f"pack: {text}")
    try:
        output.mkdir(parents=True, exist_ok=True)
        if (file := output / CLASSES).exists() and file.read_bytes() != "".join(
                f"{name}\n" for name in index.classes).encode(errors="replace"):
            if [*output.rglob(f"*{ENDING}")]:
                raise UserError(f"{output} was packed from other data; use an empty --output", Exit.CANNOT_CREATE)
            file.unlink()  # of a packing that was refused
        write_classes(output, index.classes)
        for split, samples in index.splits.items():
            is_folder = not is_table(given.data) and os.path.isdir(os.path.join(samples.root, "train"))
            name = samples.name(0).partition(b"/")[0].decode() if is_folder else split * (len(index.splits) > 1)
            folder = output / name
            pack(cut(samples, index.classes, is_folder, int(size[1]) * UNITS[size[2]]), folder)
            say(f"pack: {counted(len(samples), 'sample')} of {split} in {folder}", sys.stdout)
    except OSError as error:
        raise UserError(f"{error.filename or output}: {error.strerror}", Exit.IO) from None
    return Exit.DONE


def index_of(data: str, columns: tuple[str, str]) -> FolderIndex:
    """All samples of the data, none held out; of a table all but test. columns: of images and labels.

    Raises UserError (65, 66, 74).
    """
    val = ValSplit(0, 0, only="train")
    if is_table(data):
        return build_table_index(TableSource(data, IMAGES, columns[0], columns[1:]), val, cache_path())
    return build_image_index(data, val, cache_path(), say, columns)


def cut(samples: ImageIndex, classes: Sequence[str], has_folder: bool, most: int) -> Iterator[list[Packed]]:
    """The samples of each tar file: in their order, until `most` bytes are reached. Raises UserError (65), OSError."""
    part, num_bytes, keys = [], 0, set()
    for index, label in enumerate(samples.labels.tolist()):
        name = os.fsdecode(samples.name(index))
        name = name.partition("/")[2] if has_folder else name
        name = name if plain(name.partition("/")[0]) == classes[label] else f"{classes[label]}/{name}"
        if ("\0" in name or name.startswith("/") or ".." in name.split("/") or not name.lower().endswith(EXTENSIONS)
                or len(os.fsencode(member_of(os.fsencode(name)))) > MAX_NAME):
            raise UserError(f"{name} cannot be packed: a sample is one image in the folder of the data, whose name ends"
                            f" in {' '.join(EXTENSIONS)} and has at most {MAX_NAME} bytes", Exit.BAD_DATA)
        if (key := name.rpartition(".")[0]) in keys:
            raise UserError(f"{name} cannot be packed: another image has its name with another ending, and in a tar"
                            " file both would be one sample; rename one", Exit.BAD_DATA)
        keys.add(key)
        path = samples.path(index)
        part.append(Packed(os.fsdecode(member_of(os.fsencode(name))), label, path, stat_of(path)))
        num_bytes += part[-1].stat[0]
        if num_bytes >= most:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part


def pack(parts: Iterator[list[Packed]], folder: Path) -> None:
    """Write what is not there yet. Raises UserError (73) where the folder holds other tar files, OSError."""
    folder.mkdir(exist_ok=True)
    written = set()
    for number, part in enumerate(parts):
        file = folder / f"{number:05}{ENDING}"
        written.add(file.name)
        source = digest_of([(each.member, each.label, each.path, each.stat) for each in part])
        if file.exists():
            if lines_of(file.with_suffix(".csv"))[:1] != [f"# {source}".encode()]:
                raise UserError(f"{file} was packed from other data; use an empty --output", Exit.CANNOT_CREATE)
            continue
        table = io.StringIO()
        write = csv.writer(table, lineterminator="\n").writerow
        table.write(f"# {source}\n")
        write(["member", "size", "sha256"])
        file.with_suffix(".packed").unlink(missing_ok=True)  # of a packing that was killed
        write_shard(file.with_suffix(".packed"), _contents(part, write))
        write_atomically(file.with_suffix(".csv"), table.getvalue())  # first: a tar file has its table
        os.rename(file.with_suffix(".packed"), file)
    for leaving in folder.glob(".*.packed.*"):  # of a packing that was killed
        leaving.unlink(missing_ok=True)
    if others := sorted(path.name for path in folder.glob(f"*{ENDING}") if path.name not in written):
        raise UserError(f"{folder} holds {some(others)}, which is of other data; remove it, or use an empty --output",
                        Exit.CANNOT_CREATE)


def _contents(part: list[Packed], write: Callable[[list], object]) -> Iterator[tuple[str, bytes, int]]:
    for each in part:
        with opened(each.path) as file:
            content = file.read()
        write([ascii(each.member)[1:-1], len(content), hashlib.sha256(content).hexdigest()])
        yield each.member, content, each.label


if __name__ == "__main__":
    GIVEN = PARSER.parse_args()
    exit_after(lambda: main(GIVEN), PARSER.name)
