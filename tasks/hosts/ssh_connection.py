"""One SSH connection: strict about host keys, with a limit on every wait, through jump hosts where they are declared.

Fabric opens it. What Fabric does not do is done here: it adds unknown host keys by itself and loads no known ones, has
no keepalive, and copies output a thousand bytes at a time in quadratic time; so commands run on plain channels.
"""

import getpass
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import fabric
import paramiko
from paramiko.config import SSHConfig
from paramiko.ssh_exception import (
    AuthenticationException,
    BadHostKeyException,
    ChannelException,
    PasswordRequiredException,
    SSHException,
)

from slipstream.configs.ssh_address import SshAddress
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.hosts.host import HostUnreachable
from slipstream.tasks.hosts.known_hosts import Refuse, changed_key
from slipstream.tasks.hosts.sftp import Sftp
from slipstream.tasks.hosts.ssh_target import UNANSWERED_KEEPALIVES, SshTarget
from slipstream.tasks.hosts.tcp import connect_tcp

READ_BYTES = 65_536
FULL_PAUSE_SECONDS = 0.2  # until a channel that others hold may be free
LOGIN_TIMED_OUT = "Authentication timeout."  # paramiko's words: of the same class as a refused login
SAID = {  # what paramiko says, for people
    LOGIN_TIMED_OUT: "no answer to the login in time",
    "No existing session": "no SSH server answered there in time",  # the wait for banner and keys ended
    "Authentication failed: transport shut down or saw EOF": "the server ended the connection during the login, "
    "as it does when it goes down, and after too many keys (host.identity_file names the right one)",
    "timed out": "no answer in time",
}
WAITING_SECONDS = 300.0  # a program there that is not asked for longer may have ended (`far_side.IDLE_SECONDS`)

logging.getLogger("paramiko").addHandler(logging.NullHandler())  # its tracebacks; we say what happened in words


