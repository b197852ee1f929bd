"""parity: proves, through the served path, that the server speaks for the target and feeds the draft as training did.

A server with diagnostics is started, traced requests are run through HTTP, and every hand-over is compared:

    slots, teacher logits, greedy tokens   server against transformers
    every captured row, of A, B, A, too    server against the eager capture of the same input
    draft logits of steps 1..K             server, exported checkpoint and trainer against the independent reference
    accepted drafts                        server against the trainer's code on offline states, round by round
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.engine.capture import slot_name
from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.device import resolve_device
from slipstream.engine.drafts.eagle3.checkpoint import load_draft
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.injection import Injection
from slipstream.engine.loader import load_target
from slipstream.engine.serving.trace_file import unpack_trace
from slipstream.engine.trace import RequestTrace
from slipstream.engine.training.checkpoint import load_network
from slipstream.tasks.bench_prompts import benchmark_prompts
from slipstream.tasks.conversations import read_conversations
from slipstream.tasks.extract import CONVERSATIONS, capture_plan, draft_plan
from slipstream.tasks.facts import DRAFT, PARITY, resolved_target
from slipstream.tasks.manifest import write_json
from slipstream.tasks.parity_findings import (
    REPEATED,
    ParityError,
    ParityFindings,
    ParityPrompt,
    Progress,
    examine,
    no_progress,
)
from slipstream.tasks.parity_target import TargetReference, reference_device
from slipstream.tasks.registry import get_stage
from slipstream.tasks.server import RunningServer, plan_server, running_server
from slipstream.tasks.stage import Stage, StageContext

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment

VALIDATION_CONVERSATIONS = 12
MAX_NEW_TOKENS = 96
REPEATED_TOKENS = 12
INJECTED = "parity-inject"  # its own folder and server: the real parity is not touched


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


def run(context: StageContext) -> dict[str, Any]:
    """The stage. Raises ParityError with every failed comparison; parity.json is written either way.

    Figures: passed, num_steps, failures, and those of parity.json in short.
    """
    figures = measure(context)
    refuse_failed(figures)
    return figures


def injected_stage(injections: tuple[Injection, ...], skip: Collection[str] = ()) -> Stage:
    """The same comparison with faults put into the server: a stage apart, never cached, its folder kept when it fails.

    Its figures say whether it passed; `refuse_failed` raises. skip: checks that are off (tests of the faults only).
    """

    def run_injected(context: StageContext) -> dict[str, Any]:
        for injection in injections:
            context.warn(f"put into the server on purpose: {injection}: {injection.meaning}")
        return measure(context, tuple(map(str, injections)), skip)

    return replace(STAGE, name=INJECTED, run=run_injected, cached=False)


def refuse_failed(figures: Mapping[str, Any]) -> None:
    """Raises ParityError when the figures of a run say that it failed."""
    if not figures["passed"]:
        raise ParityError(figures["failures"], figures["fault"])


def measure(context: StageContext, injections: tuple[str, ...] = (), skip: Collection[str] = ()) -> dict[str, Any]:
    """Compares and judges. Returns the figures; writes parity.json.

    Args:
        context: of the stage.
        injections: faults put into the server.
        skip: checks that are off.
    """
    config, gates = context.config, context.config.gates
    findings = compare_served(context, injections)
    failures = findings.failures(
        max_slot_share=gates.max_slot_error,
        max_argmax_difference=gates.max_argmax_difference,
        max_tau_gap=gates.max_tau_gap,
        skip=skip,
    )
    fault = findings.fault if failures else ""
    judged = {"num_steps": served_steps(config), "passed": not failures, "failures": failures, "fault": fault}
    write_json(context.out / PARITY, {**judged, "injections": injections, **findings.to_dict()})
    for line in findings.describe(gates.max_argmax_difference):
        context.say(line)
    for line in findings.warnings(context.manifest("train")["config"]["training"]["num_steps"]):
        context.warn(line)
    return {**judged, **findings.summary()}


def served_steps(config: "Deployment") -> int:
    """K of parity's server: the largest one that may be served."""
    asked = config.speculation.num_steps
    return config.speculation.max_num_steps if asked == "auto" else asked


def compare_served(context: StageContext, injections: tuple[str, ...] = ()) -> ParityFindings:
    """Traces the prompts through a server of its own and compares; see the head of this file."""
    config = context.config
    num_steps = served_steps(config)
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
    plan = replace(plan, injections=injections)
    repeated = repeated_prompts(prompts)
    with running_server(config, context.workdir, plan, name=context.stage) as server:
        traces = fetch_traces(
            server,
            prompts,
            config.server.max_running_requests,
            lambda done, total: context.progress(done, total, doing="traced requests through the server"),
        )
        traces += fetch_traces(server, repeated, concurrency=1)
        prompts += repeated
        plain = None
        if config.server.tensor_parallel_size > 1:  # ranks round otherwise than one process: only they can say
            plain = [t.target_argmax for t in fetch_traces(server, without_drafts(prompts, traces), concurrency=1)]
    device, told = reference_device(model_dir, resolve_device(config.server.device))
    context.say(told)
    return examine(
        prompts,
        traces,
        target,
        TargetReference(model_dir, device),
        networks,
        slots,
        num_steps,
        lambda done, total: context.progress(done, total, doing="comparing"),
        config.server.tensor_parallel_size,
        plain,
    )


def parity_prompts(context: StageContext, model_dir: Path) -> list[ParityPrompt]:
    """Held-out conversations (their first turn) and the benchmark's prompts, the latter through the chat template.

    benchmark.num_prompts and benchmark.max_new_tokens bound both.
    """
    config = context.config
    benchmark = config.benchmark
    records = read_conversations(context.input("regenerate") / CONVERSATIONS)
    held_out = [r for r in records if r.split == "holdout"][: min(VALIDATION_CONVERSATIONS, benchmark.num_prompts)]
    new_tokens = min(config.data.max_new_tokens, benchmark.max_new_tokens, MAX_NEW_TOKENS)
    prompts = [ParityPrompt(r.id, "validation", r.token_ids[: r.prompt_tokens], new_tokens) for r in held_out]
    chat = ChatTokenizer(model_dir)
    for prompt in benchmark_prompts(config):
        ids = chat.encode_chat(list(prompt.messages), add_generation_prompt=True)
        prompts.append(ParityPrompt(prompt.id, "benchmark", ids, min(benchmark.max_new_tokens, MAX_NEW_TOKENS)))
    return prompts


def repeated_prompts(prompts: Sequence[ParityPrompt]) -> list[ParityPrompt]:
    """A, B, A, to be run one after the other: two prompts cut to one length, so that every step has the same shape.

    A capture that one step leaves behind for the next is then B's in place of A's, or A's in place of B's.
    """
    if len(prompts) < 2:
        return []
    first, second = prompts[:2]
    length = min(len(first.token_ids), len(second.token_ids))
    tokens = min(first.max_new_tokens, second.max_new_tokens, REPEATED_TOKENS)
    names = (("A", first), ("B", second), ("A again", first))
    return [ParityPrompt(f"{p.name} as {name}", REPEATED, p.token_ids[:length], tokens) for name, p in names]


def without_drafts(prompts: Sequence[ParityPrompt], traces: Sequence[RequestTrace]) -> list[ParityPrompt]:
    """The served texts as prompts, for one more token: prefill runs every position without the draft."""
    return [replace(p, token_ids=t.token_ids[:-1], max_new_tokens=1) for p, t in zip(prompts, traces, strict=True)]


STAGE = get_stage("parity")
