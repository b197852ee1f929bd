"""A job seen from here: started or found again, its log followed by offset, to its end."""

import time
from collections.abc import Callable
from dataclasses import replace

from slipstream.tasks.hosts.host import Host, Job, JobStatus

POLL_SECONDS = 0.5
LONGEST_POLL_SECONDS = 5.0  # where the log stands still


def run_job(host: Host, job: Job, say: Callable[[str], None], *, again: bool = False) -> JobStatus:
    """Starts a job, or finds it, and follows it to its end.

    Args:
        host: where it runs.
        job: what runs. It goes on when we are interrupted; the same call finds it again.
        say: told every line of its log, also those from before we came.
        again: whether an earlier end other than success is tried once more, rather than returned.

    Raises HostUnreachable when the connection does not come back in time; the job goes on.
    """
    status = host.start(job)
    if again and status.attached and status.state != "running" and status.exit_code != 0:
        status = host.start(replace(job, run=f"{job.run}@{time.time():.3f}"))
    return replace(follow(host, status, say), attached=status.attached)


def follow(host: Host, status: JobStatus, say: Callable[[str], None]) -> JobStatus:
    """Tells a job's log line by line as it grows. Returns the status at its end."""
    offset, rest, pause = 0, b"", POLL_SECONDS
    while True:
        # Looked at before the log is read: what an ended job wrote is all there.
        now = host.status(status.name) or status
        more = host.read(now.log, offset)
        while more:
            offset += len(more)
            *lines, rest = (rest + more).split(b"\n")
            for line in lines:
                say(line.decode(errors="replace"))
            more = host.read(now.log, offset)
            pause = POLL_SECONDS
        if now.state != "running":
            if rest:
                say(rest.decode(errors="replace"))
            return now
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_POLL_SECONDS)
