"""Lesson 01's exercises: count what stays, what autograd saves, what the logits need, and fit a step into a budget."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..exercise import Exercise, Mistake, calls, measure
from .settings import flat, train_setting


def resident_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of parameters, gradients and AdamW's states of a model in training."""
    parameters = list(model.parameters())  # a tied weight comes once
    trained = [p for p in parameters if p.requires_grad]
    gradients = sum(p.numel() * p.element_size() for p in trained)
    return {
        "parameters": sum(p.numel() * p.element_size() for p in parameters),
        "gradients": gradients,
        "optimizer": 2 * gradients + 4 * len(trained),
    }


def _resident(parameters, trained, *, moments=2, moment_bytes=None, counters=True, size=None):
    def nbytes(tensors, per=None):
        return sum(p.numel() * (per or p.element_size()) for p in tensors)

    return {
        "parameters": nbytes(parameters, size),
        "gradients": nbytes(trained, size),
        "optimizer": moments * nbytes(trained, moment_bytes or size) + 4 * len(trained) * counters,
    }


def _split(model, *, duplicates=False, frozen_too=False):
    parameters = [p for _, p in model.named_parameters(remove_duplicate=not duplicates)]
    return parameters, [p for p in parameters if p.requires_grad or frozen_too]


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.table.weight


def _observe_resident(candidate):
    frozen = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    frozen[0].requires_grad_(False)
    models = {
        "a float32 MLP": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        "a bf16 MLP": nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).to(torch.bfloat16),
        "a model with a tied table": _Tied(),
        "an MLP whose first layer is frozen": frozen,
    }
    return {name: candidate(model) for name, model in models.items()}


def saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the storages that ``model(x)`` saves for backward, each once, without the model's parameters."""
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    for parameter in model.parameters():
        saved.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(saved.values())


def _saves(nbytes=lambda t: t.untyped_storage().nbytes(), *, each=False, parameters=False):
    """A wrong ``saved_bytes``: what a saved tensor counts, every time or once a storage, with or without parameters."""

    def wrong(model, x):
        kept, own = [], {p.untyped_storage().data_ptr() for p in model.parameters()}
        with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            model(x)
        counted = [(t.untyped_storage().data_ptr(), nbytes(t)) for t in kept]
        counted = [(key, n) for key, n in counted if parameters or key not in own]
        return sum(n for _, n in counted) if each else sum(dict(counted).values())

    return wrong


def _outputs_of_layers(model, x):
    outputs = []
    layers = [m for m in model.modules() if not list(m.children())]
    handles = [m.register_forward_hook(lambda m, args, out: outputs.append(out.nbytes)) for m in layers]
    model(x)
    for handle in handles:
        handle.remove()
    return sum(outputs)


class _FirstColumnSquared(nn.Module):
    def forward(self, x):
        return x[:, :1] * x[:, :1]


def _observe_saved(candidate):
    five = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    sliced = nn.Sequential(nn.Linear(4, 8), _FirstColumnSquared())
    wide = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).to(torch.bfloat16)
    return {
        "five modules": candidate(five, torch.randn(1, 2)),
        "a slice of a large tensor": candidate(sliced, torch.randn(6, 4)),
        "a bf16 MLP": candidate(wide, torch.randn(32, 16, dtype=torch.bfloat16)),
    }


def eager_surplus(batch: int, seq_len: int, heads: int) -> int:
    """Bytes that eager attention saves above fused attention, in one float32 block."""
    softmax = 4 * batch * heads * seq_len * seq_len
    log_sum_exp = 4 * batch * heads * seq_len
    return softmax - log_sum_exp


def logits_spike(batch: int, seq_len: int, vocab: int) -> int:
    """Bytes around the loss when its backward begins, for a model of any precision: three float32 tensors."""
    return 3 * 4 * batch * seq_len * vocab


def bytes_per_parameter(recipe: str) -> int:
    """Bytes that training with AdamW keeps for each parameter: weight, gradient, both moments, master copy."""
    return {
        "float32": 4 + 4 + 8,
        "bf16": 2 + 2 + 4,
        "autocast-bf16": 4 + 4 + 8,
        "float32-master": 2 + 2 + 4 + 8,
    }[recipe]


_RECIPES = ("float32", "bf16", "autocast-bf16", "float32-master")
# As the exercise called them at first.
_BEFORE = {"autocast-bf16": "autocast", "float32-master": "float32 master"}


def _asked(answer, recipe: str):
    """What ``answer`` says of ``recipe``. One that was written for the names of before is asked by those."""
    try:
        return answer(recipe)
    except KeyError as error:
        with suppress(KeyError):
            return answer(_BEFORE[recipe])
        raise error


