"""The target against transformers in bf16 and fp32, teacher-forced on our own greedy tokens.

    python tests/e2e/transformers_agreement.py --target DIR [--prompts 32] [--tokens 128] [--threads 2] [--device auto]

Positions of prompt and answer count. Asked: the most likely token differs from that of transformers in bf16 at no more
than 0.5 % of the positions, each time with a gap of at most two bf16 ulps of the top logit, and our error against fp32
is at most 1.5 times that of transformers in bf16. Ends with 1 where that does not hold.

But for the 0.5 %, where bf16 is too coarse for it: transformers in bf16 is compared with itself on the same tokens,
with its other attention ("eager" for "sdpa") and in fp32. Where its own two attentions differ more often than asked,
the bound is what these two allow (`slipstream.tasks.agreement_bound`), as in the parity stage; where they do not, it
is the 0.5 %. Besides, we may differ from transformers in fp32 no more often than transformers in bf16 does, within two
standard errors.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from slipstream.configs.schema import Deployment
from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.device import DEVICES, resolve_device
from slipstream.engine.engine import Engine, EngineConfig
from slipstream.engine.loader import load_target
from slipstream.engine.models import TargetModel
from slipstream.engine.sampling_params import SamplingParams
from slipstream.tasks.agreement_bound import MAX_ERROR_RATIO
from slipstream.tasks.bench_prompts import benchmark_prompts
from slipstream.tasks.parity_target import LogitFindings, TargetReference

MAX_DIFFERENCE = 0.005


def describe(found: LogitFindings) -> list[str]:
    """Lines for the person who runs it."""
    ours, theirs = found.error_sum / found.positions, found.reference_error_sum / found.positions
    return [
        found.describe(),
        found.describe_bound(MAX_DIFFERENCE),
        f"argmax differs from transformers in fp32: ours at {found.own_differ} positions ({found.own_share:.2%}, "
        f"bound {found.allowed_own_share:.2%}), transformers in bf16 at {found.reference_differ} "
        f"({found.reference_share:.2%})",
        "error against fp32 (root mean square of a row's logits, mean over rows): "
        f"ours {ours:.4f}, transformers in bf16 {theirs:.4f}",
    ]


@torch.no_grad()
def measure(
    model_dir: Path, target: TargetModel, prompts: Sequence[list[int]], tokens: int, device: str = "cpu"
) -> LogitFindings:
    """Answers every prompt greedily without speculation, then compares each position with transformers.

    Args:
        model_dir: for transformers.
        target: the same, in bf16, by our loader.
        prompts: token ids.
        tokens: new tokens a prompt.
        device: where the target lies; transformers runs there, too, its fp32 products in fp32.
    """
    torch.set_float32_matmul_precision("highest")
    config = EngineConfig(max_context_tokens=max(map(len, prompts)) + tokens, device=device)
    answers = Engine(target, config).generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True), trace=True)
    reference = TargetReference(model_dir, device)
    findings = LogitFindings(independent=target.device.type != "cpu")
    for answer in answers:
        assert answer.trace is not None
        ids = answer.trace.token_ids[:-1]  # the last token never goes through the target
        findings.add(answer.trace, len(answer.prompt_ids), target, reference.run(ids))
    return findings


def failures(findings: LogitFindings) -> list[str]:
    """Sentences, none where target and transformers agree."""
    found = []
    if findings.share > findings.allowed_share(MAX_DIFFERENCE):
        found.append(findings.describe_bound(MAX_DIFFERENCE))
    if findings.own_share > findings.allowed_own_share:
        found.append(
            f"the argmax differs from transformers in fp32 at {findings.own_share:.2%} of the positions, that of "
            f"transformers in bf16 at {findings.reference_share:.2%}"
        )
    if findings.beyond_tie:
        found.append(
            f"{findings.beyond_tie} argmax differences have a gap of more than {findings.tie_ulps:.2g} bf16 ulps"
        )
    if findings.error_ratio > MAX_ERROR_RATIO:
        found.append(f"the error against fp32 is {findings.error_ratio:.2f} x that of transformers in bf16")
    if findings.served_differ or findings.tokens_differ:
        found.append(
            f"served and teacher argmax differ at {findings.served_differ} positions, token and argmax at "
            f"{findings.tokens_differ}"
        )
    return found


def say(text: str) -> None:
    """Prints at once, also into a file that somebody follows."""
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compares the target with transformers, teacher-forced.")
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", choices=DEVICES, default="auto", help="of our target and of transformers")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    chat = ChatTokenizer(args.target)
    chosen = benchmark_prompts(Deployment(benchmark={"num_prompts": args.prompts}))
    prompts = [chat.encode_chat(list(p.messages), add_generation_prompt=True) for p in chosen]
    device = resolve_device(args.device)
    target = load_target(args.target, EngineConfig().dtype, device)
    findings = measure(args.target, target, prompts, args.tokens, device)
    for line in describe(findings):
        say(line)
    found = failures(findings)
    for sentence in found:
        say(f"FAILED {sentence}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
