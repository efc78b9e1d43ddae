"""Networks of models/own.py: what is wrong with them is one message, and all else treats them as any other model."""

import copy
import json
import runpy
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from data.texts.tokenizer import train_tokenizer
from models import trial
from models.blocks import blocks_of
from models.own import IMAGE_MODELS, TEXT_MODELS
from models.tasks import find_model, load_task
from models.text.bert import EncoderSpec, build_encoder, load_classifier, save_model_folder
from models.text.own_classifier import outputs_for_ids
from models.text.padding import find_padding_side
from models.trial import notes_on_outputs
from models.vision.classifier import build_classifier, build_model, load_model_folder, require_known
from models.vision.classifier import save_model_folder as save_image_folder
from utils.errors import Exit, UserError
from utils.settings.image_options import ModelOptions
from utils.settings.option import own_names
from utils.settings.text_options import TextModelOptions

TOKENIZER = train_tokenizer(["the quick brown fox jumps over the lazy dog"], 100)
CLASSES = ("cat", "dog", "eel")
IMAGE_FOLDER = {"architecture": "small-cnn", "image_size": 16, "resize_size": 16, "interpolation": "bilinear",
                "mean": [0.5] * 3, "std": [0.5] * 3, "white_value": 255}


class Flat(nn.Module):
    """One layer; `shape` is what it makes of its output."""

    def __init__(self, num_outputs, shape):
        super().__init__()
        self.layer, self.shape = nn.LazyLinear(num_outputs), shape

    def forward(self, inputs, mask=None):
        return self.shape(self.layer(inputs.flatten(1).float()))


class Positions(nn.Module):
    """16 positions; computes in float32, whatever the type of its weights."""

    def __init__(self, num_outputs, num_tokens):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(num_tokens, 8), nn.Embedding(16, 8)
        self.head = nn.Linear(8, num_outputs)

    def forward(self, input_ids, attention_mask):
        features = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        return self.head((features.float() * attention_mask[:, :, None]).sum(dim=1))


class Fixed(Positions):
    """Takes texts of 16 tokens alone."""

    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids.reshape(-1, 16), attention_mask)


def raising(*sizes):
    raise KeyError("no such layer")


WRONG = {
    "raises": (raising, ["KeyError: 'no such layer'"]),
    "no module": (lambda *sizes: None, ["the function returns None"]),
    "an output more": (lambda outputs, *rest: Flat(outputs + 1, lambda logits: logits), ["[2, 4]", "[2, 3] is needed"]),
    "no batch": (lambda outputs, *rest: Flat(outputs, lambda logits: logits[0]), ["[3]", "[2, 3] is needed"]),
    "a tuple": (lambda outputs, *rest: Flat(outputs, lambda logits: (logits,)), ["gives tuple"])}


def build_text(model="bag-of-words", folder=None, classes=CLASSES, task="text-classification", own_head=False,
               shortest=0, **options):
    """(the network, its config), and what was reported."""
    reports = []
    spec = EncoderSpec(load_task(task).head, TOKENIZER, 16, classes if task == "text-classification" else (), own_head,
                       lambda text, is_head_new: reports.append((text, is_head_new)), shortest)
    options = {"pretrained": folder is not None} | options
    return build_encoder(spec, TextModelOptions(model=str(folder or model), **options), folder and str(folder),
                         folder and str(folder)), reports


def built_image(world, model="small-cnn", classes=CLASSES, **options):
    return build_model(ModelOptions(model=str(model), **options), classes, 16, True, world)[0]


@pytest.fixture
def text_folder(tmp_path):
    """RUN/model of a text run."""
    (model, config), _ = build_text()
    folder = tmp_path / "model"
    folder.mkdir()
    save_model_folder(model.state_dict(), config, {"max_tokens": 16}, TOKENIZER, folder)
    return folder


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_message_that_names_the_file(case, world, monkeypatch):
    function, parts = WRONG[case]
    monkeypatch.setitem(IMAGE_MODELS, "my-net", function)
    monkeypatch.setitem(TEXT_MODELS, "my-net", function)
    for build in (lambda: built_image(world, "my-net"), lambda: build_text("my-net")):
        with pytest.raises(UserError) as error:
            build()
        assert error.value.code == Exit.USAGE
        assert [part for part in ("--model my-net", "models/own.py", *parts) if part not in str(error.value)] == []


