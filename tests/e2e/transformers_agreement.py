"""The target against transformers in bf16 and fp32, teacher-forced on our own greedy tokens.

    python tests/e2e/transformers_agreement.py --target DIR [--prompts 32] [--tokens 128] [--threads 2]

Positions of prompt and answer count. Asked: the most likely token differs from that of transformers in bf16 at no more
than 0.5 % of the positions, each time with a gap of at most two bf16 ulps of the top logit, and our error against fp32
is at most 1.5 times that of transformers in bf16. Ends with 1 where that does not hold.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from slipstream.configs.schema import Deployment
from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.engine import Engine, EngineConfig
from slipstream.engine.loader import load_target
from slipstream.engine.models import TargetModel
from slipstream.engine.sampling_params import SamplingParams
from slipstream.tasks.bench_prompts import benchmark_prompts
from slipstream.tasks.parity_findings import MAX_ERROR_RATIO
from slipstream.tasks.parity_target import BF16_ULPS_OF_A_TIE, LogitFindings, TargetReference

MAX_DIFFERENCE = 0.005


def measure(
    target: TargetModel, reference: TargetReference, prompts: Sequence[list[int]], tokens: int
) -> LogitFindings:
    """Answers every prompt greedily without speculation, then compares each position with `reference`."""
    config = EngineConfig(max_context_tokens=max(map(len, prompts)) + tokens)
    answers = Engine(target, config).generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True), trace=True)
    findings = LogitFindings()
    for answer in answers:
        assert answer.trace is not None
        ids = answer.trace.token_ids[:-1]  # the last token never goes through the target
        findings.add(answer.trace, len(answer.prompt_ids), target, reference.run(ids))
    return findings


def failures(findings: LogitFindings) -> list[str]:
    """Sentences, none where target and transformers agree."""
    found = []
    if findings.share > MAX_DIFFERENCE:
        found.append(f"the argmax differs at {findings.share:.2%} of the positions, more than {MAX_DIFFERENCE:.2%}")
    if findings.beyond_tie:
        found.append(f"{findings.beyond_tie} argmax differences have a gap of more than {BF16_ULPS_OF_A_TIE} bf16 ulps")
    if findings.error_ratio > MAX_ERROR_RATIO:
        found.append(f"the error against fp32 is {findings.error_ratio:.2f} x that of transformers in bf16")
    if findings.served_differ or findings.tokens_differ:
        found.append(
            f"served and teacher argmax differ at {findings.served_differ} positions, token and argmax at "
            f"{findings.tokens_differ}"
        )
    return found


def main(arguments: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(description="Compares the target with transformers, teacher-forced.")
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    chat = ChatTokenizer(args.target)
    chosen = benchmark_prompts(Deployment(benchmark={"num_prompts": args.prompts}))
    prompts = [chat.encode_chat(list(p.messages), add_generation_prompt=True) for p in chosen]
    target = load_target(args.target, EngineConfig().dtype)
    findings = measure(target, TargetReference(args.target), prompts, args.tokens)
    say(findings.describe())
    say(
        f"error against fp32 (root mean square of a row's logits, mean over rows): ours "
        f"{findings.error_sum / findings.positions:.4f}, transformers in bf16 "
        f"{findings.reference_error_sum / findings.positions:.4f}"
    )
    found = failures(findings)
    for sentence in found:
        say(f"FAILED {sentence}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
