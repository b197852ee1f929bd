"""The INT4 format against the library that writes it, the order of the kernels against its definition, and the twin."""

import pytest
import torch

from slipstream.kernels import int4
from slipstream.kernels.int4 import arrange, arrange_stack, dequantise, disarrange, matrix, pack, unpack
from slipstream.kernels.linear import linear
from slipstream.kernels.weight import as_matrix


def random_weight(num_rows: int, features: int, group: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers [N, K] that take every value, and scales [N, K / group] over three decades."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-8, 8, (num_rows, features), generator=generator, dtype=torch.int8)
    scale = 10 ** (3 * torch.rand(num_rows, features // group, generator=generator) - 4)
    return integers, scale.bfloat16()


@pytest.mark.parametrize("shape", [(5, 64), (33, 256)])
def test_packing_agrees_with_the_library(shape: tuple[int, int]) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    integers, _ = random_weight(*shape, 32)
    packed = pack(integers)
    assert packed.dtype == torch.int32
    assert torch.equal(packed, pack_to_int32(integers, 4))
    assert torch.equal(unpack(packed), integers)
    assert torch.equal(unpack(packed), unpack_from_int32(packed, 4, torch.Size(shape)))


def test_the_lowest_nibble_is_the_lowest_feature() -> None:
    packed = pack(torch.tensor([[-8, -7, -1, 0, 1, 2, 6, 7]]))
    assert packed.item() & 0xFFFFFFFF == 0xFEA98710


@pytest.mark.parametrize("group", [32, 128])
def test_dequantising_agrees_with_the_library(group: int) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    integers, scale = random_weight(7, 256, group)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=group)
    by_library = dequantize(integers, scale.float(), args=args)
    assert torch.equal(dequantise(pack(integers), scale), by_library)


def test_dequantising_is_exact_at_the_ends_of_the_scale() -> None:
    """Scale 0 and -0.0, the smallest subnormal, the largest finite; a group's border between two of them."""
    tiny, huge = 2.0**-133, torch.finfo(torch.bfloat16).max / 8
    scale = torch.tensor([[0.0, -0.0, tiny, huge]], dtype=torch.bfloat16)
    integers = torch.tensor([-8, 7] * 64, dtype=torch.int8)[None]  # [1, 128], 32 a group
    got = dequantise(pack(integers), scale)[0].double()
    want = integers[0].double() * scale[0].double().repeat_interleave(32)
    assert scale[0, 2].item() == tiny
    assert torch.equal(got, want)
    assert got[63] == 0
    assert got[64] == -8 * tiny


@pytest.mark.parametrize(
    ("num_rows", "features", "group", "half"),
    [(64, 64, 32, 16), (40, 256, 128, 16), (1, 128, 32, 16), (192, 64, 32, 32), (192, 128, 128, 96)],
)
def test_the_order_in_memory_is_the_documented_one(num_rows: int, features: int, group: int, half: int) -> None:
    integers, scale = random_weight(num_rows, features, group)
    weight = arrange(pack(integers), scale, half)
    assert weight.shape == (num_rows, features)
    assert weight.group == group
    generator = torch.Generator().manual_seed(1)
    for row, feature in zip(
        torch.randint(num_rows, (300,), generator=generator).tolist(),
        torch.randint(features, (300,), generator=generator).tolist(),
        strict=True,
    ):
        segment, second, inside = row // (2 * half), row % (2 * half) // half, row % half
        b, i, g = segment * (half // 16) + inside // 16, 2 * second + inside % 16 // 8, row % 8
        c, j, e = feature // 32, feature % 32 // 2, feature % 2
        word = weight.words[b, c, g, j].item()
        assert (word >> (16 * e + 4 * i)) & 0xF == integers[row, feature] + 8
        assert weight.scales[b, feature // group, g, i] == scale[row, feature // group]
    assert torch.equal(as_matrix(weight, torch.float32), dequantise(pack(integers), scale))
    packed, back = disarrange(weight)
    assert torch.equal(packed, pack(integers))
    assert torch.equal(back, scale)


def test_a_rank_may_hold_nothing() -> None:
    integers, scale = random_weight(40, 64, 32)
    for packed, scales in ((pack(integers)[:0], scale[:0]), (pack(integers)[:, :0], scale[:, :0])):
        weight = arrange(packed, scales)
        assert weight.shape == (packed.shape[0], packed.shape[1] * 8)
        y = linear(torch.ones(3, weight.in_features), weight)
        assert torch.equal(y, torch.zeros(3, packed.shape[0]))


def test_rows_that_fill_the_last_block_are_zeros() -> None:
    integers, scale = random_weight(33, 64, 32)
    weight = arrange(pack(integers), scale)
    last = weight.words[1, 0, 1, 0].item()  # rows 33, 41, 49, 57: none of them is there
    assert last & 0xFFFFFFFF == 0x88888888
    assert (weight.scales[1, :, 1] == 0).all()


@pytest.mark.parametrize(
    ("packed", "scale", "words"),
    [
        (torch.zeros(4, 8, dtype=torch.int64), torch.ones(4, 2).bfloat16(), "torch.int64"),
        (torch.zeros(4, 8, dtype=torch.int32), torch.ones(4, 2).half(), "torch.float16"),
        (torch.zeros(4, 8, dtype=torch.int32), torch.ones(5, 2).bfloat16(), "bfloat16 [4, K / group]"),
        (torch.zeros(4, 8, dtype=torch.int32), torch.ones(4, 1).bfloat16(), "groups of (32, 128)"),
        (torch.zeros(4, 8, dtype=torch.int32), torch.ones(4, 3).bfloat16(), "groups of (32, 128)"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(packed: torch.Tensor, scale: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        arrange(packed, scale)
    assert words in str(caught.value)


def test_rows_that_make_no_whole_blocks_are_refused() -> None:
    integers, scale = random_weight(48, 64, 32)
    for half in (32, 24):
        with pytest.raises(ValueError, match=f"48 rows, half {half}"):
            arrange(pack(integers), scale, half)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [32, 128])
def test_the_twin_is_the_matrix_product(dtype: torch.dtype, group: int) -> None:
    integers, scale = random_weight(40, 256, group)
    x = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(2)).to(dtype)
    with torch.no_grad():
        y = linear(x, arrange(pack(integers), scale))
    assert y.dtype == dtype
    assert y.shape == (2, 3, 40)
    exact = dequantise(pack(integers), scale).double()
    want = x.double() @ exact.T
    bound = 2**-8 * want.abs() if dtype == torch.bfloat16 else 0
    assert ((y.double() - want).abs() <= bound + 2**-16 * (x.double().abs() @ exact.abs().T)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rows_bits_do_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    integers, scale = random_weight(64, 256, 32)
    weight = arrange(pack(integers), scale)
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(3)).to(dtype)
    with torch.no_grad():
        alone = torch.cat([linear(row[None], weight) for row in x])
        for count in (2, 3, 5, 16, 33, 128):
            assert torch.equal(linear(x[:count], weight), alone[:count])


@pytest.mark.parametrize("at_once", [1, 2, 16 << 10])  # weights that are put in order together
@pytest.mark.parametrize(("count", "rows", "columns", "half"), [(3, 64, 96, 16), (2, 64, 32, 32), (4, 96, 64, 48)])
def test_a_stack_is_each_weight_arranged_in_the_memory_it_had(count, rows, columns, half, at_once, monkeypatch):
    monkeypatch.setattr(int4, "_BYTES_AT_ONCE", at_once * rows * columns // 2)
    generator = torch.Generator().manual_seed(7)
    packed = pack(torch.randint(-8, 8, (count * rows, columns), generator=generator))
    scale = torch.rand(count * rows, columns // 32, generator=generator).bfloat16()
    each = [arrange(p, s, half) for p, s in zip(packed.split(rows), scale.split(rows), strict=True)]
    words, scales = packed.clone(), scale.clone()
    stack = arrange_stack(words, scales, count, half)
    assert (stack.words.data_ptr(), stack.scales.data_ptr()) == (words.data_ptr(), scales.data_ptr())
    assert torch.equal(stack.words, torch.cat([one.words for one in each]))
    assert torch.equal(stack.scales, torch.cat([one.scales for one in each]))
    assert torch.equal(matrix(stack), dequantise(packed, scale))
    assert all(torch.equal(a, b) for a, b in zip(disarrange(stack), (packed, scale), strict=True))
    with pytest.raises(ValueError, match="whole blocks of 32 rows"):
        arrange_stack(packed[: count * 16], scale[: count * 16], count)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_stack_is_put_in_order_on_a_card_as_on_a_cpu():
    packed = torch.randint(-(2**31), 2**31 - 1, (40 * 512, 896), dtype=torch.int32)
    scale = torch.rand(40 * 512, 224).bfloat16()
    on_card = arrange_stack(packed.cuda(), scale.cuda(), 40, 256)
    on_cpu = arrange_stack(packed, scale, 40, 256)
    assert torch.equal(on_card.words.cpu(), on_cpu.words)
    assert torch.equal(on_card.scales.cpu(), on_cpu.scales)
