"""Answers to lesson 08's exercises that were once judged wrongly or that nobody had in mind: right
ones in unusual forms, and wrong ones.
"""

import itertools
from bisect import bisect_left

import numpy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from gradmem_lib.course.lessons.lesson_08 import exercises


class Policy:
    def __init__(self):
        self.turns = [itertools.cycle([True, False]), itertools.cycle([True, False])]

    def __call__(self, ctx, op, *args, **kwargs):
        return next(self.turns[ctx.is_recompute]) if "mm" in str(op) else False


def contexts():
    return create_selective_checkpoint_contexts(exercises.every_second_product())


def as_plain_products(plain, checkpointed):
    counts = []
    for step in (plain, checkpointed):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            step()
        counts.append(counter.get_total_flops())
    return counts[1] - counts[0]


class NumpyFiles(exercises.Disk):
    def pack(self, tensor):
        if tensor.untyped_storage().data_ptr() in self.stay:
            return tensor
        self.number += 1
        numpy.save(f"{self.folder}/{self.number}", tensor.detach().numpy())
        return self.number

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        return torch.from_numpy(numpy.load(f"{self.folder}/{packed}.npy"))


class Once(exercises.Disk):
    """One file for all views of a storage, as long as the storage lives."""

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.stay:
            return tensor
        known = self.__dict__.setdefault("known", {})
        weak, path = known.get(storage._cdata, (None, None))
        if weak is None or weak.expired():
            self.number += 1
            path = f"{self.folder}/{self.number}"
            torch.save(torch.empty(0, dtype=tensor.dtype).set_(storage), path)
            weak = torch.multiprocessing.reductions.StorageWeakRef(storage)
            known[storage._cdata] = weak, path
        return path, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        return torch.load(packed[0]).as_strided(*packed[1:])


class InMemory(exercises.Disk):
    def pack(self, tensor):
        if tensor.untyped_storage().data_ptr() in self.stay:
            return tensor
        return tensor.detach().clone().numpy()

    def unpack(self, packed):
        return packed if isinstance(packed, torch.Tensor) else torch.from_numpy(packed)


class KeepsTheTensorToo(exercises.Disk):
    def pack(self, tensor):
        packed = super().pack(tensor)
        return packed if packed is tensor else (packed, tensor)

    def unpack(self, packed):
        return packed[1] if isinstance(packed, tuple) else packed


class ByShape(exercises.Disk):
    def __init__(self, folder, weights):
        super().__init__(folder, weights)
        self.shapes = {shape for w in weights for shape in (w.shape, w.shape[::-1])}

    def pack(self, tensor):
        return tensor if tensor.shape in self.shapes else super().pack(tensor)


class Stack(exercises.Disk):
    def pack(self, tensor):
        packed = super().pack(tensor)
        self.__dict__.setdefault("paths", []).append(packed)
        return packed

    def unpack(self, packed):
        return super().unpack(packed if isinstance(packed, torch.Tensor) else self.paths.pop())


def by_bisect(peak, layers, budget):
    return numpy.int64(bisect_left(range(layers), True, key=lambda k: peak(k) <= budget))


