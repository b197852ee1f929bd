"""The two JSON files of a draft directory.

config.json      the plain Hugging Face EAGLE-3 form that vLLM and SGLang read, layer ids for both
slipstream.json  what they have no key for: slots by canonical name, what the draft was trained from
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.engine.capture import CapturePlan, default_slots, slot_id, slot_name
from slipstream.engine.deepseek_config import LATENT_SIZES, Latent, read_latent
from slipstream.engine.drafts.eagle3.config import Eagle3Config
from slipstream.engine.drafts.eagle3.layer_ids import KNOWN_VERSIONS, Engine, Family, reading
from slipstream.engine.drafts.eagle3.published import IDS_KEY, attention_of, check_kind, published_slots
from slipstream.engine.drafts.eagle3.value_checks import check_values
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.files import read_json_object, write_atomic
from slipstream.engine.handover import TargetIdentity, refuse, slot_differences

CONFIG = "config.json"
RECORD = "slipstream.json"
RECORD_FORMAT = "slipstream-eagle3"
# By attention, (architecture, model type): what both engines select their EAGLE-3 class by.
_GROUPED = ("LlamaForCausalLMEagle3", "llama")
_LATENT = ("Eagle3DeepseekV2ForCausalLM", "deepseek_v3")
_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Switches that an engine's draft does not have, by attention; it drops the tensor or ignores the key without a word.
_NOT_IN = {
    ("grouped", Engine.SGLANG): ("norm_before_residual", "norm_before_fc"),
    ("latent", Engine.SGLANG): ("norm_before_residual", "norm_before_fc"),
    ("latent", Engine.VLLM): ("norm_before_fc",),
}
_AGAIN = "convert again: `slipstream stage convert CONFIG`"


@dataclass(frozen=True)
class DraftRecord:
    """Where a draft comes from.

    Args:
        identity: the target, tokenizer and chat template that it was trained on.
        family: of the target, which decides how other engines read layer ids.
        training_fingerprint: of the training stage's manifest.
    """

    identity: TargetIdentity
    family: Family
    training_fingerprint: str


def scaling_alone(rope: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """`rope_scaling` or `rope_parameters` without the theta that newer files keep in it; None for plain rotary."""
    scaling = {key: value for key, value in (rope or {}).items() if key != "rope_theta"}
    return None if scaling.get("rope_type", scaling.get("type", "default")) == "default" else scaling


def engine_ids(config: Eagle3Config, family: Family) -> dict[Engine, tuple[int, ...] | str]:
    """Layer ids to write for each engine; a text says why that engine cannot serve this draft."""
    result: dict[Engine, tuple[int, ...] | str] = {}
    attention = "grouped" if config.latent is None else "latent"
    for engine, version in KNOWN_VERSIONS.items():
        on = [s for s in _NOT_IN.get((attention, engine), ()) if getattr(config, s)]
        if on:
            result[engine] = f"{engine.value} {version} has no {' and no '.join(on)}"
            continue
        try:
            result[engine] = reading(engine, version, family).ids(config.slots, config.target_num_layers)
        except SlipstreamError as error:
            result[engine] = error.found
    return result


def write_configs(directory: Path, config: Eagle3Config, record: DraftRecord, dtype: str) -> None:
    """Writes config.json and slipstream.json. Args: dtype: of the weights, as torch names it without `torch.`."""
    ids = engine_ids(config, record.family)
    # Where SGLang cannot serve the draft, an empty list makes it stop; without a list it would capture its defaults.
    # vLLM takes its defaults for an empty list too, so it always gets our ids.
    sglang = ids[Engine.SGLANG]
    architecture, model_type = _GROUPED if config.latent is None else _LATENT
    value: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": dtype,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        **_attention_values(config),
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling_alone(config.rope_scaling),
        "max_position_embeddings": config.max_position,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": len(config.slots),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **{switch: getattr(config, switch) for switch in _SWITCHES},
        IDS_KEY: list(config.slots),
        "eagle_config": {
            "use_aux_hidden_state": True,
            IDS_KEY: [] if isinstance(sglang, str) else list(sglang),
        },
    }
    own = {
        "format": RECORD_FORMAT,
        "format_version": 1,
        "slots": list(config.plan.names),
        "target_num_layers": config.target_num_layers,
        "target_family": record.family.value,
        "identity": record.identity.to_dict(),
        "training_fingerprint": record.training_fingerprint,
        "engines": {
            f"{engine.value} {KNOWN_VERSIONS[engine]}": {"cannot_serve": i} if isinstance(i, str) else {"ids": list(i)}
            for engine, i in ids.items()
        },
    }
    for name, content in ((CONFIG, value), (RECORD, own)):
        write_atomic(directory / name, (json.dumps(content, indent=2) + "\n").encode())


def _attention_values(config: Eagle3Config) -> dict[str, int]:
    """Of config.json: a head's size, or those of latents (DeepSeek's classes take `head_dim` for the rotated part)."""
    c = config.latent
    if c is None:
        return {"head_dim": config.head_dim}
    sizes = (c.q_rank, c.kv_rank, c.nope_dim, c.rope_dim, c.value_dim)
    return {"head_dim": c.rope_dim, **dict(zip(LATENT_SIZES, sizes, strict=True))}


def read_record(directory: Path) -> DraftRecord | None:
    """Where a draft comes from; None for a draft that Slipstream did not write."""
    path = directory / RECORD
    if not path.is_file():
        return None
    own = _read_json(path)
    try:
        return DraftRecord(TargetIdentity(**own["identity"]), Family(own["target_family"]), own["training_fingerprint"])
    except (KeyError, TypeError, ValueError) as error:
        raise _bad_record(path, error) from error


def read_config(
    directory: Path,
    *,
    slots: tuple[int, ...] | None = None,
    target_num_layers: int | None = None,
    family: Family | None = None,
    skip: Collection[str] = (),
) -> Eagle3Config:
    """The draft of a directory.

    Args:
        directory: with config.json, and slipstream.json if Slipstream wrote it.
        slots, target_num_layers: for a draft without slipstream.json.
        family: of the target; with it a draft of another trainer tells its slots itself where its ids are unambiguous.
        skip: faults whose checks are off.

    Raises SlipstreamError for a missing key or a value that cannot be; (F2, F3) when config.json names other slots than
    slipstream.json; for a kind of draft that there is no network for; and (F4) for ids that engines read differently.
    """
    value = _read_json(directory / CONFIG)
    check_values(directory / CONFIG, value, (*_SWITCHES, "use_aux_norm"))
    check_kind(directory / CONFIG, value)
    own = _read_json(directory / RECORD) if (directory / RECORD).is_file() else None
    if own is not None:
        try:
            slots = tuple(slot_id(name) for name in own["slots"])
            target_num_layers = int(own["target_num_layers"])
            plan, family = CapturePlan(slots, target_num_layers), Family(own["target_family"])
        except SlipstreamError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _bad_record(directory / RECORD, error) from error
        _check_ids(directory, value, plan, family, skip)
    elif slots is None and family is not None and target_num_layers is not None:
        slots = published_slots(directory / CONFIG, value, family, target_num_layers)
    if slots is None or target_num_layers is None:
        raise SlipstreamError(
            f"{directory} has no {RECORD}: its config.json holds layer ids, which engines read differently",
            expected="the canonical slots and the target's number of layers",
            do="name them (capture.slots) when the draft is imported",
        )
    try:
        rope = value.get("rope_scaling") or value.get("rope_parameters")
        latent: Latent | None = None
        if attention_of(value) == "latent":
            latent = read_latent(directory / CONFIG, value, scaling_alone(rope))
        return Eagle3Config(
            hidden_size=value["hidden_size"],
            intermediate_size=value["intermediate_size"],
            num_heads=value["num_attention_heads"],
            num_kv_heads=value.get("num_key_value_heads") or value["num_attention_heads"],
            head_dim=_head_dim(value, latent),
            rms_norm_eps=value["rms_norm_eps"],
            rope_theta=float(value.get("rope_theta") or (rope or {})["rope_theta"]),
            rope_scaling=scaling_alone(rope),
            max_position=value["max_position_embeddings"],
            vocab_size=value["vocab_size"],
            draft_vocab_size=value.get("draft_vocab_size") or value["vocab_size"],
            target_hidden_size=value.get("target_hidden_size") or value["hidden_size"],
            slots=slots,
            target_num_layers=target_num_layers,
            latent=latent,
            **{switch: bool(_switch(value, switch)) for switch in _SWITCHES},
        )
    except KeyError as error:
        raise SlipstreamError(
            f"{directory / CONFIG} has no {error.args[0]}", expected="the config of an EAGLE-3 draft", do=_AGAIN
        ) from error


def _switch(value: Mapping[str, Any], name: str) -> Any:
    """Of config.json. SGLang takes the older `use_aux_norm` for `fc_norm`, too."""
    return value.get(name, False) or (name == "fc_norm" and value.get("use_aux_norm", False))


def _head_dim(value: Mapping[str, Any], latent: Latent | None) -> int:
    """Of queries and keys."""
    if latent is not None:
        return latent.nope_dim + latent.rope_dim
    return int(value.get("head_dim") or value["hidden_size"] // value["num_attention_heads"])


def _check_ids(
    directory: Path, value: Mapping[str, Any], plan: CapturePlan, family: Family, skip: Collection[str]
) -> None:
    """The ids in config.json mean the slots in slipstream.json, for every engine that they do not stop."""
    nested = (value.get("eagle_config") or {}).get(IDS_KEY)
    for engine, ids in {Engine.VLLM: value.get(IDS_KEY), Engine.SGLANG: nested}.items():
        version = KNOWN_VERSIONS[engine]
        if ids == [] and engine is Engine.SGLANG:
            continue  # stops it
        rule = reading(engine, version, family)
        captured = rule.slots(ids, plan.num_layers) if ids else default_slots(plan.num_layers)
        refuse(
            slot_differences(tuple(slot_name(s) for s in captured), plan.names),
            found_in=f"{directory / CONFIG} (ids {ids} as {engine.value} {version} reads them)",
            expected_in=RECORD,
            do=f"do not edit layer ids by hand; {_AGAIN}",
            skip=skip,
        )


def _bad_record(path: Path, error: Exception) -> SlipstreamError:
    wrong = f"has no {error.args[0]}" if isinstance(error, KeyError) else f"is damaged: {error}"
    return SlipstreamError(f"{path} {wrong}", expected="the record that Slipstream writes beside a draft", do=_AGAIN)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, expected="a draft directory", do=_AGAIN)
    except FileNotFoundError:
        raise SlipstreamError(f"{path} does not exist", expected="a draft directory", do=_AGAIN) from None
