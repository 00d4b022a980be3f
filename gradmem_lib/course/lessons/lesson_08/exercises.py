"""Lesson 08's exercises about recomputing a part: a policy, and the operations that it repeats."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from ....compat.dispatch_modes import TorchDispatchMode
from ...judge.exercise import Exercise, HiddenCase, Mistake
from ...machine.compat import cpu_attention
from ..shared.settings import gradients_of

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
KEEP, REPEAT = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
WIDTH = 8


def every_second_product():
    """A new policy: of the matrix products that it is asked about, keep the first, the third and so
    on, and nothing else.
    """
    counts = [0, 0]

    def policy(ctx, op, *args, **kwargs):
        if op not in PRODUCTS:
            return REPEAT
        counts[ctx.is_recompute] += 1
        return KEEP if counts[ctx.is_recompute] % 2 else REPEAT

    return policy


def _policies(
    *,
    products=PRODUCTS,
    keeps=lambda count: count % 2 == 1,
    run=lambda ctx, op: ctx.is_recompute,
    rest=REPEAT,
    shared=None,
):
    """A wrong ``every_second_product``."""

    def wrong():
        counts: dict = {} if shared is None else shared

        def policy(ctx, op, *args, **kwargs):
            if products and op not in products:
                return rest
            counts[run(ctx, op)] = counts.get(run(ctx, op), 0) + 1
            return KEEP if keeps(counts[run(ctx, op)]) else REPEAT

        return policy

    return wrong


_ALL_COUNTED = (
    "operations of every kind are counted here: only products count, so ask op in PRODUCTS before "
    "you count."
)


def _counts_every_operation(*, again: bool):
    """Keeps products alone, where the count of all operations is odd: from 1 ``again`` in the
    second run, or going on from the first.
    """

    def make():
        counts = [0, 0]

        def policy(ctx, op, *args, **kwargs):
            run = int(ctx.is_recompute and again)
            counts[run] += 1
            return KEEP if op in PRODUCTS and counts[run] % 2 else REPEAT

        return policy

    return make


class Block(nn.Module):
    """Attention written out, and a linear layer: 7 matrix products of three kinds, (rows, tokens,
    8) to the same.
    """

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out, self.up = (
            nn.Linear(WIDTH, WIDTH, bias=i in (0, 3)) for i in range(5)
        )

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return x + self.up(F.gelu(self.out(scores.softmax(-1) @ self.value(x))))


def _setting(layers: int = 3) -> tuple[nn.ModuleList, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        return nn.ModuleList(Block() for _ in range(layers)), torch.randn(2, 5, WIDTH)


class Operations(TorchDispatchMode):
    """A list of what runs."""

    def __init__(self):
        super().__init__()
        self.ops: list = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ops.append(op)
        return op(*args, **(kwargs or {}))


def _decisions(policy, ops, again: bool) -> tuple[str, int]:
    """Which products a policy keeps, and how many other operations."""
    answers = [policy(SimpleNamespace(is_recompute=again, op_output=None), op) for op in ops]
    if any(a is None for a in answers):
        return "no answer for some", 0
    if not all(isinstance(a, (bool, CheckpointPolicy)) for a in answers):
        return "another kind of answer", 0
    kept = [a is True or a in (KEEP, CheckpointPolicy.PREFER_SAVE) for a in answers]
    products = [keep for op, keep in zip(ops, kept, strict=True) if op in PRODUCTS]
    return ", ".join(str(i) for i, keep in enumerate(products, 1) if keep) or "none", sum(
        kept
    ) - sum(products)


def _observe_policy(candidate):
    layers, x = _setting()
    with Operations() as seen:
        layers[0](x)
    policy = candidate()
    found: dict = {
        "what it returns": {"a policy, which can be called (1 is yes)": int(callable(policy))}
    }
    if not callable(policy):
        return found
    kept, rest = _decisions(policy, seen.ops, False)
    again, rest_again = _decisions(policy, seen.ops, True)
    other, other_rest = _decisions(candidate(), seen.ops, False)
    with_attention = [*PRODUCTS[:1], cpu_attention.default, *PRODUCTS[:2]]
    fused, fused_rest = _decisions(candidate(), with_attention, False)
    found |= {
        "a layer of 7 products": {
            "kept": kept,
            "other operations kept": rest,
            "kept when asked again in the second run": again,
            "other operations kept when asked again": rest_again,
        },
        "the next layer, by a policy of its own": {
            "kept": other,
            "other operations kept": other_rest,
        },
        "a layer with fused attention": {"kept": fused, "other operations kept": fused_rest},
    }
    for layer in layers:
        x = checkpoint(
            layer,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(candidate()),
        )
    with Operations() as backward:
        x.square().sum().backward()
    return found | {
        "three layers, trained": {
            "gradients": gradients_of(layers),
            "products in backward": sum(op in PRODUCTS for op in backward.ops),
        }
    }


_ONE_KIND = "only one kind of product is counted: there are mm, addmm and bmm."
_WHAT_IS_KEPT = {
    "no answer for some": (
        "the policy returns None for some operations: return PREFER_RECOMPUTE for all that runs "
        "again."
    ),
    "another kind of answer": (
        "the policy must return KEEP or REPEAT themselves, which are of CheckpointPolicy."
    ),
    "none": (
        "nothing is kept: no product is recognised. op is an overload, such as aten.mm.default, "
        "and it is not equal to aten.mm."
    ),
    "1": "only the first product is kept: of each two products keep one, the third and so on too.",
    **dict.fromkeys(("2, 7", "1, 6", "3", "4"), _ONE_KIND),
}
_A_KIND_LESS = "one kind of product is not counted: there are mm, addmm and bmm."
# By the products kept of a layer, and of the layer with fused attention. The second one tells "no
# bmm" from every third product, "no mm" from every fourth, and "addmm alone" from the first alone.
_KINDS_COUNTED = {
    ("1, 4, 7", "1, 3"): _A_KIND_LESS,
    ("1, 5", "3"): _A_KIND_LESS,
    ("2, 4, 7", "1"): _A_KIND_LESS,
    ("1", "3"): _ONE_KIND,
}


def _explain_policy(got, expected):
    mine = got.get("a layer of 7 products")
    if mine is None:
        return (
            "every_second_product() returns the policy itself (is a `return` missing?), a "
            "function that can be called with (ctx, op, ...): "
            "create_selective_checkpoint_contexts is called later."
        )
    both = (mine["kept"], got["a layer with fused attention"]["kept"])
    if both in _KINDS_COUNTED:
        return _KINDS_COUNTED[both]
    others = "other operations kept"
    if mine["kept"] == "none" and mine[others]:
        return (
            "no product is kept, but other operations are: keep every second product "
            "(op in PRODUCTS), and return PREFER_RECOMPUTE for the rest."
        )
    if mine["kept"] in _WHAT_IS_KEPT:
        return _WHAT_IS_KEPT[mine["kept"]]
    if mine != expected["a layer of 7 products"]:
        return _why_these(mine, expected["a layer of 7 products"])
    return _why_another_layer(got, expected)


def _why_another_layer(got, expected) -> str | None:
    """What is said of a policy that is right for the first layer."""
    others = "other operations kept"
    following = "the next layer, by a policy of its own"
    if got[following]["kept"] != expected[following]["kept"]:
        return (
            "the next layer's policy continues this layer's count: every_second_product() must "
            "begin a new count each time."
        )
    fused = got["a layer with fused attention"]
    if fused["kept"] != "1, 3":
        return "fused attention is counted as a product: it is not in PRODUCTS, and runs again."
    if fused[others]:
        return (
            "fused attention is kept: it is not in PRODUCTS, so it runs again like all that is no "
            "product."
        )
    return None


_ORDINALS = {3: "third", 4: "fourth", 5: "fifth", 6: "sixth"}


def _why_these(mine, right) -> str | None:
    """What is said if the kept products fit no known mistake."""
    others = "other operations kept"
    if mine["kept"] == right["kept"] and mine[others] == right[others]:
        return (
            "the second run gets other answers than the first: the answers must be the same for "
            "each operation."
        )
    if mine["kept"] == right["kept"] or mine[others] != right[others]:
        return None
    if mine["kept"] == "2, 4, 6":  # the mistake "the others"
        return None
    kept = [int(number) for number in mine["kept"].split(", ")]
    gaps = {after - before for before, after in itertools.pairwise(kept)}
    if len(gaps) == 1 and gaps <= _ORDINALS.keys():
        return f"only every {_ORDINALS[gaps.pop()]} product is kept: keep every second one."
    number = "number" if len(kept) == 1 else "numbers"
    return (
        f"of the layer's products 1 to 7, your policy keeps {number} {mine['kept']}: keep the "
        "first, let the second run again, keep the third, and so on."
    )


def fused_operations(query, key, value, *args, out_val=None, **kwargs):
    """Operations of fused attention, from shapes (rows, heads, tokens, size of a head): two
    products.
    """
    rows, heads, queries, size = query
    return 2 * (2 * rows * heads * queries * key[2] * size)


def _operations(step, formulas) -> int:
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        step()
    return counter.get_total_flops()


def repeated(plain, checkpointed):
    """The operations of ``checkpointed()`` that ``plain()`` does without; fused attention counts
    with its two products.
    """
    return _operations(checkpointed, {cpu_attention: fused_operations}) - _operations(
        plain, {cpu_attention: fused_operations}
    )


def _repeated(formula=None, result=lambda more, less: more - less):
    def wrong(plain, checkpointed):
        formulas = {cpu_attention: formula or fused_operations} if formula is not False else {}
        return result(_operations(checkpointed, formulas), _operations(plain, formulas))

    return wrong


def _one_counter(*, checkpointed: bool):
    """Only one of the two counters gets the formula."""
    formulas = {cpu_attention: fused_operations}

    def wrong(plain, more):
        without = _operations(plain, {} if checkpointed else formulas)
        return _operations(more, formulas if checkpointed else {}) - without

    return wrong


def _formula(of):
    return lambda query, key, value, *args, out_val=None, **kwargs: of(*query, key[2])


class Attention(nn.Module):
    """Fused attention: (rows, queries, 12) and (rows, keys, 12) to the first's shape, in 3 heads of
    6.
    """

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(12, 18) for _ in range(3))
        self.out = nn.Linear(18, 12)

    def forward(self, x, context):
        parts = [self.query(x), self.key(context), self.value(context)]
        q, k, v = (part.unflatten(-1, (3, 6)).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def _steps(layer, *given):
    """A step without a checkpoint, and one with."""
    return (
        lambda: layer(*given).square().sum().backward(),
        lambda: checkpoint(layer, *given, use_reentrant=False).square().sum().backward(),
    )


_FUSED = {  # rows, heads, queries, size of a head, keys
    "fused attention, 5 tokens to 5": (2, 3, 5, 6, 5),
    "fused attention, 5 tokens to 9": (2, 3, 5, 6, 9),
    HiddenCase("fused attention, another row"): (1, 3, 23, 6, 23),
}


def _observe_repeated(candidate):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        mlp = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12))
        found = {"an MLP": candidate(*_steps(mlp, torch.randn(2, 5, 12)))}
        for name, (rows, _, queries, _, keys) in _FUSED.items():
            x, context = torch.randn(rows, queries, 12), torch.randn(rows, keys, 12)
            found[name] = candidate(*_steps(Attention(), x, context))
        return found


def _explain_repeated(got, expected):
    mlp = next(iter(expected))
    numbers = all(isinstance(count, (int, float)) for count in got.values())
    if numbers and not got[mlp]:
        return "no operation is counted: run plain() and checkpointed(), each inside its `with`."
    if numbers and got[mlp] == -expected[mlp]:
        return (
            "the plain step has fewer operations: subtract it from the checkpointed step, not "
            "the other way round."
        )
    if numbers and got[mlp] != expected[mlp] and 0 < got[mlp] < 2:
        return "this is a ratio of the two steps: return their difference, a number of operations."
    if got[mlp] != expected[mlp]:
        return None
    right = {name: 4 * math.prod(sizes) for name, sizes in _FUSED.items()}
    formulas = {name: right[name] + got[name] - expected[name] for name in _FUSED}
    name = next(name for name in _FUSED if formulas[name] != right[name])
    rows, heads, queries, size, keys = _FUSED[name]
    return (
        f"the formula is wrong: for queries {(rows, heads, queries, size)} and keys "
        f"{(rows, heads, keys, size)} it must return {right[name]:,}, but returns "
        f"{formulas[name]:,}. Each of the two products takes 2 * rows * heads * queries * keys * "
        "size."
    )


EXERCISES = (
    Exercise(
        id="8.1",
        title="a policy",
        difficulty=2,
        minutes=5,
        trains="telling a checkpoint, operation by operation, what to keep",
        reference=every_second_product,
        observe=_observe_policy,
        explain=_explain_policy,
        mistakes=(
            Mistake(
                "every operation",
                _policies(products=()),
                (
                    "every second operation of any kind is kept: count only matrix products, and "
                    "repeat the rest."
                ),
            ),
            Mistake(
                "counts every operation",
                _counts_every_operation(again=True),
                _ALL_COUNTED,
            ),
            Mistake(
                "counts every operation, and goes on",
                _counts_every_operation(again=False),
                _ALL_COUNTED,
            ),
            Mistake(
                "the others",
                _policies(keeps=lambda count: count % 2 == 0),
                (
                    "the second product is kept, the fourth and so on: keep the first, the third "
                    "and so on."
                ),
            ),
            Mistake(
                "all",
                _policies(keeps=lambda count: True),
                "every product is kept: let the second run compute every second one.",
            ),
            Mistake(
                "one count",
                _policies(run=lambda ctx, op: 0),
                (
                    "the second run continues the count of forward, so it decides differently: "
                    "count the second run separately, by ctx.is_recompute."
                ),
            ),
            Mistake(
                "by kind",
                _policies(run=lambda ctx, op: (ctx.is_recompute, op)),
                (
                    "each kind of product has its own count: use one count for mm, addmm and bmm "
                    "together."
                ),
            ),
            Mistake(
                "the rest too",
                _policies(rest=KEEP),
                (
                    "other operations than products are kept too, which costs bytes and saves "
                    "little work: return PREFER_RECOMPUTE for them."
                ),
            ),
        ),
    ),
    Exercise(
        id="8.2",
        title="what runs again",
        difficulty=2,
        minutes=5,
        trains="counting operations with a counter that does not see all of them",
        reference=repeated,
        observe=_observe_repeated,
        explain=_explain_repeated,
        raises=(
            (
                r"unexpected keyword argument 'out_",
                (
                    "the counter passes more arguments than the formula needs: let its arguments "
                    "end with *args, out_val=None, **kwargs."
                ),
            ),
            (
                r"'torch.Size' object has no attribute",
                "query, key and value are shapes, not tensors: rows, heads, queries, size = query.",
            ),
            (r"\+=: 'int' and 'NoneType'", "the formula returns nothing: is a `return` missing?"),
            (r"'method'", "get_total_flops is a method: call it, with ()."),
            (
                r"'int' object is not callable",
                "the value in custom_mapping is the function itself: formula, without calling it.",
            ),
        ),
        mistakes=(
            Mistake(
                "blind",
                _repeated(False),
                (
                    "fused attention is not counted: FlopCounterMode has no formula for it on a "
                    "CPU; give it one in custom_mapping, under the name without .default."
                ),
            ),
            Mistake(
                "one product",
                _repeated(_formula(lambda b, h, s, d, t: 2 * b * h * s * t * d)),
                (
                    "the formula gives half: attention is two products, queries times keys and "
                    "weights times values, and a multiplication and an addition are two operations."
                ),
            ),
            Mistake(
                "square",
                _repeated(_formula(lambda b, h, s, d, t: 4 * b * h * s * s * d)),
                (
                    "the queries are squared: there may be more keys than queries; key[2] has "
                    "their number."
                ),
            ),
            Mistake(
                "heads",
                _repeated(_formula(lambda b, h, s, d, t: 4 * b * s * t * d)),
                "only one head is counted: each head has its own two products.",
            ),
            Mistake(
                "the whole step",
                _repeated(result=lambda more, less: more),
                (
                    "this is the whole step with its checkpoint: what runs again is the difference "
                    "from the plain step."
                ),
            ),
            Mistake(
                "halves",
                _repeated(result=lambda more, less: (more - less) // 2),
                "a multiplication and an addition are counted as one operation: they are two.",
            ),
            Mistake(
                "the plain step",
                _repeated(result=lambda more, less: less),
                (
                    "this is the step without its checkpoint: count both steps, and take the "
                    "difference."
                ),
            ),
            Mistake(
                "the sum",
                _repeated(result=lambda more, less: more + less),
                (
                    "the sum of both steps is counted: each step has its own counter; return the "
                    "difference."
                ),
            ),
            Mistake(
                "a quarter",
                _repeated(_formula(lambda b, h, s, d, t: b * h * s * t * d)),
                (
                    "the formula gives a quarter: there are two products, and a multiplication "
                    "and an addition count as two operations."
                ),
            ),
            Mistake(
                "no rows",
                _repeated(_formula(lambda b, h, s, d, t: 4 * h * s * t * d)),
                "the formula leaves out the rows.",
            ),
            Mistake(
                "no size",
                _repeated(_formula(lambda b, h, s, d, t: 4 * b * h * s * t)),
                (
                    "the formula leaves out the size of a head: each score takes that many "
                    "multiplications."
                ),
            ),
            Mistake(
                "no keys",
                _repeated(_formula(lambda b, h, s, d, t: 4 * b * h * s * d)),
                "the formula leaves out the keys: each query has a score with each of them.",
            ),
            Mistake(
                "no queries",
                _repeated(_formula(lambda b, h, s, d, t: 4 * b * h * t * d)),
                "the formula leaves out the queries: each of them has its own scores.",
            ),
            Mistake(
                "keys squared",
                _repeated(_formula(lambda b, h, s, d, t: 4 * b * h * t * t * d)),
                "the formula squares the keys: there may be fewer queries than keys.",
            ),
            Mistake(
                "another place",
                _repeated(_formula(lambda b, h, s, d, t: 4 * b * h * s * d * d)),
                (
                    "the formula uses the size of a head as the number of keys: a shape is (rows, "
                    "heads, tokens, size), so key[2] has it."
                ),
            ),
            Mistake(
                "one counter",
                _one_counter(checkpointed=False),
                (
                    "the formula is given only to plain()'s counter: checkpointed()'s counter "
                    "needs it too."
                ),
            ),
            Mistake(
                "the other counter",
                _one_counter(checkpointed=True),
                (
                    "the formula counts twice what it should, or one of the two counters does not "
                    "have it: both need it."
                ),
            ),
        ),
    ),
)
