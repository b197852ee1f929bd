"""What another engine would feed the draft, against what the draft was trained on: F2, F3, F4, F20.

Every engine concatenates as many states of the same width as the draft takes, so that no shape tells right from wrong;
which states they are depends on the ids in the draft's config.json, on the engine, its version and the target.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.engine.capture import slot_id
from slipstream.engine.drafts.eagle3.layer_ids import (
    Capture,
    Family,
    Reading,
    default_runner,
    family_of,
    reading,
    who_can,
)
from slipstream.engine.engine_versions import Engine, neighbours
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.contradictions import Check, Finding
from slipstream.tasks.draft_facts import DraftFacts
from slipstream.tasks.facts import Facts

CHECK = "serving-slots"
OTHERS = tuple(engine.value for engine in Engine)
EVERY_ENGINE = ("slipstream", *OTHERS)


@dataclass(frozen=True)
class ServedTarget:
    """What capture depends on. architecture: "" where only the draft's record tells; hidden_size: None = unknown."""

    family: Family
    architecture: str
    num_layers: int
    hidden_size: int | None


def _serving_slots(facts: Facts) -> Iterator[Finding]:
    """The slots that serving feeds the draft are those it was trained on."""
    path, draft = facts.deployment.draft.path, _served_draft(facts)
    if draft is None:
        if path is not None:
            yield _no_draft(facts)
        return
    trained = None if draft.slots is None else tuple(map(slot_id, draft.slots))
    stated = facts.deployment.draft.slots
    if trained is not None and stated is not None and trained != stated:
        yield _stated_otherwise(facts, draft, trained, stated)
    engine = facts.deployment.server.engine
    if engine == "slipstream":  # which captures by name
        if draft.problem:
            yield Finding(
                CHECK,
                draft.problem,
                "an EAGLE-3 draft of a kind that Slipstream's engine has a network for",
                ("name another draft (draft.path)", "leave draft.path out: this deployment then trains its own"),
            )
    else:
        yield from _other_engine(facts, Engine(engine), draft, trained or stated)


def _served_draft(facts: Facts) -> DraftFacts | None:
    """The draft that would be served: the one of draft.path, else what convert left for another engine."""
    if facts.deployment.draft.path is not None:
        return facts.given_draft
    return None if facts.deployment.server.engine == "slipstream" else facts.draft


def _no_draft(facts: Facts) -> Finding:
    path = facts.deployment.draft.path
    assert path is not None
    there = path.exists()
    return Finding(
        CHECK,
        f"{facts.say('draft.path')}: " + ("it holds no config.json" if there else "it is not on this machine"),
        "the directory of a draft: what it was trained on is compared with what the engine would capture",
        ("name the directory that holds config.json and model.safetensors",)
        if there
        else ("plan on the machine that has it, or copy its config.json and slipstream.json here",),
        severity="error" if there else "warning",
    )


def _stated_otherwise(facts: Facts, draft: DraftFacts, trained: Sequence[int], stated: Sequence[int]) -> Finding:
    target = _target(facts, draft)
    found = (
        f"the draft {draft.path} was trained on slots {_list(trained)} ({draft.slots_from}); "
        f"{facts.say('draft.slots')}: capture would give slots {_list(stated)}{_widths(trained, stated, draft, target)}"
    )
    ways = [f"write draft.slots: {list(trained)}, or leave it out: the record tells"]
    if target is not None:
        ways += [f"serve with {able}" for able in who_can(trained, target.num_layers, target.family)]
    ways.append(f"train a draft on {_list(stated)}")
    return Finding(CHECK, found, f"slots {_list(trained)}, {_how(trained)}", tuple(ways), _fault(trained, stated))


def _other_engine(facts: Facts, engine: Engine, draft: DraftFacts, meant: tuple[int, ...] | None) -> Iterator[Finding]:
    target = _target(facts, draft)
    if target is None:
        yield Finding(
            CHECK,
            f"what {engine.label} would capture for the draft {draft.path} is not known: neither the target nor a "
            "record of the draft's training is here",
            "the target's config.json, or slipstream.json beside the draft",
            ("name a target directory of this machine as target.source", "put its slipstream.json beside the draft"),
            severity="warning",
        )
        return
    try:
        rule = _reading(facts, engine, target)
    except SlipstreamError as error:
        if error.fault != "F20":  # which the other check tells
            yield Finding(CHECK, error.found, error.expected, (error.do,), error.fault)
        return
    captured = rule.capture(draft.top_level_ids, draft.nested_ids, target.num_layers, captures=draft.captures)
    if meant is None:
        yield _unknown_training(draft, rule, captured)
    elif captured.slots != meant or captured.problems or captured.in_graphs:
        yield _captured_otherwise(draft, rule, captured, meant, target)


def _reading(facts: Facts, engine: Engine, target: ServedTarget) -> Reading:
    runner = default_runner(target.architecture) if engine is Engine.VLLM else None
    return reading(engine, facts.deployment.server.engine_version or "", target.family, runner)


