"""Interleaved pairs: the same prompts to the server without and to the one with speculation, one right after the other.

Both are loaded, one at a time works. Who goes first alternates. A pair is written to disk when it is measured, with the
servers' counters around it, so that a benchmark that is killed goes on where it stopped, with new servers too.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from slipstream.engine.files import drop_torn_line
from slipstream.tasks.bench_client import Answer, Chunk, Prompt, ask_all
from slipstream.tasks.counters import Counters, read_counters

Side = Literal["baseline", "speculation"]
SIDES: tuple[Side, Side] = ("baseline", "speculation")


@dataclass(frozen=True)
class Measured:
    """What one server did with one block of prompts."""

    answers: tuple[Answer, ...]
    counters: Counters
    seconds: float  # from the first request to the last answer

    @property
    def decode_ms(self) -> float:
        return 1000 * sum(answer.decode_seconds for answer in self.answers)

    @property
    def decode_tokens(self) -> int:
        return sum(answer.decode_tokens for answer in self.answers)


@dataclass(frozen=True)
class Pair:
    """One block of prompts on both servers. repeat: 0, 1, ... first: who was asked first."""

    block: int
    repeat: int
    first: Side
    baseline: Measured
    speculation: Measured

    @property
    def prompts(self) -> str:
        """What the pair was measured with, to tell repeats of the same from independent ones."""
        return ",".join(answer.prompt_id for answer in self.baseline.answers)

    @property
    def differing(self) -> list[str]:
        """Prompts whose two answers differ: speculation must not change any."""
        both = zip(self.baseline.answers, self.speculation.answers, strict=True)
        return [a.prompt_id for a, b in both if (a.token_ids, a.text) != (b.token_ids, b.text)]


def measure_pairs(
    urls: dict[Side, str],
    prompts: Sequence[Prompt],
    file: Path,
    *,
    repeats: int,
    concurrency: int,
    max_tokens: int,
    seed: int,
    progress: Callable[[int, int, Pair | None], None],
) -> list[Pair]:
    """Measures what `file` does not hold yet, and returns all pairs.

    Args:
        urls: of the two servers.
        prompts: in blocks of `concurrency`, each block a pair.
        file: JSON lines; grows by a line a pair.
        repeats: how often each block is measured.
        max_tokens: longest answer, in tokens.
        progress: told (pairs done, pairs, the last one).
    """
    blocks = [prompts[i : i + concurrency] for i in range(0, len(prompts), concurrency)]
    pairs = {(pair.repeat, pair.block): pair for pair in resume_pairs(file)}
    total = repeats * len(blocks)
    progress(len(pairs), total, None)
    with file.open("a", encoding="utf-8") as out:
        for repeat in range(repeats):
            for index, block in enumerate(blocks):
                if (repeat, index) in pairs:
                    continue
                order = SIDES if (repeat + index) % 2 == 0 else SIDES[::-1]
                done = {side: _ask(urls[side], block, concurrency, max_tokens, seed) for side in order}
                pair = Pair(index, repeat, order[0], done["baseline"], done["speculation"])
                out.write(json.dumps(_to_json(pair), separators=(",", ":")) + "\n")
                out.flush()
                pairs[repeat, index] = pair
                progress(len(pairs), total, pair)
    return [pairs[key] for key in sorted(pairs)]


def _ask(url: str, block: Sequence[Prompt], concurrency: int, max_tokens: int, seed: int) -> Measured:
    before, began = read_counters(url), time.perf_counter()
    answers = ask_all(url, block, max_tokens=max_tokens, concurrency=concurrency, seed=seed)
    seconds = time.perf_counter() - began
    return Measured(tuple(answers), read_counters(url) - before, seconds)


def resume_pairs(file: Path) -> Iterator[Pair]:
    """The pairs that a file holds. A last line that a kill cut short is taken off."""
    if not file.exists():
        return
    drop_torn_line(file)
    for line in file.read_text(encoding="utf-8").splitlines():
        yield _from_json(json.loads(line))


def _to_json(pair: Pair) -> dict[str, Any]:
    def side(measured: Measured) -> dict[str, Any]:
        answers = [asdict(answer) for answer in measured.answers]
        return {"answers": answers, "counters": measured.counters.to_dict(), "seconds": measured.seconds}

    return {
        "block": pair.block,
        "repeat": pair.repeat,
        "first": pair.first,
        "baseline": side(pair.baseline),
        "speculation": side(pair.speculation),
    }


def _from_json(data: dict[str, Any]) -> Pair:
    def side(entry: dict[str, Any]) -> Measured:
        answers = [
            Answer(
                **{
                    **a,
                    "token_ids": tuple(a["token_ids"]),
                    "chunks": tuple(Chunk(**chunk) for chunk in a["chunks"]),
                }
            )
            for a in entry["answers"]
        ]
        return Measured(tuple(answers), Counters.from_dict(entry["counters"]), entry["seconds"])

    return Pair(data["block"], data["repeat"], data["first"], side(data["baseline"]), side(data["speculation"]))
