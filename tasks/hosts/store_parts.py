"""Parts of a hidden-state store for hosts that train together: which shards go to whom, and how they get there.

The first host holds all. Of the others each keeps what it extracted itself, as a share of the prompts, and is brought
what it lacks of an equal part: through this machine, where shares that were fetched lie already.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import sha256_file
from slipstream.engine.store_manifest import StoreManifest
from slipstream.tasks.hosts.far_stage import RUNS, run_name
from slipstream.tasks.hosts.host import Host
from slipstream.tasks.shares import STORE, STORE_MANIFEST, done_stores, share_name

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

Say = Callable[[str], None]


def store_path(run: str) -> str:
    """Of the whole store, on the first host. Args: run: the run's name there."""
    return f"{RUNS}/{run}/extract/{STORE}"


def part_path(run: str) -> str:
    """Of another host's part. Args: run: the run's name there."""
    return f"{RUNS}/{run}.train-part"


def choose_parts(sizes: Mapping[str, int], held: Sequence[set[str]]) -> list[list[str]]:
    """Which shards each host after the first holds: its own, and of the others until it has an equal share.

    Args:
        sizes: bytes of every shard, in the store's order.
        held: for each host after the first the shards that lie on it already.
    """
    share = sum(sizes.values()) / (len(held) + 1)
    parts = [[shard for shard in sizes if shard in own] for own in held]
    taken = {shard for part in parts for shard in part}
    for part in parts:
        for shard in (shard for shard in sizes if shard not in taken):
            if sum(sizes[own] for own in part) >= share:
                break
            part.append(shard)
            taken.add(shard)
        if not part:  # fewer shards than hosts
            part.append(next(iter(sizes)))
    return parts


def lay_parts(
    first: Host,
    others: Sequence[Host],
    store: StoreManifest,
    deployment: "Deployment",
    workdir: Path,
    temporary: Path,
    say: Say,
) -> list[list[str]]:
    """Gives each host after the first its part of the store; the manifest, of the whole, comes last.

    Args:
        first: holds the whole store of the run.
        others: the hosts after it.
        store: the whole store's manifest, which also lies in `temporary`.
        deployment, workdir: of the run, here.
        temporary: a folder for shards on their way.
        say: told what is sent, and what each host holds.

    Returns the parts, by names of shards. Raises SlipstreamError (F17) for a shard whose content is not as told.
    """
    run = run_name(workdir)
    digests = {shard.name: shard.sha256 for shard in store.shards}
    own = [_own_shards(host, run, len(others) + 1, temporary) for host in others]
    here = _shards_here(deployment, workdir)
    held = [{shard for shard, digest in digests.items() if digest in shards} for shards in own]
    parts = choose_parts({shard.name: shard.bytes for shard in store.shards}, held)
    for host, part, shards, kept in zip(others, parts, own, held, strict=True):
        for shard in part:
            digest, target = digests[shard], f"{part_path(run)}/{shard}"
            if _has(host, target, digest) or _linked(host, shards.get(digest), target, digest):
                continue
            passing = temporary / shard
            if digest not in here:
                first.get(f"{store_path(run)}/{shard}", passing, say=say)
            host.put(here.get(digest, passing), target, say=say)
            passing.unlink(missing_ok=True)
            if not _has(host, target, digest):
                raise SlipstreamError(
                    f"{shard} on {host.name} is not the shard that the store's manifest tells of",
                    expected=f"sha256 {digest[:12]}...",
                    do="run the extract stage again",
                    fault="F17",
                )
        host.put(temporary / STORE_MANIFEST, f"{part_path(run)}/{STORE_MANIFEST}")
        say(f"{host.name} holds {len(part)} of {len(digests)} shards, {len(kept)} of them its own")
    return parts


def _own_shards(host: Host, name: str, count: int, temporary: Path) -> dict[str, str]:
    """Digest -> path of the shards that the host extracted as shares of this run."""
    found: dict[str, str] = {}
    for number in range(count):
        folder = f"{RUNS}/{name}-{share_name((number, count))}/extract/{STORE}"
        if host.file_facts(f"{folder}/{STORE_MANIFEST}") is None:
            continue
        copy = temporary / "share"
        copy.mkdir(exist_ok=True)
        host.get(f"{folder}/{STORE_MANIFEST}", copy / STORE_MANIFEST)
        found |= {shard.sha256: f"{folder}/{shard.name}" for shard in StoreManifest.load(copy).shards}
    return found


def _shards_here(deployment: "Deployment", workdir: Path) -> dict[str, Path]:
    """Digest -> path of the shards of shares that were fetched to this machine."""
    found = {}
    for folder in done_stores(deployment, workdir):
        for shard in StoreManifest.load(folder).shards:
            path = folder / shard.name
            if path.is_file() and sha256_file(path) == shard.sha256:
                found[shard.sha256] = path
    return found


def _has(host: Host, path: str, digest: str) -> bool:
    facts = host.file_facts(path)
    return facts is not None and facts["sha256"] == digest


def _linked(host: Host, source: str | None, target: str, digest: str) -> bool:
    """Gives a file of the host a second name there, where it has that content."""
    if source is None:
        return False
    base = host.directory
    host.run(("mkdir", "-p", str(Path(f"{base}/{target}").parent)))
    host.run(("ln", "-f", f"{base}/{source}", f"{base}/{target}"))
    return _has(host, target, digest)
