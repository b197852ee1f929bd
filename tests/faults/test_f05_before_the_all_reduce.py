"""F5 under tensor parallelism: a state taken before the all-reduce, at slot 0, at a middle slot, on one rank only."""

from pathlib import Path

import pytest

from slipstream.engine.drafts.eagle3.checkpoint import load_draft, save_draft
from slipstream.engine.drafts.eagle3.hf_config import DraftRecord
from slipstream.engine.drafts.eagle3.layer_ids import Family
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.loader import load_target
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.serving.trace_file import unpack_trace
from slipstream.tasks.parity_findings import ParityPrompt, examine
from slipstream.tasks.parity_target import TargetReference

CAUGHT = [
    ("F5", "parity (2 and 8 ranks)", "slot 0 equals rank 0's partial sum before the reduce: cosine to its own, to that")
]
JOBS = Path(__file__).parents[1] / "engine" / "parallel_jobs.py"
SLOTS, K = (0, 2, 3), 2
BOUNDS = {"max_slot_share": 0.1, "max_argmax_difference": 0.005, "max_tau_gap": 0.1}


class World:
    """A tiny target and draft, and parity's findings of several ranks that serve them."""

    def __init__(self, tiny, jobs, root, pool):
        self.pool, self.target_dir, self.draft_dir = pool, root / "target", root / "draft"
        self.target = load_target(tiny.save_tiny(self.target_dir), "float32")
        record = DraftRecord(TargetIdentity.from_dir(self.target_dir), Family.LLAMA, "0" * 64)
        save_draft(self.draft_dir, tiny.tiny_draft(self.target, slots=SLOTS), record)
        self.reference = TargetReference(self.target_dir)
        self.prompts = [ParityPrompt(f"p{i}", "validation", ids, 12) for i, ids in enumerate(tiny.prompts(3, high=20))]
        params = [SamplingParams(max_tokens=12, ignore_eos=True) for _ in self.prompts]
        prompts = [p.token_ids for p in self.prompts]
        self.case = jobs.Case(str(self.target_dir), str(self.draft_dir), K, prompts, params, capture=SLOTS)

    def findings(self, ranks, *faults):
        traces = [unpack_trace(data) for data in self.pool.run(ranks, JOBS, "traced", self.case, faults)[0]]
        networks = {"export": load_draft(self.draft_dir)}
        return examine(self.prompts, traces, self.target, self.reference, networks, SLOTS, K, num_ranks=ranks)


@pytest.fixture(scope="module")
def world(tiny, load_test_module, tmp_path_factory, ranks):
    return World(tiny, load_test_module(JOBS), tmp_path_factory.mktemp("ranks"), ranks)


@pytest.fixture(scope="module")
def embedding(world):
    """Slot 0 before its reduce, by number of ranks."""
    return {ranks: world.findings(ranks, "F5:slot=0") for ranks in (2, 8)}


@pytest.mark.parametrize("size", [2, 8])
def test_the_embedding_before_its_reduce_is_rank_0s_part(embedding, size):
    first, *_ = embedding[size].failures(**BOUNDS)
    assert first.startswith("slot 0 equals rank 0's partial sum before the reduce: cosine to its own reference 0.")
    assert "(expected > 0.99), to rank 0's partial sum before the reduce 1.00" in first
    assert "fix: capture after the all-reduce of the vocab-parallel embedding" in first
    assert embedding[size].fault == "F5"
    assert not any(f.startswith(("slot 2", "slot 3", "teacher")) for f in embedding[size].failures(**BOUNDS))


def test_tokens_stay_right(embedding):
    assert all(findings.capture.tokens_differ == 0 < findings.capture.tokens for findings in embedding.values())


def test_a_middle_slot_before_its_reduce(world):
    first, *_ = world.findings(8, "F5:slot=2").failures(**BOUNDS)
    assert first.startswith("slot 2 equals rank 0's partial sum before the reduce: cosine to its own reference 0.")
    assert "fix: capture after the all-reduce of layer 1's last projection" in first


def test_rank_0_alone_is_caught_as_well(world):
    findings = world.findings(2, "F5:slot=2,rank=0")
    assert findings.failures(**BOUNDS)[0].startswith("slot 2 equals rank 0's partial sum before the reduce")


def test_another_rank_alone_is_caught_where_the_ranks_compare_themselves(world):
    """Rank 0's trace is right: only the ranks can see it, and they end."""
    with pytest.raises(RuntimeError, match="rank 5 differs from the other 7 of 8 ranks in the captured states of step"):
        world.findings(8, "F5:slot=0,rank=5")


def test_through_the_served_path(served_pipeline, tmp_path):
    """Two ranks behind HTTP; tokens are compared with those that the same ranks give without drafts."""
    findings = served_pipeline.compare(tmp_path, "F5:slot=2", ranks=2)
    first, *_ = served_pipeline.failures(findings)
    assert first.startswith("slot 2 equals rank 0's partial sum before the reduce: cosine to its own reference 0.")
    assert findings.capture.describe_tokens() == (
        "tokens: all 132 are identical to K = 0 (with a wrong capture, too: they cannot show it)"
    )
    assert "error" not in (served_pipeline.workdir / "parity-inject.log").read_text().lower()


def test_another_rank_alone_ends_the_server_which_says_which(served_pipeline, tmp_path):
    with pytest.raises(SlipstreamError, match="rank 1 differs from the other 1 of 2 ranks in the captured states"):
        served_pipeline.compare(tmp_path, "F5:slot=2,rank=1", ranks=2)


def test_no_alarm_without_the_fault(world):
    for ranks in (2, 8):
        findings = world.findings(ranks)
        assert findings.failures(**BOUNDS) == []
        assert all(rows.wrong == 0 for rows in findings.capture.slots.values())


def test_the_fault_passes_with_the_check_off(embedding):
    for findings in embedding.values():
        assert findings.failures(**BOUNDS, skip={"slots", "drafts", "acceptance"}) == []
