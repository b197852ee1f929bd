"""Many sequences in one pass: the bits of one at a time, whatever stands beside them."""

import pytest
import torch

from slipstream.engine.batch_capture import BatchCapture
from slipstream.engine.runner import capture_states

SLOTS = (0, 2, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_one_sequence_at_a_time(tiny, tmp_path, dtype):
    target = tiny.tiny_target(tmp_path, dtype=dtype)
    sequences = [tiny.prompts(1, low=n, high=n)[0] for n in (70, 3, 41, 64, 20)]
    capture = BatchCapture(target, SLOTS, max_rows=160, longest=70)
    groups = list(capture.groups([len(ids) for ids in sequences]))
    assert [i for group in groups for i in group] == list(range(5))
    assert 1 < len(groups) < 5
    for group in [*groups, groups[0]]:  # the first group again, over a cache that others have written to
        for index, (states, teacher) in zip(group, capture([sequences[i] for i in group]), strict=True):
            alone, last = capture_states(target, sequences[index], SLOTS, prefill_chunk_tokens=32)
            assert torch.equal(teacher, last)
            assert states.keys() == alone.keys()
            assert all(torch.equal(states[name], alone[name]) for name in alone)


def test_groups_hold_as_much_as_fits(tiny, tmp_path):
    capture = BatchCapture(tiny.tiny_target(tmp_path), SLOTS, max_rows=64, longest=100)
    assert capture.max_rows == 112  # the longest sequence, in whole blocks
    assert list(capture.groups([100, 5, 17, 16, 33, 1])) == [[0], [1, 2, 3], [4, 5]]
    assert list(capture.groups([])) == []
    with pytest.raises(ValueError, match="8 sequences of up to 16 rows: more than 112"):
        capture([[1, 2]] * 8)
