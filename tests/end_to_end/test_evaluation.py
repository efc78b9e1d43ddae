"""Evaluations that people use: rows by sample, figures by class, --best, weights as they are; images and texts."""

import csv
import io
import json

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import roc_auc_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data.images.augment import CentreCrop, SmallTrain
from data.images.folder import ImageFolder
from data.images.scan import build_index
from data.sampler import epoch_order
from data.splits import ValSplit
from models import predict
from tests.conftest import COUNTS, ROOT
from tests.harness.run_directory import records, weights_sha256
from utils.errors import Exit

SMALL = {"images": ["--model", "mobilenet_v3_small", "--image-size", "32", "--global-batch-size", "24"],
         "texts": ["--task", "text-classification", "--model", "bert-tiny", "--vocab-size", "200", "--max-length", "32",
                   "--text-column", "text,more"]}
COMMON = ["--epochs", "1", "--threads", "1", "--workers", "0", "--precision", "fp32", "--eval-batch-size", "20"]


@pytest.fixture(scope="module", params=SMALL)
def said(request, session_dir, run_train, photos, texts):
    """The kind of data, the words of a run of one epoch, its run directory, and what it printed."""
    kind, run = request.param, session_dir / f"evaluated-{request.param}"
    words = [*SMALL[kind], *COMMON, "--data", photos if kind == "images" else texts]
    result = run_train(*words, "--run-dir", run)
    assert result.returncode == 0, result.text
    return kind, words, run, result.out


@pytest.fixture(scope="module")
def trained(said):
    """All but what it printed."""
    return said[:3]


def figures(text):
    """The figures of the JSON line of --eval-only."""
    return {name: value for name, value in json.loads(text).items() if name not in ("time", "step", "epoch", "samples")}


def test_a_run_says_where_its_weights_come_from_and_its_learning_rate(said):
    kind, _, run, out = said
    model, lr = {"images": ("mobilenet_v3_small", "0.000612"), "texts": ("bert-tiny", "0.001")}[kind]
    [line] = [line for line in out.splitlines() if line.startswith(f"{run}: ")]
    assert f", {model} from scratch, " in line and line.endswith(f", learning rate {lr}; a new run")


def test_a_run_says_in_plain_words_what_is_wrong_with_it(said):
    """After two or three steps nearly all predictions are of one class."""
    _, _, run, out = said
    assert (f"\n{records(run)[-1]['never_predicted']} of the classes of the validation set are never predicted;"
            " RUN/eval/classes.json has the recall of each class") in out, out


def test_a_record_holds_its_position_and_numbers_alone(trained):
    """Tables do not take the place of a number: `samples` is how many were trained on."""
    _, _, run = trained
    last = records(run)[-1]
    assert (last["epoch"], last["samples"]) == (1.0, sum(COUNTS["train"]))
    assert {name for name, value in last.items() if not isinstance(value, int | float)} == {"split"}


def test_the_rows_are_the_samples_of_val_in_its_order(trained, photos, texts):
    kind, _, run = trained
    with (run / "eval" / "samples.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    if kind == "images":
        expected = [(str(path), path.parent.name) for path in sorted(photos.glob("val/*/*.png"))]
    else:
        with (texts / "val.csv").open(newline="") as file:
            expected = [(f"{row['text']}\t{row['more']}", row["label"]) for row in csv.DictReader(file)]
    assert [(row["input"], row["label"]) for row in rows] == expected
    last = records(run)[-1]
    assert sum(row["prediction"] == row["label"] for row in rows) / len(rows) == last["top1"]
    # six decimals
    assert sum(float(row["loss"]) for row in rows) / len(rows) == pytest.approx(last["loss"], abs=1e-6)


def test_the_figures_of_the_classes_are_in_a_file(trained):
    _, _, run = trained
    found = json.loads((run / "eval" / "classes.json").read_text())
    assert [figures["support"] for figures in found["classes"].values()] == list(COUNTS["val"])
    recalls = [figures["recall"] for figures in found["classes"].values()]
    assert sum(recalls) / 3 == pytest.approx(found["macro_recall"], abs=1e-12)
    assert found["auroc"] == records(run)[-1]["auroc"]


@pytest.fixture(scope="module")
def shown(trained):
    """shown(tag): a picture or a text in TensorBoard's file, [H, W, 3] uint8 or Markdown."""
    kind, _, run = trained
    events = EventAccumulator(str(run / "tb"), size_guidance={"images": 0, "tensors": 0}).Reload()

    def show(tag):
        if kind == "images":
            [event] = events.Images(tag)
            return np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))
        [event] = events.Tensors(f"{tag}/text_summary")
        return event.tensor_proto.string_val[0].decode()

    return show


