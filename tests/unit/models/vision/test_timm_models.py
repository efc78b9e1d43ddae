"""--model timm/NAME, with EfficientNet-Lite0's real ImageNet weights where weights matter."""

import csv
import json
import shutil
from importlib import metadata

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.optim import param_groups_layer_decay

from benchmarks.pretrained import write_lite0
from models.blocks import blocks_of, freeze, lr_factors
from models.vision.classifier import (
    build_classifier,
    build_model,
    classify_images,
    load_model_folder,
    save_model_folder,
)
from models.vision.preprocessing import description_of, preprocessing_of_weights
from models.vision.timm_models import timm_preprocessing
from models.vision.weights import classes_of_weights
from tests.unit.models.vision.test_classifier import equal_names
from utils.errors import Exit, UserError
from utils.settings.image_options import ModelOptions

torch.set_num_threads(1)
LITE0, TINY, SMALL_VIT = "timm/tf_efficientnet_lite0", "timm/test_resnet", "timm/test_vit"  # timm's own, for tests
CLASSES = ("cat", "dog", "eel")
IMAGENET = tuple(f"n{index:04}" for index in range(1000))


def built(world, classes=CLASSES, image_size=64, **options):
    return build_model(ModelOptions(**options), classes, image_size, True, world)[0]


@pytest.fixture(scope="module")
def real_weights(tmp_path_factory):
    """The file of real weights with timm's names."""
    path = tmp_path_factory.mktemp("weights") / "lite0.pth"
    write_lite0(str(path))
    return path


@pytest.fixture
def pictures(tmp_path):
    """Files of several shapes and formats: smooth noise, of which the model has different opinions."""
    paths, random = [], np.random.default_rng(0)
    for index, (width, height) in enumerate([(300, 200), (224, 256), (900, 620), (260, 700), (64, 48), (500, 375)]):
        noise = Image.fromarray(random.integers(0, 256, (5 + index, 7, 3), dtype=np.uint8))
        path = tmp_path / f"{index}.{'png' if index == 1 else 'jpg'}"
        noise.resize((width, height), Image.Resampling.BICUBIC).save(path)
        paths.append(str(path))
    return paths


@pytest.mark.long
def test_predictions_of_real_weights_are_timms_own(world, real_weights, pictures):
    """timm's pixels are Pillow's, ours those of libjpeg-turbo and torch: a level of 255 more or less."""
    # ours
    options = {"model": LITE0, "weights": str(real_weights)}
    model = built(world, IMAGENET, 224, **options).eval()
    description = preprocessing_of_weights(ModelOptions(**options)) | {"white_value": 65535}
    [rows] = classify_images(model, description, pictures, torch.device("cpu"), batch_size=64)
    found = np.stack([row.values for row in rows])

    # timm's
    theirs = timm.create_model("tf_efficientnet_lite0", checkpoint_path=str(real_weights)).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(theirs))
    images = torch.stack([transform(Image.open(path).convert("RGB")) for path in pictures])
    with torch.inference_mode():
        expected = theirs(images).softmax(dim=1).double().numpy()

    assert found.argmax(axis=1).tolist() == expected.argmax(axis=1).tolist()
    assert len(set(expected.argmax(axis=1))) > 3
    assert np.abs(found - expected).max() < 0.01


@pytest.mark.rows(1)
@pytest.mark.parametrize("for_test", [False, True])
def test_images_are_prepared_as_timm_does_for_each_of_its_weights(for_test):
    """Its test size and crop for weights as they are, the training ones to fine-tune; read from timm's transforms."""
    wrong, num_other = {}, 0
    for name in timm.list_pretrained()[::7]:
        described = timm.get_pretrained_cfg(name).to_dict()
        config = timm.data.resolve_data_config(pretrained_cfg=described, use_test_size=for_test)
        num_other += config != timm.data.resolve_data_config(pretrained_cfg=described, use_test_size=not for_test)
        side = config["input_size"][-1]
        expected = {
            "image_size": side, "resize_size": int(side / config["crop_pct"]),
            "interpolation": config["interpolation"], "mean": list(config["mean"]), "std": list(config["std"]),
            "crop_mode": config["crop_mode"]}
        if timm_preprocessing(f"timm/{name}", for_test) != expected:
            wrong[name] = expected
    assert wrong == {} and num_other > 15


