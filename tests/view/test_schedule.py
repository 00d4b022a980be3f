"""What a schedule's record says: events of real steps against independent counts, its bytes against
the tracker.
"""

from __future__ import annotations

import pytest
import torch
from support.chains import X, batch, chain, in_segments, step_of
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from gradmem_lib import MemoryTracker, checkpoint_layers, record_schedule
from gradmem_lib.view import schedules


@pytest.mark.parametrize("segments", [[8], [4, 4], [3, 3, 2], [1] * 8])
def test_forward_calls_are_those_that_the_layers_counted(segments):
    layers, calls = chain(8)
    record = record_schedule(layers, step_of(layers, segments))
    assert record.ran("forward", "recompute") == calls and len(calls) == 16 - segments[-1]


def test_each_segment_runs_again_just_before_its_backward():
    layers, _ = chain(8)
    record = record_schedule(layers, step_of(layers, [3, 3, 2]))
    ran = [f"{event.kind[0]}{event.layer}" for event in record.events]
    ran = " ".join(ran).removeprefix("o-1 ")  # PyTorch 2.11 makes an empty tensor first
    assert ran == "f0 f1 f2 f3 f4 f5 f6 f7 o-1 b7 b6 r3 r4 r5 b5 b4 b3 r0 r1 r2 b2 b1 b0"
    looks = schedules.looks_of(record)
    first = looks.index("dropped")
    assert first <= 1 and looks[first : first + 9] == ["dropped"] * 6 + ["forward"] * 2 + [""]
    stops = [event.stop for event in record.events]
    assert [event.start for event in record.events] == [0, *stops[:-1]] and stops[-1] == len(
        record.totals
    )


