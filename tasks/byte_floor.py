"""The least time of a step: the bytes of weights that a rank reads, by the bandwidth of its GPU. No step is faster.

Not a forecast of an engine: sums over ranks, caches and gaps come on top. It shows what a chain of K costs at
least, and so which K can pay for a given acceptance.
"""

from dataclasses import dataclass

from slipstream.engine.drafts.eagle3.config import Eagle3Config
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.speed_forecast import chain_accept_length, needed_conditional
from slipstream.tasks import derived
from slipstream.tasks.draft_weights import rank_parameters
from slipstream.tasks.facts import Facts
from slipstream.tasks.target_weights import target_weights, weight_bytes

# What others measured: (what, accept length, at which K, how). Not by our engine, and not of this deployment's draft.
PUBLISHED = (
    (
        "lightseekorg/kimi-k2.5-eagle3 on MT-Bench",
        2.687,
        3,
        "its card: a chain of 3, bonus token included; sampling and acceptance rule are not stated there",
    ),
    (
        "lightseekorg/kimi-k2.5-eagle3 on GSM8K",
        3.201,
        3,
        "its card: a chain of 3, bonus token included; sampling and acceptance rule are not stated there",
    ),
    (
        "lightseekorg/kimi-k2.5-eagle3-mla on MT-Bench",
        2.940,
        3,
        "its card: a chain of 3, bonus token included; sampling and acceptance rule are not stated there",
    ),
    (
        "lightseekorg/kimi-k2.5-eagle3-mla on GSM8K",
        3.017,
        3,
        "its card: a chain of 3, bonus token included; sampling and acceptance rule are not stated there",
    ),
)


@dataclass(frozen=True)
class Floor:
    """Of one stream: bytes and milliseconds of a verify step of K + 1 rows, and those of the round's K draft steps."""

    num_steps: int
    step_bytes: int
    step_ms: float
    draft_ms: float

    @property
    def round_ms(self) -> float:
        return self.step_ms + self.draft_ms

    def tokens_per_second(self, accept_length: float) -> float:
        return 1000 * accept_length / self.round_ms


def step_bytes(target: ModelConfig, ranks: int, rows: int, dtype: str) -> int:
    """Bytes of weights that the fullest rank reads for so many rows, whose experts are chosen alike often and apart."""
    size, total = derived.BYTES[dtype], 0.0
    for weights in target_weights(target, ranks):
        if weights.what == "embedding" and not target.tie_word_embeddings:
            continue  # a few rows of it
        read = weight_bytes(weights, target, size) / weights.copies
        if weights.what == "routed experts":
            assert target.experts is not None
            read *= 1 - (1 - target.experts.per_token / target.experts.num) ** rows
        total += read
    return int(total)


def draft_step_bytes(draft: Eagle3Config, ranks: int, dtype: str) -> int:
    """Of one draft step: all but the embedding and `fc`, which is read once a round."""
    once = draft.feature_size * draft.hidden_size + -(-draft.vocab_size // ranks) * draft.hidden_size
    return (rank_parameters(draft, ranks) - once) * derived.BYTES[dtype]


def floors(facts: Facts, largest: int | None = None) -> tuple[Floor, ...]:
    """K = 0 .. `largest`, or the largest served; empty while shapes or host.gpu_bandwidth_tb are not known."""
    deployment, target = facts.deployment, facts.target
    bandwidth, server, speculation = deployment.host.gpu_bandwidth_tb, deployment.server, deployment.speculation
    if bandwidth is None or target is None or not facts.slots or server.engine != "slipstream":
        return ()
    try:
        draft = derived.draft_config(deployment, target, facts.slots)
    except SlipstreamError:
        return ()  # a check of its own says why
    served = speculation.max_num_steps if speculation.num_steps == "auto" else speculation.num_steps
    largest = served if largest is None else largest
    ranks, size = server.tensor_parallel_size, derived.BYTES[server.dtype]
    made = []
    for steps in range(largest + 1):
        read = step_bytes(target, ranks, steps + 1, server.dtype)
        fused = draft.feature_size * draft.hidden_size * size if steps else 0
        drafts = fused + steps * draft_step_bytes(draft, ranks, server.dtype)
        made.append(Floor(steps, read, read / bandwidth / 1e9, drafts / bandwidth / 1e9))
    return tuple(made)


def best_at_floor(found: tuple[Floor, ...], length: float, at: int) -> tuple[Floor, float]:
    """(the K of most tokens a second at the floor, its accept length), by an acceptance that is the same at each draft.

    Args: length, at: accept length that was measured with K = `at`.
    """
    conditional = needed_conditional(length, at) or 0.0
    lengths = {floor.num_steps: chain_accept_length(conditional, floor.num_steps) for floor in found}
    best = max(found, key=lambda floor: floor.tokens_per_second(lengths[floor.num_steps]))
    return best, lengths[best.num_steps]
