"""Decode speed of `transformers` generate on the same prompts, in a process of its own.

The child imports torch and transformers only and has none of our settings of the arithmetic libraries: it is as fast as
transformers is by itself. It answers one prompt a line, so that it can take turns with a server.

    python -P -m slipstream.tasks.bench_transformers MODEL_DIR DTYPE THREADS DEVICE
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from slipstream.engine.errors import SlipstreamError

OURS = ("MKL_CBWR",)  # variables that our kernels set for themselves
EXIT_SECONDS = 10.0


@dataclass(frozen=True)
class Decoded:
    """tokens: after the first one. seconds: first token -> last token."""

    tokens: int
    seconds: float


class TransformersProcess:
    """The child. Use it as a context manager.

    Args:
        model_dir: a Hugging Face directory.
        dtype: "bfloat16" or "float32".
        threads: of torch.
        device: "cpu" or "cuda".
    """

    def __init__(self, model_dir: Path, dtype: str, threads: int, device: str = "cpu") -> None:
        environment = {name: value for name, value in os.environ.items() if name not in OURS}
        command = [sys.executable, "-P", "-m", "slipstream.tasks.bench_transformers"]
        self._child = subprocess.Popen(
            [*command, str(model_dir), dtype, str(threads), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def __enter__(self) -> "TransformersProcess":
        self._read()  # loaded and warm
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        try:
            self._child.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()

    def decode(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Decoded:
        """Answers one prompt, greedily. Raises SlipstreamError when the child is gone."""
        assert self._child.stdin is not None
        print(json.dumps({"ids": list(prompt_ids), "tokens": max_new_tokens}), file=self._child.stdin, flush=True)
        return Decoded(**self._read())

    def _read(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise SlipstreamError(
                f"the process that measures transformers ended with code {self._child.wait()}",
                expected="an answer",
                do="read its error above; or leave the comparison out: benchmark.compare_transformers: false",
            )
        return json.loads(line)


def main() -> None:
    """Entry of the child."""
    model_dir, dtype, threads, device = sys.argv[1:]
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer
    from transformers.utils import logging

    class Clock(BaseStreamer):
        """Notes when tokens arrive; the first call hands over the prompt."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    logging.disable_progress_bar()  # it would tear ours
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype), local_files_only=True)
    model = model.eval().to(device)

    def decode(ids: list[int], tokens: int) -> Decoded:
        prompt = torch.tensor([ids], device=device)  # [1, T]
        clock = Clock()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=tokens,
            streamer=clock,
            pad_token_id=0,
        )
        first, last = clock.times[1], clock.times[-1]
        return Decoded(len(clock.times) - 2, last - first)

    decode(list(range(1, 17)), 4)
    print("{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = decode(request["ids"], request["tokens"])
        print(json.dumps({"tokens": answer.tokens, "seconds": answer.seconds}), flush=True)


if __name__ == "__main__":
    main()
