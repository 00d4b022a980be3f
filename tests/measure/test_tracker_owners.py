"""Whose bytes are whose when programs swap, share, copy and reload what they train; and what a
tracker counts otherwise than the same run without it.
"""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from support.oracle import nbytes
from torch import nn
from torch.func import functional_call
from torch.optim import SGD, AdamW

from gradmem_lib import MemoryTracker
from gradmem_lib.compat.dispatch_modes import num_active_dispatch_modes


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))


def test_a_copy_that_is_dropped_is_freed():
    """What it made is alive, and known by it; the copy is not."""
    teacher, x = nn.Linear(20, 30), torch.ones(5, 20)
    with MemoryTracker() as tracker, torch.no_grad():
        student = copy.deepcopy(teacher)
        gone, kept = weakref.ref(student), student(x)
        del student
        gc.collect()
        assert gone() is None
        assert tracker.current.total == nbytes(teacher.parameters()) + x.nbytes + kept.nbytes
        names = {holder.module for holder in tracker.largest_at_peak(9)}
    assert "Linear" in names
    assert tracker.current.total == nbytes(teacher.parameters()) + x.nbytes + kept.nbytes


@pytest.mark.parametrize("given", [True, False])
def test_an_optimizer_that_is_dropped_frees_its_states(given):
    """As in meta-learning, where each task has an optimizer of its own."""
    model, x = small(), torch.ones(5, 20)
    optimizers = [AdamW(model.parameters()) for _ in range(3)]
    with MemoryTracker(model, optimizers[:1] if given else None) as tracker:
        while optimizers:
            model(x).sum().backward()
            optimizers[-1].step()
            optimizers.pop().zero_grad()
            assert tracker.current.by_category["optimizer"] == 0
        assert tracker.current.total == nbytes(model.parameters()) + x.nbytes


def test_weights_that_a_step_computed_are_no_parameters(recwarn):
    """``functional_call`` puts them in the place of the model's own, which are its parameters all
    the same.
    """
    model, x, seen = nn.Linear(20, 30), torch.ones(5, 20), []
    model.register_forward_hook(lambda *given: seen.append(tracker.current.by_category))
    with MemoryTracker(model) as tracker:
        fast = {name: p * 0.5 for name, p in model.named_parameters()}
        loss = functional_call(model, fast, x).sum()
        loss.backward()
    [in_forward], own = seen, nbytes(model.parameters())
    assert (in_forward["parameters"], in_forward["activations"]) == (own, own + 5 * 30 * 4)
    assert tracker.peak.by_category["parameters"] == own
    assert not recwarn.list  # of a gradient that only leaves have


@pytest.mark.parametrize("view", [lambda w: w[:5], lambda w: w.view(-1)], ids=["part", "whole"])
def test_a_buffer_that_is_a_view_of_a_parameter_is_that_parameter(view):
    model = small()
    model.register_buffer("mean", torch.ones(3))
    model.register_buffer("seen", view(model[0].weight.detach()))
    with MemoryTracker(model) as tracker:
        model(torch.ones(5, 20)).sum().backward()
        during = tracker.current.by_category
    for found in (during, tracker.current.by_category):
        assert found["parameters"] == found["gradients"] == nbytes(model.parameters())


