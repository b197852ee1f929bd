"""Chi-square of 20,000 seeds against transformers' warpers. Equality of speculative and plain tokens cannot see a wrong
distribution: an engine that ignored the temperature would pass every equality test.

Seeds are the consecutive numbers 0 .. 19,999, so every figure is the same on every run; a hash that treats neighbours
alike would show here first.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import stats
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from slipstream.kernels.sampling import SamplingBatch, gumbel_noise, propose_tokens, sample

NUM_SEEDS = 20_000
FIRST, MID_ROUND = 57, 60  # position after a prompt of 57 tokens, and the fourth of the round that starts there
FAR = 2_000_003
SUSPICIOUS, IMPOSSIBLE = 1e-3, 1e-6


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def batch_of(params: Params, seeds: np.ndarray | None = None, choice: int = 0) -> SamplingBatch:
    """One request a seed."""
    seeds = np.arange(NUM_SEEDS) if seeds is None else seeds
    one = SamplingBatch.from_params([params])
    return replace(
        one,
        temperature=one.temperature.expand(len(seeds)),
        top_k=one.top_k.expand(len(seeds)),
        top_p=one.top_p.expand(len(seeds)),
        seed=torch.from_numpy(seeds),
        choice=torch.full((len(seeds),), choice),
        sampled_rows=tuple(range(len(seeds))),
    )


def draw(logits: torch.Tensor, batch: SamplingBatch, positions: list[int]) -> np.ndarray:
    """logits [V] -> [number of seeds, number of positions]."""
    shape = (batch.size, len(positions))
    rows = torch.tensor(positions).expand(shape)
    return sample(logits.expand(*shape, -1), batch, rows).numpy()


def probabilities(logits: torch.Tensor, params: Params) -> np.ndarray:
    """[V] fp64, what transformers would sample from."""
    scores = TemperatureLogitsWarper(params.temperature)(None, logits[None])
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return scores[0].double().softmax(-1).numpy()


def p_value(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square of drawn tokens against probabilities; ids expected fewer than 5 times are taken together."""
    observed = np.bincount(tokens, minlength=len(expected)).astype(float)
    if observed[expected == 0].any():
        return 0.0  # a token that the filters had removed
    frequencies = expected * len(tokens)
    rare = frequencies < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    frequencies = np.append(frequencies[~rare], frequencies[rare].sum())
    if frequencies[-1] == 0:
        observed, frequencies = observed[:-1], frequencies[:-1]
    if len(frequencies) == 1:
        return 1.0
    return stats.chisquare(observed, frequencies).pvalue


def joint_p_value(a: np.ndarray, b: np.ndarray, vocab: int) -> float:
    """Chi-square of independence on the joint table of two columns of tokens; ids below 3 % are taken together."""
    common = np.flatnonzero(np.bincount(np.append(a, b), minlength=vocab) > 0.03 * (len(a) + len(b)))
    classes = np.zeros(vocab, dtype=np.int64)
    classes[common] = np.arange(1, len(common) + 1)
    size = len(common) + 1
    table = np.bincount(classes[a] * size + classes[b], minlength=size * size).reshape(size, size)
    table = table[table.sum(1) > 0][:, table.sum(0) > 0]
    return stats.chi2_contingency(table).pvalue


def some_logits(vocab: int, scale: float = 1.5) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * scale


SETTINGS = [
    (64, Params(1.0)),
    (64, Params(0.7)),
    (64, Params(1.6)),
    (64, Params(0.8, top_p=0.9)),
    (64, Params(1.0, top_k=5)),
    (64, Params(1.3, top_k=20, top_p=0.7)),
    (17, Params(0.8, top_p=0.95)),
    (2, Params(1.0)),
]


@pytest.mark.parametrize(("vocab", "params"), SETTINGS)
def test_tokens_follow_transformers_distribution(vocab: int, params: Params) -> None:
    logits = some_logits(vocab)
    expected = probabilities(logits, params)
    tokens = draw(logits, batch_of(params), [FIRST, MID_ROUND])
    for column in range(2):
        assert p_value(tokens[:, column], expected) > SUSPICIOUS
    if vocab == 2:
        return
    # Positions of one round are independent of each other, as are neighbouring seeds.
    assert joint_p_value(tokens[:, 0], tokens[:, 1], vocab) > SUSPICIOUS
    assert joint_p_value(tokens[::2, 0], tokens[1::2, 0], vocab) > SUSPICIOUS


