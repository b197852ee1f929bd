"""The target as transformers itself runs it: what parity compares with.

transformers loads nearly all targets by itself. Not Kimi-K2.5: its text model, DeepSeek-V3 to transformers, lies behind
a wrapper, and its routed experts are INT4, which only a further library would unpack. Here they are unpacked apart from
the engine's loader, by the format alone.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from slipstream.engine.deepseek_config import DEEPSEEK_ARCHITECTURES, WRAPPER
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.tensor_files import tensor_files

_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj")


def reference_model(model_dir: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model, on the CPU, in eval mode, with the attention "sdpa".

    Args:
        model_dir: Hugging Face directory.
        dtype: of its parameters.

    Raises SlipstreamError where a DeepSeek-V3 or Kimi lacks tensors or has others than transformers' class.
    """
    raw = json.loads((model_dir / "config.json").read_text())
    if (raw.get("architectures") or [""])[0] not in DEEPSEEK_ARCHITECTURES:
        model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
        return cast(PreTrainedModel, model.eval())
    wrapped = raw["architectures"][0] == WRAPPER
    text = raw["text_config"] if wrapped else raw
    quantization = text.get("quantization_config") or raw.get("quantization_config")
    own = ("quantization_config", "model_type", "architectures", "auto_map")
    config = DeepseekV3Config.from_dict({key: value for key, value in text.items() if key not in own})
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        made: Any = DeepseekV3ForCausalLM(config)
    made.model.rotary_emb = DeepseekV3RotaryEmbedding(config)  # its frequencies are in no file
    tensors = dict(_named(model_dir, "language_model." if wrapped else "", quantization is not None))
    tensors = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(dtype)
        for name, tensor in _stacked(tensors)
    }
    wanted = set(made.state_dict())
    further = config.num_hidden_layers, config.num_hidden_layers + (text.get("num_nextn_predict_layers") or 0)
    left = [name for name in tensors if name not in wanted and _layer(name) not in range(*further)]
    missing = sorted(wanted - set(tensors))
    if missing or left:
        raise SlipstreamError(
            f"{model_dir} and transformers' DeepSeek-V3 differ: missing {missing[:5]}, left over {sorted(left)[:5]}",
            expected="the tensors of its class, under the names of published checkpoints",
            do="copy or download the model directory again",
        )
    made.load_state_dict({name: tensors[name] for name in wanted}, assign=True)
    return cast(PreTrainedModel, made.eval())


def _named(model_dir: Path, prefix: str, packed: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the text model by transformers' names; an INT4 weight is unpacked to fp32."""
    files = {name: path for path, names in tensor_files(model_dir).items() for name in names}

    def read(name: str) -> torch.Tensor:
        with safe_open(files[name], framework="pt") as file:
            return cast(torch.Tensor, file.get_tensor(name))

    for name in files:
        if not name.startswith(prefix):
            continue  # vision
        stem, _, last = name.removeprefix(prefix).rpartition(".")
        if not packed or last not in ("weight_packed", "weight_scale", "weight_shape"):
            yield name.removeprefix(prefix), read(name)
        elif last == "weight_packed":
            scale = read(name.removesuffix(last) + "weight_scale")
            yield f"{stem}.weight", unpacked(read(name), scale)


def unpacked(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """packed int32 [out, in / 8], the lowest nibble first, value + 8; scale [out, in / group] -> fp32 [out, in]."""
    nibbles = packed[..., None] >> torch.arange(0, 32, 4) & 15  # [out, in / 8, 8]
    values = (nibbles - 8).flatten(1).float()  # [out, in]
    return values * scale.float().repeat_interleave(values.shape[1] // scale.shape[1], dim=1)


def _stacked(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The experts' three weights as transformers keeps them: gate and up of all in one tensor, down in another."""
    experts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = _EXPERT.fullmatch(name.removesuffix(".weight"))
        if found is None:
            yield name, tensor
        else:
            experts.setdefault(found[1], {})[int(found[2]), found[3]] = tensor
    for stem, parts in experts.items():
        numbers = sorted({number for number, _ in parts})
        both = [torch.cat((parts[n, "gate"], parts[n, "up"])) for n in numbers]  # [2 width, h] each
        yield f"{stem}.gate_up_proj", torch.stack(both)
        yield f"{stem}.down_proj", torch.stack([parts[n, "down"] for n in numbers])


def _layer(name: str) -> int:
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1
