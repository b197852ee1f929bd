"""What fits together: the parts of an engine, and a request with the engine that is to run it."""

from slipstream.engine.config import EngineConfig
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.models import TargetModel
from slipstream.engine.proposer import Proposer
from slipstream.engine.sequence import Request


def check_parts(target: TargetModel, config: EngineConfig, proposer: Proposer | None) -> None:
    """Target, sizes and proposer belong together, on one device, or SlipstreamError says what does not."""
    have = proposer.num_steps if proposer else 0
    if have != config.num_steps:
        raise SlipstreamError(
            f"num_steps = {config.num_steps}, and {'a proposer of ' + str(have) if proposer else 'no proposer'}",
            expected="the same K in both; no proposer at K = 0",
            do="make the proposer with the engine's num_steps",
        )
    if target.device.type != config.device:
        raise SlipstreamError(
            f"the target lies on {target.device.type}, and device = {config.device}",
            expected="the target on the engine's device",
            do="load it with load_target(..., device=...)",
        )
    bounds = {"target": target.config.max_position, "draft": proposer.max_position if proposer else None}
    for name, bound in bounds.items():
        if bound is not None and bound < config.max_context_tokens:
            raise SlipstreamError(
                f"the {name} follows a context of {bound} tokens; the engine is to serve {config.max_context_tokens}",
                expected=f"max_context_tokens <= {bound}",
                do="lower server.max_context_tokens"
                + (", or raise draft.max_context_tokens" if name == "draft" else ""),
                fault="F14" if name == "draft" else "",
            )


def token_limit(request: Request, model: ModelConfig, config: EngineConfig) -> int:
    """Most tokens that the request may have, its prompt included: max_tokens or the context's end.

    Raises SlipstreamError for a prompt that the target cannot read, or that leaves no room for a new token.
    """
    num_prompt, context = len(request.prompt_ids), config.max_context_tokens
    if not request.prompt_ids or not all(0 <= i < model.vocab_size for i in request.prompt_ids):
        raise SlipstreamError(
            "a prompt token id is out of range" if request.prompt_ids else "the prompt is empty",
            expected=f"one or more ids in 0..{model.vocab_size - 1}",
            do="encode the prompt with the target's own tokenizer",
        )
    if num_prompt >= context:
        raise SlipstreamError(
            f"the prompt has {num_prompt} tokens",
            expected=f"at most {context - 1}: max_context_tokens is {context}, and a new token needs room",
            do="shorten the prompt, or raise server.max_context_tokens",
        )
    return min(num_prompt + request.params.max_tokens, context)
