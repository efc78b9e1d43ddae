"""What the samples of a set were when the run used them: 32 bytes each, with which every later use is compared.

Else a run would go on without a word after its files were overwritten: its data would be known by their names alone.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.distributed.world import World
from utils.errors import Exit, UserError

MOST = 20_000_000  # samples of a set, which take 640 MB in each process; larger sets have no Digests
UNKNOWN = bytes(32)  # the digest of a sample that was not used yet, or could not be read


class Digests:
    """Of the samples of one set; in host memory on every rank, and joined over the ranks where they must agree.

    A digest is a sha256 (data.batch.sample_digest); to note or compare a micro-batch takes some microseconds.
    """

    def __init__(self, num_samples: int, name: Callable[[int], str] = str):
        """name: what a sample is called in messages."""
        self._rows = np.zeros((num_samples, 4), np.uint64)  # [N, 32 bytes]
        self._name, self.num_bytes = name, self._rows.nbytes

    def changed(self, read: Mapping[int, bytes]) -> list[str]:
        """The names of those samples, {index: digest} as they were read now, that are not what they were."""
        indices = np.fromiter(read, np.int64)
        return [self._name(int(index)) for index in indices[_differ(self._rows[indices], _rows_of(read))]]

    def add(self, read: Mapping[int, bytes]) -> None:
        """The run used these samples."""
        indices = np.fromiter(read, np.int64)
        self._before = indices, self._rows[indices]
        self._rows[indices] = _rows_of(read)

    def undo(self) -> None:
        """Forget what was added last: the step changed nothing, and is taken again."""
        indices, rows = self._before
        self._rows[indices] = rows

    def used(self, indices: Collection[int]) -> list[str]:
        """The names of those of these samples that were used."""
        return [self._name(index) for index in sorted(indices) if self._rows[index].any()]

    def some_used(self, most: int) -> list[int]:
        """Up to `most` of the samples that were used, from all over the set; always the same ones."""
        used = np.flatnonzero(self._rows.any(axis=1))
        return used[np.unique(np.linspace(0, len(used) - 1, most).astype(int))].tolist() if len(used) else []

    def joined(self, world: World) -> Tensor:
        """Those of all ranks, [N, 32] uint8, in the memory that they are kept in. Collective: 32 x N bytes.

        Raises UserError (65) on every rank if two ranks have used different samples of one name.
        """
        own, joined = self._rows.copy(), torch.from_numpy(self._rows.view(np.uint8))
        world.all_reduce_or(joined)
        differ = np.argwhere((own != 0) & (own != self._rows))[:1, 0]
        found = [name for names in world.gather([*map(self._name, differ.tolist())]) for name in names]
        if found:
            raise UserError(f"{found[0]} is not the same on all nodes; give all nodes the same data", Exit.BAD_DATA)
        return joined

    def load(self, saved: Tensor) -> None:
        """Continue what joined() returned."""
        self._rows[:] = saved.cpu().numpy().view(np.uint64)


def differing(one: Tensor, two: Tensor) -> list[int]:
    """The samples that both of two runs have used, and that differ. one, two: what joined() returned, [N, 32]."""
    return np.flatnonzero(_differ(one.numpy().view(np.uint64), two.numpy().view(np.uint64))).tolist()


def summary(saved: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a link of the chain says of samples.safetensors: the step since which it is complete, and hashes."""
    return {name: int(value) if name == "since" else hashlib.sha256(value.numpy()).hexdigest()
            for name, value in saved.items()}


def _rows_of(read: Mapping[int, bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(read.values()), np.uint64).reshape(-1, 4)


def _differ(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """[N] bool: which of these digests differ; what is unknown does not."""
    return (one != two).any(axis=1) & one.any(axis=1) & two.any(axis=1)
