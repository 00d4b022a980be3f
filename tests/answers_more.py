"""More answers to lessons 08 and 09: those that a check once judged wrongly, or answered with a number alone."""

import torch
from answers_moving import PRODUCTS
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gradmem_lib.course.exercises import lesson_08, lesson_08_moving, lesson_08_numbers

RIGHT, WRONG = {}, {}
SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def _policy(*, counted=lambda op: op in PRODUCTS, again=True, rest=AGAIN):
    def make():
        counts = [0, 0]

        def policy(ctx, op, *args, **kwargs):
            if not counted(op) or (ctx.is_recompute and not again):
                return rest
            counts[ctx.is_recompute] += 1
            return SAVE if counts[ctx.is_recompute] % 2 else AGAIN

        return policy

    return make


WRONG["8.1"] = {
    "attention counts too": (_policy(counted=lambda op: op in PRODUCTS or "attention" in str(op)), "fused attention is counted as a product"),
    "None for the rest": (_policy(rest=None), "the policy returns None for some operations"),
    "nothing in the second run": (_policy(again=False), "the second run gets other answers"),
}  # fmt: skip


def _count(step, formula, counter=None):
    counter = counter or FlopCounterMode(display=False, custom_mapping={lesson_08.FUSED: formula})
    with counter:
        step()
    return counter.get_total_flops()


def _flops(of):
    def formula(query, key, value, *args, out_val=None, **kwargs):
        return of(*query, key[2])

    return lambda plain, checkpointed: _count(checkpointed, formula) - _count(plain, formula)


def _one_counter(plain, checkpointed):
    with FlopCounterMode(
        display=False, custom_mapping={lesson_08.FUSED: lesson_08.fused_operations}
    ) as counter:
        plain()
        checkpointed()
    return counter.get_total_flops()  # fmt: skip


RIGHT["8.2"] = {"from both shapes": _flops(lambda b, h, q, d, k: 4 * b * h * q * d * k)}
WRONG["8.2"] = {
    "no rows": (_flops(lambda b, h, q, d, k: 4 * h * q * d * k), "the formula is wrong"),
    "no size": (_flops(lambda b, h, q, d, k: 4 * b * h * q * k), "the formula is wrong"),
    "four products": (_flops(lambda b, h, q, d, k: 8 * b * h * q * d * k), "the formula is wrong"),
    "one counter": (_one_counter, "the sum of both steps is counted"),
    "not called": (lambda plain, checkpointed: 0, "no operation is counted"),
}  # fmt: skip


class _ByShape(lesson_08_moving.Disk):
    def __init__(self, folder, weights):
        super().__init__(folder, weights)
        self.shapes = {shape for w in weights for shape in (w.shape, w.shape[::-1])}

    def pack(self, tensor):
        return tensor if tensor.shape in self.shapes else super().pack(tensor)


class _InNumpy(lesson_08_moving.Disk):
    def pack(self, tensor):
        return tensor if tensor.untyped_storage().data_ptr() in self.stay else tensor.detach().clone().numpy()


WRONG["8.3"] = {
    "a weight's shape": (_ByShape, "an activation that has a weight's shape stays"),
    "numpy": (_InNumpy, "numpy has no bfloat16"),
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


def _largest(peak, layers, budget):
    low, high = 0, layers
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if peak(middle) <= budget else (low, middle - 1)
    return low


RIGHT["8.5"] = {
    "a tensor": lambda peak, layers, budget: _halve(peak, layers, budget, torch.tensor),
    "numpy": lambda peak, layers, budget: _halve(peak, layers, budget, lambda k: torch.tensor(k).numpy()[()]),
}
WRONG["8.5"] = {
    "asks twice": (lambda *given: _halve(*given, asks=2), "the number is right, with more than 8 calls"),
    "never ends": (lambda *given: _halve(*given, up=0), "the range does not get smaller any more"),
    "the largest that fits": (_largest, "the search ends in the wrong place"),
    "steps of eight": (
        lambda peak, layers, budget: next(k for k in [*range(0, layers, 8), layers] if peak(k) <= budget),
        "the search ends in the wrong place",
    ),
}


def _tiles(dim=1, joined=1, join=torch.cat, **settings):
    def tiled(mlp, x, tiles):
        settings.setdefault("use_reentrant", False)
        return join([checkpoint(mlp, part, **settings) for part in x.tensor_split(tiles, dim)], joined)

    return tiled


WRONG["8.6"] = {
    "other random numbers": (_tiles(preserve_rng_state=False), "dropout takes other numbers"),
    "checkpoint of checkpoints": (
        lambda mlp, x, tiles: checkpoint(lambda x: _tiles()(mlp, x, tiles), x, use_reentrant=False),
        "a checkpoint around the checkpoints",
    ),
    "joined along rows": (_tiles(joined=0), "joined along another dimension"),
    "stacked": (_tiles(join=torch.stack), "joined along another dimension"),
    "the width is cut": (_tiles(2, 2), "a part of the width"),
    "x detached": (
        lambda mlp, x, tiles: _tiles()(mlp, x.detach(), tiles), "x gets no gradient"),
}  # fmt: skip


def _cache(of):
    return lambda config, rows, tokens, width: of(
        lesson_08_numbers.kv_cache(config, rows, tokens, width), config, tokens
    )


WRONG["8.7"] = {
    "one token": (_cache(lambda right, config, tokens: right // tokens), "one token is counted"),
    "one token fewer": (_cache(lambda right, config, tokens: right // tokens * (tokens - 1)), "the last token is missing"),
    "queries": (
        _cache(lambda right, config, tokens: right + right // 2 // config.num_key_value_heads * config.num_attention_heads),
        "queries are counted as well",
    ),
    "heads of one number": (_cache(lambda right, config, tokens: right // config.head_dim), "the width of a head is missing"),
    "MiB": (_cache(lambda right, config, tokens: right / 2**20), "bytes are asked for"),
    "bits": (_cache(lambda right, config, tokens: 8 * right), "these are bits"),
}  # fmt: skip
