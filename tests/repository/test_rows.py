"""A new optimizer is its class and one row: everything else reads the row. A value without a row is
refused in a sentence, never taken for another value.
"""

from __future__ import annotations

import copy
import math
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from support.operations import Operations
from support.predicted import tiny
from torch import nn
from torch.utils._pytree import tree_leaves

from gradmem_lib import MemoryTracker
from gradmem_lib.course.material import accounting
from gradmem_lib.course.material.shapes import SHAPES
from gradmem_lib.names import ATTENTION, OFFLOAD, OPTIMIZERS, PRECISIONS, SELECTIVE, SHARDING
from gradmem_lib.optimizers import Bytes, ClosedForm, OptimizerSpec
from gradmem_lib.planning.cards import CARDS, Card
from gradmem_lib.planning.cost import seconds_per_token
from gradmem_lib.planning.held import resident_bytes, saved_bytes_per_token
from gradmem_lib.planning.options import changes, describe
from gradmem_lib.planning.work import count
from gradmem_lib.prediction.predict import predict
from gradmem_lib.techniques import optimizers
from gradmem_lib.training.prepare import (
    change_model,
    make_optimizer,
    optimizer_class,
    prepare,
    set_checkpointing,
)
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.training.step import step
from gradmem_lib.training.trainer import make_trainer
from gradmem_lib.training.trainer_arguments import arguments

CARD = CARDS["RTX 4090 24GB"]
WIDE = Card("endless operations, one byte a second", 1, math.inf, math.inf, 1.0)


class OneMoment(torch.optim.Optimizer):
    """Steps by the sign of a running mean, which is its one state."""

    def __init__(self, params, lr: float, beta: float = 0.5):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 1 - group["beta"])
                p.sub_(state["mean"].sign(), alpha=group["lr"])


ROW = OptimizerSpec(
    words="one state; steps by its sign",
    made_by="techniques.optimizers.OneMoment",
    settings={"beta": 0.9},
    learning_rate=3e-4,
    state_bytes=Bytes(1),
    step_traffic=Bytes(2),
)


@pytest.fixture
def add(monkeypatch):
    """Add the class, and a row for it: nothing else."""
    monkeypatch.setattr(optimizers, "OneMoment", OneMoment, raising=False)

    def add_row(**more):
        monkeypatch.setitem(OPTIMIZERS, "one-moment", replace(ROW, **more))

    return add_row


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_row_is_built_and_costed_with_its_own_bytes(add, precision):
    add()
    recipe = Recipe(optimizer="one-moment", precision=precision)
    model = tiny()
    work = count(model.config)
    config = copy.deepcopy(model.config)
    made = prepare(model, recipe)
    assert type(made.optimizer) is OneMoment
    assert made.optimizer.defaults == {"lr": 3e-4, "beta": 0.9}
    ids = torch.randint(0, 512, (1, 8))
    step(made.model, made.optimizer, {"input_ids": ids, "labels": ids}, recipe)
    states = [t for state in made.optimizer.state.values() for t in state.values()]
    width = 4 if precision == "float32" else 2
    held = sum(t.nbytes for t in states)
    assert resident_bytes(work, recipe)["optimizer"] == held == width * work.parameters

    def bytes_moved(name):
        return seconds_per_token(work, replace(recipe, optimizer=name), WIDE, 1, 1)

    moved = bytes_moved("one-moment") - bytes_moved("sgd")
    assert moved == pytest.approx(2 * width * work.parameters)
    assert "one-moment" in describe(recipe)
    found = predict(config, batch_size=1, seq_len=8, recipe=recipe, target="cpu")
    assert max(found.timeline.by_category["optimizer"]) == held


BY_CHANCE = {"rounds_by_chance": True}
REFUSED = [
    ({}, {"momentum": 0.9}, "choose optimizer='sgd'"),
    ({}, {"precision": "float32-master"}, "float32-master is written for AdamW"),
    ({}, {"sharding": "fsdp"}, "one-moment may need whole weights"),
    ({}, {"sharding": "zero2"}, "one-moment may need whole weights"),
    (BY_CHANCE, {"precision": "float32"}, "one-moment rounds .*by chance"),
    (BY_CHANCE, {"precision": "autocast-fp16"}, "one-moment rounds .*by chance"),
    (BY_CHANCE, {"precision": "bf16", "sharding": "ddp"}, "one-moment rounds .*by chance"),
]


