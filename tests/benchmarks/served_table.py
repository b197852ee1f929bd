"""What serve_card.py measured: answers that differ, the table, machine-readable rows."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from slipstream.engine.acceptance import AcceptanceCounts, compare
from slipstream.engine.device import device_name

HTTP_GOAL = 0.9


@dataclass
class Speed:
    """Greedy answers to one set. seconds: of whole answers. decode_*: after the first output, where that is seen."""

    tokens: int = 0
    seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    answers: list[list[int]] = field(default_factory=list)
    counts: AcceptanceCounts | None = None

    @property
    def whole(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def decode(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class Outcome:
    """Of one set. offline: by K. streamed, whole: by K of a server. replayed: by K. transformers: decode tok/s."""

    name: str
    offline: dict[int, Speed]
    streamed: dict[int, Speed]
    whole: dict[int, Speed]
    replayed: list[AcceptanceCounts]
    transformers: float

    def differing(self) -> list[str]:
        """Ways of asking whose answers are not those of the offline API without speculation."""
        want = [_text(a) for a in self.offline[0].answers]
        ways: dict[str, Speed] = {f"offline K = {k}": speed for k, speed in self.offline.items()}
        ways |= {f"streamed K = {k}": speed for k, speed in self.streamed.items()}
        ways |= {f"openai K = {k}": speed for k, speed in self.whole.items()}
        found = []
        for way, speed in ways.items():
            differ = sum(_text(a) != b for a, b in zip(speed.answers, want, strict=True))
            found += [f"{self.name}: {differ} of {len(want)} answers differ, {way}"] * bool(differ)
        return found

    def rows(self) -> Iterator[dict[str, Any]]:
        """Machine-readable, one a K of a server."""
        for k, streamed in self.streamed.items():
            counts = streamed.counts
            yield {
                "set": self.name,
                "num_steps": k,
                "prompts": len(streamed.answers),
                "tokens": streamed.tokens,
                "http_decode_tok_s": streamed.decode,
                "http_stream_tok_s": streamed.whole,
                "http_openai_tok_s": self.whole[k].whole,
                "offline_tok_s": self.offline[k].whole,
                "transformers_decode_tok_s": self.transformers,
                "served": counts.to_dict() if k and counts else None,
                "replayed": self.replayed[k].to_dict() if k else None,
            }


def _text(answer: Sequence[int]) -> tuple[int, ...]:
    return tuple(answer)


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """One line a set and K."""
    table = Table(title="batch 1, greedy; tok/s")
    for name in (
        "set",
        "K",
        "decode",
        "x K=0",
        "x transf.",
        "stream",
        "openai",
        "offline",
        "of it",
        "served",
        "A_k",
    ):
        table.add_column(name, justify="left" if name in ("set", "A_k") else "right")
    table.add_column("replayed", justify="right")
    table.add_column("A_k", justify="left")
    for outcome in outcomes:
        plain = outcome.streamed[0]
        table.add_row(outcome.name, "transf.", f"{outcome.transformers:.0f}")
        for k, streamed in outcome.streamed.items():
            off = outcome.offline[k].whole
            table.add_row(
                *("", str(k), f"{streamed.decode:.0f}", f"{streamed.decode / plain.decode:.2f}"),
                *(f"{streamed.decode / outcome.transformers:.1f}", f"{streamed.whole:.0f}"),
                *(f"{outcome.whole[k].whole:.0f}", f"{off:.0f}"),
                f"{streamed.whole / off:.0%} {outcome.whole[k].whole / off:.0%}",
                *_acceptance(streamed.counts if k else None),
                *_acceptance(outcome.replayed[k] if k else None),
            )
    return table


def _acceptance(counts: AcceptanceCounts | None) -> tuple[str, str]:
    if counts is None or not counts.rounds:
        return "-", "-"
    return f"{counts.accept_length:.2f}", " ".join(f"{joint.rate:.2f}" for joint in counts.joint)


def report(outcomes: Sequence[Outcome], rows: Path | None, device: str) -> int:
    """Prints, writes the rows, and returns the exit code."""
    print(f"{device_name(device)}; goal: stream and openai at least {HTTP_GOAL:.0%} of offline")
    Console(width=170).print(table_of(outcomes))
    for outcome in outcomes:
        for k, streamed in outcome.streamed.items():
            if k and streamed.counts and streamed.counts.rounds and outcome.replayed[k].rounds:
                gap = compare(outcome.replayed[k], streamed.counts)
                print(f"{outcome.name}, K = {k}: replayed against served: {gap.relative_gap:.1%} apart")
    if rows:
        rows.write_text("".join(json.dumps(row) + "\n" for outcome in outcomes for row in outcome.rows()))
    differing = [sentence for outcome in outcomes for sentence in outcome.differing()]
    for sentence in differing:
        print(f"FAILED {sentence}")
    compared = sum(len(o.offline) + len(o.streamed) + len(o.whole) - 1 for o in outcomes)
    print(f"answers equal to those of K = 0 offline: {compared - len(differing)} of {compared} ways of asking")
    return 1 if differing else 0
