"""How many drafts a round really proposed, and where that is known from: start-up, counters, or the printed pairs."""

from dataclasses import dataclass, field

from slipstream.engine.engine_versions import Engine
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.explain_log.observed import PRINTED_HALF_UNIT, RateFit, Section, Settings
from slipstream.tasks.other_engines.metric_definitions import RateDefinition, rate_definition

CHAINS = (None, "EAGLE", "EAGLE3", "NEXTN", "STANDALONE")  # algorithms whose width follows from the steps


@dataclass
class Width:
    """num_steps: K; None when it is not one number. definition: of the printed rate, where it is settled."""

    num_steps: int | None = None
    verify_width: int | None = None
    where: str = ""
    definition: RateDefinition | None = None
    definition_from: str = ""
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def find_width(section: Section, version: str | None) -> Width:
    """K and verify width of a section, with the meaning of its rate. `version`: stated, or printed by the server."""
    found = Width()
    in_force, asked = section.effective, section.asked
    topk = in_force.topk or asked.topk or 1
    if in_force.known and not _contradicts_itself(in_force, topk, found):
        found.verify_width, found.where = _width_of(in_force, topk), in_force.where
    if section.engine == "sglang" and section.fit.pairs:
        _settle_rate(section, version, topk, found)
    if found.verify_width is None and asked.known and section.engine == "sglang" and topk == 1:
        found.verify_width = None if asked.num_steps is None else asked.num_steps + 1
        found.where = f"{asked.where}: with topk 1 the width is steps + 1, whatever tokens are asked"
    elif found.verify_width is None and asked.known:
        found.verify_width, found.where = _width_of(asked, topk), asked.where
    if found.verify_width is not None:
        found.num_steps = found.verify_width - 1 if topk == 1 else in_force.num_steps or asked.num_steps
    if topk > 1:
        found.notes.append(f"a tree (topk {topk}): the ceiling is steps + 1; accepted / proposed is not given")
    _not_one_k(section, found)
    _too_long(section, found)
    return found


def _contradicts_itself(settings: Settings, topk: int, found: Width) -> bool:
    """A chain in force has the width steps + 1 in every release read; of other numbers, neither is believed."""
    steps, width = settings.num_steps, settings.verify_width
    if topk != 1 or steps is None or width in (None, steps + 1) or settings.algorithm not in CHAINS:
        return False
    tree = "" if settings.topk else " (a tree has not, but no topk is in the file)"
    found.refused.append(
        f"{settings.where} says {settings.describe()}: in force, a chain has the width steps + 1{tree}, so K is not "
        "taken from them"
    )
    return True


def _width_of(settings: Settings, topk: int) -> int | None:
    """Rows the target scores a round; of a chain, steps + 1 where the width itself is not told."""
    if settings.verify_width is not None:
        return settings.verify_width
    return settings.num_steps + 1 if settings.num_steps is not None and topk == 1 else None


def _settle_rate(section: Section, version: str | None, topk: int, found: Width) -> None:
    """The definition of SGLang's printed rate: the documented one, or the only one that fits the printed pairs."""
    fit = section.fit
    documented = None
    try:
        documented = rate_definition(Engine.SGLANG, version, topk)
    except SlipstreamError as error:
        refusal = error.found
    if topk > 1:
        found.refused.append(refusal)
        return
    fitting = fit.fitting(found.verify_width) if section.lengths.lines else {}
    if documented is None:
        if len(fitting) == 1:
            ((found.definition, widths),) = fitting.items()
            found.definition_from = f"of the two known definitions only this one fits all {fit.pairs} printed pairs"
            _infer(found, widths, fit)
            return
        found.refused.append(f"{refusal}; {_fits(found, fitting, fit)}")
    elif documented in fitting or not section.lengths.lines:
        found.definition, found.definition_from = documented, f"documented for {version}"
        _infer(found, fitting.get(documented, []), fit)
    else:
        found.refused.append(
            f"the accept rate is not converted: its {fit.pairs} pairs of length and rate do not fit the definition of "
            f"{version} ({documented.formula}) with {_words(found.verify_width)}; {_fits(found, fitting, fit)}. The "
            "version stated is not what ran, or it was patched"
        )


def _words(width: int | None) -> str:
    return "any verify width" if width is None else f"verify width {width}"


def _fits(found: Width, fitting: dict[RateDefinition, list[int]], fit: RateFit) -> str:
    """Which definitions fit the printed pairs, in words."""
    if len(fitting) > 1:
        return "both known definitions fit its pairs"
    if fitting:
        return f"they fit that of {next(iter(fitting)).where}"
    told = f"no known definition fits its pairs with {_words(found.verify_width)}"
    elsewhere = [f"width {', '.join(map(str, w[:3]))} by that of {d.where}" for d, w in fit.fitting(None).items()]
    if found.verify_width is not None and elsewhere:
        told += f" (but {' or '.join(elsewhere)} would)"
    return told


def _infer(found: Width, widths: list[int], fit: RateFit) -> None:
    """Takes the width from the pairs when nothing else tells it."""
    assert found.definition is not None
    if found.verify_width is not None:
        return
    if len(widths) == 1:
        found.verify_width = widths[0]
        found.where = f"the {fit.pairs} printed pairs of length and rate ({found.definition.formula})"
    elif widths:
        found.notes.append(
            f"the printed pairs allow verify widths {widths[0]} to {widths[-1]}: K is not taken from them"
        )


def _not_one_k(section: Section, found: Width) -> None:
    """Under an adaptive server the figures mix several K."""
    if not section.adaptive_changes:
        if section.effective.adaptive:
            found.notes.append("speculative_adaptive is on; no change of K is printed, so K is taken as fixed")
        return
    found.refused.append(
        f"K changed {section.adaptive_changes} times (adaptive): a mean over several K has no ceiling, no accepted / "
        "proposed and no A_k"
    )
    found.num_steps = found.verify_width = None


def _too_long(section: Section, found: Width) -> None:
    """A printed length above K + 1 contradicts K."""
    highest = section.lengths.highest
    if found.num_steps is not None and section.lengths.lines and highest > found.num_steps + 1 + PRINTED_HALF_UNIT:
        found.refused.append(
            f"K = {found.num_steps} ({found.where}): a length of {highest:.2f} is printed, and a round of that K "
            f"commits at most {found.num_steps + 1}"
        )
        found.num_steps = found.verify_width = None
    counted = section.accepted / section.rounds if section.rounds and section.accepted is not None else 0.0
    if found.num_steps is not None and counted > found.num_steps + 0.005:
        found.refused.append(
            f"K = {found.num_steps} ({found.where}): {section.accepted:g} accepted drafts are counted in "
            f"{section.rounds:g} rounds, {counted:.2f} a round, and no round accepts more than it drafts"
        )
        found.num_steps = found.verify_width = None
