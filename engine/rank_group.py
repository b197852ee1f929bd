"""How ranks on one host find each other: gloo over the loopback, through a store that is never a file on disk."""

import os
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rank 0 starts the others before it imports torch
    from slipstream.engine.tensor_parallel import TensorParallel

# Longest wait for a peer within one exchange. A peer that dies is noticed at once; this is for one that hangs.
PEER_SECONDS = 60.0


def make_store() -> int:
    """A descriptor for the ranks to meet at; children inherit it. An anonymous file in memory: gone with its last user.

    (A TCP store would listen on every network interface.)
    """
    return os.memfd_create("slipstream-ranks")


def connect(
    rank: int, size: int, store: int, *, name: str = "tp", peer_seconds: float = PEER_SECONDS
) -> "TensorParallel":
    """Joins the other ranks; all must come within `peer_seconds`.

    Args:
        rank, size: this one, of how many.
        store: descriptor from `make_store`.
        name: tells groups that meet at one store apart.
        peer_seconds: longest wait for a peer, now and in every exchange.

    Raises PeerLost when one does not come.
    """
    import torch.distributed as dist

    from slipstream.engine.tensor_parallel import TensorParallel, single
    from slipstream.kernels.all_gather import PeerLost

    if size == 1:
        return single()
    file = dist.PrefixStore(name, dist.FileStore(f"/proc/self/fd/{store}", -1))
    file.set_timeout(timedelta(seconds=peer_seconds))
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=peer_seconds)
    options._threads = 1
    try:
        return TensorParallel(rank, size, dist.ProcessGroupGloo(file, rank, size, options))
    except RuntimeError as error:
        raise PeerLost(str(error)) from error
