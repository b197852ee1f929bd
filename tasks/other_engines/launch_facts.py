"""A launch of another engine as rules look at it: what was asked, the target's and the draft's config, the release."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.engine.engine_versions import Version
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.facts import Facts
from slipstream.tasks.manifest import read_json
from slipstream.tasks.other_engines.sglang_flags import flag_of

# Keys that several rules look at, and the words for a launch that ends before it serves.
STEPS, TOPK, WIDTH = "speculation.num_steps", "speculation.topk", "speculation.verify_width"
ALGORITHM, ADAPTIVE, DRAFT = "sglang.speculative_algorithm", "sglang.speculative_adaptive", "draft.path"
CRASH = "the start fails"
EAGLE3_LLAMA, EAGLE3_MLA = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"
# Directories as trainers leave them: `4`, `checkpoint-5000`, `epoch_3_step_1200`.
_STEP = re.compile(r"(?:.*step[_-]?|checkpoint-|iter[_-]?)?(\d+)")


@dataclass(frozen=True)
class OtherModel:
    """What a launch depends on of a target's or a draft's config.json; a model that our own engine need not know.

    Args:
        path: its directory.
        architecture: first of `architectures`; "" where there is none.
        positions: the context that the engine derives from it, in tokens; None when the file does not say.
        vocab_size, draft_vocab_size: None when the file does not say.
        quantized: whether it names a quantization of its own.
    """

    path: Path
    architecture: str
    positions: int | None
    vocab_size: int | None
    draft_vocab_size: int | None
    quantized: bool


@dataclass(frozen=True)
class Launch:
    """A launch for one release.

    Args:
        facts: the deployment with its origins.
        version: the release.
        target, draft: their configs, None where they are not on this machine.
    """

    facts: Facts
    version: Version
    target: OtherModel | None = None
    draft: OtherModel | None = None

    def get(self, key: str) -> Any:
        """What was asked for a dotted key; None when it is not on the launch line."""
        return asked(self.facts, key)

    def on(self, key: str) -> bool:
        """Whether a switch was asked for."""
        return self.get(key) is True

    def say(self, *keys: str) -> str:
        """The keys with value and origin, or as unset."""
        return " and ".join(self.facts.say(key) if self.get(key) is not None else f"{key} unset" for key in keys)

    def before(self, release: str) -> bool:
        """Whether this release is older than `release`."""
        return self.version < Version.parse(release)

    @property
    def algorithm(self) -> str | None:
        """The algorithm by its own name: NEXTN is another name of EAGLE."""
        name = self.get("sglang.speculative_algorithm")
        return "EAGLE" if name == "NEXTN" else name

    @property
    def eagle(self) -> bool:
        """Whether steps, topk and tokens are those of an EAGLE-like draft."""
        return self.algorithm in ("EAGLE", "EAGLE3", "STANDALONE")

    @property
    def target_is_deepseek(self) -> bool | None:
        """Whether the target is of the DeepSeek-V3 / Kimi family; None while it is unknown."""
        if self.target is None:
            return None
        return self.target.architecture.startswith(("DeepseekV3", "DeepseekV2", "KimiK2", "KimiVL"))


def asked(facts: Facts, key: str) -> Any:
    """What was asked for a dotted key; None when nobody wrote it, or wrote `auto` or `null`."""
    section, _, field = key.partition(".")
    values = getattr(facts.deployment, section)
    if field not in values.model_fields_set:
        return None
    value = getattr(values, field)
    return None if value == "auto" else value


def auto_choice(launch: Launch) -> tuple[int, int, int] | None:
    """(steps, topk, tokens) that SGLang chooses for a target; None while the target is unknown."""
    if launch.algorithm == "STANDALONE":
        return (3, 1, 4)
    if launch.target is None:
        return None
    trees = ("LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM")
    return (5, 4, 8) if launch.target.architecture in trees else (3, 1, 4)


def pin(key: str, value: object) -> str:
    """`write speculation.verify_width: 2 (--speculative-num-draft-tokens 2)`."""
    flag = flag_of(key)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if flag is None:
        return f"write {key}: {text}"
    if flag.variable:
        return f"write {key}: {text} ({flag.name}={int(value) if isinstance(value, bool) else value})"
    return f"write {key}: {text} ({flag.name if value is True else f'{flag.name} {value}'})"


def leave_out(key: str) -> str:
    """`leave speculation.verify_width out (--speculative-num-draft-tokens)`."""
    flag = flag_of(key)
    return f"leave {key} out" + (f" ({flag.name})" if flag else "")


def read_other_model(path: Path) -> OtherModel | None:
    """What config.json of a directory says; None when there is none, or none that can be read."""
    config = _object(path / "config.json")
    if config is None:
        return None
    inner = config.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, Mapping) else config
    names = config.get("architectures")
    return OtherModel(
        path=path,
        architecture=str(names[0]) if isinstance(names, list) and names else "",
        positions=_positions(text),
        vocab_size=_whole(text.get("vocab_size")),
        draft_vocab_size=_whole(config.get("draft_vocab_size")),
        quantized=bool(config.get("quantization_config") or text.get("quantization_config")),
    )


def _positions(config: Mapping[str, Any]) -> int | None:
    """The context as SGLang derives it: the first of the known keys, times the factor of a rope that is stretched; None
    where they are missing, or the factor is no number above 0."""
    keys = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
    base = next((config[key] for key in keys if _whole(config.get(key))), None)
    scaling = config.get("rope_scaling") or {}
    stretched = isinstance(scaling, Mapping) and "original_max_position_embeddings" not in scaling
    if stretched and scaling.get("rope_type", scaling.get("type")) == "llama3":
        stretched = False
    factor = scaling.get("factor", 1) if stretched else 1
    usable = isinstance(factor, int | float) and not isinstance(factor, bool) and 0 < factor < math.inf
    return None if base is None or not usable else int(base * factor)


def _object(path: Path) -> dict[str, Any] | None:
    """The object of a JSON file; None when there is none, or it is damaged or something else."""
    try:
        value = read_json(path)
    except (OSError, SlipstreamError):
        return None
    return value if isinstance(value, dict) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def draft_step(path: Path) -> tuple[int, str] | None:
    """The training step of a draft's directory and where it was read; None when nothing tells it.

    The trainer's own `trainer_state.json` counts before the directory's name.
    """
    step = (_object(path / "trainer_state.json") or {}).get("global_step")
    if isinstance(step, int):
        return step, "global_step in trainer_state.json"
    found = _STEP.fullmatch(path.name)
    return (int(found[1]), "the directory's name") if found else None
