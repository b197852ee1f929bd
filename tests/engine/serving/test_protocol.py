"""The socket between front and engine: whole messages, no waiting for a slow reader, a clear end."""

import socket

import pytest

from slipstream.engine.serving.protocol import Abort, Channel, Round, Stop, Tokens, encode


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    yield ours, Channel(theirs)
    ours.close()


def test_messages_in_pieces_arrive_whole_and_in_order(pair):
    ours, channel = pair
    data = encode(Abort("a")) + encode(Stop())
    for byte in data[:-1]:
        ours.send(bytes([byte]))
    assert channel.receive(wait=True) == [Abort("a")]
    assert channel.receive(wait=False) == []
    ours.send(data[-1:])
    assert channel.receive(wait=False) == [Stop()]


def test_a_slow_reader_does_not_hold_up_the_engine(pair):
    ours, channel = pair
    message = Round([Tokens("a", list(range(1000)))])
    size = len(encode(message))
    for _ in range(2000):
        channel.send(message)  # many times what a socket holds; a blocking send would hang here
    received = bytearray()
    while len(received) < 2000 * size:
        received += ours.recv(1 << 20)
        channel.receive(wait=False)
    assert bytes(received) == encode(message) * 2000


def test_flush_hands_over_the_last_words(pair):
    ours, channel = pair
    channel.send(Tokens("a", [1]))
    channel.flush(1.0)
    assert ours.recv(1 << 20) == encode(Tokens("a", [1]))


def test_a_front_that_is_gone_is_noticed(pair):
    ours, channel = pair
    ours.close()
    with pytest.raises(BrokenPipeError):
        channel.receive(wait=True)
    with pytest.raises(BrokenPipeError):
        channel.send(Stop())
