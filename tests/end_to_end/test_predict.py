"""models.predict on several processes: the same bytes, also after kills, with features beside the rows."""

import os
import shutil
import signal
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from data.texts.tokenizer import train_tokenizer
from models import prediction_files
from models.text.bert import save_model_folder as save_text_folder
from models.vision.classifier import build_classifier, load_model_folder, save_model_folder
from tests.conftest import ROOT
from tests.harness.launches import assert_no_process
from tests.harness.predicting import ended
from utils.errors import Exit, UserError
from utils.files import read_checked, write_checked
from utils.rundir import lock

PREDICT = {"script": "models/predict.py"}
BATCH = ["--batch-size", "16", "--device", "cpu"]
IMAGES = {"task": "image-classification", "classes": ["red", "a, b", "<i>"], "image_size": 32, "resize_size": 32,
          "interpolation": "bilinear", "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.25, 0.3]}


def write_image_run(folder, architecture="resnet18"):
    """A run directory of a model with random weights."""
    (folder / "model").mkdir(parents=True)
    torch.manual_seed(0)
    model = build_classifier(architecture, 3, 32)
    save_model_folder(model.state_dict(), IMAGES | {"architecture": architecture}, folder / "model")
    return folder


def write_text_run(folder, config=transformers.BertConfig, model=transformers.BertForSequenceClassification, **more):
    """The same of texts."""
    (folder / "model").mkdir(parents=True)
    tokenizer = train_tokenizer(["abcdefghij"], 64)
    described = config(vocab_size=len(tokenizer), num_labels=3, pad_token_id=0, **(more or {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
        "initializer_range": 0.3}))
    described.architectures = [model.__name__]
    torch.manual_seed(0)
    about = {"task": "text-classification", "text_columns": ["text", "more"], "max_tokens": 24}
    save_text_folder(model(described).state_dict(), described, about, tokenizer, folder / "model")
    return folder


@pytest.fixture(scope="module", params=["images", "texts"])
def asked(request, session_dir, photos, texts):
    """Words that ask a model about 148 inputs, of which one cannot be read; some inputs are named twice."""
    place = session_dir / f"predict-{request.param}"
    if request.param == "images":
        run, inputs = write_image_run(place / "run"), [photos / "val", place / "bad\udcff.png"]
        inputs[1].write_bytes(b"no image")
    else:
        run, inputs = write_text_run(place / "run"), [texts / "val.csv", place / "more.tsv"]
        inputs[1].write_text("text\tmore\n \tb\n")
    return [run, inputs[1], inputs[0], *BATCH]


@pytest.fixture(scope="module")
def expected(asked, session_dir, run_train):
    """What one process writes about them: the bytes of the file, and of that of the features."""
    return written(run_train(*asked, *output(folder := session_dir / "predict-one", fresh=True), **PREDICT), folder)


def output(folder, fresh=False):
    """Words that name the files in the folder."""
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    return ["--output", folder / "rows.csv", "--embeddings", folder / "features.npy"]


def written(result, folder, names=("features.npy", "rows.csv")):
    """The bytes of the files, once the launch has ended well; nothing else is left."""
    assert result.code == Exit.BAD_DATA or result.returncode == Exit.BAD_DATA, result.text
    assert result.err.count("predict: cannot read ") == 1, result.text
    assert "predict: 1 of 148 inputs could not be read and have no row\n" in result.err, result.text
    assert sorted(os.listdir(folder)) == sorted(names)
    return [(folder / name).read_bytes() for name in names]


@pytest.mark.rows(1)
@pytest.mark.parametrize("processes", [2, 3])
def test_any_number_of_processes_writes_the_same_bytes(processes, asked, expected, run_torchrun, tmp_path):
    assert written(run_torchrun(processes, *asked, *output(tmp_path / "out"), **PREDICT), tmp_path / "out") == expected
    assert expected[1].count(b"\n") == 148  # the header, and all rows but one
    features = np.load(tmp_path / "out" / "features.npy")
    assert features.dtype == np.float32 and features.shape[0] == 147 and features.std(axis=0).max() > 0.01


@pytest.mark.long
def test_threads_of_the_environment_change_no_byte(asked, expected, run_train, tmp_path):
    result = run_train(*asked, *output(tmp_path / "out"), **PREDICT, env={"OMP_NUM_THREADS": "2"})
    assert written(result, tmp_path / "out") == expected


@pytest.mark.rows(1)
def test_after_a_kill_the_same_command_continues_on_any_number(asked, expected, start_torchrun, run_torchrun, tmp_path):
    words = [*asked, *output(tmp_path / "out")]
    killed = start_torchrun(2, 2, *words, script="tests/end_to_end/predict_and_die.py").wait()
    assert "SIGKILL" in killed.text, killed.text
    [parts] = (tmp_path / "out").iterdir()
    assert parts.name.startswith("rows.csv.parts-")
    assert {"1", "3"} <= {path.name for path in parts.iterdir()} and not (parts / "5").exists()

    # what is done is used as it is
    rows, bad, size = read_checked(parts / "3")
    write_checked(parts / "3", [f"done,{rows}", bad, size])
    (parts / ".tmp-5").write_text("a part of a part")  # of a write that a kill cut off
    result = run_torchrun(3, *words, **PREDICT)
    features, text = written(result, tmp_path / "out")
    assert f"predict: continuing: what is in {parts} is done\n" in result.err
    assert features == expected[0] and text.replace(b"done,", b"", 1) == expected[1] and b"done," in text


def test_processes_end_with_torchrun_and_the_same_command_continues(
        photos, start_torchrun, run_train, tmp_path):
    run, folder = write_image_run(tmp_path / "run", "small-cnn"), tmp_path / "out"
    folder.mkdir()
    words = [run, photos / "val", *BATCH, "--output", folder / "rows.csv"]
    launch = start_torchrun(2, 2, *words, script="tests/end_to_end/predict_and_die.py", env={"VICTIM": "torchrun"})
    assert launch.wait().returncode == -signal.SIGKILL
    assert_no_process(launch)
    assert not (folder / "rows.csv").exists()
    result = run_train(*words, **PREDICT)
    assert result.returncode == 0 and "predict: continuing: what is in" in result.err, result.text


@pytest.mark.parametrize("more, says", [
    ([], "is in use by process"), (["--batch-size", "5"], "is being written by another start")])
def test_a_second_start_on_an_output_is_78(more, says, photos, tmp_path, monkeypatch, capsys):
    run, out = write_image_run(tmp_path / "run", "small-cnn"), tmp_path / "rows.csv"
    words = [str(run), str(photos / "val"), *BATCH, "--output", str(out)]
    monkeypatch.setattr(lock, "LOCK_WAIT_S", 0)
    with monkeypatch.context() as unwritten:
        unwritten.setattr(prediction_files, "write_files", fails := Mock(side_effect=UserError("not now")))
        assert ended(words) == Exit.USAGE and fails.called
    [parts] = tmp_path.glob("rows.csv.parts-*")
    program = ("import sys; from pathlib import Path; from utils.rundir.lock import RunLock; lock = RunLock();"
               "lock.acquire(Path(sys.argv[1])); print(flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", program, parts], cwd=ROOT, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        assert ended([*words, *more]) == Exit.OTHER_RUN
        holder.stdin.close()
    assert says in (said := capsys.readouterr().err) and "--output" in said and not out.exists() and parts.exists()


@pytest.mark.long
def test_other_arguments_or_another_model_begin_anew(asked, expected, run_train, tmp_path):
    run, *inputs = asked
    copy, folder = shutil.copytree(run, tmp_path / "run"), tmp_path / "out"
    words, config = [copy, *inputs, *output(folder)], copy / "model" / "config.json"

    def kill(*more):
        """Of a start that is killed: the lines about parts."""
        result = run_train(2, *words, *more, script="tests/end_to_end/predict_and_die.py")
        assert result.returncode == -signal.SIGKILL and len(os.listdir(folder)) == 1, result.text
        return [line for line in result.err.splitlines() if "beginning anew" in line or "continuing" in line]

    assert kill("--batch-size", "8") == []
    [parts] = folder.iterdir()
    of_others = "is of another model, other inputs or other arguments"
    assert kill() == [f"predict: beginning anew: {parts} {of_others}"]
    [parts] = folder.iterdir()
    config.write_text(config.read_text() + " ")
    assert kill() == [f"predict: beginning anew: {parts} {of_others}"]
    assert written(run_train(*words, **PREDICT), folder) == expected


@pytest.mark.parametrize("words", [["a.png"], ["-", "--output", "rows.csv"]])
def test_what_only_one_process_can_do_is_64(words, asked, run_torchrun, tmp_path):
    run, image, *_ = asked
    inputs = [image if word == "a.png" else word for word in words]
    if "texts" not in str(run) and "-" in words:
        pytest.skip("images are not read from standard input")
    result = run_torchrun(2, run, *inputs, *BATCH, **PREDICT)
    assert result.code == Exit.USAGE, result.text
    assert result.err.count(
        "predict: several processes, and --embeddings, need --output FILE, and inputs other than -\n") == 1


@pytest.mark.rows(1)
def test_an_error_of_the_user_is_said_once(asked, run_torchrun, tmp_path):
    run, *_ = asked
    result = run_torchrun(2, run, tmp_path / "gone.csv", "--output", tmp_path / "rows.csv", **PREDICT)
    assert (result.code, result.err.count("predict: ")) == (Exit.NO_INPUT, 1), result.text
    result = run_torchrun(2, *asked, "--output", tmp_path / "gone" / "rows.csv", **PREDICT)
    assert (result.code, result.err.count("predict: --output ")) == (Exit.CANNOT_CREATE, 1), result.text


# --- features


def features_of(run, inputs, tmp_path):
    """[rows, D]: what --embeddings writes."""
    words = [run, *inputs, "--output", tmp_path / "rows.csv", "--embeddings", tmp_path / "f.npy", *BATCH]
    assert ended([*map(str, words)]) == Exit.DONE
    return torch.from_numpy(np.load(tmp_path / "f.npy"))


@pytest.mark.rows(2)
@pytest.mark.parametrize(("architecture", "width"), [
    ("resnet18", 512), ("squeezenet1_1", 512), ("vit_b_16", 768), ("swin_t", 768), ("convnext_tiny", 768),
    ("mobilenet_v3_small", 1024), ("small-cnn", 128)])
def test_features_of_images_are_what_the_last_layer_gets(architecture, width, photos, tmp_path):
    """SqueezeNet's last layer gets a map: its mean."""
    run = write_image_run(tmp_path / "run", architecture)
    paths = sorted((photos / "val").rglob("*.png"))[:20]
    features = features_of(run, paths, tmp_path)
    assert features.shape == (20, width)

    model, _ = load_model_folder(run / "model")
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(path).resize((32, 32), Image.Resampling.BILINEAR)))
                          for path in paths]).permute(0, 3, 1, 2)
    seen = []
    last = [module for module in model.modules() if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)][-1]
    last.register_forward_hook(lambda layer, inputs, output: seen.append(inputs[0]))
    mean, std = (255 * torch.tensor(IMAGES[name]).view(1, 3, 1, 1) for name in ("mean", "std"))
    with torch.inference_mode():
        model((pixels - mean) / std)
    expected = seen[0].flatten(2).mean(2) if seen[0].ndim == 4 else seen[0]
    torch.testing.assert_close(features, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert"])
def test_features_of_texts_do_not_depend_on_the_texts_beside(kind, texts, tmp_path):
    small = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "initializer_range": 0.3}
    more = small if kind == "DistilBert" else {}
    run = write_text_run(tmp_path / "run", getattr(transformers, f"{kind}Config"),
                         getattr(transformers, f"{kind}ForSequenceClassification"), **more)
    together = features_of(run, [texts / "val.csv"], tmp_path)
    assert together.shape == (147, 32) and together.std(dim=0).max() > 0.01
    (tmp_path / "one.csv").write_text("".join((texts / "val.csv").read_text().splitlines(True)[:2]))
    alone = features_of(run, [tmp_path / "one.csv"], tmp_path)
    torch.testing.assert_close(alone, together[:1], rtol=1e-4, atol=1e-5)