@pytest.mark.long
def test_photos_by_wordnet_id_are_evaluated_as_timm_does(real_weights, pictures, run_train, tmp_path):
    """Without train/, with a few of the 1,000 classes: a prediction counts among all of them, and as timm's own."""
    # timm's
    theirs = timm.create_model("tf_efficientnet_lite0", checkpoint_path=str(real_weights)).eval()
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=theirs, use_test_size=True))
    ids, root, expected = timm.data.ImageNetInfo().label_names(), tmp_path / "data", {}
    for number, path in enumerate(pictures):
        with torch.inference_mode():
            predicted = ids[theirs(transform(Image.open(path).convert("RGB"))[None]).argmax()]
        folder = root / "val" / ("n01440764" if number == 5 else predicted)
        folder.mkdir(parents=True, exist_ok=True)
        expected[str(shutil.copy(path, folder))] = predicted

    # ours
    result = run_train("--eval-only", "--data", root, "--model", LITE0, "--weights", real_weights, "--workers", 0,
                       "--precision", "fp32", "--threads", 1, "--output", tmp_path / "rows.csv")
    assert result.returncode == 0, result.text
    with (tmp_path / "rows.csv").open(newline="") as file:
        assert {row["input"]: row["prediction"] for row in csv.DictReader(file)} == expected
    assert json.loads(result.out)["top1"] == pytest.approx(5 / 6) and result.err.startswith("there is no train/")


def test_names_of_the_weights_outputs_are_found_or_left(world, model_folder_of, real_weights):
    """Those of a run; the WordNet ids of as much of ImageNet as the head has outputs; else the data's."""
    ids = timm.data.ImageNetInfo().label_names()
    file = {"model": LITE0, "weights": str(real_weights)}
    run = {"model": str(model_folder_of(["b", "a", "c"])), "pretrained": True}
    more = timm.data.ImageNetInfo("imagenet-21k-miil").label_names()
    of_more = {"model": "timm/mobilenetv3_large_100.miil_in21k", "pretrained": True}
    for options, classes, expected in (
            (of_more, more[7:9], more),
            (file, ids[7:9], ids), (file, ["cat", "dog"], ["cat", "dog"]), (file, ["n00000001"], ["n00000001"]),
            (run, ["a", "b"], ["b", "a", "c"]), (run, ["a", "d"], ["a", "d"]), (run, ["A", "b"], ["b", "A", "c"])):
        described = description_of(options["model"], world)
        assert classes_of_weights(ModelOptions(**options), described, classes, world) == expected
    ten = {"head.fc.weight": torch.zeros(10, 8), "head.fc.bias": torch.zeros(10)}
    torch.save(ten, real_weights.with_name("ten.pth"))
    few = ModelOptions(model=TINY, weights=str(real_weights.with_name("ten.pth")))
    assert classes_of_weights(few, {}, ids[:10], world) == ids[:10]


@pytest.fixture
def model_folder_of(tmp_path):
    """The folder of a model with these classes, without weights."""
    def write(classes):
        (tmp_path / "config.json").write_text(json.dumps({"architecture": TINY, "classes": classes}))
        return tmp_path
    return write


def test_the_crop_is_that_of_timms_data_config():
    found = {name: preprocessing_of_weights(ModelOptions(model=f"timm/{name}", pretrained=True)) for name in (
        "tf_efficientnet_lite0", "tf_efficientnet_lite4", "resnet50.a1_in1k")}
    assert [(each["image_size"], each["resize_size"], each["interpolation"], each["mean"]) for each in found.values()
            ] == [(224, 256, "bicubic", [0.5] * 3), (380, 413, "bilinear", [0.5] * 3),
                  (224, 235, "bicubic", [0.485, 0.456, 0.406])]


