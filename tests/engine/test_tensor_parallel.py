"""Tensor parallelism over gloo: 1, 2, 4 and 8 ranks give the same tokens, slots, draft logits and A_k, on every one."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.capture import slot_name
from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.drafts.eagle3.checkpoint import save_draft
from slipstream.engine.drafts.eagle3.hf_config import DraftRecord
from slipstream.engine.drafts.eagle3.layer_ids import Family
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.tensor_parallel import TensorParallel
from slipstream.tasks.perplexity import fixed_text

JOBS = Path(__file__).with_name("parallel_jobs.py")
SIZES = (2, 4, 8)
SLOTS = (0, 1, 2)
# Largest error of a state or logit in fp32, as a share of the largest value there.
BOUND = 2e-5

# Heads, KV heads and vocabularies that the ranks do not divide; the draft has 4 heads, 2 KV heads and 66 tokens.
MODELS = {
    "4/2 tied": {},
    "9/3 untied": {
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 72,
        "intermediate_size": 100,
        "tie_word_embeddings": False,
    },
    "4/4 tied": {"num_key_value_heads": 4, "intermediate_size": 90},
    "qwen3 4/2": {"family": "qwen3", "head_dim": 24},
    "8/2 untied": {"num_attention_heads": 8, "head_dim": 16, "vocab_size": 203, "tie_word_embeddings": False},
}


@pytest.fixture(scope="module")
def jobs(load_test_module) -> ModuleType:
    return load_test_module(JOBS)


@pytest.fixture(scope="module")
def models(tiny, tmp_path_factory) -> dict[str, tuple[str, str]]:
    """Name -> directories of a target and its draft."""
    made = {}
    for i, (name, sizes) in enumerate(MODELS.items()):
        root = tmp_path_factory.mktemp("model")
        target = tiny.tiny_target(root / "target", seed=i, dtype=torch.float32, num_hidden_layers=3, **sizes)
        record = DraftRecord(TargetIdentity.from_dir(root / "target"), Family.LLAMA, "0" * 64)
        save_draft(root / "draft", tiny.tiny_draft(target, seed=i, slots=SLOTS), record)
        made[name] = (str(root / "target"), str(root / "draft"))
    return made


class Layout:
    """What all ranks of a size hold."""

    def __init__(self, size: int, num_heads: int, num_kv_heads: int) -> None:
        ranks = [TensorParallel(rank, size, group=None if size == 1 else object()) for rank in range(size)]
        self.cuts = [rank.cut_heads(num_heads, num_kv_heads) for rank in ranks]


@given(size=st.integers(1, 40), num_kv_heads=st.integers(1, 16), group=st.integers(1, 16))
def test_every_query_head_is_on_one_rank_with_its_kv_head(size, num_kv_heads, group):
    num_heads = num_kv_heads * group
    cuts = Layout(size, num_heads, num_kv_heads).cuts
    assert [head for cut in cuts for head in range(cut.q.start, cut.q.stop)] == list(range(num_heads))
    for cut in cuts:
        assert (cut.q.total, cut.kv.total) == (num_heads, num_kv_heads)
        if not cut.q.size:
            assert cut.kv.size == 0
            continue
        each = cut.q.size // cut.kv.size  # the kernel's rule: local query head i reads local KV head i // each
        assert each * cut.kv.size == cut.q.size
        for i in range(cut.q.size):
            assert cut.kv.start + i // each == (cut.q.start + i) // group
    if size <= num_kv_heads:
        assert sum(cut.kv.size for cut in cuts) == num_kv_heads  # none is held twice
    sizes = [cut.q.size for cut in cuts]
    assert max(sizes) - min(sizes) <= group  # as even as whole KV heads allow


@given(total=st.integers(0, 200), size=st.integers(1, 40))
def test_a_cut_axis_is_covered_once_in_rank_order(total, size):
    cuts = [TensorParallel(rank, size, None if size == 1 else object()).cut(total) for rank in range(size)]
    assert [i for cut in cuts for i in range(cut.start, cut.stop)] == list(range(total))
    assert max(cut.size for cut in cuts) - min(cut.size for cut in cuts) <= 1


def _case(jobs, tiny, directories, num_steps, *, oracle=None, temperature=0.0, count=4, max_tokens=20, **fields):
    target, draft = directories
    params = [
        SamplingParams(max_tokens=max_tokens - 2 * i, ignore_eos=True, temperature=temperature, top_p=0.95, seed=5 + i)
        if temperature
        else SamplingParams(max_tokens=max_tokens - 2 * i, ignore_eos=True)
        for i in range(count)
    ]
    prompts = tiny.prompts(count, seed=1, low=6, high=44)  # up to three chunks of 16
    return jobs.Case(target, draft, num_steps, prompts, params, recordings=oracle, capture=SLOTS, **fields)


def _recordings(case, served) -> dict[str, list[int]]:
    pairs = zip(case.prompts, served.tokens, strict=True)
    return {str(i): [*prompt, *tokens] for i, (prompt, tokens) in enumerate(pairs)}


def _assert_equal(ours, one, what: str) -> float:
    """Every rank of `ours` against a single device; the largest error as a share of the largest value."""
    assert len({served.bits() for served in ours}) == 1, f"{what}: ranks differ"
    assert ours[0].tokens == one.tokens, what
    assert ours[0].acceptance == one.acceptance, what
    assert set(ours[0].tensors) == set(one.tensors)
    worst = 0.0
    for name, expected in one.tensors.items():
        error = (ours[0].tensors[name] - expected).abs().max() / expected.abs().max()
        assert error <= BOUND, f"{what}: {name} differs by {error:.2e}"
        worst = max(worst, float(error))
    return worst


@pytest.mark.parametrize("every_size", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_slots_and_draft_logits_do_not_depend_on_the_number_of_ranks(
    jobs, tiny, ranks, models, name, every_size
):
    """How a model is cut over so many ranks shows in the last case: target and draft, for every model and size.

    The others are the runner's ways, whatever the cut: each at one size a model, in turn, so that it meets all sizes.
    """
    plain_case = _case(jobs, tiny, models[name], 0)
    plain = ranks.run(1, JOBS, "serve", plain_case)[0]
    cases = {
        "K = 0": plain_case,
        "K = 3, oracle": _case(jobs, tiny, models[name], 3, oracle=_recordings(plain_case, plain)),
        "K = 3, draft, T = 0.8": _case(jobs, tiny, models[name], 3, temperature=0.8, count=2, max_tokens=12),
    }
    for turn, (what, case) in enumerate(cases.items(), list(MODELS).index(name)):
        one = ranks.run(1, JOBS, "serve", case)[0]
        if case.num_steps and not case.params[0].temperature:
            assert one.tokens == plain.tokens
            accepted = one.acceptance[3]["histogram"]
            assert min(accepted) > 0, f"an accepted count never occurred: {accepted}"
        for size in SIZES if every_size or case.params[0].temperature else SIZES[turn % 3 :][:1]:
            ours = ranks.run(size, JOBS, "serve", case)
            worst = _assert_equal(ours, one, f"{name}, {what}, {size} ranks")
            print(f"{name}, {what}, {size} ranks: largest error {worst:.1e}; heads {[served.heads for served in ours]}")
            for served in ours:
                assert served.kv_heads == served.heads[1]  # a rank's cache holds its own KV heads only


def _error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits.float() - exact).abs().mean())


@pytest.mark.parametrize("name", MODELS)
def test_bf16_is_as_near_to_fp32_on_any_number_of_ranks(tiny, ranks, models, name):
    """Teacher-forced. Partial sums are rounded once more each, which must not show beside the rounding there is."""
    text, (target, _) = tiny.prompts(1, seed=2, low=110, high=110)[0], models[name]
    exact, _ = ranks.run(1, JOBS, "teacher_forced", target, "float32", text)[0]
    one, _ = ranks.run(1, JOBS, "teacher_forced", target, "bfloat16", text)[0]
    for size in SIZES:
        everybody = [logits for logits, _ in ranks.run(size, JOBS, "teacher_forced", target, "bfloat16", text)]
        assert all(torch.equal(everybody[0], logits) for logits in everybody)
        error, usual = _error(everybody[0], exact), _error(one, exact)
        print(f"{name}, {size} ranks in bf16: mean error to fp32 {error:.4f}, of one device {usual:.4f}")
        assert error <= 1.3 * usual


@pytest.mark.real
def test_bf16_argmax_of_the_real_target_differs_only_at_near_ties(ranks, real_target):
    """Teacher-forced: where argmaxes differ, one device sees at most 2 bf16 ulps between the two tokens."""
    text = ChatTokenizer(real_target).encode(fixed_text())[:300]
    one, _ = ranks.run(1, JOBS, "teacher_forced", str(real_target), "bfloat16", text)[0]
    for size in SIZES:
        everybody = [
            logits for logits, _ in ranks.run(size, JOBS, "teacher_forced", str(real_target), "bfloat16", text)
        ]
        assert all(torch.equal(everybody[0], logits) for logits in everybody)
        other = everybody[0].argmax(-1)
        rows = torch.nonzero(other != one.argmax(-1))[:, 0]
        best = one[rows].max(-1).values.float()
        ulps = (best - one[rows, other[rows]].float()) / torch.exp2(torch.floor(torch.log2(best.abs())) - 7)
        share = len(rows) / len(text)
        print(
            f"{size} ranks in bf16: argmax differs at {len(rows)} of {len(text)} positions ({share:.1%}), "
            f"gaps of {sorted(ulps.tolist())} ulps"
        )
        assert (ulps <= 2).all()
        assert share <= 0.08  # bf16 itself differs from fp32 at 4 %


def test_states_are_whole_on_every_rank(tiny, ranks, models):
    """Slots are taken behind the reduce: each equals a single device's, and none equals a rank's part of it."""
    target, _ = models["9/3 untied"]
    text = tiny.prompts(1, seed=3, low=50, high=50)[0]
    _, one = ranks.run(1, JOBS, "teacher_forced", target, "float32", text)[0]
    for size in SIZES:
        for logits, states in ranks.run(size, JOBS, "teacher_forced", target, "float32", text):
            assert logits.shape == (50, 199)
            for slot in range(4):
                expected = one[slot_name(slot)]
                assert (states[slot_name(slot)] - expected).abs().max() <= BOUND * expected.abs().max()


def test_ranks_that_found_different_files_are_named_at_start(ranks):
    said = ranks.run(4, JOBS, "facts_of", 2)
    assert len(set(said)) == 1
    assert "rank 2 differs from the other 3 of 4 ranks in the weights" in said[0]
    assert ranks.run(4, JOBS, "facts_of", 9) == [""] * 4


@pytest.mark.parametrize("graphs", [False, True])
def test_ranks_with_launches_in_flight_compare_what_was_committed_now_and_then(tiny, ranks, jobs, models, graphs):
    """As on cards, with exchanges within captured steps: a step's tensors are not looked at, and most steps end without
    an exchange between the hosts."""
    target, draft = models["4/2 tied"]
    prompts = tiny.prompts(4, seed=5)
    params = [SamplingParams(max_tokens=70, ignore_eos=True, temperature=t, seed=3) for t in (0.0, 1.0, 0.0, 0.8)]
    case = jobs.Case(target, draft, 2, prompts, params, rounds_in_flight=2, graphs=graphs)
    alone, *_ = ranks.run(1, JOBS, "serve", case)
    for tokens, steps, compared, said in ranks.run(2, JOBS, "serve_in_flight", case, -1):
        assert said == ""
        assert tokens == alone.tokens
        assert steps > 64
        assert 1 <= compared <= 1 + steps // 64
    for *_, said in ranks.run(2, JOBS, "serve_in_flight", case, 1):
        assert "in the committed tokens of steps 1 to 64" in said


def test_ranks_choose_the_same_k_whatever_their_clocks_say(tiny, ranks, jobs, models):
    """Another K on one rank would be another number of exchanges: they would wait for each other for ever."""
    target, draft = models["4/2 tied"]
    params = [SamplingParams(max_tokens=70, ignore_eos=True, temperature=t, seed=3) for t in (0.0, 1.0, 0.0, 0.8)]
    case = jobs.Case(target, draft, 2, tiny.prompts(4, seed=5), params, rounds_in_flight=2, graphs=True)
    alone, *_ = ranks.run(1, JOBS, "serve", case)
    clocks = [{0: 1.0, 1: 1.001, 2: 1.002}, {0: 0.9, 1: 30.0, 2: 40.0}]  # drafts for nothing; drafts that never pay
    found = ranks.run(2, JOBS, "serve_choosing", replace(case, choose_steps=True), clocks)
    for tokens, times, rounds in found:
        assert tokens == alone.tokens
        assert all(one == {0: 1.0, 1: 30.0, 2: 40.0} for one in times)
        assert rounds == found[0][2]
        assert rounds[0] > 20
        assert rounds[2] > 3
