"""RUN/report.html: a run on one page, from what its directory holds. No network, no script, the same bytes each time.

    write_report(run.path)              # at the end of a run
    page([RUN1, RUN2])                  # several side by side, in any state: python -m ask.report

report.html.jinja is the page; it escapes all that it is given.
"""

import csv
import io
import os
import socket
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image

from data.images.decode import EncodedImage, UnreadableImage
from data.labels import SEPARATOR
from engine.records.log import EMA, NO_FIGURES, records
from extras.report.certainty import calibration, intervals, num_resamples
from extras.report.chart import chart
from models.metrics.classes import class_values
from models.metrics.labels import label_values
from models.metrics.metric import share_interval
from models.metrics.targets import TARGET_COLUMNS, figures_of
from utils.errors import Exit, UserError, first_line, rounded
from utils.files import read_json, write_atomically
from utils.output_files import TEXT, without_places
from utils.rundir.chain import read_lines, valid_links
from utils.rundir.clock import SHARES
from utils.rundir.identity import kept_settings
from utils.rundir.resolved import Resolved
from utils.rundir.starts import read_starts
from utils.settings.config import CONFIGS, flag
from utils.settings.habits import FORMERLY_KEPT

MOST_BYTES = 10 * 2**20  # of samples.csv, up to 200,000 rows: above, the page has nothing that is by sample
FEWEST, FEWEST_GROUPS = 50, 20  # samples of a calibration; groups of an interval
FEWEST_OF_CLASS = 30  # and twice as many as there are classes: below, the bootstrap of averages over them is biased
AVERAGES = ("macro_", "weighted_")
SORTS = 4  # the work of a sample and target beside that of a sample and class
NUM_MISTAKES, MOST_CLASSES, SIDE = 12, 20, 160  # shown; SIDE: pixels of a picture
PERCENTAGES = ("top1", "top5")
INTERNALS = ("code", "data", "tokenizer", "encoder", "weights", "hub", "undecayed_tables", "names_as_written", "pad_to",
             "padding_side", "first_position", "white_value", "yardstick", "branch",
             "origin")  # keys of auto.json that are no settings
Rows = list[dict[str, str]]


def write_report(run: Path) -> str:
    """Write RUN/report.html. Returns its path, or what went wrong: that is no reason to fail, the run is complete."""
    try:
        write_atomically(run / "report.html", page([run]))
        return f"{run}/report.html"
    except Exception as error:  # whatever it is
        return f"could not be written ({first_line(error)}); python -m ask.report tries again"


def page(runs: Sequence[Path], has_places: bool = False) -> str:
    """The page of these runs. Raises UserError: 66 for what is no run directory, 74 for a damaged one.

    has_places: with the paths of data and weights, not their last parts alone.
    """
    import jinja2  # the end of a run alone needs it

    abouts = []
    above = os.path.commonpath([run.resolve().parent for run in runs])
    for run in runs:
        if not (run / "config.yaml").is_file():
            raise UserError(f"{run} is not a run directory of train.py: it has no config.yaml", Exit.NO_INPUT)
        try:
            abouts.append(_about(run, has_places) | {"name": os.path.relpath(run.resolve(), above)})
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, csv.Error,
                yaml.YAMLError) as error:
            raise UserError(f"{run} is damaged ({type(error).__name__}: {error})", Exit.IO) from None
    template = jinja2.Template(Path(__file__).with_name("report.html.jinja").read_text("utf-8"), autoescape=True,
                               undefined=jinja2.ChainableUndefined, trim_blocks=True, lstrip_blocks=True)
    html = template.render(runs=abouts, charts=_curves(abouts), most_classes=MOST_CLASSES, shares=SHARES,
                           internals=INTERNALS, percentages=PERCENTAGES, rounded=rounded)
    return html.encode("utf-8", "replace").decode()  # names of files may be in any encoding


