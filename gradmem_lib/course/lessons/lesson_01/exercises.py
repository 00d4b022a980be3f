"""Lesson 01's exercises on models: count what stays, what autograd saves, and fit a step into a
budget.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ...judge.compare import describe, difference, plain
from ...judge.exercise import Exercise, Mistake, Seen, measure
from ...judge.hints import shares, times, unit_of
from ..shared.gradient_weights import (
    ANOTHER_STEP,
    before_each_update,
    factor_between,
    why_clipped,
)
from ..shared.settings import flat
from .settings import train_setting


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


def _trained(model):
    return [p for p in model.parameters() if p.requires_grad]


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.lm_head.weight = self.embed_tokens.weight


def _models() -> dict[str, nn.Module]:
    frozen = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    frozen[0].requires_grad_(False)
    two = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)).to(torch.bfloat16)
    two[1].float()
    normed = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    return {
        "a float32 MLP": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        "a bf16 MLP": nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).to(torch.bfloat16),
        "a model with a tied table": _Tied(),
        "an MLP whose first layer is frozen": frozen,
        "an MLP whose batch norm has buffers": normed,
        "a bf16 MLP whose norm has another dtype, float32": two,
    }


def _observe_resident(candidate):
    return {name: candidate(model) for name, model in _models().items()}


def _explain_resident(got, expected):
    if not all(isinstance(found, dict) for found in got.values()):
        return "return a dict with three entries: parameters, gradients and optimizer."
    right = {
        entry: [got[case].get(entry) == expected[case][entry] for case in expected]
        for entry in ENTRIES
    }
    if all(ok for each in right.values() for ok in each[:-1]):
        last_is_right = all(each[-1] for each in right.values())
        return _beside_the_three(got) if last_is_right else _DTYPES
    if says := _other_bytes(got, expected):
        return says
    frozen = [*expected].index("an MLP whose first layer is frozen")
    wrong = [entry for entry, each in right.items() if not each[frozen]]
    if all(ok for each in right.values() for i, ok in enumerate(each) if i != frozen):
        if wrong == ["parameters"]:
            return (
                "frozen parameters need no gradient, but they take memory too: count them with "
                "the parameters."
            )
        return (
            "frozen parameters have no gradient, no moments and no step counter: only those with "
            "requires_grad do."
        )
    if not all(right["parameters"]):
        return _why_parameters(got)
    if not all(right["gradients"]):
        return _why_gradients(got)
    return _why_states({case: found.get("optimizer") for case, found in got.items()}, expected)


_DTYPES = (
    "the parameters of a model may have different dtypes: ask each parameter for its "
    "element_size()."
)


def _beside_the_three(got) -> str | None:
    """What is said if all three entries are right, so that a name beside them is what differs."""
    others = {describe(name): None for found in got.values() for name in found}
    shown = " and ".join(name for name in others if name not in map(describe, ENTRIES))
    return f"all three entries are right: leave out {shown}." if shown else None


def _why_parameters(got) -> str | None:
    """What is said if the parameters are those of ``state_dict()`` in every case."""
    for case, model in _models().items():
        in_state_dict = sum(tensor.nbytes for tensor in model.state_dict().values())
        if got[case]["parameters"] != in_state_dict:
            return None
    return (
        "state_dict() has a tied weight under both of its names, and buffers too: "
        "model.parameters() gives every parameter once, and nothing else."
    )


def _why_gradients(got) -> str | None:
    """What is said if no case has gradients, or all have as many bytes as parameters."""
    if not any(found["gradients"] for found in got.values()):
        return (
            "no gradient is counted: before the first backward each p.grad is None, so ask "
            "p.requires_grad."
        )
    if all(found["gradients"] == found["parameters"] for found in got.values()):
        return "frozen parameters get no gradient: only those with requires_grad do."
    return None


ENTRIES = ("parameters", "gradients", "optimizer")
_FOUR_BYTES = (
    "this counts 4 bytes for each number, whatever its dtype: a bf16 number has 2; ask each "
    "parameter for its element_size()."
)


def _other_bytes(got, expected) -> str:
    """The sentence for a number's bytes, if they are in another unit or always those of float32."""
    size = {case: found["parameters"] for case, found in expected.items()}
    factor = shares({case: found.get("parameters") for case, found in got.items()}, size)
    if factor and (unit := unit_of(factor[0])):
        return unit
    in_float32, in_bf16 = "a float32 MLP", "a bf16 MLP"
    for entry in ("parameters", "gradients"):
        right = got[in_float32].get(entry) == expected[in_float32][entry]
        if right and got[in_bf16].get(entry) == 2 * expected[in_bf16][entry]:
            return _FOUR_BYTES
    return ""


