"""The attention kernels compile without a card for sm_80, sm_90 and sm_120, within a block's shared memory."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
FILE = Path(__file__).with_name("attention_to_compile.py")
SHARED_KB = {80: 163, 90: 227, 120: 99}


@pytest.mark.parametrize(
    ("function", "capability", "count"),
    [("decode", 90, 6), ("prefill", 90, 5), ("largest", 80, 4), ("largest", 120, 4)],
)
def test_attention_compiles(
    cross_compile: Callable[..., list[dict[str, Any]]], function: str, capability: int, count: int
) -> None:
    launches = cross_compile(FILE, function, capability)
    assert len(launches) == count
    for one in launches:
        assert one["shared"] <= SHARED_KB[capability] * 1024, one["constants"]
        waits = one["ptx"].count("griddepcontrol.wait")
        assert waits == (1 if capability >= 90 else 0), "one wait, whatever path a program takes"
    if function == "decode":
        # A row's sum over a tile is taken in the order of this layout: it must not follow from the number of rows.
        layouts = {
            (one["constants"]["M"], warps)
            for one in launches
            if one["constants"]["D"] < 256
            for warps in re.findall(r"nvidia_mma<\{[^}]*warpsPerCTA = (\[[^]]*\])", one["ttgir"])
        }
        assert layouts == {(16, "[1, 4]"), (32, "[1, 4]")}
