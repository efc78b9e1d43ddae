"""data/tables/table.py: every row of a table as it stands in its file, and what breaks a rule named with its line."""

import csv
import json
import os
import re
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.tables.source import find_tables
from data.tables.table import MAX_FIELD, MAX_LINE, TEXTS, Columns, Row, choose_columns, read_rows, require_columns
from utils.errors import Exit, UserError

LABELLED, PLAIN, PAIR = Columns(("text",), ("label",)), Columns(("text",), ()), Columns(("a", "b"), ("label",))
TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"))
NO_LABEL = "label must be a word, a number, or a list of words without |, not "
SMALL = {  # the same two rows
    "t.csv": "text,label\nein Wort,x\nü,y\n", "t.tsv": "text\tlabel\nein Wort\tx\nü\ty\n",
    "t.jsonl": '{"text": "ein Wort", "label": "x"}\n{"label": "y", "text": "ü"}\n', "t.txt": "ein Wort\nü\n"}


@pytest.fixture
def write(tmp_path):
    """Writes a file, as it is, with the folders above it."""
    def write(name, content=b""):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return tmp_path / name
    return write


def columns_of(path):
    return PLAIN if path.suffix == ".txt" else LABELLED


def texts(path, columns=None):
    return [row.texts for row in read_rows(path, columns or columns_of(path))]


def labels(path):
    return [row.labels[0] for row in read_rows(path, LABELLED)]


def refusal(work, *arguments):
    """The exit code and the message of the UserError that `work` raises."""
    with pytest.raises(UserError) as error:
        result = work(*arguments)
        list(result)
    return error.value.code, str(error.value)


def refused_row(path, columns=None):
    """The line that reading `path` is refused at, and the rule."""
    code, message = refusal(read_rows, path, columns or columns_of(path))
    where, _, rule = message.partition(": ")
    name, _, line = where.rpartition(" line ")
    assert (code, name) == (Exit.BAD_DATA, str(path))
    return int(line), rule


def found(tmp_path):
    """{split: [paths below the folder]}, and the notes."""
    files, notes = find_tables(str(tmp_path))
    return {split: [path.relative_to(tmp_path).as_posix() for path in paths] for split, paths in files.items()}, notes


# --- which files


@pytest.mark.parametrize("suffix", TEXTS.suffixes)
def test_a_file_is_all_for_training(write, suffix):
    file = write(f"reviews{suffix}")
    assert find_tables(str(file)) == ({"train": [file]}, [])


@pytest.mark.parametrize("names", [
    ("train.csv", "val.csv"), ("train.tsv", "val.jsonl"), ("train.txt", "val.txt"), ("train/a.csv", "val/a.csv"),
    ("train.csv", "val/deep/er.csv"), ("train/a.jsonl", "val.jsonl")])
def test_splits_are_files_or_folders(write, tmp_path, names):
    for name in names:
        write(name)
    assert found(tmp_path) == ({"train": [names[0]], "val": [names[1]]}, [])


def test_a_folder_gives_its_tables_in_path_order(write, tmp_path):
    """A folder gives its tables in path order without hidden and other files."""
    for name in ("train/b.csv", "train/a/2.tsv", "train/a/10.jsonl", "train/README.md", "train/.c.csv",
                 "train/labels.json"):
        write(name)
    assert found(tmp_path) == ({"train": ["train/a/10.jsonl", "train/a/2.tsv", "train/b.csv"]}, [])


def test_tables_in_hidden_folders_are_passed_over(write, tmp_path):
    for name in ("train/a.csv", "train/.ipynb_checkpoints/a-checkpoint.csv", "train/@eaDir/a.csv"):
        write(name)
    assert found(tmp_path)[0] == {"train": ["train/a.csv"]}


@pytest.mark.parametrize("folder", ["train/", ""])
def test_a_folder_named_like_a_table_is_no_table(write, tmp_path, folder):
    write(f"{folder}a.csv")
    write(f"{folder}parts.csv/_SUCCESS")
    assert found(tmp_path)[0] == {"train": [f"{folder}a.csv"]}


@pytest.mark.parametrize("val", ["valid", "validation", "dev", "eval", "test"])
@pytest.mark.parametrize("form", ["{}.csv", "{}/a.csv"])
def test_val_may_have_another_name_which_is_noted(write, tmp_path, val, form):
    write("train.csv")
    write(form.format(val))
    assert found(tmp_path) == ({"train": ["train.csv"], "val": [form.format(val)]},
                               [f"there is no val, so {val} is used for validation"])


