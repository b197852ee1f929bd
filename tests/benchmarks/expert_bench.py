"""Times the routed experts of one rank of Kimi-K2.5 at TP=8, INT4 group 32, inside CUDA graphs. By hand, on a GPU:

    python tests/benchmarks/expert_bench.py [--only check|kernels|chain] [--ceiling 4.55]

384 experts of 512 x 7168 and 7168 x 256, 8 a row, in 20 layers of weights of their own (24 GB): each layer's are cold.
Rows differ and so do their experts; how many distinct ones a layer has is printed, and shares are of their bytes.
`check` compares bits and errors at these sizes; `kernels` times each alone; `chain` is router and experts, by layers;
`counters` runs the one kernel once, for a profiler, and runs only when asked for.
"""

import argparse
import json
import os
import time
from typing import Any

import torch
from cold_graphs import relative_error, seconds_per_replay

from slipstream.kernels.cuda import expert_launch, expert_stream_launch, route_launch, router
from slipstream.kernels.cuda import experts as on_card
from slipstream.kernels.cuda.expert_launch import AS_PLANNED, Plan
from slipstream.kernels.expert_mlp import ExpertWeights, expert_mlp
from slipstream.kernels.gpu import launch as gpu_launch
from slipstream.kernels.int4 import Int4Weight
from slipstream.kernels.route import Routing

EXPERTS, HIDDEN, WIDTH, LAYERS = 384, 7168, 256, 20
# Kimi's but for the scaling (2.827): layers here have no norm, and what grows by its square is not finite after five.
ROUTING = Routing(8, scaling=0.05)
ROWS = (1, 2, 4, 8, 16)
EXPERT_BYTES = 3 * HIDDEN * WIDTH * (0.5 + 2 / 32)
GATE_UP_SHARE = 2 / 3
ROUTER_BYTES = 2 * EXPERTS * HIDDEN
STEP_LAYERS = 60
STREAM, TWO = Plan(stream=True), Plan(stream=False)


