"""Brings Slipstream itself to a host: this wheel, these versions, these very files, in an environment of its own there.

The environment is keyed by all that it is made of: the same one is never made twice, and a changed one never takes
another's place. It is made by a job on the host, which goes on without us.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import sha256_file, write_atomic
from slipstream.tasks.hosts.follow import run_job
from slipstream.tasks.hosts.host import Host, Job
from slipstream.tasks.hosts.make_environment import ENVIRONMENTS, MODULE, READY
from slipstream.tasks.manifest import digest, write_json

PACKAGE = "slipstream"
SELF_TEST = "slipstream.kernels.self_test"
CURRENT = f"{ENVIRONMENTS}/current.json"  # names the environment that was asked for last
WHEELS = "wheels"  # below Slipstream's directory on the host, by content
BUILD_SECONDS = 300.0
EPOCH = "315532800"  # 1980: the same sources give the same wheel, byte for byte


@dataclass(frozen=True)
class Environment:
    """An environment on a host.

    Args:
        key: of all that it is made of.
        python: its interpreter.
        packages: name==version.
        self_test: what the self-test said.
        was_there: whether it was there already.
        lock: every package but Slipstream with the SHA-256 of the file that it came from.
    """

    key: str
    python: str
    packages: tuple[str, ...]
    self_test: dict[str, Any]
    was_there: bool
    lock: tuple[str, ...] = ()


def provision(
    host: Host,
    wheel: Path,
    *,
    python: str,
    wheelhouse: Path | None = None,
    constraints: str | None = None,
    lock: Path | None = None,
    env: dict[str, str] | None = None,
    self_test: str = SELF_TEST,
    say: Callable[[str], None] = lambda _: None,
) -> Environment:
    """Makes the environment on the host, or finds it.

    Args:
        host: where.
        wheel: Slipstream's own.
        python: there, 3.11 or 3.12.
        wheelhouse: folder of wheels that holds all that Slipstream needs, for a host without a registry.
        constraints: name==version lines; None: the versions installed here.
        lock: file of the hashes of every package; where there is none yet, it is written once the environment works.
        env: variables of the job that makes it.
        self_test: module of the package that shows whether it can compute.
        say: told the job's output.

    Raises SlipstreamError with the last lines of the output where a step failed.
    """
    constraints = installed_versions() if constraints is None else constraints
    wheels = [] if wheelhouse is None else sorted(wheelhouse.glob("*.whl"))
    if wheelhouse is not None and not wheels:
        raise SlipstreamError(
            f"there is no wheel in {wheelhouse}",
            expected="the wheels of Slipstream and of all that it needs, for the host's Python",
            do=f"fill it where a registry is: pip download --dest {wheelhouse} {wheel.name}",
        )
    hashes = {path.name: sha256_file(path) for path in (wheel, *wheels)}
    locked = _read_lock(lock, constraints)
    key = digest([hashes, constraints, locked, python, host.hello()["python"], self_test])[:16]
    found = _ready(host, key)
    if found is not None:
        if lock is not None and not locked:
            _write_lock(lock, constraints, _lock_of(found, host, key))
            say(f"locked {len(found['lock'])} packages by their hashes in {lock}, as they are there already")
        _note_current(host, key, found)
        return Environment(key, **found, was_there=True)
    base = host.directory
    place = f"{WHEELS}/{key}"
    for path in (wheel, *wheels):
        _send_once(host, path, f"{place}/{path.name}", hashes[path.name], say)
    spec = {
        "wheel": f"{base}/{place}/{wheel.name}",
        "constraints": f"{base}/{ENVIRONMENTS}/{key}.txt",
        "lock": f"{base}/{ENVIRONMENTS}/{key}.lock" if locked else "",
        "wheelhouse": f"{base}/{place}" if wheels else "",
        "self_test": self_test,
    }
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "spec", spec)
        (Path(folder) / "constraints").write_text(constraints)
        host.put(Path(folder) / "constraints", f"{ENVIRONMENTS}/{key}.txt")
        if locked:
            own = f"{spec['wheel']} --hash=sha256:{hashes[wheel.name]}"
            (Path(folder) / "lock").write_text("\n".join([*locked, own]) + "\n")
            host.put(Path(folder) / "lock", f"{ENVIRONMENTS}/{key}.lock")
        host.put(Path(folder) / "spec", f"{ENVIRONMENTS}/{key}.json")
    command = (python, "-I", host.archive_path, MODULE, f"{base}/{ENVIRONMENTS}/{key}.json")
    lines: list[str] = []

    def heard(line: str) -> None:
        lines.append(line)
        say(line)

    job = Job(f"provision-{key}", command, env=env or {})
    ended = run_job(host, job, heard, again=True)
    made = _ready(host, key)
    if ended.exit_code != 0 or made is None:
        raise SlipstreamError(
            f"no environment on {host.name} (job {ended.state}, exit code {ended.exit_code}); its last lines:\n"
            + "\n".join(lines[-15:]),
            expected="an environment that passes its self-test",
            do=f"correct what the last line names and give the same command again; the log is {ended.log}",
            runbook="first-deployment.md",
        )
    _note_current(host, key, made)
    if lock is not None and not locked:
        _write_lock(lock, constraints, made["lock"])
        say(f"locked {len(made['lock'])} packages by their hashes in {lock}; the next host gets the very same files")
    return Environment(key, **made, was_there=False)


def _read_lock(lock: Path | None, constraints: str) -> list[str]:
    """The requirements of a lock file; none where there is none yet. Raises SlipstreamError on other versions."""
    if lock is None or not lock.is_file():
        return []
    first, *lines = lock.read_text(encoding="utf-8").splitlines()
    if first != _first_line(constraints):
        raise SlipstreamError(
            f"{lock} locks other versions than those installed here",
            expected=f"the first line {_first_line(constraints)!r}",
            do=f"delete {lock} to lock the present versions at the next host, or install its versions here",
            runbook="first-deployment.md",
        )
    return [line for line in lines if line.strip()]


def _lock_of(found: dict[str, Any], host: Host, key: str) -> Sequence[str]:
    """The hashes of an environment that is there. Raises SlipstreamError where none were noted when it was made."""
    if not found["lock"]:
        raise SlipstreamError(
            f"the environment {key} on {host.name} has no hashes: no lock can be written of it",
            expected="the hashes that are noted when an environment is made",
            do=f"delete {host.directory}/{ENVIRONMENTS}/{key} there and give the same command again",
            runbook="first-deployment.md",
        )
    return tuple(found["lock"])


def _write_lock(lock: Path, constraints: str, lines: Sequence[str]) -> None:
    lock.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(lock, "\n".join([_first_line(constraints), *lines, ""]).encode())


def _first_line(constraints: str) -> str:
    return f"# slipstream: files of versions {digest(constraints)[:16]}"


def build_wheel(folder: Path) -> Path:
    """Builds Slipstream's wheel from the checkout that this runs from. Raises SlipstreamError where there is none."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():
        raise SlipstreamError(
            "Slipstream runs from an installed wheel: there are no sources to build one from",
            expected="a checkout, or the wheel itself",
            do="give the wheel that was installed here: --wheel FILE",
        )
    sources = folder / "sources"  # a copy: a build leaves files behind, which would get into the next wheel
    _copy_sources(root, sources)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(sources)],
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        cwd=folder,
        env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH},
    )
    found = sorted(folder.glob(f"{PACKAGE}-*.whl"))
    if done.returncode != 0 or not found:
        raise SlipstreamError(
            f"the wheel cannot be built: {done.stderr.strip()[-1000:]}",
            expected="a wheel of the checkout",
            do="build it where a registry is (`pip wheel --no-deps .`) and give it: --wheel FILE",
        )
    return found[0]


