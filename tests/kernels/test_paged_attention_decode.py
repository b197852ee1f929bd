"""The decode and verify kernel against softmax written out in fp64, its bits, and what it must not read.

The fp32 tile holds 32 keys at head_dim 16, a group 256: lengths of 40 to 600 have one tile, several, several groups.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slipstream.kernels.paged_attention import paged_attention as twin
from slipstream.kernels.paged_attention import plan_rows

gpu = pytest.importorskip("slipstream.kernels.gpu.paged_attention")
split = pytest.importorskip("slipstream.kernels.gpu.attention_split")
_HERE = Path(__file__)


@pytest.fixture(scope="module")
def paged(load_test_module: Callable[[Path], ModuleType]) -> ModuleType:
    return load_test_module(_HERE.with_name("paged_case.py"))


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def counters_are_zero() -> bool:
    # Other tests launch on tensors that hold nothing (meta), to see that nobody waits for the device.
    held = [workspace.counters for device, workspace in split._WORKSPACES.items() if device.type != "meta"]
    assert held
    return not any(bool(counters.any()) for counters in held)


@pytest.mark.parametrize(
    ("starts", "num_rows", "heads", "kv_heads", "window", "programs"),
    [
        ([0], 1, 2, 1, None, 264),  # the first token
        ([37, 0, 90], 3, 6, 2, None, 264),  # one tile, part of one, four
        ([270, 31], 5, 4, 2, None, 264),  # two groups, tile by tile; a border of tiles inside the rows
        ([600], 2, 3, 1, None, 2),  # three groups, group by group
        ([300, 70], 4, 4, 2, 50, 264),  # a window that begins inside a tile
        ([520], 2, 2, 1, 20, 264),  # a window across the border of two groups
        ([520], 1, 2, 1, 1, 4),  # only itself
        ([100], 4, 9, 1, None, 264),  # more folded rows than a program takes
    ],
)
def test_rows_are_the_softmax(
    kernel_device: str,
    paged: ModuleType,
    starts: list[int],
    num_rows: int,
    heads: int,
    kv_heads: int,
    window: int | None,
    programs: int,
) -> None:
    case = paged.PagedCase.of([s + num_rows for s in starts], kv_heads, 16, torch.float32, kernel_device)
    positions = paged.rows_at(starts, num_rows, kernel_device)
    q = case.queries(positions, heads)
    got = gpu.paged_attention(q, case.cache, case.table, positions, 0.3, window, split.Cut(programs))
    torch.testing.assert_close(got.double(), case.softmax(q, positions, 0.3, window), atol=3e-6, rtol=3e-6)
    assert counters_are_zero()


@pytest.mark.parametrize(("head_dim", "dtype"), [(96, torch.float32), (256, torch.float32), (64, torch.bfloat16)])
def test_head_sizes_and_bf16_are_the_softmax_and_the_twin(
    kernel_device: str, paged: ModuleType, head_dim: int, dtype: torch.dtype
) -> None:
    case = paged.PagedCase.of([150, 43], 1, head_dim, dtype, kernel_device)
    positions = paged.rows_at([147, 40], 3, kernel_device)
    q, scale = case.queries(positions, 2), head_dim**-0.5
    got = gpu.paged_attention(q, case.cache, case.table, positions, scale).double()
    tolerance = 1e-2 if dtype == torch.bfloat16 else 3e-6
    torch.testing.assert_close(got, case.softmax(q, positions, scale), atol=tolerance, rtol=tolerance)
    clean = case.cache.nan_to_num().cpu()  # the twin multiplies masked cells by 0
    want = twin(q.cpu(), clean, plan_rows(case.table.cpu(), positions.cpu(), 8), scale)
    torch.testing.assert_close(got.cpu(), want.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 45])
def test_a_row_keeps_its_bits_in_any_company(kernel_device: str, paged: ModuleType, window: int | None) -> None:
    """Alone and beside other rows, which may see further tiles; with padding; beside other requests; split otherwise.

    The rows cross the border of two tiles and of two groups.
    """
    case = paged.PagedCase.of([258, 290, 20], 1, 16, torch.float32, kernel_device)
    positions = paged.rows_at([254, 286, 16], 4, kernel_device)
    q = case.queries(positions, 2)

    def attend(requests: slice, rows: slice, cut: Any, at: torch.Tensor = positions) -> torch.Tensor:
        return gpu.paged_attention(
            q[requests, rows], case.cache, case.table[requests], at[requests, rows], 0.3, window, cut
        )

    first, everything, usual = slice(0, 1), slice(None), split.Cut(24, whole=0)
    alone = torch.cat([attend(first, slice(r, r + 1), usual) for r in range(4)], dim=1)
    assert torch.equal(attend(first, everything, usual), alone)
    assert torch.equal(attend(first, slice(1, 3), usual), alone[:, 1:3])
    together = attend(everything, everything, usual)
    assert torch.equal(together[:1], alone)
    for cut in (
        split.Cut(1),
        split.Cut(7, early=1),
        split.Cut(24, whole=9, early=3),
        split.Cut(24, wide=1, early=0),
        None,
    ):
        assert torch.equal(attend(everything, everything, cut), together), cut
    padded = positions.clone()
    padded[0, 2:], padded[1, 3], padded[2] = -1, -1, -1
    got = attend(everything, everything, usual, padded)
    assert torch.equal(got[padded >= 0], together[padded >= 0])
    assert torch.equal(got[padded < 0], torch.zeros_like(got[padded < 0]))


@pytest.mark.parametrize(
    ("tokens", "window", "programs"), [(4200, 40, 24), (4200, 40, 1), (600, None, 40), (2200, None, 1)]
)
def test_partials_stay_in_their_room(
    kernel_device: str, paged: ModuleType, tokens: int, window: int | None, programs: int
) -> None:
    """A request of a cache in which tile 128 begins at token 4096: a window of tiles 127 and 128 meets at every level
    of the tree only at its top."""
    case = paged.PagedCase.of([tokens], 1, 16, torch.float32, kernel_device, spare=0)
    positions = torch.tensor([[min(4100, tokens - 1)]], device=kernel_device)
    q = case.queries(positions, 1)
    tile = split.tile_of(16, torch.float32)
    room = split.Split.of(1, 1, 1, case.table.shape[1] * 8, tile, split.Cut(programs))
    gpu.paged_attention(q, case.cache, case.table, positions, 0.3, window, split.Cut(programs))
    workspace = split._WORKSPACES[q.device]
    workspace.reserve(0, room.slots + 64)
    workspace.counters[room.slots :] = 77
    workspace.partials.fill_(77)
    got = gpu.paged_attention(q, case.cache, case.table, positions, 0.3, window, split.Cut(programs))
    torch.testing.assert_close(got.double(), case.softmax(q, positions, 0.3, window), atol=3e-6, rtol=3e-6)
    assert (workspace.counters[room.slots :] == 77).all()
    assert (workspace.partials[room.slots * room.rows * (64 + 2) :] == 77).all()
    workspace.counters.zero_()


def test_two_programs_share_an_sm_where_one_on_each_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    small, wide = (split.tile_of(head_dim, torch.bfloat16) for head_dim in (64, 128))
    assert split.usual_cut(44, 132, small).registers is None
    two = split.usual_cut(45, 135, small)
    assert 2 * 32 * small.warps * (two.registers or 255) <= split.REGISTERS
    assert (two.early, two.stages) == (1, 1)
    assert split.usual_cut(64, 512, wide) == split.usual_cut(16, 128, wide)  # it names its registers
    monkeypatch.setattr(split, "architecture", lambda: 120)
    assert split.usual_cut(45, 135, small).registers is None  # one program fills the SM's shared memory


def test_a_size_that_was_launched_reserves_nothing_more(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the warm-up before a capture is all that a capture needs."""
    monkeypatch.setattr(split, "_WORKSPACES", {})
    device = torch.device(kernel_device, 0) if kernel_device == "cuda" else torch.device("cpu")
    cache = torch.zeros(4, 8, 2, 2, 16, device=kernel_device)
    reserved = []
    for batch in (1, 2, 4, 1, 2, 4):
        positions = torch.zeros(batch, 4, dtype=torch.int64, device=kernel_device)
        table = torch.ones(batch, 12, dtype=torch.int64, device=kernel_device)
        q = torch.zeros(batch, 4, 4, 16, device=kernel_device)
        gpu.paged_attention(q, cache, table, positions, 0.3)
        reserved.append(split._WORKSPACES[device].partials)
    assert reserved[0].numel() > 0
    assert all(one is reserved[2] for one in reserved[3:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(1, 1, 3, 16)}, "does not fit the cache"),
        ({"q": torch.zeros(1, 1, 4, 16, dtype=torch.bfloat16)}, "does not fit the cache"),
        ({"cache": torch.zeros(3, 12, 2, 2, 16)}, "blocks of 12 tokens"),
        ({"scale": 0.0}, "scale 0.0"),
        ({"window": 0}, "window 0"),
        ({"q": torch.zeros(1, 1, 2, 512), "cache": torch.zeros(3, 8, 2, 2, 512)}, "head_dim 512"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "q": torch.zeros(1, 1, 4, 16),
        "cache": torch.zeros(3, 8, 2, 2, 16),
        "block_table": torch.ones(1, 2, dtype=torch.int64),
        "positions": torch.zeros(1, 1, dtype=torch.int64),
        "scale": 0.3,
    }
    with pytest.raises(ValueError, match=words):
        gpu.paged_attention(**{**given, **change})


def test_the_kernel_of_write_index_is_the_plan(kernel_device: str) -> None:
    from slipstream.kernels.gpu.write_index import write_index

    table = torch.randperm(40, generator=torch.Generator().manual_seed(0)).view(4, 10)
    positions = torch.tensor([[0, 1, 2], [63, 64, -1], [-1, -1, -1], [79, 5, 31]])
    want = plan_rows(table, positions, 8).write_index
    dummy = (positions < 0).flatten()
    assert (want[dummy] < 8).all()  # cells of block 0
    got = write_index(table.to(kernel_device), positions.to(kernel_device), 8).cpu()
    assert torch.equal(got[~dummy], want[~dummy])
    assert (got[dummy] < 8).all()
    assert (got >= 0).all()
