"""What the bits of a run depend on: device, threads, dropout, determinism, precision; kept from its first start."""

import socket
from functools import partial

import torch

from utils.distributed.world import World
from utils.errors import some
from utils.hardware import vendor
from utils.hardware.compiling import require_compiler
from utils.numerics.kernels import replace_kernels
from utils.numerics.precision import Precision, hardware_precision
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
    vendor.set_tf32(config.tf32 == "always" or (config.tf32 == "auto" and precision != "fp32"))

    # kernels on the CPU
    if is_fast:
        replace_kernels(has_fast_convolutions)
        vendor.allow_16_bit_attention(world.device.type == "cpu" and precision == "bf16")
    return Precision(precision, world.device)


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
