"""Which strategies a test can start where, and micro-batches for them."""

from types import SimpleNamespace

from utils.strategies import STRATEGIES, load_strategy

ACROSS = [  # one device, and the whole model, for each of several processes
    name for name, kind in ((name, load_strategy(name)) for name in STRATEGIES)
    if kind.max_devices == 1 and kind.max_processes > 1 and not kind.is_sharded]


class OnCpu(SimpleNamespace):
    """A micro-batch of a test: an index, and what its forward needs."""

    place = None  # where to() has put it

    def to(self, device):
        return OnCpu(**vars(self) | {"place": device})
