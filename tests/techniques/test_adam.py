"""Adam by hand against torch.optim: the same trajectories, and the same checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradmem_lib import Adam, AdamW

PAIRS = [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)]
both = pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["Adam", "AdamW"])


def parameters(shapes=((3, 4), (5,), ()), dtype=torch.float64, seed=0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.complex128 if dtype.is_complex else torch.float64
    made = [torch.randn(shape, dtype=drawn, generator=generator) for shape in shapes]
    return [nn.Parameter(p.to(dtype)) for p in made]


def train(optimizer, steps=100, seed=1, start=0, left_out=None) -> list[torch.Tensor]:
    """Steps on gradients that depend on the parameters and are noisy; returns the parameters.
    ``left_out``: the number of a parameter that has no gradient in each second step.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        for number, p in enumerate(params):
            noise = torch.randn(p.shape, dtype=torch.float64, generator=generator).to(p.dtype)
            p.grad = (p.detach() + noise) * 10.0 ** (step % 5 - 3)
            if number == left_out and step % 2 == 0:
                p.grad = None
        optimizer.step()
    return [p.detach() for p in params]


def distance(ones, others) -> float:
    """The largest difference, relative to the largest entry of its tensor."""
    largest = 0.0
    for a, b in zip(ones, others, strict=True):
        if a.numel():
            a, b = a.detach().cdouble(), b.detach().cdouble()
            largest = max(largest, float((a - b).abs().max() / b.abs().max().clamp_min(1e-300)))
    return largest


# The same trajectory.


@both
def test_what_is_not_given_is_as_in_torch(ours, theirs):
    mine, its = ours(parameters()), theirs(parameters())
    assert {name: its.defaults[name] for name in mine.defaults} == mine.defaults
    assert len(mine.defaults) == 5


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64], ids=str)
def test_other_precisions_are_as_close_to_the_plain_loop_as_foreach_is(ours, theirs, dtype):
    shapes, settings = ((64, 33), (7,)), {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}
    plain, foreach = (
        train(theirs(parameters(shapes, dtype), **settings, foreach=it), 20) for it in (False, True)
    )
    mine = train(ours(parameters(shapes, dtype), **settings), 20)
    assert all(p.isfinite().all() and p.dtype == dtype for p in mine)
    assert distance(mine, plain) <= max(distance(foreach, plain), 1e-7)


@settings(max_examples=40, deadline=None)
@given(
    pair=st.sampled_from(PAIRS),
    of_groups=st.lists(
        st.fixed_dictionaries(
            {
                "lr": st.floats(0, 1),
                "betas": st.tuples(st.floats(0, 0.999), st.floats(0, 0.9999)),
                "eps": st.floats(1e-12, 1e-2),
                "weight_decay": st.floats(0, 1),
            }
        ),
        min_size=1,
        max_size=3,
    ),
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=3, max_size=5),
    steps=st.integers(1, 12),
    seed=st.integers(0, 1000),
    left_out=st.integers(0, 5),
)
def test_any_settings_of_groups_and_any_shapes_equal_torch(
    pair, of_groups, shapes, steps, seed, left_out
):
    ends, states = [], []
    for kind, options in zip(pair, ({}, {"foreach": False}), strict=True):
        made = parameters(shapes, seed=seed)
        several = len(of_groups)
        groups = [{"params": made[i::several], **given} for i, given in enumerate(of_groups)]
        optimizer = kind(groups, **options)
        ends.append(train(optimizer, steps, seed, left_out=left_out))
        states.append(shape_of(optimizer.state_dict()))
    assert distance(*ends) <= 1e-12 and states[0] == states[1]


def test_a_step_with_a_closure_updates_in_place_and_leaves_no_graph():
    (p,) = parameters([(3,)])
    optimizer = Adam([p], weight_decay=0.5)
    before, pointer = p.detach().clone(), p.data_ptr()

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert torch.equal(optimizer.step(closure), before.square().sum())
    assert p.data_ptr() == pointer and p.is_leaf and not torch.equal(p, before)
    assert torch.equal(p.grad, 2 * before), "weight decay must not change what others may read"
    assert not any(state.requires_grad for state in optimizer.state[p].values())


