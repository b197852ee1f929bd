"""The prediction that training leaves behind: replayed tau(K) and A_k of held-out conversations."""

from pathlib import Path

from slipstream.engine.acceptance import AcceptanceCounts
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
