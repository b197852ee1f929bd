"""Versions of other engines: order, what is no release, and what is said of a release between two that were read."""

import itertools
import subprocess
import sys

import pytest

from slipstream.engine.engine_versions import (
    READ,
    READ_IN_PART,
    Engine,
    Version,
    neighbours,
    not_a_release,
    release,
    settled,
)
from slipstream.engine.errors import SlipstreamError

SGLANG, VLLM = Engine.SGLANG, Engine.VLLM


def test_order():
    texts = ["0.4.10", "0.5.9", "0.5.10", "0.5.10.post1", "0.5.10.post2", "0.5.11", "0.24.0", "1.0.0"]
    versions = [Version.parse(text) for text in texts]
    for (i, a), (j, b) in itertools.product(enumerate(versions), repeat=2):
        assert (a < b, a == b) == (i < j, i == j)


@pytest.mark.parametrize(("text", "shown"), [("v0.24.0", "0.24.0"), ("0.24", "0.24.0"), (" 0.5.9\n", "0.5.9")])
def test_spellings(text, shown):
    assert str(Version.parse(text)) == shown


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0.5.10.dev20260301+gabc1234", "a development build"),
        ("0.5.10.dev3", "a development build"),
        ("nightly", "a nightly build"),
        ("nightly-dev-20260301-abc", "a nightly build"),
        ("0.5.11rc1", "a pre-release"),
        ("0.5.11.rc0", "a pre-release"),
        ("0.24.0b1", "a pre-release"),
        ("0.5.14+patched", "a local build"),
        ("main", "a name that moves"),
        ("latest", "a name that moves"),
        ("9f2c1d4", "a commit"),
        ("9f2c1d4e8a0b3c5d7e9f1a2b3c4d5e6f7a8b9c0d", "a commit"),
        ("five", "not the name of a release"),
        ("\uff10.5.14", "not the name of a release"),
    ],
)
def test_no_release(text, words):
    assert not_a_release(text) == words
    with pytest.raises(SlipstreamError) as caught:
        release(SGLANG, text)
    assert caught.value.fault == "F20"
    assert text in caught.value.found
    assert words in caught.value.found
    with pytest.raises(ValueError, match=words):
        Version.parse(text)


@pytest.mark.parametrize("text", [None, "", "  "])
def test_unknown(text):
    with pytest.raises(SlipstreamError, match="version of SGLang is not known") as caught:
        release(SGLANG, text)
    assert caught.value.fault == "F20"


def test_what_was_read_is_in_order_and_are_releases():
    for engine in Engine:
        versions = [Version.parse(text) for text in READ[engine]]
        assert versions == sorted(set(versions))
        assert [str(v) for v in versions] == list(READ[engine])
        assert not set(READ[engine]) & set(READ_IN_PART[engine])


@pytest.mark.parametrize(
    ("version", "speak"),
    [
        ("0.5.9", ("0.5.9",)),
        ("v0.5.14", ("0.5.14",)),
        ("0.5.10", ("0.5.9", "0.5.10.post1")),
        ("0.5.13", ("0.5.12.post1", "0.5.13.post1")),
        ("0.5.16", ("0.5.15.post1", "0.5.23")),
        ("0.5.19", ("0.5.15.post1", "0.5.23")),  # read for one feature only
    ],
)
def test_who_speaks_for_a_version(version, speak):
    assert neighbours(SGLANG, version) == speak


@pytest.mark.parametrize(
    ("engine", "version", "words"),
    [
        (SGLANG, "0.5.8", "SGLang 0.5.8 is older than every release"),
        (SGLANG, "0.5.24", "SGLang 0.5.24 is newer than every release"),
        (VLLM, "0.23.1", "vLLM 0.23.1 is older"),
        (VLLM, "0.24.1", "vLLM 0.24.1 is newer"),
    ],
)
def test_outside_of_what_was_read(engine, version, words):
    with pytest.raises(SlipstreamError, match=words) as caught:
        neighbours(engine, version)
    assert caught.value.fault == "F20"
    assert READ[engine][-1] in caught.value.do


def test_a_rule_between_two_releases():
    def shifted(version):
        return version >= Version.parse("0.5.13.post1")

    assert settled(SGLANG, "0.5.12.post1", shifted, "the rule") is False
    assert settled(SGLANG, "0.5.12", shifted, "the rule") is False  # 0.5.11 and 0.5.12.post1 agree
    assert settled(SGLANG, "0.5.20", shifted, "the rule") is True
    with pytest.raises(SlipstreamError) as caught:
        settled(SGLANG, "0.5.13", shifted, "the rule")
    assert caught.value.fault == "F20"
    assert "the rule changed between SGLang 0.5.12.post1 and 0.5.13.post1, and 0.5.13 lies" in caught.value.found


def test_it_loads_without_torch():
    code = "import sys, slipstream.engine.engine_versions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
