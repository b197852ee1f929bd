"""The train stage over all hosts of a fleet: the stage on the first one, its nodes as jobs on the others.

Each other host gets a part of the first one's store: shards that it extracted itself are linked, others carried, all
compared by SHA-256. The ranks of all hosts meet at the first one; the draft ends there. Where one host is lost the
others are stopped, and the same command goes on from the last checkpoint.

    runs/RUN.meeting.json (first host)    runs/RUN.train-part/ (others: shards, manifest last)    job RUN-train-node-I
"""

import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.store_manifest import StoreManifest
from slipstream.tasks.hosts.far_look import far_looks
from slipstream.tasks.hosts.far_stage import RUNS, environment_python, owner_of, run_far_stage, run_name, stage_job
from slipstream.tasks.hosts.follow import follow
from slipstream.tasks.hosts.host import Host, HostUnreachable, Job, JobStatus
from slipstream.tasks.hosts.host_lock import GPU_LOCK
from slipstream.tasks.hosts.open_host import each_deployment, open_host
from slipstream.tasks.hosts.provision import CURRENT
from slipstream.tasks.hosts.store_parts import Say, lay_parts, part_path, store_path
from slipstream.tasks.manifest import write_json
from slipstream.tasks.reporting import NullReporter, Reporter
from slipstream.tasks.shares import STORE_MANIFEST
from slipstream.tasks.stage import StageResult
from slipstream.tasks.torchrun import Launch, Meeting
from slipstream.tasks.train_ranks import MEETING, threads_of
from slipstream.tasks.train_words import LOST_OTHERS, Heard

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

# Whether ports of a host can be reached: one where nobody listens answers that, too. Arguments: address, ports.
REACH = """
import socket, sys
for port in map(int, sys.argv[2:]):
    try:
        socket.create_connection((sys.argv[1], port), 5).close()
    except ConnectionRefusedError:
        pass
    except OSError as error:
        sys.exit(f"{sys.argv[1]}:{port}: {error}")
"""
A_KERNELS_PORT = 47_000  # in the range from which kernels give out ports
STAGE = "train"
NODE = "train-node"
# How long one side's own words are waited for where the other only missed it: logs are read every few seconds.
WORDS_SECONDS = 15.0


@dataclass(frozen=True)
class _Node:
    """A host after the first. Args: number: from 1; job: of its ranks."""

    number: int
    host: Host
    deployment: "Deployment"
    job: str


def train_over_hosts(
    host: Host, deployment: "Deployment", workdir: Path, reporter: Reporter, *, force: bool = False
) -> StageResult:
    """Runs the train stage on all hosts of the deployment, or finds it running there, and follows it to its end.

    Args and errors: as `run_far_stage`, with these: a host that cannot be reached for host.reconnect_seconds, or whose
    ranks end, ends the stage, by an error that names it, and is stopped on all others. An interruption leaves the jobs
    running everywhere.
    """
    name = run_name(workdir)

    def say(text: str) -> None:
        reporter.say(STAGE, text, markup=False)

    workdir.mkdir(parents=True, exist_ok=True)
    with _opened(deployment, name) as nodes, tempfile.TemporaryDirectory(dir=workdir) as temporary:
        if not force and far_looks(host, (STAGE,), deployment, workdir)[0].done:
            return run_far_stage(host, STAGE, deployment, workdir, reporter)
        _check_environments(host, nodes)
        meeting = _meeting(deployment)
        env = {MEETING: f"{host.directory}/{RUNS}/{name}.meeting.json"}
        if not _runs_everywhere(host, name, nodes):
            for each, job in ((host, stage_job(name, STAGE)), *((node.host, node.job) for node in nodes)):
                each.stop(job)
            store = _store_of(host, name, Path(temporary))
            if store is None:  # the stage says what is missing
                return run_far_stage(host, STAGE, deployment, workdir, reporter, force=force)
            _check_ways(nodes, meeting)
            others = [node.host for node in nodes]
            parts = lay_parts(host, others, store, deployment, workdir, Path(temporary), say)
            path = Path(temporary) / "meeting.json"
            write_json(path, {**vars(meeting), "parts": parts})
            host.put(path, f"{RUNS}/{name}.meeting.json")
            _start(nodes, meeting, name)
        with _watched(nodes, deployment, workdir, say) as watch:
            try:
                return run_far_stage(host, STAGE, deployment, workdir, reporter, force=force, env=env)
            except SlipstreamError as error:
                raise watch.why(error) from error


