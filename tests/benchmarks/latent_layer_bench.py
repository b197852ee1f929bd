"""A layer of Kimi-K2.5 but its routed experts' products, one rank of TP = 8, on one GPU: where its time goes.

    python tests/benchmarks/latent_layer_bench.py [--only check parts cuts choice] [--layers 10]

Weights of each layer are its own, so that they are cold. `parts`: each kernel alone, one launch a layer, and what the
chain of all of them loses when that one is left out (its outputs are there from before): of the chain in more launches
that a card of sm_80 runs, and of the engine's. `cuts`: other kernels for q_a + kv_a. `choice`: pieces of
gate_experts. Microseconds a layer, inside CUDA graphs.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from cold_graphs import seconds_per_replay
from mla_bench import BLOCK, HEADS, NOPE, RANK, ROPE, SCALE, VALUE
from mla_bench import Bench as Cells

from slipstream.kernels.all_reduce_add import add
from slipstream.kernels.choose_experts import choose_experts
from slipstream.kernels.cuda import gate, gate_launch, route_launch, skinny_gemm
from slipstream.kernels.cuda import launch as product_launch
from slipstream.kernels.cuda.launch import Epilogue, Flow, Override, Variant
from slipstream.kernels.cuda.pack import RowOrder, pack
from slipstream.kernels.gpu.mla_attention import mla_attention
from slipstream.kernels.head_linear import head_linear
from slipstream.kernels.latent_rows import absorb_query, latent_rows, write_latent
from slipstream.kernels.linear_add import linear_add
from slipstream.kernels.norm_gate_up import norm_gate_up
from slipstream.kernels.norm_linear import norm_linear
from slipstream.kernels.rms_norm import rms_norm
from slipstream.kernels.route import Routing
from slipstream.kernels.stream import Norm, Stream

HIDDEN, Q_RANK, EXPERTS, WIDTH = 7168, 1536, 384, 256
ROUTING = Routing(8, scaling=2.827)
READ = 4.55e12
CASES = ((1, 1, 512), (1, 4, 512), (1, 16, 512), (16, 1, 512))
# Bytes of weights (and of what is read beside them) of each part, for its floor.
BYTES = {
    "qkv_a": 2 * (Q_RANK + RANK + ROPE) * HIDDEN,
    "q_b": 2 * HEADS * (NOPE + ROPE) * Q_RANK,
    "absorb": 2 * HEADS * NOPE * RANK,
    "values": 2 * HEADS * VALUE * RANK,
    "o": 2 * HIDDEN * HEADS * VALUE,
    "route": 2 * EXPERTS * HIDDEN,
    "shared up": 4 * WIDTH * HIDDEN,
    "shared down": 2 * WIDTH * HIDDEN,
    "gate": 2 * EXPERTS * HIDDEN + 6 * WIDTH * HIDDEN,
}
State = dict[str, Any]
Part = Callable[[State, int], None]


class Bench:
    def __init__(self, layers: int) -> None:
        torch.manual_seed(3)
        self.layers, self.cells = layers, Cells()

        def randn(*shape: int, scale: float | None = None) -> torch.Tensor:
            return (torch.randn(*shape, device="cuda") * (shape[-1] ** -0.5 if scale is None else scale)).bfloat16()

        def norm(width: int) -> Norm:
            return Norm((0.5 + torch.rand(width, device="cuda")).bfloat16(), 1e-6)

        every = range(layers)
        self.qkv_a = [pack(randn(Q_RANK + RANK + ROPE, HIDDEN)) for _ in every]
        self.q_b = [pack(randn(HEADS * (NOPE + ROPE), Q_RANK)) for _ in every]
        self.key_up = [randn(HEADS, RANK, NOPE) for _ in every]
        self.value_up = [randn(HEADS, VALUE, RANK) for _ in every]
        self.o = [pack(randn(HIDDEN, HEADS * VALUE)) for _ in every]
        self.router = [randn(EXPERTS, HIDDEN) for _ in every]
        self.packed_router = [pack(one) for one in self.router]
        self.up = [pack(randn(2 * WIDTH, HIDDEN), RowOrder.GATE_UP) for _ in every]
        self.down = [pack(randn(HIDDEN, WIDTH)) for _ in every]
        self.bias = torch.randn(EXPERTS, device="cuda") * 0.02
        self.norms = {width: [norm(width) for _ in every] for width in (HIDDEN, Q_RANK, RANK)}
        self.cut: dict[str, Override] = {}  # of q_a + kv_a and q_b
        self.x = randn(128, HIDDEN, scale=1.0)
        self.angles = randn(2, 128, ROPE, scale=1.0)

    def state(self, batch: int, rows: int, context: int) -> State:
        count = batch * rows
        plans = [self.cells.rows(batch, rows, context, layer) for layer in range(self.layers)]
        return {
            "stream": add(torch.zeros_like(self.x[:count]), Stream(self.x[:count])),  # with its sums of squares
            "plans": plans,
            "shape": (batch, rows),
            "angles": self.angles[:, :count],
        }

    # ---- parts; each reads and writes the state ----

    def p_qkv_a(self, s: State, i: int) -> None:
        how = self.cut.get("qkv_a", Override())
        s["made"] = skinny_gemm.norm_linear(s["stream"], self.norms[HIDDEN][i], self.qkv_a[i], override=how)

    def p_copy(self, s: State, i: int) -> None:
        s["low"] = s["made"][:, :Q_RANK].contiguous()

    def p_rows(self, s: State, i: int) -> None:
        cache, index = self.cells.cache, s["plans"][i].write_index
        s["low"] = latent_rows(s["made"], self.norms[Q_RANK][i], self.norms[RANK][i], *s["angles"], cache, index)

    def p_q_b_of_normed(self, s: State, i: int) -> None:
        how = self.cut.get("q_b", Override())
        made = skinny_gemm.norm_linear(Stream(s["low"]), None, self.q_b[i], override=how)
        s["q"] = made.view(-1, HEADS, NOPE + ROPE)

    def p_q_b(self, s: State, i: int) -> None:
        s["q"] = norm_linear(Stream(s["low"]), self.norms[Q_RANK][i], self.q_b[i]).view(-1, HEADS, NOPE + ROPE)

    def p_write(self, s: State, i: int) -> None:
        index = s["plans"][i].write_index
        write_latent(s["made"][:, Q_RANK:], self.norms[RANK][i], *s["angles"], self.cells.cache, index)

    def p_absorb(self, s: State, i: int) -> None:
        s["absorbed"] = absorb_query(s["q"], self.key_up[i], *s["angles"]).view(*s["shape"], HEADS, RANK + ROPE)

    def p_attention(self, s: State, i: int) -> None:
        s["mixed"] = mla_attention(s["absorbed"], self.cells.cache, s["plans"][i], SCALE, RANK)

    def p_values(self, s: State, i: int) -> None:
        s["values"] = head_linear(s["mixed"].flatten(0, 1), self.value_up[i]).flatten(1)

    def p_o(self, s: State, i: int) -> None:
        s["behind"] = linear_add(s["values"], self.o[i], s["stream"])

    def p_norm(self, s: State, i: int) -> None:
        s["normed"] = rms_norm(s["behind"].rows, self.norms[HIDDEN][i].weight, 1e-6)

    def p_route(self, s: State, i: int) -> None:
        s["choice"] = choose_experts(s["normed"], self.router[i], self.bias, ROUTING)

    def p_up(self, s: State, i: int) -> None:
        s["inner"] = norm_gate_up(s["behind"], self.norms[HIDDEN][i], self.up[i])

    def p_down(self, s: State, i: int) -> None:
        s["shared"] = norm_linear(Stream(s["inner"]), None, self.down[i])

    def p_gate(self, s: State, i: int) -> None:
        made = gate.gate_experts(
            s["behind"], self.norms[HIDDEN][i], self.packed_router[i], self.bias, ROUTING, (self.up[i], self.down[i])
        )
        s["normed"], s["choice"], s["shared"] = made

    def p_add(self, s: State, i: int) -> None:
        s["stream"] = add(s["shared"], s["behind"])

    def us(self, s: State, parts: list[Part]) -> float:
        def work() -> None:
            stream = s["stream"]
            for i in range(self.layers):
                for part in parts:
                    part(s, i)
            s["stream"] = stream

        return seconds_per_replay(work) * 1e6 / self.layers


def now(bench: Bench) -> list[tuple[str, Part]]:
    """As the engine runs a layer."""
    return [
        ("qkv_a", bench.p_qkv_a), ("rows", bench.p_rows), ("q_b", bench.p_q_b_of_normed), ("absorb", bench.p_absorb),
        ("attention", bench.p_attention), ("values", bench.p_values), ("o", bench.p_o), ("gate", bench.p_gate),
        ("add", bench.p_add),
    ]  # fmt: skip


def parts(bench: Bench) -> None:
    before: list[tuple[str, Part]] = [
        ("qkv_a", bench.p_qkv_a), ("copy", bench.p_copy), ("q_b", bench.p_q_b), ("write", bench.p_write),
        ("absorb", bench.p_absorb), ("attention", bench.p_attention), ("values", bench.p_values), ("o", bench.p_o),
        ("norm", bench.p_norm), ("route", bench.p_route), ("shared up", bench.p_up), ("shared down", bench.p_down),
        ("add", bench.p_add),
    ]  # fmt: skip
    for title, chain in (("now", now(bench)), ("before", before)):
        table: dict[str, list[str]] = {name: [] for name, _ in chain}
        sums = []
        for case in CASES:
            s = bench.state(*case)
            whole = bench.us(s, [part for _, part in chain])
            sums.append(whole)
            for name, part in chain:
                alone = bench.us(s, [part])
                without = bench.us(s, [other for other_name, other in chain if other_name != name])
                table[name].append(f"{alone:6.2f} {whole - without:6.2f}")
        print(f"{title}: {'':8} floor | alone, in the chain: " + " | ".join("{}/{}/{}".format(*c) for c in CASES))
        for name, row in table.items():
            print(f"{name:12} {BYTES.get(name, 0) / READ * 1e6:6.2f} | " + " | ".join(row))
        print(f"{'chain':12} {'':6} | " + " | ".join(f"{us:13.2f}" for us in sums), flush=True)


def cuts(bench: Bench) -> None:
    """q_a + kv_a by other kernels: in the chain (less the chain without it), and alone; its rings, how it lets go."""
    bulk = [Variant(*one, bulk=True) for one in ((1, 1, 1, 8, 8), (1, 2, 1, 4, 8))]
    few = [Variant(*one) for one in ((1, 1, 4, 2, 8), (1, 1, 4, 4, 12))]
    many = [Variant(2, 2, 4, 2, 12), Variant(2, 2, 4, 1, 8)]
    chain, usual, turns = [part for _, part in now(bench)], product_launch.ONE_FLOW, product_launch._take_turn
    for rows, variants in ((1, bulk + few), (4, bulk + few), (16, many)):
        s = bench.state(1, rows, 512)
        bench.us(s, chain)  # what parts read is there
        rest = bench.us(s, chain[1:])

        def tell(name: str, s: State = s, rest: float = rest) -> None:
            print(f"  {name:20} {bench.us(s, chain) - rest:6.2f} {bench.us(s, chain[:1]):6.2f}", flush=True)

        tell(f"{rows} rows, as planned")
        for variant in variants:
            bench.cut = {"qkv_a": Override(variant=variant, wide=False)}
            tell(variant.name(Epilogue.STORE, norm=True))
        bench.cut = {}
        if rows > 8:
            continue
        for name in ("large_bytes", "bulk_bytes"):
            product_launch._take_turn = lambda epilogue, card, name=name: getattr(card, name)
            for left in (0, 16, 32, 64):
                product_launch.ONE_FLOW = Flow(left)
                tell(f"{name} {left}")
        product_launch.ONE_FLOW, product_launch._take_turn = usual, turns


def choice(bench: Bench) -> None:
    """gate_experts by pieces."""
    print("gate_experts  rows: all, no shared expert, no norm, no PDL | first kernel alone | second alone")
    for rows in (1, 4, 8, 16, 32, 64):
        s = bench.state(1, rows, 512)
        s["behind"] = linear_add(bench.x[:rows, : HEADS * VALUE].contiguous(), bench.o[0], s["stream"])
        told = []
        for norm, shared, pdl in ((True, True, None), (True, False, None), (False, True, None), (True, True, False)):

            def part(s: State, i: int, norm: bool = norm, shared: bool = shared, pdl: bool | None = pdl) -> None:
                s["kept"] = gate.gate_experts(
                    s["behind"], bench.norms[HIDDEN][i] if norm else None, bench.packed_router[i], bench.bias, ROUTING,
                    (bench.up[i], bench.down[i]) if shared else None, pdl=pdl,
                )  # fmt: skip

            told.append(bench.us(s, [part]))
        both = gate_launch.launch_gate, gate_launch.launch_choose
        alone = []
        for at in (0, 1):
            gate_launch.launch_gate, gate_launch.launch_choose = [
                one if i == at else lambda *_: None for i, one in enumerate(both)
            ]
            alone.append(bench.us(s, [bench.p_gate]))
        gate_launch.launch_gate, gate_launch.launch_choose = both
        print(
            f"{rows:4}: " + " ".join(f"{us:6.2f}" for us in told) + f" | {alone[0]:6.2f} | {alone[1]:6.2f}", flush=True
        )


def check(bench: Bench) -> None:
    """Both ways to the same: normed rows and ids equal, the shared expert within its rounding."""
    for rows in (1, 4, 16, 128):
        s = bench.state(1, 1, 512)
        x = bench.x[:rows]
        s["behind"] = linear_add(x[:, : HEADS * VALUE].contiguous(), bench.o[0], Stream(x))
        for part in (bench.p_norm, bench.p_route, bench.p_up, bench.p_down):
            part(s, 0)
        old = s["normed"], s["choice"], s["shared"]
        for _ in range(3):
            bench.p_gate(s, 0)
        new = s["normed"], s["choice"], s["shared"]
        same_rows = float((old[0] != new[0]).float().mean())
        ids = int((old[1].ids != new[1].ids).any(1).sum())
        off = float((old[2].float() - new[2].float()).norm() / old[2].float().norm())
        print(f"check {rows:3} rows: {same_rows:.6f} of x differ, {ids} rows choose otherwise, shared off {off:.5f}")


PARTS = {"check": check, "parts": parts, "cuts": cuts, "choice": choice}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--layers", type=int, default=10)
    args = parser.parse_args()
    began = time.monotonic()
    device = torch.cuda.current_device()
    for module in (product_launch, route_launch, gate_launch):
        module.load(device)
    bench = Bench(args.layers)
    torch.cuda.synchronize()
    print(f"[compiled, loaded, weights there: {time.monotonic() - began:.1f} s; blocks of {BLOCK}]", flush=True)
    for name in args.only:
        PARTS[name](bench)
        print(f"[{name}: {time.monotonic() - began:.1f} s]", flush=True)


if __name__ == "__main__":
    main()
