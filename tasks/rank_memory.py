"""Memory of one GPU of a deployment, from shapes alone: what a rank holds when all is loaded, captured and full.

Weights and caches are exact. What the kernels and graphs take is an estimate, of the largest tensors that live at the
same time, and is labelled so.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.engine.config import MOST_PREFILL_ROWS, EngineConfig
from slipstream.engine.drafts.eagle3.config import Eagle3Config
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.model_config import ModelConfig
from slipstream.tasks import derived
from slipstream.tasks.contradictions import Check, Finding
from slipstream.tasks.draft_weights import held_parameters
from slipstream.tasks.facts import Facts
from slipstream.tasks.target_weights import target_weights, weight_bytes

GIB = 2**30
GRAPH_BYTES = 32 << 20  # of one captured round: nodes of some hundred kernels, and what they share
CONTEXT_BYTES = 2 * GIB  # CUDA's context, loaded kernels, the buffers of NCCL and of the libraries


@dataclass(frozen=True)
class Part:
    """Bytes of one rank, and how they follow."""

    what: str
    bytes: int
    how: str


@dataclass(frozen=True)
class RankMemory:
    """What the fullest rank holds.

    Args:
        parts: all of it.
        tokens: that its caches hold.
        token_bytes: of one of them, target and draft.
    """

    parts: tuple[Part, ...]
    tokens: int
    token_bytes: int

    @property
    def total(self) -> int:
        return sum(part.bytes for part in self.parts)


def rank_memory(facts: Facts) -> RankMemory | None:
    """The plan of a rank's memory; None while shapes are unknown or contradict each other (checks of their own say)."""
    deployment, target = facts.deployment, facts.target
    server, speculation = deployment.server, deployment.speculation
    if target is None or not facts.slots or server.engine != "slipstream" or server.dtype not in derived.BYTES:
        return None
    steps = speculation.max_num_steps if speculation.num_steps == "auto" else speculation.num_steps
    try:
        draft = derived.draft_config(deployment, target, facts.slots) if steps else None
        engine = EngineConfig(
            num_steps=steps,
            max_running_requests=server.max_running_requests,
            max_context_tokens=server.max_context_tokens,
            block_size_tokens=server.block_size_tokens,
            prefill_chunk_tokens=server.prefill_chunk_tokens,
            dtype=server.dtype,
            device="cuda",
        )
    except SlipstreamError:
        return None
    return _memory(target, draft, engine, server.tensor_parallel_size)


def _memory(target: ModelConfig, draft: Eagle3Config | None, engine: EngineConfig, ranks: int) -> RankMemory:
    size, tokens = derived.BYTES[engine.dtype], engine.total_blocks * engine.block_size_tokens
    cell = target_cell(target, engine.dtype, ranks)
    draft_cell = 0
    parts = [*_weights(target, ranks, size)]
    if draft is not None:
        draft_cell = derived.draft_cell_bytes(draft, engine.dtype, ranks)
        parts.append(
            Part(
                "draft",
                held_parameters(draft, ranks) * size,
                f"fc{'' if draft.latent is None else ' and latents'} on every rank, the rest over {ranks}",
            )
        )
    each = "" if target.latent is None else ", latents on every rank"
    parts.append(Part("KV cache", tokens * cell, f"{tokens:,} tokens x {cell:,} bytes{each}"))
    if draft is not None:
        parts.append(Part("draft's KV cache", tokens * draft_cell, f"{tokens:,} tokens x {draft_cell:,} bytes"))
    own = 0 if draft is None else 2 * draft.max_position * draft.rope_dim * size
    parts.append(Part("rotary tables", rotary_bytes(target, size) + own, f"{target.max_position:,} positions"))
    rounds = len(engine.batch_buckets) * (2 if draft is not None else 1)
    parts.append(Part("graphs", rounds * GRAPH_BYTES, f"estimate: {rounds} captured rounds"))
    rows = max(MOST_PREFILL_ROWS, engine.prefill_chunk_tokens)
    parts.append(Part("workspace", _workspace(target, engine, ranks, rows), f"estimate: {rows:,} rows of prompts"))
    parts.append(Part("context", CONTEXT_BYTES, "estimate: CUDA, kernels, NCCL"))
    return RankMemory(tuple(parts), tokens, cell + draft_cell)


def _weights(target: ModelConfig, ranks: int, size: int) -> Iterator[Part]:
    everything = [*target_weights(target, ranks)]
    experts = [weight for weight in everything if weight.what == "routed experts"]
    for weight in experts:
        bits = 8 * weight_bytes(weight, target, size) / weight.parameters
        yield Part("routed experts", weight_bytes(weight, target, size), f"{bits:g} bits a weight, over {ranks} ranks")
    others = [weight for weight in everything if weight not in experts]
    total = sum(weight_bytes(weight, target, size) for weight in others)
    yield Part("other weights", total, ", ".join(weight.what for weight in others if weight.parameters))


