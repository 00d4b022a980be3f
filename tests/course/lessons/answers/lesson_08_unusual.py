"""Answers to the exercises of lesson 08 that nobody had in mind when its checks were written."""

import itertools
import math
from bisect import bisect_left

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gradmem_lib.course.lessons.lesson_08.exercises import PRODUCTS
from gradmem_lib.course.lessons.lesson_08.exercises_moving import Disk

RIGHT, WRONG = {}, {}
KEEP, REPEAT = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _cycles():
    turns = {False: itertools.cycle((KEEP, REPEAT)), True: itertools.cycle((KEEP, REPEAT))}

    def policy(ctx, op, *args, **kwargs):
        return next(turns[ctx.is_recompute]) if op in PRODUCTS else REPEAT

    return policy


class _Policy:
    def __init__(self):
        self.seen = []

    def __call__(self, ctx, op, *args, **kwargs):
        if op not in PRODUCTS:
            return CheckpointPolicy.MUST_RECOMPUTE
        self.seen.append(ctx.is_recompute)
        return KEEP if self.seen.count(ctx.is_recompute) % 2 else REPEAT


def _every(n, start=1):
    def every_second_product():
        counts = [0, 0]

        def policy(ctx, op, *args, **kwargs):
            if op not in PRODUCTS:
                return REPEAT
            counts[ctx.is_recompute] += 1
            return KEEP if counts[ctx.is_recompute] % n == start else REPEAT

        return policy

    return every_second_product


def _by_shape():
    def policy(ctx, op, *args, **kwargs):
        return KEEP if op in PRODUCTS and args and args[0].shape[-1] % 2 else REPEAT

    return policy


RIGHT["8.1"] = {"cycles": _cycles, "a class": _Policy}
WRONG["8.1"] = {
    "every third": (_every(3), "only every third product is kept"),
    "the second ones": (_every(2, 0), "keep the first"),
    "True and False": (
        lambda: lambda ctx, op, *a, **k: "KEEP" if op in PRODUCTS else "REPEAT",
        "KEEP or REPEAT themselves",
    ),
}


def _formula(factor=4, pairs=None, size=None):
    def formula(query, key, value, *args, out_val=None, **kwargs):
        rows, heads, queries, width = query
        return (
            factor
            * rows
            * heads
            * (pairs(queries, key[2]) if pairs else queries * key[2])
            * (size(width) if size else width)
        )

    return formula


def _count(formula, report=lambda more, less: more - less):
    def repeated(plain, checkpointed):
        totals = []
        for step in (plain, checkpointed):
            with FlopCounterMode(display=False, custom_mapping={FUSED: formula}) as counter:
                step()
            totals.append(counter.get_total_flops())
        return report(totals[1], totals[0])

    return repeated


RIGHT["8.2"] = {
    "value's width": _count(
        lambda q, k, v, *a, out_val=None, **kw: 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3])
    )
}
WRONG["8.2"] = {
    "causal half": (_count(_formula(2)), "gives half"),
    "heads' width twice": (_count(_formula(4, size=lambda w: 2 * w)), "counts twice"),
    "a share": (_count(_formula(), lambda more, less: more / less - 1), "ratio"),
    "checkpointed alone": (_count(_formula(), lambda more, less: more), "whole step"),
    "absolute of the other": (
        _count(_formula(), lambda more, less: less - more),
        "other way round",
    ),
}


class _Bytes(Disk):
    """Raw bytes, with shape and dtype in the handle."""

    def pack(self, tensor):
        if tensor.untyped_storage().data_ptr() in self.stay:
            return tensor
        self.number += 1
        path = f"{self.folder}/{self.number}.bin"
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        with open(path, "wb") as file:
            file.write(flat.numpy().tobytes())
        return path, tensor.dtype, tuple(tensor.shape)

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        path, dtype, shape = packed
        with open(path, "rb") as file:
            return torch.frombuffer(bytearray(file.read()), dtype=dtype).view(shape)


class _Removes(_Bytes):
    """Each file is removed when it has been read."""

    def unpack(self, packed):
        import os

        found = super().unpack(packed)
        if not isinstance(packed, torch.Tensor):
            os.remove(packed[0])
        return found


class _Half(_Bytes):
    def pack(self, tensor):
        if tensor.dtype == torch.float32 and tensor.untyped_storage().data_ptr() not in self.stay:
            return super().pack(tensor.half())
        return super().pack(tensor)

    def unpack(self, packed):
        found = super().unpack(packed)
        return found.float() if found.dtype == torch.float16 else found


class _InMemory(_Bytes):
    """Bytes in Python's memory: no tracker sees them."""

    def pack(self, tensor):
        if tensor.untyped_storage().data_ptr() in self.stay:
            return tensor
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        return flat.numpy().tobytes(), tensor.dtype, tuple(tensor.shape)

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        data, dtype, shape = packed
        return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


RIGHT["8.3"] = {"raw bytes": _Bytes}
WRONG["8.3"] = {
    "float16": (_Half, "rounded to half"),
    "in memory": (_InMemory, "nothing is moved"),
}
RIGHT["8.4"] = {
    "logarithms": lambda n, o, b, s: math.exp(
        math.log(2 * n) + math.log(s) - math.log(b) - math.log(o)
    ),
}
WRONG["8.4"] = {
    "speed over bandwidth alone": (lambda n, o, b, s: s / b, "has no effect"),
    "bits": (lambda n, o, b, s: 16 * n * s / (b * o), "8 times"),
    "twice the operations": (lambda n, o, b, s: n / b / (2 * o / s), "4 times"),
    "a difference": (lambda n, o, b, s: 2 * n / b - o / s, "difference in seconds"),
}


