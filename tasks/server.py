"""One server of a deployment: start it, wait until it is healthy, prove that it is what was asked for, stop it."""

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from slipstream.engine.acceptance import AcceptanceCounts
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.handover import Difference, refuse, slot_differences
from slipstream.tasks.cleanup import (
    READY_SUFFIX,
    SEGMENTS_BEFORE,
    check_port,
    gpu_baseline,
    note_segments,
    read_ready,
    segments_before,
    stop_recorded,
)
from slipstream.tasks.counters import read_counters, read_settings
from slipstream.tasks.drain import join, leave, leave_file, read_health
from slipstream.tasks.facts import DRAFT, resolved_target
from slipstream.tasks.hosts.gpu_claim import hold_gpus, refuse_held_gpus
from slipstream.tasks.process import STATE_SUFFIX, Detached, ProcessIdentity, start_detached, tail

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

POLL_SECONDS = 0.1
REQUEST_SECONDS = 30.0
LOG_LINES = 15
# What a server says it is doing, in order: the share of a start that lies behind when it says so.
PHASES = (
    "starting",
    "importing torch",
    "waiting for the other ranks",
    "loading the target",
    "reading the target's fingerprint",
    "loading the draft",
    "allocating the KV cache",
    "probing row invariance",
    "warming up",
    "loading the tokenizer",
    "ready",
)
Progress = Callable[[float, float, str], None]


@dataclass(frozen=True)
class ServerPlan:
    """What a server shall be.

    Args:
        target: directory of the target.
        draft: directory of the draft; None at K = 0.
        num_steps: K.
        slots: names of the slots that the draft reads, in its order; () at K = 0, None when unknown.
        port: 0 for any free one.
        diagnostics: serve /slipstream/trace.
        capture_slots: slots that traces hold beside the draft's.
        injections: faults put in on purpose, each as engine.injection writes it.
    """

    target: Path
    draft: Path | None
    num_steps: int
    slots: tuple[str, ...] | None = None
    port: int = 0
    diagnostics: bool = False
    capture_slots: tuple[int, ...] = ()
    injections: tuple[str, ...] = ()


