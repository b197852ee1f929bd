"""A rank of the training: rank 0 runs the stage, the others follow it. torchrun starts it, on one host or several.

`python -m ... LAUNCH_JSON TORCHRUN_PID`; torchrun's variables tell rank, size and where to meet.
"""

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slipstream.engine.capture import CapturePlan
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.hidden_store import HiddenStateStore
from slipstream.engine.serving.engine_process import die_with
from slipstream.engine.training.follow import follow
from slipstream.engine.training.ranks import Ranks
from slipstream.engine.training.store_source import StoreSource
from slipstream.kernels.all_gather import PeerLost
from slipstream.tasks.torchrun import Launch, tell, words_of
from slipstream.tasks.train_words import EXIT_PEER_LOST

# Longest wait for a peer: rank 0 checks its inputs before the first exchange, and evaluates between two.
PEER_SECONDS = 1800
CULPRIT_SECONDS = 1.0  # torchrun looks for it before it sees us


@dataclass(frozen=True)
class Stage:
    """What rank 0 needs to run the stage.

    Args:
        deployment: as JSON.
        workdir, out, resumed, skip: as of `StageContext` and `train.run`.
        parts: shards of the store that each host after the first holds, by name; the first holds all.
    """

    deployment: dict[str, Any]
    workdir: str
    out: str
    resumed: bool
    skip: tuple[str, ...]
    parts: tuple[tuple[str, ...], ...]


def main(arguments: Sequence[str]) -> None:
    launch, parent = Launch.of(json.loads(arguments[0])), int(arguments[1])
    die_with(parent)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    tell("rank", rank=rank, size=size, pid=os.getpid())
    try:
        run(launch, rank, size)
    except PeerLost as error:
        print(f"rank {rank}: an exchange failed: {error}", file=sys.stderr)
        time.sleep(CULPRIT_SECONDS)
        _end(EXIT_PEER_LOST)
    except BaseException as error:
        traceback.print_exc()
        words = f"{type(error).__name__}: {error}"[:2000]
        tell("rank_failed", rank=rank, error=words_of(error) if isinstance(error, SlipstreamError) else words)
        _end(1)
    _end(0)


def run(launch: Launch, rank: int, size: int) -> None:
    """Joins the others, then does this rank's part of the training."""
    device = torch.device("cpu")
    if launch.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if launch.threads is not None:
        torch.set_num_threads(launch.threads)
    ranks = join(launch, rank, size)
    store = HiddenStateStore(Path(launch.store))
    if rank:

        def source_of(plan: CapturePlan) -> StoreSource:
            return StoreSource(store, store.conversation_ids("train"), plan)

        follow(ranks, source_of, device)
        return
    assert launch.stage is not None  # rank 0 is on the first host
    lead(Stage(**json.loads(Path(launch.stage).read_text())), store, ranks, device)


def lead(stage: Stage, store: HiddenStateStore, ranks: Ranks, device: torch.device) -> None:
    """Runs the stage, as rank 0 does, and tells its figures."""
    from slipstream.configs.schema import Deployment  # here: other ranks do without all that a stage needs
    from slipstream.tasks import train
    from slipstream.tasks.reporting import JsonLinesReporter
    from slipstream.tasks.stage import StageContext

    context = StageContext(
        train.STAGE,
        Deployment(**stage.deployment),
        Path(stage.workdir),
        Path(stage.out),
        JsonLinesReporter(sys.stdout),
        resumed=stage.resumed,
    )
    holders = holders_of(store, stage.parts) if stage.parts else None
    tell("result", figures=train.train(context, device, ranks, holders, skip=stage.skip))


def join(launch: Launch, rank: int, size: int) -> Ranks:
    """Meets the other ranks: numbers go by gloo, what lies on cards by NCCL."""
    interface = _interface_towards(os.environ["MASTER_ADDR"])
    # By default gloo takes the address that the host's name has, which may be 127.0.0.1 or none at all.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if launch.meeting is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    backend = "cpu:gloo,cuda:nccl" if launch.device == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=PEER_SECONDS))
    except RuntimeError as error:
        raise PeerLost(str(error)) from error
    alike = Ranks(rank, size, (0,) * size, dist.group.WORLD)
    nodes = alike.gathered(torch.tensor([int(os.environ["GROUP_RANK"])]))
    return Ranks(rank, size, tuple(int(node) for node in nodes), dist.group.WORLD)


def holders_of(store: HiddenStateStore, parts: Sequence[Sequence[str]]) -> list[list[int]]:
    """The hosts that hold each training conversation of the store. Args: parts: as `Stage`'s."""
    held = [set(part) for part in parts]
    shards = [store.entry(name).shard for name in store.conversation_ids("train")]
    return [[0, *(node for node, part in enumerate(held, start=1) if shard in part)] for shard in shards]


def _interface_towards(address: str) -> str:
    """The network interface by which `address` is reached, or that has it."""
    import psutil

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = probe.getsockname()[0]
    found = [name for name, addresses in psutil.net_if_addrs().items() if own in (a.address for a in addresses)]
    if not found:
        raise SlipstreamError(
            f"no network interface of this host has {own}, by which it reaches {address}",
            expected="an interface to the other hosts",
            do="name it in the environment: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
        )
    return found[0]


def _end(code: int) -> None:
    """At once: threads of the process group, and kernels on a card, may still wait for a peer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
