"""Latent attention's kernels against softmax written out in fp64, their bits, and what they must not read.

The fp32 tile holds 16 keys, and a row has at most 8 chunks: from position 128 on a chunk is two tiles, from 256 four.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

gpu = pytest.importorskip("slipstream.kernels.gpu.mla_attention")
split = pytest.importorskip("slipstream.kernels.gpu.mla_split")
heads = pytest.importorskip("slipstream.kernels.gpu.head_linear")
_HERE = Path(__file__)
SCALE = 0.2


@pytest.fixture(scope="module")
def latent(load_test_module: Callable[[Path], ModuleType]) -> ModuleType:
    return load_test_module(_HERE.with_name("mla_case.py"))


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    ("starts", "num_rows", "heads", "programs"),
    [
        ([0], 1, 1, 64),  # the first token
        ([37, 0, 90], 3, 4, 64),  # three tiles, part of one, six
        ([125], 6, 4, 64),  # rows on both sides of the border at which chunks grow; more than a program takes
        ([300, 14], 2, 8, 3),  # chunks of four tiles beside single ones, two of them to a program
        ([510], 4, 2, 1),  # the border of a further doubling, all by one program
    ],
)
def test_rows_are_the_softmax(
    kernel_device: str, latent: ModuleType, starts: list[int], num_rows: int, heads: int, programs: int
) -> None:
    case = latent.LatentCase.of([s + num_rows for s in starts], 32, 8, torch.float32, kernel_device)
    positions = latent.rows_at(starts, num_rows, kernel_device)
    q = case.randn(len(starts), num_rows, heads, 40)
    got = gpu.mla_attention(q, case.cache, case.rows(positions), SCALE, 32, programs=programs)
    torch.testing.assert_close(got.double(), case.softmax(q, positions, SCALE), atol=3e-6, rtol=3e-6)


def test_bf16_is_the_softmax(kernel_device: str, latent: ModuleType) -> None:
    """And sizes that are no powers of two."""
    case = latent.LatentCase.of([150, 43], 48, 24, torch.bfloat16, kernel_device)
    positions = latent.rows_at([147, 40], 3, kernel_device)
    q = case.randn(2, 3, 4, 72)
    got = gpu.mla_attention(q, case.cache, case.rows(positions), SCALE, 48).double()
    torch.testing.assert_close(got, case.softmax(q, positions, SCALE), atol=2e-2, rtol=1e-2)


def test_a_row_keeps_its_bits_in_any_company(kernel_device: str, latent: ModuleType) -> None:
    """Alone and beside other rows, of which some have other chunks; with padding; beside other requests; handed out
    to other programs."""
    case = latent.LatentCase.of([130, 260, 20], 32, 8, torch.float32, kernel_device)
    positions = latent.rows_at([126, 254, 14], 4, kernel_device)
    q = case.randn(3, 4, 5, 40)

    def attend(requests: slice, rows: slice, at: torch.Tensor = positions, **how: Any) -> torch.Tensor:
        plan = case.rows(at[requests, rows], requests)
        return gpu.mla_attention(q[requests, rows], case.cache, plan, SCALE, 32, **how)

    everything = slice(None)
    together = attend(everything, everything)
    for b in range(3):
        request = slice(b, b + 1)
        alone = torch.cat([attend(request, slice(r, r + 1)) for r in range(4)], dim=1)
        assert torch.equal(alone, together[request])
        assert torch.equal(attend(request, slice(1, 3)), alone[:, 1:3])
    for programs in (1, 40):
        assert torch.equal(attend(everything, everything, programs=programs), together), programs
    padded = positions.clone()
    padded[0, 2:], padded[1, 3], padded[2] = -1, -1, -1
    got = attend(everything, everything, padded)
    assert torch.equal(got[padded >= 0], together[padded >= 0])
    assert not got[padded < 0].any()


def test_partials_stay_in_their_room(kernel_device: str, latent: ModuleType) -> None:
    """Whatever the position, no more chunks than there is room for, in a table that ends with the request."""
    tile = split.decode_tile(torch.float32)
    for last in (0, 15, 16, 127, 128, 255, 256, 1000):
        count = last // (tile.keys << max(0, (last >> tile.first_bits).bit_length())) + 1
        assert count <= split.Split.of(1, 1, last + 1, tile, 64).chunks <= tile.chunks
    case = latent.LatentCase.of([260], 32, 8, torch.float32, kernel_device)
    positions = latent.rows_at([256], 4, kernel_device)
    q = case.randn(1, 4, 5, 40)
    cut = split.Split.of(1, 20, case.table.shape[1] * 8, tile, 64)
    need = cut.row_blocks * cut.chunks * tile.rows * (32 + 2)
    workspace = gpu.workspace_of(q.device)
    workspace.reserve(need + 64, 0)
    workspace.partials.fill_(77)
    got = gpu.mla_attention(q, case.cache, case.rows(positions), SCALE, 32, programs=64)
    torch.testing.assert_close(got.double(), case.softmax(q, positions, SCALE), atol=3e-6, rtol=3e-6)
    assert (workspace.partials[need:] == 77).all()


def test_a_workspace_that_grew_in_an_inference_step_serves_any_step(kernel_device: str) -> None:
    workspace = gpu.workspace_of(torch.device(kernel_device))
    with torch.inference_mode():
        workspace.reserve(workspace.partials.numel() + 8, workspace.counters.numel() + 8)
    workspace.partials.fill_(77)
    workspace.counters.zero_()


def expanded(case: Any, q: torch.Tensor, positions: torch.Tensor, expand: torch.Tensor, nope: int) -> torch.Tensor:
    """[B, R, H, v]: plain attention over keys and values of every head, in fp64."""
    parts = expand.double().unflatten(0, (q.shape[2], -1))  # [H, nope + v, rank]
    out = torch.zeros((*q.shape[:3], parts.shape[1] - nope), dtype=torch.float64, device=q.device)
    for b, r in (positions >= 0).nonzero().tolist():
        cells = case.cells[b][: int(positions[b, r]) + 1].double()
        made = torch.einsum("tc,hnc->htn", cells[:, : case.rank], parts)  # [H, T, nope + v]
        keys = torch.cat((made[..., :nope], cells[:, case.rank :].expand(len(parts), -1, -1)), dim=2)
        weights = (torch.einsum("hn,htn->ht", q[b, r].double(), keys) * SCALE).softmax(-1)
        out[b, r] = torch.einsum("ht,htv->hv", weights, made[..., nope:])
    return out


def prompt(case: Any, q: torch.Tensor, plan: Any, expand: torch.Tensor, nope: int) -> torch.Tensor:
    """Rows q [B, R, H, nope + rope] of prompts as a card takes them: into the latents' space, and back to values."""
    parts = expand.unflatten(0, (q.shape[2], -1))  # [H, nope + v, rank]
    key = parts[:, :nope].transpose(1, 2).contiguous()
    absorbed = heads.into_latents(q.flatten(0, 1), key, None).unflatten(0, q.shape[:2])
    mixed = gpu.mla_prefill(absorbed, case.cache, plan, SCALE, case.rank)
    return heads.of_heads(mixed.flatten(0, 1), parts[:, nope:]).unflatten(0, q.shape[:2])  # [B, R, H, v]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_prompts_are_attention_over_expanded_keys(
    kernel_device: str, latent: ModuleType, dtype: torch.dtype, bound: float
) -> None:
    case = latent.LatentCase.of([40, 30], 32, 8, dtype, kernel_device)
    positions = latent.rows_at([20, 3], 20, kernel_device)
    positions[1, 12:] = -1
    q, expand = case.randn(2, 20, 2, 24), case.randn(2 * (16 + 24), 32) * 0.3
    got = prompt(case, q, case.rows(positions), expand, 16).double()
    want = expanded(case, q, positions, expand, 16)
    assert (got - want).abs().max() <= bound * want.abs().max()


