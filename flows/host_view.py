"""`slipstream host ...`: trust a host's key, shown to a person first; install Slipstream there."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from slipstream.configs.load import load
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.hosts.known_hosts import RUNBOOK, changed_key, describe, known_keys, trust_key
from slipstream.tasks.hosts.open_host import each_deployment, open_host, ssh_target
from slipstream.tasks.hosts.provision import Environment, build_wheel, provision
from slipstream.tasks.hosts.ssh_connection import shown_key
from slipstream.tasks.hosts.ssh_target import SshTarget


def trust(
    config: Path,
    overrides: Sequence[str],
    *,
    fingerprints: Sequence[str] = (),
    replace_changed: bool = False,
    ask: Callable[[str], str] | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Shows the key of each host of the deployment, and of each jump before it, and writes what is trusted.

    Args:
        config, overrides: the deployment.
        fingerprints: `SHA256:...` that are trusted without asking, as the host's owner told them.
        replace_changed: whether a key that differs from the known one may be trusted at all.
        ask: asks a person; None is the terminal.
        say: told what was found and done.

    Raises SlipstreamError when a key is not trusted, and HostUnreachable.
    """
    for deployment in each_deployment(load(config, overrides).deployment):
        _trust(ssh_target(deployment), fingerprints, replace_changed, ask, say)


def _trust(
    target: SshTarget,
    fingerprints: Sequence[str],
    replace_changed: bool,
    ask: Callable[[str], str] | None,
    say: Callable[[str], None],
) -> None:
    """One host, and the way there."""
    for number, address in enumerate((*target.jumps, target.address)):
        way = replace(target, jumps=target.jumps[:number])
        key = shown_key(way, address)
        known = known_keys(target.known_hosts, address.known_as)
        if key in known:
            say(f"{address.known_as} is known: {describe(key)}")
            continue
        if known and not replace_changed:
            raise changed_key(address.known_as, key, known[0], target.known_hosts)
        say(f"{address.known_as} shows {describe(key)}")
        for before in known:
            say(f"  in the place of {describe(before)}")
        if key.fingerprint not in fingerprints:
            _confirm(target, address.known_as, str(key.fingerprint), fingerprints, ask)
        trust_key(target.known_hosts, address, key)
        say(f"written to {target.known_hosts}")


def _confirm(
    target: SshTarget, name: str, fingerprint: str, given: Sequence[str], ask: Callable[[str], str] | None
) -> None:
    """A person's word. Raises SlipstreamError for any other than yes, and where nobody can be asked."""
    if given:
        words, do = f"{name} shows {fingerprint}, not {', '.join(given)}", "ask the host's owner which one is right"
    elif ask is None and not sys.stdin.isatty():
        words = f"{name} shows {fingerprint}, and nobody is here to compare it"
        do = "give the fingerprint that the host's owner told you: --fingerprint SHA256:..."
    elif (ask or input)("Is this the fingerprint that the host's owner told you? [yes/no] ").strip().lower() == "yes":
        return
    else:
        words, do = f"{name} is not trusted", "ask the host's owner for its fingerprint"
    raise SlipstreamError(words, expected=f"a key to trust, for {target.known_hosts}", do=do, runbook=RUNBOOK)


def provision_host(
    config: Path,
    overrides: Sequence[str],
    *,
    wheel: Path | None,
    wheelhouse: Path | None,
    lock: Path | None = None,
    say: Callable[[str], None] = print,
) -> Environment:
    """Installs Slipstream on every host of the deployment, and says with which Python it runs there.

    Args:
        config, overrides: the deployment.
        wheel: Slipstream's own; None: built from this checkout, once for all.
        wheelhouse: folder of all wheels, for hosts without a registry.
        lock: file of the packages' hashes.
        say: told what happens.

    Returns the environment of the first host. Raises SlipstreamError.
    """
    made = []
    with TemporaryDirectory() as folder:
        own = build_wheel(Path(folder)) if wheel is None else wheel
        for deployment in each_deployment(load(config, overrides).deployment):
            host = open_host(deployment)
            python = sys.executable if deployment.host.kind == "local" else deployment.host.python
            try:
                found = provision(host, own, python=python, wheelhouse=wheelhouse, lock=lock, say=say)
            finally:
                host.close()
            say(f"{'found' if found.was_there else 'made'} environment {found.key} on {host.name}: {found.python}")
            say(f"self-test: {found.self_test}")
            made.append(found)
    return made[0]
