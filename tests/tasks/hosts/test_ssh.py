"""What only a network and a stranger at its other end can do: keys, logins, jumps, time-outs, cuts. Real OpenSSH."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from slipstream.configs.ssh_address import SshAddress
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.hosts.far_side import questions
from slipstream.tasks.hosts.host import HostUnreachable, Job
from slipstream.tasks.hosts.known_hosts import HostKeyRefused, known_keys
from slipstream.tasks.hosts.scripted import ScriptedHost
from slipstream.tasks.hosts.ssh_connection import SshConnection, shown_key
from slipstream.tasks.proc_stat import read_stat

COUNT = "import time\nfor i in range({n}): print(i, flush=True); time.sleep(0.1)"


# ---- host keys -------------------------------------------------------------------------------------------------------


def test_an_unknown_key_is_refused_before_anything_is_sent(own_server, ssh_tools, tmp_path):
    server = own_server()
    host = server.host(tmp_path / "far", reconnect_seconds=60)
    started = time.monotonic()
    with pytest.raises(HostKeyRefused, match=r"\[127\.0\.0\.1\]:\d+ is not known") as error:
        host.hello()
    assert time.monotonic() - started < 30  # and not tried again
    assert fingerprint(server) in str(error.value)
    assert "slipstream host trust" in error.value.do
    assert error.value.runbook == "host-key.md"
    assert not (tmp_path / "far").exists()
    assert "Accepted publickey" not in (server.folder / "sshd.log").read_text()
    server.trust()
    assert host.hello()["user"] == server.address.user
    host.close()


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa"])
def test_a_changed_key_is_refused(own_server, tmp_path, kind):
    """Also where it is of another type, which OpenSSH's file has no entry for."""
    server = own_server()
    server.trust()
    before = fingerprint(server)
    server.stop()
    server.new_host_key(kind)
    server.start()
    host = server.host(tmp_path / "far")
    with pytest.raises(HostKeyRefused, match="shows another key than before") as error:
        host.hello()
    assert before in str(error.value)
    assert fingerprint(server) in str(error.value)
    assert "--replace" in error.value.do
    server.trust()
    assert len(known_keys(server.folder / "known_hosts", server.address.known_as)) == 1
    assert host.hello()
    host.close()


def test_the_key_of_a_jump_is_held_to_the_same_file(own_server, tmp_path):
    jump, server = own_server(), own_server()
    server.trust()
    shutil.copyfile(jump.user_key, server.user_key)
    shutil.copyfile(f"{jump.user_key}.pub", server.folder / "authorized_keys")
    host = server.host(tmp_path / "far", jumps=(jump.address,))
    with pytest.raises(HostKeyRefused, match="is not known") as error:
        host.hello()
    assert str(jump.port) in str(error.value)


def test_openssh_holds_to_the_same_file(own_server):
    server = own_server()
    server.trust()

    def ssh():
        options = ["-o", f"UserKnownHostsFile={server.folder / 'known_hosts'}", "-o", "StrictHostKeyChecking=yes"]
        options += ["-o", "GlobalKnownHostsFile=/dev/null", "-o", "BatchMode=yes", "-i", str(server.user_key)]
        to = f"{server.address.user}@127.0.0.1"
        return subprocess.run(["ssh", *options, "-p", str(server.port), to, "true"], capture_output=True, timeout=60)

    assert ssh().returncode == 0
    server.stop()
    server.new_host_key()
    server.start()
    assert ssh().returncode == 255


# ---- logins and ways -------------------------------------------------------------------------------------------------


def test_a_refused_login_says_what_was_tried(own_server, ssh_tools, tmp_path):
    server = own_server()
    server.trust()
    other = tmp_path / "other_key"
    ssh_tools.make_key(other)
    with pytest.raises(SlipstreamError, match="refused the login of") as error:
        server.host(tmp_path / "far", identity_file=other).hello()
    assert str(other) in str(error.value)
    assert not isinstance(error.value, HostUnreachable)  # trying again would change nothing