@pytest.mark.parametrize("form", ["{}.csv", "{}/a.csv"])
def test_a_test_without_labels_is_not_used_for_validation(write, tmp_path, form):
    write(form.format("train"), b"text,label\na,b\n")
    write(test := form.format("test"), b"text\na\n")
    files, notes = find_tables(str(tmp_path), ["label"])
    assert set(files) == {"train", "test"} and files["test"] == [tmp_path / test]
    assert notes == [f"{(tmp_path / test).name} has no column label, so it is not used for validation"]
    assert set(find_tables(str(tmp_path))[0]) == {"train", "val"}  # where labels are not read


def test_the_first_name_of_val_that_exists_is_taken(write, tmp_path):
    for name in ("train.csv", "valid.csv", "validation.csv"):
        write(name)
    assert found(tmp_path)[0] == {"train": ["train.csv"], "val": ["valid.csv"]}
    write("validation.tsv")  # which nobody asks for
    assert found(tmp_path)[0] == {"train": ["train.csv"], "val": ["valid.csv"]}


@pytest.mark.parametrize("val", ["val", "valid", "validation", "dev", "eval"])
def test_test_next_to_val_is_a_split_of_its_own(write, tmp_path, val):
    for name in ("train.csv", f"{val}.csv", "test.csv"):
        write(name)
    assert found(tmp_path)[0] == {"train": ["train.csv"], "val": [f"{val}.csv"], "test": ["test.csv"]}


def test_train_alone_is_no_val(write, tmp_path):
    write("train.csv")
    assert found(tmp_path) == ({"train": ["train.csv"]}, [])


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_two_files_for_one_split_are_refused_by_name(write, tmp_path, split):
    for name in ("train.csv", "val.csv", "test.csv", f"{split}.tsv"):
        write(name)
    assert refusal(find_tables, str(tmp_path)) == (
        Exit.BAD_DATA, f"--data {tmp_path}: {split}.csv, {split}.tsv each hold {split}; keep one")


@pytest.mark.parametrize("name", ["val.csv", "test/a.csv", "Train.csv", "training.tsv"])
def test_a_split_without_train_is_refused_by_name(write, tmp_path, name):
    write(name)
    code, message = refusal(find_tables, str(tmp_path))
    assert (code, f"{tmp_path}: has {name.split('/')[0]} but no texts for training" in message) == (Exit.BAD_DATA, True)


def test_an_empty_train_folder_is_not_said_to_be_missing(write, tmp_path):
    write("train/data.feather")
    write("val/data.feather")
    code, message = refusal(find_tables, str(tmp_path))
    assert (code, "no train" in message) == (Exit.BAD_DATA, False)


def test_an_empty_train_folder_does_not_hide_the_file(write, tmp_path):
    write("train.csv")
    (tmp_path / "train").mkdir()
    assert found(tmp_path)[0] == {"train": ["train.csv"]}


def test_loose_files_are_all_for_training_with_a_note(write, tmp_path):
    for name in ("b.csv", "a.csv", "README.md", ".hidden.csv", "lost+found/c.csv", "desktop.ini"):
        write(name)
    assert found(tmp_path) == ({"train": ["a.csv", "b.csv"]},
                               ["there is no train, so all of --data is training data (2 files)"])


def test_a_script_beside_loose_files_is_no_split(write, tmp_path):
    for name in ("reviews.csv", "test.py"):
        write(name)
    assert found(tmp_path)[0] == {"train": ["reviews.csv"]}


@pytest.mark.parametrize("names, words", [
    ((), "it holds nothing, and no table"), (("a.feather", "notes"), "it holds a.feather, notes, and no table")])
def test_a_folder_without_tables_is_refused_and_says_what_it_holds(write, tmp_path, names, words):
    for name in names:
        write(name)
    code, message = refusal(find_tables, str(tmp_path))
    assert (code, words in message, str(tmp_path) in message) == (Exit.BAD_DATA, True, True)


