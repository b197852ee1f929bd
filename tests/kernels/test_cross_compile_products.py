"""The matrix products compile for cards that are not here, within their shared memory, and sum in one order.

A program's warps and its reductions must lie the same way for few rows and for many: else a row's bits would hang on
how many rows travel with it. On a GPU the bits themselves are compared.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.kernels.gpu.tiles import SHARED_BYTES

LAUNCHES = Path(__file__).with_name("products_to_compile.py")
Compile = Callable[..., list[dict[str, Any]]]


def reductions(ttgir: str) -> list[str]:
    """Of each `tl.sum`: over which axis, and how the threads of a program lie along it."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    found = []
    pattern = r'"tt\.reduce"\([^)]*\) <\{axis = (\d+) : i32\}>.*?\}\) : \(tensor<[\dx]+xf32, (#\w+)>\) ->'
    for axis, layout in re.findall(pattern, ttgir, re.DOTALL):
        text = layouts[layout]
        lies = {key: re.findall(r"\d+", value)[int(axis)] for key, value in re.findall(r"(\w+) = \[([\d, ]+)\]", text)}
        found.append(f"axis {axis}: {sorted(lies.items())}")
    return sorted(set(found))


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_fits_the_card_and_sums_in_one_order(capability: int, cross_compile: Compile) -> None:
    orders = defaultdict(set)
    for made in cross_compile(LAUNCHES, "linears", capability):
        assert made["shared"] <= SHARED_BYTES[capability], (made["kernel"], made["constants"], made["shared"])
        constants = made["constants"]
        shape = (made["kernel"], constants["K"], constants.get("SUMSQ"), constants.get("NORM"))
        found = reductions(made["ttgir"])
        assert found or constants["SPLIT"] == 1
        orders[shape].add(str(found))
    assert len(orders) >= 3
    assert all(len(found) == 1 for found in orders.values()), orders
