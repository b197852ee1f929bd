"""Every row of the fact sheet's table of silent changes on the named topics, set and unset, by release.

The cases are written from the fact sheet (SGLang, sections 0, 1a, 1b) and from SGLang's own sources, not from our table:
row, release, what is asked beside a launch in which nothing changes, and what must be told.
"""
# ruff: noqa: E501  (one case a line)

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from slipstream.configs.schema import Deployment
from slipstream.tasks.facts import Facts
from slipstream.tasks.other_engines.effect import Effect
from slipstream.tasks.other_engines.launch_facts import read_other_model
from slipstream.tasks.other_engines.sglang_effects import effects

UNSET = object()
OLD = ("0.5.9", "0.5.10.post1")
ALL = ("0.5.9", "0.5.10.post1", "0.5.11", "0.5.12.post1", "0.5.13.post1", "0.5.14", "0.5.15.post1", "0.5.23")
FROM_13 = ALL[4:]
FROM_14 = ALL[5:]

# A launch in which, from 0.5.14 on, nothing is changed and nothing is chosen.
CLEAN: dict[str, Any] = {
    "server.max_running_requests": 48,
    "server.max_context_tokens": 4096,
    "server.dtype": "bfloat16",
    "speculation.num_steps": 3,
    "speculation.topk": 1,
    "speculation.verify_width": 4,
    "sglang.speculative_algorithm": "EAGLE3",
    "sglang.mem_fraction_static": 0.8,
    "sglang.attention_backend": "fa3",
}
TARGETS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192, "vocab_size": 1000},
    "grok": {"architectures": ["Grok1ForCausalLM"], "max_position_embeddings": 8192, "vocab_size": 1000},
    "qwen": {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 8192, "vocab_size": 1000},
    "deepseek": {"architectures": ["DeepseekV3ForCausalLM"], "max_position_embeddings": 8192, "vocab_size": 1000},
    "kimi": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": {"max_position_embeddings": 8192, "vocab_size": 1000},
    },
}
DRAFT = {"max_position_embeddings": 4096, "vocab_size": 1000}
DRAFTS = {
    "mha": {**DRAFT, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 1000},
    "small": {**DRAFT, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 500},
    "mla": {**DRAFT, "architectures": ["Eagle3DeepseekV2ForCausalLM"]},
    "eagle1": {**DRAFT, "architectures": ["LlamaForCausalLMEagle"]},
    "plain": {**DRAFT, "architectures": ["LlamaForCausalLM"]},
    "short": {**DRAFT, "architectures": ["LlamaForCausalLMEagle3"], "max_position_embeddings": 2048},
    "int4": {**DRAFT, "architectures": ["LlamaForCausalLMEagle3"], "quantization_config": {"quant_method": "awq"}},
}


class Case(NamedTuple):
    """One condition: `asked` beside the clean launch; `severity` None means that the row must not be told."""

    row: str
    versions: tuple[str, ...]
    asked: dict[str, Any]
    severity: str | None
    words: str = ""
    target: str | None = "llama"
    draft: str | None = "mha"

    def __str__(self) -> str:
        asked = ",".join(f"{k.split('.')[1]}={'unset' if v is UNSET else v}" for k, v in self.asked.items())
        return f"{self.row}:{asked or 'clean'}:{self.target}:{self.draft}:{self.versions[0]}"


def s(**keys: Any) -> dict[str, Any]:
    """Keys of the section sglang."""
    return {f"sglang.{key}": value for key, value in keys.items()}


def spec(steps: Any, topk: Any, width: Any) -> dict[str, Any]:
    return {"speculation.num_steps": steps, "speculation.topk": topk, "speculation.verify_width": width}


NO_DRAFT = {"draft.path": UNSET}
RUNNING = {"server.max_running_requests": UNSET}
CONTEXT = {"server.max_context_tokens": UNSET}
TP8 = {"server.tensor_parallel_size": 8}

