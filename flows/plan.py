"""The plan of a deployment: what would happen, what is derived, what is wrong, what it costs. Starts nothing."""

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from slipstream.configs.load import Loaded, known_fields, load
from slipstream.engine.capture import slot_name
from slipstream.engine.engine_versions import Engine
from slipstream.engine.errors import SlipstreamError
from slipstream.flows.plan_forecast import expected_rows, floor_rows, memory_rows
from slipstream.tasks import derived
from slipstream.tasks.checks import Facts, Finding, find, gather
from slipstream.tasks.checks_machine import disk_needed, existing_parent
from slipstream.tasks.estimates import Cost, Tokens, costs, count_tokens
from slipstream.tasks.other_engines.effect import Effect
from slipstream.tasks.other_engines.import_line import import_line, meaning
from slipstream.tasks.other_engines.launch_facts import asked, draft_step
from slipstream.tasks.other_engines.sglang_effects import effects
from slipstream.tasks.registry import all_stages
from slipstream.tasks.stage import Stage, StageStatus, pipeline_status


@dataclass(frozen=True)
class Value:
    """One value of the deployment: dotted key, value, and where it came from."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True)
class Derived:
    """One value that follows from others: name, value as text, and how it follows."""

    name: str
    value: str
    how: str


@dataclass(frozen=True)
class Plan:
    """The plan of one deployment.

    Args:
        loaded: the deployment with the origin of each value.
        facts: what was found on the machine.
        statuses: each stage as done or needed, and why.
        findings: contradictions and warnings.
        costs: stage -> estimate.
        tokens: tokens of the conversations, None while the prompts cannot be read.
        effects: what another engine makes of the launch; empty for our own. It is not launched: no stages, no costs.
    """

    loaded: Loaded
    facts: Facts
    statuses: tuple[StageStatus, ...]
    findings: tuple[Finding, ...]
    costs: Mapping[str, Cost]
    tokens: Tokens | None
    effects: tuple[Effect, ...] = ()

    @property
    def other_engine(self) -> str:
        """Name of the engine that serves, when it is not our own; else ""."""
        engine = self.loaded.deployment.server.engine
        return "" if engine == "slipstream" else Engine(engine).label

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of the stages that a run would repeat."""
        return tuple(status.name for status in self.statuses if status.state == "needed")


def make_plan(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    workdir: Path | None = None,
    stages: Sequence[Stage] | None = None,
    environ: Mapping[str, str] | None = None,
    skip: Collection[str] = (),
) -> Plan:
    """Plans a deployment.

    Args:
        path: the deployment file.
        overrides: as given to `--set`.
        workdir: directory of the stages' outputs; None is the deployment's.
        stages: the lifecycle; None is all of it.
        environ: the environment; None is that of this process.
        skip: ids of checks to leave out (for tests).

    Raises SlipstreamError when the deployment or something left by an earlier run cannot be read.
    """
    return plan_of(load(path, overrides, environ), workdir=workdir, stages=stages, skip=skip)


def plan_command(
    line: str,
    engine_version: str | None = None,
    overrides: Sequence[str] = (),
    *,
    workdir: Path | None = None,
    environ: Mapping[str, str] | None = None,
    skip: Collection[str] = (),
) -> Plan:
    """Plans a launch line of another engine.

    Args:
        line: the launch line, as given to a shell.
        engine_version: the release that it starts; None where nobody knows.
        overrides, workdir, environ, skip: as for `make_plan`.

    Raises SlipstreamError that lists what of the line cannot be taken.
    """
    return plan_of(import_line(line, engine_version, overrides, environ), workdir=workdir, skip=skip)


def plan_of(
    loaded: Loaded,
    *,
    workdir: Path | None = None,
    stages: Sequence[Stage] | None = None,
    skip: Collection[str] = (),
) -> Plan:
    """Plans a deployment that is read already; arguments as for `make_plan`."""
    deployment = loaded.deployment
    workdir = deployment.host.workdir if workdir is None else workdir
    if deployment.server.engine != "slipstream":
        facts = gather(deployment, workdir, loaded.provenance)
        return Plan(loaded, facts, (), tuple(find(facts, skip)), {}, None, effects(facts))
    statuses: tuple[StageStatus, ...] = ()
    unreadable = None
    try:
        statuses = tuple(pipeline_status(all_stages() if stages is None else stages, deployment, workdir))
    except (SlipstreamError, OSError) as error:  # a file that a stage reads is missing; mostly a check names it better
        unreadable = error
    remade = frozenset(status.name for status in statuses if status.state == "needed")
    facts = gather(deployment, workdir, loaded.provenance, remade)
    findings = find(facts, skip)
    if unreadable is not None and not any(finding.severity == "error" for finding in findings):
        findings.append(_unreadable(unreadable))
    return Plan(loaded, facts, statuses, tuple(findings), costs(facts), count_tokens(facts))


