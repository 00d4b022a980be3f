"""Answers to the exercises of lesson 07 as people write them; see lesson_00.py."""

import copy
import math
from functools import partial

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

RIGHT, WRONG = {}, {}


def _lost(g, dtype, scale, *, among=None, gone=lambda x: (x == 0) | ~x.isfinite(), put=None):
    x = put(g, dtype, scale) if put else (g * scale).to(dtype)
    some = g != 0 if among is None else among(g)
    return (gone(x) & some).sum().item() / some.sum().item()


def _lost_loop(g, dtype, scale, gone=math.isinf):
    numbers = [n for n in g.flatten().tolist() if n]
    kept = torch.tensor(numbers).mul(scale).to(dtype).tolist()
    return sum(n == 0 or gone(n) for n in kept) / len(numbers)


RIGHT["7.1"] = {
    "plain": _lost,
    "loop": lambda g, dtype, scale: _lost_loop(
        g, dtype, scale, gone=lambda n: not math.isfinite(n)
    ),
    "selected": lambda g, dtype, scale: (
        1
        - (lambda x: ((x != 0) & (x.abs() < math.inf)).float().mean())(
            (g[g != 0] * scale).to(dtype)
        )
    ),
    "double": lambda g, dtype, scale: _lost(g.double(), dtype, scale),
}
WRONG["7.1"] = {
    "zeros among all": (
        lambda g, d, s: ((s * g).to(d) == 0).sum().item() / g.numel(),
        "were 0 before lose nothing",
    ),
    "loop, without nan": (_lost_loop, "nan is not finite either"),
    "of all": (partial(_lost, among=lambda g: torch.ones_like(g, dtype=torch.bool)), "zero"),
    "no overflow": (partial(_lost, gone=lambda x: x == 0), "overflow|inf"),
    "only overflow": (partial(_lost, gone=lambda x: ~x.isfinite()), "become 0|underflow"),
    "scaled late": (partial(_lost, put=lambda g, d, s: g.to(d) * s), "before"),
    "no scale": (partial(_lost, put=lambda g, d, s: g.to(d)), "scale"),
    "kept": (lambda g, d, s: 1 - _lost(g, d, s), "share that is kept"),
    "count": (lambda g, d, s: round(_lost(g, d, s) * int((g != 0).sum())), "counts the lost"),
    "a share of all": (
        lambda g, d, s: _lost(g, d, s) * int((g != 0).sum()) / g.numel(),
        "the number of all elements",
    ),
    "always float16": (lambda g, d, s: _lost(g, torch.float16, s), "dtype|bf16"),
}


def _sums(parameters, *, dtype=torch.float32, free=True, how=lambda a, g: a.add_(g), hooked=None):
    sums = [torch.zeros_like(p, dtype=dtype) for p in parameters]

    def hook_for(held):
        def hook(p):
            how(held, p.grad)
            if free:
                p.grad = None

        return hook

    for p, held in zip(parameters, sums, strict=True):
        p.register_post_accumulate_grad_hook(hook_for(held))
    return sums


def _sums_in_place(parameters):
    sums = []
    for p in parameters:
        total = torch.zeros(p.shape)

        def hook(p, total=total):
            total += p.grad.float()
            p.grad = None

        p.register_post_accumulate_grad_hook(hook)
        sums.append(total)
    return sums


def _sums_by_tensor_hook(parameters):
    sums = [torch.zeros(p.shape) for p in parameters]
    for p, total in zip(parameters, sums, strict=True):
        p.register_hook(lambda g, total=total: (total.add_(g), None)[1])
    return sums


def _sums_shared(parameters):
    sums = [torch.zeros(p.shape) for p in parameters]
    for i, p in enumerate(parameters):

        def hook(p):
            sums[i] += p.grad  # noqa: B023
            p.grad = None

        p.register_post_accumulate_grad_hook(hook)
    return sums


