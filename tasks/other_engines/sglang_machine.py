"""What SGLang makes of the other flags under speculation: rows 4-18 and 28 of the silent changes, and section 0.

Read in the sources of SGLang 0.5.9 to 0.5.23. What depends on the GPU is told for each kind: this machine may be
another.
"""

from collections.abc import Iterator

from slipstream.engine.engine_versions import Version
from slipstream.tasks.other_engines.effect import Effect, Rule
from slipstream.tasks.other_engines.launch_facts import (
    ALGORITHM,
    CRASH,
    DRAFT,
    EAGLE3_LLAMA,
    TOPK,
    Launch,
    leave_out,
    pin,
)
from slipstream.tasks.other_engines.sglang_adaptive import topk_in_force
from slipstream.tasks.other_engines.sglang_flags import FLAGS

RUNNING, FRACTION, CONTEXT = "server.max_running_requests", "sglang.mem_fraction_static", "server.max_context_tokens"
ATTENTION, PAGE = "sglang.attention_backend", "sglang.page_size_tokens"
DRAFT_ATTENTION, PREFILL, DECODE = (
    "sglang.speculative_draft_attention_backend",
    "sglang.prefill_attention_backend",
    "sglang.decode_attention_backend",
)
QUANTIZATION, DRAFT_QUANTIZATION = "sglang.quantization", "sglang.speculative_draft_model_quantization"
OVERLAP, SPEC_V2 = "sglang.disable_overlap_schedule", "sglang.enable_spec_v2"
OVERWRITE = "sglang.allow_overwrite_longer_context_len"
FUSION, NO_FUSION = "sglang.enable_flashinfer_allreduce_fusion", "sglang.enforce_disable_flashinfer_allreduce_fusion"


def _unknown_flags(launch: Launch) -> Iterator[Effect]:
    """Flags that this release does not have. A variable that it does not read has rows of its own."""
    for flag in FLAGS:
        if flag.variable or launch.get(flag.key) is None:
            continue
        early = bool(flag.since) and launch.before(flag.since)
        late = bool(flag.until) and launch.version > Version.parse(flag.until)
        if early or late:
            known = f"from {flag.since} on" if early else f"until {flag.until}"
            yield Effect(
                "flag",
                launch.say(flag.key),
                f"{CRASH}: SGLang {launch.version} has no {flag.name} ({known}, of the releases read)",
                "error: unrecognized arguments",
                (leave_out(flag.key), f"serve with a release that has it, {known}"),
            )


def _running(launch: Launch) -> Iterator[Effect]:
    """Rows 4 and 5."""
    if (not launch.eagle and launch.algorithm not in ("NGRAM", "DFLASH")) or launch.get(RUNNING) is not None:
        return
    yield Effect("4", launch.say(RUNNING), "48, because of speculation", "WARNING", (pin(RUNNING, 48),), "warning")
    graphs = "sglang.cuda_graph_max_bs" if launch.before("0.5.23") else "sglang.cuda_graph_max_bs_decode"
    if launch.get("sglang.cuda_graph_max_bs") is None and launch.get("sglang.cuda_graph_max_bs_decode") is None:
        yield Effect(
            "5",
            launch.say(RUNNING, graphs),
            "memory is reserved for graphs of the default batch (512 with TP 4 or more on a GPU of 80 to 160 GB), "
            "chosen before the 48; graphs are captured up to the 48 only",
            "nothing says so",
            (pin(RUNNING, 48), pin(graphs, 48)),
            "warning",
        )


def _memory(launch: Launch) -> Iterator[Effect]:
    """Rows 6 and 7."""
    speculative = launch.eagle
    if launch.before("0.5.14"):
        extra = "2 GB" if launch.before("0.5.10") else "4 GB"
        share = f"{extra} more are set aside for the draft"
    else:
        share = "the draft's weights and KV cache are part of the budget"
    if launch.get(FRACTION) is None:
        yield Effect(
            "6",
            launch.say(FRACTION),
            "(GPU memory - reserve) / GPU memory; the reserve is 512 MB + 1.5 MB x chunked prefill + 2 MB x graph "
            "batch + 1 GB x TP / 8 + 1.5 GB for MLA, at least 10 GB on a GPU above 60 GB, more for a multimodal target "
            "(Kimi-K2.5 is one)",
            "nothing says so; /server_info has the value",
            (pin(FRACTION, "FRACTION") + " as read back from /server_info",),
            "warning",
        )
        if speculative:
            yield Effect(
                "7", launch.say(FRACTION, ALGORITHM), share, "nothing says so", (pin(FRACTION, "FRACTION"),), "warning"
            )
    elif speculative and launch.before("0.5.14"):
        yield Effect(
            "7",
            launch.say(FRACTION),
            "as asked, and nothing is set aside for the draft's weights and KV cache: perhaps out of memory",
            "an error, if it happens",
            ("lower it by the draft's weights and KV cache", "serve with 0.5.14 or later, which counts them"),
            "warning",
        )


