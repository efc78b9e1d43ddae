"""The README's commands, run as they stand in a fresh copy of the project."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.harness.project_copy import copy_project, run_in
from tests.harness.quoted import is_printed
from utils.errors import Exit

README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def copy(session_dir) -> Path:
    """A copy of the project in a folder of its own, with this environment as its .venv."""
    return copy_project(session_dir / "fresh-copy")


@pytest.fixture(scope="module")
def shell(copy, session_dir):
    """Run a line in the copy, as a user would type it."""
    return lambda line: run_in(copy, line, session_dir / "cache")


def block(beginning: str) -> list[str]:
    """The commands of the code block without a language whose first line begins so; a \\ at an end joins lines."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", README.replace("\\\n", ""), re.S | re.M)
    return next(lines for language, text in blocks
                if not language and (lines := text.splitlines())[0].startswith(beginning))


@pytest.fixture(scope="module")
def trained(copy, shell) -> Path:
    """The run of `python train.py`, the first of three commands that the README calls one run."""
    first = shell(block("python train.py\n".strip())[0])
    assert first.returncode == 0, first.stderr
    assert "for comparison: always the most frequent class" in first.stdout
    [run] = (copy / "runs").iterdir()
    assert json.loads((run / "summary.json").read_text())["top1"] >= 0.97
    return run


@pytest.mark.slow
def test_the_three_ways_to_start_and_make_train_are_one_run(copy, shell, trained):
    others = ["make train", "python train.py --nproc-per-node 2",
              "python -m torch.distributed.launch --nproc-per-node=2 train.py",
              "python -m torch.distributed.launch --use-env --nproc-per-node=2 train.py"]
    for line in [*block("python train.py")[1:], *others]:
        again = shell(line)
        assert again.returncode == 0, again.stderr
        assert f"{trained.relative_to(copy)} is finished" in again.stdout
    assert list((copy / "runs").iterdir()) == [trained]


@pytest.mark.slow
def test_the_three_commands_print_what_the_page_shows(session_dir):
    """The third prints the figure of the run's best evaluation."""
    folder = copy_project(session_dir / "three-commands")
    [console] = re.findall(r"^```console\n(.*?)^```", README, re.S | re.M)
    codes = []
    for part in console.split("$ ")[1:]:
        command, *quoted = part.splitlines()
        done = run_in(folder, command, session_dir / "cache")
        codes.append(done.returncode)
        assert is_printed(tuple(quoted), done.stdout.splitlines(), {}), done.stdout + done.stderr
    [run] = (folder / "runs").iterdir()
    assert codes == [Exit.STOPPED, Exit.DONE, Exit.DONE]
    assert json.loads(done.stdout)["top1"] == json.loads((run / "summary.json").read_text())["best"]["value"]


@pytest.mark.slow
def test_the_predict_and_evaluate_lines_run(copy, shell, trained):
    image = next((ROOT / "data").glob("digits.png"))
    predict, evaluate = (line.strip("` ")
                         for line in re.findall(r"\| (`[^`]*(?:models\.predict|--eval-only)[^`]*`)", README))
    predicted = shell(predict.replace("RUN", str(trained)).replace("image.jpg folder/", str(image)))
    assert predicted.returncode == 0, predicted.stderr
    assert (copy / "predictions.csv").read_text().startswith("input,prediction,probability,0,1,2,3,4,5,6,7,8,9\n")
    evaluated = shell(evaluate.replace("RUN", str(trained)))
    assert json.loads(evaluated.stdout)["top1"] == json.loads((trained / "summary.json").read_text())["best"]["value"]


@pytest.mark.long
def test_the_lines_for_own_data_train_on_a_folder_of_images(shell, photos):
    for line in block("python train.py --data"):
        # Fewer processes and steps for two cores, and no download: its failure is tested with the command line.
        line = line.replace("DIR", str(photos)).replace("=8", "=2").replace(" --pretrained", "").replace(
            "resnet50", "resnet18")
        done = shell(f"{line} --image-size 32 --max-steps 1 --device cpu")
        assert done.returncode == 0, done.stderr
        assert "step 1/1 validation loss" in done.stdout


@pytest.mark.slow
def test_the_lines_for_own_texts_train_on_tables_pairs_and_text_files(copy, shell, texts):
    rows = list(csv.DictReader((texts / "train.csv").open(encoding="utf-8")))
    shutil.copy(texts / "train.csv", copy / "reviews.csv")
    (copy / "corpus.txt").write_text("".join(f"{row['text']}\n" for row in rows))
    pairs = [("premise", "hypothesis", "relation"), *((row["text"], row["more"], row["label"]) for row in rows)]
    (copy / "pairs.tsv").write_text("".join("\t".join(row) + "\n" for row in pairs))
    lines = block("python train.py --task masked-lm --data corpus") + block(
        "python train.py --task text-classification --data reviews")
    for seed, line in enumerate(lines):  # each a run of its own
        # Small models, and no download: its failure is tested elsewhere.
        line = line.replace("google-bert/bert-base-uncased", "runs/pretrained/model").replace("bert-small", "bert-tiny")
        done = shell(f"{line} --max-steps 1 --device cpu --seed {seed}")
        assert done.returncode == 0, done.stderr
        assert "step 1/1 validation loss" in done.stdout


@pytest.mark.slow
def test_the_lines_for_the_built_in_texts_are_runs_of_their_own(copy, shell):
    for line in block("python train.py --task text-classification\n".strip()):
        done = shell(f"{line} --max-steps 1 --device cpu --run-dir runs/{line.split()[-1]}")
        assert done.returncode == 0, done.stderr
        assert "for comparison: " in done.stdout


def test_the_files_that_the_readme_links_to_exist():
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links and all((ROOT / link).exists() for link in links)
