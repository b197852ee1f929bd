"""The section that says where the stages run: this machine, or a far host over SSH."""

from ipaddress import IPv6Address
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from slipstream.configs.base import CountOrZero, LocalPath, PositiveFloat, PositiveInt, Section
from slipstream.configs.ssh_address import DEFAULT_PORT, SshAddress, parse_jumps, parse_ssh_address


class OtherHost(Section):
    """A further far host: what it has of its own; everything else is as for the first."""

    address: str = Field(description="Its name or address, without user and port.")
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(default=None, description="TCP port of its SSH server.")
    user: str | None = Field(default=None, description="Login name there.")
    identity_file: LocalPath | None = Field(default=None, description="Private key.")
    jump: str | None = Field(default=None, description="Servers to go through.")
    directory: str | None = Field(default=None, min_length=1, description="Slipstream's directory there.")
    python: str | None = Field(default=None, min_length=1, description="A Python of 3.10 or newer there.")


class Host(Section):
    """The machine and the folders that the pipeline uses on it."""

    kind: Literal["local", "ssh"] = Field(
        default="local", description="Where the stages run: `local` is this machine, `ssh` the host at host.address."
    )
    address: str | None = Field(
        default=None,
        validate_default=True,
        description="Name or address of the far host (kind ssh), without user and port.",
    )
    port: Annotated[int, Field(ge=1, le=65535)] = Field(default=DEFAULT_PORT, description="TCP port of its SSH server.")
    user: str | None = Field(default=None, description="Login name there; null is that of who runs the command.")
    identity_file: LocalPath | None = Field(
        default=None, description="Private key; null is the agent's keys and the default ones. Passwords are not used."
    )
    jump: str | None = Field(
        default=None, description="Servers to go through, `[USER@]ADDRESS[:PORT]`, several separated by commas."
    )
    known_hosts: LocalPath = Field(
        default="known_hosts",
        validate_default=True,
        description="File of the trusted host keys, in OpenSSH's form; `slipstream host trust` writes it.",
    )
    directory: str = Field(
        default="slipstream",
        min_length=1,
        description="Slipstream's directory on the far host; a relative one lies in the home directory there.",
    )
    python: str = Field(
        default="python3",
        min_length=1,
        description="A Python of 3.10 or newer on the far host.",
    )
    connect_timeout_seconds: PositiveFloat = Field(
        default=15.0,
        description="Limit of each step of a connection: name and TCP, banner and keys, login, a new channel.",
    )
    command_timeout_seconds: PositiveFloat = Field(
        default=60.0, description="Limit of a short command on the host; jobs have none."
    )
    keepalive_seconds: PositiveInt = Field(
        default=15, description="Between two signs of life; a connection that leaves three unanswered is given up."
    )
    reconnect_seconds: CountOrZero = Field(
        default=600,
        description="How long a connection that broke may take to come back before the run ends. A host that has not "
        "answered before is not waited for.",
    )
    more: Annotated[tuple[OtherHost, ...], Field(strict=False)] = Field(
        default=(),
        description="Further far hosts (kind ssh), each by what differs from the first: `doctor` and `host` take them "
        "too, the lifecycle has them answer and extract shares of the prompts, and train where training.hosts says so, "
        "`roll` has all of them serve; every other stage runs on the first host only.",
    )
    task_runner: Literal["threads", "ray"] = Field(
        default="threads",
        description="Prefect's task runner that carries the shares of several hosts: threads of the flow, or Ray "
        "(extra `ray`), whose workers must see this project and host.workdir by the same paths.",
    )
    max_sessions: Annotated[int, Field(ge=2)] = Field(
        default=10, description="Sessions that the SSH server allows on one connection (sshd's MaxSessions)."
    )
    workdir: LocalPath = Field(
        default="runs/default",
        validate_default=True,
        description="Directory of the stages' outputs and of the server's state file.",
    )
    cache_dir: LocalPath = Field(
        default="~/.cache/slipstream",
        validate_default=True,
        description="Directory of targets, shared by runs.",
    )
    gpu_memory_gib: PositiveFloat | None = Field(
        default=None,
        description="Memory of each of its GPUs, in GiB: a plan compares a rank's need with it; null: it does not.",
    )
    gpu_bandwidth_tb: PositiveFloat | None = Field(
        default=None,
        description="Memory bandwidth of each of its GPUs, in TB/s: gives the least time of a step; null: not told.",
    )
    plain_tokens_per_second: PositiveFloat | None = Field(
        default=None,
        description=(
            "What one stream was measured to get there without speculation, from whatever engine: the plan shows it "
            "beside its own forecast; null: not told."
        ),
    )
    threads: PositiveInt | None = Field(
        default=None, description="CPU threads of torch; null is one for each available core."
    )

    @field_validator("address")
    @classmethod
    def _address(cls, address: str | None, info: ValidationInfo) -> str | None:
        """An address belongs to kind ssh, and a kind ssh has one: neither is guessed from the other."""
        far = info.data.get("kind") == "ssh"
        if far and address is None:
            raise ValueError("the name or address of the host, as host.kind is ssh")
        if address is not None and not far:
            raise ValueError("null, as host.kind is local; write host.kind: ssh for a far host")
        if address is not None and not _is_alone(address):
            raise ValueError("a name or address alone; user and port stand in host.user and host.port")
        return address

    @field_validator("user")
    @classmethod
    def _user(cls, user: str | None) -> str | None:
        if user is not None:
            parse_ssh_address(f"{user}@host")
        return user

    @field_validator("jump")
    @classmethod
    def _jump(cls, jump: str | None) -> str | None:
        parse_jumps(jump)
        return jump

    @field_validator("more")
    @classmethod
    def _more(cls, more: tuple[OtherHost, ...], info: ValidationInfo) -> tuple[OtherHost, ...]:
        """Hosts of an SSH fleet, each of them once."""
        if more and info.data.get("kind") != "ssh":
            raise ValueError("no further hosts, as host.kind is local")
        first = (info.data.get("address"), info.data.get("port"))
        places = [first, *((other.address, other.port or first[1]) for other in more)]
        if len({(str(name).lower(), port) for name, port in places}) < len(places):
            raise ValueError("every host once, by address and port")
        for other in more:
            cls._address(other.address, info)
            cls._user(other.user)
            cls._jump(other.jump)
        return more

    @property
    def each(self) -> "tuple[Host, ...]":
        """Every host by itself, the first one first."""
        alone = self.model_copy(update={"more": ()})
        own = (other.model_dump(exclude_none=True) for other in self.more)
        return (alone, *(alone.model_copy(update=values) for values in own))

    @property
    def ssh_address(self) -> SshAddress:
        """Where the far host is. ValueError for this machine."""
        if self.address is None:
            raise ValueError("host.kind is local")
        return SshAddress(self.address, self.port, self.user)


def _is_alone(address: str) -> bool:
    """A name or an address, without user or port."""
    try:
        if ":" in address:
            return bool(IPv6Address(address))
        return parse_ssh_address(address) == SshAddress(address)
    except ValueError:
        return False
