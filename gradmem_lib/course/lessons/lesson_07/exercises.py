"""Lesson 07's exercises about numbers of 16 bits: what is lost, and three ways to lose less."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ....techniques.precision import stochastic_round
from ...judge.compare import difference
from ...judge.exercise import Exercise, Mistake, Seen, measure
from ..shared.settings import flat

# Bytes. What a step of 7.4 is given takes 2,097,152. A loop that names a float32 gradient and its
# product holds three tensors of 262,144 beside that, when the next pass begins. Four float32
# gradients at once do not fit.
SUMS_CARD, MASTER_CARD = 2_450_000, 3_000_000
LAYERS, WIDTH = 4, 256  # weights (256, 256) in bf16: 131,072 bytes each, and 262,144 in float32
STOPS = 300  # micro-batches; bf16 sums of ones stop at 256


def lost(gradients, dtype, scale) -> float:
    """The share of the nonzero numbers that become 0, or not finite, when they are scaled and
    stored in ``dtype``.
    """
    stored = (gradients * scale).to(dtype)
    gone = (stored == 0) | ~stored.isfinite()
    nonzero = gradients != 0
    return (gone & nonzero).sum().item() / nonzero.sum().item()


def _among_all(gradients, dtype, scale):
    """The numbers lost are right, and the share is taken of all numbers."""
    return lost(gradients, dtype, scale) * (gradients != 0).sum().item() / gradients.numel()


def _changed(gradients, dtype, scale):
    scaled, nonzero = gradients * scale, gradients != 0
    return ((scaled.to(dtype).float() != scaled) & nonzero).sum().item() / nonzero.sum().item()


def _by_limits(gradients, dtype, scale):
    """By the dtype's smallest and largest number, and not by what is stored."""
    limits = torch.finfo(dtype)
    size, nonzero = (gradients * scale).abs(), gradients != 0
    smallest = limits.smallest_normal * limits.eps
    gone = (size < smallest) | (size > limits.max) | size.isnan()
    return (gone & nonzero).sum().item() / nonzero.sum().item()


def _nonzero_when_scaled(gradients, dtype, scale):
    scaled = gradients * scale
    stored, nonzero = scaled.to(dtype), scaled != 0
    gone = (stored == 0) | ~stored.isfinite()
    return (gone & nonzero).sum().item() / nonzero.sum().item()


def _by_size(gradients, dtype, scale):
    stored, size = (gradients * scale).to(dtype), gradients.abs()
    gone = (stored == 0) | ~stored.isfinite()
    return (size * gone).sum().item() / size.sum().item()


def _rounded_sum(total, gradient):
    total.copy_(total.to(gradient.dtype) + gradient)


def _lost(
    *, gone=lambda x: (x == 0) | ~x.isfinite(), among=lambda g: g != 0, early=True, scaled=True
):
    def wrong(gradients, dtype, scale):
        factor = scale if scaled else 1
        stored = (gradients * factor).to(dtype) if early else gradients.to(dtype) * factor
        some = among(gradients)
        return (gone(stored) & some).sum().item() / some.sum().item()

    return wrong


_SPREAD = torch.cat([torch.zeros(7), torch.logspace(-12, 3, 90), -torch.logspace(-44, -3, 60)])
_FEW = torch.tensor([[0.0, 1e-8, -3e-7], [0.5, 2e5, -1e-5]])
_BROKEN = torch.tensor([1.0, torch.nan, 1e-9, torch.inf, 0.0, -torch.inf])
_CASES = [
    (g, d, s)
    for g in (_FEW, _SPREAD, _BROKEN)
    for d in (torch.float16, torch.bfloat16)
    for s in (1.0, 2.0**12, 2.0**-6)
]


def _observe_lost(candidate):
    names = {id(_FEW): "six numbers", id(_SPREAD): "157 numbers", id(_BROKEN): "nan and inf"}
    return {
        f"{names[id(g)]} in {str(d).removeprefix('torch.')}, scale {s:g}": candidate(
            g.clone(), d, s
        )
        for g, d, s in _CASES
    }


