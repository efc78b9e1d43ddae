"""How the processes of a run meet: in a store that no earlier start has written to."""

import os
import secrets
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from utils.distributed.watchdog import prepare_store
from utils.errors import Exit, RankError


def fresh_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """A store that no earlier start has written to. Collective.

    torchrun restarts workers on the same store with the same keys: a rank that comes early would read the address of a dead
    peer (2 of 3 plain restarts failed on torch 2.15). So the ranks agree on a fresh prefix first. Whatever lies in the store
    may be stale; only an answer to the token that this process has just drawn cannot be.
    """
    address, is_ours = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(*address, is_master=is_ours and rank == 0, timeout=timeout, wait_for_workers=False)
    except dist.DistError as error:
        reason = next(iter(str(error).splitlines()), "")
        raise RankError(f"rank {rank} on {socket.gethostname()} does not reach rank 0's store at {address[0]}:{address[1]} ({reason})",
                        Exit.LOST_PEERS) from None
    token = secrets.token_hex(8)
    deadline = time.monotonic() + timeout.total_seconds()
    if rank != 0:
        store.set(f"lockstep/request/{rank}", token)
        try:
            prefix = store.get(f"lockstep/reply/{token}").decode()
        except dist.DistStoreError:
            raise RankError(f"rank {rank} on {socket.gethostname()} waited {timeout} for rank 0 in vain", Exit.LOST_PEERS) from None
        store.set(f"lockstep/received/{prefix}/{rank}", token)
    else:
        prefix, answered = token, {}
        prepare_store(dist.PrefixStore(f"lockstep/{prefix}", store), world_size)
        waiting = set(range(1, world_size))
        while waiting:
            for peer in sorted(waiting):
                if store.check([f"lockstep/request/{peer}"]):
                    request = store.get(f"lockstep/request/{peer}").decode()
                    if answered.get(peer) != request:  # a request may be a dead peer's: the living one will overwrite it
                        store.set(f"lockstep/reply/{request}", prefix)
                        answered[peer] = request
                if store.check([f"lockstep/received/{prefix}/{peer}"]):
                    waiting.remove(peer)
            if time.monotonic() > deadline:
                raise RankError(f"rank 0 waited {timeout} in vain for ranks {sorted(waiting)}", Exit.LOST_PEERS)
            time.sleep(0.005)
    return dist.PrefixStore(f"lockstep/{prefix}", store)