def _sums_returned(parameters):
    sums = [torch.zeros(p.shape) for p in parameters]
    for p, total in zip(parameters, sums, strict=True):
        p.register_post_accumulate_grad_hook(lambda p, total=total: total.add_(p.grad))
    return sums


RIGHT["7.2"] = {
    "closures": _sums,
    "in place": _sums_in_place,
    "zeroed first": lambda parameters: _sums(parameters, how=lambda a, g: a.copy_(a + g)),
}


def _sums_shared_by_tensor_hook(parameters):
    sums = []
    for p in parameters:
        total = torch.zeros_like(p)
        sums.append(total)

        def add(gradient):
            total.add_(gradient)  # noqa: B023

        p.register_hook(add)
    return sums


WRONG["7.2"] = {
    "bf16": (partial(_sums, dtype=torch.bfloat16), "bf16"),
    "kept": (partial(_sums, free=False), "p.grad"),
    "tensor hook": (_sums_by_tensor_hook, "p.grad"),
    "last hook": (_sums_shared, "last|same"),
    "last tensor hook, in bf16": (_sums_shared_by_tensor_hook, "all hooks add to the same sum"),
    "overwritten": (partial(_sums, how=lambda a, g: a.copy_(g)), "last backward|add"),
    "mean": (partial(_sums, how=lambda a, g: a.lerp_(g.float(), 0.5)), "got|expected"),
    "minus": (partial(_sums, how=lambda a, g: a.sub_(g)), "sign"),
    "returning hook": (_sums_returned, "a hook must return nothing"),
}


def _by_bits(x, generator):
    low = torch.randint(0, 65536, x.shape, generator=generator, dtype=torch.int32)
    return ((x.view(torch.int32) + low) & -65536).view(torch.float32).to(torch.bfloat16)


def _by_neighbours(x, generator, *, chance=None, gap=None):
    below = (x.view(torch.int32) & -65536).view(torch.float32)
    above = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32)
    share = (x - below) / (above - below)
    chance = torch.rand(x.shape, generator=generator) if chance is None else chance(x, generator)
    return torch.where(chance < (share if gap is None else gap(share)), above, below).bfloat16()


def _by_nextafter(x, generator):
    near = x.bfloat16()
    other = torch.nextafter(near, torch.where(x > near.float(), math.inf, -math.inf).bfloat16())
    share = ((x - near.float()) / (other.float() - near.float())).nan_to_num()
    return torch.where(torch.rand(x.shape, generator=generator) < share, other, near)


def _one_for_all(x, generator):
    low = torch.randint(0, 65536, (1,), generator=generator, dtype=torch.int32)
    return ((x.view(torch.int32) + low) & -65536).view(torch.float32).bfloat16()


def _noise(x, generator, shape=lambda x: x.shape):
    return (x + (torch.rand(shape(x), generator=generator) - 0.5) * x.abs() / 128).bfloat16()


RIGHT["7.3"] = {"bits": _by_bits, "neighbours": _by_neighbours, "nextafter": _by_nextafter}


def _from_the_nearest(x, generator):
    near = x.bfloat16()
    up = torch.nextafter(near, torch.full_like(near, torch.inf))
    gap = up.float() - near.float()
    chance = torch.rand(x.shape, generator=generator) < (x - near.float()) / gap
    return torch.where(chance, up, near)


def _in_int64(x, generator):
    noise = torch.randint(0, 1 << 16, x.shape, generator=generator)
    return ((x.view(torch.int32) + noise) & -65536).view(torch.float32).bfloat16()


