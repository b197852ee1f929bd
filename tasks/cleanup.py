"""Stage cleanup: stop what this pipeline started, prove that it is gone, name the others and leave them alone (F15).

What we started is known from the state files in the workdir, by pid, start time, group and boot; a name is never
looked at. Everybody else is foreign, whatever it looks like. The same holds for shared memory: what our processes held
and nobody holds any more is removed, everything else stays. As a stage it is an end: no restore brings back what it
stopped; a launch makes room with `clean` alone, and what it stops is brought back where it fails.
"""

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.gpu_memory import GpuMemory, read_gpu_memory, wait_gpu_memory
from slipstream.tasks.gpu_users import chosen_cards, describe_user, in_use
from slipstream.tasks.last_good import no_longer_wanted
from slipstream.tasks.manifest import read_json, write_json
from slipstream.tasks.nvml import GpuUser, read_gpus
from slipstream.tasks.ports import port_holders, port_is_free, wait_port_free
from slipstream.tasks.process import STATE_SUFFIX, ProcessRecord, forget, group_members, read_record, stop_group
from slipstream.tasks.registry import get_stage
from slipstream.tasks.shared_memory import (
    Segment,
    forgotten,
    from_json,
    held_by_group,
    read_segments,
    remove_unheld,
    to_json,
)
from slipstream.tasks.stage import StageContext

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

PORT_SECONDS = 10.0
GPU_SECONDS = 100.0
READY_SUFFIX = ".ready.json"  # written by the server itself: which port it got
SEGMENTS_SUFFIX = ".segments.json"  # the shared memory that a server held when it was ready
SEGMENTS_BEFORE = "segments_before"  # key of a state file's notes: device and inode of all that was there at the launch


@dataclass(frozen=True)
class Stopped:
    """A process group that was ours.

    Args:
        name: of its state file.
        pid: of its leader.
        command: of its leader.
        ended, killed: pids that left after SIGTERM, and those that needed SIGKILL; both empty when it was gone already.
        seconds: what stopping took.
        segments: shared memory that it left, and that was removed.
    """

    name: str
    pid: int
    command: str
    ended: tuple[int, ...]
    killed: tuple[int, ...]
    seconds: float
    segments: tuple[str, ...] = ()

    def __str__(self) -> str:
        left = f"; removed the shared memory that it left: {', '.join(self.segments)}" if self.segments else ""
        if not self.ended and not self.killed:
            return f"{self.name} (pid {self.pid}) was gone already{left}"
        how = f", {len(self.killed)} by SIGKILL" if self.killed else ""
        return f"stopped {self.name} (pid {self.pid}, {len(self.ended + self.killed)} processes{how}){left}"


def run(context: StageContext) -> dict[str, Any]:
    """The stage: see the head of this file. Raises SlipstreamError (F15) when something of ours does not come back."""
    no_longer_wanted(context.workdir)  # first: whoever is killed in the middle of an end has still ended it
    stopped = clean(context.workdir, context.config, say=context.say)
    cards = read_gpu_memory()
    if cards is None:
        context.say("no NVIDIA GPU on this machine: no GPU memory to wait for")
    return {
        "stopped": [asdict(one) for one in stopped],
        "gpu_memory_bytes": None if cards is None else {str(card.index): card.used_bytes for card in cards},
    }


def clean(
    workdir: Path,
    deployment: "Deployment",
    *,
    say: Callable[[str], None] = lambda _: None,
    skip: Collection[str] = (),
) -> list[Stopped]:
    """Stops every process group that a state file in `workdir` names, and sees that nobody else is in the way.

    Args:
        workdir: of the runs.
        deployment: says which port will be needed, and how long a server may take to end.
        say: told what was done.
        skip: faults whose checks are off.

    Who else holds the deployment's port is told and left alone: that, like others on a GPU, is the business of who
    needs it next (`check_port`, `check_gpus`). Raises SlipstreamError: F15 when a port or memory of a GPU that was ours
    does not come back.
    """
    stopped = []
    for state_file in sorted(workdir.glob(f"*{STATE_SUFFIX}")):
        one = stop_recorded(state_file, drain_seconds=deployment.server.shutdown_timeout_seconds)
        if one is not None:
            say(str(one))
            stopped.append(one)
    if not stopped:
        say("nothing of ours was running")
    left = forgotten(read_segments())
    if left:
        say(f"left alone in shared memory, held by nobody and not recorded by us: {', '.join(map(str, left))}")
    try:
        check_port(deployment.server.host, deployment.server.port, skip=skip)
    except SlipstreamError as error:
        say(f"{error.found}: left alone; a launch there would be refused")
    return stopped


def stop_recorded(state_file: Path, *, drain_seconds: float) -> Stopped | None:
    """Stops the group that a state file names, and waits until its port and its GPU memory are free again.

    Returns None when there is no such file. The file is removed once the group is proven gone.
    """
    record = read_record(state_file)
    if record is None:
        return None
    name = state_file.name.removesuffix(STATE_SUFFIX)
    ready_file = state_file.with_name(f"{name}{READY_SUFFIX}")
    address = _address(record, ready_file)
    members = [member.pid for member in group_members(record.identity)]
    ours = _our_segments(record, state_file, members)
    lived = bool(members)
    report = stop_group(record.identity, drain_seconds=drain_seconds)
    removed, _ = remove_unheld(ours)
    if address is not None and lived and not wait_port_free(*address, PORT_SECONDS):
        check_port(*address)
    _wait_for_gpus(record)
    ready_file.unlink(missing_ok=True)
    _segments_file(state_file).unlink(missing_ok=True)
    forget(state_file)
    return Stopped(
        name,
        record.identity.pid,
        " ".join(record.command),
        report.ended,
        report.killed,
        round(report.seconds, 3),
        tuple(map(str, removed)),
    )