class Ending(nn.Module):
    """Takes images, or texts; its outputs go through a function."""

    def __init__(self, num_outputs, num_tokens=9, end=lambda outputs: outputs):
        super().__init__()
        self.embedding, self.head, self.end = nn.Embedding(num_tokens, 3), nn.Linear(3, num_outputs), end

    def forward(self, inputs, mask=None):
        features = inputs.mean(dim=(2, 3)) if mask is None else (self.embedding(inputs) * mask[:, :, None]).mean(dim=1)
        return self.end(self.head(features))


@pytest.mark.parametrize("end, says", [
    (lambda outputs: outputs, ""), (lambda outputs: outputs.softmax(dim=1), "seems to end in a softmax"),
    (torch.sigmoid, ""), (lambda outputs: outputs.log_softmax(dim=1), "")])
def test_a_network_that_ends_in_a_softmax_is_noted(world, monkeypatch, end, says):
    monkeypatch.setitem(IMAGE_MODELS, "my-net", lambda outputs: Ending(outputs, end=end))
    *_, notes = build_model(ModelOptions(model="my-net"), CLASSES, 16, True, world)
    assert [says in note for note in notes] == [True] * bool(says)
    ids = outputs_for_ids(Logits(Ending(3, 50, end)), 50)
    assert [says in note for note in notes_on_outputs("my-net", ids)] == [True] * bool(says)


class Logits(nn.Module):
    """As build_own_classifier gives a network."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.model(input_ids, torch.ones_like(input_ids)))


@pytest.mark.parametrize("norm, is_noted", [
    (lambda: nn.BatchNorm2d(4, track_running_stats=False), True), (lambda: nn.BatchNorm2d(4), False),
    (lambda: nn.GroupNorm(2, 4), False), (lambda: nn.InstanceNorm2d(4), False)])
def test_an_image_network_whose_outputs_depend_on_the_batch_is_noted(world, monkeypatch, norm, is_noted):
    monkeypatch.setitem(IMAGE_MODELS, "my-net", lambda outputs: nn.Sequential(
        nn.Conv2d(3, 4, 3), norm(), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, outputs)))
    *_, notes = build_model(ModelOptions(model="my-net"), CLASSES, 16, True, world)
    assert [("depends on the images beside it" in note) for note in notes] == [True] * is_noted


def test_a_network_that_reads_a_file_that_is_gone_is_told_the_door(world, monkeypatch):
    monkeypatch.setitem(IMAGE_MODELS, "my-net", lambda outputs: torch.load("/gone/weights.pth"))
    with pytest.raises(UserError, match=r"/gone/weights.pth.*give them with --weights FILE instead"):
        built_image(world, "my-net")


def test_the_message_names_the_line_of_the_file(world, monkeypatch):
    with torch.device("cpu"):
        broken = IMAGE_MODELS["small-cnn"](3)
    broken.head = nn.Linear(5, 3)
    monkeypatch.setitem(IMAGE_MODELS, "my-net", lambda num_outputs: broken)
    with pytest.raises(UserError, match=r"shapes cannot be multiplied .* \(models/own\.py line \d+\)"):
        built_image(world, "my-net")


@pytest.mark.parametrize("name, function", [(name, IMAGE_MODELS) for name in IMAGE_MODELS]
                         + [(name, TEXT_MODELS) for name in TEXT_MODELS])
def test_the_last_block_of_an_example_is_its_head(name, function):
    model = function[name](*[3, 50][:1 if function is IMAGE_MODELS else 2])
    *others, head = [list(block.params) for block in blocks_of(model)]
    assert head == ["head.weight", "head.bias"] and len(others) >= 1
    assert {param for block in (*others, head) for param in block} == dict(model.named_parameters()).keys()


def test_published_weights_of_an_own_model_are_refused():
    for refuse in (lambda: require_known("small-cnn", is_pretrained=True), lambda: build_text(pretrained=True)):
        with pytest.raises(UserError, match=r"--pretrained: --model (small-cnn|bag-of-words) is") as error:
            refuse()
        assert error.value.code == Exit.USAGE


def test_texts_begin_from_scratch_without_a_flag():
    assert own_names() == {*IMAGE_MODELS, *TEXT_MODELS}
    assert [TextModelOptions.has_weights(name) for name in ("bag-of-words", "bert-tiny", "org/name")] == [
        False, False, True]


def test_padding_is_tried_in_the_lengths_and_the_type_that_a_network_takes(monkeypatch):
    monkeypatch.setitem(TEXT_MODELS, "my-net", Positions)
    (model, _), _ = build_text("my-net")
    assert find_padding_side(model, TOKENIZER, 16) == "right"


def test_a_network_that_cannot_take_the_shortest_text_is_refused(monkeypatch):
    """Else it trains on longer ones, and fails on the first short one that it is asked about."""
    monkeypatch.setitem(TEXT_MODELS, "my-net", Fixed)
    with pytest.raises(UserError, match=r"fails on an input of \[2, 2\].*the shortest text has 2 tokens"):
        build_text("my-net", shortest=2)


class HeadFirst(nn.Module):
    """Its last layer is assigned first."""

    def __init__(self, num_outputs, num_tokens=None):
        super().__init__()
        self.head, self.stem = nn.Linear(8, num_outputs), nn.Sequential(nn.LazyLinear(8), nn.ReLU())

    def forward(self, inputs, mask=None):
        return self.head(self.stem(inputs.flatten(1).float()))


class Usual(nn.Module):
    """Norms after both convolutions and a shared activation before them; the head's weight alone is used."""

    def __init__(self, num_outputs):
        super().__init__()
        self.act, self.conv1, self.conv2 = nn.PReLU(), nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.norm1, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.scale = torch.jit.script(nn.Conv2d(8, 8, 1))
        self.head = nn.Linear(8, num_outputs)

    def forward(self, images):
        features = self.act(self.norm2(self.conv2(self.act(self.norm1(self.conv1(images))))))
        return nn.functional.linear(self.scale(features).mean((2, 3)), self.head.weight)


