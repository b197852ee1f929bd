"""Latent attention: absorbed and expanded forms against keys and values made for every head, and rows by themselves."""

import pytest
import torch

from slipstream.kernels.head_linear import head_linear
from slipstream.kernels.latent_rows import absorb_query, rotate_query, write_latent
from slipstream.kernels.mla_attention import mla_attention, mla_prefill
from slipstream.kernels.paged_attention import plan_rows
from slipstream.kernels.rms_norm import rms_norm
from slipstream.kernels.rotary import apply_rotary
from slipstream.kernels.stream import Norm

HEADS, RANK, NOPE, ROPE, VALUE, BLOCK, SCALE = 4, 32, 16, 8, 24, 16, 0.2
LENGTH = 41


class Case:
    """Two requests, one with its blocks side by side and one with them scattered, all cells written."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(4)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        blocks = LENGTH // BLOCK + 1
        self.tables = torch.stack(
            [torch.arange(1, blocks + 1), blocks + 1 + torch.randperm(blocks, generator=generator)]
        )
        self.norm = Norm(torch.rand(RANK, generator=generator).to(dtype) + 0.5, 1e-5)
        self.expand = randn(HEADS * (NOPE + VALUE), RANK) * 0.3
        parts = self.expand.view(HEADS, NOPE + VALUE, RANK)
        self.key = parts[:, :NOPE].transpose(1, 2).contiguous()  # [H, rank, nope]
        self.value = parts[:, NOPE:].contiguous()  # [H, v, rank]
        self.kv, self.q = randn(2, LENGTH, RANK + ROPE), randn(2, LENGTH, HEADS, NOPE + ROPE)
        angles = torch.outer(torch.arange(LENGTH).float(), torch.tensor([1.0, 0.3, 0.1, 0.02])).repeat(1, 2)  # [T, 8]
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.cache = torch.zeros(2 * blocks + 1, BLOCK, RANK + ROPE, dtype=dtype)
        rows = plan_rows(self.tables, torch.arange(LENGTH).repeat(2, 1), BLOCK)
        twice = (self.cos.repeat(2, 1), self.sin.repeat(2, 1))
        write_latent(self.kv.flatten(0, 1), self.norm, *twice, self.cache, rows.write_index)

    def absorbed(self, requests: slice, rows: slice) -> torch.Tensor:
        q, plan, (cos, sin) = self._step(requests, rows)
        made = absorb_query(q.flatten(0, 1), self.key, cos, sin)  # [M, H, rank + rope]
        mixed = mla_attention(made.view(*q.shape[:2], *made.shape[1:]), self.cache, plan, SCALE, RANK)
        return head_linear(mixed.flatten(0, 1), self.value).view(*q.shape[:3], VALUE)

    def expanded(self, requests: slice, rows: slice) -> torch.Tensor:
        q, plan, (cos, sin) = self._step(requests, rows)
        rotated = rotate_query(q.flatten(0, 1), cos, sin).view(q.shape)
        return mla_prefill(rotated, self.cache, plan, SCALE, self.expand, NOPE, VALUE)

    def _step(self, requests, rows):
        q = self.q[requests, rows]
        positions = torch.arange(LENGTH)[rows].repeat(q.shape[0], 1)
        angles = (table[rows].repeat(q.shape[0], 1) for table in (self.cos, self.sin))
        return q, plan_rows(self.tables[requests], positions, BLOCK), angles

    def exact(self) -> torch.Tensor:
        """[2, T, H, v] in fp64: plain attention over keys and values of every head."""
        latent = rms_norm(self.kv[..., :RANK], self.norm.weight, self.norm.eps).double()
        rope = apply_rotary(self.kv[:, :, None, RANK:].double(), self.cos.double(), self.sin.double())  # [2, T, 1, r]
        parts = self.expand.double().view(HEADS, NOPE + VALUE, RANK)
        made = torch.einsum("btc,hnc->bthn", latent, parts)
        k = torch.cat((made[..., :NOPE], rope.expand(-1, -1, HEADS, -1)), dim=-1)
        turned = apply_rotary(self.q[..., NOPE:].double(), self.cos.double(), self.sin.double())
        q = torch.cat((self.q[..., :NOPE].double(), turned), dim=-1)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), float("-inf"))
        return torch.einsum("bhqk,bkhv->bqhv", scores.softmax(-1), made[..., NOPE:])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_both_forms_against_attention_of_every_head(dtype, bound, form):
    case = Case(dtype)
    ours, exact = getattr(case, form)(slice(0, 2), slice(0, LENGTH)), case.exact()
    assert (ours.double() - exact).abs().max() <= bound * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_a_rows_bits_depend_on_nobody_else(dtype, form):
    case = Case(dtype)
    attend = getattr(case, form)
    together = attend(slice(0, 2), slice(0, LENGTH))
    for request in (slice(0, 1), slice(1, 2)):
        for cut in ([1] * LENGTH, [16, 16, 9], [33, 8], [LENGTH]):
            start, parts = 0, []
            for size in cut:
                parts.append(attend(request, slice(start, start + size)))
                start += size
            assert torch.equal(torch.cat(parts, dim=1), together[request]), cut


def test_a_rank_without_heads():
    case = Case(torch.float32)
    plan = plan_rows(case.tables, torch.zeros(2, 1, dtype=torch.int64), BLOCK)
    assert mla_attention(torch.empty(2, 1, 0, RANK + ROPE), case.cache, plan, SCALE, RANK).shape == (2, 1, 0, RANK)
    none = mla_prefill(torch.empty(2, 1, 0, NOPE + ROPE), case.cache, plan, SCALE, case.expand[:0], NOPE, VALUE)
    assert none.shape == (2, 1, 0, VALUE)
    assert head_linear(torch.empty(3, 0, RANK), case.value[:0]).shape == (3, 0, VALUE)