@pytest.mark.parametrize(("row", "fields", "says"), REFUSED)
def test_a_row_refuses_what_it_does_not_say(add, row, fields, says):
    add(**row)
    with pytest.raises(ValueError, match=says):
        Recipe(optimizer="one-moment", **fields)


def test_a_row_without_a_closed_form_or_a_trainers_name_has_none(add):
    add()
    with pytest.raises(ValueError, match="'one-moment', which has no closed form"):
        accounting.bytes_per_parameter("bf16", "one-moment")
    with pytest.raises(ValueError, match="does not compare optimizer='one-moment': choose"):
        changes(Recipe(optimizer="one-moment"))
    assert "optim" not in arguments(Recipe(optimizer="one-moment"), 2)


def test_a_row_allows_what_it_says(add):
    add(steps_shards=True, takes_momentum=True, closed_form=ClosedForm(tensors=1))
    Recipe(optimizer="one-moment", sharding="fsdp", momentum=0.5)
    Recipe(optimizer="one-moment", sharding="ddp")
    shape = SHAPES["tiny Llama"]
    assert "one-moment" in accounting.OPTIMIZERS
    held = accounting.resident_bytes(shape, "autocast-bf16", "one-moment")
    assert held["optimizer"] == 4 * shape.parameters  # one state in float32, and no counters
    with_momentum = accounting.resident_bytes(shape, "bf16", "one-moment", 0.5)
    assert with_momentum["optimizer"] == 2 * 2 * shape.parameters
    assert accounting.estimate(shape, batch_size=1, seq_len=8, optimizer="one-moment").total > 0


def test_a_trainer_takes_the_row(add, tmp_path):
    add()
    given = {"batch_size": 2, "output_dir": str(tmp_path), "max_steps": 1}
    trainer = make_trainer(tiny(), Recipe(optimizer="one-moment"), **given, weight_decay=0.0)
    assert trainer.args.learning_rate == 3e-4
    made = trainer.create_optimizer()
    assert type(made) is OneMoment and "betas" not in made.param_groups[0]
    add(
        trainer_name="adamw_bnb_8bit",
        adam_settings=True,
        **BY_CHANCE,
    )
    rounded = Recipe(optimizer="one-moment", precision="bf16", sharding="zero1")
    assert arguments(rounded, 2)["optim"] == "adamw_bnb_8bit"


def test_a_row_keeps_master_weights_by_its_own_class(add, monkeypatch):
    add(master="techniques.optimizers.WithMaster")
    monkeypatch.setattr(optimizers, "WithMaster", type("WithMaster", (OneMoment,), {}), False)
    recipe = Recipe(optimizer="one-moment", precision="float32-master")
    assert type(make_optimizer(WEIGHTS, recipe, 0.1)).__name__ == "WithMaster"


def stepped_once(
    name: str, *sizes: tuple[int, ...]
) -> tuple[nn.ParameterList, torch.optim.Optimizer]:
    weights = nn.ParameterList([nn.Parameter(torch.ones(size)) for size in sizes])
    optimizer = make_optimizer([*weights], Recipe(optimizer=name), 0.1)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return weights, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_traffic_of_a_row_is_that_of_its_step(name):
    """A kernel reads and writes each state once. A factored optimizer's operations are counted."""
    row = OPTIMIZERS[name]
    if not row.factored:
        for width in (2, 4):
            twice = 2 * row.bytes_of_states(width)
            assert row.bytes_of_a_step(width) == pytest.approx(twice, rel=0.02)
        return
    weights, optimizer = stepped_once(name, (64, 64))
    with Operations() as ran:
        optimizer.step()
    touched = tree_leaves([rest for func, *rest in ran.seen if not func.is_view])
    sizes = [leaf.numel() for leaf in touched if isinstance(leaf, torch.Tensor)]
    besides_weight_and_gradient = sizes.count(weights[0].numel()) - 3
    assert row.bytes_of_a_step(4) == pytest.approx(4 * besides_weight_and_gradient, rel=0.06)


