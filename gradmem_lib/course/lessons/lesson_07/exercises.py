"""Lesson 07's exercises, in the order of their numbers: what 16 bits lose, three ways to lose less,
a loss that is scaled, and the copies that autocast keeps.
"""

import math

import torch
from torch import nn

from ...judge.exercise import Exercise, measured
from ..shared.settings import flat, gradients_of, weights_of

# 7.1


def lost(gradients, dtype, scale) -> float:
    """The share of the nonzero numbers that become 0, or not finite, when they are scaled and
    stored in ``dtype``.
    """
    stored = (gradients * scale).to(dtype)
    gone = (stored == 0) | ~stored.isfinite()
    nonzero = gradients != 0
    return (gone & nonzero).sum().item() / nonzero.sum().item()


IN_FLOAT16 = (  # numbers, the scale, and what happens to them
    ("1 0.1", 1.0, "0.1 is rounded, and not lost"),
    ("1 0 0 1e-8", 1.0, "only 1e-8 is lost, since the zeros were 0 before"),
    ("1 2e5", 1.0, "2e5 becomes inf"),
    ("1 nan inf -inf", 1.0, "nan and inf are not finite afterwards"),
    ("1 1e-6 4e-8 65510", 1.0, "none is lost, though 4e-8 and 65510 are beyond the limits"),
    ("1 1e-8 0", 4096.0, "1e-8 times the scale is not lost"),
)


def lost_cases(answer):
    for text, scale, happens in IN_FLOAT16:
        numbers = torch.tensor([float(word) for word in text.split()])
        name = f"numbers {text} in float16, with scale {scale:g}, where {happens}"
        yield name, answer(numbers, torch.float16, scale)
    for dtype in (torch.bfloat16, torch.float16):
        # So close to one another that some are just beyond each limit of a dtype.
        rows = torch.logspace(-46, 5, 300).view(2, 150)
        name = f"(torch.logspace(-46, 5, 300).view(2, 150), {dtype}, 2**-6)"
        yield name, answer(rows, dtype, 2**-6)


LOST = Exercise(
    "7.1",
    lost,
    lost_cases,
    """
    gradients != 0 → torch.ones_like(gradients) != 0
        numbers that are already zero are counted: take the share of the numbers that are not zero,
        in numerator and denominator.
    / nonzero.sum().item() → / gradients.numel()
        this divides by the number of all elements: leave the zeros out there too, and divide by how
        many were not zero.
    (gone & nonzero) → (stored == 0)
    / nonzero.sum().item() → / gradients.numel()
        this is the share of zeros after the cast: numbers that were 0 before lose nothing, and what
        becomes inf or nan is lost too.
    | ~stored.isfinite() →
        what becomes inf is lost too (overflow): ~stored.isfinite().
    ~stored.isfinite() → stored.isinf()
        nan is not finite either, and lost: ~stored.isfinite() finds inf and nan.
    (stored == 0) | →
        small numbers that become 0 are lost too (underflow): stored == 0.
    (gradients * scale).to(dtype) → gradients.to(dtype) * scale
        the scale comes after the cast, or is taken off again: scale before you store, and look at
        what is stored.
    gradients * scale → gradients
        the scale has no effect: multiply by it, then store.
    """,
)

# 7.2

# Bytes. What a step of 7.4 is given takes 2,097,152. A loop that names a float32 gradient and its
# product holds three tensors of 262,144 beside that, when the next pass begins. Four float32
# gradients at once do not fit.
SUMS_CARD, MASTER_CARD = 2_450_000, 3_000_000
WIDTH = 256  # weights (256, 256) in bf16: 131,072 bytes each, and 262,144 in float32


def float32_sums(parameters) -> list[torch.Tensor]:
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


def full_weights(*numbers: float) -> list[nn.Parameter]:
    """A bf16 weight (WIDTH, WIDTH) full of each number."""
    return [nn.Parameter(torch.full((WIDTH, WIDTH), x, dtype=torch.bfloat16)) for x in numbers]


def averages(tensors) -> list[float]:
    """What each tensor is full of."""
    return [tensor.mean(dtype=torch.float64).item() for tensor in tensors]


