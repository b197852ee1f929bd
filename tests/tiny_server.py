"""A tiny random target with a tokenizer, a draft for it, and real servers of both, for tests that need a process."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream.engine.drafts.eagle3.checkpoint import save_draft
from slipstream.engine.drafts.eagle3.hf_config import DraftRecord
from slipstream.engine.drafts.eagle3.layer_ids import Family
from slipstream.engine.handover import TargetIdentity

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
START_SECONDS = 120.0


def save_tokenizer(directory: Path) -> int:
    """Writes a tokenizer of single bytes and three marks (ids 0..2) with a chat template. Returns its size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*MARKS, *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=MARKS[0], eos_token=MARKS[2], additional_special_tokens=list(MARKS)
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return len(vocab)


@dataclass(frozen=True)
class Models:
    """Directories of a target and of its draft."""

    target: Path
    draft: Path


def make_models(root: Path, tiny: ModuleType, seed: int = 0) -> Models:
    """Writes both. The target has 259 tokens and a context of 256, the draft slots (1, 2, 4)."""
    target = root / "target"
    size = save_tokenizer(target)
    tiny.save_tiny(target, seed, vocab_size=size, eos_token_id=2, bos_token_id=0)
    loaded = tiny.load_target(target, "bfloat16")
    record = DraftRecord(TargetIdentity.from_dir(target), Family.LLAMA, "0" * 64)
    save_draft(root / "draft", tiny.tiny_draft(loaded, seed), record)
    return Models(target, root / "draft")


@dataclass
class Running:
    """A server in a process of its own."""

    process: subprocess.Popen[bytes]
    state: dict[str, object]
    log: Path

    @property
    def url(self) -> str:
        return str(self.state["url"])

    @property
    def engine_pid(self) -> int:
        return int(str(self.state["engine_pid"]))

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    def stats(self) -> dict[str, object]:
        return httpx.get(f"{self.url}/slipstream/settings", timeout=60).json()["stats"]

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def command(models_: Models, num_steps: int, *flags: str, port: int = 0) -> list[str]:
    """The command line of a server of `models_`."""
    draft = str(models_.draft) if num_steps else "none"
    return [
        *(sys.executable, "-P", "-m", "slipstream.engine.serving.main"),
        *("--target", str(models_.target), "--draft", draft, "--num-steps", str(num_steps), "--port", str(port)),
        *("--max-context-tokens", "128", "--max-running-requests", "4", "--threads", "1", *flags),
    ]


def start(folder: Path, models_: Models, num_steps: int = 3, *flags: str, wait: bool = True) -> Running:
    """Starts a server with its log and state file in `folder`; with `wait`, until it is ready."""
    folder.mkdir(parents=True, exist_ok=True)
    state_file, log = folder / "state.json", folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(models_, num_steps, "--state-file", str(state_file), *flags),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    deadline = time.monotonic() + START_SECONDS
    wanted = "ready" if wait else "starting"
    while True:
        state = json.loads(state_file.read_text()) if state_file.is_file() else {}
        if state.get("status") == wanted:
            return Running(process, state, log)
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"the server did not start (exit code {process.wait()}):\n{log.read_text()}")
        time.sleep(0.05)
