"""Compile what a test module's function launches, for a card that need not be there: FILE FUNCTION CAPABILITY.

Every launch that goes through `kernels/gpu/launch.py` is compiled instead of run; its tensors may lie on the device
`meta`. Prints one JSON line a launch. Equal launches are compiled once.
"""

import importlib.util
import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slipstream.kernels.gpu import launch

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.uint8: "*u8",
}


def signature(kernel: Any, arguments: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """(signature, constexprs, attributes) of a launch, as Triton's own specialisation would make them."""
    types, constants, attributes = {}, {}, {}
    for at, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None or (value is True or value is False):
            types[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[parameter.name] = _TYPES[value.dtype]
            attributes[(at,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            types[parameter.name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            types[parameter.name], constants[parameter.name] = "constexpr", 1
        else:
            types[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(at,)] = [["tt.divisibility", 16]]
    return types, constants, attributes


def main(file: str, function: str, capability: int) -> None:
    seen = set()

    def compile_instead(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], options: dict[str, Any]) -> None:
        types, constants, attributes = signature(kernel, arguments)
        key = repr((kernel.__name__, types, constants, attributes, options))
        if key in seen:
            return
        seen.add(key)
        source = ASTSource(kernel, types, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        line = {
            "kernel": kernel.__name__,
            "constants": {k: v for k, v in constants.items() if isinstance(v, int | float | bool)},
            "shared": compiled.metadata.shared,
            "num_warps": options["num_warps"],
            "ttgir": compiled.asm["ttgir"],
            "ptx": compiled.asm["ptx"],
        }
        print(json.dumps(line))

    launch.capability = lambda: capability  # type: ignore[assignment]
    launch._run = compile_instead
    spec = importlib.util.spec_from_file_location("cross_compiled", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with torch.no_grad():
        getattr(module, function)()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
