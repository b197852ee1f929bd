"""Checks of a draft's tensors where they cross a file: names and shapes (F8), the draft vocabulary (F9).

Other engines skip what they do not know and leave what is missing at its first value, without a word; the server is
healthy and accepts nothing. So both are errors here, at conversion and at load.
"""

import difflib
from collections.abc import Collection, Mapping

import torch

from slipstream.engine.errors import SlipstreamError
from slipstream.engine.tensor_files import check_finite

# Offsets of a sorted choice repeat wherever two neighbouring ids are chosen; target ids never repeat. A d2t with so
# many entries and no repeat holds target ids, even where offsets of that size would be possible.
_ABSOLUTE_ENTRIES = 512


def check_names_and_shapes(
    found: Mapping[str, torch.Size | tuple[int, ...]],
    needed: Mapping[str, torch.Size | tuple[int, ...]],
    *,
    where: str,
    optional: Collection[str] = (),
    skip: Collection[str] = (),
) -> None:
    """Every tensor found is needed, every tensor needed is found, in its shape.

    Args:
        found, needed: tensor name -> shape.
        where: what was read or written, for the error.
        optional: names that may be missing.
        skip: faults whose checks are off.

    Raises SlipstreamError (F8) that lists every misnamed, missing, extra and misshaped tensor.
    """
    missing = sorted(set(needed) - set(found) - set(optional))
    extra = sorted(set(found) - set(needed))
    lines = []
    for name in list(extra):
        # The nearest name is a proposal only if its shape fits; otherwise the two are reported apart.
        same_shape = [m for m in missing if tuple(needed[m]) == tuple(found[name])]
        nearest = difflib.get_close_matches(name, same_shape, n=1, cutoff=0.6)
        if nearest:
            lines.append(f"misnamed: {name} {list(found[name])}, nearest is {nearest[0]}")
            missing.remove(nearest[0])
            extra.remove(name)
    lines += [f"missing: {name} {list(needed[name])}" for name in missing]
    lines += [f"extra: {name} {list(found[name])}" for name in extra]
    lines += [
        f"misshaped: {name} is {list(found[name])}, the config says {list(needed[name])}"
        for name in sorted(set(found) & set(needed))
        if tuple(found[name]) != tuple(needed[name])
    ]
    if lines and "F8" not in skip:
        raise SlipstreamError(
            f"{where} and the draft network differ in {len(lines)} tensors:\n    " + "\n    ".join(lines),
            expected="every tensor used, every parameter loaded",
            do="rename or convert the tensors, or restore the config.json that was written with them",
            fault="F8",
        )


