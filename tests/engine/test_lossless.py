"""Speculation never changes the output: tokens, logits and cache, alone and in a batch, whatever is proposed."""

import pytest
import torch

from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine, EngineConfig, Request
from slipstream.engine.proposer import OracleProposer
from slipstream.engine.runner import capture_states
from slipstream.engine.sampling_params import SamplingParams
from slipstream.kernels.sampling import SamplingBatch, sample

SAMPLING = {
    "greedy": SamplingParams(max_tokens=48, ignore_eos=True),
    "T=1": SamplingParams(max_tokens=48, temperature=1.0, seed=11, ignore_eos=True),
    "T=0.8 p=0.9": SamplingParams(max_tokens=48, temperature=0.8, top_p=0.9, seed=12, ignore_eos=True),
    "T=1.2 k=20": SamplingParams(max_tokens=48, temperature=1.2, top_k=20, seed=13),
}


def config(num_steps: int, **sizes) -> EngineConfig:
    return EngineConfig(**{"num_steps": num_steps, "max_context_tokens": 128, "prefill_chunk_tokens": 16, **sizes})


def recordings(answers) -> dict[str, list[int]]:
    return {str(i): a.prompt_ids + a.token_ids for i, a in enumerate(answers)}


@pytest.fixture(scope="module")
def target(tiny, tmp_path_factory):
    return tiny.tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts(tiny):
    return tiny.prompts(10)


@pytest.fixture(scope="module")
def plain(target, prompts):
    """Answers at K = 0, a request at a time."""
    alone = config(0, max_running_requests=1)
    return {name: Engine(target, alone).generate(prompts, params) for name, params in SAMPLING.items()}


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("num_steps", [0, 1, 3, 5, 7])
def test_tokens_do_not_depend_on_k_or_neighbours(target, prompts, plain, num_steps, name):
    oracle = OracleProposer(num_steps, recordings(plain[name]), target.config.vocab_size, seed=3) if num_steps else None
    engine = Engine(target, config(num_steps), oracle)
    answers = engine.generate(prompts, SAMPLING[name])
    assert answers == plain[name]
    histogram = engine.stats.acceptance[num_steps].histogram
    assert len(histogram) == num_steps + 1
    assert min(histogram) > 0, f"an accepted count never occurred: {histogram}"
    assert engine.scheduler.blocks.num_used == 0


@pytest.mark.parametrize("num_steps", [1, 5])
def test_tokens_do_not_depend_on_the_draft(tiny, target, prompts, plain, num_steps):
    engine = Engine(target, config(num_steps), Eagle3Proposer(tiny.tiny_draft(target), num_steps))
    assert engine.generate(prompts, SAMPLING["T=1"]) == plain["T=1"]
    assert engine.stats.acceptance[num_steps].histogram[1] > 0  # the noise shared with the target makes some right


@pytest.mark.parametrize("name", ["T=1", "T=0.8 p=0.9"])
def test_each_token_takes_the_noise_of_its_own_absolute_position(target, prompts, plain, name):
    """From the finished text, in one pass: the token at p is the sample of the logits at p - 1, with the noise of p."""
    params = SAMPLING[name]
    for answer in plain[name][:4]:
        ids, start = answer.prompt_ids + answer.token_ids, len(answer.prompt_ids)
        _, teacher = capture_states(target, ids[:-1], ())
        logits = target.logits(teacher[start - 1 :])[None]  # [n, V] -> [1, n, V]
        positions = torch.arange(start, len(ids))[None]  # [1, n]
        expected = sample(logits, SamplingBatch.from_params([params]), positions)
        assert expected[0].tolist() == answer.token_ids


def test_the_choice_index_changes_the_answer(target, prompts):
    engine = Engine(target, config(0))
    for choice in (0, 1):
        engine.add_request(Request(f"{choice}", prompts[0], SAMPLING["T=1"], choice_index=choice))
    tokens = {"0": [], "1": []}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
    assert tokens["0"] != tokens["1"]


def test_mixed_sampling_in_one_batch(target, prompts, plain):
    names = [list(SAMPLING)[i % 4] for i in range(len(prompts))]
    answers = Engine(target, config(0)).generate(prompts, [SAMPLING[n] for n in names])
    assert answers == [plain[n][i] for i, n in enumerate(names)]


def _run(target, num_steps, prompts, oracle):
    """Logits of every committed position and the cache of every request just before its end, batch of all prompts."""
    engine = Engine(target, config(num_steps, max_running_requests=len(prompts)), oracle)
    logits: list[dict[int, torch.Tensor]] = [{} for _ in prompts]
    take = engine.runner.round

    def spy(slots, num_steps):
        result = take(slots, num_steps)
        ids = {s.slot: int(s.request.request_id) for s in engine.scheduler.running}
        for b, slot in enumerate(slots.tolist()):
            for i in range(int(result.accepted[b]) + 1):
                logits[ids[slot]][int(result.start[b]) - 1 + i] = result.logits[b, i]
        return result

    engine.runner.round = spy
    for i, prompt in enumerate(prompts):
        engine.add_request(Request(str(i), prompt, SAMPLING["greedy"]))
    blocks: dict[int, list[int]] = {}
    while engine.has_work:
        for sequence in engine.scheduler.running:
            blocks[int(sequence.request.request_id)] = list(sequence.blocks)
        engine.step()
    lengths = [len(p) + SAMPLING["greedy"].max_tokens - 1 for p in prompts]  # the last token is never in the cache
    return logits, [engine.runner.cache.read(blocks[i], n) for i, n in enumerate(lengths)]


def test_logits_and_cache_are_bitwise_equal(target, prompts, plain):
    """In bf16: K = 0 a request at a time, against K = 5 in a batch."""
    few = prompts[:4]
    oracle = OracleProposer(5, recordings(plain["greedy"]), target.config.vocab_size)
    spec_logits, spec_caches = _run(target, 5, few, oracle)
    for i, prompt in enumerate(few):
        (logits,), (cache,) = _run(target, 0, [prompt], None)
        assert logits.keys() == spec_logits[i].keys()
        assert all(torch.equal(logits[p], spec_logits[i][p]) for p in logits)
        assert cache.abs().sum() > 0
        assert torch.equal(cache, spec_caches[i])


def test_oracle_reaches_the_acceptance_it_is_given(target, prompts, plain):
    wanted = [0.9, 0.5, 0.1]
    oracle = OracleProposer(3, recordings(plain["greedy"]), target.config.vocab_size, joint_acceptance=wanted)
    engine = Engine(target, config(3), oracle)
    engine.generate(prompts, SAMPLING["greedy"])
    for rate, joint in zip(wanted, engine.stats.acceptance[3].joint, strict=True):
        assert abs(joint.rate - rate) < 4 * joint.standard_error


def test_oracle_refuses_rising_acceptance():
    with pytest.raises(ValueError, match="falling"):
        OracleProposer(2, {}, 10, joint_acceptance=[0.2, 0.4])
