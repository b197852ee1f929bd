"""Text, finish reason and usage do not depend on how the tokens were cut into rounds."""

import itertools

import pytest

from slipstream.engine.serving.generation import Generation
from slipstream.engine.serving.protocol import Tokens

END = 0


class ByteTokenizer:
    """Token b is byte b; token 0 is the end mark and no text."""

    def decode(self, token_ids, skip_special_tokens=True):
        return bytes(b for b in token_ids if b != END).decode(errors="replace")


def run(token_ids, cuts, reason, stop=()):
    """The answer as its rounds give it: (text, ids, finish reason, completion tokens)."""
    generation = Generation(ByteTokenizer(), 3, stop, logprobs=False)
    text, ids, start = "", [], 0
    for end in [*cuts, len(token_ids)]:
        last = end == len(token_ids)
        delta = generation.push(Tokens("r", token_ids[start:end], reason if last else None))
        text, ids, start = text + delta.text, ids + delta.token_ids, end
        if delta.finish_reason:
            break
    return text, ids, generation.finish_reason, generation.usage()["completion_tokens"]


def all_cuts(length):
    places = range(1, length)
    return itertools.chain.from_iterable(itertools.combinations(places, n) for n in range(4))


@pytest.mark.parametrize(
    ("data", "reason", "stop", "expected"),
    [
        ("hé€😀!".encode(), "length", (), ("hé€😀!", "length", 11)),
        (b"abc\x00", "stop", (), ("abc", "stop", 4)),
        ("ab€".encode()[:-1], "length", (), ("ab\ufffd", "length", 4)),
        (b"one two three", "length", ("two",), ("one ", "stop", 7)),
        (b"one two\x00", "stop", ("two",), ("one ", "stop", 7)),
        (b"one tw", "length", ("two",), ("one tw", "length", 6)),
        (b"aXbYc", "length", ("Y", "Xb"), ("a", "stop", 3)),
    ],
)
def test_every_cut_gives_the_same_answer(data, reason, stop, expected):
    for cuts in all_cuts(len(data)):
        text, ids, finish_reason, count = run(list(data), cuts, reason, stop)
        assert (text, finish_reason, count) == expected, cuts
        assert ids == list(data)[:count]


def test_a_stop_token_that_is_text_is_not_shown():
    assert run(list(b"ab\n"), [1], "stop")[0] == "ab"


def test_logprobs_stay_with_their_tokens():
    generation = Generation(ByteTokenizer(), 1, ("b",), logprobs=True)
    entries = [(-0.5, [(97, -0.5)]), (-0.25, [(98, -0.25)]), (-1.0, [(99, -1.0)])]
    delta = generation.push(Tokens("r", list(b"abc"), None, entries))
    assert [(e.token_id, e.logprob, e.top) for e in delta.logprobs] == [
        (97, -0.5, ((97, -0.5),)),
        (98, -0.25, ((98, -0.25),)),
    ]
