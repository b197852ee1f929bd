"""Which far host a connection goes to, and how to get there."""

from dataclasses import dataclass
from pathlib import Path

from slipstream.configs.ssh_address import SshAddress

UNANSWERED_KEEPALIVES = 3  # then a connection is given up


@dataclass(frozen=True)
class SshTarget:
    """A far host and how to get there.

    Args:
        address: of the host.
        jumps: servers to go through, in order.
        identity_file: private key; None: the agent's keys and the user's default ones.
        known_hosts: file of the trusted host keys, for the host and for every jump.
        connect_seconds: limit of each of: TCP, banner, keys, login, a new channel.
        keepalive_seconds: between two signs of life on an idle connection.
        max_sessions: channels that the server allows at the same time (sshd's MaxSessions).
    """

    address: SshAddress
    known_hosts: Path
    jumps: tuple[SshAddress, ...] = ()
    identity_file: Path | None = None
    connect_seconds: float = 15.0
    keepalive_seconds: float = 15.0
    max_sessions: int = 10
