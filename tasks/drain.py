"""Stage drain: the server is sent no more requests, and answers those that it has; it goes on running.

While its leave file is there, a server says 503 on /health, which is where a load balancer looks, and answers whatever
still comes. So nothing is lost between the moment in which it leaves and the one in which the balancer knows. `join`
takes that back; stage restore does so by hand. A launch starts its server like that and has it join once it is proven.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.cleanup import LEAVE_SUFFIX, READY_SUFFIX, read_ready
from slipstream.tasks.registry import DRAIN
from slipstream.tasks.stage import StageContext

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

LEFT = "left"  # the phase of a server that is ready and has left
REQUEST_SECONDS = 30.0
POLL_SECONDS = 0.2
Progress = Callable[[float, float, int], None]


@dataclass(frozen=True)
class Health:
    """What a server says of its health.

    Args:
        phase: what it does.
        answers: it answers requests, whether or not it wants them.
        in_flight: requests that it answers now, from their arrival to the last byte of their answer.
    """

    phase: str
    answers: bool
    in_flight: int


def read_health(url: str) -> Health | None:
    """What the server at `url` says; None where none answers."""
    try:
        answer = httpx.get(f"{url}/health", timeout=REQUEST_SECONDS, trust_env=False)
        told = answer.json()
        phase = str(told["phase"])
        return Health(phase, answer.status_code == 200 or phase == LEFT, int(told.get("in_flight", 0)))
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


def leave_file(workdir: Path, name: str = "server") -> Path:
    """The file of which a server of that name is told on its command line."""
    return workdir / f"{name}{LEAVE_SUFFIX}"


def leave(workdir: Path, name: str = "server") -> None:
    """Has a server say, by its health, that it wants no more requests."""
    leave_file(workdir, name).touch()


def join(workdir: Path, name: str = "server") -> None:
    """Takes `leave` back."""
    leave_file(workdir, name).unlink(missing_ok=True)


def drain(workdir: Path, deployment: "Deployment", progress: Progress) -> str:
    """Takes the server of `workdir` out, and waits until it has answered all.

    Args:
        workdir: of the run.
        deployment: says how long (section roll).
        progress: told seconds that are over, seconds that it may take, requests that still run.

    Returns "drained", or "none" where no server answers. Raises SlipstreamError for a server that knows no leaving, and
    for one that does not come to its end; it has then joined again, as after every other error.
    """
    state = read_ready(workdir / f"server{READY_SUFFIX}")
    told = None if state is None else read_health(str(state["url"]))
    if state is None or told is None or not told.answers:
        return "none"
    url, roll = str(state["url"]), deployment.roll
    leave(workdir)
    began = time.monotonic()
    try:
        while (told := read_health(url)) is not None:
            over = time.monotonic() - began
            if not told.answers:
                break
            if told.phase != LEFT:
                raise _stays(url, told)
            if over >= roll.leave_seconds and not told.in_flight:
                return "drained"
            if over >= roll.leave_seconds + roll.drain_seconds:
                raise SlipstreamError(
                    f"the server at {url} still answers {told.in_flight} requests {over:.0f} s after it left",
                    expected="an end of all that it has begun; it has joined again, and was left as it is",
                    do="see that whoever balances load looks at /health; wait, or raise roll.drain_seconds",
                    runbook="roll-replicas.md",
                )
            progress(over, roll.leave_seconds + roll.drain_seconds, told.in_flight)
            time.sleep(POLL_SECONDS)
    except BaseException:
        join(workdir)
        raise
    return "none"  # it ended meanwhile


def run(context: StageContext) -> dict[str, Any]:
    """The stage: see the head of this file. Figures: `server`: drained, or none where none answers."""

    def follow(over: float, most: float, in_flight: int) -> None:
        context.progress(over, most, in_flight=in_flight)

    server = drain(context.workdir, context.config, follow)
    said = {
        "drained": "the server has left, and has answered all; `slipstream stage restore CONFIG` has it join again",
        "none": "no server answers here: there is nothing to drain",
    }
    context.say(said[server])
    return {"server": server}


def _stays(url: str, told: Health) -> SlipstreamError:
    return SlipstreamError(
        f"the server at {url} was asked to leave, and its health says {told.phase}",
        expected=f"{LEFT}: a server that was started with --leave-file, as this release starts all of them",
        do="take this host out of what requests are sent to by hand, then `slipstream stage launch CONFIG` there",
        runbook="roll-replicas.md",
    )


STAGE = DRAIN
