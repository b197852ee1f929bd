"""Finished stages of a tiny pipeline, shared by tests that only read them, and a deployment that can be launched."""

import json
import shutil

import pytest

from slipstream.configs.schema import Deployment
from slipstream.tasks import cleanup, convert, extract, train
from slipstream.tasks.manifest import write_json
from slipstream.tasks.stage import Stage, run_stage

K = 2  # of what is launched


@pytest.fixture(scope="session")
def finished(pipeline, chats, tiny, tmp_path_factory):
    """(Pipeline with extract, train and convert done, stage name -> its result, stage name -> what it said)."""
    made = pipeline.make_pipeline(tmp_path_factory.mktemp("finished"), chats, tiny)
    results, listeners = {}, {}
    for stage in (extract.STAGE, train.STAGE, convert.STAGE):
        listeners[stage.name] = pipeline.Listener()
        results[stage.name] = run_stage(stage, made.deployment, made.workdir, listeners[stage.name])
    return made, results, listeners


@pytest.fixture
def launchable(tiny_models, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{i}", "category": "words", "turns": [f"word {i}"]} for i in range(3)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Deployment(
        target={"source": str(tiny_models.target)},
        data={"max_prompt_tokens": 64, "max_new_tokens": 32},
        capture={"slots": (1, 2, 4)},
        draft={"draft_vocab_size": 86},
        training={"num_steps": K},
        speculation={"num_steps": K},
        server={"max_context_tokens": 128, "max_running_requests": 2, "startup_timeout_seconds": 120.0},
        host={"threads": 1, "workdir": str(tmp_path / "work")},
        benchmark={"prompts": str(prompts), "num_prompts": 3, "max_new_tokens": 40},
    )


@pytest.fixture
def launch_workdir(launchable, tiny_models):
    """A workdir in which resolve, convert and tune have run."""

    def convert(context):
        shutil.copytree(tiny_models.draft, context.out / "draft")
        return {}

    def tune(context):
        write_json(context.out / "choice.json", {"num_steps": K, "candidate": K})
        return {}

    folder = launchable.host.workdir
    stages = (
        Stage("resolve", 1, (), ("target",), lambda context: {"model_dir": str(tiny_models.target)}),
        Stage("convert", 1, ("resolve",), (), convert),
        Stage("tune", 1, ("convert",), (), tune),
    )
    for stage in stages:
        run_stage(stage, launchable, folder)
    yield folder
    cleanup.clean(folder, launchable)