def _mixed_chunk(launch: Launch) -> Iterator[Effect]:
    """Row 8."""
    key = "sglang.enable_mixed_chunk"
    if launch.eagle and launch.on(key):
        yield Effect("8", launch.say(key), "switched off by speculation", "WARNING", (leave_out(key),))


def _overlap(launch: Launch) -> Iterator[Effect]:
    """Rows 9 to 11."""
    if not launch.eagle:
        return
    v2, off, topk = launch.get(SPEC_V2), launch.on(OVERLAP), launch.get(TOPK)
    tree = topk is not None and topk > 1
    if launch.before("0.5.11"):
        if v2 and tree:
            yield Effect(
                "9",
                launch.say(SPEC_V2, TOPK),
                f"{CRASH}: chains only",
                "ValueError",
                (leave_out(SPEC_V2), pin(TOPK, 1)),
            )
        elif v2 and off:
            yield Effect(
                "9", launch.say(SPEC_V2, OVERLAP), "overlap is on", "WARNING", (leave_out(OVERLAP), leave_out(SPEC_V2))
            )
        elif v2 is None and not off:
            yield Effect(
                "9", launch.say(SPEC_V2, OVERLAP), "overlap is off", "WARNING", (pin(OVERLAP, True),), "warning"
            )
    elif launch.before("0.5.13"):
        if tree and not off:
            yield Effect(
                "10", launch.say(TOPK, OVERLAP), "overlap is off, the old worker (v1) serves", "WARNING",
                (pin(OVERLAP, True), pin(TOPK, 1)), "error" if v2 else "warning",
            )  # fmt: skip
        elif v2 is False and not off:
            yield Effect(
                "10", launch.say(SPEC_V2), "overlap is off, the old worker (v1) serves", "WARNING",
                (pin(OVERLAP, True),), "note",
            )  # fmt: skip
    else:
        if off or (v2 is False and launch.before("0.5.14")):
            yield Effect(
                "11", launch.say(OVERLAP, SPEC_V2), "the same worker (v2), synchronous: the old one is gone", "WARNING",
                (leave_out(OVERLAP),), "warning",
            )  # fmt: skip
        if v2 is not None and not launch.before("0.5.14"):
            yield Effect(
                "11",
                launch.say(SPEC_V2),
                "no effect: this variable is gone, the v2 worker serves",
                "WARNING" if launch.before("0.5.23") else "nothing says so",
                (leave_out(SPEC_V2) + ("" if v2 else f" and {pin(OVERLAP, True)}"),),
                "warning" if v2 else "error",
            )


def _backends(launch: Launch, *keys: str) -> dict[str, str]:
    return {key: launch.get(key) for key in keys if launch.get(key) is not None}


def _tree_attention(launch: Launch) -> Iterator[Effect]:
    """Rows 12 and 13."""
    topk, page = topk_in_force(launch), launch.get(PAGE)
    if not launch.eagle or topk is None or topk == 1:
        return
    for key, name in _backends(launch, ATTENTION, PREFILL, DECODE).items():
        if name == "trtllm_mha":
            yield Effect(
                "13",
                launch.say(TOPK, key),
                f"{CRASH}: chains only",
                "ValueError",
                (pin(TOPK, 1), pin(key, "flashinfer")),
            )
    allowed = ("flashinfer", "fa3") if launch.before("0.5.13") else ("flashinfer", "fa3", "triton")
    backend = launch.get(ATTENTION)
    if page is None or page == 1 or backend in allowed:
        return
    yield Effect(
        "12",
        launch.say(TOPK, PAGE, ATTENTION),
        f"{CRASH}: a tree with pages above 1 needs {' or '.join(allowed)}"
        + ("" if backend else ", and which one is chosen depends on the GPU"),
        "ValueError",
        (pin(PAGE, 1), pin(ATTENTION, "flashinfer")),
        "error" if backend else "warning",
    )


