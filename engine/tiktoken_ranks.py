"""The file of a tiktoken vocabulary: a token's bytes and its rank on every line."""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path

from slipstream.engine.errors import SlipstreamError

RANKS = "tiktoken.model"


def read_ranks(path: Path) -> dict[bytes, int]:
    """Bytes of a token -> its rank, which is its id: lines of base64 and a number.

    Raises SlipstreamError for a line that is none, for ranks that are not 0, 1, 2, ..., and where a byte is missing.
    """
    ranks: dict[bytes, int] = {}
    lines = 0
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            text, rank = line.split()
            token = base64.b64decode(text, validate=True)
            ranks[token] = int(rank)
        except (ValueError, binascii.Error):
            raise _wrong(
                path, f"line {number} is {line[:40]!r}", "a token in base64, a space, and its rank, on every line"
            ) from None
        if len(ranks) < (lines := lines + 1):
            raise _wrong(path, f"line {number} names a token that stands above already", "every token once")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise _wrong(path, f"its {len(ranks)} ranks are not 0 to {len(ranks) - 1}", "every rank once, none left out")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise _wrong(path, f"{len(missing)} of the 256 bytes are no token, {missing[0]} the first", "all of them")
    return ranks


def pairs(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Which two tokens are joined, most urgent first: the rank of what they make, then their own."""
    found = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = ranks.get(token[:cut]), ranks.get(token[cut:])
            if left is not None and right is not None:
                found.append((rank, left, right, token[:cut], token[cut:]))
    return [(left, right) for *_, left, right in sorted(found)]


def _wrong(path: Path, found: str, expected: str) -> SlipstreamError:
    return SlipstreamError(f"{path}: {found}", expected=expected, do="copy this file of the checkpoint again")
