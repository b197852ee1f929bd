"""The stage framework: atomic directories, skipping, resuming, locking, and errors in words."""

import errno
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.configs.schema import Deployment
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks import manifest as mf
from slipstream.tasks import registry
from slipstream.tasks.lock import LOCK, workdir_lock
from slipstream.tasks.os_errors import is_disk_full
from slipstream.tasks.proc_stat import boot_id, process_start_time
from slipstream.tasks.reporting import JsonLinesReporter
from slipstream.tasks.stage import Stage, StageContext, fingerprint, pipeline_status, run_stage, stage_status


class FakeDeployment:
    """Just enough of a deployment: sections as plain values."""

    def __init__(self, **sections: Any) -> None:
        self.sections = sections

    def model_dump(self, mode: str) -> dict[str, Any]:
        assert mode == "json"
        return self.sections


def deployment(x: int = 1, y: int = 2) -> Any:
    return FakeDeployment(first={"x": x, "other": 0}, second={"y": y})


class Counter:
    """A stage body that counts its runs and writes one file."""

    def __init__(self, content: str = "hello") -> None:
        self.runs, self.content = 0, content

    def __call__(self, context: StageContext) -> dict[str, Any]:
        self.runs += 1
        (context.out / "file.txt").write_text(self.content)
        return {"runs": self.runs}


def chain(first: Counter, second: Counter, **changes: Any) -> tuple[Stage, Stage]:
    a = Stage("a", 1, (), ("first.x",), first)
    b = Stage("b", 1, ("a",), ("second",), second)
    return (Stage(**{**vars(a), **changes}) if changes else a), b


def test_finished_stage_has_manifest_with_hashes_and_no_partial(tmp_path: Path) -> None:
    a, _ = chain(Counter(), Counter())
    result = run_stage(a, deployment(), tmp_path)
    assert (result.status, result.figures) == ("done", {"runs": 1})
    recorded = mf.read_json(tmp_path / "a" / mf.MANIFEST)
    assert recorded["files"]["file.txt"] == {"sha256": mf.sha256_file(tmp_path / "a/file.txt"), "bytes": 5}
    assert recorded["config"] == {"first.x": 1}
    assert recorded["fingerprint"] == fingerprint(a, deployment(), tmp_path)
    assert not (tmp_path / "a.partial").exists()
    assert not (tmp_path / LOCK).exists()


def test_unchanged_stage_is_skipped_and_undeclared_settings_do_not_count(tmp_path: Path) -> None:
    first = Counter()
    a, _ = chain(first, Counter())
    run_stage(a, deployment(), tmp_path)
    other = FakeDeployment(first={"x": 1, "other": 99}, second={"y": 7})
    assert run_stage(a, other, tmp_path).status == "skipped"  # type: ignore[arg-type]
    assert first.runs == 1


@pytest.mark.parametrize(
    "change", ["config", "version", "external", "file content", "file size", "missing file", "force"]
)
def test_each_change_repeats_the_stage(tmp_path: Path, change: str) -> None:
    first = Counter()
    a, _ = chain(first, Counter())
    run_stage(a, deployment(), tmp_path)
    kwargs: dict[str, Any] = {}
    d = deployment()
    if change == "config":
        d = deployment(x=5)
    elif change == "version":
        a, _ = chain(first, Counter(), version=2)
    elif change == "external":
        a, _ = chain(first, Counter(), external=lambda _: {"prompts": "abc"})
    elif change == "force":
        kwargs["force"] = True
    else:
        path = tmp_path / "a/file.txt"
        content = {"file content": "HELLO", "file size": "hello, world"}.get(change)
        path.write_text(content) if content else path.unlink()
    if change != "force":
        assert stage_status(a, d, tmp_path).state == "needed"
    assert run_stage(a, d, tmp_path, **kwargs).status == "done"
    assert first.runs == 2


def test_status_names_the_setting_that_changed(tmp_path: Path) -> None:
    a, b = chain(Counter(), Counter())
    run_stage(a, deployment(), tmp_path)
    run_stage(b, deployment(), tmp_path)
    assert [s.state for s in pipeline_status((a, b), deployment(), tmp_path)] == ["done", "done"]
    assert [s.why for s in pipeline_status((a, b), deployment(y=3), tmp_path)] == [
        "unchanged",
        "changed: config.second.y: 2 -> 3",
    ]
    assert [s.why for s in pipeline_status((a, b), deployment(x=4), tmp_path)] == [
        "changed: config.first.x: 1 -> 4",
        "a runs first",
    ]


def test_repeated_input_with_other_content_repeats_what_reads_it(tmp_path: Path) -> None:
    first, second = Counter(), Counter()
    a, b = chain(first, second)
    run_stage(a, deployment(), tmp_path)
    run_stage(b, deployment(), tmp_path)
    run_stage(a, deployment(), tmp_path, force=True)
    assert run_stage(b, deployment(), tmp_path).status == "skipped"  # the same content came out
    first.content = "otherwise"
    run_stage(a, deployment(), tmp_path, force=True)
    assert run_stage(b, deployment(), tmp_path).status == "done"
    assert second.runs == 2


