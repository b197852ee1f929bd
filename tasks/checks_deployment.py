"""Checks of the deployment against itself and against the shapes of its target: F1, F14 and what else does not fit."""

from collections.abc import Iterator

from slipstream.engine.config import MAX_NUM_STEPS
from slipstream.engine.device import resolve_device
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.serving.engine_options import MAX_RANKS
from slipstream.tasks.contradictions import Check, Finding
from slipstream.tasks.facts import Facts
from slipstream.tasks.other_engines import sglang_effects

OURS_AND_SGLANG = ("slipstream", "sglang")


def _widths(facts: Facts) -> Iterator[Finding]:
    if facts.deployment.server.engine != "slipstream":
        yield from sglang_effects.findings(facts, "F1")
        return
    speculation = facts.deployment.speculation
    steps, width = speculation.num_steps, speculation.verify_width
    if speculation.topk != 1:
        yield Finding(
            "F1",
            facts.say("speculation.topk"),
            "topk = 1: this engine drafts chains, whose verify width is num_steps + 1",
            ("write topk: 1 or leave it out",),
            "F1",
        )
    if width is None:
        return
    if steps == "auto":
        yield Finding(
            "F1",
            f"{facts.say('speculation.num_steps')} and {facts.say('speculation.verify_width')}",
            f"no stated width beside `auto`: each K from 0 to {speculation.max_num_steps} has its own, K + 1",
            ("leave verify_width out", *([f"write num_steps: {width - 1}"] if width - 1 <= MAX_NUM_STEPS else [])),
            "F1",
        )
    elif width != steps + 1:
        keep = f"write num_steps: {width - 1} to keep the width {width}"
        if width - 1 > MAX_NUM_STEPS:
            keep = (
                f"(num_steps: {width - 1} would agree with the width {width}, but at most {MAX_NUM_STEPS} are served)"
            )
        yield Finding(
            "F1",
            f"{facts.say('speculation.num_steps')} and {facts.say('speculation.verify_width')} contradict each other",
            f"verify_width = num_steps + 1: with topk 1 a chain of {steps} has {steps + 1} rows to verify, not {width}",
            (f"leave verify_width out, it is then {steps + 1}", f"write verify_width: {steps + 1}", keep),
            "F1",
        )


def _steps_served(facts: Facts) -> Iterator[Finding]:
    speculation = facts.deployment.speculation
    key = "speculation.max_num_steps" if speculation.num_steps == "auto" else "speculation.num_steps"
    if _largest_steps(facts) > MAX_NUM_STEPS:
        yield Finding(
            "steps-served",
            facts.say(key),
            f"at most {MAX_NUM_STEPS}: longer chains are not served",
            (f"write {key.split('.')[1]}: {MAX_NUM_STEPS} or less",),
        )


def _steps_chosen(facts: Facts) -> Iterator[Finding]:
    deployment = facts.deployment
    server = deployment.server
    if not server.choose_steps:
        return
    off = "write server.choose_steps: false"
    if deployment.speculation.num_steps == 0:
        yield Finding(
            "steps-chosen",
            f"{facts.say('server.choose_steps')} and {facts.say('speculation.num_steps')}",
            "drafts to choose from: num_steps is the largest K in question, 0 is in question anyway",
            (off, "write speculation.num_steps: auto, or 1 or more"),
        )
    here = server.device == "auto" and deployment.host.kind == "local"
    if server.device == "cpu" or (here and resolve_device("auto") == "cpu"):
        yield Finding(
            "steps-chosen",
            f"{facts.say('server.choose_steps')} and {facts.say('server.device')}"
            + (", and this machine has no card that torch can use" if here else ""),
            "rounds that are captured and timed at start, as they are on a card alone",
            (off, "serve on a card"),
        )


def _steps_trained(facts: Facts) -> Iterator[Finding]:
    trained, served = facts.deployment.training.num_steps, _largest_steps(facts)
    if trained < served:
        key = "max_num_steps" if facts.deployment.speculation.num_steps == "auto" else "num_steps"
        yield Finding(
            "steps-trained",
            f"{facts.say('training.num_steps')} and {facts.say(f'speculation.{key}')}",
            f"training over as many steps as are served: steps {trained + 1} to {served} would run on states of the "
            "draft's own that it never saw in training, and their acceptance falls off",
            (f"write training.num_steps: {served}", f"write speculation.{key}: {trained}", "measure it and see"),
            severity="warning",
        )