def stop_nodes(deployment: "Deployment", workdir: Path, say: Say) -> None:
    """Stops this run's training on every host after the first that can be reached; of the others it is told."""
    prefix = f"{run_name(workdir)}-{NODE}-"
    for there in each_deployment(deployment)[1:]:
        host = open_host(_impatient(there))
        try:
            for status in host.jobs(prefix):
                if status.members:
                    host.stop(status.name)
                    say(f"stopped {status.name} on {host.name}")
        except HostUnreachable as error:
            say(f"{error.found}: what trains there goes on, until its ranks miss the others")
        finally:
            host.close()


def _impatient(deployment: "Deployment") -> "Deployment":
    """With a host that is not waited for."""
    return deployment.model_copy(update={"host": deployment.host.model_copy(update={"reconnect_seconds": 0})})


@contextmanager
def _opened(deployment: "Deployment", name: str) -> Iterator[list[_Node]]:
    nodes = [
        _Node(number, open_host(there), there, f"{name}-{NODE}-{number}")
        for number, there in enumerate(each_deployment(deployment)[1:], start=1)
    ]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.host.close()


def _meeting(deployment: "Deployment") -> Meeting:
    training, host = deployment.training, deployment.host
    address = training.rendezvous_address or host.address
    assert address is not None  # kind ssh has one
    return Meeting(address, training.rendezvous_port, len(host.each))


def _check_environments(host: Host, nodes: Sequence[_Node]) -> None:
    """Raises SlipstreamError where a host has another Slipstream, or other packages, than the first."""
    environment_python(host)
    keys = {each.name: (each.read_json(CURRENT) or {}).get("key") for each in (host, *(node.host for node in nodes))}
    if len(set(keys.values())) > 1:
        told = ", ".join(f"{name} has {key or 'none'}" for name, key in keys.items())
        raise SlipstreamError(
            f"the hosts' environments differ: {told}",
            expected="one Slipstream on all hosts that train together",
            do="run `slipstream host provision CONFIG`",
            runbook="first-deployment.md",
        )


def _check_ways(nodes: Sequence[_Node], meeting: Meeting) -> None:
    """Raises SlipstreamError where a host cannot reach the first one: its ranks would wait for half an hour."""
    for node in nodes:
        command = (node.deployment.host.python, "-c", REACH, meeting.address, str(meeting.port), str(A_KERNELS_PORT))
        done = node.host.run(command)
        if done.exit_code:
            raise SlipstreamError(
                f"{node.host.name} does not reach the first host at {done.stderr.strip()[-200:]}",
                expected="an open way between all hosts that train together",
                do="set training.rendezvous_address to an address that it reaches; open the ports that "
                "training.hosts needs (its description says which), or train on the first host alone",
                runbook="host-unreachable.md",
            )


def _runs_everywhere(host: Host, name: str, nodes: Sequence[_Node]) -> bool:
    """Whether the stage runs on the first host and each other host's ranks run, or have done all they had to."""

    def whole(status: JobStatus | None) -> bool:
        return status is not None and (status.state == "running" or status.exit_code == 0)

    first = host.status(stage_job(name, STAGE))
    if first is None or first.state != "running":
        return False
    return all(whole(node.host.status(node.job)) for node in nodes)


def _store_of(host: Host, name: str, folder: Path) -> StoreManifest | None:
    """The manifest of the first host's store; None where there is none yet."""
    path = f"{store_path(name)}/{STORE_MANIFEST}"
    if host.file_facts(path) is None:
        return None
    host.get(path, folder / STORE_MANIFEST)
    return StoreManifest.load(folder)


