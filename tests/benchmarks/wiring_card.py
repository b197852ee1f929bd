"""What tokens cannot prove, counted on a card: slots, draft logits and A_k of replayed graphs against the eager engine.

    python -P tests/benchmarks/wiring_card.py --target DIR --draft DIR [--num-steps 3] [--tokens 96] [--device auto]

- slots under graph replay for inputs A, B, A against the eager capture of the same: numbers that differ in any bit;
- draft logits at k = 1..K of every round, tokens, accepted counts and A_k, likewise;
- F5 (another point of the stream) and F6 (a stale or frozen capture) put in before the capture of the graphs: tokens
  stay equal, and the comparison of slots fails.

Ends with 1 where anything differs that must not, or a fault is not seen. On a CPU a replay runs the captured function
again: that rehearses the script.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.config import EngineConfig
from slipstream.engine.device import DEVICES, device_name, resolve_device
from slipstream.engine.drafts.eagle3.checkpoint import load_draft
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.inject import inject
from slipstream.engine.injection import parse_injections
from slipstream.engine.loader import load_target
from slipstream.engine.models.dense import DenseModel
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.trace import RequestTrace

A = "Explain in a few sentences why the sky is blue in the day and red in the evening."
B = "Write a Python function that returns the n-th Fibonacci number, and say how long it takes for a large n."
ORDER = (A, B, A)
CONTEXT_STEP = 128


@dataclass(frozen=True)
class Difference:
    """Of two runs of the same inputs. Each is (numbers that differ, numbers compared)."""

    tokens: tuple[int, int]
    slots: dict[str, tuple[int, int]]
    draft_logits: list[tuple[int, int]]
    rounds: tuple[int, int]

    @property
    def of_slots(self) -> int:
        return sum(differ for differ, _ in self.slots.values())

    @property
    def of_drafts(self) -> int:
        return sum(differ for differ, _ in self.draft_logits)


def differing(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int]:
    """Bit for bit, of two tensors of one dtype; where one is longer, all of it counts as different."""
    kind = torch.int16 if a.element_size() == 2 else torch.int32 if a.element_size() == 4 else torch.int64
    if a.shape != b.shape:
        return max(a.numel(), b.numel()), max(a.numel(), b.numel())
    return int((a.contiguous().view(kind) != b.contiguous().view(kind)).sum()), a.numel()


def added(parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return sum(differ for differ, _ in parts), sum(compared for _, compared in parts)


def difference(eager: Sequence[RequestTrace], other: Sequence[RequestTrace], num_steps: int) -> Difference:
    """All requests of a run together."""
    pairs = list(zip(eager, other, strict=True))
    names = [*eager[0].states, "teacher"]

    def state(trace: RequestTrace, name: str) -> torch.Tensor:
        return trace.teacher if name == "teacher" else trace.states[name]

    rounds = [(x, y) for a, b in pairs for x, y in zip(a.rounds, b.rounds, strict=False)]
    told = [(x.start, x.num_valid, x.accepted) != (y.start, y.num_valid, y.accepted) for x, y in rounds]
    missing = sum(abs(len(a.rounds) - len(b.rounds)) for a, b in pairs)
    logits = []
    for k in range(num_steps):
        each = [
            differing(x.draft_logits[k], y.draft_logits[k])
            for x, y in rounds
            if x.draft_logits is not None and y.draft_logits is not None
        ]
        logits.append(added(each))
    return Difference(
        tokens=added([differing(torch.tensor(a.token_ids), torch.tensor(b.token_ids)) for a, b in pairs]),
        slots={name: added([differing(state(a, name), state(b, name)) for a, b in pairs]) for name in names},
        draft_logits=logits,
        rounds=(sum(told) + missing, len(rounds) + missing),
    )


@dataclass(frozen=True)
class Subject:
    """What is run: a target, its draft, prompts as token ids."""

    target: DenseModel
    draft: Eagle3Network
    prompts: list[list[int]]
    num_steps: int
    tokens: int
    device: str

    def run(self, graphs: bool, faults: Sequence[str] = ()) -> tuple[list[RequestTrace], Engine]:
        """One request after the other through the same engine, traced."""
        longest = max(map(len, self.prompts)) + self.tokens
        config = EngineConfig(
            num_steps=self.num_steps,
            max_running_requests=1,
            max_context_tokens=-(-longest // CONTEXT_STEP) * CONTEXT_STEP,
            device=self.device,
            graphs=graphs,
        )
        engine = Engine(self.target, config, Eagle3Proposer(self.draft, self.num_steps))
        params = SamplingParams(max_tokens=self.tokens, ignore_eos=True)
        traces = []
        try:
            inject(engine, parse_injections(list(faults)))
            for prompt in self.prompts:
                (answer,) = engine.generate([prompt], params, trace=True)
                assert answer.trace is not None
                traces.append(answer.trace)
        finally:  # what the faults wrapped around the target
            self.target.__dict__.pop("forward", None)
            for module in self.target.modules():
                module._forward_hooks.clear()
        return traces, engine


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--draft", type=Path, required=True, help="EAGLE-3 directory")
    parser.add_argument("--num-steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--device", choices=DEVICES, default="auto")
    args = parser.parse_args(arguments)
    device = resolve_device(args.device)
    target = load_target(args.target, EngineConfig().dtype, device)
    draft = load_draft(args.draft, torch.bfloat16, target_embedding=target.embed_tokens.weight).eval()
    chat = ChatTokenizer(args.target)
    prompts = [chat.encode_chat([{"role": "user", "content": text}], add_generation_prompt=True) for text in ORDER]
    subject = Subject(target, draft, prompts, args.num_steps, args.tokens, device)

    eager, one = subject.run(graphs=False)
    slot = draft.config.slots[1]
    faults = ("", f"F5:slot={slot},kind=normed", f"F5:slot={slot},kind=no-residual", f"F6:slot={slot}")
    faults = (*faults, f"F6:slot={slot},kind=frozen")
    table = Table(title=f"{device_name(device)}: graphs against eager, inputs A, B, A; numbers that differ / compared")
    for name in (
        "fault",
        "tokens",
        *[*eager[0].states, "teacher"],
        "rounds",
        "draft logits k = 1..K",
        "A_k",
        "verdict",
    ):
        table.add_column(name, justify="left" if name in ("fault", "verdict", "A_k") else "right")
    expected_joint = [joint.rate for joint in one.stats.acceptance[args.num_steps].joint]
    table.add_row("eager", *[""] * (len(eager[0].states) + 4), _rates(expected_joint), "")
    failed = 0
    for fault in faults:
        traces, engine = subject.run(graphs=True, faults=[fault] if fault else [])
        found = difference(eager, traces, args.num_steps)
        joint = [one.rate for one in engine.stats.acceptance[args.num_steps].joint]
        clean = not (found.of_slots or found.of_drafts or found.rounds[0] or joint != expected_joint)
        right = not found.tokens[0] and (bool(found.slots[f"slot_{slot}"][0]) if fault else clean)
        failed += not right
        table.add_row(
            fault or "none",
            *(_share(pair) for pair in (found.tokens, *found.slots.values(), found.rounds)),
            " ".join(_share(pair) for pair in found.draft_logits),
            _rates(joint),
            ("equal" if not fault else "tokens equal, check fails") if right else "FAILED",
        )
    Console(width=200).print(table)
    print(f"{len(faults) - failed} of {len(faults)} as they must be")
    return 1 if failed else 0


def _share(pair: tuple[int, int]) -> str:
    return f"{pair[0]}/{pair[1]}"


def _rates(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.3f}" for rate in rates)


if __name__ == "__main__":
    sys.exit(main())