def check_numbers(tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Raises SlipstreamError (F8) for a weight of a dtype that no draft has, or that holds a number that is not finite.

    Args:
        tensors: by file name; `d2t` and `t2d` are left to `check_vocabulary`.
        where: what was read or written, for the error.
    """
    weights = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    for name, tensor in weights.items():
        if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise SlipstreamError(
                f"{where}: {name} is {tensor.dtype}",
                expected="weights in bfloat16, float16 or float32: a draft that is not quantized",
                do="convert the training checkpoint again",
                fault="F8",
            )
    check_finite({f"{where}: {name}": tensor for name, tensor in weights.items()})


def check_vocabulary(
    tensors: Mapping[str, torch.Tensor],
    vocab_size: int,
    draft_vocab_size: int,
    *,
    where: str,
    skip: Collection[str] = (),
) -> None:
    """A reduced draft vocabulary comes with its own head and a d2t of offsets; t2d, where present, says the same.

    Args:
        tensors: by file name; `lm_head.weight`, `d2t` [Vd] and `t2d` [V] are looked at.
        vocab_size, draft_vocab_size: V and Vd.
        where: what was read or written, for the error.
        skip: faults whose checks are off.

    Raises SlipstreamError (F9).
    """
    if "F9" in skip:
        return
    reduced = draft_vocab_size < vocab_size
    for name, silent in (
        ("lm_head.weight", f"the first {draft_vocab_size} rows of the target's head"),
        ("d2t", f"target ids 0..{draft_vocab_size - 1}"),
    ):
        if reduced and name not in tensors:
            raise SlipstreamError(
                f"{where} has no {name}, and a draft vocabulary of {draft_vocab_size} of {vocab_size} tokens",
                expected=f"its own {name}: other engines would silently take {silent}",
                do="convert the training checkpoint again",
                fault="F9",
            )
    if "d2t" in tensors:
        _check_offsets(tensors["d2t"], tensors.get("t2d"), vocab_size, draft_vocab_size, where)


def _check_offsets(d2t: torch.Tensor, t2d: torch.Tensor | None, vocab_size: int, draft_size: int, where: str) -> None:
    """d2t [Vd] are offsets to rising ids within the vocabulary, those that t2d [V] marks."""
    if d2t.dtype.is_floating_point or tuple(d2t.shape) != (draft_size,):
        _refuse(where, f"d2t is {d2t.dtype} {list(d2t.shape)}", f"integers [{draft_size}]")
    marked = None
    if t2d is not None:
        if tuple(t2d.shape) != (vocab_size,):
            _refuse(where, f"t2d is {list(t2d.shape)}", f"[{vocab_size}], one mark a target token")
        marked = t2d.bool().nonzero().squeeze(1)  # [V] -> [marks]
    d2t = d2t.long()
    ids = d2t + torch.arange(draft_size)  # [Vd]
    rising = bool((ids[1:] > ids[:-1]).all())
    inside = bool(((ids >= 0) & (ids < vocab_size)).all())
    agrees = marked is None or torch.equal(ids, marked)
    repeats = draft_size == 1 or bool((d2t[1:] <= d2t[:-1]).any())
    absolute = not repeats and bool(((d2t >= 0) & (d2t < vocab_size)).all())
    if marked is not None:
        absolute = absolute and torch.equal(d2t, marked) and not agrees
    elif inside:
        absolute = absolute and draft_size >= _ABSOLUTE_ENTRIES
    if absolute:
        _refuse(
            where,
            f"d2t holds target ids (absolute: {_first(d2t)}), which would be read as offsets to {_first(ids)}",
            f"offsets, target id minus draft id: {_first(d2t - torch.arange(draft_size))}",
        )
    if not inside:
        bad = int(((ids < 0) | (ids >= vocab_size)).sum())
        found = f"d2t maps {bad} draft tokens outside the vocabulary (to {int(ids.min())}..{int(ids.max())})"
        _refuse(where, found, f"target ids 0..{vocab_size - 1}")
    if not rising:
        at = int((ids[1:] <= ids[:-1]).nonzero()[0])
        _refuse(
            where,
            f"d2t maps draft tokens {at} and {at + 1} to target tokens {int(ids[at])} and {int(ids[at + 1])}",
            "strictly rising target ids: two draft tokens for one target token, or a shuffled map, is a damaged d2t",
        )
    if not agrees:
        only = len(set(ids.tolist()) ^ set(marked.tolist())) if marked is not None else 0
        _refuse(where, f"d2t and t2d disagree about {only} target tokens", "the same choice of tokens in both")


def _first(values: torch.Tensor) -> str:
    return ", ".join(str(int(v)) for v in values[:4]) + (", ..." if len(values) > 4 else "")


def _refuse(where: str, found: str, expected: str) -> None:
    raise SlipstreamError(
        f"{where}: {found}", expected=expected, do="convert the training checkpoint again", fault="F9"
    )


def out_of_vocabulary_share(counts: torch.Tensor, d2t: torch.Tensor) -> float:
    """Share of counted tokens that the draft cannot propose: counts [V] by target token (not all 0), d2t [Vd]."""
    ids = d2t + torch.arange(len(d2t))
    return 1.0 - int(counts[ids].sum()) / int(counts.sum())
