"""A target, a deployment file, and what earlier runs leave in a working directory, by the code that writes it."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from slipstream.engine.capture import CapturePlan
from slipstream.engine.drafts.eagle3.config import Eagle3Config
from slipstream.engine.drafts.eagle3.hf_config import DraftRecord, write_configs
from slipstream.engine.drafts.eagle3.layer_ids import Family
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.store_manifest import StoreManifest, StoreSpec
from slipstream.flows.plan import Plan, make_plan
from slipstream.tasks.stage import Stage, run_stage

LAYERS = 32  # as many as in the incident: `auto` is (2, 16, 29)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
WEIGHTS = (4).to_bytes(8, "little") + b"{}  "  # a whole safetensors file without a tensor


class World:
    """A directory with a target (its weights are only a header), a deployment file and a working directory.

    Args:
        root: an empty directory.
        values: section -> key -> value, written into the deployment file over the defaults.
    """

    def __init__(self, root: Path, values: Mapping[str, Mapping[str, object]] | None = None) -> None:
        self.root, self.target, self.workdir = root, root / "target", root / "work"
        self.target.mkdir()
        (self.target / "config.json").write_text(json.dumps(CONFIG))
        (self.target / "model.safetensors").write_bytes(WEIGHTS)
        (self.target / "tokenizer.json").write_text("{}")
        (self.target / "chat_template.jinja").write_text("{{ messages }}")
        self.file = root / "deployment.yaml"
        self.values: dict[str, dict[str, object]] = {
            "target": {"source": str(self.target)},
            "host": {"workdir": str(self.workdir), "cache_dir": str(root / "cache")},
        }
        self.write(values or {})

    def write(self, values: Mapping[str, Mapping[str, object]]) -> None:
        """Writes the deployment file, `values` over what it said before. One key a line, in JSON's spelling."""
        for section, keys in values.items():
            self.values.setdefault(section, {}).update(keys)
        lines = []
        for section, keys in self.values.items():
            lines += [f"{section}:", *(f"  {key}: {json.dumps(value)}" for key, value in keys.items())]
        self.file.write_text("\n".join(lines) + "\n")

    def line(self, key: str) -> str:
        """FILE:LINE of a dotted key, as errors name it."""
        section, field = key.split(".")
        lines = self.file.read_text().splitlines()
        start = lines.index(f"{section}:")
        number = next(i for i in range(start, len(lines)) if lines[i].startswith(f"  {field}:"))
        return f"{self.file}:{number + 1}"

    def plan(self, *overrides: str, skip: tuple[str, ...] = (), stages: tuple[Stage, ...] = ()) -> Plan:
        """Plans the deployment file; the machine's environment plays no part. Without stages nothing is made again."""
        return make_plan(self.file, overrides, environ={}, skip=skip, stages=stages)

    def words(self, *overrides: str, skip: tuple[str, ...] = ()) -> list[str]:
        """The contradictions as texts."""
        return [str(finding) for finding in self.plan(*overrides, skip=skip).errors]

    def resolve(self) -> None:
        """What the resolve stage leaves, by way of `run_stage`."""
        stage = Stage("resolve", 1, (), ("target",), lambda context: {"model_dir": str(self.target)})
        run_stage(stage, self.plan().loaded.deployment, self.workdir)

    def store(self, slots: tuple[int, ...]) -> Path:
        """The manifest of a hidden-state store of the target as it is now."""
        path = self.workdir / "extract" / "store"
        path.mkdir(parents=True, exist_ok=True)
        identity = TargetIdentity.from_dir(self.target)
        spec = StoreSpec.from_plan(CapturePlan(slots, LAYERS), identity, CONFIG["hidden_size"], torch.bfloat16)
        StoreManifest(spec, complete=True).save(path)
        return path

    def draft(self, slots: tuple[int, ...], max_position: int = 1024) -> Path:
        """The two JSON files of a converted draft for the target as it is now."""
        path = self.workdir / "convert" / "draft"
        path.mkdir(parents=True, exist_ok=True)
        config = Eagle3Config(
            hidden_size=64,
            intermediate_size=128,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            rope_scaling=None,
            max_position=max_position,
            vocab_size=1000,
            draft_vocab_size=500,
            target_hidden_size=64,
            slots=slots,
            target_num_layers=LAYERS,
        )
        record = DraftRecord(TargetIdentity.from_dir(self.target), Family.LLAMA, "0" * 64)
        write_configs(path, config, record, "bfloat16")
        return path
