"""Several hosts: shares of the work to each, to another where one is lost. Servers on them: replicas.py.

`flows/fan_out.py` maps the shares. `run_share` needs nothing but its arguments, for whatever maps it over the shares.
A share that is asked for again finds its jobs, running or ended, as every job does.
"""

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from slipstream.tasks.conversations import CONVERSATIONS
from slipstream.tasks.hosts.far_stage import RUNS, run_far_stage, run_name
from slipstream.tasks.hosts.host import Host, HostUnreachable
from slipstream.tasks.hosts.open_host import each_deployment, open_host
from slipstream.tasks.manifest import read_json
from slipstream.tasks.reporting import Reporter
from slipstream.tasks.shares import STORE, STORE_MANIFEST, share_name, shares_folder

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

SHARED_STAGES = ("resolve", "regenerate", "extract")
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
    arrived = store / f"{STORE_MANIFEST}.part"  # it names every conversation: too large for host.read_json
    host.get(f"{run}/extract/{STORE}/{STORE_MANIFEST}", arrived)
    for shard in read_json(arrived)["shards"]:
        host.get(f"{run}/extract/{STORE}/{shard['name']}", store / shard["name"], say=say)
    arrived.replace(store / STORE_MANIFEST)
