"""`slipstream host ...` and `slipstream doctor`: commands about the host of a deployment."""

from pathlib import Path
from typing import Annotated

import typer

from slipstream.flows.arguments import AsJson, Config, Overrides

host_app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)


@host_app.callback()
def host() -> None:
    """The host of a deployment: trust its key, install Slipstream there."""


@host_app.command("trust")
def host_trust(
    config: Config,
    overrides: Overrides = None,
    fingerprints: Annotated[
        list[str] | None,
        typer.Option(
            "--fingerprint", metavar="SHA256:...", help="Trust this key without asking; repeatable, for jump hosts."
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Trust a key that differs from the known one, if you say so.")
    ] = False,
) -> None:
    """Show the key of the deployment's host and write it to the project's known-hosts file, once you trust it."""
    from slipstream.configs.load import load
    from slipstream.tasks.hosts.open_host import ssh_target

    ssh_target(load(config, overrides or ()).deployment)  # says what is missing before fabric is imported
    from slipstream.flows.host_view import trust

    trust(config, overrides or (), fingerprints=fingerprints or (), replace_changed=replace)


@host_app.command("provision")
def host_provision(
    config: Config,
    overrides: Overrides = None,
    wheelhouse: Annotated[
        Path | None,
        typer.Option("--wheelhouse", metavar="DIR", help="All wheels that Slipstream needs; no registry is asked."),
    ] = None,
    wheel: Annotated[
        Path | None,
        typer.Option("--wheel", metavar="FILE", help="Slipstream's wheel; default: built from this checkout"),
    ] = None,
    lock: Annotated[
        Path | None,
        typer.Option(
            "--lock", metavar="FILE", help="Hashes of all packages: written at the first host, held to at the next."
        ),
    ] = None,
) -> None:
    """Install Slipstream on the deployment's host, in an environment of its own, and verify it by a self-test."""
    from slipstream.flows.host_view import provision_host

    provision_host(config, overrides or (), wheel=wheel, wheelhouse=wheelhouse, lock=lock)


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="The deployment file (YAML); none: this machine.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=2, help="Also time the sums of 1 to K + 1 rows over so many ranks, on idle cards."),
    ] = None,
) -> None:
    """Look at the deployment's host: GPUs and who is on them, disk, ports, clock, limits, each with its consequence.

    Starts and stops nothing, but for what --ranks times. Ends with exit code 3 when the deployment cannot use the host
    as it is.
    """
    from slipstream.flows.doctor_view import show_doctor

    if config is None and overrides:
        raise typer.BadParameter("needs a deployment file", param_hint="--set")
    if not show_doctor(config, overrides or (), as_json=as_json, ranks=ranks or 0):
        raise typer.Exit(3)