@pytest.mark.parametrize("names", [("train/a/1.png", "val/a/1.png"), ("a/1.JPG", "b/2.jpg")])
def test_a_folder_of_images_is_refused_with_the_task_for_them(write, tmp_path, names):
    for name in names:
        write(name)
    code, message = refusal(find_tables, str(tmp_path))
    expected = [f"images ({name}); for images give --task image-classification" for name in names]
    assert (code, any(words in message for words in expected)) == (Exit.BAD_DATA, True)


def test_a_picture_beside_tables_is_no_matter(write, tmp_path):
    for name in ("a.csv", "plot.png"):
        write(name)
    assert found(tmp_path)[0] == {"train": ["a.csv"]}


def test_a_path_that_is_not_there_is_66(tmp_path):
    assert refusal(find_tables, str(tmp_path / "gone")) == (Exit.NO_INPUT,
                                                            f"--data {tmp_path}/gone: there is no such file or folder")


@pytest.mark.parametrize("name", ["reviews.feather", "reviews", "reviews.csv.gz"])
def test_a_file_with_another_ending_is_refused_with_those_there_are(write, name):
    file = write(name, "text,label\na,b\n")
    assert refusal(find_tables, str(file)) == (Exit.BAD_DATA,
                                               f"{file}: a file of texts ends in .csv, .tsv, .jsonl, .parquet, .txt")


# --- which columns


def chosen(path, text_column, label_column):
    return choose_columns(path, TEXTS, text_column, [label_column] if label_column else [])


def header_of(suffix, names):
    return {".csv": ",".join(names) + "\n", ".tsv": "\t".join(names) + "\n",
            ".jsonl": json.dumps(dict.fromkeys(names, "x"))}[suffix]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
@pytest.mark.parametrize("names, text_column, label_column, expected", [
    (["id", "text", "label"], "auto", "label", Columns(("text",), ("label",))),
    (["label", "sentence"], "auto", "label", Columns(("sentence",), ("label",))),
    (["stars", "review"], "auto", "stars", Columns(("review",), ("stars",))),
    (["review"], "auto", None, Columns(("review",), ())),
    (["text", "label"], "auto", None, Columns(("text",), ())),
    (["label"], "auto", None, Columns(("label",), ())),
    (["text", "title", "label"], "title", "label", Columns(("title",), ("label",))),
    (["a", "b", "label"], "a,b", "label", Columns(("a", "b"), ("label",))),
    (["a", "b", "label"], "b, a", "label", Columns(("b", "a"), ("label",)))])
def test_columns_are_those_named_or_the_only_ones_possible(write, suffix, names, text_column, label_column, expected):
    assert chosen(write(f"t{suffix}", header_of(suffix, names)), text_column, label_column) == expected


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_the_column_with_the_labels_is_never_the_text_of_auto(write, suffix):
    path = write(f"t{suffix}", header_of(suffix, ["sentence", "text"]))
    assert chosen(path, "auto", "text") == Columns(("sentence",), ("text",))


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
@pytest.mark.parametrize("names, text_column, label_column, rule", [
    (["text", "stars"], "auto", "label",
     "there is no column label; it has text, stars; give --label-column the name of the column with the labels"),
    (["text", "label"], "body", "label",
     "there is no column body; it has text, label; give --text-column a column that it has"),
    (["text", "label"], "text,body", "label",
     "there is no column body; it has text, label; give --text-column a column that it has"),
    (["text", "label"], "Text", None,
     "there is no column Text; it has text, label; give --text-column a column that it has"),
    (["a", "b", "label"], "auto", "label",
     "which column is the text? it has a, b, label; name it with --text-column, or two (A,B) for a"
     " sentence pair"),
    (["label"], "auto", "label",
     "which column is the text? it has label; name it with --text-column, or two (A,B) for a sentence pair")])
def test_columns_that_are_not_there_are_refused_with_those_that_are(write, suffix, names, text_column, label_column,
                                                                    rule):
    path = write(f"t{suffix}", header_of(suffix, names))
    assert refusal(chosen, path, text_column, label_column) == (Exit.BAD_DATA, f"{path}: {rule}")


def test_three_columns_of_text_are_refused_by_the_flag(write):
    path = write("t.csv", "a,b,c,label\n")
    assert refusal(chosen, path, "a,b,c", "label") == (
        Exit.USAGE, "--text-column a,b,c: give one column, or two (A,B) for a sentence pair, 2 at most; the columns of"
        " labels and groups cannot be among them")