def test_features_of_a_decoder_are_refused_in_words(texts, tmp_path, capsys):
    """Its last layer gets every token, so there is nothing pooled."""
    run = write_text_run(tmp_path / "run", transformers.GPT2Config, transformers.GPT2ForSequenceClassification,
                         n_embd=32, n_layer=2, n_head=2, n_positions=64)
    words = [str(run), str(texts / "val.csv"), "--output", str(tmp_path / "rows.csv"), *BATCH]
    assert ended([*words, "--embeddings", str(tmp_path / "f.npy")]) == Exit.BAD_DATA
    assert "predict: --embeddings: the last layer of the model is not called once" in capsys.readouterr().err
    assert ended(words) == Exit.DONE and not (tmp_path / "f.npy").exists()


@pytest.mark.parametrize("words", [["a.txt"], ["-", "--output", "rows.csv"]])
def test_features_need_files_of_which_there_can_be_parts(words, tmp_path, capsys, monkeypatch):
    run = write_text_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a\tb\n")
    assert ended([str(run), *words, "--embeddings", "f.npy", *BATCH]) == Exit.USAGE
    assert "need --output FILE" in capsys.readouterr().err and sorted(os.listdir(tmp_path)) == ["a.txt", "run"]


def test_features_that_cannot_be_written_are_73_before_any_computation(photos, tmp_path, capsys):
    run = write_image_run(tmp_path / "run", "small-cnn")
    words = [str(run), str(photos / "val"), "--output", str(tmp_path / "rows.csv"), *BATCH]
    assert ended([*words, "--embeddings", str(tmp_path / "gone/f.npy")]) == Exit.CANNOT_CREATE
    assert capsys.readouterr().err.startswith(f"predict: --embeddings {tmp_path}/gone/f.npy: cannot write it")
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, True), (False, False)])
def test_a_terminal_shows_a_bar_over_all_batches(is_terminal, shown, photos, tmp_path, capsys, monkeypatch):
    run = write_image_run(tmp_path / "run", "small-cnn")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert ended([str(run), str(photos / "val"), "--output", str(tmp_path / "rows.csv"), *BATCH]) == Exit.DONE
    assert ("predict: 100%" in (said := capsys.readouterr().err) and "| 10/10 [" in said) == shown


