"""Stage cleanup: stop what this pipeline started, prove that it is gone, name the others and leave them alone (F15).

What we started is known from the state files in the workdir, by pid, start time, group and boot; a name is never
looked at. Everybody else is foreign, whatever it looks like. The same holds for shared memory: what our processes held
and nobody holds any more is removed, everything else stays. As a stage it is an end: no restore brings back what it
stopped, and what cannot be stopped, or is not known for a damaged record, keeps nothing else from its end. A launch
makes room with `clean` alone, and what it stops is brought back where it fails.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.gpu_memory import GpuMemory, read_gpu_memory, wait_gpu_memory
from slipstream.tasks.gpu_users import chosen_cards, describe_user, in_use
from slipstream.tasks.last_good import forget_last_good
from slipstream.tasks.manifest import read_json, write_json
from slipstream.tasks.nvml import GpuUser, read_gpus
from slipstream.tasks.ports import port_holders, port_is_free, wait_port_free
from slipstream.tasks.proc_stat import command_of, read_stat
from slipstream.tasks.process import (
    STATE_SUFFIX,
    ProcessIdentity,
    ProcessRecord,
    forget,
    group_members,
    read_record,
    stop_group,
)
from slipstream.tasks.registry import get_stage
from slipstream.tasks.roll_mark import end_roll
from slipstream.tasks.shared_memory import (
    Segment,
    forgotten,
    from_json,
    held_by_group,
    holders_of,
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
LEAVE_SUFFIX = ".leave"  # while it is there, the server tells whoever balances load to send no more (drain.py)
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
    """The stage: see the head of this file.

    Raises SlipstreamError, once everything else is stopped, that names all that was left: F15 for what of ours does not
    come back, and the records that cannot be read.
    """
    end_roll(context.workdir)
    left = forget_last_good(context.workdir)  # first: whoever is killed in the middle of an end has still ended it
    drain = context.config.server.shutdown_timeout_seconds
    stopped, not_stopped = stop_each(context.workdir, drain_seconds=drain, say=context.say)
    left += not_stopped
    _look_around(context.config, stopped, context.say)
    cards = read_gpu_memory()
    if cards is None:
        context.say("no NVIDIA GPU on this machine: no GPU memory to wait for")
    refuse_left(left)
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
    """Makes room: stops every process group that a state file in `workdir` names, and sees who else is in the way.

    Args:
        workdir: of the runs.
        deployment: says which port will be needed, and how long a server may take to end.
        say: told what was done.
        skip: faults whose checks are off.

    Who else holds the deployment's port is told and left alone: that, like others on a GPU, is the business of who
    needs it next (`check_port`, `check_gpus`). Raises SlipstreamError: before anything is stopped, when a state file is
    damaged; F15 when a port or memory of a GPU that was ours does not come back.
    """
    for state_file in _state_files(workdir):
        _readable(state_file)
    stopped, left = stop_each(workdir, drain_seconds=deployment.server.shutdown_timeout_seconds, say=say)
    refuse_left(left)
    _look_around(deployment, stopped, say, skip=skip)
    return stopped


def stop_each(
    workdir: Path, *, drain_seconds: float, say: Callable[[str], None], keep: ProcessIdentity | None = None
) -> tuple[list[Stopped], list[SlipstreamError]]:
    """Stops what each state file in `workdir` names, whatever becomes of the others.

    Args:
        workdir: of the runs.
        drain_seconds: how long a group may take to end.
        say: told what was done, and what was left.
        keep: the leader of a group that is left alone.

    Returns (what was stopped, why the others were left).
    """
    stopped, left = [], []
    for state_file in _state_files(workdir):
        try:
            record = _readable(state_file)
            if record is not None and record.identity == keep:
                continue
            one = stop_recorded(state_file, drain_seconds=drain_seconds)
        except SlipstreamError as error:
            left.append(error)
        except OSError as error:  # what the file system refuses: to read a record, or to remove that of a stopped group
            expected = "files in the workdir that can be read and removed"
            do = f"correct what the system refuses, then give `slipstream clean CONFIG` again for {state_file}"
            left.append(SlipstreamError(f"{state_file}: {error}", expected=expected, do=do))
        else:
            if one is not None:
                say(str(one))
                stopped.append(one)
    return stopped, left


def refuse_left(left: Sequence[SlipstreamError]) -> None:
    """Raises one SlipstreamError for all that was left; none for nothing."""
    if len(left) == 1:
        raise left[0]
    if left:
        numbered = list(enumerate(left, 1))
        raise SlipstreamError(
            f"{len(left)} things were left: " + "; ".join(f"({n}) {one.found}" for n, one in numbered),
            expected="; ".join(f"({n}) {one.expected}" for n, one in numbered),
            do="; ".join(f"({n}) {one.do}" for n, one in numbered),
            runbook="left-over-server.md",
            fault=next((one.fault for one in left if one.fault), ""),
        )


def _look_around(
    deployment: "Deployment", stopped: Sequence[Stopped], say: Callable[[str], None], skip: Collection[str] = ()
) -> None:
    """Tells who else is there: in shared memory, at the port."""
    if not stopped:
        say("nothing of ours was running")
    left = forgotten(read_segments())
    if left:
        say(f"left alone in shared memory, held by nobody and not recorded by us: {', '.join(map(str, left))}")
    try:
        check_port(deployment.server.host, deployment.server.port, skip=skip)
    except SlipstreamError as error:
        say(f"{error.found}: left alone; a launch there would be refused")


def stop_recorded(state_file: Path, *, drain_seconds: float) -> Stopped | None:
    """Stops the group that a state file names, and waits until its port and its GPU memory are free again.

    Returns None when there is no such file. The file is removed once the group is proven gone.
    Raises SlipstreamError: F15 when something does not come back; when a record of it is damaged.
    """
    record = _readable(state_file)
    if record is None:
        return None
    name = state_file.name.removesuffix(STATE_SUFFIX)
    ready_file = state_file.with_name(f"{name}{READY_SUFFIX}")
    address = _address(record, ready_file)
    members = [member.pid for member in group_members(record.identity)]
    ours, damaged = _held_segments(record, members), None
    lived = bool(members)
    report = stop_group(record.identity, drain_seconds=drain_seconds)
    try:
        ours += _noted_segments(record, state_file)
    except SlipstreamError as error:  # a reason to tell, none to leave anything
        damaged = error
    removed, _ = remove_unheld(ours)
    if address is not None and lived and not wait_port_free(*address, PORT_SECONDS):
        check_port(*address)
    _wait_for_gpus(record)
    ready_file.unlink(missing_ok=True)
    state_file.with_name(f"{name}{LEAVE_SUFFIX}").unlink(missing_ok=True)
    _segments_file(state_file).unlink(missing_ok=True)
    forget(state_file)
    if damaged is not None:
        raise damaged
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
        found = (*_noted_segments(record, state_file), *_held_segments(record, members))
        write_json(_segments_file(state_file), to_json({segment.key: segment for segment in found}.values()))


def segments_before() -> list[list[int]]:
    """For a state file's notes: what is in shared memory before a launch is not ours."""
    return [list(segment.key) for segment in read_segments()]