def sums_cases(answer):
    weights = full_weights(1, 1, 1, 1)

    def two_backwards():
        sums = answer(weights)
        a, b, c, d = map(torch.sum, weights)
        (a + 0.5 * b + 3 * c + 2 * d).backward()
        # Another gradient is complete first: that of the sum which was made last.
        d, c, b, a = map(torch.sum, reversed(weights))
        # 1 + 0.001953125 has no place in bf16.
        (-d + c + 0.25 * b + 0.001953125 * a).backward()
        return sums

    run = measured(two_backwards, SUMS_CARD)
    name = "gradients 1, 0.5, 3, 2, and in a second backward 0.001953125, 0.25, 1, -1"
    yield f"{name}: the sums", averages(run.value)
    left = sum(weight.grad is not None for weight in weights)
    yield f"{name}: how many gradients stay in .grad", left
    yield f"{name}: the dtypes of the sums", [total.dtype for total in run.value]
    yield f"{name}: the bytes", run


SUMS = Exercise(
    "7.2",
    float32_sums,
    sums_cases,
    """
    total.add_(p.grad) → total = total + p.grad
        the sums that are returned stay zeros: total = total + p.grad makes a new tensor;
        total.add_(p.grad) changes the one in your list.
    torch.zeros(p.shape) → torch.zeros_like(p)
        the sums are bf16, and stop growing when the number that is added is half a gap:
        torch.zeros(p.shape) is float32.
    p.grad = None →
        p.grad is not removed: the next backward adds to it, so it counts twice, and its bytes stay;
        set p.grad = None in the hook.
    total.add_(p.grad) → total.copy_(total.bfloat16() + p.grad)
        the sum is rounded to bf16 in each addition, so it stops growing: add the gradient to the
        float32 sum itself.
    total.add_( → total.copy_(
        only the last backward counts: add to the sum, do not overwrite it.
    lambda p, total=total: → lambda p:
        all hooks add to the same sum, the last one: a function made in a loop looks a name up when
        it is called; bind it by a default argument.
    total.add_( → total.sub_(
        the sums have the wrong sign.
    """,
    changes="parameters",
)

# 7.3


def round_by_chance(x, generator) -> torch.Tensor:
    """``x``, float32, as bf16: one of its two neighbours, so that the mean of many roundings is
    ``x``.
    """
    low = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, generator=generator)
    upper = (x.view(torch.int32) + low) & -(1 << 16)
    return upper.view(torch.float32).bfloat16()


# (shape, the neighbour nearer to 0, the share of the gap that x is above it, the gap)
PLACES = (
    ((4000, 5), 1.0, 0.3, 2**-7),
    ((5, 4000), -192.0, 0.3, -1.0),
    ((20000,), 2**-15, 0.8, 2**-22),
)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rounding_cases(answer):
    for number, (shape, at, share, gap) in enumerate(PLACES):
        x = at + share * gap
        rounded = answer(torch.full(shape, x), seeded(number))
        gaps = (rounded.double() - at) / gap + 0.0  # 0, not -0
        name = f"{x:.9g} in a tensor of {shape}, counted in gaps from the neighbour {at:.9g}"
        yield f"{name}: which results there are", gaps.unique()[:4].tolist()
        yield f"{name}: their mean", gaps.mean().item()
    yield "the dtype of the result", rounded.dtype
    exact = torch.tensor([0, 1, -3.5, 2**-20])
    yield "[0, 1, -3.5, 2**-20], which bf16 holds", answer(exact, seeded(1))
    x, used = torch.linspace(-3, 3, 999), seeded(1)
    first = answer(x, used)
    for words, generator in (("with the same seed", seeded(1)), ("used again", used)):
        is_same = torch.equal(first, answer(x, generator))
        yield f"whether a generator {words} gives the same", is_same


ROUNDING = Exercise(
    "7.3",
    round_by_chance,
    rounding_cases,
    """
    upper.view(torch.float32).bfloat16() → x.bfloat16()
        this rounds to the nearest, every time: an update below half a gap is lost every time too.
    low = torch.randint(0, 1 << 16 → low = 65535 * torch.randint(0, 2
        each neighbour gets the same chance, wherever x is: the nearer one must get a greater
        chance.
    (x.view(torch.int32) + low) → x.view(torch.int32)
        the result is always the neighbour nearer to 0, as if the lower bits were cut off: add a
        random number to them first.
    & -(1 << 16) →
        after the random number was added, .bfloat16() rounds once more, to the nearest: cut the
        lower 16 bits off first.
    , generator=generator →
        the generator has no effect: pass it to torch.randint (or rand), so that a run can be
        repeated.
    x.shape → (1,)
        all elements get the same random number, so they go up or down together: draw one for each,
        x.shape.
    1 << 16, x.shape → 1 << 15, x.shape
        the random integers are too small: the lower half has 16 bits, so they go up to 2**16 - 1.
    """,
    tolerance=0.1,
)

