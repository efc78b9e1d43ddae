"""data/texts/index.py, data/texts/text_set.py.

The token ids on disk are those of the tokenizer, each text's whole, and appear all or not at all.
"""

import csv
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.labels import LABELS, NUMBERS
from data.tables.table import TEXTS
from data.texts.index import ROWS_AT_ONCE, TextSource, open_texts, read_texts, sample_rows
from data.texts.text_set import TextSample, TextSet, padded
from data.texts.tokenizer import is_special, load_tokenizer, train_tokenizer
from tests.harness.mapped import is_mapped
from utils.errors import Exit, UserError

WORDS = ("an", "apple", "bent", "close", "down", "every", "fine", "green", "hill", "just", "kept", "low", "near", "our",
         "path", "quite",
         "red", "so", "tall", "until", "very", "wide")
SMALL = [("an apple", "x"), ("red hill", "y"), ("so tall", "x")]  # four tokens each
PAIR = {"input_column": "a,b"}


def some_texts(count, longest, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, longest))) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer with every word as a token, saved."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(WORDS * 9, 400).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture
def write(tmp_path):
    """Writes ROOT/NAME, a CSV file of rows under a header or the lines of a text file; returns the root."""
    def write(name, rows, header=("text", "label"), root="data"):
        file = tmp_path / root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w", encoding="utf-8", newline="") as stream:
            csv.writer(stream).writerows([header, *rows]) if file.suffix == ".csv" else stream.writelines(row + "\n"
                for row in rows)
        return tmp_path / root
    return write


@pytest.fixture
def opened(tokenizer, tmp_path):
    """opened(root, max_length=..., ...): tokenizes and opens."""
    def opened(root, by=tokenizer, **changes):
        return open_texts(source_of(root, **changes), by, tmp_path / "cache")
    return opened


def source_of(root, **changes):
    source = TextSource(str(root), TEXTS, "auto", ("label",), tokenizer="abc", max_length=12, split_long=False)
    return replace(source, **changes)


def samples(table):
    return [(sample.ids.tolist(), sample.types.tolist(), sample.label)
            for sample in map(table.sample, range(len(table)))]


def ids(table):
    return [sample[0] for sample in samples(table)]


def labels(index, split="train"):
    return [index.classes[label] for label in index.splits[split].labels]


def refusal(work, *arguments, **options):
    with pytest.raises(UserError) as error:
        work(*arguments, **options)
    return error.value.code, str(error.value)


# --- tokens


def test_ids_and_types_are_those_of_the_tokenizer_called_directly(write, opened, tokenizer):
    texts = some_texts(ROWS_AT_ONCE + 500, 14)  # more than are worked on at once, and some too long
    table = opened(write("train.csv", [(text, number % 3) for number, text in enumerate(texts)])).splits["train"]
    direct = tokenizer(texts, truncation=True, max_length=12)
    expected = list(zip(direct.input_ids, direct.token_type_ids, np.arange(len(texts)) % 3, strict=True))
    assert samples(table) == expected and set(table.lengths.tolist()) == set(range(3, 13))


def test_pairs_are_tokenized_as_pairs_in_the_order_named(write, opened, tokenizer):
    texts, more = some_texts(300, 9, 1), some_texts(300, 9, 2)
    rows = [(b, number % 2, a) for number, (a, b) in enumerate(zip(texts, more, strict=True))]
    index = opened(write("train.csv", rows, ("b", "label", "a")), **PAIR)
    direct = tokenizer(texts, more, truncation=True, max_length=12)
    assert samples(index.splits["train"]) == list(zip(direct.input_ids, direct.token_type_ids, np.arange(300) % 2,
                                                      strict=True))
    assert index.text_columns == ("a", "b")


def test_cutting_loses_no_token_and_adds_only_special_ones(write, opened, tokenizer):
    texts = some_texts(ROWS_AT_ONCE + 300, 50)
    table = opened(write("train.txt", texts), label_columns=(), split_long=True).splits["train"]
    whole = tokenizer(texts, add_special_tokens=False).input_ids
    pieces = [[2, *text[begin:begin + 10], 3] for text in whole for begin in range(0, len(text), 10)]
    assert ids(table) == pieces and table.num_ordinary.tolist() == [len(piece) - 2 for piece in pieces]


