"""Connecting to what does not answer: it ends within its limit, as an error that says what happened, or by a signal."""

import os
import signal
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest

from slipstream.configs.ssh_address import SshAddress
from slipstream.engine.errors import SlipstreamError
from slipstream.flows.signals import unwinding_signals
from slipstream.tasks.hosts.host import HostUnreachable
from slipstream.tasks.hosts.ssh_connection import SshConnection, shown_key
from slipstream.tasks.hosts.tcp import connect_tcp

LIMIT_SECONDS = 0.5
PATIENCE_SECONDS = 600.0  # what a host that is waited for gets: a test that waits for it fails by its time
ENOUGH_SECONDS = 30.0  # far below the patience, far above the limits, on a busy machine


@contextmanager
def refused(ssh_tools):
    yield SshAddress("127.0.0.1", ssh_tools.free_port(), "x")


@contextmanager
def unknown_name(ssh_tools):
    yield SshAddress("no-such-host.invalid", 22, "x")


@contextmanager
def packets_dropped(ssh_tools):
    """A listener whose queue is full: the kernel answers nothing to one more."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(8):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        yield SshAddress("127.0.0.1", full.getsockname()[1], "x")


@contextmanager
def no_banner(ssh_tools):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield SshAddress("127.0.0.1", silent.getsockname()[1], "x")


@contextmanager
def no_ssh(ssh_tools):
    """A server of something else, which speaks first and goes on."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"220 mail ready\r\n")

        threading.Thread(target=speak, daemon=True).start()
        yield SshAddress("127.0.0.1", server.getsockname()[1], "x")
        server.shutdown(socket.SHUT_RDWR)


WAYS = {
    refused: "Connection refused",
    unknown_name: r"Name or service not known|name resolution|No address|no name server told",
    packets_dropped: "no answer in time",
    no_banner: r"no SSH server answered there in time|banner",
    no_ssh: "banner",
}


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def silent(request, ssh_tools):
    """(an address at which no host answers, the words of the error)."""
    with request.param(ssh_tools) as address:
        yield address, WAYS[request.param]


def test_a_host_that_never_answered_is_not_waited_for(silent, ssh_server, tmp_path):
    address, words = silent
    options = {"address": address, "connect_seconds": LIMIT_SECONDS, "reconnect_seconds": PATIENCE_SECONDS}
    host = ssh_server.host(tmp_path / "far", **options)
    began = time.monotonic()
    with pytest.raises(HostUnreachable, match=f"cannot be reached: .*({words})") as error:
        host.hello()
    assert time.monotonic() - began < ENOUGH_SECONDS
    assert str(address) in error.value.found
    assert error.value.expected
    assert "host.address" in error.value.do
    assert error.value.runbook == "host-unreachable.md"
    with pytest.raises(HostUnreachable, match=words):  # and the way of `slipstream host trust`
        shown_key(host.target, address)


def test_a_host_behind_a_jump_that_does_not_answer(ssh_server, ssh_tools, tmp_path):
    options = {"jumps": (ssh_server.address,), "connect_seconds": 5.0, "reconnect_seconds": PATIENCE_SECONDS}
    to = SshAddress("127.0.0.1", ssh_tools.free_port(), "x")
    began = time.monotonic()
    with pytest.raises(HostUnreachable, match=f"{to} cannot be reached"):
        ssh_server.host(tmp_path / "far", address=to, **options).hello()
    assert time.monotonic() - began < ENOUGH_SECONDS


def test_a_host_without_a_cable(machine, tmp_path):
    """Packets go out into nothing, or the network says that there is no way: both within the limit."""
    one = machine()
    host = one.host(one.base, connect_seconds=LIMIT_SECONDS, reconnect_seconds=PATIENCE_SECONDS)
    one.unplug()
    began = time.monotonic()
    with pytest.raises(HostUnreachable, match="cannot be reached"):
        host.hello()
    assert time.monotonic() - began < ENOUGH_SECONDS


def test_a_name_server_that_is_silent_has_the_limit_too(monkeypatch):
    held = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [held.wait()])
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no name server told the address of gpu1 within 0\.2 s"):
        connect_tcp("gpu1", 22, 0.2)
    assert time.monotonic() - began < ENOUGH_SECONDS
    held.set()


