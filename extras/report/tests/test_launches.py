"""RUN/report.html of real runs: after a kill, of 2 processes, switched off, unwritable; ask.report makes the same."""

import csv
import json
import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.harness.run_directory import status, trained_steps

ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
LABEL = "<script>alert(1)</script>"
WORDS = ["--model", "small-cnn", "--image-size", "32", "--max-steps", "6", "--log-every", "1", "--workers", "0",
         "--global-batch-size", "24", "--eval-every", "3", "--save-every", "1"]


@pytest.fixture(scope="module")
def table(session_dir, photos):
    """A folder with train.csv and val.csv of the photos; a label is markup."""
    root = session_dir / "reported"
    root.mkdir()
    for split in ("train", "val"):
        rows = [[path, path.parent.name.replace("tint1", LABEL)] for path in sorted((photos / split).rglob("*.png"))]
        for row in rows[::10] if split == "val" else ():
            row[1] = LABEL if row[1] != LABEL else "tint0"  # mistakes, however well it learns
        with (root / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["image", "label"], *rows])
    return root


@pytest.mark.long
def test_a_killed_and_continued_run_has_the_report(run_dir, start_torchrun, run_torchrun, run_train, table):
    words = ["--data", table, "--run-dir", run_dir, *WORDS]
    killed = start_torchrun(2, *words)
    killed.wait_for(lambda: trained_steps(run_dir) >= 2, "two steps")
    killed.kill_all()
    assert not (run_dir / "report.html").exists()
    done = run_torchrun(2, *words)
    assert done.code == 0 and f"its report      {run_dir}/report.html\n" in done.out, done.text

    # what it says
    html, summary = (run_dir / "report.html").read_text(), json.loads((run_dir / "summary.json").read_text())
    last = {name: re.search(rf"<tr><td>{name}</td>.*<td>([\d.]+)( %)?</td></tr>", html)[1]
            for name in ("loss", "top1")}
    assert last == {"loss": f"{summary['loss']:.4f}", "top1": f"{100 * summary['top1']:.2f}"}
    assert "Finished at step 6." in html and "<script" not in html and "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert html.count('<img alt="" src="data:image/jpeg;base64,') == 12  # the worst mistakes

    # the same by ask.report, also where the locale knows ASCII alone (a process of its own: a fork keeps its locale)
    asked = subprocess.run([sys.executable, "-m", "ask.report", run_dir, "--output", run_dir.parent / "page.html"],
                           cwd=ROOT, env=os.environ | ASCII, capture_output=True, text=True)
    assert (asked.returncode, asked.stdout) == (0, f"{run_dir.parent}/page.html\n"), asked.stderr
    assert (run_dir.parent / "page.html").read_text() == html


def test_no_report_is_written_if_it_is_off(run_dir, run_train, table):
    done = run_train("--data", table, "--run-dir", run_dir, *WORDS, "--report", "off")
    assert done.returncode == 0 and "its report" not in done.out and not (run_dir / "report.html").exists(), done.text


def test_a_report_that_cannot_be_written_does_not_fail_the_run(run_dir, run_train, table):
    stopped = run_train("--data", table, "--run-dir", run_dir, *WORDS, "--stop-after", "2")
    asked = run_train(run_dir, run_dir, "--output", run_dir.parent / "page.html", script="ask/report.py")
    assert asked.returncode == 0 and "Stopped" in (run_dir.parent / "page.html").read_text(), stopped.text + asked.text
    (run_dir / "report.html").mkdir()
    done = run_train("--data", table, "--run-dir", run_dir, *WORDS)
    assert done.returncode == 0 and "its report      could not be written (" in done.out, done.text
    assert status(run_dir)["state"] == "finished" and (run_dir / "model" / "model.safetensors").exists()


def test_what_is_no_run_is_an_error_in_words(run_dir, run_train):
    found = run_train(run_dir, script="ask/report.py")
    assert (found.returncode, found.err) == (66, f"report: {run_dir} is not a run directory of train.py: it has no"
                                                 " config.yaml\n"), found.text
