"""What a model cannot compute in: found by trying, decided once, at the first start."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from data.batch import Batch
from engine import evaluation
from engine.resolve import with_possible_precision
from engine.start import Start
from models.output import Output
from utils.errors import Exit, UserError
from utils.numerics.precision import Precision
from utils.rundir.lock import RunLock
from utils.rundir.run import Run


class Model(nn.Module):
    """Raises in the forwards of `fails`: (precision, whether it is training)."""

    def __init__(self, fails, error=RuntimeError):
        super().__init__()
        self.layers, self.fails, self.error = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), fails, error

    def forward(self, inputs):
        precision = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        if (precision, self.training) in self.fails:
            raise self.error("does not compute")
        return self.layers(inputs)


@pytest.fixture
def decide(world, tmp_path):
    """decide(model, given, name, is_new, trains): the start, the notes, and what the run keeps."""

    def decided(model, given="auto", name="bf16", is_new=True, trains=True):
        notes = []
        run = Run(tmp_path, {"precision": name}, {"start": 1, "cores_per_process": 1}, notes.append, RunLock())
        config = SimpleNamespace(device=SimpleNamespace(precision=given),
                                 model=SimpleNamespace(model="org/name"), run=SimpleNamespace(seed=0))
        task = SimpleNamespace(
            example=lambda size: Batch({"inputs": torch.ones(size, 3)}, torch.zeros(size), torch.ones(size)),
            forward=lambda model, batch: Output(model(**batch.inputs).sum(), None))
        start = Start(config, world, run, task, Precision(name, torch.device("cpu")), None)
        return with_possible_precision(start, model, trains, is_new), notes, run.resolved

    return decided


@pytest.mark.parametrize("is_training", [True, False])
def test_auto_is_fp32_where_the_model_cannot_compute_in_bf16(is_training, decide):
    """Whether it raises in training or in evaluation alone."""
    start, [note], kept = decide(Model({(torch.bfloat16, is_training)}))
    assert start.precision.name == kept.precision == "fp32"
    assert "--precision auto is fp32: --model org/name cannot compute in bf16 (does not compute)" in note


@pytest.mark.parametrize("fails, precision", [((torch.bfloat16, True), "bf16"), ((torch.bfloat16, False), "fp32")])
def test_an_evaluation_alone_tries_no_training(fails, precision, decide):
    start, _, kept = decide(Model({fails}), trains=False)
    assert start.precision.name == kept.precision == precision


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_given_precision_that_the_model_lacks_is_64(name, is_new, decide):
    with pytest.raises(UserError) as error:
        decide(Model({(torch.bfloat16, True), (torch.float16, True)}), name, name, is_new)
    assert error.value.code == Exit.USAGE and f"--precision {name}: --model org/name" in str(error.value)
    assert "use --precision fp32" in str(error.value)


@pytest.mark.parametrize("model, is_new", [
    (Model(()), True), (Model({(torch.bfloat16, True)}), False),
    (Model({(torch.bfloat16, True)}, torch.OutOfMemoryError), True)])
def test_a_run_keeps_bf16_where_it_can_or_has_begun(model, is_new, decide):
    """Memory is another question."""
    start, notes, kept = decide(model, is_new=is_new)
    assert start.precision.name == kept.precision == "bf16" and notes == []


def test_what_a_model_cannot_do_in_any_precision_is_raised(decide):
    with pytest.raises(KeyError):
        decide(Model({(torch.bfloat16, True), (torch.float32, True)}, KeyError))


@pytest.mark.parametrize("fails", [(), {(torch.bfloat16, False)}])
def test_a_try_changes_nothing(fails, decide):
    model = Model(fails)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.default_generator.get_state()
    decide(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(torch.default_generator.get_state(), state)


@pytest.mark.parametrize("device, is_split, is_sharded, tried_on", [
    ("cpu", False, False, ["model"]), ("cpu", True, False, ["model"]), ("meta", False, False, ["model"]),
    ("meta", True, False, ["module"]), ("meta", True, True, [])])
def test_a_split_model_is_tried_once_it_is_on_its_devices(monkeypatch, device, is_split, is_sharded, tried_on):
    """A forward of a sharded one is collective: no rank can try it alone."""
    model, split, tried = nn.Linear(1, 1), nn.Linear(1, 1), []

    class Kind:
        def __init__(self, *arguments):
            self.module = split if is_split else model

    Kind.is_split, Kind.is_sharded = is_split, is_sharded
    start = SimpleNamespace(
        config=SimpleNamespace(device=SimpleNamespace(strategy="some", checkpoint_activations=False),
                               optim=SimpleNamespace(freeze=()), run=SimpleNamespace(seed=0)),
        world=SimpleNamespace(device=torch.device(device)), task=SimpleNamespace(build_model=lambda initial: model))
    monkeypatch.setattr(evaluation, "load_strategy", lambda name: Kind)
    monkeypatch.setattr(evaluation, "with_possible_precision",
                        lambda start, tried_model, *words: tried.append(tried_model) or start)
    evaluation.build_strategy(start, initial_weights=True, trains=False)
    assert [("model" if each is model else "module") for each in tried] == tried_on
