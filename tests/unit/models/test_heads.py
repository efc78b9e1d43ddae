"""Heads of encoders on weights that lack them, or have them for other classes: of every architecture.

What is new is written, what is known to be good is kept, and either is reported.
"""

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from data.texts.tokenizer import train_tokenizer
from models.tasks import load_task
from models.text.bert import EncoderSpec, build_encoder
from tests.harness.encoders import ARCHITECTURES, WITHOUT_MASKED_LM, configured, write_encoder
from utils.settings.text_options import TextModelOptions

TOKENIZER = train_tokenizer(["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"],
                            120)
CLASSES = ("cat", "dog", "eel")
HEADS = {task: load_task(task).head for task in ("text-classification", "masked-lm")}
MARK = 7e7  # no weight is as large
# those whose heads are made in ways of their own; the others in make test
FEW = ("bert", "distilbert", "roberta", "deberta-v2", "electra", "modernbert", "gpt2", "t5")
ALL = [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in ARCHITECTURES]


def build(folder, task="text-classification", classes=CLASSES, pretrained=True):
    """The model, and what was reported."""
    reports = []
    spec = EncoderSpec(HEADS[task], TOKENIZER, 32, classes if task == "text-classification" else (),
                       report=lambda text, is_head_new: reports.append((text, is_head_new)))
    model, _ = build_encoder(spec, TextModelOptions(model=str(folder), pretrained=pretrained), str(folder),
                             str(folder) if pretrained else None)
    return model.eval(), reports


class MarkedMemory(TorchFunctionMode):
    """Within it, new memory holds MARK until it is written."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.empty, torch.empty_like) and result.is_floating_point() and result.device.type == "cpu":
            result.fill_(MARK)
        return result


def named(id2label=CLASSES):
    return {"id2label": dict(enumerate(id2label)), "label2id": {name: number for number, name in enumerate(id2label)}}


@pytest.mark.rows(7)
@pytest.mark.parametrize("pretrained", [True, False])
@pytest.mark.parametrize("task", HEADS)
@pytest.mark.parametrize("name", ALL)
def test_every_weight_of_a_new_head_is_written(name, task, pretrained, tmp_path):
    """transformers leaves some as the memory was: other losses in each process, up to infinity."""
    if task == "masked-lm" and name in WITHOUT_MASKED_LM:
        pytest.skip("it has no such head")
    write_encoder(tmp_path, name, transformers.AutoModel, TOKENIZER)
    with MarkedMemory():
        model, reports = build(tmp_path, task, pretrained=pretrained)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert [key for key, tensor in tensors if tensor.is_floating_point() and (tensor == MARK).any()] == []
    assert all(text.startswith("new weights in the head: ") for text, _ in reports)
    assert [is_new for _, is_new in reports] == [task == "text-classification"] * len(reports)


@pytest.mark.parametrize("name", ALL)
def test_a_head_for_the_same_classes_in_another_order_is_kept(name, tmp_path):
    write_encoder(tmp_path, name, HEADS["text-classification"], TOKENIZER, **named())
    ids = torch.tensor([[2, 7, 8, 9, 11, 3]])
    plain, _ = build(tmp_path)
    turned, reports = build(tmp_path, classes=tuple(name.upper() for name in CLASSES[::-1]))
    torch.manual_seed(0)  # some architectures sample
    expected = plain(input_ids=ids).logits.flip(1)
    torch.manual_seed(0)
    assert torch.equal(turned(input_ids=ids).logits, expected)
    [(text, is_new)] = reports
    assert "in another order" in text and not is_new
    assert build(tmp_path)[1] == []  # nothing is new, nothing changed places


@pytest.mark.parametrize("name", ALL)
def test_a_head_for_as_many_other_classes_is_new(name, tmp_path):
    write_encoder(tmp_path, name, HEADS["text-classification"], TOKENIZER, **named())
    model, [(text, is_new)] = build(tmp_path, classes=("cat", "dog", "emu"))
    theirs = load_file(tmp_path / "model.safetensors")
    new = [key for key, param in model.named_parameters()
           if key.endswith("weight") and not torch.equal(param, theirs.get(key, param))]
    assert len(new) == 1 and is_new and f"{new[0].removesuffix('.weight')} (3 x " in text


@pytest.mark.parametrize("labels, classes, is_kept", [
    (["0", "1"], ("0", "1"), True), (["1", "0"], ("0", "1"), False), (["LABEL_0", "LABEL_1"], ("neg", "pos"), False),
    (["Pos", "Neg"], ("neg", "pos"), True), (["a", "A"], ("A", "a"), True), (["a", "b"], ("a", "c"), False)])
def test_numbers_say_nothing_about_the_order_of_classes(labels, classes, is_kept, tmp_path):
    write_encoder(tmp_path, "bert", HEADS["text-classification"], TOKENIZER, **named(labels))
    model, _ = build(tmp_path, classes=classes)
    theirs = load_file(tmp_path / "model.safetensors")["classifier.weight"]
    assert torch.equal(model.classifier.weight.sort(dim=0)[0], theirs.sort(dim=0)[0]) == is_kept


def test_only_the_last_layer_is_reordered_where_others_have_its_width(tmp_path):
    """RoBERTa's head has a square matrix before the one with an output for each class."""
    classes = tuple(f"class {number}" for number in range(10, 42))
    write_encoder(tmp_path, "roberta", HEADS["text-classification"], TOKENIZER, **named(classes))
    model, _ = build(tmp_path, classes=classes[::-1])
    theirs = load_file(tmp_path / "model.safetensors")
    assert torch.equal(model.classifier.dense.weight, theirs["classifier.dense.weight"])
    assert torch.equal(model.classifier.out_proj.weight, theirs["classifier.out_proj.weight"].flip(0))


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2"])
def test_a_decoder_without_a_pad_token_takes_the_tokenizers(name, tmp_path):
    """It looks for the last token before the padding."""
    write_encoder(tmp_path, name, transformers.AutoModel, TOKENIZER, pad_token_id=None)
    model, _ = build(tmp_path)
    assert configured(name, TOKENIZER, pad_token_id=None).pad_token_id is None
    assert model.config.pad_token_id == TOKENIZER.pad_token_id
    pad, texts = TOKENIZER.pad_token_id, [[7, 8, 9, 11], [7, 8]]
    padded = torch.tensor([texts[0], texts[1] + [pad, pad]])
    both = model(input_ids=padded, attention_mask=(padded != pad).long()).logits
    alone = torch.cat([model(input_ids=torch.tensor([ids])).logits for ids in texts])
    torch.testing.assert_close(both, alone, rtol=0, atol=1e-6)  # sums over other shapes