def test_an_encrypted_key_is_left_to_the_agent(own_server, ssh_tools, tmp_path, monkeypatch):
    server = own_server()
    server.trust()
    key = tmp_path / "encrypted"
    ssh_tools.make_key(key, passphrase="a b c")
    (server.folder / "authorized_keys").write_text((tmp_path / "encrypted.pub").read_text())
    with pytest.raises(SlipstreamError, match="is encrypted") as error:
        server.host(tmp_path / "far", identity_file=key).hello()
    assert "ssh-add" in error.value.do
    # the same key, held by an agent
    socket_path = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket_path)], stdout=subprocess.DEVNULL)
    try:
        ssh_tools.wait_for(socket_path.exists)
        ask = tmp_path / "ask"
        ask.write_text("#!/bin/sh\necho 'a b c'\n")
        ask.chmod(0o700)
        agent_env = {"SSH_AUTH_SOCK": str(socket_path), "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force"}
        subprocess.run(["ssh-add", str(key)], env={**os.environ, **agent_env}, check=True, capture_output=True)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket_path))
        host = server.host(tmp_path / "far", identity_file=None)
        assert host.hello()
        host.close()
    finally:
        agent.terminate()
        agent.wait()


def test_an_identity_file_that_is_not_there_is_named(ssh_server, tmp_path):
    with pytest.raises(SlipstreamError, match="there is no identity file"):
        ssh_server.host(tmp_path / "far", identity_file=tmp_path / "absent").hello()


def test_through_two_jumps(own_server, tmp_path):
    servers = [own_server() for _ in range(3)]
    last = servers[-1]
    for server in servers:
        server.trust(server.address)
        with (last.folder / "known_hosts").open("a") as file:
            file.write((server.folder / "known_hosts").read_text())
        (server.folder / "authorized_keys").write_text((last.folder / "user_key.pub").read_text())
    host = last.host(tmp_path / "far", jumps=tuple(server.address for server in servers[:2]))
    assert host.run(("echo", "through")).stdout == "through\n"
    assert all("Accepted publickey" in (server.folder / "sshd.log").read_text() for server in servers)
    # and the key of a server behind them is fetched the same way
    assert shown_key(host.target, last.address) == known_keys(host.target.known_hosts, last.address.known_as)[0]
    host.close()


def test_the_users_ssh_config_stands_in_no_deployment(ssh_server, tmp_path, monkeypatch):
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host *\n  Hostname 192.0.2.1\n  Port 1\n  User nobody\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    host = ssh_server.host(tmp_path / "far")
    assert host.hello()["user"] == ssh_server.address.user
    host.close()


def test_a_server_without_sftp_says_so(own_server, tmp_path):
    server = own_server("Subsystem sftp /bin/false")
    server.trust()
    with pytest.raises(SlipstreamError, match=r"SFTP|file channel|file transfer"):
        server.host(tmp_path / "far", reconnect_seconds=0).hello()


def test_a_host_without_a_usable_python_says_so(ssh_server, tmp_path):
    with pytest.raises(SlipstreamError, match=r"helper did not answer.*exit code 127") as error:
        ssh_server.host(tmp_path / "far", python="/no/such/python").hello()
    assert "host.python" in error.value.do


def test_a_login_shell_that_talks_does_no_harm(ssh_server, tmp_path):
    talker = tmp_path / "python that talks"
    talker.write_text(f'#!/bin/sh\necho "Welcome!"; echo oops >&2; {sys.executable} "$@"; echo bye\n')
    talker.chmod(0o755)
    host = ssh_server.host(tmp_path / "far", python=str(talker))
    assert host.run(("echo", "x")).stdout == "x\n"
    host.close()