CASES = [
    # 1: topk 1, tokens != steps + 1
    Case("1", ALL, spec(1, 1, 16), "error", "verify width 2"),
    Case("1", ALL, spec(15, 1, 16), None),
    Case("1", ALL, spec(5, 1, 6), None),
    Case("1", ALL, spec(5, 1, 5), "error", "verify width 6"),
    Case("1", ALL, spec(3, 1, UNSET), "warning", "verify width 4"),
    Case("1", ALL, spec(3, 4, 16), None),
    Case("1", ALL, spec(1, 1, 16) | s(speculative_algorithm="NGRAM"), None),
    Case("1", ALL, spec(1, 1, 16) | s(speculative_algorithm="EAGLE"), "error", "verify width 2", "llama", "eagle1"),
    Case("1", ALL, spec(1, 1, 16) | s(speculative_algorithm="STANDALONE"), "error", "verify width 2"),
    Case("1", FROM_14, spec(3, 1, 16) | s(speculative_adaptive=True), None),  # 24 tells
    Case("1", ALL[3:5], spec(3, 1, 16) | s(speculative_adaptive=True), "error", "verify width 4"),
    # 2: steps unset
    Case("2", ALL, spec(UNSET, UNSET, 16) | s(speculative_algorithm="NGRAM"), None),
    Case("2", FROM_14, spec(UNSET, 1, UNSET) | s(speculative_adaptive=True), None),
    Case("2", ALL, spec(UNSET, UNSET, 16), "error", "the start fails"),
    Case("2", ALL, spec(UNSET, 1, 16), "error", "the start fails"),
    Case("2", ALL, spec(UNSET, 1, UNSET), "error", "the start fails"),
    Case("2", ALL, spec(UNSET, UNSET, UNSET), "warning", "steps 5, topk 4, tokens 8"),
    Case("2", ALL, spec(UNSET, UNSET, UNSET), "warning", "steps 5, topk 4, tokens 8", "grok"),
    Case("2", ALL, spec(UNSET, UNSET, UNSET), "warning", "steps 3, topk 1, tokens 4", "qwen"),
    Case("2", ALL, spec(UNSET, UNSET, UNSET), "warning", "steps 3, topk 1, tokens 4", "deepseek"),
    Case("2", FROM_14, spec(UNSET, UNSET, UNSET), "warning", "steps 3, topk 1, tokens 4", "kimi"),
    Case("2", ALL, spec(UNSET, UNSET, UNSET), "warning", "for a Llama or Grok target, 3, 1, 4 for any other", None),
    Case("2", ALL, {**spec(UNSET, UNSET, UNSET), **s(speculative_algorithm="STANDALONE")}, "warning", "3, topk 1"),
    Case("2", ALL, spec(3, 1, 4), None),
    # 3: steps set, topk unset
    Case("3", ALL, spec(1, UNSET, 16), "error", "the start fails"),
    Case("3", ALL, spec(3, UNSET, UNSET), "error", "the start fails"),
    Case("3", ALL, spec(3, 1, 4), None),
    Case("3", ALL, spec(3, UNSET, 4) | s(speculative_algorithm="NGRAM"), None),
    Case("3", FROM_14, spec(3, UNSET, UNSET) | s(speculative_adaptive=True), None),
    Case("3", ALL[3:5], spec(3, UNSET, UNSET) | s(speculative_adaptive=True), "error", "the start fails"),
    # 1a: trees; tokens - 1 within topk + (steps - 1) x topk^2
    Case("1a", ALL, spec(2, 2, 7), None),
    Case("1a", ALL, spec(2, 2, 8), "error", "= 6 candidates"),
    Case("1a", ALL, spec(3, 4, UNSET), "error", "without a width"),
    Case("1a", ALL, spec(1, 4, 5), "error", "a tree of one step"),
    Case("1a", ALL, {**spec(3, 1, 4), **s(speculative_algorithm=UNSET)}, "error", "no speculation"),
    Case("1a", ALL, s(speculative_accept_threshold_single=0.9), "warning", "changes the answers"),
    Case("1a", ALL, s(speculative_accept_threshold_acc=0.5), "warning", "changes the answers"),
    Case("1a", ALL, s(speculative_accept_threshold_single=1.0), None),
    Case("1a", ALL, s(speculative_token_map="/m.pt"), "error", "ignored for EAGLE3"),
    Case("1a", ALL, s(speculative_token_map="/m.pt", speculative_algorithm="EAGLE"), None, "", "llama", "eagle1"),
    Case("1a", ALL, s(speculative_draft_load_format="dummy"), "error", "random weights"),
    Case("1a", ALL, s(simulate_acc_len=3.0), "error", "made up"),
    Case("1a", ALL, {"draft.path": "org/a-draft"}, "warning", "revision `main`", "llama", None),
    Case("1a", ALL, {"draft.path": "org/a-draft", **s(speculative_draft_model_revision="abc")}, None, "", "llama", None),
    Case("1a", ALL, {"target.source": "hf://org/name@main"}, "warning", "revision `main`"),
    Case("1a", ALL, {"target.source": "hf://org/name@0123abc"}, None),
    # 4, 5: max-running-requests
    Case("4", ALL, RUNNING, "warning", "48"),
    Case("4", ALL, {**RUNNING, **s(speculative_algorithm="NGRAM")}, "warning", "48"),
    Case("4", ALL, {}, None),
    Case("4", ALL, {**RUNNING, **s(speculative_algorithm=UNSET), **spec(UNSET, UNSET, UNSET), **NO_DRAFT}, None),
    Case("5", ALL, RUNNING, "warning", "512 with TP 4 or more"),
    Case("5", ALL, {}, None),
    Case("5", ALL[:7], {**RUNNING, **s(cuda_graph_max_bs=48)}, None),
    Case("5", FROM_14, {**RUNNING, **s(cuda_graph_max_bs_decode=48)}, None),
    # 6, 7: mem-fraction-static
    Case("6", ALL, s(mem_fraction_static=UNSET), "warning", "512 MB + 1.5 MB x chunked prefill + 2 MB x graph batch"),
    Case("6", ALL, {}, None),
    Case("7", ("0.5.9",), s(mem_fraction_static=UNSET), "warning", "2 GB more"),
    Case("7", ("0.5.10.post1", "0.5.11", "0.5.12.post1", "0.5.13.post1"), s(mem_fraction_static=UNSET), "warning", "4 GB"),
    Case("7", FROM_14, s(mem_fraction_static=UNSET), "warning", "part of the budget"),
    Case("7", ALL[:5], {}, "warning", "nothing is set aside for the draft"),
    Case("7", FROM_14, {}, None),
    # 8: mixed chunk
    Case("8", ALL, s(enable_mixed_chunk=True), "error", "switched off"),
    Case("8", ALL, {}, None),
    # 9 to 11: overlap
    Case("9", OLD, {}, "warning", "overlap is off"),
    Case("9", OLD, s(disable_overlap_schedule=True), None),
    Case("9", OLD, s(enable_spec_v2=True), None),
    Case("9", OLD, {**s(enable_spec_v2=True), **spec(3, 4, 8)}, "error", "the start fails"),
    Case("9", OLD, s(enable_spec_v2=True, disable_overlap_schedule=True), "error", "overlap is on"),
    Case("9", ALL[2:], {}, None),
    Case("10", ("0.5.11", "0.5.12.post1"), {}, None),
    Case("10", ("0.5.11", "0.5.12.post1"), spec(3, 4, 8), "warning", "v1"),
    Case("10", ("0.5.11", "0.5.12.post1"), {**spec(3, 4, 8), **s(enable_spec_v2=True)}, "error", "v1"),
    Case("10", ("0.5.11", "0.5.12.post1"), s(enable_spec_v2=False), "note", "v1"),
    Case("11", FROM_13, s(disable_overlap_schedule=True), "warning", "synchronous"),
    Case("11", ("0.5.13.post1",), s(enable_spec_v2=False), "warning", "synchronous"),
    Case("11", FROM_14, s(enable_spec_v2=True), "warning", "this variable is gone"),
    Case("11", FROM_14, s(enable_spec_v2=False), "error", "this variable is gone"),
    Case("11", FROM_13, {}, None),
    Case("11", FROM_13, spec(3, 4, 8), None),
    # 12, 13: trees and attention
    Case("12", ALL, {**spec(3, 4, 8), **s(page_size_tokens=64, attention_backend="flashmla")}, "error", "the start fails"),
    Case("12", ALL[:4], {**spec(3, 4, 8), **s(page_size_tokens=64, attention_backend="triton")}, "error", "the start fails"),
    Case("12", FROM_13, {**spec(3, 4, 8), **s(page_size_tokens=64, attention_backend="triton")}, None),
    Case("12", ALL, {**spec(3, 4, 8), **s(page_size_tokens=64, attention_backend="fa3")}, None),
    Case("12", ALL, {**spec(3, 4, 8), **s(page_size_tokens=64, attention_backend="flashinfer")}, None),
    Case("12", ALL, {**spec(3, 4, 8), **s(page_size_tokens=64, attention_backend=UNSET)}, "warning", "depends on the GPU"),
    Case("12", ALL, {**spec(3, 4, 8), **s(page_size_tokens=1, attention_backend="triton")}, None),
    Case("12", ALL, {**spec(3, 4, 8), **s(attention_backend="triton")}, None),
    Case("12", ALL, {**s(page_size_tokens=64, attention_backend="triton")}, None),
    Case("13", ALL, {**spec(3, 4, 8), **s(attention_backend="trtllm_mha")}, "error", "the start fails"),
    Case("13", ALL, {**spec(3, 4, 8), **s(decode_attention_backend="trtllm_mha")}, "error", "the start fails"),
    Case("13", ALL, s(attention_backend="trtllm_mha", page_size_tokens=64), None),
    Case("13", ALL, {**spec(UNSET, UNSET, UNSET), **s(attention_backend="trtllm_mha")}, "error", "the start fails"),
    Case("13", ALL, {**spec(UNSET, UNSET, UNSET), **s(attention_backend="trtllm_mha")}, None, "", "qwen"),
    Case("13", ALL, {**spec(UNSET, UNSET, UNSET), **s(attention_backend="trtllm_mha")}, None, "", None),
    # 14: pages
    Case("14", ALL, s(attention_backend="flashmla"), "warning", "page size 64"),
    Case("14", ALL, s(attention_backend="flashmla", page_size_tokens=32), "error", "page size 64"),
    Case("14", ALL, s(attention_backend="flashmla", page_size_tokens=64), None),
    Case("14", ALL, s(attention_backend="trtllm_mla", page_size_tokens=1), "error", "page size 64"),
    Case("14", ALL, s(attention_backend="trtllm_mla", page_size_tokens=32), None),
    Case("14", ("0.5.23",), s(attention_backend="cutedsl_mla", page_size_tokens=16), "error", "page size 64"),
    Case("14", ("0.5.23",), s(speculative_draft_attention_backend="trtllm_mha", page_size_tokens=1), "error", "both models"),
    Case("14", ("0.5.23",), s(speculative_draft_attention_backend="trtllm_mha", page_size_tokens=128), None),
    Case("14", ALL, s(page_size_tokens=1), None),
    # 15, 16: attention backend
    Case("15", FROM_14, s(attention_backend=UNSET), "warning", "fa3 on Hopper, trtllm_mla on SM100, triton", "kimi"),
    Case("15", ALL, s(attention_backend=UNSET), "warning", "fa3 on Hopper, trtllm_mla on SM100, triton", "deepseek"),
    Case("15", ALL, s(attention_backend=UNSET), "warning", "by the target's kind", "llama"),
    Case("15", ALL, {}, None),
    Case("16", ALL, s(attention_backend="trtllm_mla", page_size_tokens=64), "error", "runs MLA models alone", "deepseek"),
    Case("16", ALL, s(attention_backend="trtllm_mla", page_size_tokens=64), "warning", "if the draft", "deepseek", None),
    Case("16", ALL[3:], s(attention_backend="trtllm_mla", page_size_tokens=64), None, "", "deepseek", "mla"),
    Case(
        "16",
        ALL,
        s(attention_backend="trtllm_mla", page_size_tokens=64, speculative_draft_attention_backend="trtllm_mha"),
        None,
        "",
        "deepseek",
    ),
    Case("16", ALL, s(attention_backend=UNSET), "warning", "on SM100", "deepseek"),
    Case("16", ALL, s(attention_backend=UNSET), None, "", "llama"),
    # 17: quantization
    Case("17", ALL, s(quantization="awq"), "error", "becomes awq, too: it is not quantized"),
    Case("17", ALL, s(quantization="awq"), "warning", "does not load", "llama", None),
    Case("17", ALL, s(quantization="awq"), "warning", "becomes awq", "llama", "int4"),
    Case("17", ALL, s(quantization="awq", speculative_draft_model_quantization="unquant"), None),
    Case("17", ALL, {}, None),
    # 18: context length
    Case("18", ALL, {}, None),
    Case("18", ALL, CONTEXT, "error", "the start fails"),  # the target's 8192, the draft's 4096
    Case("18", ALL, {**CONTEXT, **s(allow_overwrite_longer_context_len=True)}, "error", "become 8192"),
    Case("18", ALL, {}, "error", "the start fails", "llama", "short"),
    Case("18", ALL, s(allow_overwrite_longer_context_len=True), "error", "become 4096", "llama", "short"),
    Case("18", ALL, {"server.max_context_tokens": 16384}, "error", "the start fails"),
    Case("18", ALL, {"server.max_context_tokens": 2048}, None, "", "llama", "short"),
    Case("18", ALL, s(allow_overwrite_longer_context_len=True), None),
    Case("18", ALL, s(allow_overwrite_longer_context_len=True), "warning", "instead of refused", "llama", None),
    Case("18", ALL, {**CONTEXT, **s(allow_overwrite_longer_context_len=True)}, "warning", "instead of refused", None, None),
    # 19, 20: draft path
    Case("19", ALL, NO_DRAFT, "error", "the target is loaded twice", "deepseek"),
    Case("19", ALL, NO_DRAFT, "error", "the start fails", "llama"),
    Case("19", ALL, NO_DRAFT, "error", "the target is loaded twice; for others the start fails", None),
    Case("19", ALL, {**NO_DRAFT, **s(speculative_algorithm="EAGLE")}, "warning", "MTP layer drafts; for others", None),
    Case("19", ALL, {**NO_DRAFT, **s(speculative_algorithm="EAGLE")}, "error", "no draft", "llama"),
    Case("19", ALL, {**NO_DRAFT, **s(speculative_algorithm="STANDALONE")}, "error", "no draft", "qwen"),
    Case("19", ALL, {**NO_DRAFT, **s(speculative_algorithm="EAGLE")}, "warning", "its own MTP layer", "deepseek"),
    Case("19", ALL, {**NO_DRAFT, **s(speculative_algorithm="NEXTN")}, "warning", "its own MTP layer", "deepseek"),
    Case("19", ALL, {}, None, "", "deepseek"),
    Case("20", ALL, {}, "note", "as asked", "deepseek"),
    Case("20", ALL, {}, None, "", "llama"),
    # 21: DP attention
    Case("21", ALL, s(speculative_algorithm="STANDALONE", enable_dp_attention=True), "error", "no DP attention"),
    Case("21", ALL, s(speculative_algorithm="NGRAM", enable_dp_attention=True), "error", "no DP attention"),
    Case("21", ALL, s(enable_dp_attention=True), None),
    Case("21", ALL, s(speculative_algorithm="STANDALONE"), None),
    # 22: algorithm and kind of draft
    Case("22", ALL, s(speculative_algorithm="EAGLE"), "error", "accept length 1.00"),
    Case("22", ALL, s(speculative_algorithm="NEXTN"), "error", "accept length 1.00"),
    Case("22", ALL[3:], s(speculative_algorithm="EAGLE"), "error", "accept length 1.00", "deepseek", "mla"),
    Case("22", ALL, s(speculative_algorithm="EAGLE"), None, "", "llama", "eagle1"),
    Case("22", ALL, s(speculative_algorithm="EAGLE"), "warning", "accept length 1.00", "llama", None),
    Case("22", ALL, {}, None),
    Case("2a", ALL, {}, "error", "another class", "llama", "plain"),
    Case("2a", ALL[:3], {}, "error", "no such class", "deepseek", "mla"),
    Case("2a", ALL[3:], {}, None, "", "deepseek", "mla"),
    # 23, 24: adaptive
    Case("23", ALL[3:], {**s(speculative_adaptive=True), **spec(3, 4, 8)}, "error", "switched off"),
    Case("23", ALL[3:], s(speculative_adaptive=True, enable_dp_attention=True), "error", "switched off"),
    Case("23", ALL[3:], s(speculative_adaptive=True, enable_two_batch_overlap=True), "error", "switched off"),
    Case("23", ALL[3:], s(speculative_adaptive=True, enable_pdmux=True), "error", "switched off"),
    Case("23", ALL[3:], s(speculative_adaptive=True, enable_multi_layer_eagle=True), "error", "switched off"),
    Case("23", ALL[3:], s(speculative_adaptive=True, speculative_algorithm="STANDALONE"), "error", "switched off"),
    Case("23", ("0.5.11",), s(speculative_adaptive=True), "error", "switched off"),
    Case("23", ALL[3:5], s(speculative_adaptive=True) | spec(UNSET, UNSET, UNSET), "error", "switched off"),
    Case("23", FROM_14, s(speculative_adaptive=True) | spec(UNSET, UNSET, UNSET), None),
    Case("23", ALL[3:], s(speculative_adaptive=True), None),
    Case("24", FROM_14, s(speculative_adaptive=True), None),
    Case("24", FROM_14, {**s(speculative_adaptive=True), **spec(3, 1, 16)}, "error", "verify width 4"),
    Case("24", FROM_14, {**s(speculative_adaptive=True), **spec(3, UNSET, UNSET)}, "warning", "topk 1"),
    Case("24", FROM_14, {**s(speculative_adaptive=True), **spec(UNSET, 1, UNSET)}, "warning", "middle candidate, 3"),
    Case("24", FROM_14, {**s(speculative_adaptive=True), **spec(3, 1, UNSET)}, "warning", "verify width 4"),
    Case("24", FROM_13, {**s(speculative_adaptive=True), **spec(4, 1, 5)}, "error", "the start fails"),
    Case("24", ("0.5.23",), {**s(speculative_adaptive=True), **spec(5, 1, 6)}, None),
    Case("24", ("0.5.14", "0.5.15.post1"), {**s(speculative_adaptive=True), **spec(5, 1, 6)}, "error", "[0, 1, 3, 7]"),
    Case("24", FROM_13, s(speculative_adaptive=True, speculative_adaptive_config="/c.json") | spec(4, 1, 5), None),
    # 25: rejection sampling
    Case("25", FROM_14, s(speculative_use_rejection_sampling=True), None),
    Case("25", FROM_14, {**s(speculative_use_rejection_sampling=True), **spec(3, 4, 8)}, "error", "chains only"),
    Case("25", FROM_14, s(speculative_use_rejection_sampling=True, speculative_accept_threshold_acc=0.9), "error", "thresh"),
    Case("25", FROM_14, s(speculative_use_rejection_sampling=True), "error", "whole vocabulary", "llama", "small"),
    Case("25", FROM_14, s(speculative_use_rejection_sampling=True), "warning", "vocabulary", "llama", None),
    Case("25", FROM_14, s(speculative_use_rejection_sampling=True, speculative_algorithm="STANDALONE"), "error", "fails"),
    Case("25", ("0.5.23",), s(speculative_use_block_verification=True), "error", "whole vocabulary", "llama", "small"),
    Case("25", FROM_14, {}, None),
    # 26: draft window
    Case("26", ALL[3:], s(speculative_draft_window_tokens=512), None),
    Case("26", ALL[3:], s(speculative_draft_window_tokens=512), "error", "MLA draft ignores", "deepseek", "mla"),
    Case("26", ALL[3:], s(speculative_draft_window_tokens=512), "warning", "MLA draft", "deepseek", None),
    Case("26", ALL[3:], s(speculative_draft_window_tokens=512, speculative_algorithm="NGRAM"), "error", "no effect"),
    Case("26", ALL[3:7], s(speculative_draft_window_tokens=512, speculative_algorithm="EAGLE"), "error", "no effect", "llama", "eagle1"),
    Case("26", ("0.5.23",), s(speculative_draft_window_tokens=512, speculative_algorithm="EAGLE"), None, "", "llama", "eagle1"),
    # 28, and flags that a release does not have
    Case("28", ALL, s(pp_size=2), "error", "no pipeline"),
    Case("28", ALL, s(pp_size=1), None),
    Case("flag", ALL[:5], s(speculative_use_rejection_sampling=True), "error", "no --speculative-use-rejection-sampling"),
    Case("flag", FROM_14, s(speculative_use_rejection_sampling=True), None),
    Case("flag", OLD, s(speculative_adaptive=True), "error", "no --speculative-adaptive"),
    Case("flag", ("0.5.23",), s(cuda_graph_max_bs=48), "error", "no --cuda-graph-max-bs"),
    Case("flag", ALL[:7], s(cuda_graph_max_bs=48), None),
    Case("flag", ("0.5.9",), s(enforce_disable_flashinfer_allreduce_fusion=True), "error", "from 0.5.10.post1 on"),
    # dtype
    Case("dtype", ALL, {"server.dtype": UNSET}, "warning", "float32"),
    Case("dtype", ALL, {}, None),
    # 0: capture
    Case("0", OLD, {}, "warning", "inside CUDA graphs the default layers"),
    Case("0", OLD, s(disable_cuda_graph=True), None),
    Case("0", ALL[2:], {}, None),
    Case("0", ("0.5.9",), s(disable_cuda_graph=True), "error", "no capture in 0.5.9", "kimi"),
    Case("0", ALL[2:5], TP8, "warning", "partial sums", "kimi"),
    Case("0", ALL[2:5], TP8, "warning", "partial sums", "deepseek"),
    Case("0", ALL[2:5], TP8, "warning", "partial sums", None),
    Case("0", ALL[2:5], TP8, None, "", "llama"),
    Case("0", ALL[2:5], {**TP8, **s(enable_flashinfer_allreduce_fusion=True)}, "error", "partial sums", "llama"),
    Case("0", ALL[2:5], {**TP8, **s(enforce_disable_flashinfer_allreduce_fusion=True)}, None, "", "kimi"),
    Case("0", ALL[2:5], {}, None, "", "kimi"),
    Case("0", FROM_14, TP8, None, "", "kimi"),
]  # fmt: skip


