"""The process of one of the ranks 1..n - 1: loads its part, then follows rank 0. Its last words go to rank 0."""

import argparse
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence

from slipstream.engine.serving.engine_options import EngineOptions
from slipstream.engine.serving.engine_process import EXIT_FAILED, STOP_SIGNALS, die_with, say_why
from slipstream.engine.serving.protocol import Channel, Connect, Here
from slipstream.engine.serving.ranks import EXIT_PEER_LOST, follow


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry: `python -P -m ... --socket=FD --store=FD --parent=PID --rank=R OPTIONS_JSON`."""
    parser = argparse.ArgumentParser(prog="slipstream-rank")
    for name in ("socket", "store", "parent", "rank"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("options", type=json.loads)
    told = parser.parse_args(arguments)
    die_with(told.parent)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=told.socket), "rank 0")
    try:
        run(channel, told.rank, told.store, EngineOptions.from_json(told.options))
    except BrokenPipeError:
        _end(EXIT_FAILED)  # rank 0 is gone, and has said why
    except Exception as error:
        _end(_exit_code(channel, error))  # here, where the error still holds the engine: to take that down may wait
    _end(0)


def _end(code: int) -> None:
    """At once: threads of the process group, and kernels on a card, may still wait for a peer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(channel: Channel, rank: int, store: int, options: EngineOptions) -> None:
    """Loads this rank's part and works until rank 0 says stop."""
    from slipstream.engine.rank_group import LOAD_SECONDS, PEER_SECONDS, be_patient, connect
    from slipstream.engine.serving.engine_build import build_engine

    channel.send(Here())
    for message in channel.receive(wait=True):
        if not isinstance(message, Connect):
            return  # rank 0 stops before it began
    parallel = connect(rank, options.tensor_parallel_size, store)
    os.close(store)
    be_patient(parallel, LOAD_SECONDS)
    engine, _ = build_engine(options, lambda _: None, parallel=parallel)
    gc.collect()
    gc.freeze()
    be_patient(parallel, PEER_SECONDS)
    follow(engine, channel)


def _exit_code(channel: Channel, error: Exception) -> int:
    from slipstream.kernels.all_gather import PeerLost

    if isinstance(error, PeerLost):
        return EXIT_PEER_LOST
    say_why(channel, error)
    return EXIT_FAILED


if __name__ == "__main__":
    main()
