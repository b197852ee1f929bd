"""Training over the cards of one host: one process, several, several again; losses, bits and milliseconds a step.

    python -P tests/benchmarks/train_ranks.py --processes 2 --sizes smollm2 llama8b

Random weights and states (what a step costs hangs on sizes alone), the product's own ranks and trainer, by torchrun.
Checked: losses of one process and of several agree within bf16's rounding, and several give the same bits twice.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from slipstream.engine.drafts.eagle3.config import Eagle3Config
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.training.data import Conversation, ConversationList, slot_counts
from slipstream.engine.training.follow import follow, lead
from slipstream.engine.training.log import read_metrics
from slipstream.engine.training.settings import TrainingSettings
from slipstream.engine.training.teacher import Teacher
from slipstream.engine.training.trainer import Trainer
from slipstream.tasks.torchrun import Launch
from slipstream.tasks.train_rank import join

# hidden, MLP, heads, KV heads, vocabulary, draft vocabulary, tokens of a batch, tokens of a conversation
SIZES = {
    "tiny": (32, 64, 4, 2, 96, 64, 256, 24),
    "smollm2": (576, 1536, 9, 3, 49152, 49152, 16384, 512),
    "llama8b": (4096, 14336, 32, 8, 128256, 32000, 16384, 512),
}
WARM_STEPS = 5


def rank(told: dict) -> None:
    """One rank, to its end. What rank 0 found goes to a file."""
    device = torch.device("cpu")
    if told["device"] == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    ranks = join(Launch(told["processes"], told["device"], 0, None, "", None, None), int(os.environ["RANK"]),
                 int(os.environ["WORLD_SIZE"]))  # fmt: skip
    hidden, mlp, heads, kv_heads, vocab, draft_vocab, batch_tokens, length = SIZES[told["size"]]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    settings = TrainingSettings(5, 1000, None, 1e-4, 0.05, 0.0, 0.5, batch_tokens, 0.8, 0, 1e9, str(dtype)[6:], "auto")
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(4096, hidden, generator=draw).to(dtype)  # read at many places: memory is not what is measured
    conversations = []
    for index in range(4 * batch_tokens // length):
        mask = torch.arange(length) >= length // 4
        rows = (torch.arange(length) + 97 * index) % len(states)
        features = states[rows].repeat(1, 3)  # [T, h] -> [T, 3h]
        ids = torch.randint(0, vocab, (length,), generator=draw)
        conversations.append(Conversation(ids, mask, features, states[(rows + 1) % len(states)], 0))
    source = ConversationList(conversations)
    if ranks.rank:
        follow(ranks, lambda plan: source, device)
        return
    config = Eagle3Config(
        hidden_size=hidden, intermediate_size=mlp, num_heads=heads, num_kv_heads=kv_heads, head_dim=hidden // heads,
        rms_norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, max_position=1024, vocab_size=vocab,
        draft_vocab_size=draft_vocab, target_hidden_size=hidden, slots=(1, 2, 3), target_num_layers=4,
    )  # fmt: skip
    network = Eagle3Network(config, dtype)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * parameter.shape[-1] ** -0.5)
    network.embed_tokens.weight.requires_grad_(False)
    network = network.to(device)
    head = (torch.randn(vocab, hidden, generator=draw) * hidden**-0.5).to(device, dtype)
    teacher = Teacher(torch.ones(hidden, device=device, dtype=dtype), head, 1e-5, torch.arange(draft_vocab))
    counts = slot_counts(source, settings.num_steps)
    lead(ranks, network, teacher, source, settings, counts, None)
    trainer = Trainer(network, teacher, source, settings, Path(told["out"]), ranks=ranks, counts=counts)
    ends = []

    def stop() -> bool:
        ends.append(time.monotonic())
        return trainer.step >= told["steps"]

    trainer.run(stop)
    bits = sum(int(t.view(torch.int32).sum()) for t in trainer.optimizer.tensors(moments=False))
    milliseconds = (ends[-1] - ends[WARM_STEPS]) / (len(ends) - 1 - WARM_STEPS) * 1e3
    losses = [row["loss"] for row in read_metrics(Path(told["out"]))]
    Path(told["out"], "found.json").write_text(json.dumps({"ms": milliseconds, "losses": losses, "bits": bits}))


def run(size: str, processes: int, options: argparse.Namespace) -> dict:
    """A training on so many processes. Returns what rank 0 found."""
    with tempfile.TemporaryDirectory() as out:
        told = {"size": size, "processes": processes, "device": options.device, "out": out, "steps": options.steps}
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", __file__]
        subprocess.run([*command, "--told", json.dumps(told)], check=True, env={**os.environ, "OMP_NUM_THREADS": "4"})
        return json.loads(Path(out, "found.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["smollm2", "llama8b"])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--told", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.told:
        rank(options.told)
        sys.stdout.flush()
        os._exit(0)
    for size in options.sizes:
        one, many, again = (run(size, count, options) for count in (1, options.processes, options.processes))
        apart = max(abs(a - b) / abs(b) for a, b in zip(many["losses"], one["losses"], strict=True))
        print(
            f"{size}: {one['ms']:.1f} ms a step by one process, {many['ms']:.1f} by {options.processes} "
            f"({one['ms'] / many['ms']:.2f} times); losses {one['losses'][0]:.4f} .. {one['losses'][-1]:.4f}, apart "
            f"{apart:.1e}; bits again the same: {many['bits'] == again['bits']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