def _unreadable(error: SlipstreamError | OSError) -> Finding:
    if isinstance(error, SlipstreamError):
        return Finding("stages", error.found, error.expected, (error.do,) if error.do else (), error.fault)
    do = "correct what stands there, or give host.workdir (--workdir) another folder"
    return Finding("stages", f"{error.filename}: {error.strerror}", "readable inputs of the stages", (do,))


def values(plan: Plan) -> list[Value]:
    """Every value of the deployment, in the order of the schema."""
    result = []
    for key, _ in known_fields():
        section, field = key.split(".")
        value = getattr(getattr(plan.loaded.deployment, section), field)
        result.append(Value(key, value, str(plan.loaded.provenance[key])))
    return result


def meanings(plan: Plan) -> dict[str, str]:
    """Meaning of each key that was written for another engine, and its effect under speculation there."""
    written = {key for key, origin in plan.loaded.provenance.items() if origin.kind != "default"}
    return {key: meaning(key, field) for key, field in known_fields() if key in written}


def derived_values(plan: Plan) -> list[Derived]:
    """Every value that follows from the deployment and the target; nothing is guessed where the target is unknown."""
    if plan.other_engine:
        return _of_launch(plan)
    facts, deployment = plan.facts, plan.loaded.deployment
    rows = [Derived("target", _target_words(facts), facts.target_words)]
    speculation = deployment.speculation
    if speculation.num_steps == "auto":
        tried = [*range(speculation.max_num_steps + 1)]
        rows.append(Derived("num_steps (K)", " ".join(map(str, tried)), "auto: the fastest as measured is served"))
        rows.append(Derived("verify width", " ".join(str(k + 1) for k in tried), "num_steps + 1 rows a round"))
    else:
        tried = [speculation.num_steps]
        rows.append(Derived("verify width", str(speculation.num_steps + 1), "num_steps + 1 rows a round"))
    rows.append(Derived("accept length", f"1 to {tried[-1] + 1}", "floor and ceiling K + 1, the bonus token included"))
    rows.append(Derived("draft positions", f"{facts.draft_positions} tokens", _draft_positions_words(facts)))
    expected_sha256 = deployment.target.expected_sha256
    if deployment.target.kind == "pypi" and expected_sha256 is not None:
        how = "target.sha256" if deployment.target.sha256 else "the pin of the embedded default"
        rows.append(Derived("wheel sha256", expected_sha256, how))
    rows += _of_target(plan)
    if plan.tokens is not None:
        how = "counted in the store" if plan.tokens.measured else "estimate from the prompts' length and max_new_tokens"
        words = f"{plan.tokens.conversations} with about {plan.tokens.total} tokens"
        rows.append(Derived("conversations", words, how))
    return rows


def _of_launch(plan: Plan) -> list[Derived]:
    """What follows from a launch of another engine."""
    facts = plan.facts
    rows = [Derived("target", _target_words(facts) if facts.target else "unknown here", facts.target_words)]
    steps, topk = asked(facts, "speculation.num_steps"), asked(facts, "speculation.topk")
    if steps is not None and topk == 1 and not asked(facts, "sglang.speculative_adaptive"):
        rows.append(Derived("verify width", str(steps + 1), "num_steps + 1 rows a round, with topk 1"))
        rows.append(Derived("accept length", f"1 to {steps + 1}", "floor and ceiling, the bonus token included"))
    path = asked(facts, "draft.path")
    if path is not None:
        rows.append(Derived("draft", "there" if path.is_dir() else "not on this machine", str(path)))
        step = draft_step(path)
        if step is not None:
            rows.append(Derived("draft's training step", str(step[0]), step[1]))
    return rows