class _Fits:
    """A sorted sequence of "does it fit", for bisect."""

    def __init__(self, peak, layers, budget):
        self.peak, self.layers, self.budget = peak, layers, budget

    def __len__(self):
        return self.layers + 1

    def __getitem__(self, k):
        return self.peak(k) <= self.budget


def _cached(peak, layers, budget):
    from functools import lru_cache

    ask = lru_cache(None)(peak)
    low, high = -1, layers
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if ask(middle) <= budget else (middle, high)
    return high


RIGHT["8.5"] = {
    "bisect": lambda peak, layers, budget: bisect_left(_Fits(peak, layers, budget), True),
    "from -1": _cached,
}
WRONG["8.5"] = {
    "below the budget": (
        lambda peak, layers, budget: bisect_left(
            range(layers + 1), True, key=lambda k: peak(k) < budget
        ),
        "exactly the budget",
    ),
    "one layer less": (
        lambda peak, layers, budget: max(0, _cached(peak, layers, budget) - 1),
        "one layer is missing",
    ),
    "interpolated": (
        lambda peak, layers, budget: max(
            0, min(layers, math.ceil((peak(0) - budget) / max(1, peak(0) - peak(layers)) * layers))
        ),
        "straight line",
    ),
    "how many stay": (
        lambda peak, layers, budget: layers - _cached(peak, layers, budget),
        "do not run again",
    ),
}


def _tiles(cut, join=lambda parts: torch.cat(parts, dim=1)):
    return lambda mlp, x, tiles: join(
        [checkpoint(mlp, part, use_reentrant=False) for part in cut(x, tiles)]
    )


def _recursive(mlp, x, tiles):
    if tiles == 1:
        return checkpoint(mlp, x, use_reentrant=False)
    cut = -(-x.shape[1] // tiles)
    first = checkpoint(mlp, x[:, :cut], use_reentrant=False)
    return torch.cat((first, _recursive(mlp, x[:, cut:], tiles - 1)), 1)


RIGHT["8.6"] = {"recursive": _recursive, "chunks": _tiles(lambda x, n: x.chunk(n, 1))}
WRONG["8.6"] = {
    "of so many tokens": (_tiles(lambda x, n: x.split(n, 1)), "length of a tile"),
    "rows": (
        _tiles(lambda x, n: x.tensor_split(n, 0), lambda p: torch.cat(p, 0)),
        "the rows are cut",
    ),
}


def _kv(**wrong):
    def kv_cache(config, rows, tokens, bytes_per_number):
        heads = wrong.get("heads", lambda c: c.num_key_value_heads)(config)
        layers = wrong.get("layers", lambda c: c.num_hidden_layers)(config)
        return (
            wrong.get("times", 2)
            * layers
            * heads
            * config.head_dim
            * rows
            * tokens
            * wrong.get("size", bytes_per_number)
        )

    return kv_cache


RIGHT["8.7"] = {
    "tensors": lambda c, r, t, b: sum(
        torch.empty(
            r,
            c.num_key_value_heads,
            t,
            c.head_dim,
            dtype={1: torch.int8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[b],
            device="meta",
        ).nbytes
        for _ in range(2 * c.num_hidden_layers)
    ),
}
WRONG["8.7"] = {
    "bits": (lambda c, r, t, b: 8 * _kv()(c, r, t, b), "these are bits"),
    "one layer": (_kv(layers=lambda c: 1), "one layer"),
    "always bf16": (_kv(size=2), "bytes_per_number"),
    "GiB": (lambda c, r, t, b: _kv()(c, r, t, b) / 2**30, "GiB"),
    "pairs of tokens": (lambda c, r, t, b: _kv()(c, r, t * t, b), "squared"),
}


def _of_63_layers(peak, layers, budget):
    low, high = 0, 63
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if peak(middle) <= budget else (middle + 1, high)
    return low


def _by_recursion(peak, layers, budget, low=0):
    if low == layers:
        return layers
    middle = (low + layers) // 2
    if peak(middle) <= budget:
        return _by_recursion(peak, middle, budget, low)
    return _by_recursion(peak, layers, budget, middle + 1)


RIGHT.setdefault("8.5", {})["by recursion"] = _by_recursion
WRONG.setdefault("8.5", {})["as if there were 63 layers"] = (
    _of_63_layers,
    "k goes from 0 to `layers`",
)


class _Contiguous(Disk):
    """Views that are contiguous already are not copied, and keep their whole storage."""

    def pack(self, tensor):
        if tensor.untyped_storage().data_ptr() in self.stay:
            return tensor
        self.number += 1
        path = f"{self.folder}/{self.number}.pt"
        torch.save(tensor.detach().contiguous(), path)
        return path


class _ByKind(Disk):
    """Only parameters stay, and no view of one."""

    def pack(self, tensor):
        if isinstance(tensor, torch.nn.Parameter):
            return tensor
        self.number += 1
        path = f"{self.folder}/{self.number}.pt"
        torch.save(tensor.detach().clone(), path)
        return path


WRONG["8.3"] |= {
    "contiguous": (_Contiguous, "clone\\(\\) does"),
    "parameters by their class": (_ByKind, "views of weights"),
}
