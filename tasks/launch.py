"""Stage launch: a server of the deployment, proven to be the one that was planned.

Never a cache hit. It makes room first, starts the server with checked flags, follows its start, verifies identity and
effective settings, and succeeds only after a smoke request whose K, width, slots and A_1 agree with plan and parity.
The server goes on running when the stage is done, and is noted as the last good one (last_good.py). Until then the one
before it is: however a launch ends, stage restore brings that one back.
"""

from typing import Any

from slipstream.engine.acceptance import AcceptanceCounts, JointAcceptance, StepComparison
from slipstream.engine.capture import slot_name
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.bench_client import ask_all
from slipstream.tasks.bench_prompts import benchmark_prompts
from slipstream.tasks.checks import find, gather, refuse, refuse_other_engine
from slipstream.tasks.cleanup import check_gpus, clean
from slipstream.tasks.drain import join
from slipstream.tasks.facts import PARITY, Facts
from slipstream.tasks.last_good import keep_last_good, read_last_good
from slipstream.tasks.manifest import MANIFEST, read_json, write_json
from slipstream.tasks.registry import get_stage
from slipstream.tasks.server import RunningServer, ServerPlan, check_settings, plan_server, start_server, stop_server
from slipstream.tasks.stage import StageContext
from slipstream.tasks.tune import chosen_num_steps

SETTINGS = "settings.json"
SMOKE_PROMPTS = 4
SMOKE_TOKENS = 48
# Held-out prompts differ from each other more than coin tosses do; a broken capture moves A_1 by far more than this.
MAX_DEVIATION = 5.0
MAX_DIFFERENCE = 0.15


def run(context: StageContext) -> dict[str, Any]:
    """The stage: see the head of this file. Raises SlipstreamError, and leaves no server behind, if it differs."""
    config, workdir = context.config, context.workdir
    refuse_other_engine(config, "stage launch")
    facts = gather(config, workdir)
    refuse(find(facts))
    try:
        return _replace(context, facts)
    except Exception:
        try:
            last = read_last_good(workdir)
        except SlipstreamError as damaged:  # must not hide why the launch failed
            context.warn(damaged.found)
            last = None
        if last is not None and not last.lives:
            context.warn(
                "the server of before was stopped to make room; `slipstream stage restore CONFIG` brings it back"
            )
        raise


def _replace(context: StageContext, facts: Facts) -> dict[str, Any]:
    """Makes room, starts, proves, and notes the new one as what shall serve."""
    config, workdir = context.config, context.workdir
    clean(workdir, config, say=context.say)
    check_gpus(config)
    num_steps = chosen_num_steps(context.input("tune"))
    slots = None if facts.slots is None else tuple(slot_name(slot) for slot in facts.slots)
    plan = plan_server(workdir, num_steps, slots=slots, port=config.server.port)

    def follow(done: float, total: float, phase: str) -> None:
        context.progress(done, total, phase=phase)

    server = start_server(config, workdir, plan, progress=follow, left=True)  # no traffic before it is proven
    try:
        promise = server.settings["row_invariance"]
        context.say(f"ready at {server.url} after {server.seconds:.1f} s; {promise['detail']}: {promise['promise']}")
        smoke = smoke_test(context, server, plan)
        write_json(context.out / SETTINGS, server.settings)
        keep_last_good(workdir, plan.draft, server.settings)
        join(workdir)
    except BaseException:  # also where the disk is full: no server that nobody notes
        stop_server(config, workdir)
        raise
    return {
        "base_url": server.url,
        "model": server.model,
        "pid": server.identity.pid,
        "start_seconds": server.seconds,
        "settings": {
            key: server.settings[key]
            for key in ("num_steps", "choose_steps", "verify_width", "slots", "dtype", "threads")
        },
        "row_invariant": promise["invariant"],
        "fingerprint": server.settings["fingerprint"],
        "smoke": smoke,
    }


def smoke_test(context: StageContext, server: RunningServer, plan: ServerPlan) -> dict[str, Any]:
    """A few held-out prompts: they are answered, with the planned K, width and slots, and A_1 as parity measured it.

    Raises SlipstreamError otherwise. Returns the figures.
    """
    before = server.acceptance()
    prompts = benchmark_prompts(context.config)[:SMOKE_PROMPTS]
    answers = ask_all(server.url, prompts, max_tokens=min(SMOKE_TOKENS, context.config.benchmark.max_new_tokens))
    check_settings(context.config, plan, server.effective())
    served = server.acceptance().since(before)
    figures: dict[str, Any] = {
        "prompts": len(answers),
        "tokens": sum(answer.output_tokens for answer in answers),
        "acceptance": served.to_dict(),
    }
    if not plan.num_steps:
        context.say(f"smoke: {figures['tokens']} tokens without speculation")
        return figures
    expected = parity_first_step(context)
    first = served.joint[0]
    if expected is not None:
        check_first_step(expected, first)
    parity = "unknown" if expected is None else f"{expected.rate:.3f} ({expected.hits}/{expected.rounds})"
    context.say(
        f"smoke: {figures['tokens']} tokens, accept length {served.accept_length:.2f} of {plan.num_steps + 1}, "
        f"A_1 {first.rate:.3f} ({first.hits}/{first.rounds}), parity's {parity}"
    )
    return {**figures, "parity_first_step": None if expected is None else expected.rate}


def check_first_step(expected: JointAcceptance, served: JointAcceptance) -> None:
    """A_1 of the smoke request against parity's. Raises SlipstreamError when chance does not explain the difference."""
    if not served.rounds:
        raise SlipstreamError(
            "the smoke request has no counted round: A_1 of the server is unknown",
            expected="answers that are longer than one round",
            do="look at the answers to the benchmark's prompts: they may end at once",
        )
    compared = StepComparison(expected, served)
    if abs(compared.difference) > MAX_DIFFERENCE and compared.deviation > MAX_DEVIATION:
        raise SlipstreamError(
            f"A_1 of the server is {served.rate:.3f} ({served.hits}/{served.rounds} rounds), parity measured "
            f"{expected.rate:.3f} ({expected.hits}/{expected.rounds})",
            expected=f"a difference of at most {MAX_DIFFERENCE} or {MAX_DEVIATION:.0f} standard errors",
            do="the draft does not see in this server what it saw in parity: run `slipstream stage parity CONFIG` "
            "again, and compare its slots with the server's settings",
        )


def parity_first_step(context: StageContext) -> JointAcceptance | None:
    """A_1 that parity measured through the served path, on the benchmark's prompts; None, with a warning, without one.

    A launch by hand does without parity, so that parity is no declared input: its manifest says of which draft it is.
    """
    folder, nothing = context.workdir / "parity", "so that of the server is compared with nothing"
    if not (folder / MANIFEST).is_file():
        context.warn(f"smoke: parity has not measured A_1, {nothing}")
        return None
    if read_json(folder / MANIFEST)["inputs"].get("convert") != context.manifest("convert")["identity"]:
        context.warn(f"smoke: parity is of another draft, its A_1 is not this one's, {nothing}")
        return None
    measured = read_json(folder / PARITY)["acceptance"]
    counts = AcceptanceCounts.from_dict(measured["benchmark"]["served"]) if "benchmark" in measured else None
    if counts is None or not counts.num_steps or not counts.rounds:
        context.warn(f"smoke: parity has no counted round, {nothing}")
        return None
    return counts.joint[0]


STAGE = get_stage("launch")
