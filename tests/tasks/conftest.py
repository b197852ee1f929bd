"""Finished stages of a tiny pipeline, shared by tests that only read them."""

import pytest

from slipstream.tasks import convert, extract, train
from slipstream.tasks.stage import run_stage


@pytest.fixture(scope="session")
def finished(pipeline, chats, tiny, tmp_path_factory):
    """(Pipeline with extract, train and convert done, stage name -> its result, stage name -> what it said)."""
    made = pipeline.make_pipeline(tmp_path_factory.mktemp("finished"), chats, tiny)
    results, listeners = {}, {}
    for stage in (extract.STAGE, train.STAGE, convert.STAGE):
        listeners[stage.name] = pipeline.Listener()
        results[stage.name] = run_stage(stage, made.deployment, made.workdir, listeners[stage.name])
    return made, results, listeners
