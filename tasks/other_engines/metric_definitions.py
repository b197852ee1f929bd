"""What other engines mean by "accept rate" and "accept length", by engine and version (F12).

Two servers that accept the same drafts print different rates: the denominator differs, and so does whether the bonus
token is counted. So a rate is converted by the formula of its engine and version, or it is refused; nothing is guessed.
Runs of different K are never compared by a rate of any definition: its denominator holds K.
"""

import math
from dataclasses import dataclass

from slipstream.engine.engine_versions import Engine, Version, not_a_release
from slipstream.engine.errors import SlipstreamError

RUNBOOK = "accept-length-low.md"


@dataclass(frozen=True)
class RateDefinition:
    """How a printed rate follows from a chain's accept length and verify width W = K + 1.

    where: engine and releases. formula: for people. with_bonus: the bonus token is in the numerator and the root in
    the denominator, so that a draft of which nothing is ever accepted shows 1 / W.
    """

    where: str
    formula: str
    with_bonus: bool

    def rate(self, accept_length: float, width: int) -> float:
        """What the engine prints. Raises ValueError when nothing is proposed (width 1)."""
        _check_width(width)
        return accept_length / width if self.with_bonus else (accept_length - 1) / (width - 1)

    def accept_length(self, rate: float, width: int) -> float:
        """The inverse: tokens a round, bonus included."""
        _check_width(width)
        return rate * width if self.with_bonus else 1 + rate * (width - 1)

    def acceptance_rate(self, rate: float, width: int) -> float:
        """Accepted drafts / proposed drafts."""
        return (self.accept_length(rate, width) - 1) / (width - 1)

    def width_range(self, accept_length: float, rate: float, half_unit: float) -> tuple[float, float]:
        """The verify widths that a printed pair allows.

        Args:
            accept_length, rate: as printed.
            half_unit: half of the last printed digit, 0.005 for two decimals.
        """
        bonus = 0.0 if self.with_bonus else 1.0
        low, high = accept_length - bonus - half_unit, accept_length - bonus + half_unit
        smallest, largest = rate - half_unit, rate + half_unit
        most = math.inf if smallest <= 0 else high / smallest
        least = 0.0 if largest <= 0 else max(low, 0.0) / largest
        return least + bonus, most + bonus


def _check_width(width: int) -> None:
    if width < 2:
        raise ValueError(f"verify width {width}: nothing is proposed, so there is no rate")


LENGTH_OVER_WIDTH = RateDefinition(
    "SGLang up to 0.5.10.post1", "accept length / verify width (bonus token and root counted)", True
)
ACCEPTED_OVER_PROPOSED = RateDefinition(
    "SGLang 0.5.11 and later; vLLM (V1)",
    "accepted drafts / proposed drafts, (accept length - 1) / K of a chain",
    False,
)
SGLANG_DEFINITIONS = (LENGTH_OVER_WIDTH, ACCEPTED_OVER_PROPOSED)

# Of each span, releases at both ends and between were read for this one number.
_SGLANG_SPANS = (
    ("0.5.4", "0.5.10.post1", LENGTH_OVER_WIDTH),
    ("0.5.11", "0.5.23", ACCEPTED_OVER_PROPOSED),
)
_VLLM_READ = ("0.24.0",)  # its log line prints the counts too, from which the rate is known in every release


def rate_definition(engine: Engine, version: str | None, topk: int | None = 1) -> RateDefinition:
    """The definition of the rate that a release prints in its log and on its metrics page.

    Args:
        engine: whose log it is.
        version: as somebody wrote it; None when nobody did.
        topk: branches of the draft; above 1 it is a tree.

    Raises SlipstreamError (F12) where no definition is known: no version, no release (a nightly, a patched build), one
    that was not read, and every tree.
    """
    if topk is not None and topk > 1:
        raise _refused(
            f"the accept rate of a tree (topk {topk})",
            "its denominator is tree nodes, most of which no chain could ever accept",
        )
    if version is None:
        raise _refused(f"an accept rate of {engine.label}, version unknown", "its meaning changed between versions")
    words = not_a_release(version)
    if words:
        raise _refused(f"an accept rate of {engine.label} {version}", f"that is {words}; its definition is not known")
    asked = Version.parse(version)
    if engine is Engine.VLLM and asked.text in _VLLM_READ:
        return ACCEPTED_OVER_PROPOSED
    for first, last, definition in _SGLANG_SPANS if engine is Engine.SGLANG else ():
        if Version.parse(first) <= asked <= Version.parse(last):
            return definition
    raise _refused(f"an accept rate of {engine.label} {asked}", "no source of that release was read")


def accept_length_from_rate(
    engine: Engine, version: str | None, rate: float, width: int | None, topk: int = 1
) -> float:
    """Accept length where only a rate was printed. Raises SlipstreamError (F12) when it cannot be converted."""
    definition = rate_definition(engine, version, topk)
    if width is None or width < 2:
        raise _refused(
            f"an accept rate of {rate:g} with verify width {'unknown' if width is None else width}",
            f"{definition.formula}: it cannot be read without the width",
        )
    return definition.accept_length(rate, width)


@dataclass(frozen=True)
class RequestKeys:
    """Names of a request's figures in SGLang's `meta_info`, which moved between releases.

    All count the same: accepted drafts without the bonus token; `histogram[a]` = verifies that accepted a drafts.
    """

    releases: str
    accepted: str
    proposed: str
    histogram: str


REQUEST_KEYS = (
    RequestKeys(
        "0.5.12 and later", "spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram"
    ),
    RequestKeys("0.5.11", "spec_accepted_drafts", "spec_proposed_drafts", "spec_accept_histogram"),
    RequestKeys("0.5.9 and 0.5.10", "spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram"),
)


def _refused(what: str, why: str) -> SlipstreamError:
    return SlipstreamError(
        f"{what} is not converted: {why}",
        expected="a rate whose formula is known for its engine and version: "
        + "; ".join(f"{d.where}: {d.formula}" for d in SGLANG_DEFINITIONS),
        do="state the release with --engine-version, or give the accept length or the histogram of accepted drafts",
        runbook=RUNBOOK,
        fault="F12",
    )
