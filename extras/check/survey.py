"""What the samples of a data set are like: which are the same, which look alike, and what is odd about them.

Made by images.py and texts.py; mode.py says it in words.
Legend: N samples, those of train first, then those of val; S of them that were looked at; H values of a hash.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np
from tqdm import tqdm

from utils.distributed.world import World

AT_ONCE = 64  # samples that a thread takes, and that are compared with all others, at a time
TOO_MANY, CROWD = 0.2, 5  # candidates of all, and alike ones of each: beyond, the hashes do not tell images apart
ALIKE = 0.98  # correlation of the perceptual hashes of candidates; chosen by measurement: extras/check/README.md


@dataclass(frozen=True, eq=False)
class Survey:
    """What was found. A key is a hash of a content, the same for equal contents."""

    num_train: int
    labels: np.ndarray  # [N] or [N, C], see data.labels.LabelReader.encoded
    exact: np.ndarray  # [N] int64 keys of the bytes
    same: np.ndarray  # [N] int64 keys of the pixels, or of the words without case and spaces
    seen: np.ndarray  # [S] indices, ascending, chosen at random; of the others `exact` alone is known
    looks: np.ndarray  # [S, H] int8 perceptual hashes; [0, H] of what has none
    odd: dict[str, np.ndarray]  # {what is odd: indices}
    unreadable: dict[int, str]  # {index: path and reason}; none of them is in `seen`
    name: Callable[[int], str]  # what a sample is called
    where: Callable[[int], str]  # the whole path of its file, or the number of its row
    left_out: frozenset[int] = frozenset()  # indices

    def pairs(self) -> Iterator[tuple[str, np.ndarray]]:
        """(what is to be said, [P, 2] indices: a sample, and the one that it is compared with, or itself)."""
        alone = {"unreadable": np.array([*self.unreadable], np.int64), **self.odd}
        yield from ((kind, np.c_[samples, samples]) for kind, samples in alone.items())

        # the same as the first sample that is the same, or as the first one of val
        every, first = np.arange(len(self.same)), first_with(self.same)
        pairs, is_val = np.c_[every, first], every >= self.num_train
        if self.labels.dtype.kind != "f":  # two measurements of one thing may differ
            label = np.unique(self.labels, axis=0, return_inverse=True)[1].flatten()
            yield "conflict", pairs[label != label[first]]
        yield "leak", pairs[is_val & ~is_val[first]]
        first[is_val] = self.num_train + first_with(self.same[is_val])
        yield "copy", np.c_[every, first][first < every]

        # like another one
        train, val = (np.flatnonzero(is_val[self.seen[:len(self.looks)]] == side) for side in (False, True))
        leaks, copies = self._alike(val, train), np.concatenate([self._alike(train, train), self._alike(val, val)])
        near = np.concatenate([leaks, copies])                                              # [P, 3]
        crowd = near[near[:, 2] > CROWD]
        has_framing = len(np.unique(crowd[:, 0])) > TOO_MANY * len(self.seen)
        yield "framing", crowd[:, :2] if has_framing else crowd[:0, :2]
        for kind, each in (("near leak", leaks), ("near copy", copies)):
            yield kind, each[(each[:, 2] <= CROWD) | (not has_framing), :2]

    def beside_left_out(self) -> np.ndarray:
        """[P, 2] indices: a training sample that stays, and one that is left out and is the same, or looks like it."""
        train = np.arange(self.num_train)
        left_out = np.isin(train, [*self.left_out])
        first = {key: index for index, key in zip(train[left_out], self.same[train[left_out]], strict=True)}
        same = [[index, first[self.same[index]]] for index in train[~left_out] if self.same[index] in first]
        seen = self.seen[:len(self.looks)]
        stays, away = (np.flatnonzero((seen < self.num_train) & (np.isin(seen, train[left_out]) == side))
                       for side in (False, True))
        near = self._alike(stays, away, only_before=False)
        return np.concatenate([np.array(same, np.int64).reshape(-1, 2), near[near[:, 2] <= CROWD, :2]])

    def of_the_others(self) -> "Survey":
        """What is known without the samples that are left out."""
        gone, is_seen = np.array([*self.left_out], np.int64), ~np.isin(self.seen, [*self.left_out])
        same = self.same.copy()
        same[gone] = [key_of(b"left out %d" % index) for index in gone]  # like no other one
        return replace(
            self, same=same, seen=self.seen[is_seen], looks=self.looks[is_seen[:len(self.looks)]],
            odd={kind: np.setdiff1d(indices, gone) for kind, indices in self.odd.items()},
            unreadable={index: reason for index, reason in self.unreadable.items() if index not in self.left_out})

    def _alike(self, rows: np.ndarray, columns: np.ndarray, only_before: bool = True) -> np.ndarray:
        """[P, 3] indices: a sample, and the one before it that looks most like it, maybe mirrored, but has another key;
        and how many look like it. only_before: False = of all.

        rows, columns: ascending places in `looks`. The hashes are whole numbers, so their products are exact, and the
        answer does not depend on the number of threads.
        """
        looks, keys, found = self.looks.astype(np.float32), self.same[self.seen], [np.zeros((0, 3), np.int64)]
        side = math.isqrt(looks.shape[1])  # of the small picture that a hash is
        mirrored = looks.reshape(-1, side, side)[:, :, ::-1].reshape(looks.shape)
        norms = np.maximum(1, np.linalg.norm(self.looks.astype(np.float64), axis=1))
        for part in np.array_split(rows, -(-len(rows) // AT_ONCE)) if len(rows) and len(columns) else ():
            alike = np.maximum(looks[part] @ looks[columns].T, mirrored[part] @ looks[columns].T)
            alike /= norms[part, None] * norms[columns]                                     # [AT_ONCE, columns]
            alike[keys[part, None] == keys[columns]] = 0
            crowd = (alike >= ALIKE).sum(axis=1)
            alike[only_before & (part[:, None] <= columns)] = 0
            best = columns[alike.argmax(axis=1)]
            found.append(np.c_[self.seen[part], self.seen[best], crowd][alike.max(axis=1) >= ALIKE])
        return np.concatenate(found)


def first_with(keys: np.ndarray) -> np.ndarray:
    """[N]: the first index with the same key."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return first[inverse]


def key_of(content: bytes) -> int:
    """An int64 that is the same for the same content alone, as far as 64 bits can tell."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def shared_out(world: World, work: Callable[[int], Any], indices: Sequence[int]) -> list[Any]:
    """[work(index), ...], JSON, computed by the cores of all ranks together; the same on any number. Collective."""
    mine = indices[world.rank::world.world_size]
    with ThreadPool(world.cores) as pool:
        shown = partial(tqdm, total=len(mine), leave=False, disable=None if world.is_main else True)
        ranks = world.gather([*shown(pool.imap(work, mine, AT_ONCE))])  # Collective.
    return [ranks[place % world.world_size][place // world.world_size] for place in range(len(indices))]
