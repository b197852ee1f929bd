"""Who is on the cards of a deployment, in words. Looks only; never touches a process."""

import os
from collections.abc import Mapping, Sequence

from slipstream.tasks.checks_machine import human_bytes
from slipstream.tasks.nvml import Gpu, GpuUser
from slipstream.tasks.proc_stat import command_of, read_stat, user_of

IDLE_CARD_BYTES = 1e9  # a display, a driver's own, a monitor; more is somebody's


def chosen_cards(cards: Sequence[Gpu], ranks: int, environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """The cards that a server of so many ranks runs on: the first ones, or those that CUDA_VISIBLE_DEVICES names."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(cards[:ranks])
    names = [name.strip() for name in visible.split(",") if name.strip()]
    by_name = {str(card.index): card for card in cards} | {card.uuid: card for card in cards}
    return [by_name[name] for name in names[:ranks] if name in by_name]


def describe_user(user: GpuUser) -> str:
    """`process 77 of ann: `python train.py` (40.0 GB)`, or what little can be said of another container's."""
    size = "memory unknown" if user.used_bytes is None else human_bytes(user.used_bytes)
    if read_stat(user.pid) is None:
        return f"process {user.pid} of the host (not in our process table, {size})"
    return f"process {user.pid} of {user_of(user.pid)}: `{command_of(user.pid)}` ({size})"


def in_use(card: Gpu) -> str:
    """What is on a card that is not ours to stop: "" while all of it but IDLE_CARD_BYTES is free."""
    if card.used_bytes <= IDLE_CARD_BYTES:
        return ""
    who = "; ".join(map(describe_user, card.users)) or "nobody whom the driver names: another container, or a context "
    who += "" if card.users else "that outlived its process"
    return f"GPU {card.index}: {human_bytes(card.used_bytes)} of {human_bytes(card.total_bytes)} in use, by {who}"
