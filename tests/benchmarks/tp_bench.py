"""Tensor parallelism on two cards of one host, in one command: python -P tp_bench.py [PART ..]

exchange  all-reduce + add + the next norm's sums: bits, microseconds in a graph, 10,000 replays with checks
engine    Llama-3.1-8B sizes, random weights: milliseconds a step and a round, fault F5 in a trace, a killed rank
nccl      the exchange by NCCL, which is the fallback: bits and microseconds

TP_BENCH_REHEARSE tries the script itself, with tiny sizes: `cpu` the engine part without a card, `card` both ranks on
one card, which they take in turn (peer memory is real then, times are not).

Each part is two processes of tp_ranks.py, with a time limit of its own. Rows are printed as they come; with OUT in the
environment they also go to OUT/tp_bench.json, a list of {case, batch, K, tp, value, unit, goal, commit, command}. A
part that fails says so in a row, and the others go on.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

SIZE = 2
PARTS = {"exchange": 50.0, "engine": 90.0, "nccl": 30.0}  # seconds that each may take
DEAD_GOAL_SECONDS = 5.0
KILL_ME = "waiting to be killed"
GIVE_UP_SECONDS = 10.0  # for the other rank, after one has ended
EXIT_PEER_LOST = 4
REHEARSE = os.environ.get("TP_BENCH_REHEARSE", "")

Row = dict[str, Any]


def row(case: str, value: float, unit: str, goal: float | None = None, *, batch: int = 1, k: int = 0) -> Row:
    return {"case": case, "batch": batch, "K": k, "tp": SIZE, "value": value, "unit": unit, "goal": goal}


def show(one: Row) -> Row:
    """Prints a row and hands it back."""
    goal, value = one["goal"], one["value"]
    verdict = "FAILED" if value != value else "" if goal is None else "met" if value <= goal else "missed"
    words = f"| {one['case']} | {one['batch']} | {one['K']} | {value:.3f} | {one['unit']} | {goal or ''} | {verdict} |"
    print(words, flush=True)
    return one


def memory_in_use() -> float:
    """MiB in use on all cards together."""
    if REHEARSE == "cpu":
        return 0.0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return float(sum(int(one) for one in found if one.isdigit())) if found else float("nan")


def head_commit() -> str:
    """Of the checkout; nothing where it is none."""
    try:
        return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


class Part:
    """Two processes that run a part.

    Args: name, seconds: of the part.
    """

    def __init__(self, name: str, seconds: float) -> None:
        from slipstream.engine.rank_group import make_store

        self.name, self.seconds, self.began, self.killed_at = name, seconds, time.monotonic(), 0.0
        self.rows: list[Row] = []
        store, program = make_store(), str(Path(__file__).with_name("tp_ranks.py"))
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-P", program, str(rank), str(SIZE), str(store), name, str(seconds - 5)],
                stdout=subprocess.PIPE if rank == 0 else None,
                pass_fds=[store],
                text=True,
            )
            for rank in range(SIZE)
        ]
        os.close(store)

    def watch(self) -> None:
        """Ends the part when its time is over, or soon after one of the two has ended badly."""
        bad_since = None
        while any(process.poll() is None for process in self.processes):
            now = time.monotonic()
            if any(process.poll() for process in self.processes):  # an exit code other than 0
                bad_since = bad_since or now
            if now - self.began > self.seconds or (bad_since and now - bad_since > GIVE_UP_SECONDS):
                for process in self.processes:
                    process.kill()
            time.sleep(0.02)

    def run(self) -> list[Row]:
        before = memory_in_use()
        watcher = threading.Thread(target=self.watch, daemon=True)
        watcher.start()
        assert self.processes[0].stdout is not None
        for line in self.processes[0].stdout:
            if not line.startswith("@"):
                print(line, end="", flush=True)
                continue
            message = json.loads(line[1:])
            self.rows += [show(one) for one in message.get("rows", [])]
            if message.get("state") == KILL_ME:
                time.sleep(0.5)
                self.killed_at = time.monotonic()
                self.processes[1].kill()
            if message.get("state") == "lost":
                print(f"rank 0 says: {message['words']}", flush=True)
        codes = [process.wait() for process in self.processes]
        ended = time.monotonic()
        watcher.join()
        if self.killed_at:
            seconds = ended - self.killed_at if codes[0] == EXIT_PEER_LOST else float("nan")
            self.rows.append(show(row("killed-rank", seconds, "s until the other is gone", DEAD_GOAL_SECONDS)))
            held = memory_in_use() - before
            self.rows.append(show(row("killed-rank-memory", held, "MiB more in use than before the part", 64.0)))
        if any(codes) and codes != [EXIT_PEER_LOST, -9]:
            self.rows.append(show(row(f"{self.name}: exit codes {codes}", float("nan"), "failed")))
        self.rows.append(show(row(f"{self.name}-seconds", ended - self.began, "s for this part", self.seconds)))
        return self.rows


def main(parts: list[str]) -> None:
    rows: list[Row] = []
    commit = head_commit()
    print("| case | batch | K | value | unit | goal | |\n| --- | --- | --- | --- | --- | --- | --- |")
    for name in ["engine"] if REHEARSE == "cpu" else parts or list(PARTS):
        rows += Part(name, PARTS[name] * (3 if REHEARSE else 1)).run()
        if "OUT" in os.environ:
            origin = {"commit": commit, "command": f"python -P tests/benchmarks/tp_bench.py {name}"}
            Path(os.environ["OUT"], "tp_bench.json").write_text(json.dumps([one | origin for one in rows], indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
