"""A dead run is told to its own server, whichever one we talk to; a record that nobody could be told of is kept."""

import uuid
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.flows import run_record
from slipstream.flows.run_record import FILE, RunRecord, abandon, read_run, untold_runs
from slipstream.tasks.manifest import write_json
from slipstream.tasks.proc_stat import boot_id
from slipstream.tasks.process import ProcessIdentity

NOBODY = "http://127.0.0.1:9/api"
DEAD = ProcessIdentity(2**22 + 1, 2**22 + 1, 1, boot_id())  # a pid that no process of this boot can have


@pytest.fixture
def dead_run(with_prefect: str) -> RunRecord:
    """A run that the session's server believes in."""
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.states import Running

    @flow
    def lifecycle() -> None:
        pass

    with get_client(sync_client=True) as client:
        made = client.create_flow_run(lifecycle, state=Running())
    return RunRecord(str(made.id), "lifecycle", with_prefect, DEAD, "")


def state_of(record: RunRecord) -> str:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return str(client.read_flow_run(uuid.UUID(record.flow_run_id)).state_name)


def test_a_run_of_another_server_is_told_to_that_one(dead_run: RunRecord) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings(updates={PREFECT_API_URL: NOBODY}):
        assert abandon(dead_run, "a test") == "Running"
    assert state_of(dead_run) == "Crashed"
    assert abandon(dead_run, "again") == "Crashed"
    assert abandon(replace(dead_run, flow_run_id=str(uuid.uuid4())), "unknown there") == ""


def test_a_run_whose_server_does_not_answer_is_kept_by_the_next_run_until_it_can_be_told(
    dead_run: RunRecord, tmp_path: Path
) -> None:
    elsewhere = replace(dead_run, flow_run_id=str(uuid.uuid4()), api=NOBODY)
    assert abandon(elsewhere, "nobody is there") is None
    write_json(tmp_path / FILE, asdict(elsewhere))
    with run_record.run_record(tmp_path, "the next", "lifecycle", dead_run.api):
        present = read_run(tmp_path)
        assert present is not None
        assert present.flow_run_id == "the next"
        assert list(untold_runs(tmp_path).values()) == [elsewhere]
    assert read_run(tmp_path) is None
    assert list(untold_runs(tmp_path).values()) == [elsewhere]
    write_json(tmp_path / FILE, asdict(dead_run))  # one that can be told is not kept
    with run_record.run_record(tmp_path, "one more", "lifecycle", dead_run.api):
        assert len(untold_runs(tmp_path)) == 1
    assert state_of(dead_run) == "Crashed"


def test_the_command_keeps_the_record_and_says_whom_it_could_not_tell(
    dead_run: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.engine.errors import SlipstreamError
    from slipstream.flows import prefect_cli

    config = tmp_path / "deployment.yaml"
    config.write_text(f"host: {{workdir: {tmp_path / 'work'}}}\n")
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("PREFECT_API_URL", dead_run.api)
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr("slipstream.flows.by_hand.run_stages", lambda names, *_, **__: ran.append(names))
    elsewhere = replace(dead_run, flow_run_id=str(uuid.uuid4()), api=NOBODY, flow="serve")
    write_json(tmp_path / "work" / FILE, asdict(elsewhere))
    with pytest.raises(SlipstreamError, match=r"127\.0\.0\.1:9/api, does not answer") as error:
        prefect_cli.abandon(config)
    assert str(tmp_path / "work" / FILE) in error.value.do
    assert read_run(tmp_path / "work") == elsewhere
    write_json(tmp_path / "work" / FILE, asdict(dead_run))
    prefect_cli.abandon(config)
    assert read_run(tmp_path / "work") is None
    assert ran == [("restore",), ("cleanup",)]  # after serve the server before it comes back


def test_what_each_flow_leaves_to_do_is_known() -> None:
    from slipstream.flows import cleanup, lifecycle, roll, serve, stage

    made: list[Any] = [cleanup.cleanup, lifecycle.lifecycle, roll.roll, serve.serve, stage.stage]
    assert {flow.name for flow in made} == set(run_record.AFTER)
