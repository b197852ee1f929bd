"""What a host is and what is on it right now, as JSON. Runs there, out of the archive; looks and changes nothing."""

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipstream.tasks.hosts.host_lock import holders
from slipstream.tasks.nvml import read_gpus
from slipstream.tasks.ports import port_holders, port_is_free
from slipstream.tasks.proc_stat import boot_id, command_of, read_stat, user_of
from slipstream.tasks.process import our_processes
from slipstream.tasks.shared_memory import FOLDER, KNOWN_NAMES, held, read_segments

XID = re.compile(r"NVRM: Xid \((?P<device>[^)]*)\): (?P<code>\d+)")
DMESG_SECONDS = 5.0


def machine_facts(
    base: Path, *, address: str, port: int, lock_folder: str, lock_names: list[str], nvml: str
) -> dict[str, Any]:
    """Everything that `doctor` judges.

    Args:
        base: Slipstream's directory on this host.
        address, port: that a server will listen on; port 0 is any free one.
        lock_folder, lock_names: of the host's locks.
        nvml: the driver's management library.
    """
    ours = our_processes(base)
    return {
        "time": time.time(),
        "host": socket.gethostname(),
        "boot_id": boot_id(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "nvcc": shutil.which("nvcc") or next((p for p in ("/usr/local/cuda/bin/nvcc",) if os.path.exists(p)), None),
        "memory": _memory(),
        "disk": _disk(base),
        "shared_memory": _shared_memory(),
        "port": _port(address, port),
        "limits": {
            name: list(resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}")))
            for name in ("nofile", "memlock")
        },
        "gpus": _gpus(nvml, ours),
        "xids": _xids(),
        "locks": {name: [str(holder) for holder in holders(Path(lock_folder), name)] for name in lock_names},
    }


def _gpus(library: str, ours: set[int]) -> dict[str, Any] | None:
    """The cards, each user with its command as far as our own process table shows it: the driver knows the host's."""
    found = read_gpus(library)
    if found is None:
        return None
    cards = []
    for card in found.cards:
        users = [
            {
                **asdict(user),
                "ours": user.pid in ours,
                "visible": read_stat(user.pid) is not None,
                "command": command_of(user.pid),
                "user": user_of(user.pid),
            }
            for user in card.users
        ]
        cards.append({**asdict(card), "users": users})
    return {"driver": found.driver, "cuda": found.cuda, "cards": cards}


def _memory() -> dict[str, int]:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return {
        "total_bytes": int(lines["MemTotal"].split()[0]) * 1024,
        "available_bytes": int(lines["MemAvailable"].split()[0]) * 1024,
    }


def _disk(path: Path) -> dict[str, Any]:
    usage = shutil.disk_usage(path)
    return {"path": str(path), "total_bytes": usage.total, "free_bytes": usage.free}


def _shared_memory() -> dict[str, Any] | None:
    if not os.path.isdir(FOLDER):
        return None
    usage = shutil.disk_usage(FOLDER)
    named = [one for one in read_segments() if one.name.startswith(KNOWN_NAMES)]
    holders = held(named)
    left = [
        {"name": one.name, "bytes": one.bytes, "mine": one.uid == os.getuid(), "mapped": one.key in holders}
        for one in named
    ]
    return {"total_bytes": usage.total, "free_bytes": usage.free, "segments": left}


def _port(address: str, port: int) -> dict[str, Any]:
    if port == 0:
        return {"port": 0, "free": True, "holders": [], "problem": ""}
    try:
        free, problem = port_is_free(address, port), ""
    except OSError as error:
        free, problem = False, error.strerror or str(error)
    return {"port": port, "free": free, "holders": [str(one) for one in port_holders(port)], "problem": problem}


def _xids() -> list[dict[str, Any]] | None:
    """Errors that the driver wrote to the kernel's log since boot; None where we may not read it."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, timeout=DMESG_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    found = XID.finditer(done.stdout.decode(errors="replace"))
    return [{"device": one["device"], "code": int(one["code"])} for one in found]