def test_stage_that_acts_on_the_world_runs_every_time_without_repeating_what_follows(tmp_path: Path) -> None:
    act, reader = Counter(), Counter()
    launch = Stage("launch", 1, (), ("first",), act, cached=False)
    measure = Stage("measure", 1, ("launch",), ("second",), reader)
    for expected in ("done", "skipped"):
        act.content = expected  # e.g. another pid
        assert run_stage(launch, deployment(), tmp_path).status == "done"
        assert run_stage(measure, deployment(), tmp_path).status == expected
    assert (act.runs, reader.runs) == (2, 1)


@pytest.mark.parametrize("stale", ["missing", "settings", "damaged"])
def test_missing_or_stale_input_is_refused(tmp_path: Path, stale: str) -> None:
    a, b = chain(Counter(), Counter())
    d = deployment()
    if stale != "missing":
        run_stage(a, d, tmp_path)
    if stale == "settings":
        d = deployment(x=9)
    if stale == "damaged":
        (tmp_path / "a/file.txt").unlink()
    with pytest.raises(SlipstreamError, match="stage b cannot start: a ") as error:
        run_stage(b, d, tmp_path)
    assert "slipstream stage a" in str(error.value)


def test_undeclared_input_is_a_mistake_of_the_stage(tmp_path: Path) -> None:
    stage = Stage("c", 1, (), (), lambda context: {"dir": str(context.input("a"))})
    with pytest.raises(KeyError, match="needs"):
        run_stage(stage, deployment(), tmp_path)


class Interrupted(Exception):
    pass


def test_partial_files_survive_a_failure_and_are_dropped_when_settings_change(tmp_path: Path) -> None:
    seen: list[tuple[bool, list[str]]] = []

    def body(context: StageContext) -> dict[str, Any]:
        shards = sorted(p.name for p in context.out.glob("shard*"))
        seen.append((context.resumed, shards))
        (context.out / f"shard{len(shards)}").write_text("x")
        if len(shards) < 2:
            raise Interrupted
        return {}

    stage = Stage("a", 1, (), ("first",), body)
    for _ in range(2):
        with pytest.raises(Interrupted):
            run_stage(stage, deployment(), tmp_path)
    assert stage_status(stage, deployment(), tmp_path).resumable
    with pytest.raises(Interrupted):
        run_stage(stage, deployment(x=2), tmp_path)
    assert not stage_status(stage, deployment(), tmp_path).resumable
    for _ in range(1):
        with pytest.raises(Interrupted):
            run_stage(stage, deployment(x=2), tmp_path)
    run_stage(stage, deployment(x=2), tmp_path)
    assert seen == [
        (False, []),
        (True, ["shard0"]),
        (False, []),
        (True, ["shard0"]),
        (True, ["shard0", "shard1"]),
    ]


def test_killed_between_manifest_and_rename_counts_as_finished(tmp_path: Path) -> None:
    first = Counter()
    a, _ = chain(first, Counter())
    run_stage(a, deployment(), tmp_path)
    (tmp_path / "a").rename(tmp_path / "a.partial")
    assert run_stage(a, deployment(), tmp_path).status == "skipped"
    assert first.runs == 1
    assert (tmp_path / "a/file.txt").exists()