def _explain_lost(got, expected):
    pairs = [(got[a], got[a.replace("bfloat16", "float16")]) for a in expected if "bfloat16" in a]
    are_whole = all(float(share).is_integer() for share in got.values())
    # Shares that are all 0 or 1 have lost their fraction, and say nothing of the dtype.
    if not are_whole and all(a == b for a, b in pairs):
        return "the dtype has no effect: store in the dtype that is given."
    if are_whole and max(got.values()) > 1:
        return "this counts the lost numbers: divide by how many were not zero to get their share."
    if not difference(got, _observe_lost(_scaled_twice)):
        return "the scale is used twice: multiply by it once."
    if not difference(got, _observe_lost(_nonzero_when_scaled)):
        return (
            "numbers that the scale itself makes 0 are left out: they are not zero in `gradients`, "
            "so they are lost, and count below the fraction line too."
        )
    for digits in range(6):
        if got == {case: round(share, digits) for case, share in expected.items()}:
            return "the share is rounded: return it with all its digits."
    for says, shares in _OTHER_SHARES.items():
        for count, among in shares:
            if not difference(got, _observe_lost(_share(count, among))):
                return says
    return None


def _scaled_twice(gradients, dtype, scale):
    return lost(gradients, dtype, scale * scale)


def _share(count, among):
    """An answer that counts the numbers for which ``count`` is true, and divides by how many are
    true for ``among``; each gets the given numbers, the stored ones, and which of them are lost.
    """

    def wrong(gradients, dtype, scale):
        stored = (gradients * scale).to(dtype)
        lost_ones = ((stored == 0) | ~stored.isfinite()) & (gradients != 0)
        number = among(gradients, stored).sum().item()
        return count(gradients, stored, lost_ones).sum().item() / number if number else math.nan

    return wrong


def _lost_ones(gradients, stored, lost_ones):
    return lost_ones


def _of_finite_given(gradients, stored, lost_ones):
    return lost_ones & gradients.isfinite()


def _of_finite_stored(gradients, stored, lost_ones):
    return lost_ones & stored.isfinite()


def _of_zero(gradients, stored, lost_ones):
    return (stored == 0) | ~stored.isfinite()


def _not_zero(gradients, stored):
    return gradients != 0


def _finite_given(gradients, stored):
    return (gradients != 0) & gradients.isfinite()


def _finite_stored(gradients, stored):
    return (gradients != 0) & stored.isfinite()


_OTHER_SHARES = {
    (
        "numbers that were 0 already are counted among the lost ones: count only those that were "
        "not zero before."
    ): ((_of_zero, _not_zero),),
    ("this divides by the number of rows: divide by how many numbers were not zero."): (
        (_lost_ones, lambda gradients, stored: torch.ones(len(gradients))),
    ),
    (
        "numbers that are inf or nan before the cast are left out: they are not zero, so count "
        "them among all numbers, and among the lost ones."
    ): (
        (_of_finite_given, _finite_given),
        (_lost_ones, _finite_given),
        (_of_finite_given, _not_zero),
    ),
    (
        "nan is left out: it is not zero, and it is lost, so count it above and below the fraction "
        "line."
    ): (
        (
            lambda gradients, stored, lost_ones: lost_ones & ~gradients.isnan(),
            lambda gradients, stored: (gradients != 0) & ~gradients.isnan(),
        ),
    ),
    (
        "numbers that are not finite after the cast are left out: they are lost, so count them as "
        "lost, and divide by how many were not zero before the cast."
    ): (
        (_lost_ones, _finite_stored),
        (_lost_ones, lambda gradients, stored: stored.isfinite()),
        (_of_finite_stored, _finite_stored),
        (_of_finite_stored, lambda gradients, stored: stored.isfinite()),
    ),
    (
        "this divides by the numbers that are not zero after the cast: divide by how many were "
        "not zero before."
    ): (
        (_lost_ones, lambda gradients, stored: stored != 0),
        (_lost_ones, lambda gradients, stored: (stored != 0) & stored.isfinite()),
    ),
}


def _zeros_among_all(gradients, dtype, scale):
    stored = (gradients * scale).to(dtype)
    return (stored == 0).float().mean().item()


def float32_sums(parameters) -> list[Tensor]:
    """Float32 tensors, one a parameter, to which every backward adds; no gradient stays in
    ``.grad``.
    """
    sums = [torch.zeros(p.shape) for p in parameters]

    def add(p, total):
        total.add_(p.grad)
        p.grad = None

    for p, total in zip(parameters, sums, strict=True):
        p.register_post_accumulate_grad_hook(lambda p, total=total: add(p, total))
    return sums


