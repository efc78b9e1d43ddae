"""utils/numerics/precision.py: a step whose gradient is not finite changes nothing."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from engine.resolve import resolve_arithmetic
from tests.unit.utils.numerics.test_optimizers import OPTIMIZERS
from utils.numerics.optimizers import build_optimizer
from utils.numerics.precision import Precision
from utils.rundir.resolved import Resolved
from utils.rundir.run import Run
from utils.settings.run_options import DeviceOptions, OptimOptions
from utils.strategies.ddp import DDP

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")
HUGE = 1e4  # an input whose gradient overflows fp16 at the first scale, 65536


class Trainer:
    """One process's steps on a small model, in the order of train.py's loop."""

    def __init__(self, world, precision, optimizer="sgd"):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.strategy = DDP(self.model, world)
        self.optimizer = build_optimizer(self.model, OptimOptions(optimizer=optimizer, lr=0.01))
        self.precision = Precision(precision, CPU)
        self.steps = 0

    def step(self, inputs=1.0, poison=None, max_norm=0.0):
        """Returns whether the gradient was finite."""
        self.steps += 1
        torch.manual_seed(self.steps)
        with self.precision.autocast():
            output = self.model(inputs * torch.randn(5, 4))
        (output.float().square().mean() * self.precision.scale).backward()
        if poison is not None:
            self.model.weight.grad[1, 2] = poison
        self.precision.unscale_(self.optimizer)
        self.norm = self.strategy.clip_grad_norm_(max_norm)
        self.grads = [param.grad.clone() for param in self.model.parameters()]
        is_finite = self.precision.step(self.optimizer, self.norm)
        self.is_usual = bool(self.precision.is_usual(is_finite))
        self.optimizer.zero_grad(set_to_none=True)
        return bool(is_finite)

    def state(self):
        """Params and optimizer state, comparable bit for bit. State of zeros is the same as none: both start a run."""
        params, state = list(self.model.parameters()), self.optimizer.state
        return [param.tolist() for param in params], [
            {name: value.tolist() for name, value in state[param].items() if value.any()} for param in params]


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_a_non_finite_gradient_changes_nothing(world, precision, optimizer, poison, steps_before):
    """Neither params nor optimizer state, for every --optimizer, in the first step and later."""
    trainer = Trainer(world, precision, optimizer)
    for _ in range(steps_before):
        trainer.step()
    before = trainer.state()
    assert (trainer.step(poison=poison), trainer.state()) == (False, before)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_after_a_skipped_one_are_as_without_it(world, precision, optimizer):
    skipped, plain = Trainer(world, precision, optimizer), Trainer(world, precision, optimizer)
    skipped.step(poison=NAN)
    plain.steps = 1
    for trainer in (skipped, plain):
        trainer.step()
        trainer.step()
    assert skipped.state() == plain.state()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_optimizer_that_ignores_found_inf_is_refused(world, precision):
    """RMSprop would apply the NaN: Precision refuses to step it, as NAdam, or torch's Adam without fused=True."""
    trainer = Trainer(world, precision)
    trainer.optimizer = torch.optim.RMSprop(trainer.model.parameters())
    before = trainer.state()
    with pytest.raises(TypeError, match="RMSprop ignores found_inf"):
        trainer.step(poison=NAN)
    with pytest.raises(TypeError, match="RMSprop ignores found_inf"):
        trainer.precision.void_step(trainer.optimizer)  # the warm-up, before the first step
    assert trainer.state() == before


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_finite_gradient_is_applied_and_not_reported(world, precision):
    trainer = Trainer(world, precision)
    before = trainer.state()
    assert (trainer.step(), trainer.is_usual, trainer.state() == before) == (True, True, False)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_that_is_not_finite_is_not_usual(world, precision):
    trainer = Trainer(world, precision)
    assert (trainer.step(poison=NAN), trainer.is_usual) == (False, False)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_void_step_allocates_and_changes_nothing(world, optimizer, steps_before):
    void, plain = Trainer(world, "fp32", optimizer), Trainer(world, "fp32", optimizer)
    for _ in range(steps_before):
        void.step()
        plain.step()
    void.model(torch.randn(5, 4)).square().mean().backward()
    void.precision.void_step(void.optimizer)
    void.optimizer.zero_grad(set_to_none=True)
    assert len(void.optimizer.state) == 2
    assert void.state()[0] == plain.state()[0]
    for trainer in (void, plain):
        trainer.step()
    assert void.state() == plain.state()


# --- fp16


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_overflow_in_fp16_halves_the_scale_and_skips_the_step(world, optimizer, steps_before):
    trainer = Trainer(world, "fp16", optimizer)
    for _ in range(steps_before):
        trainer.step()
    before = trainer.state()
    was_finite = trainer.step(inputs=HUGE)
    assert (was_finite, trainer.precision.scaler.get_scale(), trainer.state()) == (False, 65536 / 2, before)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_after_an_overflow_in_fp16_are_as_without_it(world, optimizer):
    skipped, plain = Trainer(world, "fp16", optimizer), Trainer(world, "fp16", optimizer)
    skipped.step(inputs=HUGE)
    plain.precision.scaler.scale(torch.ones(()))
    plain.precision.scaler.update(65536.0 / 2)  # the same scale: fp16 rounds small gradients by it
    plain.steps = 1
    for trainer in (skipped, plain):
        trainer.step()
        trainer.step()
    assert skipped.state() == plain.state()