def _about(run: Path, has_places: bool) -> dict[str, Any]:
    """What the page says of a run, by name."""
    # what the directory holds
    config = yaml.safe_load((run / "config.yaml").read_text())
    config = {name: value for name, value in config.items() if name not in FORMERLY_KEPT}
    auto, status, summary = (read_json(run / f"{name}.json") for name in ("auto", "status", "summary"))
    found = records(run, "train", "val", "epoch")
    train, val, epochs = ([each for each in found if each["split"] == split] for split in ("train", "val", "epoch"))
    evaluation = read_json(run / "eval" / "classes.json") or read_json(run / "eval" / "targets.json")
    saved = [read_json(path).get("best", {}) for path in run.glob("checkpoints/step-*/trainer.json")]
    best = summary.get("best") or max(saved, key=lambda each: each.get("step", 0), default={})
    last = val[-1] if val else {}

    # figures of the best evaluation, which may be that of the average of the weights, and of the last one
    by_sample, prefix = _by_sample(run, config, evaluation), EMA if "weights" in best else ""
    of_best = evaluation or next((each for each in val if each["step"] == best.get("step")), {})
    of_best = {name: of_best.get(prefix + name, value) for name, value in of_best.items()}
    ends = by_sample.get("intervals", {}) | {
        name: share_interval(of_best[name], by_sample.get("num_groups") or of_best["evaluated"]) for name in PERCENTAGES
        if name in of_best and (not by_sample.get("num_groups") or of_best[name] in (0, 1))}
    figures = [name for name in last if name not in NO_FIGURES and not name.startswith(EMA)]

    # settings and the rest
    config = config if has_places else without_places(config)
    usual = kept_settings(CONFIGS[config["task"]]())
    about = by_sample | {
        "config": config, "auto": auto, "branched": Resolved.of(auto).branched(), "best": best, "last": last,
        "figures": figures,
        "of_best": of_best, "ends": ends,
        "train": train, "val": val, "epoch": epochs[-1] if epochs else {}, "starts": read_starts(run),
        "state": "finished" if summary and summary["step"] == last.get("step") else _state(status),
        "chosen": [(flag(name), value, usual.get(name)) for name, value in config.items() if value != usual.get(name)],
        "links": valid_links(read_lines(run)),
        "names": sorted(evaluation.get("classes", evaluation.get("targets", {})).items(),
                        key=lambda each: each[1].get("f1", 0))}
    return about | {"curves": _curves([about])}


def _state(status: Mapping[str, Any]) -> str:
    """What status.json says, but for a process that was killed: it could not write that."""
    is_killed = (status.get("state"), status.get("host")) == ("running", socket.gethostname()) and not (
        Path(f"/proc/{status['pid']}").exists())
    return "killed" if is_killed else status.get("state", "not begun")