@pytest.mark.parametrize("assign", [False, True])
def test_what_a_checkpoint_brings_is_parameters_and_states_at_once(assign):
    model = small()
    optimizer = AdamW(model.parameters(), foreach=False)
    model(torch.ones(5, 20)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with MemoryTracker(model, optimizer) as tracker:
        model.load_state_dict(saved[0], assign=assign)
        optimizer.load_state_dict(saved[1])
        during = tracker.current.by_category
        optimizer.load_state_dict(saved[1])
    states = 2 * nbytes(model.parameters()) + 4 * len(list(model.parameters()))
    for found in (during, tracker.current.by_category):
        assert found["parameters"] == nbytes(model.parameters())
        assert found["optimizer"] == states


def test_lazy_modules_are_counted_once_they_have_a_size():
    model = nn.Sequential(nn.LazyLinear(30), nn.LazyBatchNorm1d(), nn.Linear(30, 4))
    with MemoryTracker(model) as tracker:
        assert (
            tracker.current.total
            == nbytes(model[2].parameters()) + model[1].num_batches_tracked.nbytes
        )
        model(torch.ones(5, 20)).sum().backward()
        optimizer = SGD(model.parameters(), lr=0.1)
        optimizer.step()
    assert tracker.current.by_category["parameters"] == nbytes(model.parameters())
    assert tracker.current.by_category["gradients"] == nbytes(model.parameters())
    assert tracker.current.by_category["temporaries"] == 0


def test_a_model_that_leaves_after_its_last_step_keeps_its_figures():
    model = small()
    with MemoryTracker(model) as tracker:
        model(torch.ones(5, 20)).sum().backward()
        held, model_bytes = [p.detach() for p in model.parameters()], nbytes(model.parameters())
        model.zero_grad()
        model[2].to("meta")
    assert held and tracker.current.by_category["parameters"] == model_bytes


def test_a_sparse_batch_from_before_the_block_counts_as_an_input():
    model = nn.Linear(30, 12)
    a = (torch.arange(400).view(20, 20) % 3 == 0).float().to_sparse()
    x = torch.ones(20, 30)

    class Graph(nn.Module):
        def forward(self, links, x):
            return torch.sparse.mm(links, model(x))

    with MemoryTracker(model) as tracker, torch.no_grad():
        Graph()(a, x)
    assert (
        tracker.current.by_category["other"] == x.nbytes + a._indices().nbytes + a._values().nbytes
    )


def test_a_list_that_requires_gradients_begins_a_forward_without_modules():
    weights = [torch.ones(8, requires_grad=True) for _ in range(2)]
    with MemoryTracker() as tracker:
        whole = torch.cat(weights)
    assert tracker.peak.phase == "forward"
    assert tracker.peak.by_category["activations"] == whole.nbytes


def test_two_storages_on_the_same_memory_count_twice():
    with MemoryTracker() as tracker:
        one = torch.ones(100)
        again = torch.from_numpy(one.numpy()) + 0 * torch.utils.dlpack.from_dlpack(one)
        del again
        other = torch.from_numpy(one.numpy())
        other.add_(1)
    assert other.data_ptr() == one.data_ptr()
    assert tracker.current.total == 2 * one.nbytes


# What torch compiles by itself, or from its own functions.


def branches(layer, x):
    return torch.cond(x.sum() > 0, lambda row: layer(row), lambda row: -layer(row), (x,))


def test_a_branch_without_gradients_is_counted_and_one_with_them_refused():
    """Uncompiled, its layer would get none, and nothing would say so."""
    layer, x = nn.Linear(6, 6), torch.ones(6)
    branches(layer, x).sum().backward()
    assert layer.weight.grad is not None
    layer.zero_grad()
    with MemoryTracker(layer) as tracker:
        with torch.no_grad():
            kept = branches(layer, x)
        with pytest.raises(RuntimeError, match=r"cond.*torch\.no_grad"):
            branches(layer, x)
    assert tracker.current.total == nbytes(layer.parameters()) + nbytes([x, kept])


def test_flex_attention_is_refused_in_a_sentence_that_names_it():
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 128, 16)
    for mode in (torch.no_grad(), torch.enable_grad()):
        with (
            MemoryTracker(),
            mode,
            pytest.raises(RuntimeError, match=r"flex_attention.*uncompiled"),
        ):
            flex_attention(q, q, q)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_ends_the_last_look_leaves_nothing_patched(monkeypatch, error):
    call, model = nn.Module.__call__, nn.Linear(2, 2)

    def ends(*given, **named):
        raise error

    with pytest.raises(error), MemoryTracker(model) as tracker:
        model(torch.ones(1, 2))
        monkeypatch.setattr(tracker._meter, "sync", ends)
    assert (
        nn.Module.__call__ is call
        and num_active_dispatch_modes() == 0
        and not model.weight._post_accumulate_grad_hooks
    )
