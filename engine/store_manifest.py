"""The manifest of a hidden-state store: what its tensors are, by name, and how two stores are compared."""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.capture import CapturePlan, slot_name
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import write_atomic
from slipstream.engine.handover import Difference, TargetIdentity, identity_differences, refuse, slot_differences

FORMAT = "slipstream-hidden-states"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
AGAIN = "extract again with this configuration: `slipstream stage extract CONFIG`"


@dataclass(frozen=True)
class StoreSpec:
    """What the tensors of a store are.

    Args:
        identity: the target, tokenizer and chat template that they were made with.
        slots: names of the feature slots, in the order of the capture plan.
        teacher_slot: name of the slot whose normed state gives the target's logits.
        hidden_size: width of every state.
        dtype: of every state, as torch names it without `torch.`.
        prenorm: whether the teacher is the state before the final norm. This code writes true only.
    """

    identity: TargetIdentity
    slots: tuple[str, ...]
    teacher_slot: str
    hidden_size: int
    dtype: str = "bfloat16"
    prenorm: bool = True

    @classmethod
    def from_plan(
        cls, plan: CapturePlan, identity: TargetIdentity, hidden_size: int, dtype: torch.dtype
    ) -> "StoreSpec":
        """The spec of a store made under a capture plan."""
        return cls(identity, plan.names, slot_name(plan.teacher), hidden_size, str(dtype).removeprefix("torch."))

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def check_spec(
    found: StoreSpec, expected: StoreSpec, *, where: str, do: str = AGAIN, skip: Collection[str] = ()
) -> None:
    """A store is what the caller needs. Raises SlipstreamError that names every differing field with both values."""
    names = ("teacher_slot", "hidden_size", "dtype", "prenorm")
    differences = [
        *slot_differences(found.slots, expected.slots),
        *identity_differences(found.identity, expected.identity),
        *(Difference(n, old, new) for n in names if (old := getattr(found, n)) != (new := getattr(expected, n))),
    ]
    refuse(differences, found_in=where, expected_in="the configuration", do=do, skip=skip)


@dataclass(frozen=True)
class ShardEntry:
    """One file of a store: its name, sha256 (hex) and size."""

    name: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class ConversationEntry:
    """Where a conversation lies, and what reading it must find.

    Args:
        shard: file name.
        split: "train" or "holdout".
        tokens: T.
        teacher_start: first position with a teacher state.
        supervised_tokens: assistant tokens, by the loss mask.
        token_sha256: of the token ids as int32 bytes.
    """

    shard: str
    split: str
    tokens: int
    teacher_start: int
    supervised_tokens: int
    token_sha256: str


@dataclass
class StoreManifest:
    """All that is known of a store without reading a tensor. `complete` turns true when the extraction has ended."""

    spec: StoreSpec
    shards: list[ShardEntry] = field(default_factory=list)
    conversations: dict[str, ConversationEntry] = field(default_factory=dict)
    complete: bool = False

    def save(self, directory: Path) -> None:
        value = {"format": FORMAT, "format_version": FORMAT_VERSION, "complete": self.complete, **asdict(self.spec)}
        value["shards"] = [asdict(s) for s in self.shards]
        value["conversations"] = {name: asdict(c) for name, c in self.conversations.items()}
        write_atomic(directory / MANIFEST, (json.dumps(value, indent=1) + "\n").encode())

    @classmethod
    def load(cls, directory: Path) -> "StoreManifest":
        """Raises SlipstreamError when there is no manifest, or not one of this format and version."""
        path = directory / MANIFEST
        try:
            value: dict[str, Any] = json.loads(path.read_text())
            found = f"{value['format']} version {value['format_version']}"
        except FileNotFoundError:
            raise SlipstreamError(f"{directory} has no {MANIFEST}", expected="a hidden-state store", do=AGAIN) from None
        except (ValueError, KeyError, TypeError) as error:
            raise SlipstreamError(f"{path} is not readable: {error!r}", expected="a manifest", do=AGAIN) from error
        known = f"{FORMAT} version {FORMAT_VERSION}"
        if found != known:
            raise SlipstreamError(f"{path} is {found}", expected=known, do=f"delete {directory} and {AGAIN}")
        spec = StoreSpec(
            identity=TargetIdentity(**value["identity"]),
            slots=tuple(value["slots"]),
            **{n: value[n] for n in ("teacher_slot", "hidden_size", "dtype", "prenorm")},
        )
        return cls(
            spec,
            [ShardEntry(**s) for s in value["shards"]],
            {name: ConversationEntry(**c) for name, c in value["conversations"].items()},
            value["complete"],
        )
