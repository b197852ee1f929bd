"""Whoever asked is killed, or cut off: a short command ends with him, with all that it started, here and over SSH."""

import os
import signal
import subprocess
import sys
import threading
import uuid
from contextlib import suppress

import psutil
import pytest
import yaml

from slipstream.tasks.hosts.host import HostUnreachable, Job
from slipstream.tasks.hosts.provision import CURRENT

SOON_SECONDS = 30.0  # a rank that hangs is given up after 90 s by itself


def marked(mark, word=""):
    """Living processes with the variable MARK, wherever they are by now."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if (
                process.environ().get("MARK") == mark
                and (not word or word in process.cmdline())
                and process.status() != "zombie"
            ):
                found.append(process)
    return found


@pytest.fixture(params=["this machine", "over SSH"])
def config(request, ssh_server, tmp_path):
    """(deployment file, mark of what runs for it)."""
    mark, host = uuid.uuid4().hex, {"workdir": str(tmp_path / "work")}
    if request.param == "over SSH":
        python = tmp_path / "python"
        path = os.environ.get("PYTHONPATH", "")
        python.write_text(f'#!/bin/sh\nMARK={mark} PYTHONPATH={path!r} OMP_NUM_THREADS=1 exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        there = ssh_server.host(tmp_path / "far")
        current = tmp_path / "current"
        current.write_text(f'{{"key": "x", "python": "{python}"}}')
        there.put(current, CURRENT)
        there.close()
        host |= {"kind": "ssh", "address": "127.0.0.1", "port": ssh_server.port, "directory": str(tmp_path / "far")}
        host |= {"identity_file": str(ssh_server.user_key), "known_hosts": str(ssh_server.folder / "known_hosts")}
    file = tmp_path / "d.yaml"
    file.write_text(yaml.safe_dump({"host": host, "server": {"device": "cpu"}}))
    return file, mark


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_doctor_that_is_ended_leaves_no_rank_also_one_that_hangs(config, ssh_tools, number):
    file, mark = config
    words = [sys.executable, "-P", "-m", "slipstream.flows.cli", "doctor", str(file), "--ranks", "2"]
    told = subprocess.Popen(words, env={**os.environ, "MARK": mark}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        ranks = ssh_tools.wait_for(lambda: (found := marked(mark, "--rank")) and len(found) == 2 and found)
        ranks[1].send_signal(signal.SIGSTOP)
        told.send_signal(number)
        told.communicate(timeout=SOON_SECONDS)
        ssh_tools.wait_for(lambda: not marked(mark), seconds=SOON_SECONDS)
    finally:
        told.kill()
        for process in marked(mark):
            process.kill()


def test_a_command_ends_with_the_connection_and_a_job_does_not(own_server, ssh_tools, tmp_path):
    server = own_server()
    relay = ssh_tools.Relay(server.port)
    server.trust(relay.address)
    host = server.host(tmp_path / "far", address=relay.address)
    job = host.start(Job("goes-on", (sys.executable, "-c", "import time; time.sleep(600)")))
    mark, failed = uuid.uuid4().hex, []

    def ask():
        try:
            host.run(("env", f"MARK={mark}", "sh", "-c", "sleep 600 & sleep 600; true"))
        except HostUnreachable as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    ssh_tools.wait_for(lambda: len(marked(mark)) >= 3)
    relay.cut()
    asking.join(timeout=SOON_SECONDS)
    assert len(failed) == 1
    ssh_tools.wait_for(lambda: not marked(mark), seconds=SOON_SECONDS)
    assert host.status("goes-on").state == "running"
    assert job.members
    host.stop("goes-on", drain_seconds=0)
    host.close()
    relay.close()


def test_a_helper_that_is_killed_takes_its_command_with_it(own_server, ssh_tools, tmp_path):
    server = own_server()
    server.trust()
    host = server.host(tmp_path / "far")
    helper, mark = int(host.run(("sh", "-c", "echo $PPID")).stdout), uuid.uuid4().hex
    asking = threading.Thread(target=lambda: suppressed(lambda: host.run(("env", f"MARK={mark}", "sleep", "600"))))
    asking.start()
    ssh_tools.wait_for(lambda: marked(mark))
    os.kill(helper, signal.SIGKILL)
    asking.join(timeout=SOON_SECONDS)
    ssh_tools.wait_for(lambda: not marked(mark), seconds=SOON_SECONDS)
    host.close()


def suppressed(ask):
    with suppress(HostUnreachable):
        ask()
