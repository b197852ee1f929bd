"""All-reduce and all-gather between cards, held against their torch twins: in the interpreter, rank after rank."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from slipstream.kernels.stream import Stream

HELPERS = Path(__file__).with_name("exchanges.py")


@pytest.fixture(scope="module")
def exchanges(load_test_module) -> ModuleType:
    return load_test_module(HELPERS)


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What a rank puts in: numbers of very different size, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    scale = torch.exp2(torch.randint(-14, 15, shape, generator=generator).float())
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """Their sum in fp32 in the order of the ranks, rounded once."""
    total = parts[0].float()
    for one in parts[1:]:
        total = total + one.float()
    return total.to(parts[0].dtype)


needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks one after the other: interpreter only")


@needs_interpreter
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (3, torch.float32), (3, torch.float16)])
def test_the_sum_is_that_of_the_ranks_in_order_rounded_once_then_added(exchanges, size, dtype):
    ranks = exchanges.peers(size, "cpu")
    for seed, rows in enumerate((3, 1, 2)):  # epochs go on, fewer rows and more of them
        parts = [part(rank, (rows, 1056), dtype, seed) for rank in range(size)]
        residual = part(9, (rows, 1056), dtype, seed)
        added = exchanges.one_after_the_other(
            ranks, lambda one, r, p=parts, x=residual: one.all_reduce_add(p[r], Stream(x))
        )
        expected = residual + in_order(parts)
        for stream in added:
            assert torch.equal(stream.rows, expected)  # the same bits on every rank
            assert stream.sumsq.shape == (rows, -(-1056 // (512 if dtype != torch.float32 else 256)))
            torch.testing.assert_close(stream.sumsq.sum(1), expected.float().square().sum(1), rtol=1e-5, atol=0)
            assert torch.equal(stream.sumsq, added[0].sumsq)
        assert all(one.lost() is None for one in ranks)
    backwards = in_order(parts[::-1])
    assert dtype != torch.float32 or not torch.equal(backwards, in_order(parts))  # another order would have shown


@needs_interpreter
def test_without_a_stream_the_sum_alone(exchanges):
    ranks = exchanges.peers(2, "cpu")
    parts = [part(rank, (2, 3, 576), torch.bfloat16) for rank in range(2)]
    for summed in exchanges.one_after_the_other(ranks, lambda one, r: one.all_reduce(parts[r])):
        assert torch.equal(summed, in_order(parts))


@needs_interpreter
def test_what_is_summed_already_is_added_with_the_same_bits(exchanges):
    from slipstream.kernels.gpu.all_reduce import all_reduce_add

    ranks = exchanges.peers(2, "cpu")
    parts = [part(rank, (2, 1056), torch.bfloat16) for rank in range(2)]
    residual = part(9, (2, 1056), torch.bfloat16)
    fused = exchanges.one_after_the_other(ranks, lambda one, r: one.all_reduce_add(parts[r], Stream(residual)))[0]
    apart = all_reduce_add(in_order(parts), Stream(residual), None)
    assert torch.equal(apart.rows, fused.rows)
    assert torch.equal(apart.sumsq, fused.sumsq)


@needs_interpreter
def test_a_row_does_not_depend_on_its_neighbours_nor_on_how_a_call_is_cut(exchanges, monkeypatch):
    from slipstream.kernels.gpu import all_reduce

    parts = [part(rank, (7, 1056), torch.bfloat16) for rank in range(2)]
    residual = part(9, (7, 1056), torch.bfloat16)

    def run(rows: slice, together: int = 100) -> Stream:
        ranks = exchanges.peers(2, "cpu")
        for one in ranks:
            monkeypatch.setattr(one, "rows_together", lambda _: together)

        def call(one, r):
            return one.all_reduce_add(parts[r][rows], Stream(residual[rows]))

        return exchanges.one_after_the_other(ranks, call)[0]

    whole = run(slice(None))
    for row in (0, 3, 6):
        alone = run(slice(row, row + 1))
        assert torch.equal(alone.rows[0], whole.rows[row])
        assert torch.equal(alone.sumsq[0], whole.sumsq[row])
    assert torch.equal(run(slice(None), together=4).rows, whole.rows)  # two launches
    monkeypatch.setattr(all_reduce, "_MOST_PROGRAMS", 2)  # each program has several items
    assert torch.equal(run(slice(None)).rows, whole.rows)


@needs_interpreter
@pytest.mark.parametrize(
    ("widths", "dtype"), [((600, 598), torch.bfloat16), ((301, 300, 299), torch.bfloat16), ((257, 256), torch.float32)]
)
def test_uneven_parts_are_gathered_in_rank_order(exchanges, widths, dtype):
    ranks = exchanges.peers(len(widths), "cpu")
    for rows in (2, 1):
        parts = [part(rank, (rows, width), dtype, rows) for rank, width in enumerate(widths)]
        for whole in exchanges.one_after_the_other(ranks, lambda one, r, p=parts: one.all_gather(p[r], widths)):
            assert torch.equal(whole, torch.cat(parts, dim=-1))
        assert all(one.lost() is None for one in ranks)


@needs_interpreter
def test_a_peer_that_does_not_come_is_named(exchanges):
    ranks = exchanges.peers(3, "cpu")
    parts = [part(rank, (1, 576), torch.bfloat16) for rank in range(3)]
    assert ranks[0].lost() is None
    ranks[1].all_reduce(parts[1])
    ranks[0].all_reduce(parts[0])
    assert ranks[0].lost() == 2  # rank 1's words were there


@needs_interpreter
def test_words_of_an_earlier_exchange_are_not_taken_for_new(exchanges):
    ranks = exchanges.peers(2, "cpu")
    x = part(0, (1, 576), torch.bfloat16)
    for _ in range(3):  # both places of each word have been used
        exchanges.one_after_the_other(ranks, lambda one, r: one.all_reduce(x))
    ranks[1].all_reduce(x)
    assert ranks[1].lost() == 0


def test_what_cannot_be_exchanged_is_refused(exchanges):
    from slipstream.kernels.gpu.all_reduce import all_reduce_add

    x = torch.zeros(2, 33, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="odd width"):
        all_reduce_add(x, Stream(x), None)
    with pytest.raises(ValueError, match="for parts"):
        all_reduce_add(x[:, :32], Stream(x), None)
    with pytest.raises(ValueError, match="at most"):
        exchanges.peers(2, "cpu")[0].rows_together(100_000)


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_compiles_and_words_are_not_torn(capability, cross_compile):
    made = cross_compile(HELPERS, "compiled", capability)
    assert {one["kernel"] for one in made} == {"_all_reduce_kernel", "_all_gather_kernel"}
    for one in made:
        ptx, world = one["ptx"], one["constants"]["WORLD"]
        # A word and its epoch are one store and one load, and the wait is a loop with a clock.
        assert ptx.count("st.relaxed.sys.global.b64") >= world - 1
        assert (world > 1) == ("ld.relaxed.sys.global.b64" in ptx)
        assert "ld.relaxed.sys.global.v2" not in ptx
        assert "ld.relaxed.sys.global.b32" not in ptx
        assert world == 1 or ptx.count("globaltimer") >= 2 * (world - 1)
        waits = "griddepcontrol.wait" in ptx
        assert waits == (capability >= 90)
