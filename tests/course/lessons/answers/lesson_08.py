"""Answers to the exercises of lesson 08 as people write them; see lesson_00.py."""

import bisect
import io
import itertools
import math
import pickle
import uuid
from functools import partial
from pathlib import Path

import numpy as np
import torch
from support.families import OLDER
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from gradmem_lib.course.lessons.lesson_08 import exercises as lesson_08
from gradmem_lib.course.lessons.lesson_08 import exercises_moving, exercises_numbers

RIGHT, WRONG, aten = {}, {}, torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}
SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def _policy(
    *,
    is_product=lambda op: op in PRODUCTS,
    odd=1,
    run=lambda ctx: ctx.is_recompute,
    rest=AGAIN,
    save=SAVE,
):
    counts = {}

    def policy(ctx, op, *args, **kwargs):
        if not is_product(op):
            return rest
        counts[run(ctx)] = counts.get(run(ctx), 0) + 1
        return save if counts[run(ctx)] % 2 == odd else AGAIN

    return policy


class _Policy:
    def __init__(self):
        self.turns = [itertools.cycle([True, False]), itertools.cycle([True, False])]

    def __call__(self, ctx, op, *args, **kwargs):
        return next(self.turns[ctx.is_recompute]) if op in PRODUCTS else False


RIGHT["8.1"] = {
    "counts": lambda: _policy(),
    "an object": lambda: _Policy(),
    "by name": lambda: _policy(is_product=lambda op: "mm" in str(op)),
    "prefers": lambda: _policy(
        save=CheckpointPolicy.PREFER_SAVE, rest=CheckpointPolicy.MUST_RECOMPUTE
    ),
}


SHARED = _policy()


def _by_kind():
    seen = []

    def policy(ctx, op, *args, **kwargs):
        if op not in PRODUCTS:
            return AGAIN
        seen.append((ctx.is_recompute, op))
        return SAVE if seen.count((ctx.is_recompute, op)) % 2 else AGAIN

    return policy


def _keeps_attention_too(policy):
    return lambda ctx, op, *args: SAVE if "attention" in str(op) else policy(ctx, op)


def _keeps_all_again(policy):
    """The rest is kept, but only when the second run asks."""

    def asked(ctx, op, *args):
        if op not in PRODUCTS and ctx.is_recompute:
            return SAVE
        return policy(ctx, op)

    return asked


WRONG["8.1"] = {
    "every second operation": (lambda: _policy(is_product=lambda op: True), "operation"),
    "the others": (lambda: _policy(odd=0), "first"),
    "all": (
        lambda: lambda ctx, op, *args, **kwargs: SAVE if op in PRODUCTS else AGAIN,
        "every product|all",
    ),
    "one count": (lambda: _policy(run=lambda ctx: 0), "second run|is_recompute"),
    "one for all": (lambda: SHARED, "second run" if OLDER else "policy of its own|layer"),
    "by kind": (_by_kind, "kind"),
    "packets": (
        lambda: _policy(is_product=lambda op: op in (aten.mm, aten.addmm, aten.bmm)),
        "default",
    ),
    "the rest too": (lambda: _policy(rest=SAVE), "other operations than products"),
    "contexts": (lambda: create_selective_checkpoint_contexts(_policy()), "policy itself|called"),
    "mm alone": (lambda: _policy(is_product=lambda op: op == aten.mm.default), "addmm|bmm"),
    "keeps attention too": (lambda: _keeps_attention_too(_policy()), "fused attention is kept"),
    "the test the wrong way round": (
        lambda: _policy(is_product=lambda op: op not in PRODUCTS),
        "no product is kept, but other operations are",
    ),
    "other answers in the second run": (
        lambda: _keeps_all_again(_policy()),
        "second run gets other answers|other operations than products",
    ),
    "keeps nothing": (lambda: lambda ctx, op, *args, **kwargs: AGAIN, "nothing is kept|no product"),
}


def _counting_policy(*, counted=lambda op: op in PRODUCTS, again=True, rest=AGAIN):
    def make():
        counts = [0, 0]

        def policy(ctx, op, *args, **kwargs):
            if not counted(op) or (ctx.is_recompute and not again):
                return rest
            counts[ctx.is_recompute] += 1
            return SAVE if counts[ctx.is_recompute] % 2 else AGAIN

        return policy

    return make


def _counts_all():
    seen = {True: 0, False: 0}

    def policy(ctx, op, *args, **kwargs):
        again = bool(ctx.is_recompute)
        seen[again] += 1
        if op not in PRODUCTS:
            return AGAIN
        return SAVE if seen[again] % 2 == 1 else AGAIN

    return policy


def _counts_all_and_goes_on():
    seen = 0

    def policy(ctx, op, *args, **kwargs):
        nonlocal seen
        seen += 1
        return SAVE if op in PRODUCTS and seen % 2 == 1 else AGAIN

    return policy