def test_the_helper_there_goes_on_for_the_next_question_and_ends_with_the_connection(ssh_server, tmp_path, ssh_tools):
    """A login shell and an interpreter for every question would take half a second each."""
    host = ssh_server.host(tmp_path / "far")
    helpers = {host.run(("sh", "-c", "echo $PPID")).stdout for _ in range(3)}
    assert len(helpers) == 1
    (pid,) = map(int, helpers)
    host.close()
    ssh_tools.wait_for(lambda: read_stat(pid) is None)


def test_a_helper_that_was_killed_is_replaced(ssh_server, tmp_path, ssh_tools):
    host = ssh_server.host(tmp_path / "far")
    before = int(host.run(("sh", "-c", "echo $PPID")).stdout)
    os.kill(before, signal.SIGKILL)
    ssh_tools.wait_for(lambda: read_stat(before) is None)
    assert host.status("nothing") is None
    assert int(host.run(("sh", "-c", "echo $PPID")).stdout) != before
    host.close()


def test_a_helper_that_nobody_asks_ends():
    asked, ask = os.pipe()
    os.write(ask, b'{"a": 1}\n\n{"b": 2}\n{"c"')
    assert list(questions(asked, 0.05)) == [b'{"a": 1}', b'{"b": 2}']  # the third is not whole
    os.write(ask, b'{"d": 4}')
    os.close(ask)
    assert list(questions(asked, 5.0)) == [b'{"d": 4}']  # at the end a line needs no end
    os.close(asked)


def test_more_commands_than_the_server_allows_sessions_wait(own_server, tmp_path):
    """Also where it allows fewer than we were told."""
    server = own_server("MaxSessions 3")
    server.trust()
    host = server.host(tmp_path / "far", max_sessions=10)
    host.hello()
    results = []
    ask = [threading.Thread(target=lambda: results.append(host.run(("echo", "x")).stdout)) for _ in range(6)]
    for thread in ask:
        thread.start()
    for thread in ask:
        thread.join()
    assert results == ["x\n"] * 6
    host.close()


# ---- time-outs and cuts ----------------------------------------------------------------------------------------------


def test_a_port_that_nobody_listens_on(tmp_path, ssh_tools, ssh_server):
    target = ssh_server.target(address=SshAddress("127.0.0.1", ssh_tools.free_port(), "x"))
    with pytest.raises(HostUnreachable, match="cannot be reached") as error:
        SshConnection(target)
    assert error.value.runbook == "host-unreachable.md"


