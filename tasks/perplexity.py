"""Perplexity of a target on a fixed text of ours: one number that a wrong weight, rope or norm cannot leave alone."""

import math
from collections.abc import Callable, Sequence
from importlib.resources import files

import torch

from slipstream.engine.models import TargetModel
from slipstream.engine.runner import capture_states

LOGIT_ROWS = 128  # rows whose logits over the whole vocabulary exist at one time
WINDOW_TOKENS = 2048  # longest piece read at once; a target with a shorter context reads shorter pieces


def fixed_text() -> str:
    """The text that ships in `configs/`: plain English of several registers."""
    return files("slipstream.configs").joinpath("perplexity.txt").read_text(encoding="utf-8")


def perplexity(
    target: TargetModel, token_ids: Sequence[int], progress: Callable[[int, int], None] | None = None
) -> float:
    """exp of the mean negative log-likelihood of each token given those before it, through the engine's prefill.

    A text longer than the target's context is read in pieces, whose first tokens are not counted.

    Args:
        target: a loaded target.
        token_ids: T ids, T >= 2.
        progress: called with (tokens done, tokens in all).
    """
    size = min(WINDOW_TOKENS, target.config.max_position - 1)
    total, counted = 0.0, 0
    with torch.inference_mode():
        for first in range(0, len(token_ids) - 1, size):
            window = token_ids[first : first + size]
            _, last = capture_states(target, window, ())  # [W, h]
            labels = torch.tensor(list(window[1:]), device=last.device)  # [W - 1]
            for start in range(0, len(labels), LOGIT_ROWS):
                stop = min(start + LOGIT_ROWS, len(labels))
                logits = target.logits(last[start:stop]).float()  # [rows, h] -> [rows, V]
                total += float(torch.nn.functional.cross_entropy(logits, labels[start:stop], reduction="sum"))
                if progress is not None:
                    progress(first + stop, len(token_ids))
            counted += len(labels)
    return math.exp(total / counted)
