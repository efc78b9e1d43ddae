"""Tar files: the same members as Python's tarfile finds; and one clear error for whatever is damaged or hostile."""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.images.decode import EncodedImage, UnreadableImage
from data.images.folder import images_of
from data.shards.headers import BLOCK, MAX_EXTENDED, Reader, members_of
from data.shards.shard import MAX_LABEL, MAX_OPEN, names_in, open_shard, read_member
from utils.errors import Exit, UserError

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))


def picture(level=0) -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), level, np.uint8)).save(data, "png")
    return data.getvalue()


def write_tar(path, members, form=tarfile.PAX_FORMAT):
    """members: {name: bytes, or a TarInfo with its bytes}, or (name, bytes) pairs."""
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in members.items() if isinstance(members, dict) else members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return str(path)


def sample(key, label="0", ending="png"):
    return {f"{key}.{ending}": picture(), f"{key}.cls": label.encode()}


def found_in(path):
    with Reader(path) as reader:
        return [*members_of(reader)]


NAMES = ["a.png", "folder/b.png", "x" * 99 + "/c.png", "long/" * 30 + "d.png", "long/" * 80 + "e.png", "ä/é.png",
         "with space.png", "y" * 100, "z" * 101, "p" * 154 + "/" + "q" * 99]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 100_000])
def test_members_are_those_that_tarfile_finds(form, size, tmp_path):
    names = [name for name in NAMES if form != tarfile.USTAR_FORMAT or (len(name) < 250 and name[0] != "z")]
    path = write_tar(tmp_path / "a.tar", [(name, os.urandom(size)) for name in names], form)
    with tarfile.open(path) as archive:
        expected = [(os.fsencode(each.name), each.offset_data, each.size) for each in archive.getmembers()]
    assert [tuple(each) for each in found_in(path)] == expected


def test_folders_are_left_out_and_global_attributes_change_nothing(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "made by a test"}) as archive:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        info = tarfile.TarInfo("folder/a.txt")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    assert [(each.name, each.size) for each in found_in(str(path))] == [(b"folder/a.txt", 3)]


def changed(path, place, content):
    """The tar file with other bytes at this place, and a header whose sum is right again."""
    data = bytearray(path.read_bytes())
    data[place:place + len(content)] = content
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:BLOCK])
    path.write_bytes(data)


@pytest.mark.parametrize("size, words", [
    (b"77777777777\0", "ends behind the end of the file"), (b"\x80" + bytes(3) + b"\x7f" * 8, "ends behind the end"),
    (b"\xff" * 12, "the size of member a.png is no number"), (b"-0000000001\0", "is no number"),
    (b"zzzzzzzzzzz\0", "is no number"),
    (b"00000002001\0", "ends behind the end of the file, which is cut off")])
def test_a_size_that_cannot_be_is_refused(size, words, tmp_path):
    path = tmp_path / "a.tar"
    write_tar(path, {"a.png": b"x" * 600})
    path.write_bytes(path.read_bytes()[:3 * BLOCK])
    changed(path, 124, size)
    with pytest.raises(UserError, match=words) as raised:
        found_in(str(path))
    assert raised.value.code == Exit.BAD_DATA


def of_kind(kind, name="a.png", content=b"", linkname=""):
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, len(content), linkname
    return info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % BLOCK)


