"""Modules of one's own: what they do, hold and keep is predicted as the tracker measures it, or
refused. The step that is tracked is one of the very module that was predicted, so that a prediction
which leaves something in it shows.
"""

from __future__ import annotations

import operator
import random
import threading
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.predicted import assert_predicted, mean_square
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradmem_lib import Recipe, predict
from gradmem_lib.prediction.question import CannotTrace
from gradmem_lib.prediction.trace import traced
from gradmem_lib.techniques.checkpointing import checkpoint_layers

ROWS = torch.rand(4, 8)
AS_IT_IS = {"precision": None, "attention": None}


class Program(NamedTuple):
    """``make`` builds a module. Without a ``loss``, what it returns is one."""

    make: Callable[[], nn.Module]
    batch: Any = ROWS
    fields: dict = AS_IT_IS
    loss: Callable | None = None


PROGRAMS: dict[str, Program] = {}


class OneLayer(nn.Module):
    def __init__(self, inputs: int = 8, outputs: int = 8):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)


# Views that are changed in place.

SHAPE = (-1, 4, 16)


def normed(y):
    """As a layer of instance norm with an activation in place."""
    return F.relu_(F.instance_norm(y.view(SHAPE)))


def transposed(y):
    view = y.t()
    view *= 2
    return view.t()


def selected(y):
    view = y[0]
    view *= 2
    return view


def assigned(y):
    y[1:, 2:] = 0  # a part of a part, which is not used afterwards
    return y


def base(y):
    y.view(SHAPE).sin_()
    return y


def part_of_part(y):
    return y[2:, 8:].sin_()


class Changing(nn.Module):
    """A residual layer: the gradient of its sum waits while the changed view's backward runs."""

    def __init__(self, change):
        super().__init__()
        self.beside, self.before, self.change = nn.Linear(16, 16), nn.Linear(16, 16), change

    def forward(self, x):
        beside = self.beside(x)
        changed = self.change(self.before(x))
        return (beside.flatten()[: changed.numel()].view_as(changed) + changed).view(-1, 16)


class Recomputed(nn.Module):
    def __init__(self, use_reentrant: bool):
        super().__init__()
        self.layers = nn.ModuleList(Changing(normed) for _ in range(3))
        self.first, self.use_reentrant = nn.Linear(16, 16), use_reentrant

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


def recomputed_here() -> nn.Module:
    layers = nn.Sequential(*(Changing(normed) for _ in range(3)))
    checkpoint_layers(layers, every=1)
    return layers


MANY = torch.rand(400, 16)
for change in (normed, transposed, selected, assigned, base):
    PROGRAMS[change.__name__] = Program(partial(Changing, change), MANY, loss=mean_square)
PROGRAMS["recomputed by this library"] = Program(recomputed_here, MANY, loss=mean_square)
PROGRAMS["recomputed"] = Program(partial(Recomputed, use_reentrant=False), MANY, loss=mean_square)


# Layers whose kernels keep more than they return.


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layers = kind(8, 24, **options)
        self.head = nn.Linear(48 if options.get("bidirectional") else 24, 1)

    def forward(self, x):
        return self.head(self.layers(x)[0]).square().mean()


TIMES = torch.randn(37, 5, 8)
MORE = {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.1}
for kind in (nn.GRU, nn.RNN):
    PROGRAMS[kind.__name__] = Program(partial(Recurrent, kind), TIMES)
    PROGRAMS[f"two layers of {kind.__name__}"] = Program(partial(Recurrent, kind, **MORE), TIMES)


