"""What `auto` means for device, threads, precision, batch sizes and learning rate: resolved at a run's first start.

RUN/auto.json keeps it (utils/rundir/resolved.py lists all that is kept). Where only one file needs an `auto`, it is
resolved there: --best in engine/best.py, --workers in data/loader.py, --image-size in models/vision/preprocessing.py.
"""

import math
import os
import socket
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from data.plan import BatchPlan
from engine.attempts import try_evaluation, try_training
from engine.length import resolve_length
from engine.start import Start
from models.blocks import has_batch_norm
from utils.cpu.kernels import replace_kernels
from utils.distributed.world import World
from utils.errors import UserError, counted, first_line, is_out_of_memory, some
from utils.hardware import vendor
from utils.hardware.compiling import require_compiler
from utils.numerics.precision import Precision, hardware_precision
from utils.numerics.seed import seeded
from utils.rundir.resolved import UNSET
from utils.rundir.run import Run
from utils.settings.config import settings
from utils.settings.run_options import DeviceOptions, OptimOptions
from utils.strategies import load_strategy, require_possible
from utils.strategies.base import Strategy

AUTO_LIMIT, DEVICE_LIMIT = 64, 256  # samples in a micro-batch of `--micro-batch-size auto`, and on an accelerator
INVARIANT_SHARES = 8  # the same where the number of processes must not matter: an eighth of the global batch, ...
INVARIANT_LEAST = {True: 16, False: 4}  # ... but at least as many samples, with and without BatchNorm ...
INVARIANT_LIMIT = 32  # ... and at most as many
FROZEN_LR = {"adamw": 1e-3}  # --lr auto with --freeze backbone: nothing below the head can be spoilt
EVAL_BATCH = 64  # samples in a batch of --eval-only where no run has resolved it


