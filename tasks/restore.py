"""Stage restore: the way back from a launch that did not end well.

Afterwards the last good server runs, unless a clean end had stopped it, and nothing else that this pipeline started.
It reads records on disk alone, so that whoever survives can run it: the flow, a hook in the worker, or a person.
"""

from typing import Any

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.handover import Difference, refuse
from slipstream.tasks.cleanup import check_gpus, clean, stop_recorded
from slipstream.tasks.last_good import command_again, keep_last_good, kept_draft, read_last_good, what_makes_it
from slipstream.tasks.process import STATE_SUFFIX, read_record
from slipstream.tasks.registry import RESTORE
from slipstream.tasks.server import answers, start_command
from slipstream.tasks.stage import StageContext


def run(context: StageContext) -> dict[str, Any]:
    """The stage: see the head of this file.

    Figures: `server`: kept (it still runs), restored, or none; pid and base_url of a restored one.
    Raises SlipstreamError when the last good server does not come up again as it was; then nothing is left running.
    """
    workdir, config = context.workdir, context.config
    last = read_last_good(workdir)
    if last is not None and last.lives and answers(workdir):  # one that was told to end drains, and says so
        for state_file in sorted(workdir.glob(f"*{STATE_SUFFIX}")):
            record = read_record(state_file)
            if record is not None and record.identity != last.identity:
                stopped = stop_recorded(state_file, drain_seconds=config.server.shutdown_timeout_seconds)
                context.say(str(stopped))
        context.say(f"the last good server (pid {last.identity.pid}) still runs, and is left alone")
        return {"server": "kept", "pid": last.identity.pid}
    clean(workdir, config, say=context.say)
    if last is None or not last.wanted:
        why = "was launched here yet" if last is None else "is wanted: the last one was ended by a cleanup"
        context.say(f"no good server {why}; none is brought back")
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
        server = start_command(config, workdir, command_again(last, workdir), last.port, check, progress=follow)
    except SlipstreamError as error:
        raise SlipstreamError(
            f"the last good server could not be brought back: {error.found}",
            expected="the server that was stopped to make room",
            do=f"{error.do}; nothing serves now: run `slipstream stage launch CONFIG`",
            runbook="roll-back.md",
            fault=error.fault,
        ) from error
    keep_last_good(workdir, kept_draft(last, workdir), server.settings)  # of the process that now runs
    context.say(f"brought the last good server back at {server.url} after {server.seconds:.1f} s")
    return {"server": "restored", "pid": server.identity.pid, "base_url": server.url}


STAGE = RESTORE