@pytest.mark.parametrize("name", [name for name, row in OPTIMIZERS.items() if row.closed_form])
def test_a_closed_form_is_what_a_step_holds(name):
    form = OPTIMIZERS[name].closed_form
    weights, optimizer = stepped_once(name, (3000,), (10,))
    states = [value for state in optimizer.state.values() for value in state.values()]
    counters = [value for value in states if isinstance(value, torch.Tensor) and not value.dim()]
    assert len(counters) == len(weights) * form.counters
    with MemoryTracker(weights, optimizer, live=False) as tracker:
        optimizer.step()
    made = tracker.peak.total - tracker.current.total
    assert made == 4 * (3010 * form.whole_model + 3000 * form.tensors)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_row_names_classes_that_are_there(name):
    row = OPTIMIZERS[name]
    for made_by in filter(None, (row.made_by, row.master)):
        assert issubclass(optimizer_class(made_by), torch.optim.Optimizer)


def test_a_closed_form_is_of_whole_bytes_for_every_number():
    for wrong in ({"factored": True}, {"state_bytes": Bytes(own=2 + 8 / 256)}):
        with pytest.raises(ValueError, match="leave closed_form out"):
            replace(ROW, closed_form=ClosedForm(), **wrong)


@pytest.mark.parametrize(
    ("shape", "numbers"),
    [((), 1), ((7,), 7), ((5, 3), 8), ((2, 5, 3), 16), ((0, 3), 3)],
)
def test_factored_states_are_those_of_torch(shape, numbers):
    row = OPTIMIZERS["adafactor-torch"]
    assert row.numbers_with_states(shape) == numbers
    weight = nn.Parameter(torch.ones(shape))
    weight.grad = torch.ones_like(weight)
    optimizer = make_optimizer([weight], Recipe(optimizer="adafactor-torch"), 0.1)
    if weight.numel():
        optimizer.step()
        state = optimizer.state[weight]
        kept = [t for name, t in state.items() if name != "step" and t is not None]
        assert sum(t.numel() for t in kept) == numbers


def forged(**fields) -> Recipe:
    """A recipe with a value that ``Recipe`` itself refuses, as if a check had been forgotten."""
    recipe = Recipe(optimizer="adamw-fused")
    for field, value in fields.items():
        object.__setattr__(recipe, field, value)
    return recipe


WORK = count(tiny().config)
WEIGHTS = [nn.Parameter(torch.ones(3))]


def checkpointed(recipe: Recipe) -> None:
    set_checkpointing(tiny(), recipe, ExitStack())


ASKED = {
    "made": lambda r: make_optimizer(WEIGHTS, r, 0.1),
    "prepared": lambda r: prepare(tiny(), r),
    "for Trainer": lambda r: arguments(r, 2),
    "bytes": lambda r: resident_bytes(WORK, r, 2),
    "time": lambda r: seconds_per_token(WORK, r, CARD, 1, 8, cards=2),
    "kept": lambda r: saved_bytes_per_token(WORK, r),
    "changed": lambda r: change_model(tiny(), r),
    "checkpointed": checkpointed,
    "in a plan": changes,
}
UNKNOWN = {
    "optimizer": ("made", "prepared", "for Trainer", "bytes", "time", "in a plan"),
    "precision": ("prepared", "for Trainer", "bytes", "time", "kept", "in a plan"),
    "sharding": ("made", "bytes", "time"),
    "offload": ("bytes", "time", "kept"),
    "attention": ("prepared", "changed"),
    "checkpointing": ("prepared", "checkpointed", "time", "kept"),
}


@pytest.mark.parametrize(("option", "asked"), [(o, a) for o, some in UNKNOWN.items() for a in some])
def test_an_unknown_value_is_refused_wherever_it_is_asked(option, asked):
    with pytest.raises(ValueError, match="'new'"):
        Recipe(**{option: "new"})
    with pytest.raises(ValueError, match=r"='new'.*: (choose|give) "):
        ASKED[asked](forged(**{option: "new"}))


@pytest.mark.parametrize(
    "rows", [ATTENTION, OFFLOAD, OPTIMIZERS, PRECISIONS, SELECTIVE, SHARDING], ids=lambda r: r.what
)
def test_a_value_has_a_row_or_is_none(rows):
    with pytest.raises(TypeError, match=f"{rows.what}='new' was given 'words', which is no row"):
        rows["new"] = "words"
    assert "new" not in rows and all(row.words for row in rows.values())
    with pytest.raises(ValueError, match="'new' is not known: choose one of"):
        rows["new"]
    if rows.what in ("precision", "optimizer", "attention"):
        with pytest.raises(ValueError, match=f"{rows.what} is 'new', which has no closed form"):
            accounting.estimate(SHAPES["tiny Llama"], batch_size=1, seq_len=8, **{rows.what: "new"})
