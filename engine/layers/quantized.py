"""Linear layers with INT4 weights: which layers of a model get them, and how they are read from a checkpoint.

A layer is made as any other and knows nothing of the form of its weight. `quantise` takes the weight away from the
layers that the checkpoint stores as INT4; what they read instead follows from the layer's own shards, so that a rank
reads its own rows or groups. Once read, `layer.weight` is an `Int4Weight`, which every op takes as it takes a tensor.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.layers.attention import Attention
from slipstream.engine.layers.experts import PARTS, RoutedExperts
from slipstream.engine.layers.linear import Linear, MergedColumnParallelLinear
from slipstream.engine.layers.mlp import GatedMLP
from slipstream.engine.quantization import Quantization
from slipstream.engine.tensor_files import all_true
from slipstream.engine.tensor_parallel import Shard
from slipstream.kernels.expert_mlp import ExpertWeights
from slipstream.kernels.int4 import arrange, arrange_stack

_PER_WORD = 8
_SCALE = ".weight_scale"


@dataclass(frozen=True)
class Int4Reader:
    """The weight of one layer in the form on disk, while it is being read.

    Args:
        layer: that it is for.
        names: of the layer's parts in the checkpoint, in stacking order; one, where it is no merged layer.
        packed: [n, k / 8] int32 of this rank.
        scale: [n, k / group] bf16.
        shapes: [parts, 2] int64, [out, in] of each whole part, as the checkpoint says.
        half: as in `Int4Weight`.
        parts: the shards of the dense weight, one a name.
        group: input features that share a scale.
    """

    layer: Linear
    names: tuple[str, ...]
    packed: torch.Tensor
    scale: torch.Tensor
    shapes: torch.Tensor
    half: int
    parts: tuple[Shard, ...]
    group: int

    def on(self, device: torch.device | str) -> "Int4Reader":
        """The same with memory there."""
        packed, scale = (torch.empty_like(x, device=device) for x in (self.packed, self.scale))
        return replace(self, packed=packed, scale=scale)

    def shards(self) -> dict[str, Shard]:
        """Checkpoint name -> where it goes."""
        shards: dict[str, Shard] = {}
        row = 0
        for name, part, shape in zip(self.names, self.parts, self.shapes, strict=True):
            rows = slice(row, row + part.view.shape[0])
            shards |= _shards(name, part, self.packed[rows], self.scale[rows], shape, self.group)
            row = rows.stop
        return shards

    def scales(self) -> list[torch.Tensor]:
        """What `check_scales` looks at."""
        return [self.scale]

    def finish(self) -> None:
        """Puts the weight into the layer, in the order of the kernels. Raises SlipstreamError for one that is none."""
        for name, part, shape in zip(self.names, self.parts, self.shapes.tolist(), strict=True):
            if shape != list(part.shape):
                raise _unreadable(f"{name}.weight_shape is {shape}", f"{list(part.shape)}, as config.json says")
        self.layer.weight = arrange(self.packed, self.scale, self.half)


@dataclass(frozen=True)
class Int4ExpertsReader:
    """The routed experts of one layer in the form on disk, while they are being read.

    Args:
        layer: that they are for.
        name: of the layer in the checkpoint.
        gate_up, down: packed and scale of all experts below each other, as in `ExpertWeights`: [E * 2 I, h / 8] int32
            and [E * 2 I, h / group] bf16, [E * h, I / 8] and [E * h, I / group].
        shapes: [E, 3, 2] int64, [out, in] of each whole part, as the checkpoint says.
        parts: the shards of the dense weights, by name below the layer.
        group: input features that share a scale.
    """

    layer: RoutedExperts
    name: str
    gate_up: tuple[torch.Tensor, torch.Tensor]
    down: tuple[torch.Tensor, torch.Tensor]
    shapes: torch.Tensor
    parts: Mapping[str, Shard]
    group: int

    def on(self, device: torch.device | str) -> "Int4ExpertsReader":
        """The same with memory there."""
        gate_up, down = (
            (torch.empty_like(packed, device=device), torch.empty_like(scale, device=device))
            for packed, scale in (self.gate_up, self.down)
        )
        return replace(self, gate_up=gate_up, down=down)

    def shards(self) -> dict[str, Shard]:
        """Checkpoint name -> where it goes."""
        shards: dict[str, Shard] = {}
        width = self.layer.cut.size
        rows_of = {"gate_proj": (self.gate_up, 2 * width, 0), "up_proj": (self.gate_up, 2 * width, width)}
        rows_of["down_proj"] = (self.down, self.down[0].shape[0] // self.layer.num, 0)
        for expert in range(self.layer.num):
            for place, part in enumerate(PARTS):
                (packed, scale), step, first = rows_of[part]
                dense, start = self.parts[f"{expert}.{part}.weight"], expert * step + first
                rows = slice(start, start + dense.view.shape[0])
                name, shape = f"{self.name}.{expert}.{part}", self.shapes[expert, place]
                shards |= _shards(name, dense, packed[rows], scale[rows], shape, self.group)
        return shards

    def scales(self) -> list[torch.Tensor]:
        """As `Int4Reader.scales`, of all experts together."""
        return [self.gate_up[1], self.down[1]]

    def finish(self) -> None:
        """Puts the weights into the layer, as `Int4Reader.finish`."""
        whole = torch.tensor([list(self.parts[f"0.{part}.weight"].shape) for part in PARTS])  # [3, 2]
        for expert, place in (self.shapes != whole).any(2).nonzero().tolist():
            found, expected = self.shapes[expert, place].tolist(), whole[place].tolist()
            raise _unreadable(
                f"{self.name}.{expert}.{PARTS[place]}.weight_shape is {found}", f"{expected}, as config.json says"
            )
        width, num = self.layer.cut.size, self.layer.num
        try:
            gate_up, down = arrange_stack(*self.gate_up, num, width), arrange_stack(*self.down, num)
        except ValueError as error:
            raise _unreadable(f"{self.name}: {error}", "experts in whole blocks") from error
        self.layer.int4 = ExpertWeights(gate_up, down, num)


Reader = Int4Reader | Int4ExpertsReader


def scales_fit(readers: Iterable[Reader]) -> list[torch.Tensor]:
    """Of each reader's scales, whether all are finite and none is negative: [] bool, on its device.

    The format is symmetric: integers have both signs, and what was largest in a group is the scale. -0.0 is 0.
    """
    ends = [scale.aminmax() for reader in readers for scale in reader.scales() if scale.numel()]
    return [(end.min >= 0) & (end.max < math.inf) for end in ends]  # a NaN is both ends


def check_scales(readers: Sequence[Reader]) -> None:
    """Raises SlipstreamError that names the first weight with a scale that cannot be. Asks the device once."""
    if all_true(scales_fit(readers)):
        return
    for reader in readers:
        for name, shard in reader.shards().items():
            for wrong, what in ((~shard.view.isfinite(), "not finite"), (shard.view < 0, "negative")):
                if name.endswith(_SCALE) and bool(wrong.any()):
                    raise _unreadable(f"{name}: {int(wrong.sum())} scales are {what}", "finite scales of 0 or more")


def quantise(
    model: nn.Module, quantization: Quantization, device: torch.device | str, checkpoint_name: Callable[[str], str]
) -> list[Reader]:
    """Takes the place of the weight from every layer of `model` that has an INT4 weight.

    Args:
        model: made under `unallocated`.
        quantization: what the checkpoint says.
        device: where weights go.
        checkpoint_name: a path in the model -> its name in the checkpoint.

    Returns:
        A reader for each of those layers. All others have their weight's memory now.

    Raises SlipstreamError where a rank would hold a part of a group, or a merged layer is INT4 in some parts only.
    """
    halves = _halves(model)
    readers: list[Reader] = []
    for path, layer in model.named_modules():
        if isinstance(layer, RoutedExperts):
            readers += _experts_reader(layer, checkpoint_name(path), quantization, device)
        if not isinstance(layer, Linear):
            continue
        parts = tuple(layer.shards().values())
        names = tuple(checkpoint_name(name) for name in _names(path, layer))
        if not _covered(names, quantization, "layers that share their input"):
            layer.weight = nn.Parameter(torch.empty_like(layer.weight, device=device))
            continue
        rows, columns = layer.weight.shape
        for name, part in zip(names, parts, strict=True):
            _check_groups(name, part, quantization.group)
        del layer.weight
        readers.append(
            Int4Reader(
                layer=layer,
                names=names,
                packed=torch.empty(rows, columns // _PER_WORD, dtype=torch.int32, device=device),
                scale=torch.empty(rows, columns // quantization.group, dtype=torch.bfloat16, device=device),
                shapes=torch.empty(len(names), 2, dtype=torch.int64),
                half=halves.get(layer, 16),
                parts=parts,
                group=quantization.group,
            )
        )
    return readers


def _covered(names: tuple[str, ...], quantization: Quantization, what: str) -> bool:
    """Whether all of them have INT4 weights. Raises SlipstreamError where only some have."""
    covered = {name: quantization.covers(name) for name in names}
    if len(set(covered.values())) > 1:
        odd = [next(name for name, int4 in covered.items() if int4 is value) for value in (True, False)]
        shown = [name for name in names if len(names) <= len(PARTS) or name in odd]
        raise SlipstreamError(
            f"quantization_config.ignore divides {what}: "
            + ", ".join(f"{name} {'INT4' if covered[name] else 'not'}" for name in shown),
            expected="all of them INT4 or none",
            do="use a checkpoint that ignores all of them or none",
        )
    return covered[names[0]]


def _experts_reader(
    layer: RoutedExperts, name: str, quantization: Quantization, device: torch.device | str
) -> list[Reader]:
    """The reader of a layer's experts, whose dense weights it takes away; none where they are not INT4."""
    names = tuple(f"{name}.{expert}.{part}" for expert in range(layer.num) for part in PARTS)
    if not _covered(names, quantization, "the experts of a layer"):
        return []
    parts, group = layer.shards(), quantization.group
    for part in PARTS:
        _check_groups(f"{name}.0.{part}", parts[f"0.{part}.weight"], group)
    assert layer.gate_up is not None
    assert layer.down is not None

    def stack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = weight.shape[0] * weight.shape[1], weight.shape[2]  # [E, N, K] -> [E * N, K]
        packed = torch.empty(rows, columns // _PER_WORD, dtype=torch.int32, device=device)
        return packed, torch.empty(rows, columns // group, dtype=torch.bfloat16, device=device)

    gate_up, down = stack(layer.gate_up), stack(layer.down)
    layer.gate_up = layer.down = None
    return [
        Int4ExpertsReader(layer, name, gate_up, down, torch.zeros(layer.num, 3, 2, dtype=torch.int64), parts, group)
    ]


def _shards(
    name: str, part: Shard, packed: torch.Tensor, scale: torch.Tensor, shape: torch.Tensor, group: int
) -> dict[str, Shard]:
    """Of one weight: checkpoint name -> where it goes. `part`: the shard of the dense weight."""
    return {
        f"{name}.weight_packed": _narrowed(part, packed, _PER_WORD),
        f"{name}{_SCALE}": _narrowed(part, scale, group),
        f"{name}.weight_shape": Shard(shape, shape.shape, dtypes=(torch.int64, torch.int32)),
    }


def _halves(model: nn.Module) -> dict[Linear, int]:
    """How far apart the rows lie that an op behind the layer takes together, where they fill whole blocks."""
    halves: dict[Linear, int] = {}
    for module in model.modules():
        if isinstance(module, GatedMLP):
            halves[module.gate_up_proj] = module.gate_up_proj.weight.shape[0] // 2
        elif isinstance(module, Attention):
            halves[module.qkv_proj] = module.heads.dim // 2
    return {layer: half for layer, half in halves.items() if half and half % 16 == 0}


def _names(path: str, layer: Linear) -> list[str]:
    """Paths of the layer's parts as a checkpoint has them: a merged layer's lie beside it."""
    if not isinstance(layer, MergedColumnParallelLinear):
        return [path]
    parent = path.rpartition(".")[0]
    return [".".join(filter(None, (parent, part))) for part in layer.shards()]


def _check_groups(name: str, part: Shard, group: int) -> None:
    width = part.view.shape[1]
    start = part.start if part.dim == 1 else 0
    if part.shape[1] % group:
        raise _unreadable(f"{name} has {part.shape[1]} input features", f"a multiple of the group of {group}")
    if start % group or width % group:
        raise SlipstreamError(
            f"{name}: this rank's input features are {start}..{start + width - 1} of {part.shape[1]}",
            expected=f"whole groups of {group}, which share a scale",
            do="use fewer ranks, or a number of ranks that divides the groups evenly",
        )


def _narrowed(dense: Shard, view: torch.Tensor, per: int) -> Shard:
    """The shard of a tensor with one column where the dense weight has `per`, cut in the same place."""
    whole = torch.Size((dense.shape[0], dense.shape[1] // per))
    start = dense.start // per if dense.dim == 1 else dense.start
    return Shard(view, whole, dense.dim, start, dtypes=(view.dtype,))


def _unreadable(found: str, expected: str) -> SlipstreamError:
    return SlipstreamError(
        found,
        expected=expected,
        do="check that config.json belongs to these files, or copy the model directory again",
        fault="F8",
    )
