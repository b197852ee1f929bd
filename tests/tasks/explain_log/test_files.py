"""Files as they lie about: compressed, torn, coloured, of other encodings, with restarts, or of something else."""

import contextlib
import gzip
import json
import os
import threading
import tracemalloc
from pathlib import Path

import pytest

from slipstream.engine.errors import SlipstreamError
from slipstream.flows import cli
from slipstream.tasks.explain_log import lines as lines_module
from slipstream.tasks.explain_log.lines import LogFile
from slipstream.tasks.explain_log.read import read_file
from slipstream.tasks.explain_log.run_figures import figures

LENGTHS = [2.10, 2.45, 1.90, 2.30]


@pytest.fixture
def plain(logs):
    return [logs.server_args(3, 4), *logs.sglang_log(LENGTHS, 4, with_bonus=True)]


def key(path):
    run = figures(read_file(path), version="0.5.9")
    return run.num_steps, round(run.accept_length, 9), round(run.round_ms, 9)


@pytest.fixture
def expected(logs, plain, tmp_path):
    return key(logs.write(tmp_path / "plain.log", plain))


def test_gzip(logs, plain, tmp_path, expected):
    assert key(logs.write(tmp_path / "a.log.gz", plain)) == expected
    two = logs.write(tmp_path / "x.gz", plain[:3]).read_bytes() + logs.write(tmp_path / "y.gz", plain[3:]).read_bytes()
    (tmp_path / "two.gz").write_bytes(two)
    assert key(tmp_path / "two.gz") == expected


