"""The parts of tp8.py that run models of published sizes with random weights."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from chosen_experts import ENOUGH, Chosen
from tp8_rank import Run

from slipstream.engine.agreement import RankAgreement
from slipstream.engine.bench.generate import Timing, params_of, prompts_of, time_generate
from slipstream.engine.bench.random_deepseek import fill, kimi_k25, kimi_k25_rank, random_deepseek
from slipstream.engine.bench.sizes import LLAMA_8B, LatentSize, Size, _fill
from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.inject import inject
from slipstream.engine.injection import parse_injections
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.models.dense import DenseModel
from slipstream.engine.packed_weights import pack_for_device
from slipstream.engine.proposer import OracleProposer
from slipstream.engine.rank_group import CARD_SECONDS
from slipstream.engine.tensor_files import parameter_shards
from slipstream.tasks.step_forecast import CURVES

BYTES_PER_SECOND = 4.3e12  # that a card copies
SGLANG_MS = 9.2  # Kimi-K2.5 on 8 H200s, one request, no speculation: SGLang 0.5.6's cookbook
PROMPT, NEW = 128, 64  # tokens
LLAMA_70B = Size("Llama-3.1-70B", 128256, 8192, 28672, 80, 64, 8, 128, False, 5e5, 32000, 28672)
SMALL = Size("small", 512, 512, 1024, 8, 8, 8, 64, False, 1e4, 256, 1024)
LLAMA_GOALS_MS = {("llama8b", 2): 2.4}


class Models:
    """A random target of these sizes on this rank, and engines of it.

    Args:
        run: the ranks.
        size: of target and draft.
        context, chunk: tokens of a request, and of a prompt's piece, at most.
    """

    def __init__(self, run: Run, size: Size, context: int = 512, chunk: int = PROMPT) -> None:
        self.run, self.size, self.context, self.chunk = run, size, context, chunk
        self.target: Any
        if isinstance(size, LatentSize):
            self.target = random_deepseek(size.target_config(), run.device, torch.bfloat16, run.parallel)
        else:
            with torch.device(run.device):
                self.target = DenseModel(size.target_config(), torch.bfloat16, run.parallel)
            _fill(self.target, run.parallel.rank)
            pack_for_device(self.target, run.device)
            self.target.requires_grad_(False).eval()
        self._network: Any = None
        run.progress(f"{size.name}: weights made{self._held()}")

    @property
    def network(self) -> Any:
        """A Llama-type draft, the same on all ranks."""
        if self._network is None:
            with torch.device(self.run.device):
                network = Eagle3Network(self.size.draft_config(), torch.bfloat16, self.run.parallel)
            generator = torch.Generator(self.run.device).manual_seed(1)
            for name, shard in parameter_shards(network).items():
                fill(name, shard, generator)
            ids = torch.arange(self.size.draft_vocab_size, device=self.run.device)
            network.d2t.copy_(ids * self.size.vocab_size // self.size.draft_vocab_size - ids)
            pack_for_device(network, self.run.device)
            self._network = network.requires_grad_(False).eval()
            self.run.progress(f"draft made{self._held()}")
        return self._network

    def engine(
        self,
        num_steps: int,
        proposer: Any = None,
        *,
        most: int = 1,
        capture: tuple[int, ...] = (),
        faults: Sequence[str] = (),
        graphs: bool | None = None,
        in_flight: int | None = None,
        prepare: Callable[[Engine], Any] = lambda engine: None,
    ) -> Engine:
        """A started engine. most: requests at a time; prepare: what is to be done before the start."""
        card = self.run.parallel.card
        if card is not None:
            card.be_patient(60.0)  # kernels are compiled at each rank's own pace
        config = EngineConfig(
            num_steps=num_steps,
            max_running_requests=most,
            max_context_tokens=self.context,
            prefill_chunk_tokens=self.chunk,
            device=self.run.device,
            graphs=graphs,
            rounds_in_flight=in_flight,
        )
        agreement = RankAgreement(self.run.parallel) if self.run.parallel.size > 1 else None
        engine = Engine(self.target, config, proposer, capture, agreement)
        inject(engine, parse_injections(faults))
        prepare(engine)
        engine.start()
        if card is not None and config.uses_graphs:
            with engine.steps.context():
                card.be_patient(CARD_SECONDS)
        self.run.progress(f"K = {num_steps} ready: {engine.steps.describe()}{self._held()}")
        return engine

    def _held(self) -> str:
        if self.run.device == "cpu":
            return ""
        torch.cuda.synchronize()
        return f"; {torch.cuda.memory_allocated() / 1e9:.1f} GB, {torch.cuda.max_memory_allocated() / 1e9:.1f} at most"


class InStep(OracleProposer):
    """The same luck for all requests, of prompts of one length: they end together, and rounds have the whole batch."""

    def _draw(self, request_id: str, length: int) -> float:
        return super()._draw("", length)


def parts_note(timing: Timing) -> str:
    p = timing.parts
    return f"draft {p.draft:.3f}, verify {p.verify:.3f}, rest {p.rest:.3f}, host {p.host:.3f}"


def free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def small_kimi(config: ModelConfig) -> ModelConfig:
    """The same with tiny widths."""
    assert config.latent is not None
    assert config.experts is not None
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_heads": 8, "num_kv_heads": 8}
    latent = replace(config.latent, q_rank=64, kv_rank=64)
    return replace(config, **sizes, latent=latent, experts=replace(config.experts, num=16, width=256), max_position=512)


def kimi_part(run: Run) -> None:
    """Steps and rounds of Kimi-K2.5's sizes, drawn at T = 1, accepted as the published curve says."""
    args, rehearse, ranks = run.args, bool(run.args.rehearse), run.parallel.size
    config = kimi_k25(args.layers, 8192)
    config = replace(small_kimi(config) if rehearse else config, bos_token_id=0, eos_token_ids=())
    size = LatentSize.of(f"kimi, {args.layers} layers", config)
    # What one rank reads: whole latents and routers, its share of the rest.
    share = LatentSize.of("", kimi_k25_rank(ranks, args.layers))
    models = Models(run, size)
    batches, new, curve = [int(one) for one in args.batches.split(",")], 10 if rehearse else NEW, CURVES[0].lengths
    run.progress(f"drafts are accepted as by {CURVES[0].what}; {CURVES[0].sampling}; {CURVES[0].rule}")
    plain: list[Any] = []
    for num_steps in sorted(int(one) for one in args.steps.split(",")):
        chosen: list[Chosen] = []
        proposer = None
        if num_steps:
            if not plain:
                raise ValueError("--steps without 0: the oracle replays what a run without drafts answered")
            recordings = {str(i): [*a.prompt_ids, *a.token_ids] for i, a in enumerate(plain)}
            joint = [curve[k] - curve.get(k - 1, 1.0) for k in range(1, num_steps + 1)]
            inner = Eagle3Proposer(models.network, num_steps)
            proposer = InStep(num_steps, recordings, size.vocab_size, joint, seed=3, inner=inner)
        engine = models.engine(num_steps, proposer, most=max(batches), prepare=lambda e, c=chosen: c.append(Chosen(e)))
        for batch in batches:
            timing = time_generate(engine, batch, PROMPT, new, 1, temperature=1.0)
            tell_kimi(run, size.name, share, timing, chosen[0], length_of(engine, num_steps))
        answers = engine.generate(prompts_of(engine, max(batches), PROMPT), params_of(max(batches), new, 1.0))
        if num_steps:
            pairs = zip(answers, plain, strict=True)
            wrong = sum(a != b for x, y in pairs for a, b in zip(x.token_ids, y.token_ids, strict=True))
            case = f"{size.name}: tokens that differ from those without drafts"
            run.row(case, wrong, f"of {max(batches) * new}", 0.0, batch=max(batches), k=num_steps)
        else:
            plain = answers
        late = engine.compiles_after_ready + engine.captures_after_ready
        run.progress(f"K = {num_steps} timed; {late} compiles and captures behind ready")
        chosen[0].stop()
        del engine
        free(run.device)