def _sums(*, dtype=torch.float32, free=True, how=lambda total, g: total.add_(g), late=False):
    def wrong(parameters):
        sums = [torch.zeros(p.shape, dtype=dtype) for p in parameters]

        def add(p, total):
            how(total, p.grad)
            if free:
                p.grad = None

        for p, total in zip(parameters, sums, strict=True):
            kept = sums[-1] if late else total
            p.register_post_accumulate_grad_hook(lambda p, total=kept: add(p, total))
        return sums

    return wrong


def _new_sums(parameters):
    """Each addition makes a new tensor, which the list that was returned does not have."""
    sums = [torch.zeros(p.shape) for p in parameters]
    returned = list(sums)

    def add(p, i):
        sums[i] = sums[i] + p.grad
        p.grad = None

    for i, p in enumerate(parameters):
        p.register_post_accumulate_grad_hook(lambda p, i=i: add(p, i))
    return returned


def _weights(dtype=torch.bfloat16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [
        nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator).to(dtype))
        for _ in range(LAYERS)
    ]


_STOPPED = f"{STOPS} backwards"


def _observe_sums(candidate):
    weights = _weights()
    factors = [[1.0, 0.5, 3.0, 2.0], [0.0078125, 0.25, 1.0, -1.0]]

    def run():
        sums = candidate(weights)
        for i, some in enumerate(factors):
            terms = [(w * f).sum() for w, f in zip(weights, some, strict=True)]
            # The last term's gradient comes first: another one in each backward.
            if i == 1:
                terms = [(w * f).sum() for w, f in zip(weights[::-1], some[::-1], strict=True)]
            sum(terms).backward()
        return sums

    measured = measure(run, budget=SUMS_CARD)
    found = {
        "two backwards": {
            "sums": flat(t.flatten()[:3] for t in measured.value),
            "dtype": " and ".join(sorted({str(t.dtype) for t in measured.value})),
            "gradients left in .grad": sum(w.grad is not None for w in weights),
        }
    }
    few = [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for _ in range(2)]
    sums = candidate(few)
    for _ in range(STOPS):
        (few[0].sum() + 2 * few[1].sum()).backward()
    return found | {
        _STOPPED: {
            "sums": flat(sums),
            "gradients left in .grad": sum(p.grad is not None for p in few),
        },
        "the card": type(measured)(None, measured.peak, measured.budget),
    }


_LATE = (
    "all hooks add to the same sum, the last one: a function made in a loop looks a name up when "
    "it is called; bind it by a default argument."
)


def _explain_sums(got, expected):
    first = got["two backwards"]
    sums = first["sums"]
    # Whatever else is wrong: three numbers of each sum are shown, and the last sum's come last.
    as_many = len(sums) == len(expected["two backwards"]["sums"])
    if as_many and sums[-3:].any() and not sums[:-3].any():
        return _LATE
    if (
        first["gradients left in .grad"]
        and difference(first["sums"], expected["two backwards"]["sums"]) is None
    ):
        return (
            "the sums are right, but p.grad is kept too: set it to None, in a hook that runs "
            "after p.grad is filled."
        )
    for case, parameters in (("two backwards", LAYERS), (_STOPPED, 2)):
        left = got[case]["gradients left in .grad"]
        if 0 < left < parameters:
            return (
                f"after {case} of {parameters} parameters, {left} of them still have a gradient in "
                ".grad: each needs a hook of its own, since the gradients come one after another, "
                "and in another order in another model."
            )
    return None


def round_by_chance(x, generator) -> Tensor:
    """``x``, float32, as bf16: one of its two neighbours, so that the mean of many roundings is
    ``x``.
    """
    return stochastic_round(x, generator)


def _between(x, generator, share, chance=None):
    """One of x's two neighbours in bf16, the one further from 0 with the chance ``share(of the gap
    below x)``.
    """
    cut = x.view(torch.int32) & -(1 << 16)
    below, above = cut.view(torch.float32), (cut + (1 << 16)).view(torch.float32)
    drawn = torch.rand(x.shape, generator=generator) if chance is None else chance(generator)
    return torch.where(drawn < share((x - below) / (above - below)), above, below).bfloat16()


# (number, the neighbour nearer to 0, the gap): 3 or 8 tenths of a gap above a bf16 number.
_PLACES = {
    f"{at + share * gap:.6g}": (at, share, gap)
    for at, share, gap in (
        (1.0, 0.3, 2**-7),
        (-1.0, 0.8, -(2**-7)),
        (192.0, 0.3, 1.0),
        (2.0**-15, 0.8, 2**-22),
    )
}


