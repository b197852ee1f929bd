"""Lines of a log, streamed: plain or gzip, any encoding, torn at the end, of any size."""

import codecs
import re
import shutil
import stat
import tempfile
import weakref
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import IO

from slipstream.engine.errors import SlipstreamError

CHUNK = 1 << 18  # bytes read at a time
PIECE = 1 << 14  # bytes decompressed at a time: at most these are lost where a file is damaged
LONGEST_LINE = 1 << 20  # bytes; what is longer comes in pieces
_COLOURS = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
_GZIP = 16 + zlib.MAX_WBITS
_UTF16 = re.compile(rb"\xff\xfe[^\0]\0|\xfe\xff\0[^\0]")  # as a redirection of PowerShell writes text


class LogFile:
    """A file to read. Raises SlipstreamError when it cannot be opened or holds nothing.

    torn: set by reading when a compressed stream ended before its end; what came before was read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.torn = path, ""
        self._kept: IO[bytes] | None = None  # what came through a pipe, which can be read once only
        try:
            if stat.S_ISCHR(path.stat().st_mode):
                raise OSError(0, "it is a device")
            with path.open("rb") as file:
                if not file.seekable():
                    self._kept = tempfile.TemporaryFile()  # noqa: SIM115  (closed with this object)
                    weakref.finalize(self, self._kept.close)
                    shutil.copyfileobj(file, self._kept)
                    self._kept.seek(0)
                start = (self._kept or file).read(4)
        except OSError as error:
            raise SlipstreamError(
                f"{path} cannot be read: {error.strerror or error}",
                expected="a server's log, a metrics page, or JSON of meta_info or /server_info; .gz is read as well",
                do="correct the path",
            ) from None
        if not start:
            raise SlipstreamError(
                f"{path} is empty",
                expected="a server's log with lines of speculation, a metrics page, or JSON",
                do="look whether the server writes to another file (its standard error), or died before its first line",
            )
        self._gzip, self._utf16 = start[:2] == b"\x1f\x8b", _UTF16.match(start) is not None

    def lines(self) -> Iterator[bytes]:
        """Lines without their end and without colours."""
        rest = b""
        for chunk in self.chunks():
            *whole, rest = (rest + chunk).split(b"\n")
            yield from map(_clean, whole)
            while len(rest) > LONGEST_LINE:
                yield _clean(rest[:LONGEST_LINE])
                rest = rest[LONGEST_LINE:]
        if rest:
            yield _clean(rest)

    def chunks(self) -> Iterator[bytes]:
        """The file's bytes, decompressed."""
        if self._kept is not None:
            self._kept.seek(0)
        with self.path.open("rb") if self._kept is None else nullcontext(self._kept) as file:
            raw = iter(lambda: file.read(CHUNK), b"")
            if self._utf16:
                raw = _from_utf16(raw)
            yield from self._decompressed(raw) if self._gzip else raw

    def _decompressed(self, raw: Iterator[bytes]) -> Iterator[bytes]:
        stream = zlib.decompressobj(_GZIP)
        for data in raw:
            while data:
                if stream.eof:  # several compressed files, one after the other
                    stream = zlib.decompressobj(_GZIP)
                try:
                    out = stream.decompress(data, PIECE)
                except zlib.error as error:
                    self.torn = f"the compressed file is damaged ({error}); what came before was read"
                    return
                data = stream.unused_data if stream.eof else stream.unconsumed_tail
                if out:
                    yield out
        if not stream.eof:
            self.torn = "the compressed file ends too early; what came before was read"


def _from_utf16(raw: Iterator[bytes]) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-16")("replace")
    for data in raw:
        yield decoder.decode(data).encode("utf-8", "replace")


def _clean(line: bytes) -> bytes:
    line = line.rstrip(b"\r")
    return _COLOURS.sub(b"", line) if b"\x1b" in line else line
