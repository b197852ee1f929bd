"""How far rounding alone takes the draft's logits of a round: by running it again, its inputs moved by a last place.

Most rounds of a draft move by a hundredth of their spread where their numbers are rounded otherwise, and single ones,
whose state is small beside what it is the sum of, by all of it. Nor does one order of rounding bound another. So a
round is held against several, drawn for it.
"""

import torch

from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.training.data import Batch
from slipstream.engine.training.unroll import unrolled_states

SAMPLES = 8
SEED = 0
_BITS = {2: torch.int16, 4: torch.int32}  # bytes of a float -> the integer of its size


def unrolled_logits(
    network: Eagle3Network,
    tokens: torch.Tensor,
    features: torch.Tensor,
    num_steps: int,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """The trainer's own pass over one conversation.

    Args:
        network: of any dtype.
        tokens: [n + 1] int64.
        features: [n, F].
        num_steps: K.
        slots: [r] int64, those to have logits of; None is all n.

    Returns:
        [K, r, Vd].
    """
    states = unrolled_states(network, whole_conversation(tokens, features, num_steps, slots), num_steps)
    return torch.stack([network.logits(state[0]) for state in states])  # K x [r, Vd] -> [K, r, Vd]


def whole_conversation(
    tokens: torch.Tensor, features: torch.Tensor, num_steps: int, slots: torch.Tensor | None = None
) -> Batch:
    """A batch of one conversation. tokens [n + 1], features [n, F]; slots [r]: its rows, None is every slot."""
    slots = torch.arange(len(features)) if slots is None else slots
    count = len(slots)
    return Batch(
        tokens=tokens[None],
        features=features[None],
        slots=slots[None],
        supervised=torch.ones(num_steps, 1, count, dtype=torch.bool),
        rows=(torch.arange(count),) * num_steps,
        teacher=features.new_zeros(1, 1),
        teacher_rows=torch.zeros(num_steps, 1, count, dtype=torch.int64),
    )


def relative_errors(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Distance of logits [..., Vd] from the reference's as a share of their spread, [...] fp32."""
    logits, reference = logits.float(), reference.float()
    spread = (reference - reference.mean(-1, keepdim=True)).norm(dim=-1)
    return (logits - reference).norm(dim=-1) / spread


def rounding_errors(
    served: Eagle3Network,
    tokens: torch.Tensor,
    features: torch.Tensor,
    slots: torch.Tensor,
    reference: torch.Tensor,
) -> torch.Tensor:
    """Errors of the served network with every feature moved by a last place, at random, so that all behind it rounds
    otherwise.

    Args:
        served: the draft in the server's dtype.
        tokens: [n + 1] int64.
        features: [n, F] in that dtype.
        slots: [r] int64, those that the rounds draft from.
        reference: [K, r, Vd], in fp32.

    Returns:
        [SAMPLES, K, r].
    """
    generator = torch.Generator().manual_seed(SEED)
    errors = []
    for _ in range(SAMPLES):
        moved = moved_by_a_last_place(features, generator)
        errors.append(relative_errors(unrolled_logits(served, tokens, moved, len(reference), slots), reference))
    return torch.stack(errors)  # SAMPLES x [K, r] -> [SAMPLES, K, r]


def moved_by_a_last_place(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """x [...] of a float dtype; a quarter of its values is the next larger in size, a quarter the next smaller."""
    bits = _BITS[x.element_size()]
    drawn = torch.randint(0, 4, x.shape, generator=generator).to(x.device)
    step = (drawn == 0).to(bits) - (drawn == 1).to(bits)
    return torch.where(x == 0, x, (x.contiguous().view(bits) + step).view(x.dtype))
