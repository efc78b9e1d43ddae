import argparse
import hashlib
import json
import os
import re
from collections import OrderedDict

import pytest
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torchvision.models._api import WeightsEnum

from models.vision.classifier import build_classifier, build_model, load_model_folder, save_model_folder
from utils.errors import Exit, UserError
from utils.settings.image_options import ModelOptions

torch.set_num_threads(1)
FAMILIES = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3",
    "maxvit_t",
    "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_y_400mf", "resnet18", "shufflenet_v2_x0_5",
    "squeezenet1_1", "swin_t",
    "swin_v2_t", "vgg11_bn", "vit_b_16")
SLOW = "efficientnet_v2_s", "maxvit_t", "swin_v2_t"  # to compute with; they begin as others do
QUICK = "mobilenet_v3_small", "resnet18", "squeezenet1_1"  # the others in make test
EACH = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
COMPUTED = [name for name, family in zip(EACH, FAMILIES, strict=True) if family not in SLOW]
CLASSES = ("cat", "dog", "eel")
DESCRIPTION = {"architecture": "squeezenet1_1", "image_size": 32, "resize_size": 32, "interpolation": "bilinear",
               "mean": [0.5] * 3, "std": [0.2] * 3}


def weights_of(name: str, num_classes: int, **options) -> dict[str, torch.Tensor]:
    """Those of torchvision's own model; fresh at every call."""
    return torchvision.models.get_model(name, num_classes=num_classes, **options).state_dict()


def equal_names(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> set[str]:
    """Names of the tensors that are equal bit for bit."""
    own = model.state_dict()
    return {name for name in own if name in weights and own[name].shape == weights[name].shape
            and torch.equal(own[name], weights[name])}


def built(world, classes=CLASSES, **options):
    return built_with_notes(world, classes, **options)[0]


def built_with_notes(world, classes=CLASSES, own_head=False, **options):
    model, architecture, has_new_head, notes = build_model(
        ModelOptions(**options), classes, 224, True, world, own_head)
    assert has_new_head == any("new weights in the head" in note for note in notes)
    return model, architecture, notes


@pytest.fixture
def model_folder(tmp_path):
    """A squeezenet for CLASSES, and its weights."""
    weights, folder = weights_of("squeezenet1_1", 3), tmp_path / "model"
    folder.mkdir()
    save_model_folder(weights, DESCRIPTION | {"classes": list(CLASSES)}, folder)
    return folder, weights


def test_unknown_name_is_refused_with_close_ones(world):
    with pytest.raises(UserError, match=r"resnet81: .* did you mean resnet18") as error:
        built(world, model="resnet81")
    assert error.value.code == Exit.USAGE


@pytest.mark.parametrize("name", EACH)
def test_new_head_is_all_that_depends_on_the_number_of_classes(name):
    with torch.device("cpu" if name.startswith("regnet") else "meta"):  # RegNets cannot be built on meta
        small, large = build_classifier(name, 3), build_classifier(name, 4)
    head = [key for key, _ in small.named_parameters()][-1].rpartition(".")[0]
    shapes = {key: weight.shape for key, weight in large.state_dict().items()}
    differ = {key for key, weight in small.state_dict().items() if weight.shape != shapes[key]}
    assert differ == {key for key in shapes if key.startswith(f"{head}.")}


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", COMPUTED)
def test_further_images_change_nothing_while_their_weights_are_0(name):
    side = {"inception_v3": 75, "vit_b_16": 32}.get(name, 64)
    torch.manual_seed(0)
    two = build_classifier(name, 3, side, num_images=2).double().eval()
    torch.nn.init.normal_([*two.parameters()][-2])  # of the head, which some models begin at 0
    one = build_classifier(name, 3, side).double().eval()
    one.load_state_dict({key: weight if weight.shape == one.state_dict()[key].shape else weight[:, :3]
                         for key, weight in two.state_dict().items()})
    photo, *masks = torch.rand(3, 1, 3, side, side, dtype=torch.float64)
    with torch.no_grad():
        expected = one(photo)
        found = [two(torch.cat([photo, mask], dim=1)) for mask in masks]
    assert torch.equal(*found) and not torch.equal(one(masks[0]), expected)
    assert found[0].tolist()[0] == pytest.approx(expected.tolist()[0], rel=1e-6)  # longer sums, in another order


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_weights_of_other_classes_keep_the_backbone_and_get_a_new_head(ending, world, tmp_path):
    weights, file = weights_of("squeezenet1_1", 5), tmp_path / f"weights{ending}"
    (torch.save if ending == ".pth" else save_file)(weights, file)
    model = built(world, model="squeezenet1_1", weights=str(file))
    assert set(weights) - equal_names(model, weights) == {"classifier.1.weight", "classifier.1.bias"}
    assert model.classifier[1].weight.shape[0] == 3


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "efficientnet_b0", "squeezenet1_1"])
def test_a_new_head_on_old_weights_starts_near_0(name, world, tmp_path):
    torch.save(weights_of(name, 5), tmp_path / "weights.pth")
    model = built(world, model=name, weights=str(tmp_path / "weights.pth"))
    weight, bias = [param for key, param in model.named_parameters() if key.startswith("classifier.")][-2:]
    assert weight.shape[0] == len(CLASSES) and 0.008 < weight.std() < 0.012 and not bias.any()