WRONG["7.3"] = {
    "from the nearest": (_from_the_nearest, "always become the nearest"),
    "int64": (_in_int64, "makes int64 numbers"),
    "nearest": (lambda x, generator: x.bfloat16(), "nearest"),
    "coin": (
        partial(_by_neighbours, gap=lambda share: torch.where(share > 0, 0.5, 0.0)),
        "the same chance",
    ),
    "other way": (
        partial(_by_neighbours, gap=lambda share: (1 - share) * (share > 0)),
        "nearer|other way|chance",
    ),
    "down": (
        lambda x, generator: (x.view(torch.int32) & -65536).view(torch.float32).bfloat16(),
        "cut|toward",
    ),
    "no generator": (lambda x, generator: _by_bits(x, None), "generator"),
    "one for all": (
        partial(_by_neighbours, chance=lambda x, g: torch.rand(1, generator=g)),
        "one random number|whole tensor",
    ),
    "one int for all": (_one_for_all, "one random number decides"),
    "noise for all": (partial(_noise, shape=lambda x: (1,)), "one random number decides"),
    "noise as large as x": (_noise, "this is right near a power of 2"),
    "float32": (lambda x, generator: _by_bits(x, generator).float(), "dtype|float32"),
    "noise": (
        lambda x, generator: (
            x + (torch.rand(x.shape, generator=generator) - 0.5) / 128
        ).bfloat16(),
        "gap|size",
    ),
    "up": (lambda x, generator: _by_bits(x, generator) + 1, "got|neighbour"),
}


def _master(weights, masters, lr, *, change=None, write=True):
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            if weight.grad is None:
                continue
            (change or (lambda m, g: m.sub_(lr * g.float())))(master, weight.grad)
            if write:
                weight.copy_(master)


def _master_optimizer(weights, masters, lr):
    for weight, master in zip(weights, masters, strict=True):
        if weight.grad is not None:
            master.grad = weight.grad.float()
            torch.optim.SGD([master], lr=lr).step()
            master.grad = None
            weight.data.copy_(master)


def _master_at_once(weights, masters, lr):
    gradients = [None if w.grad is None else w.grad.float() for w in weights]
    with torch.no_grad():
        for w, m, g in zip(weights, masters, gradients, strict=True):
            if g is not None:
                m -= lr * g
                w.copy_(m)


def _into_the_weights(weights, masters, lr):
    with torch.no_grad():
        for w, _ in zip(weights, masters, strict=True):
            if w.grad is not None:
                w -= lr * w.grad


def _masters_from_weights(weights, masters, lr):
    with torch.no_grad():
        for w, m in zip(weights, masters, strict=True):
            if w.grad is not None:
                m.copy_(w).sub_(lr * w.grad.float())
                w.copy_(m)


def _master_unasked(weights, masters, lr):
    for w, m in zip(weights, masters, strict=True):
        m -= lr * w.grad.float()
        w.data.copy_(m)


def _master_ends(weights, masters, lr):
    for w, m in zip(weights, masters, strict=True):
        if w.grad is None:
            break
        m -= lr * w.grad.float()
        w.data.copy_(m)


RIGHT["7.4"] = {
    "plain": _master,
    "add alpha": lambda ws, ms, lr: _master(ws, ms, lr, change=lambda m, g: m.add_(g, alpha=-lr)),
    "an optimizer each": _master_optimizer,
}


def _master_from_the_weight(weights, masters, lr):
    for w, m in zip(weights, masters, strict=True):
        if w.grad is not None:
            w.data -= lr * w.grad
            m.copy_(w.data)


WRONG["7.4"] = {
    "in the weights": (_into_the_weights, "weights themselves|bf16"),
    "from the weights": (_masters_from_weights, "from the weight|forgotten"),
    "masters alone": (partial(_master, write=False), "never written"),
    "at once": (_master_at_once, "at a time|at once"),
    "product in bf16": (
        lambda ws, ms, lr: _master(ws, ms, lr, change=lambda m, g: m.sub_(lr * g)),
        "bf16",
    ),
    "uphill": (lambda ws, ms, lr: _master(ws, ms, -lr), "sign|uphill"),
    "twice": (lambda ws, ms, lr: _master(ws, ms, 2 * lr), "times too|got"),
    "every weight has a gradient": (_master_unasked, "got no gradient in this step"),
    "ends at the first without": (_master_ends, "skip only that weight"),
    "the other way round": (_master_from_the_weight, "the master copies it"),
    "without masters": (
        lambda ws, ms, lr: _master(ws, [w.detach().float() for w in ws], lr),
        "masters are not used",
    ),
}