def test_a_prompt_row_keeps_its_bits_however_the_prompt_is_cut(kernel_device: str, latent: ModuleType) -> None:
    case = latent.LatentCase.of([50, 20], 32, 8, torch.float32, kernel_device)
    positions = latent.rows_at([0, 0], 50, kernel_device)
    positions[1, 20:] = -1
    q, expand = case.randn(2, 50, 3, 24), case.randn(3 * (16 + 24), 32) * 0.3

    def attend(requests: slice, start: int, stop: int) -> torch.Tensor:
        plan = case.rows(positions[requests, start:stop], requests)
        return prompt(case, q[requests, start:stop], plan, expand, 16)

    both = attend(slice(0, 2), 0, 50)
    first = slice(0, 1)
    for cuts in ((0, 50), (0, 1, 17, 33, 50)):
        pieces = torch.cat([attend(first, a, b) for a, b in pairwise(cuts)], dim=1)
        assert torch.equal(pieces, both[:1]), cuts
    assert not both[1, 20:].any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(1, 1, 4, 32)}, "does not fit the cache"),
        ({"q": torch.zeros(1, 1, 4, 40, dtype=torch.bfloat16)}, "does not fit the cache"),
        ({"kv_rank": 40}, "does not fit the cache"),
        ({"cache": torch.zeros(3, 12, 40)}, "blocks of 12 tokens"),
        ({"scale": 0.0}, "scale 0.0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(latent: ModuleType, change: dict[str, Any], words: str) -> None:
    case = latent.LatentCase.of([3], 32, 8, torch.float32, "cpu")
    given = {"q": torch.zeros(1, 1, 4, 40), "cache": torch.zeros(3, 8, 40), "scale": 0.3, "kv_rank": 32}
    given["rows"] = case.rows(torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=words):
        gpu.mla_attention(**{**given, **change})


def test_a_table_too_long_for_its_chunks_is_refused() -> None:
    tile = split.decode_tile(torch.float32)
    most = tile.keys * tile.chunks << split.CLASSES
    split.Split.of(1, 1, most, tile, 64)
    with pytest.raises(ValueError, match="expected at most"):
        split.Split.of(1, 1, most + 1, tile, 64)
