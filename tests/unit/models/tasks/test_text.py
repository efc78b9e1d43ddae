"""The text tasks against plain transformers: losses, gradients and metrics of the same texts, tokenized separately.

No dropout, so that both compute the same; micro-batches are uneven. Tolerances: another order of sums, other padding.
"""

import csv
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import transformers
from torch.nn import functional as F

from data.loader import BadSamples, MicroBatchDataset
from data.sampler import WINDOW, MicroBatchRequest
from data.texts.tokenizer import load_tokenizer, train_tokenizer
from engine.evaluation import Evaluation
from engine.resolve import resolve_optim
from engine.start import Start
from models.metrics.metric import Totals
from models.objectives import values_of
from models.tasks import load_task
from models.text.padding import find_first_position, find_padding_side, outputs_for_texts, with_mask
from tests.conftest import COUNTS, ROOT
from utils.distributed.agreement import Agreement
from utils.errors import Exit, UserError
from utils.numerics.precision import Precision
from utils.rundir.lock import RunLock
from utils.rundir.run import Run
from utils.settings.command_line import parse_command_line
from utils.settings.config import with_values
from utils.settings.text_options import SIZES
from utils.strategies import load_strategy

TASKS = ("text-classification", "masked-lm")
HEADS = {task: load_task(task).head for task in TASKS}
FAMILIES = ("bert", "distilbert", "roberta")
SHARES = ([0, 56, 21, 30, 7], [41, 3], [17])  # one global batch in micro-batches
GLOBAL_BATCH = [i for share in SHARES for i in share]
NUM_VAL = sum(COUNTS["val"])
COLUMNS = {"one text": ("text",), "a pair": ("text", "more")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, texts):
    """{(family, task): a small model folder}; DistilBERT's tokenizer and RoBERTa's have no token types."""
    tokenizer, found = train_tokenizer([row["text"] for row in rows_of(texts, "train")], 200), {}
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
             "pad_token_id": 0,
             "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
    classes = [f"topic{number}" for number in range(len(COUNTS["train"]))]
    names = {"id2label": dict(enumerate(classes)), "label2id": {name: number for number, name in enumerate(classes)}}
    for family in FAMILIES:
        sizes = {name: value for name,
                 value in small.items() if hasattr(transformers.AutoConfig.for_model(family), name)}
        config = transformers.AutoConfig.for_model(family, vocab_size=len(tokenizer), initializer_range=0.5, **names,
                                                   **sizes)
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"][::1 if family == "bert" else 2]
        for task, head in HEADS.items():
            folder = found[family, task] = tmp_path_factory.mktemp(f"{family}-{task}")
            torch.manual_seed(0)
            head.from_config(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    return found


@pytest.fixture
def build(world, texts, folders, tmp_path, monkeypatch):
    """build(task, *words, family="bert"): a real task in a run of its own, whose auto.json holds `kept`."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))

    def built(task, *words, family="bert", kept=(), device="cpu"):
        folder = folders[family, task]
        argv = ["--task", task, "--data", texts, "--model", folder, "--pretrained", "--max-length", "32", *words]
        path, facts = tmp_path / f"run-{len(list(tmp_path.iterdir()))}", {"start": 1, "cores_per_process": 1}
        run = Run(path, dict(kept), facts, print, RunLock())
        run.path.mkdir()
        return load_task(task)(parse_command_line(list(map(str, argv)), {}), run,
                               replace(world, device=torch.device(device)))

    return built


def rows_of(texts, split):
    with (texts / f"{split}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def batches_of(task, shares=SHARES, epoch=0):
    return [task.collate([task.train_set[epoch, i] for i in share]) for share in shares]


def our_gradients(task, model):
    """The loss of one step, and all gradients, as train_step adds them up.

    Without dropout: the model is in evaluation mode.
    """
    weight = task.normalizer(torch.tensor(GLOBAL_BATCH))
    losses = [task.forward(model, batch).loss_sum / weight for batch in batches_of(task)]
    for loss in losses:
        loss.backward()
    return sum(losses).item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def plain_gradients(task_name, model, inputs, labels):
    """The same from transformers alone, in one batch."""
    plain = HEADS[task_name].from_config(model.config, dtype=torch.float64)
    plain.load_state_dict(model.state_dict())
    loss = plain.eval()(**inputs, labels=labels).loss
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in plain.named_parameters()}


def assert_equal_steps(ours, theirs, tolerance):
    """Losses, and gradients by the distance of all of them together."""
    assert ours[0] == pytest.approx(theirs[0], rel=tolerance) and set(ours[1]) == set(theirs[1])
    ours, theirs = (torch.cat([gradient.double().flatten() for _,
                               gradient in sorted(found.items()) if gradient is not None])
                    for _, found in (ours, theirs))
    assert theirs.norm() > 0.01 and float((ours - theirs).norm() / theirs.norm()) < tolerance


@pytest.mark.rows(2)
@pytest.mark.parametrize("task", HEADS)
@pytest.mark.parametrize("device, kept, multiple", [
    ("cpu", {}, 1), ("cpu", {"pad_to": 8}, 8), ("cuda", {}, 8), ("cuda", {"data": "begun on a CPU", "pad_to": 1}, 1)])
def test_a_run_keeps_the_widths_of_its_batches(task, device, kept, multiple, build):
    """On a CPU as wide as the longest text, on a GPU the next multiple of 8."""
    built = build(task, kept=kept, device=device)
    built.build_model(initial_weights=True)
    longest = max(len(built.train_table.sample(i).ids) for i in SHARES[0])
    width = batches_of(built, SHARES[:1])[0].inputs["input_ids"].shape[1]
    assert width == -(-longest // multiple) * multiple and longest % 8


@pytest.mark.parametrize("task", HEADS)
def test_a_rate_from_scratch_is_that_of_the_page_and_falls_with_width(task, build):
    """A run that has a rate keeps it; a folder without its weights counts by its own width, up to a limit."""
    page = (ROOT / "docs" / "models.md").read_text()
    [rate, width, limit] = map(float, re.search(r"texts (\S+) x (\d+) / width, at most (\S+) \|", page).groups())
    for name, (_, own_width) in SIZES.items():
        found = rate_of(build(task, "--model", name, "--no-pretrained", "--vocab-size", "200"))
        assert found == float(f"{min(limit, rate * width / own_width):.3g}")  # a rate has three digits
    assert rate_of(build(task, "--no-pretrained")) == 1e-3  # 16 wide
    assert rate_of(build(task)) == 5e-5
    assert rate_of(build(task, "--model", "bert-small", "--no-pretrained", kept={"lr": 1e-3})) == 1e-3


def rate_of(task):
    """--lr auto at the default global batch."""
    config = with_values(task._config, {"global_batch_size": task._config.usual["global_batch_size"]})
    task.train_set = range(config.batch.global_batch_size)
    return resolve_optim(SimpleNamespace(config=config, run=task._run, task=task)).lr


def test_class_names_that_nobody_can_tell_apart_are_one(build, tmp_path):
    table = tmp_path / "odd.csv"
    table.write_text("text,label\n" + "".join(f"some words,{name}\n" for name in ("cafe\u0301", "café", "tea") * 4))
    task = build("text-classification", "--data", table, "--eval-only", "--split", "train")
    assert len(task.classes) == 2 and len(list(task.inputs())) == len(task.eval_set)
    assert sum("one class" in note for note in task.notes) == 1


@pytest.mark.parametrize("has_val", [True, False])
def test_samples_that_are_evaluated_have_the_groups_of_their_rows(build, tmp_path, has_val):
    rows = [(f"word{number} words", "xy"[number % 2], f"p{number // 3}", "val" if has_val and number > 30 else "train")
            for number in range(40)]
    (tmp_path / "t.csv").write_text("text,label,writer,split\n" + "".join(f"{','.join(row)}\n" for row in rows))
    task = build("text-classification", "--data", tmp_path / "t.csv", "--group-column", "writer",
                 "--val-fraction", "0.3")
    group_of = {text: group for text, _, group, _ in rows}
    assert [task.groups()[index] for index, _ in task.inputs()] == [group_of[text] for _, text in task.inputs()]
    assert len(set(task.groups())) > 1 and build("text-classification").groups() is None


@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
def test_the_command_for_predict_gives_it_as_many_texts_as_it_takes(build, columns):
    task = build("text-classification", "--text-column", ",".join(columns))
    command = task.next_steps("'my run'", "cat - #")["predict"]
    assert "-m models.predict 'my run' -" in command
    printed = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    assert len(printed.rstrip("\n").split("\t")) == len(columns)


@pytest.mark.rows(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
def test_a_step_of_classification_is_the_mean_over_its_samples(family, columns, build, texts, folders):
    """Of the loss of transformers."""
    task = build("text-classification", "--text-column", ",".join(columns), family=family)
    model = task.build_model(initial_weights=True).double().eval()
    rows = [rows_of(texts, "train")[i] for i in GLOBAL_BATCH]
    inputs = load_tokenizer(str(folders[family, "text-classification"]))(
        *([row[name] for row in rows] for name in columns), truncation=True, max_length=32, padding=True,
        return_tensors="pt")
    theirs = plain_gradients("text-classification", model, inputs,
                             torch.tensor([task.classes.index(row["label"]) for row in rows]))
    assert ("token_type_ids" in inputs) == (family == "bert")
    assert_equal_steps(our_gradients(task, model), theirs, 1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_masked_lm_is_the_mean_over_predicted_tokens(family, build, folders):
    """Of the loss of transformers, which has one text in a row."""
    task = build("masked-lm", family=family)
    model = task.build_model(initial_weights=True).double().eval()
    assert len(batches_of(task)[0].inputs["owners"]) < len(SHARES[0])  # several texts in a row
    samples = [task.train_set[0, i] for i in GLOBAL_BATCH]
    inputs = load_tokenizer(str(folders[family, "masked-lm"])).pad(
        [{"input_ids": sample.text.ids.tolist()} for sample in samples], return_tensors="pt")
    labels = torch.full_like(inputs["input_ids"], -100)
    for row, sample in enumerate(samples):
        labels[row, sample.positions] = torch.from_numpy(sample.targets)
    theirs = plain_gradients("masked-lm", model, inputs, labels)
    assert_equal_steps(our_gradients(task, model), theirs, 1e-6)  # transformers computes this loss in float32


@pytest.mark.parametrize(("kept", "is_grouped"), [
    ({}, False), ({"first_position": 0}, False), ({"first_position": None}, True)])
def test_a_run_keeps_whether_its_texts_are_packed(kept, is_grouped, build):
    task = build("masked-lm", kept=kept)
    task.build_model(initial_weights=True)
    [batch] = batches_of(task, SHARES[:1])
    assert (task.lengths.window == WINDOW) == is_grouped == ("owners" not in batch.inputs)
    assert (len(batch.inputs["input_ids"]) == len(SHARES[0])) == is_grouped


def test_a_run_tries_once_whether_its_encoder_reads_packed_texts(build, folders, tmp_path, monkeypatch, capsys):
    trial = Mock(wraps=find_first_position)
    monkeypatch.setattr("models.tasks.masked_lm.find_first_position", trial)
    (folder := tmp_path / "fnet").mkdir()
    tokenizer = load_tokenizer(str(folders["bert", "masked-lm"]))
    tokenizer.save_pretrained(folder)
    transformers.FNetConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, intermediate_size=32,
                            pad_token_id=0).save_pretrained(folder)  # mixes all tokens of a row
    first = build("masked-lm", "--model", folder, "--no-pretrained")
    first.build_model(initial_weights=True)
    kept = {"first_position": first._run.resolved.first_position}
    build("masked-lm", "--model", folder, "--no-pretrained", kept=kept).build_model(initial_weights=False)
    note = f"{folder} cannot read several texts in a row: batches hold texts of similar lengths"
    assert (capsys.readouterr().out.splitlines().count(note), trial.call_count) == (1, 1)
    assert first.lengths.window == WINDOW and "owners" not in first.example(2).inputs


ALONE = {  # model_type, names of inputs, options
    "bert": (1, {}), "gpt2": (2, {}), "xlnet": (1, {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}),
    "modernbert": (2, {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3})}


def padded_model(build, folders, tmp_path, family, side="right", columns=("text",)):
    """(its folder, a task with it): a model of a family, with a tokenizer that pads on that side."""
    tokenizer = load_tokenizer(str(folders["bert", "text-classification"]))
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"][::ALONE[family][0]]
    tokenizer.init_kwargs |= {"padding_side": side, "model_input_names": tokenizer.model_input_names}
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
             "n_embd": 16, "n_layer": 2, "n_head": 2, "pad_token_id": None if family == "gpt2" else 0}
    config = transformers.AutoConfig.for_model(family)
    names = {number: f"topic{number}" for number in range(len(COUNTS["train"]))}
    config = transformers.AutoConfig.for_model(
        family, vocab_size=len(tokenizer), id2label=names, label2id={name: number for number, name in names.items()},
        **{name: value for name, value in small.items() if hasattr(config, name)} | ALONE[family][1])
    torch.manual_seed(0)
    model = HEADS["text-classification"].from_config(config)
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    model.save_pretrained(tmp_path / family)
    tokenizer.save_pretrained(tmp_path / family)
    return tmp_path / family, build("text-classification", "--model", tmp_path / family, "--text-column",
                                    ",".join(columns))


@pytest.mark.rows(4)
@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", ALONE)
def test_a_text_has_the_outputs_that_transformers_gives_it_alone(
        family, side, columns, build, folders, texts, tmp_path):
    """In a batch of training, of models.predict, and of transformers with RUN/model, whatever side the tokenizer says.

    BERT and GPT-2 count positions from the left, GPT-2 looks for the last token, and XLNet reads the last position.
    """
    folder, task = padded_model(build, folders, tmp_path, family, side, columns)
    model, chosen = task.build_model(initial_weights=True).double().eval(), list(range(0, NUM_VAL, 9))
    (saved := tmp_path / "model").mkdir()
    task.save_model(dict(model.state_dict()), saved)
    rows = [rows_of(texts, "val")[number] for number in task.eval_table.texts[chosen] - task.eval_table.texts.min()]
    rows = [tuple(row[name] for name in columns) for row in rows]
    batch = task.collate([task.eval_set[0, i] for i in chosen])
    tokenizer = load_tokenizer(str(saved))
    with torch.no_grad():
        plain = HEADS["text-classification"].from_pretrained(folder).double().eval()
        own = load_tokenizer(str(folder))
        alone = torch.cat([plain(**own(*row, truncation=True, max_length=32, return_tensors="pt")).logits
                           for row in rows])
        theirs = model(**tokenizer(*map(list, zip(*rows, strict=True)), truncation=True, max_length=32, padding=True,
                                   return_tensors="pt")).logits
        ours = task.forward(model, batch).logits
    assert len({len(task.eval_set[0, i].ids) for i in chosen}) > 3 and alone.std(0).min() > 1e-3
    predicted = outputs_for_texts(model, tokenizer, 32, find_padding_side(model, tokenizer, 32), rows)
    for found in (ours, predicted, theirs):
        torch.testing.assert_close(found.double(), alone, rtol=1e-6, atol=1e-6)
    assert ("token_type_ids" in batch.inputs) == (ALONE[family][0] == 1)


@pytest.mark.parametrize(("kept", "side"), [({}, "left"), ({"padding_side": "right"}, "right")])
def test_a_run_keeps_its_padding(kept, side, build, folders, tmp_path):
    folder, _ = padded_model(build, folders, tmp_path, "xlnet")
    task = build("text-classification", "--model", folder, kept=kept)
    task.build_model(initial_weights=not kept)
    assert task._run.resolved.padding_side == side


def test_an_encoder_that_reads_padding_is_noted_once(build, folders, tmp_path, capsys):
    """FNet has no mask. What was found is kept."""
    folder = tmp_path / "fnet"
    load_tokenizer(str(folders["bert", "text-classification"])).save_pretrained(folder)
    transformers.FNetConfig(vocab_size=200, hidden_size=16, num_hidden_layers=1, intermediate_size=32,
                            pad_token_id=0).save_pretrained(folder)
    words, kept = ("text-classification", "--model", folder, "--no-pretrained"), {}
    for _ in range(2):
        (task := build(*words, kept=kept)).build_model(initial_weights=True)
        kept = {"padding_side": json.loads(json.dumps(task._run.resolved.padding_side))}
    assert capsys.readouterr().out.count(f"{folder} reads padding, too: ") == 1 and kept == {"padding_side": None}


@pytest.mark.parametrize("task_name", TASKS)
def test_a_preview_has_a_text_for_each_sample(task_name, build, folders):
    """Packed or not, without padding."""
    task = build(task_name)
    task.build_model(initial_weights=True)
    tokenizer = load_tokenizer(str(folders["bert", task_name]))
    samples = [task.train_set[0, index] for index in SHARES[0]]
    assert task.preview(batches_of(task, SHARES[:1])[0]) == [
        tokenizer.decode(getattr(sample, "text", sample).ids) for sample in samples]


@pytest.mark.parametrize("task_name", TASKS)
def test_labels_are_smoothed_in_training_and_not_in_evaluation(task_name, build):
    task = build(task_name, "--label-smoothing", "0.1")
    model = task.build_model(initial_weights=True)
    for module in model.modules():
        module.p = 0.0  # of dropout
    for batch in batches_of(task):
        for is_training, smoothing in ((True, 0.1), (False, 0.0)):
            output = task.forward(model.train(is_training), batch)
            expected = F.cross_entropy(output.logits, batch.labels, reduction="sum", label_smoothing=smoothing)
            assert output.loss_sum.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("task_name", TASKS)
def test_padding_and_a_sample_of_weight_0_do_not_change_a_loss(task_name, build):
    task = build(task_name)
    model = task.build_model(initial_weights=True).double().eval()
    short, long = (int(index) for index in (task.lengths.tokens.argmin(), task.lengths.tokens.argmax()))
    [alone], [both] = batches_of(task, [[short]]), batches_of(task, [[short, long]])
    assert both.inputs["input_ids"].shape[1] > alone.inputs["input_ids"].shape[1]
    padded = task.forward(model, replace(both, sample_weight=torch.tensor([1.0, 0.0]))).loss_sum
    assert padded.item() == pytest.approx(task.forward(model, alone).loss_sum.item(), rel=1e-12)


@pytest.mark.parametrize("epoch", [0, 3])
def test_weight_is_the_number_of_predicted_tokens_in_the_batches(epoch, build):
    task = build("masked-lm")
    task.build_model(initial_weights=True)
    batches = batches_of(task, epoch=epoch)
    assert task.normalizer(torch.tensor(GLOBAL_BATCH)) == sum(len(batch.labels) for batch in batches)


def test_weight_is_the_number_of_samples_of_a_classifier(build):
    assert build("text-classification").normalizer(torch.tensor(GLOBAL_BATCH)) == sum(map(len, SHARES))


def test_class_weights_give_torchs_weighted_mean_over_the_global_batch(build):
    task = build("text-classification", "--class-weights", "1,2,4", "--label-smoothing", "0.1")
    model = task.build_model(initial_weights=True).double()
    for module in model.modules():
        module.p = 0.0  # of dropout
    batches = batches_of(task)
    outputs = [task.forward(model.train(), batch) for batch in batches]
    logits, labels = torch.cat([output.logits for output in outputs]), torch.cat([batch.labels for batch in batches])
    expected = F.cross_entropy(logits, labels, torch.tensor([1.0, 2, 4]).double(), label_smoothing=0.1)
    found = sum(output.loss_sum for output in outputs) / task.normalizer(torch.tensor(GLOBAL_BATCH))
    assert found.item() == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.parametrize(("loss", "kind"), [
    ("bce", "multi_label_classification"), ("cross-entropy", "single_label_classification")])
def test_the_model_folder_tells_transformers_about_the_loss(loss, kind, build, tmp_path):
    task = build("text-classification", "--loss", loss)
    task.save_model(task.build_model(initial_weights=True).state_dict(), tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).problem_type == kind


@pytest.mark.parametrize("task_name", TASKS)
def test_a_stand_in_adds_nothing_to_loss_gradients_and_figures(task_name, build, world):
    task = build(task_name)
    model = task.build_model(initial_weights=True).eval()
    samples = MicroBatchDataset(task.train_set, task.collate, workers=0)
    stand_in, real = (samples[MicroBatchRequest(0, number, (5,), is_stand_in=number == 1)] for number in (1, 0))
    output = task.forward(model, stand_in)
    output.loss_sum.backward()
    totals = [Totals(task.metrics, 2, len(task.train_set)) for _ in range(2)]
    with torch.no_grad():
        for figures in totals:
            figures.add(0, task.forward(model, real), real)
        totals[0].add(1, task.forward(model, stand_in), stand_in)
    with_it, without = (figures.values(world) for figures in totals)
    assert output.loss_sum.item() == 0 and not any(weight.grad.any() for weight in model.parameters()
                                                   if weight.grad is not None)
    assert repr(with_it) == repr(without)


@pytest.mark.parametrize("task_name", TASKS)
def test_the_example_is_as_large_as_any_batch(task_name, build):
    """As wide as any batch, with the number of samples asked for."""
    task = build(task_name)
    task.build_model(initial_weights=True)
    shape = task.example(6).inputs["input_ids"].shape
    assert shape == (6, max(batch.inputs["input_ids"].shape[1]
                            for batch in batches_of(task, [[i] for i in range(len(task.train_set))])))
    assert len(task.example(6).sample_weight) == 6


@pytest.mark.rows(1)
@pytest.mark.parametrize("max_length", [32, 500])  # the longest text has fewer than 500 tokens
@pytest.mark.parametrize("task_name", TASKS)
def test_the_example_has_a_mask_that_transformers_does_not_drop(task_name, max_length, build):
    task = build(task_name, "--max-length", max_length)
    task.build_model(initial_weights=True)
    mask = with_mask(task.example(6).inputs)["attention_mask"]
    assert mask.any(-1).all() and (mask.ndim == 4 or not mask.all())


def test_texts_of_one_length_fill_their_rows_and_have_no_mask(build):
    task = build("masked-lm")
    task.build_model(initial_weights=True)
    lengths, counts = task.lengths.tokens.unique(return_counts=True)
    for length in (several := lengths[counts > 1].tolist()):
        alike = (task.lengths.tokens == length).nonzero().flatten().tolist()
        [batch] = batches_of(task, [alike])
        assert set(batch.inputs) == {"input_ids", "token_type_ids", "positions"}
        assert batch.inputs["input_ids"].shape == (len(alike), length)
    assert len(several) > 1


def evaluated(task, world):
    """The figures of an Evaluation over all of val."""
    strategy = load_strategy("ddp")(task.build_model(initial_weights=True), world)
    watchdog = SimpleNamespace(watch=lambda items, *limits: items)
    config = SimpleNamespace(data=SimpleNamespace(workers=0))
    start = Start(config, world, None, task, Precision("fp32", world.device), watchdog)
    return Evaluation(start, strategy, 64, BadSamples("stop", None), Agreement(world)).run()


@pytest.mark.parametrize("task_name", TASKS)
def test_evaluations_give_the_same_digits_with_any_seed(task_name, build, world):
    """Evaluations of the same weights give the same digits under any seed."""
    first, again, other = (repr(evaluated(build(task_name, "--seed", seed), world)) for seed in (0, 0, 1))
    assert first == again == other


def test_evaluation_of_a_classifier_is_that_of_transformers(build, world, texts, folders):
    values, rows = evaluated(build("text-classification", "--text-column", "text,more"), world), rows_of(texts, "val")
    folder = folders["bert", "text-classification"]
    model, tokenizer = HEADS["text-classification"].from_pretrained(folder).eval(), load_tokenizer(str(folder))
    inputs = tokenizer([row["text"] for row in rows], [row["more"] for row in rows], padding=True, return_tensors="pt")
    labels = torch.tensor([model.config.label2id[row["label"]] for row in rows])
    with torch.no_grad():
        theirs = model(**inputs, labels=labels)
    assert values["loss"] == pytest.approx(float(theirs.loss), rel=1e-6) and len(rows) == NUM_VAL
    assert values["top1"] == float((theirs.logits.argmax(1) == labels).double().mean())


def test_perplexity_is_e_to_the_loss_over_all_predicted_tokens(build, world):
    task = build("masked-lm")
    values = evaluated(task, world)
    model = task.build_model(initial_weights=True).eval()
    with torch.no_grad():
        sums = [float(task.forward(model, task.collate([task.eval_set[0, i]])).loss_sum) for i in range(NUM_VAL)]
    mean = sum(sums) / sum(len(task.eval_set[0, i].targets) for i in range(NUM_VAL))
    assert values["loss"] == pytest.approx(mean, rel=1e-6)
    assert values["perplexity"] == pytest.approx(math.exp(values["loss"]), rel=1e-12)


def test_masks_depend_on_the_seed_in_training_alone(build):
    """In evaluation every run has the same masks."""
    def masked(samples):
        return [sample.text.ids.tolist() for sample in samples]

    first, second = (build("masked-lm", "--seed", seed) for seed in (0, 1))
    assert masked(first.eval_set[0, i] for i in range(NUM_VAL)) == masked(second.eval_set[0, i] for i in range(NUM_VAL))
    assert masked(first.train_set[0, i] for i in range(20)) != masked(second.train_set[0, i] for i in range(20))


HEADER = "text,label\n"
GOOD = "one two,x\nthree four,y\n" * 10


@pytest.mark.parametrize(("task_name", "train_text", "val_text", "words", "code", "message"), [
    ("text-classification", HEADER + GOOD + "five,x,y\n", None, (), Exit.BAD_DATA,
     "train.csv line 22: has 3 fields, the header 2"),
    ("masked-lm", HEADER + GOOD + "five,x,y\n", None, (), Exit.BAD_DATA,
     "train.csv line 22: has 3 fields, the header 2"),
    ("text-classification", HEADER + GOOD, HEADER + "five,z\n", (), Exit.BAD_DATA,
     "val.csv line 2: the label z does not occur in train"),
    ("text-classification", HEADER + GOOD, HEADER + '" ",x\n', (), Exit.BAD_DATA,
     "val.csv line 2: text is empty; correct or remove the row"),
    ("text-classification", "text,class\n" + GOOD, None, (), Exit.BAD_DATA,
     "there is no column label; it has text, class"),
    ("text-classification", HEADER + "one,x\n" * 9, None, (), Exit.BAD_DATA, "only one class, x"),
    ("text-classification", HEADER, None, (), Exit.BAD_DATA, "train.csv: there are no texts in it"),
    ("text-classification", HEADER + GOOD, None, ("--eval-only", "--split", "test"), Exit.NO_INPUT,
     "--split test: {root} has no such split; it has"),
    ("masked-lm", HEADER + GOOD, None, ("--text-column", "text,label"), Exit.USAGE,
     "--text-column text,label: --task masked-lm reads one"),
    ("masked-lm", HEADER + GOOD, None, ("--tokenizer", "{root}"), Exit.NO_INPUT, "{root} is not a model folder")])
def test_wrong_input_is_refused_before_there_is_a_model(task_name, train_text, val_text, words, code, message, build,
                                                        tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    for split, text in (("train", train_text), ("val", val_text)):
        if text is not None:
            (root / f"{split}.csv").write_text(text)
    with pytest.raises(UserError, match=re.escape(message.format(root=root))) as error:
        build(task_name, "--data", root, *(word.format(root=root) for word in words))
    assert error.value.code == code


def test_a_tokenizer_without_a_mask_token_is_none_for_masked_lm(build, folders, tmp_path):
    tokenizer = load_tokenizer(str(folders["bert", "masked-lm"]))
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path / "maskless")
    with pytest.raises(UserError, match="a tokenizer with a mask token") as error:
        build("masked-lm", "--tokenizer", tmp_path / "maskless")
    assert error.value.code == Exit.USAGE


@pytest.mark.parametrize("task, folder, words, expected", [
    ("text-classification", "masked-lm", [], True), ("text-classification", "masked-lm", ["--no-pretrained"], False),
    ("text-classification", "text-classification", [], False), ("masked-lm", "masked-lm", [], False)])
def test_a_new_head_on_pretrained_weights_is_known(build, folders, task, folder, words, expected):
    """The third folder has a head for these classes."""
    built = build(task, "--model", folders["bert", folder], *words)
    built.build_model(initial_weights=True)
    assert (built.has_new_head, built.head_lr_factor) == (expected, 1 if task == "masked-lm" else 10)


@pytest.mark.parametrize("columns", ["height,weight", "weight,height"])
def test_targets_in_another_order_keep_their_means(columns, world, folders, tmp_path, monkeypatch):
    """Evaluated as it is, a model predicts the same numbers whatever the order of --label-column."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    folder = shutil.copytree(folders["bert", "text-classification"], tmp_path / "model")
    model = HEADS["text-classification"].from_pretrained(folder, num_labels=2, ignore_mismatched_sizes=True)
    model.config.id2label = {0: "height", 1: "weight"}
    model.config.update({"target_mean": [100.0, 3.0], "target_std": [10.0, 0.5], "problem_type": "regression"})
    model.save_pretrained(folder)
    for split in ("train", "val"):
        (tmp_path / f"{split}.csv").write_text("text,height,weight\n" + "".join(
            f"text {i},{90 + i},{2 + i / 10}\n" for i in range(20)))
    words = ["--task", "text-regression", "--data", tmp_path, "--model", folder, "--label-column", columns]
    run = Run(tmp_path / "run", {}, {"start": 1, "cores_per_process": 1, "is_there": False}, print, None)
    task = load_task("text-regression")(
        parse_command_line([*map(str, words), "--eval-only"], {}), run, world)
    built = task.build_model(initial_weights=True).eval()
    batch = task.collate([task.eval_set[0, 0]])
    [found] = values_of(task.objective.described(), built(**batch.inputs).logits.detach())
    values = dict(zip(task.classes, found, strict=True))
    [expected] = model.eval()(**batch.inputs).logits.double() * torch.tensor([10.0, 0.5]) + torch.tensor([100.0, 3.0])
    assert [values["height"], values["weight"]] == pytest.approx(expected.tolist(), abs=1e-5)
