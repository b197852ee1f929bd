"""Families of targets, as far as engines differ in how they capture their states, and vLLM's two runners."""

from enum import StrEnum

from slipstream.engine.errors import SlipstreamError


class Family(StrEnum):
    """Families of targets that differ in how an engine captures their states."""

    LLAMA = "llama"  # Llama, Mistral
    QWEN2 = "qwen2"  # Qwen2, Qwen2.5
    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"
    GPT_OSS = "gpt_oss"
    DEEPSEEK = "deepseek"  # DeepSeek-V2, -V3, Kimi-K2
    KIMI_K25 = "kimi_k25"  # Kimi-K2.5 and later: DeepSeek's code inside a multimodal wrapper


class Runner(StrEnum):
    """vLLM's two model runners; VLLM_USE_V2_MODEL_RUNNER=0 or 1 chooses one."""

    V1 = "V1"
    V2 = "V2"


# Architectures and model types of config.json, in lower case and without "_", whose family is known.
_FAMILIES = {
    Family.LLAMA: ("llama", "llamaforcausallm", "mistral", "mistralforcausallm"),
    Family.QWEN2: ("qwen2", "qwen2forcausallm"),
    Family.QWEN3: ("qwen3", "qwen3forcausallm"),
    Family.QWEN3_MOE: ("qwen3moe", "qwen3moeforcausallm"),
    Family.GPT_OSS: ("gptoss", "gptossforcausallm"),
    Family.DEEPSEEK: (
        *("deepseekv2", "deepseekv3", "kimik2"),
        *("deepseekv2forcausallm", "deepseekv3forcausallm", "deepseekv32forcausallm"),
    ),
    Family.KIMI_K25: ("kimik25", "kimik25forconditionalgeneration"),
}

# The architectures for which vLLM 0.24 takes runner V2; all others run on V1.
_ON_V2 = (
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
    "Qwen2MoeForCausalLM",
    "GraniteMoeForCausalLM",
    "DeepseekV2ForCausalLM",
)


def family_of(name: str) -> Family:
    """The family of a target by its architecture or its `model_type`. Raises SlipstreamError for one not read."""
    plain = name.lower().replace("_", "").replace("-", "")
    for family, names in _FAMILIES.items():
        if plain in names:
            return family
    raise SlipstreamError(
        f"how other engines capture the states of {name} is not known",
        expected=f"a target of the families {', '.join(Family)}",
        do="serve with Slipstream's own engine, which captures by name",
        fault="F4",
    )


def default_runner(architecture: str) -> Runner:
    """The runner that vLLM 0.24 takes for a target when nobody chooses."""
    return Runner.V2 if architecture in _ON_V2 else Runner.V1