def _gradients(optimizer):
    return [
        p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]


def _scaled(
    optimizer,
    scale,
    good,
    patience,
    *,
    finite=lambda gs: all(bool(g.isfinite().all()) for g in gs),
    divide=True,
    skip=True,
    streak=True,
    first=False,
):
    gradients = _gradients(optimizer)
    ok = finite(gradients[:1] if first else gradients)
    if divide:
        for g in gradients:
            g /= scale
    if ok or not skip:
        optimizer.step()
    if not ok:
        return scale / 2, 0 if streak else good
    good += 1
    return (scale * 2, 0) if good == patience else (scale, good)


def _scaled_by_norm(optimizer, scale, good, patience):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for g in _gradients(optimizer):
        g.mul_(1 / scale)
    norm = clip_grad_norm_(parameters, math.inf)
    if not norm.isfinite():
        return [scale * 0.5, 0]
    optimizer.step()
    good = (good + 1) % patience
    return [scale if good else scale * 2, good]


def _scaled_by_sum(optimizer, scale, good, patience):
    return _scaled(
        optimizer,
        scale,
        good,
        patience,
        finite=lambda gs: math.isfinite(sum(g.abs().sum().item() for g in gs)),
    )


RIGHT["7.5"] = {"plain": _scaled, "by norm": _scaled_by_norm, "by sum": _scaled_by_sum}


def _scaled_without_a_look(optimizer, scale, good, patience):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad /= scale
    return _scaled(optimizer, scale, good, patience, divide=False)


def _scaled_in_the_first_group(optimizer, scale, good, patience):
    finite = True
    for p in optimizer.param_groups[0]["params"]:
        if p.grad is not None:
            p.grad /= scale
            finite = finite and bool(p.grad.isfinite().all())
    if not finite:
        return scale / 2, 0
    optimizer.step()
    good += 1
    return (2 * scale, 0) if good == patience else (scale, good)


def _scaled_a_step_each(optimizer, scale, good, patience):
    for g in _gradients(optimizer):
        g.copy_(g / scale)
        if torch.isfinite(g).all():
            optimizer.step()
            good += 1
        else:
            scale, good = scale / 2, 0
    if good == patience:
        scale, good = 2 * scale, 0
    return scale, good


WRONG["7.5"] = {
    "a step each": (_scaled_a_step_each, "once for each gradient"),
    "steps anyway": (partial(_scaled, skip=False), "skip"),
    "never divides": (partial(_scaled, divide=False), "divide"),
    "first alone": (partial(_scaled, first=True), "every gradient|one parameter"),
    "streak": (partial(_scaled, streak=False), "in a row"),
    "no gradient": (_scaled_without_a_look, "may have no gradient"),
    "one group": (_scaled_in_the_first_group, "first group's"),
    "inf alone": (
        partial(_scaled, finite=lambda gs: not any(bool(g.isinf().any()) for g in gs)),
        "NaN|nan",
    ),
    "never grows": (lambda o, s, g, p: (_scaled(o, s, g, 10**9), 0)[0], "doubl|got"),
    "swapped": (lambda o, s, g, p: _scaled(o, s, g, p)[::-1], "results are swapped"),
    "stays": (lambda o, s, g, p: (s, _scaled(o, s, g, p)[1]), "never changes"),
}


def _features(model, x, *, cache=False, dtype=torch.bfloat16, grad=False):
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=dtype, cache_enabled=cache):
        return model(x)


def _features_by_layer(model, x):
    with torch.no_grad():
        for layer in model:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = layer(x)
    return x


def _features_cleared(model, x):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for layer in model:
            x = layer(x)
            torch.clear_autocast_cache()
    return x


def _features_inference(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False), torch.inference_mode():
        return model(x)


def _features_cast(model, x):
    with torch.no_grad():
        return model.bfloat16()(x.bfloat16())


def _features_copied(model, x):
    with torch.no_grad():
        return copy.deepcopy(model).bfloat16()(x.bfloat16())


