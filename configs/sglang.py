"""The section of what only SGLang has: flags and variables of its launch line. None is: not on the line.

A key is the flag's own name, with its unit where there is one. What other engines have too stands in the sections that
all share: `speculation.num_steps`, `speculation.verify_width`, `server.max_context_tokens` and so on.
"""

from typing import Annotated, Literal

from pydantic import Field

from slipstream.configs.base import CountOrZero, Fraction, PositiveFloat, PositiveInt, Section

Algorithm = Literal["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO"]
# Every name that one of the releases read (0.5.9 to 0.5.23) takes.
AttentionBackend = Literal[
    "triton", "torch_native", "flex_attention", "nsa", "dsa", "fa3", "fa4", "flashinfer", "flashmla", "cutlass_mla",
    "trtllm_mla", "cutedsl_mla", "tokenspeed_mla", "trtllm_mha", "dual_chunk_flash_attn", "hpc_ops", "aiter", "wave",
    "intel_amx", "ascend", "intel_xpu",
]  # fmt: skip
DraftAttentionBackend = Literal["flashinfer", "fa3", "fa4", "triton", "ascend", "trtllm_mha", "intel_xpu"]
Quantization = Literal[
    "awq", "awq_marlin", "gptq", "gptq_marlin", "fp8", "mxfp8", "bitsandbytes", "gguf", "modelopt", "modelopt_fp8",
    "modelopt_fp4", "modelopt_mixed", "nvfp4_online", "petit_nvfp4", "w8a8_int8", "w8a8_fp8", "moe_wna16", "qoq",
    "w4afp8", "mxfp4", "auto-round", "auto-round-int8", "compressed-tensors", "modelslim", "mxfp_w4a8", "quark",
    "quark_int4fp8_moe", "quark_mxfp4", "unquant", "humming",
]  # fmt: skip
KvCacheDtype = Literal["auto", "fp8_e5m2", "fp8_e4m3", "bf16", "bfloat16", "fp4_e2m1"]
Threshold = Annotated[float, Field(gt=0.0, le=1.0)]