def launch(root: Path, asked: dict[str, Any], version: str | None, target: str | None, draft: str | None) -> Facts:
    """The clean launch with `asked` over it, and the two configs on the disk where they are known."""
    values: dict[str, Any] = {"server.engine": "sglang", "server.engine_version": version, **CLEAN}
    values["target.source"], values["draft.path"] = str(root / "target"), root / "draft"
    for name, configs, kind in (("target", TARGETS, target), ("draft", DRAFTS, draft)):
        if kind is not None:
            (root / name).mkdir(parents=True, exist_ok=True)
            (root / name / "config.json").write_text(json.dumps(configs[kind]))
    sections: dict[str, dict[str, Any]] = {}
    for key, value in (values | asked).items():
        if value is not UNSET:
            section, _, field = key.partition(".")
            sections.setdefault(section, {})[field] = value
    deployment = Deployment.model_validate(sections)
    return Facts(deployment, root / "work", target_dir=root / "target" if target else None)


def rows(root: Path, case: Case, version: str | None) -> list[Effect]:
    return [e for e in effects(launch(root, case.asked, version, case.target, case.draft)) if e.row == case.row]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_of_the_fact_sheet(tmp_path: Path, case: Case) -> None:
    for version in case.versions:
        found = rows(tmp_path, case, version)
        if case.severity is None:
            assert found == [], version
            continue
        told = [effect for effect in found if case.words in effect.effective]
        assert told, (version, found)
        assert {effect.severity for effect in told} == {case.severity}, version
        assert all(effect.visible and (effect.ways or case.severity == "note") for effect in told)