def usual_threads(cores: int) -> int:
    """The cores of this process, or less where the user's OMP_NUM_THREADS says so.

    torchrun sets it to 1 for several processes where nobody has set it, so that 1 is nobody's wish there.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and "LOCKSTEP_LAUNCH_ID" not in os.environ  # launch.sh sets it
    is_of_torchrun = given == "1" and is_torchrun and os.environ.get("LOCAL_WORLD_SIZE") != "1"
    return min(cores, int(given)) if given.isdecimal() and int(given) and not is_of_torchrun else cores


def resolve_arithmetic(config: DeviceOptions, run: Run, world: World) -> Precision:
    """Set what the bits of this process depend on as the run keeps it: device, threads, precision. Collective."""
    # device and threads; on the CPU sums depend on the number of threads
    require_possible(config, world)
    if config.compile:
        world.everywhere(partial(require_compiler, world.device.type))  # Collective.
    run.resolve("device", config.device, lambda: world.device.type)
    is_cpu = world.device.type == "cpu"
    is_single = is_cpu and load_strategy(config.strategy).is_invariant
    threads = run.resolve("threads", config.threads, lambda: 1 if is_single else usual_threads(run.cores_per_process))
    torch.set_num_threads(threads)
    if is_cpu and config.threads == "auto" and threads > run.cores_per_process and not run.is_read_only:
        run.note(f"each process computes with {threads} threads, as this run keeps it, and now has"
                 f" {counted(run.cores_per_process, 'core')}; --threads {run.cores_per_process} is faster, and the run"
                 " is then not bit-exact")

    # determinism
    torch.use_deterministic_algorithms(is_cpu or config.deterministic, warn_only=is_cpu)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time
    vendor.set_determinism(config.deterministic)

    # precision
    precision = _resolve_precision(config, run, world)  # Collective.
    vendor.set_tf32(precision != "fp32")

    # kernels on the CPU
    are_ours = config.cpu_kernels == "on"
    replace_kernels(are_ours)
    vendor.allow_16_bit_attention(are_ours and is_cpu and precision == "bf16")
    return Precision(precision, world.device)


def with_possible_precision(start: Start, model: nn.Module, trains: bool, is_new: bool) -> Start:
    """`start`, in fp32 if `--precision auto` chose what the model cannot compute in. Collective.

    model: on the device or devices, where a forward is not collective. trains: else its evaluation alone is tried.
    is_new: the weights are initial ones; a run that has begun keeps its precision. Some models write numbers or types
    into their arithmetic that bf16 does not have. Raises UserError (64) for a precision that was given.
    """
    config, run, world, name = start.config.device, start.run, start.world, start.precision.name
    if name == "fp32" or not (is_new or config.precision != "auto"):
        return start
    found = world.everywhere(partial(_reason_against, start, model, trains), takes_long=True)  # Collective.
    reason = next(filter(None, world.gather(found)), "")  # Collective.
    if not reason:
        return start
    words = f"--model {start.config.model.model} cannot compute in {name} ({reason})"
    if config.precision != "auto":
        raise UserError(f"--precision {name}: {words}; use --precision fp32")
    run.note(f"--precision auto is fp32: {words}")
    run.keep(precision="fp32")
    vendor.set_tf32(False)
    vendor.allow_16_bit_attention(False)
    return replace(start, precision=Precision("fp32", world.device))


def _reason_against(start: Start, model: nn.Module, trains: bool) -> str:
    """Why the model cannot compute in the precision, by trying; "" if it can, or if memory is too small to try."""

    def attempt(precision: Precision) -> None:
        tried = replace(start, precision=precision)
        with seeded(0):
            if trains:
                try_training(tried, model, 2)  # BatchNorm needs two samples
            try_evaluation(tried, model, 2)

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
    kept, differ = run.resolved.precision, len({name for name, _ in found}) > 1
    name = run.resolve("precision", config.precision, lambda: "fp32" if without else "bf16")
    if config.precision == "auto" and kept is UNSET and differ:
        run.note(f"--precision auto is fp32: {some(without)} does not compute in bf16, and other nodes do")
    elif config.precision == "auto" and kept == "bf16" and without:
        run.note(f"warning: the run keeps bf16, and {some(without)} emulates bf16, which is slow; --precision fp32 is"
                 " faster there, but the run is not bit-exact from there on")
    return name


def resolve_plan(start: Start, strategy: Strategy, fit: int | None = None) -> BatchPlan:
    """The plan of this run; its number of micro-batches is resolved at the first start and kept. Raises UserError (64).

    auto: the smallest multiple of the number of processes (of devices, if each computes micro-batches of its own) that
    keeps micro-batches within auto_limit samples; cut finer later if there are more processes. Where
    strategy.is_invariant, auto ignores the number of processes, and ranks may have no work. fit: samples that fit into
    the device's memory, where those of the plan before did not.
    """
    config, run, world, num_samples = start.config.batch, start.run, start.world, len(start.task.train_set)
    batch, size = min(run.resolved.global_batch_size, num_samples), config.micro_batch_size
    needs_two = has_batch_norm(strategy.module)

    # lanes with work; BatchNorm needs two samples in every batch
    most = max(1, BatchPlan(num_samples, batch, 1).sizes[0] // 2) if needs_two else batch
    busy = min(world.world_size, most)
    lanes = busy * min(strategy.lanes, most // busy)

    def derive() -> int:
        if strategy.is_invariant:
            size = max(INVARIANT_LEAST[needs_two], -(-batch // INVARIANT_SHARES))
            return -(-batch // min(INVARIANT_LIMIT, size))
        return lanes * -(-batch // ((fit or auto_limit(start, strategy)) * lanes))

    # resolve
    if fit:
        kept = run.resolved.micro_batches
        run.keep(micro_batches=UNSET)
        run.note(f"out of memory: a global batch is cut into {counted(derive(), 'micro-batch')} instead of {kept}, each"
                 f" of at most {counted(fit, 'sample')}")
    count = run.resolve("micro_batches", "auto" if size == "auto" else -(-batch // size), derive)
    finer = count * -(-lanes // count)
    if size == "auto" and count < finer <= most and not strategy.is_invariant:
        count = finer
        run.keep(micro_batches=count)
        who = "processes" if strategy.lanes == 1 else "devices"
        run.note(f"{lanes} {who} need more: a global batch is now cut into {count} micro-batches; the run is not"
                 " bit-exact from here on")

    # check
    plan = BatchPlan(num_samples, run.resolved.global_batch_size, count)
    if needs_two:
        plan.require_two()
    if world.world_size == 1 and strategy.lanes > count:
        run.note(f"a global batch has {counted(count, 'micro-batch')}, and there are {strategy.lanes} devices, so some"
                 " compute nothing; a smaller --micro-batch-size in a new run gives each work")
    if world.world_size > count:
        sizes = plan.sizes_for(world.world_size, needs_two)
        idle = some(str(rank) for rank in range(count, world.world_size))
        remedy = f"--micro-batch-size {sizes[-1]}" if sizes else "a larger --global-batch-size"
        run.note(f"a global batch has {counted(count, 'micro-batch')}, and there are {world.world_size} processes:"
                 f" rank {idle} only takes part in the sums; {remedy} in a new run gives every rank work")
    return plan


def auto_limit(start: Start, strategy: Strategy) -> int:
    """The most samples that auto computes at once. Where nothing is tried (engine/attempts.py), it stays careful."""
    is_tried = start.world.device.type != "cpu" and not (strategy.is_sharded or strategy.is_invariant)
    return DEVICE_LIMIT if is_tried else AUTO_LIMIT


def require_partners(start: Start, strategy: Strategy, plan: BatchPlan) -> None:
    """--mixup, --cutmix: note that some micro-batches have one sample, so that nothing is mixed there.

    Raises UserError (64) if all have.
    """
    chosen, (smallest, largest) = settings(start.config), plan.sizes
    given = " ".join(f"--{name} {chosen[name]}" for name in ("mixup", "cutmix") if chosen.get(name))
    if not given or smallest > 1:
        return
    sizes = plan.sizes_for(1 if strategy.is_invariant else start.world.world_size, needs_two=True)
    remedy = f"--micro-batch-size {sizes[0]}" if sizes else "a larger --global-batch-size, or fewer processes"
    if largest < 2:
        raise UserError(f"{given}: samples are mixed within a micro-batch, and every micro-batch of this run has one"
                        f" sample (--global-batch-size {plan.global_batch_size} makes"
                        f" {counted(plan.num_micro_batches, 'micro-batch')}); use {remedy}")
    start.run.note(f"{given}: some micro-batches have one sample, which is not mixed; to mix all, use {remedy}")


def resolve_eval_batch(start: Start, strategy: Strategy, plan: BatchPlan) -> int:
    """Samples in an evaluation batch, kept from the first start on. auto: twice the micro-batch, within auto_limit."""
    given = start.config.batch.eval_batch_size
    return start.run.resolve("eval_batch_size", given, lambda: min(auto_limit(start, strategy), 2 * plan.sizes[1]))


def resolve_optim(start: Start) -> OptimOptions:
    """The settings of the optimizer with the learning rates of this run, kept from the first start on; its length, too.

    auto: the task's, which grows with the global batch: linearly for SGD (Goyal et al., 2017), with its square root for
    Adam and AdamW (Malladi et al., 2022). The head's factor is the task's where a new one begins at random, but 1 with
    SGD or a given rate.
    """
    config, optim = start.config, start.config.optim
    resolve_length(config, start.task, start.run)  # the rate depends on the batch
    is_sgd = optim.optimizer == "sgd"

    def derive() -> float:
        batch, usual = start.run.resolved.global_batch_size, config.usual["global_batch_size"]
        growth = min(batch, len(start.task.train_set)) / usual
        rates = start.task.base_lr | (FROZEN_LR if optim.freeze == "backbone" and start.task.has_weights else {})
        lr = rates["sgd" if is_sgd else "adamw"] * (growth if is_sgd else math.sqrt(growth))
        return float(f"{lr:.3g}")

    def derive_factor() -> float:
        is_random = start.task.has_new_head and start.run.resolved.head_init == "random" and optim.freeze != "backbone"
        return start.task.head_lr_factor if is_random and optim.lr == "auto" and not is_sgd else 1.0

    start.run.resolve("head_lr_factor", "auto", derive_factor)
    return replace(optim, lr=start.run.resolve("lr", optim.lr, derive))
