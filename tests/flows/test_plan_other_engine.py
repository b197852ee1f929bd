"""The plan of a launch of another engine: asked beside effective, nothing started, and never launched."""

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console
from typer.testing import CliRunner

from slipstream.configs.load import load
from slipstream.engine.errors import SlipstreamError
from slipstream.flows.cli import app
from slipstream.flows.plan import Plan, as_dict, derived_values, make_plan, plan_command
from slipstream.flows.plan_tables import show
from slipstream.tasks.checks import refuse_other_engine

CONFIGS = Path(__file__).parents[2] / "configs"
LINE = (
    "python3 -m sglang.launch_server --model-path /m --tp-size 8 --speculative-algorithm EAGLE3"
    " --speculative-draft-model-path /data/output/4 --speculative-num-steps 1 --speculative-eagle-topk 1"
    " --speculative-num-draft-tokens 16"
)


def incident(number: int, *overrides: str) -> Plan:
    return make_plan(CONFIGS / f"incident-{number}.yaml", overrides, environ={})


def text_of(plan: Plan, width: int = 1000) -> str:
    console = Console(file=StringIO(), width=width)
    show(plan, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def derived(plan: Plan) -> dict[str, str]:
    return {row.name: row.value for row in derived_values(plan)}


def test_the_first_launch_is_a_contradiction() -> None:
    (error,) = [error for error in incident(1).errors if error.fault == "F1"]
    assert "verify width 16 contradicts num_steps 1 with topk 1 (width would be 2)" in error.found
    assert f"{CONFIGS / 'incident-1.yaml'}:" in error.found
    assert len(error.ways) == 3


@pytest.mark.parametrize(("number", "width"), [(2, 16), (3, 6)])
def test_the_other_two_agree_in_width_and_are_warned(number: int, width: int) -> None:
    plan = incident(number)
    assert [error for error in plan.errors if error.fault == "F1" or error.check == "launch-line"] == []
    assert derived(plan)["verify width"] == str(width)
    told = {effect.row for effect in plan.effects}
    assert {"0", "4", "5", "7", "15", "18", "nccl", "no-op"} <= told
    assert {effect.severity for effect in plan.effects} == {"warning"}
    sums = [effect for effect in plan.effects if "partial sums" in effect.effective]
    assert "0.5.14" not in {release for effect in sums for release in effect.releases}


def test_a_release_narrows_what_is_told() -> None:
    old, new = incident(2, "server.engine_version=0.5.9"), incident(2, "server.engine_version=0.5.14")
    assert any("CUDA graphs" in effect.effective for effect in old.effects)
    assert not any("CUDA graphs" in e.effective or "partial sums" in e.effective for e in new.effects)
    assert all(not effect.releases for effect in (*old.effects, *new.effects))


def test_the_plan_shows_what_was_asked_beside_what_is_served() -> None:
    text = text_of(incident(1))
    for words in ("Asked of SGLang", "What SGLang nightly makes of it", "so that nothing changes", "verify width 2"):
        assert words in text
    assert "it does not launch it" in text
    assert "Stages" not in text
    assert "training.epochs" not in text
    assert "--speculative-num-draft-tokens: rows that the target scores a round" in text


def test_a_narrow_terminal_shows_the_same_one_below_the_other() -> None:
    lines = [" ".join(line.split()) for line in text_of(incident(1), 100).splitlines()]
    asked = next(n for n, line in enumerate(lines) if line.startswith("1 asked verify width 16 contradicts"))
    below = [line.split()[0] for line in lines[asked + 1 : asked + 20] if line]
    assert [word for word in below if word in ("effective", "visible", "write")][:3] == [
        "effective",
        "visible",
        "write",
    ]
    assert "--speculative-num-draft-tokens: rows that the target scores" not in "\n".join(lines)


def test_a_warning_of_the_table_is_not_printed_twice() -> None:
    text = text_of(incident(2))
    assert text.count("48, because of speculation") == 1
    assert "contradiction F1" not in text


def test_the_drafts_directory_as_training_left_it(tmp_path: Path, left_over: ModuleType) -> None:
    assert derived(incident(2))["draft's training step"] == "4"
    assert derived(incident(2))["draft"] == "not on this machine"
    draft = tmp_path / "output_100k_sglang" / "4"
    draft.mkdir(parents=True)
    found = derived(incident(2, f"draft.path={draft}"))
    assert (found["draft"], found["draft's training step"]) == ("there", "4")
    (draft / "trainer_state.json").write_text(json.dumps({"global_step": 12000}))
    assert derived(incident(2, f"draft.path={draft}"))["draft's training step"] == "12000"
    (draft / "trainer_state.json").write_text("[")
    assert derived(incident(2, f"draft.path={draft}"))["draft's training step"] == "4"
    assert "draft's training step" not in derived(incident(2, f"draft.path={tmp_path}/my-draft"))


def test_a_command_is_planned_as_its_file_is(tmp_path: Path) -> None:
    from_line = plan_command(LINE, "0.5.9", environ={})
    file = tmp_path / "d.yaml"
    file.write_text(CliRunner().invoke(app, ["import", LINE, "--engine-version", "0.5.9"]).stdout)
    from_file = make_plan(file, environ={})
    assert from_file.loaded.deployment == from_line.loaded.deployment
    assert [(e.row, e.effective, e.ways) for e in from_file.effects] == [
        (e.row, e.effective, e.ways) for e in from_line.effects
    ]


def test_for_programs() -> None:
    made = json.loads(json.dumps(as_dict(plan_command(LINE, "0.5.9", environ={}))))
    (width,) = [effect for effect in made["effects"] if effect["row"] == "1"]
    assert width["severity"] == "error"
    assert made["stages"] == made["room"] == []
    (topk,) = [value for value in made["values"] if value["key"] == "speculation.topk"]
    assert topk["meaning"].startswith("--speculative-eagle-topk: branches of a draft step")


def test_keys_that_the_other_engine_does_not_have_are_told(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"server": {"engine": "sglang", "block_size_tokens": 16}})
    (finding,) = [finding for finding in world.plan().findings if finding.check == "unused-keys"]
    assert f"server.block_size_tokens = 16 ({world.line('server.block_size_tokens')})" in finding.found
    assert finding.severity == "warning"


