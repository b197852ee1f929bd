"""The prompts that speed is measured with: held out from training, a mix of categories, as chats."""

import random
from typing import TYPE_CHECKING

from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.bench_client import Prompt
from slipstream.tasks.facts import HOLDOUT
from slipstream.tasks.prompts import assign_splits, load_prompts

if TYPE_CHECKING:
    from slipstream.configs.schema import Deployment


def benchmark_prompts(deployment: "Deployment") -> list[Prompt]:
    """`benchmark.num_prompts` chats of one turn, the same ones for the same `benchmark.seed`.

    Categories take turns, so that a few prompts are as mixed as many. Raises SlipstreamError when there are too few.
    """
    bench, data = deployment.benchmark, deployment.data
    if bench.prompts == HOLDOUT:
        prompts = load_prompts(data.prompts)
        splits = assign_splits(prompts, data.holdout_fraction, data.seed)
        prompts = [prompt for prompt in prompts if splits[prompt.id] == "holdout"]
    else:
        prompts = load_prompts(bench.prompts)
    if len(prompts) < bench.num_prompts:
        raise SlipstreamError(
            f"benchmark.num_prompts is {bench.num_prompts}, but {bench.prompts} has {len(prompts)}",
            expected="as many prompts as are asked for: a prompt sent twice would find its answer's start cached",
            do="lower benchmark.num_prompts, or raise data.holdout_fraction",
        )
    order = random.Random(bench.seed)
    by_category: dict[str, list[str]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt.id)
    for ids in by_category.values():
        order.shuffle(ids)
    rank = {prompt_id: i for ids in by_category.values() for i, prompt_id in enumerate(ids)}
    mixed = sorted(prompts, key=lambda prompt: (rank[prompt.id], prompt.category, prompt.id))
    return [Prompt(p.id, ({"role": "user", "content": p.turns[0]},)) for p in mixed[: bench.num_prompts]]