def test_every_row_on_the_named_topics_has_a_case_that_is_told_and_one_that_is_not() -> None:
    named = {*map(str, range(1, 9)), *map(str, range(9, 27)), "0"}
    assert named <= {case.row for case in CASES if case.severity is not None}
    assert named <= {case.row for case in CASES if case.severity is None} | {"6", "16"}


@pytest.mark.parametrize("version", FROM_14)
def test_a_launch_in_which_everything_is_stated_is_served_as_it_stands(tmp_path: Path, version: str) -> None:
    assert effects(launch(tmp_path, {}, version, "llama", "mha")) == ()


def test_the_ways_of_an_error_lead_to_a_launch_without_it(tmp_path: Path) -> None:
    """For every case: each way that names one key and a value, written, makes the row's error go away."""
    tried = 0
    for number, case in enumerate(CASES):
        root, version = tmp_path / str(number), case.versions[-1]
        errors = [effect for effect in rows(root, case, version) if effect.severity == "error"]
        for way in (way for effect in errors for way in effect.ways):
            key, value = _written(way)
            if key is None:
                continue
            tried += 1
            better = case._replace(asked={**case.asked, key: value})
            left = [effect for effect in rows(root, better, version) if effect.severity == "error"]
            assert len(left) < len(errors), (case, way, left)
    assert tried > 80