def _counters_in_dtype() -> dict[str, int]:
    """The optimizer's bytes if the step counter of a tensor has as many as one of its numbers."""
    found = {}
    for case, model in _models().items():
        found[case] = sum(2 * p.nbytes + p.element_size() for p in _trained(model))
    return found


def _why_states(got, expected):
    tensors = {
        case: sum(p.requires_grad for p in model.parameters()) for case, model in _models().items()
    }
    gradients = {case: right["gradients"] for case, right in expected.items()}
    found = shares(got, gradients, tensors, dict.fromkeys(tensors, 1))
    if found is None:
        if got == _counters_in_dtype():
            return (
                "the moments are right, and your step counters have the parameters' dtype: a "
                "counter is one float32, 4 bytes, for each tensor, whatever its dtype."
            )
        return None
    moments, counter, once = found
    if moments == 0:
        return "the moments are missing: Adam keeps two for every trained parameter."
    if moments != 2:
        return (
            f"the optimizer has {moments:g} × the gradients here: Adam keeps two moments, each "
            "as large as the gradient, and one step counter for each tensor."
        )
    if once:
        return "this has one step counter in all: each trained tensor has its own, of 4 bytes."
    return (
        f"the moments are right; your step counters have {counter:g} bytes each: a counter is "
        "one float32, 4 bytes, for each tensor."
    )


def saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the storages that ``model(x)`` saves for backward, each once, without the model's
    parameters.
    """
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


def _no_parameter_itself(model, x):
    """Leaves out what is an ``nn.Parameter``, and counts views of one."""
    found, kept = {}, []

    def pack(tensor):
        kept.append(tensor)
        if not isinstance(tensor, nn.Parameter):
            found[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(found.values())


def _parameters_by_their_own_address(model, x):
    found, own, kept = {}, {p.data_ptr() for p in model.parameters()}, []

    def pack(tensor):
        kept.append(tensor)
        if _address(tensor) not in own:
            found[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(found.values())


def _all_parameters_taken_off(model, x):
    """What is saved, less all parameters, although some of them are not saved."""
    saved = _saves(parameters=True)(model, x)
    return saved - sum(parameter.nbytes for parameter in model.parameters())


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _saves(
    nbytes=lambda t: t.untyped_storage().nbytes(), *, each=False, parameters=False, key=_address
):
    """A wrong ``saved_bytes``: what a saved tensor counts, every time or once for a ``key``, with
    or without parameters.
    """

    def wrong(model, x):
        kept, own = [], {p.untyped_storage().data_ptr() for p in model.parameters()}
        with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            model(x)
        counted = [(key(t), nbytes(t)) for t in kept if parameters or _address(t) not in own]
        return sum(n for _, n in counted) if each else sum(dict(counted).values())

    return wrong


def _outputs_of_layers(model, x):
    outputs = []
    layers = [m for m in model.modules() if not list(m.children())]
    handles = [
        m.register_forward_hook(lambda m, args, out: outputs.append(out.nbytes)) for m in layers
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return sum(outputs)


class _FirstColumnSquared(nn.Module):
    def forward(self, x):
        return x[:, :1] * x[:, :1]


class _TwoColumns(nn.Module):
    """Saves two views of one storage, which begin at different addresses."""

    def forward(self, x):
        return x[:, 1:2] * x[:, 2:3]


_DEEP = "24 modules of one size"
_BUFFERS = "a batch norm, whose buffers are saved"
_FROZEN = "a frozen layer, and an x that requires a gradient"
_FROZEN_FIRST = "a frozen first layer, and an x that requires no gradient"


def _saving() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    five = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    sliced = nn.Sequential(nn.Linear(4, 8), _FirstColumnSquared())
    wide = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).to(torch.bfloat16)
    twice = nn.Sequential(nn.Linear(4, 8), _TwoColumns())
    # The first and the last parameter are saved too, as a first Linear's weight and a bias are not.
    normed = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.LayerNorm(6))
    normed[1].weight = nn.Parameter(torch.randn(2, 6, 4)[1])  # it begins inside its storage
    # The frozen weight is saved for the gradient that passes through it.
    frozen = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    frozen[2].requires_grad_(False)
    leaf = torch.randn(5, 4, requires_grad=True)
    # No gradient passes through the first layer, so GELU saves nothing.
    frozen_first = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))
    frozen_first[0].requires_grad_(False)
    # Backward needs the running averages of a batch norm.
    averaged = nn.Sequential(nn.Linear(4, 24), nn.BatchNorm1d(24), nn.Linear(24, 2)).eval()
    # A storage that nothing keeps is free at once, and one of the same size gets its address.
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12)))
    return {
        "five modules": (five, torch.randn(1, 2)),
        "a slice of a large tensor": (sliced, torch.randn(6, 4)),
        "a bf16 MLP": (wide, torch.randn(32, 16, dtype=torch.bfloat16)),
        "two slices of one tensor": (twice, torch.randn(6, 4)),
        "a norm at both ends": (normed, torch.randn(5, 4)),
        _FROZEN: (frozen, leaf),
        _FROZEN_FIRST: (frozen_first, torch.randn(5, 4)),
        _BUFFERS: (averaged, torch.randn(5, 4)),
        _DEEP: (deep, torch.randn(16, 64)),
    }


def _observe_saved(candidate):
    return {name: candidate(model, x) for name, (model, x) in _saving().items()}


_EACH = (
    "this counts a storage as often as it is saved: a ReLU and the Linear after it save the "
    "same one."
)
_PARAMETERS = (
    "this counts the parameters too: they are saved, but they were there before and stay "
    "afterwards."
)
_VIEW = "this counts the view: a saved slice keeps its whole storage alive."
_ELEMENTS = "this counts elements, not bytes."
_STORAGES = "this counts storages, not their bytes: storage.nbytes()."
_BYTES_TIMES_SIZE = (
    "an untyped storage's size() and nbytes() are its bytes already: they are multiplied by the "
    "size of an element here."
)


def _several(got) -> str:
    """The sentences of the mistakes that together count what ``got`` has."""
    sizes = {
        lambda t: t.untyped_storage().nbytes(): "",
        lambda t: t.nbytes: _VIEW,
        lambda t: t.untyped_storage().nbytes() // t.itemsize: _ELEMENTS,
        torch.numel: f"{_VIEW} And {_ELEMENTS}",
        lambda t: 1: _STORAGES,
        lambda t: t.untyped_storage().nbytes() * t.itemsize: _BYTES_TIMES_SIZE,
    }
    for each, parameters, size in product((False, True), (False, True), sizes):
        if _observe_saved(_saves(size, each=each, parameters=parameters)) == got:
            says = [sizes[size]] if sizes[size] else []
            if parameters:
                says.insert(0, _PARAMETERS)
            if each:
                says.insert(0, _EACH)
            return " And ".join(says)
    by_view = f"{_VIEW} Take key and bytes from tensor.untyped_storage()."
    for parameters in (False, True):
        view_by_address = _saves(
            lambda t: t.nbytes, key=torch.Tensor.data_ptr, parameters=parameters
        )
        if _observe_saved(view_by_address) == got:
            return f"{_PARAMETERS} And {by_view}" if parameters else by_view
    return ""


def _why_frozen(too_many: bool) -> str:
    """What is said if only the case with the frozen layer is wrong."""
    if too_many:
        return (
            "the weight of a frozen layer is a parameter of the model too: leave out the storages "
            "of all model.parameters()."
        )
    return (
        "x requires a gradient here, and it is no parameter: only the storages of "
        "model.parameters() are left out."
    )


def _why_one(case: str, numbers: dict, expected: dict) -> str:
    """What is said if only this ``case`` is wrong."""
    too_many = numbers[case] > expected[case]
    if case == _DEEP and not too_many:
        return (
            "pack keeps nothing of a tensor, so its storage is freed while forward runs, and the "
            "next one gets its address: let pack return the tensor itself."
        )
    if case == _BUFFERS and not too_many:
        return (
            "a buffer is no parameter, even if state_dict() has both: only the storages of "
            "model.parameters() are left out."
        )
    if case == _FROZEN_FIRST and too_many:
        return (
            "neither x nor the first layer requires a gradient here, so GELU needs no backward and "
            "saves nothing: run model(x) with x and the weights as they are."
        )
    return _why_frozen(too_many) if case == _FROZEN else ""


def _explain_saved(got, expected):
    numbers = {case: value for case, value in got.items() if isinstance(value, (int, float))}
    if len(numbers) < len(expected):
        return None
    if not any(numbers.values()):
        return (
            "nothing is counted: run model(x) inside `with saved_tensors_hooks(...)`, and not "
            "under torch.no_grad()."
        )
    if says := _several(numbers):
        return says
    wrong = [case for case, right in expected.items() if numbers[case] != right]
    if len(wrong) == 1 and (says := _why_one(wrong[0], numbers, expected)):
        return says
    given, off = _saving(), {case: numbers[case] - right for case, right in expected.items()}
    for what, size, says in (
        (
            "input",
            {case: x.nbytes for case, (_, x) in given.items()},
            "the first layer saves it, for its weight's gradient.",
        ),
        (
            "output",
            {case: model(x).nbytes for case, (model, x) in given.items()},
            "a last Linear's backward does not need it.",
        ),
        (
            "parameters",
            {case: sum(p.nbytes for p in model.parameters()) for case, (model, _) in given.items()},
            "they were there before and stay afterwards.",
        ),
    ):
        if (shares(numbers, size) or [0]) != [0]:
            return (
                f"this counts only the model's {what}: autograd saves what backward needs, "
                "layer by layer."
            )
        if (factor := shares(off, size)) and factor != [0]:
            how = "left out" if factor[0] < 0 else "counted too"
            return f"the model's {what} {'are' if what == 'parameters' else 'is'} {how}: {says}"
    return None


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


def _logs_afterwards(model, optimizer, batches):
    losses = []
    for ids in batches:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model(input_ids=ids, labels=ids).loss.item())
    return losses


def _trains(*, keeps=None, steps=True, set_to_none=True, **backward):
    """A wrong ``train``: what of the output it ``keeps``, and how it steps, zeroes (``None``: not
    at all) and goes back.
    """

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
    """Bytes that the three steps of exercise 1.6 need, in whole KiB: the peak of a loop that keeps
    nothing but numbers.
    """
    model, optimizer, batches = train_setting()
    peak = measure(
        lambda: train(model, optimizer, batches), budget=1, model=model, optimizer=optimizer
    ).peak
    return -(-peak // 1024) * 1024  # room for losses that are kept as detached tensors


def _observe_train(candidate):
    budget = train_budget()
    model, optimizer, batches = train_setting()
    updates: list[list] = []  # of each update, the gradients of all parameters

    def copy_gradients():
        updates.append([_copy_outside_torch(p.grad) for p in parameters])

    parameters = list(model.parameters())
    before_each_update(optimizer, copy_gradients)
    measured = measure(
        lambda: candidate(model, optimizer, batches),
        budget=budget,
        model=model,
        optimizer=optimizer,
    )
    losses = measured.value if isinstance(measured.value, (list, tuple)) else ()
    weights = flat(model.parameters())
    cases = {
        "three steps": measured,
        "returned losses": {"that hang on a graph": sum(map(_hangs_on_a_graph, losses))},
        "afterwards": {
            "calls of optimizer.step()": len(updates),
            "gradients in each update": _with_zeros(updates),
            "weights minus a replay of these updates": weights - _replayed(updates),
        },
    }
    return Seen(cases, weights=weights)


def _copy_outside_torch(gradient: torch.Tensor | None):
    """A copy by numpy, which the tracker does not count."""
    return None if gradient is None else gradient.detach().float().numpy().copy()


def _with_zeros(updates: list[list]) -> list[torch.Tensor]:
    """The gradients of each update in a row, zeros where there is none."""
    shapes = [p.shape for p in train_setting()[0].parameters()]
    rows = []
    for gradients in updates:
        tensors = []
        for gradient, shape in zip(gradients, shapes, strict=True):
            if gradient is None:
                tensors.append(torch.zeros(shape))
            else:
                tensors.append(torch.from_numpy(gradient))
        rows.append(flat(tensors))
    return rows


def _replayed(updates: list[list]) -> torch.Tensor:
    """The weights that the given optimizer makes of these gradients.

    Two ways to compute one gradient, as in one batch or in two halves, differ by rounding. AdamW
    divides by the gradient's own size, so where a gradient is nearly zero, the rounding becomes a
    step of up to ``lr``. Weights can't be compared with those of the reference then, but gradients
    can, and weights with what the optimizer makes of the same gradients.
    """
    model, optimizer, _ = train_setting()
    for gradients in updates:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = None if gradient is None else torch.from_numpy(gradient)
        optimizer.step()
    return flat(model.parameters())


def _hangs_on_a_graph(loss) -> bool:
    """Whether a returned loss is a tensor that keeps its graph. (Logits are no losses.)"""
    return isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad


def _explain_train(got, expected):
    if got["returned losses"]["that hang on a graph"]:
        says = "the losses in the list are tensors, each with its graph: append loss.item()."
        if got["three steps"].over:
            says += " Something large is alive, too: look for the names that hold it in backward."
        return says
    mine, right = plain(got["three steps"].value), plain(expected["three steps"].value)
    if says := _why_no_steps(got, mine, right) or _why_updates(got, expected, mine, right):
        return says
    all_is_right = (
        difference(mine, right) is None
        and difference(got["afterwards"], expected["afterwards"]) is None
    )
    if got["three steps"].over and all_is_right:
        return (
            "losses and updates are right, but something large is alive that the step does not "
            "need. Most often a name of the loop still refers to the logits, in backward or in the "
            "next forward."
        )
    return None


def _why_no_steps(got, mine: Any, right: tuple) -> str:
    """What is said if the optimizer does not step on each batch, or has no gradients."""
    unmoved = flat(train_setting()[0].parameters())
    steps = got["afterwards"]["calls of optimizer.step()"]
    moves = not torch.equal(got.notes["weights"], unmoved)
    if steps and not moves:
        return (
            "optimizer.step() finds no gradients: backward() must run before the step, and "
            "zero_grad() after it."
        )
    if moves and not steps:
        return ANOTHER_STEP
    if steps == 1 and _is_first_loss(mine, right):
        return (
            "only the first batch is used: is the return inside the loop? Make one step on each "
            "batch."
        )
    if steps == 1:
        return "optimizer.step() is called only once: make one step on each batch."
    return ""


def _why_updates(got, expected, mine: Any, right: tuple) -> str | None:
    """What is said of wrong losses, and of gradients that are a multiple of the right ones."""
    # The later losses follow from the updates, but the first one is wrong for its own reason.
    if isinstance(mine, tuple) and mine and difference(mine[0], right[0]) is None:
        says = _why_scaled(got["afterwards"], expected["afterwards"])
        if says:
            return says
    return None if difference(mine, right) is None else _why_losses(mine, right)


def _why_scaled(mine: dict, right: dict) -> str:
    """What is said if the first update's gradient is clipped, or a multiple of the right one."""
    each = "gradients in each update"
    if not mine[each]:
        return ""
    first, wanted = mine[each][0], right[each][0]
    if says := why_clipped(first, wanted):
        return says
    factor = factor_between(first, wanted)
    if not factor or difference(factor, 1.0, 1e-3) is None:
        return ""
    return (
        f"the gradient of the first update is {times(factor)}: call backward on the loss as the "
        "model returns it, and do not change the gradients."
    )


