"""The weights of a target from its shapes alone: how many parameters, in how many bits, on each of several ranks."""

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.engine.deepseek_config import WRAPPER
from slipstream.engine.model_config import ModelConfig

SCALE_BITS = 16  # of a group of INT4 weights


@dataclass(frozen=True)
class Weights:
    """Tensors of one kind.

    Args:
        what: the part of the model, as a plan shows it.
        parameters: of all layers together, on one rank, as the checkpoint has them.
        copies: how often a rank holds them.
        int4: in 4 bits with a scale a group; else in the served type.
    """

    what: str
    parameters: int
    copies: int = 1
    int4: bool = False


def target_weights(target: ModelConfig, ranks: int = 1) -> Iterator[Weights]:
    """What the fullest of so many ranks holds. Layers follow `engine/models/`: a rank's part is rounded up."""
    h, layers = target.hidden_size, target.num_layers
    vocab = _part(target.vocab_size, ranks)
    yield Weights("embedding", vocab * h)
    if not target.tie_word_embeddings:
        yield Weights("head", vocab * h, int4=_int4(target, "lm_head"))
    yield from _attention(target, ranks)
    yield Weights("norms", (2 * layers + 1) * h)
    experts = target.experts
    dense = layers if experts is None else min(layers, experts.first_dense)
    yield Weights(
        "plain blocks",
        dense * 3 * h * _part(target.intermediate_size, ranks),
        int4=_int4(target, "model.layers.0.mlp.gate_proj"),
    )
    if experts is None:
        return
    mixed, block = layers - dense, f"model.layers.{dense}.mlp"
    yield Weights("router", mixed * experts.num * h)  # every rank chooses alike
    yield Weights("router's bias", mixed * experts.num, copies=2)  # fp32
    yield Weights(
        "shared expert",
        mixed * 3 * h * _part(experts.width * experts.shared, ranks),
        int4=_int4(target, f"{block}.shared_experts.gate_proj"),
    )
    yield Weights(
        "routed experts",
        mixed * experts.num * 3 * h * _part(experts.width, ranks),
        int4=_int4(target, f"{block}.experts.0.gate_proj"),
    )


def _attention(target: ModelConfig, ranks: int) -> Iterator[Weights]:
    h, layers, latent = target.hidden_size, target.num_layers, target.latent
    heads = _part(target.num_heads, ranks)
    int4 = _int4(target, "model.layers.0.self_attn.o_proj")
    if latent is None:
        d, kv_heads = target.head_dim, _part(target.num_kv_heads, ranks)
        yield Weights("attention", layers * (2 * heads + 2 * kv_heads) * d * h, int4=int4)
        if target.qk_norm:
            yield Weights("norms of heads", layers * 2 * d)
        return
    c = latent
    whole = h * (c.q_rank + c.cell) + c.q_rank + c.kv_rank  # every rank makes the latents itself
    yield Weights("latents", layers * whole)
    yield Weights("attention", layers * heads * (c.q_rank * (c.nope_dim + c.rope_dim) + c.value_dim * h), int4=int4)
    yield Weights("up-projections", layers * heads * (c.nope_dim + c.value_dim) * c.kv_rank)


def weight_bytes(weights: Weights, target: ModelConfig, size: int) -> int:
    """Bytes of them on the rank. Args: size: bytes of a number in the served type."""
    if weights.int4:
        assert target.quantization is not None
        return (
            weights.copies
            * weights.parameters
            * (4 * target.quantization.group + SCALE_BITS)
            // (8 * target.quantization.group)
        )
    return weights.copies * weights.parameters * size


def _int4(target: ModelConfig, layer: str) -> bool:
    """Whether a layer's weights are INT4, by its name in the checkpoint."""
    prefix = "language_model." if target.architecture == WRAPPER else ""
    return target.quantization is not None and target.quantization.covers(prefix + layer)


def _part(total: int, ranks: int) -> int:
    """Most that a rank holds of an axis."""
    return -(-total // ranks)
