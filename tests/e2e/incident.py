"""The incident, step by step, on this machine: what took a team days, found in seconds. `make incident` runs it.

    python -P -m slipstream.tests.e2e.incident [--demo runs/smollm2]

Every step is a command of the product, and its exit code and words are asserted. Needs a finished `make demo`: target
and answers are taken over from it; all else (a store of four slots, a draft on three of them, servers, a benchmark) is
made here, in runs/incident. Ends with 1 when a step does not hold, and shows that step's whole output.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

CLEAN = "configs/incident-clean.yaml"
WORKDIR = Path("runs/incident")  # of CLEAN
LOGS = [f"configs/incident-logs/launch-{n}.log" for n in (1, 2, 3)]
TAKEN_OVER = ("resolve", "regenerate")
RANKS = 8
# Sizes of the last step: eight processes on two cores need no more to show it.
EIGHT_RANKS = (
    f"--set=server.tensor_parallel_size={RANKS}",
    "--set=benchmark.num_prompts=2",
    "--set=benchmark.max_new_tokens=16",
)
SERVED_BY_SGLANG = (
    "--set=server.engine=sglang",
    "--set=server.engine_version=0.5.14",
    "--set=sglang.speculative_algorithm=EAGLE3",
    "--set=speculation.num_steps=15",
    "--set=speculation.verify_width=16",
    "--set=draft.slots=[3, 15, 27]",
    f"--set=draft.path={WORKDIR}/convert/draft",
)
COLUMNS = 140  # of tables, so that their words stand on one line
POLL_SECONDS = 0.02
PLAN_SECONDS = 2.0


@dataclass(frozen=True)
class Outcome:
    """What a command did. processes: command lines of the processes that it started (not watched when live)."""

    code: int
    text: str
    seconds: float
    processes: Sequence[str] = ()

    @property
    def words(self) -> str:
        """The text with frames of tables, spaces and line ends as single spaces."""
        return re.sub(r"[\s│┃]+", " ", self.text)


@dataclass(frozen=True)
class Step:
    """One command and what must come of it.

    Args:
        title: for the person who reads along.
        arguments: of `slipstream`.
        code: expected exit code.
        words: regular expressions, each of which must be found in the output; what they found is shown.
        check: further findings, as sentences; none where all holds.
        live: show the output as it comes.
    """

    title: str
    arguments: Sequence[str]
    code: int = 0
    words: Sequence[str] = ()
    check: Callable[[Outcome], list[str]] | None = None
    live: bool = False

    def failures(self, outcome: Outcome) -> list[str]:
        found = [] if outcome.code == self.code else [f"exit code {outcome.code}, expected {self.code}"]
        found += [f"the output does not say /{w}/" for w in self.words if not re.search(w, outcome.words)]
        return found + (self.check(outcome) if self.check and not found else [])


def run(step: Step) -> Outcome:
    """Runs `slipstream ARGUMENTS`."""
    command = [sys.executable, "-P", "-m", "slipstream.flows.cli", *step.arguments]
    environment = {**os.environ, "COLUMNS": str(COLUMNS)}
    began = time.monotonic()
    if step.live:
        lines: list[str] = []
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, text=True, env=environment, **pipe) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                print("    " + line, end="", flush=True)
        return Outcome(process.returncode, "".join(lines), time.monotonic() - began)
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        started: dict[int, str] = {}
        while child.poll() is None:
            started.update(_children(child.pid))
            time.sleep(POLL_SECONDS)
        seconds = time.monotonic() - began
        output.seek(0)
        return Outcome(child.returncode, output.read(), seconds, list(started.values()))


def _children(pid: int) -> dict[int, str]:
    try:
        return {p.pid: " ".join(p.cmdline()) for p in psutil.Process(pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return {}


def quick_and_alone(outcome: Outcome) -> list[str]:
    """A plan answers at once and starts nothing."""
    found = []
    if outcome.seconds >= PLAN_SECONDS:
        found.append(f"it took {outcome.seconds:.1f} s, at most {PLAN_SECONDS:.0f} s were promised")
    if outcome.processes:
        found.append(f"it started {outcome.processes}")
    return found


def figures(stage: str) -> dict[str, Any]:
    """Figures in the manifest of a stage of WORKDIR."""
    return json.loads((WORKDIR / stage / "manifest.json").read_text())["figures"]


def clean_run_holds(_: Outcome) -> list[str]:
    """Parity passed at every slot and k; tau as predicted; speed-up above 1, or K = 0 with the losing term named."""
    parity, tune, bench = figures("parity"), figures("tune"), figures("benchmark")
    found = [] if parity["passed"] else ["parity did not pass"]
    if bench["served_num_steps"] == 0:
        if not re.search("draft|verify|accept|round", tune["why"]):
            found.append(f"K = 0 and no term that lost: {tune['why']}")
    elif bench["speedup"]["ratio"] <= 1:
        found.append(f"speculation is {bench['speedup']['ratio']:.2f}x as fast, and is served")
    for gate in figures("report")["gates"]:
        if gate["status"] == "fail":
            found.append(f"{gate['name']}: {gate['found']}, expected {gate['expected']}")
    return found + nothing_left_behind()


def nothing_left_behind() -> list[str]:
    """No process that serves out of WORKDIR is left."""
    here = str(WORKDIR.absolute())
    left = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if "slipstream.engine" in words and here in words:
            left.append(f"{process.info['pid']}: {words}")
    return [f"still running: {left}"] if left else []


def log_is_silent(_: Outcome) -> list[str]:
    """Silent corruption: the server's log says nothing that a person would search for."""
    log = WORKDIR / "parity-inject.log"
    if not log.is_file():
        return [f"there is no {log}"]
    told = ["the server's log says ERROR"] if "ERROR" in log.read_text(errors="replace") else []
    return told + nothing_left_behind()