def test_living_holder_of_the_workdir_is_named_and_a_dead_one_is_ignored(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        lock = {"pid": holder.pid, "start_time": process_start_time(holder.pid), "boot_id": boot_id()}
        (tmp_path / LOCK).write_text(json.dumps({**lock, "command": "slipstream run x"}))
        a, _ = chain(Counter(), Counter())
        with pytest.raises(SlipstreamError, match=f"in use by process {holder.pid} \\(`slipstream run x`"):
            run_stage(a, deployment(), tmp_path)
        # The same pid with another start time is another process, as after a reboot or a wrap of pids.
        (tmp_path / LOCK).write_text(json.dumps({**lock, "start_time": 1}))
        assert run_stage(a, deployment(), tmp_path).status == "done"
        (tmp_path / LOCK).write_text(json.dumps(lock))
        holder.kill()
        deadline = time.monotonic() + 10
        while process_start_time(holder.pid) is not None and time.monotonic() < deadline:
            time.sleep(0.01)  # a zombie counts as gone, so nobody needs to wait for the child
        assert run_stage(a, deployment(), tmp_path).status == "skipped"
    finally:
        holder.kill()
        holder.wait()


def test_an_empty_workdir_is_not_the_current_directory() -> None:
    with pytest.raises(ValueError, match="the path of a file or directory"):
        Deployment.model_validate({"host": {"workdir": ""}})


@pytest.mark.parametrize("start_time", [None, 1.5, "1"])
def test_a_lock_without_pid_and_start_time_is_stale(tmp_path: Path, start_time: object) -> None:
    a, _ = chain(Counter(), Counter())
    for pid in (2**22 + 1, None, "1"):  # the first is above every pid, so its start time would be None, too
        (tmp_path / LOCK).write_text(json.dumps({"pid": pid, "start_time": start_time, "boot_id": boot_id()}))
        run_stage(a, deployment(), tmp_path)


@pytest.mark.parametrize(
    ("below", "words"),
    [
        ("file", "file is a file"),
        ("file/x", "lies below .*file, which is a file"),
        ("/proc/x/y", "/proc/x/y cannot be used"),
        ("folder", "lock is a directory"),
    ],
)
def test_a_workdir_that_cannot_be_used_is_told_in_words(tmp_path: Path, below: str, words: str) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder" / LOCK).mkdir(parents=True)
    a, _ = chain(Counter(), Counter())
    with pytest.raises(SlipstreamError, match=words) as error:
        run_stage(a, deployment(), tmp_path / below)
    assert "can make and write" in error.value.expected
    assert error.value.do
    with pytest.raises(SlipstreamError, match=words), workdir_lock(tmp_path / below):
        pass


def test_lock_is_reentrant_in_one_process_and_released_at_the_end(tmp_path: Path) -> None:
    with workdir_lock(tmp_path):
        a, _ = chain(Counter(), Counter())
        run_stage(a, deployment(), tmp_path)
        assert (tmp_path / LOCK).exists()
    assert not (tmp_path / LOCK).exists()


def test_json_lines_tell_start_progress_words_and_end(tmp_path: Path) -> None:
    def body(context: StageContext) -> dict[str, Any]:
        for i in range(1000):
            context.progress(i + 1, 1000, loss=0.5)
        context.say("a sample")
        context.warn("mind this")
        return {"n": 3}

    stream = io.StringIO()
    run_stage(Stage("a", 1, (), (), body), deployment(), tmp_path, JsonLinesReporter(stream))
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines if line["event"] != "progress"] == ["started", "say", "warn", "finished"]
    progress = [line for line in lines if line["event"] == "progress"]
    assert progress[-1] == {"event": "progress", "stage": "a", "done": 1000, "total": 1000, "loss": 0.5}
    assert len(progress) < 100  # limited in rate
    assert lines[-1]["figures"] == {"n": 3}


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_full_disk_is_told_in_words_however_it_arrives(tmp_path: Path, error: Exception) -> None:
    def body(context: StageContext) -> dict[str, Any]:
        (context.out / "kept").write_text("x")
        raise error

    with pytest.raises(SlipstreamError, match="is full") as caught:
        run_stage(Stage("a", 1, (), (), body), deployment(), tmp_path)
    assert "free space" in str(caught.value)
    assert (tmp_path / "a.partial/kept").exists()


def test_other_errors_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    assert not is_disk_full(ValueError("cannot write a negative number"), tmp_path)
    assert not is_disk_full(OSError(errno.ENOENT, "no such file"), tmp_path)


DAMAGED = ["{", "[]", "{}", '"text"', "null", '{"fingerprint": 3}', "files", b"\xff"]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_manifest_is_damage_like_any_other(tmp_path: Path, content: str | bytes) -> None:
    first = Counter()
    a, b = chain(first, Counter())
    run_stage(a, deployment(), tmp_path)
    run_stage(b, deployment(), tmp_path)
    manifest = tmp_path / "a" / mf.MANIFEST
    if content == "files":
        content = json.dumps({**mf.read_manifest(tmp_path / "a"), "files": {"file.txt": 5}})
    manifest.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(mf.DamagedManifest) as error:
        mf.read_manifest(tmp_path / "a")
    assert str(tmp_path / "a") in str(error.value)
    statuses = pipeline_status((a, b), deployment(), tmp_path)
    assert statuses[0].why.startswith("damaged: manifest.json: ")
    assert [status.state for status in statuses] == ["needed", "needed"]
    with pytest.raises(SlipstreamError, match="stage b cannot start: a is damaged: manifest"):
        run_stage(b, deployment(), tmp_path)
    assert run_stage(a, deployment(), tmp_path).status == "done"
    assert run_stage(b, deployment(), tmp_path).status == "skipped"


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_damaged_note_of_the_partial_directory_is_not_resumed(tmp_path: Path, content: str) -> None:
    a, _ = chain(Counter(), Counter())
    (tmp_path / "a.partial").mkdir()
    (tmp_path / "a.partial" / "partial.json").write_text(content)
    assert not stage_status(a, deployment(), tmp_path).resumable
    assert run_stage(a, deployment(), tmp_path).status == "done"


def test_every_stage_computes_with_the_threads_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SimpleNamespace(run=lambda context: {"threads": torch.get_num_threads()})
    monkeypatch.setattr(registry, "import_module", lambda name: stage)
    before = torch.get_num_threads()
    try:
        for threads in (3, 1):
            context: Any = SimpleNamespace(config=Deployment.model_validate({"host": {"threads": threads}}))
            assert registry.get_stage("train").run(context) == {"threads": threads}
    finally:
        torch.set_num_threads(before)
