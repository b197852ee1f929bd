"""What ranks run together in the tests of tensor parallelism: functions of (parallel, ...), results are pickled."""

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slipstream.engine import card_group
from slipstream.engine.agreement import RankAgreement, check_same
from slipstream.engine.card_group import carrier_name, join_cards
from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.checkpoint import load_draft
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.inject import inject
from slipstream.engine.injection import parse_injections
from slipstream.engine.loader import load_target
from slipstream.engine.proposer import OracleProposer
from slipstream.engine.rank_group import be_patient
from slipstream.engine.runner import capture_states
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.serving.engine_build import build_engine
from slipstream.engine.serving.engine_options import EngineOptions
from slipstream.engine.serving.trace_file import pack_trace
from slipstream.engine.step_choice import PayingSteps
from slipstream.engine.tensor_parallel import TensorParallel
from slipstream.kernels import filters_of_ranks
from slipstream.kernels.all_gather import all_gather
from slipstream.kernels.all_reduce import all_reduce
from slipstream.kernels.nccl_exchange import NcclExchange
from slipstream.kernels.round_ring import RoundRecord
from slipstream.kernels.sampling import sample
from slipstream.kernels.sampling_batch import SamplingBatch
from slipstream.kernels.stream import Stream
from slipstream.kernels.vocabulary_part import VocabularyPart


@dataclass(frozen=True)
class Case:
    """One engine and what it is asked. `recordings`: an oracle replays them instead of the draft."""

    target: str
    draft: str | None
    num_steps: int
    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    dtype: str = "float32"
    recordings: dict[str, list[int]] | None = None
    capture: tuple[int, ...] = ()
    agreement: bool = True
    rounds_in_flight: int | None = None
    device: str = "cpu"
    graphs: bool | None = None
    compare_states: bool = True
    choose_steps: bool = False


@dataclass(frozen=True)
class Served:
    """What a rank saw. tensors: name -> every captured slot, teacher and draft logits of all requests, side by side."""

    tokens: list[list[int]]
    tensors: dict[str, torch.Tensor]
    acceptance: dict[int, dict[str, Any]]
    heads: tuple[int, int]
    kv_heads: int
    draft_cell: tuple[int, ...] = ()

    def bits(self) -> str:
        """Digest of all that must be the same on every rank."""
        parts = [repr((self.tokens, self.acceptance)).encode()]
        parts += [
            name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes()
            for name, tensor in sorted(self.tensors.items())
        ]
        return hashlib.sha256(b"".join(parts)).hexdigest()


def make_engine(parallel: TensorParallel, case: Case) -> Engine:
    """The engine of `case` on this rank."""
    target = load_target(case.target, case.dtype, case.device, parallel)
    config = EngineConfig(
        num_steps=case.num_steps,
        max_running_requests=3,
        max_context_tokens=128,
        prefill_chunk_tokens=16,
        dtype=case.dtype,
        rounds_in_flight=case.rounds_in_flight,
        device=case.device,
        graphs=case.graphs,
        choose_steps=case.choose_steps,
    )
    proposer: Any = None
    if case.draft is not None and case.num_steps:
        network = load_draft(
            Path(case.draft),
            getattr(torch, case.dtype),
            target_embedding=target.embed_tokens.weight,
            parallel=parallel,
        ).eval()
        proposer = Eagle3Proposer(network, case.num_steps)
    if case.recordings is not None:
        proposer = OracleProposer(
            case.num_steps, case.recordings, target.config.vocab_size, (0.6, 0.4, 0.2), seed=3, inner=proposer
        )
    agreement = None
    if parallel.size > 1 and case.agreement:
        agreement = RankAgreement(parallel, compare_states=case.compare_states)
    return Engine(target, config, proposer, case.capture, agreement)


def serve(parallel: TensorParallel, case: Case, faults: Sequence[str] = ()) -> Served:
    """Answers all prompts with traces; `faults` are put into the engines, whose ranks compare states as `case` says."""
    engine = make_engine(parallel, case)
    inject(engine, parse_injections(faults))
    if engine.agreement is not None:
        engine.agreement.compare_states = case.compare_states
    return _answer(engine, case)


def traced(parallel: TensorParallel, case: Case, faults: Sequence[str]) -> list[bytes]:
    """Traces of all prompts by engines with these faults, packed."""
    engine = make_engine(parallel, case)
    inject(engine, parse_injections(faults))
    answers = engine.generate(case.prompts, case.params, trace=True)
    return [pack_trace(answer.trace) for answer in answers if answer.trace is not None]


