"""Where answers end, who gets blocks, what is refused."""

import pytest
import torch

from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine, EngineConfig, Request
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.proposer import OracleProposer
from slipstream.engine.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def target(tiny, tmp_path_factory):
    return tiny.tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompt(tiny):
    return tiny.prompts(1, low=20, high=20)[0]


@pytest.fixture(scope="module")
def answer(target, prompt):
    """100 tokens at K = 0, end tokens passed over."""
    return make(target).generate([prompt], SamplingParams(max_tokens=100, ignore_eos=True))[0].token_ids


def make(target, num_steps=0, recording=None, **sizes) -> Engine:
    """An engine; with a recording, its oracle is always right."""
    oracle = None
    if num_steps:
        oracle = OracleProposer(num_steps, {"0": recording}, target.config.vocab_size, [1.0] * num_steps)
    return Engine(
        target,
        EngineConfig(num_steps=num_steps, prefill_chunk_tokens=16, **{"max_context_tokens": 128, **sizes}),
        oracle,
    )


def first_seen(answer: list[int], low: int) -> int:
    """An index >= low whose token does not occur before it."""
    return next(i for i in range(low, len(answer)) if answer[i] not in answer[:i])


@pytest.mark.parametrize("num_steps", [0, 3, 7])
@pytest.mark.parametrize("low", [0, 1, 2, 4, 5])
def test_a_stop_token_inside_an_accepted_span_ends_the_answer(target, prompt, answer, num_steps, low):
    at = first_seen(answer, low)
    engine = make(target, num_steps, prompt + answer)
    params = SamplingParams(max_tokens=100, ignore_eos=True, stop_token_ids=(answer[at],))
    (done,) = engine.generate([prompt], params)
    assert done.token_ids == answer[: at + 1]
    assert done.finish_reason == "stop"
    assert engine.scheduler.blocks.num_used == 0
    assert engine.stats.generated_tokens == at + 1


def test_the_models_own_end_token_stops_unless_passed_over(tiny, tmp_path, prompt, answer):
    at = first_seen(answer, 2)
    target = tiny.tiny_target(tmp_path, eos_token_id=[answer[at], 0])
    assert target.config.eos_token_ids == (answer[at], 0)
    (done,) = make(target, 3, prompt + answer).generate([prompt], SamplingParams(max_tokens=50))
    assert (done.token_ids, done.finish_reason) == (answer[: at + 1], "stop")
    (on,) = make(target).generate([prompt], SamplingParams(max_tokens=50, ignore_eos=True))
    assert (on.token_ids, on.finish_reason) == (answer[:50], "length")


