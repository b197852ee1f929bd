"""Stage `convert`: the trained draft as a plain Hugging Face EAGLE-3 directory, which vLLM and SGLang load, too.

Writes draft/ (see `engine.drafts.eagle3.checkpoint`), reads it back and compares every bit.
"""

from collections.abc import Collection
from typing import Any

import torch

from slipstream.engine.drafts.eagle3.checkpoint import load_draft, save_draft
from slipstream.engine.drafts.eagle3.hf_config import DraftRecord, engine_ids
from slipstream.engine.drafts.eagle3.layer_ids import KNOWN_VERSIONS, family_of
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.drafts.eagle3.tensor_checks import out_of_vocabulary_share
from slipstream.engine.drafts.eagle3.vocab import count_tokens
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.training.checkpoint import load_network
from slipstream.engine.training.init import TargetWeights
from slipstream.tasks.conversations import CONVERSATIONS, read_conversations
from slipstream.tasks.facts import DRAFT, resolved_target
from slipstream.tasks.registry import get_stage
from slipstream.tasks.stage import StageContext


def run(context: StageContext, *, skip: Collection[str] = ()) -> dict[str, Any]:
    """Converts, and proves that nothing was lost (F8), the vocabulary map is sound (F9) and positions suffice (F14).

    Figures: draft_dir; slots; engines (layer ids to each engine, or why it cannot serve the draft); parameters, bytes,
    dtype; draft_vocab_size; outside_vocabulary (share of answered tokens without a draft id, by split).
    Args: skip: faults whose checks are off (tests of the faults only).
    """
    config = context.config
    model_dir = resolved_target(context.workdir)
    model = ModelConfig.from_dir(model_dir)
    dtype = getattr(torch, config.server.dtype)
    network = load_network(context.input("train") / "checkpoint", dtype)
    check_embedding(network, TargetWeights.from_dir(model_dir, model.num_layers).embedding)
    record = DraftRecord(
        TargetIdentity.from_dir(model_dir), family_of(model.architecture), context.manifest("train")["fingerprint"]
    )
    draft = context.out / DRAFT
    save_draft(draft, network, record, served_tokens=config.server.max_context_tokens, skip=skip)
    check_round_trip(network, load_draft(draft, skip=skip))

    ids = engine_ids(network.config, record.family)
    for engine, written in ids.items():
        name = f"{engine.value} {KNOWN_VERSIONS[engine]}"
        if isinstance(written, str):
            context.warn(f"{name} cannot serve this draft: {written}. Slipstream can")
        else:
            context.say(f"layer ids for {name}: {list(written)} (slots {list(network.config.slots)})")
    outside = outside_vocabulary(context, network)
    if outside:
        shares = ", ".join(f"{share:.2%} ({split})" for split, share in outside.items())
        context.say(f"answered tokens that the draft cannot propose: {shares}")
    return {
        "draft_dir": str(context.workdir / context.stage / DRAFT),  # where it will stand after the stage's rename
        "slots": list(network.config.plan.names),
        "engines": {
            f"{engine.value} {KNOWN_VERSIONS[engine]}": written if isinstance(written, str) else list(written)
            for engine, written in ids.items()
        },
        "parameters": sum(p.numel() for p in network.parameters()),
        "bytes": sum(path.stat().st_size for path in draft.iterdir()),
        "dtype": config.server.dtype,
        "draft_vocab_size": network.config.draft_vocab_size,
        "outside_vocabulary": outside,
    }


def check_embedding(network: Eagle3Network, embedding: torch.Tensor) -> None:
    """The draft's embedding is the target's, bit for bit: SGLang puts the target's in its place anyway."""
    own = network.embed_tokens.weight
    if own.shape != embedding.shape or not torch.equal(own, embedding.to(own.dtype)):
        raise SlipstreamError(
            f"the draft's embedding {list(own.shape)} is not the target's {list(embedding.shape)}",
            expected="the target's, which training keeps frozen; engines share it between the two",
            do="train again from this target; one in float32 that is served so needs training.dtype: float32, too",
            fault="F8",
        )


def check_round_trip(written: Eagle3Network, read: Eagle3Network) -> None:
    """Plan and every tensor came back bit for bit. Raises SlipstreamError (F8) that lists those that did not."""
    ours, theirs = written.state_dict(), read.state_dict()
    lost = [n for n in ours if n not in theirs or not torch.equal(ours[n], theirs[n])] + sorted(set(theirs) - set(ours))
    if lost or written.config.plan != read.config.plan:
        raise SlipstreamError(
            f"the converted draft reads back otherwise: {lost or [str(read.config.plan)]}",
            expected="every bit of the trained draft",
            do="this is a fault of Slipstream or of the disk: convert again, and report it if it stays",
            fault="F8",
        )


def outside_vocabulary(context: StageContext, network: Eagle3Network) -> dict[str, float]:
    """split -> share of answered tokens that the draft cannot propose."""
    records = read_conversations(context.input("regenerate") / CONVERSATIONS)
    shares = {}
    for split in ("train", "holdout"):
        own = [(torch.tensor(r.token_ids), r.mask) for r in records if r.split == split]
        counts = count_tokens(own, network.config.vocab_size)
        if int(counts.sum()):
            shares[split] = out_of_vocabulary_share(counts, network.d2t)
    return shares


STAGE = get_stage("convert")
