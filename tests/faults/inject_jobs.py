"""What the ranks of a faulty engine run together, for tests/engine/rank_pool.py: results are pickled."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from slipstream.engine.inject import inject
from slipstream.engine.injection import parse_injections
from slipstream.engine.serving.trace_file import pack_trace
from slipstream.engine.tensor_parallel import TensorParallel

JOBS = Path(__file__).parents[1] / "engine" / "parallel_jobs.py"


def traced(parallel: TensorParallel, case: dict[str, Any], faults: tuple[str, ...]) -> list[bytes]:
    """Traces of all prompts by an engine of `case` (fields of parallel_jobs.Case) with these faults, packed."""
    jobs = _load(JOBS)
    made = jobs.Case(**case)
    engine = jobs.make_engine(parallel, made)
    inject(engine, parse_injections(faults))
    answers = engine.generate(made.prompts, made.params, trace=True)
    return [pack_trace(answer.trace) for answer in answers]


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("slipstream_tests_parallel_jobs_of_faults", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
