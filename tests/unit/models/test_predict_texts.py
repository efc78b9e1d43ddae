"""models.predict on texts.

The probabilities of transformers' own pipeline, a row per text, whatever file it stands in.
"""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from data.texts.tokenizer import train_tokenizer
from models.text.bert import save_model_folder
from tests.harness.forked import run_forked
from tests.harness.predicting import ended
from utils.errors import Exit

CLASSES = ["cat", "dog, small", 'the "ü"']
MAX_TOKENS = 16
WORDS = ["anna", "bert", "carl", "doro", "emil", "frau", "gute", "hund", "idee", "jede"]
ODD = ["a, b; c", 'she said "no"', "two\nlines", "Ünïcödé ß €", " spaced  out ", "it's\ttabbed", "=1+1", "a\rb"]
GENERATOR = np.random.default_rng(0)
TEXTS = [" ".join(GENERATOR.choice(WORDS, GENERATOR.integers(1, 12))) for _ in range(150)]
PAIRS = [(text, " ".join(GENERATOR.choice(WORDS, 3))) for text in TEXTS]


def write_run(folder: Path, columns: list[str]) -> Path:
    """A run directory whose model tells words from words."""
    (folder / "model").mkdir(parents=True)
    tokenizer = train_tokenizer(WORDS, 64)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, initializer_range=0.4, pad_token_id=0, id2label=dict(enumerate(CLASSES)),
        label2id={name: number for number, name in enumerate(CLASSES)}, architectures=["BertForSequenceClassification"])
    torch.manual_seed(0)
    weights = transformers.BertForSequenceClassification(config).state_dict()
    described = {"task": "text-classification", "text_columns": columns, "max_tokens": MAX_TOKENS}
    save_model_folder(weights, config, described, tokenizer, folder / "model")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("single") / "run", ["text"])


@pytest.fixture(scope="module")
def pair_run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("pair") / "run", ["text", "more"])


@pytest.fixture
def own_run(tmp_path):
    """One that the test may spoil."""
    return write_run(tmp_path / "run", ["text"])


def write_table(path: Path, rows, header=("text",)) -> str:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(dict(zip(header, row, strict=True)), ensure_ascii=False) + "\n"
                                for row in rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([header, *rows])
    else:
        lines = ["\t".join(row) for row in ([header, *rows] if path.suffix == ".tsv" else rows)]
        path.write_text("\n".join(lines) + "\n")
    return str(path)


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def inputs_of(text: str) -> list[str]:
    return [row["input"] for row in rows_of(text)]


def probabilities(rows) -> np.ndarray:
    return np.array([[float(row[name]) for name in CLASSES] for row in rows])


def pipeline_probabilities(run: Path, inputs: list) -> np.ndarray:
    """[B, C] of transformers, one input at a time."""
    pipeline = transformers.pipeline("text-classification", str(run / "model"), top_k=None, truncation=True,
                                     max_length=MAX_TOKENS)
    told = [{one["label"]: one["score"] for one in np.ravel(pipeline(one)).tolist()} for one in inputs]
    return np.array([[scores[name] for name in CLASSES] for scores in told])


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_probabilities_are_those_of_transformers_pipeline(form, run, tmp_path, capsys):
    table = write_table(tmp_path / "texts.csv", [[text] for text in TEXTS])
    assert ended([str(run), table, "--format", form, "--batch-size", "60", "--device", "auto"]) == Exit.DONE
    printed = capsys.readouterr().out
    rows = [json.loads(line) for line in printed.splitlines()] if form == "jsonl" else rows_of(printed)
    ours, theirs = probabilities(row.get("probabilities", row) for row in rows), pipeline_probabilities(run, TEXTS)
    assert theirs.std(0).min() > 0.01  # the texts do differ
    assert [row["input"] for row in rows] == TEXTS  # three batches
    assert np.abs(ours - theirs).max() < 1e-5
    assert [row["prediction"] for row in rows] == [CLASSES[label] for label in theirs.argmax(1)]


