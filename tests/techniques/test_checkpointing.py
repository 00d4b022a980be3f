"""Checkpointed layers against plain ones, bit by bit."""

from dataclasses import dataclass

import pytest
import torch
from support.checkpointed import FAMILIES, HF, N, batch_for, layers_of, made, same, step, taken
from support.nightly import each
from torch import nn

from gradmem_lib import MemoryTracker, extra_forwards
from gradmem_lib.techniques.checkpointing import checkpoint_layers

SCHEDULES = ["sqrt", "best", 1, 4, N, "first-2", [1, 5]]


@pytest.mark.parametrize("family", each(3, FAMILIES, 1))
def test_gradients_are_the_same_to_the_bit_with_dropout_and_layers_run_again(family):
    """Runs are counted by hooks inside the layers, and by hooks on the layers themselves."""
    model, batch = made(family), batch_for(family)
    expected = step(family, model, batch)
    keys = list(model.state_dict())
    names = [name for name, _ in model.named_modules()]
    inside, on = [], []
    with checkpoint_layers(layers_of(family, model), 1) as handle:
        layers = handle.layers
    for layer in layers:
        first = next(m for m in layer.modules() if not list(m.children()))
        first.register_forward_pre_hook(lambda *given: inside.append(1))
        layer.register_forward_pre_hook(lambda *given: on.append(1))
    for every in SCHEDULES:
        for keep_last in (True, False):
            with checkpoint_layers(layers_of(family, model), every, keep_last=keep_last) as handle:
                if every == "best":  # its first step measures
                    same(step(family, model, batch), expected)
                inside.clear(), on.clear()
                same(step(family, model, batch), expected)
                again = N + extra_forwards(handle.segments, handle.keep_last)
                assert len(inside) == len(on) == again, (every, keep_last)
                assert sum(handle.segments) == N
                assert list(model.state_dict()) == keys
                assert [name for name, _ in model.named_modules()] == names
    same(step(family, model, batch), expected)


@pytest.mark.parametrize("every", ["best", 2])
def test_backward_may_come_after_the_end_of_the_block(every):
    found = []
    for ends_first in (False, True):
        chain, x = made("sequential"), batch_for("sequential")
        torch.manual_seed(7)
        with MemoryTracker(chain, live=False) as tracker:
            with checkpoint_layers(chain, every):
                loss = chain(x).square().sum()
                if not ends_first:
                    loss.backward()
            if ends_first:
                loss.backward()
        found.append((tracker.peak.total, [p.grad.tolist() for p in chain.parameters()]))
    assert found[0] == found[1]


@pytest.mark.parametrize("family", each(3, HF, 1))
def test_collected_hidden_states_are_right_with_their_gradients(family):
    model, batch = made(family), batch_for(family)
    inputs = {k: v for k, v in batch.items() if k != "labels"}

    def hidden(**asked):
        torch.manual_seed(7)
        states = model(**inputs, **asked).hidden_states
        sum((s * i).sin().sum() for i, s in enumerate(states, 1)).backward()
        return torch.stack([s.detach() for s in states]), taken(model)

    model.config.use_cache = False
    expected = hidden(output_hidden_states=True)
    assert len(expected[0]) == N + 1
    for every in (3, [4, 2], "best"):
        with checkpoint_layers(model, every):
            same(hidden(output_hidden_states=True), expected)
    with checkpoint_layers(next(m for m in model.modules() if isinstance(m, nn.ModuleList)), 3):
        # without the model, through the hooks that transformers puts on layers
        same(hidden(output_hidden_states=True), expected)
    model.config.output_hidden_states = True
    with checkpoint_layers(model, 3):
        same(hidden(), expected)


def test_layers_that_return_more_than_their_hidden_state_are_refused_in_segments():
    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x), x.sum()

    layers = nn.ModuleList(Layer(4, 4) for _ in range(4))

    def run(x):
        for layer in layers:
            x, _ = layer(x)
        return x

    x = torch.randn(2, 4, requires_grad=True)
    with checkpoint_layers(layers, 1):
        run(x).sum().backward()
    with checkpoint_layers(layers, 2), pytest.raises(RuntimeError, match="every=1"):
        run(x)


@dataclass
class Out:
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class Fixed:
    hidden: torch.Tensor


CONTAINERS = {
    "dataclass": (Out, lambda out: out.hidden),
    "frozen dataclass": (Fixed, lambda out: out.hidden),
    "dataclass in a list": (lambda x: [Out(x)], lambda out: out[0].hidden),
    "dict": (lambda x: {"hidden": x}, lambda out: out["hidden"]),
    "list": (lambda x: [x], lambda out: out[0]),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_an_output_inside_a_segment_that_is_used_elsewhere_is_refused_in_any_container(kind):
    wrap, hidden = CONTAINERS[kind]

    class Layer(nn.Linear):
        def forward(self, out):
            return wrap(super().forward(hidden(out)))

    layers = nn.ModuleList(Layer(4, 4) for _ in range(4))

    def run(used: bool) -> list[torch.Tensor]:
        out, total = wrap(torch.ones(2, 4)), torch.zeros(())
        for layer in layers:
            out = layer(out)
            if used:
                total = total + hidden(out).sin().sum()
        return torch.autograd.grad(total + hidden(out).sum(), list(layers.parameters()))

    expected = run(used=False)
    with checkpoint_layers(layers, 2):
        assert all(map(torch.equal, expected, run(used=False)))
        with pytest.raises(RuntimeError, match="end a segment at layer 2, or use every=1"):
            run(used=True)


def test_autocast_is_the_same_when_layers_run_again():
    model, batch = made("llama"), batch_for("llama")
    expected = step("llama", model, batch, autocast=True)
    for every in (2, "best"):
        with checkpoint_layers(model, every):
            same(step("llama", model, batch, autocast=True), expected)


def test_a_frozen_base_with_a_trained_adapter():
    model, batch = made("qwen3"), batch_for("qwen3")
    model.requires_grad_(False)
    for layer in list(model.model.layers)[2:]:
        layer.self_attn.q_proj.weight.requires_grad_(True)
    expected = step("qwen3", model, batch)
    assert sum(g is not None for g in expected[1].values()) == N - 2
    for every in ("best", 2):
        with checkpoint_layers(model, every):
            same(step("qwen3", model, batch), expected)