def cells_of(markdown):
    """The header of a table in Markdown, and its rows."""
    header, _, *rows = [[cell.strip("` ") for cell in line[1:-1].split("|")] for line in markdown.splitlines()]
    return header, rows


def test_tensorboard_has_the_first_batch_as_it_is_trained_on(trained, shown, photos, texts, tmp_path):
    if trained[0] == "texts":
        header, rows = cells_of(shown("train/first_batch"))
        with (texts / "train.csv").open(newline="") as file:
            tokens = [f"[CLS] {row['text']} [SEP] {row['more']} [SEP]" for row in csv.DictReader(file)]
        assert header == ["what the model sees"] and len(rows) > 20 and {row[0] for row in rows} <= set(tokens)
        return
    index = build_index(str(photos), ValSplit(0.1, 0), tmp_path).splits["train"]
    augmented, plain = (ImageFolder(index, transform(32, "bilinear", 32), 0) for transform in (
        lambda size, how, _: SmallTrain(size, how), CentreCrop))
    picture, num_moved = shown("train/first_batch"), 0
    for place, sample in enumerate(epoch_order(0, 0, len(index))[:24].tolist()):  # a global batch
        top, left = (6 + 70 * number for number in divmod(place, 8))
        tile = picture[top:top + 64:2, left:left + 64:2]  # enlarged pixel by pixel
        assert np.array_equal(tile, augmented[0, sample].image)
        num_moved += not np.array_equal(tile, plain[0, sample].image)
    assert picture.shape == (6 + 3 * 70, 6 + 8 * 70, 3) and num_moved > 20