@pytest.mark.parametrize("columns", ["label", "a,label", "a,a"])
def test_the_label_is_no_text_and_a_column_is_no_pair_with_itself(write, columns):
    assert refusal(chosen, write("t.csv", "a,b,label\n"), columns, "label")[0] == Exit.USAGE


def test_a_text_file_has_one_column_and_no_labels(write):
    path = write("t.txt", "a, b\n")
    code, message = refusal(chosen, path, "auto", "label")
    assert (chosen(path, "auto", None), code, f"{path}: a .txt file has no labels" in message) == (PLAIN,
        Exit.BAD_DATA, True)


def test_names_of_columns_are_stripped_and_may_stand_in_quotes(write):
    path = write("t.csv", '"the, text ", label \r\na,b\r\n')
    columns = chosen(path, "auto", "label")
    assert (columns, texts(path, columns)) == (Columns(("the, text",), ("label",)), [("a",)])


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.jsonl"])
@pytest.mark.parametrize("content", ["", "\n\r\n\n", "\ufeff", "\ufeff\n"])
def test_an_empty_table_is_refused(write, name, content):
    path = write(name, content)
    assert refusal(chosen, path, "auto", "label") == (Exit.BAD_DATA, f"{path}: is empty; it must hold a table")


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.jsonl", "t.txt"])
def test_an_empty_file_has_no_rows(write, name):
    assert texts(write(name)) == []


@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
def test_a_header_alone_has_no_rows(write, name):
    assert texts(write(name, SMALL[name].splitlines()[0])) == []


@pytest.mark.parametrize("name, content",
                         [("t.csv", "text,label, text\na,b,c\n"), ("t.tsv", "\n\ntext\tlabel\ttext\na\tb\tc\n")])
def test_two_columns_of_one_name_are_refused_when_chosen_and_when_read(write, name, content):
    path = write(name, content)
    code, message = refusal(chosen, path, "auto", "label")
    line, rule = refused_row(path)
    assert (code, message) == (Exit.BAD_DATA, f"{path} line {line}: {rule}")
    assert (line, rule) == (3 if name == "t.tsv" else 1,
                            "two columns have the same name; the columns are text, label, text")


# --- rows as they stand


@pytest.mark.parametrize("name", SMALL)
def test_every_format_gives_texts_labels_and_lines(write, name):
    first = 2 if name in ("t.csv", "t.tsv") else 1
    expected = [Row(("ein Wort",), ("x",), first), Row(("ü",), ("y",), first + 1)]
    if name == "t.txt":
        expected = [row._replace(labels=()) for row in expected]
    path = write(name, SMALL[name])
    assert list(read_rows(path, columns_of(path))) == expected


@pytest.mark.parametrize("change", [
    lambda content: content.replace("\n", "\r\n"), lambda content: "\ufeff" + content,
    lambda content: content.rstrip("\n"),
    lambda content: "\ufeff" + content.replace("\n", "\r\n").rstrip("\r\n"),
    lambda content: content.replace("\n", "\n\n\r\n"),
    lambda content: "\r\n\n" + content],
    ids=["crlf", "byte order mark", "no end of the last line", "all of these", "blank lines", "blank lines first"])
@pytest.mark.parametrize("name", SMALL)
def test_ends_of_lines_a_byte_order_mark_and_blank_lines_do_not_matter(write, name, change):
    plain, changed = write(name, SMALL[name]), write(f"changed/{name}", change(SMALL[name]))
    assert [row[:2] for row in read_rows(changed, columns_of(changed))] == [row[:2]
        for row in read_rows(plain, columns_of(plain))]


def test_csv_fields_in_quotes_keep_commas_quotes_and_line_breaks(write):
    path = write("t.csv", 'text,label\r\n"a, ""b"" and\r\nc\n\nd",x\r\n"","y"\r\n e ,z\r\n')
    assert list(read_rows(path, LABELLED)) == [Row(('a, "b" and\r\nc\n\nd',), ("x",), 2), Row(("",), ("y",), 6),
                                               Row((" e ",), ("z",), 7)]


def test_a_quote_in_tsv_is_an_ordinary_character_and_a_line_a_row(write):
    path = write("t.tsv", 'text\tlabel\n"a\tx\nb" "c""\ty\n"d"\tz\n')
    assert texts(path) == [('"a',), ('b" "c""',), ('"d"',)]


