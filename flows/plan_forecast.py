"""Rows of a plan about a server that nobody has started yet: a rank's memory, the floor of a step, what is expected."""

from collections.abc import Iterator

from slipstream.engine.deepseek_config import WRAPPER
from slipstream.tasks.byte_floor import PUBLISHED, best_at_floor, floors
from slipstream.tasks.facts import Facts
from slipstream.tasks.rank_memory import GIB, rank_memory
from slipstream.tasks.step_forecast import CURVES, DRAFT_EFFICIENCY, MEASURED, Expected, best_expected, expected_rounds

Row = tuple[str, str, str]  # name, value, how it follows


def memory_rows(facts: Facts) -> Iterator[Row]:
    """A rank's memory, part by part, where the deployment says how much its GPUs have."""
    gib, memory = facts.deployment.host.gpu_memory_gib, rank_memory(facts)
    if gib is None or memory is None:
        return
    for part in memory.parts:
        yield f"a rank's {part.what}", f"{part.bytes / 1e9:.2f} GB", part.how
    room = gib * GIB / 1e9
    left = f"{room - memory.total / 1e9:.2f} GB are left of {room:.2f} (host.gpu_memory_gib)"
    yield "a rank's memory", f"{memory.total / 1e9:.2f} GB", left


def floor_rows(facts: Facts) -> Iterator[Row]:
    """The least time of a round of each K, and which K pays at most by acceptance that others have published."""
    found = floors(facts)
    for floor in found:
        yield (
            f"byte floor, K = {floor.num_steps}",
            f"{floor.step_bytes / 1e9:.2f} GB a step, {floor.round_ms:.2f} ms a round",
            "weights that a rank reads for one stream, by host.gpu_bandwidth_tb; no sums, caches or gaps",
        )
    if not found or not _is_kimi(facts):
        return
    for what, length, steps, how in PUBLISHED:
        best, accepted = best_at_floor(found, length, steps)
        plain = found[0].tokens_per_second(1.0)
        gain, tried = best.tokens_per_second(accepted) / plain, f"{best.num_steps} of 0 to {found[-1].num_steps}"
        words = f"{tried}: {gain:.2f} times the {plain:.0f} tokens/s of K = 0"
        yield "best K at the floor", words, f"length {length} of {what} ({how}); an upper bound"


def expected_rows(facts: Facts) -> Iterator[Row]:
    """The plain step and the K that pays, by the floor and what a measured step took beyond it; of Kimi-K2.5 alone."""
    found = expected_rounds(facts)
    if not found or not _is_kimi(facts):
        return
    floor, took = MEASURED.ms[1]
    yield (
        "expected plain step",
        f"{_span(found[0].least_ms, found[0].most_ms, '.1f')} ms, {_speed(found[0], 1.0)}",
        f"floor x measured: {MEASURED.who} took {took} ms on an H200's share where the floor is {floor} "
        f"({MEASURED.efficiency(1):.0%}). At least: what it took beyond the floor lasts as long here; at most: all of "
        "it grows with the bytes. Sums over ranks come on top",
    )
    known = facts.deployment.host.plain_tokens_per_second
    if known is not None:
        words = f"{known:g} tokens/s, {1000 / known:.1f} ms a step"
        yield "measured plain step", words, "host.plain_tokens_per_second, by another engine, sums over ranks included"
    for curve in CURVES:
        best = best_expected(found, curve.lengths)
        steps = " or ".join(str(one.num_steps) for one in best)
        lengths = ", ".join(f"{curve.lengths.get(one.num_steps, 1.0):g} tokens a round" for one in best)
        speeds = ", ".join(_speed(one, curve.lengths.get(one.num_steps, 1.0)) for one in best)
        yield (
            "expected best K",
            f"{steps} of 0 to {found[-1].num_steps}: {speeds}",
            f"{lengths}: {curve.what}; sampling: {curve.sampling}; acceptance: {curve.rule}. The step as above, a "
            f"draft's at {DRAFT_EFFICIENCY:.0%} of the bandwidth",
        )


def _is_kimi(facts: Facts) -> bool:
    return facts.target is not None and facts.target.architecture == WRAPPER


def _speed(expected: Expected, length: float) -> str:
    low, high = expected.tokens_per_second(length)
    return f"{_span(low, high, '.0f')} tokens/s"


def _span(low: float, high: float, form: str) -> str:
    least, most = f"{low:{form}}", f"{high:{form}}"
    return least if least == most else f"{least} to {most}"
