"""Lesson 09's exercises about fewer bytes of state: blocks of 8 bits, row and column sums, and a sign."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...techniques.optimizers import code_table
from ..compare import difference
from ..exercise import Exercise, Mistake, Unseen
from .settings import flat


def quantize(x, code, block) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` (n,) in blocks: indices (n,) uint8 of the nearest values of ``code``, each block's largest magnitude, and what is read back."""
    return _quantize()(x, code, block)


def _midpoints(scaled, code):
    return torch.bucketize(scaled, (code[1:] + code[:-1]) / 2)


def _quantize(*, whole=False, size=lambda rows: rows.abs().amax(1), pick=_midpoints, dtype=torch.uint8,
              read=lambda values, absmax: values * absmax, even=False):  # fmt: skip
    def wrong(x, code, block):
        code = torch.linspace(-1, 1, len(code)) if even else code
        block = len(x) if whole else block
        rows = F.pad(x, (0, -len(x) % block)).view(-1, block)
        absmax = size(rows)
        indices = pick(rows / torch.where(absmax == 0, 1.0, absmax)[:, None], code)
        back = read(code[indices], absmax[:, None]).flatten()[: len(x)]
        return indices.flatten()[: len(x)].to(dtype), absmax, back

    return wrong


def _next_above(scaled, code):
    return torch.bucketize(scaled, code).clamp(max=len(code) - 1)


def _moments() -> dict[str, tuple[Tensor, Tensor, int]]:
    generator = torch.Generator().manual_seed(9)
    m = torch.randn(1000, generator=generator) * torch.logspace(-3, 1, 1000)
    few = torch.tensor([-1.0, -0.5, 0.0, 0.25, 1.0])
    zeros = torch.cat([torch.tensor([0.3, -2.0, 0.6]), torch.zeros(3), torch.tensor([-0.011, 0.004])])
    minus = -m[:77].abs() - 0.1
    return {
        "8 numbers in blocks of 3, the second all 0, 5 values": (zeros, few, 3),
        "a first moment, 1,000 numbers in blocks of 256": (m, code_table(True, None), 256),
        "a second moment, 1,000 numbers in blocks of 72": (m * m, code_table(False, None), 72),
        Unseen("negative"): (minus, code_table(True, None), 50),
    }


def _observe_quantize(candidate):
    found: dict = {"returned": 3}
    for name, (x, code, block) in _moments().items():
        given = candidate(x.clone(), code.clone(), block)
        if not isinstance(given, (tuple, list)) or len(given) != 3:
            return {"returned": len(given) if isinstance(given, (tuple, list)) else 1}
        indices, absmax, back = (torch.as_tensor(part) for part in given)
        live = x != 0  # an index times 0 is 0, whichever it is
        found[name] = {
            "absmax, one a block": absmax.flatten(),
            "indices": indices.flatten().long()[live] if indices.numel() == len(x) else indices.numel(),
            "bytes an index": indices.element_size(),
            "back": back,
        }
    return found


def _explain_quantize(got, expected):
    if got["returned"] != 3:
        return (
            "three things are asked for: the indices, absmax, and the numbers that are read back from them."
        )
    return None


def adafactor_second_moment(grad, row, column, beta2, eps) -> Tensor:
    """Average the row sums (rows,) and column sums (columns,) of ``grad**2 + eps`` in place; the v (rows, columns) that they make."""
    return _factored()(grad, row, column, beta2, eps)


def _factored(
    *, square=torch.square, total=torch.sum, lerp=True, keep=True, inside=True, add=True, reduce=torch.sum
):
    def wrong(grad, row, column, beta2, eps):
        squares = square(grad) + (eps if inside and add else 0)
        sums = reduce(squares, 1), reduce(squares, 0)
        new = [
            old * beta2 + found * (1 - beta2 if lerp else 1)
            for old, found in zip((row, column), sums, strict=True)
        ]
        if keep:
            row.copy_(new[0])
            column.copy_(new[1])
        return torch.outer(*new) / total(new[0]) + (0 if inside or not add else eps)

    return wrong