def target_cell(target: ModelConfig, dtype: str, ranks: int) -> int:
    """Bytes that a rank's cache keeps of one token in all layers."""
    if target.latent is not None:
        return derived.cell_bytes(target, dtype)
    return derived.kv_bytes_per_token(target.num_layers, -(-target.num_kv_heads // ranks), target.head_dim, dtype)


def rotary_bytes(target: ModelConfig, size: int) -> int:
    """Bytes of the table of angles. Args: size: bytes of a number in the served type."""
    dim = target.head_dim if target.latent is None else target.latent.rope_dim
    return 2 * target.max_position * dim * size  # cos and sin


def _workspace(target: ModelConfig, engine: EngineConfig, ranks: int, rows: int) -> int:
    """Largest tensors of a prefill launch, and of the logits: in fp32 where sums are."""
    h = target.hidden_size
    stream = rows * h * (3 * 4 + 3 * 2)  # residual, partial sum and its exchange; normed rows, outputs
    widest = 2 * -(-target.intermediate_size // ranks) * rows * 2
    if target.experts is not None:
        e = target.experts
        widest = max(widest, rows * e.per_token * (h * 4 + 3 * -(-e.width // ranks) * 2))
    logits = engine.max_running_requests * (engine.num_steps + 1) * target.vocab_size * 4
    return stream + widest + logits


# ---- checks ----------------------------------------------------------------------------------------------------------


def _fits(facts: Facts) -> Iterator[Finding]:
    gib, memory = facts.deployment.host.gpu_memory_gib, rank_memory(facts)
    if gib is None or memory is None:
        return
    room = int(gib * GIB)
    if memory.total <= room:
        return
    shown = ", ".join(f"{part.what} {part.bytes / 1e9:.1f}" for part in memory.parts)
    server = facts.deployment.server
    left = room - (memory.total - memory.tokens * memory.token_bytes)
    tokens = max(0, left // memory.token_bytes)
    steps = facts.deployment.speculation
    beside = (steps.max_num_steps if steps.num_steps == "auto" else steps.num_steps) + 1 + server.block_size_tokens
    context = tokens // server.max_running_requests - beside
    requests = (tokens - server.block_size_tokens) // (server.max_context_tokens + beside)
    ways = []
    if context >= 2:
        ways.append(f"write server.max_context_tokens: {context} or less")
    if requests >= 1:
        ways.append(f"write server.max_running_requests: {requests} or less")
    ways.append("write a larger server.tensor_parallel_size, or serve on GPUs with more memory")
    yield Finding(
        "gpu-memory",
        f"{facts.say('host.gpu_memory_gib')} is {room / 1e9:.1f} GB; a rank needs {memory.total / 1e9:.1f} GB: {shown}",
        "a GPU that holds a rank's weights, caches, graphs and workspace"
        + ("" if left > 0 else ": here the caches would have no room at all"),
        tuple(ways),
        runbook="gpu-memory-plan.md",
    )


def _expert_groups(facts: Facts) -> Iterator[Finding]:
    target, ranks = facts.target, facts.deployment.server.tensor_parallel_size
    if target is None or target.experts is None or facts.deployment.server.engine != "slipstream":
        return
    width = target.experts.width
    if width % ranks or (target.quantization is not None and width // ranks % target.quantization.group):
        group = 1 if target.quantization is None else target.quantization.group
        sizes = [n for n in range(1, 17) if width % (n * group) == 0]
        yield Finding(
            "expert-groups",
            f"{facts.say('server.tensor_parallel_size')}, but an expert is {width} wide in groups of {group}",
            "whole groups of every expert on every rank",
            (f"write server.tensor_parallel_size: one of {', '.join(map(str, sizes))}",),
        )


def _same_shapes(facts: Facts) -> Iterator[Finding]:
    if facts.stated is not None and facts.target is not None and facts.stated != facts.target:
        named = [name for name, value in vars(facts.stated).items() if getattr(facts.target, name) != value]
        yield Finding(
            "target-shapes",
            f"{facts.say('target.shapes')}: its {', '.join(named)} is not that of the target that is here",
            "the shapes of this very target",
            ("leave target.shapes out: the target's own config.json is there",),
        )


RANK_MEMORY: tuple[Check, ...] = (
    Check("target-shapes", "the shapes that are stated are those of the target", _same_shapes),
    Check("expert-groups", "every rank has whole groups of every expert", _expert_groups),
    Check("gpu-memory", "a GPU holds what a rank needs", _fits),
)
