"""Serving replicas: one server on each host of a deployment, replaced one by one.

Each is taken out (it says so on /health, where the load balancer looks), answers what it has, is replaced by stage
launch, and joins once that has proven its successor. Where one does not come up, all go back to what served before.

    <workdir>/roll.json  here, from before the first server is touched until the end: how far it is, and the phase:
                         `rolling`: whoever finds it takes the roll back;  `done`: whoever finds it ends the marks

The hosts have marks of their own (tasks/roll_mark.py). Between the two a roll has one moment in which it is done: that
in which the phase is written. Stage restore and the next roll find what a killed one left.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import read_json
from slipstream.tasks.cleanup import refuse_left
from slipstream.tasks.hosts.far_stage import environment_python, run_far_stage, stop_far_stages
from slipstream.tasks.hosts.hand_over import ask_replica, hand_over, made_here, refuse_other_target
from slipstream.tasks.hosts.host import Host
from slipstream.tasks.hosts.open_host import each_deployment, open_host
from slipstream.tasks.manifest import write_json
from slipstream.tasks.reporting import Reporter
from slipstream.tasks.stage import StageResult

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

RECORD = "roll.json"
REPLICAS = "replicas"  # below the working directory here: what is fetched from the other hosts for people
RUNBOOK = "roll-replicas.md"
BEFORE, IN_TURN, REPLACED = "before", "in turn", "replaced"
ROLLING, DONE = "rolling", "done"
Turn = Callable[[str, Callable[[], None]], None]  # does one replica's turn, under a name


@dataclass(frozen=True)
class Replica:
    """One server of several that do the same.

    Args:
        host: where it runs.
        deployment: of this host alone.
        workdir: here, for what is fetched from it; its name is that of the run on every host.
        reporter: told what its stages tell.
    """

    host: Host
    deployment: "Deployment"
    workdir: Path
    reporter: Reporter

    @property
    def name(self) -> str:
        return self.host.name

    def run(self, stage: str) -> StageResult:
        """Runs a stage there and follows it to its end."""
        return run_far_stage(self.host, stage, self.deployment, self.workdir, self.reporter)

    def back(self) -> StageResult:
        """Stops what of the run's stages still runs there, and has what shall serve there serve."""
        self.stop_stages()
        return self.run("restore")

    def stop_stages(self) -> None:
        """Stops what of the run's stages still runs there."""
        for left in stop_far_stages(self.host, self.workdir, self.say):
            self.reporter.warn("roll", left.found)

    def mark(self, what: str) -> None:
        """`begin` or `end` of the mark of a roll there."""
        ask_replica(self.host, self.deployment, self.workdir, what)

    def say(self, text: str) -> None:
        """Tells people something about it."""
        self.reporter.say("roll", f"{self.name}: {text}", markup=False)


@dataclass
class Roll:
    """How far a roll is. Args: since: when it began; phase, hosts (name -> state): see the head of this file."""

    since: str
    hosts: dict[str, str]
    phase: str = ROLLING
    file: Path = field(default=Path(RECORD), repr=False)

    def note(self, **changes: str) -> None:
        """Writes how far it is, in one step."""
        self.phase = changes.pop("phase", self.phase)
        write_json(self.file, {key: value for key, value in asdict(self).items() if key != "file"})

    def __str__(self) -> str:
        return f"since {self.since}: " + ", ".join(f"{name} {state}" for name, state in self.hosts.items())


def read_roll(workdir: Path) -> Roll | None:
    """The roll that has begun and not ended; None where there is none. Raises SlipstreamError on a damaged record."""
    path = workdir / RECORD
    if not path.is_file():
        return None
    do = f"delete {path}, then `slipstream stage restore CONFIG` for each host by itself (--set host.address=...)"
    value = read_json(path, expected="how far a roll is", do=do)
    try:
        return Roll(str(value["since"]), dict(value["hosts"]), str(value["phase"]), path)
    except (KeyError, TypeError, ValueError) as error:
        raise SlipstreamError(
            f"{path} is not the record of a roll: {error!r}", expected="how far it is", do=do, runbook=RUNBOOK
        ) from error


@contextmanager
def open_replicas(deployment: "Deployment", workdir: Path, reporter: Reporter) -> Iterator[tuple[Replica, ...]]:
    """The replicas of a deployment, the first host's first. Connects when it is first asked."""
    with ExitStack() as stack:
        made = []
        for number, there in enumerate(each_deployment(deployment)):
            host = open_host(there)
            stack.callback(host.close)
            place = host.name.replace("/", "-").replace(":", "-")
            own = workdir / REPLICAS / place / workdir.name if number else workdir
            made.append(Replica(host, there, own, reporter))
        yield tuple(made)


def reach(replicas: Sequence[Replica]) -> None:
    """Every host answers, is provisioned, and is one. Raises SlipstreamError, before anything is touched.

    Raises HostUnreachable, which names the host, for one that does not answer.
    """
    port = replicas[0].deployment.server.port
    if len(replicas) < 2 or not port:
        found = "server.port is 0: each server would get another" if replicas[1:] else "the deployment has one host"
        raise SlipstreamError(
            f"there is nothing to roll: {found}",
            expected="several hosts (host.more), and a fixed server.port at which a load balancer finds each of them",
            do="name them; the one server of a deployment is replaced by flow serve",
            runbook=RUNBOOK,
        )
    seen: dict[tuple[str, str], str] = {}
    for replica in replicas:
        told = replica.host.hello()
        environment_python(replica.host)
        place = (str(told["boot_id"]), str(told["directory"]))
        if place in seen:
            raise SlipstreamError(
                f"{replica.name} and {seen[place]} are one host, with one directory",
                expected="a host of its own for each replica",
                do="correct host.more",
                runbook=RUNBOOK,
            )
        seen[place] = replica.name