BLANK = {  # rows that hold nothing, before the rows of SMALL or behind them
    "t.csv": ["", ",", " , ", '"",', "   ", ",,,"], "t.tsv": ["", "\t", " \t ", "   ", "\t\t\t"],
    "t.jsonl": ["", "{}", '{"text": null, "label": null}', '{"text": " ", "label": ""}']}


@pytest.mark.parametrize("name", BLANK)
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_rows_that_hold_nothing_are_no_rows_of_any_format(write, name, place):
    """Before the header, after it, between rows and at the end."""
    for blank in BLANK[name]:
        lines = SMALL[name].splitlines()
        path = write(name, "\n".join(lines[:place] + [blank] * 2 + lines[place:]))
        columns = choose_columns(path, TEXTS, "auto", ["label"])
        assert [row[:2] for row in read_rows(path, columns)] == [(("ein Wort",), ("x",)), (("ü",), ("y",))]


@pytest.mark.parametrize("name, blank", [
    ("t.csv", ","), ("t.csv", "  "), ("t.tsv", "\t"), ("t.jsonl", '{"text": null, "label": null}'), ("t.jsonl", "{}")])
def test_rows_that_hold_nothing_can_be_kept(write, name, blank):
    """What is predicted has a row for each."""
    path = write(name, SMALL[name].replace("x\n", f"x\n{blank}\n").replace("}\n{", f"}}\n{blank}\n{{"))
    assert [row.texts[0].strip() for row in read_rows(path, PLAIN, keep_blank=True)] == ["ein Wort", "", "ü"]


@pytest.mark.parametrize("header, text", [("text,label,,", "text"), ("review,label,,", "review"), (",a,label", "a"),
                                          ("label,", ""), ("label,,text,", "text")])
def test_columns_without_a_name_are_no_error(write, header, text):
    """What stands in them is not read, unless there is no other text."""
    fields = [name or "z" for name in header.split(",")]
    path = write("t.csv", f"{header}\n{','.join(fields)}\n")
    columns = choose_columns(path, TEXTS, "auto", ["label"])
    assert list(read_rows(path, columns)) == [Row((text or "z",), ("label",), 2)]
    assert refusal(choose_columns, path, TEXTS, "auto", ["no"])[1].count(", ,") == 0


@pytest.mark.parametrize("name, mark, word, way_out", [
    ("t.csv", ";", "semicolons", "save it with commas, as t.csv"), ("t.csv", "\t", "tabs", "rename it to t.tsv"),
    ("t.csv", "|", "vertical bars", "save it with commas, as t.csv"), ("t.tsv", ",", "commas", "rename it to t.csv"),
    ("t.tsv", ";", "semicolons", "save it with commas, as t.csv")])
@pytest.mark.parametrize("quote", ["", '"'])
def test_another_separator_is_named_with_a_way_out(write, name, mark, word, way_out, quote):
    """Whatever is wrong first: the columns, a row's fields, or the quotes of the header."""
    header = mark.join(quote + column + quote for column in ("text", "label"))
    path = write(name, f"{header}\na, b\tc{mark}x\n")
    messages = [refusal(choose_columns, path, TEXTS, "auto", ["label"])[1],
                refusal(choose_columns, path, TEXTS, "text", [])[1],
                refusal(require_columns, path, ["text"], "")[1], refusal(read_rows, path, Columns((header,), ()))[1]]
    assert all(word in message and way_out in message for message in messages)


def test_a_separator_is_not_blamed_where_it_is_right(write):
    code, message = refusal(choose_columns, write("t.csv", "a;b,c\tc\n"), TEXTS, "auto", ["label"])
    assert (code, "--label-column" in message, "separated" in message) == (Exit.BAD_DATA, True, False)


@pytest.mark.parametrize("name, content", [("t.csv", "label,text\r\nx,a \r\n"), ("t.tsv", "label\ttext\r\nx\ta \r\n")])
def test_a_text_at_the_end_of_a_line_keeps_its_blanks(write, name, content):
    """A text at the end of a line keeps its blanks and not the carriage return."""
    assert texts(write(name, content)) == [("a ",)]


