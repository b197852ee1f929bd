"""The hidden states that a draft learns from, on disk: safetensors shards and a manifest.

    store/
      manifest.json               what the tensors are, which conversations lie where, sha256 of each shard
      states-00000.safetensors    per conversation: token_ids int32 [T], loss_mask uint8 [T],
                                  slot_k [T, h] for each slot by its name, teacher [T - teacher_start, h]

The teacher is slot N before the final norm. Its part before `teacher_start` is not stored: no supervised slot of the
draft asks for it. A shard is written under a temporary name, renamed, and only then entered in the manifest, so what a
killed extraction leaves behind is either complete and listed, or thrown away by the next run.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from slipstream.engine.alignment import slot_mask, teacher_index
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import sha256_file, write_atomic
from slipstream.engine.store_manifest import (
    AGAIN,
    MANIFEST,
    ConversationEntry,
    ShardEntry,
    StoreManifest,
    StoreSpec,
    check_spec,
)

SHARD_BYTES = 64 << 20


@dataclass(frozen=True)
class ConversationStates:
    """One conversation with the target's states.

    Args:
        conversation_id: unique in the store.
        split: "train" or "holdout".
        token_ids: [T] int32.
        loss_mask: [T] bool, true on assistant tokens.
        slots: slot name -> [T, h].
        teacher: [T - teacher_start, h], slot N before the final norm, of positions teacher_start and later.
        teacher_start: position of the first teacher row.
    """

    conversation_id: str
    split: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    slots: Mapping[str, torch.Tensor]
    teacher: torch.Tensor
    teacher_start: int

    def to(self, device: torch.device) -> "ConversationStates":
        """The states on another device; token ids and mask stay where they are."""
        slots = {name: state.to(device) for name, state in self.slots.items()}
        return replace(self, slots=slots, teacher=self.teacher.to(device))

    @classmethod
    def from_capture(
        cls,
        conversation_id: str,
        split: str,
        token_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        slots: Mapping[str, torch.Tensor],
        teacher: torch.Tensor,
    ) -> "ConversationStates":
        """From the states of all positions, teacher [T, h]; the teacher's prompt part is dropped here."""
        start = first_teacher_position(loss_mask)
        return cls(conversation_id, split, token_ids, loss_mask, slots, teacher[start:], start)  # [T, h] -> [T - s, h]


def first_teacher_position(loss_mask: torch.Tensor) -> int:
    """First position whose teacher state training can ask for, loss_mask [T] bool; T when no slot is supervised."""
    slots = slot_mask(loss_mask, 1).nonzero()  # [T] -> [slots, 1]
    return teacher_index(int(slots[0]), 1) if len(slots) else loss_mask.shape[0]


def _token_sha256(token_ids: torch.Tensor | Sequence[int]) -> str:
    return hashlib.sha256(torch.as_tensor(token_ids, dtype=torch.int32).numpy().tobytes()).hexdigest()


