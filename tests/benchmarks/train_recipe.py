"""The recipe of a draft on one GPU, timed: prompts -> answers -> hidden states -> trained and converted draft.

    python -P tests/benchmarks/train_recipe.py --prompts train_prompts.jsonl --workdir /tmp/recipe --gguf SmolLM2.gguf

Runs the stages resolve, regenerate, extract, train and convert of a deployment in one process, each within a budget of
seconds, and prints what each took beside what was expected, then the held-out acceptance. Training gets what --seconds
leaves, and fits its schedule into that; --limit takes so many prompts, evenly spread over the file. A stage that runs
out of its budget, or is killed, keeps its partial directory: the same command goes on from there, with the seconds of
training that were set the first time. Needs no network; the target is imported from a GGUF file, or --target names its
Hugging Face directory. Figures also go to WORKDIR/recipe.json, what the stages say to WORKDIR/events.jsonl; the draft
to serve is WORKDIR/convert/draft (draft_pieces.py makes small files of it).
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.configs.load import load
from slipstream.configs.schema import Deployment
from slipstream.engine.device import device_name, resolve_device
from slipstream.kernels.matrix_products import VARIABLE
from slipstream.tasks.gguf_import import import_gguf
from slipstream.tasks.registry import get_stage
from slipstream.tasks.reporting import JsonLinesReporter
from slipstream.tasks.stage import StageResult, run_stage

CONFIG = Path(__file__).parents[2] / "configs" / "smollm2-h200.yaml"
# Seconds that a stage may take; expected on one H200 with 7,900 prompts (how: tests/benchmarks/NOTES.md).
BUDGETS = {"resolve": 120, "regenerate": 210, "extract": 120, "train": 330, "convert": 40}
EXPECTED = {"resolve": 10, "regenerate": 75, "extract": 45, "train": 180, "convert": 5}
# Of what is left before stage train: to check and load what it reads, to evaluate, and for stage convert.
BESIDE_TRAINING_SECONDS = 70.0
LEAST_TRAINING_SECONDS = 20.0
TRAINING_SECONDS = "training_seconds.json"  # in the workdir: a run that goes on must keep what it was begun with


class OutOfTime(BaseException):
    """A stage's budget is spent. Not an Exception: nothing may handle it as a fault of its own."""


@dataclass(frozen=True)
class Row:
    """What one stage took. tokens: that it made (regenerate), captured (extract) or trained on, all epochs (train)."""

    stage: str
    status: str
    seconds: float
    expected: float
    tokens: int | None = None
    tokens_per_second: float | None = None
    note: str = ""


def main() -> int:
    arguments = parse()
    arguments.workdir.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    target = arguments.target or imported(arguments.gguf, arguments.workdir / "target")
    changes = [f"target.source={target}", "target.sha256=null", f"host.workdir={arguments.workdir}"]
    if arguments.prompts:
        changes.append(f"data.prompts={limited(arguments.prompts, arguments.limit, arguments.workdir)}")
    deployment = load(arguments.config, [*changes, *arguments.set]).deployment
    events = (arguments.workdir / "events.jsonl").open("a", encoding="utf-8")
    rows: list[Row] = []
    acceptance: dict[str, Any] = {}
    for name in BUDGETS:
        left = arguments.seconds - (time.monotonic() - began)
        started = time.monotonic()
        if name == "train":
            deployment = fitted(deployment, left, arguments.workdir)
        try:
            with within(min(BUDGETS[name], left)), products_of(name):
                result = run_stage(get_stage(name), deployment, arguments.workdir, Listener(events))
        except OutOfTime:
            rows.append(Row(name, "out of time", time.monotonic() - started, EXPECTED[name], note="run again"))
            break
        rows.append(row_of(result, deployment.training.epochs))
        print(f"{name}: {result.status}, {time.monotonic() - started:.1f} s", flush=True)
        if name == "train":
            acceptance = acceptance_of(result.dir)
        torch.cuda.empty_cache()
    finished = len(rows) == len(BUDGETS) and all(row.status != "out of time" for row in rows)
    report = {
        "device": device_name(resolve_device(deployment.training.device)),
        "seconds": round(time.monotonic() - began, 1),
        "finished": finished,
        "stages": [asdict(row) for row in rows],
        "acceptance": acceptance,
    }
    (arguments.workdir / "recipe.json").write_text(json.dumps(report, indent=2) + "\n")
    print("\n".join(described(report, rows)))
    return 0 if finished else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--gguf", type=Path, help="the target's GGUF file; imported into WORKDIR/target once")
    source.add_argument("--target", type=Path, help="the target's Hugging Face directory")
    parser.add_argument("--prompts", type=Path, help="JSON lines of prompts; default: the deployment's")
    parser.add_argument("--limit", type=int, help="so many of the prompts, evenly spread")
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything together")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="overrides of the deployment")
    return parser.parse_args()


def imported(gguf: Path, into: Path) -> Path:
    """The Hugging Face directory made of a GGUF file, by rename, once."""
    if not into.is_dir():
        partial = into.with_suffix(".partial")
        partial.mkdir(exist_ok=True)
        import_gguf(gguf, partial)
        partial.rename(into)
    return into


