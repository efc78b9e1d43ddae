"""--data of tar files: a run of a folder and of what it was packed into is one run; every command reads them."""

import csv
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import unicodedata
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.images.decode import opened
from data.pack import PARSER, main
from data.shards.index import build_image_index
from data.splits import ValSplit
from tests.harness.run_directory import contents, records
from utils.errors import Exit, UserError

WORDS = ["--model", "small-cnn", "--image-size", "16", "--epochs", "2", "--global-batch-size", "24", "--threads", "1",
         "--log-every", "1", "--strategy", "exact", "--micro-batch-size", "4"]
WHOLE = ValSplit(0, 0, only="train")


@pytest.fixture(scope="module")
def module_cache(session_dir):
    """One cache for the indexes that this process makes."""
    before = os.environ.get("LOCKSTEP_CACHE")
    os.environ["LOCKSTEP_CACHE"] = str(session_dir / "cache-of-shards")
    yield Path(os.environ["LOCKSTEP_CACHE"])
    os.environ.pop("LOCKSTEP_CACHE")
    if before is not None:
        os.environ["LOCKSTEP_CACHE"] = before


def pack(data, output, size="20kB"):
    assert main(PARSER.parse_args([str(data), "--output", str(output), "--shard-size", size])) == 0
    return output


@pytest.fixture(scope="module")
def packed(photos, session_dir, module_cache) -> Path:
    return pack(photos, session_dir / "packed")


@pytest.fixture(scope="module")
def table(photos, packed, session_dir) -> Path:
    """A table with the same samples in the same order, whose images lie in the tar files."""
    folder = session_dir / "table"
    folder.mkdir()
    for split in ("train", "val"):
        index = build_image_index(str(packed), WHOLE, session_dir / "cache-of-shards", print).splits[split]
        with (folder / f"{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["image", "label"])
            for number, label in enumerate(index.labels.tolist()):
                writer.writerow([index.path(number), f"tint{label}"])
    return folder


# --- one run


@pytest.mark.rows(1)
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_packed_folder_has_the_folders_hash(processes, photos, packed, table, run_torchrun, start_torchrun, tmp_path):
    """Through a kill and a growth; the table, too."""
    ends = {}
    for name, data in (("folder", photos), ("tar", packed), ("table", table)):
        words = [*WORDS, "--data", data, "--run-dir", tmp_path / name, "--save-every", "1"]
        if name == "folder":
            assert run_torchrun(1, *words).returncode == 0
        else:
            launch = start_torchrun(processes, *words)
            launch.wait_for(lambda name=name: len(records(tmp_path / name)) > 1, "two steps")
            launch.kill_all()
            assert run_torchrun(processes + 1, *words).returncode == 0
        ends[name] = contents(tmp_path / name)[6]
    assert ends["tar"] == ends["folder"] == ends["table"]
    kept = [json.loads((tmp_path / name / "auto.json").read_text())["data"] for name in ("folder", "tar")]
    assert kept[0] == kept[1]


def test_a_run_goes_on_where_its_folder_was_packed(photos, packed, run_train, tmp_path):
    """Its samples are what they were, by names and digests; and it is verified with them."""
    words = [*WORDS, "--run-dir", tmp_path / "run"]
    assert run_train(*words, "--data", photos, "--stop-after", 2).returncode == Exit.STOPPED
    result = run_train(*words, "--data", packed)
    assert result.returncode == 0, result.text
    verified = run_train(tmp_path / "run", script="ask/verify.py")
    assert (verified.returncode, f"verified: {tmp_path / 'run'}" in verified.out) == (0, True), verified.text


@pytest.mark.long
def test_every_command_reads_tar_files(photos, packed, run_train, tmp_path):
    runs = {}
    for name, data in (("folder", photos), ("tar", packed)):
        runs[name] = tmp_path / name
        assert run_train(*WORDS, "--data", data, "--run-dir", runs[name]).returncode == 0
    evaluated = [json.loads(run_train("--eval-only", "--run-dir", run).out) for run in runs.values()]
    assert evaluated[0]["top1"] == evaluated[1]["top1"] and evaluated[0]["loss"] == evaluated[1]["loss"]

    shard = packed / "val" / "00000.tar"
    predicted = run_train(runs["tar"], shard, script="models/predict.py")
    rows = [*csv.DictReader(io.StringIO(predicted.out))]
    with tarfile.open(shard) as archive:
        names = [f"{shard}/{name}" for name in archive.getnames() if not name.endswith(".cls")]
    assert sorted(row["input"] for row in rows) == sorted(names), predicted.text
    alone = run_train(runs["tar"], names[0], script="models/predict.py")
    assert alone.returncode == 0 and names[0] in alone.out, alone.text

    checked = run_train(*WORDS[:4], "--data", packed, "--check")
    assert checked.returncode == 0 and "no problem found in the data" in checked.out, checked.text
    replayed = run_train(runs["tar"], "--step", 2, script="ask/replay.py")
    assert replayed.returncode == 0 and ".tar/tint" in replayed.out, replayed.text
    compared = run_train(*runs.values(), script="ask/compare.py")
    assert compared.returncode == 0 and "the same, bit for bit" in compared.out, compared.text
    folds = run_train("--folds", 2, "--output", tmp_path / "folds", "--", *WORDS, "--data", packed,
                      script="ask/folds.py")
    assert folds.returncode == 0, folds.text
    cached = run_train(*WORDS, "--data", packed, "--cache", "raw", "--run-dir", tmp_path / "cached")
    assert cached.returncode == 0 and contents(tmp_path / "cached")[6] == contents(runs["folder"])[6], cached.text


def test_a_shard_that_changes_while_its_run_is_stopped_ends_it(photos, module_cache, run_train, tmp_path):
    packed = pack(photos, tmp_path / "packed", "1MB")
    words = [*WORDS, "--data", packed, "--run-dir", tmp_path / "run"]
    assert run_train(*words, "--stop-after", 2).returncode == Exit.STOPPED
    shard = packed / "train" / "00000.tar"
    data = bytearray(shard.read_bytes())
    data[600] ^= 1  # of the first image
    shard.write_bytes(data)
    result = run_train(*words)
    assert result.returncode == Exit.BAD_DATA and f"{shard}/tint0/" in result.err, result.text
    shard.unlink()
    gone = run_train(*words)
    assert (gone.returncode, "has files of val, but none of train" in gone.err) == (Exit.BAD_DATA, True), gone.text


# --- packing


NASTY = ["a.b.jpg", "a-1.jpg", "a.jpg", "a b.PNG", "sub/a.jpg", "sub.x/b.jpg", "ä.jpg", "%2E.jpg", "%252E.jpg",
         "%25.jpg", "z,z.jpg", "0.JPEG"]


def write_image(path, level, kind="jpeg") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((6, 6, 3), level, np.uint8)).save(path, kind)