def _page(launch: Launch) -> Iterator[Effect]:
    """Row 14: attention kernels that know few page sizes, each with its sizes and what others become."""
    old = launch.before("0.5.23")
    mha = (16, 32, 64) if old else (16, 32, 64, 128)
    rules = {
        "flashmla": ((64,), 64, (ATTENTION, DECODE)),
        "cutlass_mla": ((128,), 128, (ATTENTION, DECODE)),
        "trtllm_mla": ((32, 64), 64, (ATTENTION, DECODE)),
        "cutedsl_mla": ((32, 64), 64, (ATTENTION, DECODE, PREFILL)),
        "trtllm_mha": (mha, 64, (ATTENTION, DECODE, PREFILL, *(() if old else (DRAFT_ATTENTION,)))),
    }
    page = launch.get(PAGE)
    for name, (sizes, becomes, keys) in rules.items():
        for key in keys:
            if launch.get(key) == name and page not in sizes:
                both = ", for both models" if key == DRAFT_ATTENTION else ""
                yield Effect(
                    "14", launch.say(key, PAGE), f"page size {becomes}{both}", "WARNING",
                    (pin(PAGE, becomes),), "warning" if page is None else "error",
                )  # fmt: skip


def _attention(launch: Launch) -> Iterator[Effect]:
    """Rows 15 and 16."""
    backend = launch.get(ATTENTION)
    if backend is None and (launch.get(PREFILL) is None or launch.get(DECODE) is None):
        deepseek = launch.target_is_deepseek or (launch.target and launch.target.architecture.startswith("KimiK25"))
        family = "fa3 on Hopper, trtllm_mla on SM100, triton elsewhere"
        if launch.target is None:
            family = f"for a DeepSeek or Kimi target {family}; for another by its kind and the GPU"
        elif not deepseek:
            family = "by the target's kind and the GPU"
        yield Effect(
            "15", launch.say(ATTENTION), f"chosen: {family}", "an INFO line, or nothing; /server_info has the value",
            (pin(ATTENTION, "NAME") + " as read back from /server_info",), "warning",
        )  # fmt: skip
    if not launch.eagle or launch.get(DRAFT) is None or launch.get(DRAFT_ATTENTION) is not None:
        return
    ways = (pin(DRAFT_ATTENTION, "trtllm_mha"), pin(ATTENTION, "triton"))
    on_sm100 = backend is None and (launch.target is None or launch.target_is_deepseek)
    if backend != "trtllm_mla" and not on_sm100:
        return
    known = launch.draft is not None and launch.draft.architecture == EAGLE3_LLAMA
    if launch.draft is not None and not known:
        return
    yield Effect(
        "16",
        launch.say(ATTENTION, DRAFT_ATTENTION),
        f"{'' if known else 'if the draft has ordinary attention (no MLA): '}the draft inherits trtllm_mla, which runs "
        f"MLA models alone: {CRASH}" + ("" if backend else " (on SM100, where it is chosen for DeepSeek and Kimi)"),
        "an error",
        ways,
        "error" if known and backend else "warning",
    )


def _quantization(launch: Launch) -> Iterator[Effect]:
    """Row 17."""
    name = launch.get(QUANTIZATION)
    if not launch.eagle or launch.get(DRAFT) is None or name is None or launch.get(DRAFT_QUANTIZATION) is not None:
        return
    plain = launch.draft is not None and not launch.draft.quantized
    yield Effect(
        "17",
        launch.say(QUANTIZATION, DRAFT_QUANTIZATION),
        f"the draft's becomes {name}, too: " + ("it is not quantized" if plain else "a draft in bf16 does not load"),
        "nothing says so, then an error while loading",
        (pin(DRAFT_QUANTIZATION, "unquant"), f"{leave_out(QUANTIZATION)}: it is read from the target's config"),
        "error" if plain else "warning",
    )


def _context(launch: Launch) -> Iterator[Effect]:
    """Row 18: the draft is built with the served context."""
    context, waived = launch.get(CONTEXT), launch.on(OVERWRITE)
    own = None if launch.target is None else launch.target.positions
    served = context if context is not None else own
    if context is None:
        value = "the target's own" + ("" if own is None else f", {own} tokens")
        yield Effect("18", launch.say(CONTEXT), value, "an INFO line", (pin(CONTEXT, own or "TOKENS"),), "warning")
    elif own is not None and context > own:
        yield Effect(
            "18",
            f"{launch.say(CONTEXT, OVERWRITE)}; the target has {own} positions",
            "its positions are overwritten: beyond its own nothing was trained" if waived else CRASH,
            "WARNING" if waived else "ValueError",
            (pin(CONTEXT, own),),
        )
    if launch.algorithm is None or launch.get(DRAFT) is None:
        return
    positions = None if launch.draft is None else launch.draft.positions
    if positions is not None and served is not None:
        if positions < served:
            yield Effect(
                "18",
                f"the draft {launch.get(DRAFT)} has {positions} positions, the served context is {served} tokens: "
                f"{launch.say(CONTEXT, OVERWRITE)}",
                f"the draft's max_position_embeddings become {served}: beyond {positions} it was never trained"
                if waived
                else CRASH,
                "WARNING" if waived else "ValueError",
                (pin(CONTEXT, positions), f"a draft trained on {served} positions"),
                fault="F14",
            )
    elif waived:
        yield Effect(
            "18",
            launch.say(OVERWRITE, CONTEXT, DRAFT),
            "a draft with fewer positions than the served context is stretched to it instead of refused; how many "
            "it has is not known here",
            "WARNING",
            (leave_out(OVERWRITE), pin(CONTEXT, "the draft's positions"), "run plan where the draft's config.json is"),
            "warning",
            "F14",
        )


