"""`slipstream host trust`: the fingerprint is shown, a person says yes, and only then is it written."""

import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.engine.errors import SlipstreamError
from slipstream.flows import cli
from slipstream.flows.host_view import trust
from slipstream.tasks.hosts.host import HostUnreachable


@pytest.fixture(scope="module")
def ssh_tools(load_test_module):
    return load_test_module(Path(__file__).parents[1] / "tasks" / "hosts" / "ssh_server.py")


@pytest.fixture
def server(ssh_tools, tmp_path):
    ssh_tools.need_sshd()
    made = ssh_tools.SshServer(tmp_path / "sshd")
    yield made
    made.stop()


@pytest.fixture
def config(server, tmp_path):
    path = tmp_path / "d.yaml"
    known, key = server.folder / "known_hosts", server.user_key
    path.write_text(
        f"host: {{kind: ssh, address: 127.0.0.1, port: {server.port}, known_hosts: {known}, identity_file: {key}}}\n"
    )
    return path


def fingerprint(server):
    words = subprocess.run(["ssh-keygen", "-lf", f"{server.host_key}.pub"], capture_output=True, text=True, check=True)
    return words.stdout.split()[1]


def known(server):
    path = server.folder / "known_hosts"
    return path.read_text() if path.is_file() else ""


def test_a_person_is_shown_the_fingerprint_and_asked(server, config):
    said, asked = [], []
    with pytest.raises(SlipstreamError, match="is not trusted"):
        trust(config, (), ask=lambda question: asked.append(question) or "y", say=said.append)
    assert known(server) == ""
    trust(config, (), ask=lambda question: asked.append(question) or "yes", say=said.append)
    assert fingerprint(server) in "\n".join(said)
    assert len(asked) == 2
    assert known(server).startswith(f"[127.0.0.1]:{server.port} ssh-ed25519 ")
    trust(config, (), ask=lambda _: pytest.fail("it is known"), say=said.append)
    assert "is known" in said[-1]


def test_other_lines_of_the_file_stay(server, config):
    key = "AAAAC3NzaC1lZDI1NTE5AAAAIIGpd2ypgKqSqHPFFyTgUYhvYyDKqiPLqvJ9v3L8kDvS"
    before = f"# ours\n\nother,example ssh-ed25519 {key}\n"
    (server.folder / "known_hosts").write_text(before)
    trust(config, (), ask=lambda _: "yes", say=lambda _: None)
    assert known(server).startswith(before)
    assert len(known(server).splitlines()) == 4


def test_a_line_that_is_no_entry_is_named(server, config):
    (server.folder / "known_hosts").write_text("# ours\nname ssh-ed25519 notbase64!\n")
    with pytest.raises(SlipstreamError, match="known_hosts:2 is not a line"):
        trust(config, (), ask=lambda _: "yes", say=lambda _: None)


def test_a_changed_key_needs_a_word_of_its_own(server, config):
    trust(config, (), fingerprints=[fingerprint(server)], say=lambda _: None)
    before = known(server)
    server.stop()
    server.new_host_key()
    server.start()
    with pytest.raises(SlipstreamError, match="shows another key than before"):
        trust(config, (), fingerprints=[fingerprint(server)], say=lambda _: None)
    assert known(server) == before
    said = []
    trust(config, (), ask=lambda _: "yes", replace_changed=True, say=said.append)
    assert "in the place of" in "\n".join(said)
    assert len(known(server).splitlines()) == 1
    assert known(server) != before


def test_every_hop_is_trusted_in_turn(server, ssh_tools, config, tmp_path):
    jump = ssh_tools.SshServer(tmp_path / "jump")
    try:
        shutil.copyfile(f"{server.user_key}.pub", jump.folder / "authorized_keys")
        way = (f"host.jump={jump.address}",)
        said = []
        trust(config, way, fingerprints=[fingerprint(jump), fingerprint(server)], say=said.append)
        assert [str(jump.port) in line for line in said if " shows " in line] == [True, False]
        assert len(known(server).splitlines()) == 2
    finally:
        jump.stop()


def test_on_the_command_line(server, config):
    runner, group = CliRunner(), cli.app
    words = ["host", "trust", str(config)]
    nobody = runner.invoke(group, words)
    assert isinstance(nobody.exception, SlipstreamError)
    assert "nobody is here to compare it" in str(nobody.exception)
    wrong = runner.invoke(group, [*words, "--fingerprint", "SHA256:x"])
    assert "not SHA256:x" in str(wrong.exception)
    assert known(server) == ""
    right = runner.invoke(group, [*words, "--fingerprint", fingerprint(server)])
    assert right.exit_code == 0, right.exception
    assert "written to" in right.output


def test_a_local_host_needs_no_trust(tmp_path):
    path = tmp_path / "d.yaml"
    path.write_text("")
    with pytest.raises(SlipstreamError, match=r"host\.kind is local"):
        trust(path, ())


def test_a_stage_of_a_host_that_is_not_trusted_is_run_nowhere(config):
    for words in (["stage", "resolve"], ["clean"], ["report"]):
        done = CliRunner().invoke(cli.app, [*words, str(config)])
        assert isinstance(done.exception, SlipstreamError), words
        assert "is not known" in str(done.exception)


def test_a_changed_stage_is_not_sent_to_a_far_host(config):
    done = CliRunner().invoke(cli.app, ["parity", str(config), "--inject", "F5:slot=0"])
    assert isinstance(done.exception, SlipstreamError)
    assert "does not go to 127.0.0.1" in str(done.exception)


def test_nobody_there(server, config):
    server.stop()
    with pytest.raises(HostUnreachable):
        trust(config, ())
