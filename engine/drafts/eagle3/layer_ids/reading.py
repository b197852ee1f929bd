"""How one engine, of one version, for one family of targets, reads layer ids: to slots and back."""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.engine.capture import default_slots
from slipstream.engine.drafts.eagle3.layer_ids.families import Family, Runner
from slipstream.engine.drafts.eagle3.layer_ids.table import Outcome, Rule, Shift, rule_of
from slipstream.engine.engine_versions import READ, READ_IN_PART, Engine, Version, settled
from slipstream.engine.errors import SlipstreamError


@dataclass(frozen=True)
class Capture:
    """What an engine captures.

    Args:
        slots: in the order in which it concatenates them: that of the layers.
        where: which ids it took ("eagle_config ids [2, 29, 57]", "its defaults, since ..."), for messages.
        problems: why it does not deliver these slots, one sentence each; empty when it does.
        in_graphs: what it captures inside CUDA graphs, where that differs.
    """

    slots: tuple[int, ...]
    where: str
    problems: tuple[str, ...] = ()
    in_graphs: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Reading:
    """How one engine reads layer ids for one family of targets.

    Args:
        engine, version, family: which one, of what.
        rule: its row of the table.
        runner: of vLLM; None for SGLang, and where it does not matter.
    """

    engine: Engine
    version: str
    family: Family
    rule: Rule
    runner: Runner | None = None

    @property
    def name(self) -> str:
        """For messages."""
        runner = f", runner {self.runner}" if self.runner else ""
        return f"{self.engine.value} {self.version} ({self.family.value} target{runner})"

    def slots(self, ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
        """The canonical slots that `ids` name to this engine, in the order of the ids, whether it delivers or not."""
        shift, add = self.rule.shift, 0
        if shift is Shift.ALWAYS:
            add = 1
        elif shift is Shift.IF_FIRST_IS_1:
            add = 1 if ids and ids[0] == 1 else 0
        elif shift is Shift.UNLESS_N:
            add = 0 if ids and max(ids) == num_layers else 1
        return tuple(i + add for i in ids)

    def choose(
        self, top_level: Sequence[int] | None, nested: Sequence[int] | None
    ) -> tuple[tuple[int, ...] | None, str]:
        """(the ids of a draft's config.json that this engine reads, where they stand); None = it takes its defaults."""
        if self.engine is Engine.SGLANG:
            where = "eagle_config ids"
            return (None, "without eagle_config ids") if nested is None else (tuple(nested), f"{where} {list(nested)}")
        if top_level:
            return tuple(top_level), f"top-level ids {list(top_level)}"
        if nested and self.runner is Runner.V1:
            return tuple(nested), f"eagle_config ids {list(nested)}, which runner V1 falls back to"
        unread = f", and runner V2 does not read eagle_config ids {list(nested)}" if nested else ""
        return None, f"without top-level ids{unread}"

    def capture(
        self, top_level: Sequence[int] | None, nested: Sequence[int] | None, num_layers: int, *, captures: bool = True
    ) -> Capture:
        """What this engine captures for a draft.

        Args:
            top_level, nested: ids in its config.json, at the top and under `eagle_config`; None when absent.
            num_layers: N of the target.
            captures: false when its config.json switches capture off.
        """
        if not captures:
            return Capture((), "eagle_config.use_aux_hidden_state false", ("no state is captured at all",))
        defaults = default_slots(num_layers)
        ids, where = self.choose(top_level, nested)
        if ids is None:
            return Capture(defaults, f"its defaults, {where}")
        named = self.slots(ids, num_layers)
        outcomes = [(slot, self._outcome(slot, num_layers)) for slot in dict.fromkeys(named)]
        problems = [f"slot {s} {o.value}" for s, o in outcomes if o is not Outcome.CAPTURED]
        twice = sorted({s for s in named if named.count(s) > 1})
        if twice:
            problems.append(f"slots {twice}, named twice, are captured once: the draft gets too few states")
        if not named:
            problems.append("an empty list: no state is captured, and it stops at the first request")
        kept = tuple(sorted(s for s, o in outcomes if o in (Outcome.CAPTURED, Outcome.OVERWRITTEN)))
        in_graphs = defaults if self.rule.graphs_ignore_ids and kept != defaults else None
        return Capture(kept, where, tuple(problems), in_graphs)

    def _outcome(self, slot: int, num_layers: int) -> Outcome:
        if slot == 0:
            return self.rule.first
        if slot == num_layers:
            return self.rule.last
        return Outcome.CAPTURED if 0 < slot < num_layers else Outcome.MISSED

    def ids(self, slots: Sequence[int], num_layers: int) -> tuple[int, ...]:
        """The ids to write so that the engine captures `slots` of a target with `num_layers` layers.

        Raises SlipstreamError: F3 for slots out of layer order, which is the order that engines concatenate in; F4 for
        slots that the engine cannot capture or cannot be told to, with the engines and versions that can.
        """
        rising = sorted(set(slots))
        if list(slots) != rising:
            raise SlipstreamError(
                f"slots {list(slots)} are not in rising order",
                expected=f"{rising}: {self.name} concatenates states in layer order, whatever the order of the ids",
                do="set the slots in rising order, and train again; or serve with Slipstream's own engine",
                fault="F3",
            )
        outside = [s for s in slots if self._outcome(s, num_layers) is not Outcome.CAPTURED]
        if outside:
            why = {self._outcome(s, num_layers).value for s in outside}
            raise SlipstreamError(
                f"{self.name} cannot capture slots {outside} of a target with {num_layers} layers ({'; '.join(why)})",
                expected=f"slots {self._range(num_layers)}",
                do=self._elsewhere(slots, num_layers),
                fault="F4",
            )
        found = self._written(slots, num_layers)
        if found is not None:
            return found
        raise SlipstreamError(
            f"{self.name} reads no list of ids as slots {list(slots)}",
            expected="a first slot other than 1, which it would take for a shifted 2",
            do=self._elsewhere(slots, num_layers),
            fault="F4",
        )

    def _written(self, slots: Sequence[int], num_layers: int) -> tuple[int, ...] | None:
        """The ids that name `slots`, None where there are none; whether they are delivered is another question."""
        # Shifted first: [1, 29, 57] means the same to every version of SGLang, [2, 30, 58] does not.
        for candidate in (tuple(s - 1 for s in slots), tuple(slots)):
            if self.slots(candidate, num_layers) == tuple(slots):
                return candidate
        return None

    def able(self, slots: Sequence[int], num_layers: int) -> tuple[int, ...] | None:
        """The ids that make it capture `slots`, in CUDA graphs too; None when nothing does."""
        if list(slots) != sorted(set(slots)):
            return None
        if any(self._outcome(s, num_layers) is not Outcome.CAPTURED for s in slots):
            return None
        if self.rule.graphs_ignore_ids and tuple(slots) != default_slots(num_layers):
            return None
        return self._written(slots, num_layers)

    def _range(self, num_layers: int) -> str:
        first = 0 if self.rule.first is Outcome.CAPTURED else 1
        return f"{first}..{num_layers if self.rule.last is Outcome.CAPTURED else num_layers - 1}"

    def _elsewhere(self, slots: Sequence[int], num_layers: int) -> str:
        able = who_can(slots, num_layers, self.family)
        return f"serve with {', or '.join(able)}; or choose other slots, extract and train again"


def reading(engine: Engine, version: str, family: Family, runner: Runner | None = None) -> Reading:
    """How an engine of a version ("0.5.14", "0.5.12.post1") reads ids.

    Raises SlipstreamError: F20 for a version that is no release, was not read, or lies between two that differ; F4 for
    a family that the engine captures nothing of.
    """
    what = f"the capture of {family.value} targets"
    rule = settled(engine, version, lambda v: rule_of(engine, v, family), what, READ_IN_PART[engine])
    if rule is None:
        unread = engine is Engine.VLLM
        raise SlipstreamError(
            f"how {engine.label} {version} captures states of {family.value} targets was not read"
            if unread
            else f"{engine.label} {version} captures no states of {family.value} targets: EAGLE-3 fails there",
            expected="an engine and version that can",
            do="serve with Slipstream's own engine" + ("" if unread else ", or with SGLang 0.5.10.post1 or later"),
            fault="F4",
        )
    return Reading(engine, version.strip(), family, rule, runner)


def who_can(slots: Sequence[int], num_layers: int, family: Family) -> list[str]:
    """Every engine, with versions and ids, that captures `slots` of such a target; Slipstream, which can, last."""
    found = []
    # An ordinary state is what everybody captures every day; one of the two ends is known from the sources alone.
    note = " (as read in its source, not run)" if {0, num_layers} & set(slots) else ""
    for engine in Engine:
        runs: list[tuple[tuple[int, ...] | None, list[str]]] = []  # ids, and the consecutive releases that take them
        for version in sorted(map(Version.parse, (*READ[engine], *READ_IN_PART[engine]))):
            rule = rule_of(engine, version, family)
            ids = None if rule is None else Reading(engine, version.text, family, rule).able(slots, num_layers)
            if runs and runs[-1][0] == ids:
                runs[-1][1].append(version.text)
            else:
                runs.append((ids, [version.text]))
        key = "top-level" if engine is Engine.VLLM else "eagle_config"
        for ids, versions in runs:
            if ids is not None:
                span = versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
                found.append(f"{engine.label} {span} with {key} ids {list(ids)}{note}")
    return [*found, "Slipstream's own engine, which captures by name"]
