"""Tiny Kimi over gloo: 1, 2, 4 and 8 ranks give the same tokens, slots, draft logits and A_k, on every one.

With drafts of both kinds: grouped KV heads (Llama), and latents, which every rank holds whole.
"""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from slipstream.engine.capture import slot_name
from slipstream.engine.drafts.eagle3.checkpoint import save_draft
from slipstream.engine.drafts.eagle3.hf_config import DraftRecord
from slipstream.engine.drafts.eagle3.layer_ids import Family
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.loader import load_target
from slipstream.engine.sampling_params import SamplingParams

JOBS = Path(__file__).with_name("parallel_jobs.py")
KIMI = Path(__file__).parents[1] / "checkpoints" / "kimi.py"
SIZES = (2, 4, 8)
SLOTS = (0, 2, 4)
DRAFTS = ("grouped", "latent")
BOUND = 2e-5  # largest error of a state or logit in fp32, as a share of the largest value there
TOKENS = 14


@pytest.fixture(scope="module")
def jobs(load_test_module) -> ModuleType:
    return load_test_module(JOBS)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kimi")


@pytest.fixture(scope="module")
def tensors(load_test_module, root) -> dict[str, torch.Tensor]:
    """What the files of a target with INT4 experts hold."""
    return load_test_module(KIMI).synthesise(root / "target").tensors


@pytest.fixture(scope="module")
def models(root, tensors, tiny) -> dict[str, str]:
    """Directories of the target and of a draft of each kind."""
    target = load_target(root / "target", torch.float32)
    record = DraftRecord(TargetIdentity.from_dir(root / "target"), Family.KIMI_K25, "0" * 64)
    for kind in DRAFTS:
        save_draft(root / kind, tiny.tiny_draft(target, slots=SLOTS, latent=kind == "latent"), record)
    return {name: str(root / name) for name in ("target", *DRAFTS)}


@pytest.fixture(scope="module")
def case(jobs, tiny, models):
    """num_steps, fields -> what ranks are asked."""

    def make(num_steps, draft="grouped", **fields):
        prompts = tiny.prompts(2, seed=8, low=18, high=34)
        params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True) for _ in prompts]
        return jobs.Case(models["target"], models[draft], num_steps, prompts, params, capture=SLOTS, **fields)

    return make


@pytest.fixture(scope="module")
def plain(case, ranks):
    """One rank at K = 0."""
    return ranks.run(1, JOBS, "serve", case(0))[0]


@pytest.fixture(scope="module", params=DRAFTS)
def draft(request):
    """Its kind."""
    return request.param


@pytest.fixture(scope="module")
def alone(case, ranks, draft):
    """One rank at K = 3 with the draft."""
    return ranks.run(1, JOBS, "serve", case(3, draft))[0]


