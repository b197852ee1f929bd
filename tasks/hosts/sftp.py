"""Files over SSH's own channel for files; a transfer goes on where it was cut."""

import threading
from pathlib import Path

import paramiko

from slipstream.tasks.hosts.host import Progress

BLOCK_BYTES = 1 << 18
FETCHED_BYTES = 1 << 15  # as paramiko asks ahead: longer reads search its list of answers and are 20 times slower


class Sftp:
    """The channel for files of a connection, one call at a time: paramiko's client loses the answer to one thread when
    another reads it. A fetch gives the lock back between two blocks, so that a log can be read beside it."""

    def __init__(self, client: paramiko.SFTPClient) -> None:
        self.client, self.lock = client, threading.RLock()

    def size(self, path: str) -> int:
        """Bytes of a file there; 0 when there is none."""
        try:
            with self.lock:
                return self.client.stat(path).st_size or 0
        except FileNotFoundError:
            return 0

    def read(self, path: str, offset: int, max_bytes: int) -> bytes:
        with self.lock, self.client.open(path, "rb") as file:
            file.seek(offset)
            return file.read(max_bytes)

    def send(self, source: Path, target: str, progress: Progress) -> None:
        """Writes what is missing at the end of `target`. Whoever else writes the same file writes the same bytes."""
        there = self.size(target)
        # Locked to its end: an answer to a write under way that another call read would be waited for for ever.
        with self.lock, source.open("rb") as file:
            if there > source.stat().st_size:
                self.client.remove(target)
                there = 0
            try:
                out = self.client.open(target, "r+b" if there else "wb")
            except FileNotFoundError:  # whoever else writes it was done meanwhile, and gave it its name
                if not there:
                    raise
                there, out = 0, self.client.open(target, "wb")
            with out:
                out.set_pipelined(True)  # not one round trip a block
                out.seek(there)
                file.seek(there)
                while block := file.read(BLOCK_BYTES):
                    out.write(block)
                    progress(file.tell())

    def fetch(self, source: str, target: Path, progress: Progress) -> None:
        """Reads what is missing at the end of `target`."""
        size, there = self.size(source), target.stat().st_size if target.exists() else 0
        if there > size:
            target.unlink()
            there = 0
        with target.open("ab") as out:
            with self.lock:
                file = self.client.open(source, "rb")
                file.seek(there)
                file.prefetch(size)
            try:
                while True:
                    with self.lock:
                        block = file.read(FETCHED_BYTES)
                    if not block:
                        return
                    out.write(block)
                    progress(out.tell())
            finally:
                with self.lock:
                    file.close()
