"""Conversations for training, and how they are batched.

position       0 .. P-1     P         ..        T-1
token          prompt       answer              end token
slot t embeds x_{t+1}, so the first supervised slot is P - 1; the teacher of slot t at step k stands at t + k.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch.nn.utils.rnn import pad_sequence

from slipstream.engine.alignment import slot_mask, teacher_index
from slipstream.engine.errors import SlipstreamError


@dataclass(frozen=True)
class Conversation:
    """One conversation with the target's states.

    Args:
        token_ids: [T] int64.
        loss_mask: [T] bool, true on assistant tokens, the end token included.
        features: [T, n * ht], the capture plan's slots in its order.
        teacher: [T - teacher_start, ht], slot N before the final norm, from position `teacher_start` on.
        teacher_start: first position that has a teacher state.
    """

    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    features: torch.Tensor
    teacher: torch.Tensor
    teacher_start: int


class ConversationSource(Protocol):
    """Indexed conversations whose lengths are known without reading them."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each conversation."""

    def loss_mask(self, index: int) -> torch.Tensor:
        """[T] bool of one conversation, without its states."""

    def __getitem__(self, index: int) -> Conversation: ...


class ConversationList:
    """A source held in memory."""

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        self._conversations = list(conversations)
        self.lengths: Sequence[int] = [len(c.token_ids) for c in self._conversations]

    def loss_mask(self, index: int) -> torch.Tensor:
        return self._conversations[index].loss_mask

    def __getitem__(self, index: int) -> Conversation:
        return self._conversations[index]


@dataclass(frozen=True)
class Batch:
    """Conversations padded to one length (padding stands at the end, where no causal query can see it).

    B conversations, T slots (the longest conversation's tokens minus the last, which no slot starts at), S rows (the
    largest number of supervised slots), M teacher states in all.

    Args:
        tokens: [B, T + 1] int64.
        features: [B, T, n * ht].
        slots: [B, S] int64, each conversation's supervised slots, padded with slot 0.
        supervised: [K, B, S] bool, rows with a loss at each step.
        rows: one [m] int64 a step, the same as indices into the B * S rows: their number is known without asking the
            device.
        teacher: [M, ht] teacher states that some row needs, pre-norm.
        teacher_rows: [K, B, S] int64, row of `teacher` for each step and row (0 where not supervised).
    """

    tokens: torch.Tensor
    features: torch.Tensor
    slots: torch.Tensor
    supervised: torch.Tensor
    rows: tuple[torch.Tensor, ...]
    teacher: torch.Tensor
    teacher_rows: torch.Tensor

    def to(self, device: torch.device) -> "Batch":
        """The batch on another device; from pinned memory the host does not wait for the copy."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """The batch in memory from which a GPU copies by itself."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        names = [field.name for field in fields(self) if field.name != "rows"]
        changed = {name: change(getattr(self, name)) for name in names}
        return Batch(rows=tuple(map(change, self.rows)), **changed)

    def step_tokens(self, step: int) -> torch.Tensor:
        """[B, S] int64: the token that each row embeds at `step` (any token where it lies past the end)."""
        return self.tokens.gather(1, (self.slots + step).clamp(max=self.tokens.shape[1] - 1))


def supervised_slots(conversation: Conversation) -> torch.Tensor:
    """[s] int64: slots with a loss at step 1."""
    return slot_mask(conversation.loss_mask, 1).nonzero().squeeze(1)


