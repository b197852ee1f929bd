"""The sections that say how target and draft are served and judged: speculation, server, benchmark, gates."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from slipstream.configs.base import CountOrZero, Fraction, PositiveFloat, PositiveInt, Section, Seed


class Speculation(Section):
    """How far the draft runs ahead in a round."""

    num_steps: CountOrZero | Literal["auto"] = Field(
        default="auto",
        description="Draft forward passes a round (K); 0: no speculation, `auto`: the fastest of 0..max_num_steps.",
    )
    max_num_steps: PositiveInt = Field(default=5, description="Largest K that `auto` may choose.")
    verify_width: PositiveInt | None = Field(
        default=None,
        description="Rows that the target scores a round: always num_steps + 1; state it only to have it checked.",
    )
    topk: PositiveInt = Field(default=1, description="Branches of the draft; 1 is a chain, the only form served here.")


class Server(Section):
    """The OpenAI-compatible server."""

    engine: Literal["slipstream", "sglang"] = Field(
        default="slipstream",
        description="Engine that serves. Another one than our own is planned and checked, and not launched.",
    )
    engine_version: str | None = Field(
        default=None,
        description="Released version of another engine, such as 0.5.14: what a flag does depends on it.",
    )
    tensor_parallel_size: PositiveInt = Field(
        default=1, description="Ranks (one GPU or CPU process each) that share every layer of target and draft."
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="Address that the server listens on.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=0, description="TCP port; 0 is any free one.")
    max_running_requests: PositiveInt = Field(
        default=8, description="Requests decoded at the same time; further ones wait."
    )
    max_context_tokens: PositiveInt = Field(default=1024, description="Longest prompt + answer, in tokens.")
    block_size_tokens: PositiveInt = Field(
        default=16, description="Positions of one block of the paged KV cache, in tokens."
    )
    prefill_chunk_tokens: PositiveInt = Field(
        default=256, description="Longest piece of a prompt that one step computes."
    )
    dtype: Literal["bfloat16", "float32", "float16"] = Field(
        default="bfloat16",
        description="Type in which the target and the draft are served; float16 by another engine alone.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where target and draft are served; `auto` is the card where there is one."
    )
    choose_steps: bool = Field(
        default=False,
        description=(
            "Choose K of each round from 0..num_steps: what gives the most tokens a second, by times measured at start "
            "and by what was accepted lately. Tokens stay the same; needs a card. A round of K = 0 still makes the "
            "draft's keys, for a later round may speculate: where 0 is best at every load, speculation.num_steps: 0 is "
            "faster."
        ),
    )
    after: Literal["stop", "keep"] = Field(
        default="stop", description="What becomes of the launched server when the run ends well: `stop` or `keep`."
    )
    startup_timeout_seconds: PositiveFloat = Field(
        default=180.0, description="Longest wait for a healthy server, in seconds."
    )
    shutdown_timeout_seconds: PositiveFloat = Field(
        default=20.0, description="Wait for a polite end, in seconds, before the process group is killed."
    )

    @field_validator("dtype")
    @classmethod
    def _served_by(cls, dtype: str, info: ValidationInfo) -> str:
        """Our own engine has no float16: its kernels' promises are proved in bfloat16 and float32."""
        if dtype == "float16" and info.data.get("engine") == "slipstream":
            raise ValueError("'bfloat16' or 'float32': Slipstream's own engine serves no float16")
        return dtype


class Benchmark(Section):
    """What is measured: the same prompts without and with speculation, interleaved."""

    prompts: str = Field(
        default="builtin-holdout",
        description="A path of JSON lines of chats, or `builtin-holdout` for the held-out part of data.prompts.",
    )
    num_prompts: PositiveInt = Field(default=16, description="Prompts of one measurement.")
    max_new_tokens: PositiveInt = Field(default=128, description="Longest answer, in tokens.")
    concurrency: PositiveInt = Field(default=1, description="Streams at the same time.")
    pairs: PositiveInt = Field(default=3, description="Interleaved repeats of (no speculation, speculation).")
    warmup_prompts: CountOrZero = Field(
        default=2, description="Prompts sent to each server before anything is measured."
    )
    compare_transformers: bool = Field(
        default=False,
        description="Also measure `transformers` generate on a few of the prompts, one stream, without speculation.",
    )
    seed: Seed = Field(default=0, description="Seed of the order of the prompts and of the requests.")


class Gates(Section):
    """What a run must reach; a gate that fails ends the run and says which term lost."""

    max_perplexity: PositiveFloat | None = Field(
        default=None, description="Largest perplexity of the target on the fixed text (resolve); null is no bound."
    )
    max_argmax_difference: Fraction = Field(
        default=0.005,
        description=(
            "Largest share of positions whose argmax differs from that of transformers (parity). Where transformers in "
            "bf16 differs from itself more often, with its other attention, what it reaches itself is the bound."
        ),
    )
    max_slot_error: PositiveFloat = Field(
        default=0.1,
        description="Largest error of a slot as a share of that to the second-nearest state (parity).",
    )
    max_tau_gap: PositiveFloat = Field(
        default=0.1,
        description="Largest gap of replayed tau - 1 to served tau - 1, as a share of the latter (benchmark).",
    )
    min_accept_length: Annotated[float, Field(ge=1.0)] | None = Field(
        default=None, description="Smallest accept length served, bonus token included; null is no bound."
    )
    min_speedup: PositiveFloat = Field(
        default=1.0,
        description=(
            "Smallest speed of speculation as a multiple of no speculation; the gate fails when the whole confidence "
            "interval lies below."
        ),
    )
