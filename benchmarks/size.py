"""`make size`: lines of code without blank lines, comments and docstrings. A report, not a gate."""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
           tokenize.ENDMARKER)

# tools and doors beside the core: what a reader of the core need not open
BESIDE = ("ask", "models/export.py", "models/exported.py", "models/own.py", "models/text/own_classifier.py",
          "models/vision/timm_models.py", "data/tables", "data/images/table.py", "data/images/cache.py")
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


if __name__ == "__main__":
    total = beside = 0
    for place in ("train.py", "launch.sh", "launch", "ask", "engine", "models", "data", "utils"):
        pattern = "*" if place == "launch" else "*.py"
        files = [ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob(pattern))
        counts = {file.relative_to(ROOT): code_lines(file) for file in files}
        total += sum(counts.values())
        beside += sum(count for file, count in counts.items() if any(map(file.is_relative_to, BESIDE)))
        print(f"{place:<44}{sum(counts.values()):>6}")
        for file, count in counts.items():
            if str(file) != place:
                print(f"    {file!s:<40}{count:>6}")
    print(f"{'the core':<44}{total - beside:>6}")
    print(f"{'beside it: ask, export, own models, timm, ...':<44}{beside:>6}")
    print(f"{'all':<44}{total:>6}")
