"""Rendezvous: the processes of a run meet in a store that no earlier start has written to.

torchrun restarts workers on the same store with the same keys, so a rank that comes early reads the address of a dead
peer (2 of 3 plain restarts failed on torch 2.15). The ranks therefore agree on a fresh prefix first.

Tests: tests/faults/test_nodes.py
"""

import os
import secrets
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from utils.distributed.peers import prepare_store
from utils.errors import Exit, RankError, some


def fresh_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """A store that no earlier start has written to. Collective.

    timeout: for all ranks to come. Raises RankError (76) if rank 0's store cannot be reached or a rank does not come.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_ours, me = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True", f"rank {rank} on {socket.gethostname()}"
    try:
        store = dist.TCPStore(host, port, is_master=is_ours and rank == 0, timeout=timeout, wait_for_workers=False)
    except dist.DistError as error:
        reason = next(iter(str(error).splitlines()), "")
        raise RankError(f"{me} cannot reach rank 0's store at {host}:{port} ({reason})", Exit.LOST_PEERS) from None
    # Whatever the store holds may be stale; only an answer to a token that was just drawn cannot be.
    token = secrets.token_hex(8)
    timed_out = f"timed out after {timeout.total_seconds():g} s waiting for"
    if rank == 0:
        prepare_store(dist.PrefixStore(f"lockstep/{token}", store), world_size)
        if missing := _answer(store, token, world_size, time.monotonic() + timeout.total_seconds()):
            raise RankError(f"{me} {timed_out} rank {some(map(str, missing))}", Exit.LOST_PEERS)
        return dist.PrefixStore(f"lockstep/{token}", store)
    store.set(f"lockstep/request/{rank}", token)
    try:
        prefix = store.get(f"lockstep/reply/{token}").decode()
    except dist.DistStoreError:
        raise RankError(f"{me} {timed_out} rank 0", Exit.LOST_PEERS) from None
    store.set(f"lockstep/received/{prefix}/{rank}", token)
    return dist.PrefixStore(f"lockstep/{prefix}", store)


def _answer(store: dist.Store, prefix: str, world_size: int, deadline: float) -> list[int]:
    """Give every rank the prefix; on rank 0. Returns the ranks that did not come in time."""
    waiting, answered = set(range(1, world_size)), {}
    while waiting and time.monotonic() <= deadline:
        for peer in sorted(waiting):
            if store.check([f"lockstep/request/{peer}"]):
                request = store.get(f"lockstep/request/{peer}").decode()
                if answered.get(peer) != request:  # it may be a dead peer's: the living one will overwrite it
                    store.set(f"lockstep/reply/{request}", prefix)
                    answered[peer] = request
            if store.check([f"lockstep/received/{prefix}/{peer}"]):
                waiting.remove(peer)
        time.sleep(0.005 if waiting else 0)
    return sorted(waiting)
