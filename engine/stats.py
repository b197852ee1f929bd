"""What an engine has done so far."""

from dataclasses import dataclass, field

from slipstream.engine.acceptance import AcceptanceCounts


@dataclass
class EngineStats:
    """Counts and wall seconds since the engine was made.

    acceptance: K in force -> counts. `rest_seconds` is what steps took outside prefill, draft and verify.
    """

    acceptance: dict[int, AcceptanceCounts] = field(default_factory=dict)
    steps: int = 0
    rounds: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    rest_seconds: float = 0.0