class SshConnection:
    """An open connection. Threads share it; at most `max_sessions` channels are open, one of them for files."""

    def __init__(self, target: SshTarget) -> None:
        """Connects. Raises SlipstreamError: HostKeyRefused, a refused login, or HostUnreachable."""
        self.target = target
        self._sessions = threading.BoundedSemaphore(max(1, target.max_sessions - 1))
        self._sftp_lock = threading.Lock()
        # Paramiko keeps one refusal for all threads: of two that are refused at once, one would not learn why.
        self._opening = threading.Lock()
        self._waiting: list[tuple[paramiko.Channel, float]] = []  # programs that wait for a question, and since when
        self._sftp: Sftp | None = None
        self._chain: list[fabric.Connection] = []
        try:
            for address in (*target.jumps, target.address):
                self._chain.append(self._open(address, self._chain[-1] if self._chain else None))
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether it stands, as far as this side knows."""
        return bool(self._chain) and all(link.is_connected for link in self._chain)

    def ask(self, command: str, request: bytes, mark: bytes, seconds: float) -> tuple[int, bytes]:
        """One question to a program that answers line by line, and goes on for the next one: a login shell and an
        interpreter take half a second to start.

        Args:
            command: starts the program; one that still waits from an earlier question is asked first.
            request: one line, without its end.
            mark: what the answer's line begins with; whatever else is written before is not it.
            seconds: limit of the answer.

        Returns 0 and all that was written, or exit code and output of a program that ended without an answer. Raises
        HostUnreachable when neither came within `seconds`. What was asked for may go on.
        """
        deadline = time.monotonic() + seconds
        with self._sessions, self._broken("answer"):
            channel = self._program(command, deadline)
            output, answered = bytearray(), False
            try:
                channel.settimeout(seconds)
                channel.sendall(request + b"\n")
                for block in _read(channel, deadline):
                    output += block
                    start = output.find(mark)
                    answered = start >= 0 and output.find(b"\n", start) >= 0
                    if answered:
                        break
                if answered:
                    return 0, bytes(output)
                channel.settimeout(max(0.1, deadline - time.monotonic()))
                code = channel.recv_exit_status()
                if code == -1:  # by a signal, or because the connection is gone: paramiko tells no difference
                    raise ConnectionError("the command ended without an exit code")
                return code, bytes(output)
            finally:
                if answered:
                    with self._opening:
                        self._waiting.append((channel, time.monotonic()))
                else:
                    channel.close()

    def sftp(self) -> Sftp:
        """The channel for files, opened once. Raises HostUnreachable, or SlipstreamError where SFTP is switched off."""
        with self._sftp_lock:
            if self._sftp is None:
                try:
                    with self._broken("file channel"), self._limited(self.target.connect_seconds):
                        transport = self._transport
                        client = paramiko.SFTPClient.from_transport(transport)
                        assert client is not None
                        channel = client.get_channel()
                        assert channel is not None
                        channel.settimeout(max(self.target.connect_seconds, 4 * self.target.keepalive_seconds))
                        self._sftp = Sftp(client)
                except HostUnreachable as error:
                    if not self.is_open:
                        raise
                    raise SlipstreamError(
                        f"{self.target.address} gives no SFTP: {error.__cause__}",
                        expected="the server's SFTP subsystem, and a free session (MaxSessions of at least 2)",
                        do="add `Subsystem sftp internal-sftp` to its sshd_config",
                        runbook="host-unreachable.md",
                    ) from error
            return self._sftp

    def close(self) -> None:
        """Ends the connection. What runs in sessions of its own goes on."""
        self._waiting = []
        for link in reversed(self._chain):
            link.client.close()
        self._chain = []

    @contextmanager
    def _broken(self, what: str) -> Iterator[None]:
        """Every way in which a connection fails, as HostUnreachable; the connection is given up, so that none hangs."""
        try:
            yield
        except (SSHException, EOFError, TimeoutError, ConnectionError) as error:
            if not isinstance(error, ChannelException):
                self.close()
            raise HostUnreachable(f"{self.target.address}: no {what} came: {_words(error)}") from error

    @property
    def _transport(self) -> paramiko.Transport:
        transport = self._chain[-1].transport if self._chain else None
        if transport is None or not transport.is_active():
            raise ConnectionError("the connection is closed")
        return transport

    def _program(self, command: str, deadline: float) -> paramiko.Channel:
        """A program that waits for a question; a new one where none waits.

        Where the server allows fewer sessions than we were told, waits until one of ours is free.
        """
        while True:
            try:
                with self._opening:
                    while self._waiting:
                        channel, since = self._waiting.pop()
                        if time.monotonic() - since < WAITING_SECONDS and not (channel.closed or channel.eof_received):
                            return channel
                        channel.close()
                    channel = self._transport.open_session(timeout=self.target.connect_seconds)
            except ChannelException:
                if time.monotonic() + FULL_PAUSE_SECONDS > deadline:
                    raise
                time.sleep(FULL_PAUSE_SECONDS)
                continue
            # One stream: read one after the other, two full ones wait for each other for ever.
            channel.set_combine_stderr(True)
            channel.settimeout(self.target.connect_seconds)
            try:
                with self._limited(self.target.connect_seconds):
                    channel.exec_command(command)
            except BaseException:
                channel.close()
                raise
            return channel

    @contextmanager
    def _limited(self, seconds: float) -> Iterator[None]:
        """Ends the connection where the body takes longer: paramiko waits without a limit for a channel's answers."""
        with _ends_after(seconds, self.close):
            yield

    def _open(self, address: SshAddress, through: fabric.Connection | None) -> fabric.Connection:
        link, limit = self._link(address, through), self.target.connect_seconds
        try:
            if through is None:
                link.connect_kwargs["sock"] = connect_tcp(address.address, address.port, limit)
            # Twice: banner and keys have one limit together, and the login has one for each key that is tried.
            with _ends_after(2 * limit, link.client.close):
                link.open()
            transport = link.transport
            assert transport is not None
            transport.set_keepalive(int(self.target.keepalive_seconds))
            if through is None:
                _limit_silence(transport, self.target.keepalive_seconds)
        except BaseException as error:
            transport = link.client.get_transport()
            answers = transport is not None and transport.is_active()
            link.client.close()
            told = self._explain(error, address, answers=answers)
            if told is None:
                raise
            raise told from error
        return link

    def _link(self, address: SshAddress, through: fabric.Connection | None) -> fabric.Connection:
        target, limit = self.target, self.target.connect_seconds
        key = target.identity_file
        if key is not None and not key.is_file():
            raise SlipstreamError(
                f"there is no identity file {key}", expected="a private key", do="correct host.identity_file"
            )
        link = fabric.Connection(
            address.address,
            user=address.user or getpass.getuser(),
            port=address.port,
            # An explicit, empty one: what a user's ~/.ssh/config says stands in no deployment file.
            config=fabric.Config(ssh_config=SSHConfig(), lazy=True),
            gateway=through if through is not None else False,
            connect_timeout=None,
            connect_kwargs={
                "timeout": limit,
                "banner_timeout": limit,
                "auth_timeout": limit,
                "channel_timeout": limit,
                "key_filename": [] if key is None else [str(key)],
                "look_for_keys": key is None,
                "allow_agent": True,
            },
        )
        if target.known_hosts.is_file():
            link.client.load_host_keys(str(target.known_hosts))
        link.client.set_missing_host_key_policy(Refuse(target.known_hosts))
        return link

    def _explain(self, error: BaseException, address: SshAddress, *, answers: bool) -> SlipstreamError | None:
        """What went wrong while connecting, for people; None for what is no matter of the connection.

        Args:
            error: what was raised.
            address: of the server.
            answers: whether its connection stood then. Paramiko calls it a failed login, too, when the server is gone.
        """
        if isinstance(error, BadHostKeyException):
            return changed_key(address.known_as, error.key, error.expected_key, self.target.known_hosts)
        if isinstance(error, PasswordRequiredException):
            return SlipstreamError(
                f"{self.target.identity_file or 'the private key'} is encrypted",
                expected="a key that can be used without asking",
                do="hand it to the agent: `ssh-add FILE`, and leave host.identity_file out",
                runbook="host-unreachable.md",
            )
        if isinstance(error, AuthenticationException) and answers and str(error) != LOGIN_TIMED_OUT:
            tried = "the agent's keys and the default ones"
            if self.target.identity_file is not None:
                tried = f"{self.target.identity_file} and the agent's keys"
            return SlipstreamError(
                f"{address} refused the login of {address.user or getpass.getuser()} (tried {tried}): {_words(error)}",
                expected="a key that the host accepts; passwords are not used",
                do="add the public key to ~/.ssh/authorized_keys there, or set host.user and host.identity_file",
                runbook="host-unreachable.md",
            )
        if isinstance(error, (SSHException, OSError, EOFError)):
            return _unreached(address, error)
        return None


