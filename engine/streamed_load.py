"""Loads a large target layer by layer: a rank reads its own part of each tensor, and a layer is whole before the next.

What the files hold is compared with what the model wants from their headers alone, so that a checkpoint that does not
fit is refused before a layer takes memory. Then a layer gets its memory, is read, checked and put into the order of
the kernels; memory for more than one layer's form on disk is never taken.
"""

import re
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from safetensors import safe_open
from torch import nn

from slipstream.engine.deepseek_config import WRAPPER
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.layers.latent_attention import PLAIN
from slipstream.engine.layers.quantized import Reader, check_scales, quantise, scales_fit
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.models.deepseek import DeepseekModel
from slipstream.engine.quantization import Quantization
from slipstream.engine.tensor_files import all_true, are_finite, check_finite, differ, parameter_shards
from slipstream.engine.tensor_parallel import Shard, TensorParallel
from slipstream.kernels.all_gather import all_gather

_SECONDS_BETWEEN_LINES = 2.0
_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.int64: "I64",
}


@dataclass(frozen=True)
class CheckpointNames:
    """How a checkpoint spells the names of a model.

    Args:
        prefix: before every name.
        skipped: what a tensor is for that is passed over -> an expression for its whole name.
    """

    prefix: str = ""
    skipped: Mapping[str, re.Pattern[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ModelConfig) -> "CheckpointNames":
        """By architecture."""
        prefix = "language_model." if config.architecture == WRAPPER else ""
        skipped = {}
        if prefix:
            skipped["vision (text only)"] = re.compile(r"(vision_tower|mm_projector)\..+")
        if config.further_layers:
            last = config.num_layers + config.further_layers
            numbers = "|".join(str(number) for number in range(config.num_layers, last))
            what = "prediction of further tokens (a draft takes its place)"
            skipped[what] = re.compile(rf"{re.escape(prefix)}model\.layers\.({numbers})\..+")
        rope = rf"{re.escape(prefix)}model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
        skipped["rope frequencies (they follow from the config)"] = re.compile(rope)
        return cls(prefix, skipped)

    def name(self, path: str) -> str:
        """A path in the model -> its name in the checkpoint."""
        return self.prefix + (path if path.partition(".")[0] == "lm_head" else f"model.{path}")


@dataclass(frozen=True)
class LoadReport:
    """What loading took.

    Args:
        read_bytes: of this rank's parts of the tensors, as they lie in the files.
        seconds: wall time of reading, checking and arranging.
        peak_host_bytes: most memory that the process has ever had resident, mapped pages of the files included.
        skipped: what tensors were for that were passed over -> how many.
    """

    read_bytes: int
    seconds: float
    peak_host_bytes: int
    skipped: Mapping[str, int]

    def __str__(self) -> str:
        passed = "".join(f"; passed over: {count} tensors, {what}" for what, count in self.skipped.items())
        return (
            f"read {self.read_bytes / 1e9:.3f} GB in {self.seconds:.1f} s ({self.read_bytes / 1e9 / self.seconds:.2f} "
            f"GB/s), peak host memory {self.peak_host_bytes / 2**30:.2f} GiB{passed}"
        )


@dataclass(frozen=True)
class Unit:
    """What is loaded in one go: a layer, or one of the modules around them.

    Args:
        path: in the model.
        module: made under `unallocated`.
        readers: of its INT4 weights; without memory until `on`.
        names: of the checkpoint.
    """

    path: str
    module: nn.Module
    readers: Sequence[Reader]
    names: CheckpointNames

    def shards(self) -> dict[str, Shard]:
        """Checkpoint name -> where it goes."""
        shards = self._parameters()
        for reader in self.readers:
            shards |= reader.shards()
        return shards

    def check(self) -> None:
        """Asks the device once whether every number that was read can be.

        Raises SlipstreamError that names weights that are not finite, or a scale that cannot be.
        """
        plain = {name: shard.view for name, shard in self._parameters().items()}
        if not all_true(are_finite(plain.values()) + scales_fit(self.readers)):
            check_finite(plain)
            check_scales(self.readers)

    def _parameters(self) -> dict[str, Shard]:
        paths = parameter_shards(self.module)
        return {self.names.name(".".join(filter(None, (self.path, below)))): paths[below] for below in paths}

    def on(self, device: torch.device | str) -> "Unit":
        """The same with memory there."""
        _allocate(self.module, device)
        return replace(self, readers=[reader.on(device) for reader in self.readers])

    def finish(self) -> None:
        """When the shards are filled: INT4 weights go to their layers. Raises SlipstreamError for one that is none."""
        for reader in self.readers:
            reader.finish()


def units_of(model: DeepseekModel, names: CheckpointNames, quantization: Quantization | None) -> list[Unit]:
    """In the order of loading. Raises SlipstreamError where a rank cannot hold its part of an INT4 weight."""
    _check_attention(model, names, quantization)
    units = []
    for path, module in _modules(model):

        def name(below: str, path: str = path) -> str:
            return names.name(".".join(filter(None, (path, below))))

        readers = [] if quantization is None else quantise(module, quantization, "meta", name)
        units.append(Unit(path, module, readers, names))
    return units


def _modules(model: DeepseekModel) -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{index}", layer) for index, layer in enumerate(child))
        else:
            yield name, child


def reports_of_ranks(report: LoadReport, parallel: TensorParallel) -> list[dict[str, float]]:
    """What loading took on every rank, in their order, for people and JSON. All ranks call it."""
    own = torch.tensor([report.read_bytes, round(report.seconds * 1000), report.peak_host_bytes])
    every = [own] if parallel.size == 1 else all_gather(own, [len(own)] * parallel.size, parallel.group)
    return [
        {"read_bytes": read, "seconds": ms / 1000, "peak_host_bytes": peak}
        for read, ms, peak in (t.tolist() for t in every)
    ]


def load_streamed(
    model: DeepseekModel,
    files: Mapping[str, Sequence[str]],
    names: CheckpointNames,
    quantization: Quantization | None,
    device: torch.device | str,
    progress: Callable[[str], None],
) -> None:
    """Fills a model that was made under `unallocated`, and leaves a `LoadReport` with it.

    Args:
        model: of this rank.
        files: path -> tensor names, from `tensor_files`.
        names: of the checkpoint.
        quantization: which layers have INT4 weights; None: none.
        device: where the weights go.
        progress: told now and then how far this rank is.

    Raises SlipstreamError that lists what is missing, left over, misshaped or of a dtype that cannot be; and for a
    weight that cannot be (a number that is not finite), before the layers behind it take memory.
    """
    began = time.perf_counter()
    units = units_of(model, names, quantization)
    expected = {name: shard for unit in units for name, shard in unit.shards().items()}
    places, skipped = _compare(files, expected, names.skipped)
    total, done, told = sum(_file_bytes(shard) for shard in expected.values()), 0, began
    for unit in units:
        ready = unit.on(device)
        done += _read(ready.shards(), places)
        ready.check()
        ready.finish()
        now = time.perf_counter()
        if now - told > _SECONDS_BETWEEN_LINES:
            told = now
            speed = done / 1e9 / (now - began)
            progress(f"loading the target: {unit.path}, {done / 1e9:.1f} of {total / 1e9:.1f} GB, {speed:.2f} GB/s")
    model.prepare()
    seconds, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    model.load_report = LoadReport(done, seconds, peak, skipped)
    progress(f"loading the target: {model.load_report}")


def _check_attention(model: DeepseekModel, names: CheckpointNames, quantization: Quantization | None) -> None:
    """Raises SlipstreamError where a weight of latent attention is INT4 that must be plain."""
    if quantization is None:
        return
    for index, _ in enumerate(model.layers):
        for part in PLAIN:
            name = names.name(f"layers.{index}.self_attn.{part}")
            if quantization.covers(name):
                raise SlipstreamError(
                    f"quantization_config says that {name} is INT4",
                    expected="it in the ignore list: this engine has no INT4 form of latent attention",
                    do="use a checkpoint with plain attention weights",
                )


def _compare(
    files: Mapping[str, Sequence[str]], expected: Mapping[str, Shard], skipped: Mapping[str, re.Pattern[str]]
) -> tuple[dict[str, str], dict[str, int]]:
    """From headers alone: (name -> its file, what was skipped -> how many). Raises SlipstreamError as said above."""
    places: dict[str, str] = {}
    passed: dict[str, int] = {}
    faults: list[str] = []
    for path, names in files.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                rule = next((what for what, pattern in skipped.items() if pattern.fullmatch(name)), None)
                if rule is not None:
                    passed[rule] = passed.get(rule, 0) + 1
                    continue
                found = file.get_slice(name)
                shape, dtype = list(found.get_shape()), found.get_dtype()
                shard = expected.get(name)
                if shard is None:
                    faults.append(f"not used: {name} {shape}")
                    continue
                places[name] = path
                if dtype not in (known := [_DTYPES[one] for one in shard.dtypes]):
                    faults.append(f"dtype: {name} is {dtype}, expected {' or '.join(known)}")
                elif shape != list(shard.shape):
                    faults.append(f"shape: {name} is {shape}, the config says {list(shard.shape)}")
    faults += [f"missing: {name} {list(expected[name].shape)}" for name in sorted(set(expected) - set(places))]
    if faults:
        raise differ(faults)
    return places, passed


def _allocate(unit: nn.Module, device: torch.device | str) -> None:
    """Memory for what was made without."""
    for module in unit.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                setattr(module, name, nn.Parameter(torch.empty_like(parameter, device=device)))


def _read(shards: Mapping[str, Shard], places: Mapping[str, str]) -> int:
    """Fills the shards; bytes that this rank took from the files, which are mapped: only its own pages are read."""
    by_file: dict[str, list[str]] = {}
    for name in shards:
        by_file.setdefault(places[name], []).append(name)
    count = 0
    for path, names in by_file.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                part = shards[name].take(file.get_tensor(name))
                shards[name].view.copy_(part)
                count += part.nbytes
    return count


def _file_bytes(shard: Shard) -> int:
    """About what a rank reads of a tensor: its part, in the first dtype that the file may have it in."""
    return shard.view.numel() * shard.dtypes[0].itemsize
