"""Speculation through HTTP against none and against transformers, batch 1: real prompts, a trained draft, real servers.

    python -P tests/benchmarks/serve_card.py --target DIR --draft DIR --files mt_bench.jsonl gsm8k_test.jsonl ...
        [--per-set 16] [--tokens 256] [--steps 1 2 3 5] [--workdir DIR] [--rows FILE.jsonl] [--device auto]

Per prompt set, greedily, with the chat template, one request at a time:

- the offline API (Engine.generate) at K = 0 and every K asked for; the K with the most tokens per second is `best`;
- servers (`slipstream serve`, a front and an engine process each) at K = 0, 3 and best, asked by a streaming client
  that notes every output, and by the real `openai` client without streaming;
- `transformers` generate on the same device, a few prompts;
- what the training's own evaluation predicts for these very answers (replayed), beside what was served.

tok/s of a whole answer: its tokens / seconds from sending to its end, prefill and HTTP included; decode tok/s: tokens
after the first output / time after it. Ends with 1 where an answer depends on K or on the way it came.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import openai
import torch

from slipstream.configs.schema import Deployment
from slipstream.engine.acceptance import AcceptanceCounts, ConversationRuns, run_lengths_to_tau
from slipstream.engine.batch_capture import BatchCapture
from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.config import MAX_NUM_STEPS, EngineConfig
from slipstream.engine.device import DEVICES, resolve_device
from slipstream.engine.drafts.eagle3.checkpoint import load_draft
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.loader import load_target
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.models import TargetModel
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.training.data import Conversation, ConversationList
from slipstream.engine.training.evaluate import Evaluator
from slipstream.engine.training.init import TargetWeights
from slipstream.engine.training.teacher import Teacher
from slipstream.tasks import server as server_task
from slipstream.tasks.bench_client import Answer, Prompt, ask_all
from slipstream.tasks.bench_prompts import benchmark_prompts
from slipstream.tasks.bench_transformers import TransformersProcess
from slipstream.tasks.counters import read_counters
from slipstream.tasks.server import RunningServer, ServerPlan, running_server
from slipstream.tests.benchmarks.served_table import Outcome, Speed, report

SERVED_STEPS = 3
ROOM = 16  # context beyond prompt and answer
CONTEXT_STEP = 128
WARM_UP_TOKENS = 24


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one file, and their token ids."""

    name: str
    prompts: list[Prompt]
    ids: list[list[int]]


@dataclass(frozen=True)
class Subject:
    """What is served. context: tokens that the longest prompt and its answer need."""

    target_dir: Path
    draft_dir: Path
    device: str
    tokens: int
    context: int

    @cached_property
    def target(self) -> TargetModel:
        return load_target(self.target_dir, EngineConfig().dtype, self.device)

    @cached_property
    def draft(self) -> Eagle3Network:
        return load_draft(self.draft_dir, torch.bfloat16, target_embedding=self.target.embed_tokens.weight).eval()

    @cached_property
    def chat(self) -> ChatTokenizer:
        return ChatTokenizer(self.target_dir)

    @property
    def params(self) -> SamplingParams:
        """As the server has them."""
        return SamplingParams(max_tokens=self.tokens, stop_token_ids=self.chat.stop_token_ids)


# ---- the offline API -------------------------------------------------------------------------------------------------


def offline(subject: Subject, num_steps: int, sets: Sequence[PromptSet]) -> list[Speed]:
    """One engine answers every prompt of every set, one after the other."""
    config = EngineConfig(
        num_steps=num_steps, max_running_requests=1, max_context_tokens=subject.context, device=subject.device
    )
    engine = Engine(subject.target, config, Eagle3Proposer(subject.draft, num_steps) if num_steps else None)
    engine.generate([sets[0].ids[0]], SamplingParams(max_tokens=WARM_UP_TOKENS, ignore_eos=True))
    measured = []
    for one in sets:
        speed, before = Speed(), engine.stats.counts(num_steps).to_dict()
        for ids in one.ids:
            began = time.perf_counter()
            (answer,) = engine.generate([ids], subject.params)
            speed.seconds += time.perf_counter() - began
            speed.answers.append(answer.token_ids)
            speed.tokens += len(answer.token_ids)
        speed.counts = engine.stats.counts(num_steps).since(AcceptanceCounts.from_dict(before))
        measured.append(speed)
    assert (engine.captures_after_ready, engine.compiles_after_ready) == (0, 0)
    return measured


# ---- through HTTP ----------------------------------------------------------------------------------------------------