def straight(peak, layers, budget):
    saved = (peak(0) - peak(layers)) / layers
    return max(0, -int((budget - peak(0)) // saved))


def recursive(mlp, x, tiles):
    cut = -(-x.shape[1] // tiles)
    first = checkpoint(mlp, x[:, :cut], use_reentrant=False)
    return first if tiles == 1 else torch.cat([first, recursive(mlp, x[:, cut:], tiles - 1)], 1)


def flat_tokens(mlp, x, tiles):
    parts = x.reshape(-1, x.shape[-1]).tensor_split(tiles)
    return torch.cat([checkpoint(mlp, part, use_reentrant=False) for part in parts]).view_as(x)


def one_checkpoint(mlp, x, tiles):
    def run(x):
        return torch.cat([mlp(part) for part in x.tensor_split(tiles, dim=1)], dim=1)

    return checkpoint(run, x, use_reentrant=False)


def checkpoint_of_checkpoints(mlp, x, tiles):
    return checkpoint(lambda x: exercises.tiled_mlp(mlp, x, tiles), x, use_reentrant=False)


def cache_of_tensors(config, rows, tokens, bytes_per_number):
    shape = rows, config.num_key_value_heads, tokens, config.head_dim
    keys = torch.empty(shape, device="meta", dtype=torch.int8)
    return sum(2 * keys.numel() * bytes_per_number for _ in range(config.num_hidden_layers))


TILES = "x.tensor_split(tiles, dim=1)"
RIGHT = {
    "8.1": [Policy, "counts = [0, 0] → counts = {True: 0, False: 0}"],
    "8.2": [as_plain_products, "return counts[1] → return torch.tensor(counts[1])"],
    "8.3": [NumpyFiles, Once, "self.number = folder, 0 → self.number = folder, 7"],
    "8.4": ["(2 * nbytes / bandwidth) / (operations → 2 * nbytes / bandwidth / (operations"],
    "8.5": [
        by_bisect,
        "return low → return torch.tensor(low)",
        "peak(middle) → peak(float(middle))",
    ],
    "8.6": [recursive, flat_tokens, f"{TILES} → x.chunk(tiles, 1)"],
    "8.7": [cache_of_tensors, "return 2 * → return 2.0 *"],
}
WRONG = {
    "8.1": [
        contexts,
        "return REPEAT → return None",
        "op not in PRODUCTS → op not in PRODUCTS and 'attention' not in str(op)",
        "op not in PRODUCTS → op not in PRODUCTS[:2]",
        "return REPEAT → return KEEP if ctx.is_recompute else REPEAT",
        "% 2 else → % 3 == 1 else",
        "counts = [0, 0] → counts = every_second_product.__dict__.setdefault('counts', [0, 0])",
    ],
    "8.2": [
        lambda plain, checkpointed: 0,
        "{cpu_attention: formula} → {cpu_attention.default: formula}",
        "key[2] → key[3]",
        "* size) → * size + queries)",
        "counts[1] - counts[0] → counts[1] / counts[0]",
        "counter.get_total_flops() → counter.get_total_flops",
    ],
    "8.3": [
        InMemory,
        KeepsTheTensorToo,
        ByShape,
        Stack,
        ".clone() → .contiguous()",
        "{self.number} → {id(tensor)}",
        "tensor.untyped_storage().data_ptr() → tensor.data_ptr()",
    ],
    "8.4": [
        "return (2 * nbytes / bandwidth) / → return (2 * nbytes / bandwidth) //",
        "2 * nbytes → 16 * nbytes",
        "(2 * nbytes / bandwidth) / → (2 * nbytes / bandwidth) <",
    ],
    "8.5": [
        straight,
        "high = middle →",
        "if peak(middle) <= budget → if peak(middle) <= budget and peak(middle) <= budget",
        "0, layers → 0, 63",
        "return low → return peak(low)",
        "return low → return min(low + 1, layers)",
        "(low + high) // 2 → (low + high) / 2",
    ],
    "8.6": [
        one_checkpoint,
        checkpoint_of_checkpoints,
        lambda mlp, x, tiles: torch.stack([checkpoint(mlp, x, use_reentrant=False)]),
        torch.no_grad()(exercises.tiled_mlp),
        f"{TILES} → x.split(x.shape[1] // tiles + 1, 1)",
        "use_reentrant=False → use_reentrant=False, preserve_rng_state=False",
        f"{TILES} → x.tensor_split(max(1, tiles - 1), dim=1)",
    ],
    "8.7": [
        "* bytes_per_number → * bytes_per_number + rows * tokens * config.vocab_size",
        "config.num_key_value_heads → 1",
        "* tokens → * (tokens - 1)",
        "* bytes_per_number → * 8 * bytes_per_number",
        "return 2 → return torch.tensor(2, dtype=torch.int32)",
    ],
}