def _curves(abouts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Charts over the steps: of one run all that it has recorded, of several runs a line for each."""
    last, best, is_one = abouts[0]["last"], abouts[0]["best"], len(abouts) == 1
    usual = (best.get("metric"), "top1", "map", "micro_f1", "mae", "perplexity")
    metric = next((name for name in usual if name in last and name != "loss"), "loss")
    parts = {metric: [("validation", "val", metric), ("average", "val", EMA + metric)],  # "loss" is replaced
             "loss": [("validation", "val", "loss"), ("training", "train", "loss"), ("average", "val", "ema_loss")],
             "learning rate": [("", "train", "lr")], "norm of the gradient": [("", "train", "grad_norm")],
             "samples per second": [("", "train", "samples_per_s")],
             "share of the time waiting for data": [("", "train", "data_wait")]}
    return [chart(title, "optimizer step", [
        (words if is_one else about["name"],
         [(each["step"], each[name]) for each in about[split] if each.get(name) is not None])
        for about in abouts for words, split, name in lines[:None if is_one else 1]],
        best.get("step") if is_one else None) for title, lines in parts.items()]


def _by_sample(run: Path, config: Mapping[str, Any], evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """What RUN/eval/samples.csv says: intervals, what is confused, calibration, the worst mistakes; or why nothing."""
    path = run / "eval" / "samples.csv"
    if not path.exists() or path.stat().st_size > MOST_BYTES:
        return {"missing": f"eval/samples.csv {'is larger than 10 MiB' if path.exists() else 'is not there'}"}
    csv.field_size_limit(2**31 - 1)
    with path.open(newline="", **TEXT) as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]  # the others could not be read
    losses = np.array([float(row["loss"]) for row in rows])                                 # [N]
    groups = np.unique([row["group"] for row in rows], return_inverse=True)[1] if (
        rows and config.get("group_column") and "group" in rows[0]) else None
    num_groups = 0 if groups is None else int(groups.max()) + 1
    targets, is_image = list(evaluation.get("targets", ())), config["task"].startswith("image")
    found = _of_targets(rows, targets, losses, groups) if targets else _of_classes(
        rows, list(evaluation["classes"]), losses, groups, config.get("multi_label", False))
    if 0 < num_groups < FEWEST_GROUPS:  # as good as none
        found["intervals"] = {}
    wrong = [index for index, row in enumerate(rows) if targets or row["label"] != row["prediction"]]
    worst = sorted(wrong, key=lambda index: -losses[index])[:NUM_MISTAKES]
    return found | {
        "num_rows": len(rows), "num_resamples": num_resamples(len(rows), SORTS * len(targets) or 1),
        "num_groups": num_groups, "fewest_groups": FEWEST_GROUPS, "targets": targets, "is_image": is_image,
        "mistakes": [(rows[index], _thumbnails(rows[index]["input"]) if is_image else []) for index in worst]}


def _of_targets(rows: Rows, names: list[str], losses: np.ndarray, groups: np.ndarray | None) -> dict[str, Any]:
    true, predicted = (np.array([[float(row[name + end]) for name in names] for row in rows])
                       for end in ("", "_prediction"))                                      # [N, T] each

    def figures(times: np.ndarray) -> dict[str, float]:
        drawn = np.repeat(np.arange(len(rows)), times)
        means = figures_of(true[drawn], predicted[drawn]).mean(axis=0)
        return dict(zip(TARGET_COLUMNS, means.tolist(), strict=True)) | {"loss": float(losses[drawn].mean())}

    return {"intervals": intervals(len(rows), figures, SORTS * len(names), groups)}


def _of_classes(rows: Rows, names: list[str], losses: np.ndarray, groups: np.ndarray | None,
                is_multi_label: bool) -> dict[str, Any]:
    # intervals
    codes, values = {name: code for code, name in enumerate(names)}, label_values if is_multi_label else class_values
    true, predicted = (
        {(index, codes[name]) for index, row in enumerate(rows)
         for name in (filter(None, row[kind].split(SEPARATOR)) if is_multi_label else [row[kind]])}
        for kind in ("label", "prediction"))
    kinds = [np.array(sorted(each), dtype=int).reshape(-1, 2).T.copy() for each in (true & predicted, true, predicted)]

    def figures(times: np.ndarray) -> dict[str, Any]:
        times = times.astype(float)  # once: each bincount would; a product by BLAS would start threads
        sums = [np.bincount(of, times[samples], len(names)) for samples, of in kinds]
        return values(torch.tensor(np.stack(sums))) | {"loss": float((times * losses).mean())}

    found: dict[str, Any] = {"intervals": intervals(len(rows), figures, groups=groups)}
    rarest, needed = int(np.bincount(kinds[1][1], minlength=len(names)).min()), max(FEWEST_OF_CLASS, 2 * len(names))
    if rarest < needed:
        kept = {name: ends for name, ends in found["intervals"].items() if not name.startswith(AVERAGES)}
        found |= {"intervals": kept, "rarest": rarest, "needed": needed}
    if is_multi_label:
        return found

    # the confusion matrix of the classes with the most mistakes; how sure the predictions are
    counts = Counter((row["label"], row["prediction"]) for row in rows)
    mistakes = Counter(name for pair in counts.elements() if pair[0] != pair[1] for name in pair)
    worst = dict(mistakes.most_common(MOST_CLASSES))
    shown = [name for name in names if len(names) <= MOST_CLASSES or name in worst]
    found["confusion"] = [(true, [counts[true, predicted] for predicted in shown]) for true in shown]
    if len(rows) >= FEWEST:
        is_right = np.array([row["label"] == row["prediction"] for row in rows])
        made = calibration(np.array([float(row["probability"]) for row in rows]), is_right)
        lines = [("as it is", made["points"]), ("perfect", [(0, 0), (1, 1)])]
        found |= {"calibration": made, "diagram": chart("accuracy", "probability of the prediction", lines)}
    return found


def _thumbnails(name: str) -> list[str]:
    """The pictures of a sample as small JPEGs in base64; none if a file is gone, or cannot be read."""
    found = []
    try:
        for path in [name] if Path(name).exists() else name.split(","):
            image = EncodedImage(path)
            shown = Image.fromarray(image.pixels(min(1, SIDE / min(image.height, image.width))).numpy())
            shown.thumbnail((SIDE, SIDE))
            shown.save(file := io.BytesIO(), "JPEG", quality=80)
            found.append(b64encode(file.getvalue()).decode())
    except (OSError, ValueError, UnreadableImage):  # a name may be too long for a path, or hold a zero
        return []
    return found
