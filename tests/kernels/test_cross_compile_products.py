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
    pattern = r'"tt\.reduce"\([^)]*\) <\{axis = (\d+) : i32\}>(.*?)\}\) : \(tensor<[\dx]+xf32, (#\w+)>\) ->'
    for axis, body, layout in re.findall(pattern, ttgir, re.DOTALL):
        if "arith.addf" in body:
            lists = re.findall(r"(\w+) = \[([\d, ]+)\]", layouts[layout])
            lies = {key: re.findall(r"\d+", value)[int(axis)] for key, value in lists}
            found.append(f"axis {axis}: {sorted(lies.items())}")
    return sorted(set(found))


@pytest.mark.parametrize(("launches", "capability"), [("few_products", 80), ("products", 90), ("few_products", 120)])
def test_fits_the_card_and_sums_in_one_order(launches: str, capability: int, cross_compile: Compile) -> None:
    orders, kinds = defaultdict(set), defaultdict(set)
    for made in cross_compile(LAUNCHES, launches, capability):
        assert made["shared"] <= SHARED_BYTES[capability], (made["kernel"], made["constants"], made["shared"])
        constants = made["constants"]
        if "K" not in constants:
            continue
        found = reductions(made["ttgir"])
        assert found or constants["SPLIT"] == 1
        made_for = {k: v for k, v in constants.items() if k not in ("BLOCK_M", "NORM", "SUMSQ")}
        orders[made["kernel"], str(constants | {"BLOCK_M": None})].add(str(found))
        kinds[made["kernel"], str(made_for)].add(str(set(re.findall(r"versionMajor = (\d)", made["ttgir"]))))
    assert orders
    assert [key for key, found in orders.items() if len(found) > 1] == []
    assert [key for key, found in kinds.items() if len(found) > 1] == []  # of matrix instructions
