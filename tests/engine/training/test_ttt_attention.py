"""Attention of the unrolled steps: equal to the obvious dense form, forward and backward, whatever the chunks."""

import pytest
import torch

from slipstream.engine.training.ttt_attention import TttAttention

BATCH, LENGTH, HEADS, KV_HEADS, SIZE, STEPS = 2, 7, 4, 2, 3, 4
SLOTS = torch.tensor([[2, 3, 4, 6], [1, 5, 0, 0]])  # the second row is padded with slot 0, as batches are
SCALE = 0.7


def make_inputs(dtype=torch.float64, device="cpu", length=LENGTH, slots=SLOTS, heads=HEADS, kv=KV_HEADS, size=SIZE):
    """(q, k, v) of each step; step 1 has a row for every slot of the conversation."""
    generator = torch.Generator().manual_seed(3)
    out = []
    for step in range(STEPS):
        rows = length if step == 0 else slots.shape[1]
        shapes = [(len(slots), rows, n, size) for n in (heads, kv, kv)]
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        out.append([t.to(device, dtype).requires_grad_() for t in drawn])
    return out


def attend_all(inputs, bound, slots=SLOTS, scale=SCALE):
    context = TttAttention(slots.to(inputs[0][0].device), scale, scores_per_chunk=bound)
    return [context.attend(*step) for step in inputs]


def dense(inputs, slots=SLOTS, scale=SCALE):
    """Each row by itself: its own list of keys, one softmax over it."""
    group, first = inputs[0][0].shape[2] // inputs[0][1].shape[2], inputs[0]
    outputs = []
    for step, (q, _, _) in enumerate(inputs):
        out = torch.empty_like(q)
        for b in range(q.shape[0]):
            for row in range(q.shape[1]):
                slot = row if step == 0 else int(slots[b, row])
                own = inputs[1 : step + 1]
                for head in range(q.shape[2]):
                    kv = head // group
                    keys = torch.cat([first[1][b, : slot + 1, kv], *(k[b, row : row + 1, kv] for _, k, _ in own)])
                    values = torch.cat([first[2][b, : slot + 1, kv], *(v[b, row : row + 1, kv] for _, _, v in own)])
                    out[b, row, head] = (keys @ q[b, row, head] * scale).softmax(-1) @ values
        outputs.append(out)
    return outputs


@pytest.mark.parametrize("bound", [1, 3 * BATCH * HEADS * LENGTH, 10**9])
def test_equals_the_dense_form_and_its_gradients(bound):
    """One row at a time, three rows at a time (a rest is left over), all at once."""
    ours, theirs = make_inputs(), make_inputs()
    outputs, expected = attend_all(ours, bound), dense(theirs)
    torch.manual_seed(0)
    total = reference = 0
    for ours_step, dense_step in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours_step, dense_step, rtol=1e-10, atol=1e-12)
        weight = torch.randn_like(dense_step)
        total, reference = total + (ours_step * weight).sum(), reference + (dense_step * weight).sum()
    total.backward()
    reference.backward()
    for mine, other in zip(ours, theirs, strict=True):
        for name, a, b in zip("qkv", mine, other, strict=True):
            assert b.grad.abs().max() > 0
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def test_gradcheck():
    flat = [t for step in make_inputs() for t in step]

    def run(*tensors):
        return tuple(attend_all([tensors[i : i + 3] for i in range(0, len(tensors), 3)], 2 * BATCH * HEADS * LENGTH))

    assert torch.autograd.gradcheck(run, flat)


def test_no_scores_are_kept_for_the_backward_pass():
    """The largest tensor kept is as long as the conversation, not as its square."""
    length = 64
    slots = torch.arange(10, length)[None]
    inputs = make_inputs(torch.float32, length=length, slots=slots)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        outputs = attend_all(inputs, 10**9, slots=slots)
    assert kept
    assert max(kept) <= STEPS * HEADS * SIZE * length < HEADS * length * length / 4
    sum(o.sum() for o in outputs).backward()


def test_bfloat16_stays_near_the_exact_form():
    exact = dense(make_inputs())
    for found, right in zip(attend_all(make_inputs(torch.bfloat16), None), exact, strict=True):
        assert found.dtype == torch.bfloat16
        error = (found.double() - right).norm() / right.norm()
        assert error < 0.02


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_on_the_gpu(dtype, tolerance):
    """Outputs and gradients against the dense form in fp64: relative errors."""
    theirs = make_inputs()
    expected = dense(theirs)
    sum(o.square().sum() for o in expected).backward()
    for bound in (2 * BATCH * HEADS * LENGTH, None):
        ours = make_inputs(dtype, "cuda")
        outputs = attend_all(ours, bound)
        sum(o.double().square().sum() for o in outputs).backward()
        for found, right in zip(outputs, expected, strict=True):
            assert (found.double().cpu() - right).norm() < tolerance * right.norm()
        for step in range(STEPS):
            for mine, other in zip(ours[step], theirs[step], strict=True):
                assert (mine.grad.double().cpu() - other.grad).norm() < 2 * tolerance * other.grad.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_on_the_gpu_grows_with_the_length():
    """Two conversations of 4,096 tokens, 16 heads, 3 steps: scores alone would take 6 GB in bf16 and fp32."""
    length, heads, kv, size = 4096, 16, 4, 64
    slots = torch.arange(256, length)[None].expand(2, -1)
    inputs = make_inputs(torch.bfloat16, "cuda", length, slots, heads, kv, size)[:3]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sum(o.float().square().sum() for o in attend_all(inputs, None, slots=slots)).backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 1.5 * 2**30
