"""F5: a state captured before its reduce, on one rank or on all: found by the ranks themselves, at the first step.

Tokens stay right, so that nothing else would notice; parity finds it by number (test_f05_wrong_point_of_capture.py).
"""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.engine.drafts.eagle3.checkpoint import save_draft
from slipstream.engine.drafts.eagle3.hf_config import DraftRecord
from slipstream.engine.drafts.eagle3.layer_ids import Family
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.sampling_params import SamplingParams

CAUGHT = [
    ("F5", "serving, every step", "rank 1 differs from the others in the captured states of a step; the server ends"),
]

JOBS = Path(__file__).parents[1] / "engine" / "parallel_jobs.py"
RANKS = 4
SLOTS = (0, 1, 2)


@pytest.fixture(scope="module")
def case(tiny, load_test_module, tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    target = tiny.tiny_target(root / "target", dtype=tiny.torch.float32, num_hidden_layers=2)
    record = DraftRecord(TargetIdentity.from_dir(root / "target"), Family.LLAMA, "0" * 64)
    save_draft(root / "draft", tiny.tiny_draft(target, slots=SLOTS), record)
    params = [SamplingParams(max_tokens=8, ignore_eos=True)] * 2
    jobs = load_test_module(JOBS)
    return jobs.Case(str(root / "target"), str(root / "draft"), 2, tiny.prompts(2, high=12), params, capture=SLOTS)


@pytest.fixture(scope="module")
def clean(ranks, case):
    """What the ranks serve without the fault: the comparison raises no false alarm."""
    return ranks.run(RANKS, JOBS, "serve", case)


@pytest.mark.parametrize(("rank", "slot"), [(1, 0), (3, 2)])
def test_a_partial_state_on_one_rank(ranks, case, clean, rank, slot):
    assert len({served.bits() for served in clean}) == 1
    began = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        ranks.run(RANKS, JOBS, "serve", case, [f"F5:slot={slot},rank={rank}"])
    print(f"found after {time.monotonic() - began:.1f} s")
    words = f"rank {rank} differs from the other 3 of 4 ranks in the captured states of step 1"
    for each in range(RANKS):
        assert f"rank {each}: {words}" in str(error.value)  # every rank says so, and ends
    assert "before its all-reduce or on some ranks only" in str(error.value)

    served = ranks.run(RANKS, JOBS, "serve", replace(case, compare_states=False), [f"F5:slot={slot},rank={rank}"])
    assert [s.tokens for s in served] == [s.tokens for s in clean]  # unnoticed: right tokens on every rank
    right = clean[0].tensors[f"slot_{slot}"]
    different = [r for r, s in enumerate(served) if not s.tensors[f"slot_{slot}"].equal(right)]
    assert different == [rank]


def test_a_partial_state_on_every_rank(ranks, case, clean):
    with pytest.raises(RuntimeError, match="differ from the other 1 of 4 ranks in the captured states of step 1"):
        ranks.run(RANKS, JOBS, "serve", case, ["F5:slot=0"])
    served = ranks.run(RANKS, JOBS, "serve", replace(case, compare_states=False), ["F5:slot=0"])
    assert [s.tokens for s in served] == [s.tokens for s in clean]