# The same checkpoint.


def shape_of(state_dict) -> dict:
    return {
        key: {name: (value.shape, value.dtype) for name, value in state.items()}
        for key, state in state_dict["state"].items()
    }


@both
def test_checkpoints_go_both_ways_and_training_continues(ours, theirs):
    def fresh(kind, values=None):
        params = parameters(dtype=torch.bfloat16)
        if values:
            params = [nn.Parameter(v.clone()) for v in values]
        extra = {"foreach": False} if kind is theirs else {}
        # Other settings than the checkpoint's: they must come from the checkpoint.
        return kind(params, lr=0.5 if values else 0.01, weight_decay=0.1, **extra)

    never_stopped = fresh(theirs)
    expected = train(never_stopped, 50)
    for first, second in [(ours, theirs), (theirs, ours), (ours, ours)]:
        begun = fresh(first)
        values = train(begun, 20)
        saved = copy.deepcopy(begun.state_dict())
        assert shape_of(saved) == shape_of(never_stopped.state_dict())
        assert list(saved["state"][0]) == ["step", "exp_avg", "exp_avg_sq"]
        assert saved["state"][0]["step"] == 20
        continued = fresh(second, values)
        continued.load_state_dict(saved)
        assert shape_of(continued.state_dict()) == shape_of(saved)
        assert distance(train(continued, 30, start=20), expected) == 0


@both
@pytest.mark.parametrize("saver", [torch.optim.Adam, torch.optim.AdamW])
def test_weight_decay_survives_a_change_of_class_as_it_does_in_torch(ours, theirs, saver):
    """AdamW always decouples; Adam goes on as the checkpoint did."""
    begun, ends = saver(parameters(), weight_decay=0.3, foreach=False), []
    train(begun, 5)
    for optimizer in (ours(parameters()), theirs(parameters(), foreach=False)):
        optimizer.load_state_dict(copy.deepcopy(begun.state_dict()))
        ends.append(train(optimizer, 5))
    assert distance(*ends) <= 1e-12


def test_a_checkpoint_that_needs_more_is_refused_and_changes_nothing():
    theirs = torch.optim.AdamW(parameters(), amsgrad=True)
    train(theirs, 3)
    mine = AdamW(parameters())
    train(mine, 2)
    before = copy.deepcopy(mine.state_dict())
    with pytest.raises(ValueError, match=r"amsgrad=True is not in this AdamW.*torch\.optim\.AdamW"):
        mine.load_state_dict(theirs.state_dict())
    assert str(mine.state_dict()) == str(before)


# Errors.


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": -1.0}, "lr=-1.0: it must be at least 0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"eps": -1e-8}, "eps=-1e-08"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"betas": (1.0, 0.999)}, r"betas=\(1.0, 0.999\)"),
        ({"betas": (0.9, -0.1)}, "betas"),
        ({"betas": (0.9,)}, "give two numbers"),
    ],
)
def test_bad_settings_are_refused_where_torch_refuses_them(options, says):
    with pytest.raises(ValueError, match=says):
        Adam([{"params": parameters(), **options}])
    with pytest.raises((ValueError, IndexError)):
        torch.optim.Adam(parameters(), **options)


def test_a_sparse_gradient_is_refused_before_anything_changes():
    first, table = nn.Parameter(torch.ones(3)), nn.Embedding(10, 4, sparse=True)
    first.grad = torch.ones(3)
    table(torch.tensor([1, 2])).sum().backward()
    optimizer = AdamW([first, table.weight])
    with pytest.raises(RuntimeError, match=r"shape \(10, 4\) has a sparse gradient.*SparseAdam"):
        optimizer.step()
    assert torch.equal(first, torch.ones(3)) and not optimizer.state
