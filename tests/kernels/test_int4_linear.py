"""The Triton kernel over INT4 weights against fp64: in the interpreter where there is no card, and on the card."""

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from slipstream.kernels.int4 import Int4Weight, arrange, dequantise, pack
from slipstream.kernels.linear_add import linear_add
from slipstream.kernels.norm_gate_up import norm_gate_up
from slipstream.kernels.norm_linear import norm_linear
from slipstream.kernels.norm_qkv import Heads, norm_qkv
from slipstream.kernels.stream import Norm, Stream

ON_CARD = torch.cuda.is_available()
DEVICE = "cuda" if ON_CARD else "cpu"
gpu = pytest.mark.skipif(not ON_CARD, reason="needs an NVIDIA GPU")


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    from slipstream.kernels.gpu import int4_linear

    return int4_linear


def exact_of(integers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return dequantise(pack(integers), scale).double().to(DEVICE)


def make(num_rows: int, features: int, group: int, half: int = 16, seed: int = 0) -> tuple[Int4Weight, torch.Tensor]:
    """A weight and its exact fp64 values. Scales over three decades; some are 0, -0.0, or subnormal."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-8, 8, (num_rows, features), generator=generator, dtype=torch.int8)
    integers[0] = -8
    scale = (10 ** (3 * torch.rand(num_rows, features // group, generator=generator) - 4)).bfloat16()
    special = torch.tensor([0.0, -0.0, 2.0**-133, -(2.0**-130)], dtype=torch.bfloat16)
    scale[1:5, 0] = special  # rows 1..4: the first group
    scale[5, :] = 0
    weight = arrange(pack(integers), scale, half)
    return Int4Weight(weight.words.to(DEVICE), weight.scales.to(DEVICE), num_rows, half), exact_of(integers, scale)


def rows_of(num_tokens: int, features: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(num_tokens, features, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(y: torch.Tensor, x: torch.Tensor, exact: torch.Tensor, rounding: float) -> None:
    """|y - y64| <= rounding |y64| + 2^-16 sum |x w|, and half of bf16's smallest number."""
    want = x.double() @ exact.T
    bound = rounding * want.abs() + 2**-16 * (x.double().abs() @ exact.abs().T) + 2**-134
    worst = ((y.double() - want).abs() - bound).max().item()
    assert worst <= 0, worst
    assert (y[:, 5] == 0).all()  # all its scales are 0


@pytest.mark.parametrize(
    ("num_rows", "features", "group", "half", "num_tokens"),
    [(96, 64, 32, 16, 1), (40, 256, 128, 16, 3), (128, 64, 32, 64, 2), (72, 1024, 128, 16, 9), (64, 1024, 32, 32, 2)],
)
def test_within_the_bound_of_fp64(
    kernel: ModuleType, num_rows: int, features: int, group: int, half: int, num_tokens: int
) -> None:
    weight, exact = make(num_rows, features, group, half)
    with torch.no_grad():
        x = rows_of(num_tokens, features, torch.float32)
        assert_close(kernel.linear_int4(x, weight), x, exact, 0)
        x = x.bfloat16()
        y = kernel.linear_int4(x, weight)
        assert y.dtype == torch.bfloat16
        assert_close(y, x, exact, 2**-8)
    if features == 1024:
        assert kernel.num_parts(num_rows, features, group) == 2


def test_group_borders_nibbles_and_minus_eight(kernel: ModuleType) -> None:
    """One input feature at a time: y is a column of the weight, so that a nibble or scale in a wrong place shows."""
    weight, exact = make(64, 256, 128)
    x = torch.eye(256, device=DEVICE)[[0, 1, 2, 5, 7, 8, 15, 16, 31, 32, 127, 128, 255]]
    with torch.no_grad():
        assert torch.equal(kernel.linear_int4(x, weight).double(), x.double() @ exact.T)


def test_a_rows_bits_do_not_depend_on_its_neighbours(kernel: ModuleType) -> None:
    weight, _ = make(64, 1024, 128)
    x = rows_of(65, 1024, torch.float32)
    with torch.no_grad():
        together = kernel.linear_int4(x, weight)
        for start, count in ((0, 1), (64, 1), (3, 9), (40, 20)):
            assert torch.equal(kernel.linear_int4(x[start : start + count], weight), together[start : start + count])


def test_how_features_are_cut(kernel: ModuleType) -> None:
    """Into equal parts of whole groups, for every width that models have; never by the number of tokens."""
    for num_rows in (32, 256, 4096, 6144, 28672, 128256):
        for features in (32, 576, 1536, 4096, 11008, 14336):
            for group in (32, 128):
                if features % group == 0:
                    assert (features // group) % kernel.num_parts(num_rows, features, group) == 0
    assert kernel.block_of_tokens(1) == 8
    assert kernel.block_of_tokens(128) == 64


def launches() -> None:
    """What is compiled for cards that are not here: both groups, few tokens and many, and fp32 rows."""
    from slipstream.kernels.gpu.int4_linear import linear_int4

    for group, num_tokens, dtype in ((32, 1, torch.bfloat16), (128, 128, torch.bfloat16), (32, 1, torch.float32)):
        words = torch.empty(128, 128, 8, 16, dtype=torch.int32, device="meta")
        scales = torch.empty(128, 4096 // group, 8, 4, dtype=torch.bfloat16, device="meta")
        linear_int4(torch.empty(num_tokens, 4096, dtype=dtype, device="meta"), Int4Weight(words, scales, 4096))


@pytest.mark.parametrize(("capability", "limit"), [(80, 163 << 10), (90, 227 << 10), (120, 99 << 10)])
def test_compiles_for_every_card(cross_compile: Callable[..., Any], capability: int, limit: int) -> None:
    made = cross_compile(__file__, "launches", capability)
    assert len(made) == 3
    for kernel in made:
        assert kernel["shared"] <= limit
        assert kernel["constants"]["PDL"] == (capability >= 90)
        if not kernel["constants"]["EXACT32"]:
            # Words go from shared memory into the operand's registers as words, and are not moved as bf16 again.
            assert kernel["ttgir"].count("ttg.local_load") == 2
            assert "m16n8k16" in kernel["ptx"]


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (1024, 576), (200, 1536)])
def test_on_the_card(kernel: ModuleType, shape: tuple[int, int], group: int) -> None:
    """Every row the same bits for 1 to 128 rows, and within the bound; with dependent launch and without."""
    num_rows, features = shape
    if features % group:
        pytest.skip("no whole groups")
    weight, exact = make(num_rows, features, group)
    x = rows_of(128, features, torch.bfloat16)
    with torch.no_grad():
        together = kernel.linear_int4(x, weight)
        assert_close(together, x, exact, 2**-8)
        for count in (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 127):
            assert torch.equal(kernel.linear_int4(x[:count], weight), together[:count]), count
            assert torch.equal(kernel.linear_int4(x[-count:], weight), together[-count:]), count
        os.environ["SLIPSTREAM_PDL"] = "0"
        try:
            assert torch.equal(kernel.linear_int4(x, weight), together)
        finally:
            del os.environ["SLIPSTREAM_PDL"]


@pytest.mark.gpu
@gpu
def test_replayed_in_a_graph(kernel: ModuleType) -> None:
    """A chain of products, so that a kernel starts while the one before still runs; counters are zero for a replay."""
    weight, _ = make(4096, 4096, 128)
    x = rows_of(4, 4096, torch.bfloat16)

    def chain() -> torch.Tensor:
        y = x
        for _ in range(8):
            y = kernel.linear_int4(y, weight)
            y = y / y.float().square().mean().sqrt().to(y.dtype)
        return y

    with torch.no_grad():
        want = chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain()
        for _ in range(20):
            got.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(got, want)


@pytest.mark.gpu
@gpu
def test_every_op_takes_int4_weights_on_the_card() -> None:
    """A row alone gives the bits that it gives among 128, and both are the twin's but for rounding."""
    heads = Heads(4, 2, 64)
    norm = Norm(torch.rand(256, device=DEVICE).bfloat16() + 0.5, 1e-5)
    x = rows_of(128, 256, torch.bfloat16)
    angles = torch.rand(128, 64, device=DEVICE).bfloat16()
    qkv, up, down = make(512, 256, 128, 32)[0], make(1024, 256, 32, 512)[0], make(256, 512, 32)[0]

    def run(rows: torch.Tensor, angle: torch.Tensor) -> list[torch.Tensor]:
        stream = Stream(rows)
        q, k, v = norm_qkv(stream, norm, qkv, heads, angle, angle)
        assert k is not None
        assert v is not None
        inner = norm_gate_up(stream, norm, up)
        return [q, k, v, inner, linear_add(inner, down, stream).rows, norm_linear(stream, norm, qkv)]

    with torch.no_grad():
        together, alone = run(x, angles), run(x[5:6], angles[5:6])
    with torch.enable_grad():
        twins = run(x, angles)
    for got, one, want in zip(together, alone, twins, strict=True):
        assert torch.equal(one[0], got[5])
        assert (got.float() - want.float()).norm() < 2**-7 * want.float().norm()  # scales differ a thousandfold