def under(prefix, weights):
    return {f"{prefix}{name}": weight for name, weight in weights.items()}


PREFIXES = ("", "module.", "_orig_mod.", "model.", "net.", "backbone.", "encoder.", "student.", "teacher.",
            "module.module.", "_orig_mod.module.", "module._orig_mod.", "model._orig_mod.net.", "learner.0.")


@pytest.mark.rows(4)
@pytest.mark.parametrize("wrapped", [
    *(lambda weights, prefix=prefix: under(prefix, weights) for prefix in PREFIXES),
    lambda weights: {"model": weights, "epoch": 3}, lambda weights: {"model_ema": under("module.", weights)},
    lambda weights: {"state_dict": under("module.", weights), "optimizer": {"state": {0: {"step": torch.ones(())}}}},
    lambda weights: {"model": {"state_dict": under("module.", weights)}}, lambda weights: {"ema": weights},
    lambda weights: {"state_dict": weights, "args": argparse.Namespace(lr=0.1)},
    lambda weights: {name.replace("0.", "0._orig_mod.", 1): weight for name, weight in weights.items()},
    lambda weights: {name: weight.half() for name, weight in weights.items()}])
def test_weights_with_the_same_classes_are_loaded_whole(wrapped, world, tmp_path):
    """Also from a checkpoint, and of a wrapper of any name, and in half precision."""
    weights = {name: weight.half().float() for name, weight in weights_of("squeezenet1_1", 3).items()}
    torch.save(wrapped(weights), tmp_path / "weights.pth")
    model, _, [note] = built_with_notes(world, model="squeezenet1_1", weights=str(tmp_path / "weights.pth"))
    assert equal_names(model, weights) == set(weights) and "cat, dog, eel" in note


@pytest.mark.parametrize("wrapped, used, unused", [
    (lambda ours, other: {"state_dict": ours, "state_dict_ema": other}, "state_dict.*", "state_dict_ema.features.0"),
    (lambda ours, other: {"ema": other, "model": ours}, "model.*", "ema.features.0"),
    (lambda ours, other: {"model_ema": {"n_averaged": torch.ones(()), **under("module.", other)}, "model": ours},
     "model.*", "n_averaged"),
    (lambda ours, other: {**under("teacher.", other), **under("student.", ours)}, "student.*", "teacher.features.0"),
    (lambda ours, other: {"state_dict": {**under("model.", ours), "loss.weight": torch.ones(3)}},
     "state_dict.model.*", "state_dict.loss.weight")])
def test_what_of_a_file_is_used_and_what_is_not_is_said(wrapped, used, unused, world, tmp_path):
    ours, other = weights_of("squeezenet1_1", 3), weights_of("squeezenet1_1", 3)
    torch.save(wrapped(ours, other), tmp_path / "weights.pth")
    model, _, notes = built_with_notes(world, model="squeezenet1_1", weights=str(tmp_path / "weights.pth"))
    assert equal_names(model, ours) == set(ours)
    assert used in notes[0] and unused in notes[0]