def test_gzip_that_ends_too_early_is_read_and_told(logs, plain, tmp_path):
    whole = gzip.compress("\n".join([*plain, *(f"filler {i * 7919 % 1000}" for i in range(5000))]).encode())
    (tmp_path / "torn.gz").write_bytes(whole[: len(whole) // 2])
    read = read_file(tmp_path / "torn.gz")
    assert read.section.lengths.lines == 5
    assert any("ends too early" in note for note in read.notes)
    (tmp_path / "damaged.gz").write_bytes(whole[:-8] + bytes(8))  # a wrong checksum
    assert any("damaged" in note for note in read_file(tmp_path / "damaged.gz").notes)


def test_bytes_of_no_encoding_colours_and_line_ends(logs, plain, tmp_path, expected):
    noise = [b"\xff\xfe\x00 bytes", "\u03b1 \u03b2".encode("utf-16"), b"\xc3"]
    coloured = [f"\x1b[32m{line}\x1b[0m" for line in plain]
    assert key(logs.write(tmp_path / "a.log", [*noise, *plain, *noise])) == expected
    assert key(logs.write(tmp_path / "b.log", coloured)) == expected
    assert key(logs.write(tmp_path / "c.log", plain, ending=b"\r\n")) == expected
    assert key(logs.write(tmp_path / "d.log", [f"sglang-1  | {line}" for line in plain])) == expected


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_log_in_utf16_as_powershell_redirects_it(plain, tmp_path, expected, encoding):
    (tmp_path / "a.log").write_bytes(("\ufeff" + "\r\n".join(plain)).encode(encoding))
    assert key(tmp_path / "a.log") == expected


@pytest.mark.parametrize("packed", [False, True])
def test_what_comes_through_a_pipe_is_read_from_its_first_line_on(logs, plain, tmp_path, expected, packed):
    """A pipe can be read once: nothing of it may go into finding out what it is."""
    data = "\n".join([*[f"filler {i}" for i in range(20_000)], *plain, ""]).encode()
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=[gzip.compress(data) if packed else data])
    writer.start()
    read = read_file(tmp_path / "pipe")
    writer.join()
    run = figures(read, version="0.5.9")
    assert (run.num_steps, round(run.accept_length, 9), round(run.round_ms, 9)) == expected
    whole = read_file(logs.write(tmp_path / "a.log", data.decode().splitlines()))
    assert (read.section.line, read.section.lengths.lines) == (whole.section.line, whole.section.lengths.lines)


def test_a_device_is_no_log():
    with pytest.raises(SlipstreamError, match="/dev/zero cannot be read: it is a device"):
        read_file(Path("/dev/zero"))


def test_what_is_no_text_reaches_no_terminal(tmp_path):
    (tmp_path / "a.log").write_bytes(b"\x7fELF\x1b]0;title\x07\x00\x9b2J")
    with pytest.raises(SlipstreamError) as caught:
        read_file(tmp_path / "a.log")
    assert all(c.isprintable() or c == "\n" for c in str(caught.value))


def test_lines_that_a_container_wrapped_in_json(logs, plain, tmp_path, expected):
    wrapped = [json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-02-03T10:20:00Z"}) for line in plain]
    assert key(logs.write(tmp_path / "a-json.log", wrapped)) == expected


@pytest.mark.parametrize("cut", [3, 30, 60, 90])
def test_a_torn_last_line_changes_nothing(logs, plain, tmp_path, expected, cut):
    path = logs.write(tmp_path / "a.log", plain)
    path.write_bytes(path.read_bytes() + logs.decode(3.9, 0.99, 9).encode()[:-cut])
    assert key(path) == expected or cut < 30  # with the speed in it the line is whole


def test_lines_are_the_same_whatever_the_chunks(tmp_path, monkeypatch):
    text = b"a\r\n\n" + b"b" * 50 + b"\nlast"
    (tmp_path / "x").write_bytes(text)
    whole = list(LogFile(tmp_path / "x").lines())
    assert whole == [b"a", b"", b"b" * 50, b"last"]
    monkeypatch.setattr(lines_module, "CHUNK", 3)
    assert list(LogFile(tmp_path / "x").lines()) == whole
    monkeypatch.setattr(lines_module, "LONGEST_LINE", 20)
    assert b"".join(LogFile(tmp_path / "x").lines()) == b"".join(whole)


def test_a_long_log_takes_no_memory(logs, plain, tmp_path, monkeypatch):
    """64 times more lines, and no more memory: nothing is kept of a line."""
    monkeypatch.setattr(lines_module, "CHUNK", 1 << 13)

    def peak(path):
        tracemalloc.start()
        read_file(path)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    body = plain[1:] * 10
    small = peak(logs.write(tmp_path / "s.log", body))
    large = peak(logs.write(tmp_path / "l.log", body * 64))
    assert (tmp_path / "l.log").stat().st_size > 1 << 19
    assert large < small + (1 << 17)


# ---- restarts


def test_the_last_start_with_figures_is_explained(logs, plain, tmp_path):
    second = [logs.server_args(5, 6), *logs.sglang_log([3.0, 3.2, 2.8], 6, with_bonus=True)]
    read = read_file(logs.write(tmp_path / "a.log", [*plain, *second]))
    assert (read.section.effective.num_steps, read.section.lengths.lines) == (5, 4)
    assert any("2 starts" in note and f"line {len(plain) + 1}" in note for note in read.notes)


def test_a_restart_that_prints_no_start_up_line_of_its_own_after_plain_decoding(logs, plain, tmp_path):
    """A server without speculation, then one with it: the second does not inherit the first one's lines."""
    off = [logs.server_args(None, None, None, algorithm=None), logs.PREFILL]
    off += [logs.decode(None, None, 90.0) for _ in range(4)]
    read = read_file(logs.write(tmp_path / "a.log", [*off, *plain]))
    assert (read.section.plain_lines, read.section.effective.num_steps) == (0, 3)


def test_a_last_start_without_figures_is_told(logs, plain, tmp_path):
    read = read_file(logs.write(tmp_path / "a.log", [*plain, logs.server_args(7, 8), "[x] Load weight begin."]))
    assert read.section.effective.num_steps == 3
    assert any("printed no figures" in note for note in read.notes)


def test_a_start_that_failed_does_not_lend_its_settings(logs, plain, tmp_path):
    read = read_file(logs.write(tmp_path / "a.log", [logs.server_args(7, 8), "RuntimeError: out of memory", *plain]))
    assert read.section.effective.num_steps == 3


# ---- damage


@pytest.mark.parametrize(
    "line",
    [
        "[x] Decode batch, #running-req: 1, accept len: 1.0.28, accept rate: 0.5, gen throughput (token/s): 50.00, ",
        "[x] Decode batch, #running-req: 1, accept len: 2.00, accept rate: 0.5, gen throughput (token/s): 5..0, ",
        "[x] Decode batch, #running-req: , accept len: 2.00, accept rate: 0.5, gen throughput (token/s): 50.00, ",
        "[x] server_args=ServerArgs(speculative_num_steps=99999999999, speculative_num_draft_tokens=2)",
    ],
)
def test_a_damaged_line_is_left_out(logs, plain, tmp_path, expected, line):
    assert key(logs.write(tmp_path / "a.log", [*plain, line])) == expected


@pytest.mark.parametrize("value", [None, True, "x", -3, 2.5, [], {}, [1, "a"], 10**30])
def test_values_of_another_kind_are_left_out(logs, tmp_path, value):
    """Of each entry in turn, any one value: the others are explained, or an error says what was not found."""
    good = logs.request((5, 3, 1, 1), 3)
    for name in ("spec_verify_ct", "spec_num_correct_drafts", "spec_correct_drafts_histogram"):
        bad = {"meta_info": {**good["meta_info"], name: value}}
        read = read_file(logs.write_json(tmp_path / "a.json", [good, bad]))
        assert read.section.rounds >= 10
        with contextlib.suppress(SlipstreamError):
            figures(read_file(logs.write_json(tmp_path / "b.json", bad)))


# ---- what is no log of speculation


def refused(path):
    with pytest.raises(SlipstreamError) as error:
        read_file(path)
    return error.value


def test_missing_folder_empty(tmp_path):
    assert "cannot be read" in refused(tmp_path / "none.log").found
    assert "cannot be read" in refused(tmp_path).found
    (tmp_path / "empty.log").touch()
    assert "is empty" in refused(tmp_path / "empty.log").found


def test_something_else_says_what_was_looked_for_and_seen(logs, tmp_path):
    error = refused(logs.write(tmp_path / "a.txt", ["dear diary", "it rained"]))
    assert "    | dear diary\n    | it rained" in error.found
    assert "Decode batch" in error.expected
    assert "SpecDecoding metrics" in error.expected
    for name, text in (("a.json", "{}"), ("b.json", "[]"), ("c.json", '{"a": [1, {"b": null}]}'), ("d", "{ torn")):
        (tmp_path / name).write_text(text)
        assert "holds no figures" in refused(tmp_path / name).found


def test_a_server_that_only_started(logs, tmp_path):
    error = refused(logs.write(tmp_path / "a.log", [logs.server_args(3, 4), "Capture cuda graph begin."]))
    assert "A server started in it, and printed no figure" in error.found


def test_a_log_without_speculation_gives_the_baseline(logs, tmp_path):
    lines = [logs.server_args(None, None, None, algorithm=None), logs.PREFILL, logs.decode(None, None, 0.5)]
    error = refused(logs.write(tmp_path / "a.log", [*lines, *(logs.decode(None, None, 90.0) for _ in range(5))]))
    assert "6 decode lines at 90.0 tok/s a stream with 1 running, none with an accept len" in error.found
    assert "algorithm in force: none" in error.found
    assert "--baseline-tok-s 90.0" in error.do


def test_the_command_ends_with_1_and_words(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.log").write_text("nothing\n")
    monkeypatch.setattr("sys.argv", ["slipstream", "explain-log", str(tmp_path / "a.log")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert "runbooks/accept-length-low.md" in capsys.readouterr().err


OPTIONS = [("--baseline-tok-s", text) for text in ("0", "-1", "nan", "inf", "1e309")] + [
    ("--accuracy", text) for text in ("74.7", "-0.1", "nan")
]


@pytest.mark.parametrize("option", OPTIONS)
def test_options_that_cannot_be(logs, plain, tmp_path, monkeypatch, option):
    path = logs.write(tmp_path / "a.log", plain)
    with pytest.raises(SlipstreamError, match=option[0]):
        cli.app(["explain-log", str(path), *option], standalone_mode=False)
    monkeypatch.setattr("sys.argv", ["slipstream", "explain-log", str(path), *option])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2


RUNBOOKS = Path(__file__).parents[3] / "runbooks"


@pytest.mark.parametrize("name", ["accept-length-low.md", "slower-than-baseline.md"])
def test_the_commands_of_the_runbooks_run(logs, tmp_path, monkeypatch, capsys, name):
    """On the incident's logs: server.log is launch 3, before.log launch 2."""
    incident = Path(__file__).parents[3] / "configs" / "incident-logs"
    (tmp_path / "server.log").write_bytes((incident / "launch-3.log").read_bytes())
    (tmp_path / "before.log").write_bytes((incident / "launch-2.log").read_bytes())
    logs.write_json(tmp_path / "answers.json", logs.request((4, 3, 2, 1), 3))
    logs.write(tmp_path / "plain.log", [logs.PREFILL, *(logs.decode(None, None, 90.0) for _ in range(5))])
    monkeypatch.chdir(tmp_path)
    lines = [
        line.split()[1:] for line in (RUNBOOKS / name).read_text().splitlines() if line.startswith("slipstream ex")
    ]
    assert len(lines) >= 3
    for words in lines:
        if "plain.log" in words:
            with pytest.raises(SlipstreamError, match="can be the baseline"):
                cli.app(words, standalone_mode=False)
        else:
            cli.app(words, standalone_mode=False)
            assert "accept length" in capsys.readouterr().out