def _recipe(**wrong):
    right = {recipe: bytes_per_parameter(recipe) for recipe in _RECIPES}
    return lambda recipe: {**right, **{name.replace("_", "-"): n for name, n in wrong.items()}}[recipe]


def train(model, optimizer, batches) -> list[float]:
    """The losses of one step on each batch of token ids, holding no more than the step needs."""
    losses = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del loss
    return losses


def _trains(*, keeps=None, steps=True, set_to_none=True, **backward):
    """A wrong ``train``: what of the output it ``keeps``, and how it steps, zeroes (``None``: not at all) and goes back."""

    def wrong(model, optimizer, batches):
        losses, kept = [], []
        for ids in batches:
            output = model(input_ids=ids, labels=ids)
            loss = output.loss
            if keeps == "logits":
                kept.append(output.logits.detach())
            if keeps != "output":
                del output
            losses.append(loss.item())
            loss.backward(**backward)
            if steps:
                optimizer.step()
            if set_to_none is not None:
                optimizer.zero_grad(set_to_none=set_to_none)
        return losses

    return wrong


@cache
def train_budget() -> int:
    """Bytes that the three steps of exercise 1.6 need at least: the peak of a loop that keeps nothing."""
    model, optimizer, batches = train_setting()
    return measure(lambda: train(model, optimizer, batches), budget=1, model=model, optimizer=optimizer).peak


def _observe_train(candidate):
    budget = train_budget()
    model, optimizer, batches = train_setting()
    updates: list[None] = []
    optimizer.register_step_post_hook(lambda *_: updates.append(None))
    measured = measure(
        lambda: candidate(model, optimizer, batches), budget=budget, model=model, optimizer=optimizer
    )
    moved = flat(model.parameters())
    return {
        "three steps": measured,
        "afterwards": {"weights": moved, "calls of optimizer.step()": len(updates)},
    }


def _explain_train(got, expected):
    unmoved = flat(train_setting()[0].parameters())
    if got["afterwards"]["calls of optimizer.step()"] and torch.equal(got["afterwards"]["weights"], unmoved):
        return "optimizer.step() finds nothing to do: zero_grad() has thrown the gradients away before it."
    return None


