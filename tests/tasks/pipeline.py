"""A tiny pipeline: a random chat target, conversations about nothing, and stand-ins for the stages before `extract`."""

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from slipstream.configs.schema import Deployment
from slipstream.engine.chat import ChatTokenizer
from slipstream.tasks.checks import find, gather, refuse
from slipstream.tasks.conversations import ConversationRecord
from slipstream.tasks.reporting import NullReporter
from slipstream.tasks.stage import Stage, StageContext, run_stage

SLOTS = (1, 2, 3)
CONVERSATIONS = 10  # the last two are held out
# Over a deployment of `make_deployment`: prompts and answers that fit into its context, so that it can be launched.
FITTING: dict[str, dict[str, Any]] = {
    "data": {"max_prompt_tokens": 64, "max_new_tokens": 32},
    "benchmark": {"max_new_tokens": 32},
}


class Listener(NullReporter):
    """Remembers what a stage said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.warned: list[str] = []
        self.progressed: list[tuple[float, float]] = []

    def progress(self, stage: str, done: float, total: float, fields: Any) -> None:
        self.progressed.append((done, total))

    def say(self, stage: str, text: str, *, markup: bool) -> None:
        self.said.append(text)

    def warn(self, stage: str, text: str) -> None:
        self.warned.append(text)


def make_deployment(model_dir: Path, **changes: dict[str, Any]) -> Deployment:
    """Two epochs of a tiny draft in fp32; `changes` override values by section."""
    sections: dict[str, dict[str, Any]] = {
        "target": {"source": str(model_dir), "dtype": "float32"},
        "capture": {"slots": SLOTS},
        "draft": {"draft_vocab_size": 120, "intermediate_size": 48},
        "training": {"num_steps": 3, "epochs": 2, "batch_tokens": 128, "dtype": "float32", "device": "cpu"},
        "server": {"max_context_tokens": 128, "prefill_chunk_tokens": 16, "dtype": "float32", "device": "cpu"},
    }
    for section, values in changes.items():
        sections[section] = {**sections.get(section, {}), **values}
    return Deployment(**sections)


def make_target(directory: Path, chats: ModuleType, tiny: ModuleType, seed: int = 0) -> Path:
    """A random target of four layers with norm weights from [0.5, 2], its tokenizer and chat template."""
    return chats.save_chat_target(directory, tiny, seed)


def make_conversations(model_dir: Path, seed: int = 0) -> list[ConversationRecord]:
    """Chats of random words; the second has two answers, the fourth was cut off by the length limit."""
    tokenizer = ChatTokenizer(model_dir)
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> str:
        letters = torch.randint(97, 123, (count, 4), generator=generator)
        return " ".join("".join(map(chr, row)) for row in letters.tolist())

    records = []
    for index in range(CONVERSATIONS):
        messages = [{"role": "user", "content": words(3)}, {"role": "assistant", "content": words(6)}]
        if index == 1:
            messages += [{"role": "user", "content": words(2)}, {"role": "assistant", "content": words(4)}]
        ids = tokenizer.encode_chat(messages, add_generation_prompt=False)
        last_end = max(stop for _, stop in tokenizer.answer_spans(ids))
        ids = ids[: last_end - (3 if index == 3 else 0)]  # what a template puts behind the end token was not generated
        mask = tokenizer.loss_mask(ids)
        records.append(
            ConversationRecord(
                id=f"chat-{index}",
                category="words",
                split="holdout" if index >= CONVERSATIONS - 2 else "train",
                token_ids=ids,
                loss_mask=mask.int().tolist(),
                prompt_tokens=int(mask.nonzero()[0]),
                finish_reason="length" if index == 3 else "stop",
            )
        )
    return records


def run_before_extract(
    workdir: Path, deployment: Deployment, model_dir: Path, records: list[ConversationRecord]
) -> None:
    """Stands in for `resolve` and `regenerate`: directories and manifests as those stages leave them."""

    def resolve(context: StageContext) -> dict[str, Any]:
        (context.out / "config.json").write_bytes((model_dir / "config.json").read_bytes())
        return {"model_dir": str(model_dir)}

    def regenerate(context: StageContext) -> dict[str, Any]:
        lines = [json.dumps(dataclasses.asdict(record)) for record in records]
        (context.out / "conversations.jsonl").write_text("\n".join(lines) + "\n")
        return {}

    run_stage(Stage("resolve", 1, (), ("target",), resolve), deployment, workdir)
    run_stage(Stage("regenerate", 1, ("resolve",), ("data",), regenerate), deployment, workdir)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Where everything lies."""

    workdir: Path
    model_dir: Path
    deployment: Deployment
    records: list[ConversationRecord]

    def context(self, stage: Stage, out: Path, deployment: Deployment | None = None) -> StageContext:
        """To call a stage's own `run` with, past the framework that would see a stale input first."""
        out.mkdir(parents=True, exist_ok=True)
        return StageContext(stage, deployment or self.deployment, self.workdir, out, Listener())

    def check_before_launch(self, slots: tuple[int, ...] | None = None, skip: Collection[str] = ()) -> None:
        """What the launch stage does before it starts a server: the checks, of a deployment that names `slots`."""
        sections = self.deployment.model_dump(exclude_unset=True)
        for section, values in FITTING.items():
            sections[section] = {**sections.get(section, {}), **values}
        if slots is not None:
            sections["capture"] = {"slots": slots}
        refuse(find(gather(Deployment(**sections), self.workdir), skip))


def make_pipeline(root: Path, chats: ModuleType, tiny: ModuleType, **changes: dict[str, Any]) -> Pipeline:
    """Everything up to `extract`, which is for the test to run."""
    model_dir = make_target(root / "target", chats, tiny)
    deployment = make_deployment(model_dir, **changes)
    records = make_conversations(model_dir)
    run_before_extract(root / "work", deployment, model_dir, records)
    return Pipeline(root / "work", model_dir, deployment, records)
