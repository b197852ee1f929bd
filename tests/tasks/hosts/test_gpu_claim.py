"""The host's lock covers what was launched, not only the job that launched it."""

import sys
from pathlib import Path

import pytest

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.gpu_memory import GpuMemory
from slipstream.tasks.hosts import gpu_claim
from slipstream.tasks.hosts.host import Job
from slipstream.tasks.hosts.host_lock import GPU_LOCK, holders
from slipstream.tasks.hosts.local import LocalHost
from slipstream.tasks.process import read_record, start_detached, stop_group

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
# A job that starts a server as launch does: detached, in a session of its own, which the job does not wait for.
LAUNCH = """
import sys
from pathlib import Path
from slipstream.tasks.hosts.gpu_claim import hold_gpus
from slipstream.tasks.process import start_detached
work = Path(sys.argv[1])
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
server = start_detached(sleep, log=work / "server.log", state_file=work / "server.state.json")
if "hold" in sys.argv:
    hold_gpus(work, server.identity)
"""


@pytest.mark.parametrize("hold", [True, False])
def test_a_launched_server_holds_the_locks_of_the_job_that_ended(tmp_path: Path, hold: bool) -> None:
    host = LocalHost(tmp_path / "host", command_seconds=60)
    locks = {"locks": (GPU_LOCK,), "lock_folder": str(tmp_path / "locks")}
    command = (sys.executable, "-P", "-c", LAUNCH, str(tmp_path), *["hold"] * hold)
    theirs = Job("other", tuple(SLEEP), owner="theirs", **locks)  # type: ignore[arg-type]
    status = host.start(Job("launch", command, owner="ours", **locks))  # type: ignore[arg-type]
    while status.state == "running":
        now = host.status("launch")
        assert now is not None
        status = now
    assert status.exit_code == 0, Path(status.log).read_text()
    record = read_record(tmp_path / "server.state.json")
    assert record is not None
    try:
        if not hold:  # without it the server would run on, and its GPUs be given away
            assert host.start(theirs).state == "running"
            return
        with pytest.raises(SlipstreamError, match="job launch of ours") as error:
            host.start(theirs)
        assert error.value.fault == "F15"
        assert str(record.identity.pid) in str(error.value)
        assert host.start(Job("bench", tuple(SLEEP), owner="ours", **locks)).state == "running"  # type: ignore[arg-type]
        host.stop("bench")
        stop_group(record.identity)
        assert host.start(theirs).state == "running"
    finally:
        stop_group(record.identity)
        for name in ("other", "bench"):
            host.stop(name, drain_seconds=0)


def test_a_local_server_holds_the_gpus_of_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = str(tmp_path / "locks")
    server = start_detached(SLEEP, log=tmp_path / "log", state_file=tmp_path / "server.state.json")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    try:
        gpu_claim.hold_gpus(ours, server.identity, locks)  # no GPU here: nothing to hold
        assert not (tmp_path / "locks").exists()
        monkeypatch.setattr(gpu_claim, "read_gpu_memory", lambda: [GpuMemory(0, 0, ())])
        gpu_claim.refuse_held_gpus(ours, locks)
        gpu_claim.hold_gpus(ours, server.identity, locks)
        gpu_claim.refuse_held_gpus(ours, locks)
        with pytest.raises(SlipstreamError, match=f"GPUs of this machine are held by job ours-server of .*{ours}"):
            gpu_claim.refuse_held_gpus(theirs, locks)
        with pytest.raises(SlipstreamError, match="held by job ours-server"):
            gpu_claim.hold_gpus(theirs, server.identity, locks)
    finally:
        stop_group(server.identity)
    gpu_claim.refuse_held_gpus(theirs, locks)
    assert holders(tmp_path / "locks", GPU_LOCK) == []
