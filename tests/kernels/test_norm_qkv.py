"""norm_qkv: the Triton kernel against its torch twin."""

from collections.abc import Callable

import pytest
import torch

from slipstream.kernels.gpu import norm_qkv as gpu
from slipstream.kernels.norm_qkv import Heads, KVSink, norm_qkv
from slipstream.kernels.stream import Norm, Stream

Close = Callable[[torch.Tensor, torch.Tensor], None]
K = 48


class Case:
    """Inputs of m rows in one dtype."""

    def __init__(self, heads: Heads, m: int, dtype: torch.dtype, head_norms: bool) -> None:
        generator = torch.Generator().manual_seed(m)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.rows = random(m, K).to(dtype)
        self.norm = Norm((1 + 0.1 * random(K)).to(dtype), 1e-5)
        self.weight = (random((heads.q + 2 * heads.kv) * heads.dim, K) / K**0.5).to(dtype)
        angle = 6 * random(m, heads.dim // 2)
        self.cos = torch.cat((angle, angle), dim=1).cos().to(dtype)  # 2 x [M, d / 2] -> [M, d]
        self.sin = torch.cat((angle, angle), dim=1).sin().to(dtype)
        self.head_norms = [Norm((1 + 0.1 * random(heads.dim)).to(dtype), 1e-6) if head_norms else None for _ in "qk"]
        self.cache = random(3, 16, 2, heads.kv, heads.dim).to(dtype)
        self.cells = torch.randperm(48, generator=generator)[:m]

    def call(self, op: Callable[..., tuple], heads: Heads, device: str, sink: bool) -> tuple[torch.Tensor, ...]:
        """(q, k, v), or (q, the whole cache)."""

        def to(norm: Norm | None) -> Norm | None:
            return None if norm is None else Norm(norm.weight.to(device), norm.eps)

        cache = self.cache.clone().to(device)
        q, k, v = op(
            Stream(self.rows.to(device)),
            to(self.norm),
            self.weight.to(device),
            heads,
            self.cos.to(device),
            self.sin.to(device),
            *map(to, self.head_norms),
            KVSink(cache, self.cells.to(device)) if sink else None,
        )
        return (q, cache) if sink else (q, k, v)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize(
    ("heads", "m", "dtype"),
    [
        (Heads(2, 1, 64), 3, torch.float32),
        (Heads(2, 1, 64), 1, torch.bfloat16),
        (Heads(3, 1, 96), 2, torch.bfloat16),  # half a head is no power of two
        (Heads(2, 2, 8), 17, torch.float32),  # smaller than a tile
    ],
)
def test_equals_the_twin(
    heads: Heads, m: int, dtype: torch.dtype, head_norms: bool, sink: bool, kernel_device: str, close: Close
) -> None:
    case = Case(heads, m, dtype, head_norms)
    found = case.call(gpu.norm_qkv, heads, kernel_device, sink)
    expected = case.call(norm_qkv, heads, "cpu", sink)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        close(a, b)
    if sink:
        untouched = [cell for cell in range(48) if cell not in case.cells]
        assert torch.equal(found[1].cpu().flatten(0, 1)[untouched], case.cache.flatten(0, 1)[untouched])


def test_one_head_norm_without_the_other(kernel_device: str, close: Close) -> None:
    heads = Heads(2, 1, 32)
    for missing in (0, 1):
        case = Case(heads, 2, torch.float32, True)
        case.head_norms[missing] = None
        found, expected = (
            case.call(op, heads, d, False) for op, d in ((gpu.norm_qkv, kernel_device), (norm_qkv, "cpu"))
        )
        for a, b in zip(found, expected, strict=True):
            close(a, b)