def _is_first_loss(mine: Any, right: tuple) -> bool:
    """Whether the first batch's loss is all that is returned, in a list or as a number."""
    losses = mine if isinstance(mine, tuple) else (mine,)
    return len(losses) == 1 and difference(losses[0], right[0]) is None


def _why_losses(mine: Any, right: tuple) -> str | None:
    """What is said of returned losses that are wrong."""
    if not isinstance(mine, tuple) or len(mine) != len(right):
        return None
    if not all(isinstance(loss, Real) for loss in mine):
        return None
    if any(list(mine) == [round(loss, digits) for loss in right] for digits in range(1, 6)):
        return "the losses are rounded: return loss.item() as it is."
    return _why_first_loss(mine, right)


def _why_first_loss(mine: tuple, right: tuple) -> str | None:
    """What is said of the first loss, which no update has changed yet."""
    model, _, batches = train_setting()
    with torch.no_grad():
        logits = [model(input_ids=ids).logits for ids in batches]
    if difference(mine[0], right[0]) is None:
        if difference(mine, right, 1e-3) is None:
            return (
                "the losses are close to the right ones, and not the same: the step computes in "
                "another precision (autocast, bf16), or something is updated in another way."
            )
        return None
    entropy = torch.nn.functional.cross_entropy
    unshifted = entropy(logits[0].flatten(0, 1), batches[0].flatten()).item()
    twice = entropy(logits[0][:, :-2].flatten(0, 1), batches[0][:, 2:].flatten()).item()
    last = entropy(logits[-1][:, :-1].flatten(0, 1), batches[-1][:, 1:].flatten()).item()
    for loss, says in (
        (
            unshifted,
            "the labels are not shifted: the logits at one place belong to the next token. "
            "model(input_ids=ids, labels=ids).loss shifts them.",
        ),
        (
            twice,
            "the labels are shifted twice: model(input_ids=ids, labels=ids).loss shifts them "
            "itself, so the labels are the ids as they are.",
        ),
        (last, "the batches come in another order: begin with the first one."),
    ):
        if difference(mine[0], loss) is None:
            return says
    factor = mine[0] / right[0]
    if difference(factor, 1 / len(batches)) is None:
        return (
            f"the loss is divided by {len(batches)}, the number of batches: each batch has a step "
            "of its own, so nothing is accumulated."
        )
    return None