class Depthwise(nn.Module):
    """As in Segformer: tokens laid out as a picture between two linear layers."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(8, 16), nn.Linear(16, 4)
        self.between = nn.Conv2d(16, 16, 3, padding=1, groups=16)

    def forward(self, x):
        picture = self.before(x).transpose(1, 2).view(len(x), 16, 6, 6)
        return self.after(self.between(picture).flatten(2).transpose(1, 2)).square().mean()


for n, pieces in ((1, 1), (2, 2)):
    tokens, cut = torch.randn(n, 36, 8), {"accumulation": pieces, "optimizer": "sgd"}
    PROGRAMS[f"tokens as a picture {n} {pieces}"] = Program(Depthwise, tokens, cut)


class Bags(nn.Module):
    def __init__(self, mode: str, **options):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(40, 8, mode=mode, **options), nn.Linear(8, 1)

    def forward(self, ids, offsets):
        return self.out(self.bag(ids, offsets)).mean()


IDS = {"ids": torch.arange(30) % 40, "offsets": torch.tensor([0, 4, 9, 30])}
BAGS = {"sum": {}, "mean": {"padding_idx": 3}, "max": {"include_last_offset": True}}
for mode, options in BAGS.items():
    sgd = AS_IT_IS | {"optimizer": "sgd"}
    PROGRAMS[f"bag {mode}"] = Program(partial(Bags, mode, **options), IDS, sgd)


# Hooks, functions and caches that hold modules and tensors.


@lru_cache
def positions(tokens: int) -> Tensor:
    return torch.arange(tokens, dtype=torch.float32)


class FromAFunction(OneLayer):
    def forward(self, x):  # (rows, 8)
        return self.linear(x) * positions(x.shape[1])


class FromAMethod(OneLayer):
    @staticmethod
    @cache
    def own(tokens: int) -> dict[str, Tensor]:
        return {"positions": torch.arange(tokens, dtype=torch.float32)}

    def forward(self, x):
        return self.linear(x) * self.own(x.shape[1])["positions"]


class KeepsFeatures(nn.Module):
    """Its hook keeps what a layer returns, in a dict of the model that the hook's closure holds."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.features: dict[str, Tensor] = {}

        def keep(module, inputs, output):
            self.features["up"] = output

        self.up.register_forward_hook(keep)

    def forward(self, x):
        return self.down(self.up(x).relu()) + self.features.pop("up").mean()


def holds_itself() -> nn.Module:
    model = nn.Linear(8, 8)

    def twice(x, again=True):
        x = F.linear(x, model.weight).relu()
        return twice(x, again=False) if again else x

    model.forward = lambda x: twice(x)
    return model


class RemembersAMask(OneLayer):
    """A function's variable keeps what the first forward has made."""

    def __init__(self):
        super().__init__()
        mask = None

        def masked(x):
            nonlocal mask
            if mask is None:
                mask = torch.ones(x.shape[-1])
            return x * mask

        self.masked = masked

    def forward(self, x):
        return self.masked(self.linear(x))


class Recorder:
    def __init__(self):
        self.lock = threading.Lock()  # which cannot be copied
        self.calls = 0

    def note(self):
        self.calls += 1


def notes_calls() -> nn.Module:
    model, note = nn.Sequential(nn.Linear(8, 8)), Recorder().note
    model[0].register_forward_hook(lambda module, inputs, out: note())
    return model


class FunctionsInLists(nn.Module):
    """Functions in lists, dicts and ``functools.partial``, and functions that hold such lists."""

    def __init__(self):
        super().__init__()
        self.inner = inner = nn.Linear(8, 8)
        self.outer = nn.Linear(8, 8)
        chosen = [inner, self.outer]
        chosen_by_name = {"first": (self.outer, "a name")}

        def apply_all(x):
            for part in chosen:
                x = part(x)
            return x

        self.choices = [lambda x: inner(x), apply_all, torch.relu]
        self.by_name = {"named": lambda x: chosen_by_name["first"][0](x)}
        self.bound = partial(lambda layer, x, scale: self.outer(layer(x)) * scale, inner, scale=2)
        self.default = lambda x, other=inner: other(x)
        self.itself = [self.choices]
        self.itself.append(self.itself)

    def forward(self, x):
        for call in (*self.choices, self.by_name["named"], self.bound, self.default):
            x = call(x)
        return x


class OneVariable(nn.Module):
    """Two functions with one variable: what one assigns, the other reads."""

    def __init__(self):
        super().__init__()
        current = first = self.first = nn.Linear(8, 8)
        second = self.second = nn.Sequential(nn.Linear(8, 96), nn.Linear(96, 8))

        def switch():
            nonlocal current
            current = second if current is first else first

        self.switch, self.call = switch, lambda x: current(x)

    def forward(self, x):
        x = self.call(x)
        self.switch()
        x = self.call(x)
        self.switch()
        return x


for make in (
    FromAFunction,
    FromAMethod,
    KeepsFeatures,
    holds_itself,
    RemembersAMask,
    notes_calls,
    FunctionsInLists,
    OneVariable,
):
    PROGRAMS[make.__name__] = Program(make, loss=mean_square)


# Numbers that are drawn or read.


class Drops(OneLayer):
    """Leaves a part out with a probability, as LoHa does. ``compare`` decides it by a number."""

    def __init__(self, compare: Callable[[Tensor, float], Tensor], p: float):
        super().__init__()
        self.compare, self.p = compare, p

    def forward(self, x):
        y = self.linear(x)
        if self.compare(torch.rand(1), self.p):
            y = y.exp()
        return y.mean()


def numpy_number() -> float:
    return np.random.rand()


