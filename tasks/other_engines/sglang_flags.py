"""Flags and variables of an SGLang launch line: the dotted key of each, its releases, its effect under speculation.

The meaning of a flag is the description of its key in the schema. Releases are those whose wheels were read (0.5.9 to
0.5.23); `since` and `until` are the first and the last of them that know the flag, "" where there is no such bound.
"""

from dataclasses import dataclass
from functools import cache

from slipstream.configs.nccl import NCCL_FIELDS


@dataclass(frozen=True)
class Flag:
    """One flag or variable.

    Args:
        key: dotted key of the deployment.
        names: spellings on the launch line, the usual one first; a variable has no dashes.
        speculation: its effect under speculation; "" is none of its own.
        meaning: what it means to SGLang, where the key's description speaks of our own engine; "" is the description.
        since, until: first and last release that was read and knows it.
    """

    key: str
    names: tuple[str, ...]
    speculation: str = ""
    since: str = ""
    until: str = ""
    meaning: str = ""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def variable(self) -> bool:
        return not self.name.startswith("-")


def _flag(key: str, names: str, speculation: str = "", *, since: str = "", until: str = "", meaning: str = "") -> Flag:
    return Flag(key, tuple(names.split()), speculation, since, until, meaning)


SHARED = (
    _flag(
        "target.source",
        "--model-path --model",
        "its architecture decides what is chosen for flags left out",
        meaning="the model that is served: a directory, or ORG/NAME on a hub, here written hf://ORG/NAME@REVISION.",
    ),
    _flag("server.host", "--host", meaning="address that the server listens on; left out: 127.0.0.1."),
    _flag("server.port", "--port", meaning="TCP port; left out: 30000."),
    _flag(
        "server.tensor_parallel_size",
        "--tp-size --tensor-parallel-size --tp",
        "until 0.5.13 with a fused all-reduce the draft sees one rank's partial sums",
        meaning="ranks, one GPU each, that share every layer.",
    ),
    _flag(
        "server.max_running_requests",
        "--max-running-requests",
        "left out it becomes 48",
        meaning="requests decoded at the same time.",
    ),
    _flag(
        "server.max_context_tokens",
        "--context-length",
        "the draft is built with it, too: longer than the draft's own is an error or overwrites it",
        meaning="longest prompt + answer, in tokens; left out: the target's own.",
    ),
    _flag(
        "server.dtype",
        "--dtype",
        "also the draft's type",
        meaning="type of weights and activations; left out: that of each config.",
    ),
    _flag(
        "draft.path",
        "--speculative-draft-model-path --speculative-draft-model",
        "the draft that proposes",
        meaning="directory of the draft, or ORG/NAME on a hub.",
    ),
    _flag(
        "speculation.num_steps",
        "--speculative-num-steps",
        "the length of a chain; left out, all three numbers are chosen by SGLang",
        meaning="draft forward passes a round (K).",
    ),
    _flag(
        "speculation.topk",
        "--speculative-eagle-topk",
        "a chain has the width steps + 1, whatever was asked",
        meaning="branches of a draft step; 1 is a chain.",
    ),
    _flag(
        "speculation.verify_width",
        "--speculative-num-draft-tokens",
        "one less is proposed; for a chain always steps + 1",
        meaning="rows that the target scores a round, the root included.",
    ),
)

SPECULATION = (
    _flag(
        "sglang.speculative_algorithm",
        "--speculative-algorithm --speculative-algo",
        "an EAGLE-3 draft under EAGLE is accepted and guesses: accept length 1.00",
    ),
    _flag("sglang.speculative_draft_model_revision", "--speculative-draft-model-revision"),
    _flag("sglang.speculative_draft_load_format", "--speculative-draft-load-format", "dummy is a random draft"),
    _flag(
        "sglang.speculative_draft_model_quantization",
        "--speculative-draft-model-quantization",
        "left out it copies an explicit --quantization",
    ),
    _flag(
        "sglang.speculative_draft_attention_backend",
        "--speculative-draft-attention-backend",
        "left out it is the target's, which may not run the draft",
    ),
    _flag("sglang.speculative_draft_kv_cache_dtype", "--speculative-draft-kv-cache-dtype", since="0.5.23"),
    _flag(
        "sglang.speculative_draft_window_tokens",
        "--speculative-draft-window-size",
        "an MLA draft ignores it without a word",
        since="0.5.12.post1",
    ),
    _flag("sglang.speculative_draft_sink_tokens", "--speculative-draft-sink-size", since="0.5.23"),
    _flag("sglang.speculative_attention_mode", "--speculative-attention-mode", "backend of verify and draft-extend"),
    _flag(
        "sglang.speculative_accept_threshold_single",
        "--speculative-accept-threshold-single",
        "below 1.0 speculation changes the answers",
    ),
    _flag(
        "sglang.speculative_accept_threshold_acc",
        "--speculative-accept-threshold-acc",
        "below 1.0 speculation changes the answers",
    ),
    _flag(
        "sglang.speculative_use_rejection_sampling",
        "--speculative-use-rejection-sampling",
        "chains of EAGLE and EAGLE3 with the target's whole vocabulary only",
        since="0.5.14",
    ),
    _flag(
        "sglang.speculative_use_block_verification",
        "--speculative-use-block-verification",
        "turns rejection sampling on",
        since="0.5.23",
    ),
    _flag("sglang.speculative_token_map", "--speculative-token-map", "ignored for EAGLE3"),
    _flag("sglang.speculative_moe_runner_backend", "--speculative-moe-runner-backend", "MoE drafts only"),
    _flag("sglang.speculative_moe_a2a_backend", "--speculative-moe-a2a-backend", "MoE drafts only"),
    _flag("sglang.speculative_adaptive", "--speculative-adaptive", "steps change while serving", since="0.5.11"),
    _flag("sglang.speculative_adaptive_config", "--speculative-adaptive-config", since="0.5.11"),
    _flag("sglang.enable_multi_layer_eagle", "--enable-multi-layer-eagle"),
    _flag(
        "sglang.enable_spec_v2",
        "SGLANG_ENABLE_SPEC_V2",
        "0.5.9 and 0.5.10: switches the overlapped worker on; 0.5.11 to 0.5.13: 0 switches it off; gone since 0.5.14",
        until="0.5.13.post1",
    ),
    _flag(
        "sglang.allow_overwrite_longer_context_len",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
        "the draft's positions are overwritten with the served context",
    ),
    _flag("sglang.simulate_acc_len", "SGLANG_SIMULATE_ACC_LEN", "fakes acceptance: every figure is made up"),
)