def _captured_otherwise(
    draft: DraftFacts, rule: Reading, captured: Capture, meant: tuple[int, ...], target: ServedTarget
) -> Finding:
    whence = f" ({draft.slots_from})" if draft.slots is not None else " (draft.slots)"
    found = f"the draft {draft.path} was trained on slots {_list(meant)}{whence}; "
    if captured.slots == meant and captured.in_graphs:
        given = captured.in_graphs
        found += f"{rule.name} would give slots {_list(given)} inside CUDA graphs, whatever the config says"
    else:
        given = captured.slots
        found += f"capture by {rule.name} would give " + (f"slots {_list(given)}" if given else "none")
        found += f" ({captured.where}{': ' if captured.problems else ''}{'; '.join(captured.problems)})"
        if captured.in_graphs:
            found += f", and inside CUDA graphs its defaults {_list(captured.in_graphs)}"
    found += _widths(meant, given, draft, target)
    ways = []
    own = rule.able(meant, target.num_layers)
    if own is not None:
        key = "at the top level" if rule.engine is Engine.VLLM else "under eagle_config"
        ways.append(f"write the ids {list(own)} {key} of {draft.path / 'config.json'}")
    ways += [f"serve with {able}" for able in who_can(meant, target.num_layers, target.family)]
    if given and not captured.problems:
        ways.append(f"train a draft on {_list(given)}")
    expected = f"slots {_list(meant)}, {_how(meant)}"
    if own is None:
        expected += f"; {_why_not(rule, meant, target)}"
    return Finding(CHECK, found, expected, tuple(ways), _fault(meant, given))


def _why_not(rule: Reading, meant: tuple[int, ...], target: ServedTarget) -> str:
    try:
        rule.ids(meant, target.num_layers)
    except SlipstreamError as error:
        return error.found
    return f"{rule.name} captures them only with CUDA graphs off"


def _unknown_training(draft: DraftFacts, rule: Reading, captured: Capture) -> Finding:
    return Finding(
        CHECK,
        f"no record tells which slots the draft {draft.path} was trained on; capture by {rule.name} would give "
        f"{_list(captured.slots)} ({captured.where})",
        "the slots of its training: any others are as wide, and nothing else would tell",
        (
            "write draft.slots: [...] as its training picked them (slot k: the state after k layers, 0: the embedding)",
            f"put the slipstream.json of its training beside it or into {draft.path.parent}",
        ),
        "F2",
    )


def _engine_version(facts: Facts) -> Iterator[Finding]:
    """The version is a release whose source was read, or lies between two."""
    engine = facts.deployment.server.engine
    if engine == "slipstream":
        return
    try:
        neighbours(Engine(engine), facts.deployment.server.engine_version)
        draft = _served_draft(facts)
        target = None if draft is None else _target(facts, draft)
        if target is not None:
            _reading(facts, Engine(engine), target)
    except SlipstreamError as error:
        if error.fault != "F20":
            return
        yield Finding(
            "F20",
            f"{facts.say('server.engine_version')}: {error.found}",
            f"{error.expected}; all else is not guessed: only settings read back and states measured could prove it",
            (error.do, "`slipstream fingerprint` tells which version is installed, and whether its files were changed"),
            "F20",
        )


def _target(facts: Facts, draft: DraftFacts) -> ServedTarget | None:
    """The target by its own config.json, which may be one that only other engines serve; else by the draft's record."""
    if facts.target is not None:
        config = facts.target
        try:
            family = family_of(config.architecture)
        except SlipstreamError:
            return None
        return ServedTarget(family, config.architecture, config.num_layers, config.hidden_size)
    if facts.target_dir is not None:
        found = _raw_target(facts)
        if found is not None:
            return found
    if draft.target_num_layers is not None and draft.target_family in list(Family):
        return ServedTarget(Family(draft.target_family), "", draft.target_num_layers, draft.target_hidden_size)
    return None


def _raw_target(facts: Facts) -> ServedTarget | None:
    assert facts.target_dir is not None
    try:
        raw = json.loads((facts.target_dir / "config.json").read_text(encoding="utf-8"))
        architecture = str(raw["architectures"][0])
        text: Mapping[str, Any] = raw.get("text_config") or raw
        return ServedTarget(
            family_of(architecture), architecture, int(text["num_hidden_layers"]), int(text["hidden_size"])
        )
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
        SlipstreamError,
    ):
        return None  # other checks say what is wrong with a target's config


def _widths(meant: Sequence[int], given: Sequence[int], draft: DraftFacts, target: ServedTarget | None) -> str:
    """`: both are 3 x 576 = 1,728 wide`, the reason why nothing else would tell."""
    hidden = target.hidden_size if target is not None and target.hidden_size else draft.target_hidden_size

    def width(slots: Sequence[int]) -> str:
        return f"{len(slots)} x {hidden} = {len(slots) * hidden:,}" if hidden else f"{len(slots)}h"

    if len(meant) == len(given):
        return f". Both are {len(meant)}h = {width(meant)} wide: no check of shapes can tell them apart"
    return f". {width(given)} wide, where the draft takes {width(meant)}" if given else ""


def _how(slots: Sequence[int]) -> str:
    return "by name and in this order" + (", slot 0 being the embedding output" if 0 in slots else "")


def _fault(meant: Sequence[int], given: Sequence[int]) -> str:
    if len(meant) == len(given):
        if sorted(meant) == sorted(given):
            return "F3" if tuple(meant) != tuple(given) else "F2"
        if len({g - m for m, g in zip(meant, given, strict=True)}) == 1 and abs(given[0] - meant[0]) == 1:
            return "F4"
    return "F2"


def _list(slots: Sequence[int]) -> str:
    return f"({', '.join(map(str, slots))})"


OTHER_ENGINE: tuple[Check, ...] = (
    Check(CHECK, "another engine feeds the draft the very slots that it was trained on", _serving_slots, EVERY_ENGINE),
    Check("F20", "what another engine does is told for releases alone whose source was read", _engine_version, OTHERS),
)
