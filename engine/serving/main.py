"""`python -m slipstream.engine.serving.main`: an OpenAI-compatible server of one target and its draft.

This process is the HTTP front; the engine runs in a child. Exit codes: 0 asked to stop, 1 could not start, 3 the engine
died while serving.
"""

import argparse
import asyncio
import errno
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import slipstream.kernels  # noqa: F401  (first: it sets what torch reads when it is imported)
from slipstream.engine.device import DEVICES
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.serving.engine_options import EngineOptions
from slipstream.engine.serving.engine_process import STOP_SIGNALS, start_engine_process

EXIT_COULD_NOT_START = 1
BACKLOG = 512
MAX_PORT = 65535


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Unknown flags are errors."""
    parser = argparse.ArgumentParser(prog="slipstream serve", allow_abbrev=False)
    parser.add_argument("--target", required=True, help="Hugging Face directory of the target")
    parser.add_argument("--draft", default="none", help="EAGLE-3 directory, or none")
    parser.add_argument("--num-steps", type=int, default=0, help="K, drafts a round; 0 is no speculation")
    parser.add_argument(
        "--choose-steps",
        action="store_true",
        help="each round's K from 0..num-steps: what pays by times measured at start and by what is accepted (a card)",
    )
    parser.add_argument("--served-model-name", help="default: the name of the target's directory")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port; the state file says which")
    parser.add_argument("--state-file", type=Path, help="JSON: pid, port, phase; written at start and when ready")
    parser.add_argument(
        "--leave-file",
        type=Path,
        help="while this file is there, /health says 503 to whoever balances load; requests are still answered",
    )
    parser.add_argument("--max-running-requests", type=int, default=8)
    parser.add_argument("--max-context-tokens", type=int, default=1024, help="prompt + answer")
    parser.add_argument("--block-size-tokens", type=int, default=16)
    parser.add_argument("--prefill-chunk-tokens", type=int, default=256)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--device", choices=DEVICES, default="auto", help="auto: the card where there is one, else the CPU"
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks that share every layer")
    parser.add_argument(
        "--threads", type=int, help="CPU threads of torch on each rank; default: its own choice, or cores / ranks"
    )
    parser.add_argument("--capture-slots", default="", help="comma-separated slots that traces hold beside the draft's")
    parser.add_argument("--diagnostics", action="store_true", help="serve /slipstream/trace")
    parser.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="FAULT",
        help="put this fault in on purpose (--diagnostics only)",
    )
    parser.add_argument("--shutdown-timeout-seconds", type=float, default=20.0, help="time for running requests to end")
    return parser.parse_args(arguments)


def check_arguments(options: argparse.Namespace) -> None:
    """What argparse cannot check, and the engine does not see. Raises SlipstreamError."""
    if not 0 <= options.port <= MAX_PORT:
        raise SlipstreamError(f"--port is {options.port}", expected=f"0 to {MAX_PORT}", do="choose another port")
    seconds = options.shutdown_timeout_seconds
    if not math.isfinite(seconds) or seconds < 0:
        raise SlipstreamError(f"--shutdown-timeout-seconds is {seconds}", expected="a finite number, 0 or more")
    if options.inject and not options.diagnostics:
        raise SlipstreamError(
            f"--inject {options.inject[0]} without --diagnostics",
            expected="faults on purpose only where their traces are looked at",
            do="add --diagnostics, or leave --inject out",
        )
    file = options.state_file
    if file is not None and not (file.parent.is_dir() and os.access(file.parent, os.W_OK) and not file.is_dir()):
        raise SlipstreamError(
            f"--state-file {file} cannot be written",
            expected="a file in a folder that exists and that we may write to",
            do=f"make the folder {file.parent.absolute()}, or name another file",
        )


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds host:port, before anything slow is begun. Raises SlipstreamError when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol named, asyncio sets TCP_NODELAY on what it accepts; without, an answer's last packet waits for
    # the client's delayed ACK: 40 ms a request.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)  # from now on a second server gets an error, and early clients wait
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        raise SlipstreamError(
            f"port {port} of {host} is taken" if taken else f"cannot listen on {host}:{port}: {error}",
            expected="a free port" if taken else "an address of this machine and a port that we may use",
            do="stop what holds it (`ss -ltnp` names it), or choose another port; 0 is any free one",
            fault="F15" if taken else "",
        ) from error
    listener.setblocking(False)
    return listener


def engine_options(options: argparse.Namespace) -> EngineOptions:
    """The engine's part of the command line. Raises SlipstreamError for what is wrong before anything is loaded."""
    try:
        capture = tuple(int(slot) for slot in options.capture_slots.split(",") if slot)
    except ValueError as error:
        raise SlipstreamError(
            f"--capture-slots is {options.capture_slots!r}", expected="numbers, as 2,15,27"
        ) from error
    result = EngineOptions(
        target=str(Path(options.target).absolute()),
        draft=None if options.draft == "none" else str(Path(options.draft).absolute()),
        num_steps=options.num_steps,
        max_running_requests=options.max_running_requests,
        max_context_tokens=options.max_context_tokens,
        block_size_tokens=options.block_size_tokens,
        prefill_chunk_tokens=options.prefill_chunk_tokens,
        dtype=options.dtype,
        threads=options.threads,
        capture_slots=capture,
        diagnostics=options.diagnostics,
        inject=tuple(options.inject),
        tensor_parallel_size=options.tensor_parallel_size,
        device=options.device,
        choose_steps=options.choose_steps,
    )
    result.check()
    return result


def stop_at_signals(process: subprocess.Popen[bytes]) -> None:
    """Until the front handles signals itself, one ends engine and front at once: nobody has been served yet."""

    def stop(*_: object) -> None:
        process.kill()
        process.wait()
        print("slipstream server: stopped", flush=True)
        os._exit(0)

    for number in STOP_SIGNALS:
        signal.signal(number, stop)


def main(arguments: Sequence[str] | None = None) -> int:
    """Binds, starts the engine, serves. Returns the exit code."""
    options = parse_arguments(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        check_arguments(options)
        engine = engine_options(options)
        listener = bind(options.host, options.port)
        process, connection = start_engine_process(engine)
    except SlipstreamError as error:
        print(f"slipstream server: {error}", file=sys.stderr)
        return EXIT_COULD_NOT_START
    stop_at_signals(process)
    try:
        from slipstream.engine.serving.front import serve  # slow: it loads while the engine does

        return asyncio.run(serve(options, listener, connection, process))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
