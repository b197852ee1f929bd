"""The distribution of what the engine answers, against transformers: its logits, its warpers, its softmax.

Equality of speculative and plain tokens cannot see a wrong distribution: an engine that ignored the temperature would
pass every equality test. 20,000 requests differ in their seed alone; seeds are consecutive numbers, so every figure is
the same on every run. Tokens are tested at the first position (prefill) and at mid-round positions: those behind an
accepted draft, the bonus token included.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import stats
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine, EngineConfig, Request
from slipstream.engine.proposer import OracleProposer
from slipstream.engine.sampling_params import SamplingParams
from slipstream.kernels.sampling import SamplingBatch, sample

NUM_SEEDS = 20_000
AT_A_TIME, FEW = 4_000, 2_000
NUM_STEPS = 3
MAX_TOKENS = NUM_STEPS + 2  # the first token, and a whole round behind it
PROMPT = [5]
VOCAB = 32
SUSPICIOUS, IMPOSSIBLE = 1e-3, 1e-6
# fp32, so that no two logits tie at top-p's cut-off: there transformers keeps what its sort happens to leave.
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
SETTINGS = {
    "T=1": SamplingParams(temperature=1.0),
    "T=0.8 p=0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "T=0.7 k=8": SamplingParams(temperature=0.7, top_k=8),
    "T=1.3 k=20 p=0.8": SamplingParams(temperature=1.3, top_k=20, top_p=0.8),
}

BY_DRAFT = "T=1.3 k=20 p=0.8"  # proposed by an EAGLE-3 draft, which uses the target's noise; the others by an oracle


@dataclass(frozen=True)
class Answers:
    """tokens [N, MAX_TOKENS]; mid_round [N, MAX_TOKENS] bool: committed as the second or a later token of a round."""

    tokens: np.ndarray
    mid_round: np.ndarray


class PatientEngine(Engine):
    """An engine for thousands of requests with one prompt.

    Rounds wait until every prompt is in: one round of thousands of requests instead of thousands of small ones. The
    prompt's forward pass is run once, its cache copied for the others; first tokens are sampled as those of prompts
    that come together are.
    """

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.forward_prompt, self.runner.forward_prompt = self.runner.forward_prompt, self._forward_once
        self.first = None

    def _forward_once(self, slots, positions):
        blocks = self.runner.table.block_table[slots, 0]  # [C]
        if self.first is None:
            self.first = self.forward_prompt(slots[:1], positions[:1]), int(blocks[0])
        output, first_block = self.first
        for layer in self.runner.cache.layers:
            layer[blocks] = layer[first_block].clone()
        count = len(slots)  # [1, R, h] -> [C, R, h]
        states = {name: state.expand(count, -1, -1) for name, state in output.states.items()}
        return replace(output, last=output.last.expand(count, -1, -1), states=states)

    def _ready(self):
        return [] if self.scheduler.waiting or self.scheduler.prefilling else super()._ready()


@pytest.fixture(scope="module")
def hf(tiny):
    """The target in transformers, its logits so far apart that many answers share their first tokens."""
    model = tiny.tiny_hf(**SIZES)
    model.lm_head.weight.data *= 1.5
    return model


@pytest.fixture(scope="module")
def target(tiny, hf, tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    hf.save_pretrained(directory)
    return tiny.load_target(directory, torch.float32)


@torch.no_grad()
def next_logits(hf, prefixes: np.ndarray) -> torch.Tensor:
    """prefixes [n, L] of new tokens -> [n, V] by transformers."""
    prompts = torch.tensor(PROMPT).expand(len(prefixes), -1)
    return hf(torch.cat((prompts, torch.from_numpy(prefixes)), dim=1)).logits[:, -1]


def probabilities(hf, prefixes: np.ndarray, params: SamplingParams) -> np.ndarray:
    """[n, V] fp64, what transformers would sample from behind each prefix [n, L]."""
    scores = TemperatureLogitsWarper(params.temperature)(None, next_logits(hf, prefixes))
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return scores.double().softmax(-1).numpy()


def oracle(hf, params: SamplingParams, count: int) -> OracleProposer:
    """Knows every answer and is wrong from a chosen step on, so that each accepted count is as frequent."""
    sampling = SamplingBatch.from_params([replace(params, seed=seed) for seed in range(count)])
    tokens = np.empty((count, 0), dtype=np.int64)
    for i in range(MAX_TOKENS):
        distinct, where = np.unique(tokens, axis=0, return_inverse=True)
        logits = next_logits(hf, distinct)[where.reshape(-1)]  # [distinct, V] -> [N, V]
        new = sample(logits[:, None], sampling, torch.full((count, 1), len(PROMPT) + i))  # [N, 1]
        tokens = np.append(tokens, new.numpy(), axis=1)
    return OracleProposer(NUM_STEPS, {str(i): PROMPT + row for i, row in enumerate(tokens.tolist())}, VOCAB)


def answer(target, proposer, params: SamplingParams, count: int = NUM_SEEDS) -> Answers:
    """Runs requests of seeds 0 .. count - 1 through an engine at K = 3."""
    most = min(count, AT_A_TIME)
    config = EngineConfig(NUM_STEPS, most, len(PROMPT) + MAX_TOKENS, dtype="float32", prefill_requests=32)
    engine = PatientEngine(target, config, proposer)
    params = replace(params, max_tokens=MAX_TOKENS, ignore_eos=True)
    tokens = np.full((count, MAX_TOKENS), -1)
    mid_round = np.zeros((count, MAX_TOKENS), dtype=bool)
    length = np.zeros(count, dtype=np.int64)
    for begin in range(0, count, most):
        for seed in range(begin, min(begin + most, count)):
            engine.add_request(Request(str(seed), PROMPT, replace(params, seed=seed)))
        while engine.has_work:
            for output in engine.step():
                seed, new = int(output.request_id), output.new_token_ids
                start, length[seed] = length[seed], length[seed] + len(new)
                tokens[seed, start : length[seed]] = new
                mid_round[seed, start + 1 : length[seed]] = True
    assert (length == MAX_TOKENS).all()
    return Answers(tokens, mid_round)


def chi_square(tokens: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Statistic and degrees of freedom; tokens expected fewer than 5 times are taken together."""
    frequencies = expected * len(tokens)
    observed = np.bincount(tokens, minlength=len(expected)).astype(float)
    if observed[expected == 0].any():
        return np.inf, 1  # a token that the filters had removed
    rare = frequencies < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    frequencies = np.append(frequencies[~rare], frequencies[rare].sum())
    kept = frequencies > 0
    return ((observed - frequencies)[kept] ** 2 / frequencies[kept]).sum(), kept.sum() - 1