def test_float16_is_another_engines_alone(tmp_path: Path, left_over: ModuleType) -> None:
    world = left_over.World(tmp_path, {"server": {"engine": "sglang", "dtype": "float16"}})
    assert world.plan().loaded.deployment.server.dtype == "float16"
    world.write({"server": {"engine": "slipstream"}})
    with pytest.raises(SlipstreamError, match=r"server.dtype = 'float16'"):
        world.plan()


# ---- the command line ------------------------------------------------------------------------------------------------


def test_exit_codes() -> None:
    run = CliRunner().invoke
    assert run(app, ["plan", str(CONFIGS / "incident-1.yaml")]).exit_code == 2
    assert run(app, ["plan", "--from-command", LINE]).exit_code == 2
    good = LINE.replace("tokens 16", "tokens 2")
    assert run(app, ["plan", "--from-command", good, "--engine-version", "0.5.14"]).exit_code == 0
    assert run(app, ["plan"]).exit_code == 2
    assert run(app, ["plan", str(CONFIGS / "incident-1.yaml"), "--from-command", LINE]).exit_code == 2


def test_the_version_of_a_file_can_be_given() -> None:
    file = str(CONFIGS / "incident-2.yaml")
    done = CliRunner().invoke(app, ["plan", file, "--engine-version", "0.5.14", "--json"])
    values = {value["key"]: value["value"] for value in json.loads(done.stdout)["values"]}
    assert values["server.engine_version"] == "0.5.14"


def test_import_of_a_bad_line_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "slipstream.flows.cli", "import", f"NCCL_PROTOO=LL {LINE}"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "the nearest known one is NCCL_PROTO" in done.stderr
    assert "runbooks/wrong-flags.md" in done.stderr


@pytest.mark.parametrize(
    "command", [("run",), ("stage", "launch"), ("stage", "tune"), ("stage", "benchmark"), ("bench",)], ids=" ".join
)
def test_nothing_of_another_engine_is_launched(tmp_path: Path, command: tuple[str, ...]) -> None:
    file = tmp_path / "d.yaml"
    file.write_text(f"server: {{engine: sglang}}\nhost: {{workdir: {tmp_path / 'work'}}}\n")
    done = CliRunner().invoke(app, [*command, str(file)])
    assert isinstance(done.exception, SlipstreamError)
    assert "server.engine = sglang" in str(done.exception)
    assert "runbooks/wrong-flags.md" in str(done.exception)


def test_our_own_engine_is_not_refused() -> None:
    refuse_other_engine(load(CONFIGS / "smollm2.yaml", (), {}).deployment, "stage launch")


def test_planning_a_launch_loads_no_torch_and_starts_nothing() -> None:
    code = f"""
import subprocess, sys
def refuse(*a, **k): raise AssertionError("plan started a process")
subprocess.Popen.__init__ = refuse
import os
os.fork = os.posix_spawn = refuse
sys.argv = ["slipstream", "plan", {str(CONFIGS / "incident-1.yaml")!r}]
from slipstream.flows.cli import main
try:
    main()
except SystemExit as end:
    assert end.code == 2, end.code
loaded = {{"torch", "transformers", "prefect", "fabric", "matplotlib", "fastapi"}} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "verify width 16 contradicts num_steps 1 with topk 1 (width would be 2)" in " ".join(done.stdout.split())
