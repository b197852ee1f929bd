"""The host of a deployment: this machine, or a far one over SSH."""

from typing import TYPE_CHECKING

from slipstream.configs.ssh_address import parse_jumps
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.hosts.host import Host
from slipstream.tasks.hosts.local import LocalHost

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment
    from slipstream.tasks.hosts.ssh_target import SshTarget


def open_host(deployment: "Deployment") -> Host:
    """The host; it connects when it is first asked. Raises SlipstreamError where SSH is wanted and not installed."""
    host = deployment.host
    if host.kind == "local":
        return LocalHost(host.workdir, command_seconds=host.command_timeout_seconds)
    target = ssh_target(deployment)
    from slipstream.tasks.hosts.ssh import SshHost

    return SshHost(
        target,
        base=host.directory,
        python=host.python,
        command_seconds=host.command_timeout_seconds,
        reconnect_seconds=host.reconnect_seconds,
    )


def each_deployment(deployment: "Deployment") -> "tuple[Deployment, ...]":
    """The deployment once for every host that it names, the first one first."""
    return tuple(deployment.model_copy(update={"host": host}) for host in deployment.host.each)


def ssh_target(deployment: "Deployment") -> "SshTarget":
    """How to get to a far host. Raises SlipstreamError for this machine, and where fabric is not installed."""
    host = deployment.host
    if host.kind == "local":
        raise SlipstreamError(
            "host.kind is local: this machine needs no SSH",
            expected="host.kind: ssh",
            do="name the host in host.address",
        )
    try:
        import slipstream.tasks.hosts.ssh_connection  # noqa: F401  (it needs them)
    except ModuleNotFoundError as error:
        if error.name not in ("fabric", "paramiko", "invoke"):
            raise
        raise SlipstreamError(
            f"host {host.address} is reached by the package {error.name}, which is not installed",
            expected="Slipstream with its flows",
            do="pip install 'slipstream[flows]'",
        ) from error
    from slipstream.tasks.hosts.ssh_target import SshTarget

    return SshTarget(
        host.ssh_address,
        host.known_hosts,
        jumps=parse_jumps(host.jump),
        identity_file=host.identity_file,
        connect_seconds=host.connect_timeout_seconds,
        keepalive_seconds=host.keepalive_seconds,
        max_sessions=host.max_sessions,
    )
