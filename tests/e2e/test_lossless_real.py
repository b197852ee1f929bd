"""The proof of losslessness: small in every run, on the real target by hand; and that it can fail."""

from dataclasses import replace

import pytest
import torch

from slipstream.engine.drafts.eagle3.checkpoint import save_draft
from slipstream.engine.drafts.eagle3.hf_config import DraftRecord
from slipstream.engine.drafts.eagle3.layer_ids import Family
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.loader import load_target

TOKENS = 24


@pytest.fixture(scope="module")
def subject(tiny, lossless, tmp_path_factory):
    target = tiny.tiny_target(tmp_path_factory.mktemp("target"))
    return lossless.Subject(target, tiny.tiny_draft(target), tiny.prompts(6), TOKENS)


def test_the_proof_on_a_tiny_model(lossless, subject):
    probe = lossless.probe_model(subject.target, subject.draft)
    findings = list(lossless.prove(subject, ["greedy", "T=0.8 p=0.9"], steps=(0, 1, 3), batches=(4, 1)))
    assert [s for f in findings for s in f.failures(probe.invariant)] == []
    recorded, *held = findings[: len(findings) // 2]
    assert (recorded.answers, recorded.case) == (0, lossless.Case("greedy", 0, "none", 4))
    assert {(f.case.num_steps, f.case.drafts, f.case.batch) for f in held} == {
        (0, "none", 1),
        *((k, drafts, batch) for k in (1, 3) for drafts in ("draft", "oracle") for batch in (1, 4)),
    }
    cells = sum(map(len, subject.prompts)) + 6 * (TOKENS - 1)
    if probe.invariant:
        assert {(f.answers, f.tokens, f.rows, f.cells) for f in held} == {(6, 6 * TOKENS, 6 * TOKENS, cells)}
    lossless.Console(width=160).print(lossless.table_of(findings, "tiny"))


class _Shaken:
    """A target whose logits depend on how many rows travel together, by up to so many bf16 ulps."""

    def __init__(self, target, ulps: float) -> None:
        self.target, self.ulps = target, ulps

    def __getattr__(self, name):
        return getattr(self.target, name)

    def __call__(self, *args):
        return self.target(*args)

    def own_logits(self, last: torch.Tensor) -> torch.Tensor:
        logits = self.target.own_logits(last)
        generator = torch.Generator().manual_seed(logits.numel())
        by = (torch.rand(logits.shape[-1], generator=generator) * 2 - 1) * self.ulps * 2.0**-8  # [V]
        return (logits.float() * (1 + by)).to(logits.dtype)


@pytest.mark.parametrize(("ulps", "by_gap_holds"), [(1, True), (16, False)])
def test_the_proof_sees_rows_that_depend_on_their_number(lossless, subject, ulps, by_gap_holds):
    shaken = replace(subject, target=_Shaken(subject.target, ulps), draft=None)
    findings = list(lossless.prove(shaken, ["T=1"], steps=(0, 3), batches=(4, 1)))
    assert sum(f.rows_differ for f in findings) > 0
    assert any(f.failures(invariant=True) for f in findings)
    assert any(f.failures(invariant=False) for f in findings) is not by_gap_holds


def test_the_proof_sees_drafts_accepted_unseen(lossless, subject, monkeypatch):
    monkeypatch.setattr("slipstream.kernels.round_ops.accept", lambda draft, sampled, num_valid: num_valid)
    findings = list(lossless.prove(replace(subject, draft=None), ["greedy"], steps=(0, 3), batches=(4, 1)))
    assert not findings[1].failures(invariant=True)  # K = 0 alone
    assert all(f.answers_differ and "answers" in f.failures(invariant=True)[0] for f in findings[2:])


def test_the_proof_sees_a_wrong_cell_that_changes_no_token(lossless, subject, monkeypatch):
    """The last cell of an answer is read by nothing: tokens and logits stay as they are."""
    release = lossless.WatchedEngine._release

    def spoil(engine, sequence):
        if engine.config.num_steps:
            last = sequence.length - 2
            block = sequence.blocks[last // engine.config.block_size_tokens]
            engine.runner.cache.layers[1][block, last % engine.config.block_size_tokens, 1, 0, 0] += 1
        release(engine, sequence)

    monkeypatch.setattr(lossless.WatchedEngine, "_release", spoil)
    *plain, first, second = lossless.prove(replace(subject, draft=None), ["greedy"], steps=(0, 3), batches=(4, 1))
    assert not any(f.failures(invariant=True) for f in plain)
    for found in (first, second):
        assert (found.answers_differ, found.rows_differ, found.cells_differ) == (0, 0, 6)
        assert found.failures(invariant=True)


def test_a_gap_counts_noise_and_filters(lossless):
    logits = torch.tensor([4.0, 3.5, 1.0, -2.0])
    greedy, plain = lossless.SAMPLINGS["greedy"], replace(lossless.SAMPLINGS["T=1"], seed=1)
    ulp = 4 * 2.0**-7
    assert lossless.gap_ulps(logits, greedy, 9, 0, 1) == 0.5 / ulp
    both = [lossless.gap_ulps(logits, plain, 9, a, b) for a, b in ((0, 1), (1, 0))]
    assert both[0] == -both[1] != 0.5 / ulp
    assert lossless.gap_ulps(logits, replace(plain, top_k=2), 9, 0, 2) == 2.5 / ulp  # 3.5 is the least one kept


@pytest.mark.real
@pytest.mark.soak
def test_the_whole_proof_on_the_real_target(tiny, lossless, real_target, tmp_path):
    """32 prompts x 128 tokens; the draft is a random one of the target's shape."""
    target = load_target(real_target, "bfloat16")
    draft = tiny.tiny_draft(target, slots=(2, 15, 27))
    draft.d2t.zero_()  # the first third of the vocabulary
    save_draft(tmp_path / "draft", draft, DraftRecord(TargetIdentity.from_dir(real_target), Family.LLAMA, "0" * 64))
    assert lossless.main(["--target", str(real_target), "--draft", str(tmp_path / "draft")]) == 0