def _held_segments(record: ProcessRecord, members: list[int]) -> list[Segment]:
    """The shared memory that a group holds now; none where no launch noted what was there before."""
    before = record.notes.get(SEGMENTS_BEFORE)
    return [] if before is None else held_by_group(members, {(device, inode) for device, inode in before})


def _noted_segments(record: ProcessRecord, state_file: Path) -> list[Segment]:
    """The shared memory that a group held when it was noted. Raises SlipstreamError where the note is damaged."""
    file = _segments_file(state_file)
    if record.notes.get(SEGMENTS_BEFORE) is None or not file.is_file():
        return []
    try:
        return from_json(read_json(file))
    except (SlipstreamError, TypeError) as error:
        raise SlipstreamError(
            f"{file.name} of process {record.identity.pid} is damaged: what it left in shared memory is not known",
            expected="the list that its launch wrote",
            do="`slipstream doctor` names what nobody holds there: remove what is yours, once no server of yours runs",
            runbook="left-over-server.md",
        ) from error


def _state_files(workdir: Path) -> list[Path]:
    return sorted(workdir.glob(f"*{STATE_SUFFIX}"))


def _readable(state_file: Path) -> ProcessRecord | None:
    """The record; None when there is no file. A damaged one is an error that names who writes its log, unguessed."""
    try:
        return read_record(state_file)
    except SlipstreamError as error:
        log = state_file.with_name(state_file.name.removesuffix(STATE_SUFFIX) + ".log")
        found = [member for pid in holders_of(log) if (member := read_stat(pid)) is not None]
        who = "; ".join(f"process {one.pid} (`{command_of(one.pid)}`)" for one in found) or "nobody"
        groups = " ".join(f"-{group}" for group in sorted({one.pgid for one in found}))
        raise SlipstreamError(
            f"{error.found}; {log.name} is open in {who}",
            expected=error.expected,
            do=f"if that is what it should name, `kill -- {groups}`; then delete {state_file}" if found else error.do,
            runbook="left-over-server.md",
            fault="F15",
        ) from error


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
