"""Large files: by rsync and by SFTP, gone on with where they were cut, the same bytes at the end."""

import os
import random
import subprocess
import threading

import pytest

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.hosts import rsync, ssh
from slipstream.tasks.hosts.host import HostUnreachable
from slipstream.tasks.hosts.sftp import Sftp

SIZE = 6_000_000


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "a source"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    return path


@pytest.fixture(params=["rsync", "SFTP"])
def way(request, monkeypatch):
    """The two ways a file goes; small ones go as large ones."""
    monkeypatch.setattr(ssh, "RSYNC_FROM_BYTES", 1)
    if request.param == "SFTP":
        monkeypatch.setattr(ssh, "can_rsync", lambda: False)
    elif not rsync.can_rsync():
        pytest.skip("no rsync here")
    return request.param


@pytest.fixture
def relayed(own_server, ssh_tools, tmp_path):
    """(host through a relay that can be slow, relay)."""
    server = own_server()
    relay = ssh_tools.Relay(server.port)
    server.trust()
    server.trust(relay.address)
    host = server.host(tmp_path / "far", address=relay.address, keepalive_seconds=1.0, reconnect_seconds=0)
    host.hello()
    yield host, relay
    host.close()
    relay.close()


def test_there_and_back_with_the_rate(relayed, way, source, tmp_path):
    host, _ = relayed
    said = []
    sent = host.put(source, "some folder/it's $(id)", say=said.append)
    assert (sent.way, sent.bytes, sent.resumed_bytes) == (way, SIZE, 0)
    assert (tmp_path / "far" / "some folder" / "it's $(id)").read_bytes() == source.read_bytes()
    back = tmp_path / "back again"
    assert host.get("some folder/it's $(id)", back, say=said.append).way == way
    assert back.read_bytes() == source.read_bytes()
    assert len(said) == 2
    assert all("6.0 MB in " in line and f"by {way}, " in line and "MB/s" in line for line in said)
    assert sorted(path.name for path in (tmp_path / "far" / "some folder").iterdir()) == ["it's $(id)"]
    assert not list(tmp_path.glob(".*"))


def cut_in_the_middle(relay, path):
    """Makes the relay slow, and cuts it once something of a file has arrived."""
    relay.be_slow(1_500_000)
    done = threading.Event()

    def watch():
        while not done.wait(0.02):
            if any(part.stat().st_size > 500_000 for part in path.glob(".*")):
                relay.open = False
                relay.cut()
                return

    threading.Thread(target=watch, daemon=True).start()
    return done


def test_what_was_there_when_the_connection_broke_is_not_sent_again(relayed, way, source, tmp_path):
    host, relay = relayed
    folder = tmp_path / "far" / "folder"
    folder.mkdir(parents=True)
    done = cut_in_the_middle(relay, folder)
    with pytest.raises(HostUnreachable):
        host.put(source, "folder/target")
    done.set()
    (part,) = folder.iterdir()
    assert 0 < part.stat().st_size < SIZE
    relay.be_slow(float("inf"))
    relay.open, host.reconnect_seconds = True, 30
    before = relay.carried_bytes
    again = host.put(source, "folder/target")
    assert again.resumed_bytes >= 500_000
    assert "were there" in str(again)
    assert relay.carried_bytes - before < SIZE - 300_000
    assert (folder / "target").read_bytes() == source.read_bytes()
    assert [path.name for path in folder.iterdir()] == ["target"]


def test_a_fetch_goes_on_as_well(relayed, way, source, tmp_path):
    host, relay = relayed
    host.put(source, "target")
    here = tmp_path / "here"
    here.mkdir()
    (here / f".back.{host.file_facts('target')['sha256'][:12]}.part").write_bytes(source.read_bytes()[:4_000_000])
    before = relay.carried_bytes
    fetched = host.get("target", here / "back")
    assert fetched.resumed_bytes == 4_000_000
    assert relay.carried_bytes - before < 3_000_000
    assert (here / "back").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("length", [100_000, SIZE, SIZE + 5])
def test_a_beginning_that_is_not_this_files_is_thrown_away(relayed, way, source, tmp_path, length):
    """Found by the hash of the whole, whatever lay there; without it the wrong bytes would stay."""
    host, _ = relayed
    sha = subprocess.run(["sha256sum", source], capture_output=True, text=True, check=True).stdout[:12]
    (tmp_path / "far" / f".target.{sha}.part").write_bytes(b"x" * length)
    host.put(source, "target")
    assert (tmp_path / "far" / "target").read_bytes() == source.read_bytes()


def test_two_who_send_the_same_file_at_once(relayed, way, source, tmp_path):
    host, _ = relayed
    results = []

    def send():
        results.append(host.put(source, "target"))

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert (tmp_path / "far" / "target").read_bytes() == source.read_bytes()


def test_a_part_that_somebody_else_has_finished_meanwhile_is_sent_anew(relayed, way, source, tmp_path, monkeypatch):
    """Between the look at what is there and the opening, the other sender gives the file its name."""
    host, _ = relayed
    there = Sftp.size

    def done_meanwhile(self, path):
        return there(self, path) or 5

    monkeypatch.setattr(Sftp, "size", done_meanwhile)
    host.put(source, "target")
    assert (tmp_path / "far" / "target").read_bytes() == source.read_bytes()


def test_rsync_holds_to_the_same_known_hosts_file(own_server, source, tmp_path):
    if not rsync.can_rsync():
        pytest.skip("no rsync here")
    server = own_server()
    target = tmp_path / "target"

    def send():
        rsync.rsync(server.target(), str(source), str(target), to_host=True, progress=lambda _: None)

    with pytest.raises(HostUnreachable, match="Host key verification failed"):
        send()
    assert not target.exists()
    server.trust()
    send()
    assert target.read_bytes() == source.read_bytes()


def test_through_jump_hosts(own_server, source, tmp_path):
    if not rsync.can_rsync():
        pytest.skip("no rsync here")
    jump, server = own_server(), own_server()
    for each in (jump, server):
        each.trust()
        with (server.folder / "known_hosts").open("a") as file:
            file.write((each.folder / "known_hosts").read_text())
    (jump.folder / "authorized_keys").write_text((server.folder / "user_key.pub").read_text())
    target = server.target(jumps=(jump.address,))
    rsync.rsync(target, str(source), str(tmp_path / "target"), to_host=True, progress=lambda _: None)
    assert (tmp_path / "target").read_bytes() == source.read_bytes()
    assert "Accepted publickey" in (jump.folder / "sshd.log").read_text()


def test_where_the_shell_prints_sftp_takes_over(machine, source, tmp_path, monkeypatch):
    monkeypatch.setattr(ssh, "RSYNC_FROM_BYTES", 1)
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bashrc").write_text("echo 'Welcome to node 7!'\n")
    one = machine(home=home)
    host = one.host(one.base)
    assert host.put(source, "target").way == "SFTP"
    assert host.file_facts("target")["bytes"] == SIZE
    host.close()


def test_a_file_that_cannot_be_written_there_is_no_matter_of_the_connection(relayed, way, source, tmp_path):
    host, _ = relayed
    (tmp_path / "far" / "target").mkdir()
    with pytest.raises(SlipstreamError, match=r"target|directory"):
        host.put(source, "target/")
    assert os.listdir(tmp_path / "far" / "target") == []