def random_stack(rows: int, columns: int, half: int) -> Int4Weight:
    """Of all experts of a layer."""
    blocks = EXPERTS * rows // 32
    words = torch.empty(blocks, columns // 32, 8, 16, dtype=torch.int32, device="cuda").random_()
    words = words.bitwise_xor_(words << 1)  # random_ leaves the sign 0
    scales = torch.empty(blocks, columns // 32, 8, 4, device="cuda").uniform_(0.5, 1.5) * (columns**-0.5 / 4.6)
    return Int4Weight(words, scales.bfloat16(), EXPERTS * rows, half, cuda=True)


class Model:
    """Weights of all layers, and what was routed for each number of rows."""

    def __init__(self, layers: int = LAYERS) -> None:
        torch.manual_seed(7)
        self.experts = [
            ExpertWeights(random_stack(2 * WIDTH, HIDDEN, WIDTH), random_stack(HIDDEN, WIDTH, 16), EXPERTS)
            for _ in range(layers)
        ]
        self.gates = [torch.randn(EXPERTS, HIDDEN, device="cuda").bfloat16() * HIDDEN**-0.5 for _ in range(layers)]
        self.bias = torch.randn(EXPERTS, device="cuda") * 0.02
        self.x = torch.randn(128, HIDDEN, device="cuda").bfloat16()
        self.shared = torch.randn(128, HIDDEN, device="cuda").bfloat16()
        self.device = torch.cuda.current_device()

    def choices(self, rows: int, tile: int | None = None) -> list[Any]:
        return [router.choose_experts(self.x[:rows], gate, self.bias, ROUTING, tile) for gate in self.gates]

    def distinct(self, choices: list[Any]) -> float:
        return sum(len(one.ids.unique()) for one in choices) / len(choices)

    def route(self, rows: int) -> list[Any]:
        return self.choices(rows)

    def stream(self, rows: int, choices: list[Any]) -> list[torch.Tensor]:
        return [
            expert_stream_launch.experts(
                self.x[:rows], experts, choice.lists, choice.gates, self.shared[:rows], self.device
            )
            for experts, choice in zip(self.experts, choices, strict=True)
        ]

    def gate_up(self, rows: int, choices: list[Any], plan: Plan) -> list[torch.Tensor]:
        made = []
        for experts, choice in zip(self.experts, choices, strict=True):
            assert isinstance(experts.gate_up, Int4Weight)
            made.append(expert_launch.gate_up(self.x[:rows], experts.gate_up, choice.lists, EXPERTS, self.device, plan))
        return made

    def down(self, rows: int, choices: list[Any], inner: list[torch.Tensor], plan: Plan) -> list[torch.Tensor]:
        made = []
        for experts, choice, one in zip(self.experts, choices, inner, strict=True):
            assert isinstance(experts.down, Int4Weight)
            gpu_launch.launched(settles=plan.settled)  # the lists are there long since
            made.append(
                expert_launch.down(
                    one, experts.down, choice.lists, EXPERTS, choice.gates, self.shared[:rows], self.device, plan
                )
            )
        return made

    def chain(
        self, rows: int, plan: Plan, choices: list[Any] | None = None, kept: list[Any] | None = None
    ) -> torch.Tensor:
        """Every layer on the output of the one before. choices: made beforehand; kept: gets those that are made."""
        x = self.x[:rows]
        for i, experts in enumerate(self.experts):
            if choices is None:
                choice = router.choose_experts(x, self.gates[i], self.bias, ROUTING)
            else:
                choice = choices[i]
            if kept is not None:
                kept.append(choice)
            x = on_card.expert_mlp(x, experts, choice.ids, choice.gates, self.shared[:rows], choice.lists, plan)
        return x


def told(name: str, us: float, num_bytes: float, ceiling: float) -> str:
    rate = num_bytes / us / 1e6
    return f"{name} {us:.2f} us {rate:.2f} TB/s {rate / ceiling:.0%}"


def per_layer(work: Any) -> float:
    return seconds_per_replay(work) / LAYERS * 1e6


def check(model: Model, ceiling: float) -> list[dict[str, object]]:
    """Sixteen rows of real sizes against the torch twin; a row alone and beside others; PDL, early lists, cuts."""
    experts, x = model.experts[0], model.x
    choice = model.choices(128)[0]
    whole = on_card.expert_mlp(x, experts, choice.ids, choice.gates, None)
    with torch.enable_grad():
        few = slice(0, 16)
        want = expert_mlp(x[few], experts, choice.ids[few], choice.gates[few], None)
    other = []
    for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 64, 65, 127):
        for more in ({"stream": True}, {"stream": True, "pdl": False}, {"stream": False}, {}):
            found = on_card.expert_mlp(
                x[:rows],
                experts,
                choice.ids[:rows],
                choice.gates[:rows],
                None,
                None,
                Plan(**more),
            )
            if not found.equal(whole[:rows]):
                other.append((rows, more))
    error = relative_error(whole[few], want)
    print(f"check: relative error to the twin {error:.5f}, other bits {other or 'none'}", flush=True)
    for rows in (1, 4, 16):
        kept: list[Any] = []
        chains = [model.chain(rows, STREAM, kept=kept)]
        before = os.environ.get("SLIPSTREAM_PDL", "1")
        os.environ["SLIPSTREAM_PDL"] = "0"  # the router's, too
        chains.append(model.chain(rows, Plan(stream=False, settled=False)))
        os.environ["SLIPSTREAM_PDL"] = before
        chains += [model.chain(rows, STREAM) for _ in range(3)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = model.chain(rows, STREAM)
        for _ in range(3):
            graph.replay()
            chains.append(replayed.clone())
        if not chains[0].isfinite().all():
            raise ValueError(f"{LAYERS} layers of {rows} rows are not finite: nothing below is of Kimi's kind")
        same = [chains[0].equal(one) for one in chains[1:]]
        found = ", ".join(f"{len(one.ids.unique())}" for one in kept[:: LAYERS // 4])
        told_same = all(same) or same
        print(
            f"check: M={rows:<2} two kernels without PDL, thrice again, three replays: {told_same}; experts {found}",
            flush=True,
        )
    return [{"error": error, "other": len(other)}]


def kernels(model: Model, ceiling: float) -> list[dict[str, object]]:
    """Each kernel alone, one launch a layer; `whole` is the one kernel, of entries of 8 rows."""
    results: list[dict[str, object]] = []
    for rows in (*ROWS, 32, 64, 128):
        choices = model.choices(rows)
        distinct = model.distinct(choices)
        inner = model.gate_up(rows, choices, AS_PLANNED)
        size = distinct * EXPERT_BYTES
        few = model.choices(rows, 8)
        times = {
            "route": (per_layer(lambda r=rows: model.route(r)), ROUTER_BYTES),
            "whole": (per_layer(lambda r=rows, c=few: model.stream(r, c)), size),
            "gate_up": (per_layer(lambda r=rows, c=choices: model.gate_up(r, c, AS_PLANNED)), size * GATE_UP_SHARE),
            "down": (
                per_layer(lambda r=rows, c=choices, i=inner: model.down(r, c, i, AS_PLANNED)),
                size * (1 - GATE_UP_SHARE),
            ),
        }
        floor = size / ceiling / 1e6
        words = " | ".join(told(name, us, count, ceiling) for name, (us, count) in times.items())
        print(f"kernels M={rows:<3} {distinct:.1f} experts, floor {floor:.1f} us | {words}", flush=True)
        results.append({"rows": rows, "distinct": distinct, "us": {name: us for name, (us, _) in times.items()}})
    return results


def chain(model: Model, ceiling: float) -> list[dict[str, object]]:
    """Layer by layer: by one kernel and by two, with the router and without; of more than 16 rows by two kernels."""
    results: list[dict[str, object]] = []
    for rows in (*ROWS, 32, 64, 128):
        choices: list[Any] = []
        model.chain(rows, AS_PLANNED, kept=choices)
        distinct = model.distinct(choices)
        size = distinct * EXPERT_BYTES
        floor = size / ceiling / 1e6
        times = {
            f"{name}{suffix}": per_layer(lambda r=rows, p=plan, c=made: model.chain(r, p, c))
            for name, plan in (("one", STREAM), ("two", TWO))
            for suffix, made in ((" with the router", None), ("", choices))
        }
        words = "  ".join(f"{name} {us:.2f}" for name, us in times.items())
        best = min(times["one"], times["two"])
        rate = size / best / 1e6
        print(
            f"chain M={rows:<2} {distinct:.1f} experts, floor {floor:.1f} us | {words}"
            f" | {rate:.2f} TB/s {rate / ceiling:.0%}; {STEP_LAYERS} layers as planned"
            f" {STEP_LAYERS * per_layer(lambda r=rows: model.chain(r, AS_PLANNED)) / 1e3:.2f} ms",
            flush=True,
        )
        results.append({"rows": rows, "distinct": distinct, "us": times})
    model.x[1:16], model.shared[1:16] = model.x[0].clone(), model.shared[0].clone()  # eight experts, two entries each
    alike = {name: per_layer(lambda p=plan: model.chain(16, p)) for name, plan in (("one", STREAM), ("two", TWO))}
    print(f"chain M=16 all rows alike: {alike['one']:.2f} us, two kernels {alike['two']:.2f}", flush=True)
    return results


def counters(model: Model, ceiling: float) -> list[dict[str, object]]:
    """One layer of each of three numbers of rows."""
    for rows in (1, 4, 16):
        model.chain(rows, STREAM)
    return []


PARTS = {"check": check, "kernels": kernels, "chain": chain, "counters": counters}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=tuple(PARTS))
    parser.add_argument("--ceiling", type=float, default=4.55, help="TB/s of a pure read")
    args = parser.parse_args()
    began = time.monotonic()
    device = torch.cuda.current_device()
    expert_launch.load(device)
    expert_stream_launch.load(device)
    route_launch.load(device)
    print(f"{torch.cuda.get_device_name()}: compiled and loaded in {time.monotonic() - began:.1f} s", flush=True)
    model = Model(1 if args.only == "counters" else LAYERS)
    torch.cuda.synchronize()
    print(f"[weights: {time.monotonic() - began:.1f} s since the start]", flush=True)
    results: dict[str, object] = {}
    for name, part in PARTS.items():
        if args.only == name or (args.only is None and name != "counters"):
            results[name] = part(model, args.ceiling)
            print(f"[{name}: {time.monotonic() - began:.1f} s since the start]", flush=True)
    if out := os.environ.get("OUT"):
        with open(os.path.join(out, "experts.json"), "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
