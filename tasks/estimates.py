"""What a run costs before it is run: seconds, disk and memory of each stage.

Where an earlier run left a manifest, its seconds are taken; everything else is a rough formula and is labelled so. The
formulas are for a CPU and meant to tell minutes from hours, and gigabytes from terabytes. Of a card nobody knows the
seconds before something ran there; memory is the host's, weights and caches in cards are the plan's "a rank's memory".
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.engine.drafts.eagle3.config import Eagle3Config
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.model_config import ModelConfig
from slipstream.tasks import derived
from slipstream.tasks.facts import Facts
from slipstream.tasks.manifest import MANIFEST, read_json
from slipstream.tasks.prompts import held_out_count, load_prompts
from slipstream.tasks.target_weights import target_weights, weight_bytes

# Of two cores of a present-day server, measured with a model of 135 million parameters.
READ_BYTES_PER_SECOND = 12e9  # weights streamed from memory in a decode step
OPERATIONS_PER_SECOND = 1e11  # of matrix products
CHARACTERS_PER_TOKEN = 3.5
TEMPLATE_TOKENS = 40  # of a chat template around a prompt
CARD_RANK_BYTES = 4 << 30  # of the host, a guess: Python, torch, CUDA, and pages of the files while they are read
STEP_ROWS = 16  # rows that a decode step takes in hardly more time than one

TRAINING_BYTES_PER_PARAMETER = 18  # bf16 weight, float32 master and gradient, two float32 moments
CHECKPOINT_BYTES_PER_PARAMETER = 12  # float32 master, two float32 moments
CONVERSATION_BYTES_PER_TOKEN = 8  # token ids and mask as JSON text


@dataclass(frozen=True)
class Tokens:
    """How many tokens the conversations hold. `measured`: counted in an earlier run, else guessed from the prompts."""

    conversations: int
    answer_tokens: int
    other_tokens: int
    measured: bool

    @property
    def total(self) -> int:
        return self.answer_tokens + self.other_tokens


@dataclass(frozen=True)
class Cost:
    """Cost of one stage. `measured`: the seconds are those of an earlier run. None where nothing can be said."""

    seconds: float | None
    disk_bytes: int
    memory_bytes: int
    measured: bool = False


def count_tokens(facts: Facts) -> Tokens | None:
    """Tokens of the conversations; None when the prompts cannot be read (a check of its own says so)."""
    data = facts.deployment.data
    try:
        sizes = [sum(map(len, prompt.turns)) for prompt in load_prompts(data.prompts)]
    except (OSError, SlipstreamError):
        return None
    measured = _counted(facts.workdir / "extract" / "store" / MANIFEST)
    if measured is not None:
        return measured
    held_out = held_out_count(len(sizes), data.holdout_fraction)
    conversations = (len(sizes) - held_out) * len(data.temperatures) + held_out  # held-out prompts are answered once
    prompt_tokens = sum(min(size / CHARACTERS_PER_TOKEN + TEMPLATE_TOKENS, data.max_prompt_tokens) for size in sizes)
    other_tokens = int(prompt_tokens / len(sizes) * conversations)
    return Tokens(conversations, conversations * data.max_new_tokens, other_tokens, measured=False)


def costs(facts: Facts) -> dict[str, Cost]:
    """Stage -> cost of running it, whether it is needed or not; without the target's shapes only measured ones."""
    rough, earlier = _rough(facts), _earlier_seconds(facts.workdir)
    result = {}
    for stage in sorted({*rough, *earlier}):
        guess, seconds = rough.get(stage, Cost(None, 0, 0)), earlier.get(stage)
        result[stage] = guess if seconds is None else Cost(seconds, guess.disk_bytes, guess.memory_bytes, measured=True)
    return result


def _counted(manifest: Path) -> Tokens | None:
    """The tokens of an extracted store."""
    if not manifest.is_file():
        return None
    conversations = read_json(manifest).get("conversations", {}).values()
    answers = sum(c["tokens"] - c["teacher_start"] for c in conversations)
    return Tokens(len(conversations), answers, sum(c["teacher_start"] for c in conversations), measured=True)


def _earlier_seconds(workdir: Path) -> dict[str, float]:
    found = {}
    for manifest in workdir.glob(f"*/{MANIFEST}"):
        try:
            value = read_json(manifest)
        except SlipstreamError:
            continue  # a damaged one says nothing here: its stage is made again
        if not isinstance(value, dict):
            continue
        if isinstance(value.get("seconds"), int | float) and value.get("stage") == manifest.parent.name:
            found[manifest.parent.name] = float(value["seconds"])
    return found


def _rough(facts: Facts) -> dict[str, Cost]:
    if facts.target is None or not facts.slots:
        return {}
    try:
        draft = derived.draft_config(facts.deployment, facts.target, facts.slots)
    except SlipstreamError:
        return {}  # a check of its own says what contradicts what
    tokens = count_tokens(facts)
    return {} if tokens is None else _Formulas(facts, facts.target, draft, tokens).all()