def test_an_input_that_is_not_there_keeps_the_parts_of_another_command(asked, run_train, tmp_path):
    (parts := tmp_path / f"rows.csv.parts-{'0' * 20}").mkdir()
    result = run_train(asked[0], tmp_path / "nosuch.csv", "--output", tmp_path / "rows.csv", **PREDICT)
    assert result.returncode == Exit.NO_INPUT and parts.exists(), result.text


def test_a_damaged_part_is_named_and_computed_again_once_it_is_removed(photos, tmp_path, capsys, monkeypatch):
    run, rows = write_image_run(tmp_path / "run", "small-cnn"), tmp_path / "rows.csv"
    words = [str(run), str(photos / "val"), "--output", str(rows), *BATCH]
    with monkeypatch.context() as kept:
        kept.setattr(prediction_files.shutil, "rmtree", lambda *_, **__: None)  # as if killed before the end
        assert ended(words) == Exit.DONE
    [parts], expected = tmp_path.glob("rows.csv.parts-*"), rows.read_bytes()
    rows.unlink()
    part = parts / "3"
    part.write_bytes(part.read_bytes().replace(b"red", b"rad"))
    assert ended(words) == Exit.BAD_DATA and not rows.exists()
    assert f"predict: {part} is damaged; remove it, and the same command computes it again\n" in capsys.readouterr().err
    part.unlink()
    assert ended(words) == Exit.DONE and rows.read_bytes() == expected and not parts.exists()


def test_an_output_that_is_an_input_or_the_other_output_is_64(texts, tmp_path, capsys):
    run, table = write_text_run(tmp_path / "run"), shutil.copy(texts / "val.csv", tmp_path / "in.csv")
    before = table.read_bytes()
    (tmp_path / "link.csv").symlink_to(table)
    for flag, *words in (("--output", "link.csv"), ("--embeddings", "in.csv", "--output", "rows.csv"),
                         ("--embeddings", "rows.csv", "--output", "rows.csv")):
        files = [str(tmp_path / word) if "." in word else word for word in words]
        assert ended([str(run), str(table), flag, *files, *BATCH]) == Exit.USAGE
        assert f"{flag} {files[0]}: it is an input, or the other output, too" in capsys.readouterr().err
    assert ended([str(run), str(table), "-", "--output", str(table), *BATCH]) == Exit.USAGE  # in no parts
    assert table.read_bytes() == before and {path.name for path in tmp_path.iterdir()} == {"run", "in.csv", "link.csv"}