RIGHT["7.6"] = {
    "off": _features,
    "by layer": _features_by_layer,
    "cleared": _features_cleared,
    "inference": _features_inference,
}
WRONG["7.6"] = {
    "cached": (partial(_features, cache=True), "cache"),
    "graph": (partial(_features, grad=True), "graph|no_grad"),
    "graph and cache": (partial(_features, grad=True, cache=True), "a graph is built"),
    "float32": (lambda model, x: _features(model, x, dtype=torch.float32), "float32"),
    "float16": (partial(_features, dtype=torch.float16), "float16"),
    "cast": (_features_cast, "model|weights"),
    "copied": (_features_copied, "copy|over|budget|weights"),
    "float16 cached": (partial(_features, dtype=torch.float16, cache=True), "float16|cache"),
}


def _lost_of(count, among):
    """Counts and divides by the given numbers, the stored ones and which are lost, in float32."""

    def lost(gradients, dtype, scale):
        stored = (gradients * scale).to(dtype)
        gone = (gradients != 0) & ((stored == 0) | ~stored.isfinite())
        return (count(gradients, stored, gone).sum() / among(gradients, stored).sum()).item()

    return lost


def _gone(gradients, stored, gone):
    return gone


WRONG["7.1"] |= {
    "of all that is finite": (
        _lost_of(lambda g, s, gone: gone & g.isfinite(), lambda g, s: (g != 0) & g.isfinite()),
        "inf or nan before the cast are left out",
    ),
    "over the finite ones": (
        _lost_of(_gone, lambda g, s: (g != 0) & g.isfinite()),
        "inf or nan before the cast are left out",
    ),
    "nan alone left out": (
        _lost_of(lambda g, s, gone: gone & ~g.isnan(), lambda g, s: (g != 0) & ~g.isnan()),
        "nan is left out",
    ),
    "of what is finite afterwards": (
        _lost_of(lambda g, s, gone: gone & s.isfinite(), lambda g, s: (g != 0) & s.isfinite()),
        "not finite after the cast are left out",
    ),
    "over what is finite afterwards": (
        _lost_of(_gone, lambda g, s: s.isfinite()),
        "not finite after the cast are left out",
    ),
    "over what is left": (_lost_of(_gone, lambda g, s: s != 0), "not zero after the cast"),
    "a percentage in float32": (
        lambda *given: 100 * _lost_of(_gone, lambda g, s: g != 0)(*given),
        "100 times too large",
    ),
}


def _master_by(update, times=1, after=None):
    def master_step(weights, masters, lr):
        with torch.no_grad():
            for _ in range(times):
                for weight, master in zip(weights, masters, strict=True):
                    if weight.grad is None:
                        continue
                    update(master, weight.grad, lr)
                    weight.copy_(master)
                    if after:
                        after(weight, lr)

    return master_step


def _subtract(master, gradient, lr):
    master -= lr * gradient.float()


WRONG["7.4"] |= {
    "twice": (_master_by(_subtract, times=2), "moves 2 times as far as it should"),
    "once for each weight": (_master_by(_subtract, times=4), "moves 4 times as far as it should"),
    "a factor": (
        _master_by(lambda m, g, lr: m.sub_(2 * lr * g.float())),
        "moves 2 times as far as it should",
    ),
    "lr twice": (
        _master_by(lambda m, g, lr: m.sub_(lr * lr * g.float())),
        "lr is multiplied in twice",
    ),
    "no lr": (_master_by(lambda m, g, lr: m.sub_(g.float())), "lr has no effect"),
    "half of it": (
        _master_by(lambda m, g, lr: m.sub_(lr * g.float() / 2)),
        "0.5 times lr times the gradient",
    ),
    "the weight once more": (
        _master_by(_subtract, after=lambda weight, lr: weight.sub_(lr * weight.grad)),
        "once more after the copy",
    ),
    "decays": (
        _master_by(lambda m, g, lr: m.mul_(1 - lr).sub_(lr * g.float())),
        "no weight decay",
    ),
}


