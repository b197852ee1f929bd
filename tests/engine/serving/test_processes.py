"""Real servers in processes of their own: how they end, and what they leave behind (nothing)."""

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

LONG = {"prompt": "abc", "max_tokens": 120, "ignore_eos": True, "stream": True}


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def busy(server):
    """Keeps the server decoding in a thread. Returns (thread, lines received)."""
    lines: list[str] = []
    began = threading.Event()

    def read():
        try:
            with server.client() as client, client.stream("POST", "/v1/completions", json=LONG) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    began.set()
        except httpx.HTTPError as error:
            lines.append(f"broken: {type(error).__name__}")
        began.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert began.wait(60)
    return thread, lines


def run_to_end(command):
    """Exit code and output of a server that is expected to end by itself."""
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return result.returncode, result.stdout + result.stderr


def test_kill_9_of_the_engine_ends_streams_with_an_error_and_the_server(tiny_server, tiny_models, tmp_path):
    server = tiny_server.start(tmp_path, tiny_models)
    os.kill(server.engine_pid, signal.SIGSTOP)  # so that the stream below is surely unfinished when the engine dies
    lines: list[str] = []

    def read():
        with server.client() as client, client.stream("POST", "/v1/completions", json=LONG) as answer:
            lines.extend(answer.iter_lines())

    thread = threading.Thread(target=read)
    thread.start()
    wait_for(lambda: httpx.get(f"{server.url}/health", timeout=10).json()["in_flight"] == 1)
    os.kill(server.engine_pid, signal.SIGKILL)
    thread.join(60)
    assert server.process.wait(60) == 3
    assert f"the engine process (pid {server.engine_pid}) was ended by SIGKILL" in server.log.read_text()
    *_, last = [line for line in lines if line]
    assert '"code":"engine_gone"' in last
    assert "SIGKILL" in last
    assert gone(server.engine_pid)
    assert not (tmp_path / "state.json").exists()


def test_kill_9_of_the_front_takes_the_engine_along(tiny_server, tiny_models, tmp_path):
    server = tiny_server.start(tmp_path, tiny_models)
    thread, _ = busy(server)
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(60)
    wait_for(lambda: gone(server.engine_pid))
    thread.join(60)
    with socket.socket() as probe:  # the port is free again
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", server.state["port"]))


def test_sigterm_to_the_whole_group_lets_a_running_request_finish(tiny_server, tiny_models, tmp_path):
    server = tiny_server.start(tmp_path, tiny_models, 0)
    thread, lines = busy(server)
    os.killpg(server.process.pid, signal.SIGTERM)
    thread.join(60)
    assert server.process.wait(60) == 0
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in [line for line in lines if line][-2]
    assert "stopped" in server.log.read_text()
    assert gone(server.engine_pid)


def test_sigterm_while_it_loads_ends_it(tiny_server, tiny_models, tmp_path):
    server = tiny_server.start(tmp_path, tiny_models, wait=False)
    assert server.stop() == 0
    assert not (tmp_path / "state.json").exists()


def test_a_taken_port_is_told_before_anything_is_loaded(tiny_server, tiny_models):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        code, output = run_to_end(tiny_server.command(tiny_models, 3, port=port))
    assert code == 1
    assert f"F15: port {port} of 127.0.0.1 is taken" in output
    assert "Traceback" not in output


def test_a_truncated_safetensors_file_is_named(tiny_server, tiny_models, tmp_path):
    target = tmp_path / "target"
    shutil.copytree(tiny_models.target, target)
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    code, output = run_to_end(tiny_server.command(tiny_server.Models(target, tiny_models.draft), 3))
    assert code == 1
    assert f"{file} (" in output
    assert "a truncated copy looks like this" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--draft", "none"), "num_steps is 3, but there is no draft"),
        (("--num-steps", "0"), "but num_steps is 0"),
        (("--num-steps", "9"), "num_steps = 9"),
        (("--capture-slots", "2;3"), "--capture-slots is '2;3'"),
        (("--max-contxt-tokens", "3"), "unrecognized arguments"),
    ],
)
def test_flags_that_cannot_be_are_refused(tiny_server, tiny_models, flags, words):
    code, output = run_to_end([*tiny_server.command(tiny_models, 3), *flags])
    assert code in (1, 2)
    assert words in output
    assert "Traceback" not in output