def collate(conversations: Sequence[Conversation], num_steps: int) -> Batch:
    """Pad and align conversations for `num_steps` steps.

    Raises SlipstreamError when a teacher state that a supervised slot needs was not stored.
    """
    slots = [supervised_slots(c) for c in conversations]
    padded_slots = pad_sequence(slots, batch_first=True)  # [B, S]
    supervised = torch.zeros(num_steps, *padded_slots.shape, dtype=torch.bool)
    teacher_rows = torch.zeros(num_steps, *padded_slots.shape, dtype=torch.int64)
    teachers, base = [], 0
    for b, (conversation, own) in enumerate(zip(conversations, slots, strict=True)):
        if not len(own):
            continue
        start = teacher_index(int(own[0]), 1)
        if conversation.teacher_start > start:
            raise SlipstreamError(
                f"teacher states start at position {conversation.teacher_start}, slot {int(own[0])} needs {start}",
                expected="a teacher state for every supervised slot",
                do="extract the hidden states again; the loss mask has changed since",
            )
        teachers.append(conversation.teacher[start - conversation.teacher_start :])  # [T - start, ht]
        for step in range(1, num_steps + 1):
            on = slot_mask(conversation.loss_mask, step)[own]  # [s]
            supervised[step - 1, b, : len(own)] = on
            teacher_rows[step - 1, b, : len(own)] = torch.where(on, base + own + step - start, 0)
        base += len(teachers[-1])
    if not teachers:
        raise ValueError("a batch needs at least one supervised slot; `supervised_indices` leaves others out")
    return Batch(
        tokens=pad_sequence([c.token_ids for c in conversations], batch_first=True).long(),
        features=pad_sequence([c.features[:-1] for c in conversations], batch_first=True),
        slots=padded_slots,
        supervised=supervised,
        rows=tuple(on.flatten().nonzero().squeeze(1) for on in supervised),  # [B, S] -> [m]
        teacher=torch.cat(teachers),
        teacher_rows=teacher_rows,
    )


def slot_counts(source: ConversationSource, num_steps: int) -> torch.Tensor:
    """[n, K] int64: slots of every conversation that are supervised at each step."""
    counts = torch.zeros(len(source.lengths), num_steps, dtype=torch.int64)
    for index in range(len(source.lengths)):
        on = slot_mask(source.loss_mask(index), 1)  # [T]
        for step in range(num_steps):
            counts[index, step] = on.sum()
            on = on[:-1] & on[1:]  # [T] -> [T - 1]: one step on, where this slot and the next one are supervised
    return counts


def supervised_indices(counts: torch.Tensor) -> tuple[list[int], int]:
    """(conversations that have a supervised slot, number of supervised slots at step 1 in all).

    Args: counts: [n, K] int64, as `slot_counts` makes it.

    Raises SlipstreamError (F10) when there is none at all.
    """
    first = counts[:, 0].tolist()  # [n, K] -> [n]
    if not sum(first):
        raise SlipstreamError(
            f"no supervised slot in {len(first)} conversations",
            expected="loss masks that are true on the assistant's tokens, two or more in a row",
            do="look at the decoded sample of the regenerate stage: the chat template or the mask is wrong",
            fault="F10",
        )
    return [i for i, count in enumerate(first) if count], sum(first)


def plan_batches(
    indices: Sequence[int], lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int
) -> list[list[int]]:
    """One epoch's batches: whole conversations of like length, in an order that (seed, epoch) fixes.

    Args:
        indices: conversations to use.
        lengths: tokens of every conversation, by index.
        batch_tokens: most padded tokens in a batch; a longer conversation makes a batch by itself.
        seed, epoch: fix the shuffle.

    Returns:
        Batches of indices; each index once.
    """
    rng = random.Random(f"{seed}/{epoch}")
    order = list(indices)
    rng.shuffle(order)  # conversations of one length meet in another order each epoch
    order.sort(key=lambda i: lengths[i] // _BUCKET_TOKENS)
    batches: list[list[int]] = []
    longest = 0
    for index in order:
        longest = max(longest, lengths[index])
        if not batches or longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            longest = lengths[index]
        batches[-1].append(index)
    rng.shuffle(batches)
    return batches


# Conversations whose lengths differ by less than this share a bucket: about a tenth of a usual answer is padding.
_BUCKET_TOKENS = 16
