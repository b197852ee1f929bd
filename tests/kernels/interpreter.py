"""Three repairs of Triton's interpreter (3.6), which stands in for the GPU in tests.

bf16 is rounded to nearest even, as the GPU does (it cuts). A loop may end at a value that the kernel was given or
computed, whatever the NumPy version (2.4 makes an int of 0-d arrays only). `tl.dot` gives a row the same bits at any
place in a tile, as a matrix unit does (BLAS does not).
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def repair() -> None:
    convert, patch_tensor = interpreter._convert_float, interpreter._patch_lang_tensor

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(data).view(np.uint32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            return np.ascontiguousarray(data).astype(np.uint32) << 16
        return convert(data, source, target, rounding)

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        # Loops of its own: one row is like another.
        product = np.einsum("...mk,...kn->...mn", a.data, b.data, dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter._convert_float = convert_float
    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter.InterpreterBuilder.create_dot = dot