@dataclass
class RunningServer:
    """A healthy server.

    Args:
        url: its root, without /v1.
        identity: of the front, which leads the group.
        settings: effective settings, as it told them when it was ready.
        log: its output.
        seconds: from start to ready.
    """

    url: str
    identity: ProcessIdentity
    settings: dict[str, Any]
    log: Path
    seconds: float
    _process: Detached = field(repr=False)

    @property
    def model(self) -> str:
        """Name under which the target is served."""
        return str(self.settings["model"])

    def effective(self) -> dict[str, Any]:
        """Effective settings and counters as of now."""
        return read_settings(self.url)

    def stats(self) -> dict[str, Any]:
        """Counters as of now (see engine.serving.engine_build.engine_stats)."""
        return self.effective()["stats"]

    def acceptance(self) -> AcceptanceCounts:
        """Rounds counted so far at this server's K, the largest where it chooses."""
        return read_counters(self.url).of(int(self.settings["num_steps"]))

    def complete(self, prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
        """One greedy completion of token ids, as the server's JSON with token ids. Raises SlipstreamError."""
        body = {"prompt": prompt_ids, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
        return self._post("/v1/completions", body).json()

    def trace(self, body: dict[str, Any]) -> bytes:
        """A traced request, as the bytes that engine.serving.trace_file.unpack_trace reads. Raises SlipstreamError."""
        return self._post("/slipstream/trace", body).content

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        try:
            answer = httpx.post(f"{self.url}{path}", json=body, timeout=None, trust_env=False)
        except httpx.HTTPError as error:
            raise _ended(self._process, f"the server broke off {path}: {error or type(error).__name__}") from error
        if answer.status_code != 200:
            raise SlipstreamError(
                f"the server answered {path} with {answer.status_code}: {answer.text[:500]}",
                expected="status 200",
                do=f"read {self.log}",
            )
        return answer


@contextmanager
def running_server(
    deployment: "Deployment", workdir: Path, plan: ServerPlan, *, name: str = "server", progress: Progress | None = None
) -> Iterator[RunningServer]:
    """A server for the time of a `with`: whatever happens inside, it is stopped at the end and proven gone."""
    server = start_server(deployment, workdir, plan, name=name, progress=progress)
    try:
        yield server
    finally:
        stop_server(deployment, workdir, name)


def plan_server(
    workdir: Path,
    num_steps: int,
    *,
    slots: tuple[str, ...] | None = None,
    port: int = 0,
    diagnostics: bool = False,
    capture_slots: tuple[int, ...] = (),
) -> ServerPlan:
    """The plan for serving what stages resolve and convert left in `workdir`."""
    target = resolved_target(workdir)
    draft = workdir / "convert" / DRAFT if num_steps else None
    return ServerPlan(target, draft, num_steps, slots if num_steps else (), port, diagnostics, capture_slots)


def server_command(deployment: "Deployment", plan: ServerPlan, ready_file: Path) -> list[str]:
    """The command line of a server; the same works by hand."""
    server = deployment.server
    flags: dict[str, object] = {
        "--target": plan.target.absolute(),
        "--draft": "none" if plan.draft is None else plan.draft.absolute(),
        "--num-steps": plan.num_steps,
        "--host": server.host,
        "--port": plan.port,
        "--state-file": ready_file.absolute(),
        "--leave-file": leave_file(ready_file.parent, ready_file.name.removesuffix(READY_SUFFIX)).absolute(),
        "--max-running-requests": server.max_running_requests,
        "--max-context-tokens": server.max_context_tokens,
        "--block-size-tokens": server.block_size_tokens,
        "--prefill-chunk-tokens": server.prefill_chunk_tokens,
        "--dtype": server.dtype,
        "--device": server.device,
        "--tensor-parallel-size": server.tensor_parallel_size,
        "--shutdown-timeout-seconds": server.shutdown_timeout_seconds,
    }
    if deployment.host.threads is not None:
        flags["--threads"] = deployment.host.threads
    if plan.capture_slots:
        flags["--capture-slots"] = ",".join(map(str, plan.capture_slots))
    command = [sys.executable, "-P", "-m", "slipstream.engine.serving.main"]
    words = [*command, *(str(word) for pair in flags.items() for word in pair), *["--diagnostics"] * plan.diagnostics]
    words += ["--choose-steps"] * chooses_steps(deployment, plan)
    return [*words, *(word for fault in plan.injections for word in ("--inject", fault))]


def chooses_steps(deployment: "Deployment", plan: ServerPlan) -> bool:
    """Whether this server chooses K: one without a draft, as every baseline, has nothing to choose from."""
    return deployment.server.choose_steps and plan.num_steps > 0


def start_server(
    deployment: "Deployment",
    workdir: Path,
    plan: ServerPlan,
    *,
    name: str = "server",
    progress: Progress | None = None,
    left: bool = False,
) -> RunningServer:
    """Starts a server and waits until it is healthy and proven to be what was asked for.

    Args:
        deployment: sizes, address and time limits.
        workdir: where state file, log and the server's own file go, as `<name>.*`.
        plan: what to serve.
        name: tells servers of one workdir apart; a leftover of the same name is stopped first.
        progress: called with (phases behind, phases, what is done now).
        left: nobody who looks at its health sends it requests until `join`.

    Raises SlipstreamError, and leaves nothing running: a port or GPUs that somebody holds, a process that ends (with
    its last lines), no health in time, another process at the address, other settings than planned.
    """
    command = server_command(deployment, plan, workdir / f"{name}{READY_SUFFIX}")

    def check(settings: dict[str, Any]) -> None:
        check_settings(deployment, plan, settings)

    return start_command(deployment, workdir, command, plan.port, check, name=name, progress=progress, left=left)


def start_command(
    deployment: "Deployment",
    workdir: Path,
    command: list[str],
    port: int,
    check: Callable[[dict[str, Any]], None],
    *,
    name: str = "server",
    progress: Progress | None = None,
    left: bool = False,
) -> RunningServer:
    """The same by a command that is already written; `check` is told the healthy server's settings, and raises."""
    stop_server(deployment, workdir, name)
    check_port(deployment.server.host, port)
    refuse_held_gpus(workdir)
    ready_file = workdir / f"{name}{READY_SUFFIX}"
    ready_file.unlink(missing_ok=True)
    (leave if left else join)(workdir, name)
    started = time.monotonic()
    process = start_detached(
        command,
        log=workdir / f"{name}.log",
        state_file=workdir / f"{name}{STATE_SUFFIX}",
        env=deployment.nccl.variables,
        notes={
            "host": deployment.server.host,
            "port": port,
            "gpu_baseline": gpu_baseline(),
            SEGMENTS_BEFORE: segments_before(),
        },
    )
    try:
        hold_gpus(workdir, process.identity)
        url = _wait_until_healthy(process, ready_file, deployment.server.startup_timeout_seconds, progress)
        settings = read_settings(url)
        check_identity(process, settings, url)
        check(settings)
        note_segments(process.state_file)
    except BaseException:
        stop_server(deployment, workdir, name)
        raise
    seconds = round(time.monotonic() - started, 3)
    return RunningServer(url, process.identity, settings, Path(process.record.log), seconds, process)


def stop_server(deployment: "Deployment", workdir: Path, name: str = "server") -> None:
    """Stops the server of that name, if there is one, and proves that it is gone."""
    state_file = workdir / f"{name}{STATE_SUFFIX}"
    stop_recorded(state_file, drain_seconds=deployment.server.shutdown_timeout_seconds)


def answers(workdir: Path, name: str = "server") -> bool:
    """Whether a server of that name answers requests now, left or not; one that starts, ends or hangs does not."""
    state = read_ready(workdir / f"{name}{READY_SUFFIX}")
    told = None if state is None else read_health(str(state["url"]))
    return told is not None and told.answers


def check_settings(deployment: "Deployment", plan: ServerPlan, settings: dict[str, Any]) -> None:
    """What the server says it does against what it was told. Raises SlipstreamError (F1 width, F2 and F3 slots)."""
    server = deployment.server
    planned: dict[str, tuple[Any, str]] = {
        "num_steps": (plan.num_steps, "F1"),
        "verify_width": (plan.num_steps + 1, "F1"),
        "choose_steps": (chooses_steps(deployment, plan), ""),
        "dtype": (server.dtype, ""),
        "max_context_tokens": (server.max_context_tokens, "F14"),
        "max_running_requests": (server.max_running_requests, ""),
        "block_size_tokens": (server.block_size_tokens, ""),
        "prefill_chunk_tokens": (server.prefill_chunk_tokens, ""),
        "tensor_parallel_size": (server.tensor_parallel_size, ""),
        "injections": (list(plan.injections), ""),  # none but in a parity check that asked for them
    }
    if server.device != "auto":
        planned["device"] = (server.device, "")
    if deployment.host.threads is not None:
        planned["threads"] = (deployment.host.threads, "")
    differences = [
        Difference(key, settings.get(key), value, fault)
        for key, (value, fault) in planned.items()
        if settings.get(key) != value
    ]
    if plan.slots is not None:
        differences += slot_differences(tuple(settings["slots"]), plan.slots)
    refuse(
        differences,
        found_in="what the server says it does",
        expected_in="the plan",
        do="nothing is changed silently: if a value cannot be served, change it in the deployment",
    )


def _wait_until_healthy(process: Detached, ready_file: Path, seconds: float, progress: Progress | None) -> str:
    """Follows a start phase by phase. Returns the server's URL."""
    deadline = time.monotonic() + seconds
    url, phase = "", "starting"
    while True:
        if process.exit_code() is not None:
            raise _ended(process, f"the server ended while it was {phase}")
        if time.monotonic() > deadline:
            raise SlipstreamError(
                f"the server is not ready after {seconds:.0f} s; it is still {phase}. Its last lines:\n"
                + tail(Path(process.record.log), LOG_LINES),
                expected="health within server.startup_timeout_seconds",
                do=f"read {process.record.log}; raise server.startup_timeout_seconds if it only needs longer",
            )
        if not url and (state := read_ready(ready_file)) is not None:
            url = str(state["url"])
        if url:
            told = read_health(url)
            healthy = told is not None and told.answers
            phase = PHASES[-1] if healthy else phase if told is None else told.phase
            if progress is not None:
                progress(PHASES.index(phase) if phase in PHASES else 0, len(PHASES) - 1, phase)
            if healthy:
                return url
        time.sleep(POLL_SECONDS)


def check_identity(process: Detached, settings: dict[str, Any], url: str) -> None:
    """It is our process that answers at `url`. Raises SlipstreamError (F15)."""
    if settings.get("pid") != process.identity.pid:
        raise SlipstreamError(
            f"process {settings.get('pid')} answers at {url}",
            expected=f"process {process.identity.pid}, which we started",
            do="another server holds that address: stop it, or set server.port to 0",
            runbook="left-over-server.md",
            fault="F15",
        )


def _ended(process: Detached, what: str) -> SlipstreamError:
    """What a server that is gone left behind: exit code and last lines."""
    log = Path(process.record.log)
    code = process.exit_code()
    how = "it still runs" if code is None else f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    lines = tail(log, LOG_LINES)
    named = re.search(r"^slipstream server: (F\d+): ", lines, re.MULTILINE)
    return SlipstreamError(
        f"{what} ({how}); its last lines:\n{lines or '(none)'}",
        expected="a server that goes on serving",
        do=f"read {log}; the same command works by hand: {' '.join(process.record.command)}",
        fault=named.group(1) if named else "",
    )