def p_values(hf, answers: Answers, params: SamplingParams) -> dict[str, float]:
    """Every test of one setting.

    first: chi-square of the first tokens. mid-round: chi-square of tokens behind the most common prefixes. mid-round,
    any prefix: that F(t - 1) + v p(t), v uniform, is uniform, F being the distribution of t behind its own prefix. In
    this form all tokens have one distribution, so that neighbours can be tested for independence whatever the target
    makes of the first for the second.
    """
    tokens, found = answers.tokens, {}
    uniform = np.random.default_rng(0).random(tokens.shape)
    statistic, freedom = 0.0, 0
    for column in range(MAX_TOKENS):
        distinct, where = np.unique(tokens[:, :column], axis=0, return_inverse=True)
        where, expected = where.reshape(-1), probabilities(hf, distinct, params)
        chosen = tokens[:, column]
        below = (expected.cumsum(1) - expected)[where, chosen]
        uniform[:, column] = below + uniform[:, column] * expected[where, chosen]
        if column == 0:
            found["first"] = stats.chi2.sf(*chi_square(chosen, expected[0]))
        mid = answers.mid_round[:, column]
        counts = np.bincount(where[mid], minlength=len(distinct))
        for prefix in np.argsort(-counts)[:8]:
            if counts[prefix] >= 50:
                one = chi_square(chosen[mid & (where == prefix)], expected[prefix])
                statistic, freedom = statistic + one[0], freedom + one[1]
    assert freedom > 5, "too few answers share a prefix"
    found["mid-round"] = stats.chi2.sf(statistic, freedom)
    found["mid-round, any prefix"] = stats.kstest(uniform[answers.mid_round], "uniform").pvalue
    cells = np.minimum((uniform * 8).astype(int), 7)
    for i in range(MAX_TOKENS - 1):
        table = np.bincount(cells[:, i] * 8 + cells[:, i + 1], minlength=64).reshape(8, 8)
        found[f"neighbours {i}, {i + 1}"] = stats.chi2_contingency(table).pvalue
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_follow_transformers_distribution(tiny, target, hf, name):
    params = SETTINGS[name]
    proposer = oracle(hf, params, NUM_SEEDS)
    if name == BY_DRAFT:
        proposer = Eagle3Proposer(tiny.tiny_draft(target, slots=(0, 1)), NUM_STEPS)
    answers = answer(target, proposer, params)
    assert answers.mid_round[:, 2:].sum() > NUM_SEEDS / 4
    assert answers.mid_round[:, 2:].any(axis=0).all()
    found = p_values(hf, answers, params)
    assert min(found.values()) > SUSPICIOUS, found


@pytest.mark.parametrize(("name", "mistake"), [("T=0.7 k=8", {"temperature": 1.0}), ("T=0.8 p=0.9", {"top_p": 1.0})])
def test_the_test_sees_a_parameter_ignored(target, hf, name, mistake):
    params = replace(SETTINGS[name], **mistake)
    answers = answer(target, oracle(hf, params, FEW), params, FEW)
    found = p_values(hf, answers, SETTINGS[name])
    assert max(found["first"], found["mid-round"]) < IMPOSSIBLE, found
    assert min(p_values(hf, answers, params).values()) > SUSPICIOUS


def test_the_test_sees_drafts_accepted_unseen(target, hf, monkeypatch):
    """What is committed behind a wrong draft was computed behind that draft. First tokens show nothing."""
    monkeypatch.setattr("slipstream.kernels.round_ops.accept", lambda draft, sampled, num_valid: num_valid)
    params = SETTINGS["T=0.7 k=8"]
    found = p_values(hf, answer(target, oracle(hf, params, FEW), params, FEW), params)
    assert found["first"] > SUSPICIOUS
    assert max(found["mid-round"], found["mid-round, any prefix"]) < IMPOSSIBLE, found


def test_the_test_sees_noise_that_ignores_the_position(target, hf, monkeypatch):
    def everywhere_alike(logits, batch, at, *more, **named):
        return sample(logits, batch, at * 0, *more, **named)

    monkeypatch.setattr("slipstream.engine.runner.sample", everywhere_alike)
    params = SETTINGS["T=1"]
    found = p_values(hf, answer(target, oracle(hf, params, FEW), params, FEW), params)
    assert found["first"] > SUSPICIOUS
    assert found["neighbours 1, 2"] < IMPOSSIBLE