def _observe_factored(candidate):
    found = {}
    for rows, columns, beta2, eps in ((3, 5, 0.9, 0.01), (6, 2, 0.75, 0.2)):
        generator = torch.Generator().manual_seed(rows)
        row, column = (torch.zeros(n, dtype=torch.float64) for n in (rows, columns))
        for number in (1, 2):
            grad = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
            v = candidate(grad, row, column, beta2, eps)
            found[f"({rows}, {columns}), beta2={beta2}, eps={eps}, step {number}"] = {
                "row": row.clone(), "column": column.clone(), "v": v.clone(),
            }  # fmt: skip
    return found


def _explain_factored(got, expected):
    first = got[next(iter(got))]
    if not first["row"].any() and not first["column"].any():
        return "row and column are where they were: change them in place, as row.copy_(…) or row.lerp_(…) do."
    if difference(got, _observe_factored(_factored(add=False))) is None:
        return "eps has no effect: add it to every square, before the sums."
    if any(
        difference(got[case][vector], expected[case][vector])
        for case in expected
        for vector in ("row", "column")
    ):
        return None
    mine, right = first["v"], expected[next(iter(expected))]["v"]
    if difference(mine, right.sqrt()) is None:
        return "this is the root of v: v itself is asked for."
    if difference(mine, len(right) * right) is None or difference(mine, right.shape[1] * right) is None:
        return "the product is divided by a mean: divide it by the total, row.sum()."
    return None


