"""What follows from a deployment and its target: the draft's shape, layer ids, bytes of a token. No tensor is made."""

from typing import TYPE_CHECKING

from slipstream.engine.drafts.eagle3.config import Eagle3Config
from slipstream.engine.drafts.eagle3.hf_config import engine_ids, scaling_alone
from slipstream.engine.drafts.eagle3.layer_ids import KNOWN_VERSIONS, family_of
from slipstream.engine.model_config import ModelConfig
from slipstream.tasks.target_weights import target_weights

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
TOKEN_ID_AND_MASK_BYTES = 5  # int32 token id, uint8 loss mask


def draft_config(deployment: "Deployment", target: ModelConfig, slots: tuple[int, ...]) -> Eagle3Config:
    """The draft that a deployment describes for a target: what it leaves out is the target's.

    Raises SlipstreamError when the values contradict each other.
    """
    draft = deployment.draft
    return Eagle3Config(
        hidden_size=target.hidden_size,
        intermediate_size=draft.intermediate_size or target.intermediate_size,
        num_heads=draft.num_heads or target.num_heads,
        num_kv_heads=draft.num_kv_heads or target.num_kv_heads,
        head_dim=target.head_dim if target.latent is None else target.latent.value_dim,  # its heads have no latents
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
    )


def trained_parameters(draft: Eagle3Config) -> int:
    """Parameters that training changes: all but the embedding, which is the target's."""
    h, d = draft.hidden_size, draft.head_dim
    attention = 2 * h * (draft.num_heads + 2 * draft.num_kv_heads) * d + draft.num_heads * d * h  # inputs are 2h wide
    norms = 4 * h  # input_layernorm, hidden_norm, post_attention_layernorm, norm
    before_fc = draft.feature_size if draft.norm_before_fc or draft.fc_norm else 0
    mlp = 3 * h * draft.intermediate_size
    return draft.feature_size * h + attention + mlp + norms + before_fc + draft.draft_vocab_size * h


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