# 7.4


def master_step(weights, masters, lr) -> None:
    """One step of gradient descent: the float32 ``masters`` take it, and each weight becomes its
    master, rounded.
    """
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            if weight.grad is not None:
                master -= lr * weight.grad.float()
                weight.copy_(master)


# (lr, what each gradient is full of); a weight without a gradient stays as it is.
STEPS = (
    (0.3, (0.75, -1.25, 2.0, 0.0625)),
    (0.003, (1.5, None, 0.375, 0.5)),
    (0.1, (-0.75, 0.3125, 2.0, 1.0)),
)


def master_steps(answer):
    """(name, what masters or weights are full of) after each step. Everything is made here, so that
    a tracker around it counts every byte.
    """
    weights = full_weights(1, -2, 0.5, 3)
    masters = [weight.detach().float() for weight in weights]
    name = "weights and masters 1, -2, 0.5, 3"
    for lr, gradients in STEPS:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = None
            if gradient is not None:
                weight.grad = torch.full_like(weight, gradient)
        answer(weights, list(masters), lr)
        name += f", after a step with lr {lr} and gradients {gradients}"
        yield f"{name}: the masters", averages(masters)
        yield f"{name}: the weights", averages(weights)


def master_cases(answer):
    run = measured(lambda: list(master_steps(answer)), MASTER_CARD)
    yield from run.value
    yield "the bytes, with float32 copies of one tensor at a time", run


MASTER = Exercise(
    "7.4",
    master_step,
    master_cases,
    """
    master -= lr * weight.grad.float() → weight -= lr * weight.grad
    weight.copy_(master) →
        the update goes into the weights themselves, where bf16 loses it: subtract it from the
        master, then copy.
    master -= lr → master = master - lr
        the given masters have not changed: `master = …` and `masters[i] = …` put a new tensor
        in the place of a master; master -= … changes the master itself.
    weight.copy_(master) →
    master -= lr → weight.copy_(master); master -= lr
        the weights are one step behind: the master takes the update first, and then the weight
        becomes the master, rounded.
    weight.copy_(master) → weight -= lr * weight.grad
        the weights take a step of their own, in bf16: copy the master into them, which rounds it.
    weight.copy_(master) → weight.copy_(master); master.copy_(weight)
        the master becomes the rounded weight after the step, so what was rounded away is lost: only
        the weight is rounded.
    master -= lr → master.copy_(weight); master -= lr
        the master is made from the weight in each step, so what was rounded away is lost: keep the
        master from step to step.
    weight.copy_(master) →
        the masters change, but the model does not: the weights are never written.
    weight.grad.float() → weight.grad
        lr * grad is computed in bf16, and so rounded: convert the gradient to float32 first.
    """,
    changes="weights masters",
)

# 7.5


def scaled_step(optimizer, scale, good, patience):
    """Divide all gradients by ``scale`` and step, unless one is not finite.

    Returns the next (scale, good steps in a row).
    """
    gradients = [
        p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]
    for gradient in gradients:
        gradient.div_(scale)
    if not all(gradient.isfinite().all() for gradient in gradients):
        return scale / 2, 0
    optimizer.step()
    return (scale * 2, 0) if good + 1 == patience else (scale, good + 1)


# (scale, good, patience, which weight's gradient has a number of its own, that number). Scales are
# powers of two, which divide without rounding; the last ones are beyond the limits that people
# write.
CALLS = (
    (1024.0, 1, 4, 0, 4.0),
    (1024.0, 2, 3, 3, 4.0),
    (1024.0, 1, 3, 1, math.inf),
    (2.0, 1, 2, 0, math.nan),
    (2.0**32, 0, 1, 1, 4.0),
    (2.0**-24, 3, 5, 3, -math.inf),
)