def assert_equal(ours, one):
    """Every rank of `ours` against a single device."""
    assert len({served.bits() for served in ours}) == 1, "ranks differ"
    assert (ours[0].tokens, ours[0].acceptance) == (one.tokens, one.acceptance)
    assert set(ours[0].tensors) == set(one.tensors)
    errors = {}
    for name, expected in one.tensors.items():
        errors[name] = float((ours[0].tensors[name] - expected).abs().max() / expected.abs().max())
    print(len(ours), "ranks:", {name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) <= BOUND


@pytest.mark.parametrize("size", SIZES)
def test_tokens_slots_draft_logits_and_acceptance_with_a_draft(case, ranks, plain, alone, draft, size):
    assert alone.tokens == plain.tokens
    assert {"draft logits", "teacher", *map(slot_name, SLOTS)} == set(alone.tensors)
    ours = ranks.run(size, JOBS, "serve", case(3, draft))
    assert_equal(ours, alone)
    cells = {served.draft_cell for served in ours}  # a rank without grouped heads keeps nothing of them
    assert cells == ({(96,)} if draft == "latent" else {(2, 1, 192), *([(2, 0, 192)] if size == 8 else [])})
    assert [served.heads for served in ours] == [(8 // size, 8 // size)] * size


@pytest.mark.parametrize(("size", "kind"), [(2, "grouped"), (2, "latent"), (8, "latent")])
def test_with_an_oracle_every_accepted_count_occurs(case, ranks, plain, size, kind):
    """It runs the draft of that kind, too: its logits follow chains of every length."""
    pairs = zip(case(0).prompts, plain.tokens, strict=True)
    recordings = {str(i): [*prompt, *tokens] for i, (prompt, tokens) in enumerate(pairs)}
    one = ranks.run(1, JOBS, "serve", case(3, kind, recordings=recordings))[0]
    assert one.tokens == plain.tokens
    assert sum(count > 0 for count in one.acceptance[3]["histogram"]) >= 3
    assert_equal(ranks.run(size, JOBS, "serve", case(3, kind, recordings=recordings)), one)


def test_without_drafts(case, ranks, plain):
    assert_equal(ranks.run(4, JOBS, "serve", case(0)), plain)


@pytest.mark.parametrize("slot", [0, 2])
def test_a_state_taken_before_its_reduce_shows_in_the_slots_and_nowhere_in_the_tokens(case, ranks, alone, draft, slot):
    """F5, at the embedding and behind a mixture of experts."""
    ours = ranks.run(2, JOBS, "serve", case(3, draft, compare_states=False), [f"F5:slot={slot}"])
    assert ours[0].tokens == alone.tokens
    wrong, right = ours[0].tensors[slot_name(slot)], alone.tensors[slot_name(slot)]
    assert (wrong - right).abs().max() > 0.1 * right.abs().max()
    with pytest.raises(AssertionError):
        assert_equal(ours, alone)


def test_ranks_that_differ_in_a_state_end(case, ranks):
    with pytest.raises(RuntimeError, match="rank 1 differs from the other 1 of 2 ranks in the captured states"):
        ranks.run(2, JOBS, "serve", case(3), ["F5:slot=2,rank=1"])


def test_each_rank_reads_its_own_bytes_and_they_add_up(ranks, models, tensors):
    """All that is cut is read once by all ranks together; what is whole on every rank, by each of them."""
    text = {name: tensor.nbytes for name, tensor in tensors.items() if name.startswith("language_model.")}
    on_all = ("norm.weight", "q_a_proj.weight", "kv_a_proj_with_mqa.weight", "mlp.gate.", "weight_shape")
    replicated = sum(size for name, size in text.items() if any(part in name for part in on_all))
    shapes = sum(size for name, size in text.items() if name.endswith("weight_shape"))  # compared, and not kept
    for size in (1, *SIZES):
        everybody = ranks.run(size, JOBS, "loaded", models["target"])
        read = [count for count, _, _ in everybody]
        print(f"{size} ranks read {read} bytes of {sum(text.values())}")
        assert sum(read) == sum(text.values()) + (size - 1) * replicated
        assert max(read) - min(read) < 0.02 * max(read)
        assert all(held == count - shapes for count, held, _ in everybody)
        assert all(skipped == {"vision (text only)": 2} for _, _, skipped in everybody)


def test_a_server_tells_what_loading_took_on_each_rank_and_that_rows_keep_their_bits(ranks, models):
    for size, draft in ((1, "grouped"), (2, "latent")):
        everybody = ranks.run(size, JOBS, "built", models["target"], models[draft])
        settings, said, _ = everybody[0]
        assert [one["read_bytes"] for one in settings["load_of_ranks"]] == [read for _, _, read in everybody]
        assert all(one["peak_host_bytes"] > one["read_bytes"] for one in settings["load_of_ranks"])
        assert any(text.startswith("loading the target: read 0.00") and "GB/s" in text for text in said)
        assert settings["row_invariance"]["invariant"]


def test_bf16_is_as_near_to_fp32_on_any_number_of_ranks(tiny, ranks, models):
    """Teacher-forced. Partial sums are rounded once more each, which must not show beside the rounding there is."""
    text, target = tiny.prompts(1, seed=2, low=60, high=60)[0], models["target"]
    exact, _ = ranks.run(1, JOBS, "teacher_forced", target, "float32", text)[0]
    one, _ = ranks.run(1, JOBS, "teacher_forced", target, "bfloat16", text)[0]
    usual = float((one.float() - exact).abs().mean())
    for size in SIZES:
        everybody = [logits for logits, _ in ranks.run(size, JOBS, "teacher_forced", target, "bfloat16", text)]
        assert all(torch.equal(everybody[0], logits) for logits in everybody)
        error = float((everybody[0].float() - exact).abs().mean())
        print(f"{size} ranks in bf16: mean error to fp32 {error:.4f}, of one device {usual:.4f}")
        assert error <= 1.3 * usual
