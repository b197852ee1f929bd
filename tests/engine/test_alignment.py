"""The shift between tokens and features, checked on a sequence whose answer can be read off by eye."""

import torch

from slipstream.engine.alignment import draft_tokens, slot_mask, teacher_index

# position      0  1  2  3  4  5  6  7
# role          p  p  p  a  a  a  e  p      (p prompt, a assistant, e end token: still the assistant's)
LOSS_MASK = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0], dtype=torch.bool)


def slots(step: int) -> list[int]:
    return slot_mask(LOSS_MASK, step).nonzero().flatten().tolist()


def test_first_supervised_slot_is_the_last_prompt_position():
    # Slot 2 embeds x_3, the target's own first token, and predicts x_4: the earliest draft that serving asks for.
    assert slots(1) == [2, 3, 4]


def test_end_token_is_a_label_and_nothing_after_it_is():
    # Slot 4 embeds x_5 and predicts the end token x_6; slot 5 would predict x_7, which belongs to the next prompt.
    assert 4 in slots(1)
    assert 5 not in slots(1)


def test_later_steps_lose_slots_at_the_end_only():
    assert slots(2) == [2, 3]
    assert slots(3) == [2]
    assert slots(4) == []


def test_slots_never_span_two_answers():
    two_turns = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
    assert slot_mask(two_turns, 1).nonzero().flatten().tolist() == [0, 4, 5]
    assert slot_mask(two_turns, 2).nonzero().flatten().tolist() == [4]


def test_unshifted_mask_would_supervise_other_slots():
    # What trainers that forget the shift do: F10.
    assert LOSS_MASK.nonzero().flatten().tolist() != slots(1)


def test_tokens_and_teacher_move_on_with_the_step():
    tokens = torch.arange(8)
    for step in (1, 2, 3):
        for slot in slots(step):
            assert draft_tokens(tokens, step)[slot] == slot + step
            assert teacher_index(slot, step) == slot + step


def test_mask_is_batched_and_short_sequences_are_empty():
    batch = torch.stack([LOSS_MASK, LOSS_MASK.flip(0)])
    assert torch.equal(slot_mask(batch, 1)[0], slot_mask(LOSS_MASK, 1))
    assert not slot_mask(torch.ones(2, dtype=torch.bool), 1).any()
