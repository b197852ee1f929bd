"""Real graphs over garbage: the memory that they were captured into, caches, free rows, and all that nobody holds.

A tensor that a graph points to and nobody keeps alive, a buffer that is read before the replay writes it, a cell of the
cache that is read too early: each is NaN, or far off, in the first run behind a capture already.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.checkpoint import save_draft
from slipstream.engine.drafts.eagle3.hf_config import DraftRecord
from slipstream.engine.drafts.eagle3.layer_ids import Family
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.loader import load_target
from slipstream.engine.proposer import OracleProposer
from slipstream.engine.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
TESTS = Path(__file__).parents[1]
JOBS, POISON = Path(__file__).with_name("parallel_jobs.py"), TESTS / "benchmarks" / "poison.py"
WIDE = {"hidden_size": 128, "q_lora_rank": 64, "kv_lora_rank": 512, "vocab_size": 203}
SLOTS = (0, 2, 4)
SIZES = {"max_running_requests": 3, "max_context_tokens": 128, "prefill_chunk_tokens": 32, "device": "cuda"}
KINDS = ((0.0, 0, 1.0), (1.0, 0, 1.0), (0.8, 9, 0.9))  # temperature, top-k, top-p
PARAMS = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=t, seed=3, top_k=k, top_p=p) for t, k, p in KINDS]


@pytest.fixture(scope="module")
def garbage(load_test_module):
    return load_test_module(POISON)


@pytest.fixture(scope="module", params=["dense", "kimi"])
def directory(request, tiny, load_test_module, tmp_path_factory):
    root = tmp_path_factory.mktemp("target")
    if request.param == "dense":
        return tiny.save_tiny(root, hidden_size=256, intermediate_size=512, vocab_size=509)  # heads of 64
    return load_test_module(TESTS / "checkpoints" / "kimi.py").synthesise(root / "m", library=False, **WIDE).directory


@pytest.fixture(scope="module")
def target(directory):
    return load_target(directory, torch.bfloat16, "cuda")


@pytest.fixture(scope="module")
def prompts(tiny):
    return tiny.prompts(3, low=20, high=60)


@pytest.fixture(scope="module")
def plain(target, prompts):
    """Without speculation and graphs, a request at a time."""
    config = EngineConfig(**{**SIZES, "max_running_requests": 1, "graphs": False})
    return [answer.token_ids for answer in Engine(target, config).generate(prompts, PARAMS)]


@pytest.mark.parametrize("num_steps", [0, 3])
def test_the_first_run_behind_a_capture_reads_no_garbage(tiny, directory, target, prompts, plain, garbage, num_steps):
    """Three engines captured anew; then once more, and with garbage in all graphs' memory in front of every launch."""
    proposer = None
    for _ in range(3):
        if num_steps:
            draft = tiny.tiny_draft(load_target(directory, torch.bfloat16), slots=SLOTS, head_dim=64).to("cuda")
            recordings = {str(i): [*p, *t] for i, (p, t) in enumerate(zip(prompts, plain, strict=True))}
            inner = Eagle3Proposer(draft, num_steps)
            proposer = OracleProposer(num_steps, recordings, target.config.vocab_size, seed=3, inner=inner)
        engine = Engine(target, EngineConfig(num_steps=num_steps, **SIZES), proposer)
        engine.start()
        garbage.poison_free_memory()
        for run in range(3):
            if run == 2:
                garbage.poison_every_launch(engine)
            garbage.poison(engine)
            assert [answer.token_ids for answer in engine.generate(prompts, PARAMS)] == plain, f"run {run}"
    if num_steps:
        assert min(engine.stats.acceptance[num_steps].histogram) > 0


def test_the_tests_see_a_tensor_that_nobody_keeps(garbage):
    """A graph reads a tensor that is freed behind its capture."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    kept = torch.zeros(300_000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        copy = kept + 0.0
    graph.replay()
    torch.cuda.synchronize()
    assert not copy.isnan().any()
    del kept
    assert garbage.poison_free_memory() >= 1_200_000
    graph.replay()
    torch.cuda.synchronize()
    assert copy.isnan().any()


@pytest.mark.parametrize("directory", ["kimi"], indirect=True)
def test_two_ranks_read_no_garbage(jobs, ranks, tiny, directory, prompts, tmp_path):
    """K = 0, and K = 3 with an oracle around a draft: first and later runs have the tokens of two ranks without."""
    draft = tiny.tiny_draft(load_target(directory, torch.bfloat16), slots=SLOTS, head_dim=64)
    save_draft(tmp_path / "draft", draft, DraftRecord(TargetIdentity.from_dir(directory), Family.KIMI_K25, "0" * 64))
    where = {"dtype": "bfloat16", "device": "cuda"}
    case = jobs.Case(str(directory), str(tmp_path / "draft"), 3, prompts, PARAMS, **where)
    (plain, _), _ = ranks.run(2, JOBS, "serve_on_cards", replace(case, num_steps=0, draft=None, capture=SLOTS))
    recordings = {str(i): [*p, *t] for i, (p, t) in enumerate(zip(prompts, plain.tokens, strict=True))}
    for one in (replace(case, num_steps=0, draft=None), replace(case, recordings=recordings)):
        assert ranks.run(2, JOBS, "serve_over_garbage", one, str(POISON)) == [[plain.tokens] * 4] * 2


@pytest.fixture(scope="module")
def jobs(load_test_module):
    return load_test_module(JOBS)
