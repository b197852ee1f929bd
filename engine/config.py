"""Sizes of one engine."""

from dataclasses import dataclass

from slipstream.engine.errors import SlipstreamError

MAX_NUM_STEPS = 8  # longer chains are not served


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of one engine.

    Args:
        num_steps: K, drafts a round; 0 is no speculation.
        max_running_requests: request slots.
        max_context_tokens: most tokens of a request, prompt included.
        block_size_tokens: tokens a KV block.
        prefill_chunk_tokens: prompt tokens a prefill step.
        num_kv_blocks: KV blocks, the dummy block included; None: enough for every slot at full context.
        dtype: dtype of weights and caches.
        device: where they live.

    Raises SlipstreamError for sizes that cannot work.
    """

    num_steps: int = 0
    max_running_requests: int = 8
    max_context_tokens: int = 2048
    block_size_tokens: int = 16
    prefill_chunk_tokens: int = 256
    num_kv_blocks: int | None = None
    dtype: str = "bfloat16"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not 0 <= self.num_steps <= MAX_NUM_STEPS:
            raise SlipstreamError(
                f"num_steps = {self.num_steps}",
                expected=f"0..{MAX_NUM_STEPS}",
                do="set speculation.num_steps in that range",
            )
        for name in ("max_running_requests", "block_size_tokens", "prefill_chunk_tokens"):
            if getattr(self, name) < 1:
                raise SlipstreamError(f"{name} = {getattr(self, name)}", expected="1 or more", do=f"raise {name}")
        if self.max_context_tokens < 2:
            raise SlipstreamError(
                f"max_context_tokens = {self.max_context_tokens}",
                expected="2 or more: a prompt token and a new one",
                do="raise max_context_tokens",
            )

    @property
    def blocks_per_request(self) -> int:
        """Blocks of a request at full context, with room for the K + 1 rows of its last round."""
        return -(-(self.max_context_tokens + self.num_steps + 1) // self.block_size_tokens)

    @property
    def total_blocks(self) -> int:
        """KV blocks, the dummy block included."""
        if self.num_kv_blocks is not None:
            return self.num_kv_blocks
        return 1 + self.max_running_requests * self.blocks_per_request
