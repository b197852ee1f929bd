"""What an EAGLE-3 draft is: every value that changes its parameters or its outputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.engine.capture import CapturePlan
from slipstream.engine.deepseek_config import Latent
from slipstream.engine.errors import SlipstreamError


@dataclass(frozen=True)
class Eagle3Config:
    """Shapes and switches of one draft.

    Args:
        hidden_size: width h of the draft's residual stream; the embedding is the target's, so h is the target's too.
        intermediate_size: width of the draft's MLP.
        num_heads, num_kv_heads, head_dim: attention of the draft's one layer (its inputs are 2h wide). With latents
            every head is its own KV head, and head_dim is that of queries and keys.
        rms_norm_eps: of every norm in the draft.
        rope_theta, rope_scaling: rotary embedding; `rope_scaling` as in a checkpoint's config, or None.
        max_position: length of the rope table in tokens; at least the served context (F14).
        vocab_size: V, of the target.
        draft_vocab_size: Vd <= V, tokens that the draft can propose.
        target_hidden_size: width of one captured state.
        slots: canonical ids of the features, in the order in which `fc` reads them.
        target_num_layers: N, which gives the slots their range and the teacher its slot.
        norm_before_residual: the residual starts from the normed g instead of g.
        norm_before_fc: one RMSNorm over all features together.
        fc_norm: one RMSNorm a slot (EAGLE-3.1); excludes `norm_before_fc`.
        norm_output: the state fed back is post-norm (EAGLE-3.1) instead of pre-norm.
        latent: of multi-head latent attention (MLA); None: grouped KV heads.

    Raises SlipstreamError when values contradict each other.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_position: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    slots: tuple[int, ...]
    target_num_layers: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    latent: Latent | None = None

    def __post_init__(self) -> None:
        latent = self.latent
        if latent is not None:
            size = latent.nope_dim + latent.rope_dim
            if (self.num_kv_heads, self.head_dim) != (self.num_heads, size):
                raise SlipstreamError(
                    f"latent attention with {self.num_kv_heads} KV heads and a head size of {self.head_dim}",
                    expected=f"those of its {self.num_heads} heads of {latent.nope_dim} + {latent.rope_dim}",
                    do="leave draft.num_kv_heads out where draft.attention is latent",
                )
        if self.norm_before_fc and self.fc_norm:
            raise SlipstreamError(
                "norm_before_fc and fc_norm are both on",
                expected="at most one norm before fc: one over all features (norm_before_fc) or one a slot (fc_norm)",
                do="switch one of draft.norm_before_fc and draft.fc_norm off",
            )
        if self.num_heads % self.num_kv_heads:
            raise SlipstreamError(
                f"the draft has {self.num_heads} heads and {self.num_kv_heads} KV heads",
                expected="heads that divide evenly over the KV heads",
                do="set draft.num_heads to a multiple of draft.num_kv_heads",
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise SlipstreamError(
                f"draft vocabulary of {self.draft_vocab_size} tokens, target vocabulary of {self.vocab_size}",
                expected="1 <= draft_vocab_size <= the target's",
                do="lower draft.draft_vocab_size",
            )
        if not self.slots:
            raise SlipstreamError(
                "the draft names no slots", expected="one or more captured states", do="set capture.slots"
            )

    @property
    def plan(self) -> CapturePlan:
        """The capture plan whose `select` makes this draft's features."""
        return CapturePlan(self.slots, self.target_num_layers)

    @property
    def rope_dim(self) -> int:
        """How much of a head is rotated."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def feature_size(self) -> int:
        """Width of the features that `fc` reads: slots x target_hidden_size."""
        return len(self.slots) * self.target_hidden_size
