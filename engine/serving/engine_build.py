"""From directories to a warm engine, and what its effective settings are. Every check of a draft happens here, once."""

import hashlib
import os
import platform
import time
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.agreement import RankAgreement, check_same
from slipstream.engine.capture import slot_name
from slipstream.engine.card_group import carrier_name, check_shares, join_cards
from slipstream.engine.device import device_name, resolve_device
from slipstream.engine.drafts.eagle3.checkpoint import load_draft
from slipstream.engine.drafts.eagle3.hf_config import read_record
from slipstream.engine.drafts.eagle3.layer_ids import family_of
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine, Request
from slipstream.engine.expert_choices import record_choices
from slipstream.engine.files import sha256_file
from slipstream.engine.handover import Difference, TargetIdentity, identity_differences, refuse
from slipstream.engine.inject import inject
from slipstream.engine.injection import parse_injections
from slipstream.engine.kv_room import room_for
from slipstream.engine.layers import Linear
from slipstream.engine.layers.experts import RoutedExperts, Router
from slipstream.engine.layers.latent_attention import LatentAttention
from slipstream.engine.loader import load_target
from slipstream.engine.models.decoder import Decoder
from slipstream.engine.packed_weights import describe, products_for
from slipstream.engine.rank_group import CARD_SECONDS
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.serving.engine_options import EngineOptions
from slipstream.engine.streamed_load import reports_of_ranks
from slipstream.engine.tensor_parallel import TensorParallel, single
from slipstream.kernels.all_gather import all_gather
from slipstream.kernels.row_invariance import RowInvariance, probe

EXACT = "speculation gives the very tokens that the target gives without it, bit for bit"
ON_GPU = (
    "block sizes, splits and orders of summation of the kernels depend on the weights' shapes and the card, not "
    "on the number of rows: tests compare the bits for 1..128 of them"
)
BY_GAP = (
    "this CPU changes a row's bits with the number of rows: with speculation a token may differ where the target's two "
    "best logits are within rounding of each other"
)


def build_engine(
    options: EngineOptions,
    phase: Callable[[str], None],
    skip: Collection[str] = (),
    parallel: TensorParallel | None = None,
) -> tuple[Engine, dict[str, Any]]:
    """Loads, checks and warms up. Every rank calls it; they go through it side by side.

    Args:
        options: see there.
        phase: told what is being done.
        skip: faults whose checks are off.
        parallel: this rank among all, where there are several.

    Returns: (engine, effective settings as JSON; {} on all ranks but the first).
    Raises SlipstreamError: F2, F3, F8, F9, F14, F17 and whatever else is wrong with the directories.
    """
    if options.threads_per_rank is not None:
        torch.set_num_threads(options.threads_per_rank)
    options.check()
    parallel = parallel or single()
    check_same(parallel, _told(options))
    device = resolve_device(options.device)
    if device == "cuda" and parallel.size > 1:
        phase("joining the cards")
        parallel = join_cards(parallel)
    config = options.engine_config(device)
    clock = _StartClock()
    if device == "cuda":
        phase("compiling the matrix products")
        products_for(device)
        clock.part("compile matrix products")
    phase("loading the target")
    with room_for("the target's weights"):
        target = load_target(options.target, options.dtype, device, parallel, phase)
    loaded = reports_of_ranks(target.load_report, parallel) if target.load_report else None
    identity = None
    if parallel.rank == 0:  # reading all weights once is enough
        phase("reading the target's fingerprint")
        identity = TargetIdentity.from_dir(Path(options.target))
    proposer = None
    if options.draft is not None:
        phase("loading the draft")
        with room_for("the draft's weights"):
            network = load_draft(
                Path(options.draft),
                getattr(torch, options.dtype),
                target_embedding=target.embed_tokens.weight,
                target_num_layers=target.config.num_layers,
                family=family_of(target.config.architecture),
                parallel=parallel,
                skip=skip,
            )
        if identity is not None:
            check_draft_fits(Path(options.draft), network, target, identity, skip)
        proposer = Eagle3Proposer(network.eval(), options.num_steps)
    if parallel.card is not None:
        check_shares(parallel.size, [m.config.num_heads for m in (target, proposer and proposer.network) if m])
    clock.part("load")
    phase("allocating the KV cache")
    agreement = RankAgreement(parallel, compare_states="F5" not in skip) if parallel.size > 1 else None
    engine = Engine(target, config, proposer, options.capture_slots, agreement)
    if options.diagnostics:
        record_choices(target)
    inject(engine, parse_injections(options.inject))
    phase("probing row invariance")
    invariance = probe_model(target, proposer.network if proposer else None)
    clock.part("allocate and probe")
    phase("warming up")
    engine.start()
    warm_up(engine)
    if parallel.card is not None:
        with engine.steps.context():
            parallel.card.be_patient(CARD_SECONDS)
    engine.mark_ready()
    clock.part("warm up and capture")
    if identity is None:
        return engine, {}
    settings = effective_settings(options, engine, identity, invariance, clock.seconds)
    return engine, settings | ({"load_of_ranks": loaded} if loaded else {})


