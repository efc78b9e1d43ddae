import io
import itertools
import random
import struct
import warnings
import zlib
from functools import partial

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image, ImageOps, PngImagePlugin

from data.images.decode import EncodedImage, UnreadableImage, left_out

torch.set_num_threads(1)


def encoded(image: Image.Image, format: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def photo(height: int, width: int) -> Image.Image:
    """A smooth picture with an asymmetric pattern, so that turned or shifted pixels show."""
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([x * 255 / width, y * 255 / height, (x + 2 * y) % 97], axis=2).astype(np.uint8))


def as_rgb(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"))


SMALL = photo(20, 30)
CLEAR = Image.merge("RGBA", (*SMALL.split(), Image.new("L", (30, 20), 0)))
PALETTE = SMALL.quantize(16)
GREY16 = Image.fromarray((np.arange(600).reshape(20, 30) * 109).astype(np.uint16))
GREY8 = np.round(np.arange(600).reshape(20, 30) * 109 / 257).astype(np.uint8)
WHITE = np.full((20, 30, 3), 255, dtype=np.uint8)


@pytest.mark.parametrize(("data", "expected"), [
    (encoded(SMALL, "PNG"), as_rgb(SMALL)),
    (encoded(SMALL, "JPEG"), as_rgb(Image.open(io.BytesIO(encoded(SMALL, "JPEG"))))),
    (encoded(SMALL, "JPEG", progressive=True),
     as_rgb(Image.open(io.BytesIO(encoded(SMALL, "JPEG", progressive=True))))),
    (encoded(SMALL.convert("L"), "JPEG"), as_rgb(Image.open(io.BytesIO(encoded(SMALL.convert("L"), "JPEG"))))),
    (encoded(SMALL.convert("CMYK"), "JPEG", quality=100), as_rgb(SMALL)),
    (encoded(SMALL.convert("CMYK"), "TIFF"), as_rgb(SMALL)),
    (encoded(PALETTE, "PNG"), as_rgb(PALETTE)),
    (encoded(PALETTE, "PNG", transparency=bytes(16)), WHITE),
    (encoded(PALETTE, "GIF"), as_rgb(PALETTE)),
    (encoded(PALETTE, "GIF", save_all=True, append_images=[PALETTE.rotate(180)]), as_rgb(PALETTE)),
    (encoded(SMALL, "WEBP", lossless=True, save_all=True, append_images=[SMALL.rotate(180)]), as_rgb(SMALL)),
    (encoded(CLEAR, "PNG"), WHITE),
    (encoded(CLEAR.convert("LA"), "PNG"), WHITE),
    (encoded(Image.new("RGB", (30, 20), "red"), "PNG", transparency=(255, 0, 0)), WHITE),
    (encoded(SMALL.convert("1"), "PNG"), as_rgb(SMALL.convert("1"))),
    (encoded(GREY16, "PNG"), np.stack([GREY8] * 3, axis=2)),
    (encoded(GREY16, "TIFF"), np.stack([GREY8] * 3, axis=2)),
    (encoded(Image.fromarray(np.asarray(GREY16).astype(np.int32)), "PPM"), np.stack([GREY8] * 3, axis=2)),
    (encoded(SMALL, "BMP"), as_rgb(SMALL)),
    (encoded(SMALL.convert("L"), "PPM"), as_rgb(SMALL.convert("L"))),
])
def test_every_mode_is_decoded_to_its_colours(data, expected):
    image = EncodedImage(data)
    pixels = image.pixels()
    assert (image.height, image.width) == (20, 30) and pixels.dtype == torch.uint8
    # CMYK goes through a lossy JPEG here; everything else is exact.
    assert np.abs(pixels.numpy().astype(int) - expected).max() <= (12 if data[:2] == b"\xff\xd8" and b"Adobe" in data
                                                                   else 0)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(format, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(SMALL, format, exif=exif)
    reference = as_rgb(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    image = EncodedImage(data)
    assert (image.height, image.width) == reference.shape[:2]
    assert np.array_equal(image.pixels().numpy(), reference)


def turned(kind: str, orientation: int) -> bytes:
    """A JPEG that is turned by EXIF or by XMP."""
    if kind == "exif":
        exif = Image.Exif()
        exif[0x0112] = orientation
        return encoded(SMALL, "JPEG", exif=exif)
    return encoded(SMALL, "JPEG", xmp=f'<rdf:Description tiff:Orientation="{orientation}"/>'.encode())


def segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2) + content


# What a JPEG may begin with, after its first two bytes: nothing else, a long profile, a comment that looks like a
# header, fill bytes, a marker without a length.
BEGINNINGS = {"": b"", "profile": segment(0xE2, bytes(60_000)), "comment": segment(0xFE, b"\xff\xda\xff\xe1"),
              "fill": b"\xff\xff", "restart": b"\xff\xd0"}


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("kind", ["exif", "xmp"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_a_jpeg_is_turned_as_pillow_turns_it(kind, orientation, beginning):
    data = turned(kind, orientation)
    data = data[:2] + BEGINNINGS[beginning] + data[2:]
    reference = as_rgb(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert np.array_equal(EncodedImage(data).pixels().numpy(), reference)
    assert reference.shape == ((20, 30, 3) if orientation == 1 else (30, 20, 3))


def test_a_jpeg_of_a_subsampling_without_a_name_is_decoded():
    """4:4:1, which is 4:1:1 turned by a quarter; simplejpeg names all others."""
    data = bytearray(simplejpeg.encode_jpeg(np.array(photo(32, 32)), colorsubsampling="411"))
    luma = data.index(b"\xff\xc0") + 11  # of the first component in the frame's header: its two factors
    assert data[luma] == 0x41
    data[luma] = 0x14  # as many blocks, in another order
    expected = as_rgb(Image.open(io.BytesIO(data)))
    assert np.array_equal(EncodedImage(bytes(data)).pixels().numpy(), expected)


@pytest.mark.parametrize("at_least", [1, 0.7, 0.5, 0.4, 0.25, 0.2, 0.125, 0.01])
@pytest.mark.parametrize("orientation", [1, 6])
def test_reduced_decode_keeps_what_is_asked_for(at_least, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = EncodedImage(encoded(photo(333, 501), "JPEG", exif=exif))
    pixels = image.pixels(at_least)
    factor = 2.0 ** max(-3, np.ceil(np.log2(at_least)))
    assert pixels.shape == (np.ceil(image.height * factor), np.ceil(image.width * factor), 3)
    full = torch.nn.functional.interpolate(image.pixels()[None].permute(0, 3, 1, 2), pixels.shape[:2], mode="bilinear",
                                           antialias=True)
    # Red and green are ramps: the same picture, unshifted.
    assert (full[0].permute(1, 2, 0)[4:-4, 4:-4, :2].float() - pixels[4:-4, 4:-4, :2].float()).abs().mean() < 4


def png_of_16_bits(values: np.ndarray) -> bytes:
    """values: uint16 [H, W, 1 or 3]; Pillow writes no such colours."""
    def chunk(name: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4) + name + content + zlib.crc32(name + content).to_bytes(4)

    height, width, channels = values.shape
    header = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 3: 2}[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")])


def tiff_of_16_bits(values: np.ndarray, order: str, is_packed: bool, rows: int = 8) -> bytes:
    """values: uint16 [H, W, 1 or 3]. order: < or > (byte order)."""
    height, width, channels = values.shape
    strips = [values[row:row + rows].astype(f"{order}u2").tobytes() for row in range(0, height, rows)]
    strips = [zlib.compress(strip) if is_packed else strip for strip in strips]
    size, number = 2 + 12 * 10 + 4, len(strips)
    bits, offsets = 8 + size, 8 + size + 2 * channels
    lengths = offsets + 4 * number
    starts = lengths + 4 * number + np.cumsum([0, *map(len, strips[:-1])])
    tags = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, channels, bits if channels == 3 else 16),
            (259, 3, 1, 8 if is_packed else 1), (262, 3, 1, 2 if channels == 3 else 1), (273, 4, number, offsets),
            (277, 3, 1, channels), (278, 4, 1, rows), (279, 4, number, lengths), (284, 3, 1, 1)]
    directory = struct.pack(f"{order}H", len(tags)) + b"".join(
        struct.pack(f"{order}HHIHxx" if kind == 3 and count == 1 else f"{order}HHII", *tag)
        for tag in tags for _, kind, count, _ in [tag]) + bytes(4)
    arrays = [np.full(channels, 16, f"{order}u2"), starts.astype(f"{order}u4"),
              np.array([*map(len, strips)], f"{order}u4")]
    start = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}I", 8)
    return b"".join([start, directory, *(array.tobytes() for array in arrays), *strips])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("write", [
    png_of_16_bits, *(partial(tiff_of_16_bits, order=order, is_packed=packed)
                      for order, packed in itertools.product("<>", (False, True)))],
    ids=["png", "tiff", "packed tiff", "tiff of big endian", "packed tiff of big endian"])
def test_files_of_16_bits_show_all_grey_levels_of_their_depth(write, channels):
    """10, 12 or 14 bits of a sensor, the lowest of the 16: a 255th of the depth is a level, whatever the container."""
    for bits in (8, 10, 12, 14, 16):
        values = np.linspace(0, 2**bits - 1, 20 * 30 * channels).astype(np.uint16).reshape(20, 30, channels)
        image = EncodedImage(write(values))
        expected = np.broadcast_to(values / (2**bits - 1) * 255, (20, 30, 3))
        assert image.white == 2**bits - 1
        assert np.abs(image.pixels().numpy() - expected).max() <= 0.5


@pytest.mark.parametrize("channels", [1, 3])
def test_a_value_has_one_brightness_in_all_files_of_a_data_set(channels):
    """Whatever else a file holds; what is above the white of the data set is white."""
    for largest in (600, 4095, 60_000):
        values = np.array([0, 600, largest], np.uint16).reshape(1, 3, 1).repeat(channels, axis=2)
        levels = EncodedImage(png_of_16_bits(values), white=4095).pixels()[0, :, 1]
        assert levels.tolist() == [0, 37, 37 if largest == 600 else 255]


def test_signed_values_below_0_are_refused_with_the_reason():
    with pytest.raises(UnreadableImage, match="below 0"):
        EncodedImage(encoded(Image.new("I", (4, 4), -1000), "TIFF"))


def tiff(pixels: np.ndarray, **tags: int) -> bytes:
    """An uncompressed TIFF of one strip. pixels: [H, W, bands]. tags: photometric; extra, of each further band."""
    height, width, bands = pixels.shape
    rows = [(256, 3, [width]), (257, 3, [height]), (258, 3, [8 * pixels.itemsize] * bands), (259, 3, [1]),
            (262, 3, [tags.get("photometric", 2)]), (273, 4, [8]), (277, 3, [bands]), (278, 3, [height]),
            (279, 4, [pixels.nbytes])] + ([(338, 3, [tags["extra"]])] if "extra" in tags else [])
    blob, entries = pixels.tobytes(), b""
    for tag, kind, values in rows:
        packed = struct.pack(f"<{len(values)}{'HI'[kind == 4]}", *values)
        if len(packed) > 4:
            packed, blob = struct.pack("<I", 8 + len(blob)), blob + packed
        entries += struct.pack("<HHI", tag, kind, len(values)) + packed.ljust(4, b"\0")
    return b"II*\0" + struct.pack("<I", 8 + len(blob)) + blob + struct.pack("<H", len(rows)) + entries + bytes(4)


BANDS = np.random.default_rng(0).integers(0, 256, (8, 9, 6)).astype(np.uint8)


@pytest.mark.parametrize("bands, tags, is_transparency", [
    (4, {}, False), (4, {"extra": 0}, False), (4, {"extra": 2}, True)])
def test_a_fourth_band_is_transparency_where_the_file_says_so(bands, tags, is_transparency, tmp_path):
    """It may be near infrared."""
    pixels = BANDS[:, :, :bands]
    (tmp_path / "a.tif").write_bytes(tiff(pixels, **tags))
    over_white = 255 - (255 - pixels[:, :, :3].astype(int)) * pixels[:, :, 3:4] / 255
    shown = EncodedImage(str(tmp_path / "a.tif")).pixels().numpy()
    np.testing.assert_allclose(shown, over_white if is_transparency else pixels[:, :, :3], atol=is_transparency)
    assert left_out(str(tmp_path / "a.tif")) == (
        "" if is_transparency else "more bands than colours: the others are not used")


@pytest.mark.parametrize("format, says", [("TIFF", True), ("GIF", True), ("WEBP", True), ("JPEG", False)])
def test_pages_and_frames_after_the_first_are_left_out_in_words(format, says, tmp_path):
    more = {"save_all": True, "append_images": [SMALL.rotate(180)]} if says else {}
    (tmp_path / "a").write_bytes(encoded(SMALL, format, **more))
    assert left_out(str(tmp_path / "a")) == ("several pages or frames: the first is used" if says else "")
    assert left_out(str(tmp_path)) == ""


def test_where_0_is_white_a_file_of_16_bits_is_inverted_as_one_of_8_bits():
    grey = BANDS[:, :, :1]
    both = [EncodedImage(tiff(values, photometric=0), white=65535).pixels()
            for values in (grey, grey.astype(np.uint16) * 257)]
    assert torch.equal(*both) and torch.equal(both[0][:, :, :1], 255 - torch.from_numpy(grey))


def test_a_pointer_of_git_lfs_is_called_that():
    with pytest.raises(UnreadableImage, match="a pointer of git-lfs, not the image; run git lfs pull"):
        EncodedImage(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")


def test_16_bits_with_transparency_are_refused_where_white_is_less():
    """Pillow reads their upper bytes alone, which would be darker than the other files."""
    data = tiff(BANDS[:, :, :4].astype(np.uint16) * 4, extra=2)
    EncodedImage(data, white=65535)
    with pytest.raises(UnreadableImage, match="where 1023 is white; store grey or RGB"):
        EncodedImage(data, white=1023)


def of_much_text() -> PngImagePlugin.PngInfo:
    """As programs that generate images write their settings."""
    text = PngImagePlugin.PngInfo()
    for number in range(3):
        text.add_text(f"settings {number}", "x" * 30_000_000, zip=True)
        text.add_itxt(f"more settings {number}", "x" * 3_000_000, zip=True)
    return text


@pytest.mark.parametrize("options", [{"pnginfo": of_much_text()}, {"icc_profile": bytes(3_000_000)}],
                         ids=["text", "profile"])
def test_long_texts_and_profiles_in_a_png_do_not_matter(options):
    """Pillow refuses a text or profile beyond 1 MiB, and texts beyond 64 MiB."""
    assert np.array_equal(EncodedImage(encoded(SMALL, "PNG", **options)).pixels().numpy(), as_rgb(SMALL))


GOOD_PNG, GOOD_JPEG = encoded(photo(64, 64), "PNG"), encoded(photo(64, 64), "JPEG")
FRAME = GOOD_JPEG.index(b"\xff\xc0")
BAD = {
    "truncated.jpg": GOOD_JPEG[:len(GOOD_JPEG) // 2], "without_end.jpg": GOOD_JPEG[:-2],
    "12_bits.jpg": GOOD_JPEG[:FRAME + 4] + b"\x0c" + GOOD_JPEG[FRAME + 5:],
    "truncated.png": GOOD_PNG[:len(GOOD_PNG) // 2],
    "empty.jpg": b"", "text.jpg": b"this is no image\n" * 9,
    "header.png": GOOD_PNG[:8] + b"\0\0\0\1XXXX" + GOOD_PNG[16:],
    "length.png": GOOD_PNG[:8] + b"\xff" * 4 + GOOD_PNG[12:],
    "bomb.png": encoded(Image.new("1", (15_000, 15_000)), "PNG"),
    "bomb.jpg": encoded(Image.new("L", (15_000, 15_000)), "JPEG"),
    "float.tif": encoded(Image.new("F", (4, 4)), "TIFF"), "int32.tif": encoded(Image.new("I", (4, 4), 70_000), "TIFF"),
}


@pytest.mark.filterwarnings("ignore")  # pytest lifts the filter that data/images/decode.py sets
def test_damaged_files_raise_nothing_else():
    generator = random.Random(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    files = [encoded(SMALL, "JPEG", exif=exif), encoded(SMALL, "JPEG"), encoded(SMALL.convert("CMYK"), "JPEG"),
             encoded(SMALL, "PNG", exif=exif),
             encoded(PALETTE, "PNG", transparency=3), encoded(PALETTE, "GIF"), encoded(SMALL, "WEBP"),
             encoded(SMALL, "BMP"),
             encoded(SMALL, "PPM"), encoded(GREY16, "PNG"), encoded(SMALL, "TIFF", exif=exif),
             png_of_16_bits(np.ones((9, 9, 3), np.uint16)), tiff_of_16_bits(np.ones((9, 9, 3), np.uint16), "<", True)]
    outcomes = set()
    for data in files * 60:
        damaged = bytearray(data[:generator.randrange(len(data))] if generator.random() < 0.2 else data)
        for _ in range(generator.choice((1, 3, 10))):
            if damaged:
                damaged[generator.randrange(min(len(damaged), 200))] = generator.randrange(256)
        try:
            EncodedImage(bytes(damaged)).pixels(0.3)
            outcomes.add("decoded")
        except UnreadableImage:
            outcomes.add("refused")
    assert outcomes == {"decoded", "refused"}


def test_large_image_gives_no_warning():
    with warnings.catch_warnings(action="error"):
        assert EncodedImage(encoded(Image.new("L", (10_000, 9_500)), "JPEG")).width == 10_000


def test_stray_bytes_before_a_marker_are_read_as_by_pillow():
    middle = GOOD_JPEG.rindex(b"\xff\xd9")
    data = GOOD_JPEG[:middle] + bytes(200) + GOOD_JPEG[middle:]
    assert np.array_equal(EncodedImage(data).pixels().numpy(), as_rgb(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("options", [{}, {"restart_marker_rows": 1}])
@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9])
def test_a_truncated_file_is_refused_wherever_it_ends(options, kept):
    data = encoded(photo(416, 320), "JPEG", **options)
    for broken in (data[:int(kept * len(data))], data[:-2]):
        with pytest.raises(UnreadableImage, match="truncated"):
            EncodedImage(broken).pixels()
