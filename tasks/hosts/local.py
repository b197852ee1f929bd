"""This machine as a host: the same archive, without a network."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from slipstream.engine.files import write_atomic
from slipstream.tasks.hosts.archive import build_archive
from slipstream.tasks.hosts.far_side import MODULE
from slipstream.tasks.hosts.host import HostUnreachable, Progress
from slipstream.tasks.hosts.scripted import ScriptedHost
from slipstream.tasks.process import NEUTRAL_DIRECTORY


class LocalHost(ScriptedHost):
    """This machine. Jobs outlive us here as on a far host.

    Args:
        base: directory of jobs and files.
        command_seconds: limit of a short command.
    """

    def __init__(self, base: Path, *, command_seconds: float = 60.0) -> None:
        self._folder = base.expanduser().absolute()
        super().__init__(str(self._folder), command_seconds=command_seconds, reconnect_seconds=0.0)

    @property
    def name(self) -> str:
        return "this machine"

    def _read(self, path: str, offset: int, max_bytes: int) -> bytes:
        with (self._folder / path).open("rb") as file:
            file.seek(offset)
            return file.read(max_bytes)

    def close(self) -> None:
        """Nothing to end."""

    def _exchange(self, request: bytes, mark: str, seconds: float) -> tuple[int, str]:
        archive = build_archive()
        path = self._folder / archive.path
        if not path.is_file():
            for folder in (self._folder, path.parent):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(path, archive.data)
        command = [sys.executable, "-I", str(path), MODULE]
        helper = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=NEUTRAL_DIRECTORY,
            start_new_session=True,
            env=os.environ.copy(),
        )
        assert helper.stdout is not None
        try:
            answer, _ = helper.communicate(request, timeout=seconds)
        except subprocess.TimeoutExpired as error:
            helper.kill()
            helper.communicate()
            raise HostUnreachable(f"no answer of {self.name} after {seconds:.0f} s", expected="an answer") from error
        except BaseException:
            helper.stdout.close()  # as a connection that ends: it ends a command, and brings a stop to its end
            raise
        return helper.returncode, answer.decode(errors="replace")

    def _send(self, source: Path, target: str, progress: Progress) -> str:
        shutil.copyfile(source, self._folder / target)
        return "copy"

    def _fetch(self, source: str, target: Path, progress: Progress) -> str:
        shutil.copyfile(self._folder / source, target)
        return "copy"