def bring_draft(replicas: Sequence[Replica], workdir: Path) -> None:
    """Sees that what the first host made lies on all others, for their own target. Nothing is stopped or started."""
    first, *others = replicas
    made = made_here(first.host, first.deployment, workdir)
    stages = [name for name in made if name != "resolve"]
    for other in others:
        refuse_other_target(other.name, other.run("resolve").figures, made["resolve"])
        arrived = hand_over(first.host, other.host, stages, other.deployment, workdir, first.say)
        other.say(f"{', '.join(arrived)} of {first.name} lie here now" if arrived else "has what it needs already")


def roll(replicas: Sequence[Replica], workdir: Path, turn: Turn = lambda _, work: work()) -> list[dict[str, Any]]:
    """Replaces the servers one by one, so that all but one are in at every moment.

    Args:
        replicas: reached, and with the draft (`reach`, `bring_draft`).
        workdir: of the run here.
        turn: carries out each replica's turn.

    Returns for each host: host, base_url, model, pid of its new server, and A_1 of its smoke test.
    Raises what a stage raises; then the caller takes the roll back (`take_back`).
    """
    old = read_roll(workdir)
    if old is not None:
        _tell_interrupted(old, replicas)
        for replica in replicas:
            replica.stop_stages()
            if old.phase == DONE:  # what it replaced all with is what this one goes back to
                replica.mark("end")
    going = Roll(time.strftime("%Y-%m-%d %H:%M:%S"), {one.name: BEFORE for one in replicas}, file=workdir / RECORD)
    going.note()
    for replica in replicas:
        replica.mark("begin")
    rows: list[dict[str, Any]] = []
    for replica in replicas:

        def one(replica: Replica = replica) -> None:
            going.hosts[replica.name] = IN_TURN
            going.note()
            replica.run("drain")
            rows.append(_row(replica, replica.run("launch").figures))
            going.hosts[replica.name] = REPLACED
            going.note()

        turn(replica.name, one)
    going.note(phase=DONE)
    _end(replicas, workdir)
    return rows


def take_back(deployment: "Deployment", workdir: Path, reporter: Reporter) -> StageResult:
    """Brings the roll that has begun to an end: back, last replaced host first; forward where it was done already.

    Returns the result of stage restore on the first host. A host where that fails, or that does not answer, is told and
    keeps no other from it; then the record stays, and SlipstreamError is raised.
    """
    going = read_roll(workdir)
    assert going is not None
    failed: list[str] = []
    result: StageResult | None = None
    with open_replicas(deployment, workdir, reporter) as replicas:
        if going.phase == DONE:
            _end(replicas, workdir)
            return replicas[0].back()
        replicas[0].say(f"a roll has begun and not ended ({going}); every host goes back to what served before it")
        for replica in reversed(replicas):
            try:
                result = replica.back()
                going.hosts[replica.name] = BEFORE
                going.note()
            except SlipstreamError as error:
                failed.append(f"{replica.name}: {error.found}")
                reporter.warn("roll", f"{replica.name} is not back: {error.found}")
    if failed or result is None:
        raise SlipstreamError(
            "not every replica is back as before the roll: " + "; ".join(failed),
            expected="on each host the server of before; the others have it",
            do="`slipstream stage restore CONFIG` again, when that host answers",
            runbook=RUNBOOK,
        )
    (workdir / RECORD).unlink()
    return result


def stop_others(deployment: "Deployment", workdir: Path, reporter: Reporter) -> None:
    """A clean end of the servers on all hosts but the first, and of a roll that has begun. Raises as stage cleanup.

    Nothing happens where no roll has been there since the last such end. Whoever cannot be reached keeps no other from
    its end.
    """
    if not (workdir / REPLICAS).is_dir():
        return
    left = []
    with open_replicas(deployment, workdir, reporter) as replicas:
        for replica in replicas[1:]:
            try:
                replica.stop_stages()
                replica.run("cleanup")
            except SlipstreamError as error:
                left.append(error)
    refuse_left(left)
    (workdir / RECORD).unlink(missing_ok=True)
    shutil.rmtree(workdir / REPLICAS)  # nothing of ours serves there any more


def _tell_interrupted(old: Roll, replicas: Sequence[Replica]) -> None:
    names = {replica.name for replica in replicas}
    if old.phase == ROLLING and set(old.hosts) != names:
        raise SlipstreamError(
            f"a roll over other hosts has begun and not ended ({old})",
            expected=f"the hosts {', '.join(sorted(names))}",
            do="first `slipstream stage restore CONFIG` with the hosts of that roll",
            runbook=RUNBOOK,
        )
    how = "was interrupted; it begins anew" if old.phase == ROLLING else "had come to its end, but for its marks"
    replicas[0].say(f"the roll {old} {how}")


def _end(replicas: Sequence[Replica], workdir: Path) -> None:
    """A roll that is done: its marks go, the record last."""
    for replica in replicas:
        replica.mark("end")
    (workdir / RECORD).unlink()


def _row(replica: Replica, figures: dict[str, Any]) -> dict[str, Any]:
    acceptance = figures.get("smoke", {}).get("acceptance", {}).get("joint") or [{}]
    told = {key: figures.get(key) for key in ("base_url", "model", "pid")}
    return {"host": replica.name, **told, "first_step_rate": acceptance[0].get("rate")}