def _written(way: str) -> tuple[str | None, Any]:
    """(key, value) of `write section.key: value (flag)` or `leave section.key out (flag)`; (None, ...) for other words."""
    words = way.split()
    if words[0] == "leave" and words[1].count(".") == 1 and words[2].startswith("out"):
        return words[1], UNSET
    if words[0] == "write" and words[1].endswith(":") and words[1].count(".") == 1 and " and " not in way:
        text = words[2]
        if text.isdecimal():
            return words[1][:-1], int(text)
        if text in ("true", "1.0"):
            return words[1][:-1], {"true": True, "1.0": 1.0}[text]
        if text.islower() or text.startswith("EAGLE"):
            return words[1][:-1], text
    return None, None


# ---- releases that are not known -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [None, "nightly", "0.6.0", "0.5.15.dev1+gabcdef0"])
def test_an_unknown_release_is_told_what_each_known_one_does(tmp_path: Path, version: str | None) -> None:
    found = effects(launch(tmp_path, spec(1, 1, 16), version, "llama", "mha"))
    (width,) = [effect for effect in found if effect.row == "1"]
    assert (width.severity, width.releases) == ("error", ())  # so in every release: no doubt is left
    (overlap,) = [effect for effect in found if effect.row == "9"]
    assert overlap.releases == OLD
    assert overlap.where == "0.5.9 to 0.5.10.post1"
    assert all(effect.severity != "error" for effect in found if effect.releases)


