"""The cases that are timed, each with its goal on one H200, and the rows that record them."""

import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from slipstream.engine.bench.generate import Timing, time_generate
from slipstream.engine.bench.parts import RoundParts, profile_rounds
from slipstream.engine.bench.sizes import SIZES, LatentSize, Size, random_draft, random_target
from slipstream.engine.config import EngineConfig
from slipstream.engine.device import Device
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.files import write_atomic


@dataclass(frozen=True)
class Case:
    """A size, a batch and a K. goal_ms: on one H200, None where there is none."""

    name: str
    size: str
    batch: int
    num_steps: int
    goal_ms: float | None = None


CASES = (
    Case("smollm2-step", "smollm2", 1, 0, 0.40),
    Case("smollm2-step", "smollm2", 4, 0),
    Case("smollm2-step", "smollm2", 16, 0),
    Case("smollm2-step", "smollm2", 64, 0, 1.0),
    Case("smollm2-round", "smollm2", 1, 3, 0.60),
    Case("smollm2-round", "smollm2", 4, 3),
    Case("smollm2-round", "smollm2", 16, 3),
    Case("llama8b-step", "llama8b", 1, 0, 3.9),
    Case("llama8b-step", "llama8b", 4, 0),
    Case("llama8b-step", "llama8b", 16, 0, 4.2),
    Case("llama8b-round", "llama8b", 1, 3, 4.6),
    Case("llama8b-round", "llama8b", 4, 3),
    Case("llama8b-round", "llama8b", 16, 3, 5.3),
    Case("llama8b-round", "llama8b", 1, 5, 5.1),
    Case("llama8b-int4-step", "llama8b-int4", 1, 0, 1.5),
    Case("llama8b-int4-step", "llama8b-int4", 4, 0),
    Case("llama8b-int4-step", "llama8b-int4", 16, 0),
    Case("kimi-rank-step", "kimi-rank", 1, 0, 3.1),
    Case("kimi-rank-step", "kimi-rank", 2, 0),
    Case("kimi-rank-step", "kimi-rank", 4, 0, 3.84),
    Case("kimi-rank-step", "kimi-rank", 8, 0),
    Case("kimi-rank-step", "kimi-rank", 16, 0, 6.9),
)


@dataclass(frozen=True)
class Row:
    """One line of the record: `value` in `unit`, beside its goal, at a commit, by a command."""

    case: str
    batch: int
    K: int
    tp: int
    value: float
    unit: str
    goal: float | None
    commit: str
    command: str


@dataclass(frozen=True)
class Outcome:
    """A timed case. bytes_read: weights and keys a step; ceiling: bytes a second that the card reads.

    parts: from the profiler, if they were asked for.
    """

    case: Case
    timing: Timing
    bytes_read: float
    ceiling: float
    parts: RoundParts | None = None

    @property
    def floor_ms(self) -> float:
        return self.bytes_read / self.ceiling * 1e3

    @property
    def share(self) -> float:
        """Share of the read ceiling that the whole step reaches."""
        return self.floor_ms / self.timing.ms

    @property
    def reached(self) -> bool | None:
        """Whether the goal is; None where there is none."""
        return None if self.case.goal_ms is None else self.timing.ms <= self.case.goal_ms

    def row(self, commit: str, command: str) -> Row:
        value = round(self.timing.ms, 4)
        return Row(
            self.case.name, self.case.batch, self.case.num_steps, 1, value, "ms", self.case.goal_ms, commit, command
        )


def run_cases(
    cases: Sequence[Case], ceiling: float, *, parts: bool = False, device: Device = "cuda", **of_timing: int
) -> Iterator[Outcome]:
    """Times each case; one model is in memory at a time, one engine for all batches of a K.

    Args:
        cases: a size's next to each other.
        ceiling: bytes a second that the card reads.
        parts: profile each case as well (on a card).
        device: where (the CPU: to try the harness).
        of_timing: for `time_generate`.
    """
    for name in dict.fromkeys(case.size for case in cases):
        size, of_size = SIZES[name], [case for case in cases if case.size == name]
        temperature = 1.0 if isinstance(size, LatentSize) else 0.0  # rows go to different experts
        target, draft = random_target(size, device), None
        for num_steps in dict.fromkeys(case.num_steps for case in of_size):
            if num_steps and draft is None:
                draft = random_draft(size, device)
            of_k = [case for case in of_size if case.num_steps == num_steps]
            most = max(case.batch for case in of_k)
            engine = Engine(
                target,
                EngineConfig(
                    num_steps=num_steps,
                    max_running_requests=most,
                    max_context_tokens=2048 if most <= 16 else 512,
                    device=device,
                ),
                Eagle3Proposer(draft, num_steps) if num_steps and draft is not None else None,
            )
            for case in of_k:
                timing = time_generate(engine, case.batch, temperature=temperature, **of_timing)
                profile = profile_rounds(engine, case.batch) if parts else None
                yield Outcome(case, timing, step_bytes(size, case), ceiling, profile)
            del engine
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
        del target, draft


def step_bytes(size: Size, case: Case, mean_context: int = 256) -> float:
    """What a step must read: weights once, of experts those that rows choose apart from each other, and keys and values
    of every request at the answers' mean context."""
    return size.step_bytes(case.num_steps, case.batch) + case.batch * size.kv_bytes(mean_context)


def write_rows(path: Path, rows: list[Row]) -> None:
    """Replaces the rows of the same case, batch, K and tp in a record file; others stay."""
    old = json.loads(path.read_text()) if path.is_file() else []
    new = {(row["case"], row["batch"], row["K"], row["tp"]): row for row in [*old, *map(asdict, rows)]}
    write_atomic(path, ("[\n" + ",\n".join(json.dumps(row) for row in new.values()) + "\n]\n").encode())
