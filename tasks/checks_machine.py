"""Checks of the machine: target, prompts, disk, memory and port (F15)."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.contradictions import Check, Finding
from slipstream.tasks.derived import BYTES
from slipstream.tasks.estimates import costs
from slipstream.tasks.facts import HOLDOUT, Facts, prompts_path
from slipstream.tasks.ports import port_holders, port_is_free
from slipstream.tasks.process import our_processes
from slipstream.tasks.prompts import held_out_count, load_prompts
from slipstream.tasks.rank_memory import GIB
from slipstream.tasks.target_weights import target_weights, weight_bytes


def human_bytes(number: float) -> str:
    """1.5 GB: bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(number) < 1000:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def existing_parent(path: Path) -> Path:
    """The nearest directory above `path` (or itself) that is there: its file system is where `path` will be."""
    path = path.expanduser().absolute()
    while not path.is_dir():
        path = path.parent
    return path


def disk_needed(facts: Facts) -> int:
    """Bytes that the stages still to run write into the working directory (estimate)."""
    return sum(cost.disk_bytes for stage, cost in costs(facts).items() if stage in facts.remade)


def _far_host(facts: Facts) -> Iterator[Finding]:
    host = facts.deployment.host
    if host.kind != "local":
        yield Finding(
            "host",
            f"{facts.say('host.address')}: what is done, the disk and the memory there were not looked at",
            "a plan of the machine on which the stages run",
            ("run `slipstream doctor CONFIG`, which looks there",),
            severity="warning",
        )
    if host.more:
        yield Finding(
            "host",
            f"host.more names {', '.join(other.address for other in host.more)}: no run works there",
            "runs on the first host only; `slipstream doctor` and `slipstream host` take all of them",
            ("leave host.more out where the first host is to be used alone",),
            severity="warning",
        )


def _disk(facts: Facts) -> Iterator[Finding]:
    if facts.deployment.host.kind != "local":
        return
    place, needed = existing_parent(facts.workdir), disk_needed(facts)
    free = shutil.disk_usage(place).free
    if needed > free:
        yield Finding(
            "disk",
            f"the disk of {place} has {human_bytes(free)} free; this run writes about {human_bytes(needed)} (estimate)",
            "room for the outputs of the stages",
            ("make room", "give host.workdir another disk", "use fewer prompts or shorter answers"),
        )


def _memory(facts: Facts) -> Iterator[Finding]:
    if facts.deployment.host.kind != "local":
        return
    needed = {stage: cost.memory_bytes for stage, cost in costs(facts).items() if stage in facts.remade}
    if not needed:
        return
    stage, most = max(needed.items(), key=lambda item: item[1])
    memory = psutil.virtual_memory()
    if most > memory.available:
        enough_in_all = most <= memory.total
        yield Finding(
            "memory",
            f"stage {stage} takes about {human_bytes(most)} of memory (estimate); {human_bytes(memory.available)} of "
            f"{human_bytes(memory.total)} are available",
            "memory for the largest stage",
            ("end other programs",) if enough_in_all else ("lower server.max_running_requests or max_context_tokens",),
            severity="warning" if enough_in_all else "error",
        )


def _port(facts: Facts) -> Iterator[Finding]:
    server = facts.deployment.server
    if server.port == 0 or facts.deployment.host.kind != "local":
        return
    try:
        if port_is_free(server.host, server.port):
            return
        holders = port_holders(server.port)
    except OSError as error:
        yield Finding(
            "port",
            f"{facts.say('server.host')} and {facts.say('server.port')} cannot be listened on: {error}",
            "an address of this machine and a port that is open to us",
            ("write server.host: 127.0.0.1", "write another server.port, or 0 for any free one"),
        )
        return
    ours = our_processes(facts.workdir)
    foreign = [holder for holder in holders if holder.pid not in ours]
    if foreign or not holders:
        who = ", ".join(str(holder) for holder in foreign) or "a process that is not visible to us"
        yield Finding(
            "port",
            f"{facts.say('server.port')} is taken by {who}",
            "a port that nobody listens on",
            ("stop that process, if it is yours", "write another server.port, or 0 for any free one"),
            "F15",
        )


def _prompts(facts: Facts) -> Iterator[Finding]:
    data, benchmark = facts.deployment.data, facts.deployment.benchmark
    own_file = benchmark.prompts != HOLDOUT
    counted: dict[str, int] = {}
    sources = {"data.prompts": data.prompts, **({"benchmark.prompts": benchmark.prompts} if own_file else {})}
    for key, name in sources.items():
        try:
            counted[key] = len(load_prompts(name))
        except (OSError, UnicodeDecodeError) as error:
            problem = f"{prompts_path(name)} cannot be read: {getattr(error, 'strerror', None) or error}"
        except SlipstreamError as error:
            problem = error.found
        else:
            continue
        yield Finding(
            "prompts",
            f"{facts.say(key)}: {problem}",
            'JSON lines, one {"id": ..., "category": ..., "turns": [...]} each',
            ("correct the path or the file", f"leave {key} out to use the prompts that ship with Slipstream"),
        )
    if len(counted) < len(sources):
        return
    there = counted["benchmark.prompts"] if own_file else held_out_count(counted["data.prompts"], data.holdout_fraction)
    if benchmark.num_prompts > there:
        what = "benchmark.prompts" if own_file else "data.holdout_fraction"
        yield Finding(
            "prompts",
            f"{facts.say('benchmark.num_prompts')}, but {facts.say(what)} gives {there}",
            "as many prompts as are asked for: one that is sent twice finds its answer's start in the cache",
            (f"write benchmark.num_prompts: {there}", f"change {what}"),
        )


def _target_there(facts: Facts) -> Iterator[Finding]:
    if facts.deployment.host.kind != "local" and facts.deployment.target.kind == "local":
        return  # a path on that host
    if facts.target_problem:
        yield Finding(
            "target",
            f"{facts.say('target.source')}: {facts.target_problem}",
            "a target that is there and that the engine can run",
            ("correct target.source",),
        )


def _whole_target(facts: Facts) -> Iterator[Finding]:
    """The stages beside the server know no tensor parallelism: each holds the whole target."""
    deployment, target = facts.deployment, facts.target
    gib, ours = deployment.host.gpu_memory_gib, deployment.server.engine == "slipstream"
    if target is None or gib is None or deployment.server.device != "cuda" or not ours or "extract" not in facts.remade:
        return
    size = BYTES[deployment.server.dtype]
    need, room = sum(weight_bytes(weight, target, size) for weight in target_weights(target)), gib * GIB
    if need > room:
        beside = costs(facts)["parity"].memory_bytes if "parity" in costs(facts) else need
        yield Finding(
            "whole-target",
            f"extract holds the whole target on one card, {human_bytes(need)} of weights: host.gpu_memory_gib = {gib:g}"
            f" is {human_bytes(room)}; resolve holds it in the host's memory, parity {human_bytes(beside)} there",
            "a target that one card holds: of the stages, only those that go through the server divide it over ranks",
            ("serve it with a draft that was trained elsewhere: `slipstream serve --draft DIR`",),
            severity="warning",
        )


MACHINE: tuple[Check, ...] = (
    Check("host", "the machine that was looked at is the one that is used", _far_host),
    Check("target", "the target is there and its kind is known", _target_there),
    Check("prompts", "the prompts are there and readable", _prompts),
    Check("disk", "the disk holds what the run writes", _disk),
    Check("memory", "the largest stage fits into memory", _memory),
    Check("whole-target", "each stage has room for what it holds of the target", _whole_target),
    Check("port", "nobody else holds the server's port (F15)", _port),
)