def test_a_longer_text_is_noted_with_what_becomes_of_it(write, opened):
    root = write("train.csv", [("red " * 11, "x"), ("red " * 10, "y"), ("red " * 40, "x")])
    expected = "2 of 3 texts have more than --max-length 12 tokens and are "
    assert opened(root).notes == (expected + "cut off there",)
    assert opened(root, label_columns=(), split_long=True).notes == (expected + "cut into several samples",)
    assert opened(root, max_length=42).notes == ()


def test_a_text_of_unknown_characters_is_a_sample_only_with_a_label(write, opened):
    """A text of unknown characters is a sample with a label and none to predict."""
    root = write("train.csv", [("☃ ☃", "x"), ("☃ red", "y")])
    assert [len(opened(root, label_columns=column).splits["train"]) for column in (("label",), ())] == [2, 1]


def test_special_tokens_are_no_ordinary_ones(write, opened, tokenizer):
    table = opened(write("train.csv", [("red ☃ [MASK] hill [SEP]", "x"), ("red", "y")])).splits["train"]
    assert table.num_ordinary.tolist() == [2, 1] and np.flatnonzero(is_special(tokenizer)).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("size, dtype", [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_ids_take_two_bytes_if_all_of_them_fit(write, opened, size, dtype):
    sparse = numbered({"red": 2, "hill": size - 1})
    table = opened(write("train.csv", [("red", "x"), ("hill", "y")]), sparse).splits["train"]
    assert (table.ids.dtype, ids(table)) == (dtype, [[2], [size - 1]])


def numbered(words):
    """A tokenizer of these words, with these numbers."""
    sparse = Tokenizer(models.WordPiece({"[PAD]": 0, "[UNK]": 1, **words}, unk_token="[UNK]"))
    sparse.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=sparse, pad_token="[PAD]", unk_token="[UNK]")


def test_numbers_of_tokens_may_have_gaps(write, opened):
    sparse = numbered({"red": 70_000, "hill": 65_000})
    table = opened(write("train.csv", [("red hill so", "x"), ("hill", "y")]), sparse).splits["train"]
    assert (ids(table), table.num_ordinary.tolist()) == ([[70_000, 65_000, 1], [65_000]], [2, 1])


def test_a_tokenizer_without_types_gives_none(write, opened, tokenizer):
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    table = opened(write("train.csv", SMALL), tokenizer).splits["train"]
    assert len(table.types) == 0 and set(padded([table.sample(0)], 0, 64, 8)) == {"input_ids", "attention_mask"}


def test_tokenizing_leaves_the_tokenizer_as_it_was(write, opened, tokenizer):
    before = tokenizer.backend_tokenizer.to_str()
    opened(write("train.csv", SMALL))
    assert tokenizer.backend_tokenizer.to_str() == before


def test_texts_to_train_a_tokenizer_on_are_those_of_train_in_order(write):
    root = write("val.csv", [("not this", 1, "nor this")], ("a", "label", "b"))
    for name, row in (("train/2.csv", ("c", 1, "d")), ("train/10.csv", ("a", 1, "b"))):
        write(name, [row], ("a", "label", "b"))
    assert list(read_texts(source_of(root, **PAIR))) == ["a", "b", "c", "d"]


# --- labels


@pytest.mark.parametrize("found, classes", [
    (["pos", "neg", "Pos"], ("Pos", "neg", "pos")), (["10", "9", "100"], ("9", "10", "100")),
    (["1.5", "10", "-1", "9", "0"], ("-1", "0", "1.5", "9", "10")), (["10", "9", "x"], ("10", "9", "x")),
    (["1.0", "1"], ("1", "1.0")),
    (["09007199254740993", "9007199254740992"], ("9007199254740992", "09007199254740993")),  # one and the same as float
    (["2", "nan", "1"], ("1", "2", "nan"))])
def test_classes_are_sorted_as_numbers_if_all_are_and_else_as_words(write, opened, found, classes):
    rows = [(text, found[number % len(found)]) for number, text in enumerate(some_texts(20, 3))]
    index = opened(write("train.csv", rows))
    assert (index.classes, labels(index)) == (classes, [label for _, label in rows])


def test_labels_of_all_splits_are_those_of_train(write, opened):
    write("test.csv", [("so", "c")])
    write("val.csv", [("so", "c"), ("so", "a"), ("so", "c")])
    index = opened(write("train.csv", [("so", "b"), ("so", "c"), ("so", "a")]), split="test")
    assert [labels(index, split) for split in ("train", "val", "test")] == [["b", "c", "a"], ["c", "a", "c"], ["c"]]


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_label_that_train_lacks_is_refused_with_those_there_are(write, opened, split):
    for name in ("train", "val", "test"):
        root = write(f"{name}.csv", [("so tall", "10"), ("red\nhill", "9"), ("so", "8" if name == split else "9")])
    assert refusal(opened, root, split=split) == (
        Exit.BAD_DATA, f"{root}/{split}.csv line 5: the label 8 does not occur in train, which has 9, 10;"
        " correct or remove the row, or pass --bad-samples skip")


def test_a_split_that_the_first_row_of_jsonl_lacks_is_refused(write, opened):
    """It would have been training data."""
    rows = ['{"text": "so", "label": "a"}', '{"text": "red", "label": "b", "split": "val"}']
    file = write("reviews.jsonl", rows) / "reviews.jsonl"
    assert refusal(opened, file) == (
        Exit.BAD_DATA, f"{file} line 2: has split, and the first row has none; give it to each row, or to none")
    write("val.jsonl", rows)  # files are the splits, so the column is none
    write("train.jsonl", rows)
    assert set(opened(file.parent).splits) == {"train", "val"}


def test_test_is_read_only_for_its_evaluation(write, opened):
    """It does not change the fingerprint."""
    write("test.csv", [("so", "-1")])
    write("val.csv", [("so", "a")])
    root = write("train.csv", [("so", "a"), ("red", "b")])
    without = opened(root)
    write("test.csv", [("so", "b")])
    assert (set(without.splits), opened(root, split="test").fingerprint) == ({"train", "val"}, without.fingerprint)


def test_the_tokenizer_never_sees_a_long_pair_whole(write, opened, tokenizer, monkeypatch):
    # It makes every combination of what it leaves out of both: memory by the product of their lengths.
    seen, call = [], type(tokenizer).__call__

    def noted(self, *texts, **options):
        seen.extend(len(text) for column in texts for text in column if len(texts) == 2)
        return call(self, *texts, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", noted)
    opened(write("train.csv", [(" ".join(WORDS * 40), " ".join(WORDS * 40), label) for label in "xy"],
                 ("a", "b", "label")), **PAIR)
    assert len(seen) == 4 and max(seen) < 200


def test_evaluating_train_or_val_makes_no_tokens_anew(write, opened, tmp_path):
    root = write("train.csv", SMALL)
    opened(root), opened(root, split="train")
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_long_pairs_are_truncated_as_the_library_does_it(write, opened, tokenizer):
    long, short = " ".join(WORDS * 40), " ".join(WORDS)
    pairs = [(long, long, "x"), (long, "so", "y"), ("red", long, "x"), (short, long, "y"), (long, short, "x")]
    index = opened(write("train.csv", pairs, ("a", "b", "label")), **PAIR)
    expected = [tokenizer(a[:2000], b[:2000], truncation=True, max_length=12)["input_ids"] for a, b, _ in pairs]
    assert [index.splits["train"].sample(i).ids.tolist() for i in range(5)] == expected


def test_one_class_alone_is_refused(write, opened):
    root = write("train.csv", [("so", "x"), ("red", "x")])
    assert refusal(opened, root) == (
        Exit.BAD_DATA, f"--data {root}: label has only one class, x; add another")


def test_a_column_of_ids_is_refused_before_a_text_is_tokenized(write, opened):
    root = write("train.csv", [("so", f"u{number % 9_990}") for number in range(10_000)])
    expected = Exit.BAD_DATA, (
        f"--data {root}: the column label has 9990 classes that look like ids: 9980 have a single training"
        " sample, and of more than 1000 classes at most 90% may have a single one; give"
        " --label-column the column with classes; for numbers use --task"
        " image-regression or text-regression")
    assert refusal(opened, root, by=None) == expected == refusal(read_texts, source_of(root))
    assert len(list(read_texts(source_of(root, label_columns=())))) == 10_000


# --- bad rows


@pytest.mark.parametrize("row, problem", [
    (("", "b", "x"), "a is empty"), (("a", " \t", "x"), "b is empty"), (("", "\u2003", "x"), "a, b is empty"),
    (("a", "b", ""), "label is empty"), (("a", "b", " "), "label is empty")])
@pytest.mark.parametrize("split", ["train", "val"])
def test_an_empty_text_or_label_is_refused_with_its_line(write, opened, split, row, problem):
    for name in ("train", "val"):
        root = write(f"{name}.csv", [("a\nb", "c", "x"), row if name == split else ("a", "b", "y"), ("a", "b", "y")],
                     ("a", "b", "label"))
    assert refusal(opened, root, **PAIR) == (
        Exit.BAD_DATA, f"{root}/{split}.csv line 4: {problem}; correct or remove the row, or pass --bad-samples skip")


def test_bad_rows_that_are_skipped_are_as_if_they_were_not_there(write, opened):
    for root in ("bad", "good", "mended"):
        write("train.csv", {"bad": [("", "left out")], "good": [], "mended": [("an", "x")]}[root] + SMALL, root=root)
        folder = write("val.csv", SMALL + ([("so", "new"), ("red", "")] if root == "bad" else []), root=root).parent
    bad, good, mended = (opened(folder / root, skip_bad=True) for root in ("bad", "good", "mended"))
    assert bad.notes == (f"left out 3 samples, for example {folder}/bad/train.csv line 2: text is empty",)
    assert (bad.classes, bad.fingerprint) == (good.classes, good.fingerprint) and good.fingerprint != mended.fingerprint
    assert [samples(table) for table in bad.splits.values()] == [samples(table) for table in good.splits.values()]


def test_a_null_in_jsonl_is_skipped_as_an_empty_cell_is(write, opened):
    rows = [*SMALL, ("", "x"), ("so", ""), ("", "")]
    for name in ("train", "val"):
        table = write(f"{name}.csv", rows, root="csv")
        objects = write(f"{name}.jsonl", [json.dumps({"text": text or None, "label": label or None})
                                          for text, label in rows], root="jsonl")
    of_cells, of_nulls = opened(table, skip_bad=True), opened(objects, skip_bad=True)
    assert of_nulls.fingerprint == of_cells.fingerprint
    assert of_nulls.notes == (f"left out 4 samples, for example {objects}/train.jsonl line {len(rows) - 2}: text is"
                              " empty",)
    assert refusal(opened, objects) == (Exit.BAD_DATA, (
        f"{objects}/train.jsonl line {len(rows) - 2}: text is empty; correct or remove the row, or pass --bad-samples"
        " skip"))


def test_a_column_without_a_name_may_stand_in_several_files(write, opened):
    """pandas writes its index so."""
    for name in ("train", "val"):
        write(f"{name}.csv", SMALL, root="plain")
        write(f"{name}.csv", [(number, *row) for number, row in enumerate(SMALL)], ("", "text", "label"), root="index")
    plain, index = (opened(write("README", [], root=root)) for root in ("plain", "index"))
    assert index.fingerprint == plain.fingerprint


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("rows", [[], [("", "x")]], ids=["a header alone", "bad rows alone"])
def test_a_split_without_texts_is_refused(write, opened, split, rows):
    for name in ("train", "val"):
        root = write(f"{name}.csv", rows if name == split else SMALL)
    left_out = f"; left out 1 sample, for example {root}/{split}.csv line 2: text is empty" if rows else ""
    assert refusal(opened, root, skip_bad=True) == (
        Exit.BAD_DATA, f"{root}/{split}.csv: there are no texts in it{left_out}")


def test_several_labels_of_a_row_are_refused_without_multi_label(write, opened):
    root = write("train.csv", [("a", "red|new"), ("b", "red"), ("c", "old|red")])
    assert refusal(opened, root) == (Exit.BAD_DATA, (
        f"--data {root}: the column label holds red|new, old|red: | separates the labels of a sample that has several;"
        " give --multi-label, or write the classes without |"))


# --- the cache


def test_arrays_are_mapped_into_memory_and_cannot_be_written(write, opened):
    table = opened(write("train.csv", SMALL)).splits["train"]
    arrays = [table.ids, table.types, table.spans, table.labels, table.num_ordinary, table.texts, table.lengths]
    assert [(is_mapped(array), array.flags.writeable) for array in arrays] == [(True, False)] * 7


@pytest.mark.parametrize("name", ["about.json", "train.ids", "train.labels"])
def test_a_short_file_of_the_cache_is_made_anew(write, opened, tmp_path, name):
    root = write("train.csv", SMALL)
    expected = samples(opened(root).splits["train"])
    (folder,) = (tmp_path / "cache").iterdir()
    os.truncate(folder / name, (folder / name).stat().st_size - 1)
    assert samples(opened(root).splits["train"]) == expected and list((tmp_path / "cache").iterdir()) == [folder]


def test_what_is_removed_before_it_can_be_read_is_named(write, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("data.texts.index.make_folder", lambda *_: None)  # it was made, and is gone
    code, message = refusal(open_texts, source_of(write("train.csv", SMALL)), tokenizer, tmp_path / "cache")
    assert (code, f"{tmp_path}/cache/texts-" in message, "start again" in message) == (Exit.IO, True, True)


def test_the_fingerprint_is_that_of_the_content_wherever_it_lies(write, opened):
    others = [[*SMALL[:2], ("so low", "x")], [*SMALL[:2], ("so tall", "y")], [SMALL[0], ("red hill", "z"), SMALL[2]],
              SMALL[:2]]
    found = [opened(write("train.csv", rows, root=str(number))).fingerprint for number,
             rows in enumerate([SMALL, SMALL, *others])]
    assert found[0] == found[1] and len(set(found)) == 5


def test_the_second_time_nothing_is_written(write, opened, tmp_path):
    root, times = write("train.csv", SMALL), []
    for _ in range(2):
        opened(root, **({"by": None} if times else {}))  # which cannot tokenize
        times.append({path: path.stat().st_mtime_ns for path in tmp_path.joinpath("cache").rglob("*")})
    assert times[0] == times[1] and len(times[0]) > 5


@pytest.mark.parametrize("change", [
    lambda file: os.utime(file, ns=(0, 0)), lambda file: file.write_text(file.read_text() + "quite so,y\n"),
    lambda file: file.write_text(file.read_text().replace("red", "our")),
    lambda file: file.with_name("val.csv").write_bytes(file.read_bytes())],
    ids=["touched", "longer", "as long as before", "a file more"])
def test_changed_files_are_read_anew(write, opened, tmp_path, change):
    root = write("train.csv", [("red hill", "x"), ("red", "y")])
    opened(root)
    time.sleep(0.02)  # a file's time advances in steps of up to 10 ms
    change(root / "train.csv")
    again = opened(root)
    entries = len(list((tmp_path / "cache").iterdir()))
    fresh = opened(root.rename(tmp_path / "elsewhere"))
    assert {name: samples(table) for name, table in again.splits.items()} == {name: samples(table) for name,
                                                                              table in fresh.splits.items()}
    assert entries == 2


@pytest.mark.parametrize("changes", [
    {"max_length": 8}, {"tokenizer": "def"}, {"label_columns": ()}, {"split_long": True}, {"skip_bad": True},
    {"input_column": "text"}])
def test_other_settings_have_entries_of_their_own(write, opened, tmp_path, changes):
    root = write("train.csv", SMALL)
    opened(root)
    opened(root, **changes)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_what_was_interrupted_leaves_nothing_behind(write, tokenizer, tmp_path):
    class Stopping(type(tokenizer)):
        def __call__(self, texts, **options):
            if len(texts) == 1:  # those of the second time
                raise KeyboardInterrupt
            return super().__call__(texts, **options)

    tokenizer.__class__ = Stopping
    root = write("train.csv", [("red hill", "xy"[number % 2]) for number in range(ROWS_AT_ONCE + 1)])
    with pytest.raises(KeyboardInterrupt):
        open_texts(source_of(root), tokenizer, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_bad_row_leaves_nothing_behind_and_is_named_each_time(write, opened, tmp_path):
    root = write("train.csv", [*[("red hill", "x"), ("so", "y")] * ROWS_AT_ONCE, ("", "x")])
    refusals = {refusal(opened, root) for _ in range(2)}
    assert len(refusals) == 1 and list((tmp_path / "cache").iterdir()) == []


def test_several_at_once_all_succeed_and_leave_one_entry(write, folder, tmp_path):
    source, meeting = source_of(write("train.csv", SMALL)), Barrier(3, timeout=60)

    def work(_):
        tokenizer = load_tokenizer(folder)

        class Meeting(type(tokenizer)):
            def __call__(self, texts, **options):
                meeting.wait()  # all are past the question whether it is there
                return super().__call__(texts, **options)

        tokenizer.__class__ = Meeting
        return samples(open_texts(source, tokenizer, tmp_path / "cache").splits["train"])

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(work, range(3)))
    assert found[0] == found[1] == found[2] and len(list((tmp_path / "cache").iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_named(write, tokenizer, tmp_path):
    (tmp_path / "file").touch()
    code, message = refusal(open_texts, source_of(write("train.csv", SMALL)), tokenizer, tmp_path / "file")
    assert (code, f"{tmp_path}/file" in message, "LOCKSTEP_CACHE" in message) == (Exit.CANNOT_CREATE, True, True)


# --- samples


def test_lengths_are_those_of_the_samples(write, opened):
    table = opened(write("train.csv", [*SMALL, ("quite low so low", "y")])).splits["train"]
    assert table.lengths.tolist() == [len(one) for one in ids(table)] == [4, 4, 4, 6]


def test_items_are_the_samples_in_every_epoch(write, opened):
    table = opened(write("train.csv", SMALL)).splits["train"]
    items = TextSet(table)
    found = [[(item.ids.tolist(), item.types.tolist(), item.label)
              for item in (items[epoch, i] for i in range(len(items)))]
             for epoch in (0, 1)]
    assert found == [samples(table)] * 2 and items[0, torch.tensor(1)].ids.dtype == np.int64


def test_a_batch_in_which_nothing_is_padded_has_no_mask():
    batch = padded([TextSample(np.full(8, 5), np.ones(8, np.uint8), 0)] * 2, 7, 64, 8)
    assert set(batch) == {"input_ids", "token_type_ids"}


@pytest.mark.parametrize("multiple, longest, width", [
    (8, 1, 8), (8, 7, 8), (8, 8, 8), (8, 9, 16), (8, 16, 16), (8, 61, 63), (1, 2, 2), (1, 7, 7), (1, 63, 63)])
def test_a_batch_is_as_wide_as_its_longest_or_the_next_multiple(multiple, longest, width):
    texts = [TextSample(np.full(length, 5), np.ones(length, np.uint8), 0) for length in (1, longest)]
    batch = padded(texts, 7, 63, multiple)
    expected = {"input_ids": [[5] * n + [7] * (width - n) for n in (1, longest)],
                "attention_mask": [[1] * n + [0] * (width - n) for n in (1, longest)],
                "token_type_ids": [[1] * n + [0] * (width - n) for n in (1, longest)]}
    assert {name: tensor.tolist() for name, tensor in batch.items()} == expected
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


# --- texts of samples, read again


ROWS = [("an apple", "x"), ("", "x"), ("red hill", "y"), ("so tall", ""), ("our path", "y")]


def texts_of_samples(*which):
    return {number: "\t".join(row.texts) for number, row in sample_rows(*which).items()}


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_texts_of_samples_are_read_again_without_those_left_out(write, opened, split):
    root = write("train.csv", ROWS)
    write("val.csv", [("low", "y"), ("near", "z"), ("wide", "x")])
    index = opened(root, skip_bad=True, split=split)
    numbers = index.splits[split].texts[::-1]  # in any order
    texts = texts_of_samples(source_of(root, skip_bad=True, split=split), index.classes, numbers)
    assert [texts[number] for number in numbers.tolist()] == {
        "train": ["our path", "red hill", "an apple"], "val": ["wide", "low"]}[split]


def test_texts_of_held_out_samples_are_those_of_train(write, opened):
    root = write("train.csv", SMALL)
    index = opened(root)
    assert texts_of_samples(source_of(root), index.classes, np.array([2])) == {2: "so tall"}


def test_texts_of_pairs_have_a_tab_between_them(write, opened):
    root = write("train.csv", [("an", "x", "apple"), ("red", "y", "hill")], ("a", "label", "b"))
    index = opened(root, **PAIR)
    found = texts_of_samples(source_of(root, **PAIR), index.classes, np.array([0, 1]))
    assert found == {0: "an\tapple", 1: "red\thill"}


def test_texts_that_are_gone_are_an_error(write, opened):
    root = write("train.csv", SMALL)
    index = opened(root)
    write("train.csv", SMALL[:2])
    assert refusal(sample_rows, source_of(root), index.classes, np.array([2]))[0] == Exit.BAD_DATA


# --- splits by a column, groups, several labels, numbers


def test_rows_are_split_by_a_column_and_read_again_for_their_texts(write, opened):
    rows = [("so", "x", "train"), ("an apple", "y", "val"), ("red", "y", "train"), ("hill", "x", "test")]
    root = write("all.csv", rows, ("text", "label", "split"))
    found = opened(root, split="test")
    assert {split: table.labels.tolist() for split, table in found.splits.items()} == {
        "train": [0, 1], "val": [1], "test": [0]}
    for split, text in (("val", "an apple"), ("test", "hill")):
        source, numbers = source_of(root, split=split), opened(root, split=split).splits[split].texts
        assert list(texts_of_samples(source, found.classes, numbers).values()) == [text]


def test_texts_of_a_group_have_its_number_also_when_they_are_cut(write, opened):
    rows = [(" ".join(WORDS * 5), "x", "anna"), ("so", "y", "ben"), ("red", "x", "anna")]
    root = write("train.csv", rows, ("text", "label", "writer"))
    assert opened(root, group_column="writer").groups.tolist() == [0, 1, 0]
    cut = opened(root, group_column="writer", label_columns=(), split_long=True)
    texts = cut.splits["train"].texts.tolist()
    assert len(texts) > 3 and cut.groups.tolist() == [{0: 0, 1: 1, 2: 0}[text] for text in texts]


def test_several_labels_and_numbers_are_kept_as_rows(write, opened):
    rows = [("so", "a|b", "1.5", "-2"), ("red", "b", "2", "1e3")]
    root = write("train.csv", rows, ("text", "labels", "x", "y"))
    found = opened(root, input_column="text", label_columns=("labels",), label_kind=LABELS)
    assert (found.classes, found.splits["train"].labels.tolist()) == (("a", "b"), [[1, 1], [0, 1]])
    found = opened(root, input_column="text", label_columns=("x", "y"), label_kind=NUMBERS)
    table = found.splits["train"]
    assert (found.classes, table.labels.tolist()) == (("x", "y"), [[1.5, -2], [2, 1000]])
    assert table.sample(1).label.tolist() == [2, 1000]