class Dropping(nn.Module):
    """Leaves each layer out with a probability, as stochastic depth does."""

    def __init__(self, probability: float, draw=random.random):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.probability, self.draw = probability, draw

    def forward(self, x):
        for layer in self.layers:
            if self.draw() >= self.probability:
                x = x + layer(x).sin()
        return x.square().mean()


for compare in (operator.gt, operator.ge, operator.lt, operator.le):
    p = float(compare is operator.lt)
    PROGRAMS[f"drops {compare.__name__}"] = Program(partial(Drops, compare, p))
PROGRAMS["drops no layer"] = Program(partial(Dropping, 0.0))
PROGRAMS["drops no layer, by numpy"] = Program(partial(Dropping, 0.0, numpy_number))


# What a batch and a recipe may be.


class Flagged(OneLayer):
    def forward(self, x, target, double=False):
        return ((self.linear(x) - target) * (2 if double else 1)).square().mean()


class MakesOnMeta(OneLayer):
    """Asks for a shape on the device meta, whose tensors have no memory, however large they are."""

    def forward(self, x):
        many = x.to("meta").repeat(100, 1)
        return (self.linear(x) + torch.zeros(many.shape[1])).square().mean()


class Counts(OneLayer):
    """Keeps more in every fifth call than in the others: no micro-batch stands for others."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        y = self.linear(x)
        if self.calls % 5 == 4:
            y = y.exp().log().exp().log()  # the same values, so that the loss may be cut
        return y.square().mean()


class NormalizedWeights(nn.Module):
    """Its weights are computed from others before each forward, and kept until the next one."""

    def __init__(self):
        super().__init__()
        first, last = (nn.utils.weight_norm(nn.Linear(n, m)) for n, m in ((8, 16), (16, 1)))
        self.layers = nn.Sequential(first, nn.Tanh(), last)

    def forward(self, x):
        return self.layers(x).square().mean()


def normed_layers() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(4)))


def half_frozen_with_gradients() -> nn.Module:
    """Gradients that frozen weights hold stay."""
    model = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model[0].requires_grad_(False)
    return model


class Sign(torch.optim.Optimizer):
    """A class of one's own, with a state of another dtype than its parameter's."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p, dtype=torch.bfloat16)
                state["mean"].lerp_(p.grad.bfloat16(), 0.1)
                p.sub_(state["mean"].sign(), alpha=group["lr"])


CENTERED = partial(torch.optim.RMSprop, centered=True, momentum=0.9)
SQUARE = torch.randn(32, 8)
PAIR = {"x": SQUARE, "target": SQUARE}
SCALED = PAIR | {"by": torch.tensor(2.0)}
PIECES = {"accumulation": 5}
PROGRAMS |= {
    "a number in the batch": Program(
        Flagged, SCALED, {"accumulation": 2}, lambda m, b: m(b["x"], b["target"] * b["by"])
    ),
    "one tensor twice": Program(Flagged, PAIR),
    "a flag in the batch": Program(Flagged, PAIR | {"target": SQUARE[:, :1], "double": True}),
    "inputs with a gradient": Program(Flagged, PAIR | {"x": SQUARE.clone().requires_grad_()}),
    "a shape on meta": Program(MakesOnMeta),
    "running statistics in checkpoints": Program(
        normed_layers, torch.rand(4, 16), AS_IT_IS | {"checkpointing": 2}, mean_square
    ),
    "micro-batches that differ": Program(Counts, torch.randn(35, 8), PIECES),
    "frozen weights' gradients": Program(half_frozen_with_gradients, fields={}, loss=mean_square),
    **{
        f"weights that a hook computes {fields}": Program(NormalizedWeights, fields=fields)
        for fields in ({"accumulation": 2}, {"precision": "autocast-bf16"})
    },
    **{
        f"stepped by {optimizer}": Program(
            lambda: nn.Sequential(nn.Linear(8, 48), nn.Linear(48, 4)),
            fields=AS_IT_IS | {"optimizer": optimizer},
            loss=mean_square,
        )
        for optimizer in (torch.optim.Adagrad, torch.optim.NAdam, CENTERED, Sign)
    },
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_module_is_predicted_to_the_byte_and_left_as_it_was(name):
    make, batch, fields, loss = PROGRAMS[name]
    positions.cache_clear()
    FromAMethod.own.cache_clear()
    model = make()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]

    def check_unchanged() -> None:
        assert [module.training for module in model.modules()] == modes
        assert not getattr(model, "features", None)
        for key, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[key]), key

    assert_predicted(model, batch, Recipe(**fields), loss, then=check_unchanged)


def test_a_real_step_before_a_prediction_changes_nothing():
    """What it has put into caches of functions is used, and kept."""
    for make in (FromAFunction, FromAMethod):
        model = make()
        expected, kept = model(ROWS), positions(8)
        assert_predicted(model, ROWS, Recipe(**AS_IT_IS, optimizer="sgd"), mean_square)
        assert positions(8) is kept and model(ROWS).shape == expected.shape


