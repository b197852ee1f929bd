"""Accepted counts against a loop that reads like the definition."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels.accept import accept


def accepted_by_loop(draft: list[int], sampled: list[int], num_valid: int) -> int:
    for a in range(num_valid):
        if draft[a] != sampled[a]:
            return a
    return num_valid


@given(st.data(), st.integers(0, 8), st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_accept_is_the_leading_run(data: st.DataObject, num_steps: int, batch: int) -> None:
    token = st.integers(0, 1)  # so that runs of every length occur
    rows = range(batch)
    draft = [data.draw(st.lists(token, min_size=num_steps, max_size=num_steps)) for _ in rows]
    sampled = [data.draw(st.lists(token, min_size=num_steps + 1, max_size=num_steps + 1)) for _ in rows]
    num_valid = [data.draw(st.integers(0, num_steps)) for _ in rows]
    got = accept(
        torch.tensor(draft, dtype=torch.int64).view(batch, num_steps), torch.tensor(sampled), torch.tensor(num_valid)
    )
    assert got.tolist() == [accepted_by_loop(*row) for row in zip(draft, sampled, num_valid, strict=True)]
    assert got.dtype == torch.int64


def test_a_match_behind_a_miss_does_not_count() -> None:
    sampled = torch.tensor([[5, 6, 7, 8]] * 4)
    draft = torch.tensor([[5, 6, 7], [5, 0, 7], [0, 6, 7], [6, 7, 8]])
    assert accept(draft, sampled, torch.tensor([3, 3, 3, 3])).tolist() == [3, 1, 0, 0]
    assert accept(draft, sampled, torch.tensor([2, 1, 0, 3])).tolist() == [2, 1, 0, 0]
