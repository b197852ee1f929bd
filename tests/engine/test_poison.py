"""What a step must not read is garbage here: cells, features, tokens, free rows' parameters, results of steps before,
and whatever torch hands out uninitialised. Answers and cells stay what they are.

tests/benchmarks/poison.py says what is filled; test_poison_gpu.py does the same to the memory of real graphs.
"""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.loader import load_target
from slipstream.engine.proposer import OracleProposer
from slipstream.engine.sampling_params import SamplingParams
from slipstream.kernels import latent_rows
from slipstream.kernels.gpu import attention_split, launch

TESTS = Path(__file__).parents[1]
GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=11, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True)
PARAMS = [replace((GREEDY, SAMPLED)[i % 2], max_tokens=6 + 3 * i) for i in range(5)]


@pytest.fixture(scope="module")
def garbage(load_test_module):
    return load_test_module(TESTS / "benchmarks" / "poison.py")


@pytest.fixture(scope="module", params=["dense", "kimi"])
def target(request, tiny, load_test_module, tmp_path_factory):
    root = tmp_path_factory.mktemp("target")
    if request.param == "dense":
        return tiny.tiny_target(root, dtype=torch.float32)
    load_test_module(TESTS / "checkpoints" / "kimi.py").synthesise(root / "m", library=False, num_hidden_layers=2)
    return load_target(root / "m", torch.float32)


@pytest.fixture(scope="module")
def prompts(tiny):
    return tiny.prompts(5, low=10)


@pytest.fixture(scope="module")
def plain(target, prompts):
    """Without speculation and graphs, a request at a time."""
    return engine_of(target, 0, graphs=False, max_running_requests=1).generate(prompts, PARAMS)


