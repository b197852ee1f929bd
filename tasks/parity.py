"""parity: proves, through the served path, that the server speaks for the target and feeds the draft as training did.

A server with diagnostics is started, traced requests are run through HTTP, and every hand-over is compared:

    slots, teacher logits, greedy tokens   server against transformers
    draft logits of steps 1..K             server, exported checkpoint and trainer against the independent reference
    accepted drafts                        server against the trainer's code on offline states, round by round
"""

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.capture import slot_name
from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.drafts.eagle3.checkpoint import load_draft
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.loader import load_target
from slipstream.engine.serving.trace_file import unpack_trace
from slipstream.engine.trace import RequestTrace
from slipstream.engine.training.checkpoint import load_network
from slipstream.tasks.bench_prompts import benchmark_prompts
from slipstream.tasks.conversations import read_conversations
from slipstream.tasks.extract import CONVERSATIONS, capture_plan, draft_plan
from slipstream.tasks.facts import DRAFT, PARITY, resolved_target
from slipstream.tasks.manifest import write_json
from slipstream.tasks.parity_findings import ParityError, ParityPrompt, Progress, examine, no_progress
from slipstream.tasks.parity_target import TargetReference
from slipstream.tasks.registry import get_stage
from slipstream.tasks.server import RunningServer, plan_server, running_server
from slipstream.tasks.stage import StageContext

VALIDATION_CONVERSATIONS = 12
MAX_NEW_TOKENS = 96


def fetch_traces(
    server: RunningServer, prompts: Sequence[ParityPrompt], concurrency: int, progress: Progress = no_progress
) -> list[RequestTrace]:
    """Runs the prompts greedily through the server's HTTP front with everything recorded.

    Args:
        server: started with diagnostics.
        prompts: what to run.
        concurrency: requests in flight.
        progress: called with (done, total).

    Raises SlipstreamError when the server refuses or fails.
    """

    def fetch(prompt: ParityPrompt) -> RequestTrace:
        body = {"prompt": prompt.token_ids, "max_tokens": prompt.max_new_tokens, "temperature": 0.0}
        return unpack_trace(server.trace(body))

    traces = []
    with ThreadPoolExecutor(concurrency) as pool:
        for trace in pool.map(fetch, prompts):
            traces.append(trace)
            progress(len(traces), len(prompts))
    return traces


def run(context: StageContext, *, skip: Collection[str] = ()) -> dict[str, Any]:
    """The stage. Raises SlipstreamError with every failed comparison; parity.json is written either way.

    Figures: passed, num_steps, failures, and those of parity.json in short.
    Args: skip: checks that are off (tests of the faults only).
    """
    config = context.config
    asked = config.speculation.num_steps
    num_steps = config.speculation.max_num_steps if asked == "auto" else asked
    model_dir = resolved_target(context.workdir)
    target = load_target(model_dir, config.server.dtype)
    networks: dict[str, Eagle3Network] = {}
    if num_steps:
        dtype = getattr(torch, config.server.dtype)
        networks = {
            "export": load_draft(context.input("convert") / DRAFT, dtype),
            "trainer": load_network(context.input("train") / "checkpoint", dtype),
        }
    slots = draft_plan(config, capture_plan(config, target.config.num_layers)).slots
    prompts = parity_prompts(context, model_dir)
    plan = plan_server(
        context.workdir,
        num_steps,
        slots=tuple(slot_name(slot) for slot in slots),
        diagnostics=True,
        capture_slots=slots,
    )
    with running_server(config, context.workdir, plan, name="parity") as server:
        traces = fetch_traces(
            server,
            prompts,
            config.server.max_running_requests,
            lambda done, total: context.progress(done, total, doing="traced requests through the server"),
        )
    findings = examine(
        prompts,
        traces,
        target,
        TargetReference(model_dir),
        networks,
        slots,
        num_steps,
        lambda done, total: context.progress(done, total, doing="comparing"),
    )
    gates = config.gates
    failures = findings.failures(
        max_slot_share=gates.max_slot_error,
        max_argmax_difference=gates.max_argmax_difference,
        max_tau_gap=gates.max_tau_gap,
        skip=skip,
    )
    measured = {"num_steps": num_steps, "passed": not failures, "failures": failures, **findings.to_dict()}
    write_json(context.out / PARITY, measured)
    for line in findings.describe():
        context.say(line)
    if failures:
        raise ParityError(failures)
    return {"num_steps": num_steps, "passed": True, "failures": [], **findings.summary()}


def parity_prompts(context: StageContext, model_dir: Path) -> list[ParityPrompt]:
    """Held-out conversations (their first turn) and the benchmark's prompts, the latter through the chat template."""
    config = context.config
    records = read_conversations(context.input("regenerate") / CONVERSATIONS)
    held_out = [r for r in records if r.split == "holdout"][:VALIDATION_CONVERSATIONS]
    prompts = [
        ParityPrompt(
            r.id, "validation", r.token_ids[: r.prompt_tokens], min(config.data.max_new_tokens, MAX_NEW_TOKENS)
        )
        for r in held_out
    ]
    chat = ChatTokenizer(model_dir)
    for prompt in benchmark_prompts(config):
        ids = chat.encode_chat(list(prompt.messages), add_generation_prompt=True)
        prompts.append(ParityPrompt(prompt.id, "benchmark", ids, min(config.benchmark.max_new_tokens, MAX_NEW_TOKENS)))
    return prompts


STAGE = get_stage("parity")