def test_a_server_that_says_nothing_is_given_up(ssh_server, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = ssh_server.target(address=SshAddress("127.0.0.1", silent.getsockname()[1], "x"), connect_seconds=1.0)
        started = time.monotonic()
        with pytest.raises(HostUnreachable):
            SshConnection(target)
        assert time.monotonic() - started < 15


@pytest.fixture
def relayed(ssh_server, ssh_tools, tmp_path):
    """(host through a relay, relay)."""
    relay = ssh_tools.Relay(ssh_server.port)
    ssh_server.trust(relay.address)
    host = ssh_server.host(tmp_path / "far", address=relay.address, keepalive_seconds=1.0, connect_seconds=5.0)
    yield host, relay
    relay.thaw()
    for folder in sorted((tmp_path / "far" / "jobs").glob("*")):
        ssh_server.host(tmp_path / "far").stop(folder.name, drain_seconds=0)
    host.close()
    relay.close()


def test_a_job_goes_on_while_the_connection_is_cut_and_is_found_again(relayed, ssh_tools):
    host, relay = relayed
    job = Job("count", (sys.executable, "-c", COUNT.format(n=30) + "\nraise SystemExit(9)"))
    first = host.start(job)
    ssh_tools.wait_for(lambda: host.read(first.log))
    relay.open = False
    relay.cut()
    threading.Timer(1.5, lambda: setattr(relay, "open", True)).start()
    again = host.start(job)  # waits until it is reached again
    assert again.attached
    assert again.identity == first.identity
    ended = ssh_tools.wait_for(lambda: (s := host.status("count")).state == "exited" and s)
    assert ended.exit_code == 9
    assert host.read(ended.log) == b"".join(b"%d\n" % i for i in range(30))


def test_a_command_under_way_is_not_sent_twice(relayed, tmp_path, ssh_tools):
    host, relay = relayed
    counted = tmp_path / "counted"
    host.hello()
    failed = []

    def ask():
        try:
            host.run(("sh", "-c", f"echo x >> {counted}; sleep 5"))
        except HostUnreachable as error:
            failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    ssh_tools.wait_for(counted.is_file)
    relay.cut()
    thread.join(timeout=20)
    assert len(failed) == 1
    assert host.status("nothing") is None  # the next call goes over a new connection
    assert counted.read_text() == "x\n"


def test_a_connection_that_carries_nothing_any_more_is_noticed(relayed):
    """No end, no answer: the wait is bounded. Afterwards a new connection serves."""
    host, relay = relayed
    host.hello()
    host.reconnect_seconds, host.command_seconds = 0.0, 0.5
    relay.freeze()
    started = time.monotonic()
    with pytest.raises(HostUnreachable):
        host.status("nothing")
    assert time.monotonic() - started < 30
    relay.thaw()
    relay.cut()
    host.reconnect_seconds, host.command_seconds = 30.0, 30.0
    assert host.status("nothing") is None


def test_a_host_that_stays_away_is_given_up_with_its_runbook(relayed):
    host, relay = relayed
    host.hello()
    relay.open = False
    relay.cut()
    host.reconnect_seconds = 2.0
    with pytest.raises(HostUnreachable, match="cannot be reached") as error:
        host.status("nothing")
    assert "finds its jobs" in error.value.do


def test_a_file_whose_transfer_is_cut_arrives_whole_at_the_second_try(relayed, tmp_path, monkeypatch):
    host, relay = relayed
    source = tmp_path / "source"
    source.write_bytes(os.urandom(8_000_000))
    send, tries = host._send, []

    def cut_once(path, target, progress):
        tries.append(target)
        if len(tries) == 1:
            threading.Timer(0.01, relay.cut).start()
        return send(path, target, progress)

    monkeypatch.setattr(host, "_send", cut_once)
    host.put(source, "folder/target")
    folder = tmp_path / "far" / "folder"
    assert (folder / "target").read_bytes() == source.read_bytes()
    assert [path.name for path in folder.iterdir()] == ["target"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root mounts a small disk")
def test_a_full_disk_is_named_and_nothing_half_written_stays(ssh_server, tmp_path, monkeypatch):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    host = ssh_server.host(small)
    try:
        source = tmp_path / "source"
        source.write_bytes(os.urandom(5_000_000))
        with pytest.raises(SlipstreamError, match=r"needs 5\.0 MB and the disk there has \d\.. MB free") as error:
            host.put(source, "folder/target")
        assert error.value.runbook == "disk-full.md"
        # filled by somebody else after the look at the free space
        ask = ScriptedHost._ask

        def full(self, call, within, /, **arguments):
            value = ask(self, call, within, **arguments)
            if call == "prepare_folder" and not tried:
                tried.append(call)
                return {"free_bytes": 10_000_000, "part_bytes": 0}
            return value

        tried: list[str] = []
        monkeypatch.setattr(ScriptedHost, "_ask", full)
        with pytest.raises(SlipstreamError, match=r"needs 5\.0 MB"):
            host.put(source, "folder/target")
        assert tried
        assert list((small / "folder").iterdir()) == []
    finally:
        host.close()
        subprocess.run(["umount", "-l", str(small)], check=True)


def fingerprint(server):
    words = subprocess.run(["ssh-keygen", "-lf", f"{server.host_key}.pub"], capture_output=True, text=True, check=True)
    return words.stdout.split()[1]