def shown_key(target: SshTarget, address: SshAddress) -> paramiko.PKey:
    """The key that a server shows, without logging in. `target.jumps` must be trusted already; may raise as they do."""
    before: SshConnection | None = None
    try:
        if target.jumps:
            way = SshTarget(
                target.jumps[-1],
                target.known_hosts,
                target.jumps[:-1],
                target.identity_file,
                target.connect_seconds,
                target.keepalive_seconds,
                target.max_sessions,
            )
            before = SshConnection(way)
        with _unreachable(address):
            where = (address.address, address.port)
            if before is None:
                sock: socket.socket | paramiko.Channel = connect_tcp(*where, target.connect_seconds)
            else:
                sock = before._transport.open_channel("direct-tcpip", where, ("", 0), timeout=target.connect_seconds)
            transport = paramiko.Transport(sock)
            transport.banner_timeout = target.connect_seconds
            try:
                transport.start_client(timeout=target.connect_seconds)
                return transport.get_remote_server_key()
            finally:
                transport.close()
    finally:
        if before is not None:
            before.close()


@contextmanager
def _unreachable(address: SshAddress) -> Iterator[None]:
    try:
        yield
    except (SSHException, OSError, EOFError) as error:
        raise _unreached(address, error) from error


def _unreached(address: SshAddress, error: BaseException) -> HostUnreachable:
    return HostUnreachable(
        f"{address} cannot be reached: {_words(error)}",
        expected="an SSH server that answers there",
        do="check host.address, host.port and the network, then run the same command again: it finds its jobs",
    )


@contextmanager
def _ends_after(seconds: float, end: Callable[[], None]) -> Iterator[None]:
    """Calls `end` where the body takes longer; what the body waits for then fails, and that counts as a time-out."""
    late = threading.Event()

    def give_up() -> None:
        late.set()
        end()

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (SSHException, EOFError, OSError, AttributeError) as error:  # AttributeError: paramiko's, of a closed client
        if late.is_set():
            raise TimeoutError(f"no answer within {seconds:g} s") from error
        raise
    finally:
        timer.cancel()


def _read(channel: paramiko.Channel, deadline: float) -> Iterator[bytes]:
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time is up")
        channel.settimeout(left)
        block = channel.recv(READ_BYTES)
        if not block:
            return
        yield block


def _limit_silence(transport: paramiko.Transport, keepalive_seconds: float) -> None:
    """Has the kernel end a connection whose other side acknowledges nothing; a keepalive alone waits for 15 minutes."""
    milliseconds = int(1000 * UNANSWERED_KEEPALIVES * keepalive_seconds)
    set_option: Callable[..., None] | None = getattr(transport.sock, "setsockopt", None)
    if set_option is not None:
        set_option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _words(error: BaseException) -> str:
    """An error's text in words, or its name where it has none."""
    text = str(error).strip()
    if isinstance(error, OSError) and error.strerror and error.filename is None:
        text = error.strerror  # without its number
    return (
        SAID.get(text) or text or {"TimeoutError": "no answer in time"}.get(type(error).__name__, type(error).__name__)
    )
