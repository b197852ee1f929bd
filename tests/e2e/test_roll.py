"""Two far hosts that serve for real are rolled by `prefect deployment run`, under chats sent where /health says 200."""

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import yaml

from slipstream.configs.load import load
from slipstream.tasks.hosts.far_stage import send_deployment
from slipstream.tasks.registry import get_stage
from slipstream.tasks.stage import run_stage

pytestmark = pytest.mark.soak

K, PORT, LEAVE_SECONDS = 2, 8000, 2


class Chats:
    """Chats without an end, each sent to a server that was well a moment ago; what was answered, and what was lost."""

    def __init__(self, urls: list[str], turns: list[str]) -> None:
        self.urls, self.turns = urls, turns
        self.answers: list[tuple[str, str, str]] = []  # turn, url, text
        self.lost: list[str] = []
        self.model = httpx.get(f"{urls[0]}/v1/models", trust_env=False).json()["data"][0]["id"]
        self._well, self._on = set[str](), True
        self._threads = [threading.Thread(target=self._look), *(threading.Thread(target=self._ask) for _ in range(2))]

    def __enter__(self) -> "Chats":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._on = False
        for thread in self._threads:
            thread.join()

    def _look(self) -> None:
        while self._on:
            for url in self.urls:
                try:
                    well = httpx.get(f"{url}/health", trust_env=False, timeout=5).status_code == 200
                except httpx.HTTPError:
                    well = False
                (self._well.add if well else self._well.discard)(url)
            time.sleep(LEAVE_SECONDS / 10)

    def _ask(self) -> None:
        while self._on:
            well, turn = list(self._well), random.choice(self.turns)
            if not well:
                time.sleep(0.05)
                continue
            url = random.choice(well)
            body = {"model": self.model, "messages": [{"role": "user", "content": turn}], "max_tokens": 16}
            try:
                answer = httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=60)
                answer.raise_for_status()
                self.answers.append((turn, url, answer.json()["choices"][0]["message"]["content"]))
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.lost.append(f"{url}: {error!r}")


def test_real_servers_are_rolled_without_losing_a_chat(
    worlds: ModuleType,
    chats: ModuleType,
    tiny: ModuleType,
    load_test_module: Callable[[Path], ModuleType],
    tmp_path: Path,
) -> None:
    house = load_test_module(Path(__file__).with_name("test_resume.py")).make_house(chats, tiny, tmp_path)
    values = yaml.safe_load(house.config.read_text())
    values["training"] |= {"epochs": 60, "max_seconds": 60.0}
    values["server"] |= {"host": "0.0.0.0", "port": PORT, "after": "keep"}
    values["roll"] = {"leave_seconds": LEAVE_SECONDS, "drain_seconds": 60.0}
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    hosts = [
        worlds.far_host(load_test_module, folder, number=i, command_seconds=120) for i, folder in enumerate(folders)
    ]
    with hosts[0] as one, hosts[1] as two:
        known = tmp_path / "known_hosts"
        known.write_text("".join(Path(far.section["known_hosts"]).read_text() for far in (one, two)))
        more = {key: two.section[key] for key in ("address", "identity_file", "directory")}
        values["host"] |= {**one.section, "known_hosts": str(known), "more": [more]}
        world = worlds.World(tmp_path, values)
        written = load(tmp_path / "configs" / "smollm2.yaml").deployment
        there = load(send_deployment(one.host, written, one.host.directory, written.host.workdir.name)).deployment
        for name in ("resolve", "regenerate", "extract", "train", "convert", "tune"):
            run_stage(get_stage(name), there, there.host.workdir)
        urls = [f"http://{far.section['address']}:{PORT}" for far in (one, two)]
        with world.up():
            first = servers(world, world.run("roll"))  # nothing served yet
            turns = [json.loads(line)["turns"][0] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
            with Chats(urls, turns) as stream:
                wait_for(stream, urls)
                second = servers(world, world.run("roll"))
                wait_for(stream, urls)
            assert stream.lost == []
            assert not {(row["host"], row["pid"]) for row in first} & {(row["host"], row["pid"]) for row in second}
            # Greedy: each turn has one answer, whichever server gave it, before, during and after.
            assert len({(turn, text) for turn, _, text in stream.answers}) == len(
                {turn for turn, _, _ in stream.answers}
            )
            assert any("accepted" in line for line in metrics(urls))
            world.run("cleanup")
            for url in urls:
                with pytest.raises(httpx.ConnectError):
                    httpx.get(f"{url}/health", trust_env=False, timeout=5)
        print(json.dumps({"chats": len(stream.answers), **world.figures}))


def servers(world: Any, run: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(world.artifacts(run)["slipstream-replicas"])
    assert len(rows) == 2
    return rows


def wait_for(stream: Chats, urls: list[str]) -> None:
    """Until every server has answered another dozen chats."""
    begun = len(stream.answers)
    deadline = time.monotonic() + 120.0
    while any(sum(url == asked for _, asked, _ in stream.answers[begun:]) < 12 for url in urls):
        assert time.monotonic() < deadline, stream.lost[-3:]
        time.sleep(0.1)


def metrics(urls: list[str]) -> list[str]:
    """What has been counted."""
    pages = [httpx.get(f"{url}/metrics", trust_env=False, timeout=5).text for url in urls]
    return [
        line for page in pages for line in page.splitlines() if not line.startswith("#") and line.split()[-1] != "0.0"
    ]