class Sglang(Section):
    """What only SGLang has; read with `server.engine: sglang`."""

    # ---- speculation
    speculative_algorithm: Algorithm | None = Field(
        default=None, description="Kind of speculation; unset is none. EAGLE3 for an EAGLE-3 draft."
    )
    speculative_draft_model_revision: str | None = Field(
        default=None, description="Revision of a draft from a hub; unset is `main`, whatever that is on the day."
    )
    speculative_draft_load_format: str | None = Field(
        default=None, description="Form of the draft's weights; unset is that of the target, `dummy` is random weights."
    )
    speculative_draft_model_quantization: Quantization | None = Field(
        default=None, description="Quantization of the draft; unset copies the target's flag, `unquant` is none."
    )
    speculative_draft_attention_backend: DraftAttentionBackend | None = Field(
        default=None, description="Attention kernels of the draft; unset is the target's."
    )
    speculative_draft_kv_cache_dtype: KvCacheDtype | None = Field(
        default=None, description="Type of the draft's KV cache; unset is that of the target."
    )
    speculative_draft_window_tokens: PositiveInt | None = Field(
        default=None, description="Sliding window of the draft's attention, in tokens; unset is all positions."
    )
    speculative_draft_sink_tokens: CountOrZero | None = Field(
        default=None, description="First tokens that a windowed draft always sees."
    )
    speculative_attention_mode: Literal["prefill", "decode"] | None = Field(
        default=None, description="Which of the two attention backends verifies; unset is prefill's."
    )
    speculative_accept_threshold_single: Threshold | None = Field(
        default=None, description="Accepts a draft of at least this probability; 1.0 is exact."
    )
    speculative_accept_threshold_acc: Threshold | None = Field(
        default=None, description="Raises the probability of acceptance from p to p / this; 1.0 is exact."
    )
    speculative_use_rejection_sampling: bool | None = Field(
        default=None, description="Accepts by rejection sampling over both distributions."
    )
    speculative_use_block_verification: bool | None = Field(
        default=None, description="Accepts blocks of drafts; turns rejection sampling on."
    )
    speculative_token_map: str | None = Field(default=None, description="Reduced draft vocabulary (FR-Spec) of EAGLE.")
    speculative_moe_runner_backend: str | None = Field(default=None, description="MoE kernels of the draft.")
    speculative_moe_a2a_backend: str | None = Field(default=None, description="Expert exchange of the draft.")
    speculative_adaptive: bool | None = Field(
        default=None, description="Changes the number of steps while serving, by measured acceptance."
    )
    speculative_adaptive_config: str | None = Field(
        default=None, description="JSON file of the adaptive steps: candidates and thresholds."
    )
    enable_multi_layer_eagle: bool | None = Field(default=None, description="One draft layer a step (MTP models).")
    enable_spec_v2: bool | None = Field(
        default=None, description="SGLANG_ENABLE_SPEC_V2: the overlapped speculative worker."
    )
    allow_overwrite_longer_context_len: bool | None = Field(
        default=None,
        description="SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN: a context longer than a model's own is no error.",
    )
    simulate_acc_len: float | None = Field(
        default=None, description="SGLANG_SIMULATE_ACC_LEN: a made-up accept length. Refused."
    )

    # ---- attention, types, graphs
    attention_backend: AttentionBackend | None = Field(
        default=None, description="Attention kernels; unset is chosen by model and GPU."
    )
    prefill_attention_backend: AttentionBackend | None = Field(
        default=None, description="Attention kernels of prefill."
    )
    decode_attention_backend: AttentionBackend | None = Field(default=None, description="Attention kernels of decode.")
    sampling_backend: str | None = Field(default=None, description="Kernels that sample.")
    grammar_backend: str | None = Field(default=None, description="Library of constrained answers.")
    quantization: Quantization | None = Field(
        default=None, description="Quantization of the target; unset is read from its config."
    )
    kv_cache_dtype: KvCacheDtype | None = Field(
        default=None, description="Type of the KV cache; `auto` is the model's."
    )
    load_format: str | None = Field(default=None, description="Form of the target's weights.")
    cuda_graph_max_bs: PositiveInt | None = Field(
        default=None, description="Largest batch with a CUDA graph (releases before 0.5.23)."
    )
    cuda_graph_max_bs_decode: PositiveInt | None = Field(
        default=None, description="Largest decode batch with a CUDA graph (from 0.5.14)."
    )
    disable_cuda_graph: bool | None = Field(default=None, description="Runs without CUDA graphs.")
    disable_cuda_graph_padding: bool | None = Field(
        default=None, description="CUDA graphs only for batches of just their size."
    )
    enable_torch_compile: bool | None = Field(default=None, description="Compiles the model with torch.")
    enable_deterministic_inference: bool | None = Field(
        default=None, description="Answers that do not depend on the batch."
    )

    # ---- memory and scheduling
    mem_fraction_static: Fraction | None = Field(
        default=None, description="Share of the GPU's memory for weights and KV cache; unset is computed."
    )
    max_total_tokens: PositiveInt | None = Field(default=None, description="Tokens of the KV cache.")
    max_prefill_tokens: PositiveInt | None = Field(default=None, description="Tokens of one prefill batch.")
    chunked_prefill_tokens: int | None = Field(
        default=None, ge=-1, description="Longest piece of a prompt in one prefill, in tokens; -1 is all of it."
    )
    page_size_tokens: PositiveInt | None = Field(default=None, description="Tokens of one page of the KV cache.")
    schedule_policy: str | None = Field(default=None, description="Order of waiting requests.")
    schedule_conservativeness: PositiveFloat | None = Field(
        default=None, description="How carefully requests are admitted; larger is fewer."
    )
    num_continuous_decode_steps: PositiveInt | None = Field(
        default=None, description="Decode steps between two looks at the queue. No release read (0.5.9 on) uses it."
    )
    disable_overlap_schedule: bool | None = Field(
        default=None, description="The CPU does not schedule the next batch while the GPU computes."
    )
    enable_mixed_chunk: bool | None = Field(default=None, description="Prefill and decode in one batch.")
    disable_radix_cache: bool | None = Field(default=None, description="No prefix cache.")
    enable_two_batch_overlap: bool | None = Field(default=None, description="Two half batches that overlap.")
    enable_pdmux: bool | None = Field(default=None, description="Prefill and decode share a GPU by multiplexing.")
    cpu_offload_gb: CountOrZero | None = Field(default=None, description="Weights kept in host memory, in GB.")

    # ---- several GPUs and hosts
    pp_size: PositiveInt | None = Field(default=None, description="Pipeline stages.")
    dp_size: PositiveInt | None = Field(default=None, description="Data-parallel replicas.")
    ep_size: PositiveInt | None = Field(default=None, description="Ranks that share the experts.")
    enable_dp_attention: bool | None = Field(default=None, description="Attention by replicas, experts by ranks.")
    moe_runner_backend: str | None = Field(default=None, description="MoE kernels.")
    moe_a2a_backend: str | None = Field(default=None, description="Expert exchange.")
    disable_shared_experts_fusion: bool | None = Field(default=None, description="Shared experts apart.")
    disable_custom_all_reduce: bool | None = Field(
        default=None, description="No all-reduce kernel of SGLang's own: small sums go through NCCL."
    )
    enable_flashinfer_allreduce_fusion: bool | None = Field(
        default=None, description="All-reduce, residual and norm in one kernel; comes on by itself for some models."
    )
    enforce_disable_flashinfer_allreduce_fusion: bool | None = Field(
        default=None, description="That fusion stays off (from 0.5.10)."
    )
    enable_symm_mem: bool | None = Field(default=None, description="NCCL's symmetric memory.")
    enable_nccl_nvls: bool | None = Field(default=None, description="NCCL's NVLS for prefill.")
    enable_mscclpp: bool | None = Field(default=None, description="MSCCL++ for small all-reduces.")
    enable_torch_symm_mem: bool | None = Field(default=None, description="Torch's symmetric memory for all-reduces.")
    nnodes: PositiveInt | None = Field(default=None, description="Number of hosts.")
    node_rank: CountOrZero | None = Field(default=None, description="Number of this host.")
    dist_init_addr: str | None = Field(default=None, description="Address at which the hosts meet.")
    nccl_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(default=None, description="Port of NCCL's set-up.")
    device: str | None = Field(default=None, description="Kind of device, such as cuda.")
    base_gpu_id: CountOrZero | None = Field(default=None, description="First GPU that is used.")
    cuda_visible_devices: str | None = Field(default=None, description="CUDA_VISIBLE_DEVICES: the GPUs to be seen.")

    # ---- model and service
    trust_remote_code: bool | None = Field(default=None, description="Runs Python code that lies beside the weights.")
    tokenizer_path: str | None = Field(default=None, description="Tokenizer elsewhere than beside the target.")
    tokenizer_mode: Literal["auto", "slow"] | None = Field(default=None, description="Fast tokenizer or the slow one.")
    json_model_override_args: str | None = Field(default=None, description="JSON that overrides the target's config.")
    chat_template: str | None = Field(default=None, description="Chat template elsewhere than beside the target.")
    served_model_name: str | None = Field(default=None, description="Name of the model in the API.")
    reasoning_parser: str | None = Field(default=None, description="Splits thoughts from the answer.")
    tool_call_parser: str | None = Field(default=None, description="Reads tool calls out of the answer.")
    random_seed: CountOrZero | None = Field(default=None, description="Seed of the sampling.")
    stream_interval_tokens: PositiveInt | None = Field(default=None, description="Tokens between two streamed pieces.")
    enable_return_hidden_states: bool | None = Field(default=None, description="Requests may ask for hidden states.")
    enable_return_aux_hidden_states: bool | None = Field(
        default=None, description="Requests may ask for the states that the draft is fed (0.5.23): for parity."
    )
    skip_server_warmup: bool | None = Field(default=None, description="No warm-up request.")
    log_level: str | None = Field(default=None, description="How much is logged.")
    log_level_http: str | None = Field(default=None, description="How much of HTTP is logged.")
    log_requests: bool | None = Field(default=None, description="Logs every request.")
    log_requests_level: CountOrZero | None = Field(default=None, description="How much of each request is logged.")
    enable_metrics: bool | None = Field(default=None, description="Serves /metrics for Prometheus.")
    enable_cache_report: bool | None = Field(default=None, description="Answers say how many tokens were cached.")
    decode_log_interval_batches: PositiveInt | None = Field(
        default=None, description="Decode batches between two log lines."
    )
    watchdog_timeout_seconds: PositiveFloat | None = Field(
        default=None, description="A batch that takes longer ends the server."
    )
    soft_watchdog_timeout_seconds: PositiveFloat | None = Field(
        default=None, description="A batch that takes longer is dumped, the server goes on."
    )
