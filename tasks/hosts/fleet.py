"""Several hosts: shares of the work to each, to another where one is lost; replicas replaced one by one.

`flows/fan_out.py` maps the shares. `run_share` needs nothing but its arguments, for whatever maps it over the shares.
A share that is asked for again finds its jobs, running or ended, as every job does.
"""

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.conversations import CONVERSATIONS
from slipstream.tasks.hosts.far_stage import RUNS, run_far_stage, run_name
from slipstream.tasks.hosts.host import Host, HostUnreachable
from slipstream.tasks.hosts.open_host import each_deployment, open_host
from slipstream.tasks.reporting import Reporter
from slipstream.tasks.shares import STORE, STORE_MANIFEST, share_name, shares_folder

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

SHARED_STAGES = ("resolve", "regenerate", "extract")
DRAIN_POLL_SECONDS = 0.2
Say = Callable[[str], None]
T = TypeVar("T")
_turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # a host's cards hold one share at a time


def on_a_living_host(
    number: int, deployments: "Sequence[Deployment]", work: "Callable[[Host, Deployment], T]", say: Say
) -> T:
    """Does `work` on one of the hosts: the `number`-th by turns, and where that cannot be reached, the next.

    Args:
        number: of the work; equal numbers begin at the same host.
        deployments: one for each host (`each_deployment`).
        work: what is done; it must bear being begun anew elsewhere.
        say: told when a host is given up.

    Raises HostUnreachable of the last host when all are gone, and every other error of `work` at once.
    """
    order = [deployments[(number + offset) % len(deployments)] for offset in range(len(deployments))]
    for left, deployment in reversed(list(enumerate(reversed(order)))):
        host = open_host(deployment)
        try:
            with _turns[host.name]:
                return work(host, deployment)
        except HostUnreachable as error:
            if not left:
                raise
            say(f"{host.name} is given up, its work goes to another host: {error.found}")
        finally:
            host.close()
    raise AssertionError("there is a first host")


def run_share(number: int, deployment: "Deployment", workdir: Path, reporter: Reporter, *, count: int = 0) -> Path:
    """Answers and extracts one share of the prompts on one of the deployment's hosts, and fetches what came of it.

    Args:
        number: of the share, from 0.
        deployment: of the whole; its `host.more` names the other hosts.
        workdir: of the whole run here.
        reporter: told what the stages tell.
        count: shares in all; 0 is one for each host.

    Returns the folder of the share here. Raises as `on_a_living_host`.
    """
    deployments = each_deployment(deployment)
    share = (number, count or len(deployments))
    whole = shares_folder(deployment)
    folder = workdir / whole / share_name(share)
    own = workdir.with_name(f"{workdir.name}-{share_name(share)}")

    def work(host: Host, there: "Deployment") -> Path:
        part = there.model_copy(update={"data": there.data.model_copy(update={"share": share})})
        for stage in SHARED_STAGES:
            run_far_stage(host, stage, part, own, reporter)
        _fetch_share(host, f"{RUNS}/{run_name(own)}", folder, lambda text: reporter.say("extract", text, markup=False))
        return folder

    return on_a_living_host(number, deployments, work, lambda text: reporter.warn("extract", text))


def fetched_share(share: tuple[int, int], deployment: "Deployment", workdir: Path) -> Path | None:
    """The folder of a share that was fetched whole; None where it was not."""
    folder = workdir / shares_folder(deployment) / share_name(share)
    return folder if (folder / STORE / STORE_MANIFEST).is_file() else None


def stop_shares(deployment: "Deployment", workdir: Path, say: Say) -> None:
    """Stops the stages of this run's shares on every host that can be reached; of the others, who cannot is told."""
    job = re.compile(rf"{re.escape(run_name(workdir))}-\d+-of-\d+-({'|'.join(SHARED_STAGES)})")
    for there in each_deployment(deployment):
        host = open_host(there.model_copy(update={"host": there.host.model_copy(update={"reconnect_seconds": 0})}))
        try:
            for status in host.jobs(f"{run_name(workdir)}-"):
                if job.fullmatch(status.name) and status.members:
                    host.stop(status.name)
                    say(f"stopped {status.name} on {host.name}")
        except HostUnreachable as error:
            say(f"{error.found}: what runs there of a share goes on")
        finally:
            host.close()


