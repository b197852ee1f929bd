"""compute-sanitizer over the kernel tests: every kernel at small shapes, in a few minutes of one card.

    python -P tests/kernels/sanitize.py [--groups products attention ...] [--tools memcheck racecheck ...] [--out DIR]
        [--seconds 150] [--jobs 8]

One process for each (tool, group), several at a time; each runs pytest on the tests named below and ends with the
sanitizer's own count of errors. memcheck runs without torch's caching allocator, so that every tensor is an allocation
of its own with nothing behind it. A control with a planted store past the end comes first: where memcheck does not see
it, nothing below means anything. Ends with 1 on any error, on a test that failed, and on a group that did not come to
its end. Run the tests once without the sanitizer before: it makes compiling slow.

Not counted, but told: what racecheck and synccheck find inside kernels of other libraries (memcheck and initcheck
count whoever reads, for what a library's kernel reads may be ours); and races of racecheck that an mbarrier orders. It
follows no mbarrier in a loop, and takes the copying thread for a writer that nothing orders (FlashAttention's
AI/RACECHECK_TMA_HAZARD.md found the same). That such a ring waits is tested on the emulated GPU. Two kinds are told
apart, by the disassembled kernel: a bulk copy and the readers of the ring that it fills, or sums sent through a
cluster (the write is an instruction whose bytes an mbarrier counts); and words that are handed on (the run of stores
stands between a wait at an mbarrier and an arrival at another, each run of loads behind a wait at that other one).

And synccheck's divergent threads at a cluster's barrier, which warps with parts of their own reach at instructions of
their own, as PTX allows. Where a CTA is its own cluster the compiler takes the CTA's barrier 0 instead, which counts
warps wherever they stand; synccheck wants all at one instruction. Told apart by the code: the cluster's wait stands
just in front of it, on the other branch. synccheck keeps 256 records of a launch, and one that has more is no verdict:
so where a CTA is alone, its warps of 32 threads that copy are all that is at such a barrier by itself.
"""

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Group -> (tests, tools that are worth their time there). racecheck looks at shared memory, initcheck at global memory.
KERNELS = "tests/kernels/"
GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # CUDA C++: every compiled kernel once or twice.
    "products": ((f"{KERNELS}test_cuda_skinny_gemm.py::test_gpu_every_kernel",), TOOLS),
    "int4": ((f"{KERNELS}test_cuda_int4_gemm.py::test_gpu_every_kernel",), TOOLS),
    "wide": ((f"{KERNELS}test_cuda_wide_gemm.py::test_gpu_every_kernel",), TOOLS),
    "cluster": ((f"{KERNELS}test_cuda_cluster_gemm.py::test_gpu_every_kernel",), TOOLS),
    "prompt": ((f"{KERNELS}test_cuda_prompt_gemm.py::test_gpu_every_kernel",), TOOLS),
    "experts": (
        (
            f"{KERNELS}test_cuda_experts.py::test_gpu_every_kernel_over_few_chunks",
            f"{KERNELS}test_cuda_route.py::test_gpu_every_stage",
            f"{KERNELS}test_cuda_gate.py::test_gpu_every_branch",
        ),
        TOOLS,
    ),
    # Triton.
    "latent": (
        (f"{KERNELS}test_mla_attention_kernels.py", f"{KERNELS}test_latent_rows_kernels.py"),
        ("memcheck", "racecheck", "initcheck"),
    ),
    "triton": (
        tuple(f"{KERNELS}test_{op}.py" for op in ("norm_linear", "linear_add", "norm_gate_up", "norm_qkv")),
        ("memcheck", "racecheck", "initcheck"),
    ),
    "triton-int4": ((f"{KERNELS}test_int4_linear.py::test_every_op_takes_int4_weights_on_the_card",), ("memcheck",)),
    "attention": (
        (
            f"{KERNELS}test_paged_attention_decode.py",
            f"{KERNELS}test_paged_attention_prefill.py",
        ),
        ("memcheck", "initcheck"),
    ),
    "sampling": (
        (
            f"{KERNELS}test_sampling_kernels.py::test_every_kind_of_row_is_the_twins",
            f"{KERNELS}test_sampling_kernels.py::test_greedy_takes_the_lowest_id_of_equals",
            f"{KERNELS}test_sampling_kernels.py::test_proposed_tokens_are_the_twins",
            f"{KERNELS}test_sampling_kernels.py::test_a_broken_row_still_gives_an_id",
        ),
        ("memcheck", "racecheck"),
    ),
    "round": (
        (
            f"{KERNELS}test_round_ops_kernels.py::test_a_round_is_the_twins",
            f"{KERNELS}test_round_ops_kernels.py::test_the_first_token_is_the_twins",
            f"{KERNELS}test_round_ops_kernels.py::test_copies_are_the_twins",
            f"{KERNELS}test_embed.py",
            f"{KERNELS}test_draft_input.py",
            f"{KERNELS}test_rotary.py",
        ),
        ("memcheck", "initcheck"),
    ),
    "exchange": ((f"{KERNELS}test_peer_exchange_gpu.py::test_parts_are_gathered",), ("memcheck",)),
}
CONTROL = """
import torch, triton, triton.language as tl
@triton.jit
def store(x, n, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), 1.0, mask=tl.arange(0, BLOCK) < n)
x = torch.zeros(64, device="cuda")
store[(1,)](x, 96, BLOCK=128)
torch.cuda.synchronize()
"""