@pytest.mark.parametrize("character", ["\x0b", "\x0c", "\x1c", "\x1e", "\x85", "\u2028", "\u2029", "\ufeff"])
@pytest.mark.parametrize("name", SMALL)
def test_only_a_line_feed_ends_a_line(write, name, character):
    # JSON wants control characters escaped
    in_file = json.dumps(character)[1:-1] if name == "t.jsonl" and character < " " else character
    path = write(name, SMALL[name].replace("ein Wort", f"ein{in_file}Wort"))
    assert texts(path) == [(f"ein{character}Wort",), ("ü",)]


def test_a_pair_comes_in_the_order_it_is_named(write):
    path = write("t.csv", "b,label,a\n1,x,2\n")
    assert [texts(path, PAIR), texts(path, PAIR._replace(texts=("b", "a")))] == [[("2", "1")], [("1", "2")]]


def test_columns_that_are_not_asked_for_may_hold_anything(write):
    path = write("t.jsonl", '{"text": "a", "label": "x", "more": [1, null]}\n{"text": "b", "label": "y"}\n')
    assert texts(path) == [("a",), ("b",)]


def test_lines_of_a_text_file_are_stripped_and_blank_ones_left_out(write):
    path = write("t.txt", "  a, b \n\n \t \n\"c\r\n")
    assert list(read_rows(path, PLAIN)) == [Row(("a, b",), (), 1), Row(('"c',), (), 4)]


@pytest.mark.parametrize("name, content", [
    ("t.csv", 'text,label\na, x \nb,"x"\nc,x y\n'), ("t.tsv", "text\tlabel\na\t x \nb\tx\nc\tx y\n"),
    ("t.jsonl", '{"text": "a", "label": " x\\n"}\n{"text": "b", "label": "x"}\n{"text": "c", "label": "x y"}\n')])
def test_labels_are_stripped(write, name, content):
    assert labels(write(name, content)) == ["x", "x", "x y"]


@pytest.mark.parametrize("value, label",
                         [("3", "3"), ("-1", "-1"), ("0.5", "0.5"), ("true", "true"), ("false", "false"), ('"3"', "3")])
def test_a_label_in_jsonl_may_be_a_number_or_a_truth_value(write, value, label):
    assert labels(write("t.jsonl", f'{{"text": "a", "label": {value}}}')) == [label]


def test_a_line_of_a_text_file_holds_a_pair_with_a_tab_in_between(write):
    path = write("t.txt", "a, b\t c \r\n\n\td\n")
    assert list(read_rows(path, PAIR._replace(labels=()))) == [Row(("a, b", "c"), (), 1), Row(("", "d"), (), 3)]


@pytest.mark.parametrize("content, rule", [("a\tb\n\nc\n", "1 texts;"), ("a\tb\n\nc\td\te\n", "3 texts;")])
def test_a_line_that_is_no_pair_is_refused(write, content, rule):
    line, found_rule = refused_row(write("t.txt", content), PAIR._replace(labels=()))
    assert (line, found_rule[:len(rule)]) == (3, rule)


@given(st.lists(st.tuples(TEXT, TEXT, st.sampled_from(["x", "y"]))))
def test_whatever_csv_writer_writes_is_read_again(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "written.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\r\n").writerows([("a", "b", "label"), *rows])
    assert [(*row.texts, *row.labels) for row in read_rows(path, PAIR)] == rows


@given(st.lists(TEXT))
def test_one_column_of_csv_may_hold_empty_texts(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "written.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\r\n").writerows([("text",), *([row] for row in rows)])
    assert [row.texts for row in read_rows(path, PLAIN, keep_blank=True)] == [(row,) for row in rows]
    assert texts(path, PLAIN) == [(row,) for row in rows if row.strip()]


@given(st.lists(st.tuples(TEXT, TEXT, st.sampled_from(["x", "y"]))), st.booleans())
def test_whatever_json_writes_is_read_again(tmp_path_factory, rows, ensure_ascii):
    path = tmp_path_factory.getbasetemp() / "written.jsonl"
    objects = [dict(zip(("a", "b", "label"), row, strict=True)) for row in rows]
    path.write_text("".join(json.dumps(each, ensure_ascii=ensure_ascii) + "\n" for each in objects), encoding="utf-8",
                    newline="")
    assert [(*row.texts, *row.labels) for row in read_rows(path, PAIR)] == rows