def _answer(engine: Engine, case: Case) -> Served:
    answers = engine.generate(case.prompts, case.params, trace=True)
    traces = [answer.trace for answer in answers if answer.trace is not None]
    tensors = {name: torch.cat([t.states[name] for t in traces]) for name in traces[0].states}
    tensors["teacher"] = torch.cat([t.teacher for t in traces])
    logits = [r.draft_logits[: r.num_valid] for t in traces for r in t.rounds if r.draft_logits is not None]
    if logits:
        tensors["draft logits"] = torch.cat(logits)
    heads, cache = engine.target.layers[0].self_attn.heads, engine.runner.cache.layers[0]
    own = getattr(engine.runner.proposer, "cache", None)
    return Served(
        [answer.token_ids for answer in answers],
        tensors,
        {k: counts.to_dict() for k, counts in engine.stats.acceptance.items()},
        (heads.q, heads.kv),
        cache.shape[3] if cache.dim() == 5 else 0,  # 0: one latent for all heads
        tuple(own.layers[0].shape[2:]) if own is not None else (),
    )


def teacher_forced(
    parallel: TensorParallel, target_dir: str, dtype: str, token_ids: Sequence[int], device: str = "cpu"
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(logits [T, V], every state) of one text, from serving's own prefill; on the CPU, wherever they were made."""
    target = load_target(target_dir, dtype, device, _on_cards(parallel) if device == "cuda" else parallel)
    slots = tuple(range(target.config.num_layers + 1))
    states, teacher = capture_states(target, token_ids, slots, prefill_chunk_tokens=32)
    with torch.inference_mode():
        return target.logits(teacher).cpu().clone(), {name: state.cpu().clone() for name, state in states.items()}


def facts_of(parallel: TensorParallel, odd_rank: int) -> str:
    """`check_same` where one rank found another file: what it said."""
    try:
        check_same(parallel, {"version": 1, "weights": "b" if parallel.rank == odd_rank else "a"})
    except Exception as error:
        return str(error)
    return ""


def reduce(parallel: TensorParallel, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """All-reduce of each rank's own part."""
    return all_reduce(parts[parallel.rank], parallel.group)


def gather(parallel: TensorParallel, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All-gather of each rank's own part."""
    return all_gather(parts[parallel.rank], [one.shape[-1] for one in parts], parallel.group)


def sample_parts(
    parallel: TensorParallel,
    widths: Sequence[int],
    logits: torch.Tensor,
    sampling: SamplingBatch,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Of each rank's own columns: tokens, filtered logits, and the most numbers a row that an exchange has moved."""
    part, moved = VocabularyPart(parallel.rank, widths, parallel.group), 0

    def noted(x: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
        nonlocal moved
        moved = max(moved, x.shape[-1])
        return all_gather(x, *rest)

    own = logits[..., part.ids].contiguous()
    filters_of_ranks.all_gather = noted
    try:
        filtered = filters_of_ranks.filter_logits_of_ranks(own, sampling, part)
        return sample(own, sampling, positions, 1, part), filtered, moved
    finally:
        filters_of_ranks.all_gather = all_gather


def by_nccl_exchange(parallel: TensorParallel, parts: Sequence[torch.Tensor], widths: Sequence[int]) -> list[Any]:
    """The ways of the cards' fallback, on gloo: the sum, a stream with the sum added, uneven parts put together."""
    exchange = NcclExchange(parallel.group)
    own = parts[parallel.rank]
    added = exchange.all_reduce_add(own, Stream(parts[0]))
    return [exchange.all_reduce(own), added.rows, exchange.all_gather(own[:, : widths[parallel.rank]], widths)]


def serve_in_flight(parallel: TensorParallel, case: Case, odd_rank: int) -> tuple[list[list[int]], int, int, str]:
    """Answers without traces while launches stay out: tokens, steps, how often ranks compared, and what they said.

    odd_rank: believes that it committed another token than it did, once, after 10 launches.
    """
    engine = make_engine(parallel, case)
    agreement, told = engine.agreement, [0, 0]
    note, check = agreement.note_record, agreement.check

    def note_record(record: RoundRecord) -> None:
        told[0] += 1
        requests = record.requests
        if parallel.rank == odd_rank and told[0] == 10:
            requests = [replace(one, tokens=[token + 1 for token in one.tokens]) for one in requests]
        note(replace(record, requests=requests))

    def counted() -> None:
        told[1] += 1
        check()

    agreement.note_record, agreement.check = note_record, counted
    try:
        tokens = [answer.token_ids for answer in engine.generate(case.prompts, case.params)]
    except SlipstreamError as error:
        return [], engine.stats.steps, told[1], str(error)
    return tokens, engine.stats.steps, told[1], ""


def serve_choosing(
    parallel: TensorParallel, case: Case, ms: Sequence[dict[int, float]]
) -> tuple[list[list[int]], list[dict[int, float]], dict[int, int]]:
    """Answers with a chosen K: tokens, times in force, rounds of each K. ms: K -> what each rank's clock says of it."""
    engine = make_engine(parallel, case)
    prepare = engine.steps.prepare

    def prepared() -> None:
        prepare()
        assert {k for times in engine.steps.round_ms.values() for k in times} == set(ms[parallel.rank])
        engine.steps.round_ms = {size: dict(ms[parallel.rank]) for size in engine.steps.round_ms}

    engine.steps.prepare = prepared  # type: ignore[method-assign]
    tokens = [answer.token_ids for answer in engine.generate(case.prompts, case.params)]
    assert isinstance(engine.choice, PayingSteps)
    return tokens, [dict(times) for times in engine.choice.round_ms.values()], engine.stats.rounds_of


def share_card(parallel: TensorParallel) -> TensorParallel:
    """The ranks with peer memory on card 0, which they take in turn: slow, and all the rest is as on several cards."""
    torch.zeros(1, device="cuda")
    exchange = card_group._peer_exchange(parallel)
    if isinstance(exchange, str):
        raise RuntimeError(exchange)
    exchange.be_patient(60.0)
    return replace(parallel, card=exchange)


def on_one_card(parallel: TensorParallel, times: int) -> list[bool]:
    """Both ranks on card 0: whether sums are right."""
    exchange = share_card(parallel).card
    assert exchange is not None
    right = []
    for turn in range(times):
        parts = [torch.full((3, 4096), 1.0 + turn + rank, dtype=torch.bfloat16, device="cuda") for rank in range(2)]
        total = exchange.all_reduce(parts[parallel.rank])
        right.append(bool((total == parts[0] + parts[1]).all()) and exchange.lost() is None)
    return right


_joined: dict[int, TensorParallel] = {}


def _on_cards(parallel: TensorParallel) -> TensorParallel:
    """The ranks with a card each, or one for all; joined once."""
    if parallel.size == 1:
        return parallel
    if parallel.size not in _joined:
        be_patient(parallel, 120.0)
        join = join_cards if torch.cuda.device_count() >= parallel.size else share_card
        _joined[parallel.size] = join(parallel)
    joined = _joined[parallel.size]
    assert joined.card is not None
    joined.card.be_patient(60.0)  # engines are made, and kernels compiled, at each rank's own pace
    return joined


def serve_on_cards(parallel: TensorParallel, case: Case, faults: Sequence[str] = ()) -> tuple[Served, str]:
    """`serve` with a card for each rank, or one for all where there is no other: what it saw, and the digest of it."""
    parallel = _on_cards(parallel)
    engine = make_engine(parallel, case)
    inject(engine, parse_injections(faults))
    served = _answer(engine, case)
    untraced = [answer.token_ids for answer in engine.generate(case.prompts, case.params)]  # launches in flight
    assert untraced == served.tokens
    assert engine.captures_after_ready == 0
    assert carrier_name(parallel) in (None, "peer memory", "NCCL")
    return served, served.bits()


def serve_over_garbage(parallel: TensorParallel, case: Case, file: str) -> list[list[list[int]]]:
    """Tokens of the first run behind a capture and of three more, over garbage; file: tests/benchmarks/poison.py."""
    spec = importlib.util.spec_from_file_location("poison", file)
    assert spec is not None
    assert spec.loader is not None
    garbage = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(garbage)
    engine = make_engine(_on_cards(parallel) if case.device == "cuda" else parallel, case)
    engine.start()
    if case.device == "cuda":
        garbage.poison_free_memory()
    found = []
    for run in range(4):
        if run == 2:
            garbage.poison_every_launch(engine)
        garbage.poison(engine)
        found.append([answer.token_ids for answer in engine.generate(case.prompts, case.params)])
    return found


def loaded(parallel: TensorParallel, target_dir: str) -> tuple[int, int, dict[str, int]]:
    """Of a target read layer by layer: bytes that this rank read, bytes that it holds, what it passed over."""
    target: Any = load_target(target_dir, "bfloat16", parallel=parallel)
    held = sum(parameter.nbytes for parameter in target.parameters())
    for layer in target.layers:
        int4 = getattr(getattr(layer.mlp, "experts", None), "int4", None)
        held += 0 if int4 is None else int4.gate_up.nbytes + int4.down.nbytes
    return target.load_report.read_bytes, held, dict(target.load_report.skipped)


def built(parallel: TensorParallel, target_dir: str, draft_dir: str) -> tuple[dict[str, Any], list[str], int]:
    """An engine as a server makes it: its settings, what it said meanwhile, bytes that this rank read."""
    sizes = {"max_context_tokens": 64, "max_running_requests": 2, "dtype": "bfloat16", "device": "cpu"}
    options = EngineOptions(target_dir, draft_dir, 2, tensor_parallel_size=parallel.size, threads=1, **sizes)
    said: list[str] = []
    engine, settings = build_engine(options, said.append, parallel=parallel)
    target: Any = engine.target
    return settings, said, target.load_report.read_bytes
