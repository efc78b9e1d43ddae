"""What differs between two runs: before any step, then in the first record and the first checkpoint that differ.

    python -m ask.compare RUN1 RUN2             # by what they have written down; in seconds
    python -m ask.compare RUN1 RUN2 --locate    # also computes both again, to the first tensor that differs

Exit code 0: what both have computed is the same, bit for bit; 1: it differs. Data are read as they are now, and
compared if they are still those that the runs were trained on. The runs stay as they are.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from ask.command_line import answer, begin, parser_of

PARSER = parser_of("compare", __doc__, "RUN1", "RUN2")
PARSER.add_argument("--locate", action="store_true", help="compute both again, to the first tensor that differs")

if __name__ == "__main__":  # before torch is imported
    GIVEN, WATCHDOG = begin(PARSER)

from safetensors import SafetensorError
from safetensors.torch import load_file

from ask.locate import NAMES, is_an_answer, locate
from ask.record import Part, Record, read_records, read_run
from ask.repeat import Place, computing, conditions_of, config_for, in_words, lay_out
from ask.rounding import EPSILON, apart
from models.tasks import load_task
from models.tasks.base import Task
from utils.distributed.watchdog import Watchdog
from utils.distributed.world import World
from utils.errors import Exit, UserError, counted, say, some
from utils.rundir.checkpoint import SAMPLES
from utils.rundir.checkpoint_folder import CheckpointFolder
from utils.rundir.digests import differing
from utils.rundir.run import open_run
from utils.settings.command_line import config_of
from utils.settings.config import facts, flag, with_values
from utils.settings.option import OPERATIONAL

IN = tuple(f"in {name}" for name in NAMES)
SHOWN = 3  # figures of a record
DIGESTS = {"data": "the data's fingerprint", "tokenizer": "the tokenizer", "encoder": "the encoder's config",
           "weights": "the file of initial weights"}
# operational, but what is best or trained on depends on them, or how sums are rounded
DECISIVE = {"--eval-every", "--bad-samples", "--max-nonfinite", "--devices-per-process"}
Sample = tuple[str, str]  # path or text, label
Written = dict[Any, dict[str, Any]]  # what a run has written down, in its order: each with its "step"


def main(given: argparse.Namespace, watchdog: Watchdog) -> int:
    """Say on standard output what differs. Returns the exit code. Collective."""
    device = given.device if given.locate else "cpu"  # where nothing is computed
    with computing([given.run1, given.run2], device, watchdog) as place:  # Collective.
        paths = zip((given.run1, given.run2), given.data, strict=True)
        one, two = runs = [read_run(path, place.world, data) for path, data in paths]  # Collective.
        note = partial(say, stream=sys.stdout) if place.world.is_main else lambda text: None
        note(f"RUN1 is {one.path}, RUN2 is {two.path}")
        for name, run in zip(NAMES, runs, strict=True):
            if run.branched:
                note(f"{name} was {run.branched}")
        of_data = data_apart(runs, place)  # Collective.
        found = [*settings_apart(one.starts[0], two.starts[0], of_data=of_data), *starts_of(runs), *of_data]
        first = [run.links[0]["content"] for run in runs if 0 in run.links]
        found += [f"the initial weights, by their hash: {first[0][:16]} {IN[0]}, {first[1][:16]} {IN[1]}"
                  ] if len({*first}) > 1 else []
        note("\n".join(f"  {text}" for text in found or ["before the first step nothing differs that is written down"]))
        agreed, differs, words = results_apart(runs, [written(run, place.world) for run in runs])  # Collective.
        note("\n".join(words))
        for text in locate(place, runs, agreed, max(1, differs)) if given.locate and differs is not None else ():
            note(text)  # Collective.
    return 0 if differs is None else 1


# --- before any step


def settings_apart(one: dict[str, Any], two: dict[str, Any], where: Sequence[str] = IN,
                   of_data: Sequence[str] = ()) -> list[str]:
    """What two starts compute with that is not the same, a line each; at the end what has no effect on it.

    one, two: lines of starts.jsonl. where: words behind the value of each. of_data: what else differs in their data.
    """
    known = facts(config_of(one["settings"]))
    idle = {flag(name) for name, fact in known.items() if fact.kind == OPERATIONAL} - DECISIVE
    if one["resolved"].get("data") == two["resolved"].get("data") and not of_data:  # the same in another place
        idle.add("--data")
    first, second = facts_of(one), facts_of(two)
    found = {name: f"{name}: {_shown(first, name)} {where[0]}, {_shown(second, name)} {where[1]}"
             for name in first | second if first.get(name) != second.get(name)}
    without_effect = "; ".join(text for name, text in found.items() if name in idle)
    return [*(text for name, text in found.items() if name not in idle),
            *([f"without an effect on what is computed: {without_effect}"] if without_effect else [])]


def facts_of(line: dict[str, Any]) -> dict[str, Any]:
    """What a start computes with, by name: settings as they were resolved, the program, versions, hardware."""
    hidden = ("code", "branch", "origin", "left_out", *DIGESTS)
    resolved = {name: value for name, value in line["resolved"].items() if name not in hidden}
    found = {flag(name): resolved.pop(name, value) for name, value in line["settings"].items()}
    found |= {name.replace("_", " "): value for name, value in resolved.items()}
    found |= {words: line["resolved"][name][:16] for name, words in DIGESTS.items() if name in line["resolved"]}
    return found | conditions_of(line)


def _shown(found: dict[str, Any], name: str) -> str:
    """A setting that is off is not written down; the rest is missing in a run of an older version."""
    return in_words(found[name]) if name in found else "the default" if name.startswith("--") else "not known"


def starts_of(runs: Sequence[Record]) -> Iterator[str]:
    """Where the later starts of each run begin, and what is not as before from there on."""
    for name, run in zip(NAMES, runs, strict=True):
        if len(run.starts) > 1:
            yield f"{name} has {len(run.starts)} starts, after steps {some(str(line['step']) for line in run.starts)}"
        for before, line in pairwise(run.starts):
            for text in settings_apart(before, line, ("before", "from there on")):
                yield f"{name} after step {line['step']}: {text}"


def data_apart(runs: Sequence[Record], place: Place) -> list[str]:
    """Which samples are not in the data of both runs, or have another label, as far as that can be known. Collective.
    """
    recorded = [run.starts[-1]["resolved"].get("data") for run in runs]
    if recorded[0] == recorded[1]:
        return digests_apart(runs, place)  # Collective.
    found, reasons = [], []
    for name, run, fingerprint in zip(NAMES, runs, recorded, strict=True):
        try:
            task = read_data(run, place, place.folder / f"{name}-data")  # Collective.
            found.append([*task.listing()] if place.world.is_main else [])
            if task.fingerprint != fingerprint:
                reasons.append(f"the data of {name} are not as they were when it was trained")
        except UserError as error:
            if not is_an_answer(error):
                raise
            reasons.append(f"the data of {name} cannot be read: {error}")
    return [f"{reason}; which samples differ cannot be said" for reason in reasons] or samples_apart(*found)


def digests_apart(runs: Sequence[Record], place: Place) -> list[str]:
    """Which samples both have used that were not the same, of data with the same names and labels. Collective."""
    def find() -> list[list[Any]] | None:
        folders = [CheckpointFolder(run.path / "checkpoints", 1, print) for run in runs]
        with suppress(OSError, ValueError, SafetensorError):  # one has none, or is just removing it
            one, two = (load_file(folder.path / name / SAMPLES) for folder in folders for name in folder.names()[:1])
            return [[name, index] for name in sorted(one.keys() & two.keys() - {"since"})
                    if len(one[name]) == len(two[name]) for index in differing(one[name], two[name])]
        return None

    (first, *held_out), (second, *others) = (
        [run.starts[-1]["settings"].get(name) for name in ("data", "seed", "val_fraction")] for run in runs)
    # None: not known, as other samples may be held out
    differ = place.world.on_rank_zero(find, takes_long=True) if held_out == others else None  # Collective.
    if not differ:
        is_unknown = differ is None and first != second
        return ["data: it is not known whether their samples hold the same bytes"] * is_unknown
    try:
        task = read_data(runs[0], place, place.folder / "data")  # Collective.
        sets = {"train": task.train_set, "val": task.eval_set}
        names = [sets[name].name(index) for name, index in differ]
    except UserError as error:
        if not is_an_answer(error):
            raise
        names = [f"sample {index} of {name}" for name, index in differ]
    return [f"data: {'one sample differs' if len(names) == 1 else f'{len(names)} samples differ'}: {some(names)}"]


def read_data(run: Record, place: Place, folder: Path) -> Task:
    """The task of a run, with its data as they are now. folder: a new one. Collective. Raises UserError."""
    line, world = run.starts[-1], place.world
    config = with_values(config_for(line, place.device, run.data, folder), {"cache": "none"})  # no images are packed
    world.on_rank_zero(lambda: lay_out(Part(0, 0, line, None), config, run.path, folder))  # Collective.
    with open_run(config, world, lambda text: None) as opened:  # Collective.
        return load_task(config.run.task)(config, opened, world)  # Collective.


def samples_apart(one: Sequence[Sample], two: Sequence[Sample]) -> list[str]:
    """Which samples differ between two data sets, or that their order does."""
    first, second = ([*(Counter(these) - Counter(those)).elements()] for these, those in ((one, two), (two, one)))
    labels = dict(second)
    both = labels.keys() & dict(first).keys()
    groups = {"with another label": [f"{_cut(name)} ({label} {IN[0]}, {labels[name]} {IN[1]})"
                                     for name, label in first if name in both],
              **{f"only {where}": [f"{_cut(name)} ({label})" for name, label in samples if name not in both]
                 for where, samples in zip(IN, (first, second), strict=True)}}
    return [f"data: {counted(len(names), 'sample')} {what}: {some(names)}" for what, names in groups.items() if names
            ] or ["data: the same samples in another order, or with others held out"]


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- results


def results_apart(runs: Sequence[Record], results: Sequence[tuple[Written, Written]]
                  ) -> tuple[int, int | None, list[str]]:
    """The last step up to which all is the same that both have written down; the first that is not; what to say.

    None: all is the same. Raises UserError (66) if there is nothing that both have.
    """
    (same_records, record), (same_links, link) = map(first_apart, *results)
    if not (same_records or record or same_links or link):
        raise UserError("the runs have no record and no checkpoint of the same step in common, so there is nothing to"
                        " compare", Exit.NO_INPUT)
    differs = min((pair[0]["step"] for pair in (record, link) if pair), default=None)
    agreed = max((step for step in same_records + same_links if differs is None or step < differs), default=0)
    number = f"{counted(len(same_records), 'record')}, {counted(len(same_links), 'link')} of the chain"
    if differs is None:
        return agreed, None, [f"the same, bit for bit: {number}, up to step {agreed}"]
    found = [f"the same in both: {number}"]
    if record:
        same = [step for step in same_records if step < record[0]["step"]]  # the step's own epoch record may be
        steps = record[0]["step"] - max(same, default=0)
        precision = max((run.starts[0]["resolved"]["precision"] for run in runs), key=EPSILON.get)
        found += [f"the first record that differs: {record[0]['split']}, step {record[0]['step']}",
                  *record_apart(*record, steps, precision)]
    if link:
        what = f"the checkpoint of step {link[0]['step']}" if link[0]["step"] else "the state before the first step"
        found.append(f"the first content in the chain that differs: {what}")
    return agreed, differs, found


def written(run: Record, world: World) -> tuple[Written, Written]:
    """The records; what the checkpoints mean, before or after an evaluation. Collective."""
    records = read_records(run, world, "train", "val", "epoch")  # Collective.
    return ({(record["split"], record["step"]): record for record in records},
            {(step, link["awaits_evaluation"]): {"step": step, "content": link["content"]}
             for step, link in sorted(run.links.items())})


def first_apart(one: Written, two: Written) -> tuple[list[int], tuple[dict[str, Any], dict[str, Any]] | None]:
    """The steps of what is the same in both, up to the first pair that is not; and this pair."""
    same: list[int] = []
    for key in filter(two.__contains__, one):
        if one[key] != two[key]:
            return same, (one[key], two[key])
        same.append(one[key]["step"])
    return same, None


def record_apart(one: dict[str, Any], two: dict[str, Any], steps: float, precision: str) -> Iterator[str]:
    """The figures that differ; of loss or gradient norm, whether rounding may do it in that many steps."""
    names = [name for name in one | two if one.get(name) != two.get(name)]
    rounded = next((name for name in names if name in ("loss", "grad_norm")), "")  # lr and counts are exact
    for name in names[:SHOWN]:
        first, second = one.get(name), two.get(name)
        yield (f"  {name}: {apart(first, second, precision, IN, steps)}" if name == rounded else
               f"  {name}: {first} {IN[0]}, {second} {IN[1]}")
    if names[SHOWN:]:
        yield f"  and {counted(len(names[SHOWN:]), 'figure')} more"


if __name__ == "__main__":
    answer(main, GIVEN, WATCHDOG, PARSER)
