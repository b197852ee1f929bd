"""By hand (-m soak): what a far host costs, through a relay that counts: bytes while a job is followed, the time until
a cut connection answers again, and the rates of both ways of sending. Figures are printed; nothing is judged by time.
"""

import json
import random
import sys
import threading
import time

import pytest

from slipstream.tasks.hosts import ssh
from slipstream.tasks.hosts.follow import follow
from slipstream.tasks.hosts.host import Job

FOLLOWED_SECONDS = 60.0
FILE_BYTES = 256 << 20
LINES = "import sys, time\nfor n in range(int(sys.argv[1])): print('x' * 120, flush=True); time.sleep(1)"


@pytest.fixture
def relayed(own_server, ssh_tools, tmp_path):
    server = own_server()
    relay = ssh_tools.Relay(server.port)
    server.trust()
    server.trust(relay.address)
    host = server.host(tmp_path / "far", address=relay.address)
    host.hello()
    yield host, relay
    host.close()
    relay.close()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "command"), [("a line of 120 bytes a second", LINES), ("silent", "import time; time.sleep(60)")]
)
def test_bytes_while_a_job_is_followed(relayed, name, command):
    host, relay = relayed
    status = host.start(Job("followed", (sys.executable, "-c", command, "60")))
    relay.carried_bytes = 0
    began, lines = time.monotonic(), []
    follow(host, status, lines.append)
    seconds = time.monotonic() - began
    figures = {"job": name, "seconds": round(seconds, 1), "lines": len(lines), "bytes": relay.carried_bytes}
    print(json.dumps(figures | {"megabytes_per_hour": round(relay.carried_bytes / seconds * 3600 / 1e6, 2)}))
    assert relay.carried_bytes > 0


@pytest.mark.soak
def test_seconds_until_a_cut_connection_answers_again(relayed):
    host, relay = relayed
    host.start(Job("cut", (sys.executable, "-c", "import time; time.sleep(600)")))
    took = []
    for _ in range(5):
        relay.cut()
        began = time.monotonic()
        assert host.status("cut").state == "running"
        took.append(round(time.monotonic() - began, 2))
    host.stop("cut", drain_seconds=0)
    relay.open = False
    relay.cut()
    back = threading.Timer(20.0, lambda: setattr(relay, "open", True))
    back.start()
    began = time.monotonic()
    host.hello()
    print(json.dumps({"cut_seconds": took, "after_20_s_away": round(time.monotonic() - began - 20, 2)}))


@pytest.mark.soak
@pytest.mark.parametrize("way", ["rsync", "SFTP"])
def test_rates_of_both_ways(own_server, tmp_path, monkeypatch, way):
    server = own_server()
    server.trust()
    host = server.host(tmp_path / "far")
    host.hello()
    source = tmp_path / "source"
    source.write_bytes(random.Random(0).randbytes(1 << 20) * (FILE_BYTES >> 20))
    if way == "SFTP":
        monkeypatch.setattr(ssh, "can_rsync", lambda: False)
    sent, got = host.put(source, "there"), host.get("there", tmp_path / "back")
    host.close()
    assert {sent.way, got.way} == {way}
    rates = {name: round(one.bytes / 1e6 / one.seconds, 1) for name, one in (("put", sent), ("get", got))}
    print(
        json.dumps(
            {"way": way, "megabytes": FILE_BYTES / 1e6, **{f"{name}_mb_s": rate for name, rate in rates.items()}}
        )
    )
