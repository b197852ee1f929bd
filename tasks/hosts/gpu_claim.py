"""Who has this machine's GPUs: a server holds the host's lock on them for as long as it lives, however it was started.

In a job of a far host the job's locks pass on to it; else it takes the lock itself, on a machine that has GPUs.
"""

import getpass
import os
import socket
from pathlib import Path

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.gpu_memory import read_gpu_memory
from slipstream.tasks.hosts.host_lock import GPU_LOCK, HELD, LOCK_FOLDER, hold_too, holder_of, holders, take_locks
from slipstream.tasks.process import ProcessIdentity


def refuse_held_gpus(workdir: Path, folder: str = LOCK_FOLDER) -> None:
    """Raises SlipstreamError (F15), naming the holder, when another deployment has the GPUs of this machine."""
    if HELD in os.environ or read_gpu_memory() is None:
        return  # our job was let in when it began; without GPUs there is nothing to hold
    others = [holder for holder in holders(Path(folder), GPU_LOCK) if holder.owner != owner_of(workdir)]
    if others:
        raise SlipstreamError(
            f"the GPUs of this machine are held by {', '.join(map(str, others))}",
            expected=f"that nobody but {owner_of(workdir)} uses them",
            do="wait for its end, or ask its owner to stop it; nothing was started",
            runbook="left-over-server.md",
            fault="F15",
        )


def hold_gpus(workdir: Path, identity: ProcessIdentity, folder: str = LOCK_FOLDER) -> None:
    """Makes a server that was just started a holder. Raises SlipstreamError (F15) when another one was faster."""
    if hold_too(identity) or read_gpu_memory() is None:
        return
    take_locks(Path(folder), (GPU_LOCK,), holder_of(owner_of(workdir), f"{workdir.name}-server", identity))


def owner_of(workdir: Path) -> str:
    """Whose locks they are: this user's, on this machine, for this working directory."""
    return f"{getpass.getuser()}@{socket.gethostname()}:{workdir.absolute()}"
