"""The noise bit for bit, the filters against transformers' warpers, and which token comes out."""

import math
import struct
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from slipstream.kernels import gumbel_noise as noise_module
from slipstream.kernels import logit_filters
from slipstream.kernels.sampling import (
    SamplingBatch,
    filter_logits,
    gumbel_noise,
    propose_tokens,
    sample,
    token_logprobs,
)

SEEDS = st.integers(-(2**63), 2**63 - 1)


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = 0


def noise(seed: int, choice: int, positions: list[int], token_ids: torch.Tensor) -> torch.Tensor:
    """[R, V] of one request."""
    rows = torch.tensor([positions])
    return gumbel_noise(torch.tensor([seed]), torch.tensor([choice]), rows, token_ids)[0]


def noise_in_plain_integers(seed: int, choice: int, position: int, token_id: int) -> float:
    """The definition once more, in Python's unbounded integers."""

    def mix64(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    key = mix64((mix64((mix64(seed % 2**64) + choice) % 2**64) + position) % 2**64)
    x = token_id
    x = (x ^ (x >> 16)) * 0x31848BAB % 2**32
    x = (x ^ (x >> 15)) * 0xAC4C1B51 % 2**32
    x ^= x >> 16
    x = (x ^ (key % 2**32)) * 0xED5AD4BB % 2**32
    x = ((x ^ (x >> 11)) + (key >> 32)) * 0xAC4C1B51 % 2**32
    x = (x ^ (x >> 15)) * 0x31848BAB % 2**32
    x ^= x >> 14
    signed = x - 2**32 if x >= 2**31 else x
    uniform = (signed + 2**31 + 0.5) / 2**32
    return struct.unpack("f", struct.pack("f", -math.log(-math.log(uniform))))[0]


def warped(logits: torch.Tensor, params: Params) -> torch.Tensor:
    """[R, V] -> [R, V], by transformers' warpers in transformers' order."""
    scores = TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return scores


@given(SEEDS, st.integers(0, 3), st.integers(0, 2**20), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_noise_is_the_hash_written_in_plain_integers(seed: int, choice: int, position: int, ids: list[int]) -> None:
    got = noise(seed, choice, [position], torch.tensor(ids))[0].tolist()
    assert got == [noise_in_plain_integers(seed, choice, position, i) for i in ids]


def test_noise_never_changes_between_versions() -> None:
    """Pinned: other values here mean other answers to every seeded request."""
    got = noise(1234, 1, [0, 77], torch.tensor([0, 1, 49151]))
    want = [
        [2.7413439750671387, 1.1007195711135864, 0.160685732960701],
        [-0.24388901889324188, 2.570297956466675, 0.8947464823722839],
    ]
    assert torch.equal(got, torch.tensor(want))


def test_uniform_is_open_at_both_ends() -> None:
    ends = noise_module._gumbel(torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32))
    assert ends.tolist() == pytest.approx([-math.log(33 * math.log(2)), 33 * math.log(2)], rel=1e-6)


@given(SEEDS, st.integers(1, 3000), st.data())
@settings(max_examples=50, deadline=None)
def test_noise_of_a_shard_is_a_slice_of_the_whole(seed: int, vocab: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, vocab - 1))
    end = data.draw(st.integers(start + 1, vocab))
    ids = torch.arange(vocab)
    whole = noise(seed, 0, [3, 4], ids)
    assert torch.equal(noise(seed, 0, [3, 4], ids[start:end]), whole[:, start:end])
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(vocab))
    assert torch.equal(noise(seed, 0, [3, 4], order), whole[:, order])


def test_noise_of_a_row_does_not_depend_on_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, choices = torch.tensor([5, -6, 7]), torch.tensor([0, 1, 0])
    positions = torch.tensor([[4, 5], [100, 101], [-1, 0]])
    ids = torch.arange(257)
    whole = gumbel_noise(seeds, choices, positions, ids)
    for b in range(3):
        for r in range(2):
            one = gumbel_noise(seeds[b : b + 1], choices[b : b + 1], positions[b : b + 1, r : r + 1], ids)
            assert torch.equal(one[0, 0], whole[b, r])
    monkeypatch.setattr(noise_module, "_NOISE_VALUES", 600)  # two rows at a time instead of all six
    assert torch.equal(gumbel_noise(seeds, choices, positions, ids), whole)


