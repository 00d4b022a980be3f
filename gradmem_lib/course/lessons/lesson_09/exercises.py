"""Lesson 09's exercises about fewer bytes of state: blocks of 8 bits, and row and column sums."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ....techniques.optimizers import code_table
from ...judge.compare import difference
from ...judge.exercise import Exercise, HiddenCase, Mistake


def quantize(x, code, block) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` (n,) in blocks: indices (n,) uint8 of the nearest values of ``code``, each block's
    largest magnitude, and what is read back.
    """
    return _quantize()(x, code, block)


def _midpoints(scaled, code):
    return torch.bucketize(scaled, (code[1:] + code[:-1]) / 2)


def _quantize(
    *,
    whole=False,
    size=lambda rows: rows.abs().amax(1),
    pick=_midpoints,
    dtype=torch.uint8,
    read=lambda values, absmax: values * absmax,
    even=False,
):
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
    zeros = torch.cat(
        [torch.tensor([0.3, -2.0, 0.6]), torch.zeros(3), torch.tensor([-0.011, 0.004])]
    )
    minus = -m[:77].abs() - 0.1
    return {
        "8 numbers in blocks of 3, the second all 0, 5 values": (zeros, few, 3),
        "a first moment, 1,000 numbers in blocks of 256": (m, code_table(True, None), 256),
        "a second moment, 1,000 numbers in blocks of 72": (m * m, code_table(False, None), 72),
        "small numbers": (m * m * 1e-10, code_table(False, None), 72),
        HiddenCase("negative"): (minus, code_table(True, None), 50),
        HiddenCase("nothing but zeros"): (torch.zeros(5), code_table(True, None), 2),
    }


def _observe_quantize(candidate):
    found: dict = {"returned": 3}
    for name, (x, code, block) in _moments().items():
        given = candidate(x.clone(), code.clone(), block)
        if not isinstance(given, (tuple, list)) or len(given) != 3:
            return {"returned": len(given) if isinstance(given, (tuple, list)) else 1}
        indices, absmax, back = (torch.as_tensor(part) for part in given)
        live = torch.cat([part.any().expand(len(part)) for part in x.split(block)])
        whole = indices.numel() == len(x)
        found[name] = {
            _ABSMAX: absmax.flatten(),
            "indices": indices.flatten().long()[live] if whole else indices.numel(),
            "indices in blocks of zeros": indices.flatten().long()[~live]
            if whole
            else indices.numel(),
            "bytes an index": indices.element_size(),
            "back": back,
        }
    return found


_ABSMAX = "absmax, one a block"
_SIGNED = (
    "the largest number is not the largest magnitude if numbers are negative: take abs() first."
)
_ROUNDED = (
    "absmax is rounded to 16 bits, so every number that is read back has the wrong size: keep "
    "absmax in float32, as x is."
)
_ZEROS = (
    "in a block of zeros, your index is not the position of 0 in `code`. There, 0 / 0 is not a "
    "number: divide by another number, as absmax.clamp(min=1e-30) does, and look up the nearest "
    "value as in other blocks."
)


def _explain_quantize(got, expected):
    if got["returned"] != 3:
        return (
            "return three things: the indices, absmax, and the numbers that are read back from "
            "them."
        )
    wrong = [case for case in expected if difference(got[case], expected[case])]
    says = _why_zeros(got, expected, wrong) or _why_absmax(got, expected, wrong)
    if says:
        return says
    if wrong and set(wrong) <= set(list(expected)[3:5]):
        return (
            "small numbers are lost: absmax is clamped to, or increased by, a larger number "
            "than they are; 1e-30 is small enough."
        )
    mine, right = got[wrong[0]], expected[wrong[0]]
    says = _why_blocks(mine, right)
    if says:
        return says
    wanted = [case for case in expected if case != "returned"]
    if all(not difference(got[case]["back"], expected[case]["back"]) for case in wanted):
        if mine["bytes an index"] == 1:
            return (
                "back is right, but it was not made from these indices: uint8 goes from 0 to 255."
            )
        return None
    if not difference(mine["indices"], right["indices"]):
        return (
            "the indices are right, but back is not: each number is code[index] times its "
            "block's absmax."
        )
    return (
        "an index is not that of the nearest value of `code`: divide by the block's absmax "
        "first, and use the middle between two values as the border."
    )