def test_a_model_of_bce_gives_the_sigmoids_of_transformers_pipeline(own_run, tmp_path, capsys):
    file = own_run / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"problem_type": "multi_label_classification"}))
    assert ended([str(own_run), write_table(tmp_path / "texts.csv", [[text] for text in TEXTS])]) == Exit.DONE
    ours = probabilities(rows_of(capsys.readouterr().out))
    assert np.abs(ours - pipeline_probabilities(own_run, TEXTS)).max() < 1e-5
    assert np.abs(ours.sum(1) - 1).max() > 0.05


def test_probabilities_of_pairs_are_those_of_transformers_pipeline(pair_run, tmp_path, capsys):
    path = write_table(tmp_path / "pairs.csv", [(more, "x", text) for text, more in PAIRS], ("more", "label", "text"))
    assert ended([str(pair_run), path]) == Exit.DONE
    rows = rows_of(capsys.readouterr().out)
    theirs = pipeline_probabilities(pair_run, [{"text": text, "text_pair": more} for text, more in PAIRS])
    assert [row["input"] for row in rows] == [f"{text}\t{more}" for text, more in PAIRS]
    assert np.abs(probabilities(rows) - theirs).max() < 1e-5
    swapped = pipeline_probabilities(pair_run, [{"text": more, "text_pair": text} for text, more in PAIRS])
    assert np.abs(swapped - theirs).max() > 0.01  # which is which matters


def test_long_texts_are_cut_off_where_training_cut_them_off(run, tmp_path, capsys):
    long = [" ".join(WORDS * 30), " ".join(WORDS * 30) + " ende", "x" * 3000]
    assert ended([str(run), write_table(tmp_path / "long.txt", [[text] for text in long])]) == Exit.DONE
    rows = rows_of(capsys.readouterr().out)
    assert [row["input"] for row in rows] == long
    assert np.abs(probabilities(rows) - pipeline_probabilities(run, long)).max() < 1e-5


def test_every_format_of_texts_gives_the_same_rows(run, tmp_path, capsys):
    printed = {}
    for suffix in (".csv", ".tsv", ".jsonl", ".txt"):
        assert ended([str(run),
                             write_table(tmp_path / f"texts{suffix}", [[text] for text in TEXTS])]) == Exit.DONE
        printed[suffix] = capsys.readouterr().out
    assert inputs_of(printed[".csv"]) == TEXTS and len(set(printed.values())) == 1


def test_rows_of_several_files_come_in_the_order_in_which_these_are_named(run, tmp_path, capsys):
    paths = [write_table(tmp_path / name, [[text] for text in texts]) for name,
             texts in (("b.txt", TEXTS[:70]), ("a.jsonl", TEXTS[70:90]))]
    ended([str(run), *paths, paths[1]])
    assert inputs_of(capsys.readouterr().out) == [*TEXTS[:90], *TEXTS[70:90]]


def test_standard_input_is_a_text_a_line(run, tmp_path):
    lines = "".join(f"{text}\n" for text in TEXTS[:70]) + "\nümlaut\n"
    done = run_forked("models/predict.py", run, "-", folder=tmp_path, text=lines)
    assert (done.returncode, inputs_of(done.stdout)) == (Exit.BAD_DATA, [*TEXTS[:70], "ümlaut"])
    assert "/dev/stdin line 71: a text is empty" in done.stderr  # or the rows would no longer stand beside the lines


def test_standard_input_of_a_pair_model_has_a_tab_in_each_line(pair_run, tmp_path, capsys):
    lines = [f"{text}\t{more}" for text, more in PAIRS[:5]]
    done = run_forked("models/predict.py", pair_run, "-", folder=tmp_path, text="\n".join([*lines, "without a tab"]))
    assert done.returncode == Exit.BAD_DATA
    assert "line 6: 1 texts; a sentence pair is two texts with a tab between them" in done.stderr
    (tmp_path / "pairs.txt").write_text("\n".join(lines))
    assert ended([str(pair_run), str(tmp_path / "pairs.txt")]) == Exit.DONE
    assert inputs_of(capsys.readouterr().out) == lines


