"""The strategies, by name; what is possible with each."""

from importlib import import_module
from typing import TYPE_CHECKING

from utils.errors import UserError, counted
from utils.settings.run_options import DeviceOptions

if TYPE_CHECKING:
    from utils.distributed.world import World

# the class of each; dp-classic's is in dp_classic.py
STRATEGIES = {"ddp": "DDP", "exact": "Exact", "fsdp": "FSDP", "dp": "DP", "dp-classic": "DPClassic",
              "model-parallel": "ModelParallel"}


def load_strategy(name: str) -> type:
    """The class of strategy `name`, a key of STRATEGIES."""
    return getattr(import_module(f"utils.strategies.{name.replace('-', '_')}"), STRATEGIES[name])


def devices_per_process(config: DeviceOptions) -> int | str:
    """How many devices a process takes; "auto": its share of the node's. Raises UserError (64)."""
    wanted, most = config.devices_per_process, load_strategy(config.strategy).max_devices
    if most == 1 and wanted not in ("auto", 1):
        several = [name for name in STRATEGIES if load_strategy(name).max_devices > 1]
        raise UserError(f"--devices-per-process {wanted}: with --strategy {config.strategy} a process has one device;"
                        f" start more processes, or use --strategy {' or '.join(several)}")
    return 1 if most == 1 else wanted


def require_possible(config: DeviceOptions, world: "World") -> None:
    """Raise UserError (64) for too many processes, too few devices, and what the strategy lacks."""
    strategy, name = load_strategy(config.strategy), f"--strategy {config.strategy}"
    if world.world_size > strategy.max_processes:
        raise UserError(f"{name} computes in {counted(strategy.max_processes, 'process')}, and there are"
                        f" {world.world_size}; start it as python train.py, or use --strategy ddp")
    if len(world.devices) < strategy.min_devices:
        way_out = "start fewer processes" if world.world_size > 1 else "choose --devices-per-process"
        raise UserError(f"{name} needs {counted(strategy.min_devices, 'device')} in each process, and"
                        f" {world.device.type} gives {len(world.devices)}; {way_out}, or use --strategy ddp")
    if config.find_unused_parameters and not strategy.finds_unused:
        raise UserError(f"--find-unused-parameters is a switch of DistributedDataParallel, and {name} has none; leave"
                        " it out, or use --strategy ddp")
    is_shared = strategy.is_sharded and world.world_size > 1  # torch 2.15's inductor fails on image models
    has_several = strategy.min_devices > 1  # devices: torch cannot trace how each is seeded
    if config.compile and (is_shared or has_several):
        raise UserError(f"--compile does not work with {name}; leave it out, or use --strategy ddp")
