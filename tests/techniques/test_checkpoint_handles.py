"""Checkpoints put on and taken off: what is refused, what is left behind, and what copies are."""

import copy
import pickle
import warnings

import pytest
import torch
import transformers
from support.checkpointed import N, batch_for, made, same, step, untouched
from support.families import tiny_config
from torch import nn

from gradmem_lib.compat.modules import call_override
from gradmem_lib.course import models
from gradmem_lib.techniques.checkpointing import checkpoint_layers


def test_remove_gives_every_layer_its_own_forward_back_and_may_be_repeated():
    model = made("llama")
    handle = checkpoint_layers(model, 2)
    assert not untouched(model)
    handle.remove()
    assert untouched(model)
    handle.remove()
    with checkpoint_layers(model, "best"), pytest.raises(ZeroDivisionError):
        _ = 1 / 0
    assert untouched(model)
    with pytest.raises(ValueError):
        checkpoint_layers(model, [1, 1])
    assert untouched(model)


@pytest.mark.parametrize(
    ("error", "stop_at"), [(KeyboardInterrupt, 3), (ValueError, N + 1)], ids=["forward", "backward"]
)
def test_an_interrupted_step_passes_through_and_the_next_one_is_right(error, stop_at):
    model, batch = made("gpt2"), batch_for("gpt2")
    expected, calls = step("gpt2", model, batch), []

    def hook(module, args):
        calls.append(1)
        if len(calls) == stop_at:
            raise error("stop")

    for layer in model.transformer.h:
        layer.ln_1.register_forward_pre_hook(hook)
    with checkpoint_layers(model, 3):
        with pytest.raises(error):
            step("gpt2", model, batch)
        model.zero_grad(set_to_none=True)
        same(step("gpt2", model, batch), expected)
    assert not any(call_override(m) for m in model.modules())


def test_a_second_schedule_on_the_same_layers_is_refused():
    model = made("llama")
    with checkpoint_layers(model, 2):
        for again in (model, model.model.layers):
            with pytest.raises(RuntimeError, match="already"):
                checkpoint_layers(again, 1)
    with checkpoint_layers(model.model.layers, [N]), pytest.raises(RuntimeError, match="already"):
        checkpoint_layers(model, 1)  # also where the one segment is kept, and nothing runs again


def switch(model, way):
    """transformers' own checkpointing "enable" or "disable", by its newer name where it has one."""
    name = f"activation_checkpointing_{way}"
    getattr(model, name if hasattr(model, name) else name.replace("activation", "gradient"))()


def test_transformers_own_checkpointing_is_refused_before_and_after():
    model, batch = made("llama"), batch_for("llama")
    switch(model, "enable")
    with pytest.raises(RuntimeError, match="transformers"):
        checkpoint_layers(model, 2)
    switch(model, "disable")
    with checkpoint_layers(model, 2):
        switch(model, "enable")
        with pytest.raises(RuntimeError, match="transformers"):
            step("llama", model, batch)


def test_a_copy_is_a_plain_model():
    model, batch = made("llama"), batch_for("llama")
    expected = step("llama", model, batch)
    with checkpoint_layers(model, "best"):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        same(step("llama", model, batch), expected)
    for other in copies:
        same(step("llama", other, batch), expected)
        with checkpoint_layers(other, 3):  # not "already checkpointed"
            same(step("llama", other, batch), expected)
            other.config.output_hidden_states = True
    same(step("llama", model, batch), expected)


def test_layers_called_out_of_order_or_with_something_else_are_refused():
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    x = torch.randn(2, 4, requires_grad=True)
    with checkpoint_layers(layers, [2, 2], keep_last=False):  # what is kept runs as it is called
        with pytest.raises(RuntimeError, match="in order"):
            layers[1](x)
        layers[0](x)
        with pytest.raises(RuntimeError, match="in order"):
            layers[3](x)
        y = layers[0](x)
        with pytest.raises(RuntimeError, match="something else than the output of layer 0"):
            layers[1](y + 1)
        y = layers[0](x)
        with torch.no_grad(), pytest.raises(RuntimeError, match="switched off"):
            layers[1](y)
    with checkpoint_layers(layers, "best"), pytest.raises(RuntimeError, match="before layer 0"):
        layers[2](x)


class Bare(nn.Module):
    """Layers with no home in transformers."""

    def __init__(self):
        super().__init__()
        self.stack = nn.ModuleList([nn.Linear(2, 2)])


@pytest.mark.parametrize(
    ("given", "every", "error", "says"),
    [
        (lambda: models.chain(4), [2, 3], ValueError, "5 layers, and there are 4"),
        (lambda: nn.Sequential(), 1, ValueError, "no layers"),
        (lambda: nn.Linear(2, 2), 1, ValueError, "no ModuleList of .* was found"),
        (Bare, 1, ValueError, "Give the nn.Sequential or nn.ModuleList"),
        (lambda: [nn.Linear(2, 2)], 1, TypeError, "nn.ModuleList"),
        (lambda: nn.Sequential(*[nn.ReLU()] * 2), 1, ValueError, "more than once"),
    ],
)
def test_what_cannot_be_checkpointed_is_refused_with_a_sentence(given, every, error, says):
    model = given()
    with pytest.raises(error, match=says):
        checkpoint_layers(model, every)
    assert not isinstance(model, nn.Module) or untouched(model)


class Named(nn.Linear):
    def forward(self, hidden_states=None, x=None):
        return super().forward(hidden_states if x is None else x)


def test_a_layer_without_a_positional_argument_is_refused_or_found_by_its_name():
    layers, x = nn.ModuleList([Named(4, 4), Named(4, 4)]), torch.randn(2, 4, requires_grad=True)
    expected = layers[1](x=layers[0](x=x))
    with checkpoint_layers(layers, [2], keep_last=False):
        y = layers[1](hidden_states=layers[0](hidden_states=x))
        assert torch.equal(y, expected)
        y.sum().backward()
        with pytest.raises(TypeError, match="first argument"):
            layers[0](x=x)


