"""NCCL's variables: known values and ranges (F16), and what a set one does to a launch.

From NCCL 2.30.7 (`docs/userguide/source/env.rst`, `src/graph/tuning.cc`). A misspelt variable is refused where the
launch line or the file is read; a value is checked here.
"""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from slipstream.configs.nccl import NCCL_FIELDS, NcclMeasured
from slipstream.tasks.contradictions import Check, Finding
from slipstream.tasks.facts import Facts
from slipstream.tasks.nvml import Gpus, read_gpus
from slipstream.tasks.other_engines.effect import Effect, Rule
from slipstream.tasks.other_engines.launch_facts import Launch, asked, leave_out, pin

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

ALGORITHMS = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
LEVELS = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")
FUNCTIONS = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
DEBUG = ("VERSION", "WARN", "INFO", "ABORT", "TRACE")
WORDS = {"p2p_level": LEVELS, "net_gdr_level": LEVELS, "debug": DEBUG}
LISTS = {"algo": ALGORITHMS, "proto": PROTOCOLS}
THREADS = (64, 128, 256, 512)
MAX_CHANNELS = 64
CHANNELS = ("min_nchannels", "max_nchannels", "min_ctas", "max_ctas")
RANGES = {
    **dict.fromkeys(CHANNELS, (1, MAX_CHANNELS)),
    **dict.fromkeys(("p2p_disable", "shm_disable", "ib_disable", "cumem_enable"), (0, 1)),
    **dict.fromkeys(("nvls_enable", "cross_nic"), (0, 2)),
}
LEGACY_LEVELS = range(5)
DEFAULT_BUFFER_BYTES = 4 << 20


def _values(facts: Facts) -> Iterator[Finding]:
    """F16: a value that NCCL does not know, or that is out of its range."""
    for field in NCCL_FIELDS:
        key = f"nccl.{field}"
        value = asked(facts, key)
        if value is None:
            continue
        expected, near = _problem(field, value)
        if expected:
            ways = (*((pin(key, near),) if near is not None else ()), leave_out(key))
            yield Finding("F16", facts.say(key), expected, ways, "F16", runbook="wrong-flags.md")
    for low, high in (("min_nchannels", "max_nchannels"), ("min_ctas", "max_ctas")):
        least, most = asked(facts, f"nccl.{low}"), asked(facts, f"nccl.{high}")
        if least is not None and most is not None and least > most:
            yield Finding(
                "F16",
                f"{facts.say(f'nccl.{low}')} and {facts.say(f'nccl.{high}')}",
                "no more channels at least than at most",
                (leave_out(f"nccl.{low}"), leave_out(f"nccl.{high}")),
                "F16",
                runbook="wrong-flags.md",
            )


def _problem(field: str, value: str | int) -> tuple[str, str | int | None]:
    """(what was expected, nearest value); ("", None) for a value that NCCL takes."""
    if field in LISTS:
        return _list_problem(str(value), LISTS[field])
    if field in WORDS:
        words = WORDS[field]
        if (value in LEGACY_LEVELS and words is LEVELS) or str(value).upper() in words:
            return "", None
        return f"one of {', '.join(words)}", _nearest(str(value), words)
    if field == "nthreads" and value not in THREADS:
        assert isinstance(value, int)
        silently = "" if value % 32 == 0 else ": one that is no multiple of 32 becomes the largest, without a word"
        return f"one of {', '.join(map(str, THREADS))}{silently}", min(THREADS, key=lambda n: abs(n - value))
    if field == "buffsize_bytes" and isinstance(value, int) and value < 1:
        return "a positive number of bytes, best a power of two", DEFAULT_BUFFER_BYTES
    if field in RANGES and isinstance(value, int):
        low, high = RANGES[field]
        if not low <= value <= high:
            return f"{low} to {high}", min(max(value, low), high)
    return "", None


def _list_problem(text: str, known: Sequence[str]) -> tuple[str, str | None]:
    """A list such as `Ring,Tree`, `^LL128` or `allreduce:ring;broadcast:tree`."""
    for part in text.split(";"):
        function, colon, names = part.rpartition(":")
        if colon and function.strip().lower() not in FUNCTIONS:
            near = _nearest(function.strip(), FUNCTIONS)
            return f"a function of {', '.join(FUNCTIONS)} before the colon", text.replace(function, near)
        for name in names.strip().removeprefix("^").split(","):
            if name.strip().lower() not in [word.lower() for word in known]:
                near = _nearest(name.strip(), known)
                return (
                    f"a list of {', '.join(known)}; ^ before it excludes. NCCL 2.24 and later stop at another word",
                    text.replace(name, near) if name else near,
                )
    return "", None


def _nearest(text: str, known: Sequence[str]) -> str:
    lower = {word.lower(): word for word in known}
    return lower[get_close_matches(text.lower(), list(lower), 1, 0.0)[0]]


