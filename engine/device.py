"""Which device serves: what `auto` means on this machine, and what the device is called."""

from typing import Literal

from slipstream.engine.errors import SlipstreamError

Device = Literal["cpu", "cuda"]
DEVICES = ("auto", "cpu", "cuda")


def resolve_device(asked: str) -> Device:
    """What `asked` (auto, cpu or cuda) is here; `auto` is the card where there is one.

    Raises SlipstreamError for another word, and for cuda without a card that torch can use.
    """
    if asked not in DEVICES:
        raise SlipstreamError(f"device = {asked!r}", expected=f"one of {', '.join(DEVICES)}", do="correct --device")
    if asked == "cpu":
        return "cpu"
    import torch  # at last: command lines are checked without it

    if torch.cuda.is_available():
        return "cuda"
    if asked == "auto":
        return "cpu"
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    raise SlipstreamError(
        f"device is cuda, and torch {torch.__version__} ({built}) sees no card",
        expected="an NVIDIA card with its driver, and a torch built for CUDA",
        do="look at `nvidia-smi` and CUDA_VISIBLE_DEVICES, install a CUDA build of torch, or set server.device to cpu",
    )


def device_name(device: str) -> str:
    """The card's own name; "CPU" for the CPU."""
    if device != "cuda":
        return "CPU"
    import torch

    return torch.cuda.get_device_name()
