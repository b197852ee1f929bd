"""What is timed: the harness on the CPU with tiny sizes, the bytes that shares are told of, and the record."""

import json
import time
from dataclasses import replace

import pytest
import torch

from slipstream.engine import in_flight
from slipstream.engine.bench import cases
from slipstream.engine.bench.cases import CASES, Case, Outcome, Row, run_cases, step_bytes, write_rows
from slipstream.engine.bench.ceiling import read_ceiling
from slipstream.engine.bench.generate import Parts, Timing, time_generate
from slipstream.engine.bench.kernels import measure_kernels
from slipstream.engine.bench.parts import profile_rounds
from slipstream.engine.bench.sizes import LLAMA_8B, SIZES, SMOLLM2_135M, Size, random_draft, random_target
from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.layers import Linear
from slipstream.engine.sampling_params import SamplingParams
from slipstream.kernels.int4 import Int4Weight
from slipstream.kernels.weight import as_matrix

TINY = Size("tiny", 199, 64, 96, 7, 4, 2, 16, True, 1e4, 64, 80)
ROW = Row("step", 1, 0, 1, 1.5, "ms", 2.0, "abc", "slipstream bench engine")


@pytest.fixture
def tiny_size(monkeypatch):
    monkeypatch.setitem(cases.SIZES, "tiny", TINY)


@pytest.mark.parametrize("size", [SMOLLM2_135M, replace(LLAMA_8B, num_layers=6), TINY], ids=lambda size: size.name)
def test_bytes_are_those_of_the_weights_that_a_round_reads(size):
    with torch.device("meta"):
        target, draft = (model(size, "meta") for model in (_target, _draft))
    layers = sum(m.weight.numel() for m in target.layers.modules() if isinstance(m, Linear))
    head = target.head_weight.numel()
    assert size.step_bytes(0) == 2 * (layers + head)
    drafted = sum(m.weight.numel() for m in draft.midlayer.modules() if isinstance(m, Linear))
    step = drafted + draft.lm_head.weight.numel()
    assert size.step_bytes(3) == size.step_bytes(0) + 2 * (3 * step + draft.fc.weight.numel())
    cache = target.allocate_kv(3, 16)
    assert size.kv_bytes(48) == sum(layer.nbytes for layer in cache.layers)


def _target(size, device):
    from slipstream.engine.models.dense import DenseModel

    return DenseModel(size.target_config(64), torch.bfloat16)


def _draft(size, device):
    from slipstream.engine.drafts.eagle3.network import Eagle3Network

    return Eagle3Network(size.draft_config(64), torch.bfloat16)


def test_cases_run_and_are_counted(tiny_size):
    asked = [Case("step", "tiny", 2, 0, 1e6), Case("round", "tiny", 1, 2), Case("round", "tiny", 3, 2, 1e-9)]
    found = list(run_cases(asked, 1e12, device="cpu", prompt_tokens=5, new_tokens=9, repeats=2))
    assert [outcome.case for outcome in found] == asked
    step, one, three = found
    assert (step.timing.steps, step.timing.tokens) == (10, 18)  # a chunk a step: the second answer begins later
    assert (one.timing.tokens, three.timing.tokens) == (9, 27)
    assert [outcome.reached for outcome in found] == [True, None, False]
    for outcome in found:
        parts = outcome.timing.parts
        assert parts.verify > 0
        assert parts.host > 0
        assert (parts.draft > 0) == (outcome.case.num_steps > 0)
        assert outcome.share == pytest.approx(step_bytes(TINY, outcome.case) / 1e12 / (outcome.timing.ms * 1e-3))


def test_the_engine_counts_what_it_waited(monkeypatch):
    """Every wait is counted, and is not the host's work."""
    waits = []

    def slow(*arguments):
        waits.append(time.sleep(0.004))
        return in_flight.wait_for(*arguments)

    monkeypatch.setattr("slipstream.engine.engine.wait_for", slow)
    engine = Engine(random_target(TINY, "cpu"), EngineConfig(num_steps=0, max_context_tokens=64))
    timing = time_generate(engine, 1, prompt_tokens=5, new_tokens=9, repeats=1)
    assert len(waits) >= 2 * timing.steps  # of the repeat that is thrown away, too
    assert engine.stats.waited_seconds >= 0.004 * len(waits)
    assert timing.parts.host * (timing.steps - 1) <= (timing.ms - 4) * timing.steps + 1e-6  # a round; a step
    assert 0 < timing.parts.verify * (timing.steps - 1) <= engine.stats.verify_seconds * 1e3  # a round, not all of them