class Masked(nn.Linear):
    def forward(self, x, mask, scale):
        return torch.tanh(super().forward(x) * mask) * scale


def test_arguments_are_the_same_where_they_are_views_of_the_same_elements_or_equal_values():
    """Masks are often cut out anew for each layer, and numbers computed anew."""
    torch.manual_seed(0)
    layers, masks = nn.ModuleList(Masked(8, 8) for _ in range(4)), torch.rand(2, 4, 8)
    x = torch.randn(4, 8)

    def run(which=0, more=0.0):
        out = x
        for i, layer in enumerate(layers):
            out = layer(out, masks[which if i % 2 else 0], float("0.5") + more * (i % 2))
        return torch.autograd.grad(out.sum(), list(layers.parameters()))

    expected = run()
    with checkpoint_layers(layers, 2):
        assert all(map(torch.equal, run(), expected))
        for other in ({"which": 1}, {"more": 0.25}):
            with pytest.raises(RuntimeError, match="other arguments"):
                run(**other)


def test_the_first_k_of_several_lists_are_the_first_lists_first():
    model = transformers.T5ForConditionalGeneration(tiny_config("t5"))
    n = len(model.encoder.block)
    with pytest.raises(ValueError, match=f"'first-9': there are {2 * n} layers"):
        checkpoint_layers(model, "first-9")
    with checkpoint_layers(model, f"first-{n + 1}") as handle:
        assert handle.keep_last == {"encoder.block": False, "decoder.block": True}
        assert handle.segments["encoder.block"] == [1] * n
        assert handle.segments["decoder.block"] == [1, len(model.decoder.block) - 1]


class _OfParts(nn.Module):
    """Its forward calls the parts of its layers, and never the layers."""

    def __init__(self, kind: type):
        super().__init__()
        made = [kind().extend([nn.LayerNorm(8), nn.Linear(8, 8)]) for _ in range(4)]
        self.layers = nn.ModuleList(made)

    def forward(self, x):
        for norm, linear in self.layers:
            x = x + linear(norm(x)).tanh()
        return x


@pytest.mark.parametrize("every", [1, "best"])
def test_a_list_whose_items_are_never_called_is_not_taken_in_silence(every):
    with pytest.raises(ValueError, match="no forward of their own"):
        checkpoint_layers(_OfParts(nn.ModuleList).layers, every)
    model, x = _OfParts(nn.Sequential), torch.rand(2, 8)
    with checkpoint_layers(model.layers, every):
        with torch.no_grad():
            model(x)  # no checkpoint is expected here
        with pytest.warns(UserWarning, match="parts of the layers in this list"):
            model(x).sum().backward()


@pytest.mark.parametrize("shared", [True, False])
def test_a_part_that_runs_before_its_layers_is_no_list_of_parts(shared):
    """A part of the first layer, or what all layers share."""
    part = nn.Linear(8, 8)
    layers = [nn.Sequential(part if shared else nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(8)]
    layers = nn.Sequential(*layers)
    with warnings.catch_warnings(), checkpoint_layers(layers, 4):
        warnings.simplefilter("error")
        for _ in range(2):
            layers(layers[0][0](torch.rand(2, 8))).sum().backward()


@pytest.mark.parametrize("every", [[1, 2], "best"])
def test_a_layer_that_changes_its_input_in_place_is_refused_in_a_sentence(every):
    model = nn.Sequential(
        nn.Linear(8, 8),
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)),
        nn.Sequential(nn.Sigmoid(), nn.Linear(8, 8)),
    )
    with (
        checkpoint_layers(model, every, keep_last=False),
        pytest.raises(RuntimeError, match=r"layer 1 changes its input in place|in-place operation"),
    ):
        model(torch.rand(2, 8)).sum().backward()


def test_a_model_without_known_layers_is_told_which_list_to_give():
    model = nn.Module()
    model.encoder = _OfParts(nn.Sequential)
    with pytest.raises(ValueError, match=r"such as model\.encoder\.layers \(4 layers\)"):
        checkpoint_layers(model, 1)


def outputs(layers, x):
    found = []
    for layer in layers:
        x = layer(x)
        found.append(x)
    return found


def left_out(layers, x):
    return outputs([*layers[:2], *layers[3:]], x)[-1]


def added_in_place(layers, x):
    for layer in layers:
        before, x = x, layer(x)
        x += before
    return x


def ends_early(layers, x):
    return outputs(layers, x)[1]


@pytest.mark.parametrize(
    ("run", "every", "keep_last", "says"),
    [
        (left_out, 3, False, "has run already"),
        (left_out, 3, True, "has run already"),
        (added_in_place, 3, False, "changed in place"),
        (added_in_place, 3, True, "changed in place"),
        (ends_early, 3, None, "elsewhere"),
        (ends_early, [2, 4], None, None),
    ],
)
def test_layers_of_a_segment_run_in_a_row_and_their_outputs_have_no_other_use(
    run, every, keep_last, says
):
    layers, x = nn.ModuleList(nn.Linear(4, 4) for _ in range(6)), torch.randn(2, 4)

    def gradient():
        return torch.autograd.grad(run(layers, x).sum(), layers[0].weight)[0]

    expected = gradient()
    with checkpoint_layers(layers, 1):
        assert torch.equal(gradient(), expected)
    with checkpoint_layers(layers, every, keep_last=keep_last):
        if says:
            with pytest.raises(RuntimeError, match=says):
                gradient()
        else:
            assert torch.equal(gradient(), expected)