@pytest.fixture
def uninitialised_is_garbage() -> Iterator[None]:
    """NaN, or the largest integer, in all that torch.empty and its like hand out."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def engine_of(target, num_steps, proposer=None, **changes) -> Engine:
    sizes = {"max_running_requests": 3, "max_context_tokens": 96, "prefill_chunk_tokens": 20, "graphs": True}
    return Engine(target, EngineConfig(num_steps, **{**sizes, "dtype": "float32", **changes}), proposer)


def oracle(target, plain, num_steps):
    recordings = {str(i): a.prompt_ids + a.token_ids for i, a in enumerate(plain)}
    return OracleProposer(num_steps, recordings, target.config.vocab_size, seed=3)


def answers_and_cells(engine, prompts, params):
    """Answers, and of each the cells of all positions that a layer keeps."""
    blocks, admit = {}, engine.scheduler.admit

    def admitted():
        found = admit()
        blocks.update({s.request.request_id: list(s.blocks) for s in found})
        return found

    cells, release = {}, engine._release

    def released(sequence):
        at = sequence.request.request_id
        cells[at] = engine.runner.cache.read(blocks[at], sequence.length - 1)
        release(sequence)

    engine.scheduler.admit, engine._release = admitted, released
    answers = engine.generate(prompts, params)
    engine.scheduler.admit, engine._release = admit, release
    return answers, [cells[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize(("kind", "num_steps", "in_flight"), [("", 0, 2), ("oracle", 3, 0), ("draft", 3, 2)])
@pytest.mark.usefixtures("uninitialised_is_garbage")
def test_no_answer_hangs_on_what_lay_there(target, tiny, prompts, plain, garbage, kind, num_steps, in_flight):
    """The first run behind a capture, one behind others, and with garbage in front of every launch."""
    proposer = oracle(target, plain, num_steps) if kind == "oracle" else None
    if kind == "draft":
        proposer = Eagle3Proposer(tiny.tiny_draft(target, slots=(0, 1, 2)), num_steps)
    engine = engine_of(target, num_steps, proposer, rounds_in_flight=in_flight)
    engine.start()
    want = answers_and_cells(engine, prompts, PARAMS)[1]
    for way in (garbage.poison, garbage.poison, garbage.poison_every_launch):
        garbage.poison(engine)
        way(engine)
        answers, cells = answers_and_cells(engine, prompts, PARAMS)
        assert answers == plain
        assert all(torch.equal(a, b) for a, b in zip(cells, want, strict=True))
    if kind == "oracle":
        assert min(engine.stats.acceptance[num_steps].histogram) > 0


@pytest.mark.parametrize("target", ["kimi"], indirect=True)
def test_two_ranks_read_no_garbage(ranks, load_test_module, target, prompts, plain, tmp_path):
    jobs, poison = Path(__file__).with_name("parallel_jobs.py"), TESTS / "benchmarks" / "poison.py"
    sizes = {"num_hidden_layers": 2}
    load_test_module(TESTS / "checkpoints" / "kimi.py").synthesise(tmp_path / "m", library=False, **sizes)
    recordings = {str(i): a.prompt_ids + a.token_ids for i, a in enumerate(plain)}
    case = load_test_module(jobs).Case(
        str(tmp_path / "m"), None, 3, prompts, PARAMS, recordings=recordings, graphs=True
    )
    want = [answer.token_ids for answer in plain]
    assert ranks.run(2, jobs, "serve_over_garbage", case, str(poison)) == [[want] * 4] * 2


@pytest.mark.parametrize("target", ["kimi"], indirect=True)
def test_a_cell_that_is_not_written_shows_only_where_garbage_lay(target, prompts, plain, garbage, monkeypatch):
    """The same request again gets the same blocks, so it finds there what it would have written: as if nothing was."""
    engine = engine_of(target, 3, oracle(target, plain, 3))
    one = slice(0, 1)
    assert engine.generate(prompts[one], PARAMS[one]) == plain[one]
    missed = 16 + len(prompts[0]) + 1  # behind the dummy block: a cell of the answer
    write, misses = latent_rows.write_latent, []

    def leaves_one_out(kv, norm, cos, sin, cache, write_index):
        others = (write_index != missed).nonzero()[:, 0]
        misses.append(len(others) < len(write_index))
        write(kv[others], norm, cos[others], sin[others], cache, write_index[others])

    monkeypatch.setattr(latent_rows, "write_latent", leaves_one_out)
    assert engine.generate(prompts[one], PARAMS[one]) == plain[one]
    assert any(misses)
    garbage.poison(engine)
    assert engine.generate(prompts[one], PARAMS[one]) != plain[one]


@pytest.mark.parametrize("target", ["dense"], indirect=True)
def test_what_a_replay_did_not_write_shows(target, prompts, plain, garbage):
    """A replay whose logits stay where the capture put them."""
    engine = engine_of(target, 0, max_running_requests=1)
    engine.start()
    garbage.graphs_filler(engine.steps)()
    (captured,) = engine.steps.rounds[0]
    assert captured.result.logits.isnan().all()
    assert (captured.result.tokens == -1).all()
    captured.replay()
    assert captured.result.logits.isfinite().all()


class Launched:
    """Tensors that kernels are given while no kernel runs: their memory, and what of it was made meanwhile."""

    def __init__(self) -> None:
        self.storages: dict[int, StorageWeakRef] = {}
        self.made: set[int] = set()

    def note(self, _kernel, _grid, arguments, _options) -> None:
        for one in arguments.values():
            if isinstance(one, torch.Tensor):
                found = StorageWeakRef(one.untyped_storage())
                self.storages[found.cdata] = found

    def lost(self) -> int:
        """How many that were there before the step are gone. (Those that it made itself lie in its graph's memory.)"""
        gc.collect()
        return sum(s.expired() for at, s in self.storages.items() if at not in self.made)


class _Made(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, launched: Launched) -> None:
        super().__init__()
        self.launched, self.kept = launched, []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        inputs = {a.untyped_storage()._cdata for a in arguments if isinstance(a, torch.Tensor)}
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in inputs:
                self.launched.made.add(one.untyped_storage()._cdata)
                self.kept.append(StorageWeakRef(one.untyped_storage()))  # its number is nobody else's while this lives
        return result


@pytest.mark.parametrize("forgets", [False, True])
def test_what_a_captured_step_points_to_stays_alive(load_test_module, monkeypatch, forgets):
    """A small batch is captured, then a large one, for which attention's workspace grows. On `meta`, as on a card."""
    to_compile = load_test_module(Path(__file__).with_name("round_to_compile.py"))
    launched = Launched()
    monkeypatch.setattr(launch, "capability", lambda: 90)
    monkeypatch.setattr(launch, "_run", lambda *_: None)
    monkeypatch.setattr(attention_split, "_WORKSPACES", {})
    if forgets:
        monkeypatch.setattr(
            attention_split._Workspace, "_outgrown", property(lambda _: [], lambda *_: None), raising=False
        )
    runner, inputs = to_compile.runner(3, 16), []
    with to_compile.as_on_a_card(), torch.inference_mode():
        for batch in (1, 16):
            slots = torch.zeros(batch, dtype=torch.int64, device="meta")
            chunks = torch.zeros(batch, 4, dtype=torch.int64, device="meta")
            inputs += [slots, chunks]  # as `Captured` does
            for step in (lambda s=slots: runner.round(s, 3), lambda c=chunks: runner.prefill(c, 64)):
                step()  # warms up
                with monkeypatch.context() as during, _Made(launched):
                    during.setattr(launch, "_run", launched.note)
                    step()
    assert len(launched.storages) > len(launched.made & launched.storages.keys()) > 0
    assert (launched.lost() > 0) is forgets
