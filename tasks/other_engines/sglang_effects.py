"""What SGLang makes of a launch, by release: all rows that a deployment meets, and the findings from them."""

from collections.abc import Iterator

from slipstream.engine.engine_versions import READ, Engine, Version, neighbours
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.contradictions import Check, Finding, Severity
from slipstream.tasks.facts import Facts
from slipstream.tasks.other_engines.effect import Effect, run_rules
from slipstream.tasks.other_engines.launch_facts import Launch, asked, read_other_model
from slipstream.tasks.other_engines.nccl import NCCL_RULES
from slipstream.tasks.other_engines.sglang_flags import flag_of
from slipstream.tasks.other_engines.sglang_machine import MACHINE_RULES
from slipstream.tasks.other_engines.sglang_speculation import SPECULATION_RULES

RULES = (*SPECULATION_RULES, *MACHINE_RULES, *NCCL_RULES)
RUNBOOK = "wrong-flags.md"
TOLD_WHOLE = 3  # unused keys with value and origin; further ones by name
# Checks whose findings are rows of the table: F1 and F14 by their own names, the rest together.
ROW_CHECKS = ("F1", "F14", "launch-line")


def launches(facts: Facts) -> tuple[Launch, ...]:
    """The launch for each release that speaks for the version: itself, two neighbours, or all that were read."""
    try:
        releases = neighbours(Engine.SGLANG, facts.deployment.server.engine_version)
    except SlipstreamError:  # a nightly or an unknown version: F20 says so; what any release does is told as such
        releases = READ[Engine.SGLANG]
    path = asked(facts, "draft.path")
    stated = asked(facts, "target.source") is not None  # else facts speak of our own default, the demo's
    target = read_other_model(facts.target_dir) if stated and facts.target_dir is not None else None
    draft = None if path is None else read_other_model(path)
    return tuple(Launch(facts, Version.parse(release), target, draft) for release in releases)


def effects(facts: Facts) -> tuple[Effect, ...]:
    """Every row of the table asked / effective / visible that the deployment meets; none for our own engine."""
    if facts.deployment.server.engine != Engine.SGLANG:
        return ()
    return run_rules(RULES, launches(facts))


def findings(facts: Facts, fault: str) -> Iterator[Finding]:
    """The rows of a fault as findings; "" for those of no fault of their own."""
    for effect in effects(facts):
        if effect.severity != "note" and (effect.fault if effect.fault in ROW_CHECKS else "") == fault:
            yield _finding(effect, fault or "launch-line")


def _finding(effect: Effect, check: str) -> Finding:
    where = f" in SGLang {effect.where}" if effect.where else ""
    row = f"(row {effect.row}; visible: {effect.visible})"
    if effect.fault == "F1" and effect.row == "1":
        found, expected = f"{effect.asked}{where}", f"{effect.effective} {row}"
    else:
        found = f"{effect.asked}{where}: {effect.effective} {row}"
        expected = "what is served stands on the launch line: nothing is changed, and nothing is chosen silently"
    severity: Severity = "error" if effect.severity == "error" else "warning"
    return Finding(check, found, expected, effect.ways, effect.fault, severity, RUNBOOK)


def _launch_line(facts: Facts) -> Iterator[Finding]:
    yield from findings(facts, "")


def _unused(facts: Facts) -> Iterator[Finding]:
    """Keys that nothing will use: those of our own engine beside SGLang, those of SGLang beside our own engine."""
    deployment = facts.deployment
    sglang = deployment.server.engine == Engine.SGLANG
    if sglang:
        sections: tuple[str, ...] = ("server", "speculation", "draft")
        kept = {"server.engine", "server.engine_version", "draft.slots", "draft.max_context_tokens", "draft.method"}
    else:
        server, kept = deployment.server, set()
        sums_on_cards = server.device != "cpu" and server.tensor_parallel_size > 1  # the ranks get NCCL's variables
        sections = ("sglang",) if sums_on_cards else ("sglang", "nccl")
    keys = [f"{section}.{field}" for section in sections for field in getattr(deployment, section).model_fields_set]
    unused = sorted(
        key
        for key in keys
        if key not in kept and asked(facts, key) is not None and (not sglang or flag_of(key) is None)
    )
    if unused:
        others = unused[TOLD_WHOLE:]
        yield Finding(
            "unused-keys",
            " and ".join(map(facts.say, unused[:TOLD_WHOLE])) + (f", and {', '.join(others)}" if others else ""),
            f"keys that server.engine = {deployment.server.engine} has: nothing uses these",
            ("leave them out", *(() if sglang else ("write server.engine: sglang",))),
            severity="warning" if sglang else "error",
            runbook=RUNBOOK,
        )


LAUNCH_LINE: tuple[Check, ...] = (
    Check("launch-line", "SGLang changes nothing of what was asked", _launch_line, engines=("sglang",)),
    Check("unused-keys", "no key is for another engine", _unused, engines=("slipstream", "sglang")),
)