@pytest.mark.parametrize("wrapped, head", [(lambda net: net, "stem.0"), (nn.Sequential, "0.stem.0")])
def test_a_network_whose_output_layer_is_not_assigned_last_is_refused(wrapped, head, world, monkeypatch):
    """Its head would be frozen, and kept for other classes."""
    monkeypatch.setitem(IMAGE_MODELS, "my-net", lambda outputs: wrapped(HeadFirst(outputs)))
    monkeypatch.setitem(TEXT_MODELS, "my-net", HeadFirst)
    builds = [lambda: built_image(world, "my-net"), *([lambda: build_text("my-net", shortest=2)] * (head == "stem.0"))]
    for build in builds:
        with pytest.raises(UserError, match=rf"my-net: {head} is the last layer that is assigned, and") as error:
            build()
        assert error.value.code == Exit.USAGE


def test_an_ordinary_network_in_another_order_of_layers_is_taken(world, monkeypatch):
    monkeypatch.setitem(IMAGE_MODELS, "my-net", Usual)
    model = built_image(world, "my-net")
    assert model.training and not any(layer._forward_pre_hooks for layer in (model.conv1, model.head))


def test_a_network_for_texts_is_no_unknown_name_for_images():
    with pytest.raises(UserError, match=r"bag-of-words: models/own\.py has it for texts; give a --task"):
        require_known("bag-of-words")


@pytest.mark.parametrize("text, parts", [("IMAGE_MODELS = {", ["SyntaxError", "line 1"]),
                                         ("\nimport torhc", ["No module named 'torhc'", "models/own.py line 2"])])