WRONG["8.1"] |= {
    "counts every operation": (_counts_all, "only products count"),
    "counts every operation, and goes on": (_counts_all_and_goes_on, "only products count"),
    "attention counts too": (
        _counting_policy(counted=lambda op: op in PRODUCTS or "attention" in str(op)),
        "fused attention is counted as a product",
    ),
    "None for the rest": (
        _counting_policy(rest=None),
        "the policy returns None for some operations",
    ),
    "nothing in the second run": (
        _counting_policy(again=False),
        "the second run gets other answers",
    ),
}


def _fused(query, key, value, *args, factor=4, keys=lambda q, k: k[2], out_val=None, **kwargs):
    return factor * query[0] * query[1] * query[2] * keys(query, key) * query[3]


FUSED = aten._scaled_dot_product_flash_attention_for_cpu


def _operations(step, formula=_fused, op=FUSED):
    with FlopCounterMode(display=False, custom_mapping={op: formula}) as counter:
        step()
    return counter.get_total_flops()


def _repeated(plain, checkpointed, *, formula=_fused, op=FUSED, of=lambda more, less: more - less):
    return of(_operations(checkpointed, formula, op), _operations(plain, formula, op))


def _as_plain_products(plain, checkpointed):
    counts = []
    for step in (plain, checkpointed):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            step()
        counts.append(counter.get_total_flops())
    return counts[1] - counts[0]