def length_of(engine: Engine, num_steps: int) -> float:
    """Tokens a round, of all rounds so far."""
    return engine.stats.acceptance[num_steps].accept_length if num_steps else 1.0


def tell_kimi(run: Run, name: str, share: LatentSize, timing: Timing, chosen: Chosen, length: float) -> None:
    batch, k, ms = timing.batch, timing.num_steps, timing.round_ms
    kv = batch * share.kv_bytes(PROMPT + NEW // 2)
    floor = (share.step_bytes(k, batch) + kv) / BYTES_PER_SECOND * 1e3
    published = CURVES[0].lengths.get(k, 1.0)
    note = f"{parts_note(timing)}; floor {floor:.2f} ({floor / ms:.0%}); "
    note += f"{1e3 * published / ms:.0f} tok/s a request at {published:.2f} tokens a round ({length:.2f} here)"
    if k == 0:  # the last round of a chain has rows that nobody needs
        of_layers = chosen.distinct(batch)
        experts, independent = sum(of_layers) / len(of_layers), share.distinct_experts(batch)
        note += f"; {experts:.0f} of {independent:.0f} experts"
        if experts < ENOUGH * independent and not run.args.rehearse:
            note += ": rows are alike, NOT TO BE RECORDED"
    if (batch, k) == (1, 0):
        note += f"; SGLang publishes {SGLANG_MS} ms on 8"
    run.row(f"{name}, {'round' if k else 'step'}", ms, "ms without prompts", batch=batch, k=k, note=note)


def llama_part(run: Run) -> None:
    """Steps of Llama sizes, where the weights fit; of 8B's on all ranks rounds, too."""
    ranks, rehearse = run.parallel.size, bool(run.args.rehearse)
    for name in run.args.models.split(","):
        size = SMALL if rehearse else {"llama8b": LLAMA_8B, "llama70b": LLAMA_70B}[name]
        share = size.step_bytes(0) / ranks
        if run.device == "cuda" and share > 0.9 * torch.cuda.get_device_properties(0).total_memory:
            run.progress(f"{name}: {share / 1e9:.0f} GB a rank do not fit")
            continue
        models = Models(run, size)
        steps = (0, 3) if name == "llama8b" and ranks == run.args.ranks else (0,)
        for num_steps in steps:
            proposer = Eagle3Proposer(models.network, num_steps) if num_steps else None
            engine = models.engine(num_steps, proposer)
            timing = time_generate(engine, 1, PROMPT, 16 if rehearse else 256 if size is LLAMA_8B else 96, 2)
            floor = (size.step_bytes(num_steps) + size.kv_bytes(2 * PROMPT)) / ranks / BYTES_PER_SECOND * 1e3
            note = f"{parts_note(timing)}; floor {floor:.2f} ({floor / timing.ms:.0%}); spread {timing.spread:.1%}"
            goal = None if num_steps else LLAMA_GOALS_MS.get((name, ranks))
            case = f"{name}-{'round' if num_steps else 'step'}"
            run.row(case, timing.ms, "ms, wall", goal, k=num_steps, note=note)
            del engine
        del models
        free(run.device)