def _unmeasured(facts: Facts) -> Iterator[Finding]:
    """Our own server with tuned values beside speculation: what a launch of another engine is told as an effect."""
    keys = [f"nccl.{f}" for f in NCCL_FIELDS if not f.startswith("debug") and asked(facts, f"nccl.{f}") is not None]
    deployment = facts.deployment
    if not keys or deployment.speculation.num_steps == 0:
        return
    measured = deployment.nccl.measured_for
    if measured is None:
        found = f"{', '.join(facts.say(key) for key in keys)}, beside {facts.say('speculation.num_steps')}"
    else:
        other = measured_otherwise(measured, deployment, read_gpus() if deployment.host.kind == "local" else None)
        if not other:
            return
        found = f"{', '.join(keys)} were measured for {', '.join(f'{before}, not {now}' for before, now in other)}"
    yield Finding(
        "nccl-tuned",
        found,
        "values that were measured for this K, on this card and this topology: a verify step's sums are K + 1 rows "
        "wide and a draft's stand between them, so that what was best for plain decoding need not be best here",
        (
            "leave the section nccl out: NCCL chooses",
            "time them with `slipstream doctor CONFIG --ranks N`, which prints nccl.measured_for; benchmark with and "
            "without them, interleaved",
        ),
        severity="warning",
        runbook="wrong-flags.md",
    )


def measured_otherwise(measured: NcclMeasured, deployment: "Deployment", gpus: Gpus | None) -> list[tuple[str, str]]:
    """(what the values were measured for, what is here) where they differ; `gpus`: of the host, None where unknown."""
    ranks, steps = deployment.server.tensor_parallel_size, deployment.speculation.num_steps
    compared: list[tuple[str, object, object]] = [("ranks", measured.ranks, ranks)]
    compared.append(("K", measured.num_steps, deployment.speculation.max_num_steps if steps == "auto" else steps))
    if gpus is not None and gpus.cards:
        cards = gpus.cards[:ranks]
        compared.append(("card", measured.card, cards[0].name))
        compared.append(("topology", measured.topology, topology([card.peers for card in cards])))
    return [(f"{name} {before}", str(now)) for name, before, now in compared if before != now]


def topology(peers: Sequence[Mapping[int, str]]) -> str:
    """How these cards reach each other, at worst: nvlink, pcie or host. `peers`: of each, as `nvml.Gpu` has them."""
    ways = {way for card in peers for other, way in card.items() if int(other) < len(peers)}
    return next((way for way in ("host", "pcie") if way in ways), "nvlink")


NCCL_TUNED = Check("nccl-tuned", "NCCL's tuned values were measured for what is served", _unmeasured)
F16 = Check(
    "F16", "NCCL's variables have values that NCCL takes", _values, engines=("slipstream", "sglang")
)  # fmt: skip


# ---- what a set one does to a launch ---------------------------------------------------------------------------------


def _carried_over(launch: Launch) -> Iterator[Effect]:
    keys = [f"nccl.{field}" for field in NCCL_FIELDS if launch.get(f"nccl.{field}") is not None]
    tuning = [key for key in keys if not key.startswith("nccl.debug")]
    if tuning:
        yield Effect(
            "nccl",
            launch.say(*tuning),
            "as asked, for every sum of draft and verify, whose sizes are not those of plain decoding; NCCL's guide "
            "lists such variables for experiments",
            "only a measurement shows what they do",
            ("leave them out", "keep each that wins when measured with speculation as well as without"),
            "warning",
        )


def _useless(launch: Launch) -> Iterator[Effect]:
    buffer, proto = launch.get("nccl.buffsize_bytes"), launch.get("nccl.proto")
    if buffer is not None and proto is not None and proto.strip().lower() in ("ll", "ll128", "ll,ll128", "ll128,ll"):
        yield Effect(
            "nccl",
            launch.say("nccl.buffsize_bytes", "nccl.proto"),
            f"no effect on sums: it is the buffer of protocol Simple, and {proto} is the only one allowed",
            "nothing says so",
            (leave_out("nccl.buffsize_bytes"), leave_out("nccl.proto")),
            "warning",
        )
    elif buffer is not None and buffer > 0 and buffer & (buffer - 1):
        near = 1 << (buffer.bit_length() - 1)
        yield Effect(
            "nccl", launch.say("nccl.buffsize_bytes"), "as asked; a power of two is advised", "nothing says so",
            (pin("nccl.buffsize_bytes", near),), "warning",
        )  # fmt: skip
    if proto is not None and "ll128" in proto.lower() and not proto.startswith("^"):
        yield Effect(
            "nccl", launch.say("nccl.proto"), "LL128 also where the hardware cannot: sums may be wrong",
            "nothing says so", (leave_out("nccl.proto"),), "warning",
        )  # fmt: skip
    if launch.get("nccl.max_nchannels") is not None and launch.get("nccl.max_ctas") is not None:
        yield Effect(
            "nccl", launch.say("nccl.max_nchannels", "nccl.max_ctas"), "the smaller one counts", "nothing says so",
            (leave_out("nccl.max_nchannels"),), "warning",
        )  # fmt: skip


def _deterministic(launch: Launch) -> Iterator[Effect]:
    key, algo = "sglang.enable_deterministic_inference", launch.get("nccl.algo")
    if launch.on(key) and (launch.get("server.tensor_parallel_size") or 1) > 1 and algo not in (None, "allreduce:tree"):
        yield Effect(
            "nccl",
            launch.say("nccl.algo", key),
            "NCCL_ALGO becomes allreduce:tree, and the custom all-reduce is off",
            "WARNING",
            (leave_out("nccl.algo"), pin("nccl.algo", "allreduce:tree"), leave_out(key)),
        )


NCCL_RULES: tuple[Rule, ...] = (_carried_over, _useless, _deterministic)
