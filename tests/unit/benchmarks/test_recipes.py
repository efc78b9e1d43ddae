"""`make recipes`: its commands are ones that train.py takes, its data, its table; and the table of docs/recipes.md."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import in_turn, recipes
from benchmarks.recipes import RECIPES, SMALL, Recipe, beginning, lay_out, table, verdict
from utils.settings.command_line import parse_command_line
from utils.settings.config import settings

PAGE = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()


@pytest.mark.parametrize("recipe", RECIPES, ids=beginning)
def test_a_recipe_changes_what_its_technique_says_alone(recipe, tmp_path):
    words = [*f"{recipe.base.words} --data".replace("MINILM", str(tmp_path)).split(), str(tmp_path)]
    technique = recipe.technique.split()
    without, having = (settings(parse_command_line(each, {})) for each in (words, [*words, *technique]))
    changed = {f"--{name.replace('_', '-')}" for name in having if having[name] != without[name]}
    assert changed == {word for word in technique if word.startswith("--")}


def test_the_page_has_every_row_with_what_was_expected():
    assert [line for line in map(beginning, RECIPES) if line not in PAGE] == []
    assert len(re.findall(r"^\| `--.*\| (?:higher|equal|lower) \| ", PAGE, re.M)) == len(RECIPES)


def test_the_data_are_laid_out_once_with_the_counts_it_says(tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(recipes, "PHOTOS", {"train": 2, "val": 3})
    monkeypatch.setattr(recipes, "UNEVEN_PHOTOS", (1, 4))
    for name in [f"{split}/{label}" for split in ("train", "val") for label in "abc"]:
        (tmp_path / "cifar10" / name).mkdir(parents=True)
        for number in range(5):
            (tmp_path / "cifar10" / name / f"{number}.jpg").touch()
    for name in ("cifar", "imbalanced"):
        lay_out(name, tmp_path)
        lay_out(name, Path("not there"))
    counts = {name: [len(list((tmp_path / "runs" / "data" / name / split / label).iterdir()))
                     for split in ("train", "val") for label in "abc"] for name in ("cifar", "imbalanced")}
    assert counts == {"cifar": [2, 2, 2, 3, 3, 3], "imbalanced": [1, 4, 1, 3, 3, 3]}


@pytest.mark.parametrize("differences, expected", [
    ([1.0, 1.2, 1.1], "higher"), ([-1.0, -1.2, -1.1], "lower"), ([1.0, -0.2, 0.1], "equal"), ([3.0], "one seed")])
def test_a_difference_counts_beyond_two_standard_errors(differences, expected):
    assert verdict(differences) == expected


def test_a_row_compares_seed_by_seed():
    row = Recipe("--early-stop-patience 2", SMALL, "equal", "best")
    summaries = {(SMALL, technique, seed): {"step": step, "best": {"value": value}} for technique, values in {
        "": [(100, 0.5), (100, 0.6)], row.technique: [(60, 0.51), (40, 0.61)]}.items()
        for seed, (step, value) in enumerate(values)}
    assert table([row], summaries).splitlines()[-1] == (
        f"{beginning(row)} 55.0 ± 7.1 | higher (+1.0 ± 0.0), 50 % of the steps |")


def test_a_row_is_kept_if_none_of_its_runs_is_older(tmp_path, monkeypatch):
    """An older one may be another version's."""
    monkeypatch.setattr(recipes, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(in_turn, "RESULTS", tmp_path / "results.jsonl")
    monkeypatch.setattr(recipes, "lay_out", lambda name, data: None)

    def train(run):
        folder = recipes.folder_of(run)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").write_text(json.dumps({"step": 9, "top1": 0.25 if run[1] else 0.5}))
        return folder

    monkeypatch.setattr(recipes, "train", train)
    train((SMALL, "--augmentation shift", 0))
    recipes.main(tmp_path, 2, "--mixup")
    recipes.main(tmp_path, 2, "--augmentation shift")
    [line] = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert line["what"] == "recipe, --mixup 0.2, photos"
    assert line["figures"] == {"without": [50, 50], "with": [25, 25]}


def test_an_average_is_compared_with_the_weights():
    row = Recipe("--ema-decay 0.9", SMALL, "equal", "ema_top1")
    summaries = {(SMALL, "", 0): {"step": 9, "top1": 0.5},
                 (SMALL, row.technique, 0): {"step": 9, "top1": 0.1, "ema_top1": 0.6}}
    assert table([row], summaries).endswith("| 50.0 | one seed (+10.0) |")
