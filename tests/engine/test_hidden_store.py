"""The hidden-state store: what is written is read back bit for bit, and nothing else is."""

import dataclasses
import json

import pytest
import torch

from slipstream.engine.alignment import slot_mask, teacher_index
from slipstream.engine.capture import CapturePlan
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.handover import TargetIdentity
from slipstream.engine.hidden_store import ConversationStates, HiddenStateStore, StoreWriter, first_teacher_position
from slipstream.engine.store_manifest import MANIFEST, StoreManifest, StoreSpec
from slipstream.tasks.derived import store_bytes_per_token

HIDDEN = 6
PLAN = CapturePlan((2, 4, 5), num_layers=8)
IDENTITY = TargetIdentity("a" * 64, "b" * 64, "c" * 64)
SPEC = StoreSpec.from_plan(PLAN, IDENTITY, HIDDEN, torch.bfloat16)


def conversation(index: int, *, prompt: int = 3, answer: int = 4, dtype: torch.dtype = torch.bfloat16):
    """(ConversationStates, the teacher of all positions)."""
    generator = torch.Generator().manual_seed(index)
    size = prompt + answer
    mask = torch.arange(size) >= prompt
    states = {n: torch.randn(size, HIDDEN, generator=generator).to(dtype) for n in (*PLAN.names, "teacher")}
    teacher = states.pop("teacher")
    ids = torch.randint(0, 50, (size,), generator=generator, dtype=torch.int32)
    split = "holdout" if index % 3 == 2 else "train"
    return ConversationStates.from_capture(f"c{index}", split, ids, mask, states, teacher), teacher


def write(directory, indices, **options) -> StoreWriter:
    writer = StoreWriter(directory, SPEC, **options)
    for index in indices:
        writer.add(conversation(index)[0])
    return writer


def test_reads_back_every_bit(tmp_path):
    write(tmp_path, range(5), shard_bytes=600).finish()
    store = HiddenStateStore(tmp_path, expect=SPEC)
    assert len(store.manifest.shards) > 1
    assert store.conversation_ids() == [f"c{i}" for i in range(5)]
    assert store.conversation_ids("holdout") == ["c2"]
    for index, read in enumerate(store):
        wrote, teacher = conversation(index)
        assert torch.equal(read.token_ids, wrote.token_ids)
        assert torch.equal(read.loss_mask, wrote.loss_mask)
        assert read.loss_mask.dtype == torch.bool
        assert list(read.slots) == ["slot_2", "slot_4", "slot_5"]
        assert all(torch.equal(read.slots[n], wrote.slots[n]) for n in PLAN.names)
        assert torch.equal(read.teacher, teacher[3:])
        assert read.split == wrote.split
    assert store.num_tokens() == 35
    assert store.num_supervised_tokens("train") == 16


@pytest.mark.parametrize("mask", ["0001111", "0011001111", "10", "0001", "0000", "11"])
def test_the_teacher_starts_where_the_first_supervised_slot_needs_it(mask):
    loss_mask = torch.tensor([c == "1" for c in mask])
    start = first_teacher_position(loss_mask)
    needed = [teacher_index(int(slot), step) for step in range(1, 8) for slot in slot_mask(loss_mask, step).nonzero()]
    assert start == min(needed, default=len(mask))


def test_bytes_per_token_as_computed(tmp_path):
    write(tmp_path, range(40)).finish()
    store = HiddenStateStore(tmp_path)
    after, before = store_bytes_per_token(3, HIDDEN, "bfloat16")  # as `plan` tells them
    assert (before, after) == (3 * HIDDEN * 2 + 5, 4 * HIDDEN * 2 + 5)
    payload = 40 * (3 * before + 4 * after)
    assert payload < store.num_bytes() < payload + 40 * 6 * 120  # a header entry a tensor
    assert store.bytes_per_token() == store.num_bytes() / (40 * 7)


def test_an_interrupted_extraction_goes_on(tmp_path):
    writer = write(tmp_path / "store", range(3), shard_bytes=1)  # a shard a conversation
    writer.add(conversation(3)[0])
    del writer
    (tmp_path / "store" / "states-00004.safetensors.partial").write_bytes(b"half")
    (tmp_path / "store" / "states-00007.safetensors").write_bytes(b"renamed, but not in the manifest")
    with pytest.raises(SlipstreamError, match="has not ended"):
        HiddenStateStore(tmp_path / "store")

    writer = StoreWriter(tmp_path / "store", SPEC, shard_bytes=1)
    assert sorted(p.name for p in (tmp_path / "store").iterdir()) == [
        MANIFEST,
        *(f"states-{i:05d}.safetensors" for i in range(4)),
    ]
    assert writer.has("c2", conversation(2)[0].token_ids)
    assert not writer.has("c4", conversation(4)[0].token_ids)
    for index in range(5):
        writer.add(conversation(index)[0])
    writer.finish()

    write(tmp_path / "at_once", range(5), shard_bytes=1).finish()
    assert (tmp_path / "store" / MANIFEST).read_bytes() == (tmp_path / "at_once" / MANIFEST).read_bytes()


def test_resume_drops_a_shard_cut_short_and_what_follows(tmp_path):
    write(tmp_path, range(4), shard_bytes=1)
    cut = tmp_path / "states-00001.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    writer = StoreWriter(tmp_path, SPEC, shard_bytes=1)
    assert list(writer.manifest.conversations) == ["c0"]
    for index in range(4):
        writer.add(conversation(index)[0])
    writer.finish()
    assert [s.conversation_id for s in HiddenStateStore(tmp_path)] == ["c0", "c1", "c2", "c3"]


