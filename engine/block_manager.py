"""Which cache blocks belong to whom. One block table serves the target's cache and the draft's."""

import heapq

from slipstream.engine.errors import SlipstreamError

DUMMY_BLOCK = 0  # padding rows write here; nobody owns it


class BlockManager:
    """Owner of the free list.

    Args:
        num_blocks: blocks in each cache, the dummy block included.
        block_size: tokens a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(DUMMY_BLOCK + 1, num_blocks))  # a heap: lowest first, so neighbours stay together
        self._used: set[int] = set()

    @property
    def num_usable(self) -> int:
        """Blocks that requests can have."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def check_fits(self, num_tokens: int) -> None:
        """Raises SlipstreamError when a request of `num_tokens` positions could not run even alone."""
        count = self.blocks_for(num_tokens)
        if count > self.num_usable:
            raise SlipstreamError(
                f"the request needs {count} KV blocks ({num_tokens} positions)",
                expected=f"at most {self.num_usable}, all that there are",
                do="lower max_tokens, or give the engine more KV blocks",
            )

    def allocate(self, num_tokens: int) -> list[int] | None:
        """Blocks for `num_tokens` positions, or None when too few are free."""
        count = self.blocks_for(num_tokens)
        if count > self.num_free:
            return None
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        self._used.update(blocks)
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Gives blocks back. Raises ValueError when one is not in use: a double free is our bug, never hidden."""
        stray = [b for b in blocks if b not in self._used]
        if stray or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {stray or blocks} freed twice")
        for block in blocks:
            self._used.remove(block)
            heapq.heappush(self._free, block)
