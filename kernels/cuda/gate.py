"""In front of routed experts on a card: norm, router and shared expert in two launches (gate.cuh, choose.cuh)."""

import torch

from slipstream.kernels.choose_experts import Choice
from slipstream.kernels.cuda import gate_launch
from slipstream.kernels.cuda.gate_launch import MAX_ROWS, ChooseParams, GateParams
from slipstream.kernels.cuda.pack import PackedWeight, RowOrder
from slipstream.kernels.expert_lists import ExpertLists, empty_lists
from slipstream.kernels.route import Routing
from slipstream.kernels.stream import Norm, Stream
from slipstream.kernels.weight import Weight


def gate_experts(
    stream: Stream,
    norm: Norm | None,
    router: PackedWeight,
    bias: torch.Tensor,
    routing: Routing,
    shared: tuple[Weight, Weight] | None = None,
    tile: int | None = None,
    pdl: bool | None = None,
) -> tuple[torch.Tensor, Choice, torch.Tensor | None]:
    """The normed rows, the experts of every row, and what the shared expert adds.

    Args:
        stream: M rows of width h, bf16.
        norm: through which they are read; None: as they are.
        router: [E, h], its rows as they are.
        bias: [E] fp32.
        routing: how experts are chosen.
        shared: gate and up [2 I, h], in pairs, and down [h, I] of the shared expert, packed; None: there is none.
        tile: rows of an entry of the lists, at most; None: by the number of rows.

    Returns:
        (x [M, h], choice, partial sum [M, h] or None). Lists are made where one launch takes all rows.
    """
    x, num_experts = stream.rows, router.shape[0]
    rows, width = x.shape
    packed = _packed(shared, width)
    _check(stream, norm, router, bias)
    device = x.get_device()
    normed = x if norm is None else torch.empty(rows, width, dtype=x.dtype, device=x.device)
    inner_width = 0 if packed is None else packed[1].shape[1]
    inner = torch.empty(rows, inner_width, dtype=x.dtype, device=x.device)
    out = None if packed is None else torch.empty(rows, packed[1].shape[0], dtype=x.dtype, device=x.device)
    logits = torch.empty(rows, num_experts, dtype=torch.float32, device=x.device)
    ids = torch.empty(rows, routing.per_token, dtype=torch.int32, device=x.device)
    gates = torch.empty(rows, routing.per_token, dtype=torch.float32, device=x.device)
    lists = empty_lists(ids, num_experts, tile) if 0 < rows <= MAX_ROWS else None
    for start in range(0, rows, MAX_ROWS):
        cut = slice(start, min(rows, start + MAX_ROWS))
        made = GateParams(weight=router.data.data_ptr(), x=x[cut].data_ptr(), x_stride=x.stride(0))
        made.M, made.K, made.E, made.I = cut.stop - start, width, num_experts, inner_width
        made.logits = logits[cut].data_ptr()
        if norm is not None:
            made.norm_weight, made.eps, made.normed = norm.weight.data_ptr(), norm.eps, normed[cut].data_ptr()
            if stream.sumsq is not None:
                made.sumsq_in, made.num_sumsq = stream.sumsq[cut].data_ptr(), stream.sumsq.shape[1]
        choose = ChooseParams(logits=logits[cut].data_ptr(), bias=bias.data_ptr(), M=made.M, E=num_experts, chooses=1)
        if packed is not None and out is not None:
            made.shared_weight, made.inner = packed[0].data.data_ptr(), inner[cut].data_ptr()
            choose.weight, choose.x, choose.out = packed[1].data.data_ptr(), made.inner, out[cut].data_ptr()
            choose.N, choose.chunks = packed[1].shape[0], inner_width // 32
        gate_launch.launch_gate(made, device, pdl)
        _choose(choose, routing, ids[cut], gates[cut], lists, device, pdl)
    return normed, Choice(ids, gates, lists), out


def route(logits: torch.Tensor, bias: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """As `slipstream.kernels.route.route`."""
    rows, num_experts = logits.shape
    ids = torch.empty(rows, routing.per_token, dtype=torch.int32, device=logits.device)
    gates = torch.empty(rows, routing.per_token, dtype=torch.float32, device=logits.device)
    logits = logits.contiguous()
    for start in range(0, rows, MAX_ROWS):
        cut = slice(start, min(rows, start + MAX_ROWS))
        made = ChooseParams(logits=logits[cut].data_ptr(), bias=bias.data_ptr(), E=num_experts, chooses=1)
        made.M = cut.stop - start
        _choose(made, routing, ids[cut], gates[cut], None, logits.get_device())
    return ids, gates


def expert_lists(ids: torch.Tensor, num_experts: int, tile: int | None = None) -> ExpertLists:
    """The lists of ids [M, k] int32 that are chosen already, 1 to MAX_ROWS rows."""
    ids = ids.contiguous()
    lists = empty_lists(ids, num_experts, tile)
    made = ChooseParams(M=len(ids), E=num_experts)
    _choose(made, Routing(ids.shape[1]), ids, None, lists, ids.get_device())
    return lists


def _choose(
    params: ChooseParams,
    routing: Routing,
    ids: torch.Tensor,
    gates: torch.Tensor | None,
    lists: ExpertLists | None,
    device: int,
    pdl: bool | None = None,
) -> None:
    params.ids, params.gates = ids.data_ptr(), None if gates is None else gates.data_ptr()
    params.per_token, params.groups, params.groups_kept = routing.per_token, routing.groups, routing.groups_kept
    params.normalise, params.scaling = int(routing.normalise), routing.scaling
    if lists is not None:
        params.count, params.entries = lists.count.data_ptr(), lists.entries.data_ptr()
        params.order, params.place = lists.order.data_ptr(), lists.place.data_ptr()
        params.tile_bits, params.lists = lists.tile.bit_length() - 1, 1
    gate_launch.launch_choose(params, device, pdl)


def _packed(shared: tuple[Weight, Weight] | None, width: int) -> tuple[PackedWeight, PackedWeight] | None:
    """The shared expert's weights, if the kernels take them; a ValueError else."""
    if shared is None:
        return None
    up, down = shared
    if (
        isinstance(up, PackedWeight)
        and isinstance(down, PackedWeight)
        and up.order is RowOrder.GATE_UP
        and down.order is RowOrder.ROWS
        and up.shape == (2 * down.shape[1], width)
    ):
        return up, down
    told = ", ".join(f"{type(one).__name__} {tuple(one.shape)}" for one in shared)
    raise ValueError(
        f"a shared expert of {told}: expected packed weights, gate and up of [2 I, {width}] in pairs, down of [h, I]"
    )


def _check(stream: Stream, norm: Norm | None, router: PackedWeight, bias: torch.Tensor) -> None:
    x = stream.rows
    width = x.shape[1]
    fits = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    if x.dtype != torch.bfloat16 or not fits or router.shape[1] != width:
        raise ValueError(
            f"rows {x.dtype} {tuple(x.shape)}, strides {x.stride()}, for a router {router.shape}: expected bfloat16 of "
            f"width {router.shape[1]}, each row at a multiple of 16 bytes"
        )
    if router.order is not RowOrder.ROWS or bias.dtype != torch.float32 or not bias.is_contiguous():
        raise ValueError(f"a router in order {router.order.value}, bias {bias.dtype}: expected rows and fp32")
    if norm is not None and (norm.weight.shape != (width,) or norm.weight.dtype != torch.bfloat16):
        raise ValueError(f"norm weight {norm.weight.dtype} {tuple(norm.weight.shape)}: expected bfloat16 [{width}]")
