"""Four processes of a node share one copy of the image index, and of the text table.

Counted is their share (PSS) of the cache's files, and the memory of their own that each has more after reading.
"""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.long
PROCESSES = 4
READ = '''
import json, re, sys
from multiprocessing import get_context
from pathlib import Path
import numpy as np
{imports}
cache, root = Path(sys.argv[1]), sys.argv[2]

def make():
    {make}

def tables():
    {tables}

def anonymous():
    """Bytes of this process's own memory."""
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def mapped():
    """{{file of the cache: this process's share of its memory, in bytes}}"""
    smaps = Path("/proc/self/smaps").read_text()
    parts = re.findall(rf"^\\S+ \\S+ \\S+ \\S+ \\S+ +({{re.escape(str(cache))}}\\S*)(.*?)^VmFlags", smaps, re.M | re.S)
    return {{file: 1024 * int(re.search(r"^Pss: +(\\d+)", rest, re.M)[1]) for file, rest in parts}}

def read(meeting, results):
    before, found = anonymous(), tables()
    for array in [array for table in found for array in vars(table).values() if isinstance(array, np.ndarray)]:
        for begin in range(0, len(array), 2**14):
            array[begin:begin + 2**14].max()
    meeting.wait()  # all have read
    grown = anonymous() - before
    result = mapped(), grown
    meeting.wait()  # none has ended
    results.put(result)

fork = get_context("fork")
first = fork.Process(target=make)  # so that readers are forked by a process that never held anything of it
first.start(), first.join()
meeting, results = fork.Barrier({processes}), fork.SimpleQueue()
for _ in range({processes}):
    fork.Process(target=read, args=(meeting, results)).start()
print(json.dumps([results.get() for _ in range({processes})]))
'''


def copies(cache: Path, root: Path, imports: str, make: str, tables: str) -> tuple[float, int]:
    """Memory of four processes that read all `tables`, in copies of the files that they map; and bytes of a copy."""
    program = READ.format(imports=imports, make=make, tables=tables, processes=PROCESSES)
    done = subprocess.run([sys.executable, "-c", program, cache, root], cwd=ROOT, capture_output=True, text=True,
                          check=True)
    found = json.loads(done.stdout)
    one = sum(Path(file).stat().st_size for file, share in found[0][0].items() if share)
    return sum(sum(shares.values()) + grown for shares, grown in found) / one, one


def test_four_processes_share_one_image_index(tmp_path):
    (tmp_path / "pool").mkdir()
    for number in range(3_000):
        (tmp_path / "pool" / f"a-name-as-long-as-those-of-cameras-{number:05d}.jpg").touch()
    for number in range(100):  # 300,000 paths: folders of links to the same files
        folder = tmp_path / "photos" / "train" / f"class{number % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}").symlink_to(tmp_path / "pool")
    share, one = copies(tmp_path / "cache", tmp_path / "photos",
                        "from data.images.scan import build_index\nfrom data.splits import ValSplit",
                        "tables()", "return list(build_index(root, ValSplit(0.1, 0), cache).splits.values())")
    assert one > 20e6 and 1 <= share < 1.3


def test_four_processes_share_one_text_table(tmp_path):
    with (tmp_path / "texts.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *(("so red a hill", number % 10) for number in range(60_000))])
    share, one = copies(
        tmp_path / "cache", tmp_path / "texts.csv",
        "from data.splits import ValSplit\nfrom data.tables.table import TEXTS\n"
        "from data.texts.index import TextSource\nfrom data.texts.tokenizer import train_tokenizer\n"
        "from models.tasks.text import _open_splits\n"
        "source = TextSource(sys.argv[2], TEXTS, 'text', ('label',), tokenizer='', max_length=8, split_long=False)\n"
        "tokenizer = train_tokenizer(['so red a hill'] * 9, 100)\n",
        "tables()",
        "index, evaluated = _open_splits(source, tokenizer, ValSplit(0.4, 0), cache)\n"
        "    return [*index.splits.values(), evaluated]")
    assert one > 3e6 and 1 <= share < 1.3