class _Counter(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in PRODUCTS:
            a, b = [t for t in args if isinstance(t, torch.Tensor)][-2:]
            self.total += 2 * a.numel() * b.shape[-1]
        elif op is FUSED.default:
            self.total += 4 * args[0].numel() * args[1].shape[-2]
        return op(*args, **(kwargs or {}))


def _by_mode(plain, checkpointed):
    with _Counter() as less:
        plain()
    with _Counter() as more:
        checkpointed()
    return torch.tensor(more.total - less.total)


RIGHT["8.2"] = {"mapping": _repeated, "plain products": _as_plain_products, "a mode": _by_mode}


def _blind(plain, checkpointed):
    with FlopCounterMode(display=False) as less:
        plain()
    with FlopCounterMode(display=False) as more:
        checkpointed()
    return more.get_total_flops() - less.get_total_flops()


WRONG["8.2"] = {
    "blind": (_blind, "fused attention"),
    "blind by overload": (partial(_repeated, op=FUSED.default), "fused attention"),
    "one product": (partial(_repeated, formula=partial(_fused, factor=2)), "two products"),
    "multiplications": (
        partial(_repeated, of=lambda more, less: (more - less) // 2),
        "addition|too small",
    ),
    "whole step": (partial(_repeated, of=lambda more, less: more), "whole step|difference"),
    "plain step": (partial(_repeated, of=lambda more, less: less), "without its checkpoint"),
    "turned round": (partial(_repeated, of=lambda more, less: less - more), "sign|negative|round"),
    "square": (partial(_repeated, formula=partial(_fused, keys=lambda q, k: q[2])), "keys"),
    "a head": (
        partial(
            _repeated, formula=lambda q, k, v, *a, out_val=None, **kw: 4 * q[0] * q[2] * k[2] * q[3]
        ),
        "head",
    ),
    "a share": (
        partial(_repeated, of=lambda more, less: more / less - 1),
        "share|fraction|operations",
    ),
}


def _flops(of):
    def formula(query, key, value, *args, out_val=None, **kwargs):
        return of(*query, key[2])

    return lambda plain, checkpointed: (
        _operations(checkpointed, formula) - _operations(plain, formula)
    )


RIGHT["8.2"] |= {"from both shapes": _flops(lambda b, h, q, d, k: 4 * b * h * q * d * k)}


def _one_counter(plain, checkpointed):
    return _operations(lambda: (plain(), checkpointed()), lesson_08.fused_operations)


WRONG["8.2"] |= {
    "no rows": (_flops(lambda b, h, q, d, k: 4 * h * q * d * k), "leaves out the rows"),
    "no size": (_flops(lambda b, h, q, d, k: 4 * b * h * q * k), "leaves out the size of a head"),
    "four products": (_flops(lambda b, h, q, d, k: 8 * b * h * q * d * k), "counts twice"),
    "one counter": (_one_counter, "the sum of both steps is counted"),
    "not called": (lambda plain, checkpointed: 0, "no operation is counted"),
}


def _operations_by(step, formula):
    with FlopCounterMode(
        display=False, custom_mapping={FUSED: formula} if formula else {}
    ) as counter:
        step()
    return counter.get_total_flops()


def _difference(of, *, first=True, second=True):
    """``of(rows, heads, queries, size, keys)``: the formula, which the plain step's counter has,
    and the other step's.
    """

    def formula(query, key, value, *args, out_val=None, **kwargs):
        return of(*query, key[2])

    return lambda plain, again: (
        _operations_by(again, second and formula) - _operations_by(plain, first and formula)
    )


def _exact(rows, heads, queries, size, keys):
    return 4 * rows * heads * queries * size * keys


def _with(formula):
    return lambda plain, again: _operations_by(again, formula) - _operations_by(plain, formula)


def _not_called(plain, again):
    counters = []
    for step in (plain, again):
        with FlopCounterMode(display=False, custom_mapping={FUSED: lambda *_, **__: 0}) as counter:
            step()
        counters.append(counter)
    return counters[1].get_total_flops - counters[0].get_total_flops


WRONG["8.2"] |= {
    "fewer arguments": (_with(lambda query, key, value, *args: 0), r"\*\*kwargs"),
    "shapes of shapes": (
        _with(lambda query, *rest, **kwargs: query.shape[0]),
        "are shapes, not tensors",
    ),
    "no return": (_with(lambda *shapes, **kwargs: None), "returns nothing"),
    "the number itself": (_with(4), "without calling it"),
    "total not called": (_not_called, "call it"),
    "keys squared": (_difference(lambda b, h, q, d, k: 4 * b * h * k * k * d), "squares the keys"),
    "size for keys": (_difference(lambda b, h, q, d, k: 4 * b * h * q * d * d), r"key\[2\]"),
    "a quarter": (_difference(lambda b, h, q, d, k: b * h * q * d * k), "a quarter"),
    "softmax too": (
        _difference(lambda b, h, q, d, k: _exact(b, h, q, d, k) + b * h * q * k),
        "must return 3,600, but returns 3,750",
    ),
    "one counter with it": (_difference(_exact, first=False), "one of the two counters"),
    "the other counter with it": (
        _difference(_exact, second=False),
        r"given only to plain\(\)'s counter",
    ),
}


class _Disk:
    """Saves what is handed over; the switches below make it wrong."""

    stays, file, clones, keeps, caches, half = True, "{n}", True, False, False, False

    def __init__(self, folder, weights):
        self.folder, self.numbers, self.kept = folder, itertools.count(), {}
        self.weights = {w.untyped_storage().data_ptr() for w in weights}

    def pack(self, tensor):
        if self.stays and tensor.untyped_storage().data_ptr() in self.weights:
            return tensor
        name = self.file.format(n=next(self.numbers), id=id(tensor), shape=tuple(tensor.shape))
        path = f"{self.folder}/{name}.pt"
        if self.keeps:
            self.kept[path] = tensor
        torch.save(self.written(tensor.detach()), path)
        return path

    def written(self, tensor):
        if self.half and tensor.is_floating_point():
            tensor = tensor.half().to(tensor.dtype)
        return tensor.clone() if self.clones else tensor

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        if not self.caches:
            return torch.load(packed)
        if packed not in self.kept:
            self.kept[packed] = torch.load(packed)
        return self.kept[packed]


class _Paths:
    """By pathlib and names by chance; files go when they are read, weights are known as
    parameters.
    """

    def __init__(self, folder, weights):
        self.folder = Path(folder)
        self.stay = [w.data_ptr() for w in weights]

    def pack(self, tensor):
        if tensor.data_ptr() in self.stay:
            return tensor
        path = self.folder / uuid.uuid4().hex
        torch.save(tensor.detach().contiguous().clone(), path)
        return path

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        tensor = torch.load(packed)
        packed.unlink()
        return tensor


class _Numpy(_Disk):
    def pack(self, tensor):
        if tensor.untyped_storage().data_ptr() in self.weights:
            return tensor
        path = Path(self.folder) / str(next(self.numbers))
        path.write_bytes(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return path, tensor.dtype, tensor.shape

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        path, dtype, shape = packed
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=dtype).view(shape)


class _Once(_Disk):
    """One file a storage, as the library has it, as long as the storage lives."""

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.weights:
            return tensor
        known, path = self.kept.get(storage._cdata, (None, None))
        if known is None or known.expired():
            path = f"{self.folder}/{next(self.numbers)}"
            torch.save(torch.empty(0, dtype=tensor.dtype).set_(storage), path)
            self.kept[storage._cdata] = StorageWeakRef(storage), path
        return path, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, packed):
        return (
            packed
            if isinstance(packed, torch.Tensor)
            else torch.load(packed[0]).as_strided(*packed[1:])
        )


RIGHT["8.3"] = {"plain": _Disk, "paths": _Paths, "bytes": _Numpy, "once": _Once}


def _disk(**switches):
    return type("Disk", (_Disk,), switches)


class _Memory(_Disk):
    def pack(self, tensor):
        if tensor.untyped_storage().data_ptr() in self.weights:
            return tensor
        buffer = io.BytesIO()
        pickle.dump(tensor.detach().clone(), buffer)
        return buffer

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        packed.seek(0)
        return pickle.load(packed)


class _Identity(_Disk):
    def pack(self, tensor):
        return tensor

    def unpack(self, packed):
        return packed


class _Returns(_Disk):
    def unpack(self, packed):
        return packed


WRONG["8.3"] = {
    "keeps": (_disk(keeps=True), "kept|alive"),
    "whole storage": (_disk(clones=False), "storage|clone"),
    "weights too": (_disk(stays=False), "weight"),
    "by id": (_disk(file="{id}"), "name|overwrit"),
    "by shape": (_disk(file="{shape}"), "name|overwrit"),
    "one file": (_disk(file="saved"), "name|overwrit"),
    "caches": (_disk(caches=True), "alive|keep|kept"),
    "half": (_disk(half=True), "rounded|half precision"),
    "in memory": (_Memory, "folder|file"),
    "identity": (_Identity, "nothing is moved|no file"),
    "names alone": (_Returns, "unpack"),
}


class _NumpyFiles(exercises_moving.Disk):
    def pack(self, tensor):
        if tensor.untyped_storage().data_ptr() in self.stay:
            return tensor
        self.number += 1
        path = f"{self.folder}/{self.number}.npy"
        np.save(path, tensor.detach().numpy())
        return path

    def unpack(self, packed):
        return packed if isinstance(packed, torch.Tensor) else torch.from_numpy(np.load(packed))


RIGHT["8.3"] |= {"numpy files": _NumpyFiles}


class _ByShape(exercises_moving.Disk):
    def __init__(self, folder, weights):
        super().__init__(folder, weights)
        self.shapes = {shape for w in weights for shape in (w.shape, w.shape[::-1])}

    def pack(self, tensor):
        return tensor if tensor.shape in self.shapes else super().pack(tensor)


class _KeepsTheTensorToo(exercises_moving.Disk):
    def pack(self, tensor):
        packed = super().pack(tensor)
        return packed if packed is tensor else (packed, tensor)

    def unpack(self, packed):
        return packed[1] if isinstance(packed, tuple) else packed


class _InNumpy(exercises_moving.Disk):
    def pack(self, tensor):
        if tensor.untyped_storage().data_ptr() in self.stay:
            return tensor
        return tensor.detach().clone().numpy()

    def unpack(self, packed):
        return packed if isinstance(packed, torch.Tensor) else torch.from_numpy(packed)


class _ByAddress(exercises_moving.Disk):
    def pack(self, tensor):
        if tensor.data_ptr() in self.stay:
            return tensor
        self.stay, stay = set(), self.stay
        path = super().pack(tensor)
        self.stay = stay
        return path


class _ReadsAll(exercises_moving.Disk):
    def unpack(self, packed):
        return torch.load(packed)


class _OpensAll(exercises_moving.Disk):
    def unpack(self, packed):
        with open(packed, "rb") as file:
            return torch.load(file)


WRONG["8.3"] |= {
    "reads weights too": (_ReadsAll, "return a tensor as it is"),
    "opens weights too": (_OpensAll, "return a tensor as it is"),
    "a weight's address": (_ByAddress, "recognise each by its storage"),
    "the tensor beside its file": (_KeepsTheTensorToo, "the very tensor that pack was given"),
    "a weight's shape": (_ByShape, "an activation that has a weight's shape stays"),
    "numpy": (_InNumpy, "no file appears"),
}


def _ratio(nbytes, operations, bandwidth, speed):
    return 2 * nbytes / bandwidth / (operations / speed)


RIGHT["8.4"] = {
    "plain": _ratio,
    "one fraction": lambda nbytes, operations, bandwidth, speed: (
        nbytes * speed * 2 / (bandwidth * operations)
    ),
    "tensors": lambda n, o, b, s: torch.tensor(2.0 * n, dtype=torch.float64) / b * s / o,
}
WRONG["8.4"] = {
    "one way": (lambda n, o, b, s: n / b / (o / s), "twice|both ways|back"),
    "inverse": (lambda n, o, b, s: o / s / (2 * n / b), "round|inverse|divide"),
    "difference": (lambda n, o, b, s: 2 * n / b - o / s, "difference"),
    "swapped": (lambda n, o, b, s: 2 * n / s / (o / b), "speed|bandwidth"),
    "truth": (lambda n, o, b, s: 2 * n / b < o / s, "number|how many times"),
    "seconds": (lambda n, o, b, s: 2 * n / b, "seconds|has no effect"),
    "free back": (lambda n, o, b, s: max(n / b, o / s), "got|times|effect"),
    "share": (lambda n, o, b, s: (2 * n / b) / (2 * n / b + o / s), "share|sum"),
    "forward and backward": (lambda n, o, b, s: 4 * n / b / (o / s), "times too large|twice"),
}


def _bisected(peak, layers, budget):
    low, high = 0, layers
    while low < high:
        middle = (low + high) // 2
        if peak(middle) <= budget:
            high = middle
        else:
            low = middle + 1
    return low


def _recursive(peak, layers, budget, low=0):
    if low == layers:
        return low
    middle = (low + layers) // 2
    return (
        _recursive(peak, middle, budget, low)
        if peak(middle) <= budget
        else _recursive(peak, layers, budget, middle + 1)
    )


def _between(peak, layers, budget, *, low=0, high=None, fits=lambda found, budget: found <= budget):
    high = layers if high is None else high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(peak(middle), budget) else (middle + 1, high)
    return low


RIGHT["8.5"] = {
    "loop": _bisected,
    "recursive": _recursive,
    "bisect": lambda peak, layers, budget: bisect.bisect_left(
        range(layers), True, key=lambda k: peak(k) <= budget
    ),
    "ends first": lambda peak, layers, budget: (
        0 if peak(0) <= budget else _between(peak, layers, budget, low=1)
    ),
}


def _scanned(peak, layers, budget):
    return next(k for k in range(layers + 1) if peak(k) <= budget)


def _straight(peak, layers, budget):
    most, least = peak(0), peak(layers)
    return max(0, math.ceil((most - budget) / (most - least) * layers))


WRONG["8.5"] = {
    "scan": (_scanned, "one after another|calls"),
    "below": (partial(_between, fits=lambda found, budget: found < budget), "exactly|at most"),
    "all": (lambda peak, layers, budget: layers, "all|fewest|whatever"),
    "none": (lambda peak, layers, budget: 0, "none|budget|whatever"),
    "straight": (_straight, "same|line|unequal"),
    "at least one": (partial(_between, low=1), "0|nothing"),
    "never all": (
        lambda peak, layers, budget: _between(peak, layers, budget, high=layers - 1),
        "all|last",
    ),
    "last that fails": (
        lambda peak, layers, budget: max(_bisected(peak, layers, budget) - 1, 0),
        "does not fit|over",
    ),
    "one more": (
        lambda peak, layers, budget: min(_bisected(peak, layers, budget) + 1, layers),
        "one layer too many",
    ),
    "the peak": (lambda peak, layers, budget: peak(_bisected(peak, layers, budget)), "peak|bytes"),
}


def _halve(peak, layers, budget, number=int, asks=1, up=1):
    low, high = 0, layers
    while low < high:
        middle = (low + high) // 2
        if max([peak(middle) for _ in range(asks)]) <= budget:
            high = middle
        else:
            low = middle + up
    return number(low)


RIGHT["8.5"] |= {
    "a tensor": lambda peak, layers, budget: _halve(peak, layers, budget, torch.tensor),
    "numpy": lambda peak, layers, budget: _halve(peak, layers, budget, np.int64),
}


def _largest(peak, layers, budget):
    low, high = 0, layers
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if peak(middle) <= budget else (low, middle - 1)
    return low


WRONG["8.5"] |= {
    "asks twice": (
        lambda *given: _halve(*given, asks=2),
        "the number is right, but it took more than 8",
    ),
    "never ends": (lambda *given: _halve(*given, up=0), "does not get smaller"),
    "the largest that fits": (_largest, "the search ends in the wrong place"),
    "steps of eight": (
        lambda peak, layers, budget: next(
            k for k in [*range(0, layers, 8), layers] if peak(k) <= budget
        ),
        "the search ends in the wrong place",
    ),
}


def _others(peak, layers, budget):
    low, high = 0, layers
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if peak(middle) <= budget else (middle + 1, high)
    return layers - low


WRONG["8.5"] |= {"those that stay": (_others, "layers that do not run again")}


def _tiled(mlp, x, tiles, *, dim=1, run=None, cut=None, join=torch.cat):
    parts = cut(x, tiles) if cut else x.tensor_split(tiles, dim=dim)
    run = run or partial(checkpoint, use_reentrant=False)
    return join([run(mlp, part) for part in parts], dim=dim)


def _tiled_into(mlp, x, tiles):
    size = math.ceil(x.shape[1] / tiles)
    out = []
    for start in range(0, x.shape[1], size):
        out.append(checkpoint(mlp, x[:, start : start + size], use_reentrant=False))
    return torch.cat(out, 1)


RIGHT["8.6"] = {
    "chunk": lambda mlp, x, tiles: _tiled(mlp, x, tiles, cut=lambda x, tiles: x.chunk(tiles, 1)),
    "tensor_split": _tiled,
    "slices": _tiled_into,
    "split": lambda mlp, x, tiles: _tiled(
        mlp, x, tiles, cut=lambda x, tiles: x.split(-(-x.shape[1] // tiles), 1)
    ),
}


def _plain(mlp, part):
    return mlp(part)


def _tiled_twice(mlp, x, tiles):
    return checkpoint(lambda whole: _tiled(mlp, whole, tiles, run=_plain), x, use_reentrant=False)


def _even(x, tiles):
    size = x.shape[1] // tiles
    return [x[:, i * size : (i + 1) * size] for i in range(tiles)]


WRONG["8.6"] = {
    "no checkpoint": (partial(_tiled, run=_plain), "checkpoint"),
    "whole": (lambda mlp, x, tiles: checkpoint(mlp, x, use_reentrant=False), "whole|tile|at once"),
    "tiles in one checkpoint": (_tiled_twice, "each tile|one checkpoint"),
    "rows": (partial(_tiled, dim=0), "rows|dim"),
    "rest dropped": (partial(_tiled, cut=_even), "left out|missing|rest|tokens"),
    "no grad": (
        lambda mlp, x, tiles: _tiled(mlp, x, tiles, run=lambda mlp, part: mlp(part).detach()),
        "detach|gradient",
    ),
    "input cut off": (lambda mlp, x, tiles: _tiled(mlp, x.detach(), tiles), "x gets no gradient"),
    "plain": (lambda mlp, x, tiles: mlp(x), r"nothing runs again: this is mlp\(x\) itself"),
    "size": (
        lambda mlp, x, tiles: _tiled(mlp, x, tiles, cut=lambda x, tiles: x.split(tiles, 1)),
        "number of tiles|tokens each|length|runs",
    ),
    "reentrant": (partial(_tiled, run=partial(checkpoint, use_reentrant=True)), "reentrant"),
}


def _tiles(dim=1, joined=1, join=torch.cat, **settings):
    def tiled(mlp, x, tiles):
        settings.setdefault("use_reentrant", False)
        return join(
            [checkpoint(mlp, part, **settings) for part in x.tensor_split(tiles, dim)], joined
        )

    return tiled


WRONG["8.6"] |= {
    "other random numbers": (
        _tiles(preserve_rng_state=False),
        "dropout draws other random numbers",
    ),
    "checkpoint of checkpoints": (
        lambda mlp, x, tiles: checkpoint(lambda x: _tiles()(mlp, x, tiles), x, use_reentrant=False),
        "a checkpoint around the checkpoints",
    ),
    "joined along rows": (_tiles(joined=0), "not joined along the dimension"),
    "stacked": (_tiles(join=torch.stack), "not joined along the dimension"),
    "the width is cut": (_tiles(2, 2), "the width is cut, so"),
    "x detached": (lambda mlp, x, tiles: _tiles()(mlp, x.detach(), tiles), "x gets no gradient"),
}


def _cache(
    config,
    rows,
    tokens,
    bytes_per_number,
    *,
    both=2,
    heads="num_key_value_heads",
    layers=True,
    size=None,
):
    width = getattr(config, heads) * (size(config) if size else config.head_dim)
    return (
        both
        * (config.num_hidden_layers if layers else 1)
        * width
        * rows
        * tokens
        * bytes_per_number
    )


def _real_size(config):
    return config.hidden_size // config.num_attention_heads


def _measured_cache(config, rows, tokens, bytes_per_number):
    keys = torch.empty(
        rows, config.num_key_value_heads, tokens, config.head_dim, device="meta", dtype=torch.int8
    )
    return sum(2 * keys.numel() * bytes_per_number for _ in range(config.num_hidden_layers))


RIGHT["8.7"] = {
    "plain": _cache,
    "tensors": _measured_cache,
    "or": lambda c, r, t, b: _cache(
        c, r, t, b, size=lambda c: getattr(c, "head_dim", None) or _real_size(c)
    ),
}
WRONG["8.7"] = {
    "keys alone": (partial(_cache, both=1), "values"),
    "every head": (partial(_cache, heads="num_attention_heads"), "grouped|share|key_value"),
    "one layer": (partial(_cache, layers=False), "layer"),
    "hidden / heads": (partial(_cache, size=_real_size), "head_dim"),
    "hidden / shared heads": (
        partial(_cache, size=lambda c: c.hidden_size // c.num_key_value_heads),
        "num_key_value_heads|hidden",
    ),
    "one row": (lambda c, r, t, b: _cache(c, 1, t, b), "only one row"),
    "numbers": (lambda c, r, t, b: _cache(c, r, t, 1), "bytes"),
    "always bf16": (lambda c, r, t, b: _cache(c, r, t, 2), "bytes_per_number|two bytes"),
    "square": (lambda c, r, t, b: _cache(c, r, t * t, b), "tokens|square"),
    "queries too": (partial(_cache, both=3), "queries"),
}


def _changed_cache(of):
    return lambda config, rows, tokens, width: of(
        exercises_numbers.kv_cache(config, rows, tokens, width), config, tokens
    )


WRONG["8.7"] |= {
    "one token": (
        _changed_cache(lambda right, config, tokens: right // tokens),
        "one token is counted",
    ),
    "one token fewer": (
        _changed_cache(lambda right, config, tokens: right // tokens * (tokens - 1)),
        "the last token is missing",
    ),
    "queries": (
        _changed_cache(
            lambda right, config, tokens: (
                right + right // 2 // config.num_key_value_heads * config.num_attention_heads
            )
        ),
        "queries are counted as well",
    ),
    "logits": (
        lambda config, rows, tokens, width: (
            _cache(config, rows, tokens, width) + rows * tokens * config.vocab_size * width
        ),
        "the logits are counted too",
    ),
    "the last logits, in float32": (
        lambda config, rows, tokens, width: (
            _cache(config, rows, tokens, width) + 4 * rows * config.vocab_size
        ),
        "the logits are counted too",
    ),
    "hidden states": (
        lambda config, rows, tokens, width: (
            _cache(config, rows, tokens, width) + rows * tokens * config.hidden_size * width
        ),
        "the hidden states are counted too",
    ),
    "heads of one number": (
        _changed_cache(lambda right, config, tokens: right // config.head_dim),
        "the width of a head is missing",
    ),
    "MiB": (_changed_cache(lambda right, config, tokens: right / 2**20), "return bytes"),
    "bits": (_changed_cache(lambda right, config, tokens: 8 * right), "these are bits"),
}


def _always(each):
    def kv_cache(config, rows, tokens, bytes_per_number):
        width = config.num_key_value_heads * config.head_dim
        return 2 * config.num_hidden_layers * width * rows * tokens * each

    return kv_cache


WRONG["8.7"] |= {
    "always 4 bytes": (_always(4), "assumes 4 bytes a number"),
    "always 8 bytes": (_always(8), "assumes 8 bytes a number"),
}


def _keeps(these):
    """A policy that keeps the products whose number, from 1, is one of these."""

    def make():
        counts = [0, 0]

        def policy(ctx, op, *args, **kwargs):
            if op not in PRODUCTS:
                return AGAIN
            counts[ctx.is_recompute] += 1
            return SAVE if counts[ctx.is_recompute] in these else AGAIN

        return policy

    return make


def _policy_of(*kinds):
    """The right policy, but only for these kinds of products."""
    counted = [getattr(aten, kind).default for kind in kinds]
    return lambda: _policy(is_product=lambda op: op in counted)


WRONG["8.1"] |= {
    "every third": (_keeps(range(1, 100, 3)), "only every third product"),
    "every third, from the third": (_keeps(range(3, 100, 3)), "only every third product"),
    "every fourth": (_keeps(range(1, 100, 4)), "only every fourth product"),
    "the first half": (_keeps(range(1, 5)), "keeps numbers 1, 2, 3, 4: keep the first"),
    "in pairs": (_keeps((1, 2, 5, 6)), "keeps numbers 1, 2, 5, 6: keep the first"),
    "one of them": (_keeps((5,)), "keeps number 5: keep the first"),
    "the first one": (_keeps((1,)), "only the first product is kept"),
    "no mm": (_policy_of("addmm", "bmm"), "one kind of product is not counted"),
    "no addmm": (_policy_of("mm", "bmm"), "one kind of product is not counted"),
    "no bmm": (_policy_of("mm", "addmm"), "one kind of product is not counted"),
    "mm alone": (_policy_of("mm"), "only one kind of product is counted"),
    "addmm alone": (_policy_of("addmm"), "only one kind of product is counted"),
    "bmm alone": (_policy_of("bmm"), "only one kind of product is counted"),
}


def _rest_in_the_last(x, tiles):
    size = x.shape[1] // tiles
    return x.tensor_split([size * i for i in range(1, tiles)], dim=1)


WRONG["8.6"] |= {
    "one tile less": (
        lambda mlp, x, tiles: _tiles()(mlp, x, max(1, tiles - 1)),
        "has 8 tokens, and 6 are enough: there are fewer than `tiles` tiles",
    ),
    "the rest in the last tile": (
        partial(_tiled, cut=_rest_in_the_last),
        "has 7 tokens, and 6 are enough: .* their lengths differ by more than 1",
    ),
}


def _halves(peak, layers, budget, *, low=0, after=0, fits=lambda peak, budget: peak <= budget):
    high = layers
    while low < high:
        middle = (low + high) // 2
        if fits(peak(middle), budget):
            high = middle
        else:
            low = middle + 1
    return low + after


RIGHT["8.4"] |= {
    "one fraction": lambda nbytes, operations, bandwidth, speed: (
        2 * nbytes * speed / (operations * bandwidth)
    )
}
RIGHT["8.5"] |= {
    "bisect": lambda peak, layers, budget: bisect.bisect_left(
        range(layers), True, key=lambda k: peak(k) <= budget
    )
}
RIGHT["8.7"] |= {"as a shape": lambda c, r, t, b: _cache(c, r, t, b)}
WRONG["8.4"] |= {
    "bits": (lambda n, o, b, s: 16 * n / b / (o / s), "8 times too large"),
    "half a bus": (lambda n, o, b, s: 2 * n / (b / 2) / (o / s), "too often"),
}
WRONG["8.5"] |= {
    "from 1": (partial(_halves, low=1), "the answer is 0"),
    "less than the budget": (
        partial(_halves, fits=lambda peak, budget: peak < budget),
        "equal to the budget fits",
    ),
    "one more": (partial(_halves, after=1), "one layer too many"),
}
WRONG["8.7"] |= {
    "one token less": (lambda c, r, t, b: _cache(c, r, t - 1, b), "last token is missing"),
    "scores": (lambda c, r, t, b: _cache(c, r, t * t, b), "tokens are squared"),
    "one row": (lambda c, r, t, b: _cache(c, 1, t, b), "only one row"),
}


def _in_32_bits(config, rows, tokens, width):
    return torch.tensor(_cache(config, rows, tokens, width)).to(torch.int32)


WRONG["8.4"] |= {
    "whole": (lambda n, o, b, s: int(2 * n / b / (o / s)), "return it with its fraction"),
    "rounded": (lambda n, o, b, s: round(2 * n / b / (o / s)), "return it with its fraction"),
}
WRONG["8.7"] |= {"in 32 bits": (_in_32_bits, "wrapped around")}


class _Stack(exercises_moving.Disk):
    """Reads the files in the reverse order, whatever it is asked for."""

    def pack(self, tensor):
        if tensor.untyped_storage().data_ptr() in self.stay:
            return tensor
        torch.save(tensor.detach().clone(), f"{self.folder}/{self.number}.pt")
        self.number += 1
        return self.number

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        self.number -= 1
        return torch.load(f"{self.folder}/{self.number}.pt")


class _ReturnsNothing(exercises_moving.Disk):
    def pack(self, tensor):
        packed = super().pack(tensor)
        return packed if isinstance(packed, torch.Tensor) else None


WRONG["8.3"] |= {
    "a stack": (_Stack, "come back in another order"),
    "returns nothing": (_ReturnsNothing, "a file whose name is None"),
}


def _half(peak, layers, budget):
    low, high = 0, layers
    while low < high:
        middle = (low + high) / 2
        if peak(middle) <= budget:
            high = middle
        else:
            low = middle + 1
    return low


WRONG["8.5"] |= {"a half layer": (_half, "halve with //")}


def _flat_tokens(mlp, x, tiles):
    """Cuts the tokens of all rows together: each tile is at most as large as one of all rows."""
    tokens = x.reshape(-1, x.shape[-1])
    parts = [checkpoint(mlp, part, use_reentrant=False) for part in tokens.tensor_split(tiles)]
    return torch.cat(parts).view_as(x)


def _row_by_row(mlp, x, tiles):
    rows = [row.tensor_split(tiles) for row in x]
    run = partial(checkpoint, mlp, use_reentrant=False)
    return torch.stack([torch.cat([run(part) for part in parts]) for parts in rows])


def _flat_row(mlp, x, tiles):
    """The same, as one long row."""
    return _flat_tokens(lambda part: mlp(part[None])[0], x, tiles)


RIGHT["8.6"] |= {"rows and tokens in one": _flat_tokens, "one long row": _flat_row}
WRONG["8.6"] |= {
    "each row whole": (
        partial(_tiled, dim=0, cut=lambda x, tiles: x.split(1)),
        "rows are cut|whole sequence at once",
    ),
    "row by row": (_row_by_row, "runs more often than asked for"),
    "one token more": (
        partial(_tiled, cut=lambda x, tiles: x.split(x.shape[1] // tiles + 1, 1)),
        "of 9 tokens in 3 tiles, the longest tile has 4, and 3 are enough",
    ),
    "rounded": (
        partial(_tiled, cut=lambda x, tiles: x.split(round(x.shape[1] / tiles), 1)),
        "runs more often than asked for",
    ),
}


def _cache_of_heads(heads):
    return lambda c, rows, tokens, size: (
        2 * c.num_hidden_layers * heads(c) * c.head_dim * rows * tokens * size
    )


WRONG["8.7"] |= {
    "no heads": (_cache_of_heads(lambda c: 1), "cache of one key-value head"),
    "heads that share": (
        _cache_of_heads(lambda c: c.num_attention_heads // c.num_key_value_heads),
        "query heads that share a key-value head",
    ),
}
