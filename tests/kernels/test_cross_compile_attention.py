"""The attention kernels compile without a card for sm_80, sm_90 and sm_120, within a block's shared memory."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.kernels.gpu.tiles import SHARED_BYTES

FILE = Path(__file__).with_name("attention_to_compile.py")


@pytest.mark.parametrize(
    ("function", "capability", "count"),
    [("decode", 90, 9), ("prefill", 90, 5), ("largest", 80, 4), ("largest", 120, 4)],
)
def test_attention_compiles(
    cross_compile: Callable[..., list[dict[str, Any]]], function: str, capability: int, count: int
) -> None:
    launches = cross_compile(FILE, function, capability)
    assert len(launches) == count
    for one in launches:
        assert one["shared"] <= SHARED_BYTES[capability], one["constants"]
        waits = one["ptx"].count("griddepcontrol.wait")
        assert waits == (1 if capability >= 90 else 0), "one wait, whatever path a program takes"
    if function == "decode":
        # A row's sum over a tile is taken in the order of this layout: it must not follow from the number of rows.
        layouts = {
            (one["constants"]["D"], one["constants"]["M"], warps)
            for one in launches
            if one["constants"]["D"] < 256
            for warps in re.findall(r"nvidia_mma<\{[^}]*warpsPerCTA = (\[[^]]*\])", one["ttgir"])
        }
        assert layouts == {(d, m, f"[1, {warps}]") for d, warps in ((64, 8), (128, 4)) for m in (16, 32)}
        # A product and a sum are fused where the kernel says so, and nowhere else: the same line gives the same bits in
        # a loop and outside of it.
        for one in launches:
            assert not re.findall(r"\b(?:mul|add|sub|mad)\.(?:ftz\.)?f32", one["ptx"]), "left to the assembler's choice"


def test_keys_are_read_before_the_wait_where_the_kernel_before_allows_it(
    cross_compile: Callable[..., list[dict[str, Any]]],
) -> None:
    """It does if it lets its successor start only after its own wait: then all before it is done, and nothing but its
    own q, k and v must be waited for."""
    qkv, behind, further, chained = (one["ptx"] for one in cross_compile(FILE, "behind_qkv", 90))

    def read_before_wait(ptx: str) -> int:
        return len(re.findall(r"ld\.global\S*\.v4", ptx[: ptx.index("griddepcontrol.wait")]))

    def settles(ptx: str) -> bool:
        return ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")

    assert [settles(ptx) for ptx in (qkv, behind, chained)] == [True, False, True]
    assert [read_before_wait(ptx) > 0 for ptx in (behind, further, chained)] == [True, False, False]
    # A program without a tile ends there, too, before it has asked for a key.
    before = behind[: behind.index("griddepcontrol.wait")]
    assert before.count("ret;") == 1
    assert not re.search(r"ld\.global\S*\.v4", before[: before.index("ret;")])
    # The next kernel starts when the keys are on the way, so that its weights do not come before them.
    start_next, wait = behind.index("griddepcontrol.launch_dependents"), behind.index("griddepcontrol.wait")
    assert start_next < wait
    assert not re.search(r"ld\.global\S*\.v4", behind[start_next:wait])
    for ptx in (behind, further, chained):
        assert ptx.count("griddepcontrol.wait") == ptx.count("griddepcontrol.launch_dependents") == 1