@given(st.lists(TEXT.filter(lambda text: not set(text) & set("\t\n"))))
def test_any_text_without_tabs_and_line_feeds_is_a_field_of_tsv(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "written.tsv"
    path.write_text("text\tlabel\n" + "".join(f"{row}\tx\n" for row in rows), encoding="utf-8", newline="")
    assert texts(path) == [(row,) for row in rows]


@given(st.lists(st.tuples(TEXT, st.sampled_from(["x", "y"])), min_size=1))
def test_a_row_says_the_line_it_begins_on(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "written.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\r\n").writerows([("text", "label"), *rows])
    begins = [2 + sum(text.count("\n") + 1 for text, _ in rows[:i]) for i in range(len(rows))]
    assert [row.line for row in read_rows(path, LABELLED)] == begins


# --- what breaks a rule


@pytest.mark.parametrize("name, content, line, rule", [
    ("t.csv", "text,label\na,x\nb\n", 3, "has 1 fields, the header 2 (text, label);"),
    ("t.csv", "text,label\na,x\nb,c,y\n", 3, "has 3 fields, the header 2 (text, label);"),
    ("t.csv", 'text,label\n"a\n\nb",x\n\n"c\nd",e,y\n', 6, "has 3 fields, the header 2 (text, label);"),
    ("t.tsv", "text\tlabel\na\tx\nb\n", 3, "has 1 fields, the header 2 (text, label);"),
    ("t.tsv", "text\tlabel\n\n\na\tb\tx\n", 4, "has 3 fields, the header 2 (text, label);"),
    ("t.csv", 'text,label\na,x\n"b,y\nc,z\n', 3, "unexpected end of data"),
    ("t.csv", 'text,label\na,x\n"b" c,y\nc,z\n', 3, "',' expected after '\"'"),
    ("t.csv", '"text,label\na,x\n', 1, "unexpected end of data"),
    ("t.csv", "text,label\na,x\rb,y\rc,z\r", 2, "there is a carriage return outside quotes"),
    ("t.jsonl", '{"text": "a", "label": "x"}\n\n["b", "y"]\n', 3, "must be an object"),
    ("t.jsonl", '{"text": "a", "label": "x"}\n"b"\n', 2, "must be an object"),
    ("t.jsonl", '{"text": "a", "label": "x"}\n{"text": "b", "label"}\n', 2, "is not JSON: "),
    ("t.jsonl", '{"text": "a", "label": "x"} {"text": "b", "label": "y"}\n', 1, "is not JSON: "),
    ("t.jsonl", '{"text": "a",\n"label": "x"}\n', 1, "is not JSON: "),
    ("t.jsonl", '{"text": "a", "label": "x"}\n{"text": "b", "Label": "y"}\n', 2, "has no label; it has text, Label"),
    ("t.jsonl", '{"text": "a", "label": "x"}\n{"more": 1}\n', 2, "has no text, label; it has more"),
    ("t.jsonl", '{"text": "a", "label": "x", "text": "b"}\n', 1, "the key text stands there twice"),
    ("t.jsonl", '{"text": "a", "label": NaN}\n', 1, "label is nan, which JSON does not have; write null, or a number"),
    ("t.jsonl", '{"text": 3, "label": "x"}\n', 1, "text must be a text, not 3"),
    ("t.jsonl", '{"text": ["a"], "label": "x"}\n', 1, 'text must be a text, not ["a"]'),
    ("t.jsonl", '{"text": "a", "label": {}}\n', 1, NO_LABEL + "{}"),
    ("t.jsonl", '{"text": "a", "label": [1]}\n', 1, NO_LABEL + "[1]"),
    ("t.jsonl", '{"text": "a", "label": ["b", "c|d"]}\n', 1, NO_LABEL + '["b", "c|d"]'),
    ("t.jsonl", '{"text": "a", "label": {"b": 1}}\n', 1, NO_LABEL + '{"b": 1}'),
])
def test_what_breaks_a_rule_is_refused_with_its_line(write, name, content, line, rule):
    found_line, found_rule = refused_row(write(name, content))
    assert (found_line, found_rule[:len(rule)]) == (line, rule)


def test_json_that_is_nested_too_deep_is_refused(write):
    assert refused_row(write("t.jsonl", '\n{"text": "a", "label": "x", "more": ' + "[" * 100_000))[0] == 2


@pytest.mark.parametrize("escaped", ["\\u0000", "\\ud800"])
def test_what_is_no_text_is_refused_when_it_is_escaped_too(write, escaped):
    path = write("t.jsonl", f'{{"text": "a", "label": "x"}}\n{{"text": "b{escaped}", "label": "x"}}\n')
    assert refused_row(path)[0] == 2


def test_rows_before_the_one_that_is_refused_are_read(write):
    rows, read = read_rows(write("t.csv", "text,label\na,x\nb,y\nc\n"), LABELLED), []
    with pytest.raises(UserError):
        read.extend(row.texts for row in rows)
    assert read == [("a",), ("b",)]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_bytes_that_are_not_utf8_are_refused_with_line_and_byte(write, name, mark):
    content = mark + SMALL[name].encode()
    line = 1 + SMALL[name][:SMALL[name].index("ü")].count("\n")
    found = refused_row(write(name, content.replace("ü".encode(), b"\xfc")))
    assert found[0] == line and found[1].startswith("byte 0xfc is not UTF-8; it looks like WINDOWS-1252: convert it")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_wrong_byte_in_the_first_line_is_named(write, mark):
    """A byte in the first line is named with or without a byte order mark."""
    line, rule = refused_row(write("t.txt", mark + b"caf\xe9\n"))
    assert line == 1 and rule.startswith("byte 0xe9 is not UTF-8; ")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "cp1252", "latin-1"])
