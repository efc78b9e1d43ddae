"""--without: nothing of a left-out sample is read but its place and its length; what is refused; where it is shown.

57 samples are trained on, of which those named below are left out, in 3 steps of an epoch.
"""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from ask.integrity import findings
from data.images.index import ImageIndex
from data.tables.source import TableSource
from data.tables.table import TEXTS
from data.texts.index import TextSource, read_texts
from data.texts.tokenizer import text_of_padding, train_tokenizer
from tests.harness.encoders import configured, write_encoder
from tests.harness.run_directory import contents, records, rows_of
from utils.errors import Exit, UserError
from utils.settings.option import Names

LENGTH = ["--epochs", "2", "--global-batch-size", "24", "--threads", "1", "--workers", "0", "--log-every", "1",
          "--save-every", "1", "--keep", "9", "--strategy", "exact", "--micro-batch-size", "4"]
IMAGES = ["--model", "small-cnn", "--image-size", "16"]
BERT = ["--model", "bert-tiny", "--vocab-size", "100", "--max-length", "32", "--text-column", "text"]
NUMBERS = (3, 20, 41, 56)  # rows of a table: of each class one, and the last
CASES = {  # settings by name: those of a task on images or texts
    "images": IMAGES,
    "images, mixed, weighted": [*IMAGES, "--mixup", "0.5", "--cutmix", "0.5", "--class-weights", "balanced"],
    "images, bf16, averaged": [*IMAGES, "--precision", "bf16", "--ema-decay", "0.5"],
    "images of any size": ["--model", "small-cnn"],
    "texts": ["--task", "text-classification", *BERT, "--class-weights", "balanced"],
    "own network": ["--task", "text-classification", "--model", "bag-of-words", *BERT[2:]],
    "fitted": ["--task", "text-classification", "--max-length", "32", "--text-column", "text"],
    "several labels": ["--task", "text-classification", *BERT, "--multi-label", "--class-weights", "balanced"],
    "numbers": ["--task", "text-regression", *BERT, "--label-column", "number"],
    "masked": ["--task", "masked-lm", *BERT, "--max-length", "16"]}  # one of the left-out texts is cut in two


@pytest.fixture
def names(own_photos, tmp_path) -> Path:
    """A file with an image of each class."""
    lines = [str(sorted((own_photos / "train" / name).iterdir())[5].relative_to(own_photos))
             for name in sorted(path.name for path in (own_photos / "train").iterdir())]
    return written(tmp_path / "names.txt", lines)


