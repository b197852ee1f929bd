"""What the facts of a host mean for one deployment: each finding with its consequence, and what to do about it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from slipstream.tasks.checks_machine import human_bytes

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

Severity = Literal["ok", "note", "warning", "error"]
MAX_SKEW_SECONDS = 2.0
MIN_FREE_DISK_BYTES = 10e9
MIN_SHARED_MEMORY_BYTES = 1e9  # a container's default of 64 MB ends NCCL and workers of loaders
MIN_OPEN_FILES = 4096
IDLE_CARD_BYTES = 1e9  # a display, a driver's own; more is somebody's
ENGINE_PYTHON = ((3, 11), (3, 12))
LEFT_OVER = "left-over-server.md"


@dataclass(frozen=True)
class HostFinding:
    """One thing about a host.

    Args:
        check: what was looked at.
        severity: an error stops this deployment; a warning costs it something; a note is good to know.
        found: what was found.
        consequence: what that means for this deployment.
        do: what to do, or "".
        fault: id of the incident's fault, or "".
        runbook: file name under `runbooks/`, or "".
    """

    check: str
    severity: Severity
    found: str
    consequence: str
    do: str = ""
    fault: str = ""
    runbook: str = ""


Facts = dict[str, Any]
Judge = Callable[[Facts, "Deployment"], Iterator[HostFinding]]


def judge(facts: Facts, deployment: "Deployment") -> list[HostFinding]:
    """Every finding, in the order of the checks; the worst ones are not sorted to the top."""
    return [finding for check in CHECKS for finding in check(facts, deployment)]


def _python(facts: Facts, deployment: "Deployment") -> Iterator[HostFinding]:
    version = tuple(map(int, facts["python"].split(".")[:2]))
    found = f"Python {facts['python']} as {deployment.host.python if deployment.host.kind == 'ssh' else 'this one'}"
    if ENGINE_PYTHON[0] <= version <= ENGINE_PYTHON[1]:
        yield HostFinding("python", "ok", found, "runs Slipstream's helper and can run its stages")
    else:
        yield HostFinding(
            "python", "warning", found, "runs the helper, but not the stages", "install Python 3.11 or 3.12 there"
        )


def _driver(facts: Facts, deployment: "Deployment") -> Iterator[HostFinding]:
    gpus, device = facts["gpus"], deployment.server.device
    if gpus is None or not gpus["cards"]:
        found = "no NVIDIA GPU whose driver answers"
        if device == "cuda":
            consequence, do = (
                "server.device is cuda: nothing can be served",
                "install the driver, or choose another host",
            )
            yield HostFinding("gpus", "error", found, consequence, do)
        else:
            yield HostFinding("gpus", "note", found, "everything runs on the CPU")
        return
    cards, ranks = gpus["cards"], deployment.server.tensor_parallel_size
    names = sorted({f"{card['name']} ({card['capability']}, {human_bytes(card['total_bytes'])})" for card in cards})
    found = f"{len(cards)} of {', '.join(names)}; driver {gpus['driver']}, CUDA up to {gpus['cuda']}"
    if len(cards) < ranks and device != "cpu":
        consequence = f"server.tensor_parallel_size {ranks} needs {ranks} cards"
        yield HostFinding("gpus", "error", found, consequence, "lower it, or choose another host")
    elif len(names) > 1 and ranks > 1:
        yield HostFinding("gpus", "warning", found, "cards differ: a step takes as long as on the slowest of them")
    else:
        yield HostFinding("gpus", "ok", found, f"enough for {ranks} rank{'s' * (ranks > 1)}")
    if facts["nvcc"] is None:
        consequence = "matrix products run in Triton, unless they were compiled before"
        yield HostFinding("nvcc", "warning", "no nvcc in the helper's PATH", consequence, "install CUDA's compiler")


def _gpu_users(facts: Facts, deployment: "Deployment") -> Iterator[HostFinding]:
    """F15: who is on the cards. Ours are stopped by `clean`; others are named and left alone."""
    for card in _cards(facts):
        where, used = f"GPU {card['index']}", f"{human_bytes(card['used_bytes'])} of {human_bytes(card['total_bytes'])}"
        foreign = [user for user in card["users"] if not user["ours"]]
        ours = [user for user in card["users"] if user["ours"]]
        if foreign:
            yield HostFinding(
                "gpu users",
                "error",
                f"{where}: {used} in use, by {'; '.join(map(_user, foreign))}",
                "not started from here: it is left alone, and its memory is missing for weights and KV cache",
                "ask its owner, or use other cards",
                "F15",
                LEFT_OVER,
            )
        elif ours:
            consequence = "jobs of ours: they are found again, and stopped on request"
            yield HostFinding(
                "gpu users", "note", f"{where}: {used} in use, by {'; '.join(map(_user, ours))}", consequence
            )
        elif card["used_bytes"] > IDLE_CARD_BYTES:
            yield HostFinding(
                "gpu users",
                "error",
                f"{where}: {used} in use, and the driver names nobody",
                "a process in another container, or a context that outlived its process: the memory is missing",
                "look on the host itself, outside of containers; a reset of the card is its owner's decision",
                "F15",
                LEFT_OVER,
            )
    if _cards(facts) and not any(card["users"] or card["used_bytes"] > IDLE_CARD_BYTES for card in _cards(facts)):
        yield HostFinding("gpu users", "ok", "nobody is on the cards", "all of their memory can be had")


def _topology(facts: Facts, deployment: "Deployment") -> Iterator[HostFinding]:
    ranks = deployment.server.tensor_parallel_size
    cards = _cards(facts)[:ranks]
    if ranks < 2 or len(cards) < ranks or deployment.server.device == "cpu":
        return
    chosen = {card["index"] for card in cards}
    ways = {way for card in cards for other, way in card["peers"].items() if int(other) in chosen}
    if ways == {"nvlink"}:
        yield HostFinding("topology", "ok", "NVLink between all cards", "sums over ranks go through peer memory")
    elif "host" not in ways:
        consequence = "sums over ranks go through peer memory over PCIe: a step with many ranks waits for them"
        yield HostFinding("topology", "note", "PCIe between cards, with peer access", consequence)
    else:
        yield HostFinding(
            "topology",
            "warning",
            "cards without access to each other's memory",
            "sums over ranks go through the host's memory: our own exchange cannot run, NCCL does, and slowly",
            "look at IOMMU and ACS in the host's BIOS, or use fewer ranks",
        )


def _health(facts: Facts, deployment: "Deployment") -> Iterator[HostFinding]:
    for card in _cards(facts):
        where = f"GPU {card['index']}"
        if card["uncorrected_ecc_errors"]:
            found = f"{where}: {card['uncorrected_ecc_errors']} uncorrected ECC errors since the driver was loaded"
            do = "drain it and have it reset; if they come back, have it replaced"
            yield HostFinding("ecc", "error", found, "weights or results in its memory may be wrong", do)
        if card["row_remap_failed"]:
            yield HostFinding("ecc", "error", f"{where}: a memory row could not be remapped", "have it replaced")
        elif card["row_remap_pending"]:
            found = f"{where}: a memory row waits to be remapped"
            yield HostFinding("ecc", "warning", found, "it is done at the next reset", "reset the card when it is idle")
        if card["persistence"] is False:
            found = f"{where}: persistence mode is off"
            yield HostFinding("persistence", "note", found, "the first start after idling takes seconds longer")
    if facts["gpus"] is not None and facts["xids"] is None:
        consequence = "errors of the driver (Xid) are not seen"
        yield HostFinding("xid", "note", "the kernel's log may not be read", consequence, "look there as root: dmesg")
    elif facts["xids"]:
        seen = ", ".join(sorted({f"{one['code']} on {one['device']}" for one in facts["xids"]}))
        consequence = "a card reported errors since the host was booted; 48, 63, 64 and 79 are its hardware"
        yield HostFinding(
            "xid", "warning", f"Xid {seen}", consequence, "look the code up in NVIDIA's catalog of Xid errors"
        )


def _disk(facts: Facts, deployment: "Deployment") -> Iterator[HostFinding]:
    disk = facts["disk"]
    found = f"{human_bytes(disk['free_bytes'])} of {human_bytes(disk['total_bytes'])} free at {disk['path']}"
    if disk["free_bytes"] < MIN_FREE_DISK_BYTES:
        do = "free space there, or set host.directory to a larger disk"
        yield HostFinding("disk", "warning", found, "hidden states alone take gigabytes", do, runbook="disk-full.md")
    else:
        yield HostFinding("disk", "ok", found, "`slipstream plan` says what a run will write")


def _shared_memory(facts: Facts, deployment: "Deployment") -> Iterator[HostFinding]:
    shared = facts["shared_memory"]
    if shared is None or shared["free_bytes"] < MIN_SHARED_MEMORY_BYTES:
        found = "no /dev/shm" if shared is None else f"{human_bytes(shared['free_bytes'])} free in /dev/shm"
        several = deployment.server.tensor_parallel_size > 1
        consequence = (
            "ranks cannot exchange through it: a start with several ends" if several else "one rank needs little"
        )
        do = "give the container more (--shm-size=8g), or empty it of what nobody uses" if several else ""
        yield HostFinding("shared memory", "error" if several else "note", found, consequence, do)
    else:
        yield HostFinding("shared memory", "ok", f"{human_bytes(shared['free_bytes'])} free in /dev/shm", "enough")
    left = [] if shared is None else [segment for segment in shared["segments"] if not segment["mapped"]]
    if left:
        size = human_bytes(sum(segment["bytes"] for segment in left))
        names = ", ".join(segment["name"] + ("" if segment["mine"] else " (another user's)") for segment in left[:5])
        consequence = "left by servers that were killed; when it is full, the next start ends"
        do = "delete those that are yours, once no server of yours runs"
        yield HostFinding("shared memory", "note", f"{size} that nobody visible maps: {names}", consequence, do)


def _port(facts: Facts, deployment: "Deployment") -> Iterator[HostFinding]:
    port = facts["port"]
    if port["free"]:
        found = "server.port is 0" if port["port"] == 0 else f"port {port['port']} is free"
        yield HostFinding("port", "ok", found, "a server can listen")
        return
    holders = ", ".join(port["holders"]) or port["problem"] or "a process that is not visible"
    do = "stop it if it is yours, or set server.port to another port (0: any free one)"
    found = f"port {port['port']} cannot be listened on: {holders}"
    yield HostFinding("port", "error", found, "the server cannot start; the holder is left alone", do, "F15", LEFT_OVER)


def _clock(facts: Facts, deployment: "Deployment") -> Iterator[HostFinding]:
    skew = facts["skew_seconds"]
    found = (
        f"its clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} ours" if skew else "its clock is ours"
    )
    if abs(skew) > MAX_SKEW_SECONDS:
        consequence = "times in logs of both machines cannot be compared"
        yield HostFinding("clock", "warning", found, consequence, "set both by NTP")
    else:
        yield HostFinding("clock", "ok", found, "times in logs of both machines can be compared")


def _limits(facts: Facts, deployment: "Deployment") -> Iterator[HostFinding]:
    soft, hard = facts["limits"]["nofile"]
    found = f"{'unlimited' if soft < 0 else soft} open files a process"
    if 0 <= soft < MIN_OPEN_FILES:
        consequence = "a server with many streams runs out of them"
        yield HostFinding("limits", "warning", found, consequence, f"ulimit -n {MIN_OPEN_FILES} (hard limit {hard})")
    else:
        yield HostFinding("limits", "ok", found, "enough for a server")


def _memory(facts: Facts, deployment: "Deployment") -> Iterator[HostFinding]:
    memory = facts["memory"]
    found = f"{human_bytes(memory['available_bytes'])} of {human_bytes(memory['total_bytes'])} available"
    yield HostFinding("memory", "ok", f"{found}, {facts['cores']} cores", "`slipstream plan` says what a stage takes")


def _locks(facts: Facts, deployment: "Deployment") -> Iterator[HostFinding]:
    for name, held in facts["locks"].items():
        if held:
            consequence = "a job of another owner that needs it is refused until they end"
            yield HostFinding("locks", "note", f"{name} is held by {', '.join(held)}", consequence)
        else:
            yield HostFinding("locks", "ok", f"nobody holds {name}", "a job can take it")


def _cards(facts: Facts) -> list[dict[str, Any]]:
    return [] if facts["gpus"] is None else list(facts["gpus"]["cards"])


def _user(user: dict[str, Any]) -> str:
    size = "" if user["used_bytes"] is None else f", {human_bytes(user['used_bytes'])}"
    if not user["visible"]:
        return f"process {user['pid']} of the host (not in our process table{size})"
    return f"process {user['pid']} of {user['user']} (`{user['command'][:80]}`{size})"


CHECKS: tuple[Judge, ...] = (
    _python,
    _driver,
    _gpu_users,
    _topology,
    _health,
    _memory,
    _disk,
    _shared_memory,
    _port,
    _locks,
    _limits,
    _clock,
)