def _draft_context(facts: Facts) -> Iterator[Finding]:
    if facts.deployment.server.engine != "slipstream":
        yield from sglang_effects.findings(facts, "F14")
        return
    draft, served = facts.deployment.draft.max_context_tokens, facts.deployment.server.max_context_tokens
    if draft is not None and draft < served:
        yield Finding(
            "F14",
            f"{facts.say('draft.max_context_tokens')} is shorter than {facts.say('server.max_context_tokens')}",
            f"a draft with at least {served} positions: beyond {draft} its rope table has no rows",
            (
                "leave draft.max_context_tokens out: it is then the server's",
                f"write draft.max_context_tokens: {served}",
                f"write server.max_context_tokens: {draft}",
            ),
            "F14",
        )
    old = facts.draft
    if old is not None and "convert" not in facts.remade and old.max_position is not None and old.max_position < served:
        yield Finding(
            "F14",
            f"the draft {old.path} has {old.max_position} positions (max_position_embeddings in its config.json), but "
            f"{facts.say('server.max_context_tokens')}",
            f"a draft with at least {served} positions",
            (f"delete {old.path.parent} to convert again", f"write server.max_context_tokens: {old.max_position}"),
            "F14",
        )


def _context_budget(facts: Facts) -> Iterator[Finding]:
    data, benchmark, server = facts.deployment.data, facts.deployment.benchmark, facts.deployment.server
    for key, answer in (
        ("data.max_new_tokens", data.max_new_tokens),
        ("benchmark.max_new_tokens", benchmark.max_new_tokens),
    ):
        total = data.max_prompt_tokens + answer
        if total > server.max_context_tokens:
            yield Finding(
                "context-budget",
                f"{facts.say('data.max_prompt_tokens')} and {facts.say(key)} make {total} tokens, but "
                f"{facts.say('server.max_context_tokens')}",
                "room for the longest prompt and its answer in the context",
                (f"write server.max_context_tokens: {total}", f"lower data.max_prompt_tokens or {key}"),
            )
    if facts.target is not None and server.max_context_tokens > facts.target.max_position:
        yield Finding(
            "context-budget",
            f"{facts.say('server.max_context_tokens')}, but the target has {facts.target.max_position} positions",
            "a served context within the target's",
            (f"write server.max_context_tokens: {facts.target.max_position}",),
        )


def _concurrency(facts: Facts) -> Iterator[Finding]:
    streams, served = facts.deployment.benchmark.concurrency, facts.deployment.server.max_running_requests
    if streams > served:
        yield Finding(
            "concurrency",
            f"{facts.say('benchmark.concurrency')}, but {facts.say('server.max_running_requests')}",
            f"no more streams than the server decodes at the same time: of {streams} requests {streams - served} would "
            "wait, and their wait would be measured as theirs",
            (f"write benchmark.concurrency: {served}", f"write server.max_running_requests: {streams}"),
        )


def _slots_in_range(facts: Facts) -> Iterator[Finding]:
    stored, read = facts.stored_slots, facts.deployment.draft.slots
    if stored is None:
        return
    yield from _named_well(facts, "capture.slots", stored)
    if read is not None:
        yield from _named_well(facts, "draft.slots", read)
        missing = [s for s in read if s not in stored]
        if missing:
            yield Finding(
                "slots",
                f"{facts.say('draft.slots')}, but {facts.say('capture.slots')}: {missing} would not be stored",
                "a draft that reads some of the stored slots, picked by name",
                (f"write capture.slots: {sorted({*stored, *read})}", f"write other draft.slots, of {list(stored)}"),
                "F2",
            )


def _named_well(facts: Facts, key: str, slots: tuple[int, ...]) -> Iterator[Finding]:
    depth = None if facts.target is None else facts.target.num_layers
    wrong = [s for s in slots if s < 0 or (depth is not None and s > depth)]
    twice = sorted({s for s in slots if slots.count(s) > 1})
    if wrong or twice:
        what = f"{wrong} outside the target" if wrong else f"{twice} named twice"
        yield Finding(
            "slots",
            f"{facts.say(key)}: slots {list(slots)}, {what}",
            f"different states of 0 (embedding) to {'N' if depth is None else depth} (after the last layer)",
            (f"name the slots in {key}",),
        )


def _draft_shape(facts: Facts) -> Iterator[Finding]:
    draft, target = facts.deployment.draft, facts.target
    if draft.norm_before_fc and draft.fc_norm:
        yield Finding(
            "draft-shape",
            f"{facts.say('draft.norm_before_fc')} and {facts.say('draft.fc_norm')}",
            "at most one kind of norm before fc",
            ("switch one of the two off",),
        )
    if target is None:
        return
    if draft.draft_vocab_size is not None and draft.draft_vocab_size > target.vocab_size:
        yield Finding(
            "draft-shape",
            f"{facts.say('draft.draft_vocab_size')}, but the target's vocabulary has {target.vocab_size} tokens",
            "a draft vocabulary within the target's",
            (f"write draft_vocab_size: {target.vocab_size} or less", "leave it out"),
        )
    if draft.attention == "latent":
        yield from _latent_draft(facts, target)
        return
    heads, kv_heads = draft.num_heads or target.num_heads, draft.num_kv_heads or target.num_kv_heads
    if heads % kv_heads:
        yield Finding(
            "draft-shape",
            f"{facts.say('draft.num_heads')} and {facts.say('draft.num_kv_heads')}: {heads} heads over {kv_heads}",
            "heads that divide evenly over the KV heads",
            ("change draft.num_heads or draft.num_kv_heads",),
        )


