"""Tiny Kimi on two ranks with cards, or on one card that both take in turn.

Ranks agree bit for bit, and with one within rounding; speculation changes nothing on two ranks either; a state taken
before its reduce shows in its slot alone.
"""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from slipstream.engine.drafts.eagle3.checkpoint import save_draft
from slipstream.engine.drafts.eagle3.hf_config import DraftRecord
from slipstream.engine.drafts.eagle3.layer_ids import Family
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.loader import load_target
from slipstream.engine.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
JOBS = Path(__file__).with_name("parallel_jobs.py")
KIMI = Path(__file__).parents[1] / "checkpoints" / "kimi.py"
WIDE = {"hidden_size": 128, "q_lora_rank": 64, "kv_lora_rank": 512, "vocab_size": 203}
SLOTS = (0, 2, 4)


@pytest.fixture(scope="module")
def jobs(load_test_module) -> ModuleType:
    return load_test_module(JOBS)


@pytest.fixture(scope="module")
def case(jobs, tiny, load_test_module, tmp_path_factory):
    """K = 3 with a Llama-type draft, greedy and seeded, in bf16."""
    root = tmp_path_factory.mktemp("kimi")
    load_test_module(KIMI).synthesise(root / "target", library=False, **WIDE)
    record = DraftRecord(TargetIdentity.from_dir(root / "target"), Family.KIMI_K25, "0" * 64)
    draft = tiny.tiny_draft(load_target(root / "target", torch.bfloat16), slots=SLOTS, head_dim=64)
    save_draft(root / "draft", draft, record)
    kinds = ((0.0, 0, 1.0), (1.0, 9, 1.0), (0.8, 0, 0.9))  # temperature, top-k, top-p
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, temperature=t, seed=3, top_k=k, top_p=p) for t, k, p in kinds
    ]
    where = {"dtype": "bfloat16", "capture": SLOTS, "device": "cuda"}
    return jobs.Case(str(root / "target"), str(root / "draft"), 3, tiny.prompts(3, seed=5), params, **where)


@pytest.fixture(scope="module")
def right(ranks, case):
    """What rank 0 of two saw, and its digest, the same as rank 1's."""
    (first, bits), (_, others) = ranks.run(2, JOBS, "serve_on_cards", case)
    assert bits == others
    return first


def test_tokens_of_two_ranks_do_not_depend_on_k(ranks, case, right):
    """Nor slots, where both have them: with a draft, with an oracle whose every count occurs, and without."""
    (plain, _), _ = ranks.run(2, JOBS, "serve_on_cards", replace(case, num_steps=0, draft=None))
    assert right.tokens == plain.tokens
    recordings = {str(i): [*p, *t] for i, (p, t) in enumerate(zip(case.prompts, plain.tokens, strict=True))}
    (found, bits), (_, others) = ranks.run(2, JOBS, "serve_on_cards", replace(case, recordings=recordings))
    assert bits == others
    assert found.tokens == plain.tokens
    assert sum(count > 0 for count in found.acceptance[3]["histogram"]) >= 3


def test_two_ranks_are_as_near_to_fp32_as_one(ranks, case, tiny):
    """Teacher-forced, every slot and logits: partial sums are rounded once more each, which must not show."""
    ids = tiny.prompts(1, seed=2, low=60, high=60)[0]
    exact, states = ranks.run(1, JOBS, "teacher_forced", case.target, "float32", ids)[0]
    one, of_one = ranks.run(1, JOBS, "teacher_forced", case.target, "bfloat16", ids, "cuda")[0]
    both = ranks.run(2, JOBS, "teacher_forced", case.target, "bfloat16", ids, "cuda")
    assert torch.equal(both[0][0], both[1][0])
    assert all(torch.equal(both[0][1][name], both[1][1][name]) for name in states)
    for name, want in {"logits": exact, **states}.items():
        got = [x if name == "logits" else y[name] for x, y in ((one, of_one), both[0])]
        usual, found = (float((x.float() - want).abs().mean()) for x in got)
        print(name, f"{usual:.5f} on one card, {found:.5f} on two, of {float(want.abs().mean()):.3f}")
        assert found <= 1.5 * usual + 1e-6, name


@pytest.mark.parametrize("slot", [0, 2])
def test_a_state_taken_before_its_reduce_shows_in_its_slot_alone(ranks, case, right, slot):
    """F5, at the embedding and behind a mixture of experts."""
    (wrong, _), _ = ranks.run(2, JOBS, "serve_on_cards", replace(case, compare_states=False), [f"F5:slot={slot}"])
    assert wrong.tokens == right.tokens
    differ = [name for name, tensor in right.tensors.items() if not torch.equal(tensor, wrong.tensors[name])]
    assert [name for name in differ if name != "draft logits"] == [f"slot_{slot}"]