def test_an_error_in_the_file_is_one_message_with_its_line(text, parts, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(text)
    monkeypatch.setattr(trial, "FILE", tmp_path / "own.py")
    monkeypatch.setattr(trial, "import_module", lambda name: runpy.run_path(str(trial.FILE)))
    with pytest.raises(UserError) as error:
        load_task("image-classification")
    assert error.value.code == Exit.USAGE
    assert [part for part in ("correct it in models/own.py", *parts) if part not in str(error.value)] == []


@pytest.mark.parametrize("prefix", ["", "module.model."])
def test_a_file_of_weights_lends_the_backbone_to_other_classes(prefix, world, tmp_path):
    weights = {prefix + name: param for name, param in built_image(world, classes=("a", "b")).state_dict().items()}
    torch.save(weights, tmp_path / "weights.pth")
    loaded = built_image(world, weights=str(tmp_path / "weights.pth")).state_dict()
    assert {name for name in loaded if name.startswith("head.")} == {"head.weight", "head.bias"}
    assert all(torch.equal(loaded[name], weights[prefix + name]) for name in loaded if not name.startswith("head."))


def test_further_images_are_further_channels_that_change_nothing_at_first():
    torch.manual_seed(0)
    one = build_classifier("small-cnn", 3, 16).eval()
    torch.manual_seed(0)
    two = build_classifier("small-cnn", 3, 16, num_images=2).eval()
    images = torch.rand(2, 6, 16, 16)
    torch.testing.assert_close(two(images), one(images[:, :3]))


def test_an_image_folder_gives_back_what_was_saved(tmp_path):
    weights = build_classifier("small-cnn", 3, 16).state_dict()
    save_image_folder(weights, IMAGE_FOLDER | {"classes": list(CLASSES)}, tmp_path)
    loaded = load_model_folder(tmp_path)[0].state_dict()
    assert loaded.keys() == weights.keys() and all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_a_network_that_changed_since_it_was_saved_is_named(tmp_path, text_folder, monkeypatch):
    """The message says what differs, and the way out."""
    save_image_folder(build_classifier("small-cnn", 3, 16).state_dict(), IMAGE_FOLDER | {"classes": list(CLASSES)},
                      tmp_path)
    monkeypatch.setitem(IMAGE_MODELS, "small-cnn", lambda outputs: nn.Sequential(nn.Flatten(), nn.LazyLinear(outputs)))
    monkeypatch.setitem(TEXT_MODELS, "bag-of-words", lambda outputs, tokens: Flat(outputs, lambda logits: logits))
    said = []
    for load in (load_model_folder, load_classifier):
        with pytest.raises(UserError) as error:
            load(tmp_path if load is load_model_folder else text_folder)
        said.append(str(error.value))
    assert all(part in said[0] for part in ("Missing key(s)", "the network in models/own.py", "trained with"))


def test_a_file_that_changed_since_the_model_was_saved_is_said(tmp_path, text_folder, monkeypatch, capsys):
    """An activation, say: the weights still fit."""
    (text_folder / "config.json").write_text(json.dumps(
        json.loads((text_folder / "config.json").read_text()) | {"task": "text-classification"}))
    assert find_model(tmp_path) == (text_folder, "text-classification") and capsys.readouterr().err == ""
    monkeypatch.setattr(trial, "SOURCE", "of another file")
    find_model(tmp_path)
    assert "warning: models/own.py changed since" in capsys.readouterr().err


def test_a_text_folder_gives_back_what_was_saved(text_folder):
    loaded, config = load_classifier(text_folder)
    assert tuple(config.id2label.values()) == CLASSES
    (again, _), reports = build_text(folder=text_folder, own_head=True)
    ids = torch.randint(5, 50, (2, 7))
    assert torch.equal(loaded(input_ids=ids).logits, again.eval()(input_ids=ids).logits) and reports == []
    assert json.loads((text_folder / "config.json").read_text())["architecture"] == "bag-of-words"


def test_a_batch_without_padding_has_a_mask_of_ones(text_folder):
    model, _ = load_classifier(text_folder)
    ids = torch.randint(5, 50, (2, 7))
    padded, mask = torch.cat([ids, torch.zeros(2, 3, dtype=torch.int64)], 1), torch.ones(2, 10, dtype=torch.int64)
    mask[:, 7:] = 0
    torch.testing.assert_close(copy.deepcopy(model)(input_ids=padded, attention_mask=mask).logits,
                               model(input_ids=ids).logits)


def test_the_same_classes_in_another_order_keep_their_outputs(text_folder):
    loaded, _ = load_classifier(text_folder)
    (other, _), [(said, is_new)] = build_text(folder=text_folder, classes=("eel", "cat", "dog"))
    assert "its outputs are reordered" in said and not is_new
    assert torch.equal(other.head.weight, loaded.head.weight[[2, 0, 1]])


def test_other_classes_get_a_new_head_on_the_same_embeddings(text_folder):
    loaded, _ = load_classifier(text_folder)
    (other, _), [(said, is_new)] = build_text(folder=text_folder, classes=("ape", "bee", "cow"))
    assert torch.equal(other.embedding.weight, loaded.embedding.weight)
    assert not torch.equal(other.head.weight, loaded.head.weight) and is_new and "head.weight" in said


def test_weights_without_the_head_are_not_evaluated(text_folder):
    weights = load_file(text_folder / "model.safetensors")
    save_file({"embedding.weight": weights["embedding.weight"]}, text_folder / "model.safetensors")
    for load in (lambda: load_classifier(text_folder), lambda: build_text(folder=text_folder, own_head=True)):
        with pytest.raises(UserError, match=r"are not for the head that bag-of-words has in models/own\.py") as error:
            load()
        assert error.value.code == Exit.BAD_DATA


@pytest.mark.parametrize("words, parts", [
    ({"task": "masked-lm"}, ["does not suit this task", "models/own.py"]),
    ({"dropout": 0.1}, ["--dropout", "has no dropout"])])
def test_what_an_own_text_model_cannot_do_is_refused(words, parts):
    with pytest.raises(UserError) as error:
        build_text(**words)
    assert error.value.code == Exit.USAGE and [part for part in parts if part not in str(error.value)] == []
