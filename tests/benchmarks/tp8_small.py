"""The part of tp8.py that proves tensor parallelism on tiny models: N ranks against one, a fault, a killed rank.

The ranks' jobs and the tiny models are those of the engine's tests.
"""

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tp8 import KILL_ME
from tp8_models import SMALL, Models
from tp8_rank import Run

from slipstream.engine.agreement import check_same
from slipstream.engine.bench.generate import prompts_of
from slipstream.engine.card_group import check_peers
from slipstream.engine.drafts.eagle3.checkpoint import save_draft
from slipstream.engine.drafts.eagle3.hf_config import DraftRecord
from slipstream.engine.drafts.eagle3.layer_ids import Family
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.loader import load_target
from slipstream.engine.sampling_params import SamplingParams

TESTS = Path(__file__).parents[1]
BOUND = 2e-5  # largest error of a state or logit in fp32, as a share of the largest value there
SLOTS = (0, 1, 2)
WIDTHS = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 203}
DENSE = {**WIDTHS, "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 3}
KIMI = {**WIDTHS, "q_lora_rank": 64, "kv_lora_rank": 512}
DRAFT = {"num_heads": 8, "num_kv_heads": 8, "intermediate_size": 256}  # a head for each of 8 ranks


def small_part(run: Run) -> None:
    """One rank makes the models and keeps what it saw; N ranks compare with that."""
    sys.path += [str(TESTS / "engine"), str(TESTS / "checkpoints")]
    import parallel_jobs as jobs
    import tiny

    if run.parallel.size == 1:
        make_models(run.scratch, tiny)
    # Kimi on a card is bf16, in which other partial sums round otherwise: against one rank its tokens are not compared.
    for name, dtype in {"dense": "float32", "kimi": "float32" if run.device == "cpu" else "bfloat16"}.items():
        case = case_of(run, jobs, tiny, name, dtype)
        compared(run, jobs, case, name)
    if run.parallel.size > 1:
        killed(run)


def make_models(scratch: Path, tiny: Any) -> None:
    import kimi

    tiny.tiny_target(scratch / "dense", dtype=torch.float32, tie_word_embeddings=False, **DENSE)
    kimi.synthesise(scratch / "kimi", library=False, **KIMI)
    for name, head_dim in (("dense", 16), ("kimi", 64)):
        target = load_target(scratch / name, torch.bfloat16)
        family = Family.LLAMA if name == "dense" else Family.KIMI_K25
        record = DraftRecord(TargetIdentity.from_dir(scratch / name), family, "0" * 64)
        draft = tiny.tiny_draft(target, slots=SLOTS, head_dim=head_dim, **DRAFT)
        save_draft(scratch / f"{name}-draft", draft, record)


def case_of(run: Run, jobs: Any, tiny: Any, name: str, dtype: str) -> Any:
    """K = 3 with the draft, greedy and drawn."""
    kinds = ((0.0, 0, 1.0), (1.0, 0, 1.0), (0.8, 9, 0.9))  # temperature, top-k, top-p
    params = [
        SamplingParams(max_tokens=16, ignore_eos=True, temperature=t, seed=3, top_k=k, top_p=p) for t, k, p in kinds
    ]
    where = {"dtype": dtype, "capture": SLOTS, "device": run.device}
    draft = str(run.scratch / f"{name}-draft")
    return jobs.Case(str(run.scratch / name), draft, 3, tiny.prompts(3, seed=5), params, **where)


def served(run: Run, jobs: Any, case: Any, faults: Any = ()) -> Any:
    if run.parallel.card is not None:
        run.parallel.card.be_patient(60.0)
    return jobs.serve(run.parallel, case, faults)


def compared(run: Run, jobs: Any, case: Any, name: str) -> None:
    """Ranks with each other, N with one, K = 3 with 0, an oracle whose every count occurs, and F5."""
    kept, exact = run.scratch / f"{name}.pickle", case.dtype == "float32"
    plain = served(run, jobs, replace(case, num_steps=0, draft=None))
    recordings = {str(i): [*p, *t] for i, (p, t) in enumerate(zip(case.prompts, plain.tokens, strict=True))}
    drafted, oracle = served(run, jobs, case), served(run, jobs, replace(case, recordings=recordings))
    if run.parallel.size == 1:
        kept.write_bytes(pickle.dumps((drafted, oracle)))
        return
    check_same(run.parallel, {"tokens, slots, draft logits and A_k": (drafted.bits(), oracle.bits())})
    run.row(f"{name}: ranks whose bits differ", 0.0, "of tokens, slots, draft logits, A_k", 0.0)
    differ = differing(drafted.tokens, plain.tokens) + differing(oracle.tokens, plain.tokens)
    run.row(f"{name}: tokens of K = 3 that differ from K = 0", differ, "draft and oracle", 0.0)
    histogram = oracle.acceptance[3]["histogram"]
    run.row(f"{name}: accepted counts that did not occur", histogram.count(0), f"of {histogram}", 1.0)
    one, of_oracle = pickle.loads(kept.read_bytes())
    if exact:
        differ = differing(drafted.tokens, one.tokens) + differing(oracle.tokens, of_oracle.tokens)
        run.row(f"{name}: tokens that differ from one rank's", differ, "count", 0.0)
        same = (drafted.acceptance, oracle.acceptance) == (one.acceptance, of_oracle.acceptance)
        run.row(f"{name}: A_k differs from one rank's", float(not same), "of draft and oracle", 0.0)
        for tensor, right in one.tensors.items():
            error = float((drafted.tensors[tensor] - right).abs().max() / right.abs().max())
            run.row(f"{name}: {tensor}, largest error to one rank", error, "of the largest value", BOUND)
    wrong = served(run, jobs, replace(case, compare_states=False), ["F5:slot=2"])
    changed = [key for key, tensor in drafted.tensors.items() if not torch.equal(tensor, wrong.tensors[key])]
    found = [key for key in changed if key != "draft logits"] == ["slot_2"]
    run.row(f"{name}, F5 in slot 2: tokens that differ", differing(wrong.tokens, drafted.tokens), "count", 0.0)
    run.row(f"{name}, F5 in slot 2: not found in it alone", float(not found), str(changed), 0.0)


def differing(ours: Any, theirs: Any) -> float:
    return float(sum(a != b for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)))


def killed(run: Run) -> None:
    """Generates until a rank is killed."""
    models = Models(run, SMALL)
    engine = models.engine(0)
    run.send(state=KILL_ME)
    while True:
        engine.generate(prompts_of(engine, 1, 40), SamplingParams(max_tokens=400, ignore_eos=True))
        check_peers(run.parallel)