EXERCISES = (
    Exercise(
        id="1.1",
        title="the bytes that stay",
        difficulty=1,
        minutes=6,
        trains="adding up parameters, gradients and AdamW's states",
        reference=resident_bytes,
        observe=_observe_resident,
        explain=_explain_resident,
        mistakes=(
            Mistake(
                "one moment",
                lambda model: _resident(*_split(model), moments=1),
                "this counts one moment: Adam keeps two for every parameter.",
            ),
            Mistake("always 4 bytes", lambda model: _resident(*_split(model), size=4), _FOUR_BYTES),
            Mistake(
                "float32 moments",
                lambda model: _resident(*_split(model), moment_bytes=4),
                (
                    "for a bf16 MLP, entry 'optimizer' is 4 bytes a number too large: PyTorch "
                    "keeps two moments in the parameter's own dtype, 2 bytes each in bf16, and no "
                    "float32 copy."
                ),
            ),
            Mistake(
                "frozen parameters",
                lambda model: _resident(*_split(model, frozen_too=True)),
                "this gives frozen parameters a gradient and moments: they have neither.",
            ),
            Mistake(
                "tied twice",
                lambda model: _resident(*_split(model, duplicates=True)),
                "this counts a tied weight twice: two names, one storage.",
            ),
            Mistake(
                "buffers",
                lambda model: _resident([*model.parameters(), *model.buffers()], _trained(model)),
                (
                    "buffers are counted with the parameters: a batch norm's running means have "
                    "no gradient, and model.parameters() leaves them out."
                ),
            ),
            Mistake(
                "elements",
                lambda model: _resident(*_split(model), size=1),
                "this counts elements: multiply each by its element_size().",
            ),
            Mistake(
                "a counter for each number",
                lambda model: (
                    _resident(*_split(model))
                    | {
                        "optimizer": sum(
                            p.numel() * (2 * p.element_size() + 4) for p in _trained(model)
                        )
                    }
                ),
                (
                    "this has one step counter for each number: it is one for each trained tensor, "
                    "however large the tensor."
                ),
            ),
            Mistake(
                "no counters",
                lambda model: _resident(*_split(model), counters=False),
                (
                    "the moments are right; AdamW also keeps a step counter, one float32 for each "
                    "trained tensor."
                ),
            ),
        ),
    ),
    Exercise(
        id="1.2",
        title="the bytes that autograd saves",
        difficulty=2,
        minutes=8,
        trains="saved-tensor hooks, and thinking in storages rather than tensors",
        reference=saved_bytes,
        raises=(
            (
                r"^KeyError: \d{6,}$",
                (
                    "a key is missing that looks like an address: not every parameter is saved, so "
                    "take a parameter's storage out by pop(key, None)."
                ),
            ),
        ),
        observe=_observe_saved,
        explain=_explain_saved,
        mistakes=(
            Mistake("every time", _saves(each=True), _EACH),
            Mistake("with parameters", _saves(parameters=True), _PARAMETERS),
            Mistake("size of the view", _saves(lambda t: t.nbytes), _VIEW),
            Mistake(
                "by the view's address",
                _saves(key=torch.Tensor.data_ptr),
                (
                    "a storage counts once for each view that begins elsewhere in it: the key is "
                    "tensor.untyped_storage().data_ptr(), not tensor.data_ptr()."
                ),
            ),
            Mistake(
                "elements", _saves(lambda t: t.untyped_storage().nbytes() // t.itemsize), _ELEMENTS
            ),
            Mistake(
                "no parameter itself",
                _no_parameter_itself,
                (
                    "a parameter's view is counted: what is saved of a weight may be its "
                    "transpose, which is no nn.Parameter. Compare the storages."
                ),
            ),
            Mistake(
                "parameters by their own address",
                _parameters_by_their_own_address,
                (
                    "a parameter that begins inside its storage is counted: compare storages, "
                    "p.untyped_storage().data_ptr(), not p.data_ptr()."
                ),
            ),
            Mistake(
                "all parameters taken off",
                _all_parameters_taken_off,
                (
                    "the bytes of all parameters are subtracted, but not all of them are saved: "
                    "the first layer's weight and the biases are not. Leave out a saved storage "
                    "that is a parameter's."
                ),
            ),
            Mistake(
                "outputs of layers",
                _outputs_of_layers,
                (
                    "this adds up the layers' outputs: autograd saves what backward needs, which "
                    "is not the same."
                ),
            ),
        ),
    ),
    Exercise(
        id="1.6",
        title="three steps under a budget",
        difficulty=3,
        minutes=10,
        trains="finding what a training loop holds without needing it",
        reference=train,
        observe=_observe_train,
        explain=_explain_train,
        mistakes=(
            Mistake(
                "keeps the output",
                _trains(keeps="output"),
                (
                    "the logits are still alive in backward (and, unless deleted, in the next "
                    "forward): a name for them, or for the model's output, keeps them."
                ),
            ),
            Mistake(
                "collects logits",
                _trains(keeps="logits"),
                (
                    "every batch's logits stay in a list: detached logits keep no graph, but they "
                    "still take bytes."
                ),
            ),
            Mistake(
                "zeroes in place",
                _trains(set_to_none=False),
                (
                    "the gradients stay, filled with zeros, through the next forward: "
                    "zero_grad(set_to_none=True) frees them."
                ),
            ),
            Mistake(
                "retains the graph",
                _trains(retain_graph=True),
                "retain_graph=True keeps every saved activation until the loss itself is freed.",
            ),
            Mistake(
                "never zeroes",
                _trains(set_to_none=None),
                (
                    "without zero_grad the gradients of all batches add up, and they stay through "
                    "the next forward."
                ),
            ),
            Mistake(
                "logs afterwards",
                _logs_afterwards,
                (
                    "these are the losses after each update, by one more forward: a step's loss "
                    "is the one that backward was called on."
                ),
            ),
            Mistake(
                "never steps",
                _trains(steps=False),
                "the losses show that nothing was learned: optimizer.step() is missing.",
            ),
        ),
    ),
)
