"""`make small`: its commands are ones that train.py takes, its data, its table."""

import csv
from pathlib import Path

import pytest

from benchmarks import small
from benchmarks.small import CELLS, IMAGE, SEEDS, SIX, TEXT, lay_out, rows_of, table, tfidf, words_of
from utils.settings.command_line import parse_command_line
from utils.settings.config import settings

pytestmark = pytest.mark.unit


def test_there_are_twelve_cells_and_three_seeds_in_five():
    assert len({cell.name for cell in CELLS}) == 12 and sum(cell.has_seeds for cell in CELLS) == 5
    assert {len(SIX[kind]) for kind in (TEXT, IMAGE)} == {6}
    assert [len([*rows_of(cell)]) for cell in CELLS[:2]] == [2 * SEEDS + 8, 10]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_each_command_is_one_that_train_takes(cell):
    """The former defaults are given as such, and what is tried stands after them."""
    for setting, seed in rows_of(cell):
        if setting in ("tfidf", "embeddings"):
            continue
        config = parse_command_line(words_of(cell, Path("data"), Path("run"), setting, seed), {})
        found = settings(config)
        assert (found["seed"], found["run_dir"], found["head_init"] == "random") == (seed, "run", bool(setting))
        usual = type(config)().usual
        if setting == "former":
            assert (found["epochs"], found["global_batch_size"]) == (usual["epochs"], usual["global_batch_size"])
        for flag, value in zip(setting.split()[::2], setting.split()[1::2], strict=False):
            assert str(found[flag[2:].replace("-", "_")]) in (value, str(float(value)) if value[0].isdigit() else value)


def test_texts_are_cut_to_their_size_by_class(tmp_path, monkeypatch):
    monkeypatch.setattr(small, "RUNS", tmp_path / "runs")
    source = tmp_path / "sst2"
    source.mkdir()
    for split, count in (("train", 300), ("val", 10)):
        rows = "".join(f"{word} {number}\t{label}\n" for number in range(count)
                       for label, word in enumerate(("bad", "good")))
        (source / f"{split}.tsv").write_text(f"text\tlabel\n{rows}")
    [cell] = [cell for cell in CELLS if cell.name == "sst2-200"]
    folder = lay_out(cell, tmp_path)
    with (folder / "train.csv").open() as file:
        labels = [row["label"] for row in csv.DictReader(file)]
    assert sorted(labels) == ["0"] * 100 + ["1"] * 100
    assert tfidf(folder, cell.columns) == 100


def test_the_table_has_means_over_seeds_and_the_best_of_six():
    rows = [{"cell": "sst2-200", "setting": "", "seed": seed, "top1": 70.0 + seed, "head": 60.0, "s": 9.0}
            for seed in range(3)]
    rows += [{"cell": "sst2-200", "setting": name, "seed": 0, "top1": top1, "s": 5.0}
             for name, top1 in (("former", 65.0), (SIX[TEXT][0], 69.0), (SIX[TEXT][1], 68.0))]
    [line] = [line for line in table(rows).splitlines() if line.startswith("| sst2-200")]
    assert "| 65.0 | 71.0 (70.0 to 72.0) | 60.0" in line and f"69.0 `{SIX[TEXT][0]}`" in line
