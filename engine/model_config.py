"""What a target is: the values of its config.json that change its parameters or its outputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import read_json

# Values that the layers assume. A checkpoint that says otherwise is refused, never run with the key ignored.
_ASSUMED: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu",),
    "quantization_config": (None,),
    "sliding_window": (None,),
    "partial_rotary_factor": (1.0, None),
}
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
        architectures = raw.get("architectures") or ["(none)"]
        for key in _NEEDED:
            if raw.get(key) is None:
                raise SlipstreamError(
                    f"{directory / 'config.json'} has no {key}", expected=f"all of {', '.join(_NEEDED)}"
                )
        for key, known in _ASSUMED.items():
            if key in raw and raw[key] not in known:
                raise SlipstreamError(
                    f"{directory / 'config.json'} says {key} = {raw[key]!r}",
                    expected=f"{key} = {known[0]!r}: this engine's layers have no other form yet",
                    do="use a target without it",
                )
        # transformers 5 writes theta and scaling into one `rope_parameters`; older files have two keys.
        rope = raw.get("rope_parameters") or raw.get("rope_scaling")
        theta = raw.get("rope_theta") or (rope or {}).get("rope_theta") or 10000.0
        return cls(
            architecture=architectures[0],
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            rms_norm_eps=raw["rms_norm_eps"],
            rope_theta=float(theta),
            rope_scaling=rope,
            max_position=raw.get("max_position_embeddings") or 2048,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=eos_token_ids(directory),
            dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
        )


def read_model_json(path: Path) -> dict[str, Any]:
    """A JSON file of a model directory; {} where there is none. Raises SlipstreamError for one that is not JSON."""
    if not path.is_file():
        return {}
    return read_json(path, expected="a file of a Hugging Face model directory", do="copy the model directory again")


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Every id that ends an answer, by config.json and generation_config.json, first mention first; often one."""
    ids: list[int] = []
    for name in ("config.json", "generation_config.json"):
        value = read_model_json(directory / name).get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))
