"""What a draft weighs, from its shapes alone: parameters, of all or of one of several ranks, and a cell of its cache.

Layers follow `engine/drafts/eagle3/network.py`: `fc`, norms and what makes latents are whole on every rank, the rest is
cut, a rank's part rounded up.
"""

from slipstream.engine.drafts.eagle3.config import Eagle3Config


def layer_and_fc(draft: Eagle3Config, ranks: int = 1) -> int:
    """Parameters of `fc`, the decoder layer and all norms."""
    h, feature = draft.hidden_size, draft.feature_size
    norms = 4 * h + (feature if draft.norm_before_fc or draft.fc_norm else 0)
    return feature * h + _attention(draft, ranks) + 3 * h * _part(draft.intermediate_size, ranks) + norms


def rank_parameters(draft: Eagle3Config, ranks: int) -> int:
    """What the fullest rank reads from the draft's files."""
    tables = _part(draft.draft_vocab_size, ranks) + _part(draft.vocab_size, ranks)  # head, embedding
    return layer_and_fc(draft, ranks) + tables * draft.hidden_size


def held_parameters(draft: Eagle3Config, ranks: int) -> int:
    """What it holds of them: no embedding, which is the target's own, and the up-projections of latents twice."""
    embedding = _part(draft.vocab_size, ranks) * draft.hidden_size
    twice = _up_projections(draft, ranks) if draft.latent is not None else 0
    return rank_parameters(draft, ranks) - embedding + twice


def cell_numbers(draft: Eagle3Config, ranks: int) -> int:
    """Numbers that a rank's cache keeps of one token: keys and values of its heads, or the whole latent."""
    if draft.latent is not None:
        return draft.latent.cell
    return 2 * _part(draft.num_kv_heads, ranks) * draft.head_dim


def _attention(draft: Eagle3Config, ranks: int) -> int:
    h, c, heads = draft.hidden_size, draft.latent, _part(draft.num_heads, ranks)
    if c is None:
        kv_heads, d = _part(draft.num_kv_heads, ranks), draft.head_dim
        return 2 * h * (heads + 2 * kv_heads) * d + heads * d * h  # inputs are 2h wide
    latents = 2 * h * (c.q_rank + c.cell) + c.q_rank + c.kv_rank  # on every rank, with their norms
    return latents + heads * (c.q_rank * draft.head_dim + c.value_dim * h) + _up_projections(draft, ranks)


def _up_projections(draft: Eagle3Config, ranks: int) -> int:
    c = draft.latent
    assert c is not None
    return _part(draft.num_heads, ranks) * (c.nope_dim + c.value_dim) * c.kv_rank


def _part(total: int, ranks: int) -> int:
    return -(-total // ranks)