def _why_zeros(got, expected, wrong) -> str | None:
    """What is said of blocks of zeros, if they alone are wrong, or give nan."""
    zeros = "indices in blocks of zeros"
    if all(not difference(got[case] | {zeros: 0}, expected[case] | {zeros: 0}) for case in wrong):
        return _ZEROS
    if any(got[case]["back"].isnan().any() for case in wrong):
        return (
            "back is not a number where a block is all zeros, because of 0 / 0: divide such a "
            "block by another number, as absmax.clamp(min=1e-30) does."
        )
    return None


def _why_absmax(got, expected, wrong) -> str | None:
    """What is said of absmax values that are rounded, or made without abs()."""
    off = [case for case in wrong if difference(got[case][_ABSMAX], expected[case][_ABSMAX])]
    if any(_is_rounded(got[case][_ABSMAX], expected[case][_ABSMAX]) for case in off):
        return _ROUNDED
    if off and all(_is_signed(got[case][_ABSMAX], *_moments()[case]) for case in off):
        return _SIGNED
    return None


def _is_signed(absmax, x, code, block) -> bool:
    """Is ``absmax`` each block's largest number, where 0 and negative numbers are alike?"""
    largest = torch.stack([part.max() for part in x.split(block)])
    return absmax.shape == largest.shape and torch.equal(absmax.clamp(min=0), largest.clamp(min=0))


def _is_rounded(absmax, wanted) -> bool:
    """Is ``absmax`` what a 16-bit format stores of ``wanted``?"""
    if absmax.shape != wanted.shape:
        return False
    stored = (wanted.to(dtype).to(wanted.dtype) for dtype in (torch.float16, torch.bfloat16))
    return any(torch.equal(absmax.to(wanted.dtype), each) for each in stored)


def _why_blocks(mine, right) -> str | None:
    """What is said of the number of blocks, and of their absmax."""
    absmax, wanted = (seen[_ABSMAX] for seen in (mine, right))
    if len(mine["back"].flatten()) > len(right["back"]):
        return "the padding is still there: cut indices and back to the length of x."
    if len(absmax) < len(wanted):
        return "the last block is missing: it may be shorter than the others."
    if len(absmax) == len(right["back"]) and len(set(absmax.tolist())) <= len(wanted):
        return "absmax has one number for each number of x: return one for each block."
    if len(absmax) == len(right["back"]):
        return "return indices, absmax and back, in this order."
    if difference(absmax, wanted):
        return (
            "these are not the blocks' absmax values: a block is `block` numbers in a row, and "
            "its absmax is their largest magnitude, the maximum of their abs()."
        )
    return None


def adafactor_second_moment(grad, row, column, beta2, eps) -> Tensor:
    """Average the row sums (rows,) and column sums (columns,) of ``grad**2 + eps`` in place; the v
    (rows, columns) that they make.
    """
    return _factored()(grad, row, column, beta2, eps)


def _factored(
    *,
    square=torch.square,
    sums=lambda squares: (squares.sum(1), squares.sum(0)),
    average=lambda old, new, beta2: beta2 * old + (1 - beta2) * new,
    keep=lambda vector, new: vector.copy_(new),
    product=lambda row, column, squares: torch.outer(row, column) / row.sum(),
    inside=True,
    outside=False,
):
    """``adafactor_second_moment``, or a wrong one: what is summed, averaged, kept and multiplied,
    and where eps is added.
    """

    def wrong(grad, row, column, beta2, eps):
        squares = square(grad)
        if inside:
            squares = squares + eps
        new_row, new_column = (
            average(old, new, beta2) for old, new in zip((row, column), sums(squares), strict=True)
        )
        keep(row, new_row)
        keep(column, new_column)
        v = product(new_row, new_column, squares)
        return v + eps if outside else v

    return wrong


def _over_mean_of_rows(row, column, squares):
    return torch.outer(row, column) / row.mean()


def _over_mean_of_columns(row, column, squares):
    return torch.outer(row, column) / column.mean()


_BY_A_MEAN = "the product is divided by a mean: divide it by the total, row.sum()."


def _from_the_old(grad, row, column, beta2, eps):
    v = torch.outer(row, column) / row.sum()
    adafactor_second_moment(grad, row, column, beta2, eps)
    return v


def _eps_in_the_sums(grad, row, column, beta2, eps):
    row.lerp_(grad.square().sum(1) + eps, 1 - beta2)
    column.lerp_(grad.square().sum(0) + eps, 1 - beta2)
    return torch.outer(row, column) / row.sum()


