"""Two ranks against one: tokens, slots, draft logits and A_k in fp32; faults that tokens do not show.

On two cards, or on one that both take in turn: peer memory of another process and captured exchanges either way.
"""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from slipstream.engine.drafts.eagle3.checkpoint import save_draft
from slipstream.engine.drafts.eagle3.hf_config import DraftRecord
from slipstream.engine.drafts.eagle3.layer_ids import Family
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
JOBS = Path(__file__).with_name("parallel_jobs.py")
SLOTS = (0, 1, 2)
BOUND = 2e-5  # largest error of a state or logit in fp32, as a share of the largest value there


@pytest.fixture(scope="module")
def jobs(load_test_module) -> ModuleType:
    return load_test_module(JOBS)


@pytest.fixture(
    scope="module", params=[{}, {"num_attention_heads": 8, "vocab_size": 203, "tie_word_embeddings": False}]
)
def case(request, jobs, tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    target = tiny.tiny_target(root / "target", dtype=torch.float32, num_hidden_layers=3, **request.param)
    record = DraftRecord(TargetIdentity.from_dir(root / "target"), Family.LLAMA, "0" * 64)
    save_draft(root / "draft", tiny.tiny_draft(target, slots=SLOTS), record)
    kinds = ((0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 9, 1.0), (0.8, 0, 0.9))  # temperature, top-k, top-p
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, temperature=t, seed=3, top_k=k, top_p=p) for t, k, p in kinds
    ]
    prompts = tiny.prompts(4, seed=5)
    return jobs.Case(str(root / "target"), str(root / "draft"), 3, prompts, params, capture=(3,), device="cuda")


@pytest.fixture(scope="module")
def right(ranks, case):
    """What rank 0 of two saw, and its digest, the same as rank 1's."""
    (first, bits), (_, others) = ranks.run(2, JOBS, "serve_on_cards", case)
    assert bits == others
    return first


def test_two_ranks_agree_bit_for_bit_and_with_one_in_fp32(ranks, case, right):
    ((one, _),) = ranks.run(1, JOBS, "serve_on_cards", case)
    assert right.tokens == one.tokens
    assert right.acceptance == one.acceptance
    assert right.tensors.keys() == one.tensors.keys()
    for name, tensor in one.tensors.items():
        assert (right.tensors[name] - tensor).abs().max() <= BOUND * tensor.abs().max(), name


@pytest.mark.parametrize("fault", ["F5:slot=2", "F5:slot=2,kind=no-residual", "F6:slot=2", "F6:slot=2,kind=frozen"])
def test_a_slot_that_is_not_the_streams_is_seen_in_the_slot_alone(ranks, case, right, fault):
    """Taken before the sum (the fused kernel comes apart for it, with the same bits elsewhere), or in another round."""
    (wrong, _), _ = ranks.run(2, JOBS, "serve_on_cards", case, [fault])
    assert wrong.tokens == right.tokens
    differ = [name for name, tensor in right.tensors.items() if not torch.equal(tensor, wrong.tensors[name])]
    assert [name for name in differ if name != "draft logits"] == ["slot_2"]