def test_a_full_disk_leaves_the_store_as_it_was(tmp_path, monkeypatch):
    writer = write(tmp_path, range(2), shard_bytes=1)
    before = sorted(p.name for p in tmp_path.iterdir())

    def full(_fd):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            writer.add(conversation(2)[0])
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert list(StoreManifest.load(tmp_path).conversations) == ["c0", "c1"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("teacher_slot", "slot_7", ["teacher_slot slot_8", "teacher_slot slot_7"]),
        ("hidden_size", 7, ["hidden_size 6", "hidden_size 7"]),
        ("dtype", "float32", ["dtype bfloat16", "dtype float32"]),
        ("prenorm", False, ["prenorm True", "prenorm False"]),
    ],
)
def test_a_mismatched_manifest_is_refused_by_writer_and_reader(tmp_path, field, value, words):
    write(tmp_path, range(1)).finish()
    other = dataclasses.replace(SPEC, **{field: value})
    for open_it in (lambda: StoreWriter(tmp_path, other), lambda: HiddenStateStore(tmp_path, expect=other)):
        with pytest.raises(SlipstreamError) as caught:
            open_it()
        assert words[0] in caught.value.found
        assert words[1] in caught.value.expected


def test_every_differing_field_is_named_at_once(tmp_path):
    write(tmp_path, range(1)).finish()
    identity = dataclasses.replace(IDENTITY, tokenizer="d" * 64)
    other = dataclasses.replace(SPEC, slots=("slot_0", "slot_2", "slot_4"), identity=identity, hidden_size=9)
    with pytest.raises(SlipstreamError) as caught:
        HiddenStateStore(tmp_path, expect=other)
    found = caught.value.found
    assert "slots ['slot_2', 'slot_4', 'slot_5']" in found
    assert "tokenizer bbbbbbbbbbbb" in found
    assert "hidden_size 6" in found
    assert caught.value.fault == "F2"


def test_a_changed_byte_is_found_when_it_is_read(tmp_path):
    write(tmp_path, range(2), shard_bytes=1).finish()
    path = tmp_path / "states-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    store = HiddenStateStore(tmp_path)
    store.read("c0")
    with pytest.raises(SlipstreamError, match=r"states-00001\.safetensors has other content"):
        store.read("c1")


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_missing_or_cut_shard_is_named(tmp_path, damage):
    write(tmp_path, range(1)).finish()
    path = tmp_path / "states-00000.safetensors"
    size = path.stat().st_size
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:100])
    words = "is missing" if damage == "missing" else "holds 100 bytes"
    with pytest.raises(SlipstreamError, match=words) as caught:
        HiddenStateStore(tmp_path).read("c0")
    assert f"{size:,} bytes" in caught.value.expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["slot_4", "teacher"])
def test_nan_and_infinity_are_refused_on_both_sides(tmp_path, monkeypatch, value, where):
    states = conversation(0)[0]
    (states.teacher if where == "teacher" else states.slots[where])[1, 2] = value
    with pytest.raises(SlipstreamError, match=f"{where} holds NaN or infinity"):
        StoreWriter(tmp_path / "a", SPEC).add(states)

    with monkeypatch.context() as patch:  # a store written by something less careful
        patch.setattr("slipstream.engine.hidden_store._check_states", lambda *args, **kwargs: None)
        writer = StoreWriter(tmp_path / "b", SPEC)
        writer.add(states)
        writer.finish()
    with pytest.raises(SlipstreamError, match=f"conversation c0: {where} holds NaN or infinity"):
        HiddenStateStore(tmp_path / "b").read("c0")


def test_wrong_lengths_and_dtypes_are_refused(tmp_path):
    writer, states = StoreWriter(tmp_path, SPEC), conversation(0)[0]
    short = dict(states.slots) | {"slot_4": states.slots["slot_4"][:-1]}
    for broken, words in (
        (dataclasses.replace(states, slots=short), r"slot_4 is torch.bfloat16 \[6, 6\], not torch.bfloat16 \[7, 6\]"),
        (dataclasses.replace(states, teacher=states.teacher.float()), "teacher is torch.float32"),
        (dataclasses.replace(states, teacher_start=2), r"teacher is .* \[4, 6\], not torch.bfloat16 \[5, 6\]"),
        (dataclasses.replace(states, loss_mask=states.loss_mask[1:]), "loss_mask has 6 entries for 7 tokens"),
        (dataclasses.replace(states, slots={"slot_2": states.slots["slot_2"]}), r"has no \['slot_4', 'slot_5'\]"),
    ):
        with pytest.raises(SlipstreamError, match=words):
            writer.add(broken)


def test_other_tokens_under_the_same_id_are_refused(tmp_path):
    write(tmp_path, range(2)).finish()
    ids = conversation(1)[0].token_ids
    store = HiddenStateStore(tmp_path)
    store.read("c1", token_ids=ids.tolist())
    changed = ids.clone()
    changed[2] += 1
    with pytest.raises(SlipstreamError, match=r"conversation c1 .* holds other tokens"):
        store.read("c1", token_ids=changed.tolist())
    with pytest.raises(SlipstreamError, match=r"conversation c1 is in .* with other tokens"):
        StoreWriter(tmp_path, SPEC).has("c1", changed)


def test_a_manifest_of_another_kind_or_version_is_refused(tmp_path):
    with pytest.raises(SlipstreamError, match=r"has no manifest\.json"):
        HiddenStateStore(tmp_path)
    write(tmp_path, range(1)).finish()
    path = tmp_path / MANIFEST
    value = json.loads(path.read_text())
    path.write_text(json.dumps(value | {"format_version": 2}))
    with pytest.raises(SlipstreamError, match="hidden-states version 2"):
        HiddenStateStore(tmp_path)
    path.write_text("{")
    with pytest.raises(SlipstreamError, match="is not readable"):
        HiddenStateStore(tmp_path)