def nasty_folder(root) -> Path:
    for split, count in (("train", len(NASTY)), ("val", 3)):
        for name in ("10", "2", "cat.dog"):
            for number, file in enumerate(NASTY[:count]):
                path = root / split / name / file
                write_image(path, 20 * number, "png" if path.suffix == ".PNG" else "jpeg")
    return root


def test_a_packed_folder_is_the_same_index_whatever_its_files_are_called(module_cache, tmp_path):
    folder = nasty_folder(tmp_path / "folder")
    packed = pack(folder, tmp_path / "packed", "2kB")
    assert len([*packed.glob("train/*.tar")]) > 3
    one, two = (build_image_index(str(root), WHOLE, module_cache, print) for root in (folder, packed))
    assert (one.classes, one.fingerprint) == (two.classes, two.fingerprint)
    for split in ("train", "val"):
        first, second = one.splits[split], two.splits[split]
        assert [first.name(each) for each in range(len(first))] == [second.name(each) for each in range(len(second))]
        assert first.labels.tolist() == second.labels.tolist()
    again = pack(packed, tmp_path / "again", "2kB")  # tar files are packed, too
    assert digests(again) == digests(packed)


def digests(folder):
    return {path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*.tar")}


def test_packing_goes_on_after_a_kill_and_gives_the_same_bytes(module_cache, tmp_path):
    """And what is there of other data is not written over."""
    folder = nasty_folder(tmp_path / "folder")
    whole, output = digests(pack(folder, tmp_path / "whole", "2kB")), pack(folder, tmp_path / "output", "2kB")
    kept, lost = output / "train" / "00000.tar", output / "train" / "00002.tar"
    time = kept.stat().st_mtime_ns
    lost.rename(lost.with_suffix(".packed"))
    lost.with_suffix(".packed").write_bytes(b"cut off")
    assert digests(pack(folder, output, "2kB")) == whole and kept.stat().st_mtime_ns == time
    with pytest.raises(UserError, match="was packed from other data; use an empty --output"):
        pack(folder, output, "3kB")
    (folder / "train" / "2" / "a.jpg").write_bytes((folder / "train" / "2" / "a-1.jpg").read_bytes() + b"x")
    with pytest.raises(UserError, match="was packed from other data"):
        pack(folder, output, "2kB")


def test_packing_that_was_killed_goes_on(module_cache, tmp_path):
    """While it read the last image, which is a pipe that gives nothing."""
    folder = nasty_folder(tmp_path / "folder")
    whole, words = digests(pack(folder, tmp_path / "whole", "2kB")), ["--shard-size", "2kB", "--output"]
    last = folder / "train" / "cat.dog" / "z,z.jpg"
    image = last.read_bytes()
    last.unlink()
    os.mkfifo(last)
    process = subprocess.Popen([sys.executable, "-m", "data.pack", folder, *words, tmp_path / "output"],
                               cwd=Path(__file__).parents[2])
    try:
        while not is_read(last):
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    there = digests(tmp_path / "output")
    last.unlink()
    last.write_bytes(image)
    assert 3 < len(there) < len(whole) and there.items() < whole.items()
    assert digests(pack(folder, tmp_path / "output", "2kB")) == whole


def is_read(pipe) -> bool:
    with suppress(OSError):  # there is no reader
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        return True
    return False


def test_a_table_and_one_split_can_be_packed(module_cache, tmp_path):
    """All of their samples; and names that are written in another form of Unicode stay as they are."""
    names = [unicodedata.normalize("NFD", name) for name in ("Käse", "Öl")]
    folder = tmp_path / "folder"
    for number, name in enumerate(names * 2):
        write_image(folder / "train" / name / f"{number}.jpg", number)
        write_image(folder / "val" / name / f"{number}.jpg", number)
    (folder.parent / "table.csv").write_text("image,label\n" + "".join(
        f"{path.relative_to(tmp_path)},{path.parent.name}\n" for path in sorted(folder.glob("train/*/*"))))
    packed = pack(folder, tmp_path / "packed")
    one, two = (build_image_index(str(root), WHOLE, module_cache, print) for root in (folder, packed))
    assert (one.classes, one.fingerprint) == (two.classes, two.fingerprint) == (("Käse", "Öl"), one.fingerprint)
    for split in ("train", "val"):
        shutil.copy(tmp_path / "table.csv", tmp_path / f"{split}.csv")
    (tmp_path / "train").mkdir()  # of no meaning to a table
    of_two = build_image_index(str(pack(tmp_path, tmp_path / "of-two")), WHOLE, module_cache, print)
    assert {split: len(each) for split, each in of_two.splits.items()} == {"train": 4, "val": 4}
    of_table = build_image_index(str(pack(tmp_path / "table.csv", tmp_path / "of-table")), WHOLE, module_cache, print)
    assert len(of_table.splits["train"]) == 4 and of_table.classes == one.classes
    for name in ("val", "val/*.tar"):
        alone = build_image_index(str(packed / name), ValSplit(0.1, 0, only="val"), module_cache, print)
        assert (len(alone.splits["val"]), alone.classes) == (4, one.classes)
    with pytest.raises(UserError, match="has files of val, but none of train; name the files for training"):
        pack(packed / "val" / "*.tar", tmp_path / "of-val")


def test_the_table_beside_a_tar_file_has_sizes_and_digests(module_cache, tmp_path):
    packed = pack(nasty_folder(tmp_path / "folder"), tmp_path / "packed", "1MB")
    with (packed / "train" / "00000.csv").open() as file, tarfile.open(packed / "train" / "00000.tar") as archive:
        next(file)
        rows = [*csv.DictReader(file)]
        for row in rows[:4]:
            data = archive.extractfile(row["member"]).read()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (int(row["size"]), row["sha256"])
    assert len(rows) == 3 * len(NASTY) and (packed / "classes.txt").read_text() == "10\n2\ncat.dog\n"


# --- what others have packed


def write_shard(path, samples):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in samples:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def web_samples(first, count, label=lambda number: b"%d" % (number % 3), ending="cls"):
    for number in range(first, first + count):
        data = io.BytesIO()
        level = np.random.default_rng(number).integers(0, 256, (8, 8, 3))
        Image.fromarray(level.astype(np.uint8)).save(data, "jpeg")
        yield f"{number:06}.jpg", data.getvalue()
        yield f"{number:06}.{ending}", label(number)


@pytest.mark.parametrize("names, words", [
    (("train/0.tar", "train/1.tar", "val/0.tar"), ""), (("train/0.tar", "training/1.tar", "val/0.tar"), ""),
    (("training/0.tar", "validation/0.tar", "test/0.tar"), ""),
    (("test-set-train-0.tar", "set-train-1.tar", "set-validation-0.tar"), ""), (("0.tar", "1.tar", "2.tar"), ""),
    (("0.tar", "1.tar", "2.tar"), "*.tar"), (("a/train-0.tar", "b/train-1.tar", "c/val-0.tar"), "*/*.tar"),
    (("one.tar",), "one.tar"),
    (("plain/set-train-0.tar", "plain/set-validation-0.tar"), "")])
def test_splits_are_folders_or_in_the_names_and_else_val_is_held_out(names, words, module_cache, tmp_path):
    for number, name in enumerate(names):
        write_shard(tmp_path / "set" / name, web_samples(30 * number, 30))
    index = build_image_index(str(tmp_path / "set" / words), ValSplit(0.1, 0), module_cache, print)
    has_val = any("val" in name for name in names)
    counts = {split: len(each) for split, each in index.splits.items()}
    num_train = 30 * sum("val" not in name and not name.startswith("test/") for name in names)
    assert counts["train"] == (num_train if has_val else round(num_train * 0.9)), counts
    assert counts["val"] == (30 if has_val else round(num_train * 0.1))
    assert ("test" in counts) == ("test/" in str(names))
    assert index.classes == ("0", "1", "2")
    assert all(opened(path).read(2) == b"\xff\xd8" for each in index.splits.values()
               for path in map(each.path, range(len(each))))
    assert ("are held out" in str(index.notes)) != has_val


def test_labels_are_numbers_of_lines_or_names(module_cache, tmp_path):
    root = tmp_path / "set"
    write_shard(root / "train" / "0.tar", web_samples(0, 12, lambda number: b'{"label": %d}' % (number % 3), "json"))
    (root / "classes.txt").write_text("2\n10\n1\nunused\n")
    index = build_image_index(str(root), ValSplit(0.1, 0), module_cache, print)
    assert index.classes == ("2", "10", "1", "unused") and "no sample of unused" in str(index.notes)
    assert sorted(index.splits["train"].labels.tolist()) == [0] * 3 + [1] * 3 + [2] * 3
    write_shard(root / "val" / "0.tar", web_samples(0, 3, lambda number: b"7"))
    with pytest.raises(UserError, match=r"val has the label 7, which train \(or classes.txt\) lacks") as raised:
        build_image_index(str(root), ValSplit(0.1, 0), module_cache, print)
    assert raised.value.code == Exit.BAD_DATA


@pytest.mark.parametrize("members, words", [
    ([], "no images in it; a sample is KEY.jpg and KEY.cls"), ([("a.txt", b"text")], "no images in it"),
    ([*web_samples(0, 4, lambda number: b"0")], "there is only one class, 0"),
    ([*web_samples(0, 4), *web_samples(3, 1)], "000003.jpg is there twice")])
def test_a_set_that_cannot_be_trained_on_is_refused(members, words, module_cache, tmp_path):
    write_shard(tmp_path / "set" / "0.tar", members)
    with pytest.raises(UserError, match=words) as raised:
        build_image_index(str(tmp_path / "set"), ValSplit(0.1, 0), module_cache, print)
    assert raised.value.code == Exit.BAD_DATA


def test_a_number_is_that_of_a_line_whatever_other_labels_are(module_cache, tmp_path):
    (tmp_path / "classes.txt").write_text("1\n2\n3 \n4\n")
    for labels, expected in ((b"012", [4, 4, 4]), (b"12", [0, 6, 6])):
        write_shard(tmp_path / "0.tar", web_samples(0, 12, lambda number, labels=labels: labels[
            number % len(labels):][:1]))
        index = build_image_index(str(tmp_path), WHOLE, module_cache, print)
        assert np.bincount(index.splits["train"].labels).tolist() == expected
        assert index.classes == ("1", "2", "3", "4")
    write_shard(tmp_path / "0.tar", web_samples(0, 12, lambda number: b"%d" % (number % 3 + 2)))
    with pytest.raises(UserError, match=r"has the label 4, which train \(or classes.txt\) lacks"):
        build_image_index(str(tmp_path), WHOLE, module_cache, print)
    for content in (b"\xe4\n", b"", b"a\na\n"):
        (tmp_path / "classes.txt").write_bytes(content)
        with pytest.raises(UserError, match="the name of a class on each line, in UTF-8, and none twice"):
            build_image_index(str(tmp_path), WHOLE, module_cache, print)


def test_what_is_not_used_is_said(module_cache, tmp_path, capfd):
    for number, name in enumerate(("train", "valid", "validation", "test")):
        write_shard(tmp_path / "set" / name / "0.tar", web_samples(30 * number, 30, lambda number: b"%d" % (number % 3)
                                                                   if number < 90 else b""))
    index = build_image_index(str(tmp_path / "set"), ValSplit(0.1, 0), module_cache, print)
    assert {"the files of validation are not used", "there is no val, so valid is used for validation",
            "test has no labels, and is not used"} <= {*index.notes} and len(index.splits) == 2
    for name in ("valid", "validation"):
        (tmp_path / "set" / name / "0.tar").unlink()
        (tmp_path / "set" / name).rmdir()
    pack(tmp_path / "set", tmp_path / "packed")
    assert "pack: test has no labels, and is not used" in capfd.readouterr().err
    held = build_image_index(str(tmp_path / "set"), ValSplit(0.1, 0), module_cache, print)
    assert "test has no labels, and is not used" in held.notes and len(held.splits["val"]) == 3
    assert "is used for validation" not in str(held.notes)
    with pytest.raises(UserError, match=r"test/0.tar: 000090.jpg has no label; it needs KEY.cls, or KEY.json with"):
        build_image_index(str(tmp_path / "set"), ValSplit(0.1, 0, only="test"), module_cache, print)
    (tmp_path / "set" / "test").rename(tmp_path / "set" / "eval")
    with pytest.raises(UserError, match=r"eval/0.tar: 000090.jpg has no label"):
        build_image_index(str(tmp_path / "set"), ValSplit(0.1, 0), module_cache, print)
    (tmp_path / "set" / "train" / "1.tar").symlink_to(tmp_path / "none.tar")
    with pytest.raises(UserError, match=r"cannot read .*/train/1\.tar: No such file"):
        build_image_index(str(tmp_path / "set"), ValSplit(0.1, 0), module_cache, print)


@pytest.mark.parametrize("name", ["train", "test"])
def test_data_that_are_called_as_a_split_may_have_several(name, module_cache, tmp_path):
    write_shard(tmp_path / name / "a-train-0.tar", web_samples(0, 12))
    write_shard(tmp_path / name / "a-val-0.tar", web_samples(12, 6))
    for data in (tmp_path / name, tmp_path / name / "*.tar"):
        index = build_image_index(str(data), WHOLE, module_cache, print)
        assert {split: len(each) for split, each in index.splits.items()} == {"train": 12, "val": 6}


@pytest.mark.parametrize("name", ["f.tar", "f.parquet"])
def test_a_folder_of_classes_may_be_called_as_a_file_is(name, module_cache, tmp_path):
    folder = nasty_folder(tmp_path / name)
    assert len(build_image_index(str(folder), WHOLE, module_cache, print).splits["train"]) == 3 * len(NASTY)


def test_a_sample_is_found_by_its_name_in_a_folder_and_in_its_tar_file(packed, module_cache):
    """--without takes either, and a line of bad_samples.txt."""
    train = build_image_index(str(packed), WHOLE, module_cache, print).splits["train"]
    path = train.path(5)
    lines = [train.called(5), os.path.relpath(path, packed), path, f"{path}: cannot be read"]
    assert train.find([*lines, f"{path}x"]) == {line: [5] for line in lines}


def test_a_key_in_two_shards_is_refused_with_both(module_cache, tmp_path):
    for name in ("0.tar", "1.tar"):
        write_shard(tmp_path / "set" / name, web_samples(0, 4))
    with pytest.raises(UserError, match=r"'000000.jpg' is in .*0.tar, .*1.tar; a KEY must be one sample"):
        build_image_index(str(tmp_path / "set"), ValSplit(0.1, 0), module_cache, print)


def test_files_beside_folders_of_classes_are_no_data(module_cache, tmp_path):
    """An archive of the data often lies beside them."""
    folder = nasty_folder(tmp_path / "folder")
    one = build_image_index(str(folder), WHOLE, module_cache, print)
    for name in ("photos.tar", "train/photos.tar", "metadata.parquet"):
        (folder / name).write_bytes(b"of no interest")
    two = build_image_index(str(folder), WHOLE, module_cache, print)
    assert (one.fingerprint, len(one.splits["train"])) == (two.fingerprint, len(two.splits["train"]))


def test_a_name_without_a_split_beside_others_is_refused(module_cache, tmp_path):
    for number, name in enumerate(("set-train-0.tar", "set-val-0.tar", "extra.tar")):
        write_shard(tmp_path / "set" / name, web_samples(10 * number, 10))
    with pytest.raises(UserError, match=r"extra\.tar says no split, and others do; rename it, move it away, or give a"):
        build_image_index(str(tmp_path / "set"), ValSplit(0.1, 0), module_cache, print)
    both = build_image_index(str(tmp_path / "set" / "set-*.tar"), ValSplit(0.1, 0), module_cache, print)
    assert {split: len(index) for split, index in both.splits.items()} == {"train": 10, "val": 10}


def test_a_scan_ends_where_signals_are_blocked(tmp_path):
    """As the watchdog blocks them in a start, and in all that it forks."""
    for number in range(6):
        write_shard(tmp_path / "set" / f"{number}.tar", web_samples(10 * number, 10))
    program = f"""if True:
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM, signal.SIGINT}})
        from pathlib import Path
        from data.shards.index import build_image_index
        from data.splits import ValSplit
        build_image_index({str(tmp_path / "set")!r}, ValSplit(0.1, 0), Path({str(tmp_path / "cache")!r}), print)"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=Path(__file__).parents[2])


def test_two_images_of_one_name_and_another_ending_cannot_be_packed(module_cache, tmp_path):
    folder = nasty_folder(tmp_path / "folder")
    shutil.copy(folder / "train" / "2" / "a.jpg", folder / "train" / "2" / "a.jpeg")
    with pytest.raises(UserError, match="another image has its name with another ending"):
        pack(folder, tmp_path / "packed")


@pytest.mark.parametrize("name, words", [
    ("train/a\nb/1.jpg", "each on a line, in UTF-8; rename 'a.nb'"), ("table.csv", "whose name ends in .jpg"),
    ("absolute.csv", "/m/01/train/c/1.jpg cannot be packed")])
def test_what_would_not_come_back_is_not_packed(name, words, module_cache, tmp_path):
    for path in ("train/c/1.jpg", "val/c/1.jpg", name):
        write_image(tmp_path / "folder" / path, 9) if path.endswith("jpg") else None
    (tmp_path / "folder" / "photo").write_bytes((tmp_path / "folder" / "train" / "c" / "1.jpg").read_bytes())
    (tmp_path / "folder" / "table.csv").write_text("image,label\ntrain/c/1.jpg,1\nphoto,2\n")
    (tmp_path / "folder" / "absolute.csv").write_text("image,label\ntrain/c/1.jpg,/m/01\nval/c/1.jpg,/m/02\n")
    data = tmp_path / "folder" / (name if name.endswith("csv") else "")
    with pytest.raises(UserError, match=words):
        pack(data, tmp_path / "packed")


def test_a_pattern_is_trained_on_as_it_is_typed(run_train, tmp_path):
    for number in range(3):
        write_shard(tmp_path / "set" / f"{number}.tar", web_samples(20 * number, 20))
    result = run_train("--data", tmp_path / "set" / "*.tar", *WORDS, "--run-dir", tmp_path / "run")
    assert result.returncode == 0 and "54 training and 6 validation samples" in result.out, result.text
    numbers = run_train("--data", tmp_path / "set" / "*.tar", "--task", "image-regression")
    assert numbers.returncode == Exit.BAD_DATA and "for numbers give a table" in numbers.err, numbers.text
    none = run_train("--data", tmp_path / "set" / "none-*.tar", *WORDS, "--run-dir", tmp_path / "none")
    assert none.returncode == Exit.NO_INPUT and "there is no such file" in none.err, none.text