@pytest.mark.parametrize("content, words", [
    (b"no tar file at all" * 100, "there is no header at byte 0"), (b"short", "there is no header at byte 0"),
    (b"\x1f\x8b" + bytes(700), "is compressed, .* unpack it: gzip -d"), (b"\x28\xb5\x2f\xfd" + bytes(700), "zstd -d"),
    (of_kind(b"1", linkname="b.png"), "is a link; make the file with tar --hard-dereference"),
    (of_kind(b"2", linkname="b.png"), "is a link; make the file with tar --dereference"),
    (of_kind(b"S"), "is sparse; make the file with tar without --sparse"),
    (of_kind(b"x", content=b"25 GNU.sparse.major=1\n"), "cannot be read"),
    (of_kind(b"x", content=b"22 GNU.sparse.major=1\n"), "a sparse member"),
    (of_kind(b"x", content=b"9 size=-1\n"), "cannot be read"), (of_kind(b"x", content=b"11 size=-1\n"), "the size -1"),
    (of_kind(b"x", content=b"30 size=9" + b"9" * 20 + b"\n"), "of the size 9999"),
    (of_kind(b"x", content=b"x" * 40), "attributes"),
    (of_kind(b"0", "/etc/a.png"), "leads out of the tar file"), (of_kind(b"0", "a/../../b.png"), "leads out of the"),
    (of_kind(b"L", content=b"n" * 1025) + of_kind(b"0", content=b"x"), "is longer than 1024 bytes"),
    (of_kind(b"L", content=b"x" * (MAX_EXTENDED + 1)), "1048577 bytes"),
    (of_kind(b"0", "a.png", b"x"), "its end is missing, so it is cut off"), (b"", "its end is missing"),
    *((of_kind(b"0", "a.png") + bytes(zeros) + of_kind(b"0", "b.png") + bytes(2 * BLOCK), "more follows behind its")
      for zeros in (2 * BLOCK, MAX_EXTENDED + 2 * BLOCK)),
    (of_kind(b"0", "a.png", b"x")[:BLOCK] + b"y" * BLOCK + b"junk" * 128, "there is no header at byte 1024")])
