"""RUN/report.html: its figures are those of the run, what comes from the data stays text."""

import csv
import json
import os
import re
import shutil
import socket
from html.parser import HTMLParser

import numpy as np
import pytest
import yaml
from PIL import Image

from extras.report.chart import HEIGHT, WIDTH, chart
from extras.report.page import page, write_report
from utils.errors import Exit, UserError, rounded
from utils.rundir.identity import kept_settings
from utils.settings.config import CONFIGS, with_values

pytestmark = pytest.mark.unit

EVIL = '</td><script>alert(1)</script><img src=x onerror="alert(2)">'
TAGS = {"html", "meta", "title", "style", "h1", "h2", "p", "div", "dl", "dt", "dd", "table", "tr", "th", "td", "span",
        "br", "figure", "figcaption", "svg", "line", "text", "polyline", "circle", "section", "code", "img"}


class Page(HTMLParser):
    """The elements of a page and its text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def table_row(html, name):
    """The cells of the row that begins with `name`."""
    found = re.search(rf"<tr><td>{name}</td>(.*?)</tr>", html)
    return re.findall("<td>(.*?)</td>", found[1])


def samples_of(names, count, rng):
    """Rows of samples.csv: four of five are right."""
    for index in range(count):
        label = int(rng.integers(len(names)))
        predicted = label if rng.random() < 0.8 else int(rng.integers(len(names)))
        yield {"input": f"{EVIL} {index}", "label": names[label], "prediction": names[predicted],
               "probability": f"{rng.uniform(0.5, 1):.6f}", "loss": f"{rng.exponential():.6f}"}


@pytest.fixture
def build(tmp_path):
    """build(task, rows, names, **settings): the directory of a finished run of 20 steps with these rows in RUN/eval."""
    def make(task="text-classification", rows=(), names=("a", "b"), best="top1", **values):
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        (run / "eval").mkdir(parents=True, exist_ok=True)
        config = kept_settings(with_values(CONFIGS[task](), values))
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        figures = {"loss": 0.52345678, best: 0.8123, "macro_f1": 0.71239, "evaluated": max(1, len(rows)), "top5": 1.0,
                   "mae": 1.5, "never_predicted": 2}
        position = {"epoch": 2.0, "samples": 640, "time": "2026-01-02T03:04:05.678+00:00"}
        records = [{"split": "train", "step": step, **position, "loss": 1 / step, "grad_norm": 1.0, "lr": 0.1,
                    "samples_per_s": 9.0, "data_wait": None} for step in range(1, 21)]
        records += [{"split": "val", "step": step, **position, **figures} for step in (10, 20)]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records) + '{"split": "tr')
        (run / "summary.json").write_text(json.dumps(
            records[-1] | {"best": {"step": 10, "metric": best, "value": figures[best]}}))
        kind = "targets" if task.endswith("regression") else "classes"
        if rows:
            of_each = dict.fromkeys(("precision", "recall", "f1", "support"), 0.5) | {"auroc": None}
            (run / "eval" / f"{kind}.json").write_text(json.dumps(
                {"step": 10, **figures, kind: dict.fromkeys(names, of_each)}))
            with (run / "eval" / "samples.csv").open("w", newline="", errors="surrogateescape") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)
        return run
    return make


def test_figures_are_those_of_the_summary(build):
    run = build(rows=[*samples_of("ab", 200, np.random.default_rng(0))])
    html, summary = page([run]), json.loads((run / "summary.json").read_text())
    for name, value in summary.items():
        if name not in ("split", "step", "epoch", "samples", "time", "best", "evaluated"):
            shown = f"{100 * value:.2f} %" if name in ("top1", "top5") else (
                str(value) if isinstance(value, int) else rounded(value))
            best, interval, last = table_row(html, name)
            assert (best, last) == (shown, shown), name
            assert bool(interval) == (name in ("loss", "top1", "top5", "macro_f1")), name


def test_what_comes_from_the_data_stays_text(build):
    names = (EVIL, "b&amp;b", "c")
    run = build(rows=[*samples_of(names, 100, np.random.default_rng(0))], names=names, label_column=EVIL)
    html = page([run, run])
    found = Page(html)
    assert {tag for tag, _ in found.elements} <= TAGS
    assert not [name for _, attributes in found.elements for name in attributes if name.startswith("on")]
    assert EVIL in found.text and "b&amp;b" in found.text and "url(" not in html and "@import" not in html
    assert {attributes["src"][:23] for tag, attributes in found.elements if "src" in attributes} <= {
        "data:image/jpeg;base64,"}


def test_runs_with_the_same_folder_name_are_told_apart(build, tmp_path):
    run = build()
    runs = [shutil.copytree(run, tmp_path / name / "seed0" / "x") for name in ("one", "two")]
    text = Page(page([*runs, run])).text
    assert text.startswith("one/seed0/x, two/seed0/x, run ") and Page(page(runs[:1])).text.startswith("x ")


def test_settings_that_differ_are_those_of_every_run(build, tmp_path):
    image = shutil.copytree(build("image-classification"), tmp_path / "image")
    html = page([build("text-classification"), image])
    differ = html[html.index("Settings that differ"):html.index("</table>", html.index("Settings that differ"))]
    assert {"max_length", "image_size"} <= set(re.findall(r"<tr><td>(\w+)</td>", differ))


@pytest.mark.parametrize("has_evaluation", [True, False])
def test_the_training_loss_is_on_the_chart_of_every_run(build, has_evaluation):
    run = build("masked-lm", best="loss")
    lines = (run / "metrics.jsonl").read_text().replace('"mae"', '"other"').splitlines()
    (run / "metrics.jsonl").write_text("\n".join(line for line in lines if has_evaluation or "train" in line))
    if not has_evaluation:
        (run / "summary.json").unlink()
    html = page([run])
    assert html.count('<span class="key a">training</span>' if not has_evaluation else ">training</span>") == 1
    assert html.count('aria-label="loss by optimizer step"') == 1


def test_the_average_of_the_weights_has_its_own_interval(build):
    run = build()
    lines = [json.loads(line) | {"ema_top1": 0.5} for line in (run / "metrics.jsonl").read_text().splitlines()[:-1]]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line | {'evaluated': 400})}\n" for line in lines))
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"best": summary["best"] | {"weights": "ema"}}))
    assert table_row(page([run]), "top1")[:2] == ["50.00 %", "45.12 to 54.88 %"]


def test_the_same_run_gives_the_same_bytes(build):
    run = build(rows=[*samples_of("ab", 100, np.random.default_rng(0))])
    assert page([run]) == page([run])


@pytest.mark.rows(3)
@pytest.mark.parametrize("count", [1, 3, 60, 25_000])
@pytest.mark.parametrize("num_classes", [1, 2, 1000])
def test_any_number_of_classes_and_samples_has_a_page(build, count, num_classes):
    names = [f"class {number}" for number in range(num_classes)]
    found = Page(page([build(rows=[*samples_of(names, count, np.random.default_rng(0))], names=names)]))
    confusion = [attributes for _, attributes in found.elements if "--share" in attributes.get("style", "")]
    assert 1 <= len(confusion) <= 400 or num_classes == 1000
    assert ("Expected calibration error" in found.text) == (count >= 50)


@pytest.mark.parametrize("num_groups, words", [
    (25, "by whole groups (25), because the samples of a group are alike"),
    (9, "No intervals: the 200 validation samples are of 9 groups, and an interval needs 20")])
def test_samples_of_groups_have_intervals_of_their_groups(build, num_groups, words):
    """Each group is right, or wrong, as a whole."""
    rows = [row | {"label": "a", "prediction": "ab"[index % num_groups % 5 == 0], "group": f"p{index % num_groups}"}
            for index, row in enumerate(samples_of("ab", 200, np.random.default_rng(0)))]
    html = page([build(rows=rows, group_column="p")])
    assert words in Page(html).text
    alone = page([build(rows=[{name: row[name] for name in row if name != "group"} for row in rows])])
    wide, narrow = ([*map(float, re.findall(r"[\d.]+", table_row(each, "top1")[1]))] for each in (html, alone))
    assert (wide[1] - wide[0] > 2 * (narrow[1] - narrow[0])) if num_groups > 9 else wide == []


def test_several_labels_numbers_and_no_samples_have_a_page(build):
    labels = [{"input": "x", "label": "a|b", "prediction": "a", "probability": "0.910000", "loss": "0.3"},
              {"input": "y", "label": "", "prediction": "", "probability": "", "loss": "0.1"}]
    shown = Page(page([build(rows=labels, best="micro_f1", multi_label=True)])).text
    assert "a|b, predicted a (91 %)" in shown and "Calibration" not in shown
    numbers = [{"input": "x", "pictures": str(n), "pictures_prediction": str(n + 1), "loss": "0.3"} for n in range(9)]
    html = page([build("text-regression", numbers, ["pictures"], best="mae")])
    assert "pictures 3, predicted 4" in Page(html).text and table_row(html, "mae")[1] == "1.0000 to 1.0000"


def test_a_run_without_an_evaluation_or_a_step_has_a_page(build):
    run = build("masked-lm", best="loss")
    assert "There is nothing about single samples: eval/samples.csv is not there." in Page(page([run])).text
    for name in ("summary.json", "metrics.jsonl"):
        (run / name).unlink()
    assert "There is no evaluation yet." in Page(page([run])).text


def test_pictures_are_on_the_page_while_their_files_are_there(build, tmp_path):
    for index, mode in enumerate(("RGB", "I;16", "RGBA")):
        Image.fromarray(np.full((9, 300), 77 * index, np.uint16)).convert(mode).save(tmp_path / f"{index},.png")
    rows = [{"input": str(tmp_path / f"{index},.png"), "label": "a", "prediction": "b", "probability": "0.9",
             "loss": str(index)} for index in range(4)]  # one is gone
    run = build("image-classification", rows)
    assert len(re.findall("<img ", page([run]))) == 3
    for index in range(3):
        (tmp_path / f"{index},.png").unlink()
    assert "The pictures are not where they were." in page([run])


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_names_that_are_no_paths_have_a_page(build, name):
    rows = [{"input": name, "label": "a", "prediction": "b", "probability": "0.9", "loss": "1"}]
    assert "The pictures are not where they were." in page([build("image-classification", rows)])


def test_names_that_are_no_text_have_a_page(build):
    rows = [{"input": "caf\udce9.png", "label": "a", "prediction": "b", "probability": "0.9", "loss": "1"}]
    page([build(rows=rows)]).encode()


def test_a_damaged_run_is_an_error_in_words(build, tmp_path):
    run = build(rows=[{"input": "x", "label": "a", "prediction": "?", "probability": "0.9", "loss": "1"}])
    with pytest.raises(UserError, match="is damaged") as error:
        page([run])
    assert error.value.code == Exit.IO
    with pytest.raises(UserError, match="is not a run directory") as error:
        page([tmp_path])
    assert error.value.code == Exit.NO_INPUT


def test_a_report_that_fails_is_a_line_and_no_error(build):
    run = build()
    (run / "report.html").mkdir()
    assert write_report(run).startswith("could not be written (")
    assert write_report(run / "none").startswith("could not be written (")
    (run / "report.html").rmdir()
    assert write_report(run) == str(run / "report.html") and (run / "report.html").read_text() == page([run])


@pytest.mark.rows(1)
@pytest.mark.parametrize("num_classes", [3, 20])
def test_averages_over_rare_classes_have_no_interval(build, num_classes):
    names = [f"class {number}" for number in range(num_classes)]

    def html_of(count):
        rows = [*samples_of(names, count, np.random.default_rng(0))]
        for index, row in enumerate(rows):
            row["label"] = names[index % num_classes]
        return page([build(rows=rows, names=names)])

    few, enough = html_of(num_classes * 29), html_of(num_classes * max(30, 2 * num_classes))
    assert table_row(few, "macro_f1")[1] == "" and table_row(few, "loss")[1] and table_row(enough, "macro_f1")[1]
    assert "one class has 29 samples, and an honest interval needs" in Page(few).text
    assert "an honest interval" not in Page(enough).text


@pytest.mark.parametrize("values", [[0.0], [1e-9, 2e-9], [-5, 1e7], [3, 3, 3], [float(n) for n in range(5000)]])
def test_a_chart_keeps_all_within_its_frame(values):
    made = chart("", "", [("", [*enumerate(values, 1)])], mark=1)
    [(_, _, points)] = made["lines"]
    assert len(points) <= 300 and made["y_ticks"] and made["x_ticks"]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in [*points, (made["mark"], 0)])


@pytest.mark.parametrize(("pid", "host", "words"), [
    (os.getpid(), socket.gethostname(), "Running at"), (2**22 + 1, socket.gethostname(), "Killed at"),
    (2**22 + 1, "elsewhere", "Running at")], ids=["here", "gone", "elsewhere"])
def test_a_run_whose_process_is_gone_was_killed(build, pid, host, words):
    run = build()
    (run / "summary.json").unlink()
    (run / "status.json").write_text(json.dumps({"state": "running", "pid": pid, "host": host}))
    assert words in Page(page([run])).text