MACHINE = (
    _flag("sglang.attention_backend", "--attention-backend", "the draft's, too, unless it has its own"),
    _flag("sglang.prefill_attention_backend", "--prefill-attention-backend", "verifies, in attention mode prefill"),
    _flag("sglang.decode_attention_backend", "--decode-attention-backend"),
    _flag("sglang.sampling_backend", "--sampling-backend"),
    _flag("sglang.grammar_backend", "--grammar-backend"),
    _flag("sglang.quantization", "--quantization", "the draft's, too, unless it has its own"),
    _flag("sglang.kv_cache_dtype", "--kv-cache-dtype", "the draft's, too"),
    _flag("sglang.load_format", "--load-format", "the draft's, too"),
    _flag(
        "sglang.cuda_graph_max_bs",
        "--cuda-graph-max-bs",
        "a graph of verify holds batch x width rows",
        until="0.5.15.post1",
    ),
    _flag(
        "sglang.cuda_graph_max_bs_decode",
        "--cuda-graph-max-bs-decode",
        "a graph of verify holds batch x width rows",
        since="0.5.14",
    ),
    _flag("sglang.disable_cuda_graph", "--disable-cuda-graph", "draft steps without graphs are slow"),
    _flag("sglang.disable_cuda_graph_padding", "--disable-cuda-graph-padding"),
    _flag("sglang.enable_torch_compile", "--enable-torch-compile"),
    _flag("sglang.enable_deterministic_inference", "--enable-deterministic-inference", "sets NCCL_ALGO itself"),
    _flag(
        "sglang.mem_fraction_static",
        "--mem-fraction-static",
        "stated, no release before 0.5.14 sets memory aside for the draft",
    ),
    _flag("sglang.max_total_tokens", "--max-total-tokens", "the draft's KV cache has a place for each of them"),
    _flag("sglang.max_prefill_tokens", "--max-prefill-tokens"),
    _flag("sglang.chunked_prefill_tokens", "--chunked-prefill-size"),
    _flag("sglang.page_size_tokens", "--page-size", "trees need 1, or a backend that knows them"),
    _flag("sglang.schedule_policy", "--schedule-policy"),
    _flag("sglang.schedule_conservativeness", "--schedule-conservativeness"),
    _flag("sglang.num_continuous_decode_steps", "--num-continuous-decode-steps"),
    _flag("sglang.disable_overlap_schedule", "--disable-overlap-schedule", "from 0.5.13 on: the synchronous worker"),
    _flag("sglang.enable_mixed_chunk", "--enable-mixed-chunk", "switched off"),
    _flag("sglang.disable_radix_cache", "--disable-radix-cache", "with the cache, hits are one token shorter"),
    _flag("sglang.enable_two_batch_overlap", "--enable-two-batch-overlap", "its layers are not captured for the draft"),
    _flag("sglang.enable_pdmux", "--enable-pdmux"),
    _flag("sglang.cpu_offload_gb", "--cpu-offload-gb"),
    _flag("sglang.pp_size", "--pp-size --pipeline-parallel-size --pp", "above 1 refused with speculation"),
    _flag("sglang.dp_size", "--dp-size --data-parallel-size --dp"),
    _flag("sglang.ep_size", "--ep-size --expert-parallel-size --ep"),
    _flag("sglang.enable_dp_attention", "--enable-dp-attention", "refused for STANDALONE and NGRAM"),
    _flag("sglang.moe_runner_backend", "--moe-runner-backend"),
    _flag("sglang.moe_a2a_backend", "--moe-a2a-backend"),
    _flag("sglang.disable_shared_experts_fusion", "--disable-shared-experts-fusion"),
    _flag(
        "sglang.disable_custom_all_reduce",
        "--disable-custom-all-reduce",
        "the small sums of every draft step and verify go through NCCL: part of the fixed cost of a round",
    ),
    _flag(
        "sglang.enable_flashinfer_allreduce_fusion",
        "--enable-flashinfer-allreduce-fusion",
        "until 0.5.13 the draft is fed partial sums",
    ),
    _flag(
        "sglang.enforce_disable_flashinfer_allreduce_fusion",
        "--enforce-disable-flashinfer-allreduce-fusion",
        "the draft is fed whole sums",
        since="0.5.10.post1",
    ),
    _flag("sglang.enable_symm_mem", "--enable-symm-mem"),
    _flag("sglang.enable_nccl_nvls", "--enable-nccl-nvls"),
    _flag("sglang.enable_mscclpp", "--enable-mscclpp"),
    _flag("sglang.enable_torch_symm_mem", "--enable-torch-symm-mem"),
    _flag("sglang.nnodes", "--nnodes"),
    _flag("sglang.node_rank", "--node-rank"),
    _flag("sglang.dist_init_addr", "--dist-init-addr --nccl-init-addr"),
    _flag("sglang.nccl_port", "--nccl-port"),
    _flag("sglang.device", "--device"),
    _flag("sglang.base_gpu_id", "--base-gpu-id"),
    _flag("sglang.cuda_visible_devices", "CUDA_VISIBLE_DEVICES"),
)

