"""Versions of other engines: how they are written and ordered, and which ones were read in their source.

What a flag, a log line or a layer id means to another engine depends on its version. A rule is known for the releases
whose source was read. For a release between two of those it is known when both of them have the same rule. Everything
else (older, newer, a nightly, a build of one's own) is refused by name (F20): nothing about it is guessed.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from slipstream.engine.errors import SlipstreamError

T = TypeVar("T")


class Engine(StrEnum):
    """Engines whose drafts we write, whose launch lines and logs we read."""

    VLLM = "vllm"
    SGLANG = "sglang"

    @property
    def label(self) -> str:
        """As its makers write it."""
        return {"vllm": "vLLM", "sglang": "SGLang"}[self.value]


# Releases whose source was read for all that Slipstream says of them, oldest first.
READ: dict[Engine, tuple[str, ...]] = {
    Engine.SGLANG: (
        "0.5.9",
        "0.5.10.post1",
        "0.5.11",
        "0.5.12.post1",
        "0.5.13.post1",
        "0.5.14",
        "0.5.15.post1",
        "0.5.23",
    ),
    Engine.VLLM: ("0.24.0",),
}
# Releases read for single features alone (in SGLang: how states are captured, token details over the OpenAI endpoints).
READ_IN_PART: dict[Engine, tuple[str, ...]] = {
    Engine.SGLANG: ("0.5.17", "0.5.19", "0.5.21", "0.5.22"),
    Engine.VLLM: (),
}

_RELEASE = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.post(\d+))?", re.IGNORECASE | re.ASCII)
# What else people call a version, the first that fits. None of these says which source is running.
_NO_RELEASE = (
    (re.compile(r"^g?[0-9a-f]{7,40}$", re.IGNORECASE), "a commit"),
    (re.compile(r"nightly", re.IGNORECASE), "a nightly build"),
    (re.compile(r"\.?dev\d*", re.IGNORECASE), "a development build"),
    (re.compile(r"\d\.?(rc|a|b|alpha|beta|pre)\d*", re.IGNORECASE), "a pre-release"),
    (re.compile(r"\+"), "a local build"),
    (re.compile(r"^(main|master|head|latest|stable)$", re.IGNORECASE), "a name that moves"),
)


@dataclass(frozen=True, order=True)
class Version:
    """A release, ordered as releases are: 0.5.9 < 0.5.10 < 0.5.10.post1 < 0.5.11. `text` is how it is shown."""

    key: tuple[int, int, int, int]
    text: str = field(compare=False)

    @classmethod
    def parse(cls, text: str) -> "Version":
        """From "0.5.9", "v0.24.0", "0.24" or "0.5.10.post1". Raises ValueError for what is not a release."""
        found = _RELEASE.fullmatch(text.strip())
        if found is None:
            raise ValueError(not_a_release(text))
        major, minor, patch, post = found.groups()
        numbers = (int(major), int(minor), int(patch or 0))
        tail = "" if post is None else f".post{int(post)}"
        return cls((*numbers, -1 if post is None else int(post)), ".".join(map(str, numbers)) + tail)

    def __str__(self) -> str:
        return self.text


def not_a_release(text: str) -> str:
    """What a version is instead of a release ("a nightly build"), or "" for a release."""
    text = text.strip()
    if _RELEASE.fullmatch(text):
        return ""
    return next((words for pattern, words in _NO_RELEASE if pattern.search(text)), "not the name of a release")


def release(engine: Engine, version: str | None) -> Version:
    """A version as a release. Raises SlipstreamError (F20) for none, and for a nightly or another build, by name."""
    if version is None or not version.strip():
        raise _refused(engine, f"the version of {engine.label} is not known", "the release that is installed")
    words = not_a_release(version)
    if words:
        raise _refused(
            engine,
            f"{engine.label} {version.strip()} is {words}, no release",
            "a release: what flags, logs and layer ids mean is known by release alone",
        )
    return Version.parse(version)


def neighbours(engine: Engine, version: str | None, also: Sequence[str] = ()) -> tuple[str, ...]:
    """The releases that were read and that speak for a version: itself, or the next older and the next newer one.

    Args: also: releases beside those of READ that were read for the matter at hand (see READ_IN_PART).
    Raises SlipstreamError (F20) for an unknown, older or newer version and for one that is no release.
    """
    asked = release(engine, version)
    read = sorted(Version.parse(text) for text in (*READ[engine], *also))
    if asked in read:
        return (asked.text,)
    older, newer = [v for v in read if v < asked], [v for v in read if v > asked]
    if not older or not newer:
        raise _refused(
            engine,
            f"{engine.label} {asked} is {'newer' if older else 'older'} than every release whose source was read",
            f"a release from {read[0]} to {read[-1]}" if len(read) > 1 else f"{read[0]}",
        )
    return (older[-1].text, newer[0].text)


def settled(
    engine: Engine, version: str | None, rule: Callable[[Version], T], what: str, also: Sequence[str] = ()
) -> T:
    """What a rule says for a version.

    Args:
        engine, version: as somebody wrote them.
        rule: gives the rule of one release that was read; its results are compared by `==`.
        what: the rule's subject, for the error ("the meaning of layer ids").
        also: releases beside those of READ that were read for this rule (see READ_IN_PART).

    Raises SlipstreamError (F20) for what `neighbours` refuses, and for a release between two read ones that disagree.
    """
    spoken = neighbours(engine, version, also)
    results = [rule(Version.parse(text)) for text in spoken]
    if any(result != results[0] for result in results):
        older, newer = spoken
        raise _refused(
            engine,
            f"{what} changed between {engine.label} {older} and {newer}, and {release(engine, version)} lies between: "
            "which of the two it has is not known",
            f"{older} or earlier, or {newer} or later",
        )
    return results[0]


def _refused(engine: Engine, found: str, expected: str) -> SlipstreamError:
    return SlipstreamError(
        found,
        expected=expected,
        do=f"install and name one of {engine.label} {', '.join(READ[engine])}, or serve with Slipstream's own engine",
        fault="F20",
    )
