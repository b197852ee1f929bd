"""The sums over ranks on a host, timed there for one deployment, and what the times mean for its NCCL values."""

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.facts import gather
from slipstream.tasks.hosts.doctor import HostFinding
from slipstream.tasks.hosts.far_stage import environment_python
from slipstream.tasks.hosts.host import Host
from slipstream.tasks.other_engines.nccl import topology

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

SECONDS = 240.0
STAND_IN_HIDDEN = 4096
ALL_ROWS = 8  # up to so many rows each number is timed, above it powers of two and the last
SLOWER = 1.05  # below that two medians are the same


def time_sums(host: Host, facts: dict[str, Any], deployment: "Deployment", ranks: int) -> dict[str, Any]:
    """Times the deployment's sums of 1 to K + 1 rows on the host, over so many ranks.

    Args:
        host: where; Slipstream must be installed there.
        facts: of it: nobody may be on its cards.
        deployment: width of the target, K, NCCL's values.
        ranks: 2 or more.

    Returns `engine.bench.all_reduce.Timed` as JSON, with `num_steps`, `topology` and whether `hidden` is the target's.
    Raises SlipstreamError where somebody is on the cards, and with the words of a rank that ends badly.
    """
    cards = [] if facts["gpus"] is None or deployment.server.device == "cpu" else facts["gpus"]["cards"]
    busy = [f"GPU {card['index']}" for card in cards[:ranks] if card["users"]]
    if busy:
        raise SlipstreamError(
            f"somebody is on {', '.join(busy)}",
            expected="idle cards: sums that are timed beside other work say nothing, and they would slow it",
            do="give the command again when they are free",
            runbook="gpu-memory-not-freed.md",
        )
    target = gather(deployment).target
    hidden = STAND_IN_HIDDEN if target is None else target.hidden_size
    steps = deployment.speculation.num_steps
    num_steps = deployment.speculation.max_num_steps if steps == "auto" else steps
    python = sys.executable if deployment.host.kind == "local" else environment_python(host)
    rows = ",".join(map(str, rows_to_time(num_steps)))
    words = (python, "-P", "-m", "slipstream.engine.bench.all_reduce", "--ranks", str(ranks), "--hidden", str(hidden))
    where = ("--rows", rows, "--device", deployment.server.device)
    nccl = {name: value for name, value in deployment.nccl.variables.items() if not name.startswith("NCCL_DEBUG")}
    done = host.run((*words, *where, "--nccl", json.dumps(nccl)), seconds=SECONDS)
    if done.exit_code:
        raise SlipstreamError(
            f"the sums over {ranks} ranks on {host.name} were not timed: {done.stderr.strip()[-1500:]}",
            expected="a time for each number of rows",
            do="fewer ranks, or correct what it says",
        )
    timed = json.loads(done.stdout.splitlines()[-1])
    way = topology([card["peers"] for card in cards[:ranks]]) if cards else "host"
    return {**timed, "num_steps": num_steps, "topology": way, "hidden_known": target is not None}


def rows_to_time(num_steps: int) -> list[int]:
    """1 to K + 1; of many, powers of two and the last."""
    width = num_steps + 1
    if width <= ALL_ROWS:
        return list(range(1, width + 1))
    return sorted({*(2**n for n in range(width.bit_length()) if 2**n < width), width})


def judge_sums(timed: dict[str, Any]) -> Iterator[HostFinding]:
    """What the times mean."""
    library, rows = timed["library"].upper() if timed["card"] else timed["library"], timed["rows"]
    width = f"{rows[-1]} rows x {timed['hidden']}" + ("" if timed["hidden_known"] else " (the target is unknown here)")
    own = f"1 row {timed['own_us'][0]:.1f} us, {width} {timed['own_us'][-1]:.1f} us"
    theirs = f"{timed['default_us'][0]:.1f} and {timed['default_us'][-1]:.1f} us"
    found = f"over {timed['ranks']} ranks by {timed['carrier']}: {own}; {library} by itself {theirs}"
    if not timed["card"]:
        consequence = "gloo stands in, there are no cards: that the way works, nothing about speed on cards"
        yield HostFinding("all-reduce", "note", found, consequence)
    elif timed["carrier"] == "peer memory":
        consequence = "a step's sums run in our kernels, through peer memory; NCCL's values do not act on them"
        yield HostFinding("all-reduce", "ok", found, consequence)
    else:
        consequence = "cards do not reach each other's memory: NCCL gathers and we sum, in each layer of each step"
        yield HostFinding("all-reduce", "warning", found, consequence, "look at IOMMU, ACS and the topology")
    if timed["configured_us"] is not None:
        yield _configured(timed)


def _configured(timed: dict[str, Any]) -> HostFinding:
    """The section nccl against no value at all."""
    pairs = list(zip(timed["rows"], timed["configured_us"], timed["default_us"], strict=True))
    found = f"{', '.join(f'{name}={value}' for name, value in timed['nccl'].items())}: " + ", ".join(
        f"{rows} rows {configured:.1f} us, unset {default:.1f}" for rows, configured, default in pairs
    )
    worse = [str(rows) for rows, configured, default in pairs if configured > SLOWER * default]
    if not timed["card"]:
        return HostFinding("nccl values", "note", found, "gloo does not read them: both are the same within noise")
    if worse:
        consequence = f"slower than unset at {', '.join(worse)} rows"
        return HostFinding(
            "nccl values", "warning", found, consequence, "leave the section nccl out", "F16", "wrong-flags.md"
        )
    measured = {key: timed[key] for key in ("num_steps", "ranks", "card", "topology")}
    consequence = "no slower than unset at any width that a round has"
    return HostFinding("nccl values", "ok", found, consequence, f"note it: nccl.measured_for: {json.dumps(measured)}")
