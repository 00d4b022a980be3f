"""Models that were edited by hand, and hooks: predicted as they are, or refused; no layer's answer
is taken for another's.
"""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F
from support.predicted import assert_predicted, assert_same, tracked
from torch import nn
from transformers import BatchEncoding, LlamaForCausalLM, LlamaModel

from gradmem_lib import Recipe
from gradmem_lib.course.material import models
from gradmem_lib.prediction.predict import predict
from gradmem_lib.prediction.question import CannotTrace, Source

RECIPE = Recipe(attention=None, optimizer="sgd")


def llama(layers: int = 8) -> LlamaForCausalLM:
    return models.tiny_llama(layers=layers, hidden=32, heads=2, intermediate=48, vocab=61)


def batch(rows: int = 2, tokens: int = 12) -> dict[str, torch.Tensor]:
    ids = torch.arange(rows * tokens).view(rows, tokens) % 61
    return {"input_ids": ids, "labels": ids}


def fewer_are_called(model):
    model.config.num_hidden_layers = 6


def one_layer_twice(model):
    model.model.layers[6] = model.model.layers[4]


def two_share_a_matrix(model):
    model.model.layers[6].mlp.up_proj.weight = model.model.layers[4].mlp.up_proj.weight


def one_is_passed_over(model):
    model.model.layers[5].forward = lambda hidden_states, **more: hidden_states


def one_part_keeps_more(model):
    down = model.model.layers[5].mlp.down_proj

    def forward(self, x):
        return nn.functional.linear(x.exp().log1p(), self.weight)

    down.forward = types.MethodType(forward, down)


def the_last_four_run_twice(model):
    inner = model.model
    own = inner.forward

    def forward(self, **given):
        inner.layers, kept = nn.ModuleList([*inner.layers, *inner.layers[5:]]), inner.layers
        inner.config.num_hidden_layers = len(inner.layers)
        try:
            return own(**given)
        finally:
            inner.layers, inner.config.num_hidden_layers = kept, len(kept)

    inner.forward = types.MethodType(forward, inner)


def one_has_another_class(model):
    class Wide(type(model.model.layers[5].mlp)):
        def forward(self, x):
            return super().forward(x) * torch.sigmoid(x)

    model.model.layers[5].mlp.__class__ = Wide


def half_is_frozen(model):
    for layer in model.model.layers[:4]:
        layer.requires_grad_(False)


EDITS = (
    fewer_are_called,
    one_layer_twice,
    two_share_a_matrix,
    one_is_passed_over,
    one_part_keeps_more,
    one_has_another_class,
    half_is_frozen,
)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_an_edited_model_is_predicted_as_it_is(edit):
    model = llama()
    assert Source(model, "", is_user_module=True).layers is not None
    edit(model)
    assert_predicted(model, batch(), RECIPE)


def test_a_patch_that_reaches_for_the_model_itself_is_refused():
    model = llama()
    the_last_four_run_twice(model)
    with pytest.raises(CannotTrace, match="another module's parameter"):
        predict(model, batch=batch(), recipe=RECIPE, target="cpu")


class Own(LlamaForCausalLM):
    """People's own model on transformers' base class: the last layers see half of the tokens."""

    def forward(self, input_ids, labels):
        hidden = self.model.embed_tokens(input_ids)
        rotary = self.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        for i, layer in enumerate(self.model.layers):
            if i == 6:
                hidden, rotary = hidden[:, ::2], tuple(part[:, ::2] for part in rotary)
            hidden = layer(hidden, position_embeddings=rotary)
        return nn.functional.cross_entropy(
            self.lm_head(hidden).flatten(0, 1), labels[:, ::2].flatten()
        )


def test_a_class_of_ones_own_is_traced_whole():
    model = Own(llama().config)
    assert (
        isinstance(model.model, LlamaModel)
        and Source(model, "", is_user_module=True).layers is None
    )
    assert_predicted(model, batch(), RECIPE)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_is_refused(kind):
    model = llama(2)
    handle = getattr(model.model.norm.weight, kind)(lambda tensor: None)
    with pytest.raises(CannotTrace, match=r"a parameter has a hook.*remove it"):
        predict(model, batch=batch(), recipe=RECIPE, target="cpu")
    handle.remove()
    assert_predicted(model, batch(), RECIPE)


class Bags(nn.Module):
    def __init__(self, mode: str, **options):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(40, 8, mode=mode, **options), nn.Linear(8, 1)

    def forward(self, ids, offsets):
        return self.out(self.bag(ids, offsets)).mean()


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 3}, {"include_last_offset": True}], ids=str
)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings_to_the_byte(mode, options):
    given = {"ids": torch.arange(30) % 40, "offsets": torch.tensor([0, 4, 9, 30])}
    assert_predicted(
        Bags(mode, **options),
        given,
        Recipe(precision=None, optimizer="sgd"),
        loss=lambda model, one: model(**one),
    )


def test_a_tokenizers_batch_is_a_dict():
    given = batch()
    given["attention_mask"] = torch.tensor([[1] * 12, [1] * 7 + [0] * 5])
    expected = predict(llama(2), batch=given, recipe=RECIPE, target="cpu").peak
    assert (
        predict(llama(2), batch=BatchEncoding(given), recipe=RECIPE, target="cpu").peak == expected
    )
    assert_predicted(llama(2), BatchEncoding(given), RECIPE)


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(lora_rank=2)], ids=["half", "lora"])
def test_gradients_that_frozen_weights_hold_stay(recipe):
    model = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8))
    for part in model:
        for parameter in part.parameters():
            parameter.grad = torch.ones_like(parameter)
    model[0].requires_grad_(False)
    predicted = predict(model, batch=torch.ones(4, 8), recipe=recipe, loss=mean_of, target="cpu")
    assert predicted.current.by_category["gradients"] > 0
    assert_same(predicted, tracked(model, torch.ones(4, 8), recipe, mean_of))


def mean_of(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x: (model(x) * ELSEWHERE[:4]).mean(),
        lambda model, x: model(x + ELSEWHERE.view(4, 8)).mean(),
        lambda model, x: model(ELSEWHERE).mean() + model(x).mean(),
    ],
    ids=["slice", "view", "given to a module"],
)
def test_a_tensor_from_elsewhere_that_stays_is_refused(loss):
    with pytest.raises(CannotTrace, match=r"a real tensor that is not a parameter.*as a buffer"):
        predict(nn.Linear(8, 8), batch=torch.ones(4, 8), loss=loss, target="cpu")


def test_a_tensor_from_elsewhere_that_is_computed_with_alone_has_no_bytes_of_the_step():
    labels, weight = torch.arange(4), torch.rand(8)
    assert_predicted(
        nn.Linear(8, 8),
        (torch.ones(4, 8), labels),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], weight=weight),
    )


ELSEWHERE = torch.ones(4, 8)
