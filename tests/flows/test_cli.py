"""The command line: exit codes, words on standard error, and no traceback for anything that was expected."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

from slipstream.engine.errors import SlipstreamError
from slipstream.flows import cli
from slipstream.tasks import registry
from slipstream.tasks.gates import GatesFailed
from slipstream.tasks.stage import Stage

DEMO = Path(__file__).parents[2] / "configs" / "smollm2.yaml"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the console script in this process: arguments -> (exit code, standard output, standard error)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["slipstream", *map(str, arguments)])
        capsys.readouterr()
        code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., dict[str, Any]]]:
    """name -> what the stage of that name does instead; stages that are not named do nothing."""
    bodies: dict[str, Callable[..., dict[str, Any]]] = {}

    def made(name: str, cached: bool) -> Stage:
        return Stage(name, 1, (), (), lambda context: bodies.get(name, lambda c: {})(context), cached=cached)

    table = tuple(made(stage.name, stage.cached) for stage in registry.STAGES)
    monkeypatch.setattr(registry, "STAGES", table)
    monkeypatch.setattr(registry, "_BY_NAME", {stage.name: stage for stage in table})
    return bodies


def fail(error: BaseException) -> Callable[..., dict[str, Any]]:
    def body(_: object) -> dict[str, Any]:
        raise error

    return body


# ---- plan ------------------------------------------------------------------------------------------------------------


def test_plan_of_a_good_deployment(run: Run, tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path)
    code, out, err = run("plan", world.file)
    assert (code, err) == (0, "")
    for words in ("capture.slots", "slot_2, slot_16, slot_29", "resolve", "needed", "no contradiction"):
        assert words in out


def test_plan_of_a_contradiction_ends_with_2(run: Run, tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path)
    code, out, _ = run("plan", world.file, "--set", "speculation.num_steps=1", "--set", "speculation.verify_width=16")
    assert code == 2
    assert "F1: speculation.num_steps = 1 (--set speculation.num_steps=1)" in out


def test_plan_for_programs(run: Run, tmp_path: Path, left_over: ModuleType) -> None:
    code, out, _ = run("plan", left_over.World(tmp_path).file, "--json", "--set", "draft.max_context_tokens=4")
    assert code == 2
    assert [finding["fault"] for finding in json.loads(out)["findings"]] == ["F14"]


def test_plan_of_another_workdir(run: Run, tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path)
    world.store((0, 3, 31))
    assert run("plan", world.file)[0] == 2
    assert run("plan", world.file, "--workdir", tmp_path / "fresh")[0] == 0


def test_a_deployment_that_cannot_be_read_ends_with_2(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    path.write_text("training:\n  epoch: 3\n")
    for command in (("plan", path), ("run", path), ("stage", "train", path), ("clean", path)):
        code, out, err = run(*command)
        assert code == 2
        assert out == ""
        assert f"error {path}:2: training.epoch is not a known key" in err
        assert "training.epochs" in err
    assert run("plan", tmp_path / "absent.yaml")[0] == 2


def test_the_environment_reaches_the_plan(
    run: Run, tmp_path: Path, left_over: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TRAINING__EPOCHS", "7")
    _, out, _ = run("plan", left_over.World(tmp_path).file, "--json")
    values = {value["key"]: value for value in json.loads(out)["values"]}
    assert values["training.epochs"] == {
        "key": "training.epochs",
        "value": 7,
        "origin": "environment SLIPSTREAM_TRAINING__EPOCHS",
    }


# ---- stages ----------------------------------------------------------------------------------------------------------


def test_a_stage_tells_programs_what_it_does(
    run: Run, tmp_path: Path, left_over: ModuleType, stages: dict[str, Any]
) -> None:
    def body(context: Any) -> dict[str, Any]:
        context.progress(1, 2, loss=0.5)
        context.say("half way")
        return {"answer": 42}

    stages["extract"] = body
    world = left_over.World(tmp_path)
    code, out, err = run("stage", "extract", world.file, "--json")
    assert (code, err) == (0, "")
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in events] == ["started", "progress", "say", "finished"]
    assert events[1] == {"event": "progress", "stage": "extract", "done": 1, "total": 2, "loss": 0.5}
    assert events[-1]["figures"] == {"answer": 42}
    manifest = json.loads((world.workdir / "extract" / "manifest.json").read_text())
    assert manifest["figures"] == {"answer": 42}

    again = [json.loads(line) for line in run("stage", "extract", world.file, "--json")[1].splitlines()]
    assert [(event["event"], event["status"]) for event in again] == [("finished", "skipped")]
    forced = run("stage", "extract", world.file, "--json", "--force")[1]
    assert '"status": "done"' in forced


def test_a_stage_tells_a_person_what_it_does(
    run: Run, tmp_path: Path, left_over: ModuleType, stages: dict[str, Any]
) -> None:
    stages["extract"] = lambda context: context.warn("mind the gap") or {"answer": 42}
    code, out, _ = run("stage", "extract", left_over.World(tmp_path).file, "--workdir", tmp_path / "w")
    assert code == 0
    for words in ("extract", "mind the gap", "42"):
        assert words in out
    assert (tmp_path / "w" / "extract" / "manifest.json").is_file()


def test_an_unknown_stage_is_an_error_with_the_known_ones(run: Run, tmp_path: Path, left_over: ModuleType) -> None:
    code, _, err = run("stage", "extrakt", left_over.World(tmp_path).file)
    assert code == 2
    assert "there is no stage 'extrakt'" in err
    assert "expected: one of resolve, " in err
    assert "do: the nearest one is extract: `slipstream stage extract CONFIG`" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [(SlipstreamError("the disk is full", do="make room"), 1), (GatesFailed([]), 3)],
)
def test_errors_have_their_exit_code_and_are_printed_once(
    run: Run, tmp_path: Path, left_over: ModuleType, stages: dict[str, Any], error: SlipstreamError, code: int
) -> None:
    stages["train"] = fail(error)
    found, _, err = run("stage", "train", left_over.World(tmp_path).file)
    assert found == code
    assert err.count(error.found.splitlines()[0]) == 1
    if error.do:
        assert f"do: {error.do}" in err


def test_what_the_machine_refuses_is_told_without_a_traceback(
    run: Run, tmp_path: Path, left_over: ModuleType, stages: dict[str, Any]
) -> None:
    stages["train"] = fail(OSError(errno.EIO, os.strerror(errno.EIO), "/some/file"))
    code, _, err = run("stage", "train", left_over.World(tmp_path).file)
    assert code == 1
    assert f"{os.strerror(errno.EIO)}: '/some/file' (asked by slipstream." in err
    assert "expected: files, folders and an output that can be read and written" in err
    assert "do: correct the path, its owner or its rights" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_an_output_that_takes_nothing_more_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "slipstream.flows.cli", "schema"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "error [Errno 28] No space left on device" in done.stderr
    assert "do: make room\n  runbook: runbooks/disk-full.md" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_workdir_that_is_a_file_is_a_contradiction_with_a_remedy(
    run: Run, tmp_path: Path, left_over: ModuleType
) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    code, out, _ = run("plan", left_over.World(tmp_path).file, "--workdir", file)
    assert code == 2
    assert "give host.workdir (--workdir) another folder" in " ".join(out.split())


def test_an_interruption_ends_with_130(run: Run, tmp_path: Path, left_over: ModuleType, stages: dict[str, Any]) -> None:
    stages["train"] = fail(KeyboardInterrupt())
    assert run("stage", "train", left_over.World(tmp_path).file)[0] == 130


def test_a_mistake_of_ours_keeps_its_traceback(
    tmp_path: Path, left_over: ModuleType, stages: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages["train"] = fail(ZeroDivisionError("ours"))
    monkeypatch.setattr(sys, "argv", ["slipstream", "stage", "train", str(left_over.World(tmp_path).file)])
    with pytest.raises(ZeroDivisionError):
        cli.main()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("parity", ["parity"]),
        ("bench", ["cleanup", "tune", "launch", "benchmark", "cleanup"]),
        ("clean", ["cleanup"]),
        ("report", ["report"]),
    ],
)
def test_short_commands_run_their_stages(
    run: Run, tmp_path: Path, left_over: ModuleType, stages: dict[str, Any], command: str, expected: list[str]
) -> None:
    ran: list[str] = []
    for name in registry.NAMES:
        stages[name] = lambda context, name=name: ran.append(name) or {}
    assert run(command, left_over.World(tmp_path).file)[0] == 0
    assert ran == expected


def test_bench_takes_two_words_beside_a_deployment(
    run: Run, tmp_path: Path, left_over: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.flows import bench_view

    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(bench_view, "bench", lambda *arguments: asked.append(arguments))
    assert run("bench", "engine", "--sizes", "smollm2", "--rows", "x.json", "--parts")[0] == 0
    assert run("bench", "kernels")[0] == 0
    line = "slipstream bench engine --sizes smollm2 --rows x.json --parts"
    assert asked == [
        ("engine", "smollm2", Path("x.json"), True, line),
        ("kernels", None, None, False, "slipstream bench kernels"),
    ]
    code, _, err = run("bench", left_over.World(tmp_path).file, "--parts")
    assert code == 2
    assert "only with `bench engine` or `bench kernels`" in err


def test_an_unknown_fault_is_a_wrong_command_line(run: Run, tmp_path: Path, left_over: ModuleType) -> None:
    code, _, err = run("parity", left_over.World(tmp_path).file, "--inject", "F5:slot=0", "--inject", "F77")
    assert code == 2
    assert "--inject F77: there is no F77 to inject" in err
    assert "F6:slot=...,rank=...,kind=stale  a round hands out what the round before it captured" in err
    assert list(tmp_path.glob("work/*")) == []


def test_bench_cleans_up_when_it_fails(run: Run, tmp_path: Path, left_over: ModuleType, stages: dict[str, Any]) -> None:
    ran: list[str] = []
    stages["cleanup"] = lambda context: ran.append("cleanup") or {}
    stages["benchmark"] = fail(SlipstreamError("the server died"))
    code, _, err = run("bench", left_over.World(tmp_path).file)
    assert code == 1
    assert "the server died" in err
    assert ran == ["cleanup", "cleanup"]


def test_bench_keeps_the_server_when_told_so(
    run: Run, tmp_path: Path, left_over: ModuleType, stages: dict[str, Any]
) -> None:
    ran: list[str] = []
    stages["cleanup"] = lambda context: ran.append("cleanup") or {}
    assert run("bench", left_over.World(tmp_path).file, "--set", "server.after=keep")[0] == 0
    assert ran == ["cleanup"]


# ---- run -------------------------------------------------------------------------------------------------------------


def test_run_refuses_contradictions_before_anything_starts(
    run: Run, tmp_path: Path, left_over: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.flows import run as lifecycle_run

    started: list[Path] = []
    monkeypatch.setattr(lifecycle_run, "run_lifecycle", lambda config, *rest: started.append(config))
    world = left_over.World(tmp_path, {"speculation": {"num_steps": 1, "verify_width": 16}})
    code, _, err = run("run", world.file)
    assert (code, started) == (2, [])
    assert "F1:" in err
    code, out, _ = run("run", world.file, "--set", "speculation.verify_width=2")
    assert (code, started) == (0, [world.file])
    assert "a run would do: resolve" in out


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_schema_describes_the_demo(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("schema")
    assert code == 0
    schema = json.loads(out)
    jsonschema.validate(yaml.safe_load(DEMO.read_text().replace("1.0e-3", "0.001")), schema)
    run("schema", "--out", tmp_path / "s.json")
    assert json.loads((tmp_path / "s.json").read_text()) == schema


@pytest.mark.parametrize("below", ["", "nowhere/x.json"])
def test_a_schema_that_cannot_be_written_is_told_in_words(run: Run, tmp_path: Path, below: str) -> None:
    code, _, err = run("schema", "--out", tmp_path / below)
    assert code == 1
    assert f"the schema cannot be written to {tmp_path / below}" in err
    assert "do: correct --out" in err


def test_only_what_works_is_offered(run: Run) -> None:
    _, out, _ = run("--help")
    offered = {
        line.split()[0]
        for line in out.partition("Commands:")[2].splitlines()
        if line.startswith("  ") and line[2] != " "
    }
    running = {"plan", "run", "stage", "parity", "bench", "report", "clean", "serve"}
    assert offered == running | {
        "abandon",
        "up",
        "roll",
        "doctor",
        "explain-log",
        "fingerprint",
        "host",
        "import",
        "schema",
    }


def test_a_wrong_command_line_ends_with_2(run: Run) -> None:
    assert run("plan")[0] == 2
    assert run("frobnicate")[0] == 2
    assert run("plan", "x.yaml", "--frob")[0] == 2


def test_serve_hands_its_command_line_over(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.engine.serving import main as serving

    seen: list[list[str]] = []

    def serve(arguments: list[str]) -> int:
        seen.append(arguments)
        return 3

    monkeypatch.setattr(serving, "main", serve)
    assert run("serve", "--target", "t", "--num-steps", "3", "--port", "0")[0] == 3
    assert seen == [["--target", "t", "--num-steps", "3", "--port", "0"]]


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['slipstream', '--help']\n"
        "from slipstream.flows.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'prefect', 'fabric', 'pydantic', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path)
    command = [sys.executable, "-P", "-m", "slipstream.flows.cli", "schema"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=world.root)
    os.close(writing)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["import"], ["plan", "--json", "--from-command"]])
def test_what_programs_read_is_utf8_whatever_the_terminals_encoding(command: list[str]) -> None:
    """An ASCII terminal, and an argument that holds a byte of no encoding: no crash, and nothing read as another."""
    line = b"python3 -m sglang.launch_server --model-path /m --served-model-name '\xc3\xa9\xff'"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "slipstream.flows.cli", *command, line],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"},
    )
    assert b"Traceback" not in done.stderr
    text = done.stdout.decode("utf-8")
    if command == ["import"]:
        assert yaml.safe_load(text)["sglang"]["served_model_name"] == "\xe9\udcff"
    else:
        values = {entry["key"]: entry["value"] for entry in json.loads(text)["values"]}
        assert values["sglang.served_model_name"] == "\xe9\udcff"


@pytest.mark.parametrize("port", [99_999_999, 65_536, -5])
def test_up_at_a_port_that_is_none(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prefect.yaml").write_text("deployments: []\n")
    code, _, said = run("up", "--home", tmp_path / "home", "--port", port)
    assert code == 2
    assert "'--port'" in said
    assert ("equal to 65535" if port > 0 else "equal to 0") in said
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("stop", [[], ["--stop"]])
@pytest.mark.parametrize(("home", "words"), [("/proc/x", "cannot be used"), ("file", "is a file")])
def test_up_with_a_home_that_cannot_be_made_names_its_option(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, words: str, stop: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prefect.yaml").write_text("deployments: []\n")
    (tmp_path / "file").write_text("")
    code, _, said = run("up", "--home", home, *stop)
    assert code == 1
    assert f"--home {home}" in said
    assert words in said
    assert "set --home to another folder" in said
    assert "workdir" not in said


def test_abandon_with_wrong_words(run: Run, tmp_path: Path) -> None:
    assert run("abandon")[0] == 2
    assert run("abandon", DEMO, "--never")[0] == 2
    code, _, said = run("abandon", tmp_path / "absent.yaml")
    assert code == 2
    assert "there is no deployment file" in said
    code, told, _ = run("abandon", DEMO, "--set", f"host.workdir={tmp_path / 'absent'}")
    assert (code, "nothing to abandon" in told) == (0, True)
    assert not (tmp_path / "absent").exists()


def test_a_run_whose_workdir_cannot_be_made_starts_nothing(run: Run) -> None:
    code, _, said = run("run", DEMO, "--set", "host.workdir=/dev/null/x")
    assert code in (1, 2)
    assert "/dev/null" in said
    assert "  do: " in said
