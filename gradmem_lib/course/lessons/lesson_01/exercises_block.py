"""Lesson 01's last table: what a block of GPT-2 saves, module by module."""

from __future__ import annotations

from ast import literal_eval

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ...judge.compare import describe
from ...judge.exercise import Exercise, Mistake, calls
from ...judge.hints import shares, times
from ...material import models


def block(hidden: int, heads: int) -> nn.Module:
    """A block of GPT-2 in training, with GELU as one operator and a dropout of 0.1 after
    each half.
    """
    sizes = {"hidden": hidden, "heads": heads, "vocab": 16, "positions": 64}
    return models.tiny_gpt2(
        layers=1, **sizes, activation="gelu_pytorch_tanh", dropout=0.1
    ).transformer.h[0]


def gpt2_block(batch: int, seq_len: int, hidden: int, heads: int) -> dict[str, int]:
    """Bytes of the storages that each module of a float32 block saves first, by asking a real one.

    ``"attn"`` is the attention itself, between its linear layers.
    """
    layer, inside, first = block(hidden, heads), [], {}
    for name, module in layer.named_modules():
        if name:
            module.register_forward_pre_hook(lambda *_, name=name: inside.append(name))
            module.register_forward_hook(lambda *_: inside.pop() and None)

    def pack(tensor):
        storage = tensor.untyped_storage()
        first.setdefault(storage.data_ptr(), (inside[-1], storage.nbytes()))
        return tensor

    x = torch.randn(batch, seq_len, hidden, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(x)  # held, and with it all that was saved: no storage takes another's place
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    saved = [row for pointer, row in first.items() if pointer not in own]
    del out
    return {name: sum(n for at, n in saved if at == name) for name in _WHY}


# Why a module saves what it does.
_NORM = "a LayerNorm keeps its input, and for each token a mean and 1/std."
_MASK = "dropout keeps its mask, here a float32 number for each number of its input."
_WHY = {
    "ln_1": _NORM,
    "attn.c_attn": "a linear layer keeps its input, not its output.",
    "attn": (
        "fused attention keeps q, k, v and its result, and one log-sum-exp for each head of "
        "each token, but no square of scores."
    ),
    "attn.c_proj": "its input is the attention's result, which is counted already.",
    "attn.resid_dropout": _MASK,
    "ln_2": _NORM,
    "mlp.c_fc": "a linear layer keeps its input, not its output.",
    "mlp.act": "GELU keeps its input, and that is 4 * hidden wide.",
    "mlp.c_proj": "its input is GELU's result, and that is 4 * hidden wide.",
    "mlp.dropout": _MASK,
}


def _explain_block(got, expected):
    if not all(isinstance(rows, dict) for rows in got.values()):
        return f"return a dict with an entry for each of {', '.join(_WHY)}."
    sizes = {case: literal_eval(case) for case in expected}
    every = [(case, name) for case in sizes for name in _WHY]
    rows = {(case, name): got[case].get(name) for case, name in every}
    factor = shares(rows, {(case, name): expected[case][name] for case, name in every})
    if factor == [1.0]:
        # The rows are right: what differs is a name beside them.
        others = [name for name in next(iter(got.values())) if name not in _WHY]
        if not others:
            return None
        shown = " and ".join(map(describe, others))
        return f"every row is right: leave out {shown}, and return the {len(_WHY)} rows alone."
    if factor:
        return f"every row is {times(factor[0])}: count float32 numbers of 4 bytes."
    if shares(rows, {(case, name): expected[case][name] / sizes[case][0] for case, name in every}):
        return "this counts one sequence: multiply by the batch."
    tokens = {case: batch * seq_len for case, (batch, seq_len, *_) in sizes.items()}
    terms = {
        "* hidden": {case: 4 * tokens[case] * sizes[case][2] for case in sizes},
        "": {case: 4 * tokens[case] for case in sizes},
        "* heads": {case: 4 * tokens[case] * sizes[case][3] for case in sizes},
        "* heads * seq_len": {
            case: 4 * tokens[case] * sizes[case][3] * sizes[case][1] for case in sizes
        },
    }
    for name, why in _WHY.items():
        entry = {case: rows[case, name] for case in sizes}
        if all(entry[case] == expected[case][name] for case in sizes):
            continue
        found = shares(entry, *terms.values())
        if found is None:
            return None
        parts = [f"{c:g} {term}".strip() for c, term in zip(found, terms, strict=True) if c]
        return f"{name} has {' + '.join(parts) or '0'} numbers a token here: {why}"
    return None


def _formula(**wrong):
    """What a block saves, in numbers by T (tokens), x (tokens times hidden) and heads, with some
    rows ``wrong``.
    """

    def answer(batch, seq_len, hidden, heads):
        t, x = batch * seq_len, batch * seq_len * hidden
        rows = dict(
            zip(
                _WHY,
                (x + 2 * t, x, 4 * x + t * heads, 0, x, x + 2 * t, x, 4 * x, 4 * x, x),
                strict=True,
            )
        )
        rows |= {
            name: wrong[key](t, x, rows[name])
            for name in rows
            if (key := name.split(".")[-1]) in wrong
        }
        return {name: int(wrong.get("size", 4) * count) for name, count in rows.items()}

    return answer


EXERCISES = (
    Exercise(
        id="1.7",
        title="the table of a GPT-2 block",
        difficulty=2,
        minutes=8,
        trains=(
            "saying of each operation what its backward needs, in a block that you have not seen"
        ),
        reference=gpt2_block,
        observe=calls(
            (2, 8, 32, 4),
            (1, 12, 24, 3),
            (4, 5, 16, 2),
            hidden=((3, 10, 40, 5), (2, 7, 48, 2), (1, 33, 8, 4)),
        ),
        explain=_explain_block,
        mistakes=(
            Mistake(
                "a Llama's norm",
                _formula(ln_1=lambda t, x, n: 2 * x + t, ln_2=lambda t, x, n: 2 * x + t),
                (
                    "this is the norm of a Llama: a LayerNorm keeps its input, and for each token "
                    "a mean and 1/std."
                ),
            ),
            Mistake(
                "one log-sum-exp a token",
                _formula(attn=lambda t, x, n: 4 * x + t),
                (
                    "the log-sum-exp is one number for each head of each token: every head has a "
                    "softmax of its own."
                ),
            ),
            Mistake(
                "the result twice",
                _formula(c_proj=lambda t, x, n: n or x),
                (
                    "the attention's result is counted twice: it is one storage, and attn.c_proj "
                    "saves nothing of its own."
                ),
            ),
            Mistake(
                "GELU keeps both",
                _formula(act=lambda t, x, n: 2 * n),
                (
                    "GELU's backward needs only its input; mlp.c_proj saves GELU's result, so it "
                    "counts there."
                ),
            ),
            Mistake(
                "a byte of mask",
                _formula(resid_dropout=lambda t, x, n: x / 4, dropout=lambda t, x, n: x / 4),
                (
                    "this counts one byte for each number of dropout's mask, as on CUDA: on the "
                    "CPU the mask is float32."
                ),
            ),
            Mistake(
                "elements", _formula(size=1), "this counts numbers: each is a float32 of 4 bytes."
            ),
        ),
    ),
)
