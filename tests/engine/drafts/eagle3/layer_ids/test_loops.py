"""SGLang's table against a twin of its models' own loops, written from their sources."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.drafts.eagle3.layer_ids import Engine, Family, reading
from slipstream.engine.engine_versions import READ, READ_IN_PART, Version

SGLANG = Engine.SGLANG
LLAMA, QWEN2, QWEN3, QWEN3_MOE = Family.LLAMA, Family.QWEN2, Family.QWEN3, Family.QWEN3_MOE
GPT_OSS, DEEPSEEK = Family.GPT_OSS, Family.DEEPSEEK
ALL = sorted((*READ[SGLANG], *READ_IN_PART[SGLANG]), key=Version.parse)  # twelve releases
UP_TO_0512, SINCE_0514 = ALL[:4], ALL[5:]


class Overwritten(list[int]):
    """A state that is a buffer: `[slot]`, and later layers add into it."""


def forward(points: Sequence[int], layers: int, style: str) -> list[int]:
    """The slots that come out of a forward pass which captures at `points`, as the engines' models are written.

    Args:
        points: what the model keeps of the config's ids.
        style: add (hidden + residual on entering a layer), plain (the same, but the bare hidden state without a
            residual), copy (a copy after the layer's first norm), flag (the same, flagged on the layer itself), edges
            (before the first and behind each layer), edges-copy (the same, copied).
    """
    hidden, residual = Overwritten([0]), None
    flagged = set()
    if style == "flag":
        for point in points:
            flagged.add(range(layers)[point])  # a layer's attribute is set: an index beyond the last one raises
    out: list[list[int]] = []
    if style.startswith("edges") and 0 in points:
        out.append(list(hidden) if style == "edges-copy" else hidden)
    for i in range(layers):
        if style == "add" and i in points:
            if residual is None:
                raise TypeError("hidden + None")
            out.append([hidden[0]])
        elif style == "plain" and i in points:
            out.append(hidden if residual is None else [hidden[0]])
        elif (style == "copy" and i in points) or (style == "flag" and i in flagged):
            out.append([hidden[0]])
        if residual is None:
            residual = hidden  # from here on the buffer is the residual stream
        residual[0] = i + 1
        hidden = residual
        if style.startswith("edges") and i + 1 in points:
            out.append([i + 1])
    return [state[0] for state in out]


# How the model files are written, by version. Read in the wheels, not derived from our table.
LOOPS = [
    (LLAMA, ALL[:10], "add", "plus"),
    (LLAMA, ALL[10:], "copy", "plus"),
    (QWEN2, ALL[:9], "plain", "plus"),
    (QWEN3, ALL[:9], "plain", "plus"),
    (QWEN2, ALL[9:], "copy", "plus"),
    (QWEN3, ALL[9:], "copy", "plus"),
    (QWEN3_MOE, ALL, "flag", "plus"),
    (GPT_OSS, ALL[:7], "add", "plus"),
    (GPT_OSS, ALL[7:9], "edges", "unless-n"),
    (GPT_OSS, ALL[9:], "edges-copy", "unless-n"),
    (DEEPSEEK, UP_TO_0512, "add", "plus"),
    (DEEPSEEK, ("0.5.13.post1",), "add", "first"),
    (DEEPSEEK, SINCE_0514, "copy", "first"),
]


def kept(ids: Sequence[int], layers: int, how: str) -> list[int]:
    if how == "plus" or (how == "first" and ids[0] == 1) or (how == "unless-n" and max(ids) != layers):
        return [i + 1 for i in ids]
    return list(ids)


@given(data=st.data())
def test_as_the_models_are_written(data):
    family, versions, style, how = data.draw(st.sampled_from(LOOPS))
    version = data.draw(st.sampled_from(versions))
    layers = data.draw(st.integers(6, 12))
    ids = data.draw(st.lists(st.integers(-1, layers), min_size=1, max_size=4))
    captured = reading(SGLANG, version, family).capture(None, ids, layers)
    try:
        came_out = forward(kept(ids, layers, how), layers, style)
    except (TypeError, IndexError):
        assert captured.problems
        return
    if captured.problems:  # too few states, or an overwritten one: never what was named, one by one
        assert came_out != sorted(reading(SGLANG, version, family).slots(ids, layers))
    else:
        assert tuple(came_out) == captured.slots
        assert len(came_out) == len(ids)