class Lion(torch.optim.Optimizer):
    """A step of ``lr`` along the sign of a blend of momentum and gradient (Chen et al. 2023, algorithm 2): one state."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(group["lr"] * m.lerp(p.grad, 1 - beta1).sign())
                    m.lerp_(p.grad, 1 - beta2)


def _lion(step):
    """A wrong ``Lion``, by what it does to one parameter: ``step(p, m, gradient, group, defaults)``."""

    @torch.no_grad()
    def every(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    step(p, m, p.grad, group, self.defaults)

    return type("Lion", (Lion,), {"step": every})


def _one(*, early=False, swapped=False, sign=torch.sign, blend=True, decay=True, own=True):
    def step(p, m, g, group, defaults):
        lr, decays = group["lr"] if own else defaults["lr"], group["weight_decay"]
        beta1, beta2 = reversed(group["betas"]) if swapped else group["betas"]
        g = g if decay else g + decays * p
        if early:
            m.lerp_(g, 1 - beta2)
        p.mul_(1 - lr * decays if decay else 1)
        p.sub_(lr * sign(m if early else m.lerp(g, 1 - beta1) if blend else g))
        if not early:
            m.lerp_(g, 1 - beta2)

    return _lion(step)


def _observe_lion(candidate):
    generator = torch.Generator().manual_seed(3)
    shapes = ((40, 10), (30,), (20, 5))
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    narrow = nn.Parameter(torch.randn(64, generator=generator).bfloat16())
    groups = [{"params": weights[:1]}, {"params": [*weights[1:], narrow], "lr": 0.03, "weight_decay": 0.5}]
    optimizer = candidate(groups, lr=0.1, betas=(0.8, 0.95))
    found = {}
    for number in range(1, 7):
        for i, p in enumerate((*weights, narrow)):
            if number != 2 or i != 1:
                size = (3.0, 1.0, -0.4)[number % 3]
                p.grad = (torch.randn(p.shape, generator=generator) + size).to(p.dtype)
            else:
                p.grad = None
        before = flat(weights)
        optimizer.step()
        now = flat(weights)
        if number in (1, 2, 6):
            found[f"after step {number}"] = {"weights": now}
        if number == 1:
            found["step 1"] = {"how far the weights of the first group go": (now - before)[:400].abs()}
    held = {p: [t for t in optimizer.state.get(p, {}).values() if isinstance(t, Tensor) and t.numel() > 1]
            for p in (*weights, narrow)}  # fmt: skip
    return {
        "self.state": {
            "tensors a parameter": [len(tensors) for tensors in held.values()],
            "bytes": [sum(t.nbytes for t in tensors) for tensors in held.values()],
        },
        **found,
    }


def _explain_lion(got, expected):
    tensors, wanted = (seen["self.state"]["tensors a parameter"] for seen in (got, expected))
    if not any(tensors):
        return "self.state has no tensor for a parameter, so a checkpoint forgets the momentum: keep it in self.state[p]."
    if max(tensors) > 1:
        return f"{max(tensors)} tensors of state are kept for a parameter: Lion needs one, the momentum."
    if got["self.state"] != expected["self.state"] and tensors == wanted:
        return "the state of a bf16 parameter has another dtype than the parameter: torch.zeros_like(p) keeps it."
    right = [
        difference(got[case][what], expected[case][what]) is None
        for case, what in (
            ("step 1", "how far the weights of the first group go"),
            ("after step 1", "weights"),
        )
    ]
    if right != [True, False]:
        return None
    mine, wanted = (seen["after step 1"]["weights"] for seen in (got, expected))
    if difference(mine[:400], wanted[:400]) is None:  # the first group does not decay, the second does
        return "the decay is wrong: shrink the parameter by 1 - lr * weight_decay, before the sign is subtracted."
    return "the weights go the other way: they walk against the sign."


EXERCISES = (
    Exercise(
        id="9.1", title="moments in 8 bits", difficulty=2, minutes=4,
        trains="blockwise quantization: what is stored, and what is read back",
        reference=quantize,
        observe=_observe_quantize,
        explain=_explain_quantize,
        mistakes=(
            Mistake("one for all", _quantize(whole=True),
                    "one magnitude is kept for all: each block of `block` numbers has its own, so that one large number spoils one block alone."),
            Mistake("no magnitude", _quantize(size=lambda rows: rows.amax(1)),
                    "the largest number is not the largest magnitude where numbers are negative: take abs() first."),
            Mistake("next above", _quantize(pick=_next_above),
                    "this takes the next value above, not the nearest: the border between two values is their middle."),
            Mistake("long", _quantize(dtype=torch.int64),
                    "an index has 8 bytes here, twice a float32 number: .to(torch.uint8)."),
            Mistake("not scaled back", _quantize(read=lambda values, absmax: values),
                    "back is in units of the block's largest magnitude still: multiply the code's values by absmax."),
            Mistake("even steps", _quantize(even=True),
                    "the code's own values have no effect: find the nearest value of `code`, whose steps are not even."),
        ),
    ),
    Exercise(
        id="9.2", title="a second moment from row and column sums", difficulty=2, minutes=4,
        trains="two vectors in place of a matrix, and what they can say of it",
        reference=adafactor_second_moment,
        observe=_observe_factored,
        explain=_explain_factored,
        changes=("row", "column"),
        raises=((r"must match|size of tensor|shape|broadcast", "row has one number for each row: its sum goes along the last dimension, squares.sum(1); column's along the first."),),
        mistakes=(
            Mistake("no total", _factored(total=lambda row: 1.0),
                    "the product of a row sum and a column sum has the matrix's whole sum in it once too often: divide by the total, row.sum()."),
            Mistake("not squared", _factored(square=torch.abs), "the sums are of the gradient's size, not of its square."),
            Mistake("not kept", _factored(keep=False), "row and column are where they were: change them in place, as row.copy_(…) or row.lerp_(…) do."),
            Mistake("sums up", _factored(lerp=False), "the new sums come in whole: an average takes 1 - beta2 of them."),
            Mistake("eps outside", _factored(inside=False), "eps is added to v at the end: it goes on every square, before the sums."),
            Mistake("means", _factored(reduce=torch.mean), "row and column hold means: sums are asked for, torch.sum along one dimension."),
        ),
    ),
    Exercise(
        id="9.3", title="Lion: a sign, and one state", difficulty=2, minutes=4,
        trains="what an optimizer keeps, and what its update needs",
        reference=Lion,
        observe=_observe_lion,
        explain=_explain_lion,
        tolerance=1e-4,
        mistakes=(
            Mistake("momentum first", _one(early=True),
                    "the momentum is updated before the step: the step takes the sign of a blend by beta1 of the old one, and beta2 is for what is kept."),
            Mistake("swapped", _one(swapped=True), "the betas are swapped: beta1 blends for the step, beta2 for what is kept."),
            Mistake("no sign", _one(sign=lambda blend: blend), "the blend itself is subtracted: Lion takes its sign, so that every weight moves by lr."),
            Mistake("gradient alone", _one(blend=False), "the sign is that of the gradient alone: momentum has no effect."),
            Mistake("decay in the gradient", _one(decay=False), "the decay goes into the gradient, of which the sign is all that is left: shrink p itself, as AdamW does."),
            Mistake("one rate", _one(own=False), "every group steps by the same rate: read lr from its group."),
        ),
    ),
)  # fmt: skip