@pytest.mark.parametrize("num_steps", [0, 3, 5])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 12])
def test_max_tokens_is_never_overshot(target, prompt, answer, num_steps, max_tokens):
    engine = make(target, num_steps, prompt + answer)
    (done,) = engine.generate([prompt], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    assert done.token_ids == answer[:max_tokens]
    assert done.finish_reason == "length"
    if num_steps and max_tokens > 1:
        counts = engine.stats.acceptance[num_steps]
        assert counts.ended == 1  # the round that ends the request is left out
        assert sum(counts.histogram) == (max_tokens - 2) // (num_steps + 1)


def test_a_stop_token_at_the_limit_is_a_stop(target, prompt, answer):
    at = first_seen(answer, 3)
    params = SamplingParams(max_tokens=at + 1, ignore_eos=True, stop_token_ids=(answer[at],))
    (done,) = make(target, 3, prompt + answer).generate([prompt], params)
    assert (done.token_ids, done.finish_reason) == (answer[: at + 1], "stop")


@pytest.mark.parametrize("num_steps", [0, 5])
def test_the_context_end_is_a_length_stop(tiny, target, prompt, answer, num_steps):
    engine = make(target, num_steps, prompt + answer, max_context_tokens=32)
    (done,) = engine.generate([prompt], SamplingParams(max_tokens=100, ignore_eos=True))
    assert done.token_ids == answer[:12]
    assert done.finish_reason == "length"


def test_the_context_may_end_where_the_rope_tables_end(tiny, target):
    """A draft chain must not step over the end of its table; position 255 is the last."""
    (prompt,) = tiny.prompts(1, low=240, high=240)
    params = SamplingParams(max_tokens=100, temperature=1.0, seed=1, ignore_eos=True)
    (expected,) = make(target, max_context_tokens=256).generate([prompt], params)
    draft = Eagle3Proposer(tiny.tiny_draft(target), 7)
    (done,) = Engine(target, EngineConfig(num_steps=7, max_context_tokens=256), draft).generate([prompt], params)
    assert done == expected
    assert len(done.token_ids) == 16


def test_abort_frees_what_the_request_holds(target, prompt, answer):
    engine = make(target, 3, prompt + answer, max_running_requests=1)
    for request_id in ("0", "1"):
        engine.add_request(Request(request_id, prompt, SamplingParams(max_tokens=50, ignore_eos=True)))
    engine.step()
    assert engine.scheduler.prefilling  # the prompt takes two chunks
    assert engine.abort("1")  # waiting
    engine.step()
    assert engine.scheduler.running
    assert engine.abort("0")  # running
    assert not engine.has_work
    assert engine.scheduler.blocks.num_used == 0
    assert not engine.abort("0")
    assert engine.step() == []
    # The same id again must not meet anything of the old request.
    engine.add_request(Request("0", prompt, SamplingParams(max_tokens=5, ignore_eos=True)))
    tokens = []
    while engine.has_work:
        tokens += [t for output in engine.step() for t in output.new_token_ids]
    assert tokens == answer[:5]


def test_abort_while_prefilling(target, prompt):
    engine = make(target)
    engine.add_request(Request("0", prompt, SamplingParams(max_tokens=5)))
    engine.step()
    assert engine.scheduler.prefilling
    engine.abort("0")
    assert not engine.has_work
    assert engine.scheduler.blocks.num_used == 0


def test_requests_wait_for_blocks(target, tiny):
    """Blocks for two requests: the third waits, and every answer is the same as with room for all."""
    prompts, params = tiny.prompts(5, low=20, high=20), SamplingParams(max_tokens=11, ignore_eos=True)
    expected = make(target).generate(prompts, params)
    engine = make(target, num_kv_blocks=1 + 2 * 2)  # 20 + 11 + 1 positions are two blocks of 16
    most = 0
    for i, prompt in enumerate(prompts):
        engine.add_request(Request(str(i), prompt, params))
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        most = max(most, len(engine.scheduler.running) + len(engine.scheduler.prefilling))
        assert engine.scheduler.blocks.num_used <= 4
    assert most == 2
    assert [tokens[str(i)] for i in range(5)] == [e.token_ids for e in expected]
    assert engine.scheduler.blocks.num_used == 0
    assert engine.scheduler.blocks.num_free == 4


def test_what_can_never_run_is_refused(target, prompt):
    engine = make(target, num_kv_blocks=3, max_context_tokens=64)
    with pytest.raises(SlipstreamError, match="4 KV blocks"):
        engine.add_request(Request("0", prompt, SamplingParams(max_tokens=40)))
    with pytest.raises(SlipstreamError, match="prompt has 64 tokens") as error:
        engine.add_request(Request("0", prompt * 3 + prompt[:4], SamplingParams()))
    assert "at most 63" in str(error.value)
    with pytest.raises(SlipstreamError, match="empty"):
        engine.add_request(Request("0", [], SamplingParams()))
    with pytest.raises(SlipstreamError, match="out of range"):
        engine.add_request(Request("0", [199], SamplingParams()))
    with pytest.raises(SlipstreamError, match="temperature"):
        engine.add_request(Request("0", prompt, SamplingParams(temperature=-1)))
    engine.add_request(Request("0", prompt, SamplingParams(max_tokens=2)))
    with pytest.raises(SlipstreamError, match="in use"):
        engine.add_request(Request("0", prompt, SamplingParams(max_tokens=2)))


def test_parts_that_do_not_fit_are_refused(tiny, target):
    draft = Eagle3Proposer(tiny.tiny_draft(target), 3)
    with pytest.raises(SlipstreamError, match="num_steps = 2, and a proposer of 3"):
        Engine(target, EngineConfig(num_steps=2, max_context_tokens=64), draft)
    with pytest.raises(SlipstreamError, match="no proposer"):
        Engine(target, EngineConfig(num_steps=2, max_context_tokens=64))
    with pytest.raises(SlipstreamError, match="target follows a context of 256"):
        Engine(target, EngineConfig(max_context_tokens=257))
    draft.max_position = 100
    with pytest.raises(SlipstreamError, match="F14: the draft follows a context of 100 tokens"):
        Engine(target, EngineConfig(num_steps=3, max_context_tokens=128), draft)
    with pytest.raises(SlipstreamError, match=r"0\.\.8"):
        EngineConfig(num_steps=9)


def test_logprobs_are_of_the_raw_logits(tiny, tmp_path, prompt):
    target = tiny.tiny_target(tmp_path, dtype=torch.float32)
    (plain,) = make(target).generate([prompt], SamplingParams(max_tokens=6, ignore_eos=True))
    answer = plain.token_ids
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=3)
    engine = make(target, 3, prompt + answer)
    engine.add_request(Request("0", prompt, params))
    found = []
    while engine.has_work:
        for output in engine.step():
            assert output.logprobs is not None
            assert len(output.logprobs) == len(output.new_token_ids)
            found += output.logprobs
    assert [entry.token_id for entry in found] == answer[:6]
    with torch.no_grad():
        logits = tiny.tiny_hf()(torch.tensor([prompt + answer[:5]])).logits[0, -6:]
    expected = logits.log_softmax(-1)
    for i, entry in enumerate(found):
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token_id, entry.logprob)  # greedy takes the most likely
        assert abs(entry.logprob - float(expected[i, entry.token_id])) < 1e-3


def test_progress_counts_answers(target, tiny):
    seen = []
    make(target).generate(tiny.prompts(3), SamplingParams(max_tokens=2), lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