class StoreWriter:
    """Writes a store, or goes on with one that a killed run left.

    Args:
        directory: of the store; made when it does not exist.
        spec: what will be written. A store with another spec is refused, each difference named.
        shard_bytes: a shard is closed when it holds this much.
        skip: faults whose checks are off (tests of the faults only).
    """

    def __init__(
        self, directory: Path, spec: StoreSpec, *, shard_bytes: int = SHARD_BYTES, skip: Collection[str] = ()
    ) -> None:
        self.directory, self.spec, self._shard_bytes = directory, spec, shard_bytes
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / MANIFEST).is_file():
            self.manifest = StoreManifest.load(directory)
            do = f"delete {directory}, or restore the configuration that it was made with"
            check_spec(self.manifest.spec, spec, where=f"the store in {directory}", do=do, skip=skip)
        else:
            self.manifest = StoreManifest(spec)
        self._drop_unfinished()
        self._tensors: dict[str, torch.Tensor] = {}
        self._entries: dict[str, ConversationEntry] = {}
        self._bytes = 0

    def has(self, conversation_id: str, token_ids: torch.Tensor | Sequence[int]) -> bool:
        """Whether a conversation is stored already. Raises SlipstreamError when it is stored with other tokens."""
        entry = self.manifest.conversations.get(conversation_id) or self._entries.get(conversation_id)
        if entry is not None and entry.token_sha256 != _token_sha256(token_ids):
            raise SlipstreamError(
                f"conversation {conversation_id} is in {self.directory} with other tokens ({entry.tokens} of them)",
                expected=f"the same {len(token_ids)} tokens as in the conversations at hand",
                do=f"delete {self.directory} and extract again",
                fault="F17",
            )
        return entry is not None

    def add(self, states: ConversationStates) -> None:
        """Takes one conversation; it is on the disk when its shard is full, or after `finish`.

        Raises SlipstreamError for shapes, dtypes or values that a reader would refuse.
        """
        if self.has(states.conversation_id, states.token_ids):
            return
        _check_states(states, self.spec, where="the capture")
        tensors = {
            "token_ids": states.token_ids.to(torch.int32),
            "loss_mask": states.loss_mask.to(torch.uint8),
            **{name: states.slots[name] for name in self.spec.slots},
            "teacher": states.teacher,
        }
        tensors = {f"{states.conversation_id}/{k}": v.detach().cpu().contiguous() for k, v in tensors.items()}
        self._tensors |= tensors
        self._bytes += sum(t.nbytes for t in tensors.values())
        self._entries[states.conversation_id] = ConversationEntry(
            shard=self._next_shard(),
            split=states.split,
            tokens=len(states.token_ids),
            teacher_start=states.teacher_start,
            supervised_tokens=int(states.loss_mask.sum()),
            token_sha256=_token_sha256(states.token_ids),
        )
        if self._bytes >= self._shard_bytes:
            self.flush()

    def take(self, other: Path) -> int:
        """Takes over the files of another complete store of the same specification, with what they hold that this one
        lacks. Returns the number of conversations taken. Raises SlipstreamError for another specification."""
        theirs = HiddenStateStore(other, expect=self.spec).manifest
        taken = 0
        for shard in theirs.shards:
            entries = {name: entry for name, entry in theirs.conversations.items() if entry.shard == shard.name}
            if not entries.keys() - self.manifest.conversations.keys():
                continue
            self.flush()  # a number that is waited for is not given away
            name = self._next_shard()
            write_atomic(self.directory / name, (other / shard.name).read_bytes())
            self.manifest.shards.append(replace(shard, name=name))
            for key, entry in entries.items():
                if key not in self.manifest.conversations:
                    self.manifest.conversations[key] = replace(entry, shard=name)
                    taken += 1
            self.manifest.save(self.directory)
        return taken

    def flush(self) -> None:
        """Writes what was added so far as one shard and enters it in the manifest."""
        if not self._tensors:
            return
        data, name = save(self._tensors), self._next_shard()
        write_atomic(self.directory / name, data)
        self.manifest.shards.append(ShardEntry(name, hashlib.sha256(data).hexdigest(), len(data)))
        self.manifest.conversations |= self._entries
        self.manifest.save(self.directory)
        self._tensors, self._entries, self._bytes = {}, {}, 0

    def finish(self) -> None:
        """Writes the rest and marks the store complete: only then is it read."""
        self.flush()
        self.manifest.complete = True
        self.manifest.save(self.directory)

    def _next_shard(self) -> str:
        return f"states-{len(self.manifest.shards):05d}.safetensors"

    def _drop_unfinished(self) -> None:
        """Removes files that the manifest does not list, and listed shards from the first missing or cut one on."""
        good: list[ShardEntry] = []
        for shard in self.manifest.shards:
            path = self.directory / shard.name
            if not path.is_file() or path.stat().st_size != shard.bytes:
                break  # shard names are numbered: what follows is written again too
            good.append(shard)
        kept = {shard.name for shard in good}
        if len(good) < len(self.manifest.shards):
            self.manifest.shards, self.manifest.complete = good, False
            entries = self.manifest.conversations.items()
            self.manifest.conversations = {name: entry for name, entry in entries if entry.shard in kept}
            self.manifest.save(self.directory)
        for path in self.directory.iterdir():
            if path.name not in kept | {MANIFEST}:
                path.unlink()


