"""How often two right computations in bf16 may choose another token: as asked, or as the reference itself does.

bf16 logits lie so close together that rounding alone changes an argmax. How often depends on the model and the texts,
so it is measured on them, twice, and the smaller result counts, with two standard errors of the count:

- transformers against itself, where only its attention is another of its own (eager in place of sdpa);
- transformers against itself in fp32. On a CPU we and transformers call the same products and round at the same places,
  and differ from each other no more often than it does from fp32 (SmolLM2, 5,630 positions: 43 against 46). A card's
  kernels are our own, and ranks sum in their own order: the difference of two independent roundings is sqrt(2) times
  as large as one, so it changes an argmax sqrt(2) times as often, since small gaps are evenly spread (74 against 48).
  A target with routed experts is our own arithmetic on a CPU, too: we sum experts in fp32, transformers in bf16, and
  latent attention is absorbed.

Where transformers with its two attentions stays within what was asked, so must we.
"""

STANDARD_ERRORS = 2.0  # of a count of positions
MAX_ERROR_RATIO = 1.5  # our bf16 error against fp32, as a multiple of that of transformers in bf16
MIN_POSITIONS = 2  # a short run may differ at so few, whatever their share


def allowed_differences(
    asked_share: float, positions: int, self_differ: int, fp32_differ: int, independent: bool
) -> float:
    """At how many positions we may choose another token than transformers in bf16.

    Args:
        asked_share: of the positions, what the deployment asks for.
        positions: compared.
        self_differ: of them, where transformers in bf16 differs from itself with its other attention.
        fp32_differ: where it differs from itself in fp32.
        independent: our roundings are not its own: on a card, and where ranks sum in another order.
    """
    asked = asked_share * positions
    reached = min(self_differ, fp32_differ * 2**0.5 if independent else fp32_differ)
    if self_differ > asked:  # of rare events: the error of a count is the square root of it
        asked = max(asked, reached + STANDARD_ERRORS * reached**0.5)
    return max(asked, MIN_POSITIONS)
