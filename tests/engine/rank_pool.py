"""Ranks for tests: processes started once, and groups of the first 1, 2, 4 or 8 of them that run a function together.

Also the program of such a process: `python -P rank_pool.py RANK SIZES CONNECTION STORE`.
"""

import importlib.util
import os
import pickle
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import ModuleType
from typing import Any

SIZES = (1, 2, 4, 8)
JOB_SECONDS = 240.0
PEER_SECONDS = 30.0


class RankPool:
    """`size` processes, each of which is rank r of every group that it belongs to."""

    def __init__(self, size: int) -> None:
        from slipstream.engine.rank_group import make_store

        store = make_store()
        self._connections: list[Any] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        sizes = ",".join(str(s) for s in SIZES if s <= size)
        for rank in range(size):
            ours, theirs = Pipe()
            command = [sys.executable, "-P", __file__, str(rank), sizes, str(theirs.fileno()), str(store)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno(), store], env=environment))
            theirs.close()
            self._connections.append(ours)
        os.close(store)

    def run(self, size: int, path: Path, function: str, *args: Any) -> list[Any]:
        """function(parallel, *args) of the module at `path`, on `size` ranks: their results in rank order.

        Raises RuntimeError with the text of what a rank raised.
        """
        connections = self._connections[:size]
        for connection in connections:
            _send(connection, (size, str(path), function))
            _send(connection, args)  # apart: the module that pickle looks for must be loaded by then
        answers = [_receive(connection) if connection.poll(JOB_SECONDS) else "no answer" for connection in connections]
        faults = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if isinstance(answer, str)]
        if faults:
            raise RuntimeError("\n".join(faults))
        return [answer[0] for answer in answers]

    def stop(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _send(connection: Any, value: Any) -> None:
    connection.send_bytes(pickle.dumps(value))  # not `send`: torch makes that hand out shared memory


def _receive(connection: Any) -> Any:
    return pickle.loads(connection.recv_bytes())


def _load(path: Path) -> ModuleType:
    """As tests/conftest.py does, under the same name."""
    name = f"slipstream_tests_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def work(rank: int, sizes: list[int], connection: Any, store: int) -> None:
    from slipstream.engine.rank_group import connect

    groups = {s: connect(rank, s, store, name=f"of {s}", peer_seconds=PEER_SECONDS) for s in sizes if rank < s}
    while True:
        try:
            size, path, function = _receive(connection)
        except EOFError:
            return
        try:
            module = _load(Path(path))
            answer: Any = (getattr(module, function)(groups[size], *_receive(connection)),)
        except Exception as error:
            answer = f"{error}\n{traceback.format_exc()}"
        _send(connection, answer)


if __name__ == "__main__":
    import slipstream.kernels  # noqa: F401  (first: it sets what torch reads when it is imported)

    work(int(sys.argv[1]), [int(s) for s in sys.argv[2].split(",")], Connection(int(sys.argv[3])), int(sys.argv[4]))
