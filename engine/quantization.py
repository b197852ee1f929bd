"""What config.json says of INT4 weights (`compressed-tensors`, "pack-quantized"), and which layers have them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.engine.errors import SlipstreamError

_GROUPS = (32, 128)
# Key -> the values that this engine can run; a key that is not listed is refused, whatever it says. None: any value,
# since it records how the integers were found, or when, and not what they mean.
_TOP: Mapping[str, tuple[Any, ...] | None] = {
    "quant_method": ("compressed-tensors",),
    "format": ("pack-quantized",),
    "quantization_status": ("compressed",),
    "kv_cache_scheme": (None,),
    "sparsity_config": (None, {}),
    "moe_sparsity_config": (None, {}),
    "transform_config": (None, {}),
    "global_compression_ratio": None,
    "version": None,
    "config_groups": None,  # read below
    "ignore": None,  # read below
}
_GROUP: Mapping[str, tuple[Any, ...] | None] = {
    "targets": (["Linear"],),
    "format": ("pack-quantized", None),
    "input_activations": (None,),
    "output_activations": (None,),
    "weights": None,  # read below
}
_WEIGHTS: Mapping[str, tuple[Any, ...] | None] = {
    "num_bits": (4,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("group",),
    "group_size": _GROUPS,
    "dynamic": (False,),
    "actorder": (None, "weight", "static"),  # the columns are in their own order all the same
    "block_structure": (None,),
    "scale_dtype": None,  # the loader looks at the scales themselves
    "zp_dtype": None,
    "observer": None,
    "observer_kwargs": None,
}
_NEEDED = ("num_bits", "type", "symmetric", "strategy", "group_size")


@dataclass(frozen=True)
class Quantization:
    """INT4 weights of every linear layer but those ignored.

    Args:
        group: input features that share a scale.
        ignore: names of layers as the checkpoint spells them; "re:" and an expression that matches from the start.
    """

    group: int
    ignore: tuple[str, ...] = ()

    def covers(self, layer: str) -> bool:
        """Whether the layer of this checkpoint name (as `model.layers.0.mlp.up_proj`) has INT4 weights."""
        return not any(
            re.match(rule.removeprefix("re:"), layer) if rule.startswith("re:") else rule == layer
            for rule in self.ignore
        )


def read_quantization(path: Path, raw: Mapping[str, Any]) -> Quantization | None:
    """The `quantization_config` of a config.json, None where there is none.

    Args:
        path: of the file, for errors.
        raw: the whole file.

    Raises SlipstreamError that names the first key whose value this engine has no layers for.
    """
    config = raw.get("quantization_config")
    if config is None:
        return None
    where = "quantization_config"
    _check(path, where, config, _TOP, ("quant_method", "format", "config_groups"))
    groups = config["config_groups"]
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _refused(path, f"{where}.config_groups", groups, "one group of layers")
    name, group = next(iter(groups.items()))
    where = f"{where}.config_groups.{name}"
    _check(path, where, group, _GROUP, ("targets", "weights"))
    _check(path, f"{where}.weights", group["weights"], _WEIGHTS, _NEEDED)
    return Quantization(group["weights"]["group_size"], _rules(path, config.get("ignore")))


def _rules(path: Path, ignore: Any) -> tuple[str, ...]:
    key = "quantization_config.ignore"
    if ignore is None:
        return ()
    if not isinstance(ignore, list) or not all(isinstance(rule, str) for rule in ignore):
        raise _refused(path, key, ignore, "a list of names and re: expressions")
    for rule in ignore:
        try:
            re.compile(rule.removeprefix("re:") if rule.startswith("re:") else "")
        except re.error as error:
            raise _refused(path, key, rule, f"an expression that Python reads ({error})") from error
    return tuple(ignore)


def _check(
    path: Path, where: str, found: Any, known: Mapping[str, tuple[Any, ...] | None], needed: tuple[str, ...]
) -> None:
    if not isinstance(found, dict):
        raise _refused(path, where, found, "an object")
    for key in needed:
        if key not in found:
            raise SlipstreamError(f"{path} says {where} without {key}", expected=f"all of {', '.join(needed)}", do=_DO)
    for key, value in found.items():
        if key not in known:
            raise _refused(path, f"{where}.{key}", value, f"no other keys than {', '.join(known)}")
        values = known[key]
        if values is not None and not any(value == v and type(value) is type(v) for v in values):
            raise _refused(path, f"{where}.{key}", value, " or ".join(repr(v) for v in values))


_DO = (
    "use a checkpoint of another form: INT4 weights, symmetric, in groups of 32 or 128, pack-quantized; "
    "or one that is not quantized"
)


def _refused(path: Path, key: str, value: Any, expected: str) -> SlipstreamError:
    return SlipstreamError(f"{path} says {key} = {value!r}", expected=expected, do=_DO)