@pytest.mark.long
@pytest.mark.parametrize("processes", [
    2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_output_has_the_bytes_that_training_wrote(trained, run_torchrun, tmp_path, processes):
    _, _, run = trained
    result = run_torchrun(processes, "--eval-only", "--run-dir", run, "--output", tmp_path / "rows.csv")
    assert result.returncode == 0, result.text
    assert (tmp_path / "rows.csv").read_bytes() == (run / "eval" / "samples.csv").read_bytes()


def test_a_model_folder_is_evaluated_as_it_is_without_a_run(trained, run_train, tmp_path):
    """No run of this command is there, and none is made."""
    _, words, run = trained
    words = [run / "model" if word in ("mobilenet_v3_small", "bert-tiny") else word for word in words]
    words += ["--freeze", "999"]  # a setting of training
    before = sorted((ROOT / "runs").glob("*"))
    result = run_train(*words, "--pretrained", "--eval-only", "--output", tmp_path / "classes.json")
    assert result.returncode == 0, result.text
    assert f"evaluating the weights of {run / 'model'}" in result.err
    assert figures(result.out) == {name: value for name, value in records(run)[-1].items()
                                   if name in figures(result.out)}
    assert json.loads((tmp_path / "classes.json").read_text())["classes"] == json.loads(
        (run / "eval" / "classes.json").read_text())["classes"]
    assert sorted((ROOT / "runs").glob("*")) == before


@pytest.mark.long
@pytest.mark.parametrize("kind", SMALL)
def test_rows_of_bce_are_the_sigmoids_that_predict_gives(kind, photos, texts, run_dir, run_train, tmp_path):
    """So is AUROC; and so they are where its model folder is evaluated without --loss."""
    data = photos if kind == "images" else texts
    trained = run_train(*SMALL[kind], *COMMON, "--data", data, "--run-dir", run_dir, "--loss", "bce")
    assert trained.returncode == 0, trained.text
    with (run_dir / "eval" / "samples.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    inputs = [row["input"] for row in rows] if kind == "images" else [str(data / "val.csv")]
    assert predict.main([str(run_dir), *inputs, "--output", str(tmp_path / "said.csv")]) == Exit.DONE
    with (tmp_path / "said.csv").open(newline="") as file:
        said = list(csv.DictReader(file))
    assert [row["prediction"] for row in rows] == [row["prediction"] for row in said]
    # another batch size is another order of sums
    assert [float(row["probability"]) for row in rows] == pytest.approx(
        [float(row["probability"]) for row in said], abs=1e-5)
    last, found = records(run_dir)[-1], json.loads((run_dir / "eval" / "classes.json").read_text())
    assert np.mean([float(row["loss"]) for row in rows]) == pytest.approx(last["loss"], abs=1e-6)
    for name, of_class in found["classes"].items() if kind == "texts" else ():  # three steps tell images hardly apart
        expected = roc_auc_score([row["label"] == name for row in rows], [float(row[name]) for row in said])
        assert of_class["auroc"] == pytest.approx(expected, abs=0.002)  # six decimals make ties

    words = [run_dir / "model" if word in ("mobilenet_v3_small", "bert-tiny") else word for word in SMALL[kind]]
    again = run_train(*words, *COMMON, "--data", data, "--eval-only", "--output", tmp_path / "rows.csv")
    assert again.returncode == 0, again.text
    assert (tmp_path / "rows.csv").read_bytes() == (run_dir / "eval" / "samples.csv").read_bytes()


def test_a_file_that_cannot_be_written_is_73_before_the_evaluation(trained, run_train, tmp_path):
    kind, _, run = trained
    if kind == "texts":
        pytest.skip("the same code")
    result = run_train("--eval-only", "--run-dir", run, "--output", tmp_path / "none" / "rows.csv")
    assert (result.returncode, result.out) == (Exit.CANNOT_CREATE, ""), result.text
    assert "rows.csv: cannot write it (No such file or directory); name another file" in result.err


def test_an_unreadable_image_has_a_row_without_prediction(own_photos, run_dir, run_train):
    bad = own_photos / "val" / "tint1" / "003.png"
    bad.write_bytes(b"no image")
    result = run_train(*SMALL["images"], *COMMON, "--data", own_photos, "--run-dir", run_dir, "--bad-samples", "skip",
                       "--best", "macro_f1")
    assert result.returncode == 0, result.text
    rows = (run_dir / "eval" / "samples.csv").read_text().splitlines()
    assert f"{bad},tint1,,," in rows
    assert len(rows) == 1 + sum(COUNTS["val"])
    assert json.loads((run_dir / "summary.json").read_text())["best"]["metric"] == "macro_f1"


@pytest.mark.long
def test_a_run_continued_with_another_best_trains_the_same_weights(trained, run_dir, run_train):
    kind, words, run = trained
    if kind == "texts":
        pytest.skip("the same code")
    words = [*words, "--run-dir", run_dir, "--eval-every", "1"]
    stopped = run_train(*words, "--stop-after", "2", "--best", "loss")
    assert stopped.returncode == Exit.STOPPED, stopped.text
    result = run_train(*words, "--best", "top1")
    assert result.returncode == 0, result.text
    assert "--best was loss and is now top1" in result.out
    assert weights_sha256(run_dir) == weights_sha256(run)
    evaluations = [record for record in records(run_dir) if record["split"] == "val"]
    best = json.loads((run_dir / "summary.json").read_text())["best"]
    assert best["value"] == evaluations[best["step"] - 1]["top1"]
    assert json.loads((run_dir / "eval" / "classes.json").read_text())["step"] == best["step"]