def scaled_cases(answer):
    for scale, good, patience, place, own in CALLS:
        divided = torch.tensor([[1.0, -2.0], [0.5, 2.0], [0.0, 0.0], [-1.0, 0.25]])
        divided[place, 1] = own
        weights = nn.ParameterList([torch.ones(2) for _ in divided])
        for weight, numbers in zip(weights, divided, strict=True):
            weight.grad = numbers * scale
        weights[2].grad = None
        optimizer = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:]}], lr=0.125)
        given = f"gradients {scale:g} times {divided.tolist()}, but None for the third"
        name = f"scale {scale:g}, good {good}, patience {patience}, {given}"
        yield f"{name}: what is returned", answer(optimizer, scale, good, patience)
        # A step that is skipped may leave all gradients as they were, and any may set them to None.
        factors = gradients_of(weights) / flat(divided)
        factors = factors[factors.isfinite()].unique()
        yield f"{name}: by how many different numbers gradients were divided", max(1, len(factors))
        yield f"{name}: the weights, which were 1, after SGD with lr 0.125", weights_of(weights)


SCALED = Exercise(
    "7.5",
    scaled_step,
    scaled_cases,
    """
    gradient.div_(scale) →
        the gradients that the optimizer gets are still scaled: divide them by the scale first, in
        place.
    return scale / 2, 0 → optimizer.step(); return scale / 2, 0
        the optimizer steps on gradients that are not finite, which destroys the weights: skip that
        step.
    for gradient in gradients): → for gradient in gradients[-1:]):
        only the last gradient decides: the loop must remember if any gradient of any group is not
        finite.
    gradient.isfinite().all() → not gradient.isinf().any()
        NaN passes this check, but it is not finite either (inf - inf gives NaN): isfinite() finds
        both.
    return scale / 2, 0 → return scale / 2, good
        good steps are counted across a skipped one: they must be in a row, so begin again at 0.
    good + 1 == patience → good == patience
        the scale does not double in the step with which `good` reaches `patience`: count this step
        first, and then compare.
    for group in optimizer.param_groups for → for group in optimizer.param_groups[:1] for
        only the first group's gradients are divided and looked at: go through all of
        `optimizer.param_groups`.
    gradient.div_(scale) → if not gradient.div_(scale).isfinite().all(): return scale / 2, 0
        the loop ends at the first gradient that is not finite, and the others stay multiplied by
        the scale: divide all of them first, and then decide.
    """,
)

# 7.6

FEATURES_CARD = "4.9 MB"


def features(model, x):
    """``model(x)`` under bf16 autocast, without a graph and without a bf16 copy of every weight."""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        return model(x)


def features_cases(answer):
    blocks = [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(16)
    ]
    model, x = nn.Sequential(*blocks), torch.randn(8, WIDTH)
    run = measured(lambda: answer(model, x), FEATURES_CARD, model=model)
    yield "the numbers that the model returns for x under bf16 autocast", run.value
    yield "the dtype of the result", run.value.dtype
    yield "whether the result has a graph", run.value.requires_grad
    yield "the bytes, with no graph and no copies of all weights", run


FEATURES = Exercise(
    "7.6",
    features,
    features_cases,
    """
    , cache_enabled=False →
        autocast's cache keeps a bf16 copy of every weight until the with statement of autocast
        ends, which adds half of the weights' bytes: cache_enabled=False.
    torch.no_grad(), →
        a graph is built, and it keeps every layer's input and weight for a backward that never
        comes: torch.no_grad().
    torch.no_grad(), →
    , cache_enabled=False →
        a graph is built, and it keeps every layer's input and weight for a backward that never
        comes: torch.no_grad().
    torch.no_grad(), →
    return model(x) → return model(x).detach()
        a graph is built on the way, and keeps every layer's input and weight until .detach(), which
        comes too late. Open torch.no_grad() before the forward.
    =torch.bfloat16 → =torch.bfloat16, enabled=False
        everything runs in float32: nothing is computed under autocast.
    =torch.bfloat16 → =torch.bfloat16, enabled=False
    return model(x) → return model(x).bfloat16()
        everything runs in float32, and only the result is rounded: let autocast multiply the
        matrices in bf16.
    =torch.bfloat16 → =torch.float16
        this computes in float16, but bf16 was asked for.
    =torch.bfloat16 → =torch.bfloat16, enabled=False
    return model(x) → return model.bfloat16()(x.bfloat16())
        x or the weights are bf16 before the first norm, which then gets rounded numbers: leave both
        in float32, since autocast casts the inputs of matrix products by itself.
    """,
)
