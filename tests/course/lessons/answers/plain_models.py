"""Answers to the exercises on models in plain PyTorch: what dropout keeps, a fair test of a loop,
and the same step on a smaller card.

``WRONG[id][name]`` is the answer and a pattern: what a message about it must say.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradmem_lib import checkpoint_layers, split

RIGHT, WRONG = {}, {}


def _mlp(tokens, hidden, training, *, p=0.1, inner=4):
    layers = [nn.Linear(hidden, inner * hidden), nn.ReLU(), nn.Dropout(p)]
    layers += [nn.Linear(inner * hidden, hidden), nn.Dropout(p)]
    net = nn.Sequential(*layers).train(training)
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(torch.randn(tokens, hidden, requires_grad=True))
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    return sum(size for pointer, (size, _) in kept.items() if pointer not in own)


RIGHT["1.8"] = {
    "measured": _mlp,
    "one formula": lambda t, h, training: 4 * t * h * (14 if training else 5),
    "a sum of rows": lambda t, h, training: sum(
        4 * t * h * n for n in ([1, 4, 4, 4, 1] if training else [1, 4])
    ),
    "a tensor": lambda t, h, training: torch.tensor(20 * t * h + 36 * t * h * training),
}
WRONG["1.8"] = {
    "always training": (lambda t, h, training: 56 * t * h, "has no effect"),
    "never training": (lambda t, h, training: 20 * t * h, "has no effect"),
    "the wrong way round": (
        lambda t, h, training: 4 * t * h * (5 if training else 14),
        r"in evaluation mode this counts 14",
    ),
    "two masks and no copy": (
        lambda t, h, training: 4 * t * h * (10 if training else 5),
        r"second Linear's input is missing|in training mode this counts 10",
    ),
    "masks as bool": (
        lambda t, h, training: int(4 * t * h * (10.25 if training else 5)),
        r"one byte for each number of a mask",
    ),
    "the output too": (
        lambda t, h, training: 4 * t * h * (15 if training else 6),
        r"in evaluation mode this counts 6",
    ),
    "bf16": (
        lambda t, h, training: 2 * t * h * (14 if training else 5),
        r"in evaluation mode this counts 2.5",
    ),
    "weights too": (
        lambda t, h, training: 4 * t * h * (14 if training else 5) + 4 * 8 * h * h,
        r"not a multiple",
    ),
    "all outputs": (
        lambda t, h, training: 4 * t * h * (1 + 4 + 4 + 4 + 1 + 1 if training else 1 + 4 + 4 + 1),
        r"in evaluation mode this counts 10|ReLU",
    ),
}


def _gradient(model):
    return torch.cat([p.grad.detach().clone().flatten() for p in model.parameters()])


def _fair(model, batch, accumulate, *, wrap=None, error=None, cut=None, undo=True, clear=True):
    """A ``fair_error`` from parts that may be wrong."""
    noted = [(module, module.training) for module in model.modules()]
    (wrap or nn.Module.eval)(model)
    found = []
    for pieces in ([batch], (cut or (lambda b: list(split(b, 3))))(batch)):
        for p in model.parameters():
            p.grad = None
        accumulate(pieces)
        found.append(_gradient(model))
    if clear:
        for p in model.parameters():
            p.grad = None
    if undo:
        for module, mode in noted:
            module.training = mode
    whole, pieces = found
    measure = error or (lambda a, b: ((a - b).norm() / b.norm()).item())
    return measure(pieces, whole)


def _sliced(batch):
    rows = len(batch["labels"])
    return [{k: v[i : i + 3] for k, v in batch.items()} for i in range(0, rows, 3)]


def _only_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()


def _pieces_first(model, batch, accumulate):
    noted = [(module, module.training) for module in model.modules()]
    model.eval()
    model.zero_grad()
    accumulate(list(split(batch, 3)))
    pieces = _gradient(model)
    model.zero_grad()
    accumulate([batch])
    whole = _gradient(model)
    model.zero_grad(set_to_none=False)
    for module, mode in noted:
        module.training = mode
    return torch.linalg.vector_norm(pieces - whole) / torch.linalg.vector_norm(whole)


def _seeded(model, batch, accumulate):
    """The same seed before each: the pieces still draw other numbers for their rows."""

    def again(pieces):
        torch.manual_seed(0)
        accumulate(pieces)

    return _fair(model, batch, again, wrap=lambda model: None)


RIGHT["3.9"] = {
    "slices": partial(_fair, cut=_sliced),
    "pieces first, a tensor": _pieces_first,
    "squares": partial(
        _fair, error=lambda a, b: ((a - b).square().sum() / b.square().sum()).sqrt().item()
    ),
}
WRONG["3.9"] = {
    "seeded": (_seeded, "draw other numbers"),
    "dropout alone": (partial(_fair, wrap=_only_dropout), "draw other numbers"),
    "modes not set back": (partial(_fair, undo=False), "not as it was|mode"),
    "gradients left": (partial(_fair, clear=False), "gradients are left"),
    "divided by the pieces": (
        partial(_fair, error=lambda a, b: ((a - b).norm() / a.norm()).item()),
        "length of the gradient in pieces",
    ),
    "largest difference": (
        partial(_fair, error=lambda a, b: (a - b).abs().max().item()),
        "error",
    ),
    "pieces of 6": (partial(_fair, cut=lambda b: list(split(b, 6))), "error"),
    "cosine": (
        partial(_fair, error=lambda a, b: 1 - F.cosine_similarity(a, b, dim=0).item()),
        "error",
    ),
}


def _step(model, optimizer, batch, *, forward=None, rows=None, scale=1.0, zero=True, steps=1):
    outputs = (forward or (lambda model, x: model(x)))(model, batch["x"][:rows])
    loss = F.cross_entropy(outputs, batch["labels"][:rows])
    (scale * loss).backward()
    for _ in range(steps):
        optimizer.step()
    if zero:
        optimizer.zero_grad()
    return loss.item()


def _per_block(model, x):
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return model.head(x)


def _blocks_by_hand(model, x, *, preserve=True):
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=preserve)
    return model.head(x)


def _with_segments(model, optimizer, batch, every=2, **how):
    with checkpoint_layers(model.blocks, every=every):
        return _step(model, optimizer, batch, **how)


def _in_halves(model, optimizer, batch):
    total = 0.0
    for micro in split(batch, 32):
        loss = F.cross_entropy(model(micro["x"]), micro["labels"]) / 2
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def _in_evaluation(model, optimizer, batch):
    model.eval()
    loss = _step(model, optimizer, batch)
    model.train()
    return loss


def _pieces_and_checkpoints(model, optimizer, batch):
    total = 0.0
    with checkpoint_layers(model.blocks, every=1):
        for micro in split(batch, 16):
            loss = F.cross_entropy(model(micro["x"]), micro["labels"]) / 4
            loss.backward()
            total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


RIGHT["5.10"] = {
    "segments of two": _with_segments,
    "by hand": partial(_step, forward=_per_block),
    "sqrt": partial(_with_segments, every="sqrt"),
}
WRONG["5.10"] = {
    "halves": (_in_halves, "another update"),
    "pieces and checkpoints": (_pieces_and_checkpoints, "another update"),
    "no dropout": (_in_evaluation, "evaluation mode"),
    "other numbers": (
        partial(_step, forward=partial(_blocks_by_hand, preserve=False)),
        "second run of a block",
    ),
    "half of the rows": (partial(_with_segments, every=1, rows=32), "32 of the 64 rows"),
    "two steps": (partial(_with_segments, every=1, steps=2), "2 times as far"),
    "gradients stay": (partial(_with_segments, every=1, zero=False), "zero_grad"),
    "a step too long": (partial(_with_segments, every=1, scale=2.0), "2 times as far"),
}
