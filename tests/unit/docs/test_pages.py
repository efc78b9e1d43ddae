"""The pages: code that they quote is the program's, what they link to exists, and no line is too long."""

import re
import textwrap
from pathlib import Path

import pytest

from utils.strategies import STRATEGIES

ROOT = Path(__file__).parents[3]
ROOMS = ("engine", "models", "data", "utils")
PATHS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("extras/*/*.md"), ROOT / "benchmarks/README.md"]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PATHS}
MODULES = [ROOT / "train.py", *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
PROGRAM = {path.relative_to(ROOT).as_posix(): path.read_text().splitlines() for path in MODULES}
QUOTING = ("README.md", "docs/design.md", "docs/learning.md")
MAX_COLUMNS = 120
FENCE = re.compile(r"^ *```(\w*)$")
LINK = re.compile(r"\]\(([^)\s]+)\)")
LEFT_OUT = "..."  # a line of a quotation that stands for lines left out


def split(text):
    """(numbered lines outside code blocks, code blocks as (language, the paragraph before it, lines))."""
    prose, blocks, block, paragraph = [], [], None, ""
    is_open = False  # whether the paragraph goes on
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if fence and block is None:
            block = (fence[1], paragraph, [])
        elif fence:
            blocks.append(block)
            block, paragraph = None, ""
        elif block is not None:
            block[2].append(line)
        else:
            prose.append((number, line))
            if line.strip():
                paragraph = f"{paragraph} {line}" if is_open else line
            is_open = bool(line.strip())
    assert block is None, "a code block that has no end"
    return prose, blocks


def quotations(page):
    """(the text before it, the lines) of each ```python block, dedented."""
    return [(before, textwrap.dedent("\n".join(lines)).splitlines())
            for language, before, lines in split(PAGES[page])[1] if language == "python"]


def is_in(quotation, lines):
    """Whether the quotation is found in `lines`, whole lines in order, at any indentation that all of it has."""
    parts = [[]]
    for line in quotation:
        if line.strip() == LEFT_OUT:
            parts.append([])
        else:
            parts[-1].append(line)
    parts = [part for part in parts if part]
    return any(_have_order([[" " * indent + line if line else line for line in part] for part in parts], lines)
               for indent in range(0, 24, 4))


def _have_order(parts, lines):
    start = 0
    for part in parts:
        ends = (i + len(part) for i in range(start, len(lines)) if lines[i:i + len(part)] == part)
        if (start := next(ends, 0)) == 0:
            return False
    return True


def targets(page):
    """Where a page leads: (link, or path in backticks). Not those that a diff of the page makes."""
    prose, blocks = split(PAGES[page])
    text = "\n".join(line for _, line in prose)
    made = {match[1] for language, _, lines in blocks if language == "diff"
            for line in lines if (match := re.match(r"\+\+\+ (?:b/)?(\S+)", line))}
    links = [link for link in LINK.findall(text) if not re.match(r"[a-z]+:", link)]
    paths = re.findall(r"(?<![\w./-])(?:[\w-]+/)+[\w-]+\.(?:py|sh|md)\b", LINK.sub("]", text))
    return [*links, *(path for path in paths if path not in made)]


def anchors(text):
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_there(target, page):
    path, _, anchor = target.partition("#")
    found = [place for place in ((ROOT / page).parent / path, ROOT / path) if place.exists()] if path else [ROOT / page]
    return bool(found) and (not anchor or anchor in anchors(found[0].read_text()))


@pytest.mark.parametrize("page", QUOTING)
def test_quoted_code_is_the_programs(page):
    """With ... for lines that are left out. Where the line before links to a file, the code is in that file."""
    def named_in(before):
        paths = [(ROOT / page).parent.joinpath(link).resolve() for link in LINK.findall(before) if link.endswith(".py")]
        return [path.relative_to(ROOT).as_posix() for path in paths] or PROGRAM

    wrong = [quotation for before, quotation in quotations(page)
             if not any(is_in(quotation, PROGRAM[file]) for file in named_in(before))]
    assert wrong == []


def test_every_quotation_for_learners_names_its_file():
    assert [lines for before, lines in quotations("docs/learning.md") if not LINK.search(before)] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_lead_somewhere(page):
    assert [target for target in targets(page) if not is_there(target, page)] == []


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_short(page):
    """URLs aside, which cannot be broken."""
    prose, _ = split(PAGES[page])
    assert [number for number, line in prose if len(re.sub(r"https?://[^\s)]+", "", line)) > MAX_COLUMNS] == []


def test_a_quotation_must_be_whole_lines_in_order():
    lines = ["def f():", "    a = 1", "    b = 2", "", "    return a"]
    right = [["a = 1", "b = 2"], ["def f():", "    ...", "    return a"], ["b = 2", "", "return a"]]
    wrong = [["b = 2", "a = 1"], ["a = 1", "return a"], ["a ="], ["return a", "...", "a = 1"]]
    assert [is_in(quotation, lines) for quotation in right + wrong] == [True] * 3 + [False] * 4


def test_an_anchor_must_be_a_heading():
    targets = ["../README.md#in-a-container", "../README.md#no-such-heading", "../README.md", "../NO.md"]
    assert [is_there(target, "docs/launching.md") for target in targets] == [True, False, True, False]


def test_every_file_with_slow_tests_is_run_by_a_target_of_the_makefile():
    """Those of whole folders aside."""
    makefile, files = (ROOT / "Makefile").read_text(), (ROOT / "tests/end_to_end").glob("test_*.py")
    names = [path.name.removeprefix("test_") for path in files if "mark.slow" in path.read_text()]
    assert [name for name in names if not re.search(rf"\b{name}|test_{name}", makefile)] == []


def test_the_spine_is_a_numbered_list_of_files():
    """Which `make size` reads. The page calls them thirty-odd."""
    items = re.findall(r"^(\d+)\. \[([^]]+)\]\(\.\./([^)]+)\): ", PAGES["docs/reading.md"], re.M)
    files = [file for _, _, file in items]
    assert [int(number) for number, _, _ in items] == [*range(1, len(items) + 1)] and 30 <= len(items) <= 36
    assert [name for _, name, _ in items] == files and files[0] == "train.py" and set(files) <= set(PROGRAM)


def test_each_table_of_strategies_has_all():
    tables = re.findall(r"^\| strategy .*\n.*\n((?:\|.*\n)+)", PAGES["docs/strategies.md"], re.M)
    assert len(tables) == 2 and all(re.findall(r"^\| `([^`]+)`", table, re.M) == list(STRATEGIES) for table in tables)
