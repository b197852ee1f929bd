"""What follows from a deployment and its target: the draft's shape, layer ids, bytes of a token. No tensor is made."""

from typing import TYPE_CHECKING

from slipstream.engine.drafts.eagle3.config import Eagle3Config
from slipstream.engine.drafts.eagle3.hf_config import engine_ids, scaling_alone
from slipstream.engine.drafts.eagle3.layer_ids import KNOWN_VERSIONS, family_of
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.model_config import ModelConfig
from slipstream.tasks.draft_weights import cell_numbers, layer_and_fc
from slipstream.tasks.target_weights import target_weights

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
TOKEN_ID_AND_MASK_BYTES = 5  # int32 token id, uint8 loss mask


def draft_config(deployment: "Deployment", target: ModelConfig, slots: tuple[int, ...]) -> Eagle3Config:
    """The draft that a deployment describes for a target: what it leaves out is the target's.

    Raises SlipstreamError when the values contradict each other.
    """
    draft, latent = deployment.draft, None
    heads, kv_heads = draft.num_heads or target.num_heads, draft.num_kv_heads or target.num_kv_heads
    # Grouped heads of a target with latents are as wide as its values.
    head_dim = target.head_dim if target.latent is None else target.latent.value_dim
    if draft.attention == "latent":
        latent = target.latent
        if latent is None:
            raise SlipstreamError(
                f"draft.attention is latent, and the target ({target.architecture}) has no latents to take sizes from",
                expected="a target with latent attention (DeepSeek-V3, Kimi-K2)",
                do="write draft.attention: grouped",
            )
        kv_heads, head_dim = draft.num_kv_heads or heads, latent.nope_dim + latent.rope_dim
    return Eagle3Config(
        hidden_size=target.hidden_size,
        intermediate_size=draft.intermediate_size or target.intermediate_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        rope_scaling=scaling_alone(target.rope_scaling),
        max_position=draft.max_context_tokens or deployment.server.max_context_tokens,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft.draft_vocab_size or target.vocab_size,
        target_hidden_size=target.hidden_size,
        slots=slots,
        target_num_layers=target.num_layers,
        norm_before_residual=draft.norm_before_residual,
        norm_before_fc=draft.norm_before_fc,
        fc_norm=draft.fc_norm,
        norm_output=draft.norm_output,
        latent=latent,
    )


def trained_parameters(draft: Eagle3Config) -> int:
    """Parameters that training changes: all but the embedding, which is the target's."""
    return layer_and_fc(draft) + draft.draft_vocab_size * draft.hidden_size


def embedding_parameters(draft: Eagle3Config) -> int:
    """Parameters of the draft's embedding, a frozen copy of the target's."""
    return draft.vocab_size * draft.hidden_size


def target_parameters(target: ModelConfig) -> int:
    """Parameters of a target, by the checkpoint: what a rank holds of them is rank_memory.py's."""
    return sum(weight.parameters for weight in target_weights(target))


def store_bytes_per_token(num_slots: int, hidden_size: int, dtype: str) -> tuple[int, int]:
    """Bytes of one token in the hidden-state store: (an answer's token, any other token).

    An answer's token also has its teacher state. Token id and loss mask are included.
    """
    state = hidden_size * BYTES[dtype]
    other = num_slots * state + TOKEN_ID_AND_MASK_BYTES
    return other + state, other


def cell_bytes(target: ModelConfig, dtype: str) -> int:
    """Bytes that the target's cache keeps of one token in all layers: keys and values of all heads, or latents."""
    if target.latent is not None:
        return target.num_layers * target.latent.cell * BYTES[dtype]
    return kv_bytes_per_token(target.num_layers, target.num_kv_heads, target.head_dim, dtype)


def draft_cell_bytes(draft: Eagle3Config, dtype: str, ranks: int = 1) -> int:
    """Bytes that the draft's cache keeps of one token: all of them, or a rank's."""
    return cell_numbers(draft, ranks) * BYTES[dtype]


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: str) -> int:
    """Bytes of the keys and values of one token."""
    return 2 * layers * kv_heads * head_dim * BYTES[dtype]


def ids_for_engines(draft: Eagle3Config, target: ModelConfig) -> dict[str, str]:
    """Engine and version -> the layer ids to write so that it captures the draft's slots, or why it cannot serve it."""
    found = engine_ids(draft, family_of(target.architecture))
    return {
        f"{engine.value} {KNOWN_VERSIONS[engine]}": ids if isinstance(ids, str) else str(list(ids))
        for engine, ids in found.items()
    }
