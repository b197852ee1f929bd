"""Checks of what earlier runs left in the working directory against the deployment: F2 and F3, F4, F17."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from slipstream.engine.capture import default_slots, slot_id, slot_name
from slipstream.engine.drafts.eagle3.layer_ids import KNOWN_VERSIONS, Engine, Reading, family_of, reading
from slipstream.engine.drafts.eagle3.published import IDS_KEY
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.handover import TargetIdentity, identity_differences, slot_differences
from slipstream.tasks.contradictions import Check, Finding
from slipstream.tasks.draft_facts import DraftFacts
from slipstream.tasks.facts import Facts


def _slots_by_name(facts: Facts) -> Iterator[Finding]:
    """A store or a draft was made from other slots than the deployment names. Never compared by number or width."""
    found: list[tuple[str, str, tuple[str, ...], str, tuple[int, ...] | None]] = []
    if facts.store is not None:
        store = facts.store
        what = f"the hidden-state store {store.path}"
        found.append((what, str(store.path.parent), store.slots, "capture.slots", facts.stored_slots))
    draft = facts.draft
    if draft is not None and "convert" not in facts.remade:
        slots = _draft_slots(draft, facts)
        if slots is not None:
            names = tuple(map(slot_name, slots))
            found.append((f"the draft {draft.path}", str(draft.path.parent), names, facts.slots_key, facts.slots))
    for what, folder, names, key, meant in found:
        if meant is None:
            continue
        expected = tuple(map(slot_name, meant))
        for difference in slot_differences(names, expected):
            order = ", the same ones in another order" if difference.fault == "F3" else ""
            yield Finding(
                "F2",
                f"{what} holds slots {_numbers(names)}{order}; {facts.say(key)}, which are {_numbers(expected)}",
                "the same slots in the same order, by name: any three slots are equally wide",
                (
                    f"write {key}: {_numbers(names)} to use it",
                    f"delete {folder} to make it again",
                    "give host.workdir another folder",
                ),
                difference.fault,
            )


def _layer_ids(facts: Facts) -> Iterator[Finding]:
    """The ids in a draft's config.json, each read as its engine reads them, mean the draft's slots.

    Of the draft that convert left, and of the one that our own engine is to serve (draft.path).
    """
    if facts.draft is not None and "convert" not in facts.remade:
        yield from _ids_of(facts, facts.draft, f"delete {facts.draft.path.parent} to convert again")
    if facts.given_draft is not None and facts.deployment.server.engine == "slipstream":
        yield from _ids_of(facts, facts.given_draft, "name another draft (draft.path)")


def _ids_of(facts: Facts, draft: DraftFacts, other: str) -> Iterator[Finding]:
    """other: what one can do but for writing the right ids."""
    if facts.target is None:
        return
    meant = tuple(_numbers(draft.slots)) if draft.slots is not None else facts.slots
    if meant is None:
        return
    layers = facts.target.num_layers
    for engine, place, ids in _id_lists(draft):
        rule = _rule(engine, facts)
        # An engine that finds no ids captures its three defaults, without a word.
        captured = default_slots(layers) if ids is None else rule.slots(ids, layers)
        if ids == ():
            continue  # written on purpose where an engine cannot serve the draft: it stops at an empty list
        shift = _shift(captured, meant)
        if captured == meant or (draft.slots is None and not shift):
            continue  # in a draft from elsewhere quite other slots are no slip between conventions: F2 names them
        try:
            right: object = list(rule.ids(meant, layers))
        except SlipstreamError as error:
            right = f"none ({error.found})"
        off = f", each off by {shift:+d}: ids of another convention" if shift else ""
        yield Finding(
            "F4",
            f"{draft.path / 'config.json'}: {place} = {'absent' if ids is None else list(ids)}, "
            f"which {rule.name} reads as slots {list(captured)}{off}",
            f"slots {list(meant)}, which are written {right} there",
            (other, f"write {right} there, if the draft was trained on {list(meant)}"),
            "F4",
        )


def _draft_slots(draft: DraftFacts, facts: Facts) -> tuple[int, ...] | None:
    """The slots of a draft: those that it names, else those that its ids mean, if F4 does not doubt them."""
    if draft.slots is not None:
        return tuple(_numbers(draft.slots))
    for engine, _, ids in _id_lists(draft):
        if ids is not None and facts.target is not None:
            captured = _rule(engine, facts).slots(ids, facts.target.num_layers)
            return None if facts.slots is not None and _shift(captured, facts.slots) else captured
    return None


def _id_lists(draft: DraftFacts) -> tuple[tuple[Engine, str, tuple[int, ...] | None], ...]:
    return (
        (Engine.VLLM, f"{IDS_KEY} at the top level", draft.top_level_ids),
        (Engine.SGLANG, f"eagle_config.{IDS_KEY}", draft.nested_ids),
    )


def _rule(engine: Engine, facts: Facts) -> Reading:
    assert facts.target is not None
    return reading(engine, KNOWN_VERSIONS[engine], family_of(facts.target.architecture))


def _shift(found: Sequence[int], expected: Sequence[int]) -> int:
    """The one number by which every slot is off; 0 when there is no such number."""
    shifts = {f - e for f, e in zip(found, expected, strict=False)}
    return shifts.pop() if len(shifts) == 1 and len(found) == len(expected) else 0


def _numbers(names: Sequence[str]) -> list[int]:
    return [slot_id(name) for name in names]


def _stale_store(facts: Facts) -> Iterator[Finding]:
    """Target, tokenizer and chat template are still those that the hidden states were computed with."""
    made: list[tuple[str, Path, TargetIdentity]] = []
    if facts.store is not None:
        made.append(("hidden-state store", facts.store.path, facts.store.identity))
    draft = facts.draft
    if draft is not None and draft.identity is not None and "convert" not in facts.remade:
        made.append(("draft", draft.path, draft.identity))
    for what, path, identity in made:
        if facts.resolve_stale:
            changes = [facts.resolve_stale]
        elif facts.identity is not None:
            changes = [
                f"{d.field}: was {d.found}, is {d.expected}" for d in identity_differences(identity, facts.identity)
            ]
        else:
            continue
        if changes:
            yield Finding(
                "F17",
                f"since the {what} {path} was made, its target changed: {'; '.join(changes)}",
                "the very target, tokenizer and chat template that it was made with",
                (
                    "set the target back to what it was",
                    f"delete {path.parent} to make it again",
                    "give host.workdir another folder",
                ),
                "F17",
            )


LEFT_OVER: tuple[Check, ...] = (
    Check("F2", "a store or draft holds the slots that the deployment names, by name and order", _slots_by_name),
    Check("F4", "layer ids mean the draft's slots to the engine that reads them", _layer_ids),
    Check("F17", "hidden states are used only with the target they came from", _stale_store),
)