@pytest.mark.parametrize("change, names", [
    (lambda weights: weights | {"loss.weight": torch.ones(3)}, "unknown: loss.weight"),
    (lambda weights: {name: weight for name, weight in weights.items() if name != "features.0.bias"},
     "missing: features.0.bias"),
    (lambda weights: weights | {"features.0.bias": torch.ones(3)}, "of another shape: features.0.bias")])
def test_tensors_that_do_not_fit_are_named(change, names, world, tmp_path):
    torch.save(change(weights_of("squeezenet1_1", 3)), tmp_path / "weights.pth")
    with pytest.raises(UserError, match=f"{names}; .*same architecture"):
        built(world, model="squeezenet1_1", weights=str(tmp_path / "weights.pth"))


@pytest.mark.parametrize("head", [{}, {"classifier.1.weight": torch.ones(3, 512, 1, 1)},
                                  {"classifier.1.0.weight": torch.ones(3, 512), "classifier.1.0.bias": torch.ones(3)}])
def test_weights_without_a_head_that_fits_get_a_new_one_and_it_is_said(head, world, tmp_path):
    weights = dict(list(weights_of("squeezenet1_1", 3).items())[:-2])
    torch.save(weights | head, tmp_path / "weights.pth")
    model, _, [note] = built_with_notes(world, model="squeezenet1_1", weights=str(tmp_path / "weights.pth"))
    assert equal_names(model, weights) == set(weights)
    assert "new weights in the head: classifier.1.weight, classifier.1.bias" in note


def test_model_folder_of_the_same_classes_is_loaded_whole(world, model_folder):
    folder, weights = model_folder
    assert equal_names(built(world, model=str(folder), pretrained=True), weights) == set(weights)
    assert equal_names(load_model_folder(folder)[0], weights) == set(weights)


def test_model_folder_without_pretrained_lends_its_architecture_only(world, model_folder):
    folder, weights = model_folder
    model = built(world, model=str(folder))
    assert set(model.state_dict()) == set(weights) and "features.0.weight" not in equal_names(model, weights)


@pytest.mark.parametrize("classes", [("cat", "dog", "emu"), ("cat", "dog")])
def test_model_folder_of_other_classes_gets_a_new_head_and_it_is_said(classes, world, model_folder):
    folder, weights = model_folder
    model, _, [note] = built_with_notes(world, classes, model=str(folder), pretrained=True)
    equal = equal_names(model, weights)
    assert "classifier.1.weight" not in equal and equal >= {name for name in weights if name.startswith("features.")}
    assert "cat, dog, eel" in note and "new weights in the head: classifier.1.weight, classifier.1.bias" in note


@pytest.mark.parametrize("own_head", [False, True])
@pytest.mark.parametrize("classes, order", [(("eel", "cat", "dog"), [2, 0, 1]), (("Dog", "EEL", "cat"), [1, 2, 0])])
def test_the_head_of_the_same_classes_in_another_order_is_reordered(classes, order, own_head, world, model_folder):
    """In training and with --eval-only; weight and bias."""
    folder, weights = model_folder
    model, _, [note] = built_with_notes(world, classes, own_head, model=str(folder), pretrained=True)
    ordered = {name: weight[order] if name.startswith("classifier.") else weight for name, weight in weights.items()}
    assert equal_names(model, ordered) == set(weights) and "another order" in note


def test_weights_of_another_architecture_are_refused(world, tmp_path):
    torch.save(weights_of("resnet18", 3), tmp_path / "weights.pth")
    for name in ("squeezenet1_1", "resnet34"):
        with pytest.raises(UserError, match="same architecture") as error:
            built(world, model=name, weights=str(tmp_path / "weights.pth"))
        assert error.value.code == Exit.USAGE


@pytest.mark.parametrize("content", [None, b"", b"<html>404</html>", [1, 2]])
def test_missing_file_of_weights_is_66_and_an_unreadable_one_65(content, world, tmp_path):
    file = tmp_path / "weights.pth"
    if isinstance(content, list):
        torch.save(content, file)
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"--weights: .*weights\.pth") as error:
        built(world, model="squeezenet1_1", weights=str(file))
    assert error.value.code == (Exit.NO_INPUT if content is None else Exit.BAD_DATA)


