"""What the bits of a run depend on: device, threads, dropout, determinism, precision; kept from its first start."""

import socket
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from engine.attempts import Attempts
from engine.start import Start
from utils.distributed.world import World
from utils.errors import UserError, first_line, is_out_of_memory, some
from utils.hardware import vendor
from utils.hardware.compiling import require_compiler
from utils.numerics.kernels import replace_kernels
from utils.numerics.precision import Precision, hardware_precision
from utils.numerics.seed import seeded
from utils.rundir.run import Run
from utils.settings.run_options import DeviceOptions
from utils.strategies import load_strategy, require_possible


def resolve_arithmetic(config: DeviceOptions, run: Run, world: World) -> Precision:
    """Set the arithmetic of this process as the run keeps it. Collective."""
    # device and threads; on the CPU sums depend on the number of threads
    require_possible(config, world)
    if config.compile:
        world.everywhere(partial(require_compiler, world.device.type))  # Collective.
    is_new = "device" not in run.kept
    is_fast = run.kept.setdefault("fast_dropout", is_new)  # this and the next: not if an earlier version began the run
    has_fast_convolutions = run.kept.setdefault("fast_convolutions", is_new)
    run.kept.setdefault("undecayed_tables", is_new)  # see models.blocks.undecayed
    run.resolve("device", config.device, lambda: world.device.type)
    is_single = world.device.type == "cpu" and load_strategy(config.strategy).is_invariant
    torch.set_num_threads(run.resolve("threads", config.threads, lambda: 1 if is_single else run.cores_per_process))

    # determinism
    if world.device.type == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
    elif config.deterministic:
        torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time
    vendor.set_determinism(config.deterministic)

    # precision
    precision = _resolve_precision(config, run, world)  # Collective.
    vendor.set_tf32(precision != "fp32")

    # kernels on the CPU
    if is_fast:
        replace_kernels(has_fast_convolutions)
        vendor.allow_16_bit_attention(world.device.type == "cpu" and precision == "bf16")
    return Precision(precision, world.device)


def with_possible_precision(start: Start, model: nn.Module, trains: bool, is_new: bool) -> Start:
    """`start`, in fp32 if `--precision auto` chose what the model cannot compute in. Collective.

    model: before a strategy takes it. One that is sharded onto accelerators is on none as a whole, and is not tried.
    trains: else its evaluation alone is tried. is_new: the weights are initial ones; a run that has begun keeps its
    precision. Some models write numbers or types into their arithmetic that bf16 does not have. Raises UserError (64)
    for a precision that was given.
    """
    config, run, world, name = start.config.device, start.run, start.world, start.precision.name
    is_here = next(model.parameters()).device.type == world.device.type
    if name == "fp32" or not is_here or not (is_new or config.precision != "auto"):
        return start
    found = world.everywhere(partial(_reason_against, start, model, trains), takes_long=True)  # Collective.
    reason = next(filter(None, world.gather(found)), "")  # Collective.
    if not reason:
        return start
    words = f"--model {start.config.model.model} cannot compute in {name} ({reason})"
    if config.precision != "auto":
        raise UserError(f"--precision {name}: {words}; use --precision fp32")
    run.note(f"--precision auto is fp32: {words}")
    run.kept["precision"] = "fp32"
    vendor.set_tf32(False)
    vendor.allow_16_bit_attention(False)
    return replace(start, precision=Precision("fp32", world.device))


def _reason_against(start: Start, model: nn.Module, trains: bool) -> str:
    """Why the model cannot compute in the precision, by trying; "" if it can, or if memory is too small to try."""

    def attempt(precision: Precision) -> None:
        attempts = Attempts(replace(start, precision=precision), model)
        with seeded(0):
            if trains:
                attempts.train(2)  # BatchNorm needs two samples
            attempts.evaluate(2)

    try:
        attempt(start.precision)
    except Exception as error:  # whatever a model raises
        if is_out_of_memory(error):
            return ""
        attempt(Precision("fp32", start.world.device))  # raises what is wrong in any precision
        return first_line(error)
    return ""


def _resolve_precision(config: DeviceOptions, run: Run, world: World) -> str:
    """--precision as the run keeps it; auto: what the hardware of all ranks computes in. Collective."""
    found = world.gather([hardware_precision(world.device), socket.gethostname()])
    without = sorted({host for name, host in found if name != "bf16"})
    kept, differ = run.kept.get("precision"), len({name for name, _ in found}) > 1
    name = run.resolve("precision", config.precision, lambda: "fp32" if without else "bf16")
    if config.precision == "auto" and kept is None and differ:
        run.note(f"--precision auto is fp32: {some(without)} does not compute in bf16, and other nodes do")
    elif config.precision == "auto" and kept == "bf16" and without:
        run.note(f"warning: the run keeps bf16, and {some(without)} emulates bf16, which is slow; --precision fp32 is"
                 " faster there, but the run is not bit-exact from there on")
    return name
