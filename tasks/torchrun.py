"""One host's part of a training over several processes: torchrun, and what it tells of a rank that ended.

`python -P -m slipstream.tasks.torchrun JSON` starts this host's ranks (`tasks/train_rank.py`), each told what `Launch`
says, and ends with them. Lines of JSON on stdout say what happens: those of the ranks, and at last `rank_ended` of each
that ended badly. A rank that dies takes the others of its host along; when this process dies, the kernel ends them.
"""

import json
import os
import shutil
import sys
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.engine.device import resolve_device
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.serving.engine_process import die_with

JOIN_SECONDS = 1800  # how long a host waits for the others: the first one has yet to read and check its inputs
MONITOR_SECONDS = 0.1


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of several hosts meet.

    Args:
        address, port: of the first host.
        nodes: hosts in all.
    """

    address: str
    port: int
    nodes: int


@dataclass(frozen=True)
class Launch:
    """What the ranks of one host are started with.

    Args:
        processes, device: as `training.processes` and `training.device` ask.
        node: the number of this host; `meeting` is None where it is alone.
        store: directory of the hidden states, or of this host's part of them.
        threads: of torch, for each rank; None: torch's choice for a card, one for a CPU.
        stage: file with what rank 0 needs to run the stage (`train_rank.Stage`), as JSON; None on other hosts.
    """

    processes: int | str
    device: str
    node: int
    meeting: Meeting | None
    store: str
    threads: int | None
    stage: str | None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, value: dict[str, Any]) -> "Launch":
        """From JSON."""
        meeting = value["meeting"]
        return cls(**{**value, "meeting": None if meeting is None else Meeting(**meeting)})


def processes_here(asked: int | str, device: str) -> int:
    """How many ranks train on this host.

    Args:
        asked: `training.processes`.
        device: `cpu` or `cuda`.

    Raises SlipstreamError for more than there are cards.
    """
    if device == "cpu":
        return 1 if asked == "auto" else int(asked)
    import torch  # at last: it takes seconds

    cards = torch.cuda.device_count()
    if asked != "auto" and int(asked) > cards:
        raise SlipstreamError(
            f"training.processes is {asked}, and torch sees {cards} cards here",
            expected="a card for each process",
            do="lower training.processes, or write auto; CUDA_VISIBLE_DEVICES may hide cards",
        )
    return cards if asked == "auto" else int(asked)


def arguments(launch: Launch) -> list[str]:
    """torchrun's."""
    words = [f"--nproc-per-node={launch.processes}", "--max-restarts=0", f"--monitor-interval={MONITOR_SECONDS}"]
    meeting = launch.meeting
    if meeting is None:  # a port that is free, and nobody's name is looked up
        where = ["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4()}"]
        return [*words, *where, "--local-addr=127.0.0.1"]
    where = [f"--nnodes={meeting.nodes}", f"--node-rank={launch.node}", f"--rdzv-conf=timeout={JOIN_SECONDS}"]
    return [*words, *where, f"--master-addr={meeting.address}", f"--master-port={meeting.port}"]


def tell(event: str, **fields: Any) -> None:
    """Writes one line for whoever started us, whole: other processes write there too."""
    os.write(1, (json.dumps({"event": event, **fields}, default=str) + "\n").encode())


def main(words: Sequence[str]) -> None:
    """Entry: `python -P -m ... JSON [PARENT]`; PARENT is the process to end with."""
    if words[1:]:
        die_with(int(words[1]))
    launch = Launch.of(json.loads(words[0]))
    try:
        device = resolve_device(launch.device)
        launch = replace(launch, device=device, processes=processes_here(launch.processes, device))
    except SlipstreamError as error:
        tell("rank_failed", rank=None, error=words_of(error))
        sys.exit(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1" if launch.device == "cpu" else str(_share_of_cores(launch)))
    os.environ["PYTHONSAFEPATH"] = "1"  # as -P, which torchrun does not hand on
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # A folder for torchrun's own files, which is made elsewhere and left otherwise; whoever starts again clears it.
    logs = (Path(launch.store) if launch.stage is None else Path(launch.stage).parent) / "torchrun"
    shutil.rmtree(logs, ignore_errors=True)
    rank = ["-m", "slipstream.tasks.train_rank", launch.to_json(), str(os.getpid())]
    try:
        run(parse_args([*arguments(launch), f"--log-dir={logs}", *rank]))
    except ChildFailedError as error:
        for number, failure in sorted(error.failures.items()):
            tell("rank_ended", rank=number, pid=failure.pid, exit_code=failure.exitcode)
        sys.exit(1)


def _share_of_cores(launch: Launch) -> int:
    return max(1, len(os.sched_getaffinity(0)) // int(launch.processes))


def words_of(error: SlipstreamError) -> dict[str, str]:
    """An error's words, for JSON."""
    return {key: getattr(error, key) for key in ("found", "expected", "do", "runbook", "fault")}


if __name__ == "__main__":
    main(sys.argv[1:])