def read_ready(ready_file: Path) -> dict[str, Any] | None:
    """What a server wrote of itself when it listened: host, port, url; None where it has not, or where it is damaged.

    A damaged one keeps nobody from stopping its server.
    """
    try:
        state = read_json(ready_file)
    except (FileNotFoundError, SlipstreamError):
        return None
    return state if isinstance(state, dict) and {"host", "port", "url"} <= state.keys() else None


def note_segments(state_file: Path) -> None:
    """Notes the shared memory that a started group holds now: of one that is killed later nobody else can tell."""
    record = read_record(state_file)
    if record is not None:
        members = [member.pid for member in group_members(record.identity)]
        write_json(_segments_file(state_file), to_json(_our_segments(record, state_file, members)))


def segments_before() -> list[list[int]]:
    """For a state file's notes: what is in shared memory before a launch is not ours."""
    return [list(segment.key) for segment in read_segments()]


def _our_segments(record: ProcessRecord, state_file: Path, members: list[int]) -> list[Segment]:
    """The shared memory that a group holds now or held when it was noted; none where no launch noted what was there."""
    before = record.notes.get(SEGMENTS_BEFORE)
    if before is None:
        return []
    file = _segments_file(state_file)
    noted = from_json(read_json(file)) if file.is_file() else []
    now = held_by_group(members, {(device, inode) for device, inode in before})
    return list({segment.key: segment for segment in (*noted, *now)}.values())


def _segments_file(state_file: Path) -> Path:
    return state_file.with_name(state_file.name.removesuffix(STATE_SUFFIX) + SEGMENTS_SUFFIX)


def check_port(host: str, port: int, *, skip: Collection[str] = ()) -> None:
    """Raises SlipstreamError (F15), naming who holds it, when `port` cannot be listened on. Port 0 is always free."""
    if port == 0 or "F15" in skip or port_is_free(host, port):
        return
    holders = port_holders(port)
    raise SlipstreamError(
        f"port {port} of {host} is held by " + (", ".join(map(str, holders)) or "a process that is not visible to us"),
        expected="a free port; this pipeline did not start what holds it, and leaves it alone",
        do="stop it yourself if it is yours, or set server.port to another port (0: any free one)",
        runbook="left-over-server.md",
        fault="F15",
    )


def check_gpus(deployment: "Deployment", *, skip: Collection[str] = ()) -> None:
    """Raises SlipstreamError (F15), naming who is there, when a card that the deployment needs is in use."""
    server = deployment.server
    found = None if server.device == "cpu" or "F15" in skip else read_gpus()
    busy = [
        words
        for card in chosen_cards(found.cards if found else (), server.tensor_parallel_size)
        if (words := in_use(card))
    ]
    if busy:
        raise SlipstreamError(
            "; ".join(busy),
            expected="cards that nobody is on: this pipeline did not start them, and leaves them alone",
            do="ask their owners, or choose other cards with CUDA_VISIBLE_DEVICES",
            runbook="gpu-memory-not-freed.md",
            fault="F15",
        )


def gpu_baseline() -> list[dict[str, Any]] | None:
    """GPU memory in use before a launch, as JSON for the notes of a state file; None without a GPU."""
    cards = read_gpu_memory()
    return None if cards is None else [asdict(card) for card in cards]


def _wait_for_gpus(record: ProcessRecord) -> None:
    """Waits until memory is back where it was before the launch; the driver frees it a while after the process."""
    noted = record.notes.get("gpu_baseline")
    if noted is None:
        return
    baseline = [GpuMemory(card["index"], card["used_bytes"], tuple(card["pids"])) for card in noted]
    above = wait_gpu_memory(baseline, GPU_SECONDS)
    if above:
        users = sorted({pid for card in above for pid in card.pids})
        who = "; ".join(describe_user(GpuUser(pid, None)) for pid in users) or "nobody"
        raise SlipstreamError(
            f"memory of GPUs {[card.index for card in above]} is not back {GPU_SECONDS:.0f} s after our server ended: "
            + ", ".join(f"GPU {card.index} {card.used_bytes / 1e9:.1f} GB" for card in above),
            expected="the use from before the launch",
            do=f"the driver names {who}; none of ours is left, and they are left alone",
            runbook="gpu-memory-not-freed.md",
            fault="F15",
        )


def _address(record: ProcessRecord, ready_file: Path) -> tuple[str, int] | None:
    """Host and port that a server got, from its own state file, else from the notes; None when it never got one."""
    state = read_ready(ready_file)
    if state is not None:
        return str(state["host"]), int(state["port"])
    port = int(record.notes.get("port", 0))
    return (str(record.notes["host"]), port) if port else None


STAGE = get_stage("cleanup")
