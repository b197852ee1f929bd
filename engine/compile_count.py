"""How many Triton kernels this process has compiled or loaded: after ready there must be no more of them."""

from typing import Any


class _CompileCount:
    """A listener of Triton's compiler. names: the kernels, in order, of every call of the compiler."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._next: Any = None
        self._installed = False

    def install(self) -> None:
        """From now on compiles are counted, once however often it is called; another listener stays in force."""
        if self._installed:
            return
        from triton import knobs  # at last: the CPU needs no Triton

        self._next, knobs.compilation.listener = knobs.compilation.listener, self
        self._installed = True

    @property
    def count(self) -> int:
        return len(self.names)

    def __call__(self, **told: Any) -> None:
        self.names.append(str(getattr(told["src"], "name", told["src"])))
        if self._next is not None:
            self._next(**told)


COMPILES = _CompileCount()
