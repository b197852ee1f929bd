"""What a target is: the values of its config.json that change its parameters or its outputs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.engine.config_values import check_rope_values, is_int, unsupported, wrong
from slipstream.engine.deepseek_config import (
    DEEPSEEK_ARCHITECTURES,
    WRAPPER,
    Experts,
    Latent,
    further_layers,
    language_part,
    read_deepseek,
)
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import read_json
from slipstream.engine.quantization import Quantization, read_quantization

# Values that the layers assume. A checkpoint that says otherwise is refused, never run with the key ignored.
_ASSUMED: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1.0, None),
}


@dataclass(frozen=True)
class DenseForm:
    """What an architecture is beside the plain dense decoder.

    Args:
        qk_norm: every query and key head passes an RMSNorm before the rotation.
        sliding_window: the key of that name is in force, in every layer.
        assumed: as `_ASSUMED`, for this architecture.
        needed: keys for which its absent value is not the plain decoder's.
    """

    qk_norm: bool = False
    sliding_window: bool = False
    assumed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    needed: tuple[str, ...] = ()


_DENSE_FORMS: Mapping[str, DenseForm] = {
    "LlamaForCausalLM": DenseForm(assumed={"sliding_window": (None,)}),
    "MistralForCausalLM": DenseForm(
        sliding_window=True, needed=("num_key_value_heads", "max_position_embeddings", "sliding_window")
    ),
    # Its sliding_window is in force with use_sliding_window only, and then in some of the layers.
    "Qwen3ForCausalLM": DenseForm(
        qk_norm=True,
        assumed={"use_sliding_window": (False, None)},
        needed=("num_key_value_heads", "max_position_embeddings", "head_dim"),
    ),
}
# What engine/loader.py can run; named here so that a plan can tell without torch.
ARCHITECTURES = (*_DENSE_FORMS, *DEEPSEEK_ARCHITECTURES)
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "original_max_position_embeddings",
)
_NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one target.

    Args:
        architecture: class name in config.json; names the model file that runs it.
        rope_scaling: `rope_scaling` / `rope_parameters` of the checkpoint, or None.
        max_position: length of the rope table in tokens.
        eos_token_ids: every id that ends an answer, from config.json and generation_config.json.
        dtype: name of the dtype in which the weights are stored.
        quantization: which layers have INT4 weights; None: none.
        qk_norm: every query and key head passes an RMSNorm before the rotation.
        sliding_window: tokens that a position sees, itself included; None: all before it.
        latent: of latent attention, None: of grouped KV heads. With it `head_dim` is the width of a key.
        experts: the mixture of experts; None: every layer has a plain block.
        further_layers: of the checkpoint, behind the last one; they predict further tokens and are not run.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_position: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    quantization: Quantization | None = None
    qk_norm: bool = False
    sliding_window: int | None = None
    latent: Latent | None = None
    experts: Experts | None = None
    further_layers: int = 0

    @classmethod
    def from_dir(cls, directory: str | Path) -> "ModelConfig":
        """Reads a Hugging Face directory. Raises SlipstreamError for a missing or unsupported value."""
        directory = Path(directory)
        if not (directory / "config.json").is_file():
            raise SlipstreamError(
                f"{directory / 'config.json'} does not exist",
                expected="a Hugging Face model directory",
                do="set target.source to a model directory",
            )
        raw = read_model_json(directory / "config.json")
        path = directory / "config.json"
        architecture = _architecture(path, raw)
        deepseek = architecture in DEEPSEEK_ARCHITECTURES
        if deepseek:
            raw = {**language_part(path, raw, architecture)}
        form = _DENSE_FORMS.get(architecture, DenseForm())
        absent = [key for key in _NEEDED if raw.get(key) is None] + [key for key in form.needed if key not in raw]
        if absent:
            raise SlipstreamError(
                f"{path} has no {absent[0]}",
                expected=f"all of {', '.join((*_NEEDED, *form.needed))}",
                do="correct the file, or copy the model directory again",
            )
        for key, known in {**_ASSUMED, **form.assumed}.items():
            if key in raw and raw[key] not in known:
                raise unsupported(path, key, raw[key], known[0])
        kinds = {*(raw.get("layer_types") or ())} - {"full_attention"}
        if kinds:
            raise unsupported(path, "layer_types", sorted(kinds), "full_attention")
        _check_values(path, {**raw, "head_dim": 1} if deepseek else raw)  # its heads have two parts, checked below
        rope = _rope(path, raw)
        latent = experts = None
        if deepseek:
            latent, experts = read_deepseek(path, raw, rope)
            raw["head_dim"] = latent.nope_dim + latent.rope_dim
        return cls(
            architecture=architecture,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            rms_norm_eps=raw["rms_norm_eps"],
            rope_theta=float(raw.get("rope_theta") or (rope or {}).get("rope_theta") or 10000.0),
            rope_scaling=rope,
            max_position=_max_position(raw),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=eos_token_ids(directory),
            dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
            quantization=read_quantization(directory / "config.json", raw),
            qk_norm=form.qk_norm,
            sliding_window=raw.get("sliding_window") if form.sliding_window else None,
            latent=latent,
            experts=experts,
            further_layers=further_layers(raw) if deepseek else 0,
        )


def check_architecture(config: ModelConfig, directory: Path) -> None:
    """Raises SlipstreamError for an architecture that the engine cannot run."""
    if config.architecture not in ARCHITECTURES:
        raise SlipstreamError(
            f"{directory / 'config.json'} names the architecture {config.architecture}",
            expected=f"one of {', '.join(ARCHITECTURES)}",
            do="use a target of a known architecture",
        )


def _architecture(path: Path, raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise wrong(path, "architectures", names, "a list of names")
    return names[0] if names else "(none)"


def _rope(path: Path, raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Scaling of the rotary embedding; transformers 5 writes theta and scaling into one `rope_parameters`."""
    rope, scaling = raw.get("rope_parameters"), raw.get("rope_scaling")
    if rope and scaling:
        ours, theirs = ({"rope_type": one.get("type", "default"), **one} for one in (rope, scaling))
        if any(ours[key] != theirs[key] for key in ours.keys() & theirs.keys() - {"type"}):
            raise wrong(path, "rope_scaling", scaling, f"the same as rope_parameters = {rope}, or one of the two alone")
    rope = rope or scaling
    if rope is None:
        return None
    if rope.get("partial_rotary_factor") not in _ASSUMED["partial_rotary_factor"]:
        raise unsupported(path, "partial_rotary_factor", rope["partial_rotary_factor"], 1.0)
    if rope.get("rope_type", rope.get("type", "default")) == "default":
        return dict(rope)
    # The length before scaling: beside `rope_parameters` it goes before the one in it; without either it is the whole.
    key = "original_max_position_embeddings"
    return {key: _max_position(raw), **rope} | ({key: raw[key]} if raw.get(key) is not None else {})


