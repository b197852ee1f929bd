"""Stage `resolve`: the target on this machine, whole, identified, and of the expected quality.

Writes `model/`, a directory of links to the target's files (in the cache, in the hub's cache, or where the user has
them), so that a file that goes away or changes is noticed by the stage's own file hashes.
"""

import time
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.chat import ChatTokenizer
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.loader import load_target
from slipstream.engine.model_config import ModelConfig, check_architecture
from slipstream.tasks.perplexity import fixed_text, perplexity
from slipstream.tasks.registry import get_stage
from slipstream.tasks.stage import StageContext
from slipstream.tasks.target_sources import find_target, model_files

MODEL = "model"
SAY_EVERY_SECONDS = 5.0


def run(context: StageContext) -> dict[str, Any]:
    """Fetches or finds the target, links it, hashes it, and measures its perplexity.

    Figures: model_dir (the directory to load), source, identity (target, tokenizer, chat_template as sha256), bytes,
    perplexity, perplexity_tokens, answer_header, answer_end (the template's marks), stop_token_ids.
    """
    context.say(f"target: {context.config.target.source}")
    source = find_target(context.config, _Listener(context))
    model = context.out / MODEL
    # First of all the config: a tokenizer that stumbles over it would hide what is wrong.
    check_architecture(ModelConfig.from_dir(source.directory), source.directory)
    link_files(source.directory, model)
    identity = TargetIdentity.from_dir(model)
    tokenizer = ChatTokenizer(model)
    marks = tokenizer.marks  # a template without marks ends here, before hours are spent on its answers
    target = load_target(model, getattr(torch, context.config.target.dtype))
    check_vocabulary(tokenizer, target.config.vocab_size)
    ids = tokenizer.encode(fixed_text())
    value = perplexity(target, ids, lambda done, total: context.progress(done, total, perplexity_tokens=total))
    context.say(f"perplexity on the fixed text ({len(ids)} tokens): {value:.2f}")
    check_perplexity(value, context.config.gates.max_perplexity)
    return {
        # Where the stage's directory will stand when it is finished: it is renamed after this function.
        "model_dir": MODEL,
        "source": source.origin,
        "identity": identity.to_dict(),
        "bytes": sum(path.stat().st_size for path in model.iterdir()),
        "perplexity": round(value, 4),
        "perplexity_tokens": len(ids),
        "answer_header": tokenizer.decode(marks.header, skip_special_tokens=False),
        "answer_end": tokenizer.decode([marks.end], skip_special_tokens=False),
        "stop_token_ids": list(tokenizer.stop_token_ids),
    }


def link_files(source: Path, into: Path) -> None:
    """Links every file of a target from `source`; what a run before linked is replaced."""
    into.mkdir(exist_ok=True)
    for old in into.iterdir():
        old.unlink()
    for path in model_files(source):
        (into / path.name).symlink_to(path.resolve())


def check_vocabulary(tokenizer: ChatTokenizer, vocab_size: int) -> None:
    """The embedding has a row for every id that the tokenizer can give (more are usual), or SlipstreamError."""
    if tokenizer.vocab_size > vocab_size:
        raise SlipstreamError(
            f"the tokenizer knows {tokenizer.vocab_size:,} ids, the model's table has {vocab_size:,} rows",
            expected="tokenizer and weights of one model",
            do="check that the tokenizer's files belong to this model",
        )


def check_perplexity(value: float, bound: float | None) -> None:
    """The gate of the stage. Raises SlipstreamError when the target reads plain English worse than the bound allows."""
    if bound is None or value <= bound:
        return
    raise SlipstreamError(
        f"the target's perplexity on the fixed text is {value:.2f}",
        expected=f"at most {bound:g} (gates.max_perplexity)",
        do="the weights, the config or the tokenizer are not those of this model: fetch them again. If the model is "
        "known to be this weak in English, raise gates.max_perplexity",
    )


class _Listener:
    """Passes progress on; a download of unknown length is a line now and then instead of a bar."""

    def __init__(self, context: StageContext) -> None:
        self._context, self._last = context, time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        if total:
            self._context.progress(done, total, what=what)
        elif time.monotonic() - self._last >= SAY_EVERY_SECONDS:
            self._last = time.monotonic()
            self._context.say(f"{what}: {done / 1e6:.0f} MB so far")


STAGE = get_stage("resolve")
