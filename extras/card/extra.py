"""RUN/model/README.md: a model card, whose metadata the Hugging Face hub reads; `hf upload` takes the folder as it is.

card.md is its text. It depends on the run alone: it has no path, time or machine. Its owner may edit it, so the run's
chain leaves it out.

Tests: extras/card/tests/test_launches.py
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import utils
from data.left_out import named
from engine.start import Start
from engine.training import Extra, Training
from models.metrics.metric import share_interval
from utils.errors import rounded
from utils.files import read_json
from utils.rundir.chain import CARD
from utils.rundir.identity import identity
from utils.settings.command_line import as_words
from utils.settings.config import facts, types
from utils.settings.option import own_names

# what the hub calls tasks and figures
TASKS = {"image-classification": "image-classification", "text-classification": "text-classification",
         "text-regression": "text-classification", "masked-lm": "fill-mask"}
METRICS = {"top1": "accuracy", "macro_f1": "f1", "micro_f1": "f1", "auroc": "roc_auc", "r2": "r_squared",
           "pearson": "pearsonr", "spearman": "spearmanr"}
# of tasks whose outputs transformers gives as they are meant: a regression's would be in standard deviations
PREDICT = """, and INPUT an image, a folder of images, a table or a file of texts:

    python -m models.predict FOLDER INPUT"""
FINE_TUNE = """, to train a classifier that begins with its weights:

    python train.py --task text-classification --model FOLDER --data DATA"""
VALUES = ("learning rate", "epochs", "global batch size", "seed", "precision", "data (sha256)")
PIPELINES = {"masked-lm": "", "text-classification": ", truncation=True, max_length={max_tokens}, top_k=None"}


class EXTRA(Extra):
    """The card of each best model."""

    def exported(self, t: Training, step: int, values: Mapping[str, Any], folder: Path) -> None:
        """Beside the weights, which are whole without it."""
        write_card(t, step, values, folder)


def write_card(start: Start, step: int, values: Mapping[str, Any], folder: Path) -> None:
    """Write the card of the model in `folder`. values: of its evaluation, at `step`."""
    # settings; of a path its last part
    config, task, described = start.config, start.task, read_json(folder / "config.json")
    index = named(task.train_set)
    known, kinds, usual = facts(config), types(config), type(config)()
    defaults = identity(usual) | {"bad_samples": usual.data.bad_samples}  # which decides what there is to train on
    given = {name: Path(value).name if known[name].path and str(value).startswith("/") else value
             for name, value in (identity(config) | {"bad_samples": config.data.bad_samples}).items()
             if name != "device"} | ({"without": "FILE"} if config.data.without else {})
    command = shlex.join(["python", "train.py", *(
        word for name, value in given.items() if value != defaults[name] or name == "task"
        for word in as_words(name, value, kinds[name]))])

    # metadata
    model, tag, is_new = given["model"], TASKS.get(given["task"]), task.origin == "from scratch"
    is_here_alone = not described or model.startswith("timm/") or described.get("architecture") in own_names()
    library = "lockstep" if is_here_alone else "transformers" if "model_type" in described else "torchvision"
    is_hubs = model in (start.run.resolved.as_dict().get("hub") or {}) or re.match(r"timm/.*\.", model)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{model}-{given['data']}")
    figures = {name: value for name, value in values.items() if isinstance(value, float)}
    num_val = values.get("evaluated", len(task.eval_set))
    ends = {name: " ({} to {})".format(*map(rounded, share_interval(figures[name], num_val)))  # of 95 %
            for name in ("top1", "top5") if name in figures and not config.data.group_column}  # whose samples are alike
    metrics = [{"type": METRICS.get(name, name), "name": name, "value": value} for name, value in figures.items()]
    metadata = {"library_name": library, "pipeline_tag": tag, "base_model": model if is_hubs and not is_new else None,
                "metrics": [*dict.fromkeys(each["type"] for each in metrics)],
                "model-index": [{"name": name, "results": [{
                    "task": {"type": tag or given["task"]}, "metrics": metrics,
                    "dataset": {"name": given["data"], "type": "unknown", "split": "val"}}]}]}

    # the text
    pipeline = f'    predict = transformers.pipeline("{tag}", FOLDER{PIPELINES.get(given["task"], "")})\n'
    if len(described.get("text_columns") or ()) == 2:
        pipeline += '    predict({{"text": "a text", "text_pair": "another text"}})\n'
    is_alone = library == "transformers" and given["task"] in PIPELINES
    origin = "from scratch" if is_new else f"fine-tuned from {given.get('weights') or model}"
    origin += f" ({branched})" if (branched := start.run.resolved.branched()) else ""
    resolved = start.run.resolved.as_dict()
    resolved |= {"learning rate": resolved["lr"], "global batch size": resolved["global_batch_size"],
                 "seed": config.run.seed, "data (sha256)": resolved["data"]}
    (folder / CARD).write_text(Path(__file__).with_name("card.md").read_text("utf-8").format(
        metadata=yaml.safe_dump({key: value for key, value in metadata.items() if value}, sort_keys=False),
        name=name, version=utils.__version__, task=given["task"], step=step,
        use=FINE_TUNE if given["task"] == "masked-lm" else PREDICT,
        num_train=len(task.train_set) - len(index.left_out if index else ()), num_val=num_val, origin=origin,
        figures="\n".join(f"| {name} | {rounded(value)}{ends.get(name, '')} |" for name, value in figures.items()),
        pipeline=f"\nWith transformers:\n\n{pipeline.format(**described)}" if is_alone else "",
        values="\n".join(f"| {name} | {resolved[name]} |" for name in VALUES),
        command=re.sub(r"\r\n?|\n", "\n    ", command)), encoding="utf-8", errors="backslashreplace")