class HiddenStateStore:
    """Reads a finished store. A shard's sha256 is verified when its first conversation is read.

    Args:
        directory: of the store.
        expect: what the caller needs it to be; every difference is an error that names both values.
        skip: faults whose checks are off (tests of the faults only).

    Raises SlipstreamError for a store that is missing, unfinished or not what `expect` says.
    """

    def __init__(self, directory: Path, *, expect: StoreSpec | None = None, skip: Collection[str] = ()) -> None:
        self.directory = directory
        self.manifest = StoreManifest.load(directory)
        self.spec = self.manifest.spec
        if not self.manifest.complete:
            raise SlipstreamError(
                f"the extraction into {directory} has not ended ({len(self.manifest.conversations)} conversations)",
                expected="a complete store",
                do="run the extract stage again: it goes on where it stopped",
            )
        if expect is not None:
            check_spec(self.spec, expect, where=f"the store in {directory}", skip=skip)
        self._shards = {shard.name: shard for shard in self.manifest.shards}
        self._files: dict[str, Any] = {}
        self._checked: set[str] = set()

    def __len__(self) -> int:
        return len(self.manifest.conversations)

    def conversation_ids(self, split: str | None = None) -> list[str]:
        """Ids in the order of extraction, of one split or of all."""
        return [i for i, entry in self.manifest.conversations.items() if split in (None, entry.split)]

    def entry(self, conversation_id: str) -> ConversationEntry:
        """What the manifest says of a conversation. Raises KeyError."""
        return self.manifest.conversations[conversation_id]

    def num_tokens(self, split: str | None = None) -> int:
        return sum(self.entry(i).tokens for i in self.conversation_ids(split))

    def num_supervised_tokens(self, split: str | None = None) -> int:
        return sum(self.entry(i).supervised_tokens for i in self.conversation_ids(split))

    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.bytes for shard in self.manifest.shards)

    def bytes_per_token(self) -> float:
        """Measured: bytes of the shards / tokens."""
        return self.num_bytes() / max(1, self.num_tokens())

    def read(
        self, conversation_id: str, *, token_ids: torch.Tensor | Sequence[int] | None = None
    ) -> ConversationStates:
        """One conversation, checked.

        Args:
            conversation_id: see `conversation_ids`.
            token_ids: what the caller believes the conversation to be; checked when given.

        Raises SlipstreamError for a damaged shard, wrong lengths or tokens, NaN or infinity.
        """
        entry = self.entry(conversation_id)
        path, file = self.directory / entry.shard, self._open(entry.shard)
        tensors = {n: file.get_tensor(f"{conversation_id}/{n}") for n in ("token_ids", "loss_mask", "teacher")}
        slots = {name: file.get_tensor(f"{conversation_id}/{name}") for name in self.spec.slots}
        states = ConversationStates(
            conversation_id,
            entry.split,
            tensors["token_ids"],
            tensors["loss_mask"].bool(),
            slots,
            tensors["teacher"],
            entry.teacher_start,
        )
        # The shard's hash holds for every read of it: the values of a conversation are looked through once.
        _check_states(states, self.spec, where=str(path), values=conversation_id not in self._checked)
        self._checked.add(conversation_id)
        wanted = entry.token_sha256 if token_ids is None else _token_sha256(token_ids)
        if not wanted == entry.token_sha256 == _token_sha256(states.token_ids):
            raise SlipstreamError(
                f"conversation {conversation_id} in {path} holds other tokens than expected",
                expected="the conversation at hand, and the tokens that it was captured from",
                do=AGAIN,
                fault="F17",
            )
        return states

    def loss_mask(self, conversation_id: str) -> torch.Tensor:
        """[T] bool, true on assistant tokens: of a conversation whose states are not needed. Raises as `read` does."""
        mask = self._open(self.entry(conversation_id).shard).get_tensor(f"{conversation_id}/loss_mask")
        return torch.as_tensor(mask).bool()

    def __iter__(self) -> Iterator[ConversationStates]:
        return (self.read(i) for i in self.conversation_ids())

    def _open(self, name: str) -> Any:
        """A shard, mapped into memory and kept so: verified when it is first opened, and read from any thread."""
        if name not in self._files:
            self._verify(name)
            self._files[name] = safe_open(self.directory / name, framework="pt")
        return self._files[name]

    def _verify(self, name: str) -> None:
        path, shard = self.directory / name, self._shards[name]
        size = path.stat().st_size if path.is_file() else None
        found = "is missing" if size is None else f"holds {size:,} bytes" if size != shard.bytes else ""
        if not found and sha256_file(path) != shard.sha256:
            found = "has other content than when it was written"
        if found:
            raise SlipstreamError(
                f"{path} {found}",
                expected=f"{shard.bytes:,} bytes with sha256 {shard.sha256[:12]}...",
                do=f"delete it and run the extract stage again: it writes the missing part of {self.directory}",
            )


def _check_states(states: ConversationStates, spec: StoreSpec, *, where: str, values: bool = True) -> None:
    """Names, lengths, dtypes and finite values of one conversation; without `values` all but the last."""
    size, name = len(states.token_ids), states.conversation_id
    missing = [slot for slot in spec.slots if slot not in states.slots]
    if missing:
        found = f"{where}: conversation {name} has no {missing}"
        raise SlipstreamError(found, expected=f"the slots {list(spec.slots)}", do=AGAIN, fault="F2")
    rows = {slot: (states.slots[slot], size) for slot in spec.slots}
    rows["teacher"] = (states.teacher, size - states.teacher_start)
    wrong = []
    if len(states.loss_mask) != size:
        wrong.append(f"loss_mask has {len(states.loss_mask)} entries for {size} tokens")
    for key, (tensor, length) in rows.items():
        found, needed = f"{tensor.dtype} {list(tensor.shape)}", f"{spec.torch_dtype} {[length, spec.hidden_size]}"
        if found != needed:
            wrong.append(f"{key} is {found}, not {needed}")
        elif values and not _all_finite(tensor):
            wrong.append(f"{key} holds NaN or infinity")
    if wrong:
        raise SlipstreamError(
            f"{where}: conversation {name}: {'; '.join(wrong)}",
            expected="one finite state a token and slot",
            do="if it comes again after a new extraction, compare the target's states with `slipstream parity`",
        )


def _all_finite(tensor: torch.Tensor) -> bool:
    """Neither NaN nor infinity in it. Either would show in the sum, which is ten times as fast to make as a mask."""
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())
