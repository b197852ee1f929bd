"""Stage `extract`: the hidden states that the draft learns from, captured by the code that serving captures with.

Writes store/ (see `engine.hidden_store`). A killed run goes on behind the last whole shard.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slipstream.engine.alignment import slot_mask
from slipstream.engine.batch_capture import BatchCapture
from slipstream.engine.capture import CapturePlan, default_slots
from slipstream.engine.device import resolve_device
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.hidden_store import ConversationStates, HiddenStateStore, StoreWriter
from slipstream.engine.loader import load_target
from slipstream.engine.models import TargetModel
from slipstream.engine.runner import capture_states
from slipstream.engine.store_manifest import StoreSpec
from slipstream.engine.teacher_check import check_teacher
from slipstream.tasks.conversations import CONVERSATIONS, ConversationRecord, read_conversations
from slipstream.tasks.facts import resolved_target
from slipstream.tasks.registry import get_stage
from slipstream.tasks.shares import done_stores
from slipstream.tasks.stage import StageContext

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

STORE = "store"
CHECKED_CONVERSATIONS = 4
# Rows of one forward pass on a GPU, padding included: enough to keep it busy. On a CPU conversations go one at a time.
GPU_ROWS = 16384


def run(context: StageContext, *, skip: Collection[str] = ()) -> dict[str, Any]:
    """Captures every conversation that is not stored yet, then proves that the teacher is the target (F7).

    Figures: slots, teacher_slot; conversations, train, holdout, left_out (without a supervised slot), resumed; tokens,
    supervised_tokens, bytes, bytes_per_token (measured), tokens_per_second (of this run); teacher (what was compared).
    Args: skip: faults whose checks are off (tests of the faults only).
    """
    config = context.config
    model_dir = resolved_target(context.workdir)
    device = torch.device(resolve_device(config.server.device))
    target = load_target(model_dir, config.server.dtype, device)
    plan = capture_plan(config, target.config.num_layers)
    dtype = target.embed_tokens.weight.dtype
    spec = StoreSpec.from_plan(plan, TargetIdentity.from_dir(model_dir), target.config.hidden_size, dtype)
    records = read_conversations(context.input("regenerate") / CONVERSATIONS)
    usable = [r for r in records if bool(slot_mask(r.mask, 1).any())]
    check_some_supervised(usable, len(records))

    writer = StoreWriter(context.out / STORE, spec, skip=skip)
    for other in done_stores(config, context.workdir):
        if taken := writer.take(other):
            context.say(f"{taken} conversations of share {other.parent.name} are taken over")
    resumed = len(writer.manifest.conversations)
    if resumed:
        context.say(f"{resumed} conversations of an interrupted run are kept, {len(usable) - resumed} remain")
    todo = [r for r in usable if not writer.has(r.id, r.token_ids)]
    began, captured, total = time.monotonic(), 0, sum(len(r.token_ids) for r in usable)
    kept = total - sum(len(r.token_ids) for r in todo)
    max_rows = GPU_ROWS if device.type == "cuda" else None
    for states in capture_all(target, todo, plan, config.server.prefill_chunk_tokens, max_rows):
        writer.add(states)
        captured += len(states.token_ids)
        speed = captured / max(time.monotonic() - began, 1e-9)
        context.progress(kept + captured, total, tokens_per_second=round(speed, 1))
    writer.finish()

    store = HiddenStateStore(context.out / STORE, expect=spec, skip=skip)
    report = check_teacher(target, read_sample(store, device), target.logits, skip=skip)
    context.say(
        f"{len(store)} conversations, {store.num_tokens():,} tokens, {store.bytes_per_token():,.0f} bytes a token; "
        f"{report.describe()}"
    )
    if len(usable) < len(records):
        context.warn(f"{len(records) - len(usable)} conversations left out: their answers are shorter than two tokens")
    return {
        "slots": list(spec.slots),
        "teacher_slot": spec.teacher_slot,
        "conversations": len(store),
        "train": len(store.conversation_ids("train")),
        "holdout": len(store.conversation_ids("holdout")),
        "left_out": len(records) - len(usable),
        "resumed": resumed,
        "tokens": store.num_tokens(),
        "supervised_tokens": store.num_supervised_tokens(),
        "bytes": store.num_bytes(),
        "bytes_per_token": round(store.bytes_per_token(), 1),
        "tokens_per_second": round(captured / max(time.monotonic() - began, 1e-9), 1),
        "teacher": report.to_dict(),
    }


def capture_plan(config: "Deployment", num_layers: int) -> CapturePlan:
    """The slots that a deployment stores, for a target with `num_layers` layers."""
    slots = config.capture.slots
    return CapturePlan(default_slots(num_layers) if slots == "auto" else tuple(slots), num_layers)


def draft_plan(config: "Deployment", stored: CapturePlan) -> CapturePlan:
    """The slots that its draft reads, picked by name from the stored ones. Raises SlipstreamError (F2)."""
    slots = config.draft.slots
    if slots is None:
        return stored
    missing = [slot for slot in slots if slot not in stored.slots]
    if missing:
        raise SlipstreamError(
            f"draft.slots = {list(slots)}, but the store keeps {list(stored.slots)}: {missing} are not among them",
            expected="some of capture.slots, by name",
            do="add them to capture.slots and extract again, or write other draft.slots",
            fault="F2",
        )
    return CapturePlan(slots, stored.num_layers)


def capture_all(
    target: TargetModel,
    records: Sequence[ConversationRecord],
    plan: CapturePlan,
    prefill_chunk_tokens: int,
    max_rows: int | None,
) -> Iterator[ConversationStates]:
    """States of every conversation, in order: one after the other, or as many at a time as `max_rows` holds."""
    if max_rows is None or not records:
        yield from (capture(target, record, plan, prefill_chunk_tokens) for record in records)
        return
    lengths = [len(record.token_ids) for record in records]
    batch = BatchCapture(target, plan.slots, max_rows, max(lengths))
    for group in batch.groups(lengths):
        members = [records[index] for index in group]
        for record, states in zip(members, batch([r.token_ids for r in members]), strict=True):
            yield to_store(record, *states)


def capture(
    target: TargetModel, record: ConversationRecord, plan: CapturePlan, prefill_chunk_tokens: int
) -> ConversationStates:
    """States of one conversation, the teacher's prompt part dropped."""
    return to_store(record, *capture_states(target, record.token_ids, plan.slots, prefill_chunk_tokens))


def to_store(
    record: ConversationRecord, states: Mapping[str, torch.Tensor], teacher: torch.Tensor
) -> ConversationStates:
    """What the store keeps of a conversation's states [T, h] and teacher [T, h]."""
    token_ids = torch.tensor(record.token_ids, dtype=torch.int32)
    return ConversationStates.from_capture(record.id, record.split, token_ids, record.mask, states, teacher)


def read_sample(
    store: HiddenStateStore, device: torch.device, size: int = CHECKED_CONVERSATIONS
) -> list[ConversationStates]:
    """Conversations evenly spread over the store, for the check of the teacher, on the target's device."""
    ids = store.conversation_ids()
    return [store.read(i).to(device) for i in ids[:: max(1, len(ids) // size)][:size]]


def check_some_supervised(usable: Sequence[ConversationRecord], total: int) -> None:
    """Raises SlipstreamError (F10) when no conversation has a slot to learn from."""
    if not usable:
        raise SlipstreamError(
            f"none of {total} conversations has two assistant tokens in a row",
            expected="loss masks that are 1 on the assistant's tokens",
            do="look at the decoded sample of the regenerate stage: the chat template or the mask is wrong",
            fault="F10",
        )


STAGE = get_stage("extract")