def _copy_sources(root: Path, target: Path) -> None:
    """What the wheel is made of: pyproject.toml, the files that it names, and the rooms."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    target.mkdir()
    for name in ("pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]):
        shutil.copyfile(root / name, target / name)
    for room in project["tool"]["setuptools"]["package-dir"].values():
        shutil.copytree(root / room, target / room, ignore=shutil.ignore_patterns("__pycache__"))


def installed_versions(package: str = PACKAGE) -> str:
    """name==version of everything that a package needs, as installed here, one a line.

    Local labels (+cpu) are left out: the host's build of that version may be another.
    """
    needed: dict[str, str] = {}
    waiting = list(_needs(package))
    while waiting:
        name = waiting.pop()
        if name in needed:
            continue
        try:
            needed[name] = distribution(name).version.partition("+")[0]
        except PackageNotFoundError:
            continue  # of another platform, or optional
        waiting += _needs(name)
    return "".join(f"{name}=={version}\n" for name, version in sorted(needed.items()))


def _needs(name: str) -> Iterator[str]:
    """What an installed package needs without any extra."""
    try:
        requires = distribution(name).requires or []
    except PackageNotFoundError:
        return
    for text in requires:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name)


def _ready(host: Host, key: str) -> dict[str, Any] | None:
    """What the host's ready.json says; None when there is none."""
    found = host.read_json(f"{ENVIRONMENTS}/{key}/{READY}")
    return None if found is None else {**found, **{key: tuple(found.get(key, ())) for key in ("packages", "lock")}}


def _note_current(host: Host, key: str, ready: dict[str, Any]) -> None:
    """Stages run in this environment from now on."""
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "current", {"key": key, "python": ready["python"]})
        host.put(Path(folder) / "current", CURRENT)


def _send_once(host: Host, path: Path, target: str, sha256: str, say: Callable[[str], None]) -> None:
    facts = host.file_facts(target)
    if facts is None or facts["sha256"] != sha256:
        say(f"sending {path.name} ({path.stat().st_size / 1e6:.1f} MB)")
        host.put(path, target, say=say)
