"""Where an SSH server is: user, address, port, as `[USER@]ADDRESS[:PORT]`."""

import re
from dataclasses import dataclass

DEFAULT_PORT = 22
# No space, quote or dash at the front: an address must never be taken for an option or for two words.
_FORM = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9._$-]*)@)?(?P<address>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*)"
    r"(?::(?P<port>[0-9]{1,5}))?"
)


@dataclass(frozen=True)
class SshAddress:
    """One SSH server; `user` None is the name of the user who runs the command."""

    address: str
    port: int = DEFAULT_PORT
    user: str | None = None

    def __str__(self) -> str:
        address = f"[{self.address}]" if ":" in self.address else self.address
        user = "" if self.user is None else f"{self.user}@"
        return f"{user}{address}" + ("" if self.port == DEFAULT_PORT else f":{self.port}")

    @property
    def known_as(self) -> str:
        """Its name in a known-hosts file."""
        return self.address if self.port == DEFAULT_PORT else f"[{self.address}]:{self.port}"


def parse_ssh_address(text: str) -> SshAddress:
    """Reads `[USER@]ADDRESS[:PORT]`, an IPv6 address in brackets. Raises ValueError for anything else."""
    found = _FORM.fullmatch(text.strip())
    port = DEFAULT_PORT if found is None or found["port"] is None else int(found["port"])
    if found is None or not 1 <= port <= 65535:
        raise ValueError("[USER@]ADDRESS[:PORT]")
    return SshAddress(found["address"].strip("[]"), port, found["user"])


def parse_jumps(text: str | None) -> tuple[SshAddress, ...]:
    """The servers to go through, in order, from `A,B`; none for None. Raises ValueError."""
    return () if text is None else tuple(parse_ssh_address(part) for part in text.split(","))