def test_the_next_address_of_a_name_is_tried(ssh_tools, monkeypatch):
    """As where this machine has no way to a name's address of IPv6: one is dead, one is silent, one is right."""
    with packets_dropped(ssh_tools) as dropped, socket.create_server(("127.0.0.1", 0)) as server:
        ports = [ssh_tools.free_port(), dropped.port, server.getsockname()[1]]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)) for port in ports]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        with connect_tcp("gpu1", 22, 2.0) as connection:
            assert connection.getpeername()[1] == ports[-1]


class DyingRelay:
    """Carries to and from an SSH server, until that has said `bytes`; then ends both ways, or lets them stand mute."""

    def __init__(self, port, after_bytes, *, freezes):
        self._to, self._left, self._freezes = port, after_bytes, freezes
        self.said = 0
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.port = self._sockets[0].getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self):
        with suppress(OSError):
            near, _ = self._sockets[0].accept()
            far = socket.create_connection(("127.0.0.1", self._to))
            self._sockets += [near, far]
            threading.Thread(target=self._up, args=(near, far), daemon=True).start()
            while self.said < self._left and (block := far.recv(min(4096, self._left - self.said))):
                near.sendall(block)
                self.said += len(block)
            if not self._freezes:
                self.close()

    def _up(self, near, far):
        with suppress(OSError):
            while block := near.recv(4096):
                if self.said < self._left:
                    far.sendall(block)


def talk(server, relay, limit_seconds):
    """All of what the first question over a new connection does."""
    address = SshAddress("127.0.0.1", relay.port, server.address.user)
    server.trust(address)
    target = server.target(address=address, connect_seconds=limit_seconds, keepalive_seconds=1)
    connection = SshConnection(target)
    try:
        connection.sftp().client.normalize(".")
        return connection.ask("echo answer; cat > /dev/null", b"", b"answer", limit_seconds)
    finally:
        connection.close()


@pytest.mark.parametrize("freezes", [False, True])
def test_a_host_that_dies_while_we_connect(own_server, freezes):
    """At every ninth of what it says from its banner to its first answer; a dead host has refused no login."""
    server = own_server()
    whole = DyingRelay(server.port, 10**9, freezes=False)
    assert talk(server, whole, 20.0) == (0, b"answer\n")
    total, parts = whole.said, 8
    whole.close()
    for part in range(parts):
        relay = DyingRelay(server.port, total * part // (parts + 1), freezes=freezes)
        began = time.monotonic()
        with pytest.raises(SlipstreamError, match=r"cannot be reached|no (answer|file channel) came") as error:
            talk(server, relay, 2 * LIMIT_SECONDS)
        assert isinstance(error.value, HostUnreachable), part
        assert time.monotonic() - began < ENOUGH_SECONDS, part
        relay.close()


# ---- signals ---------------------------------------------------------------------------------------------------------


def test_a_signal_ends_the_wait_for_a_host_that_was_lost_and_all_later_ones(
    ssh_server, ssh_tools, tmp_path, monkeypatch
):
    relay = ssh_tools.Relay(ssh_server.port)
    ssh_server.trust(relay.address)
    options = {"address": relay.address, "connect_seconds": 5.0, "reconnect_seconds": PATIENCE_SECONDS}
    host = ssh_server.host(tmp_path / "far", **options)
    host.hello()
    relay.open = False
    relay.cut()
    tried, connected = [], host._connected

    def count():
        tried.append(time.monotonic())
        if len(tried) == 3:  # it is being waited for
            os.kill(os.getpid(), signal.SIGTERM)
        return connected()

    monkeypatch.setattr(host, "_connected", count)
    began = time.monotonic()
    with unwinding_signals(), pytest.raises(SystemExit) as ended:
        host.status("nothing")
    assert ended.value.code == 128 + signal.SIGTERM
    with pytest.raises(HostUnreachable, match="was given up when we were told to end"):
        host.status("nothing")  # as a clean-up on the way out asks
    assert len(tried) == 3
    assert time.monotonic() - began < ENOUGH_SECONDS
    relay.close()


def test_after_a_signal_a_host_that_is_there_is_still_asked(ssh_server, tmp_path):
    host = ssh_server.host(tmp_path / "far")
    host.hello()

    def told_to_end():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        host._repeat(told_to_end)
    assert host.status("nothing") is None
    host.close()
