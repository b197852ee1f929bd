"""Hosts to test with: this machine, and this machine again through a real SSH server."""

from pathlib import Path

import pytest

from slipstream.tasks.hosts.local import LocalHost


@pytest.fixture(scope="session")
def ssh_tools(load_test_module):
    """tests/tasks/hosts/ssh_server.py"""
    return load_test_module(Path(__file__).parent / "ssh_server.py")


@pytest.fixture(scope="session")
def need_sshd(ssh_tools):
    ssh_tools.need_sshd()


@pytest.fixture(scope="session")
def ssh_server(need_sshd, ssh_tools, tmp_path_factory):
    """A server whose key is trusted, shared by tests that leave it as it is."""
    server = ssh_tools.SshServer(tmp_path_factory.mktemp("sshd"))
    server.trust()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def machine_tools(load_test_module):
    """tests/tasks/hosts/machines.py"""
    return load_test_module(Path(__file__).parent / "machines.py")


@pytest.fixture(scope="session")
def need_machines(need_sshd, machine_tools):
    machine_tools.need_namespaces()


@pytest.fixture
def machine(need_machines, machine_tools, ssh_tools, tmp_path):
    """Makes hosts in namespaces of their own, whose keys are trusted."""
    made, kind = [], machine_tools.machine_class(ssh_tools)

    def make(*lines, **options):
        made.append(kind(tmp_path / f"machine{len(made)}", len(made), *lines, **options))
        made[-1].trust()
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture
def own_server(need_sshd, ssh_tools, tmp_path):
    """Makes servers of a test's own."""
    made = []

    def make(*lines):
        made.append(ssh_tools.SshServer(tmp_path / f"sshd{len(made)}", *lines))
        return made[-1]

    yield make
    for server in made:
        server.stop()


def _close(made, base):
    for folder in sorted((base / "jobs").glob("*")):
        made.stop(folder.name, drain_seconds=0)
    made.close()


@pytest.fixture
def host(tmp_path):
    """This machine, for what runs on the host itself: the same archive whatever the transport."""
    made = LocalHost(tmp_path / "far")
    yield made
    _close(made, tmp_path / "far")


@pytest.fixture(params=["local", "ssh"])
def any_host(request, tmp_path):
    """Each of the two hosts, for what the transport decides; whatever jobs a test leaves are stopped."""
    base = tmp_path / "far"
    made = LocalHost(base) if request.param == "local" else request.getfixturevalue("ssh_server").host(base)
    yield made
    _close(made, base)
