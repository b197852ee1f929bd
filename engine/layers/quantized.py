"""Linear layers with INT4 weights: which layers of a model get them, and how they are read from a checkpoint.

A layer is made as any other and knows nothing of the form of its weight. `quantise` takes the weight away from the
layers that the checkpoint stores as INT4; what they read instead follows from the layer's own shards, so that a rank
reads its own rows or groups. Once read, `layer.weight` is an `Int4Weight`, which every op takes as it takes a tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.layers.attention import Attention
from slipstream.engine.layers.linear import Linear, MergedColumnParallelLinear
from slipstream.engine.layers.mlp import GatedMLP
from slipstream.engine.quantization import Quantization
from slipstream.engine.tensor_parallel import Shard
from slipstream.kernels.int4 import arrange

_PER_WORD = 8


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

    def shards(self) -> dict[str, Shard]:
        """Checkpoint name -> where it goes."""
        shards: dict[str, Shard] = {}
        row = 0
        for name, part, shape in zip(self.names, self.parts, self.shapes, strict=True):
            rows = slice(row, row + part.view.shape[0])
            shards[f"{name}.weight_packed"] = _narrowed(part, self.packed[rows], _PER_WORD)
            shards[f"{name}.weight_scale"] = _narrowed(part, self.scale[rows], self.group)
            shards[f"{name}.weight_shape"] = Shard(shape, shape.shape, dtypes=(torch.int64, torch.int32))
            row = rows.stop
        return shards

    def finish(self) -> None:
        """Puts the weight into the layer, in the order of the kernels. Raises SlipstreamError for one that is none."""
        for name, part, shape in zip(self.names, self.parts, self.shapes.tolist(), strict=True):
            if shape != list(part.shape):
                raise _unreadable(f"{name}.weight_shape is {shape}", f"{list(part.shape)}, as config.json says")
        try:
            self.layer.weight = arrange(self.packed, self.scale, self.half)
        except ValueError as error:
            raise _unreadable(f"{', '.join(self.names)}: {error}", "finite scales") from error


def quantise(
    model: nn.Module, quantization: Quantization, device: torch.device | str, checkpoint_name: Callable[[str], str]
) -> list[Int4Reader]:
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
    readers = []
    for path, layer in model.named_modules():
        if not isinstance(layer, Linear):
            continue
        parts = tuple(layer.shards().values())
        names = tuple(checkpoint_name(name) for name in _names(path, layer))
        covered = {name: quantization.covers(name) for name in names}
        if len(set(covered.values())) > 1:
            raise SlipstreamError(
                "quantization_config.ignore divides layers that share their input: "
                + ", ".join(f"{name} {'INT4' if int4 else 'not'}" for name, int4 in covered.items()),
                expected="all of them INT4 or none",
                do="use a checkpoint that ignores all of them or none",
            )
        if not covered[names[0]]:
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
