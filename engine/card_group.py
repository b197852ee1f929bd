"""How ranks on one host, each with a card of its own, come to exchange tensors: peer memory where cards reach each
other, NCCL where not. They speak about it through the group that they have met in (`rank_group`)."""

import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.rank_group import LOAD_SECONDS, make_store
from slipstream.engine.tensor_parallel import CardExchange, TensorParallel
from slipstream.kernels.all_gather import PeerLost, all_gather

# Longest wait in the exchange that finds out whether peer memory works; a rank may have to compile it first.
TRIAL_SECONDS = 60.0
_HANDLE_BYTES = 64


def join_cards(parallel: TensorParallel) -> TensorParallel:
    """The ranks with a way between their cards; rank i takes card i, and this process's current card is that one.

    All ranks call it. Waits for peers are long until `be_patient` of the result's `card`.

    Raises SlipstreamError where there are fewer cards than ranks.
    """
    if torch.cuda.device_count() < parallel.size:
        raise SlipstreamError(
            f"{parallel.size} ranks, and torch sees {_cards(torch.cuda.device_count())}",
            expected="a card of its own for each rank",
            do="set server.tensor_parallel_size to the number of cards or below (see CUDA_VISIBLE_DEVICES and "
            "`nvidia-smi`), or server.device to cpu",
        )
    torch.cuda.set_device(parallel.rank)
    torch.zeros(1, device="cuda")  # the card's context, which the driver's own calls below need
    found = _peer_exchange(parallel)
    if isinstance(found, str):
        if parallel.rank == 0:
            warnings.warn(
                f"cards do not reach each other's memory ({found}): NCCL carries what ranks tell", stacklevel=2
            )
        found = _nccl_exchange(parallel)
    found.be_patient(LOAD_SECONDS)
    return replace(parallel, card=found)


def check_shares(size: int, heads: Sequence[int]) -> None:
    """Every rank has a head of each model. Raises SlipstreamError where not: kernels run on parts that are there.

    heads: query heads of target and draft.
    """
    if min(heads) < size:
        raise SlipstreamError(
            f"{size} ranks share {min(heads)} attention heads",
            expected="on cards, at least one head of each model for each rank",
            do=f"lower server.tensor_parallel_size to {min(heads)} or below",
        )


def carrier_name(parallel: TensorParallel) -> str | None:
    """What carries tensors from rank to rank, for people; None where there is one rank."""
    if parallel.size == 1:
        return None
    names = {"PeerExchange": "peer memory", "NcclExchange": "NCCL"}
    return "gloo" if parallel.card is None else names[type(parallel.card).__name__]


def check_peers(parallel: TensorParallel) -> None:
    """Raises PeerLost where this rank's card waited for another one in vain. Asks no device."""
    lost = None if parallel.card is None else parallel.card.lost()
    if lost is not None:
        raise PeerLost(f"rank {parallel.rank}'s card waited in vain for that of rank {lost}")


def _peer_exchange(parallel: TensorParallel) -> CardExchange | str:
    """Exchange through peer memory, or why some rank cannot have it; the same kind of answer on all ranks."""
    from slipstream.kernels.gpu import peer_exchange as gpu

    own: Any = _tried(lambda: gpu.allocate(parallel.size))
    handle = _tried(lambda: gpu.share(own)) if isinstance(own, int) else own
    sent = torch.zeros(1 + _HANDLE_BYTES, dtype=torch.uint8)  # [65]: whether there is one, and it
    if isinstance(handle, bytes):
        sent[0], sent[1:] = 1, torch.frombuffer(bytearray(handle), dtype=torch.uint8)
    handles = all_gather(sent, [len(sent)] * parallel.size, parallel.group)
    if not all(int(one[0]) for one in handles):
        return handle if isinstance(handle, str) else "another rank could not share its memory"
    exchange: Any = _tried(lambda: _opened(parallel, own, handles))
    if not _all_well(parallel, not isinstance(exchange, str)):
        return exchange if isinstance(exchange, str) else "another rank could not open a peer's memory"
    trial = _tried(lambda: _trial(parallel, exchange))
    if not _all_well(parallel, trial is True):
        return trial if isinstance(trial, str) else "numbers did not come over, or not in time"
    result: CardExchange = exchange
    return result


def _opened(parallel: TensorParallel, own: int, handles: Sequence[torch.Tensor]) -> Any:
    """The exchange, with every peer's memory opened."""
    from slipstream.kernels.gpu import peer_exchange as gpu

    addresses = [
        own if rank == parallel.rank else gpu.open_shared(bytes(handle[1:].tolist()))
        for rank, handle in enumerate(handles)
    ]
    return gpu.PeerExchange(parallel.rank, parallel.size, addresses, "cuda", TRIAL_SECONDS)


def _trial(parallel: TensorParallel, exchange: CardExchange) -> bool:
    """Whether sums come out right: three times, so that both places of a word are used, and one again."""
    turns = (1.0, 2.0, 3.0)
    sums = [exchange.all_reduce(torch.full((2, 1024), turn + parallel.rank, device="cuda")) for turn in turns]
    ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ended.record()
    while not ended.query():  # not `synchronize`: a signal is heard meanwhile
        time.sleep(1e-3)
    ranks = sum(range(parallel.size))
    right = [
        bool((total == turn * parallel.size + ranks).all()) for turn, total in zip((1.0, 2.0, 3.0), sums, strict=True)
    ]
    return all(right) and exchange.lost() is None


def _nccl_exchange(parallel: TensorParallel) -> CardExchange:
    import torch.distributed as dist

    from slipstream.kernels.nccl_exchange import NcclExchange

    # They meet at a file in memory of rank 0, which ranks of one user can open.
    file = make_store() if parallel.rank == 0 else -1
    where = all_gather(torch.tensor([os.getpid(), file]), [2] * parallel.size, parallel.group)[0].tolist()
    store = dist.FileStore(f"/proc/{where[0]}/fd/{where[1]}", -1)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=LOAD_SECONDS)
    group = dist.ProcessGroupNCCL(dist.PrefixStore("cards", store), parallel.rank, parallel.size, options)
    exchange = NcclExchange(group)
    exchange.all_reduce(torch.zeros(1, 1024, device="cuda"))  # connects: not in the middle of a capture
    torch.cuda.synchronize()
    return exchange


def _all_well(parallel: TensorParallel, well: bool) -> bool:
    return all(int(one) for one in all_gather(torch.tensor([int(well)]), [1] * parallel.size, parallel.group))


def _tried(function: Callable[[], Any]) -> Any:
    """What it returns, or the words of the error that it raises."""
    try:
        return function()
    except (RuntimeError, OSError) as error:  # the driver's, or that there is none
        return str(error)


def _cards(count: int) -> str:
    return "1 card" if count == 1 else f"{count} cards"