def test_a_release_between_two_known_ones_is_told_what_both_do(tmp_path: Path) -> None:
    asked = s(speculative_adaptive=True) | spec(5, 1, 6)
    (candidates,) = [e for e in effects(launch(tmp_path, asked, "0.5.17", "llama", "mha")) if e.row == "24"]
    assert candidates.releases == ("0.5.15.post1",)
    assert candidates.severity == "warning"
    assert effects(launch(tmp_path, {}, "0.5.16", "llama", "mha")) == ()


@pytest.mark.parametrize("version", [None, "0.5.9", "0.5.23"])
def test_without_a_target_the_start_fails_and_none_is_assumed(tmp_path: Path, version: str | None) -> None:
    """Our own default, the demo's, is no target of SGLang's: nothing is told of it, though its files are here."""
    facts = launch(tmp_path, {"target.source": UNSET, "server.max_context_tokens": UNSET}, version, "llama", None)
    assert facts.target_dir is not None
    (row,) = [e for e in effects(facts) if "--model-path" in e.visible]
    assert (row.severity, row.asked) == ("error", "target.source unset")
    assert [e.effective for e in effects(facts) if e.row == "18" and "target's own" in e.effective] == [
        "the target's own"
    ]
    assert not [e for e in effects(launch(tmp_path, {}, version, "llama", None)) if "--model-path" in e.visible]


