"""Answers to the exercises of lesson 07 that nobody had in mind when its checks were written."""

import math

import torch

RIGHT, WRONG = {}, {}


def _share(gone, of=lambda g: g != 0, scaled=lambda g, s: g * s):
    def lost(gradients, dtype, scale):
        stored = scaled(gradients, scale).to(dtype)
        nonzero = of(gradients)
        return (gone(stored, gradients, scale) & nonzero).sum().item() / nonzero.sum().item()

    return lost


def _one_by_one(gradients, dtype, scale):
    kept = lost = 0
    for number in gradients.flatten():
        if number == 0:
            continue
        stored = float((number * scale).to(dtype))
        if stored == 0 or not math.isfinite(stored):
            lost += 1
        else:
            kept += 1
    return lost / (lost + kept)


def _by_division(gradients, dtype, scale):
    """What is 0, inf or nan has no finite reciprocal, or none at all."""
    some = gradients[gradients.ne(0)]
    stored = (some * scale).to(dtype).double()
    return 1 - (stored.reciprocal().isfinite() & stored.isfinite()).double().mean()


RIGHT["7.1"] = {"one by one": _one_by_one, "reciprocals": _by_division}
WRONG["7.1"] = {
    "changed at all": (
        _share(lambda s, g, k: s.float() != g * k),
        "rounding changes",
    ),
    "below the smallest normal": (
        _share(lambda s, g, k: (s.abs() < torch.finfo(s.dtype).tiny) | ~s.isfinite()),
        "smallest normal",
    ),
    "divided by scale": (
        _share(lambda s, g, k: (s == 0) | ~s.isfinite(), scaled=lambda g, s: g / s),
        "divides by the scale",
    ),
    "of all that is finite": (
        _share(lambda s, g, k: (s == 0) | ~s.isfinite(), of=lambda g: (g != 0) & g.isfinite()),
        "inf or nan before the cast are left out",
    ),
    "percent": (
        lambda g, d, s: 100 * _one_by_one(g, d, s),
        "100 times",
    ),
}


def _sums(add, when="post"):
    def float32_sums(parameters):
        parameters = list(parameters)
        sums = [torch.zeros(p.shape, dtype=torch.float32) for p in parameters]
        for p, total in zip(parameters, sums, strict=True):
            p.register_post_accumulate_grad_hook(lambda p, total=total: add(p, total))
        return sums

    return float32_sums


def _into(p, total):
    torch.add(total, p.grad, out=total)
    p.grad = None


class _Sum:
    def __init__(self, p):
        self.total = torch.zeros_like(p, dtype=torch.float32, requires_grad=False)
        p.register_post_accumulate_grad_hook(self)

    def __call__(self, p):
        self.total += p.grad
        p.grad = None


def _rounded(p, total):
    total.copy_((total.bfloat16() + p.grad).float())
    p.grad = None


def _square(p, total):
    total.add_(p.grad.float().square())
    p.grad = None


def _zeroed(p, total):
    total.add_(p.grad)
    p.grad.zero_()


RIGHT["7.2"] = {"an object": lambda ps: [_Sum(p).total for p in ps], "out": _sums(_into)}
WRONG["7.2"] = {
    "rounded on the way": (_sums(_rounded), "rounded to bf16 in each"),
    "squares": (_sums(_square), "entry 'sums'"),
    "zeroed, not freed": (_sums(_zeroed), "kept too"),
}


def _neighbours(x, generator):
    """Down and up by the bits; up with the chance of the distance from below."""
    bits = x.view(torch.int32)
    down = (bits & -65536).view(torch.float32)
    up = ((bits & -65536) + 65536).view(torch.float32)
    chance = (x.double() - down.double()) / (up.double() - down.double())
    draw = torch.rand(x.shape, generator=generator, dtype=torch.float64)
    return torch.where(draw < chance, up, down).bfloat16()


def _chance(of):
    def round_by_chance(x, generator):
        down = (x.view(torch.int32) & -65536).view(torch.float32)
        up = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32)
        share = (x - down) / (up - down)
        return torch.where(
            torch.rand(x.shape, generator=generator) < of(share), up, down
        ).bfloat16()

    return round_by_chance


RIGHT["7.3"] = {"neighbours": _neighbours}
WRONG["7.3"] = {
    "squared chance": (_chance(lambda s: s * s), "chances are not"),
    "root of the chance": (_chance(lambda s: s.sqrt()), "chances are not"),
    "turned round": (_chance(lambda s: 1 - s), "swapped"),
    "noise of 15 bits": (
        lambda x, g: (
            (
                (
                    x.view(torch.int32)
                    + torch.randint(0, 1 << 15, x.shape, dtype=torch.int32, generator=g)
                )
                & -65536
            )
            .view(torch.float32)
            .bfloat16()
        ),
        "chances are not",
    ),
    "cut by 17 bits": (
        lambda x, g: (
            (
                (
                    x.view(torch.int32)
                    + torch.randint(0, 1 << 17, x.shape, dtype=torch.int32, generator=g)
                )
                & -131072
            )
            .view(torch.float32)
            .bfloat16()
        ),
        "If you clear bits, clear the lower 16",
    ),
}


