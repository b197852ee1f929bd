"""The prediction that training leaves behind: replayed tau(K) and A_k of held-out conversations."""

from collections.abc import Collection
from pathlib import Path

from slipstream.engine.acceptance import AcceptanceCounts, ConversationRuns, run_lengths_to_tau
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.manifest import read_json

EVALUATION = "evaluation.json"


def read_replayed(train_dir: Path) -> dict[int, AcceptanceCounts]:
    """K -> counts of the replayed rounds, for K = 1 and up, as far as the evaluation went.

    Raises SlipstreamError when the stage train left no evaluation, or one without rounds.
    """
    path = train_dir / EVALUATION
    if not path.is_file():
        raise SlipstreamError(
            f"{path} does not exist",
            expected="the evaluation that the stage train ends with",
            do="run `slipstream stage train CONFIG --force`",
        )
    replayed = [AcceptanceCounts.from_dict(entry) for entry in read_json(path)["replayed"]]
    counts = {entry.num_steps: entry for entry in replayed if entry.num_steps > 0}
    empty = [k for k, count in counts.items() if not count.rounds]
    if empty or not counts:
        raise SlipstreamError(
            f"{path} holds no rounds for K = {empty or 'any'}",
            expected="held-out conversations long enough to replay",
            do="raise data.holdout_fraction or data.max_new_tokens, then run the stages from regenerate on",
        )
    return counts


def replay_prompts(
    train_dir: Path, prompt_ids: Collection[str], num_steps: int, max_new_tokens: int
) -> AcceptanceCounts | None:
    """Replays the first answers to certain prompts, cut as the benchmark cuts them.

    With greedy answers these are the very tokens that the benchmark makes, so that the prediction does not differ from
    what is served by the luck of the prompts. None when a prompt was not evaluated (it was not held out).
    """
    data = read_json(train_dir / EVALUATION)
    if num_steps > data["num_steps"]:
        return None
    first: dict[str, ConversationRuns] = {}
    for answer in data["answers"]:
        prompt_id = answer["conversation"].partition("#")[0].partition("~")[0]  # one turn, or one sample, of a prompt
        lengths = answer["run_lengths"]
        cut = lengths[: max_new_tokens - 1]  # the first token comes from prefill
        by_limit = answer["ended_by_limit"] or len(cut) < len(lengths)
        first.setdefault(prompt_id, ConversationRuns(cut, by_limit))
    if not set(prompt_ids) <= set(first):
        return None
    return run_lengths_to_tau([first[prompt_id] for prompt_id in prompt_ids], num_steps, data["num_steps"])
