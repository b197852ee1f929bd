"""A round and a chunk as a card would run them, on the device `meta`: shapes without values.

There whatever would wait for the device, or make a shape from a value, fails. What is launched goes wherever
`kernels.gpu.launch` sends it: tests count it, or compile it without a card (tests/kernels/cross_compile.py).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.config import Eagle3Config
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.models.dense import DenseModel
from slipstream.engine.runner import Runner
from slipstream.kernels import dispatch

# The shapes of SmolLM2-135M, cut to two layers and a small vocabulary.
_TARGET = ModelConfig(
    "LlamaForCausalLM", 4096, 576, 1536, 2, 9, 3, 64, 1e-5, 1e5, None, 512, True, 1, (2,), "bfloat16"
)  # fmt: skip
_DRAFT = Eagle3Config(576, 1536, 9, 3, 64, 1e-5, 1e5, None, 512, 4096, 1024, 576, (0, 1, 2), 2)


@contextmanager
def as_on_a_card() -> Iterator[None]:
    """Ops take their Triton kernels, wherever their tensors lie."""
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("slipstream.") and hasattr(m, "on_gpu")]
    before = dispatch.on_gpu
    for module in modules:
        module.on_gpu = lambda x: not torch.is_grad_enabled()
    try:
        yield
    finally:
        for module in modules:
            module.on_gpu = before


def runner(num_steps: int, batch: int, dtype: torch.dtype = torch.bfloat16) -> Runner:
    """A runner on `meta`, with a draft where there are steps."""
    with torch.device("meta"):
        target = DenseModel(_TARGET, dtype).requires_grad_(False).eval()
        proposer = None
        if num_steps:
            proposer = Eagle3Proposer(Eagle3Network(_DRAFT, dtype).requires_grad_(False).eval(), num_steps)
    config = EngineConfig(num_steps=num_steps, max_running_requests=batch, max_context_tokens=512, device="cuda")
    return Runner(target, config, proposer)


def one_round(num_steps: int = 3, batch: int = 1, this_round: int | None = None) -> None:
    """Launches one round; of K = `this_round`, where that is given."""
    made = runner(num_steps, batch)
    with as_on_a_card(), torch.inference_mode():
        made.round(torch.zeros(batch, dtype=torch.int64, device="meta"), this_round)


def one_chunk(num_steps: int = 3, rows: int = 64, batch: int = 1) -> None:
    """Launches one prefill chunk of each of `batch` requests."""
    made = runner(num_steps, batch)
    with as_on_a_card(), torch.inference_mode():
        made.prefill(torch.zeros(batch, 4, dtype=torch.int64, device="meta"), rows)


def rounds() -> None:
    """Kernels of rounds for batches of 1 and 16, and of a chunk."""
    for batch in (1, 16):
        one_round(3, batch)
    one_chunk(3, 256)
    one_chunk(3, 128, 4)
