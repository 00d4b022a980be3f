"""Programs that trained with wrong gradients, or left something behind, without a word."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from support.trainers import small
from torch import nn

from gradmem_lib import LoRALinear, Recipe, checkpoint_parts, merge_adapters, prepare, step
from gradmem_lib.techniques.checkpointing import checkpoint_layers
from gradmem_lib.techniques.lora import add_lora
from gradmem_lib.techniques.precision import MasterAdamW
from gradmem_lib.training.probe_rows import fewer_labels, groups_of_rows
from gradmem_lib.training.step import _identity

IN_TWO = Recipe(precision=None, attention=None, accumulation=2)


def rows(n: int = 4) -> dict:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(n, 4, generator=generator),
        "labels": torch.arange(n) % 3,
    }


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# A loss that is another one in the next step.


@dataclass
class Job:
    """A loss without a hash."""

    criterion: nn.Module

    def loss(self, model, batch):
        return self.criterion(model(batch["x"]), batch["labels"])

    __call__ = loss


class Weighted:
    """A loss with a hash, and with a tensor or none."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["labels"], weight=self.weight)


criterion: nn.Module = nn.CrossEntropyLoss()


def global_loss(model, batch):
    return criterion(model(batch["x"]), batch["labels"])


def test_another_criterion_is_another_loss(monkeypatch):
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 5.0]))
    model = nn.Linear(4, 3)

    def train(loss):
        step(model, sgd(model), rows(), IN_TWO, loss=loss)

    # each is gone after its step, and the next one may have its address
    for make in (
        Job,
        lambda one: Job(one).loss,
        lambda one: Weighted(one.weight),
        lambda one: global_loss,
    ):
        monkeypatch.setitem(globals(), "criterion", plain := nn.CrossEntropyLoss())
        train(make(plain))
        monkeypatch.setitem(globals(), "criterion", weighted)
        with pytest.raises(ValueError, match="weighs classes"):
            train(make(weighted))
    assert _identity(Job(plain)) != _identity(Job(weighted))  # one after the other


# Checkpoints around layers that are called in other ways.


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


# Adapters.


def test_a_merged_head_leaves_the_embedding_as_it_is():
    model, ids = small(tied=True), torch.arange(9)[None]
    model.lm_head = LoRALinear(model.lm_head, 2)
    nn.init.normal_(model.lm_head.B)
    before = model(ids).logits
    merge_adapters(model)
    torch.testing.assert_close(model(ids).logits, before)


# Batches and labels.


class TokenClassifier(nn.Module):
    class config:  # of a base whose padding token is no class
        pad_token_id = 50_283


def test_a_model_is_asked_only_about_labels_that_it_has():
    labels = torch.arange(12).view(2, 6) % 3
    for changed in fewer_labels(TokenClassifier(), {"labels": labels}, True):
        assert changed["labels"].max() <= 2


def test_a_row_alone_is_asked_about_beside_another_class():
    for label, other in ((0, 1), (2, 0)):
        (group,) = groups_of_rows([{"x": torch.ones(1, 4), "labels": torch.tensor([label])}])
        assert group["labels"].tolist() == [label, other]


def test_a_closure_computes_the_gradients_of_the_master_weights():
    model = nn.Linear(4, 3).bfloat16()
    optimizer, before = MasterAdamW(model.parameters(), lr=0.1), model.weight.clone()

    def closure():
        loss = model(rows()["x"].bfloat16()).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert not model.weight.equal(before)


# Losses and gradients that are not finite.


def deep():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def in_float32(model, batch):
    return F.cross_entropy(model(batch["x"]).float(), batch["labels"])


NOT_IN_BACKWARD = replace(IN_TWO, optimizer="sgd")
HOW = [
    NOT_IN_BACKWARD,
    replace(NOT_IN_BACKWARD, precision="autocast-fp16"),
    replace(NOT_IN_BACKWARD, accumulation=1, in_backward=True),
]


@pytest.mark.parametrize("recipe", HOW)
def test_a_row_that_makes_the_loss_nan_is_named_and_changes_nothing(recipe):
    model, batch = deep(), rows(8)
    run = prepare(model, recipe)
    before = [parameter.clone() for parameter in model.parameters()]
    batch["x"][5] = torch.nan
    where = {1: "row 6 of micro-batch 1", 2: "row 2 of micro-batch 2"}[recipe.accumulation]
    with pytest.raises(ValueError, match=rf"the loss is not finite.*\({where} alone shows it\)"):
        step(run.model, run.optimizer, batch, recipe, loss=in_float32)
    assert all(map(torch.equal, model.parameters(), before))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("precision", "clip", "factor"), [("autocast-fp16", None, 1e4), (None, 1.0, 1e38)]
)
def test_a_gradient_that_overflows_makes_no_step(precision, clip, factor):
    model, recipe = deep(), replace(IN_TWO, precision=precision)
    before = [parameter.clone() for parameter in model.parameters()]
    given = {"loss": lambda *given: factor * in_float32(*given), "max_grad_norm": clip}
    with pytest.raises(ValueError, match=r"a gradient is not finite.*scaler=GradScaler\(\)"):
        step(model, sgd(model), rows(), recipe, **given)
    assert all(map(torch.equal, model.parameters(), before))


# What is left after an error.


class TakesNoOverride(nn.Linear):
    def __setattr__(self, name, value):
        if name == "_call_impl":
            raise AttributeError("this module is closed")
        super().__setattr__(name, value)


def in_layers(*kinds):
    return nn.Sequential(*(nn.Sequential(kind(4, 4)) for kind in kinds))


def prepared(model, **given):
    rate = given.pop("lr", 1e-3)
    prepare(model, Recipe(**{"precision": None, "attention": None} | given), lr=rate)


HEAD = "no linear layer is called 'head'"


@pytest.mark.parametrize(
    ("model", "run", "given", "says"),
    [
        (in_layers(nn.Linear), prepared, {"checkpointing": 1, "lr": -1.0}, "learning rate"),
        (in_layers(nn.Linear, TakesNoOverride), checkpoint_parts, {"part": nn.Linear}, "closed"),
        (nn.Linear(4, 4), add_lora, {"rank": 2}, "no linear layer"),
        (in_layers(nn.Linear), add_lora, {"rank": 0}, "rank of at least 1"),
        (in_layers(nn.Linear), add_lora, {"rank": 2, "targets": ("head",)}, HEAD),
        (
            in_layers(nn.Linear),
            prepared,
            {"precision": "bf16", "lora_rank": 2, "lora_targets": ("head",)},
            HEAD,
        ),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_is(model, run, given, says):
    def as_it_is():
        parts = [(type(m), {**vars(m)}) for m in model.modules()]
        return parts, [(p.requires_grad, p.dtype) for p in model.parameters()]

    before = as_it_is()
    with pytest.raises((ValueError, AttributeError), match=says):
        run(model, **given)
    assert as_it_is() == before