@pytest.mark.parametrize(
    ("vocab", "temperature", "top_k", "top_p"),
    [
        (64, 0.7, 0, 0.9),
        (64, 1.0, 5, 1.0),
        (64, 1.3, 40, 0.5),
        (7, 1.0, 100, 0.99),
        (64, 1.0, 1, 0.3),
        (64, 2.0, 0, 0.001),
        (5000, 0.8, 0, 0.9),
        (5000, 1.0, 0, 0.999),
        (5000, 0.5, 2000, 0.95),
        (5000, 5.0, 0, 0.9),
    ],
)
def test_filter_is_what_transformers_keeps(vocab: int, temperature: float, top_k: int, top_p: float) -> None:
    params = Params(temperature, top_k, top_p)
    ranks = torch.randperm(4 * vocab, generator=torch.Generator().manual_seed(vocab)).view(4, vocab)
    logits = torch.special.ndtri((ranks + 0.5) / (4 * vocab)) * 4  # normal quantiles: no ties, so the sets must agree
    assert logits.unique().numel() == logits.numel()
    assert torch.equal(filter_logits(logits[None], SamplingBatch.from_params([params]))[0], warped(logits, params))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_filter_with_ties_keeps_the_same_logits(data: st.DataObject) -> None:
    """Among equal logits at top-p's cut-off transformers leaves some; here as many, those of the lowest ids.

    One more or less where the tokens ahead weigh just top_p: nine of fifteen equals are 0.6, but for its rounding.
    """
    values = data.draw(st.lists(st.integers(-4, 4), min_size=1, max_size=24))
    params = Params(
        temperature=data.draw(st.sampled_from([0.5, 0.7, 1.0, 1.7])),
        top_k=data.draw(st.integers(0, 26)),
        top_p=data.draw(st.sampled_from([0.05, 0.25, 0.5, 0.6, 0.75, 0.9, 0.99, 1.0])),
    )
    logits = torch.tensor([values], dtype=torch.float32)
    ours, theirs = filter_logits(logits[None], SamplingBatch.from_params([params]))[0, 0], warped(logits, params)[0]
    mass = warped(logits, replace(params, top_p=1.0))[0].double().softmax(-1).sort(descending=True).values.cumsum(-1)
    if params.top_p < 1 and ((mass - params.top_p).abs() < 1e-6).any():
        found, expected = ((one > -torch.inf).sum().item() for one in (ours, theirs))
        assert found == int((mass < params.top_p - 1e-6).sum()) + 1
        assert abs(found - expected) <= 1
    else:
        assert torch.equal(ours.sort().values, theirs.sort().values)
    kept = (ours > -torch.inf).nonzero()[:, 0].tolist()
    assert kept, "at least one token is always kept"
    cut = min(values[i] for i in kept)
    at_cut = [i for i, value in enumerate(values) if value == cut]
    assert [i for i in kept if values[i] == cut] == at_cut[: sum(values[i] == cut for i in kept)]