def test_our_own_engine_has_none_of_it(tmp_path: Path) -> None:
    facts = Facts(Deployment.model_validate({"speculation": {"num_steps": 1, "verify_width": 16}}), tmp_path)
    assert effects(facts) == ()


def test_the_nearest_candidates_are_offered(tmp_path: Path) -> None:
    asked = s(speculative_adaptive=True) | spec(4, 1, UNSET)
    for version, near in (("0.5.14", [3]), ("0.5.23", [3, 5])):
        found = effects(launch(tmp_path, asked, version, "llama", "mha"))
        (error,) = [effect for effect in found if effect.severity == "error"]
        offered = [_written(way) for way in error.ways]
        assert offered[: len(near)] == [("speculation.num_steps", steps) for steps in near]
        assert len(offered) == len(near) + 1


@pytest.mark.parametrize("factor", ["x", None, math.nan, math.inf, 0, -1, True, [2]])
def test_a_rope_factor_that_is_none_gives_no_positions(tmp_path: Path, factor: object) -> None:
    """Unknown is told as unknown; a clean factor stretches."""
    for scaling, positions in (({"factor": factor}, None), ({"factor": 4}, 4096), ({}, 1024)):
        config = {"max_position_embeddings": 1024, "rope_scaling": scaling}
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = read_other_model(tmp_path)
        assert found is not None
        assert found.positions == positions
