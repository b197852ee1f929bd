"""What a target with routed experts asks of a card: the kernels that it cannot do without, before it has any memory."""

import torch

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.model_config import ModelConfig

_OTHER_TARGET = "serve it on the CPU, or use another checkpoint of it"


def prepare_expert_kernels(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
    """Compiles and loads the kernels of router and routed experts, where the target has some and goes to a card.

    Unlike the products of other weights they have no Triton form. So what they do not take is refused here, before a
    layer takes memory.

    Raises SlipstreamError for a type, a form of weights, sizes or a card that they do not take, and without nvcc.
    """
    if config.experts is None or torch.device(device).type != "cuda":
        return
    from slipstream.kernels.cuda import build, expert_launch, expert_stream_launch, gate_launch, route_launch
    from slipstream.kernels.gpu.launch import capability
    from slipstream.kernels.matrix_products import OLDEST

    e, quantization, arch = config.experts, config.quantization, capability()
    group = None if quantization is None else quantization.group
    if dtype != torch.bfloat16 or group != expert_launch.GROUP:
        form = "plain" if group is None else f"INT4 in groups of {group}"
        raise SlipstreamError(
            f"{config.architecture}: routed experts with {form} weights over {str(dtype).removeprefix('torch.')}, on a "
            "card",
            expected=f"INT4 weights in groups of {expert_launch.GROUP} over bfloat16: what its kernels take",
            do=f"set server.dtype to bfloat16; else {_OTHER_TARGET}",
        )
    try:
        route_launch.check(1, e.num, e.per_token, e.groups)
    except ValueError as error:
        raise SlipstreamError(f"{config.architecture}: {error}", do=_OTHER_TARGET) from error
    if arch < OLDEST:
        raise SlipstreamError(
            f"{config.architecture} on an sm_{arch}", expected=f"sm_{OLDEST} or newer for routed experts", do="use one"
        )
    try:
        gate = [gate_launch] if arch >= gate_launch.OLDEST else []
        for module in (route_launch, *gate, expert_launch, expert_stream_launch):
            module.load(torch.cuda.current_device())
    except (RuntimeError, OSError) as error:
        found = "no nvcc, nor kernels from an earlier start" if build.nvcc() is None else str(error)
        raise SlipstreamError(
            f"the kernels of {config.architecture}'s routed experts cannot be had: {found}",
            expected="nvcc of CUDA 12 or newer on PATH, in CUDA_HOME or in /usr/local/cuda",
            do="install it (once: the kernels are kept in the user's cache), or serve the target on the CPU",
        ) from error