SERVICE = (
    _flag("sglang.trust_remote_code", "--trust-remote-code"),
    _flag("sglang.tokenizer_path", "--tokenizer-path"),
    _flag("sglang.tokenizer_mode", "--tokenizer-mode"),
    _flag("sglang.json_model_override_args", "--json-model-override-args"),
    _flag("sglang.chat_template", "--chat-template"),
    _flag("sglang.served_model_name", "--served-model-name"),
    _flag("sglang.reasoning_parser", "--reasoning-parser"),
    _flag("sglang.tool_call_parser", "--tool-call-parser"),
    _flag("sglang.random_seed", "--random-seed"),
    _flag("sglang.stream_interval_tokens", "--stream-interval"),
    _flag("sglang.enable_return_hidden_states", "--enable-return-hidden-states"),
    _flag(
        "sglang.enable_return_aux_hidden_states",
        "--enable-return-aux-hidden-states",
        "shows what the draft is fed",
        since="0.5.23",
    ),
    _flag("sglang.skip_server_warmup", "--skip-server-warmup"),
    _flag("sglang.log_level", "--log-level"),
    _flag("sglang.log_level_http", "--log-level-http"),
    _flag("sglang.log_requests", "--log-requests"),
    _flag("sglang.log_requests_level", "--log-requests-level"),
    _flag("sglang.enable_metrics", "--enable-metrics", "acceptance for Prometheus"),
    _flag("sglang.enable_cache_report", "--enable-cache-report"),
    _flag("sglang.decode_log_interval_batches", "--decode-log-interval", "how often the log tells acceptance"),
    _flag("sglang.watchdog_timeout_seconds", "--watchdog-timeout"),
    _flag("sglang.soft_watchdog_timeout_seconds", "--soft-watchdog-timeout"),
)

NCCL = tuple(
    _flag(
        f"nccl.{field}",
        "NCCL_" + field.removesuffix("_bytes").upper(),
        "acts on the sums of draft and verify, too, where NCCL does them",
    )
    for field in NCCL_FIELDS
)

FLAGS: tuple[Flag, ...] = (*SHARED, *SPECULATION, *MACHINE, *SERVICE, *NCCL)

# Known and not taken, each with the reason and what to do.
REFUSED = {
    "SGLANG_SIMULATE_ACC_LEN": "it fakes acceptance: no figure of such a server is real; leave it out",
    "--api-key": "a secret has no place in a deployment file; leave it out and give it to the server alone",
    "--admin-api-key": "a secret has no place in a deployment file; leave it out and give it to the server alone",
    "--config": "a file of further flags is not read; write its flags on the line",
}


# Part of target.source on a hub: hf://ORG/NAME@REVISION.
REVISION = Flag("target.source@revision", ("--revision",))


@cache
def by_name() -> dict[str, Flag]:
    """Every spelling -> its flag."""
    return {name: flag for flag in (*FLAGS, REVISION) for name in flag.names}


@cache
def _by_key() -> dict[str, Flag]:
    return {flag.key: flag for flag in FLAGS}


def flag_of(key: str) -> Flag | None:
    """The flag or variable of a dotted key; None for a key that SGLang has no word for."""
    return _by_key().get(key)