class Runs:
    """A pickle of it makes `marker` when it is read without care."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (open, (str(self.marker), "w"))


@pytest.fixture
def library(tmp_path, monkeypatch):
    """library(content): torchvision's weights are this file, not downloaded yet; returns it, and where it is cached."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))

    def publish(content):
        torch.save(content, file := tmp_path / "published.pth")
        file = file.rename(tmp_path / f"weights-{hashlib.sha256(file.read_bytes()).hexdigest()[:8]}.pth")
        monkeypatch.setattr(WeightsEnum, "url", file.as_uri())
        return file, tmp_path / "torch/hub/checkpoints" / file.name

    return publish


@pytest.mark.parametrize("own_head", [False, True])
@pytest.mark.parametrize("num_classes, is_file, is_by_number", [
    (12, False, True), (1000, True, True), (12, True, False)])
def test_classes_named_by_numbers_are_these_outputs(num_classes, is_file, is_by_number, own_head, library, world):
    """Folders are sorted as words, as the trainers of other files may have done it; published weights count."""
    weights = weights_of("squeezenet1_1", num_classes)
    published, _ = library(weights)
    classes = tuple(sorted(map(str, range(num_classes))))
    options = {"weights": str(published)} if is_file else {"pretrained": True}
    model, _, notes = built_with_notes(world, classes, own_head, model="squeezenet1_1", **options)
    order = [*map(int, classes)] if is_by_number else [*range(num_classes)]
    assert torch.equal(model.state_dict()["classifier.1.weight"], weights["classifier.1.weight"][order])
    assert any(("0, 1, 2, 3" if is_by_number else "0, 1, 10, 11, 2") in note for note in notes)


def test_pretrained_is_downloaded_once_and_then_read_from_the_cache(library, world):
    weights = weights_of("squeezenet1_1", 1000)
    published, cached = library(weights)
    for _ in range(2):
        model = built(world, model="squeezenet1_1", pretrained=True)
        assert equal_names(model, weights) == set(list(weights)[:-2])  # the last two are the head's
        published.unlink(missing_ok=True)
    assert os.listdir(cached.parent) == [cached.name]


@pytest.mark.parametrize("content", [None, b"half a file"])
def test_pretrained_that_cannot_be_fetched_is_66_and_leaves_nothing(content, library, world):
    published, cached = library(weights_of("squeezenet1_1", 3))
    published.unlink() if content is None else published.write_bytes(content)
    with pytest.raises(UserError, match=f"--pretrained: cannot fetch {published.as_uri()} .* --weights FILE") as error:
        built(world, model="squeezenet1_1", pretrained=True)
    assert error.value.code == Exit.NO_INPUT and os.listdir(cached.parent) == []


@pytest.mark.parametrize("is_published", [False, True])
def test_code_in_a_cached_file_of_weights_is_not_run(is_published, library, world, tmp_path):
    """Planted in the cache, or published by the library itself."""
    _, cached = library(Runs(tmp_path / "was-run") if is_published else weights_of("squeezenet1_1", 1000))
    if not is_published:
        cached.parent.mkdir(parents=True)
        torch.save(Runs(tmp_path / "was-run"), cached)
    with pytest.raises(UserError, match=f"--pretrained: {cached} ") as error:
        built(world, model="squeezenet1_1", pretrained=True)
    assert error.value.code == Exit.BAD_DATA and "\n" not in str(error.value) and not (tmp_path / "was-run").exists()


def without_counters(key: str) -> str:
    return "" if key.endswith("num_batches_tracked") else key


def as_densenet_was(key: str) -> str:
    return re.sub(r"(denselayer\d+\.(?:norm|conv))([12])", r"\1.\2", without_counters(key))


def as_vit_was(key: str) -> str:
    return key.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2.")


@pytest.mark.rows(1)
@pytest.mark.parametrize(("name", "former"), [
    ("mnasnet0_5", str), ("resnet18", without_counters), ("densenet121", as_densenet_was),
    pytest.param("vit_b_16", as_vit_was, marks=pytest.mark.long)])
