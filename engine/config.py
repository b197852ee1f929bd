"""Sizes of one engine."""

from dataclasses import dataclass

from slipstream.engine.errors import SlipstreamError

MAX_NUM_STEPS = 8  # longer chains are not served
MAX_ROUNDS_IN_FLIGHT = 8
SMALLEST_ROW_BUCKET = 32
# Of a prefill launch, where one request's chunk is not longer; the second while somebody reads a running answer as it
# comes: its next token waits for the launch.
MOST_PREFILL_ROWS, MOST_PREFILL_ROWS_BESIDE_STREAMS = 2048, 1024


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of one engine.

    Args:
        num_steps: K, drafts a round; 0 is no speculation.
        max_running_requests: request slots.
        max_context_tokens: most tokens of a request, prompt included.
        block_size_tokens: tokens a KV block.
        prefill_chunk_tokens: prompt tokens that a request brings into a prefill launch, at most.
        prefill_requests: requests whose chunks one prefill launch may take, as far as its rows stay within
            MOST_PREFILL_ROWS, or MOST_PREFILL_ROWS_BESIDE_STREAMS. None: 16 on a GPU, 1 on the CPU, where rows cost
            time and, beyond some number, bits.
        num_kv_blocks: KV blocks, the dummy block included; None: enough for every slot at full context.
        dtype: dtype of weights and caches.
        device: where they live, "cpu" or "cuda".
        graphs: steps are captured once and replayed. None: on a GPU. On the CPU a replay runs the captured function
            again on the same buffers, so that what graphs demand of the engine shows in tests without a card.
        choose_steps: K of each round is chosen from 0..num_steps by what pays (`engine.step_choice`); needs graphs.
        rounds_in_flight: launches whose results the host has not waited for when it launches the next one. None: 2 on
            a GPU, 0 on the CPU, where a launch ends when its work is done.

    Raises SlipstreamError for sizes that cannot work.
    """

    num_steps: int = 0
    max_running_requests: int = 8
    max_context_tokens: int = 2048
    block_size_tokens: int = 16
    prefill_chunk_tokens: int = 256
    prefill_requests: int | None = None
    num_kv_blocks: int | None = None
    dtype: str = "bfloat16"
    device: str = "cpu"
    graphs: bool | None = None
    rounds_in_flight: int | None = None
    choose_steps: bool = False

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
        if self.prefill_requests is not None and self.prefill_requests < 1:
            raise SlipstreamError(f"prefill_requests = {self.prefill_requests}", expected="1 or more, or None")
        if self.max_context_tokens < 2:
            raise SlipstreamError(
                f"max_context_tokens = {self.max_context_tokens}",
                expected="2 or more: a prompt token and a new one",
                do="raise max_context_tokens",
            )
        if self.device not in ("cpu", "cuda"):
            raise SlipstreamError(f"device = {self.device!r}", expected="cpu or cuda", do="correct server.device")
        if self.choose_steps and not self.num_steps:
            raise SlipstreamError(
                "K is to be chosen, and num_steps = 0",
                expected="num_steps of 1 or more: the largest K in question; 0 is in question anyway",
                do="raise num_steps, or set choose_steps to false",
            )
        if self.choose_steps and not self.uses_graphs:
            raise SlipstreamError(
                "K is to be chosen by measured times, and steps are not captured",
                expected="captured steps, which are timed at start",
                do="set choose_steps to false, or serve on a GPU",
            )
        if not 0 <= self.in_flight <= MAX_ROUNDS_IN_FLIGHT:
            raise SlipstreamError(
                f"rounds_in_flight = {self.rounds_in_flight}",
                expected=f"0 to {MAX_ROUNDS_IN_FLIGHT}: two hide the host, more only delay what stops an answer",
                do="correct rounds_in_flight",
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

    @property
    def uses_graphs(self) -> bool:
        return self.device == "cuda" if self.graphs is None else self.graphs

    @property
    def round_steps(self) -> tuple[int, ...]:
        """Every K that rounds may have, ascending."""
        return tuple(range(self.num_steps + 1)) if self.choose_steps else (self.num_steps,)

    @property
    def in_flight(self) -> int:
        """`rounds_in_flight` with its default filled in."""
        if self.rounds_in_flight is None:
            return 2 if self.device == "cuda" else 0
        return self.rounds_in_flight

    @property
    def batch_buckets(self) -> tuple[int, ...]:
        """Requests of a captured round: 1, 2, 4, .. and max_running_requests. A smaller batch is filled up."""
        return _buckets(1, self.max_running_requests)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Rows of a captured prefill chunk: 32, 64, 128, .. and the longest chunk that there can be."""
        return _buckets(SMALLEST_ROW_BUCKET, min(self.prefill_chunk_tokens, self.max_context_tokens))

    @property
    def prefill_buckets(self) -> tuple["PrefillBucket", ...]:
        """For each of the row buckets, how many requests a launch takes."""
        wanted = (16 if self.device == "cuda" else 1) if self.prefill_requests is None else self.prefill_requests
        wanted = min(wanted, self.max_running_requests)

        def most(rows_of_launch: int, rows: int) -> int:
            return max(1, min(wanted, rows_of_launch // rows))

        return tuple(
            PrefillBucket(rows, most(MOST_PREFILL_ROWS, rows), most(MOST_PREFILL_ROWS_BESIDE_STREAMS, rows))
            for rows in self.row_buckets
        )


@dataclass(frozen=True)
class PrefillBucket:
    """A captured prefill launch: rows a request, and most requests; fewer while somebody reads a running answer."""

    rows: int
    most_requests: int
    most_beside_streams: int

    @property
    def batches(self) -> tuple[int, ...]:
        """Requests of the captured launches: 1, 2, 4, .. and the most."""
        return _buckets(1, self.most_requests)


def _buckets(first: int, largest: int) -> tuple[int, ...]:
    """first, 2 * first, 4 * first, .. below `largest`, and `largest`."""
    sizes = []
    while first < largest:
        sizes.append(first)
        first *= 2
    return (*sizes, largest)
