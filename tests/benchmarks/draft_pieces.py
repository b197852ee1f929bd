"""A draft directory as small files, and back: for machines that only small files leave, or that know another import.

    python -P tests/benchmarks/draft_pieces.py pack DRAFT OUT              DRAFT -> OUT/draft.000, ...
    python -P tests/benchmarks/draft_pieces.py join OUT DRAFT --target T   and back, with T's embedding
    python -P tests/benchmarks/draft_pieces.py adopt DRAFT INTO --target T  a copy whose record names T

The embedding is left out, for it is the target's (stage convert proves that), the rest is compressed. `join` and
`adopt` write the identity of T into the record: the same weights, imported by another release of transformers, have
another config.json, and a server refuses a draft that was made for another target. Whether they are the same weights is
for the one who calls it to know; where they are not, acceptance falls and nothing else.
"""

import argparse
import io
import json
import shutil
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save

from slipstream.engine.drafts.eagle3.checkpoint import WEIGHTS
from slipstream.engine.drafts.eagle3.hf_config import RECORD
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.model_config import ModelConfig
from slipstream.engine.training.init import TargetWeights

PIECE_BYTES = 15 << 20
EMBEDDING = "embed_tokens.weight"


def pack(draft: Path, out: Path) -> list[Path]:
    """Writes `draft` without its embedding as out/draft.000, ... Returns the pieces."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = load_file(draft / WEIGHTS)
    tensors.pop(EMBEDDING, None)
    files = {path.name: path.read_bytes() for path in draft.iterdir() if path.suffix == ".json"}
    files[WEIGHTS] = save(tensors, metadata={"format": "pt"})
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    data, pieces = packed.getvalue(), []
    for number, start in enumerate(range(0, len(data), PIECE_BYTES)):
        pieces.append(out / f"draft.{number:03}")
        pieces[-1].write_bytes(data[start : start + PIECE_BYTES])
    return pieces


def join(pieces: Path, draft: Path, target: Path) -> None:
    """Makes the draft directory that `pack` made pieces of, for the target of directory `target`."""
    data = b"".join(path.read_bytes() for path in sorted(pieces.glob("draft.[0-9]*")))
    draft.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        archive.extractall(draft, filter="data")
    tensors = load_file(draft / WEIGHTS)
    if EMBEDDING not in tensors:
        model = ModelConfig.from_dir(target)
        tensors[EMBEDDING] = TargetWeights.from_dir(target, model.num_layers).embedding.to(tensors["fc.weight"].dtype)
        (draft / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
    record(draft, target)


def adopt(draft: Path, into: Path, target: Path) -> None:
    """Copies a draft directory, with the identity of the target of directory `target` in its record."""
    if not (draft / WEIGHTS).is_file():
        sys.exit(f"no draft in {draft}: {WEIGHTS} is not there; carry it over, or train one")
    into.mkdir(parents=True, exist_ok=True)
    for name in (WEIGHTS, *(path.name for path in draft.glob("*.json"))):
        shutil.copyfile(draft / name, into / name)
    record(into, target)


def record(draft: Path, target: Path) -> None:
    """Writes the identity of `target` into the draft's record."""
    value = json.loads((draft / RECORD).read_text())
    before, value["identity"] = value["identity"], TargetIdentity.from_dir(target).to_dict()
    (draft / RECORD).write_text(json.dumps(value, indent=2) + "\n")
    changed = [name for name, digest in before.items() if digest != value["identity"][name]]
    print(f"{draft}: made for {target}" + (f"; other than where it was trained: {', '.join(changed)}" * bool(changed)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pack", "join", "adopt"))
    parser.add_argument("source", type=Path)
    parser.add_argument("into", type=Path)
    parser.add_argument("--target", type=Path, help="Hugging Face directory")
    args = parser.parse_args(arguments)
    if args.what == "pack":
        print(" ".join(f"{path.name} {path.stat().st_size:,}" for path in pack(args.source, args.into)))
    elif args.target is None:
        parser.error(f"{args.what} needs --target")
    else:
        (join if args.what == "join" else adopt)(args.source, args.into, args.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