STEPS = (
    Step(
        "Launch 1 as it was: num_steps 1, sixteen draft tokens asked",
        ["plan", "configs/incident-1.yaml"],
        code=2,
        words=[
            r"F1: verify width 16 contradicts num_steps 1 with topk 1 \(width would be 2\)",
            r"do: leave speculation\.verify_width out [^;]*2; or write speculation\.verify_width: 2 [^;]*; "
            r"or write speculation\.num_steps: 15",
        ],
        check=quick_and_alone,
    ),
    Step(
        "The three logs: what was served, what a round cost, and what can be concluded",
        ["explain-log", *LOGS, "--baseline-tok-s", "90", "--accuracy", "0.747"],
        words=[
            r"accept length \(ceiling\) 1\.60 \(2\) 1\.90 \(16\) 1\.80 \(6\)",
            r"accepted / proposed 60% 6% 16%",
            r"ms a round 28\.2 40\.7 32\.8",
            r"break-even accept length 2\.54 3\.66 2\.96",
            r"p\^k at this K 1\.75 3\.92 3\.27",
            r"launch-1\.log: no draft could have won at K = 1",
            r"launch-2\.log -> [^ ]*launch-3\.log: not shown to be improved",
        ],
    ),
    Step(
        "The clean side: four slots stored, three read by name; trained, proved, served, measured",
        ["run", CLEAN],
        check=clean_run_holds,
        live=True,
    ),
    Step(
        "The incident's wiring: trained on (0, 3, 15), served with (3, 15, 27)",
        ["plan", CLEAN, *SERVED_BY_SGLANG],
        code=2,
        words=[
            r"F2: the draft [^ ]* was trained on slots \(0, 3, 15\)",
            r"capture would give slots \(3, 15, 27\)\. Both are 3h = 3 x 576 = 1,728 wide",
            r"serve with vLLM 0\.24\.0 with top-level ids \[0, 3, 15\] [^;]*; or serve with SGLang [^;]*;",
        ],
        check=quick_and_alone,
    ),
    Step(
        f"A state taken before its reduce, on {RANKS} ranks: tokens right, log silent, found by parity",
        ["parity", CLEAN, "--inject", "F5:slot=0", *EIGHT_RANKS],
        code=3,
        words=[
            r"tokens: all \d+ are identical to K = 0",
            r"slot 0 equals rank 0's partial sum before the reduce: cosine to its own reference 0\.\d+ "
            r"\(expected > 0\.99\), to rank 0's partial sum before the reduce [01]\.\d+",
            r"fix: capture after the all-reduce",
        ],
        check=log_is_silent,
        live=True,
    ),
)


def take_over(demo: Path, console: Console) -> None:
    """Copies the demo's target and answers, which are the same here. Exits with 1 when there is no finished demo."""
    missing = [name for name in TAKEN_OVER if not (demo / name / "manifest.json").is_file()]
    if missing:
        console.print(f"[red]{demo} holds no {', '.join(missing)}[/]: run `make demo` first")
        raise SystemExit(1)
    for name in TAKEN_OVER:
        if not (WORKDIR / name).exists():
            WORKDIR.mkdir(parents=True, exist_ok=True)
            shutil.copytree(demo / name, WORKDIR / f".{name}.partial", dirs_exist_ok=True)
            (WORKDIR / f".{name}.partial").rename(WORKDIR / name)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The incident, step by step.")
    parser.add_argument("--demo", type=Path, default=Path("runs/smollm2"), help="working directory of a finished demo")
    demo = parser.parse_args(arguments).demo
    console = Console(highlight=False, width=None if sys.stdout.isatty() else COLUMNS)
    take_over(demo, console)
    summary = Table(title="the incident, in seconds", show_lines=True)
    for column in ("step", "exit", "s", "found"):
        summary.add_column(column, justify="left" if column in ("step", "found") else "right")
    began, failed = time.monotonic(), 0
    for number, step in enumerate(STEPS, start=1):
        console.print(f"\n[bold]{number}. {escape(step.title)}[/]\n  $ slipstream {escape(' '.join(step.arguments))}")
        outcome = run(step)
        failures = step.failures(outcome)
        failed += bool(failures)
        if failures or not step.live:
            console.print(escape(outcome.text.rstrip()))
        for sentence in failures:
            console.print(f"  [bold red]does not hold[/]: {escape(sentence)}")
        matches = [m.group(0) for w in step.words if (m := re.search(w, outcome.words))]
        words = "; ".join(failures or matches) or "as expected"
        summary.add_row(step.title, str(outcome.code), f"{outcome.seconds:.1f}", escape(words[:300]))
    console.print(summary)
    console.print(f"{len(STEPS) - failed} of {len(STEPS)} steps hold, {time.monotonic() - began:.0f} s in all")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
