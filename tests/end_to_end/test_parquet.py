"""--data of Parquet files as the hub has them: images are imported once, texts are read in their order."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data.shards.index import build_image_index
from data.shards.parquet import choose_columns, imported, is_parquet
from data.shards.shard import read_member
from data.shards.writing import write_shard
from data.splits import ValSplit
from data.tables.parquet import objects_in
from tests.harness.run_directory import contents
from utils.errors import Exit, UserError

WORDS = ["--model", "small-cnn", "--image-size", "16", "--epochs", "2", "--global-batch-size", "24", "--threads", "1",
         "--strategy", "exact", "--micro-batch-size", "4"]
TEXTS = ["--task", "text-classification", "--model", "bert-tiny", "--vocab-size", "200", "--max-length", "32",
         "--epochs", "1", "--threads", "1", "--strategy", "exact", "--micro-batch-size", "8", "--text-column", "text"]
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def picture(level) -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), level, np.uint8)).save(data, "png")
    return data.getvalue()


def write(path, columns, names=None, **more):
    """columns: {name: (values, type)}. names: {column: of its classes}, as the hub writes them."""
    features = {name: {"names": each, "_type": "ClassLabel"} for name, each in (names or {}).items()}
    features |= {name: {"_type": "Value"} for name in columns if name not in features}
    schema = pa.schema([(name, kind) for name, (_, kind) in columns.items()],
                       {"huggingface": json.dumps({"info": {"features": features}})})
    table = pa.table([pa.array(values, kind) for values, kind in columns.values()], schema=schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **more)
    return path


def write_images(path, files, labels, names=None, **more):
    rows = [{"bytes": file, "path": f"{number}.png"} for number, file in enumerate(files)]
    return write(path, {"image": (rows, IMAGE), "label": (labels, pa.int64())}, names and {"label": names}, **more)


@pytest.fixture(scope="module")
def of_photos(photos, session_dir) -> Path:
    """The photos as the hub has them: shards of train and validation in data/."""
    folder = session_dir / "parquet"
    names = sorted(path.name for path in (photos / "train").iterdir())
    for split, name, count in (("train", "train", 3), ("val", "validation", 1)):
        paths = [path for each in names for path in sorted((photos / split / each).iterdir())]
        for number, part in enumerate(np.array_split(np.arange(len(paths)), count)):
            write_images(folder / "data" / f"{name}-{number:05}-of-{count:05}.parquet",
                         [paths[index].read_bytes() for index in part],
                         [names.index(paths[index].parent.name) for index in part], names, row_group_size=7)
    return folder


@pytest.mark.rows(1)
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_images_of_parquet_files_have_the_hash_of_their_folder(processes, photos, of_photos, run_torchrun, tmp_path):
    """With nothing said but --data. The second start imports nothing."""
    runs = {name: tmp_path / name for name in ("folder", "parquet")}
    assert run_torchrun(1, *WORDS, "--data", photos, "--run-dir", runs["folder"]).returncode == 0
    words = [*WORDS, "--data", of_photos, "--run-dir", runs["parquet"]]
    first = run_torchrun(processes, *words, "--stop-after", 3)
    assert first.code == Exit.STOPPED, first.text
    second = run_torchrun(processes, *words)
    assert (second.returncode, "importing" in second.out) == (0, False), second.text
    assert contents(runs["parquet"])[6] == contents(runs["folder"])[6]
    assert "classes" in (runs["parquet"] / "model" / "config.json").read_text()
    verified = run_torchrun(1, runs["parquet"], script="ask/verify.py")
    assert (verified.returncode, "verified: " in verified.out) == (0, True), verified.text


@pytest.mark.parametrize("kind", ["folder", "pattern"])
def test_texts_of_parquet_files_have_the_hash_of_their_table(kind, texts, run_train, tmp_path):
    names = ["topic0", "topic1", "topic2"]
    for split, name in (("train", "train"), ("val", "test")):
        rows = [*csv.DictReader((texts / f"{split}.csv").open())]
        for number, part in enumerate(np.array_split(np.arange(len(rows)), 2)):
            columns = {"text": ([rows[index]["text"] for index in part], pa.large_string()),
                       "label": ([names.index(rows[index]["label"]) for index in part], pa.int8()),
                       "embedding": ([[0.5, 1.5] for _ in part], pa.list_(pa.float32()))}
            write(tmp_path / "set" / f"{name}-{number}.parquet", columns, {"label": names})
    data = {"folder": tmp_path / "set", "pattern": tmp_path / "set" / "*.parquet"}[kind]
    assert run_train(*TEXTS, "--data", texts, "--run-dir", tmp_path / "table").returncode == 0
    result = run_train(*TEXTS, "--data", data, "--run-dir", tmp_path / "run")
    assert result.returncode == 0 and "there is no val, so test is used for validation" in result.out, result.text
    last = max(contents(tmp_path / "table"))
    assert contents(tmp_path / "run")[last] == contents(tmp_path / "table")[last]
    predicted = run_train(tmp_path / "run", tmp_path / "set" / "test-0.parquet", script="models/predict.py")
    assert predicted.returncode == 0 and "topic" in predicted.out, predicted.text


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_killed_import_goes_on_and_changed_files_are_imported_anew(own_cache, tmp_path):
    folder, said = tmp_path / "set", []
    for number in range(3):
        write_images(folder / f"train-{number}.parquet", [picture(10 * number)] * 4, [0, 1, 0, 1], ["cat", "dog"])
    place = Path(imported(str(folder), "auto", "label", own_cache, said.append))
    times = {path.name: path.stat().st_mtime_ns for path in place.glob("train/*.tar")}
    assert len(times) == 3 and "importing 3 Parquet files" in said[0] and "GB are free" in said[0]
    (place / "train" / "00001.tar").rename(place / "train" / "00001.tmp")
    assert imported(str(folder), "auto", "label", own_cache, said.append) == str(place)
    again = {path.name: path.stat().st_mtime_ns for path in place.glob("train/*.tar")}
    assert {name for name in times if times[name] == again[name]} == {"00000.tar", "00002.tar"} and len(said) == 2
    index = build_image_index(str(place), ValSplit(0.2, 0), own_cache, print)
    assert index.classes == ("cat", "dog") and len(index.splits["train"]) + len(index.splits["val"]) == 12
    write_images(folder / "train-1.parquet", [picture(99)] * 4, [0, 1, 0, 1], ["cat", "dog"])
    assert imported(str(folder), "auto", "label", own_cache, said.append) != str(place)


def test_a_tar_file_that_is_there_is_not_written_again(tmp_path):
    """Two nodes may import at once, and one that has finished reads it, by its size and time."""
    states = []
    for image in (picture(1), picture(2)):
        write_shard(tmp_path / "a.tar", [("a.png", image, 0)])
        states.append((tmp_path / "a.tar").stat())
    assert states[0] == states[1] and read_member(f"{tmp_path / 'a.tar'}/a.png") == picture(1)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".tar" and path.is_file()] == []


@pytest.mark.parametrize("columns, names, given, expected", [
    ({"img": IMAGE, "label": pa.int64()}, {"label": ["a", "b"]}, ("auto", "label"), ("img", "label", ("a", "b"))),
    ({"thumbnail": IMAGE, "image": IMAGE, "label": pa.string()}, {}, ("auto", "label"), ("image", "label", ())),
    ({"image": IMAGE, "breed": pa.int64()}, {"breed": ["a", "b"]}, ("auto", "label"), ("image", "breed", ("a", "b"))),
    ({"image": IMAGE, "fine_label": pa.int64(), "coarse_label": pa.int64()}, {}, ("auto", "coarse_label"),
     ("image", "coarse_label", ())),
    *(({"image": IMAGE, "label": kind}, {}, ("auto", "label"), ("image", "label", ()))
      for kind in (pa.dictionary(pa.int32(), pa.string()), pa.string_view(), pa.large_string(), pa.bool_(), pa.int8())),
    ({"image": IMAGE, "fine_label": pa.int64(), "coarse_label": pa.int64()},
     {"fine_label": ["a"], "coarse_label": ["b"]}, ("auto", "label"),
     "the column label is not there; give --label-column one of fine_label, coarse_label"),
    ({"image": IMAGE, "label": pa.list_(pa.int64())}, {}, ("auto", "label"), "is list"),
    ({"image": IMAGE, "label": pa.float32()}, {}, ("auto", "label"), "is float, and a class is a whole number or"),
    ({"image": pa.string(), "label": pa.int64()}, {}, ("auto", "label"), "texts have tasks of their own"),
    ({"image": pa.struct([("bytes", pa.list_(pa.uint8()))]), "label": pa.int64()}, {}, ("auto", "label"),
     "an image is a struct with bytes, and nothing is one"),
    ({"image": IMAGE, "label": pa.int64()}, {}, ("picture", "label"), "image is one")])
def test_columns_are_found_or_asked_for(columns, names, given, expected, tmp_path):
    path = write(tmp_path / "a.parquet", {name: ([], kind) for name, kind in columns.items()}, names)
    if isinstance(expected, tuple):
        assert tuple(choose_columns(str(path), [str(path)], *given)) == expected
        return
    with pytest.raises(UserError, match=expected) as raised:
        choose_columns(str(path), [str(path)], *given)
    assert raised.value.code == Exit.BAD_DATA


@pytest.mark.parametrize("files, labels, words", [
    ([picture(0), None], [0, 1], "row 1, counted from 0, has no bytes in image; embed its file, or remove it"),
    ([picture(0), b""], [0, 1], "row 1, counted from 0, has no bytes in image"),
    ([picture(0)] * 3, [0, 1, None], "row 2, counted from 0, has no label"),
    ([picture(0)] * 2, [-1, 1], "row 0, counted from 0, has no label")])
def test_rows_that_are_no_samples_are_named(files, labels, words, own_cache, tmp_path):
    path = write_images(tmp_path / "a.parquet", files, labels)
    with pytest.raises(UserError, match=words) as raised:
        imported(str(path), "auto", "label", own_cache, print)
    assert raised.value.code == Exit.BAD_DATA and not [*own_cache.rglob("*.tar")]


def test_rows_of_a_test_without_labels_are_left_out(own_cache, tmp_path):
    for name, labels in (("train", [0, 1] * 5), ("validation", [0, 1]), ("test", [-1, -1])):
        write_images(tmp_path / "set" / f"{name}-0.parquet", [picture(9)] * len(labels), labels, ["cat", "dog"])
    index = build_image_index(str(tmp_path / "set"), ValSplit(0.1, 0), own_cache, print)
    assert {split: len(each) for split, each in index.splits.items()} == {"train": 10, "val": 2}
    (tmp_path / "set" / "validation-0.parquet").unlink()
    held = build_image_index(str(tmp_path / "set"), ValSplit(0.2, 0), own_cache, print)
    assert {split: len(each) for split, each in held.splits.items()} == {"train": 8, "val": 2}


def test_files_with_other_classes_are_refused(own_cache, tmp_path):
    """A label would mean another class in each."""
    for number, names in enumerate((["cat", "dog"], ["dog", "cat"])):
        write_images(tmp_path / "set" / f"train-{number}.parquet", [picture(9)] * 2, [0, 1], names)
    with pytest.raises(UserError, match=r"train-1\.parquet has other columns image and label, or other classes, than"):
        imported(str(tmp_path / "set"), "auto", "label", own_cache, print)


def test_what_is_no_parquet_file_is_refused(own_cache, tmp_path):
    (tmp_path / "a.parquet").write_text("not at all")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        imported(str(tmp_path / "a.parquet"), "auto", "label", own_cache, print)
    whole = write_images(tmp_path / "b.parquet", [picture(0)] * 50, [0, 1] * 25)
    data = bytearray(whole.read_bytes())
    data[20:60] = bytes(40)
    whole.write_bytes(data)
    with pytest.raises(UserError, match="is damaged"):
        imported(str(whole), "auto", "label", own_cache, print)
    with pytest.raises(UserError, match="there is no such file"):
        imported(str(tmp_path / "none-*.parquet"), "auto", "label", own_cache, print)
    assert is_parquet("any.parquet") and not is_parquet(str(tmp_path / "none"))


def test_values_of_a_table_are_words_numbers_and_names_of_classes(tmp_path):
    path = write(tmp_path / "a.parquet", {
        "text": (["one", None], pa.string_view()), "label": ([1, -1], pa.int64()),
        "many": ([["x"], None], pa.large_list(pa.large_string())), "tags": ([["x", "y"], []], pa.list_(pa.string())),
        "score": ([0.5, None], pa.float64()), "raw": ([b"x", b"y"], pa.binary())},
        {"label": ["cat", "dog"]})
    assert [*objects_in(str(path), ["text", "label", "tags", "score", "many"])] == [
        (1, {"text": "one", "label": "dog", "tags": ["x", "y"], "score": 0.5, "many": ["x"]}),
        (2, {"text": None, "label": -1, "tags": [], "score": None, "many": None})]
    with pytest.raises(UserError, match="the column raw is binary; texts and labels are strings"):
        [*objects_in(str(path), ["raw"])]
    with pytest.raises(UserError, match="there is no column words; it has text, label"):
        [*objects_in(str(path), ["words"])]
    damaged = pa.Array.from_buffers(pa.string(), 1, [None, *pa.array([b"\xff"], pa.binary()).buffers()[1:]])
    pq.write_table(pa.table({"text": damaged}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b\.parquet is damaged: 'utf-8' codec can't decode"):
        [*objects_in(str(tmp_path / "b.parquet"), ["text"])]


def test_without_pyarrow_one_message_says_what_to_install(of_photos, run_train, tmp_path):
    (tmp_path / "hide" / "pyarrow").mkdir(parents=True)
    (tmp_path / "hide" / "pyarrow" / "__init__.py").write_text("raise ImportError('hidden')")
    result = run_train("--data", of_photos, *WORDS, "--run-dir", tmp_path / "run", real=True,
                       env={"PYTHONPATH": str(tmp_path / "hide")})
    assert result.returncode == Exit.USAGE and "pip install pyarrow" in result.err, result.text