class _Formulas:
    """The formulas, with what they share."""

    def __init__(self, facts: Facts, target: ModelConfig, draft: Eagle3Config, tokens: Tokens) -> None:
        self.deployment, self.target, self.draft, self.tokens = facts.deployment, target, draft, tokens
        self.stored_slots = len(facts.stored_slots or ())
        size = derived.BYTES
        self.on_card = self.deployment.server.device == "cuda"
        self.is_here = facts.target_dir is not None
        self.parameters = derived.target_parameters(target)
        stored, served = size[self.deployment.target.dtype], size[self.deployment.server.dtype]
        self.weights = sum(weight_bytes(weight, target, stored) for weight in target_weights(target))
        self.served_weights = sum(weight_bytes(weight, target, served) for weight in target_weights(target))
        self.trained = derived.trained_parameters(draft)
        self.draft_parameters = self.trained + derived.embedding_parameters(draft)
        self.step_seconds = self.served_weights / READ_BYTES_PER_SECOND

    def all(self) -> dict[str, Cost]:
        formulas: dict[str, Callable[[], Cost]] = {
            "resolve": self.resolve,
            "regenerate": self.regenerate,
            "extract": self.extract,
            "train": self.train,
            "convert": self.convert,
            "parity": self.parity,
            "cleanup": lambda: Cost(1.0, 0, 0),
            "tune": self.tune,
            "launch": lambda: Cost(10.0, 0, self.server_memory()),
            "benchmark": self.benchmark,
            "report": lambda: Cost(5.0, 2 << 20, 1 << 28),
        }
        costs = {stage: formula() for stage, formula in formulas.items()}
        anywhere = ("convert", "cleanup", "report")
        return {s: c if s in anywhere or not self.on_card else replace(c, seconds=None) for s, c in costs.items()}

    def resolve(self) -> Cost:
        # A target that is here is linked, another one fetched; it is loaded once on the CPU, for its perplexity.
        return Cost(10 + self.parameters / 2e7, (1 << 20) + (0 if self.is_here else self.weights), 2 * self.weights)

    def regenerate(self) -> Cost:
        rows = min(self.deployment.data.batch_size, STEP_ROWS)
        prefill = 2 * self.parameters * self.tokens.other_tokens / OPERATIONS_PER_SECOND
        seconds = self.tokens.answer_tokens / rows * 2 * self.step_seconds + prefill
        return Cost(seconds, self.tokens.total * CONVERSATION_BYTES_PER_TOKEN, self.server_memory())

    def extract(self) -> Cost:
        dtype = self.deployment.server.dtype  # states are captured as the server computes them
        answer, other = derived.store_bytes_per_token(self.stored_slots, self.target.hidden_size, dtype)
        disk = answer * self.tokens.answer_tokens + other * self.tokens.other_tokens
        seconds = 2 * self.parameters * self.tokens.total / OPERATIONS_PER_SECOND
        return Cost(seconds, disk, CARD_RANK_BYTES if self.on_card else self.weights + (256 << 20))

    def train(self) -> Cost:
        training = self.deployment.training
        tokens = self.tokens.total * (1 - self.deployment.data.holdout_fraction) * training.epochs
        seconds = 6 * self.trained * training.num_steps * tokens / OPERATIONS_PER_SECOND
        if training.max_seconds is not None:
            seconds = min(seconds, training.max_seconds)
        # Logits of every unrolled step are kept for the backward pass; the teacher's go over the whole vocabulary.
        logits = training.batch_tokens * (
            training.num_steps * self.draft.draft_vocab_size * 8 + self.target.vocab_size * 4
        )
        tables = 2 * derived.embedding_parameters(self.draft) * 2  # embedding and the target's head, in bf16
        memory = self.trained * TRAINING_BYTES_PER_PARAMETER + logits + tables
        return Cost(seconds, 2 * self.trained * CHECKPOINT_BYTES_PER_PARAMETER, memory)

    def convert(self) -> Cost:
        size = self.draft_parameters * derived.BYTES[self.deployment.server.dtype]
        return Cost(5.0, size, 3 * size)

    def parity(self) -> Cost:
        # The server, and in this process the target and, unpacked, transformers' own in fp32 and bf16.
        unpacked = 3 * self.parameters * derived.BYTES[self.deployment.target.dtype]
        return Cost(60.0, 4 << 20, self.server_memory() + self.served_weights + unpacked)

    def tune(self) -> Cost:
        speculation = self.deployment.speculation
        runs = speculation.max_num_steps + 1 if speculation.num_steps == "auto" else 2
        return Cost(20.0 + runs * 5.0, 1 << 20, self.server_memory())

    def benchmark(self) -> Cost:
        benchmark = self.deployment.benchmark
        rounds = 2 * benchmark.pairs * benchmark.num_prompts / min(benchmark.concurrency, benchmark.num_prompts)
        return Cost(30.0 + rounds * benchmark.max_new_tokens * self.step_seconds, 4 << 20, 2 * self.server_memory())

    def server_memory(self) -> int:
        """Weights of target and draft, and the KV cache of as many requests as run at the same time; of all ranks."""
        server = self.deployment.server
        ranks = server.tensor_parallel_size
        if self.on_card:
            return ranks * CARD_RANK_BYTES
        size = derived.BYTES[server.dtype]
        kv = derived.cell_bytes(self.target, server.dtype)
        kv += derived.draft_cell_bytes(self.draft, server.dtype)
        pool = kv * server.max_running_requests * server.max_context_tokens
        # With more ranks than KV heads, several hold the same one; latents are on all of them.
        pool *= ranks if self.target.latent is not None else max(1, ranks // self.target.num_kv_heads)
        # and on each rank the interpreter with torch
        return self.served_weights + self.draft_parameters * size + pool + ranks * (512 << 20)