def check_draft_fits(
    directory: Path, network: Eagle3Network, target: Decoder, identity: TargetIdentity, skip: Collection[str] = ()
) -> None:
    """The draft was made for this very target. Raises SlipstreamError (F8 shapes, F17 other weights or tokenizer)."""
    draft, model = network.config, target.config
    pairs = {
        "vocab_size": (draft.vocab_size, model.vocab_size),
        "hidden_size": (draft.hidden_size, model.hidden_size),
        "target_hidden_size": (draft.target_hidden_size, model.hidden_size),
        "layers of the target": (draft.target_num_layers, model.num_layers),
    }
    differences = [Difference(name, a, b, "F8") for name, (a, b) in pairs.items() if a != b]
    record = read_record(directory)
    if record is not None:
        differences += identity_differences(record.identity, identity)
    refuse(
        differences,
        found_in=f"the draft {directory}",
        expected_in="the target",
        do="serve the target that the draft was trained on, or train a draft for this one",
        skip=skip,
    )


class _StartClock:
    """Wall seconds of a start by its parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def part(self, name: str) -> None:
        """`name` ends here."""
        now = time.perf_counter()
        self.seconds[name], self._since = round(now - self._since, 3), now


def probe_model(target: Decoder, draft: Eagle3Network | None) -> RowInvariance:
    """Whether this machine keeps a row's bits in every shape that the two networks use, on every rank."""
    if target.embed_tokens.weight.is_cuda:
        return RowInvariance(True, ON_GPU)
    weights, in_fp32 = {tuple(target.head_weight.shape)}, set()
    for network in (target, draft):
        for module in network.modules() if network is not None else []:
            if isinstance(module, Linear):
                weights.add(tuple(module.weight.shape))
            elif isinstance(module, LatentAttention):  # decode reads both halves of kv_b a head at a time
                weights |= {tuple(up.shape[1:]) for up in (module.key_up, module.value_up)}
            elif isinstance(module, RoutedExperts):
                in_fp32 |= {tuple(weight.shape) for weight in module.weights.expert(0)}
            elif isinstance(module, Router):
                in_fp32.add(tuple(module.weight.shape))
    model, parallel = target.config, target.parallel
    heads = parallel.cut_heads(model.num_heads, model.num_kv_heads)
    attention = (max(1, heads.q.size), max(1, heads.kv.size), model.head_dim)  # a rank without heads probes one
    if model.latent is not None:
        attention = (attention[0], 1, model.latent.cell)  # every head reads the latents
    own = probe(target.embed_tokens.weight.dtype, _filled(weights), attention=attention)
    if own.invariant and in_fp32:
        experts = probe(torch.float32, _filled(in_fp32), attention=attention)
        own = own if experts.invariant else experts
    if parallel.size == 1:
        return own
    everybody = all_gather(torch.tensor([int(own.invariant)]), [1] * parallel.size, parallel.group)
    changed = [rank for rank, invariant in enumerate(everybody) if not int(invariant)]
    if not own.invariant or not changed:
        return own
    return RowInvariance(
        False, f"the shapes of ranks {changed} change a row's bits; those of rank {parallel.rank} do not"
    )


def _filled(shapes: Collection[tuple[int, ...]]) -> list[tuple[int, int]]:
    """Those of weights that have an element."""
    return sorted((int(rows), int(columns)) for rows, columns in shapes if rows and columns)


def _told(options: EngineOptions) -> dict[str, object]:
    """What every rank must find the same before it loads anything."""
    directories = [options.target, *([options.draft] if options.draft else [])]
    files = [file for name in directories for file in _weights_and_configs(Path(name)) if file.is_file()]
    return {
        "versions": {name: version(name) for name in ("slipstream", "torch", "safetensors")},
        "options": options,
        "files": [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files],
    }


