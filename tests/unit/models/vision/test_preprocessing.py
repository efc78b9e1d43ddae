"""models/vision/preprocessing.py: images are prepared as the weights were evaluated, else as suits the images."""

import json

import numpy as np
import pytest
import torchvision
from PIL import Image

from data.images.scan import build_index
from data.splits import ValSplit
from models.vision.preprocessing import (
    preprocessing_of_weights,
    read_description,
    resolve_preprocessing,
    size_for,
    white_for,
)
from utils.errors import Exit, UserError
from utils.rundir.lock import RunLock
from utils.rundir.resolved import Resolved
from utils.rundir.run import Run
from utils.settings.config import ImageClassificationConfig
from utils.settings.image_options import ImageOptions, ModelOptions

FROM_SCRATCH = ImageClassificationConfig()
IMAGENET = {"interpolation": "bilinear", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
OWN = {"image_size": 40, "resize_size": 50, "interpolation": "bicubic", "mean": [0.5] * 3, "std": [0.2] * 3}
GREY = {"white_value": 65535}


def images_of(folder, *sizes):
    """The index of a training set with two classes of images with these (width, height)."""
    for name in "ab":
        (folder / name).mkdir(parents=True)
        for number, size in enumerate(sizes):
            Image.new("RGB", size).save(folder / name / f"{number}.png")
    return build_index(str(folder), ValSplit(0.1, 0), folder.parent / "cache").splits["train"]


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architecture": "resnet18"} | OWN))
    return folder


@pytest.fixture
def resolved(tmp_path, world):
    """resolve_preprocessing of ImageOptions and ModelOptions; `kept` is what the run keeps."""
    index = images_of(tmp_path / "images", (50, 40), (70, 90), (300, 65))

    def resolve(images=FROM_SCRATCH.images, model=FROM_SCRATCH.model, kept=None, lock=None, is_there=True):
        facts = {"start": 1, "cores_per_process": 1, "is_there": is_there}
        run = Run(tmp_path, kept if kept is not None else {}, facts, print, lock)
        found = resolve_preprocessing(images, model, index, run, world)
        if kept is not None:
            kept |= {name: value for name, value in run.resolved.as_dict().items() if name not in Resolved().as_dict()}
        return found
    return resolve


@pytest.mark.parametrize("sizes, expected", [
    ([(8, 8)], 32), ([(32, 32), (33, 90), (31, 31)], 32), ([(33, 90)], 64), ([(500, 225)], 224), ([(192, 640)], 192),
    ([(40, 4000), (4000, 41), (65, 64)], 64)])
def test_size_from_scratch_is_the_median_shorter_side_rounded_up(tmp_path, sizes, expected):
    """To a multiple of 32, and never above 224."""
    assert size_for(images_of(tmp_path / "images", *sizes, *sizes)) == expected


def test_images_that_cannot_be_read_have_no_size(tmp_path):
    index = images_of(tmp_path / "images", (40, 40), (40, 40), (40, 40))
    (tmp_path / "images/a/0.png").write_bytes(b"no image")
    assert size_for(index) == 64
    for path in (tmp_path / "images").glob("*/*.png"):
        path.write_bytes(b"")
    assert size_for(index) == 224


def test_from_scratch_sizes_are_those_of_the_images_and_colours_imagenets(resolved):
    found, [note] = resolved(kept=(kept := {}))
    assert kept == {"image_size": 96, "resize_size": 110} | IMAGENET | GREY
    assert (found.for_eval.size, found.for_eval.resize_size) == (96, 110)
    assert note == "images of 96 px, bilinear, mean 0.485 0.456 0.406, std 0.229 0.224 0.225"


@pytest.mark.parametrize("name", ["resnet50", "efficientnet_b7", "vit_h_14", "inception_v3", "swin_v2_t"])
def test_the_librarys_weights_are_prepared_as_the_library_does(name, resolved):
    preset = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    found, [note] = resolved(model=ModelOptions(model=name, pretrained=True))
    assert (found.image_size, found.resize_size) == (preset.crop_size[0], preset.resize_size[0])
    assert (found.interpolation, found.mean, found.std) == (preset.interpolation.value, preset.mean, preset.std)
    assert note.endswith(", as the weights were evaluated")


@pytest.mark.parametrize("is_there, size, words", [
    (True, 224, "--image-size 288, and are fine-tuned as timm trained"),
    (False, 288, ", as the weights were evaluated")])
def test_timms_weights_as_they_are_have_their_test_size(is_there, size, words, resolved):
    """A run that trains them, or --eval-only where there is none."""
    found, notes = resolved(model=ModelOptions(model="timm/resnet50.a1_in1k", pretrained=True), is_there=is_there)
    assert found.image_size == size and words in notes[-1]


@pytest.mark.parametrize("name, has_note", [("resnet50.a1_in1k", False), ("convnext_small.in12k_ft_in1k_384", True)])
def test_a_crop_that_is_not_done_here_gets_a_note(name, has_note, resolved):
    _, notes = resolved(model=ModelOptions(model=f"timm/{name}", pretrained=True))
    assert ("`squash`" in notes[-1]) == has_note


def test_a_folder_of_another_run_is_prepared_as_in_that_run(resolved, model_folder):
    found, _ = resolved(model=ModelOptions(model=str(model_folder), pretrained=True))
    assert vars(found) == OWN | GREY
    assert resolved(model=ModelOptions(model=str(model_folder)))[0].image_size == 96  # without its weights


def test_what_is_given_counts_and_the_weights_own_are_told(resolved, model_folder):
    images = ImageOptions(image_size=80, mean=(0.1, 0.2, 0.3))
    found, [_, note] = resolved(images, ModelOptions(model=str(model_folder), pretrained=True))
    assert vars(found) == OWN | GREY | {"image_size": 80, "resize_size": 100, "mean": [0.1, 0.2, 0.3]}
    assert note.endswith("were evaluated with --image-size 40 --mean 0.5 0.5 0.5")


def test_a_run_keeps_what_it_began_with_without_the_folder(resolved):
    """The folder may be gone, and the images others."""
    found, _ = resolved(model=ModelOptions(model="/gone", pretrained=True), kept=dict(OWN))
    assert vars(found) == OWN | GREY


def test_a_run_of_an_earlier_version_keeps_its_crop(resolved):
    former = {"image_size": 224} | IMAGENET
    assert resolved(model=ModelOptions(model="resnet50", pretrained=True), kept=dict(former))[0].resize_size == 256


@pytest.mark.parametrize("photo, size", [(True, 256), (False, 224)])
def test_a_model_folder_of_an_earlier_version_is_read(tmp_path, photo, size):
    about = {"architecture": "resnet18", "image_size": 224, "photo": photo} | IMAGENET
    (tmp_path / "config.json").write_text(json.dumps(about))
    assert read_description(tmp_path)["resize_size"] == size
    found = preprocessing_of_weights(ModelOptions(model=str(tmp_path), pretrained=True))
    assert found == {"image_size": 224, "resize_size": size} | IMAGENET | GREY


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a model folder of an image run") as error:
        preprocessing_of_weights(ModelOptions(model=str(tmp_path), pretrained=True))
    assert error.value.code == Exit.NO_INPUT


def test_nobody_knows_how_an_architecture_without_weights_was_evaluated():
    assert preprocessing_of_weights(ModelOptions(model="resnet81", weights="file.pth")) is None


def test_files_of_16_bits_are_read_by_the_depth_of_the_data_set(tmp_path):
    """That of the largest value; a file that cannot be read, or has 8 bits, says nothing."""
    index = images_of(tmp_path / "images", *[(9, 9)] * 8)
    assert white_for(index) == 65535
    for number, value in enumerate((900, 4095, 1500)):
        Image.fromarray(np.full((9, 9), value, np.uint16)).save(index.path(number * 4))
    (tmp_path / "images/b/7.png").write_bytes(b"no image")
    assert white_for(index) == 4095
    Image.fromarray(np.full((9, 9), 4096, np.uint16)).save(index.path(1))
    assert white_for(index) == 16383


@pytest.mark.parametrize("kept, is_read_only, white", [
    ({}, False, 1023), ({}, True, 4095), ({"white_value": 255, "image_size": 40}, False, 255),
    ({"white_value": 65535, "image_size": 40}, False, 65535)])
def test_whose_depth_counts(resolved, model_folder, tmp_path, kept, is_read_only, white):
    """The data's in a new run, that of weights which are evaluated as they are; a run keeps its own."""
    (model_folder / "config.json").write_text(json.dumps({"architecture": "resnet18", "white_value": 4095} | OWN))
    for path in (tmp_path / "images").glob("*/*.png"):
        Image.fromarray(np.full((9, 9), 1000, np.uint16)).save(path)
    model = ModelOptions(model=str(model_folder), pretrained=True)
    found, notes = resolved(model=model, kept=kept, lock=None if is_read_only else RunLock())
    assert found.white_value == white
    words = f"files with 16 bits are read as {white.bit_length()} bits: 0 is black, {white} and above white"
    assert (words in notes) == (white != 65535)
