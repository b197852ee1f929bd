"""What DeepSeek-V3 and Kimi-K2 are beside a dense decoder: latent attention and routed experts, from config.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.engine.config_values import is_int, unknown, unsupported, wrong
from slipstream.engine.errors import SlipstreamError

WRAPPER = "KimiK25ForConditionalGeneration"  # its language model is under `text_config`
DEEPSEEK_ARCHITECTURES = ("DeepseekV3ForCausalLM", WRAPPER)
_TEXT_TYPES = ("deepseek_v3", "kimi_k2")

LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_COUNTS = (
    *LATENT_SIZES,
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_group",
    "topk_group",
)
_NEEDED = (*_COUNTS, "n_shared_experts", "first_k_dense_replace", "routed_scaling_factor", "norm_topk_prob")
# Values that the layers assume; a key that is absent means the first.
_ASSUMED: Mapping[str, tuple[Any, ...]] = {
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "rope_interleave": (True, None),
    "attention_bias": (False, None),
    "hidden_act": ("silu",),
    "pretraining_tp": (1, None),
    "ep_size": (1, None),
    "tie_word_embeddings": (False, None),
}
# Read here or by model_config.py.
_READ = (
    *_NEEDED,
    *_ASSUMED,
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "architectures",
    "model_type",
)
# Of no consequence for the outputs of a loaded model: training, bookkeeping, what follows from other keys, and how
# transformers of old wrote its defaults for generation into every config.
_IDLE_KEYS = """
    _name_or_path auto_map transformers_version use_cache initializer_range pad_token_id sep_token_id
    decoder_start_token_id attention_dropout aux_loss_alpha seq_aux head_dim qk_head_dim use_bfloat16 torchscript
    tf_legacy_loss return_dict output_hidden_states output_attentions output_router_logits output_scores
    return_dict_in_generate id2label label2id finetuning_task task_specific_params problem_type tokenizer_class prefix
    chunk_size_feed_forward pruned_heads is_decoder is_encoder_decoder max_length min_length do_sample early_stopping
    num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences remove_invalid_values
"""
_IDLE = frozenset(_IDLE_KEYS.split())
# Of the wrapper, for either part of the model.
_SHARED = ("quantization_config", "tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id", "eos_token_id")
# Of the wrapper, for its vision, which is not run, or for training.
_VISION = (
    "vision_config",
    "media_placeholder_token_id",
    "use_unified_vision_chunk",
    "video_placeholder",
    "ignore_index",
    "encoder_only",
    "language_only",
)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: keys and values of all heads come from one latent a position.

    Args:
        q_rank: width of what queries are made from.
        kv_rank: width of the latent.
        nope_dim, rope_dim: of a query or key head, the part without and with position.
        value_dim: of a value head.
        scale: multiplied onto q.k; YaRN's `mscale_all_dim` is in it, squared.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float

    @property
    def cell(self) -> int:
        """Numbers that the cache holds of a position: the latent and the rotated rope key, for all heads."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class Experts:
    """The mixture of experts in every layer but the first.

    Args:
        num: routed experts.
        per_token: of those, how many a row goes through.
        shared: experts that every row goes through; they are one block of that many times the width.
        width: intermediate features of an expert.
        first_dense: layers in front that have a plain block of `intermediate_size` instead.
        scaling: what weights are multiplied by at last.
        normalise: weights are divided by their sum.
        groups, groups_kept: as in `kernels.route.Routing`.
    """

    num: int
    per_token: int
    shared: int
    width: int
    first_dense: int
    scaling: float
    normalise: bool
    groups: int
    groups_kept: int


def language_part(path: Path, raw: Mapping[str, Any], architecture: str) -> Mapping[str, Any]:
    """The values of the language model: `raw` itself, or its `text_config` with what the wrapper says for it.

    Raises SlipstreamError for a wrapper without one, of another type, or that contradicts it; and for a key of the
    wrapper that is set and not known.
    """
    if architecture != WRAPPER:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise wrong(path, "text_config", text, "the language model's own values, an object")
    if text.get("model_type") not in _TEXT_TYPES:
        raise unsupported(path, "text_config.model_type", text.get("model_type"), _TEXT_TYPES[-1])
    merged = dict(text)
    # Published files have these in either place, or in both.
    for key in _SHARED:
        if raw.get(key) is not None:
            merged.setdefault(key, raw[key])
    own = ("text_config", "architectures", "model_type", *_VISION, *_IDLE)
    for key, value in raw.items():
        if (not value and key not in merged) or value is None or key in own:
            continue
        if key not in merged:
            raise unknown(path, key, value)
        if merged[key] != value:
            raise wrong(path, key, value, f"what its text_config says, {merged[key]!r}")
    return merged