def warm_up(engine: Engine) -> None:
    """One short answer, so that the first client does not pay for lazy set-up. Leaves no trace in the counters."""
    room = engine.config.max_context_tokens
    prompt = [token % engine.target.config.vocab_size for token in range(max(1, min(32, room // 2)))]
    params = SamplingParams(
        max_tokens=max(1, min(2 * engine.config.num_steps + 4, room - len(prompt))), ignore_eos=True
    )
    engine.add_request(Request("warm-up", prompt, params))
    while engine.has_work:
        engine.step()
    engine.forget()


def effective_settings(
    options: EngineOptions,
    engine: Engine,
    identity: TargetIdentity,
    invariance: RowInvariance,
    start_seconds: Mapping[str, float],
) -> dict[str, Any]:
    """What is really in force, read from the engine rather than from what was asked.

    start_seconds: part of the start -> wall seconds.
    """
    config, proposer = engine.config, engine.runner.proposer
    draft: dict[str, Any] | None = None
    if isinstance(proposer, Eagle3Proposer) and options.draft is not None:
        draft = {
            "directory": options.draft,
            "fingerprint": directory_fingerprint(Path(options.draft)),
            "draft_vocab_size": proposer.network.config.draft_vocab_size,
            "max_context_tokens": proposer.network.config.max_position,
        }
    settings = {
        "num_steps": proposer.num_steps if proposer else 0,
        "verify_width": config.num_steps + 1,
        "slots": [slot_name(slot) for slot in engine.runner.feature_plan.slots],
        "captured_slots": [slot_name(slot) for slot in engine.runner.capture],
        "vocab_size": engine.target.config.vocab_size,
        "dtype": str(engine.runner.cache.layers[0].dtype).removeprefix("torch."),
        "device": engine.runner.device.type,
        "device_name": device_name(config.device),
        "graphs": engine.steps.describe(),
        "choose_steps": config.choose_steps,
        "rounds_in_flight": config.in_flight,
        "matrix_products": describe(
            products_for(config.device),
            engine.target if isinstance(engine.target, Decoder) else None,
            proposer.network if isinstance(proposer, Eagle3Proposer) else None,
        ),
        "start_seconds": dict(start_seconds),
        "max_context_tokens": config.max_context_tokens,
        "max_running_requests": config.max_running_requests,
        "block_size_tokens": config.block_size_tokens,
        "prefill_chunk_tokens": config.prefill_chunk_tokens,
        "kv_blocks": config.total_blocks,
        "tensor_parallel_size": engine.target.parallel.size,
        "rank_exchange": carrier_name(engine.target.parallel),
        "threads": torch.get_num_threads(),
        "target": {"directory": options.target, **identity.to_dict()},
        "draft": draft,
        "row_invariance": {
            "invariant": invariance.invariant,
            "detail": invariance.detail,
            "promise": EXACT if invariance.invariant else BY_GAP,
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("slipstream", "torch", "transformers", "safetensors")},
        },
        "engine_pid": os.getpid(),
        "injections": [str(injection) for injection in parse_injections(options.inject)],
    }
    keys = ("num_steps", "choose_steps", "dtype", "device", "target", "draft", "tensor_parallel_size")
    told = [settings[key] for key in keys]
    return {**settings, "fingerprint": f"slipstream-{_sha256(repr(told))[:12]}"}


def directory_fingerprint(directory: Path) -> str:
    """sha256 over names and contents of a directory's JSON and safetensors files."""
    files = _weights_and_configs(directory)
    return _sha256("\n".join(f"{file.name} {sha256_file(file)}" for file in files))


def _weights_and_configs(directory: Path) -> list[Path]:
    return sorted([*directory.glob("*.json"), *directory.glob("*.safetensors")])


def engine_stats(engine: Engine) -> dict[str, Any]:
    """Counters since start as JSON. seconds: wall time by part of a step; rounds: of the engine, each for all
    requests of its batch; acceptance: rounds of single requests, one entry for each K in force."""
    stats, scheduler = engine.stats, engine.scheduler
    return {
        "running": len(scheduler.running) + len(scheduler.prefilling),
        "waiting": len(scheduler.waiting),
        "free_blocks": scheduler.blocks.num_free,
        "total_blocks": scheduler.blocks.num_usable,
        "steps": stats.steps,
        "rounds": stats.rounds,
        "rounds_by_num_steps": [{"num_steps": k, "rounds": n} for k, n in sorted(stats.rounds_of.items())],
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "seconds": {
            "prefill": stats.prefill_seconds,
            "draft": stats.draft_seconds,
            "verify": stats.verify_seconds,
            "rest": stats.rest_seconds,
        },
        "captures_after_ready": engine.captures_after_ready,
        "compiles_after_ready": engine.compiles_after_ready,
        "acceptance": [counts.to_dict() for counts in stats.acceptance.values()],
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