def _start(nodes: Sequence[_Node], meeting: Meeting, name: str) -> None:
    token = f"{time.time():.3f}"  # these ranks belong to this start alone
    for node in nodes:
        training, threads = node.deployment.training, node.deployment.host.threads
        count = training.processes if isinstance(training.processes, int) else 1
        store = f"{node.host.directory}/{part_path(name)}"
        each = threads_of(threads, count) if training.processes != "auto" else None
        launch = Launch(training.processes, training.device, node.number, meeting, store, each, None)
        command = (environment_python(node.host), "-P", "-m", "slipstream.tasks.torchrun", launch.to_json())
        node.host.start(Job(node.job, command, run=token, owner=owner_of(name), locks=(GPU_LOCK,)))


class _Watch:
    """Threads that follow the nodes' jobs, and end the stage on the first host where one is lost or ends badly."""

    def __init__(self, nodes: Sequence[_Node], deployment: "Deployment", workdir: Path) -> None:
        self._first, self._stage = _impatient(each_deployment(deployment)[0]), stage_job(run_name(workdir), STAGE)
        self._found, self._over = threading.Condition(), threading.Event()
        self._problems: list[tuple[SlipstreamError, bool]] = []  # and whether it began there
        self._threads = [threading.Thread(target=self._follow, args=(node,), daemon=True) for node in nodes]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """The stage has ended, well or badly."""
        self._over.set()

    def join(self) -> None:
        """Waits for the nodes' ends, for a while."""
        deadline = time.monotonic() + WORDS_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def why(self, error: SlipstreamError) -> SlipstreamError:
        """What began it: a lost host, a rank of another host that ended by itself, or the stage's own error."""
        self.end()
        with self._found:
            if LOST_OTHERS in error.found:
                self._found.wait_for(lambda: self._problems, WORDS_SECONDS)
            problems = list(self._problems)
        lost = [problem for problem in (error, *(one for one, _ in problems)) if isinstance(problem, HostUnreachable)]
        if lost:
            return SlipstreamError(
                f"a host was lost while all trained: {lost[0].found}; the others were stopped",
                expected="all hosts reachable: each computes a part of every batch",
                do="see what became of it, then give the same command again: it goes on from the last checkpoint. "
                "Others than the first can be left out: of host.more, or by training.hosts: first",
                runbook="host-unreachable.md",
            )
        return next((problem for problem, began in problems if began), error)

    def _follow(self, node: _Node) -> None:
        words = Heard(NullReporter(), f" on {node.host.name}")

        def line(text: str) -> None:
            words.line(text)

        try:
            status = node.host.status(node.job)
            ended = None if status is None else follow(node.host, status, line)
            if ended is not None and ended.exit_code == 0:
                return
            problem, began = words.error(), words.culprit
        except SlipstreamError as error:
            problem, began = error, True
        if not began and self._over.wait(WORDS_SECONDS):
            return  # it missed the first host, whose stage has said why
        with self._found:
            self._problems.append((problem, began))
            self._found.notify_all()
        if not self._over.is_set():
            self.stop_stage()

    def stop_stage(self) -> None:
        """Ends the stage on the first host, if it runs and that can be reached."""
        host = open_host(self._first)  # the other one may be busy following the stage
        try:
            host.stop(self._stage, drain_seconds=2.0)
        except HostUnreachable:
            pass  # whoever follows the stage finds that out, too
        finally:
            host.close()


@contextmanager
def _watched(nodes: Sequence[_Node], deployment: "Deployment", workdir: Path, say: Say) -> Iterator[_Watch]:
    """Follows the nodes. After the stage's end, well or badly, none of its jobs is left where it can be reached; an
    interruption leaves them all."""
    watch = _Watch(nodes, deployment, workdir)
    try:
        yield watch
    except Exception:
        watch.stop_stage()
        stop_nodes(deployment, workdir, say)
        raise
    finally:
        watch.end()
    watch.join()
    stop_nodes(deployment, workdir, say)