def _observe_factored(candidate):
    found = {}
    for rows, columns, beta2, eps in ((3, 5, 0.9, 0.01), (6, 2, 0.75, 0.2)):
        generator = torch.Generator().manual_seed(rows)
        row, column = (torch.zeros(n, dtype=torch.float64) for n in (rows, columns))
        for number in (1, 2):
            grad = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
            v = candidate(grad, row, column, beta2, eps)
            if not hasattr(v, "shape"):
                raise TypeError("return only v, a tensor: row and column change in place")
            found[f"({rows}, {columns}), beta2={beta2}, eps={eps}, step {number}"] = {
                "row": row.clone(),
                "column": column.clone(),
                "v": torch.as_tensor(v).clone(),
            }
    return found


def _explain_factored(got, expected):
    first = got[next(iter(got))]
    if not first["row"].any() and not first["column"].any():
        return (
            "row and column have not changed: change them in place, as row.copy_(…) or "
            "row.lerp_(…) do."
        )
    for name in ("row", "column"):
        if not first[name].any():
            return (
                f"{name} has not changed: change it in place, as {name}.copy_(…) or "
                f"{name}.lerp_(…) do."
            )
    return None


EXERCISES = (
    Exercise(
        id="9.1",
        title="moments in 8 bits",
        difficulty=2,
        minutes=4,
        trains="blockwise quantization: what is stored, and what is read back",
        reference=quantize,
        observe=_observe_quantize,
        explain=_explain_quantize,
        raises=(
            (
                r"is invalid for input of size",
                (
                    "the numbers do not fill the last block: pad x with zeros first, and cut the "
                    "padding off at the end."
                ),
            ),
            (
                r"too many indices for tensor|shape of the mask",
                (
                    "as an index, torch takes a uint8 tensor for a mask: read "
                    "code[indices.long()], and return the indices in uint8."
                ),
            ),
        ),
        mistakes=(
            Mistake(
                "one for all",
                _quantize(whole=True),
                (
                    "only one magnitude is kept for all blocks: each block of `block` numbers has "
                    "its own, so a large number makes only its own block less exact."
                ),
            ),
            Mistake(
                "no magnitude",
                _quantize(size=lambda rows: rows.amax(1)),
                _SIGNED,
            ),
            Mistake(
                "absmax in float16",
                _quantize(size=lambda rows: rows.abs().amax(1).half().float()),
                _ROUNDED,
            ),
            Mistake(
                "absmax in bf16",
                _quantize(size=lambda rows: rows.abs().amax(1).bfloat16().float()),
                _ROUNDED,
            ),
            Mistake(
                "next above",
                _quantize(pick=_next_above),
                (
                    "this takes the next value above, not the nearest: the border between two "
                    "values is their middle."
                ),
            ),
            Mistake(
                "long",
                _quantize(dtype=torch.int64),
                "an index has 8 bytes here, twice a float32 number: .to(torch.uint8).",
            ),
            Mistake(
                "not scaled back",
                _quantize(read=lambda values, absmax: values),
                (
                    "back is still in units of the block's largest magnitude: multiply the code's "
                    "values by absmax."
                ),
            ),
            Mistake(
                "even steps",
                _quantize(even=True),
                (
                    "the code's own values have no effect: find the nearest value of `code`, whose "
                    "values are not evenly spaced."
                ),
            ),
        ),
    ),
    Exercise(
        id="9.2",
        title="a second moment from row and column sums",
        difficulty=2,
        minutes=4,
        trains="two vectors in place of a matrix, and what they can say of it",
        reference=adafactor_second_moment,
        observe=_observe_factored,
        explain=_explain_factored,
        changes=("row", "column"),
        raises=(
            (
                r"must match|size of tensor|shape|broadcast",
                (
                    "row has one number for each row, squares.sum(1), and column one for each "
                    "column, squares.sum(0). torch.outer(row, column) multiplies each number of "
                    "one by each of the other."
                ),
            ),
        ),
        mistakes=(
            Mistake(
                "no total",
                _factored(product=lambda row, column, squares: torch.outer(row, column)),
                (
                    "the product of a row sum and a column sum includes the matrix's whole sum "
                    "once too often: divide by the total, row.sum()."
                ),
            ),
            Mistake(
                "not squared",
                _factored(square=torch.abs),
                "these are sums of the gradient's magnitude, not of its square.",
            ),
            Mistake(
                "not kept",
                _factored(keep=lambda vector, new: None),
                (
                    "row and column have not changed: change them in place, as row.copy_(…) or "
                    "row.lerp_(…) do."
                ),
            ),
            Mistake(
                "sums up",
                _factored(average=lambda old, new, beta2: beta2 * old + new),
                "the new sums are added whole: an average takes 1 - beta2 of them.",
            ),
            Mistake(
                "added up",
                _factored(average=lambda old, new, beta2: old + new),
                "beta2 has no effect: an average takes beta2 of the old sums, and 1 - beta2 of "
                "the new ones.",
            ),
            Mistake(
                "eps in the sums",
                _eps_in_the_sums,
                "eps is added to each sum once: add it to every square, before the sums.",
            ),
            Mistake(
                "over all numbers",
                _factored(
                    product=lambda row, column, squares: (
                        torch.outer(row, column) / row.sum() / squares.numel()
                    )
                ),
                "v is divided by the number of elements: divide by the total, row.sum(), alone.",
            ),
            Mistake(
                "both totals",
                _factored(
                    product=lambda row, column, squares: (
                        torch.outer(row, column) / (row.sum() + column.sum())
                    )
                ),
                "v is half as large as it should be: row.sum() and column.sum() are the same sum, "
                "so divide by one of them.",
            ),
            Mistake(
                "elements for the total",
                _factored(
                    product=lambda row, column, squares: torch.outer(row, column) / squares.numel()
                ),
                "the product is divided by the number of elements: divide it by the total, "
                "row.sum().",
            ),
            Mistake(
                "swapped",
                _factored(average=lambda old, new, beta2: (1 - beta2) * old + beta2 * new),
                "beta2 and 1 - beta2 are swapped: the new sums get the weight 1 - beta2.",
            ),
            Mistake(
                "eps outside",
                _factored(inside=False, outside=True),
                "eps is added to v at the end: add it to every square, before the sums.",
            ),
            Mistake(
                "of this step alone",
                _factored(
                    product=lambda row, column, squares: (
                        torch.outer(squares.sum(1), squares.sum(0)) / squares.sum()
                    )
                ),
                "v is made of this step's sums alone: make it of the averages, `row` and `column`.",
            ),
            Mistake(
                "divided by both sums",
                _factored(
                    product=lambda row, column, squares: (
                        torch.outer(row, column) / (row.sum() * column.sum())
                    )
                ),
                (
                    "this divides by the sum of everything twice: row.sum() and column.sum() are "
                    "the same sum, so divide by one of them."
                ),
            ),
            Mistake(
                "no eps",
                _factored(inside=False),
                "eps has no effect: add it to every square, before the sums.",
            ),
            Mistake(
                "means",
                _factored(sums=lambda squares: (squares.mean(1), squares.mean(0))),
                "row and column hold means: use sums, torch.sum along one dimension.",
            ),
            Mistake(
                "means over their mean",
                _factored(
                    sums=lambda squares: (squares.mean(1), squares.mean(0)),
                    product=_over_mean_of_rows,
                ),
                "row and column hold means: use sums, torch.sum along one dimension.",
            ),
            Mistake(
                "the root",
                _factored(
                    product=lambda row, column, squares: (
                        torch.outer(row, column) / row.sum()
                    ).sqrt()
                ),
                "this is the root of v: return v itself.",
            ),
            Mistake(
                "turned",
                _factored(
                    product=lambda row, column, squares: torch.outer(column, row) / row.sum()
                ),
                "v has the columns' sums along its rows: torch.outer(row, column).",
            ),
            Mistake(
                "from the old sums",
                _from_the_old,
                (
                    "v is made from the old row and column, which are 0 at first: average first, "
                    "then multiply."
                ),
            ),
            Mistake(
                "this step's total",
                _factored(
                    product=lambda row, column, squares: torch.outer(row, column) / squares.sum()
                ),
                (
                    "the product is divided by the sum of this step's squares: divide it by the "
                    "total of the averages, row.sum()."
                ),
            ),
            Mistake("a row's mean", _factored(product=_over_mean_of_rows), _BY_A_MEAN),
            Mistake("a column's mean", _factored(product=_over_mean_of_columns), _BY_A_MEAN),
        ),
    ),
)
