"""Logs, pages and answers written in the formats that the engines print, from figures that a test chooses."""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SERVER_ARGS = {
    # As printed by 0.5.10.post1 and before, and by 0.5.23.
    "repr": "server_args=ServerArgs(model_path='/m', {pairs}, disable_cuda_graph=False)",
    "dict": "server_args={{'model_path': '/m', {pairs}, 'disable_cuda_graph': False}}",
}
PREFILL = "[2026-02-03 10:27:55 TP0] Prefill batch. #new-seq: 1, #new-token: 28, #cached-token: 0, #queue-req: 0, "


def server_args(
    steps: int | None, width: int | None, topk: int | None = 1, style: str = "repr", algorithm: str | None = "EAGLE3",
    **more: Any,
) -> str:  # fmt: skip
    """The start-up line."""
    fields = {
        "speculative_algorithm": algorithm,
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": width,
        **more,
    }
    form = "{}={!r}" if style == "repr" else "'{}': {!r}"
    pairs = ", ".join(form.format(name, value) for name, value in fields.items())
    return "[2026-02-03 10:20:00] " + SERVER_ARGS[style].format(pairs=pairs)


def decode(
    length: float | None, rate: float | None, tok_s: float, running: int = 1, form: str = "0.5.9", rank: str = "TP0"
) -> str:
    """A decode line of a release."""
    head = {
        "0.4.6": "Decode batch. #running-req: {r}, #token: 186, token usage: 0.00, ",
        "0.5.4": "Decode batch [417], #running-req: {r}, #token: 186, token usage: 0.00, ",
        "0.5.9": "Decode batch, #running-req: {r}, #token: 186, token usage: 0.00, ",
        "0.5.23": "Decode batch, #running-req: {r}, #full token: 186, full token usage: 0.00, mamba num: 1, ",
    }[form].format(r=running)  # fmt: skip
    spec = "" if length is None else f"accept len: {length:.2f}, "
    spec += "" if rate is None else f"accept rate: {rate:.2f}, "
    graph = "cuda graph: True, "
    return f"[2026-02-03 10:27:56 {rank}] {head}{spec}{graph}gen throughput (token/s): {tok_s:.2f}, #queue-req: 0, "


def sglang_log(
    lengths: Sequence[float],
    width: int,
    *,
    with_bonus: bool,
    tok_s: float = 50.0,
    form: str = "0.5.9",
    running: int = 1,
) -> list[str]:
    """A prefill, then decode lines with rates of the older (bonus counted) or the newer definition; no start-up."""
    rates = [x / width if with_bonus else (x - 1) / (width - 1) for x in lengths]
    lines = [decode(x, rate, tok_s, running, form) for x, rate in zip(lengths, rates, strict=True)]
    return [PREFILL, decode(lengths[0], rates[0], 0.39, running, form), *lines]


VLLM_START = (
    "(APIServer pid=1) INFO 04-19 15:31:09 [api_server.py:598] vLLM API server version {version}\n"
    "(EngineCore pid=263) INFO 04-19 15:31:23 [core.py:107] Initializing a V1 LLM engine (v{version}) with config: "
    "model='/m', speculative_config=SpeculativeConfig(method='eagle3', model='/d', num_spec_tokens={k}), tokenizer='/m'"
)


def vllm_lines(histogram: Sequence[int], tok_s: float = 100.0, running: int = 1, form: str = "now") -> list[str]:
    """The pair of lines of one interval. histogram[a] = rounds that accepted a drafts."""
    k, rounds = len(histogram) - 1, sum(histogram)
    hits = [sum(histogram[i:]) for i in range(1, k + 1)]
    accepted, drafted = sum(hits), k * rounds
    shares = ", ".join(f"{h / rounds:.3f}" for h in hits)
    mean, rate = 1 + accepted / rounds, 100 * accepted / drafted
    counts = f"Accepted: {accepted} tokens, Drafted: {drafted} tokens"
    text = {
        "now": f"Mean acceptance length: {mean:.2f}, Accepted throughput: {accepted / 10:.2f} tokens/s, Drafted "
        f"throughput: {drafted / 10:.2f} tokens/s, {counts}, Per-position acceptance rate: {shares}, "
        f"Avg Draft acceptance rate: {rate:.1f}%",
        "2025": f"Draft acceptance rate: {rate:.1f}%, Mean acceptance length: {mean:.2f}, {counts}, "
        f"Per-position acceptance rate: {shares}",
    }[form]
    head = "(APIServer pid=1) INFO 08-04 20:51:08"
    speed = f"{head} [loggers.py:310] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: "
    speed += f"{tok_s:.1f} tokens/s, Running: {running} reqs, Waiting: 0 reqs, GPU KV cache usage: 0.0%"
    return [speed, f"{head} [metrics.py:120] SpecDecoding metrics: {text}"]


def vllm_page(histogram: Sequence[int], suffix: str = "_total") -> list[str]:
    k, rounds = len(histogram) - 1, sum(histogram)
    hits = [sum(histogram[i:]) for i in range(1, k + 1)]
    label = 'engine="0",model_name="m"'
    lines = [
        "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.",
        f"vllm:spec_decode_num_drafts{suffix}{{{label}}} {rounds}.0",
        f"vllm:spec_decode_num_draft_tokens{suffix}{{{label}}} {k * rounds}.0",
        f"vllm:spec_decode_num_accepted_tokens{suffix}{{{label}}} {sum(hits)}.0",
    ]
    name = f"vllm:spec_decode_num_accepted_tokens_per_pos{suffix}"
    return lines + [f'{name}{{{label},position="{i}"}} {h}.0' for i, h in enumerate(hits)]


def request(histogram: Sequence[int], k: int, release: str = "0.5.23") -> dict[str, Any]:
    """An answer of /generate, with the key names of a release. One token more comes from prefill."""
    rounds, accepted = sum(histogram), sum(a * n for a, n in enumerate(histogram))
    names = {
        "0.5.9": ("spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram"),
        "0.5.11": ("spec_accepted_drafts", "spec_proposed_drafts", "spec_accept_histogram"),
        "0.5.23": ("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram"),
    }[release]
    tokens = accepted + rounds + 1
    meta = {
        "completion_tokens": tokens,
        "spec_verify_ct": rounds,
        "spec_accept_length": tokens / rounds,
        "spec_accept_rate": accepted / (rounds * k),
        **dict(zip(names, (accepted, rounds * k, list(histogram)), strict=True)),
    }
    return {"text": "x", "output_ids": [1], "meta_info": meta}


def write(path: Path, lines: Iterable[str | bytes], ending: bytes = b"\n") -> Path:
    """As a file; gzip by its name."""
    data = b"".join((line if isinstance(line, bytes) else line.encode()) + ending for line in lines)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path