def test_every_micro_batch_of_a_module_is_asked_of_a_cards_allocator():
    asked = {"batch": torch.randn(35, 8), "recipe": Recipe(**PIECES), "target": "cuda"}
    on_card = predict(Counts(), **asked)
    assert on_card.requests() == traced(on_card._question, None).requests


def test_a_part_in_eval_mode_stays_so():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    model[1].eval()
    asked = {"batch": torch.rand(9, 64), "loss": mean_square, "target": "cpu"}
    off = predict(model, **asked)
    model.train()
    on = predict(model, **asked)
    assert on.peak_by_phase["forward"] > off.peak_by_phase["forward"]
    assert off.notes == on.notes == ()


# What is refused.


class HoldsElsewhere(OneLayer):
    def __init__(self):
        super().__init__()
        other = nn.Linear(8, 8)
        self.elsewhere = [lambda x: other(x)]

    def forward(self, x):
        return self.elsewhere[0](self.linear(x)).mean()


class ComputedOnce(OneLayer):
    """What it has computed from a weight is there from the beginning, and its graph too."""

    def __init__(self):
        super().__init__()
        self.doubled = self.linear.weight * 2

    def forward(self, x):
        return (self.linear(x) @ self.doubled.detach()).square().mean()


def gradient_with_a_graph() -> nn.Module:
    model = nn.Linear(8, 1)
    model(ROWS).square().mean().backward(create_graph=True)
    return model


class Reads(OneLayer):
    def __init__(self, read):
        super().__init__()
        self.read = read

    def forward(self, x):
        y = self.linear(x)
        self.read(y)
        return y.sum()


def changed(number: Tensor, p: float) -> Tensor:
    """What was known of a random number is so no more after a change in place."""
    number -= 0.5
    return number > p


def sparse() -> nn.Module:
    return nn.Embedding(50, 16, sparse=True)


def with_hook(kind: str) -> nn.Module:
    model = nn.Linear(8, 8)
    getattr(model.weight, kind)(lambda tensor: None)
    return model


NUMBERS = torch.randint(0, 50, (6, 5))
REFUSED = {
    r"changed in place.*change a copy instead": Program(
        partial(Changing, part_of_part), MANY, loss=mean_square
    ),
    "give use_reentrant=False": Program(
        partial(Recomputed, use_reentrant=True), MANY, loss=mean_square
    ),
    r"reads a tensor's value.*(\n.*)*test_own_modules.py(.|\n)*MemoryTracker": Program(
        partial(Reads, lambda y: y.sum().item())
    ),
    "nonzero": Program(partial(Reads, lambda y: y[y > 0])),
    "reads a tensor.s value": Program(partial(Drops, operator.gt, 0.5)),
    "reads a tensor.s value,": Program(partial(Drops, changed, 0.0)),
    "a parameter that is not in the module": Program(HoldsElsewhere),
    r"the model holds a tensor of shape \(8, 8\)": Program(ComputedOnce, loss=mean_square),
    r"\(1, 8\) has a graph.*zero_grad": Program(gradient_with_a_graph, loss=mean_square),
    r"sparse_coo.*sparse=False": Program(sparse, NUMBERS, {"optimizer": "sgd"}, mean_square),
    r"a parameter has a hook.*remove it": Program(partial(with_hook, "register_hook")),
    r"a parameter has a hook.*remove": Program(
        partial(with_hook, "register_post_accumulate_grad_hook")
    ),
    r"torch\.compile": Program(lambda: torch.compile(nn.Linear(8, 1))),
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_is_not_known_is_refused(says):
    make, batch, fields, loss = REFUSED[says]
    with pytest.raises(CannotTrace, match=says):
        predict(make(), batch=batch, recipe=Recipe(**fields), loss=loss, target="cpu")


@pytest.mark.parametrize(("kind", "target"), [(nn.LSTM, "cpu"), (nn.GRU, "cuda")])
def test_what_recurrent_kernels_keep_is_refused(kind, target):
    with pytest.raises(CannotTrace, match="keeps a workspace for backward"):
        predict(Recurrent(kind), batch=TIMES, target=target)


@pytest.mark.parametrize("draw", [random.random, numpy_number])
@pytest.mark.parametrize("probability", [0.01, 0.99])
def test_layers_that_are_left_out_by_chance_are_refused(draw, probability):
    state = random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(CannotTrace, match="set that probability to 0"):
        predict(Dropping(probability, draw), batch=ROWS, target="cpu")
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state