def _dtype(launch: Launch) -> Iterator[Effect]:
    """`--dtype` left out: models whose config says float32 are served in float16."""
    if launch.get("server.dtype") is None:
        yield Effect(
            "dtype", launch.say("server.dtype"),
            "that of each model's own config, target and draft apart; a model in float32 (a draft as training left it, "
            "perhaps) becomes float16", "an INFO line", (pin("server.dtype", "bfloat16"),), "warning",
        )  # fmt: skip


def _pipeline(launch: Launch) -> Iterator[Effect]:
    """Row 28."""
    key = "sglang.pp_size"
    if launch.algorithm is not None and (launch.get(key) or 1) > 1:
        yield Effect(
            "28", launch.say(key, ALGORITHM), f"{CRASH}: no pipeline with speculation", "an error", (pin(key, 1),)
        )


def _capture(launch: Launch) -> Iterator[Effect]:
    """Section 0: what the draft is fed, by release."""
    if launch.algorithm != "EAGLE3":
        return
    if launch.before("0.5.10") and launch.target is not None and launch.target.architecture.startswith("KimiK25"):
        yield Effect(
            "0", launch.say("target.source", ALGORITHM), f"{CRASH}: this model has no capture in {launch.version}",
            "an error", ("serve with 0.5.14 or later",),
        )  # fmt: skip
    if launch.before("0.5.11") and not launch.on("sglang.disable_cuda_graph"):
        yield Effect(
            "0",
            launch.say(ALGORITHM, "sglang.disable_cuda_graph"),
            "inside CUDA graphs the default layers are captured and the ids of the draft's config ignored; eager "
            "prefill uses the ids",
            "nothing says so: the answers stay right, acceptance falls",
            (
                "serve with 0.5.14 or later",
                pin("sglang.disable_cuda_graph", True),
                "a draft trained on the default layers",
            ),
            "warning",
        )
    tp = launch.get("server.tensor_parallel_size") or 1
    if tp > 1 and launch.before("0.5.14") and not launch.on(NO_FUSION):
        yield from _partial_sums(launch)


def _partial_sums(launch: Launch) -> Iterator[Effect]:
    asked_for = launch.on(FUSION)
    name = "" if launch.target is None else launch.target.architecture
    if not asked_for and name and not name.startswith(("DeepseekV3", "KimiK25")):
        return  # it comes on by itself for these two alone
    off = () if launch.before("0.5.10") else (pin(NO_FUSION, True),)
    yield Effect(
        "0",
        launch.say("server.tensor_parallel_size", FUSION),
        "the draft is fed one rank's partial sums instead of the state, in forwards of up to 2048 tokens"
        + ("" if asked_for else ": the fusion comes on by itself for DeepSeek-V3 and Kimi-K2.5 on SM90 and SM100"),
        "nothing says so: the answers stay right, acceptance falls",
        ("serve with 0.5.14 or later", *off, *((leave_out(FUSION),) if asked_for else ())),
        "error" if asked_for else "warning",
        "F5" if asked_for else "",
    )


def _without_effect(launch: Launch) -> Iterator[Effect]:
    key = "sglang.num_continuous_decode_steps"
    if (launch.get(key) or 1) > 1:
        effective = "no effect: nothing in the releases read (0.5.9 to 0.5.23) looks at it"
        yield Effect("no-op", launch.say(key), effective, "nothing says so", (leave_out(key),), "warning")


MACHINE_RULES: tuple[Rule, ...] = (
    _unknown_flags,
    _running,
    _memory,
    _mixed_chunk,
    _overlap,
    _tree_attention,
    _page,
    _attention,
    _quantization,
    _context,
    _dtype,
    _pipeline,
    _capture,
    _without_effect,
)
