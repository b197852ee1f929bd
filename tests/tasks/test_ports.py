"""Ports: free or held, and by whom."""

import os
import socket
import sys

import psutil
import pytest

from slipstream.tasks.ports import PortHolder, free_port, port_holders, port_is_free, wait_port_free


def test_a_held_port_is_not_free_and_its_holder_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not port_is_free("127.0.0.1", port)
        assert not wait_port_free("127.0.0.1", port, 0.1)
        (holder,) = port_holders(port)
        assert holder.pid == os.getpid()
        assert holder.user == psutil.Process().username()
        assert os.path.basename(sys.executable).split(".")[0] in holder.command
        assert str(holder).startswith(f"process {os.getpid()} of user {holder.user}: `")
    assert port_is_free("127.0.0.1", port)
    assert port_holders(port) == []


def test_connections_that_linger_do_not_hold_a_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        client = socket.create_connection(address)
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first keeps the port in TIME_WAIT
        client.close()
    assert port_is_free(*address)


def test_a_listener_on_every_address_holds_the_port_of_one():
    with socket.create_server(("0.0.0.0", 0)) as server:
        assert not port_is_free("127.0.0.1", server.getsockname()[1])


def test_free_ports_can_be_used():
    with socket.create_server(("127.0.0.1", free_port())):
        pass


def test_an_address_of_another_machine_is_an_error():
    with pytest.raises(OSError, match="address"):
        port_is_free("192.0.2.1", 80)


def test_an_unknown_holder_says_so():
    assert str(PortHolder(None, "not visible to us", "another")) == "process ? of user another: `not visible to us`"