@pytest.mark.parametrize("name", SMALL)
def test_the_advised_command_makes_a_file_that_can_be_read(write, name, encoding):
    """In any locale, and though the file's name has spaces and quotes."""
    text = SMALL[name] if encoding != "latin-1" else SMALL[name].replace("ü", "ü\x81")
    path = write(f"it's (one) {name}", text.encode(encoding))
    command = re.search(r"\((iconv .*)\)$", refused_row(path)[1])[1]
    subprocess.run(["bash", "-c", command], env={"PATH": os.environ["PATH"], "LC_ALL": "C"}, check=True)
    made = path.with_name(f"it's (one) t.utf-8{path.suffix}")
    assert texts(made) == [("ein Wort",), ("ü\x81" if encoding == "latin-1" else "ü",)]


@pytest.mark.parametrize("name", SMALL)
def test_a_nul_character_is_refused_with_its_line(write, name):
    line = 1 + SMALL[name][:SMALL[name].index("ü")].count("\n")
    assert refused_row(write(name, SMALL[name].replace("ü", "\0"))) == (line,
        "holds a NUL character, so it is not text; remove it")


@pytest.mark.parametrize("name, rule", [
    ("t.csv", f"field larger than field limit ({MAX_FIELD})"), ("t.tsv", f"text is longer than {MAX_FIELD} characters"),
    ("t.jsonl", f"text is longer than {MAX_FIELD} characters")])
def test_a_field_may_be_as_long_as_the_limit_and_no_longer(write, name, rule):
    longest = write(name, SMALL[name].replace("ein Wort", "ä" * MAX_FIELD))
    too_long = write(f"x/{name}", SMALL[name].replace("ein Wort", "ä" * (MAX_FIELD + 1)))
    line, found_rule = refused_row(too_long)
    assert (len(texts(longest)[0][0]), line, found_rule[:len(rule)]) == (MAX_FIELD, 1 if name == "t.jsonl" else 2, rule)


@pytest.mark.parametrize("name", SMALL)
def test_a_line_that_is_too_long_is_refused_before_it_is_read_whole(write, name):
    path = write(name, first := SMALL[name].splitlines()[0] + "\n")
    os.truncate(path, len(first) + MAX_LINE + 1)  # of no size on the disk
    assert refused_row(path) == (2, "is longer than 16 MiB")


@pytest.mark.parametrize("name", SMALL)
def test_a_file_that_cannot_be_read_is_74(tmp_path, name):
    (tmp_path / name).mkdir()
    assert refusal(read_rows, tmp_path / name, PLAIN) == (Exit.IO, f"cannot read {tmp_path / name}: Is a directory")


def test_labels_of_jsonl_may_be_lists_of_words_and_null_is_empty(write):
    path = write("t.jsonl", '{"text": "a", "label": ["x", "y"]}\n{"text": "b", "label": null}\n'
                            '{"text": null, "label": "x"}')
    assert [row[:2] for row in read_rows(path, LABELLED)] == [(("a",), ("x|y",)), (("b",), ("",)), (("",), ("x",))]
