"""Room on the card: allocates the caches of target and draft, or says how much fits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.kv_cache import KVCache
from slipstream.engine.models import TargetModel
from slipstream.engine.proposer import Proposer

_GIB = 2**30


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """While something is put on the card. Raises SlipstreamError that names it where its memory does not suffice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        raise SlipstreamError(
            f"the card has no room for {what}: {str(error).splitlines()[0]}",
            expected=f"enough of its {total / _GIB:.2f} GiB; {free / _GIB:.2f} GiB are free now",
            do="lower server.max_running_requests or server.max_context_tokens, or free the card (`nvidia-smi` names "
            "who uses it)",
        ) from None


def allocate_caches(target: TargetModel, config: EngineConfig, proposer: Proposer | None) -> KVCache:
    """The target's cache; the proposer makes its own. Raises SlipstreamError where they do not fit on the card."""
    try:
        cache = target.allocate_kv(config.total_blocks, config.block_size_tokens)
        if proposer:
            proposer.allocate(config, cache.layers[0].dtype)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        one_block = target.allocate_kv(1, config.block_size_tokens)
        raise no_room(config, sum(layer.nbytes for layer in one_block.layers), free, total) from None
    return cache


def no_room(config: EngineConfig, bytes_per_block: int, free: int, total: int) -> SlipstreamError:
    """The error for caches that do not fit.

    Args:
        config: what was asked for.
        bytes_per_block: of the target's cache; the draft's comes on top.
        free, total: bytes of the card, without the caches.
    """
    blocks, size = config.total_blocks, config.block_size_tokens
    why = "num_kv_blocks"
    if config.num_kv_blocks is None:
        why = f"{config.max_running_requests} requests at a full context of {config.max_context_tokens} tokens"
    fits = max(0, free // bytes_per_block - 1) * size
    return SlipstreamError(
        f"the target's KV cache of {blocks:,} blocks ({blocks * size:,} tokens: {why}) needs "
        f"{blocks * bytes_per_block / _GIB:.2f} GiB beside the weights",
        expected=f"at most the {free / _GIB:.2f} GiB that are free of the card's {total / _GIB:.2f} GiB: room for "
        f"{fits:,} tokens, less what the draft's cache, the attention's workspace and the graphs take",
        do="lower server.max_running_requests or server.max_context_tokens, or free the card (`nvidia-smi` names who "
        "uses it)",
    )
