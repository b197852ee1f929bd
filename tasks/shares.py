"""Shares of the prompts that several hosts answer and extract: which are whose, and how the whole is put together.

A share is a run of its own (`data.share`), on a host of its own. What it wrote is laid below the whole run's directory,
where the stages `regenerate` and `extract` take it as work that is done:

    WORKDIR/shares/DIGEST/I-of-N/  conversations.jsonl  store/
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from slipstream.engine.files import sha256_file
from slipstream.tasks.conversations import CONVERSATIONS, ConversationRecord, read_conversations
from slipstream.tasks.facts import prompts_path
from slipstream.tasks.manifest import digest

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

SHARES = "shares"
STORE = "store"
STORE_MANIFEST = "manifest.json"  # of a store; it is laid last: a store without one is not whole
T = TypeVar("T")


def of_share(items: Sequence[T], share: tuple[int, int]) -> list[T]:
    """Every n-th item from the i-th on."""
    first, step = share
    return list(items[first::step])


def shares_folder(deployment: "Deployment") -> str:
    """The folder below a working directory for shares of this deployment: all that decides what is in them names it."""
    values = deployment.model_dump(mode="json")
    prompts = sha256_file(prompts_path(deployment.data.prompts))  # by content: its path differs from host to host
    data = {key: value for key, value in values["data"].items() if key not in ("share", "prompts", "batch_size")}
    server = {key: values["server"][key] for key in ("dtype", "max_context_tokens")}
    made_of = [values["target"], prompts, data, values["capture"], server]
    return f"{SHARES}/{digest(made_of)[:16]}"


def share_name(share: tuple[int, int]) -> str:
    return f"{share[0]}-of-{share[1]}"


def done_conversations(deployment: "Deployment", workdir: Path) -> dict[str, ConversationRecord]:
    """The conversations of all shares that were laid below `workdir`, by id."""
    found = (read_conversations(folder / CONVERSATIONS) for folder in _folders(deployment, workdir, CONVERSATIONS))
    return {record.id: record for records in found for record in records}


def done_stores(deployment: "Deployment", workdir: Path) -> list[Path]:
    """The hidden-state stores of all shares that were laid below `workdir`."""
    return list(_folders(deployment, workdir, f"{STORE}/{STORE_MANIFEST}"))


def _folders(deployment: "Deployment", workdir: Path, holding: str) -> Iterator[Path]:
    return (path.parent for path in sorted((workdir / shares_folder(deployment)).glob(f"*/{holding}")))