def test_what_is_damaged_or_hostile_has_one_clear_error(content, words, tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as raised:
        found_in(str(path))
    assert raised.value.code == Exit.BAD_DATA and str(path) in str(raised.value)


@pytest.mark.parametrize("members, words", [
    ([*sample("a").items(), *sample("a").items()], "a.png is there twice"),
    ({"a.png": picture(), "a.jpg": picture(), "a.cls": b"1"}, "a has several images"),
    ({"a.cls": b"1"}, "a has a label and no image"),
    ({"a.png": picture(), "a.cls": b"1", "a.json": b'{"label": 2}'}, "a has the labels '1' and '2'"),
    ({"a.png": picture(), "a.json": b"{"}, "a.json is no text in UTF-8, or no JSON"),
    ({"a.png": picture(), "a.json": b"[" * 60_000}, "a.json is no text in UTF-8, or no JSON"),
    ({"a.png": picture(), "a.cls": b"\xff"}, "a.cls is no text in UTF-8"),
    ({"a.png": picture(), "a.cls": b"x" * (MAX_LABEL + 1)}, f"a.cls has {MAX_LABEL + 1} bytes"),
    ({"a.png": picture(), "a.cls": b"cat\x1b[31m"}, r"a has the label 'cat\\x1b\[31m'"),
    ({"a.png": picture(), "a.cls": b"x" * 1025}, "a label is printable, of at most 1024 bytes"),
    ({"a.png": picture(), "a.json": b'{"label": "\\ud800"}'}, "a has the label"),
    ({"\x1b[31ma.png": picture(), "\x1b[31ma.cls": b"\xff"}, r"'\\x1b\[31ma.cls' is no text")])
def test_what_is_no_sample_is_refused_by_its_name(members, words, tmp_path):
    path = write_tar(tmp_path / "a.tar", members)
    with pytest.raises(UserError, match=words) as raised:
        open_shard(path)
    assert raised.value.code == Exit.BAD_DATA and str(raised.value).isprintable()


def test_images_may_be_without_labels(tmp_path):
    """A model predicts them. A large description counts where the label does not stand in it."""
    path = write_tar(tmp_path / "a.tar", {
        "a.png": picture(), "b.png": picture(), "b.cls": b" \n", "c.png": picture(), "c.json": b'{"label": [1, 2]}',
        "d.png": picture(), "d.cls": b"7", "d.json": b'{"text": "' + b"x" * MAX_LABEL + b'"}'})
    assert open_shard(path).labels.tolist() == [b"", b"", b"", b"7"]
    assert images_of(path) == [f"{path}/{name}.png" for name in "abcd"]


def test_names_are_those_that_folders_have(tmp_path):
    """tar -C DIR -cf x.tar . writes ./cat/1.png; and GNU tar's global header has the name of a temporary file."""
    path = write_tar(tmp_path / "a.tar", {f"./{name}": data for name, data in sample("cat/1").items()})
    header = of_kind(b"g", "/tmp/GlobalHead.1", b"19 comment=a test\n\n")
    Path(path).write_bytes(header + Path(path).read_bytes())
    assert open_shard(path).names.tolist() == [b"cat/1.png"] and read_member(f"{path}/cat/1.png") == picture()
    with pytest.raises(FileNotFoundError):
        names_in(str(tmp_path / "photos.zip"))


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(UserError, match="is not a regular file, so it cannot be read as a tar file"):
        open_shard(str(tmp_path / "a.tar"))


def test_a_tar_file_that_is_exchanged_is_not_read_at_the_old_places(tmp_path):
    """Whether it is still open, or has been closed because others were read."""
    paths = [write_tar(tmp_path / f"{number}.tar", sample("a") | sample("b")) for number in range(MAX_OPEN + 2)]
    first = {read_member(f"{path}/a.png") for path in paths}
    write_tar(tmp_path / "new.tar", {"b.png": picture(9), "b.cls": b"1"} | sample("a"))
    for path in (paths[0], paths[-1]):
        os.replace(shutil.copy(tmp_path / "new.tar", tmp_path / "copy"), path)
    assert {read_member(f"{paths[-1]}/a.png")} == first  # it is open
    with pytest.raises(OSError, match="the tar file has changed since it was scanned"):
        read_member(f"{paths[0]}/a.png")


def test_samples_have_their_labels_and_their_bytes(tmp_path):
    members = {"b.JPG": b"jpeg", "b.cls": b"5\n", "folder/a.png": b"png", "folder/a.json": json.dumps({"label": "cat"}),
               "c.png": b"other", "c.json": json.dumps({"cls": 7}), "c.txt": "a caption", "notes": "of no sample"}
    path = write_tar(tmp_path / "a.tar", {name: content if isinstance(content, bytes) else content.encode()
                                          for name, content in members.items()})
    shard = open_shard(path)
    assert [*zip(shard.names.tolist(), shard.labels.tolist(), strict=True)] == [
        (b"b.JPG", b"5"), (b"c.png", b"7"), (b"folder/a.png", b"cat")]
    assert shard.others.tolist() == [2]
    assert [read_member(f"{path}/{name}") for name in ("b.JPG", "folder/a.png")] == [b"jpeg", b"png"]
    assert [*(tmp_path / "cache").glob("shard-*")] and len(open_shard(path)) == 3
    with pytest.raises(FileNotFoundError):
        read_member(f"{path}/none.png")


def test_a_tar_file_that_is_written_again_has_another_index(tmp_path):
    path = write_tar(tmp_path / "a.tar", sample("a"))
    assert open_shard(path).names.tolist() == [b"a.png"]
    write_tar(path, sample("b") | sample("c"))
    assert open_shard(path).names.tolist() == [b"b.png", b"c.png"]


def test_folders_may_be_called_as_tar_files_are(tmp_path):
    (tmp_path / "above.tar").mkdir()
    path = write_tar(tmp_path / "above.tar" / "a.tar", sample("inside.tar/a") | sample("b"))
    assert [len(read_member(f"{path}/{name}.png")) for name in ("inside.tar/a", "b")] == [len(picture())] * 2
    assert names_in(f"{path}/inside.tar") == names_in(f"{path}/./inside.tar") == (path, {"a.png"})
    assert names_in(path) == (path, {"b.png"}) and names_in(f"{path}/none") == (path, set())


def test_many_tar_files_are_read_with_few_descriptors(tmp_path):
    paths = [write_tar(tmp_path / f"{number}.tar", {"a.png": b"%d" % number, "a.cls": b"0"}) for number in range(200)]
    program = """if True:
        import resource, sys
        from data.shards.shard import read_member
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        for path in sys.argv[1:] * 2:
            assert read_member(path + "/a.png") == path.rpartition("/")[2][:-4].encode()"""
    subprocess.run([sys.executable, "-c", program, *paths], check=True, cwd=Path(__file__).parents[4])


def test_a_member_is_an_image_and_one_that_is_gone_is_unreadable(tmp_path):
    path = write_tar(tmp_path / "a.tar", {"a.png": picture(77), "a.cls": b"0"})
    assert EncodedImage(f"{path}/a.png").pixels().unique().tolist() == [77]
    for name in (f"{path}/b.png", str(tmp_path / "none.tar" / "a.png")):
        with pytest.raises(UnreadableImage):
            EncodedImage(name)