@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
def test_top_p_without_a_full_sort_finds_the_same_set(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """Flat rows need the sort, peaked ones do not; a row in between is cut where the sort would cut it."""
    looked_at, topk = [], torch.Tensor.topk

    def counted(scores: torch.Tensor, k: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        looked_at.append((k, scores.shape[0]))
        found: tuple[torch.Tensor, torch.Tensor] = topk(scores, k, dim=dim)
        return found

    monkeypatch.setattr(torch.Tensor, "topk", counted)
    logits = torch.randn(1, 6, 3000, generator=torch.Generator().manual_seed(1)) * scale
    params = Params(1.0, 0, 0.9)
    filtered = filter_logits(logits, SamplingBatch.from_params([params]))[0]
    few, whole = looked_at
    assert few == (logit_filters._TOP_P_CANDIDATES, 6)
    assert torch.equal(filtered, warped(logits[0], params))
    assert whole == (3000, {0.01: 6, 1.0: whole[1], 6.0: 0}[scale])


def test_rows_with_other_parameters_do_not_matter() -> None:
    generator = torch.Generator().manual_seed(3)
    params = [
        Params(0.0, seed=None),
        Params(0.8, top_p=0.9, seed=11),
        Params(1.2, top_k=3, seed=12),
        Params(1.0, seed=-13),
        Params(0.0, top_k=4, top_p=0.2, seed=1),
        Params(0.7, top_k=20, top_p=0.6, seed=2**63 - 1),
    ]
    logits = torch.randn(6, 4, 200, generator=generator) * 3
    positions = torch.randint(0, 1000, (6, 4), generator=generator)
    batch = SamplingBatch.from_params(params, choices=[0, 1, 2, 0, 1, 0])
    together = sample(logits, batch, positions)
    filtered = filter_logits(logits, batch)
    for i in range(6):
        alone = batch.select([i])
        assert torch.equal(sample(logits[i : i + 1], alone, positions[i : i + 1])[0], together[i])
        assert torch.equal(filter_logits(logits[i : i + 1], alone)[0], filtered[i])
        for r in range(4):
            one = sample(logits[i : i + 1, r : r + 1], alone, positions[i : i + 1, r : r + 1])
            assert one.item() == together[i, r]
    for i in (0, 4):  # greedy rows: neither scaled nor filtered
        assert torch.equal(together[i], logits[i].argmax(-1))
        assert torch.equal(filtered[i], logits[i])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("others_sample", [False, True])
def test_greedy_takes_the_lowest_id_of_equals(dtype: torch.dtype, others_sample: bool) -> None:
    logits = torch.randint(0, 3, (5, 3, 4099), generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, 0] = 0
    params = [Params(0.0) for _ in range(5)] + ([Params(1.0)] if others_sample else [])
    if others_sample:
        logits = torch.cat([logits, logits[:1]])
    batch = SamplingBatch.from_params(params)
    assert batch.is_greedy is not others_sample
    tokens = sample(logits, batch, torch.zeros(logits.shape[:2], dtype=torch.int64))
    want = [[row.tolist().index(max(row.tolist())) for row in request] for request in logits[:5].float()]
    assert tokens[:5].tolist() == want


def test_sampled_token_is_the_largest_of_filtered_logits_plus_noise() -> None:
    logits = torch.randn(1, 2, 30, generator=torch.Generator().manual_seed(0))
    params = Params(0.8, 10, 0.9, seed=99)
    tokens = sample(logits, SamplingBatch.from_params([params], choices=[2]), torch.tensor([[8, 9]]))[0]
    for row, position in enumerate((8, 9)):
        scores = [
            score + noise_in_plain_integers(99, 2, position, i)
            for i, score in enumerate(warped(logits[0], params)[row].tolist())
        ]
        assert scores.index(max(scores)) == tokens[row]


def test_draft_with_the_targets_logits_proposes_the_targets_token() -> None:
    """The same noise at the mapped ids: with equal logits the draft is always right, at any temperature."""
    vocab, generator = 100, torch.Generator().manual_seed(5)
    params = [Params(1.0, seed=i) for i in range(50)] + [Params(0.0)] * 2 + [Params(3.0, seed=i) for i in range(50)]
    batch = SamplingBatch.from_params(params)
    logits = torch.randn(len(params), vocab, generator=generator)
    positions = torch.randint(0, 999, (len(params),), generator=generator)
    target_ids = torch.randperm(vocab, generator=generator)
    proposed = propose_tokens(logits[:, target_ids], batch, positions, target_ids)
    chosen = sample(logits[:, None], batch, positions[:, None])[:, 0]
    assert torch.equal(proposed, chosen)
    assert (chosen != logits.argmax(-1)).sum() > 50  # so it was the noise that decided
    unmapped = propose_tokens(logits[:, target_ids], batch, positions, torch.arange(vocab))
    assert (target_ids[unmapped] != chosen).sum() > 20  # and noise at unmapped ids would miss
    drafts = torch.full((len(params), 2), -1)
    propose_tokens(logits[:, target_ids], batch, positions - 5, target_ids, offset=5, out=drafts[:, 1])
    assert torch.equal(drafts[:, 1], chosen)
    assert (drafts[:, 0] == -1).all()


def test_sampling_needs_a_seed_drawn_before() -> None:
    with pytest.raises(ValueError, match=r"requests \[1\] .* no seed"):
        SamplingBatch.from_params([Params(0.0, seed=None), Params(0.5, seed=None)])


def test_token_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens = torch.randint(0, 40, (2, 3), generator=torch.Generator().manual_seed(1))
    out = token_logprobs(logits, tokens, top_n=4)
    exact = logits.double().log_softmax(-1)
    assert out.chosen.dtype == torch.float32
    torch.testing.assert_close(out.chosen.double(), exact.gather(-1, tokens[..., None])[..., 0], atol=1e-6, rtol=0)
    torch.testing.assert_close(out.top.double(), exact.sort(-1, descending=True).values[..., :4], atol=1e-6, rtol=0)
    torch.testing.assert_close(exact.gather(-1, out.top_ids), out.top.double(), atol=1e-6, rtol=0)
    assert token_logprobs(logits, tokens, top_n=0).top.shape == (2, 3, 0)
