"""The small kernels around latent attention against their torch twins, and their rows by themselves."""

from collections.abc import Callable, Iterator

import pytest
import torch

from slipstream.kernels.head_linear import head_linear as head_linear_twin
from slipstream.kernels.latent_rows import absorb_query, latent_rows, rotate_query, write_latent
from slipstream.kernels.stream import Norm

gpu = pytest.importorskip("slipstream.kernels.gpu.latent_rows")
products = pytest.importorskip("slipstream.kernels.gpu.head_linear")
HEADS, RANK, NOPE, ROPE, VALUE = 3, 48, 32, 8, 40
Close = Callable[[torch.Tensor, torch.Tensor], None]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.outer(torch.arange(num_rows).float(), torch.tensor([1.0, 0.3, 0.1, 0.02])).repeat(1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@DTYPES
def test_cells_are_the_twins(kernel_device: str, close: Close, dtype: torch.dtype) -> None:
    """Of rows that are a part of wider ones; no other cell is touched."""
    wide, norm = randn(5, 20 + RANK + ROPE, dtype=dtype), Norm(0.5 + torch.rand(RANK).to(dtype), 1e-5)
    index = torch.tensor([9, 2, 30, 17, 8])
    theirs = torch.full((4, 8, RANK + ROPE), 7.0).to(dtype)
    ours = theirs.to(kernel_device)
    write_latent(wide[:, 20:], norm, *angles(5, dtype), theirs, index)
    there = [one.to(kernel_device) for one in (*angles(5, dtype), index, norm.weight, wide)]
    gpu.write_latent(there[4][:, 20:], Norm(there[3], 1e-5), there[0], there[1], ours, there[2])
    close(ours, theirs)
    untouched = torch.ones(32, dtype=torch.bool)
    untouched[index] = False
    assert (ours.cpu().flatten(0, 1)[untouched] == 7).all()


@DTYPES
def test_cells_and_normed_queries_are_one_launch(kernel_device: str, close: Close, dtype: torch.dtype) -> None:
    """The bits of `write_latent`, and the twin's norm."""
    made, q_norm = randn(5, 20 + RANK + ROPE, dtype=dtype), Norm(0.5 + torch.rand(20).to(dtype), 1e-5)
    norm, index = Norm(0.5 + torch.rand(RANK).to(dtype), 1e-5), torch.tensor([9, 2, 30, 17, 8])
    theirs = torch.full((4, 8, RANK + ROPE), 7.0).to(dtype)
    apart, ours = theirs.to(kernel_device), theirs.to(kernel_device)
    want = latent_rows(made, q_norm, norm, *angles(5, dtype), theirs, index)
    there = [one.to(kernel_device) for one in (*angles(5, dtype), index, norm.weight, made, q_norm.weight)]
    got = gpu.latent_rows(there[4], Norm(there[5], 1e-5), Norm(there[3], 1e-5), there[0], there[1], ours, there[2])
    gpu.write_latent(there[4][:, 20:], Norm(there[3], 1e-5), there[0], there[1], apart, there[2])
    assert torch.equal(ours, apart)
    close(got, want)
    close(ours, theirs)


@DTYPES
def test_queries_are_the_twins(kernel_device: str, dtype: torch.dtype, close: Close) -> None:
    wide, key = randn(5, HEADS, NOPE + ROPE + 8, dtype=dtype), randn(HEADS, RANK, NOPE, dtype=dtype, seed=1) * 0.2
    q, (cos, sin) = wide[..., : NOPE + ROPE], angles(5, dtype)
    there = wide.to(kernel_device)[..., : NOPE + ROPE]
    turned = gpu.rotate_query(there, cos.to(kernel_device), sin.to(kernel_device))
    assert torch.equal(turned.cpu(), rotate_query(q, cos, sin))
    made = gpu.absorb_query(there, key.to(kernel_device), cos.to(kernel_device), sin.to(kernel_device))
    close(made, absorb_query(q, key, cos, sin))
    of_turned = products.into_latents(turned, key.to(kernel_device), None)
    assert torch.equal(of_turned, made)


@DTYPES
def test_each_head_has_its_weight(kernel_device: str, dtype: torch.dtype, close: Close) -> None:
    """Of weights that are part of larger ones, as in `kv_b_proj`."""
    x, whole = randn(5, HEADS, RANK, dtype=dtype), randn(HEADS, 16 + VALUE, RANK, dtype=dtype, seed=1) * 0.2
    got = products.head_linear(x.to(kernel_device), whole.to(kernel_device)[:, 16:])
    close(got, head_linear_twin(x, whole[:, 16:].contiguous()))
    with pytest.raises(ValueError, match="expected"):
        products.head_linear(x.to(kernel_device), whole.to(kernel_device)[:, :, :16])


def test_a_row_keeps_its_bits_in_any_company(kernel_device: str) -> None:
    x, weight = (one.to(kernel_device) for one in (randn(20, 2, 64, dtype=torch.float32), torch.rand(2, 24, 64)))
    q, key = randn(20, 2, 24, dtype=torch.float32).to(kernel_device), torch.rand(2, 32, 16).to(kernel_device)
    cos, sin = (one.to(kernel_device) for one in angles(20, torch.float32))
    for attend in (
        lambda rows: products.head_linear(x[rows], weight),
        lambda rows: gpu.absorb_query(q[rows], key, cos[rows], sin[rows]),
    ):
        together = attend(slice(0, 20))
        for count in (1, 3, 9):
            assert torch.equal(attend(slice(0, count)), together[:count])
            assert torch.equal(attend(slice(20 - count, 20)), together[20 - count :])