def test_pretrained_takes_the_librarys_files_with_their_former_names(name, former, world, library):
    with torch.device("meta"):
        weights = {key: torch.full(weight.shape, 3, dtype=weight.dtype, device="cpu") for key,
                   weight in weights_of(name, 1000).items()}
    file = {former(key): weight for key, weight in weights.items() if former(key)}
    library(file)
    model = built(world, model=name, pretrained=True)
    # the last two are the head's
    assert equal_names(model, weights) == {key for key in list(weights)[:-2] if former(key)}


@pytest.mark.parametrize("name", ["googlenet", pytest.param("inception_v3", marks=pytest.mark.long)])
def test_auxiliary_heads_are_left_out(name, world, tmp_path):
    """The library's weights still load."""
    weights = weights_of(name, 5, aux_logits=True, init_weights=False)
    torch.save(weights, tmp_path / "weights.pth")
    model = built(world, model=name, weights=str(tmp_path / "weights.pth"))
    assert not [key for key in model.state_dict() if "aux" in key.lower()]
    assert set(model.state_dict()) - equal_names(model, weights) == {"fc.weight", "fc.bias"}
    assert any("aux" in key.lower() for key in weights)
    side = 75 if name == "inception_v3" else 32
    assert model(torch.zeros(2, 3, side, side)).shape == (2, 3)


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", ["mnasnet0_5", "googlenet", "shufflenet_v2_x0_5"])
def test_model_folder_gives_back_what_was_saved(name, tmp_path):
    model = build_classifier(name, 3)
    save_model_folder(model.state_dict(), DESCRIPTION | {"architecture": name, "classes": list(CLASSES)}, tmp_path)
    loaded, description = load_model_folder(tmp_path)
    assert not loaded.training and description["classes"] == list(CLASSES)
    assert equal_names(loaded, model.state_dict()) == set(model.state_dict())


def test_plain_torchvision_loads_mnasnet_as_the_docs_say(tmp_path):
    save_model_folder(weights_of("mnasnet0_5", 3), DESCRIPTION, tmp_path)
    weights = OrderedDict(load_file(tmp_path / "model.safetensors"))
    model = torchvision.models.mnasnet0_5(num_classes=3)
    with pytest.raises(ValueError, match="version"):
        model.load_state_dict(weights)
    weights._metadata = {"": {"version": 2}}
    model.load_state_dict(weights)
    assert equal_names(model, weights) == set(weights)


def test_same_weights_are_the_same_bytes_and_plain_json_describes_them(tmp_path):
    weights = weights_of("squeezenet1_1", 3)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_model_folder(dict(reversed(weights.items())) if name == "b" else weights, DESCRIPTION, tmp_path / name)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert json.loads((tmp_path / "a/config.json").read_text()) == DESCRIPTION


def own_head(world, classes, **options):
    """As --eval-only builds it where there is no run."""
    return built(world, classes, own_head=True, pretrained=True, **options)


def test_weights_evaluated_as_they_are_keep_their_head(world, model_folder):
    folder, weights = model_folder
    assert equal_names(own_head(world, CLASSES, model=str(folder)), weights) == set(weights)


@pytest.mark.parametrize("classes", [("cat", "dog"), ("cat", "dog", "fox")])
def test_weights_evaluated_as_they_are_on_other_classes_are_65(world, model_folder, classes):
    folder, _ = model_folder
    with pytest.raises(UserError, match=f"are for cat, dog, eel, and --data has {', '.join(classes)};") as error:
        own_head(world, classes, model=str(folder))
    assert error.value.code == Exit.BAD_DATA


def test_a_file_of_weights_for_more_classes_is_65_with_their_number(world, tmp_path):
    save_file(weights_of("squeezenet1_1", 7), tmp_path / "seven.safetensors")
    with pytest.raises(UserError, match=r"are for 7 classes, and --data has cat, dog, eel;") as error:
        own_head(world, CLASSES, model="squeezenet1_1", weights=str(tmp_path / "seven.safetensors"))
    assert error.value.code == Exit.BAD_DATA