def test_in_fp16_a_void_step_is_usual_down_to_a_scale_of_1(world):
    trainer, scales, usual = Trainer(world, "fp16"), [], []
    while all(usual) and len(usual) < 50:
        trainer.step(poison=NAN)
        scales.append(trainer.precision.scaler.get_scale())
        usual.append(trainer.is_usual)
    assert (usual, scales) == ([True] * 16 + [False], [65536 / 2**skips for skips in range(1, 18)])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_undo_restores_the_loss_scale_and_its_growth(world, precision):
    trainer = Trainer(world, precision)
    trainer.step()
    before = trainer.precision.scaler.state_dict()
    trainer.step(poison=NAN)
    trainer.precision.undo()
    assert trainer.precision.scaler.state_dict() == before


def test_the_scale_is_a_power_of_two_with_fp16_and_1_without():
    scales = [Precision(name, CPU).scale.item() for name in ("fp32", "bf16", "fp16")]
    assert scales == [1.0, 1.0, 65536.0]


def test_the_norm_is_measured_and_clipped_after_unscaling(world):
    exact, scaled = Trainer(world, "fp32"), Trainer(world, "fp16")
    for trainer in (exact, scaled):
        trainer.step(max_norm=0.01)
    clipped = [torch.cat([grad.flatten() for grad in trainer.grads]).norm().item() for trainer in (exact, scaled)]
    assert clipped == pytest.approx([0.01, 0.01], rel=1e-4)  # torch divides by norm + 1e-6
    assert scaled.norm.item() == pytest.approx(exact.norm.item(), rel=1e-2)  # fp16 has 11 bits


def test_without_a_maximum_the_gradient_is_not_clipped(world):
    free, clipped = Trainer(world, "fp32"), Trainer(world, "fp32")
    free.step()
    clipped.step(max_norm=1e9)
    assert [grad.tolist() for grad in free.grads] == [grad.tolist() for grad in clipped.grads]


@pytest.mark.parametrize("name, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_forward_computes_in_the_given_precision(name, dtype):
    with Precision(name, CPU).autocast():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype


# --- what a run keeps


@pytest.fixture
def _torch_settings():
    torch.set_float32_matmul_precision("highest")  # on the CPU, too, where another test may have changed it
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    products, convolutions = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    attention = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    yield
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(attention)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = products, convolutions


@pytest.mark.usefixtures("_torch_settings")
@pytest.mark.parametrize("kept, options, threads, name", [
    ({}, DeviceOptions(precision="fp32"), 3, "fp32"),
    ({"threads": 2, "precision": "fp16", "device": "cpu"}, DeviceOptions(), 2, "fp16"),
    ({"threads": 2, "precision": "fp16", "device": "cpu"}, DeviceOptions(threads=1, precision="bf16"), 1, "bf16")])
def test_threads_and_precision_are_those_that_the_run_keeps(world, tmp_path, kept, options, threads, name):
    run = Run(tmp_path, dict(kept), lock=None, note=lambda text: None, facts={"start": 1, "cores_per_process": 3})
    precision = resolve_arithmetic(options, run, world)
    resolved = Resolved.of({"threads": threads, "precision": name, "device": "cpu"})
    assert (torch.get_num_threads(), precision.name, run.resolved) == (threads, name, resolved)


@pytest.mark.usefixtures("_torch_settings")
@pytest.mark.parametrize("strategy, kept, threads", [("ddp", {}, 3), ("exact", {}, 1), ("exact", {"threads": 2}, 2)])
def test_under_exact_auto_is_one_thread_whatever_the_cores(world, tmp_path, strategy, kept, threads):
    run = Run(tmp_path, dict(kept), lock=None, note=print, facts={"start": 1, "cores_per_process": 3})
    resolve_arithmetic(DeviceOptions(precision="fp32", strategy=strategy), run, world)
    assert (torch.get_num_threads(), run.resolved.threads) == (threads, threads)


@pytest.mark.usefixtures("_torch_settings")
@pytest.mark.parametrize("given, cores, expected", [("auto", 1, ["--threads 1"]), ("auto", 4, []), (4, 1, [])])
def test_a_start_with_fewer_cores_for_a_process_names_the_threads_to_give(world, tmp_path, given, cores, expected):
    notes = []
    run = Run(tmp_path, {"threads": 4}, lock=SimpleNamespace(is_held=False), note=notes.append,
              facts={"start": 2, "cores_per_process": cores})
    resolve_arithmetic(DeviceOptions(precision="fp32", threads=given), run, world)
    assert [re.search("--threads [0-9]+", note)[0] for note in notes] == expected


@pytest.mark.usefixtures("_torch_settings")
def test_on_the_cpu_algorithms_are_deterministic_always(world, tmp_path):
    run = Run(tmp_path, {}, lock=None, note=lambda text: None, facts={"start": 1, "cores_per_process": 1})
    resolve_arithmetic(DeviceOptions(), run, world)
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.usefixtures("_torch_settings")
@pytest.mark.parametrize("precision, expected", [("fp32", False), ("bf16", True), ("fp16", True)])
def test_tf32_is_on_for_products_and_convolutions_but_in_fp32(world, tmp_path, precision, expected):
    """By torch's older names and by its newer ones, which torch.compile reads side by side."""
    run = Run(tmp_path, {}, lock=None, note=lambda text: None, facts={"start": 1, "cores_per_process": 1})
    resolve_arithmetic(DeviceOptions(precision=precision), run, world)
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    newer = [cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision]
    assert [cuda.matmul.allow_tf32, cudnn.allow_tf32, *(name == "tf32" for name in newer)] == [expected] * 5
    assert torch.get_float32_matmul_precision() == ("high" if expected else "highest")
    assert {mkldnn.matmul.fp32_precision, mkldnn.conv.fp32_precision} <= {"ieee", "none"}  # the CPU's: float32 always
