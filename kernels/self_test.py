"""A second of arithmetic that shows whether an installation can compute: `python -P -m slipstream.kernels.self_test`.

Two ops of every layer on the device that a server would take, against their formulas in float64. On a card that
compiles kernels, which needs a driver, a compiler's runtime and this Python to fit together.
"""

import json
import sys
import time

import torch

from slipstream.kernels.linear import linear
from slipstream.kernels.rms_norm import rms_norm

ROWS, WIDTH, OUT = 4, 256, 128  # rows x WIDTH values, OUT x WIDTH weights
TOLERANCE = 2.0**-6  # of the largest value: two roundings to bfloat16, and some


def self_test() -> dict[str, object]:
    """What was computed where, and how far it is from the formula. Raises ValueError when it is too far."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.monotonic()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator)  # [rows, width]
    norm = 0.5 + torch.rand(WIDTH, generator=generator)  # [width]
    weight = torch.randn(OUT, WIDTH, generator=generator) / WIDTH**0.5  # [out, width]
    x, norm, weight = (value.to(torch.bfloat16) for value in (x, norm, weight))
    with torch.no_grad():
        computed = linear(rms_norm(x.to(device), norm.to(device), 1e-6), weight.to(device))  # [rows, out]
    exact = x.double()
    exact = exact * (exact.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.double()
    exact = exact @ weight.double().T  # [rows, out]
    error = float((computed.double().cpu() - exact).abs().max() / exact.abs().max())
    if not error < TOLERANCE:
        raise ValueError(f"norm and product on {device} are {error:.1e} of the largest value away from their formula")
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {
        "device": name,
        "torch": torch.__version__,
        "error": error,
        "seconds": round(time.monotonic() - started, 3),
        "python": sys.version.split()[0],
    }


if __name__ == "__main__":
    print(json.dumps(self_test()))
