"""Is an installed engine the one that was released? Every file against the hashes of its wheel's RECORD (F20).

Nothing of the engine is imported. A patched file, one that is gone, a Python file that the wheel did not bring, an
editable install, a build from a repository and a nightly are named. One digest stands for all files of its packages.
"""

import base64
import csv
import hashlib
import json
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

from slipstream.engine.engine_versions import Engine, neighbours
from slipstream.engine.errors import SlipstreamError

BLOCK_BYTES = 1 << 20
CODE = (".py", ".so", ".pyd")
THREADS = 4  # hashing leaves the interpreter lock; more would only fight for the disk
SHOWN = 20  # files of one kind in a message
SHOWN_CHARS = 120  # of a damaged row
ALGORITHMS = ("sha256", "sha384", "sha512", "md5", "sha1")  # the last two are of wheels older than their standard

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Fingerprint:
    """What is installed under a name.

    Args:
        name, version: as its metadata says.
        location: the directory that it is installed in.
        source: where it came from, when that is no package index ("editable: /src/sglang", "git ... at 9f2c1d4").
        files, size_bytes: what was hashed.
        changed, missing: recorded files whose content is another one, or that are gone; relative to `location`.
        extra: Python and shared-library files in its packages that were not recorded.
        digest: sha256 (hex) of the names and contents of all files of its packages, and of the version; the same on
            every machine with the same files.
        doubts: why its version says little: one sentence each.
    """

    name: str
    version: str
    location: Path
    source: str
    files: int
    size_bytes: int
    changed: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    digest: str
    doubts: tuple[str, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """Everything that speaks against it, one sentence each; empty for a released engine as it was released."""
        kinds = (
            (self.changed, "changed since the installation"),
            (self.missing, "missing"),
            (self.extra, "not of the wheel"),
        )
        return (*self.doubts, *(f"{_count(names)} {words}: {_some(names)}" for names, words in kinds if names))


def fingerprint(name: str, search: Sequence[str] | None = None, progress: Progress | None = None) -> Fingerprint:
    """Hashes an installed distribution.

    Args:
        name: of the distribution, such as sglang.
        search: directories to look in; None is where this Python looks.
        progress: called with (bytes done, bytes in all).

    Raises SlipstreamError (F20) when it is not installed, or when its METADATA or its RECORD is missing or damaged.
    """
    installed = list(_find(name, search)) if name else []
    if not installed:
        raise _error(
            f"{name or 'a package without a name'} is not installed in "
            f"{', '.join(search) if search else 'this Python'}",
            "an installed engine",
        )
    found = installed[0]
    root = Path(str(found.locate_file("")))
    label, version = _name_and_version(found, name, root)
    rows = _rows(found, f"{label} {version}")
    recorded = {path: expected for path, expected in rows if expected}
    bare = [path for path, expected in rows if not expected and path.endswith(CODE) and _is_file(root / path)]
    extra = _extra(root, {path for path, _ in rows})
    present = [path for path in recorded if _is_file(root / path)]
    hashes = _hash_all(root, [*present, *bare, *extra], recorded, progress)
    source, doubts = _source(found)
    others = sorted({str(d.version) for d in installed[1:] if Path(str(d.locate_file(""))) == root})
    if others:
        doubts.append(f"{root} holds a record of {label} {', '.join(others)}, too: one was installed over another")
    if bare:
        doubts.append(f"{_count(bare)} recorded without a hash: {_some(bare)}")
    return Fingerprint(
        name=label,
        version=version,
        location=root,
        source=source,
        files=len(hashes),
        size_bytes=sum((root / path).stat().st_size for path in hashes),
        changed=tuple(path for path in present if hashes[path] != recorded[path].rstrip("=")),
        missing=tuple(path for path in recorded if path not in hashes),
        extra=tuple(extra),
        digest=_digest(version, hashes),
        doubts=(*doubts, *_version_doubts(label, version)),
    )


def _name_and_version(found: Distribution, name: str, root: Path) -> tuple[str, str]:
    try:
        label, version = found.metadata["Name"], found.metadata["Version"]
    except UnicodeDecodeError:
        label, version = None, None
    if not label or not version:
        raise _error(f"METADATA of {name} in {root} is damaged: it gives no name and version", "a wheel's install")
    return str(label), str(version)


def _rows(found: Distribution, label: str) -> list[tuple[str, str]]:
    """(path, hash or "") of each row of RECORD. Raises SlipstreamError for one that cannot be checked: a row that is
    skipped would be a file that nobody looks at."""
    try:
        text = found.read_text("RECORD")
        rows = [] if text is None else [row for row in csv.reader(text.splitlines(), strict=True) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise _error(f"the RECORD of {label} is damaged: {error}", "a wheel's install") from None
    if text is None:
        raise _error(f"{label} has no RECORD, so that no file of it can be checked", "a wheel's install")
    for row in rows:
        if len(row) != 3 or not row[0] or (row[1] and row[1].partition("=")[0] not in ALGORITHMS):
            raise _error(
                f"the RECORD of {label} is damaged: {','.join(row)[:SHOWN_CHARS]!r} is no row of path, hash and size",
                f"a wheel's install, its hashes by {', '.join(ALGORITHMS)}",
            )
    if not any(row[1] for row in rows):
        raise _error(f"the RECORD of {label} has no hash, so that no file of it can be checked", "a wheel's install")
    return [(row[0], row[1]) for row in rows]


def _is_file(path: Path) -> bool:
    """False, too, for a name that no file can have."""
    try:
        return path.is_file()
    except OSError:
        return False


def search_path(python: Path) -> list[str]:
    """Where another Python looks for packages; it is started, isolated, to tell. Raises SlipstreamError if it fails."""
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", "import json, sys; print(json.dumps([p for p in sys.path if p]))"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return [str(path) for path in json.loads(done.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise _error(f"{python} does not run as a Python: {error}", "the interpreter that starts the engine") from None


def _find(name: str, search: Sequence[str] | None) -> Iterable[Distribution]:
    if search is None:
        return Distribution.discover(name=name)
    return Distribution.discover(name=name, path=list(search))


def _hash_all(
    root: Path, paths: Sequence[str], recorded: Mapping[str, str], progress: Progress | None
) -> dict[str, str]:
    """path -> `sha256=...` as RECORD writes it, by the algorithm that was recorded."""
    sizes = [(root / path).stat().st_size for path in paths]
    total, done = sum(sizes), 0
    result = {}

    def hashed(path: str) -> str:
        return _hash(root / path, recorded.get(path, "sha256=").partition("=")[0])

    with ThreadPoolExecutor(THREADS) as pool:
        for path, size, value in zip(paths, sizes, pool.map(hashed, paths), strict=True):
            result[path] = value
            done += size
            if progress is not None:
                progress(done, total)
    return result


def _hash(path: Path, algorithm: str) -> str:
    digest = hashlib.new(algorithm)
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return f"{algorithm}={base64.urlsafe_b64encode(digest.digest()).decode().rstrip('=')}"


def _extra(root: Path, recorded: set[str]) -> list[str]:
    """Python and shared-library files in its packages that no row of RECORD names."""
    found = []
    for package in _packages(recorded):
        for path in (root / package).rglob("*"):
            name = path.relative_to(root).as_posix()
            if name.endswith(CODE) and name not in recorded and path.is_file():
                found.append(name)
    return sorted(found)


def _packages(recorded: set[str]) -> list[str]:
    """The outermost directories with a recorded `__init__.py`: a name that others share is not all its own."""
    packages = sorted(path.removesuffix("/__init__.py") for path in recorded if path.endswith("/__init__.py"))
    outermost: list[str] = []
    for package in packages:
        if not any(package.startswith(f"{other}/") for other in outermost):
            outermost.append(package)
    return outermost


def _digest(version: str, hashes: dict[str, str]) -> str:
    """Without the installer's notes and the scripts, which name the interpreter's path: they differ by machine."""
    own = {p: h for p, h in hashes.items() if not p.startswith("..") and ".dist-info/" not in p}
    return hashlib.sha256(json.dumps([version, sorted(own.items())]).encode()).hexdigest()


def _source(found: Distribution) -> tuple[str, list[str]]:
    """(where it came from, what that leaves open), by direct_url.json; a package index leaves none."""
    text = found.read_text("direct_url.json")
    if text is None:
        return "", []
    try:
        told = json.loads(text)
        url = told["url"]
        kinds = {key: told[key] for key in ("dir_info", "vcs_info", "archive_info") if key in told}
        if not isinstance(url, str) or not all(isinstance(value, dict) for value in kinds.values()):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        return "unknown", ["direct_url.json is damaged: where it came from is not known"]
    directory = kinds.get("dir_info")
    if directory is not None and directory.get("editable"):
        return f"editable: {url}", [
            f"an editable install: what runs are the files of {url}, which RECORD does not list"
        ]
    if "vcs_info" in kinds:
        vcs = kinds["vcs_info"]
        words = f"{vcs.get('vcs', 'a repository')} {url} at {vcs.get('commit_id', 'an unknown commit')}"
        return words, [f"built from {words}: its version number is not that of a release"]
    if directory is not None:
        return f"built from {url}", [f"built from the directory {url}: its version number is not that of a release"]
    return f"the file {url}", []


def _version_doubts(name: str, version: str) -> list[str]:
    """What is not known of a release of an engine; other packages are released as they like."""
    if name.lower() not in list(Engine):
        return []
    try:
        neighbours(Engine(name.lower()), version)
    except SlipstreamError as error:
        return [error.found]
    return []


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} file" + ("s" if len(names) != 1 else "")


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _error(found: str, expected: str) -> SlipstreamError:
    return SlipstreamError(
        found,
        expected=expected,
        do="name the Python that starts the engine (--python) or its directory of packages (--site-packages)",
        fault="F20",
    )