def _latent_draft(facts: Facts, target: ModelConfig) -> Iterator[Finding]:
    if target.latent is None:
        yield Finding(
            "draft-shape",
            f"{facts.say('draft.attention')}, but the target ({target.architecture}) has no latents",
            "latent attention in the target, whose sizes the draft takes",
            ("write draft.attention: grouped",),
        )
    elif facts.deployment.draft.num_kv_heads is not None:
        yield Finding(
            "draft-shape",
            f"{facts.say('draft.attention')} and {facts.say('draft.num_kv_heads')}",
            "one latent for all heads: there are no KV heads to count",
            ("leave draft.num_kv_heads out",),
        )


def _ranks(facts: Facts) -> Iterator[Finding]:
    deployment, target, size = facts.deployment, facts.target, facts.deployment.server.tensor_parallel_size
    if size == 1 or deployment.server.engine != "slipstream":
        return
    if deployment.speculation.num_steps == "auto":
        yield Finding(
            "ranks",
            f"{facts.say('speculation.num_steps')} and {facts.say('server.tensor_parallel_size')}",
            "a K chosen from the costs of what is served: tune measures rounds of one rank",
            ("write speculation.num_steps, and let the benchmark judge it",),
            severity="warning",
        )
    if size > MAX_RANKS:
        yield Finding(
            "ranks",
            facts.say("server.tensor_parallel_size"),
            f"at most {MAX_RANKS} ranks: each is a process of one machine",
            (f"write server.tensor_parallel_size: {MAX_RANKS} or less",),
        )
        return
    if target is None:
        return
    rows = {
        "rows in the vocabulary": target.vocab_size,
        "rows in the draft's vocabulary": deployment.draft.draft_vocab_size or target.vocab_size,
        "features in the target's MLP": target.intermediate_size,
    }
    name, fewest = min(rows.items(), key=lambda item: item[1])
    if size > fewest:
        yield Finding(
            "ranks",
            f"{facts.say('server.tensor_parallel_size')}, but there are {fewest} {name}",
            "something for every rank to hold",
            (f"write server.tensor_parallel_size: {fewest} or less",),
        )
    elif size > target.num_heads:
        yield Finding(
            "ranks",
            f"{facts.say('server.tensor_parallel_size')}, but the target has {target.num_heads} query heads",
            f"at most one rank a head: {size - target.num_heads} ranks or more would have no part in attention",
            (f"write server.tensor_parallel_size: {target.num_heads} or less",),
            severity="warning",
        )


def _samples(facts: Facts) -> Iterator[Finding]:
    data = facts.deployment.data
    if data.temperatures.count(0.0) > 1:
        yield Finding(
            "samples",
            f"{facts.say('data.temperatures')}: {data.temperatures.count(0.0)} greedy answers to each prompt",
            "one greedy answer at most: all further ones are the same",
            ("leave one 0.0 in data.temperatures", "raise the others above 0"),
        )


def _pin(facts: Facts) -> Iterator[Finding]:
    target = facts.deployment.target
    if target.kind == "pypi" and target.expected_sha256 is None:
        yield Finding(
            "pin",
            f"{facts.say('target.source')} and {facts.say('target.sha256')}",
            "the SHA-256 of the wheel that is to be loaded",
            ("download the wheel, look at it, and write its digest as target.sha256",),
        )
    if target.kind != "pypi" and target.sha256 is not None:
        yield Finding(
            "pin",
            f"{facts.say('target.sha256')} beside {facts.say('target.source')}: nothing is compared with it",
            "the digest of a wheel, for a pypi:// source alone",
            ("leave target.sha256 out", "write target.sha256: null"),
            severity="warning",
        )


def _largest_steps(facts: Facts) -> int:
    """The longest chain that this deployment may serve."""
    speculation = facts.deployment.speculation
    return speculation.max_num_steps if speculation.num_steps == "auto" else speculation.num_steps


DEPLOYMENT: tuple[Check, ...] = (
    Check("F1", "the verify width is num_steps + 1, and nobody cuts it silently", _widths, OURS_AND_SGLANG),
    Check("steps-served", "no chain is longer than the engine serves", _steps_served),
    Check("steps-chosen", "where K is chosen there are drafts, and a card that times them", _steps_chosen),
    Check("steps-trained", "the draft is trained as far ahead as it is served", _steps_trained),
    Check("F14", "the draft's positions reach as far as the served context", _draft_context, OURS_AND_SGLANG),
    Check("context-budget", "the longest prompt and its answer fit into the context", _context_budget),
    Check("concurrency", "the benchmark asks for no more streams than are served at the same time", _concurrency),
    Check("slots", "the slots name states that the target has", _slots_in_range),
    Check("draft-shape", "the draft's shapes fit each other and the target", _draft_shape),
    Check("ranks", "every rank has a part of every layer", _ranks),
    Check("samples", "no prompt is answered twice with the same answer", _samples),
    Check("pin", "a downloaded wheel is the very one that was looked at", _pin),
)
