"""Stage `regenerate`: the target answers the prompts itself, so that the draft learns what it will have to predict.

Writes conversations.jsonl, one conversation a line, in the order of the prompts. While it runs, finished ones are
appended to unsorted.jsonl, from which an interrupted run goes on.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.config import EngineConfig
from slipstream.engine.device import resolve_device
from slipstream.engine.engine import Engine
from slipstream.engine.loader import load_target
from slipstream.tasks.coloured_sample import coloured_sample
from slipstream.tasks.conversations import CONVERSATIONS, ConversationRecord, append, resume_conversations
from slipstream.tasks.dialogues import Answers, start_dialogues
from slipstream.tasks.facts import resolved_target
from slipstream.tasks.manifest import write_atomic
from slipstream.tasks.prompts import load_prompts
from slipstream.tasks.registry import get_stage
from slipstream.tasks.shares import done_conversations, of_share
from slipstream.tasks.stage import StageContext

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

UNSORTED = "unsorted.jsonl"
MANY_TRUNCATED = 0.5  # share of cut-off answers from which on the person watching is warned


def run(context: StageContext) -> dict[str, Any]:
    """Answers every prompt that has no conversation yet, then writes all of them in order.

    Figures: those of `describe`; turns_left_out, tokens_per_second (of this run); resumed (conversations kept from an
    interrupted run); sample (a decoded conversation, rich markup).
    """
    model_dir = resolved_target(context.workdir)
    tokenizer = ChatTokenizer(model_dir)
    dialogues = start_dialogues(load_prompts(context.config.data.prompts), tokenizer, context.config.data)
    unsorted = context.out / UNSORTED
    finished = done_conversations(context.config, context.workdir) | resume_conversations(unsorted)
    kept = len(finished)
    mine = of_share(dialogues, context.config.data.share)
    todo = [d for d in mine if d.id not in finished]
    if kept:
        context.say(f"{kept} conversations of an interrupted run or of shares are kept, {len(todo)} remain")
    answers = Answers(make_engine(model_dir, context.config), tokenizer, context.config.data)
    asked = {d.id for d in mine}
    done = len(asked & finished.keys())
    with unsorted.open("a", encoding="utf-8") as file:
        for record in answers.of(todo):
            if record.id in finished:
                continue  # a first turn that was written before the kill, its later turn not
            append(file, record)
            finished[record.id] = record
            done += record.id in asked
            speed = answers.tokens / max(answers.seconds, 1e-9)
            context.progress(done, len(mine), tokens_per_second=round(speed, 1))

    order = {d.id: n for n, d in enumerate(dialogues)}
    records = sorted(finished.values(), key=lambda r: (order[r.id.partition("#")[0]], r.id))
    figures = describe(records)
    shown = example(records)
    sample = coloured_sample(tokenizer, shown.token_ids, shown.mask)
    context.say(f"{shown.id}, its {sum(shown.loss_mask)} supervised tokens highlighted:")
    context.say(sample, markup=True)
    if figures["truncated_share"] > MANY_TRUNCATED:
        context.warn(f"{figures['truncated_share']:.0%} of the answers were cut off at data.max_new_tokens")
    write_atomic(context.out / CONVERSATIONS, "".join(r.line() for r in records).encode())
    unsorted.unlink()
    return {
        **figures,
        "turns_left_out": answers.turns_left_out,
        "tokens_per_second": round(answers.tokens / answers.seconds, 2) if answers.seconds else None,
        "resumed": kept,
        "sample": sample,
    }


def make_engine(model_dir: Path, config: "Deployment") -> Engine:
    """The engine without speculation, in the dtype of the server, so that its answers are the served ones."""
    device = resolve_device(config.server.device)
    target = load_target(model_dir, config.server.dtype, device)
    sizes = EngineConfig(
        max_running_requests=config.data.batch_size,
        max_context_tokens=min(config.server.max_context_tokens, target.config.max_position),
        block_size_tokens=config.server.block_size_tokens,
        prefill_chunk_tokens=config.server.prefill_chunk_tokens,
        dtype=config.server.dtype,
        device=device,
    )
    engine = Engine(target, sizes)
    engine.start()  # what it compiles and captures is not the answers' time
    return engine


def describe(records: Sequence[ConversationRecord]) -> dict[str, Any]:
    """Counts over all conversations; supervised_share is the mask's coverage, truncated_share that of "length"."""
    reasons = Counter(r.finish_reason for r in records)
    tokens = sum(len(r.token_ids) for r in records)
    supervised = sum(sum(r.loss_mask) for r in records)
    return {
        "conversations": len(records),
        "train": sum(r.split == "train" for r in records),
        "holdout": sum(r.split == "holdout" for r in records),
        "tokens": tokens,
        "supervised_tokens": supervised,
        "supervised_share": round(supervised / tokens, 4),
        "finish_reasons": dict(sorted(reasons.items())),
        "truncated_share": round(reasons["length"] / len(records), 4),
    }


def example(records: Sequence[ConversationRecord]) -> ConversationRecord:
    """A conversation to show: the shortest of those with the most answers, so that all that can go wrong is seen."""

    def answers(record: ConversationRecord) -> int:
        return sum(a < b for a, b in zip([0, *record.loss_mask], record.loss_mask, strict=False))

    return min(records, key=lambda r: (-answers(r), len(r.token_ids)))


STAGE = get_stage("regenerate")
