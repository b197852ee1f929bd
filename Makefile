# make demo      from a package to a benchmarked speculative server and back to a clean machine
# make test      all tests
# make incident  after make demo: the incident that this project exists for, found step by step in minutes
# make clean     stop what a demo left running, remove what was made here
#
# Both set up .venv first, when it is missing or pyproject.toml has changed. VENV=DIR uses an environment of your own;
# it is set up only if Slipstream is not installed there. PYTHON=python3.12 chooses the interpreter of a new one.

PYTHON ?= python3
CONFIG ?= configs/smollm2.yaml
# Plain "torch" would bring a CUDA build of gigabytes, where the index offers a CPU build of this version.
TORCH ?= torch==2.13.0

ifeq ($(origin VENV),undefined)
VENV := .venv
READY := $(VENV)/.ready-$(firstword $(shell sha256sum pyproject.toml))
else
READY := $(VENV)/bin/slipstream
endif

.PHONY: demo test incident triton bytecode clean

demo: $(READY)
	$(VENV)/bin/slipstream run $(CONFIG)

incident: $(READY)
	$(VENV)/bin/python -P -m slipstream.tests.e2e.incident

# Tests run in one process a core, four at most (each with its servers and ranks takes gigabytes). A file's tests stay
# together and in order: some go on where the one before ended, many share what is made once a file. Files come in
# collection order: by number of tests, the longest would come last. ARGS='-n 0 FILE' runs them in one process, where
# a debugger works. Tiny models gain nothing from a second thread, and lose much where test processes share the cores.
test: $(READY)
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

$(READY): | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-compile $(TORCH) --editable '.[dev]'
	$(MAKE) --no-print-directory triton
	$(MAKE) --no-print-directory bytecode
	rm -f $(VENV)/.ready-*
	touch $@

# A CUDA build of torch pins a Triton of its own, which no extra of ours may contradict; a CPU build brings none.
triton:
	$(VENV)/bin/python -c 'import triton' 2> /dev/null || [ "$$(uname -m)" != x86_64 ] || $(VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-compile triton==3.6.0

# Bytecode of what every start imports, also where PYTHONDONTWRITEBYTECODE is set: without it each process compiles torch
# anew, which doubles its start. All of site-packages (pip's own way) would take longer than it saves.
bytecode:
	env -u PYTHONDONTWRITEBYTECODE $(VENV)/bin/python -c 'import torch, torch.distributed, torch.testing, numpy, safetensors.torch, transformers.models.llama, transformers.models.auto, transformers.modeling_utils, prefect, prefect.artifacts, prefect.server.api.server, fastapi, uvicorn, httpx, openai, matplotlib.pyplot, torch.utils.tensorboard, typer, rich.table, pydantic_settings, prometheus_client, psutil, pytest, hypothesis, gguf, jinja2'

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 13) else "Slipstream needs Python 3.11 or 3.12, this is " + sys.version + ": make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

clean:
	if [ -x $(VENV)/bin/slipstream ] && [ -d runs ]; then $(VENV)/bin/slipstream clean $(CONFIG); fi
	rm -rf .venv runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
