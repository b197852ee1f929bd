"""What a host promises, on this machine and over a real SSH server: commands, values, files, logs."""

import json
import os
import sys
import threading
import time

import pytest

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.hosts.host import MAX_OUTPUT_BYTES, CommandTimedOut, Job
from slipstream.tasks.proc_stat import read_stat

HOSTILE = [
    "a b",
    "$(touch /tmp/slipstream-was-here)",
    "`id`",
    "it's",
    'say "no"',
    "two\nlines",
    "--",
    "-x",
    "*",
    "~",
    "\\",
    "ünï ☃",
    "!!",
    "",
]
SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('VALUE'), os.getcwd(), sys.stdin.read()]))"


def test_a_host_says_who_it_is(any_host, tmp_path):
    found = any_host.hello()
    assert found["directory"] == str(tmp_path / "far")
    assert found["boot_id"]
    assert abs(found["time"] - time.time()) < 60
    assert oct((tmp_path / "far").stat().st_mode)[-3:] == "700"


def test_hostile_values_arrive_as_they_are(any_host, tmp_path):
    directory = tmp_path / "a $(id) 'folder'"
    directory.mkdir()
    done = any_host.run((sys.executable, "-c", SHOW, *HOSTILE), stdin="\n".join(HOSTILE), directory=str(directory))
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == [HOSTILE, None, str(directory), "\n".join(HOSTILE)]


def test_hostile_values_of_a_job_arrive_as_they_are(any_host, ssh_tools):
    value = "x y $(id)\n'\"`"
    job = Job("show", (sys.executable, "-c", SHOW, *HOSTILE), env={"VALUE": value})
    log = any_host.start(job).log
    ssh_tools.wait_for(lambda: any_host.status("show").state == "exited")
    assert json.loads(any_host.read(log)) == [HOSTILE, value, "/", ""]


def test_a_secret_stands_on_no_command_line_and_in_no_file(any_host, tmp_path, ssh_tools):
    secret = "s3cret-" + os.urandom(8).hex()
    code = "import os, sys, time; print('arrived', os.environ['TOKEN'][:7], flush=True); time.sleep(600)"
    status = any_host.start(Job("secret", (sys.executable, "-c", code), secrets={"TOKEN": secret}))
    ssh_tools.wait_for(lambda: any_host.read(status.log) == b"arrived s3cret-\n")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                assert secret.encode() not in file.read()
        except OSError:
            continue
    files = [path for path in (tmp_path / "far").rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    assert secret not in repr(Job("secret", ("true",), secrets={"TOKEN": secret}))


def test_exit_codes_and_both_outputs(any_host):
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"
    done = any_host.run((sys.executable, "-c", code))
    assert (done.exit_code, done.stdout, done.stderr, done.truncated) == (7, "out\n", "err\n", False)
    killed = any_host.run(("sh", "-c", "kill -9 $$"))
    assert killed.exit_code == -9


def test_output_is_bounded_and_both_streams_are_drained(any_host):
    code = "import sys; b = 'x' * 65536\nfor i in range(64): sys.stdout.write(b); sys.stderr.write(b)"
    done = any_host.run((sys.executable, "-c", code))
    assert done.exit_code == 0
    assert len(done.stdout) == len(done.stderr) == MAX_OUTPUT_BYTES
    assert done.truncated


def test_a_command_out_of_time_is_ended_on_the_host_with_its_children(any_host, tmp_path):
    pids = tmp_path / "pids"
    code = f"sleep 600 & echo $! > {pids}; sleep 600"
    with pytest.raises(CommandTimedOut, match=r"`sh` on .* had not ended after 1 s"):
        any_host.run(("sh", "-c", code), seconds=1.0)
    assert read_stat(int(pids.read_text())) is None


def test_a_program_that_is_not_there_says_so(any_host):
    with pytest.raises(SlipstreamError, match=r"`/no/such` cannot be run: .*No such file"):
        any_host.run(("/no/such",))


def test_twelve_commands_at_once(any_host):
    """sshd allows ten sessions on a connection; the others wait."""
    results: dict[int, str] = {}

    def ask(number):
        results[number] = any_host.run(("sh", "-c", f"sleep 0.5; echo {number}")).stdout

    any_host.hello()
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: f"{number}\n" for number in range(12)}


def test_files_go_and_come_whole(any_host, tmp_path):
    source, back = tmp_path / "source", tmp_path / "back"
    source.write_bytes(os.urandom(3_000_000))
    any_host.put(source, "some folder/$(id)")
    assert (tmp_path / "far" / "some folder" / "$(id)").read_bytes() == source.read_bytes()
    assert [path.name for path in (tmp_path / "far" / "some folder").iterdir()] == ["$(id)"]
    any_host.get("some folder/$(id)", back)
    assert back.read_bytes() == source.read_bytes()
    with pytest.raises(SlipstreamError, match="there is no file absent on"):
        any_host.get("absent", back)
    with pytest.raises(SlipstreamError, match="there is no file"):
        any_host.put(tmp_path / "absent", "x")
    with pytest.raises(SlipstreamError, match=r"absent on .* cannot be read"):
        any_host.read("absent")


def test_a_file_that_arrives_changed_is_refused(any_host, tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.write_bytes(b"x" * 1000)
    send = any_host._send

    def cut_short(path, target, progress):
        short = tmp_path / "short"
        short.write_bytes(path.read_bytes()[:500])
        return send(short, target, progress)

    monkeypatch.setattr(any_host, "_send", cut_short)
    with pytest.raises(SlipstreamError, match="arrived with SHA-256"):
        any_host.put(source, "folder/target")
    assert list((tmp_path / "far" / "folder").iterdir()) == []


def test_a_growing_log_is_read_by_offset(any_host, ssh_tools):
    code = "import time\nfor i in range(40): print(f'line {i}', flush=True); time.sleep(0.05)"
    log = any_host.start(Job("grow", (sys.executable, "-c", code))).log
    got = b""
    pieces = 0

    def read():
        nonlocal got, pieces
        more = any_host.read(log, len(got), max_bytes=100)
        got += more
        pieces += bool(more)
        return got.endswith(b"line 39\n")

    ssh_tools.wait_for(read)
    assert got.decode().splitlines() == [f"line {i}" for i in range(40)]
    assert pieces > 3
    assert any_host.read(log, len(got)) == b""
    assert any_host.status("grow").log_bytes == len(got)