def served(server: RunningServer, num_steps: int, one: PromptSet, tokens: int) -> tuple[Speed, Speed]:
    """(streamed, whole): the same answers asked for by the streaming client and by the openai client."""
    ask_all(server.url, one.prompts[:1], max_tokens=WARM_UP_TOKENS)
    before = read_counters(server.url)
    streamed = Speed()
    for answer in ask_all(server.url, one.prompts, max_tokens=tokens):
        _add(streamed, answer)
    streamed.counts = (read_counters(server.url) - before).of(num_steps)
    whole = Speed()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for prompt in one.prompts:
            began = time.perf_counter()
            answer = client.chat.completions.create(
                model=server.model,
                messages=list(prompt.messages),  # type: ignore[arg-type]
                max_tokens=tokens,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
            whole.seconds += time.perf_counter() - began
            assert answer.usage is not None
            whole.tokens += answer.usage.completion_tokens
            whole.answers.append(list((answer.choices[0].model_extra or {}).get("token_ids") or []))
    return streamed, whole


def _add(speed: Speed, answer: Answer) -> None:
    speed.tokens += answer.output_tokens
    speed.seconds += answer.seconds
    speed.decode_tokens += answer.decode_tokens
    speed.decode_seconds += answer.decode_seconds
    speed.answers.append(list(answer.token_ids))


@contextmanager
def servers(
    deployment: Deployment, workdir: Path, subject: Subject, steps: Sequence[int]
) -> Iterator[list[RunningServer]]:
    """One server for each K, started side by side, and all gone at the end."""
    workdir.mkdir(parents=True, exist_ok=True)
    # Others of this measurement use the card beside a server: the memory in use before its launch proves nothing.
    server_task.gpu_baseline = lambda: None

    def start(num_steps: int) -> RunningServer:
        plan = ServerPlan(subject.target_dir, subject.draft_dir if num_steps else None, num_steps)
        context = running_server(deployment, workdir, plan, name=f"k{num_steps}")
        server = context.__enter__()
        stack.callback(context.__exit__, None, None, None)
        return server

    with ExitStack() as stack, ThreadPoolExecutor(len(steps) or 1) as pool:
        waiting = [pool.submit(start, num_steps) for num_steps in steps]
        yield [one.result() for one in waiting]


# ---- what the training's evaluation predicts -------------------------------------------------------------------------


@torch.no_grad()
def replayed(subject: Subject, one: PromptSet, answers: Sequence[Sequence[int]]) -> list[AcceptanceCounts]:
    """Counts for K = 0..MAX_NUM_STEPS, teacher-forced on the answers without speculation, as stage train has them."""
    draft = load_draft(subject.draft_dir, torch.bfloat16).eval().to(subject.device)  # plain weights, as in training
    slots = draft.config.slots
    # At least two tokens, or there is no slot to draft from.
    kept = [(ids, list(tokens)) for ids, tokens in zip(one.ids, answers, strict=True) if len(tokens) > 1]
    capture = BatchCapture(subject.target, slots, 4096, max(len(ids) + len(tokens) for ids, tokens in kept))
    conversations = []
    for group in capture.groups([len(ids) + len(tokens) for ids, tokens in kept]):
        members = [kept[index] for index in group]
        for (ids, tokens), (states, teacher) in zip(members, capture([i + t for i, t in members]), strict=True):
            token_ids = torch.tensor(ids + tokens)
            mask = torch.arange(len(token_ids)) >= len(ids)
            features = draft.config.plan.select(states)
            conversations.append(Conversation(token_ids, mask, features, teacher, 0))
    model = ModelConfig.from_dir(subject.target_dir)
    weights = TargetWeights.from_dir(subject.target_dir, model.num_layers).to(torch.device(subject.device))
    drafts = torch.arange(draft.config.draft_vocab_size, device=subject.device)
    teacher_of = Teacher(weights.final_norm, weights.head, model.rms_norm_eps, draft.to_target(drafts))
    runs = Evaluator(ConversationList(conversations), teacher_of, MAX_NUM_STEPS).run(draft).run_lengths
    by_limit = [len(tokens) >= subject.tokens for _, tokens in kept]
    each = [ConversationRuns(lengths, cut) for lengths, cut in zip(runs, by_limit, strict=True)]
    return [run_lengths_to_tau(each, num_steps, MAX_NUM_STEPS) for num_steps in range(MAX_NUM_STEPS + 1)]


# ---- transformers ----------------------------------------------------------------------------------------------------


def transformers_speed(subject: Subject, sets: Sequence[PromptSet], prompts: int, tokens: int) -> list[float]:
    """Decode tok/s of `transformers` generate, a set each, over its first prompts."""
    with TransformersProcess(subject.target_dir, "bfloat16", torch.get_num_threads(), subject.device) as process:
        speeds = []
        for one in sets:
            done = [process.decode(ids, tokens) for ids in one.ids[:prompts]]
            speeds.append(sum(d.tokens for d in done) / sum(d.seconds for d in done))
    return speeds


# ---- the whole -------------------------------------------------------------------------------------------------------


def prompt_sets(files: Sequence[Path], count: int, chat: ChatTokenizer) -> list[PromptSet]:
    """`count` prompts of each file, categories in turn."""
    sets = []
    for file in files:
        chosen = benchmark_prompts(Deployment(benchmark={"prompts": str(file), "num_prompts": count}))
        ids = [chat.encode_chat(list(prompt.messages), add_generation_prompt=True) for prompt in chosen]
        sets.append(PromptSet(file.stem, chosen, ids))
    return sets


def timed(what: str, done: Callable[[], Any]) -> Any:
    """Runs and says how long it took."""
    began = time.perf_counter()
    result = done()
    print(f"[{time.perf_counter() - began:5.1f} s] {what}", flush=True)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    device = resolve_device(args.device)
    sets = prompt_sets(args.files, args.per_set, ChatTokenizer(args.target))
    longest = max(len(ids) for one in sets for ids in one.ids) + args.tokens + ROOM
    subject = Subject(args.target, args.draft, device, args.tokens, -(-longest // CONTEXT_STEP) * CONTEXT_STEP)
    sizes = {"max_running_requests": 1, "max_context_tokens": subject.context, "device": device}
    deployment = Deployment(server={**sizes, "prefill_chunk_tokens": EngineConfig().prefill_chunk_tokens})
    steps = sorted({0, SERVED_STEPS, *args.steps})
    workdir = args.workdir or Path(tempfile.mkdtemp(prefix="serve_card."))
    with ExitStack() as stack:
        first = (0, SERVED_STEPS)
        started = timed(
            f"servers of K = {first} ready",
            lambda: stack.enter_context(servers(deployment, workdir, subject, first)),
        )
        running = dict(zip(first, started, strict=True))
        offline_of: dict[int, list[Speed]] = {}
        for k in steps:
            offline_of[k] = timed(f"offline K = {k}", lambda k=k: offline(subject, k, sets))
            print(f"  K = {k}: {_total(offline_of[k]):.0f} tok/s", flush=True)
        best = max(steps[1:], key=lambda k: _total(offline_of[k]))
        if best not in running:
            (running[best],) = timed(
                f"server of K = {best} (best offline) ready",
                lambda: stack.enter_context(servers(deployment, workdir, subject, (best,))),
            )
        asked = {
            k: timed(f"HTTP, K = {k}", lambda k=k: [served(running[k], k, one, args.tokens) for one in sets])
            for k in sorted(running)
        }
        predicted = timed(
            "replayed",
            lambda: [replayed(subject, one, offline_of[0][i].answers) for i, one in enumerate(sets)],
        )
        theirs = timed(
            "transformers",
            lambda: transformers_speed(subject, sets, args.transformers, args.transformers_tokens),
        )
    outcomes = [
        Outcome(
            one.name,
            {k: speeds[i] for k, speeds in offline_of.items()},
            {k: answers[i][0] for k, answers in asked.items()},
            {k: answers[i][1] for k, answers in asked.items()},
            predicted[i],
            theirs[i],
        )
        for i, one in enumerate(sets)
    ]
    return report(outcomes, args.rows, device)


def _total(speeds: Sequence[Speed]) -> float:
    """tok/s over all sets."""
    return sum(s.tokens for s in speeds) / sum(s.seconds for s in speeds)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--draft", type=Path, required=True, help="EAGLE-3 directory, made for this target")
    parser.add_argument("--files", type=Path, nargs="+", required=True, help="prompt sets, JSON lines")
    parser.add_argument("--per-set", type=int, default=16, help="prompts of each")
    parser.add_argument("--tokens", type=int, default=256, help="longest answer")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 3, 5], help="K tried offline beside 0 and 3")
    parser.add_argument("--transformers", type=int, default=2, help="prompts of each set for transformers")
    parser.add_argument("--transformers-tokens", type=int, default=128)
    parser.add_argument("--workdir", type=Path, help="for logs and state of the servers")
    parser.add_argument("--rows", type=Path, help="JSON lines are written here")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
