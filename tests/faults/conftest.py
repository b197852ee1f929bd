"""What the tests of the faults share: a finished tiny pipeline to put faults into."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slipstream.configs.schema import Deployment
from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts.eagle3.checkpoint import load_draft
from slipstream.engine.drafts.eagle3.proposer import Eagle3Proposer
from slipstream.engine.engine import Engine
from slipstream.engine.inject import inject
from slipstream.engine.injection import parse_injection, parse_injections
from slipstream.engine.loader import load_target
from slipstream.engine.sampling_params import SamplingParams
from slipstream.tasks import convert, extract, parity, train
from slipstream.tasks.parity_findings import ParityFindings, ParityPrompt, examine
from slipstream.tasks.parity_target import TargetReference
from slipstream.tasks.stage import StageContext, run_stage

NUM_STEPS = 3


@dataclass(frozen=True)
class ServedPipeline:
    """A tiny target and its trained draft, with the deployment that serves them as a file."""

    workdir: Path
    deployment: Deployment
    config: Path
    model_dir: Path
    context: Callable[..., StageContext]

    def compare(self, folder: Path, *faults: str, ranks: int = 1) -> ParityFindings:
        """Parity's findings through the served path, with these faults put into its server of so many ranks."""
        texts = tuple(str(parse_injection(fault)) for fault in faults)
        server = self.deployment.server.model_copy(update={"tensor_parallel_size": ranks})
        deployment = self.deployment.model_copy(update={"server": server})
        return parity.compare_served(self.context(parity.injected_stage(()), folder, deployment), texts)

    def failures(self, findings: ParityFindings, *skip: str) -> list[str]:
        """What is wrong by the deployment's gates; skip: checks that are off."""
        gates = self.deployment.gates
        return findings.failures(
            max_slot_share=gates.max_slot_error,
            max_argmax_difference=gates.max_argmax_difference,
            max_tau_gap=gates.max_tau_gap,
            skip=skip,
        )


@pytest.fixture(scope="session")
def served_pipeline(
    pipeline: ModuleType, chats: ModuleType, tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> ServedPipeline:
    """Everything that parity reads, once for all faults that it catches."""
    root = tmp_path_factory.mktemp("served-pipeline")
    prompts = chats.write_prompts(root / "prompts.jsonl", {f"p{i}": [f"word {i} and more"] for i in range(2)})
    changes: dict[str, dict[str, Any]] = {
        "speculation": {"num_steps": NUM_STEPS},
        "host": {"threads": 1},
        "benchmark": {"prompts": str(prompts), "num_prompts": 2, "max_new_tokens": 24},
    }
    made = pipeline.make_pipeline(root, chats, tiny, **changes)
    for stage in (extract.STAGE, train.STAGE, convert.STAGE):
        run_stage(stage, made.deployment, made.workdir)
    config = root / "deployment.yaml"
    config.write_text(json.dumps(made.deployment.model_dump(mode="json")))  # JSON is YAML
    return ServedPipeline(made.workdir, made.deployment, config, made.model_dir, made.context)


@pytest.fixture(scope="session")
def clean_findings(served_pipeline: ServedPipeline, tmp_path_factory: pytest.TempPathFactory) -> ParityFindings:
    """Parity of a server without any fault."""
    return served_pipeline.compare(tmp_path_factory.mktemp("clean"))


@pytest.fixture(scope="session")
def examined(served_pipeline: ServedPipeline) -> Callable[..., ParityFindings]:
    """Faults -> parity's findings of an engine in this process that has them: quick, and no server."""
    draft_dir, slots = served_pipeline.workdir / "convert" / "draft", served_pipeline.deployment.capture.slots
    assert slots != "auto"
    reference = TargetReference(served_pipeline.model_dir)
    prompts = [ParityPrompt(f"p{i}", "validation", list(range(9 + i, 30 + 2 * i)), 24) for i in range(3)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    config = EngineConfig(num_steps=NUM_STEPS, max_context_tokens=128, dtype="float32")

    def run(*faults: str) -> ParityFindings:
        served, right = (load_target(served_pipeline.model_dir, "float32") for _ in range(2))
        engine = Engine(served, config, Eagle3Proposer(load_draft(draft_dir), NUM_STEPS), slots)
        inject(engine, parse_injections(faults))
        made = engine.generate([p.token_ids for p in prompts], params, trace=True)
        traces = [completion.trace for completion in made if completion.trace is not None]
        return examine(prompts, traces, right, reference, {"export": load_draft(draft_dir)}, slots, NUM_STEPS)

    return run