@pytest.mark.parametrize(
    ("vocab", "params", "mistake"),
    [
        (64, Params(0.7), Params(1.0)),
        (64, Params(1.6), Params(1.0)),
        (64, Params(0.8, top_p=0.9), Params(0.8)),
        (64, Params(1.0, top_k=5), Params(1.0, top_k=6)),
        (64, Params(1.0, top_p=0.9), Params(1.0, top_p=0.8)),
    ],
)
def test_the_test_sees_a_parameter_ignored(vocab: int, params: Params, mistake: Params) -> None:
    logits = some_logits(vocab)
    tokens = draw(logits, batch_of(mistake), [FIRST])[:, 0]
    assert p_value(tokens, probabilities(logits, params)) < IMPOSSIBLE
    assert p_value(tokens, probabilities(logits, mistake)) > SUSPICIOUS


@pytest.mark.parametrize("vocab", [2, 8, 16])
def test_neighbours_are_independent(vocab: int) -> None:
    """Next position, a position far away, next seed, next choice, and one seed moved against one position."""
    logits, params = some_logits(vocab, 0.5), Params(1.0)
    base = draw(logits, batch_of(params), [FIRST, FIRST + 1, FIRST + 2, FAR])
    others = {
        "position + 1": base[:, 1],
        "position + 2": base[:, 2],
        "a far position": base[:, 3],
        "choice + 1": draw(logits, batch_of(params, choice=1), [FIRST])[:, 0],
        "seed + 1": draw(logits, batch_of(params, np.arange(NUM_SEEDS) + 1), [FIRST])[:, 0],
        "seed + 1, position - 1": draw(logits, batch_of(params, np.arange(NUM_SEEDS) + 1), [FIRST - 1])[:, 0],
        "seed - 1, choice + 1": draw(logits, batch_of(params, np.arange(NUM_SEEDS) - 1, choice=1), [FIRST])[:, 0],
        "seed + 2^32": draw(logits, batch_of(params, np.arange(NUM_SEEDS) + 2**32), [FIRST])[:, 0],
        "seed of the other sign": draw(logits, batch_of(params, -1 - np.arange(NUM_SEEDS)), [FIRST])[:, 0],
    }
    for name, tokens in others.items():
        assert joint_p_value(base[:, 0], tokens, vocab) > SUSPICIOUS, name


def test_the_test_sees_noise_that_ignores_the_position() -> None:
    logits, params = some_logits(16, 0.5), Params(1.0)
    same = draw(logits, batch_of(params), [FIRST, FIRST])
    assert joint_p_value(same[:, 0], same[:, 1], 16) < IMPOSSIBLE


def test_one_seed_over_many_positions_follows_the_distribution() -> None:
    """What one long answer sees."""
    logits, params = some_logits(64), Params(0.8, top_p=0.9)
    for seed in (0, 1, -1, 2**40):
        tokens = draw(logits, batch_of(params, np.array([seed])), list(range(NUM_SEEDS)))[0]
        assert p_value(tokens, probabilities(logits, params)) > SUSPICIOUS
        assert joint_p_value(tokens[:-1], tokens[1:], 64) > SUSPICIOUS


def test_noise_over_a_vocabulary_is_gumbel() -> None:
    """Over the ids of a row, over the positions of an id, and without correlation between neighbouring ids."""
    ids, positions = torch.arange(49_152), torch.arange(8)[None]
    rows = gumbel_noise(torch.tensor([3]), torch.tensor([0]), positions, ids)[0]
    for row in rows:
        assert stats.kstest(row.numpy(), "gumbel_r").pvalue > SUSPICIOUS
    uniform = torch.exp(-torch.exp(-rows.double()))
    for lag in (1, 2, 16, 1024):
        correlation = np.corrcoef(uniform[:, lag:].flatten(), uniform[:, :-lag].flatten())[0, 1]
        assert abs(correlation) < 4 / np.sqrt(uniform.numel())
    columns = gumbel_noise(torch.tensor([3]), torch.tensor([0]), torch.arange(NUM_SEEDS)[None], torch.tensor([0, 7]))[0]
    for column in columns.T:
        assert stats.kstest(column.numpy(), "gumbel_r").pvalue > SUSPICIOUS


def test_shared_noise_raises_acceptance_at_temperature_one() -> None:
    """Why the draft proposes with the target's noise: it agrees far more often than its argmax does."""
    target = some_logits(64)
    draft = target + 0.3 * torch.randn(64, generator=torch.Generator().manual_seed(1))
    batch = batch_of(Params(1.0))
    tokens = draw(target, batch, [FIRST])[:, 0]
    proposed = propose_tokens(
        draft.expand(NUM_SEEDS, -1), batch, torch.full((NUM_SEEDS,), FIRST), torch.arange(64)
    ).numpy()
    with_noise, with_argmax = (tokens == proposed).mean(), (tokens == int(draft.argmax())).mean()
    assert with_noise > 0.75
    assert with_argmax < 0.35