EXERCISES = (
    Exercise(
        id="1.1", title="the bytes that stay", difficulty=1, minutes=6,
        trains="adding up parameters, gradients and AdamW's states",
        reference=resident_bytes,
        observe=_observe_resident,
        mistakes=(
            Mistake("one moment", lambda model: _resident(*_split(model), moments=1),
                    "this counts one moment: Adam keeps two for every parameter."),
            Mistake("float32 moments", lambda model: _resident(*_split(model), moment_bytes=4),
                    "this takes 4 bytes for every moment: PyTorch keeps them in the parameter's own dtype, 2 bytes in bf16."),
            Mistake("frozen parameters", lambda model: _resident(*_split(model, frozen_too=True)),
                    "this gives frozen parameters a gradient and moments: they have neither."),
            Mistake("tied twice", lambda model: _resident(*_split(model, duplicates=True)),
                    "this counts a tied weight twice: two names, one storage."),
            Mistake("elements", lambda model: _resident(*_split(model), size=1),
                    "this counts elements: multiply each by its element_size()."),
            Mistake("no counters", lambda model: _resident(*_split(model), counters=False),
                    "the moments are right; AdamW also keeps a step counter, one float32 for each trained tensor."),
        ),
    ),
    Exercise(
        id="1.2", title="the bytes that autograd saves", difficulty=2, minutes=8,
        trains="saved-tensor hooks, and thinking in storages rather than tensors",
        reference=saved_bytes,
        observe=_observe_saved,
        mistakes=(
            Mistake("every time", _saves(each=True),
                    "this counts a storage as often as it is saved: a ReLU and the Linear after it save the same one."),
            Mistake("with parameters", _saves(parameters=True),
                    "this counts the parameters too: they are saved, but they were there before and stay afterwards."),
            Mistake("size of the view", _saves(lambda t: t.nbytes),
                    "this counts the view: a saved slice keeps its whole storage alive."),
            Mistake("elements", _saves(lambda t: t.untyped_storage().nbytes() // t.itemsize), "this counts elements, not bytes."),
            Mistake("outputs of layers", _outputs_of_layers,
                    "this adds up the layers' outputs: what is saved is what backward needs, which is something else."),
        ),
    ),
    Exercise(
        id="1.3", title="what eager attention saves on top", difficulty=2, minutes=5,
        trains="the one term that grows with the square of the sequence",
        reference=eager_surplus,
        observe=calls((1, 128, 4), (2, 256, 8), (8, 64, 3)),
        mistakes=(
            Mistake("one head", lambda batch, seq_len, heads: 4 * batch * seq_len * (seq_len - 1),
                    "this counts one head: every head has scores of its own."),
            Mistake("one sequence", lambda batch, seq_len, heads: 4 * heads * seq_len * (seq_len - 1),
                    "this counts one sequence: every sequence of the batch has scores of its own."),
            Mistake("log-sum-exp forgotten", lambda batch, seq_len, heads: 4 * batch * heads * seq_len**2,
                    "almost: fused attention saves something instead, one float32 (the log-sum-exp) a row of scores."),
            Mistake("lower triangle", lambda batch, seq_len, heads: 2 * batch * heads * seq_len * (seq_len + 1),
                    "this counts the lower triangle: a causal mask fills the rest with zeros, and zeros take bytes too."),
            Mistake("half precision", lambda batch, seq_len, heads: 2 * batch * heads * seq_len * (seq_len - 1),
                    "this takes 2 bytes a number: the block is in float32."),
            Mistake("not squared", lambda batch, seq_len, heads: 4 * batch * heads * seq_len,
                    "this grows with the sequence: the scores grow with its square."),
        ),
    ),
    Exercise(
        id="1.4", title="the logits spike", difficulty=2, minutes=5,
        trains="seeing the loss as the largest layer of a small model",
        reference=logits_spike,
        observe=calls((1, 128, 49152), (4, 256, 8192), (2, 32, 1000)),
        mistakes=(
            Mistake("once", lambda batch, seq_len, vocab: 4 * batch * seq_len * vocab,
                    "this counts one tensor: the loss's backward holds three of that shape at once."),
            Mistake("without the last gradient", lambda batch, seq_len, vocab: 8 * batch * seq_len * vocab,
                    "this counts two tensors: the saved log-softmax, its gradient, and the gradient of the logits make three."),
            Mistake("bf16", lambda batch, seq_len, vocab: 6 * batch * seq_len * vocab,
                    "this takes 2 bytes a number: the loss is computed in float32, whatever the model's precision."),
            Mistake("shifted", lambda batch, seq_len, vocab: 12 * batch * (seq_len - 1) * vocab,
                    "this leaves out the last position: transformers shifts the labels, and the logits keep their length."),
            Mistake("without the batch", lambda batch, seq_len, vocab: 12 * seq_len * vocab,
                    "this counts one sequence: multiply by the batch."),
        ),
    ),
    Exercise(
        id="1.5", title="bytes per parameter, by recipe", difficulty=1, minutes=5,
        trains="telling precision recipes apart by what they keep",
        reference=bytes_per_parameter,
        observe=lambda answer: {f"({recipe!r})": _asked(answer, recipe) for recipe in _RECIPES},
        mistakes=(
            Mistake("float32 moments in bf16", _recipe(bf16=12),
                    "the bf16 recipe comes out at 12: PyTorch's moments follow the parameters' dtype, so they are bf16 too."),
            Mistake("autocast halves", _recipe(autocast_bf16=8),
                    "autocast-bf16 comes out at 8: it casts on the way, and keeps weights, gradients and moments in float32."),
            Mistake("autocast keeps both", _recipe(autocast_bf16=18),
                    "autocast-bf16 comes out at 18: its bf16 copies live only while the forward and backward pass run."),
            Mistake("twelve beside a master", _recipe(float32_master=12),
                    "the master recipe comes out at 12: it keeps a float32 copy of the weights (4) and both moments in float32 (8)."),
            Mistake("one moment", _recipe(float32=12, bf16=6, autocast_bf16=12, float32_master=12),
                    "this counts one moment: Adam keeps two."),
            Mistake("no gradients", _recipe(float32=12, bf16=6, autocast_bf16=12, float32_master=14),
                    "the gradient is missing: it is as large as the weight."),
        ),
    ),
    Exercise(
        id="1.6", title="three steps under a budget", difficulty=3, minutes=10,
        trains="finding what a training loop holds without needing it",
        reference=train,
        observe=_observe_train,
        explain=_explain_train,
        mistakes=(
            Mistake("keeps the output", _trains(keeps="output"),
                    "the model's output is still alive in backward and in the next forward, and it holds the logits."),
            Mistake("collects logits", _trains(keeps="logits"),
                    "every batch's logits stay in a list: detached, they need no graph, and they need bytes all the same."),
            Mistake("zeroes in place", _trains(set_to_none=False),
                    "set_to_none=False keeps the gradients, filled with zeros, through the next forward."),
            Mistake("retains the graph", _trains(retain_graph=True),
                    "retain_graph=True keeps every saved activation until the loss itself is let go."),
            Mistake("never zeroes", _trains(set_to_none=None),
                    "without zero_grad the gradients of all batches add up, and they stay through the next forward."),
            Mistake("never steps", _trains(steps=False),
                    "the losses show that nothing was learned: optimizer.step() is missing."),
        ),
    ),
)  # fmt: skip
