"""How ranks on one host find each other: gloo over the loopback, through a store that is never a file on disk."""

import os
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # rank 0 starts the others before it imports torch
    from slipstream.engine.tensor_parallel import TensorParallel

# Longest wait for a peer within one exchange. A peer that dies is noticed at once; this is for one that hangs.
PEER_SECONDS = 60.0
# The same while ranks load, which they do at their own pace: rank 0 alone reads the fingerprint of all weights.
LOAD_SECONDS = 1800.0
# Longest wait of a card for another one while serving: ranks launch within a millisecond of each other.
CARD_SECONDS = 3.0


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

    Raises PeerLost when one does not come. A signal's handler runs meanwhile, in the main thread.
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
    group = _aside(lambda: dist.ProcessGroupGloo(file, rank, size, options))
    if isinstance(group, RuntimeError):
        raise PeerLost(str(group)) from group
    return TensorParallel(rank, size, group)


def be_patient(parallel: "TensorParallel", peer_seconds: float) -> None:
    """Changes this rank's longest wait for a peer in every exchange from now on."""
    if parallel.group is not None:
        parallel.group._set_default_timeout(timedelta(seconds=peer_seconds))


def _aside(make: Callable[[], Any]) -> Any:
    """What `make` returns, or the RuntimeError that it raises, run in another thread.

    Python handles signals between two bytecodes of the main thread, hence not while that waits for peers in C++: of a
    rank that dies then, rank 0 would hear when its own wait is over.
    """
    result: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            result.put(make())
        except RuntimeError as error:
            result.put(error)

    threading.Thread(target=run, name="join the ranks", daemon=True).start()
    return result.get()
