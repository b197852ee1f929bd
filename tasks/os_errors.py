"""A full disk and other errors of the system, in words for people."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.engine.errors import SlipstreamError

FULL_DISK_BYTES = 1 << 20  # less free space than this, and a failed write is taken for a full disk
FULL_DISK_WORDS = ("no space left", "disk is full", "quota exceeded")
FAILED_WRITE_WORDS = ("writ", "iostream", "inline_container")  # the latter two are torch.save's


@contextmanager
def explain_os_errors(stage: str, workdir: Path) -> Iterator[None]:
    """Turns a full disk and other errors of the system into errors for people."""
    try:
        yield
    except SlipstreamError:
        raise
    except Exception as error:
        free = _free_bytes(workdir)
        kept = f"Nothing is lost: finished stages and {stage}.partial stay in {workdir}, and the next run resumes."
        if is_disk_full(error, workdir):
            raise SlipstreamError(
                f"the disk of {workdir} is full ({free / 1e6:.1f} MB free) in stage {stage}: {error}",
                expected="room for the stage's output (`slipstream plan` estimates it)",
                do=f"free space or set host.workdir to a larger disk, then run the same command again. {kept}",
                runbook="disk-full.md",
            ) from error
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise SlipstreamError(
                f"stage {stage} may not write: {error}",
                expected=f"a workdir that user {os.getuid()} can write",
                do=f"change the owner of {workdir} or set host.workdir to another folder. {kept}",
            ) from error
        raise


def takes_nothing(error: OSError) -> bool:
    """Whether the file system takes no byte more, from nobody: it is full, or it is mounted read-only by now."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def is_disk_full(error: BaseException | None, folder: Path) -> bool:
    """Whether an error, or what caused it, is a full disk.

    Python says so by errno; safetensors and torch only in words, or by any failed write while no space is left.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        text = str(error).lower()
        if any(words in text for words in FULL_DISK_WORDS):
            return True
        if any(words in text for words in FAILED_WRITE_WORDS) and _free_bytes(folder) < FULL_DISK_BYTES:
            return True
        error = error.__cause__ or error.__context__
    return False


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
