"""Does the supervision of the draft's slots follow the labels? Checked against the answers, not against the shift."""

from collections.abc import Collection, Sequence

import torch

from slipstream.engine.errors import SlipstreamError


def check_slot_mask(
    supervised: torch.Tensor, spans: Sequence[tuple[int, int]], step: int, *, skip: Collection[str] = ()
) -> None:
    """Compares a mask over slots with what the answers' spans say.

    Slot t at `step` embeds x_{t+step} and predicts x_{t+1+step}. Of an answer at positions a..b-1 the target itself
    gives the first token, so its slots are a - 1 .. b - 2 - step, and no others.

    Args:
        supervised: [T] bool, as `alignment.slot_mask` gives it.
        spans: (start, stop) of each answer, its end token included.
        step: draft step, 1-based.
        skip: faults whose check is switched off; only the tests of the faults use it.

    Raises SlipstreamError (F10) naming the first slot that differs.
    """
    expected = torch.zeros_like(supervised)
    for start, stop in spans:
        first, last = max(start - 1, 0), stop - 2 - step
        if last >= first:
            expected[first : last + 1] = True
    wrong = (supervised != expected).nonzero().flatten().tolist()
    if not wrong or "F10" in skip:
        return
    slot = wrong[0]
    is_on = bool(supervised[slot])
    raise SlipstreamError(
        f"the loss mask does not follow the labels at step {step}: slot {slot} is {'' if is_on else 'not '}supervised, "
        f"its label is token {slot + 1 + step}, the answers are {list(spans)[:3]} ({len(wrong)} slots differ)",
        expected="slot t supervised exactly when tokens t+1 .. t+1+step all belong to one answer",
        do="shift the mask with the labels: use engine/alignment.py and nothing else",
        fault="F10",
    )