def test_int4_weights_are_counted_and_run():
    size = replace(TINY, name="int4", hidden_size=128, intermediate_size=256, head_dim=32, int4_group=128)
    target = random_target(size, "cpu")
    linears = [m for m in target.layers.modules() if isinstance(m, Linear)]
    assert all(isinstance(m.weight, Int4Weight) and m.weight.group == 128 for m in linears)
    assert size.step_bytes(0) == sum(m.weight.nbytes for m in linears) + 2 * target.head_weight.numel()
    again = random_target(size, "cpu").layers[2].mlp.down_proj.weight
    assert torch.equal(target.layers[2].mlp.down_proj.weight.words, again.words)
    values = as_matrix(again)
    assert values.std() == pytest.approx(0.02, rel=0.05)
    (answer,) = Engine(target, EngineConfig()).generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(answer.token_ids) == 3


def test_a_random_draft_is_one_for_the_target():
    target, draft = random_target(TINY, "cpu"), random_draft(TINY, "cpu")
    ids = draft.to_target(torch.arange(64))
    assert len(set(ids.tolist())) == 64
    assert int(ids.max()) < 199
    again = random_target(TINY, "cpu").layers[0].mlp.down_proj.weight
    assert torch.equal(target.layers[0].mlp.down_proj.weight, again)
    Engine(target, EngineConfig(num_steps=2), Eagle3Proposer(draft, 2))  # its slots and vocabulary fit


def test_kernels_are_timed_and_compared():
    found = list(measure_kernels(TINY, 1e12, "cpu", rows=(1, 3)))
    ops = {one.name.split()[0] for one in found}
    assert ops == {
        "norm_qkv",
        "linear_add",
        "norm_gate_up",
        "norm_linear",
        "draft_input",
        "embed",
        "paged_attention",
    } | {"sample"}
    for one in found:
        assert one.us > 0
        assert one.error < 1e-2
        assert one.share == pytest.approx(one.num_bytes / (one.us * 1e-6) / 1e12)
    assert {one.num_bytes for one in found if one.name == "norm_gate_up 192 x 64"} == {2 * 192 * 64}


def test_rows_replace_those_of_the_same_case(tmp_path):
    path = tmp_path / "h200.json"
    write_rows(path, [ROW, replace(ROW, batch=4)])
    write_rows(path, [replace(ROW, value=1.25, commit="def"), replace(ROW, K=3)])
    rows = json.loads(path.read_text())
    assert [(row["batch"], row["K"], row["value"], row["commit"]) for row in rows] == [
        (1, 0, 1.25, "def"),
        (4, 0, 1.5, "abc"),
        (1, 3, 1.5, "abc"),
    ]
    assert list(rows[0]) == ["case", "batch", "K", "tp", "value", "unit", "goal", "commit", "command"]


def test_an_outcome_makes_a_row():
    timing = Timing(1, 3, 0.61234, 0.02, 65, 256, Parts(0.2, 0.4, 0.0, 0.1))
    case = next(case for case in CASES if case.name == "smollm2-round" and case.batch == 1)
    row = Outcome(case, timing, 1e9, 4.5e12).row("abc", "cmd")
    assert (row.case, row.batch, row.K, row.tp, row.value, row.unit, row.goal) == (
        "smollm2-round", 1, 3, 1, 0.6123, "ms", 0.60,
    )  # fmt: skip
    assert timing.tokens_per_second == pytest.approx(256 / (0.61234e-3 * 65))


def test_every_case_has_a_size_and_stands_once():
    assert {case.size for case in CASES} <= set(SIZES)
    assert len({(case.name, case.batch, case.num_steps) for case in CASES}) == len(CASES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_card(tiny_size):
    assert 1e11 < read_ceiling(1.0) < 1e14
    (outcome,) = run_cases([Case("round", "tiny", 2, 2)], 1e12, parts=True, new_tokens=40, repeats=2)
    assert 0 < outcome.parts.busy_us <= outcome.parts.span_us
    for one in measure_kernels(TINY, 1e12, rows=(1, 4)):
        assert one.error < 1e-2, one.name


def test_the_profiler_wants_a_card():
    engine = Engine(random_target(TINY, "cpu"), EngineConfig())
    with pytest.raises(ValueError, match="of a card"):
        profile_rounds(engine, 1)