def _scaler(*, divides=1, counts=1, limit=lambda scale: scale, grows=2, shrinks=2):
    def scaled_step(optimizer, scale, good, patience):
        gradients = []
        for group in optimizer.param_groups:
            gradients += [p.grad for p in group["params"] if p.grad is not None]
        for gradient in gradients:
            for _ in range(divides):
                gradient /= scale
        if not all(gradient.isfinite().all() for gradient in gradients):
            return limit(scale / shrinks), 0
        optimizer.step()
        good += counts
        if good >= patience:
            return limit(scale * grows), 0
        return scale, good

    return scaled_step


def _counts_tries(optimizer, scale, good, patience):
    return _scaler()(optimizer, scale, good + 1, patience)


WRONG["7.5"] |= {
    "divides twice": (_scaler(divides=2), "divided by the scale twice"),
    "counts twice": (_scaler(counts=2), "grows more than once in a step"),
    "counts before and after": (_counts_tries, "grows more than once in a step"),
    "at most 65,536": (
        _scaler(limit=lambda scale: min(scale, 2.0**16)),
        "stops at 65,536: set no upper limit",
    ),
    "at most 16,777,216": (
        _scaler(limit=lambda scale: min(scale, 2.0**24)),
        "stops at 16,777,216: set no upper limit",
    ),
    "at least 1": (
        _scaler(limit=lambda scale: max(scale, 1.0)),
        "stops at 1: set no lower limit",
    ),
    "at least a millionth": (
        _scaler(limit=lambda scale: max(scale, 1e-6)),
        "stops at 1e-06: set no lower limit",
    ),
    "times 4": (_scaler(grows=4), "goes from 65,536 to 262,144: double it"),
    "a quarter": (_scaler(shrinks=4), "goes from 1,024 to 256: halve it"),
    "half as much again": (_scaler(grows=1.5), "goes from 65,536 to 98,304: double it"),
}


def _are_lost(gradients, dtype, scale, *, zeros=False):
    stored = (gradients * scale).to(dtype)
    gone = (stored == 0) | ~stored.isfinite()
    return gone if zeros else gone & (gradients != 0)


def _share_of(gradients, dtype, scale, **how):
    return (_are_lost(gradients, dtype, scale, **how).sum() / gradients.count_nonzero()).item()


def _one_less_what_stays(gradients, dtype, scale):
    given = gradients[gradients != 0]
    stored = (given * scale).to(dtype).double()
    return 1 - (stored.isfinite() & (stored != 0)).double().mean()


def _number_by_number(gradients, dtype, scale):
    given = [number for number in gradients.flatten().tolist() if number != 0]
    stored = [torch.tensor(number).mul(scale).to(dtype).item() for number in given]
    return np.mean([not math.isfinite(number) or number == 0 for number in stored])


RIGHT["7.1"] |= {
    "one less what stays": _one_less_what_stays,
    "number by number": _number_by_number,
}
WRONG["7.1"] |= {
    "zeros among the lost": (partial(_share_of, zeros=True), "0 already are counted among"),
    "scaled twice": (lambda g, d, s: _share_of(g, d, s * s), "the scale is used twice"),
    "two digits": (lambda *given: round(_share_of(*given), 2), "the share is rounded"),
    "of the rows": (
        lambda g, d, s: _are_lost(g, d, s).sum().item() / len(g),
        "divides by the number of rows",
    ),
    "in percent": (lambda *given: 100 * _share_of(*given), "100 times too large"),
    "whether any": (lambda *given: _share_of(*given) > 0, "return a number: this is True"),
    "scaled back": (
        lambda g, d, s: (
            ((((g * s).to(d) / s == 0) | ~((g * s).to(d) / s).isfinite()) & (g != 0)).sum()
            / g.count_nonzero()
        ),
        "taken off again",
    ),
}


