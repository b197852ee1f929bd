"""Tensor parallelism on the cards of one host, all of it in one command and one table, in at most 9 minutes. By hand:

    python tests/benchmarks/tp8.py [--ranks 8] [--parts exchange,small,kimi,llama] [--layers 61] [--batches 1,2,4,8,16]
                                   [--steps 0,1,2,3,4] [--seconds 535] [--rehearse cpu|card]

exchange  all-reduce + add + the next norm's sums, 1 to 16 rows of 7168, by peer memory and by NCCL; 10,000 replays
small     N ranks against one on tiny models: bits of all ranks, tokens, slots, draft logits, A_k; F5; a killed rank
kimi      Kimi-K2.5's sizes, random INT4 weights in each rank: a step and rounds of K drafts, accepted by the oracle as
          the published curve says while the real draft graph runs, beside the byte floor
same      not by default: Kimi-K2.5's sizes again and again, every round compared bit by bit; with `--ranks 1 --share 2`
          one rank's part of two as a model of its own
llama     Llama-3.1-8B's and 70B's sizes on 1, 2, 4, .. N ranks: a step, its share of the floor, how it scales

With fewer than 8 ranks `--layers` 12 is what two cards hold. `--rehearse` tries the script with tiny sizes: `cpu` over
gloo without a card, `card` with all ranks on one card, which they take in turn (peer memory is real, times are not).

Each part is processes of tp8_rank.py with a time limit; a part that fails says so in a row and the others go on. With
OUT in the environment rows go to OUT/tp8.json as {case, batch, K, tp, value, unit, goal, note, commit, command}.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIMITS = {"exchange": 60.0, "small": 75.0, "kimi": 240.0, "llama": 75.0, "same": 90.0}  # seconds of one set of ranks
PARTS = ("exchange", "small", "kimi", "llama")  # of a run that is not told which
REHEARSED = 8  # times as long
DEAD_GOAL_SECONDS = 5.0
KILL_ME = "waiting to be killed"
GIVE_UP_SECONDS = 10.0  # for the other ranks, after one has ended badly
EXIT_PEER_LOST = 4
ROWS = (1, 2, 4, 8, 16)
KILLED = "a killed rank, until the others are gone"

Row = dict[str, Any]


def row(
    case: str,
    value: float,
    unit: str,
    goal: float | None = None,
    *,
    tp: int,
    batch: int = 1,
    k: int = 0,
    note: str = "",
) -> Row:
    """A line of the table. goal: the value is to be at most that."""
    return {"case": case, "batch": batch, "K": k, "tp": tp, "value": value, "unit": unit, "goal": goal, "note": note}


def line(one: Row) -> str:
    goal, value = one["goal"], one["value"]
    verdict = "FAILED" if value != value else "" if goal is None else "met" if value <= goal else "missed"
    shown = f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.3f}"
    cells = [one["case"], one["tp"], one["batch"], one["K"], shown, one["unit"], "" if goal is None else goal]
    return "| " + " | ".join(str(cell) for cell in [*cells, verdict, one["note"]]) + " |"


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--layers", type=int, default=61, help="of the part kimi")
    parser.add_argument("--batches", default=",".join(map(str, ROWS)), help="of the part kimi")
    parser.add_argument("--steps", default="0,1,2,3,4", help="every K of the part kimi; 0 comes first")
    parser.add_argument("--models", default="llama8b,llama70b", help="of the part llama")
    parser.add_argument("--runs", type=int, default=40, help="of the part same")
    parser.add_argument("--captures", type=int, default=3, help="of the part same: engines of K = 3, captured anew")
    parser.add_argument("--share", type=int, default=1, help="of the part same on one rank: that of so many, alone")
    parser.add_argument("--seconds", type=float, default=535.0, help="of everything")
    parser.add_argument("--rehearse", choices=("", "cpu", "card"), default="")
    return parser.parse_args(words)


def runs_of(args: argparse.Namespace) -> list[tuple[str, int]]:
    """(part, ranks) in their order."""
    powers = [size for size in (1, 2, 4, 8, 16) if size <= args.ranks]
    sizes = {
        "exchange": [args.ranks],
        "small": [1, args.ranks],
        "kimi": [args.ranks],
        "llama": powers,
        "same": [args.ranks],
    }
    return [(part, size) for part in args.parts.split(",") for size in sizes[part]]


def memory_in_use(rehearse: str) -> float:
    """MiB in use on all cards together."""
    if rehearse == "cpu":
        return 0.0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return float(sum(int(one) for one in found if one.isdigit())) if found else float("nan")


class Ranks:
    """Processes that run a part.

    Args:
        part, size: what, on how many ranks.
        seconds: that they may take.
        args: of the command line.
        scratch: a directory that parts share.
    """

    def __init__(self, part: str, size: int, seconds: float, args: argparse.Namespace, scratch: str) -> None:
        from slipstream.engine.rank_group import make_store

        self.part, self.size, self.seconds, self.rehearse = part, size, seconds, args.rehearse
        self.began, self.killed_at, self.rows = time.monotonic(), 0.0, list[Row]()
        store, program = make_store(), str(Path(__file__).with_name("tp8_rank.py"))
        words = [str(size), str(store), part, str(seconds - 5), scratch, json.dumps(vars(args))]
        self.before = memory_in_use(self.rehearse)
        self.processes = [
            subprocess.Popen(
                [sys.executable, program, str(rank), *words],
                stdout=subprocess.PIPE if rank == 0 else None,
                pass_fds=[store],
                text=True,
            )
            for rank in range(size)
        ]
        os.close(store)

    def watch(self) -> None:
        """Ends the part when its time is over, or soon after one of the ranks has ended badly."""
        bad_since = None
        while any(process.poll() is None for process in self.processes):
            now = time.monotonic()
            if any(process.poll() for process in self.processes):  # an exit code other than 0
                bad_since = bad_since or now
            if now - self.began > self.seconds or (bad_since and now - bad_since > GIVE_UP_SECONDS):
                for process in self.processes:
                    process.kill()
            time.sleep(0.02)

    def add(self, one: Row) -> None:
        self.rows.append(one)
        print(line(one), flush=True)

    def run(self) -> list[Row]:
        watcher = threading.Thread(target=self.watch, daemon=True)
        watcher.start()
        assert self.processes[0].stdout is not None
        for text in self.processes[0].stdout:
            if not text.startswith("@"):
                print(text, end="", flush=True)
                continue
            message = json.loads(text[1:])
            for one in message.get("rows", []):
                self.add(one)
            if message.get("state") == KILL_ME:
                time.sleep(0.5)
                self.killed_at = time.monotonic()
                self.processes[-1].kill()
            if message.get("state") == "lost":
                print(f"rank 0 says: {message['words']}", flush=True)
        codes = [process.wait() for process in self.processes]
        ended = time.monotonic()
        watcher.join()
        as_killed = [*[EXIT_PEER_LOST] * (self.size - 1), -9]
        if self.killed_at:
            seconds = ended - self.killed_at if codes == as_killed else float("nan")
            self.add(row(KILLED, seconds, "s", DEAD_GOAL_SECONDS, tp=self.size))
            held = memory_in_use(self.rehearse) - self.before
            self.add(row("memory of the killed ranks' cards", held, "MiB more than before", 64.0, tp=self.size))
        if any(codes) and codes != as_killed:
            self.add(row(f"{self.part}: exit codes {codes}", float("nan"), "failed", tp=self.size))
        self.add(row(f"the part {self.part}", ended - self.began, "s", tp=self.size))
        return self.rows


def scaling(rows: Sequence[Row]) -> list[Row]:
    """How the steps of Llama sizes scale from the fewest ranks that hold them: 1 is as many times as fast as ranks."""
    made = []
    for case in dict.fromkeys(one["case"] for one in rows if one["case"].startswith("llama")):
        steps = [one for one in rows if one["case"] == case]
        first = steps[0]
        for one in steps[1:]:
            share = first["value"] * first["tp"] / (one["value"] * one["tp"])
            note = f"{first['value'] / one['value']:.2f} times as fast as on {first['tp']}"
            made.append(row(f"{case}, scaling", share, "of linear", tp=one["tp"], note=note))
    return made


def main(words: list[str]) -> None:
    args, began, rows = parse(words), time.monotonic(), list[Row]()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    head = "| case | ranks | batch | K | value | unit | goal | | note |\n" + "| --- " * 9 + "|"
    print(head)
    with tempfile.TemporaryDirectory() as scratch:
        for part, size in runs_of(args):
            slower = REHEARSED if args.rehearse else 1
            left = args.seconds * slower - (time.monotonic() - began)
            if left < 20:
                rows.append(row(f"the part {part}: no time", float("nan"), "not run", tp=size))
                continue
            rows += Ranks(part, size, min(LIMITS[part] * slower, left), args, scratch).run()
            if "OUT" in os.environ:
                origin = {"commit": commit, "command": " ".join(["python tests/benchmarks/tp8.py", *words])}
                Path(os.environ["OUT"], "tp8.json").write_text(json.dumps([one | origin for one in rows], indent=1))
    rows += scaling(rows)
    print("\n== all of it\n" + head + "\n" + "\n".join(line(one) for one in rows), flush=True)
    missed = sum(one["goal"] is not None and not one["value"] <= one["goal"] for one in rows)
    failed = sum(one["value"] != one["value"] for one in rows)
    print(
        f"{time.monotonic() - began:.0f} s in all; {failed} rows failed or not run, {missed} goals missed", flush=True
    )


if __name__ == "__main__":
    main(sys.argv[1:])