def written(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def write_table(folder, word, label, number):
    """57 rows for training, one of them of 30 words. Those of NUMBERS consist of one word and have this label."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 57), ("val", 31)):
        folder.mkdir(exist_ok=True)
        with (folder / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label", "number"])
            for row in range(count):
                words = generator.choice([*"abcdefghij"], 30 if row == 41 else generator.integers(3, 12)).tolist()
                is_left_out = split == "train" and row in NUMBERS
                writer.writerow([" ".join([word] * len(words) if is_left_out else words),
                                 label if is_left_out else f"topic{row % 3}", number if is_left_out else row % 7])
    return folder


def of_noise(photos, folder, names):
    """A copy of the photos in which the named ones are noise, of another size."""
    shutil.copytree(photos, folder)
    for line in names.read_text().split():
        noise = np.random.default_rng(1).integers(0, 256, (300, 200, 3)).astype(np.uint8)
        Image.fromarray(noise).save(folder / line)
    return folder


@pytest.mark.rows(1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_with_any_content_of_left_out_samples_a_run_has_the_same_hash(
        case, processes, names, own_photos, run_torchrun, tmp_path):
    """For images noise; for texts another word and another label. A word that occurs nowhere else is no token, and a
    text of such words no sample of masked-lm.
    """
    is_image = case.startswith("images")
    if is_image:
        data = [own_photos, of_noise(own_photos, tmp_path / "noise", names)]
    else:
        data = [write_table(tmp_path / word, word, *labels)
                for word, labels in (("a", ("topic0", 1)), ("b" if case == "masked" else "ϟ", ("topic2", 10**6)))]
        names = written(tmp_path / "numbers.txt", NUMBERS)
    more, runs = [], [tmp_path / "run", tmp_path / "other"]
    if case == "fitted":
        more = ["--model", tmp_path / "model"]
        write_encoder(more[1], "bert", transformers.AutoModel, train_tokenizer(["a b c d e f g h i j"], 100))
    for run, place in zip(runs, data, strict=True):
        words = [*CASES[case], *more, *LENGTH, "--data", place, "--run-dir", run, "--without", names]
        stopped = run_torchrun(processes, *words, "--stop-after", 4)
        assert stopped.code == Exit.STOPPED, stopped.text
        assert run_torchrun(processes, *words).returncode == 0
    ends = [(contents(run), records(run)) for run in runs]
    assert ends[0] == ends[1] and len(ends[0][0]) > 5
    assert json.loads((runs[0] / "auto.json").read_text())["head_init"] == "features" if more else "random"
    result = run_torchrun(1, *CASES[case], *more, *LENGTH, "--data", data[1], "--run-dir", tmp_path / "all")
    assert result.returncode == 0 and contents(tmp_path / "all") != ends[0][0], result.text


@pytest.mark.rows(1)
@pytest.mark.parametrize("more", [[], ["--mixup", "0.5"], ["--ema-decay", "0.5", "--loss", "bce"]])
def test_left_out_images_count_as_those_that_cannot_be_read(more, names, own_photos, run_train, tmp_path):
    words = [*IMAGES, *more, *LENGTH, "--data", own_photos]
    result = run_train(*words, "--run-dir", tmp_path / "run", "--without", names)
    assert "trained on 54 of 57 samples" in result.out and "3 of the 57 training samples are left out" in result.text
    assert not (tmp_path / "run" / "bad_samples.txt").exists()
    for line in names.read_text().split():
        (own_photos / line).write_text("not an image")
    skipped = run_train(*words, "--run-dir", tmp_path / "skipped", "--bad-samples", "skip")
    assert "skipped 3 unreadable samples" in skipped.out, skipped.text
    assert contents(tmp_path / "run") == contents(tmp_path / "skipped")


def test_the_names_are_in_the_run_and_the_path_of_their_file_is_not(names, own_photos, run_train, tmp_path):
    words = [*IMAGES, *LENGTH, "--data", own_photos, "--run-dir", tmp_path / "run", "--without"]
    assert run_train(*words, names, "--stop-after", 2).returncode == Exit.STOPPED
    lines = sorted(names.read_text().split())
    assert json.loads((tmp_path / "run" / "auto.json").read_text())["left_out"] == lines
    moved = names.rename(tmp_path / "moved.txt")
    written(moved, reversed(lines))
    assert run_train(*words, moved).returncode == 0
    for name in ("config.yaml", "auto.json", "starts.jsonl"):
        text = (tmp_path / "run" / name).read_text()
        assert str(names) not in text and str(moved) not in text
    assert findings(tmp_path / "run") == []
    written(moved, lines[1:])
    other = run_train(*words, moved)
    assert other.returncode == Exit.OTHER_RUN
    assert "--without was 3 names (" in other.err and "and is now 2 names (" in other.err
    alone = run_train("--eval-only", "--run-dir", tmp_path / "run")
    assert (alone.returncode, json.loads(alone.out)["top1"]) == (0, records(tmp_path / "run")[-1]["top1"])


@pytest.mark.rows(2)
@pytest.mark.parametrize("lines, words", [
    (["val/bird/0.png"], "the run is evaluated on it"), (["train/bird/none.png"], "train has no such sample"),
    ([], "must be a file with a name on each line"), (None, "must be a file with a name on each line"),
    ("all", "it names all samples of train")])
def test_what_cannot_be_left_out_is_refused_before_anything_is_written(
        lines, words, own_photos, run_train, tmp_path):
    classes = sorted(path.name for path in (own_photos / "train").iterdir())
    file = tmp_path / "names.txt"
    if lines == "all":
        lines = [path.relative_to(own_photos) for path in own_photos.glob("train/*/*")]
    if lines is not None:
        first = sorted((own_photos / "val" / classes[0]).iterdir())[0].relative_to(own_photos)
        written(file, [first if str(line).startswith("val/") else line for line in lines])
    result = run_train(*IMAGES, *LENGTH, "--data", own_photos, "--run-dir", tmp_path / "run", "--without", file)
    assert result.returncode == Exit.USAGE, result.text
    assert words in result.err and not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def parent(session_dir, run_train, photos) -> Path:
    """A finished run with all samples."""
    run = session_dir / "with-all"
    assert run_train(*IMAGES, *LENGTH, "--data", photos, "--run-dir", run).returncode == 0
    return run


def test_the_first_use_of_a_sample_is_the_step_that_lists_it(parent, run_train, tmp_path):
    steps = {}
    for step in (1, 2, 3):
        listed = run_train(parent, "--step", step, "--list", "--output", tmp_path / str(step), script="ask/replay.py")
        assert listed.returncode == 0, listed.text
        steps |= {row["sample"]: step for row in rows_of(tmp_path / str(step))}
    file = written(tmp_path / "names.txt", [f"{name}: as bad_samples.txt has it" for name in steps])
    result = run_train(parent, "--first-use", file, "--output", tmp_path / "uses", script="ask/replay.py")
    assert f"first uses in the steps of {parent}: 57 samples\n" in result.out, result.text
    found = {row["sample"]: row["step"] for row in rows_of(tmp_path / "uses")}
    assert {name.partition("photos/")[2]: step for name, step in steps.items()} == found and len(found) == 57


@pytest.mark.parametrize("name", ["bart", "t5", "roberta"])
def test_a_text_that_is_left_out_is_read_by_models_that_need_its_end(name, tmp_path):
    """Encoder-decoders look for the token that ends each text; a pair has as many of them as other pairs have."""
    tokenizer = train_tokenizer(["a b c d e f g h i j"], 100)
    tokenizer.eos_token = "[SEP]"
    for is_pair in (False, True):
        first, pad, last = text_of_padding(tokenizer, is_pair)
        config = configured(name, tokenizer, num_labels=2, eos_token_id=tokenizer.eos_token_id)
        model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
        usual = tokenizer(*["a b c"] * (1 + is_pair), return_tensors="pt")["input_ids"]
        count = usual.shape[1] - len(first) - len(last)
        ids = torch.cat([usual, torch.tensor([[*first, *pad * count, *last]])])
        assert model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.isfinite().all()


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_tokenizer_is_trained_without_the_rows_that_are_left_out(skip_bad, tmp_path):
    """Rows are counted as the samples are: without those that are no sample."""
    table = tmp_path / "texts.csv"
    table.write_text("text,label\nzero,a\n" + "one,\n" * skip_bad + "two,b\nthree,a\n")
    source = TextSource(root=str(table), inputs=TEXTS, input_column="auto", label_columns=("label",), skip_bad=skip_bad,
                        tokenizer="", max_length=9, split_long=False)
    assert isinstance(source, TableSource)
    assert [*read_texts(source, {1})] == ["zero", "three"]


@pytest.mark.parametrize("line", ["a.png,b.png", "/d/a.png", "/d/b.png: not an image", "x/../a.png,b.png"])
def test_a_line_names_a_sample_by_all_its_images_or_by_one(line):
    index = ImageIndex.of("/d", [b"a.png\0b.png", b"c.png\0d.png"], np.zeros(2, np.int32), num_images=2)
    assert index.find([line]) == {line: [0]} and index.find(["/d/e.png"]) == {}


def test_a_list_counts_for_what_is_in_it(tmp_path):
    one, other = (Names(str(written(tmp_path / name, lines)))
                  for name, lines in (("a.txt", ["x", "y", "", "y"]), ("b.txt", ["y", "x"])))
    assert one == other and one.names == ("x", "y") and one.startswith("2 names (")
    assert Names(one) == one and Names(one).names is None
    with pytest.raises(UserError, match="must be a file with a name on each line"):
        Names(str(written(tmp_path / "empty.txt", ["", ""])))