def _by_limits(smallest, largest):
    def lost(gradients, dtype, scale):
        size = (gradients * scale).abs()
        gone = (size < smallest[dtype]) | (size > largest[dtype]) | size.isnan()
        return (gone & (gradients != 0)).sum().item() / (gradients != 0).sum().item()

    return lost


_TABLE = _by_limits(
    {torch.float16: 6.0e-8, torch.bfloat16: 9.2e-41},
    {torch.float16: 65504, torch.bfloat16: 3.39e38},
)


def _nonzero_after_scaling(gradients, dtype, scale):
    scaled = (gradients * scale)[gradients * scale != 0]
    stored = scaled.to(dtype)
    return 1 - ((stored != 0) & stored.isfinite()).float().mean().item()


def _whole_share(gradients, dtype, scale):
    return int(_lost(gradients, dtype, scale))


def _weighted(gradients, dtype, scale):
    stored = (gradients * scale).to(dtype)
    gone = (stored == 0) | ~stored.isfinite()
    return gradients.abs()[gone].sum() / gradients.abs().sum()


WRONG["7.1"] |= {
    "a table's limits": (_TABLE, "just above the largest, are counted as lost, but rounding"),
    "nonzero after scaling": (_nonzero_after_scaling, "the scale itself makes 0 are left out"),
    "weighted by size": (_weighted, "each number counts by its size here"),
    "whole shares": (_whole_share, "not yet: the (answer is 0 for all|result is a whole number)"),
}


def _adds_all(hooked):
    """Hooks on some of the parameters, each of which adds the gradients of all."""

    def float32_sums(parameters):
        sums = [torch.zeros(p.shape) for p in parameters]

        def add_all(_):
            for p, total in zip(parameters, sums, strict=True):
                if p.grad is not None:
                    total.add_(p.grad)
                    p.grad = None

        for p in parameters[hooked]:
            p.register_post_accumulate_grad_hook(add_all)
        return sums

    return float32_sums


_OWN_HOOK = "of them still have a gradient in .grad: each needs a hook of its own"
WRONG["7.2"] |= {
    "one hook, on the first": (
        _adds_all(slice(1)),
        f"two backwards of 4 parameters, 3 {_OWN_HOOK}",
    ),
    "one hook, on the last": (
        _adds_all(slice(-1, None)),
        f"300 backwards of 2 parameters, 1 {_OWN_HOOK}",
    ),
}
RIGHT["7.2"] |= {"every hook adds all": _adds_all(slice(None))}


def _of_bits(begin, end, mask=-(1 << 16)):
    def round_by_chance(x, generator):
        low = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, generator=generator)
        return end((begin(x) + low) & mask).bfloat16()

    return round_by_chance


def _with_noise(noise):
    """Nearest, after noise that is made of (shape, generator) and counted in gaps."""

    def round_by_chance(x, generator):
        gap = torch.ldexp(torch.ones_like(x), torch.frexp(x)[1] - 8)
        return (x + noise(x.shape, generator) * gap).bfloat16()

    return round_by_chance


def _bits_of(x):
    return x.view(torch.int32)


def _numbers_of(bits):
    return bits.view(torch.float32)


_FAR = "not yet: the results for 1.00234 are from .* to .*, which is far from it"
_WIDE = "If you add noise before rounding, it must not be wider than one gap in all"
RIGHT["7.3"] |= {"bits in one line": _of_bits(_bits_of, _numbers_of)}
WRONG["7.3"] |= {
    "whole numbers for bits": (_of_bits(torch.Tensor.int, _numbers_of), _FAR),
    "bits for numbers": (_of_bits(_bits_of, lambda bits: bits), _FAR),
    "one bit stays": (_of_bits(_bits_of, _numbers_of, 1 << 16), _FAR),
    "the lower bits stay": (_of_bits(_bits_of, _numbers_of, 0xFFFF), _FAR),
    "normal noise": (
        _with_noise(lambda shape, generator: torch.randn(shape, generator=generator) / 2),
        _WIDE,
    ),
    "noise of two gaps": (
        _with_noise(lambda shape, generator: 2 * torch.rand(shape, generator=generator) - 1),
        _WIDE,
    ),
}


