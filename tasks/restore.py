"""Stage restore: the way back from a launch that did not end well.

Afterwards the last good server runs, unless a clean end had stopped it, and nothing else that this pipeline started.
Where a roll over several hosts has begun and not ended, that is the server of before the roll; its successor first
leaves and answers what it has. One that had left joins again.
It reads records on disk alone, so that whoever survives can run it: the flow, a hook in the worker, or a person.
"""

from typing import Any

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.handover import Difference, refuse
from slipstream.tasks.cleanup import check_gpus, clean, refuse_left, stop_each
from slipstream.tasks.drain import drain, join
from slipstream.tasks.last_good import command_again, keep_last_good, kept_draft, read_last_good, what_makes_it
from slipstream.tasks.registry import RESTORE
from slipstream.tasks.roll_mark import back_before_roll, before_roll, in_roll
from slipstream.tasks.server import answers, start_command
from slipstream.tasks.stage import StageContext


def run(context: StageContext) -> dict[str, Any]:
    """The stage: see the head of this file.

    Figures: `server`: kept (it still runs), restored, or none; pid and base_url of a restored one.
    Raises SlipstreamError when the last good server does not come up again as it was; then nothing is left running.
    """
    workdir, config = context.workdir, context.config
    if in_roll(workdir):
        _leave_roll(context)
    last = read_last_good(workdir)
    if last is not None and last.lives and answers(workdir):  # one that was told to end drains, and says so
        seconds = config.server.shutdown_timeout_seconds
        _, left = stop_each(workdir, drain_seconds=seconds, say=context.say, keep=last.identity)
        join(workdir)
        context.say(f"the last good server (pid {last.identity.pid}) still runs, and is left alone")
        refuse_left(left)
        return {"server": "kept", "pid": last.identity.pid}
    clean(workdir, config, say=context.say)
    if last is None:
        context.say("no good server was launched here, or a cleanup was its end; none is brought back")
        return {"server": "none"}

    def check(settings: dict[str, Any]) -> None:
        before, now = what_makes_it(last.settings), what_makes_it(settings)
        refuse(
            [Difference(key, now[key], before[key], "") for key in before if now[key] != before[key]],
            found_in="the server that was started again",
            expected_in="the last good one",
            do="its target or draft was replaced meanwhile: run `slipstream stage launch CONFIG` for what is there now",
        )

    def follow(done: float, total: float, phase: str) -> None:
        context.progress(done, total, phase=phase)

    try:
        check_gpus(config)
        command = command_again(last, workdir)
        server = start_command(config, workdir, command, last.port, check, progress=follow, left=True)
    except SlipstreamError as error:
        raise SlipstreamError(
            f"the last good server could not be brought back: {error.found}",
            expected="the server that was stopped to make room",
            do=f"{error.do}; nothing serves now: run `slipstream stage launch CONFIG`",
            runbook="roll-back.md",
            fault=error.fault,
        ) from error
    keep_last_good(workdir, kept_draft(last, workdir), server.settings)  # of the process that now runs
    join(workdir)
    context.say(f"brought the last good server back at {server.url} after {server.seconds:.1f} s")
    return {"server": "restored", "pid": server.identity.pid, "base_url": server.url}


def _leave_roll(context: StageContext) -> None:
    """Makes the server of before the roll the last good one. Raises as `drain` where its successor does not end."""
    last, before = read_last_good(context.workdir), before_roll(context.workdir)
    if last is not None and last.lives and (before is None or last.identity != before.identity):
        context.say("a roll has begun here and not ended: the server of before it comes back when the present one ends")
        drain(context.workdir, context.config, lambda over, most, n: context.progress(over, most, in_flight=n))
    back_before_roll(context.workdir)


STAGE = RESTORE