def _master(step):
    """``step(weight, master, wide gradient, lr)`` is done to each weight with a gradient."""

    @torch.no_grad()
    def master_step(weights, masters, lr):
        for w, m in zip(weights, masters, strict=True):
            if w.grad is not None:
                step(w, m, w.grad.float(), lr)

    return master_step


def _by_addcmul(w, m, g, lr):
    w.copy_(m.addcmul_(g, torch.tensor(-lr)))


def _both_by_themselves(w, m, g, lr):
    m.sub_(lr * g)
    w.sub_(lr * w.grad)


def _master_rounded(w, m, g, lr):
    w.copy_(m.sub_(lr * g))
    m.copy_(w)


def _weights_in_float32(w, m, g, lr):
    m.sub_(lr * g)
    w.data = m.clone()


RIGHT["7.4"] = {"addcmul": _master(_by_addcmul)}
WRONG["7.4"] = {
    "both by themselves": (_master(_both_by_themselves), "step of their own"),
    "master rounded": (_master(_master_rounded), "becomes the rounded weight"),
    "weights in float32": (_master(_weights_in_float32), "another dtype"),
}


def _all_finite(gradients):
    return all(g.isfinite().all() for g in gradients)


def _scaled(
    finite=_all_finite, divide=torch.Tensor.div_, late=0, streak=0, begins=0, skip=lambda *_: None
):
    """``late``: by how many steps the scale doubles late. ``streak`` and ``begins``: what is left
    of ``good`` after a skipped step, and after the scale has doubled.
    """

    def scaled_step(optimizer, scale, good, patience):
        gradients = [
            p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None
        ]
        for g in gradients:
            divide(g, scale)
        if not finite(gradients):
            skip(optimizer, gradients)
            return scale / 2, good * streak
        optimizer.step()
        good += 1
        if good >= patience + late:
            return scale * 2, good * begins
        return scale, good

    return scaled_step


def _norm_is_finite(gradients):
    return math.isfinite(sum(g.double().square().sum().item() for g in gradients))


def _steps_on_zeros(optimizer, gradients):
    for g in gradients:
        g.nan_to_num_(0.0, 0.0, 0.0)
    optimizer.step()


RIGHT["7.5"] = {"by the norm in float64": _scaled(_norm_is_finite)}
WRONG["7.5"] = {
    "one late": (_scaled(late=1), "one step late"),
    "zeroes what is not finite": (_scaled(skip=_steps_on_zeros), "zeros in its place"),
    "keeps the streak": (_scaled(streak=1), "in a row"),
    "any finite": (
        _scaled(lambda gradients: any(g.isfinite().all() for g in gradients)),
        "not finite",
    ),
    "nan alone": (
        _scaled(lambda gradients: not any(g.isnan().any() for g in gradients)),
        "inf passes",
    ),
    "multiplies": (_scaled(divide=torch.Tensor.mul_), "are multiplied"),
    "not begun again": (_scaled(begins=1), "does not begin again"),
}


def _block_by_block(model, x):
    with torch.inference_mode():
        for block in model:
            with torch.autocast("cpu", torch.bfloat16):
                x = block(x)
    return x


RIGHT["7.6"] = {"by block": _block_by_block}


def _half_out(model, x):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return model(x).float()


def _no_autocast_inside(model, x):
    with torch.no_grad():
        return model(x).bfloat16()


WRONG["7.6"] = {
    "rounded at the end": (_no_autocast_inside, "only the result is rounded"),
}


def _divides_later(optimizer, scale, good, patience):
    given = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    if not _all_finite(given):
        return scale / 2, 0
    for g in given:
        g /= scale
    optimizer.step()
    good += 1
    return (scale * 2, 0) if good == patience else (scale, good)


def _stops(optimizer, scale, good, patience):
    for p in _with_gradients(optimizer):
        p.grad /= scale
        if not p.grad.isfinite().all():
            return scale / 2, 0
    optimizer.step()
    good += 1
    return (scale * 2, 0) if good == patience else (scale, good)


def _stops_before(optimizer, scale, good, patience):
    for p in _with_gradients(optimizer):
        if not p.grad.isfinite().all():
            return scale / 2, 0
        p.grad.mul_(1 / scale)
    optimizer.step()
    good += 1
    return (scale * 2, 0) if good == patience else (scale, good)


