"""The training checkpoint: one file, replaced atomically, from which a run goes on exactly.

It holds fp32 masters and AdamW's fp32 moments, whatever dtype the network computes in; what is not trained (embedding,
vocabulary map) in the network's own dtype; step, seconds, settings, the CPU's random state (training draws no numbers
on a GPU). Tensors of a GPU are read back to the CPU, and from there to wherever the run goes on.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.deepseek_config import Latent
from slipstream.engine.drafts.eagle3.config import Eagle3Config
from slipstream.engine.drafts.eagle3.network import Eagle3Network
from slipstream.engine.errors import SlipstreamError

FILE_NAME = "training.pt"
FORMAT = 1


def save_checkpoint(directory: Path, state: Mapping[str, Any]) -> Path:
    """Write `state` (tensors, numbers, strings, lists and dicts of them) and put it in the place of the last one."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE_NAME
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save({"format": FORMAT, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return path


def load_checkpoint(directory: Path) -> dict[str, Any] | None:
    """The last checkpoint, None where there is none.

    Raises SlipstreamError when the file cannot be read or has another format.
    """
    path = directory / FILE_NAME
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever the broken byte runs into
        raise SlipstreamError(
            f"{path} cannot be read: {error}",
            expected="a whole training checkpoint",
            do=f"delete {directory} and train again",
        ) from error
    if state.get("format") != FORMAT:
        raise SlipstreamError(
            f"{path} has format {state.get('format')}", expected=f"format {FORMAT}", do=f"delete {directory}"
        )
    return state


def load_network(directory: Path, dtype: torch.dtype | None = None) -> Eagle3Network:
    """The draft of the last checkpoint, in the dtype that it was trained in unless told otherwise.

    Raises SlipstreamError when there is no checkpoint, or its tensors are not those of its configuration.
    """
    state = load_checkpoint(directory)
    if state is None:
        raise SlipstreamError(
            f"no training checkpoint in {directory}", expected=f"a file {FILE_NAME}", do="run the train stage"
        )
    network = Eagle3Network(config_of(state["config"]), dtype or getattr(torch, state["settings"]["dtype"]))
    try:
        network.load_state_dict({**state["frozen"], **state["optimizer"]["masters"]})
    except RuntimeError as error:
        raise SlipstreamError(
            f"the checkpoint in {directory} does not fit its own configuration: {error}",
            expected="the tensors of the configuration beside them",
            do=f"delete {directory} and train again",
            fault="F8",
        ) from error
    return network


def config_of(fields: Mapping[str, Any]) -> Eagle3Config:
    """From `config_dict`'s values."""
    latent = fields.get("latent")
    own = {"slots": tuple(fields["slots"]), "latent": None if latent is None else Latent(**latent)}
    return Eagle3Config(**{**fields, **own})


def config_dict(config: Eagle3Config) -> dict[str, Any]:
    """The configuration as plain values."""
    fields = dataclasses.asdict(config)
    fields["slots"] = list(config.slots)
    fields["rope_scaling"] = dict(config.rope_scaling) if config.rope_scaling is not None else None
    if config.latent is None:
        del fields["latent"]
    return fields
