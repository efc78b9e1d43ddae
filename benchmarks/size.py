"""`make size`: lines of code without blank lines, comments and docstrings: spine, core, what stands beside it, all.

tests/test_architecture.py holds their ceilings.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
           tokenize.ENDMARKER)
PLACES = ("train.py", "launch.sh", "launch", "ask", "extras", "engine", "models", "data", "utils")

# What a reader of the core need not open. Tools and extras; what is loaded by its name, or has a command of its own;
# the command line, which reads pages of settings and knows no training.
BESIDE = (
    "ask", "extras", "launch", "launch.sh",
    "models/features.py", "models/predict.py", "models/prediction_files.py", "models/export.py", "models/exported.py",
    "models/exported_images.py", "models/run_exported.py", "models/own.py", "models/trial.py",
    "models/text/own_classifier.py", "models/vision/timm_models.py",
    "data/tables", "data/shards", "data/pack.py", "data/images/table.py", "data/images/cache.py",
    *(f"utils/strategies/{name}.py" for name in ("fsdp", "dp", "dp_classic", "model_parallel")), "utils/cpu",
    *(f"utils/settings/{name}.py" for name in ("command_line", "help", "spelling", "habits", "option")))
TEXTS = ("models/text", "data/texts", "data/demo_text.py", "utils/settings/text_options.py",
         *(f"models/tasks/{name}.py" for name in ("text", "text_classification", "masked_lm")))
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(path: Path) -> int:
    """The number of lines of `path` that hold code; in a shell script all lines but blank ones and comments."""
    text = path.read_text()
    if path.suffix != ".py":
        return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("#"))
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def counts() -> dict[Path, int]:
    """The lines of each file of the program, by its path from the root; without tests."""
    files = [path for place in PLACES for path in ([ROOT / place] if (ROOT / place).is_file() else sorted(
        (ROOT / place).rglob("*" if place == "launch" else "*.py"))) if path.is_file()]
    return {file.relative_to(ROOT): code_lines(file) for file in files
            if not {"tests", "conftest.py"} & {*file.relative_to(ROOT).parts}}


def totals() -> dict[str, int]:
    """Lines by part. The spine: the files that docs/reading.md lists."""
    page, lines = ROOT / "docs" / "reading.md", counts()
    spine = {Path(name) for name in re.findall(r"^\d+\. \[.*?\]\(\.\./(.*?)\)", page.read_text(), re.M)}

    def within(*places: str | Path) -> int:
        return sum(count for file, count in lines.items() if any(map(file.is_relative_to, places)))

    core = sum(lines.values()) - within(*BESIDE)
    return {"spine": within(*spine), "core": core, "core without texts": core - within(*TEXTS) + within(
        "models/text/own_classifier.py"), "beside": within(*BESIDE), "all": sum(lines.values())}


if __name__ == "__main__":
    by_file = counts()
    for place in PLACES:
        files = {file: count for file, count in by_file.items() if file.is_relative_to(place)}
        print(f"{place:<44}{sum(files.values()):>6}")
        for file, count in files.items():
            if str(file) != place:
                print(f"    {file!s:<40}{count:>6}")
    for part, count in totals().items():
        print(f"{part:<44}{count:>6}")