def read_deepseek(path: Path, raw: Mapping[str, Any], rope: Mapping[str, Any] | None) -> tuple[Latent, Experts]:
    """The values of one language model.

    Args:
        path: of config.json, for errors.
        raw: of `language_part`.
        rope: its scaling of the rotary embedding.

    Raises SlipstreamError for a value that is missing, that cannot be, or that the layers have no form for; and for a
    key that is set and not known, since it might change the outputs.
    """
    absent = [key for key in _NEEDED if raw.get(key) is None]
    if absent:
        raise SlipstreamError(
            f"{path} has no {absent[0]}",
            expected=f"all of {', '.join(_NEEDED)}",
            do="correct the file, or copy the model directory again",
        )
    for key, known in _ASSUMED.items():
        if key in raw and raw[key] not in known:
            raise unsupported(path, key, raw[key], known[0])
    for key, value in raw.items():
        if value and key not in _READ and key not in _IDLE:
            raise unknown(path, key, value)
    _check(path, raw)
    _check_rope(path, rope or {})
    experts = Experts(
        num=raw["n_routed_experts"],
        per_token=raw["num_experts_per_tok"],
        shared=raw["n_shared_experts"],
        width=raw["moe_intermediate_size"],
        first_dense=raw["first_k_dense_replace"],
        scaling=float(raw["routed_scaling_factor"]),
        normalise=raw["norm_topk_prob"],
        groups=raw["n_group"],
        groups_kept=raw["topk_group"],
    )
    return _latent(raw, rope or {}), experts


def read_latent(path: Path, raw: Mapping[str, Any], rope: Mapping[str, Any] | None) -> Latent:
    """Of a config.json, a draft's: the shapes of its latent attention.

    Args:
        path: for errors.
        raw: what it holds.
        rope: its scaling of the rotary embedding.

    Raises SlipstreamError for a value that is missing or cannot be.
    """
    for key in LATENT_SIZES:
        if not (is_int(raw.get(key)) and raw[key] > 0):
            raise wrong(path, key, raw.get(key), "an integer above 0")
    _check_heads(path, raw)
    _check_rope(path, rope or {})
    return _latent(raw, rope or {})


def _latent(raw: Mapping[str, Any], rope: Mapping[str, Any]) -> Latent:
    return Latent(
        q_rank=raw["q_lora_rank"],
        kv_rank=raw["kv_lora_rank"],
        nope_dim=raw["qk_nope_head_dim"],
        rope_dim=raw["qk_rope_head_dim"],
        value_dim=raw["v_head_dim"],
        scale=_scale(raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"], rope),
    )


def further_layers(raw: Mapping[str, Any]) -> int:
    """Layers behind the last one that predict further tokens (MTP). They are in the checkpoint, and are not run."""
    return raw.get("num_nextn_predict_layers") or raw.get("num_mtp_layers") or 0


def _scale(key_dim: int, rope: Mapping[str, Any]) -> float:
    """1 / sqrt of a key's width, times YaRN's square: longer contexts get sharper attention."""
    factor, weight = rope.get("factor", 1.0), rope.get("mscale_all_dim") or 0.0
    scaled = _rope_type(rope) != "default" and factor > 1 and weight
    return key_dim**-0.5 * ((0.1 * weight * math.log(factor) + 1.0) ** 2 if scaled else 1.0)


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _check_rope(path: Path, rope: Mapping[str, Any]) -> None:
    """A factor that is written: frequencies would take an absent one from the lengths, and the scale would not."""
    factor = rope.get("factor")
    stretches = isinstance(factor, int | float) and not isinstance(factor, bool) and factor >= 1
    if _rope_type(rope) != "default" and not stretches:
        raise wrong(path, "rope_scaling.factor", factor, "a number of 1 or more")


def _check(path: Path, raw: Mapping[str, Any]) -> None:
    """Types, and numbers that belong together."""
    for key in _COUNTS:
        if not (is_int(raw[key]) and raw[key] > 0):
            raise wrong(path, key, raw[key], "an integer above 0")
    for key in ("n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers", "num_mtp_layers"):
        if raw.get(key) is not None and not (is_int(raw[key]) and raw[key] >= 0):
            raise wrong(path, key, raw[key], "an integer of 0 or more")
    if not isinstance(raw["norm_topk_prob"], bool):
        raise wrong(path, "norm_topk_prob", raw["norm_topk_prob"], "true or false")
    scaling = raw["routed_scaling_factor"]
    if not (is_int(scaling) or isinstance(scaling, float)) or not 0 < scaling < math.inf:
        raise wrong(path, "routed_scaling_factor", scaling, "a number above 0")
    experts, groups, kept = raw["n_routed_experts"], raw["n_group"], raw["topk_group"]
    if experts % groups or kept > groups:
        raise wrong(path, "n_group", groups, f"a divisor of the {experts} experts, and at least topk_group = {kept}")
    if raw["num_experts_per_tok"] > experts // groups * kept:
        raise wrong(path, "num_experts_per_tok", raw["num_experts_per_tok"], f"at most {experts // groups * kept}")
    _check_heads(path, raw)


def _check_heads(path: Path, raw: Mapping[str, Any]) -> None:
    if raw["qk_rope_head_dim"] % 2:
        raise wrong(path, "qk_rope_head_dim", raw["qk_rope_head_dim"], "an even number: it is rotated in pairs")
    heads, kv_heads = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise wrong(path, "num_key_value_heads", kv_heads, f"num_attention_heads = {heads}, or no such key")
