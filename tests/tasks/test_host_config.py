"""The host section: an address belongs to SSH, and none can be read as two words or as an option."""

import pytest
from pydantic import ValidationError

from slipstream.configs.host import Host
from slipstream.configs.load import load
from slipstream.configs.ssh_address import SshAddress, parse_jumps, parse_ssh_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("gpu1", SshAddress("gpu1")),
        ("ops@gpu1.example.org:2222", SshAddress("gpu1.example.org", 2222, "ops")),
        ("[2001:db8::1]:22", SshAddress("2001:db8::1")),
        ("a_b@10.0.0.1", SshAddress("10.0.0.1", user="a_b")),
    ],
)
def test_addresses(text, address):
    assert parse_ssh_address(text) == address
    assert parse_ssh_address(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "-oProxyCommand=x", "a b", "a;b", "a@b@c", "host:", "host:0", "host:70000", "$(id)", "u'@h", "a\nb"]
)
def test_what_is_no_address(text):
    with pytest.raises(ValueError, match="ADDRESS"):
        parse_ssh_address(text)


def test_the_name_in_a_known_hosts_file_has_the_port():
    assert SshAddress("h").known_as == "h"
    assert SshAddress("h", 2222).known_as == "[h]:2222"


def test_jumps_are_in_order():
    assert parse_jumps(None) == ()
    assert parse_jumps("a, u@b:23") == (SshAddress("a"), SshAddress("b", 23, "u"))


def test_this_machine_is_the_default():
    assert Host().kind == "local"
    assert Host(kind="ssh", address="gpu1", port=23, user="u").ssh_address == SshAddress("gpu1", 23, "u")


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "ssh"},
        {"address": "gpu1"},
        {"kind": "ssh", "address": "u@gpu1"},
        {"kind": "ssh", "address": "gpu1:22"},
        {"kind": "ssh", "address": "gpu1", "user": "a b"},
        {"kind": "ssh", "address": "gpu1", "jump": "a,,b"},
        {"kind": "ssh", "address": "gpu1", "max_sessions": 1},
    ],
)
def test_what_contradicts_itself(values):
    with pytest.raises(ValidationError):
        Host(**values)


def test_each_value_can_be_overridden(tmp_path):
    path = tmp_path / "d.yaml"
    path.write_text("host: {kind: ssh, address: gpu1}\n")
    loaded = load(path, ("host.address=gpu2",), {"SLIPSTREAM_HOST__PORT": "2222"})
    assert loaded.deployment.host.ssh_address == SshAddress("gpu2", 2222)
    assert str(loaded.provenance["host.port"]) == "environment SLIPSTREAM_HOST__PORT"
