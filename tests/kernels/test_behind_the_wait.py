"""What the kernel before wrote is seen behind `gdc_wait` through the L1 cache, too, where older kernels left old lines.

Every activation of a step lies where others lay before, and kernels of a chain stand on a multiprocessor before those
in front of them have read. So of three kernels, each of which lets the next one start at once, the first reads a buffer
late, the second writes it elsewhere, and the third, there all the time, reads it behind its wait.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
from slipstream.kernels.gpu import launch  # noqa: E402

tl = triton.language
WORDS, TURNS = 1024, 200  # 4 KB, that stay in any L1


@triton.jit
def _read_late(buffer_ptr, sums_ptr, times_ptr, nanoseconds, WORDS: tl.constexpr, PDL: tl.constexpr):
    """Leaves the buffer in the L1 of its multiprocessor, some time behind its wait; says when."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    began = tl.extra.cuda.globaltimer()
    now = began
    while now - began < nanoseconds:
        now = tl.extra.cuda.globaltimer()
    words = tl.load(buffer_ptr + tl.arange(0, WORDS))
    tl.store(sums_ptr + tl.program_id(0), tl.sum(words, 0))
    tl.store(times_ptr + tl.program_id(0), now)


@triton.jit
def _write(buffer_ptr, turn, WORDS: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tl.store(buffer_ptr + tl.arange(0, WORDS), tl.zeros((WORDS,), tl.int32) + turn)


@triton.jit
def _check(buffer_ptr, turn, wrong_ptr, times_ptr, WORDS: tl.constexpr, WAITS: tl.constexpr, PDL: tl.constexpr):
    """Counts words that are not of this turn; says when it was there."""
    began = tl.full((), 0, tl.int64)
    if PDL:
        began = tl.extra.cuda.globaltimer()
        tl.extra.cuda.gdc_launch_dependents()
        if WAITS:
            tl.extra.cuda.gdc_wait()
    words = tl.load(buffer_ptr + tl.arange(0, WORDS))
    if PDL and not WAITS:
        tl.extra.cuda.gdc_wait()
    wrong = tl.sum((words != turn).to(tl.int32), 0)
    tl.store(wrong_ptr + tl.program_id(0), tl.load(wrong_ptr + tl.program_id(0)) + wrong)
    tl.store(times_ptr + tl.program_id(0), began)


class Chain:
    """TURNS of the three, in one stream. programs: of the first and the third, several on every multiprocessor."""

    def __init__(self, device: str, programs: int) -> None:
        with torch.device(device):
            self.buffer = torch.zeros(WORDS, dtype=torch.int32)
            self.sums, self.wrong = (torch.zeros(programs, dtype=torch.int32) for _ in range(2))
            self.read_at, self.there_at = (torch.zeros(TURNS, programs, dtype=torch.int64) for _ in range(2))
        self.programs = programs

    def run(self, turns: int = TURNS, waits: bool = True) -> None:
        for turn in range(turns):
            late = {"times_ptr": self.read_at[turn], "nanoseconds": 4096, "WORDS": WORDS}
            launch.launch(_read_late, (self.programs,), num_warps=4, buffer_ptr=self.buffer, sums_ptr=self.sums, **late)
            launch.launch(_write, (1,), num_warps=4, buffer_ptr=self.buffer, turn=turn + 1, WORDS=WORDS)
            here = {"times_ptr": self.there_at[turn], "WORDS": WORDS, "WAITS": waits}
            launch.launch(
                _check,
                (self.programs,),
                num_warps=4,
                buffer_ptr=self.buffer,
                turn=turn + 1,
                wrong_ptr=self.wrong,
                **here,
            )


def one_turn() -> None:
    """What tests compile without a card."""
    for waits in (True, False):
        Chain("meta", 8).run(1, waits)


def test_the_probe_compiles(cross_compile: Callable[..., list[dict[str, Any]]]) -> None:
    made = cross_compile(Path(__file__), "one_turn", 90)
    assert [one["kernel"] for one in made] == ["_read_late", "_write", "_check", "_check"]
    for one in made:
        ptx = one["ptx"]
        assert ptx.count("griddepcontrol.wait") == 1
        loads = [line for line in ptx.splitlines() if "ld.global" in line]
        assert not [line for line in loads if ".cg" in line or ".nc" in line], "the probe reads through L1"
    waits, early = (one["ptx"] for one in made[2:])
    assert waits.index("griddepcontrol.wait") < waits.index("ld.global")
    assert early.index("ld.global") < early.index("griddepcontrol.wait")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_lines_that_older_kernels_left_are_not_read_behind_the_wait() -> None:
    if not launch.pdl_enabled():
        pytest.skip("kernels of this card do not overlap")
    programs = 4 * torch.cuda.get_device_properties(0).multi_processor_count
    chain, without = Chain("cuda", programs), Chain("cuda", programs)
    for one, waits in ((chain, True), (without, False)):
        one.run(2, waits)  # compiles
        one.wrong.zero_()
        one.buffer.zero_()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one.run(TURNS, waits)
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
    before = (chain.there_at < chain.read_at.amin(1, keepdim=True)).float().mean()
    print(f"{before:.0%} of the readers were there before the old lines were read")
    assert before > 0.1, "nothing overlapped: this shows nothing"
    assert int(without.wrong.sum()) > 0, "who does not wait reads old words: else this shows nothing"
    assert int(chain.wrong.sum()) == 0
