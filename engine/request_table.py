"""The state of running requests on the device: preallocated tensors, one row a request slot."""

import torch

from slipstream.engine.block_manager import DUMMY_BLOCK


class RequestTable:
    """Owner of the tokens, lengths and block tables that rounds read and write.

    Args:
        num_slots: requests at a time (S).
        max_tokens: most committed tokens of a request.
        num_blocks: blocks of a request, at most.
        num_steps: K.
        feature_size: width of the draft's features, 0 where no draft reads any.

    Fields:
        tokens: [S, max_tokens + K + 1] int64, committed tokens, then leftovers.
        lengths: [S] int64, committed tokens.
        limits: [S] int64, most committed tokens.
        block_table: [S, num_blocks] int64.
        features: [S, K + 1, F], of the newly committed positions that the draft has not absorbed yet.
        num_fresh: [S] int64, how many of those there are.
    """

    def __init__(
        self,
        num_slots: int,
        max_tokens: int,
        num_blocks: int,
        num_steps: int,
        feature_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_steps = num_steps
        with torch.device(device):
            self.tokens = torch.zeros(num_slots, max_tokens + num_steps + 1, dtype=torch.int64)
            self.lengths = torch.zeros(num_slots, dtype=torch.int64)
            self.limits = torch.zeros(num_slots, dtype=torch.int64)
            self.block_table = torch.full((num_slots, num_blocks), DUMMY_BLOCK, dtype=torch.int64)
            self.features = torch.zeros(num_slots, num_steps + 1, feature_size, dtype=dtype)
            self.num_fresh = torch.zeros(num_slots, dtype=torch.int64)
            self.offsets = torch.arange(num_steps + 1)  # 0..K, the columns of a round

    def occupy(self, slot: int, prompt_ids: list[int], limit: int, blocks: list[int]) -> None:
        """A request moves in. Its whole prompt is committed; prefill brings it into the caches."""
        device = self.tokens.device
        self.tokens[slot, : len(prompt_ids)] = torch.tensor(prompt_ids, device=device)
        self.lengths[slot], self.limits[slot], self.num_fresh[slot] = len(prompt_ids), limit, 0
        self.block_table[slot] = DUMMY_BLOCK
        self.block_table[slot, : len(blocks)] = torch.tensor(blocks, device=device)

    def clear(self, slot: int) -> None:
        """A request moves out; a stale row must not point at blocks that are somebody else's by now."""
        self.lengths[slot], self.limits[slot], self.num_fresh[slot] = 0, 0, 0
        self.block_table[slot] = DUMMY_BLOCK

    def commit(self, slots: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Appends the first `counts` [B] of `tokens` [B, r] to the requests at `slots` [B]."""
        columns = self.lengths[slots, None] + self.offsets[: tokens.shape[1]]  # [B, r]
        self.tokens[slots[:, None], columns] = tokens  # what lies behind the count is overwritten by the next round
        self.lengths[slots] += counts
