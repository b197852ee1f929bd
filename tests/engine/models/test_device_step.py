"""A step of target and draft by the Triton kernels: the twins' numbers (in Triton's interpreter too), no wait for the
device, and the same bits when a CUDA graph replays it."""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slipstream import kernels
from slipstream.engine.capture import slot_name

SLOTS = (0, 1, 2)
FAMILIES = {
    "llama": {"head_dim": 64},
    "qwen3": {"family": "qwen3", "head_dim": 128},
    "mistral": {"family": "mistral", "head_dim": 64, "sliding_window": 5},
}
INTERPRETER = Path(__file__).parents[2] / "kernels" / "interpreter.py"


class Step:
    """Two requests of 4 rows each; one row is padding. `inputs` are the buffers that a graph reads."""

    def __init__(self, tiny, directory, device, dtype, sizes) -> None:
        sizes = {"num_hidden_layers": 2, **sizes}
        self.target = tiny.tiny_target(directory, dtype=dtype, device=device, **sizes)
        self.draft = tiny.tiny_draft(self.target, slots=SLOTS).to(device)
        self.cache = self.target.allocate_kv(9, 16)
        heads = self.draft.midlayer.self_attn.heads
        self.draft_cache = torch.zeros(9, 16, 2, heads.kv, heads.dim, dtype=dtype, device=device)
        self.table = torch.arange(1, 9, device=device).view(2, 4)
        positions = torch.tensor([[0, 1, 2, 3], [20, 21, 22, -1]], device=device)
        self.inputs = (torch.zeros(2, 4, dtype=torch.int64, device=device), positions)

    @torch.inference_mode()
    def run(self) -> tuple[torch.Tensor, ...]:
        """Target with captured slots, its logits, and two draft steps on them."""
        token_ids, positions = self.inputs
        kv = self.cache.view(self.table)
        out = self.target(token_ids, positions, kv, SLOTS)
        g = self.draft.fuse(torch.cat([out.states[slot_name(slot)] for slot in SLOTS], -1))
        attend = self.draft.midlayer.self_attn.paged(self.draft_cache, kv.rows(positions))
        state = self.draft(token_ids, g, positions, attend)
        state = self.draft(token_ids, self.draft.feedback(state), positions, attend)
        real = positions.flatten() >= 0  # what padding rows give is not meant for use
        found = (out.last, *out.states.values(), self.target.logits(out.last), self.draft.logits(state))
        return tuple(torch.where(real[:, None], x.flatten(0, 1), 0) for x in found)

    def set(self, seed: int) -> None:
        self.inputs[0].copy_(torch.randint(0, 199, (2, 4), generator=torch.Generator().manual_seed(seed)))


@pytest.fixture
def on_card(tiny, tmp_path):
    """Makes the step of a family on the card."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return lambda sizes: Step(tiny, tmp_path, "cuda", torch.bfloat16, sizes)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_kernels_and_twins_give_the_same_step(tiny, tmp_path, family, monkeypatch, load_test_module):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        load_test_module(INTERPRETER).repair()
    step = Step(tiny, tmp_path, device, torch.float32, FAMILIES[family])
    step.set(1)
    ops = [
        importlib.import_module(f"{kernels.__name__}.{found.name}") for found in pkgutil.iter_modules(kernels.__path__)
    ]
    for choice in (False, True):
        for op in ops:
            if hasattr(op, "on_gpu"):
                monkeypatch.setattr(op, "on_gpu", lambda _, choice=choice: choice)
        step.cache = step.target.allocate_kv(9, 16)
        step.draft_cache.zero_()
        found = [x.clone() for x in step.run()] + [step.draft_cache, *step.cache.layers]
        if not choice:
            twins = [x.clone() for x in found]
    for x, twin in zip(found, twins, strict=True):
        written = x if x.dim() == 2 else x[1:]  # padding rows write into block 0
        expected = twin if x.dim() == 2 else twin[1:]
        assert (written - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", FAMILIES.values(), ids=FAMILIES.keys())
def test_a_step_waits_for_nothing(on_card, sizes):
    step = on_card(sizes)
    step.run()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", FAMILIES.values(), ids=FAMILIES.keys())
def test_replays_give_the_bits_of_the_eager_step(on_card, sizes):
    step = on_card(sizes)
    replay, replayed = _captured(step), []
    for seed in (1, 2, 1):
        step.set(seed)
        expected = [x.clone() for x in step.run()]
        replayed.append([x.clone() for x in replay()])
        for found, eager in zip(replayed[-1], expected, strict=True):
            assert torch.equal(found, eager)
            assert found.isfinite().all()
    assert all(not torch.equal(one, other) for one, other in zip(replayed[0], replayed[1], strict=True))
    assert all(torch.equal(one, again) for one, again in zip(replayed[0], replayed[2], strict=True))


def _captured(step: Step) -> Callable[[], tuple[torch.Tensor, ...]]:
    step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step.run()

    def replay() -> tuple[torch.Tensor, ...]:
        graph.replay()
        return outputs

    return replay