class ByHand(torch.autograd.Function):
    """A checkpoint as a learner writes it."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


def test_a_checkpoint_written_by_hand():
    layers, calls = chain(6)
    x = batch()
    first, second = layers[:2], layers[2:4]

    def step():
        layers[4:](ByHand.apply(second, ByHand.apply(first, x))).sum().backward()

    record = record_schedule(layers, step)
    assert record.ran("forward", "recompute") == calls == [0, 1, 2, 3, 4, 5, 2, 3, 0, 1]
    assert record.ran("recompute") == [2, 3, 0, 1]
    assert record.ran("backward") == [5, 4, 3, 2, 1, 0]
    turn = [event.kind for event in record.events].index("outside")
    assert [layer for layer in range(6) if record.internals[layer, turn]] == [4, 5]


def test_nested_segments_run_some_layers_three_times():
    layers, calls = chain(8)
    x = batch()

    def first_half(x):
        return layers[2:4](checkpoint(layers[:2], x, use_reentrant=False))

    def step():
        layers[4:](checkpoint(first_half, x, use_reentrant=False)).sum().backward()

    record = record_schedule(layers, step)
    assert record.ran("forward", "recompute") == calls
    assert record.ran("recompute") == [0, 1, 2, 3, 0, 1]
    again = [
        look
        for look, event in zip(schedules.looks_of(record), record.events, strict=True)
        if event.kind == "recompute"
    ]
    assert again == ["redropped"] * 2 + ["recompute"] * 4


@pytest.mark.parametrize("how", ["none", "transformers", "segments"])
def test_a_llama(how):
    from gradmem_lib.course.material.models import tiny_llama

    model = tiny_llama(layers=4, hidden=32, heads=2, intermediate=64, vocab=64)
    layers = model.model.layers
    tokens = torch.arange(64).view(2, 32)
    calls: list[int] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda *_, i=i: calls.append(i))
        for i, layer in enumerate(layers)
    ]
    handle = checkpoint_layers(model, [2, 2], keep_last=False) if how == "segments" else None
    if how == "transformers":
        older = model.gradient_checkpointing_enable  # transformers before 5.23
        getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False})
    record = record_schedule(layers, lambda: model(input_ids=tokens, labels=tokens).loss.backward())
    assert record.ran("forward", "recompute") == calls
    assert (
        record.ran("recompute")
        == {"none": [], "transformers": [3, 2, 1, 0], "segments": [2, 3, 0, 1]}[how]
    )
    assert record.ran("backward") == [3, 2, 1, 0]
    assert [e.kind for e in record.events].count("outside") == 2, (
        "the embedding, and the head with the loss"
    )
    assert record.inputs.max() == 4 * 2 * 32 * 32, (
        "a mask or position table was taken for a layer's input"
    )
    weights = sum(p.nbytes for p in model.parameters())
    assert record.live["left"][-1] == weights, "what is left of the step is its gradients"
    for hook in hooks:
        hook.remove()
    if handle:
        handle.remove()


# What was stored, and when.


def test_internals_and_boundaries_are_stored_from_when_they_are_made():
    layers, _ = chain(8, ratio=5)
    record = record_schedule(layers, step_of(layers, [3, 3, 2]))
    at = {(event.kind, event.layer): t for t, event in enumerate(record.events)}
    for layer in range(8):
        last_forward = at.get(("recompute", layer), at["forward", layer])
        stored = schedules.spans(record.internals[layer])
        assert stored == [(last_forward, at["backward", layer])]
        assert set(record.internals[layer]) == {0, 5 * X}
    # The input of the second segment is the output of layer 2, and is let go with the backward of
    # layer 3.
    assert schedules.spans(record.inputs[3]) == [(at["forward", 2], at["backward", 3])]
    assert schedules.spans(record.inputs[0]) == [(0, len(record.events))], (
        "the caller still holds the batch"
    )
    # inside a segment: handed on, and gone when the next layer has run
    for layer in (1, 2, 4, 5, 7):
        assert all(stop - start == 1 for start, stop in schedules.spans(record.inputs[layer]))
    assert set(record.inputs[3]) == {0, X}


@pytest.mark.parametrize("segments", [[12], [4, 4, 4], [5, 4, 2, 1]])
def test_the_peak_is_the_trackers(segments):
    layers, _ = chain(12)
    step = step_of(layers, segments)
    record = record_schedule(layers, step)
    with MemoryTracker(layers) as tracker:
        step()
    parameters = tracker.peak.by_category["parameters"]
    assert tracker.peak.by_category["other"] == X, "the batch"
    assert record.peak == tracker.peak.total - parameters
    assert record.peak == sum(int(part[record.peak_operation]) for part in record.live.values())
    event = record.events[record.peak_event]
    assert event.start <= record.peak_operation < event.stop
    kinds = {phase for phase, peak in tracker.peak_by_phase.items() if peak == tracker.peak.total}
    assert kinds == {"backward"} and event.kind in ("backward", "recompute")


# Leaving no trace.


def listeners():
    hooks = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)
    return [len(h) for h in hooks] + [_get_current_dispatch_mode()]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_listens_after_an_exception(error):
    layers, _ = chain(3)
    before = listeners()

    def step():
        assert listeners() != before
        in_segments(layers, [2, 1], batch()).sum().backward()
        raise error("stop")

    with pytest.raises(error, match="stop"):
        record_schedule(layers, step)
    assert listeners() == before


def test_gradients_and_random_numbers_are_the_same_as_without_a_recorder():
    layers, _ = chain(4)
    layers.insert(2, nn.Dropout(0.3))
    x = batch()

    def step():
        torch.manual_seed(1)
        (gradient,) = torch.autograd.grad(in_segments(layers, [2, 2, 1], x).square().sum(), x)
        return gradient

    plain, heard = step(), []
    record_schedule(layers, lambda: heard.append(step()))
    assert torch.equal(plain, heard[0])


@pytest.mark.parametrize(
    "layers, step, error, says",
    [
        (
            [nn.Linear(8, 8), 3],
            lambda: None,
            TypeError,
            "was given int.*for a Llama, model.model.layers",
        ),
        ([], lambda: None, TypeError, "was given none"),
        (
            [nn.Linear(8, 8)],
            lambda: None,
            ValueError,
            "layer 0 of 1, from 0, was not seen to run forward",
        ),
    ],
)
def test_mistakes_are_explained(layers, step, error, says):
    with pytest.raises(error, match=says):
        record_schedule(layers, step)


def test_a_step_without_backward_is_explained():
    layers, _ = chain(3)
    with pytest.raises(ValueError, match=r"not seen to run backward \(and 2 more\)"):
        record_schedule(layers, lambda: layers(batch()))