@pytest.mark.parametrize("version", [None, "0.9.2"])
def test_timm_that_is_missing_or_old_is_64_with_its_installation(version, world, monkeypatch):
    def installed(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    with pytest.raises(UserError, match=rf"timm {version or 'is not installed'}.*pip install 'timm") as error:
        built(world, model=LITE0)
    assert error.value.code == Exit.USAGE


@pytest.mark.parametrize(("name", "meant"), [
    ("resnet05", "timm/resnet50"), ("resnet50.a1_in2k", "timm/resnet50.a1_in1k"), ("hf-hub:who/what", "timm/"),
    ("local-dir:/tmp", "timm/"), ("", "timm/resnet50")])
def test_an_unknown_name_is_refused_with_close_ones(name, meant, world):
    with pytest.raises(UserError, match=f"has no such classifier; did you mean .*{meant}") as error:
        built(world, model=f"timm/{name}")
    assert error.value.code == Exit.USAGE


def test_a_model_that_is_no_classifier_is_refused(monkeypatch):
    monkeypatch.setattr(timm, "create_model", lambda *args, **options: torch.nn.Conv2d(3, 3, 1))
    with pytest.raises(UserError, match=r"gives torch\.Size\(\[1, 3, 64, 64\]\) where \[1, 3\] is needed"):
        build_classifier(TINY, 3, 64)


def test_real_weights_of_other_classes_keep_the_backbone_and_a_new_head(world, real_weights):
    weights, model = torch.load(real_weights), built(world, model=LITE0, weights=str(real_weights))
    assert set(weights) - equal_names(model, weights) == {"classifier.weight", "classifier.bias"}
    assert model.classifier.weight.shape[0] == 3


def test_weights_of_another_architecture_are_refused(world, real_weights):
    with pytest.raises(UserError, match="same architecture") as error:
        built(world, model=TINY, weights=str(real_weights))
    assert error.value.code == Exit.USAGE


def test_a_backbone_without_a_head_gets_a_new_one(world, tmp_path):
    weights = timm.create_model("test_resnet", num_classes=0).state_dict()
    save_file(weights, tmp_path / "backbone.safetensors")
    model = built(world, model=TINY, weights=str(tmp_path / "backbone.safetensors"))
    assert equal_names(model, weights) == set(weights) and set(model.state_dict()) - set(weights) == {
        "fc.weight", "fc.bias"}


def test_positions_are_resized_to_the_images_as_timm_does(world, tmp_path):
    small, large = (timm.create_model("test_vit", img_size=size) for size in (160, 64))
    save_file(small.state_dict(), tmp_path / "vit.safetensors")
    model = built(world, IMAGENET, 64, model=SMALL_VIT, weights=str(tmp_path / "vit.safetensors"))
    timm.models.load_checkpoint(large, str(tmp_path / "vit.safetensors"),
                                filter_fn=timm.models.vision_transformer.checkpoint_filter_fn)
    assert equal_names(model, large.state_dict()) == set(large.state_dict())


def test_weights_that_cannot_be_fetched_are_66_with_ways_out(world, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"from timm/test_resnet\.r160_in1k .* --weights FILE, .*") as error:
        built(world, model=TINY, pretrained=True)
    assert error.value.code == Exit.NO_INPUT and "\n" not in str(error.value)


@pytest.mark.long
def test_a_model_without_weights_of_timms_is_64(world):
    with pytest.raises(UserError, match="timm has no weights of --model timm/efficientnet_b8") as error:
        built(world, model="timm/efficientnet_b8", pretrained=True)
    assert error.value.code == Exit.USAGE


def test_layer_decay_is_timms_own():
    model = build_classifier(SMALL_VIT, 3, 160)
    groups = param_groups_layer_decay(model, weight_decay=0.0, layer_decay=0.7, no_weight_decay_list=())
    expected = {id(param): group["lr_scale"] for group in groups for param in group["params"]}
    found = lr_factors(model, layer_decay=0.7, head_lr_factor=1.0)
    assert found == {name: pytest.approx(expected[id(param)]) for name, param in model.named_parameters()}
    assert len(set(expected.values())) > 3


@pytest.mark.parametrize("name", [LITE0, TINY, SMALL_VIT, "timm/convnext_atto"])
def test_blocks_have_every_parameter_once_and_parts_that_own_them(name):
    model = build_classifier(name, 3, 64 if name != SMALL_VIT else 160)
    blocks = blocks_of(model)
    assert sorted(key for block in blocks for key in block.params) == sorted(dict(model.named_parameters()))
    for block in blocks[1:]:
        assert {id(param) for part in block.parts for param in part.parameters()} == set(map(id, block.params.values()))
    freeze(model, "backbone")
    is_trained = {key for key, param in model.named_parameters() if param.requires_grad}
    assert is_trained == set(blocks[-1].params) == {
        f"{model.pretrained_cfg['classifier']}.{kind}" for kind in ("weight", "bias")}


def test_dropout_and_drop_path_are_timms_arguments():
    model = build_classifier(SMALL_VIT, 3, 160, dropout=0.3, drop_path=0.2)
    paths = [part.drop_prob for part in model.modules() if isinstance(part, timm.layers.DropPath)]
    assert model.head_drop.p == 0.3 and max(paths) == pytest.approx(0.2)
    with pytest.raises(UserError, match=r"--drop-path: --model timm/vgg11 has no stochastic depth"):
        build_classifier("timm/vgg11", 3, 64, drop_path=0.2)


def test_model_folder_gives_back_what_was_saved(tmp_path, world):
    weights = build_classifier(TINY, 3, 64).state_dict()
    description = {"architecture": TINY, "classes": list(CLASSES), "image_size": 64, "resize_size": 70,
                   "interpolation": "bicubic", "mean": [0.5] * 3, "std": [0.5] * 3}
    save_model_folder(weights, description, tmp_path)
    assert equal_names(load_model_folder(tmp_path)[0], weights) == set(weights)
    assert equal_names(built(world, model=str(tmp_path), pretrained=True), weights) == set(weights)
    assert json.loads((tmp_path / "config.json").read_text())["architecture"] == TINY