def _of_target(plan: Plan) -> list[Derived]:
    """What needs the target's shapes."""
    facts, deployment = plan.facts, plan.loaded.deployment
    target, stored, slots = facts.target, facts.stored_slots, facts.slots
    if target is None or not slots or not stored:
        unknown, how = "unknown until resolve", "needs the target's config.json"
        names = ("capture slots", "hidden-state store", "KV cache", "draft parameters")
        if stored:  # stated in the deployment: the names do not wait for the target, other engines' ids do
            named = Derived("capture slots", _slot_words(stored), f"their ids in other engines are {unknown}")
            return [named, *(Derived(name, unknown, how) for name in names[1:])]
        return [Derived(name, unknown, how) for name in names]
    rows = [
        Derived(
            "capture slots",
            _slot_words(stored),
            f"states after that many of {target.num_layers} layers; teacher {slot_name(target.num_layers)}",
        )
    ]
    if slots != stored:
        rows.append(Derived("draft slots", _slot_words(slots), f"{facts.slots_key}: picked by name, in this order"))
    try:
        draft = derived.draft_config(deployment, target, slots)
    except SlipstreamError:
        return rows  # the checks say what is wrong with it
    for engine, ids in derived.ids_for_engines(draft, target).items():
        rows.append(Derived(f"slots for {engine}", ids, "layer ids that make it capture the same states"))
    dtype = deployment.server.dtype  # states are captured as the server computes them
    answer, other = derived.store_bytes_per_token(len(stored), target.hidden_size, dtype)
    states = (len(stored) + 1) * target.hidden_size * derived.BYTES[dtype]
    rows.append(Derived("hidden states", f"{states:,} bytes a token", f"{len(stored)} slots and the teacher"))
    rows.append(
        Derived(
            "hidden-state store",
            f"{answer} bytes a token of an answer, {other} elsewhere",
            f"({len(stored)} slots + teacher) x {target.hidden_size} x {derived.BYTES[dtype]} bytes, no teacher "
            f"elsewhere, and {derived.TOKEN_ID_AND_MASK_BYTES} of token id and mask",
        )
    )
    kv = derived.cell_bytes(target, dtype)
    draft_kv = derived.draft_cell_bytes(draft, dtype)
    rows.append(
        Derived(
            "KV cache",
            f"{kv} bytes a token, draft {draft_kv}",
            "2 x layers x KV heads x head size x bytes"
            if target.latent is None
            else "layers x (latent + rope key) x bytes, on every rank; the draft's "
            + ("likewise" if draft.latent is not None else "as keys and values of its heads"),
        )
    )
    rows.append(
        Derived(
            "draft parameters",
            f"{derived.trained_parameters(draft):,} trained, {derived.embedding_parameters(draft):,} of the embedding",
            f"one layer over {draft.feature_size} features, head of {draft.draft_vocab_size} tokens",
        )
    )
    for forecast in (memory_rows, floor_rows, expected_rows):
        rows += [Derived(*row) for row in forecast(facts)]
    return rows


def _slot_words(slots: Sequence[int]) -> str:
    return ", ".join(slot_name(slot) for slot in slots)


def _target_words(facts: Facts) -> str:
    target = facts.target
    if target is None:
        return "unknown until resolve"
    parameters = derived.target_parameters(target)
    return (
        f"{target.architecture}: {target.num_layers} layers x {target.hidden_size}, vocabulary {target.vocab_size}, "
        f"{target.max_position} positions, {_count_words(parameters)} parameters"
    )


def _count_words(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.0f} M"


def _draft_positions_words(facts: Facts) -> str:
    stated = facts.deployment.draft.max_context_tokens is not None
    return "draft.max_context_tokens" if stated else "server.max_context_tokens, since draft.max_context_tokens is null"


@dataclass(frozen=True)
class Room:
    """Need and supply of one disk or of the memory, in bytes.

    `needed` is None while the target is unknown, `free` on a far host: a plan does not look there.
    """

    what: str
    needed: int | None
    free: int | None


def room(plan: Plan) -> list[Room]:
    """Disk and memory: what the coming run needs against what is there. Nothing for an engine that is not launched."""
    if plan.other_engine:
        return []
    costed = [plan.costs[name] for name in plan.needed if name in plan.costs]
    known = any(cost.disk_bytes or cost.memory_bytes for cost in plan.costs.values()) or not plan.needed
    most = max((cost.memory_bytes for cost in costed), default=0)
    host = plan.loaded.deployment.host
    if host.kind != "local":
        return [
            Room(f"disk of {host.address}", disk_needed(plan.facts) if known else None, None),
            Room(f"memory of {host.address}, largest stage", most if known else None, None),
        ]
    place = existing_parent(plan.facts.workdir)
    return [
        Room(f"disk of {place}", disk_needed(plan.facts) if known else None, shutil.disk_usage(place).free),
        Room("memory, largest stage", most if known else None, psutil.virtual_memory().available),
    ]


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values, for programs."""
    told = meanings(plan) if plan.other_engine else {}
    return {
        "values": [
            {"key": v.key, "value": _json(v.value), "origin": v.origin}
            | ({"meaning": told[v.key]} if v.key in told else {})
            for v in values(plan)
        ],
        "derived": [{"name": d.name, "value": d.value, "how": d.how} for d in derived_values(plan)],
        "stages": [
            {
                "name": s.name,
                "state": s.state,
                "why": s.why,
                "resumable": s.resumable,
                **_cost_dict(plan.costs.get(s.name)),
            }
            for s in plan.statuses
        ],
        "room": [{"what": r.what, "needed_bytes": r.needed, "free_bytes": r.free} for r in room(plan)],
        "effects": [asdict(effect) for effect in plan.effects],
        "findings": [asdict(finding) for finding in plan.findings],
    }


def _cost_dict(cost: Cost | None) -> dict[str, Any]:
    if cost is None:
        return {"seconds": None, "seconds_measured": False, "disk_bytes": None, "memory_bytes": None}
    return {
        "seconds": cost.seconds,
        "seconds_measured": cost.measured,
        "disk_bytes": cost.disk_bytes,
        "memory_bytes": cost.memory_bytes,
    }


def _json(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value
