"""From measured pairs to the figures of a benchmark."""

from collections.abc import Sequence
from typing import Any

from slipstream.engine.acceptance import AcceptanceCounts, compare
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.speed_forecast import SpeedOption
from slipstream.tasks.bench_pairs import Measured, Pair, Side
from slipstream.tasks.counters import NOTHING, Counters
from slipstream.tasks.round_costs import losing_term, option_dict
from slipstream.tasks.statistics import speedup, summary

LARGEST_GAP = 100.0  # stands for "nothing was accepted"


def figures(
    pairs: Sequence[Pair], num_steps: int, replayed: AcceptanceCounts | None, same_prompts: bool = False
) -> dict[str, Any]:
    """Everything that the report shows of the two servers.

    Args:
        pairs: measured pairs.
        num_steps: K of the speculative server.
        replayed: prediction of held-out data for this K, where there is one.
        same_prompts: the prediction is for these very prompts.
    """
    measured = pairs  # answers of one output cannot be timed, but they can differ
    pairs = [pair for pair in pairs if pair.baseline.decode_tokens > 0 and pair.speculation.decode_tokens > 0]
    if not pairs:
        raise SlipstreamError(
            "no answer has more tokens than its first output: there is nothing to time",
            expected="answers of several rounds",
            do="raise benchmark.max_new_tokens, or choose other prompts",
        )
    base, spec = _side(pairs, "baseline", 0), _side(pairs, "speculation", num_steps)
    counters = _counters(pairs, "speculation")
    counts = counters.of(num_steps)
    option = round_option(pairs, num_steps)
    ratio = speedup(
        [pair.baseline.decode_ms / pair.baseline.decode_tokens * pair.speculation.decode_tokens for pair in pairs],
        [pair.speculation.decode_ms for pair in pairs],
        [pair.prompts for pair in pairs],
    )
    differing = sorted({prompt for pair in measured for prompt in pair.differing})
    result: dict[str, Any] = {
        "num_steps": num_steps,
        "baseline": base,
        "speculation": spec,
        "speedup": {
            "ratio": ratio.estimate,
            "low": ratio.low,
            "high": ratio.high,
            "confidence": ratio.confidence,
            "prompts": ratio.groups,
            "pairs": len(pairs),
        },
        "acceptance": counts.to_dict(),
        # Of single requests, those left out among them; one entry, but where the server chooses K.
        "rounds_by_num_steps": [
            {"num_steps": k, "rounds": c.rounds + c.left_out}
            for k, c in sorted(counters.acceptance.items())
            if c.rounds + c.left_out
        ],
        "round": option_dict(option),
        "replayed": replayed.to_dict() if replayed else None,
        "comparison": None,
        "differing_prompts": differing,
        "prompts": len({a.prompt_id for pair in measured for a in pair.baseline.answers}),
        "untimed_pairs": len(measured) - len(pairs),
        "losing_term": None,
    }
    if replayed and replayed.rounds and counts.rounds:
        comparison = compare(replayed, counts)
        result["comparison"] = {
            "relative_gap": min(comparison.relative_gap, LARGEST_GAP),  # JSON has no infinity
            "same_prompts": same_prompts,
            "text": comparison.describe(),
        }
    if ratio.estimate < 1:
        lost = losing_term(option, replayed.accept_length if replayed else None)
        result["losing_term"] = {"term": lost.term, "why": lost.why}
    return result


def round_option(pairs: Sequence[Pair], num_steps: int) -> SpeedOption:
    """Cost of a round and of a plain step as a client sees them, over all measured pairs.

    Draft and verify are the engine's own seconds; rest is everything else between two outputs: accept, commit, and the
    way to the client. The accept length here is tokens / rounds of all rounds, so that speed = length / cost exactly.
    """
    rounds = _outputs_after_first(pairs, "speculation")
    steps = _outputs_after_first(pairs, "baseline")
    round_ms = sum(pair.speculation.decode_ms for pair in pairs) / rounds
    step_ms = sum(pair.baseline.decode_ms for pair in pairs) / steps
    engine = _counters(pairs, "speculation")
    draft_ms, verify_ms = (1000 * engine.seconds[part] / engine.rounds for part in ("draft", "verify"))
    length = sum(pair.speculation.decode_tokens for pair in pairs) / rounds
    return SpeedOption(num_steps, length, draft_ms, verify_ms, round_ms - draft_ms - verify_ms, step_ms)


def _measured(pairs: Sequence[Pair], side: Side) -> list[Measured]:
    return [pair.baseline if side == "baseline" else pair.speculation for pair in pairs]


def _counters(pairs: Sequence[Pair], side: Side) -> Counters:
    return sum((measured.counters for measured in _measured(pairs, side)), start=NOTHING)


def _outputs_after_first(pairs: Sequence[Pair], side: Side) -> int:
    """Outputs that followed a first one: each is one round of one request."""
    return sum(len(answer.chunks) - 1 for measured in _measured(pairs, side) for answer in measured.answers)


def _side(pairs: Sequence[Pair], side: Side, num_steps: int) -> dict[str, Any]:
    """Latencies and speed of one server. Speed of a stream: tokens after the first output / time after it."""
    answers = [answer for measured in _measured(pairs, side) for answer in measured.answers]
    tokens, seconds = sum(a.decode_tokens for a in answers), sum(a.decode_seconds for a in answers)
    whole = sum(measured.seconds for measured in _measured(pairs, side))
    chunks = sum(len(a.chunks) - 1 for a in answers)
    return {
        "num_steps": num_steps,
        "requests": len(answers),
        "output_tokens": sum(a.output_tokens for a in answers),
        "tokens_per_second": tokens / seconds,
        "system_tokens_per_second": sum(a.output_tokens for a in answers) / whole,
        "tokens_per_chunk": tokens / chunks,
        "ttft_ms": summary([a.ttft_ms for a in answers]),
        "itl_ms": summary([gap for a in answers for gap in a.itl_ms]),
        "tpot_ms": summary([a.tpot_ms for a in answers if a.tpot_ms is not None]),
        "seconds": dict(_counters(pairs, side).seconds),
        "finish_reasons": {r: sum(a.finish_reason == r for a in answers) for r in {a.finish_reason for a in answers}},
    }
