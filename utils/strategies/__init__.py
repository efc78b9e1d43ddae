"""The strategies, as import paths."""

from importlib import import_module

STRATEGIES = {
    "ddp": "utils.strategies.ddp:DDP",
    "exact": "utils.strategies.exact:Exact",
}


def load_strategy(name: str) -> type:
    """The class of strategy `name`, a key of STRATEGIES."""
    module, cls = STRATEGIES[name].split(":")
    return getattr(import_module(module), cls)