def _max_position(raw: Mapping[str, Any]) -> int:
    return raw.get("max_position_embeddings") or 2048


def _check_values(path: Path, raw: Mapping[str, Any]) -> None:
    """Types, positive values, and head counts that divide; nothing is converted. Raises SlipstreamError."""
    for key in _COUNTS:
        if raw.get(key) is not None and not (is_int(raw[key]) and raw[key] > 0):
            raise wrong(path, key, raw[key], "an integer above 0")
    rope = {key: raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key) is not None}
    for key, value in rope.items():
        check_rope_values(path, key, value)
    thetas = {f"{key}.rope_theta": value.get("rope_theta") for key, value in rope.items()}
    for key, value in {"rms_norm_eps": raw["rms_norm_eps"], "rope_theta": raw.get("rope_theta"), **thetas}.items():
        if value is not None and not ((is_int(value) or isinstance(value, float)) and 0 < value < math.inf):
            raise wrong(path, key, value, "a number above 0")
    if not isinstance(raw.get("tie_word_embeddings"), bool | None):
        raise wrong(path, "tie_word_embeddings", raw["tie_word_embeddings"], "true or false")
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    if raw.get("head_dim") is None and hidden % heads:
        raise wrong(path, "num_attention_heads", heads, f"a divisor of hidden_size = {hidden}, or a head_dim beside it")
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise wrong(path, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")


def read_model_json(path: Path) -> dict[str, Any]:
    """A JSON file of a model directory; {} where there is none. SlipstreamError for one that is no JSON object."""
    if not path.is_file():
        return {}
    expected, do = "a file of a Hugging Face model directory", "copy the model directory again"
    value = read_json(path, expected=expected, do=do)
    if not isinstance(value, dict):
        raise SlipstreamError(f"{path} holds no JSON object", expected=expected, do=do)
    return value


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Every id that ends an answer, by config.json and generation_config.json, first mention first; often one."""
    ids: list[int] = []
    for name in ("config.json", "generation_config.json"):
        raw = read_model_json(directory / name)
        value = raw.get("eos_token_id")
        if value is None and raw.get("architectures") == [WRAPPER]:
            value = (raw.get("text_config") or {}).get("eos_token_id")
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(is_int(token) for token in found):
            raise wrong(directory / name, "eos_token_id", value, "a token id, or a list of them")
        ids += found
    return tuple(dict.fromkeys(ids))