PRINT_LIMIT = 50_000  # errors that racecheck and synccheck print: each is looked at
# Demangled C++ templates and the names of cuBLAS; ours are extern "C" or Triton's.
FOREIGN = ("nvjet_", "cublas", "cutlass", "gemm", "gemv", "void ", "at::", "nccl")
COUNTED = ("UBLKCP", "STAS")  # instructions whose bytes an mbarrier counts: bulk copies, st.async
WAIT, ARRIVAL = "SYNCS.PHASECHK", "SYNCS.ARRIVE"  # of an mbarrier
CTA_BARRIER, CLUSTER_WAIT = "BAR.SYNC", "UCGABAR_WAIT"
NEAR = 64  # instructions between words and their wait or arrival: the rest of their run and what is computed in between
ON_OTHER_BRANCH = 4  # instructions between a cluster's wait and what stands for it where a CTA is alone
BYTES = 16  # of an instruction
IN_LIBRARIES, OF_BULK_COPIES = "in other libraries' kernels", "of bulk copies or sent sums, ordered by an mbarrier"
OF_WORDS = "of words stored between a wait and an arrival at mbarriers and read behind a wait at the latter"
OF_CLUSTERS = "at barriers of a CTA that is its own cluster, which each role reaches by its own instruction"


@dataclass(frozen=True)
class Errors:
    """counted: those that fail. aside: why it is not counted -> kernel -> how many."""

    counted: int
    aside: Mapping[str, Counter[str]]

    def describe(self) -> list[str]:
        lines = []
        for why, kernels in self.aside.items():
            names = ", ".join(f"{name} {count}" for name, count in kernels.most_common())
            lines.append(f"       {kernels.total()} {why}: {names}")
        return lines


@dataclass(frozen=True)
class Outcome:
    """One process. errors: None where the sanitizer did not come to its summary. tests: pytest's last line."""

    tool: str
    group: str
    errors: Errors | None
    tests: str
    code: int
    seconds: float

    @property
    def is_clean(self) -> bool:
        return self.errors is not None and self.errors.counted == 0 and self.code == 0

    def describe(self) -> str:
        told = "no summary" if self.errors is None else f"{self.errors.counted} errors"
        verdict = "ok    " if self.is_clean else "FAILED"
        first = f"{verdict} {self.tool:9} {self.group:12} {told:12} {self.tests} ({self.seconds:.0f} s)"
        return "\n".join([first, *(self.errors.describe() if self.errors else [])])


def errors_of(tool: str, words: str, instruction: Callable[[str, int], str]) -> Errors | None:
    """Reads what the sanitizer wrote; None where its summary is missing.

    Args:
        tool: memcheck, racecheck, ..
        words: the log.
        instruction: (kernel, address in it) -> the instruction there, "" where that is not known.
    """
    summary = re.search(r"RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?\)", words)
    summary = summary or re.search(r"ERROR SUMMARY: (\d+) errors?\s*$", words, re.MULTILINE)
    if summary is None:
        return None
    total = sum(map(int, summary.groups()))
    if tool not in ("racecheck", "synccheck"):
        return Errors(total, {})
    found = re.split(r"^=+ (?=Error: |Warning: |Barrier error )", words, flags=re.MULTILINE)[1:]
    counted, aside = 0, {}
    for one in found:
        places = re.findall(r"(?:(Read|Write) access )?at (.+?)\+0x([0-9a-f]+)", one)
        kernels = {kernel for _, kernel, _ in places}
        writes = {(kernel, int(address, 16)) for access, kernel, address in places if access == "Write"}
        if kernels and all(kernel.startswith(FOREIGN) for kernel in kernels):
            why = IN_LIBRARIES
        elif writes and all(instruction(*write).startswith(COUNTED) for write in writes):
            why = OF_BULK_COPIES
        elif tool == "racecheck" and writes and _are_handed_on(instruction, places):
            why = OF_WORDS
        elif tool == "synccheck" and places and all(_is_of_cluster(instruction, *where[1:]) for where in places):
            why = OF_CLUSTERS
        else:
            counted += 1
            continue
        aside.setdefault(why, Counter()).update([min(kernels)])
    return Errors(counted + max(0, total - len(found)), aside)  # and those that it did not print


def _are_handed_on(instruction: Callable[[str, int], str], places: Sequence[tuple[str, str, str]]) -> bool:
    """Stores stand between a wait at an mbarrier and an arrival at another, loads behind a wait at that one.

    Nothing but the rest of their run lies in between that orders or touches shared memory.
    """
    handed, taken = set(), set()
    for access, kernel, at in places:
        address, kind = int(at, 16), "STS" if access == "Write" else "LDS"
        before = _beside(instruction, kernel, address, -BYTES)
        if not instruction(kernel, address).startswith(kind) or not before.startswith(WAIT):
            return False
        if access == "Write":
            behind = _beside(instruction, kernel, address, BYTES)
            if not behind.startswith(ARRIVAL) or _offset(behind) == _offset(before):
                return False
            handed.add(_offset(behind))
        else:
            taken.add(_offset(before))
    return len(handed) == 1 and taken == handed


