"""A conversation as a person should see it before training: what is supervised stands out."""

from collections.abc import Sequence

import torch
from rich.markup import escape

from slipstream.engine.chat import ChatTokenizer, mask_runs


def coloured_sample(
    tokenizer: ChatTokenizer, token_ids: Sequence[int], mask: torch.Tensor, max_tokens: int = 400
) -> str:
    """Decoded text with the supervised tokens highlighted, as rich markup; the template's marks are shown.

    Args:
        tokenizer: of the target.
        token_ids: T ids.
        mask: [T] bool.
        max_tokens: longer conversations are cut, and say so.
    """
    parts = []
    for start, stop, on in mask_runs(mask[:max_tokens]):
        text = escape(tokenizer.decode(token_ids[start:stop], skip_special_tokens=False))
        parts.append(f"[bold green]{text}[/bold green]" if on else f"[dim]{text}[/dim]")
    if len(token_ids) > max_tokens:
        parts.append(f"[dim] ... {len(token_ids) - max_tokens} tokens more[/dim]")
    return "".join(parts)
