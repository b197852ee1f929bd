"""The table: what each engine, by version and family of the target, makes of a layer id.

Read in the sources of the releases that `slipstream.engine.engine_versions` names; nothing of it was run on a GPU.
"""

from dataclasses import dataclass
from enum import StrEnum

from slipstream.engine.drafts.eagle3.layer_ids.families import Family
from slipstream.engine.engine_versions import Engine, Version


class Shift(StrEnum):
    """When an engine adds 1 to the ids of a config."""

    NEVER = "never"
    ALWAYS = "always"
    IF_FIRST_IS_1 = "only if the first id is 1"
    UNLESS_N = "unless the largest id is N"


class Outcome(StrEnum):
    """What comes of asking for a state at one of the two ends, slot 0 or slot N."""

    CAPTURED = "captured"
    STOPS = "stops with an error: there is no residual yet"
    NO_LAYER = "stops with an error: there is no such layer"
    MISSED = "is never captured, which leaves the draft one state short"
    OVERWRITTEN = "hands out the buffer that later layers add into: another state, without a word"


@dataclass(frozen=True)
class Rule:
    """One row.

    Args:
        shift: when 1 is added to the ids.
        first: what comes of slot 0, the embedding output.
        last: what comes of slot N, the state after the last layer.
        graphs_ignore_ids: CUDA graphs capture the default slots, whatever the config says.
    """

    shift: Shift
    first: Outcome
    last: Outcome
    graphs_ignore_ids: bool = False


def rule_of(engine: Engine, version: Version, family: Family) -> Rule | None:
    """The row of a release that was read; None where it cannot capture states of that family at all, or was not read.

    Args: version: one of those that `engine_versions` lists, since thresholds are set between those alone.
    """
    if engine is Engine.VLLM:
        return _vllm(family)
    return _sglang(version, family)


def _vllm(family: Family) -> Rule | None:
    if family is Family.GPT_OSS:
        return None  # not read
    if family in (Family.DEEPSEEK, Family.KIMI_K25):
        # Hidden state + residual are added on entering a layer: no residual before the first, no layer after the last.
        return Rule(Shift.NEVER, Outcome.STOPS, Outcome.MISSED)
    return Rule(Shift.NEVER, Outcome.CAPTURED, Outcome.CAPTURED)


def _sglang(version: Version, family: Family) -> Rule | None:
    """All families capture on entering a layer, so that slot N has no place but in gpt-oss since 0.5.17."""
    old_graphs = version <= Version.parse("0.5.10.post1")

    def since(text: str) -> bool:
        return version >= Version.parse(text)

    def row(shift: Shift, first: Outcome, last: Outcome = Outcome.MISSED) -> Rule:
        return Rule(shift, first, last, old_graphs)

    match family:
        case Family.LLAMA:
            return row(Shift.ALWAYS, Outcome.CAPTURED if since("0.5.22") else Outcome.STOPS)
        case Family.QWEN2 | Family.QWEN3:
            # Until 0.5.19 the embedding is handed out without a copy, and the first layer's norm adds into it.
            return row(Shift.ALWAYS, Outcome.CAPTURED if since("0.5.21") else Outcome.OVERWRITTEN)
        case Family.QWEN3_MOE:
            return row(Shift.ALWAYS, Outcome.CAPTURED, Outcome.NO_LAYER)
        case Family.GPT_OSS:
            if not since("0.5.17"):
                return row(Shift.ALWAYS, Outcome.STOPS)
            first = Outcome.CAPTURED if since("0.5.21") else Outcome.OVERWRITTEN
            return row(Shift.UNLESS_N, first, Outcome.CAPTURED)
        case Family.DEEPSEEK | Family.KIMI_K25:
            if family is Family.KIMI_K25 and not since("0.5.10.post1"):
                return None  # the wrapper does not pass the call on
            shift = Shift.IF_FIRST_IS_1 if since("0.5.13.post1") else Shift.ALWAYS
            first = Outcome.CAPTURED if since("0.5.14") else Outcome.STOPS
            return row(shift, first)