def _beside(instruction: Callable[[str, int], str], kernel: str, address: int, step: int) -> str:
    """What is next, before or behind the run of like accesses, of all that orders or touches shared memory; "": far."""
    run = instruction(kernel, address)[:3]
    near = (instruction(kernel, address + step * far) for far in range(1, NEAR + 1))
    kinds = tuple({"SYNCS", "BAR", "STS", "LDS", "ATOMS"} - {run})
    return next((one for one in near if one.startswith(kinds)), "")


def _offset(instruction: str) -> str:
    """Of an address in shared memory: "+0x78" of [R27+URZ+0x78]."""
    found = re.search(r"\[\w+(?:\+URZ)?(\+0x[0-9a-f]+)?\]", instruction)
    return (found[1] or "") if found else instruction


def _is_of_cluster(instruction: Callable[[str, int], str], kernel: str, at: str) -> bool:
    address = int(at, 16)
    before = (instruction(kernel, address - BYTES * far) for far in range(1, ON_OTHER_BRANCH + 1))
    return instruction(kernel, address).startswith(CTA_BARRIER) and any(one.startswith(CLUSTER_WAIT) for one in before)


@functools.cache
def instructions() -> dict[str, dict[int, str]]:
    """Kernel of ours -> address -> instruction, of every cubin compiled for this card; empty without nvdisasm."""
    import torch
    import triton

    from slipstream.kernels.cuda import build

    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    major, minor = torch.cuda.get_device_capability()
    kernels: dict[str, dict[int, str]] = {}
    for cubin in build.cache_dir(10 * major + minor).glob("*.cubin"):
        done = subprocess.run([disassembler, "-c", cubin], capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            if begins := re.match(r"\.text\.(\w+):", line):
                here = kernels.setdefault(begins[1], {})
            elif found := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?(.*?);", line):
                here[int(found[1], 16)] = found[2]
    return kernels


def sanitizer() -> str:
    """Path of compute-sanitizer; ends the program where there is none."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    found = shutil.which("compute-sanitizer") or next(
        (str(path) for home in homes if (path := Path(home) / "bin" / "compute-sanitizer").is_file()), None
    )
    if found is None:
        sys.exit("no compute-sanitizer on PATH, in CUDA_HOME or /usr/local/cuda: it comes with the CUDA toolkit")
    return found


def run(tool: str, group: str, command: Sequence[str], out: Path, deadline: float) -> Outcome:
    """Runs a command under a tool; the sanitizer's words go to out/TOOL-GROUP.log, the command's own to .out."""
    log, told, began = out / f"{tool}-{group}.log", out / f"{tool}-{group}.out", time.monotonic()
    environment = dict(os.environ)
    if tool == "memcheck":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    all_of_them = tool in ("racecheck", "synccheck")
    limit = ["--print-limit", str(PRINT_LIMIT), "--show-backtrace", "no"] if all_of_them else ["--print-limit", "20"]
    options = ["--launch-timeout", "300", *limit, "--log-file", str(log)]
    with told.open("w") as file:
        try:
            code = subprocess.run(
                [sanitizer(), "--tool", tool, *options, *command],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=max(1.0, deadline - time.monotonic()),
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    words = log.read_text(errors="replace") if log.is_file() else ""
    lines = [line for line in told.read_text(errors="replace").splitlines() if line.strip()]
    errors = errors_of(tool, words, lambda kernel, address: instructions().get(kernel, {}).get(address, ""))
    return Outcome(tool, group, errors, lines[-1][:70] if lines else "", code, time.monotonic() - began)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--out", type=Path, help="for logs")
    parser.add_argument("--seconds", type=float, default=150.0, help="for everything together")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time")
    args = parser.parse_args(arguments)
    out = args.out or Path(tempfile.mkdtemp(prefix="sanitize."))
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.seconds
    control = out / "control.py"
    control.write_text(CONTROL)
    seen = run("memcheck", "control", [sys.executable, "-P", str(control)], out, deadline)
    sees = seen.errors is not None and seen.errors.counted > 0
    verdict = "ok    " if sees else "FAILED"
    print(f"{verdict} a store past the end, planted:\n{seen.describe()}", flush=True)
    pytest = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # Tools in this order: what matters most starts first.
    wanted = [(tool, group) for tool in args.tools for group in args.groups if tool in GROUPS[group][1]]
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = [pool.submit(run, tool, group, [*pytest, *GROUPS[group][0]], out, deadline) for tool, group in wanted]
        outcomes = []
        for one in waiting:
            outcomes.append(one.result())
            print(outcomes[-1].describe(), flush=True)
    clean = sum(outcome.is_clean for outcome in outcomes)
    print(f"{clean} of {len(outcomes)} clean; logs in {out}")
    return 0 if sees and clean == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
