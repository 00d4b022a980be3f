"""prepare, make_optimizer and step against plain torch loops and numbers worked out by hand:
nothing here is asked twice.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.gradients import own_loss, ragged
from torch import nn
from transformers.optimization import Adafactor

from gradmem_lib import AdamW8bit, Recipe, checkpoint_parts, prepare, step
from gradmem_lib.course import models
from gradmem_lib.optimizers import ADAFACTOR_EPS, RELATIVE_RATE
from gradmem_lib.techniques.checkpointing import checkpoints_of
from gradmem_lib.techniques.lora import add_lora
from gradmem_lib.techniques.optimizers import SMALLEST_8BIT
from gradmem_lib.training.prepare import RATE

VOCAB, SEQ = 97, 16


def llama():
    return models.tiny_llama(layers=2, hidden=32, heads=2, intermediate=48, vocab=VOCAB)


def texts():
    return ragged((SEQ, 3, 9, 5), VOCAB)


ADAMW = partial(torch.optim.AdamW, lr=RATE, weight_decay=0.0)
OWN = {
    "adamw": partial(ADAMW, foreach=False, fused=False),
    "adamw-foreach": partial(ADAMW, foreach=True, fused=False),
    "adamw-fused": partial(ADAMW, foreach=False, fused=True),
    "adafactor-torch": lambda p: torch.optim.Adafactor(
        p, lr=RELATIVE_RATE, eps=ADAFACTOR_EPS, foreach=False
    ),
    "adafactor": lambda p: Adafactor(p, lr=RATE, scale_parameter=False, relative_step=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9, foreach=False),
}


@pytest.mark.parametrize("name", OWN)
def test_two_steps_are_those_of_a_plain_loop(name):
    recipe = Recipe(optimizer=name, momentum=0.9 if name == "sgd" else 0.0, accumulation=4)
    plain, ours = llama().train(), llama()
    optimizer, made = OWN[name](plain.parameters()), prepare(ours, recipe)
    for variant in ("foreach", "fused"):  # none is left to torch
        chosen = made.optimizer.defaults.get(variant)
        assert chosen == optimizer.defaults.get(variant)
    for batch in (texts(), ragged((7, 2, SEQ, 9), VOCAB)):
        loss = own_loss(plain, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert step(made.model, made.optimizer, batch, recipe).item() == pytest.approx(
            loss.item(), rel=1e-5
        )
    for (where, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        # An update is divided by its own size, which makes much of a gradient's last digits.
        limit = 1e-5 if name == "adafactor-torch" else 0.02 * RATE
        assert (p - q).abs().max() <= limit, where
    assert all(p.grad is None for p in ours.parameters())


def test_an_8_bit_update_in_several_slices_is_that_of_each_part():
    """A million numbers are updated at a time, and blocks do not look at each other: parts of their
    own end the same.
    """
    n, numbers = 2**20, torch.Generator().manual_seed(0)
    starts = torch.randn(n + SMALLEST_8BIT + 3, generator=numbers)
    whole, *parts = [nn.Parameter(t.clone()) for t in (starts, starts[:n], starts[n:])]
    optimizers = [AdamW8bit([p], lr=1e-2) for p in (whole, *parts)]
    for _ in range(2):
        whole.grad = torch.randn(len(starts), generator=numbers)
        parts[0].grad, parts[1].grad = whole.grad[:n].clone(), whole.grad[n:].clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(whole, torch.cat(parts)) and not torch.equal(whole, starts)


def test_gradients_too_small_for_float16_arrive():
    """2**-26 is nothing in float16, and 2**12 times as much is a number: what is unused has no
    gradient to unscale.
    """
    model, recipe = nn.Linear(1, 1, bias=False), Recipe(precision="autocast-fp16", optimizer="sgd")
    model.unused = nn.Parameter(torch.ones(1))
    made, before = prepare(model, recipe, lr=2.0**26), model.weight.item()
    small = {"loss": lambda m, x: m(x).float().mean() * 2.0**-26}
    step(model, made.optimizer, torch.ones(1, 1), recipe, **small)
    assert model.weight.item() == pytest.approx(before - 1, abs=1e-6) and model.unused.item() == 1


def test_marks_come_before_the_parts_of_a_step_and_stop_where_it_is_told():
    recipe, said = Recipe(accumulation=2, optimizer="sgd"), []
    made = prepare(nn.Linear(1, 1), recipe, lr=0.0)
    more = {"loss": lambda m, x: said.append(len(x)) or m(x).mean(), "mark": said.append}
    run = partial(step, made.model, made.optimizer, torch.ones(4, 1), recipe, **more)
    run()  # the first step asks the loss what it is the mean of
    said.clear()
    run()
    piece = ["forward", 2, "backward"]
    assert said == [*piece, *piece, "step"]
    said.clear()
    run(micro_batches=1)
    assert said == [*piece, "step"]


def test_clipping_takes_all_gradients_of_the_step_and_no_older_ones():
    """Those of weights that the optimizer does not have, of one that only the loss has, and the
    rows of a sparse gradient.
    """
    batches = [(torch.randint(0, 9, (6, 3)), torch.randn(6)) for _ in range(3)]
    recipe = Recipe(precision=None, accumulation=2)

    ends = []
    for plain in (True, False):
        torch.manual_seed(0)
        table, scale = nn.Embedding(9, 4, sparse=not plain), nn.Parameter(torch.tensor(3.0))
        model = nn.Sequential(table, nn.Flatten(), nn.Linear(12, 1))
        weights = [*model.parameters(), scale]
        optimizer = torch.optim.SGD([table.weight, scale], 0.5)

        def loss(model, batch, scale=scale):
            return (model(batch[0])[:, 0] * scale - batch[1]).square().mean()

        for batch in batches:
            if plain:
                loss(model, batch).backward()
                nn.utils.clip_grad_norm_(weights, 0.1)
                optimizer.step()
                for parameter in weights:
                    parameter.grad = None
            else:
                step(model, optimizer, batch, recipe, loss=loss, max_grad_norm=0.1)
        ends.append(torch.cat([parameter.detach().flatten() for parameter in weights]))
    torch.testing.assert_close(*ends)


def of_another_model(model):
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)


@pytest.mark.parametrize(
    ("make", "scheduler", "says"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), None, "'closure'"),
        (
            lambda model: torch.optim.SGD(model.parameters(), 0.1),
            torch.optim.lr_scheduler.ReduceLROnPlateau,
            "'metrics'",
        ),
        (of_another_model, None, "make the optimizer of model.parameters"),
    ],
)
def test_what_step_cannot_step_is_said_before_it_changes_anything(make, scheduler, says):
    model = nn.Linear(2, 1)
    optimizer, before = make(model), model.weight.detach().clone()
    schedule = scheduler and scheduler(optimizer)
    with pytest.raises(ValueError, match=says):
        step(model, optimizer, torch.ones(4, 2), Recipe(), loss=mean, scheduler=schedule)
    assert torch.equal(model.weight, before)


def mean(model, x):
    return model(x).mean()


class Difference(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))

    def forward(self, x, y=2.0):
        return ((self.weight * x - y) ** 2).mean()


@pytest.mark.parametrize(
    ("batch", "weight"),
    [
        ((torch.ones(2), torch.ones(2)), 3 - 0.1 * 2 * 2),
        (torch.ones(2), 3 - 0.1 * 2 * 1),
        ({"x": torch.ones(2), "y": torch.zeros(2)}, 3 - 0.1 * 2 * 3),
    ],
)
def test_batches_of_every_kind(batch, weight):
    recipe = Recipe(optimizer="sgd", accumulation=2, attention=None)
    made = prepare(Difference(), recipe, lr=0.1)
    step(made.model, made.optimizer, batch, recipe)
    assert made.model.weight.item() == pytest.approx(weight)


def test_a_recipe_for_several_processes_wants_what_prepare_returned():
    model, recipe = nn.Linear(2, 2), Recipe(sharding="ddp")
    with pytest.raises(ValueError, match=r"that prepare\(model, recipe\) returned"):
        step(model, [], torch.ones(2, 2), recipe, loss=lambda m, x: m(x).mean())


NO_SCALAR = r"Linear returned a tensor of shape \({}, 2\) where a scalar"


@pytest.mark.parametrize(
    ("rows", "accumulation", "loss", "says"),
    [
        (1, 1, None, NO_SCALAR.format(1)),
        (3, 1, None, NO_SCALAR.format(3)),
        (1, 1, lambda m, b: None, "returned NoneType where"),
        (4, 2, lambda m, b: {"a": m(b).mean()}.get("loss"), "^put labels into the .*NoneType"),
    ],
)
def test_what_is_no_loss_is_named(rows, accumulation, loss, says):
    recipe = Recipe(attention=None, accumulation=accumulation)
    with pytest.raises(ValueError, match=says):
        step(nn.Linear(2, 2), [], torch.ones(rows, 2), recipe, loss=loss)


class Older(nn.Linear):
    """Checkpoints by the names that transformers had for them before 5.23; some versions could not
    choose one layer in so many.
    """

    asked = None

    def gradient_checkpointing_enable(self, kwargs, **more):
        self.asked = kwargs, more

    def gradient_checkpointing_disable(self):
        self.asked = None


@pytest.mark.parametrize(
    ("fields", "more"),
    [({"checkpointing": "per-layer"}, {}), ({"every_n_layers": 2}, {"every_n_layers": 2})],
)
def test_checkpoints_of_older_names_are_asked_for_no_more_than_is_needed(fields, more):
    model = Older(1, 1)
    made = prepare(model, Recipe(**fields))
    assert model.asked == ({"use_reentrant": False}, more)
    made.undo.close()
    assert model.asked is None


def test_what_transformers_cannot_checkpoint_is_checkpointed_here():
    """As LayoutLMv3, whose layers it does not call through a checkpoint."""
    model = llama()
    model.supports_gradient_checkpointing = False
    prepared = prepare(model, Recipe(checkpointing="per-layer"))
    assert len(checkpoints_of(model)) == 1
    prepared.undo.close()
    assert not checkpoints_of(model)


def test_what_is_in_eval_mode_as_a_whole_is_put_into_training_mode():
    """As ``from_pretrained`` leaves it, also inside of a class of one's own, which is made in
    training mode. A frozen teacher stays so, and so do single parts: they are somebody's choice.
    """
    loaded, teacher, trains = llama().eval(), llama().eval().requires_grad_(False), llama()
    trains.model.layers[0].eval()
    prepare(nn.ModuleList([loaded, teacher, trains]), Recipe(attention=None))
    assert all(part.training for part in loaded.modules())
    assert not any(part.training for part in teacher.modules())
    assert trains.training and not trains.model.layers[0].mlp.training
    prepare(trains.eval(), Recipe(attention=None))
    assert all(part.training for part in trains.modules())


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (None, torch.float64),
        ("bf16", torch.bfloat16),
        ("autocast-bf16", torch.float32),
    ],
)
def test_weights_are_cast_as_the_precision_says(precision, dtype):
    """A module whose own dtype is none of them; whole numbers stay what they are."""
    model = nn.BatchNorm1d(2).double()
    prepare(model, Recipe(precision=precision, optimizer="sgd"))
    assert {t.dtype for t in (*model.parameters(), model.running_mean)} == {dtype}
    assert model.num_batches_tracked.dtype == torch.int64


# Losses and gradients that are not finite.


def rows(n: int = 4) -> dict:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(n, 4, generator=generator),
        "labels": torch.arange(n) % 3,
    }


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


IN_TWO = Recipe(precision=None, attention=None, accumulation=2)


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
    ("precision", "clip", "changed"),
    [
        ("autocast-fp16", None, lambda loss: 1e4 * loss),
        (None, 1.0, lambda loss: 1e38 * loss),
        # the loss, and a 0 whose gradient is no number
        (None, 1.0, lambda loss: loss + 0.0 * (loss - loss.detach()).sqrt()),
    ],
)
def test_a_gradient_that_is_not_finite_makes_no_step(precision, clip, changed):
    model, recipe = deep(), replace(IN_TWO, precision=precision)
    before = [parameter.clone() for parameter in model.parameters()]
    given = {"loss": lambda *given: changed(in_float32(*given)), "max_grad_norm": clip}
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