def limited(prompts: Path, limit: int | None, workdir: Path) -> Path:
    """The file of prompts, or one in `workdir` with `limit` of its lines, evenly spread."""
    if limit is None:
        return prompts
    lines = [line for line in prompts.read_text(encoding="utf-8").split("\n") if line.strip()]
    chosen = [lines[i * len(lines) // limit] for i in range(limit)] if limit < len(lines) else lines
    path = workdir / "prompts.jsonl"
    path.write_text("".join(f"{line}\n" for line in chosen), encoding="utf-8")
    return path


def fitted(deployment: Deployment, left: float, workdir: Path) -> Deployment:
    """The deployment with as many seconds of training as `left` has room for, or those of the first time."""
    path, asked = workdir / TRAINING_SECONDS, deployment.training.max_seconds
    if path.is_file():
        seconds = json.loads(path.read_text())
    else:
        seconds = round(max(LEAST_TRAINING_SECONDS, left - BESIDE_TRAINING_SECONDS), 1)
        seconds = seconds if asked is None else min(seconds, asked)
        path.write_text(json.dumps(seconds))
    training = deployment.training.model_copy(update={"max_seconds": seconds})
    print(f"train: {seconds:.0f} s of training at most, {left:.0f} s are left", flush=True)
    return deployment.model_copy(update={"training": training})


@contextmanager
def products_of(stage: str) -> Iterator[None]:
    """Extraction runs thousands of rows at a time: Triton's products, for those of packed weights take 128 a launch."""
    before = os.environ.get(VARIABLE)
    if stage == "extract" and before is None:
        os.environ[VARIABLE] = "triton"
    try:
        yield
    finally:
        if stage == "extract" and before is None:
            del os.environ[VARIABLE]


class Listener(JsonLinesReporter):
    """Everything goes to a file; what a stage says, with the seconds since it began, also to the terminal."""

    def stage_started(self, stage: str, *, resumed: bool) -> None:
        self.began = time.monotonic()
        super().stage_started(stage, resumed=resumed)

    def say(self, stage: str, text: str, *, markup: bool) -> None:
        super().say(stage, text, markup=markup)
        if not markup:
            print(f"  {stage} +{time.monotonic() - self.began:.1f} s: {text}", flush=True)

    def warn(self, stage: str, text: str) -> None:
        super().warn(stage, text)
        print(f"  {stage} +{time.monotonic() - self.began:.1f} s: warning: {text}", flush=True)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises OutOfTime when the body takes longer."""

    rang = False

    def ring(signum: int, frame: object) -> None:
        nonlocal rang
        rang = True
        raise OutOfTime

    if seconds <= 0:
        raise OutOfTime
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except Exception as error:
        if rang:  # a library in C has made an error of its own of it
            raise OutOfTime from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def row_of(result: StageResult, epochs: int) -> Row:
    """A finished stage; one that was skipped shows the seconds of the run that made it."""
    figures, name = result.figures, result.name
    seconds = result.seconds or json.loads((result.dir / "manifest.json").read_text())["seconds"]
    tokens, speed, note = None, figures.get("tokens_per_second"), ""
    if name == "regenerate":
        tokens = figures["supervised_tokens"]
        note = f"{figures['conversations']} answers, {figures['truncated_share']:.0%} cut off"
    elif name == "extract":
        tokens, note = figures["tokens"], f"{figures['bytes'] / 1e9:.1f} GB"
    elif name == "train":
        tokens = figures["supervised_tokens"] * epochs
        speed = round(tokens / figures["seconds"], 1)
        note = f"{figures['steps']} steps, {1e3 * figures['seconds'] / figures['steps']:.1f} ms each, loop alone"
    return Row(name, result.status, seconds, EXPECTED[name], tokens, speed, note)


def acceptance_of(train: Path) -> dict[str, Any]:
    """Replayed accept length and A_k of the held-out conversations, by K."""
    evaluation = json.loads((train / "evaluation.json").read_text())
    replayed = {str(entry["num_steps"]): entry for entry in evaluation["replayed"] if entry["num_steps"]}
    return {
        "replayed": replayed,
        "greedy_share": evaluation["greedy_share"],
        "outside_vocabulary": evaluation["outside_vocabulary"],
    }


def described(report: Mapping[str, Any], rows: list[Row]) -> list[str]:
    """The tables."""
    lines = [
        f"{report['device']}, {report['seconds']:.0f} s in all" + ("" if report["finished"] else ", NOT finished"),
        "| stage | seconds | expected | tokens | tokens/s | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        tokens = "" if row.tokens is None else f"{row.tokens:,}"
        speed = "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
        note = " ".join(filter(None, (row.note, "" if row.status == "done" else f"({row.status})")))
        lines.append(f"| {row.stage} | {row.seconds:.1f} | {row.expected:.0f} | {tokens} | {speed} | {note} |")
    acceptance = report["acceptance"]
    if acceptance:
        lines += ["| K | accept length | A_1 .. A_K (held out, replayed) |", "| --- | --- | --- |"]
        for num_steps, entry in acceptance["replayed"].items():
            rates = ", ".join(f"{joint['rate']:.3f}" for joint in entry["joint"])
            lines.append(f"| {num_steps} | {entry['accept_length']:.3f} | {rates} |")
        outside = ", ".join(f"{name} {share:.2%}" for name, share in acceptance["outside_vocabulary"].items())
        lines.append(f"greedy share {acceptance['greedy_share']:.2%}; outside the draft vocabulary: {outside}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