def lay_shares(host: Host, deployment: "Deployment", workdir: Path, say: Say) -> int:
    """Sends the shares that were fetched to the host of the whole run, whose stages take them. Returns their number.

    A share whose store has no manifest was not fetched whole and stays here. There as here a manifest comes last.
    """
    whole = shares_folder(deployment)
    fetched = [path.parents[1] for path in (workdir / whole).glob(f"*/{STORE}/{STORE_MANIFEST}")]
    found = (path for folder in fetched for path in folder.rglob("*") if path.is_file() and path.suffix != ".part")
    for path in sorted(found, key=lambda path: (path.name == STORE_MANIFEST, path)):
        target = f"{RUNS}/{run_name(workdir)}/{path.relative_to(workdir)}"
        if host.file_facts(target) is None:
            host.put(path, target, say=say)
    return len(fetched)


def _fetch_share(host: Host, run: str, folder: Path, say: Say) -> None:
    """The store's manifest comes last: a share without one is not whole."""
    store = folder / STORE
    store.mkdir(parents=True, exist_ok=True)
    host.get(f"{run}/regenerate/{CONVERSATIONS}", folder / CONVERSATIONS, say=say)
    manifest = host.read_json(f"{run}/extract/{STORE}/{STORE_MANIFEST}")
    for shard in manifest["shards"]:
        host.get(f"{run}/extract/{STORE}/{shard['name']}", store / shard["name"], say=say)
    host.get(f"{run}/extract/{STORE}/{STORE_MANIFEST}", store / STORE_MANIFEST)


@dataclass(frozen=True)
class Replica:
    """One server of several that do the same: where it runs, and how it is taken out, replaced and put back.

    Args:
        name: for people.
        leave: takes it out of what requests are sent to.
        running: how many requests it still answers.
        replace: starts its successor in its place, and returns when that has passed its smoke test.
        go_back: starts again what was there before.
        join: puts it back.
    """

    name: str
    leave: Callable[[], None]
    running: Callable[[], int]
    replace: Callable[[], None]
    go_back: Callable[[], None]
    join: Callable[[], None]


def roll(replicas: Sequence[Replica], say: Say, wait: Callable[[float], None], *, drain_seconds: float = 600.0) -> None:
    """Replaces servers one by one, so that all but one answer at every moment.

    Where a successor does not come up, the server of before is started again in its place, and so are those that were
    replaced already, last one first: all replicas do the same again.

    Args:
        replicas: at least two, or requests are refused meanwhile.
        say: told what happens.
        wait: sleeps so many seconds.
        drain_seconds: how long a replica may go on answering what it has begun.

    A replica that cannot be brought back is told to `say`, and the others are brought back all the same.

    Raises the error of the successor that did not come up.
    """
    replaced: list[Replica] = []
    for replica in replicas:
        try:
            _drain(replica, say, wait, drain_seconds)
            try:
                replica.replace()
            except BaseException as error:
                why = getattr(error, "found", error)
                say(f"{replica.name}: the new server did not come up: {why}; the old one comes back")
                _back(replica, say)
                raise
        except BaseException:
            for earlier in reversed(replaced):
                try:
                    _drain(earlier, say, wait, drain_seconds)
                except Exception as error:
                    say(f"{earlier.name}: the new server stays: {getattr(error, 'found', error)}")
                    continue
                _back(earlier, say)
            raise
        replica.join()
        say(f"{replica.name}: replaced")
        replaced.append(replica)


def _back(replica: Replica, say: Say) -> None:
    """Starts the old server again in a replica that is out, and puts it back; tells why it cannot."""
    try:
        replica.go_back()
        replica.join()
        say(f"{replica.name}: the old server is back")
    except Exception as error:
        say(f"{replica.name}: the old server is not back, nothing is sent there: {getattr(error, 'found', error)}")


def _drain(replica: Replica, say: Say, wait: Callable[[float], None], drain_seconds: float) -> None:
    """Takes a replica out and waits until it has answered all; puts it back where that fails or takes too long."""
    replica.leave()
    waited = 0.0
    try:
        while running := replica.running():
            if waited >= drain_seconds:
                raise SlipstreamError(
                    f"{replica.name} still answers {running} requests after {drain_seconds:.0f} s",
                    expected="an end of all that it has begun",
                    do="wait for it, or allow more time; it was left as it is",
                    runbook="roll-back.md",
                )
            wait(DRAIN_POLL_SECONDS)
            waited += DRAIN_POLL_SECONDS
    except BaseException:
        replica.join()
        raise
    say(f"{replica.name}: nothing runs on it any more")