@pytest.mark.rows(8)
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
@pytest.mark.parametrize("form", ["csv", "jsonl"])
@pytest.mark.parametrize("text", ODD)
def test_odd_characters_come_out_as_they_went_in_and_in_one_field(text, form, suffix, run, tmp_path, capsys):
    ended([str(run), write_table(tmp_path / f"texts{suffix}", [["before"], [text], ["after"]]), "--output",
                  str(tmp_path / "out"),
                  "--format", form])
    written = (tmp_path / "out").read_bytes().decode()
    rows = [json.loads(line) for line in written.split("\n")[:-1]] if form == "jsonl" else rows_of(written)
    assert [row["input"] for row in rows] == ["before", text, "after"]
    assert len({len(row) for row in rows}) == 1


def test_an_empty_text_is_named_and_the_others_are_written(run, tmp_path, capsys):
    """An empty text is named with file and line and the others are written."""
    texts = [*TEXTS[:70], "", "two\nlines", "  ", "last"]
    path = write_table(tmp_path / "texts.csv", [[text, "x"] for text in texts], ("text", "label"))
    assert ended([str(run), path]) == Exit.BAD_DATA
    captured = capsys.readouterr()
    assert inputs_of(captured.out) == [text for text in texts if text.strip()]
    assert captured.err.splitlines() == [
        f"predict: cannot read {path} line 72: a text is empty",
        f"predict: cannot read {path} line 75: a text is empty",
        "predict: 2 of 74 inputs could not be read and have no row"]


def test_a_batch_of_empty_texts_alone_is_no_traceback(pair_run, tmp_path, capsys):
    path = write_table(tmp_path / "pairs.tsv", [("", "b"), ("a", " ")], ("text", "more"))
    assert ended([str(pair_run), path]) == Exit.BAD_DATA
    captured = capsys.readouterr()
    assert inputs_of(captured.out) == [] and captured.err.count("a text is empty") == 2


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_a_missing_column_is_65_and_says_which_there_are(suffix, pair_run, tmp_path, capsys):
    path = write_table(tmp_path / f"texts{suffix}", [("a", "b")], ("text", "title"))
    assert ended([str(pair_run), path, "--output", str(tmp_path / "out.csv")]) == Exit.BAD_DATA
    message = capsys.readouterr().err
    assert path in message and "there is no column more; it has text, title" in message
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("name", ["gone.csv", "folder"])
def test_a_missing_input_is_66_before_anything_is_written(name, run, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    assert ended([str(run), write_table(tmp_path / "texts.txt", [["a text"]]),
                         str(tmp_path / name)]) == Exit.NO_INPUT
    captured = capsys.readouterr()
    assert name in captured.err and captured.out == ""


def test_a_language_model_is_64_and_says_what_it_is_for(own_run, capsys):
    config = json.loads((own_run / "model/config.json").read_text())
    (own_run / "model/config.json").write_text(json.dumps(config | {"task": "masked-lm"}))
    assert ended([str(own_run), "-"]) == Exit.USAGE
    message = capsys.readouterr().err
    assert f"{own_run}/model has no classes: fine-tune it" in message
    assert f"--task text-classification --model {own_run}/model" in message and "fill-mask" in message


def without_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight for name, weight in weights.items() if name != "classifier.weight"},
              folder / "model.safetensors")


def without_our_keys(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({name: value for name,
                                                    value in config.items() if name != "max_tokens"}))


@pytest.mark.parametrize("spoil", [  # all but the first fail today
    lambda folder: (folder / "model.safetensors").unlink(),
    lambda folder: (folder / "model.safetensors").write_bytes(b"half"),
    without_a_weight, without_our_keys])
def test_a_damaged_model_folder_is_refused_without_a_traceback(spoil, own_run, tmp_path, capsys):
    spoil(own_run / "model")
    code, captured = ended([str(own_run),
                                   write_table(tmp_path / "texts.txt", [["a text"]])]), capsys.readouterr()
    assert code in (Exit.BAD_DATA, Exit.NO_INPUT) and captured.out == ""
    assert str(own_run / "model") in captured.err and "Traceback" not in captured.err