def _observe_rounding(candidate):
    found: dict = {}
    results: dict[str, tuple[float, float]] = {}  # the smallest and the largest of each number
    for i, (name, (at, share, gap)) in enumerate(_PLACES.items()):
        x = torch.full((20_000,), at + share * gap)
        rounded = candidate(x, torch.Generator().manual_seed(i))
        up = (rounded.double() - at) / gap
        results[name] = rounded.min().item(), rounded.max().item()
        found[f"{name}, 20,000 times"] = {
            "dtype": str(rounded.dtype),
            "goes to no other than its two neighbours (1 is yes)": int(
                ((up == 0) | (up == 1)).all()
            ),
            "share that goes to the one further from 0": up.mean().item(),
        }
    exact = torch.tensor([0.0, 1.0, -3.5, 2.0**-20])
    x = torch.linspace(-3, 3, 999)
    one, again, other = (
        candidate(x.clone(), torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    found["what bf16 holds"] = {"stays": candidate(exact.clone(), torch.Generator()).double()}
    found["two generators with the same seed"] = {
        "the same result (1 is yes)": int(torch.equal(one, again))
    }
    found["with another seed"] = {"the same result (1 is yes)": int(torch.equal(one, other))}
    generator = torch.Generator().manual_seed(1)
    first, second = (candidate(x.clone(), generator) for _ in range(2))
    found["one generator, used twice"] = {
        "the same result (1 is yes)": int(torch.equal(first, second))
    }
    matrix = candidate(torch.full((40, 30), 1.0 + 0.4 * 2**-7), torch.Generator().manual_seed(1))
    found["a matrix of one number"] = {
        "all rows are alike (1 is yes)": int((matrix == matrix[:1]).all()),
        "all columns are alike (1 is yes)": int((matrix == matrix[:, :1]).all()),
    }
    number = torch.tensor([1.0 + 0.4 * 2**-7])
    different = {
        candidate(number.clone(), torch.Generator().manual_seed(seed)).item() for seed in range(40)
    }
    found |= {"one number, with 40 seeds": {"different results": len(different)}}
    return Seen(found, results=results)


def _explain_rounding(got, expected):
    first = next(iter(got))
    if got[first]["dtype"] != expected[first]["dtype"]:
        return (
            "the result must be bf16, but its dtype is "
            f"{got[first]['dtype'].removeprefix('torch.')}."
        )
    shares = [case.get("share that goes to the one further from 0") for case in got.values()][
        : len(_PLACES)
    ]
    if all(
        abs(share - (1 - place[1])) < 0.02
        for share, place in zip(shares, _PLACES.values(), strict=True)
    ):
        return "the chances are swapped: the nearer neighbour must get the greater chance."
    if (
        all(share in (0, 1) for share in shares)
        and got["one number, with 40 seeds"]["different results"] == 2
    ):
        return "one random number decides for the whole tensor: draw one for each element."
    right = [
        abs(share - place[1]) < 0.02 for share, place in zip(shares, _PLACES.values(), strict=True)
    ]
    says = _why_some_shares(shares, right)
    if says:
        return says
    neighbours = [
        case["goes to no other than its two neighbours (1 is yes)"]
        for case in list(got.values())[: len(_PLACES)]
    ]
    if all(neighbours) and not any(right):
        return (
            "the two neighbours are right, and the chances are not: the chance of the upper one is "
            "the distance from the lower one, as a share of the gap."
        )
    if not neighbours[0]:
        # 192.3 comes third, and its gap is 128 times that of the first number.
        return _why_far(got.notes["results"], neighbours[2])
    return _explain_chance(got)


def _why_far(results: dict[str, tuple[float, float]], fits_large: bool) -> str:
    """What is said of results that are no neighbours of the first number. ``results``: the
    smallest and the largest for each number. ``fits_large``: whether those of a large number are
    neighbours.
    """
    near = []
    for name, (smallest, largest) in results.items():
        size = abs(float(name))
        near.append(0.5 * size < abs(smallest) < 2 * size and 0.5 * size < abs(largest) < 2 * size)
    name, (at, _, gap) = next(iter(_PLACES.items()))
    smallest, largest = results[name]
    if not any(near):
        return (
            f"the results for {name} are from {smallest:.3g} to {largest:.3g}, which is far from "
            "it. x.view(torch.int32) takes the bits of a float32 number, and .view(torch.float32) "
            "makes a number of them again. Between the two, clear the lower 16 bits alone."
        )
    if fits_large:
        return (
            "some results are not neighbours of the number: the gap grows with the number's "
            "size, so the noise must grow too."
        )
    return (
        f"the results for {name} are from {(smallest - at) / gap:g} to {(largest - at) / gap:g} "
        "gaps above the neighbour below it, and its two neighbours are 0 and 1. If you add noise "
        "before rounding, it must not be wider than one gap in all. If you clear bits, clear the "
        "lower 16."
    )


def _why_some_shares(shares: list[float], right: list[bool]) -> str | None:
    """What is said where the shares of some numbers are right, and not those of others."""
    if all(right):
        return None
    if right == [True, True, False, True]:
        return (
            "this is right near a power of 2: up to the next power the gap stays the same, but "
            "noise in proportion to x grows."
        )
    # Wrong only where the number above is the nearest one, which is then always taken.
    fits_the_nearest = True
    for is_right, share, place in zip(right, shares, _PLACES.values(), strict=True):
        always_up = share == 1 and place[1] > 0.5
        if not is_right and not always_up:
            fits_the_nearest = False
    if fits_the_nearest:
        return (
            "some numbers always become the nearest bf16 number: begin with the lower 16 bits cut "
            "off, not with .bfloat16(), which rounds."
        )
    if right[0] and right[1]:
        return (
            "this is right near 1: the gap grows with the number's size, so the noise must grow "
            "with the gap."
        )
    return None


def _explain_chance(got):
    """What is said where each share is right, and the draws are not independent."""
    if got["with another seed"]["the same result (1 is yes)"]:
        return (
            "another seed gives the same result: all chance comes from `generator`, so draw from "
            "it, and do not seed it."
        )
    if got["one generator, used twice"]["the same result (1 is yes)"]:
        return (
            "a second call with the same generator repeats the first one's chance: draw from "
            "`generator` itself, not from a copy or from another generator with its seed."
        )
    if any(got["a matrix of one number"].values()):
        return (
            "one random number decides for a whole row or column: draw one for each element, of "
            "the shape of x."
        )
    return None


def master_step(weights, masters, lr) -> None:
    """One step of gradient descent: the float32 ``masters`` take it, and each weight becomes its
    master, rounded.
    """
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            if weight.grad is not None:
                master -= lr * weight.grad.float()
                weight.copy_(master)


def _master(*, update=None, write=True, before=lambda weight, master: None):
    def wrong(weights, masters, lr):
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                if weight.grad is not None:
                    before(weight, master)
                    (update or (lambda w, m, lr: m.sub_(lr * w.grad.float())))(weight, master, lr)
                    if write:
                        weight.copy_(master)

    return wrong


def _each_by_itself(weights, masters, lr):
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            if weight.grad is not None:
                master -= lr * weight.grad.float()
                weight -= lr * weight.grad


def _rounds_the_master(weights, masters, lr):
    master_step(weights, masters, lr)
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            master.copy_(weight)


def _in_the_weights(weights, masters, lr):
    with torch.no_grad():
        for weight in weights:
            if weight.grad is not None:
                weight.sub_(lr * weight.grad)


def _new_masters(weights, masters, lr):
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            if weight.grad is not None:
                weight.copy_(master - lr * weight.grad.float())


def _updates_the_weight(weights, masters, lr):
    """The other way round: the weight takes the step in bf16, and the master copies it."""
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            if weight.grad is not None:
                weight -= lr * weight.grad
                master.copy_(weight)


def _without_masters(weights, masters, lr):
    """In float32, from the rounded weight: what rounding took is lost all the same."""
    with torch.no_grad():
        for weight in weights:
            if weight.grad is not None:
                weight.copy_(weight.float() - lr * weight.grad.float())


def _copies_first(weights, masters, lr):
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            if weight.grad is not None:
                weight.copy_(master)
                master -= lr * weight.grad.float()


def _observe_master(candidate):
    weights = _weights()
    masters = [w.detach().float() for w in weights]
    generator = torch.Generator().manual_seed(3)
    given = list(masters)
    found: dict = {}
    for number, lr in enumerate((0.1, 0.003, 0.1), 1):
        for i, w in enumerate(weights):
            w.grad = (
                None
                if i == 1 and number == 2
                else torch.randn(w.shape, generator=generator).bfloat16()
            )
        everything_given = nn.ParameterList(weights)
        for i, master in enumerate(masters):
            everything_given.register_buffer(f"master_{i}", master)
        step = measure(
            lambda lr=lr: candidate(weights, masters, lr),
            budget=MASTER_CARD,
            model=everything_given,  # counts from the start
        )
        found[f"after step {number}"] = {
            "masters": torch.stack([m.flatten()[:64] for m in masters]),
            "weights": torch.stack([w.detach().float().flatten()[:64] for w in weights]),
        }
    found |= {"the card": type(step)(None, step.peak, step.budget)}
    replaced = any(new is not old for new, old in zip(masters, given, strict=True))
    return Seen(found, replaced=replaced)


def _explain_master(got, expected):
    if got["the card"].over and all(
        difference(got[name], expected[name]) is None for name in expected if "step" in name
    ):
        if got.notes["replaced"]:
            return (
                "there are new tensors in the list of masters, beside those that were given: "
                "change the given ones in place, as master.sub_(…) does."
            )
        return (
            "float32 copies of several gradients or masters exist at once: take one tensor at a "
            "time."
        )
    before, after = got["after step 1"]["masters"], got["after step 2"]["masters"]
    given = torch.stack([w.detach().float().flatten()[:64] for w in _weights()])
    written = torch.equal(got["after step 1"]["weights"], given)
    if torch.equal(before, given) and written:
        return (
            "no weight and no master has changed: `m = m - …` makes a new tensor; change each in "
            "place, as master.sub_(…) and weight.copy_(…) do."
        )
    if difference(before, expected["after step 1"]["masters"]) is None and torch.equal(
        before[1:], after[1:]
    ):
        return (
            "the weights after a weight without a gradient are left out too: skip only that weight."
        )
    return _why_update(got, expected, given)


def _why_update(got, expected, given) -> str | None:
    """What is said of the first update, of lr 0.1. ``given``: the weights before it."""
    first, right = got["after step 1"], expected["after step 1"]
    update = right["masters"] - given
    times = _times(first["masters"] - given, update)
    if times == 1:
        again = _times(first["weights"] - right["weights"], update)
        if again == 1:
            return (
                "the weight takes the update once more after the copy: copying the master is all "
                "that it needs."
            )
        return None
    if times in (2, 3, LAYERS):
        return (
            f"each master moves {times:g} times as far as it should: update it once, by lr * "
            "gradient, in one loop over weights and masters."
        )
    if times == 0.1:
        return "lr is multiplied in twice: the update is lr times the gradient."
    if times == 10:
        return "lr has no effect: the update is lr times the gradient."
    if times is not None and times > 0:
        return f"the update is {times:g} times lr times the gradient: subtract lr * gradient."
    shrinks = _times(first["masters"] - right["masters"], given)
    if shrinks is not None and shrinks < 0:
        return (
            "a share of the master is subtracted too: plain gradient descent has no weight decay."
        )
    return None


def _times(moved: Tensor, update: Tensor) -> float | None:
    """How many times ``update`` is what ``moved`` is, with two digits, up to the rounding of bf16;
    ``None`` if it is something else.
    """
    times = ((moved * update).sum() / update.square().sum()).item()
    rest = moved - times * update
    if rest.norm() > 0.05 * moved.norm():
        return None
    return float(f"{times:.2g}")


EXERCISES = (
    Exercise(
        id="7.1",
        title="what a dtype loses",
        difficulty=1,
        minutes=3,
        trains="counting numbers too small or too large for a dtype",
        reference=lost,
        observe=_observe_lost,
        explain=_explain_lost,
        mistakes=(
            Mistake(
                "of all",
                _lost(among=lambda g: torch.ones_like(g, dtype=torch.bool)),
                (
                    "numbers that are already zero are counted: take the share of the numbers "
                    "that are not zero, in numerator and denominator."
                ),
            ),
            Mistake(
                "a share of all",
                _among_all,
                (
                    "this divides by the number of all elements: leave the zeros out there too, "
                    "and divide by how many were not zero."
                ),
            ),
            Mistake(
                "zeros among all",
                _zeros_among_all,
                (
                    "this is the share of zeros after the cast: numbers that were 0 before lose "
                    "nothing, and what becomes inf or nan is lost too."
                ),
            ),
            Mistake(
                "no overflow",
                _lost(gone=lambda x: x == 0),
                "what becomes inf is lost too (overflow): ~stored.isfinite().",
            ),
            Mistake(
                "nan is no loss",
                _lost(gone=lambda x: (x == 0) | x.isinf()),
                "nan is not finite either, and lost: ~stored.isfinite() finds inf and nan.",
            ),
            Mistake(
                "overflow alone",
                _lost(gone=lambda x: ~x.isfinite()),
                "small numbers that become 0 are lost too (underflow): stored == 0.",
            ),
            Mistake(
                "scaled late",
                _lost(early=False),
                (
                    "the scale comes after the cast, or is taken off again: scale before you "
                    "store, and look at what is stored."
                ),
            ),
            Mistake(
                "no scale",
                _lost(scaled=False),
                "the scale has no effect: multiply by it, then store.",
            ),
            Mistake(
                "rounded",
                _changed,
                (
                    "every number that rounding changes is counted: only what becomes 0, inf or "
                    "nan is lost."
                ),
            ),
            Mistake(
                "too small for a normal number",
                _lost(gone=lambda x: (x.abs() < torch.finfo(x.dtype).tiny) | ~x.isfinite()),
                (
                    "torch.finfo(dtype).tiny is the smallest normal number, and there are smaller "
                    "ones above 0: what is lost is 0 itself."
                ),
            ),
            Mistake(
                "by the limits",
                _by_limits,
                (
                    "numbers just below the smallest one of the dtype, or just above the largest, "
                    "are counted as lost, but rounding makes them that number: store them, and "
                    "look at what is stored."
                ),
            ),
            Mistake(
                "by size",
                _by_size,
                "each number counts by its size here: count how many are lost, large or small.",
            ),
            Mistake(
                "divided",
                lambda gradients, dtype, scale: lost(gradients, dtype, 1 / scale),
                "this divides by the scale: multiply by it.",
            ),
            Mistake(
                "kept",
                lambda gradients, dtype, scale: 1 - lost(gradients, dtype, scale),
                "this is the share that is kept: return the share that is lost.",
            ),
        ),
    ),
    Exercise(
        id="7.2",
        title="float32 sums of bf16 gradients",
        difficulty=2,
        minutes=5,
        trains="hooks on parameters, and which sums need more than 8 bits",
        reference=float32_sums,
        observe=_observe_sums,
        explain=_explain_sums,
        changes=("parameters",),
        raises=(
            (
                "hooks should return None|has changed the (type|size|device) of value",
                (
                    "a hook must return nothing, and a lambda returns its value (add_ returns the "
                    "sum): write the hook with def."
                ),
            ),
        ),
        mistakes=(
            Mistake(
                "new sums",
                _new_sums,
                (
                    "the sums that are returned stay zeros: total = total + p.grad makes a new "
                    "tensor; total.add_(p.grad) changes the one in your list."
                ),
            ),
            Mistake(
                "bf16",
                _sums(dtype=torch.bfloat16),
                (
                    "the sums are bf16, and stop growing when the number that is added is half a "
                    "gap: torch.zeros(p.shape) is float32."
                ),
            ),
            Mistake(
                "kept",
                _sums(free=False),
                (
                    "p.grad is not removed: the next backward adds to it, so it counts twice, and "
                    "its bytes stay; set p.grad = None in the hook."
                ),
            ),
            Mistake(
                "rounded on the way",
                _sums(how=_rounded_sum),
                (
                    "the sum is rounded to bf16 in each addition, so it stops growing: add the "
                    "gradient to the float32 sum itself."
                ),
            ),
            Mistake(
                "overwritten",
                _sums(how=lambda total, g: total.copy_(g)),
                "only the last backward counts: add to the sum, do not overwrite it.",
            ),
            Mistake(
                "late",
                _sums(late=True),
                _LATE,
            ),
            Mistake(
                "minus", _sums(how=lambda total, g: total.sub_(g)), "the sums have the wrong sign."
            ),
        ),
    ),
    Exercise(
        id="7.3",
        title="rounding by chance",
        difficulty=2,
        minutes=5,
        trains="a rounding whose mean is right",
        reference=round_by_chance,
        observe=_observe_rounding,
        explain=_explain_rounding,
        raises=(
            (
                r"cannot be converted to Scalar",
                (
                    "the result has more numbers than x: torch.randint makes int64 numbers, and "
                    "as float32 each is two; give it dtype=torch.int32."
                ),
            ),
        ),
        tolerance=0.1,
        mistakes=(
            Mistake(
                "nearest",
                lambda x, generator: x.bfloat16(),
                (
                    "this rounds to the nearest, every time: an update below half a gap is lost "
                    "every time too."
                ),
            ),
            Mistake(
                "coin",
                lambda x, generator: _between(x, generator, lambda share: 0.5 * (share > 0)),
                (
                    "each neighbour gets the same chance, wherever x is: the nearer one must get a "
                    "greater chance."
                ),
            ),
            Mistake(
                "cut",
                lambda x, generator: (
                    (x.view(torch.int32) & -(1 << 16)).view(torch.float32).bfloat16()
                ),
                (
                    "the lower bits are cut off, which always rounds toward 0: add a random "
                    "number to them first."
                ),
            ),
            Mistake(
                "rounded again",
                lambda x, generator: (
                    (
                        x.view(torch.int32)
                        + torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, generator=generator)
                    )
                    .view(torch.float32)
                    .bfloat16()
                ),
                (
                    "after the random number was added, .bfloat16() rounds once more, to the "
                    "nearest: cut the lower 16 bits off first."
                ),
            ),
            Mistake(
                "no generator",
                lambda x, generator: stochastic_round(x),
                (
                    "the generator has no effect: pass it to torch.randint (or rand), so that a "
                    "run can be repeated."
                ),
            ),
            Mistake(
                "one for all",
                lambda x, generator: _between(
                    x, generator, lambda share: share, lambda g: torch.rand(1, generator=g)
                ),
                "one random number decides for the whole tensor: draw one for each element.",
            ),
        ),
    ),
    Exercise(
        id="7.4",
        title="a float32 master copy",
        difficulty=1,
        minutes=4,
        trains="which of two copies is updated, and which one is rounded",
        reference=master_step,
        observe=_observe_master,
        explain=_explain_master,
        changes=("weights", "masters"),
        raises=(
            (
                "'NoneType'|not NoneType",
                (
                    "a weight whose grad is None got no gradient in this step: leave it and its "
                    "master as they are."
                ),
            ),
        ),
        mistakes=(
            Mistake(
                "in the weights",
                _in_the_weights,
                (
                    "the update goes into the weights themselves, where bf16 loses it: subtract it "
                    "from the master, then copy."
                ),
            ),
            Mistake(
                "the other way round",
                _updates_the_weight,
                (
                    "the weight takes the update, and the master copies it: the master takes the "
                    "update in float32, and the weight becomes the master, rounded."
                ),
            ),
            Mistake(
                "without masters",
                _without_masters,
                (
                    "the masters are not used: the step starts from the rounded weight, so what "
                    "was rounded away is lost in each step."
                ),
            ),
            Mistake(
                "new masters",
                _new_masters,
                (
                    "the masters have not changed: master = master - … makes a new tensor, which "
                    "is gone after the step; master -= … changes the given one."
                ),
            ),
            Mistake(
                "copies first",
                _copies_first,
                (
                    "the weights are one step behind: the master takes the update first, and then "
                    "the weight becomes the master, rounded."
                ),
            ),
            Mistake(
                "each by itself",
                _each_by_itself,
                (
                    "the weights take a step of their own, in bf16: copy the master into them, "
                    "which rounds it."
                ),
            ),
            Mistake(
                "rounds the master",
                _rounds_the_master,
                (
                    "the master becomes the rounded weight after the step, so what was rounded "
                    "away is lost: only the weight is rounded."
                ),
            ),
            Mistake(
                "from the weights",
                _master(before=lambda weight, master: master.copy_(weight)),
                (
                    "the master is made from the weight in each step, so what was rounded away is "
                    "lost: keep the master from step to step."
                ),
            ),
            Mistake(
                "masters alone",
                _master(write=False),
                "the masters change, but the model does not: the weights are never written.",
            ),
            Mistake(
                "product in bf16",
                _master(update=lambda w, m, lr: m.sub_(lr * w.grad)),
                (
                    "lr * grad is computed in bf16, and so rounded: convert the gradient to "
                    "float32 first."
                ),
            ),
            Mistake(
                "uphill",
                _master(update=lambda w, m, lr: m.add_(lr * w.grad.float())),
                "the update has the wrong sign: this increases the loss.",
            ),
        ),
    ),
)
