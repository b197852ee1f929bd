"""The kernels of latent attention compile without a card for three architectures, within a block's shared memory."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.kernels.gpu.tiles import SHARED_BYTES

FILE = Path(__file__).with_name("mla_to_compile.py")


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize(("function", "count"), [("attention", 2), ("prefill", 1), ("small_steps", 7)])
def test_latent_attention_compiles(
    cross_compile: Callable[..., list[dict[str, Any]]], function: str, capability: int, count: int
) -> None:
    """One and sixteen rows of one and two requests run one kernel: bits cannot hang on their number."""
    launches = cross_compile(FILE, function, capability)
    assert len(launches) == count, [one["constants"] for one in launches]
    for one in launches:
        assert one["shared"] <= SHARED_BYTES[capability], one["constants"]
        waits = one["ptx"].count("griddepcontrol.wait")
        assert waits == (1 if capability >= 90 else 0), "one wait, whatever path a program takes"
        if one["kernel"] in ("_chunks", "_combine", "_prefill"):
            assert not re.findall(r"\b(?:mad)\.(?:ftz\.)?f32", one["ptx"]), "left to the assembler's choice"
