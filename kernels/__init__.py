"""One op a file. Here: the torch twin of each op, which is the CPU path and the oracle of the Triton kernel's test.

Every op on the decode and verify path promises that a row's bits do not depend on how many rows travel with it
(`row_invariance.probe` measures whether the CPU at hand keeps that promise).
"""

import os

# MKL picks code by the alignment of its buffers unless told otherwise, and then equal inputs give unequal bits from
# one call to the next. The variable is read at MKL's first call, so it must be set before any op runs.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# Turns that an idle thread of torch's pool waits for work before it sleeps. GNU OpenMP's own default is 30 times as
# long: no faster on idle cores (18.8 and 18.9 ms a step of SmolLM2 on two), but where anybody else needs one of them,
# it burns the CPU in waiting (310 ms a step against 115 with six rivals). Read when torch is imported: entry points
# (the command line, the server) import this package first.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