def _skips_the_odd_one(optimizer, scale, good, patience):
    fine = True
    for p in _with_gradients(optimizer):
        if p.grad.isfinite().all():
            p.grad = p.grad / scale
        else:
            fine = False
    if not fine:
        return scale / 2, 0
    optimizer.step()
    good += 1
    return (scale * 2, 0) if good == patience else (scale, good)


def _drops_gradients(optimizer, scale, good, patience):
    found = _scaled()(optimizer, scale, good, patience)
    optimizer.zero_grad(set_to_none=False)
    return found


def _with_gradients(optimizer):
    every = [p for group in optimizer.param_groups for p in group["params"]]
    return [p for p in every if p.grad is not None]


RIGHT["7.5"] |= {
    "divides what is finite": _divides_later,
    "drops the gradients afterwards": _drops_gradients,
}
WRONG["7.5"] |= {
    "stops at the first inf": (_stops, "divide all of them"),
    "stops before the first inf": (_stops_before, "divide all of them"),
    "leaves out the odd one": (_skips_the_odd_one, "divide all of them"),
}


# Answers with the right numbers, and something else wrong: the draws, the lists, what is left.


def _reciprocal_count(gradients, dtype, scale):
    """The share that is kept, taken from 1."""
    stored = (gradients * scale).to(dtype)
    kept = (stored != 0) & (stored - stored == 0)
    return (1 - kept.sum() / gradients.count_nonzero()).item()


RIGHT["7.1"]["what is kept, from 1"] = _reciprocal_count
WRONG["7.1"] |= {
    "scales in place": (
        lambda g, dtype, scale: _reciprocal_count(g.mul_(scale), dtype, 1.0),
        "changed `gradients` in place",
    ),
}


def _new_sums_in_the_list(parameters):
    sums = [torch.zeros(p.shape) for p in parameters]

    def adds(i):
        def hook(p):
            sums[i] = sums[i] + p.grad
            p.grad = None

        return hook

    for i, p in enumerate(parameters):
        p.register_post_accumulate_grad_hook(adds(i))
    return sums


WRONG["7.2"]["new sums, and a copy of the list"] = (
    lambda ps: list(_new_sums_in_the_list(ps)),
    "sums that are returned stay zeros",
)
RIGHT["7.2"]["new sums in the list"] = _new_sums_in_the_list


def _draws(x, numbers):
    """Rounds up where the lower half of the bits exceeds ``numbers``, which broadcast to x."""
    bits = x.contiguous().view(torch.int32)
    up = (numbers < (bits & 0xFFFF)).int()
    return (((bits >> 16) + up) << 16).view(torch.float32).bfloat16()


def _drawn(x, generator, shape=None):
    shape = x.shape if shape is None else shape
    return _draws(x, torch.randint(0, 1 << 16, shape, generator=generator))


def _from_a_copy(x, generator):
    copied = torch.Generator()
    copied.set_state(generator.get_state())
    return _drawn(x, copied)


def _from_its_seed(x, generator):
    torch.manual_seed(generator.initial_seed())
    return _drawn(x, None)


RIGHT["7.3"]["by a comparison of the lower bits"] = _drawn
WRONG["7.3"] |= {
    "from a copy of the generator": (_from_a_copy, "second call with the same generator"),
    "from the generator's seed": (_from_its_seed, "second call with the same generator"),
    "a seed of its own": (
        lambda x, generator: _drawn(x, torch.Generator().manual_seed(0)),
        "another seed gives the same result",
    ),
    "one number a column": (
        lambda x, generator: _drawn(x, generator, x.shape[-1:]),
        "whole row or column",
    ),
}


def _frozen_afterwards(weights, masters, lr):
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            weight.requires_grad_(False)
            if weight.grad is not None:
                weight.copy_(master.sub_(lr * weight.grad.float()))


def _bound_again(weights, masters, lr):
    for weight, master in zip(weights, masters, strict=True):
        if weight.grad is not None:
            master = master - lr * weight.grad.float()
            weight.data.copy_(master)


def _one_step_behind(weights, masters, lr):
    for weight, master in zip(weights, masters, strict=True):
        if weight.grad is not None:
            weight.data.copy_(master)
            master.sub_(weight.grad.float(), alpha=lr)


WRONG["7.4"] |= {
    "requires_grad off": (_frozen_afterwards, "require no gradient any more"),
    "the name is bound again": (_bound_again, "masters have not changed"),
    "one step behind": (_one_step_behind, "one step behind"),
}


def _up_to_a_limit(optimizer, scale, good, patience):
    scale, good = _scaled()(optimizer, scale, good, patience)
    return min(scale, 65536.0), good


WRONG["7.5"]["at most 65,536"] = (_up_to_a_limit, "stops at 65,536: set no upper limit")