def _new_in_the_list(all_together):
    @torch.no_grad()
    def master_step(weights, masters, lr):
        new = []
        for i, (weight, master) in enumerate(zip(weights, masters, strict=True)):
            if weight.grad is not None:
                master = master - lr * weight.grad.float()
            if not all_together:
                masters[i] = master
            weight.copy_(master)
            new.append(master)
        if all_together:
            masters[:] = new

    return master_step


WRONG["7.4"] |= {
    "new masters, one by one": (_new_in_the_list(False), "new tensors in the list of masters"),
    "new masters, all together": (_new_in_the_list(True), "new tensors in the list of masters"),
}


def _loop_of_steps(optimizer, scale, good, patience):
    for group in optimizer.param_groups:
        for p in [p for p in group["params"] if p.grad is not None]:
            p.grad /= scale
            if not p.grad.isfinite().all():
                return scale / 2, 0
            optimizer.step()
    good += 1
    return (scale * 2, 0) if good == patience else (scale, good)


def _tested_by_clipping(optimizer, scale, good, patience):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = [p for p in parameters if p.grad is not None]
    for p in parameters:
        p.grad.div_(scale)
    if not clip_grad_norm_(parameters, 1.0).isfinite():
        return scale / 2, 0
    optimizer.step()
    return (scale * 2, 0) if good + 1 == patience else (scale, good + 1)


def _asks_before(optimizer, scale, good, patience):
    if good == patience:
        scale *= 2
        good = 0
    return _scaled(optimizer, scale, good, 10**9)


def _divides_by_the_doubled(optimizer, scale, good, patience):
    gradients = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    if not all(gradient.isfinite().all() for gradient in gradients):
        return scale / 2, 0
    new = scale * 2 if good + 1 == patience else scale
    for gradient in gradients:
        gradient /= new
    optimizer.step()
    return new, 0 if new > scale else good + 1


WRONG["7.5"] |= {
    "a step in the loop": (_loop_of_steps, "the optimizer steps once for each gradient"),
    "tested by clipping": (_tested_by_clipping, "the gradient is clipped to a norm of 1"),
    "asks before": (_asks_before, "is compared with `patience` before the step"),
    "divides by the doubled": (_divides_by_the_doubled, "are divided by the doubled scale"),
}


def _under_autocast(model, x, *, cache=False, grad=False, by_row=False):
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        if by_row:
            return torch.cat([model(row[None]) for row in x])
        return model(x).detach()


def _blocks_cast(model, x):
    x = x.bfloat16()
    with torch.no_grad():
        for block in model:
            x = block.bfloat16()(x)
            block.float()
    return x


WRONG["7.6"] |= {
    "detached": (partial(_under_autocast, grad=True), "gradients are on while the model runs"),
    "row by row": (partial(_under_autocast, cache=True, by_row=True), "autocast's cache keeps"),
    "a bf16 input": (
        lambda model, x: _under_autocast(model, x.bfloat16()),
        "the model gets x in bf16",
    ),
    "blocks cast and cast back": (_blocks_cast, "weights are bf16 while the model runs"),
}
RIGHT["7.6"] |= {"row by row, without the cache": partial(_under_autocast, by_row=True)}


@torch.no_grad()
def _new_data(weights, masters, lr):
    """The masters stay the same tensors, with new memory."""
    for w, m in zip(weights, masters, strict=True):
        if w.grad is not None:
            m.data = m - lr * w.grad.float()
            w.data.copy_(m)


RIGHT["7.4"] |= {"new data": _new_data}


def _counts_skipped_steps(optimizer, scale, good, patience):
    after, count = _scaler()(optimizer, scale, good, patience)
    return after, good + 1 if after < scale else count


WRONG["7.5"] |= {
    "counts skipped steps": (
        _counts_skipped_steps,
        "it counts the steps since the last one that was skipped",
    )
}
