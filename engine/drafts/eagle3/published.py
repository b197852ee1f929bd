"""Drafts as others publish them: of which kind a config.json is, and which slots its layer ids mean.

Ids stand under `eagle_config` (as SGLang reads them), at the top (vLLM), or nowhere: then both engines capture the same
three states. Where all who would read a file take the same states from it, these are its slots; else nobody can tell.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.engine.capture import CapturePlan, default_slots
from slipstream.engine.drafts.eagle3.layer_ids import KNOWN_VERSIONS, Engine, Family, reading
from slipstream.engine.errors import SlipstreamError

IDS_KEY = "eagle_aux_hidden_state_layer_ids"  # at the top level for vLLM, under `eagle_config` for SGLang
GROUPED = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",
    "Eagle3Qwen3ForCausalLM",
    "Qwen3ForCausalLMEagle3",
)
LATENT = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM", "DeepseekV3ForCausalLMEagle3")
_LATENT_TYPES = ("kimi_k2", "deepseek_v3", "deepseek_v2")
# Values that the network assumes; a key that is absent or null means the same. Of a draft with latent attention, since
# published ones differ here: experts in its layer, attention without rotation or with a gate (Kimi-K3), a tied head.
_ASSUMED: Mapping[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "bias": False,
    "rope_interleave": True,
    "tie_word_embeddings": False,
    "logit_scale": 1.0,
    "use_moe": False,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
}
_ASSUMED_GROUPED: Mapping[str, Any] = {"num_hidden_layers": 1, "hidden_act": "silu"}
_ASSUMED_NESTED: Mapping[str, Any] = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


def attention_of(value: Mapping[str, Any]) -> str:
    """`grouped` KV heads, or `latent` (MLA), by a draft's config.json; "" for an architecture that is not known."""
    names = value.get("architectures")
    name = names[0] if isinstance(names, list) and names else ""
    if name in LATENT or value.get("model_type") in _LATENT_TYPES or value.get("kv_lora_rank") is not None:
        return "latent"
    return "grouped" if name in ("", *GROUPED) else ""


def check_kind(path: Path, value: Mapping[str, Any]) -> None:
    """Raises SlipstreamError for a draft that this engine has no network for; it says what the draft is.

    Args:
        path: of config.json.
        value: what it holds.
    """
    if "speculators_config" in value:
        raise SlipstreamError(
            f"{path} is of the speculators format ({value.get('speculators_model_type')})",
            expected="the plain Hugging Face form of an EAGLE-3 draft",
            do="have its trainer write that form, too: `fc`, `midlayer`, `lm_head`, `d2t` and a flat config.json",
        )
    kind = attention_of(value)
    if not kind:
        name = (value.get("architectures") or ["(none)"])[0]
        raise SlipstreamError(
            f"{path} names the architecture {name}",
            expected=f"one of {', '.join((*GROUPED, *LATENT))}",
            do="use an EAGLE-3 draft of this form",
        )
    if kind == "grouped":
        _check_assumed(f"{path}, a draft with KV heads,", value, _ASSUMED_GROUPED, "")
    else:
        nested, what = value.get("eagle_config"), f"{path}, a draft with latent attention (MLA),"
        _check_assumed(what, value, _ASSUMED, "")
        _check_assumed(what, nested if isinstance(nested, Mapping) else {}, _ASSUMED_NESTED, "eagle_config.")


def _check_assumed(what: str, value: Mapping[str, Any], assumed: Mapping[str, Any], prefix: str) -> None:
    for key, known in assumed.items():
        found = value.get(key)
        if found is not None and found != known:
            raise SlipstreamError(
                f"{what} says {prefix}{key} = {found!r}",
                expected=f"{prefix}{key} = {known!r}: this engine's draft network has no other form",
                do="use a draft without it, or serve this one with another engine (server.engine)",
            )


def layer_ids(value: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """(ids at the top, ids under `eagle_config`); None where there are none. Raises SlipstreamError (F4) for no ids."""
    nested = value.get("eagle_config")
    top, under = value.get(IDS_KEY), nested.get(IDS_KEY) if isinstance(nested, Mapping) else None
    return _ids(IDS_KEY, top), _ids(f"eagle_config.{IDS_KEY}", under)


def _ids(key: str, found: Any) -> tuple[int, ...] | None:
    if found is None:
        return None
    if not isinstance(found, list) or not found or any(type(one) is not int for one in found):
        raise SlipstreamError(
            f"a draft's config.json says {key} = {found!r}",
            expected="a list of layer ids, or no such key",
            do="correct the file, or name the slots of its training (draft.slots)",
            fault="F4",
        )
    return tuple(found)


def published_slots(path: Path, value: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int, ...]:
    """The canonical slots of a draft that has no record of its training.

    Args:
        path: of config.json, for errors.
        value: what it holds.
        family, num_layers: of the target.

    Raises SlipstreamError (F4) where the file means different states to different engines, states that the target does
    not have, or none.
    """
    nested = value.get("eagle_config")
    if isinstance(nested, Mapping) and nested.get("use_aux_hidden_state") is False:
        raise SlipstreamError(
            f"{path}: eagle_config.use_aux_hidden_state is false",
            expected="an EAGLE-3 draft, which reads captured states",
            do="use a draft of EAGLE-3",
            fault="F4",
        )
    top, under = layer_ids(value)
    meanings: dict[str, tuple[int, ...]] = {}
    if top is not None:
        meanings[f"{IDS_KEY} {list(top)} as vLLM reads it"] = _read(Engine.VLLM, top, family, num_layers)
    if under is not None:
        meanings[f"eagle_config {list(under)} as SGLang reads it"] = _read(Engine.SGLANG, under, family, num_layers)
    if under is not None and top is None:
        meanings[f"eagle_config {list(under)} as vLLM reads it"] = _read(Engine.VLLM, under, family, num_layers)
    if not meanings:
        return default_slots(num_layers)
    slots = next(iter(meanings.values()))
    if any(other != slots for other in meanings.values()):
        raise SlipstreamError(
            f"{path} means different states: "
            + "; ".join(f"{how}: slots {list(these)}" for how, these in meanings.items()),
            expected="ids that mean the same states to every engine that reads them",
            do="name the slots of its training (draft.slots)",
            fault="F4",
        )
    CapturePlan(slots, num_layers)  # raises for states that the target does not have
    return slots


def _read(engine: Engine, ids: tuple[int, ...], family: Family, num_layers: int) -> tuple[int, ...]:
    return reading(engine, KNOWN_VERSIONS[engine], family).slots(ids, num_layers)
