"""Answers to lesson 07's exercises that were once judged wrongly or that nobody had in mind: right
ones in unusual forms, and wrong ones.
"""

import math

import torch
from torch.nn.utils import clip_grad_norm_


def number_by_number(gradients, dtype, scale):
    given = [number for number in gradients.flatten().tolist() if number != 0]
    stored = [torch.tensor(number).mul(scale).to(dtype).item() for number in given]
    return sum(number == 0 or not math.isfinite(number) for number in stored) / len(given)


def by_reciprocals(gradients, dtype, scale):
    stored = (gradients[gradients.ne(0)] * scale).to(dtype).double()
    return 1 - (stored.reciprocal().isfinite() & stored.isfinite()).double().mean()


def by_a_table(gradients, dtype, scale):
    smallest = {torch.float16: 6.0e-8, torch.bfloat16: 9.2e-41}[dtype]
    size = (gradients * scale).abs()
    gone = (size < smallest) | (size > torch.finfo(dtype).max) | size.isnan()
    return (gone & (gradients != 0)).sum().item() / (gradients != 0).sum().item()


class Sum:
    def __init__(self, p):
        self.total = torch.zeros(p.shape)
        p.register_post_accumulate_grad_hook(self)

    def __call__(self, p):
        self.total += p.grad
        p.grad = None


def adds_all(hooked):
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


def from_the_nearest(other):
    """The nearest bf16 number, or its neighbour ``other(x, nearest)``."""

    def round_by_chance(x, generator):
        near = x.bfloat16()
        beside = torch.nextafter(near, other(x, near.float()).bfloat16())
        chance = ((x - near.float()) / (beside.float() - near.float())).nan_to_num()
        return torch.where(torch.rand(x.shape, generator=generator) < chance, beside, near)

    return round_by_chance


def with_an_optimizer(weights, masters, lr):
    for weight, master in zip(weights, masters, strict=True):
        if weight.grad is not None:
            master.grad = weight.grad.float()
            torch.optim.SGD([master], lr=lr).step()
            master.grad = None
            weight.data.copy_(master)


def all_at_once(weights, masters, lr):
    wide = [weight.grad.float() for weight in weights if weight.grad is not None]
    for weight, master in zip(weights, masters, strict=True):
        if weight.grad is not None:
            master -= lr * wide.pop(0)
            weight.data.copy_(master)


def by_clipping(norm):
    """Asks for the norm of all gradients, by clipping to ``norm``."""

    def scaled_step(optimizer, scale, good, patience):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for p in parameters:
            if p.grad is not None:
                p.grad.mul_(1 / scale)
        if not clip_grad_norm_(parameters, norm).isfinite():
            return [scale / 2, 0]
        optimizer.step()
        good = (good + 1) % patience
        return [scale if good else scale * 2, good]

    return scaled_step


def block_by_block(model, x):
    with torch.inference_mode():
        for block in model:
            with torch.autocast("cpu", torch.bfloat16):
                x = block(x)
    return x


def leaves_the_cache_off(model, x):
    torch.set_autocast_cache_enabled(False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model(x)


STEP = "master -= lr * weight.grad.float()"
LOW = "dtype=torch.int32, generator=generator)"
DIVIDE = "gradient.div_(scale)"
RETURN = "return model(x)"
RIGHT = {
    "7.1": [number_by_number, by_reciprocals, "gradients * scale → gradients.double() * scale"],
    "7.2": [
        lambda parameters: [Sum(p).total for p in parameters],
        adds_all(slice(None)),
        "total.add_(p.grad) → torch.add(total, p.grad, out=total)",
    ],
    "7.3": [
        from_the_nearest(lambda x, near: torch.where(x > near, math.inf, -math.inf)),
        f"{LOW} → generator=generator).int()",
    ],
    "7.4": [
        with_an_optimizer,
        f"{STEP} → g = weight.grad.float(); u = lr * g; master -= u",
        f"{STEP} → master.data = master - lr * weight.grad.float()",
        "weight.copy_(master) → weight.data = master.to(weight.dtype)",
    ],
    "7.5": [
        by_clipping(math.inf),
        f"{DIVIDE} → gradient.copy_(gradient.double() / scale)",
        "optimizer.step() → optimizer.step(); optimizer.zero_grad()",
        """
        gradient.div_(scale) →
        optimizer.step() → [gradient.div_(scale) for gradient in gradients]; optimizer.step()
        """,
    ],
    "7.6": [
        block_by_block,
        f"{RETURN} → return torch.cat([model(row[None]) for row in x])",
        "torch.no_grad() → torch.inference_mode()",
    ],
}
WRONG = {
    "7.1": [
        by_a_table,
        "gone = (stored == 0) → gone = (stored.abs() < torch.finfo(dtype).tiny)",
        "gradients != 0 → gradients * scale != 0",
        "gradients != 0 → (gradients != 0) & gradients.isfinite()",
        "gradients * scale → gradients.mul_(scale)",
        "return (gone → return round((gone\nnonzero.sum().item() → nonzero.sum().item(), 2)",
    ],
    "7.2": [
        adds_all(slice(1)),
        adds_all(slice(-1, None)),
        "p.grad = None → p.grad.zero_()",
        "torch.zeros(p.shape) → torch.zeros(p.shape, dtype=torch.float64)",
        "sums = [torch → parameters[0].data = parameters[0].data.float(); sums = [torch",
    ],
    "7.3": [
        from_the_nearest(lambda x, near: torch.full_like(x, math.inf)),
        "x.shape → x.shape[-1:]",
        "generator=generator → generator=torch.Generator().manual_seed(0)",
        "generator=generator → generator=torch.Generator().set_state(generator.get_state())",
        ".bfloat16() →",
        "1 << 16, x.shape → 1 << 15, x.shape",
    ],
    "7.4": [
        all_at_once,
        "if weight.grad is not None → if weights[1].grad is not None",
        f"{STEP} → weight.requires_grad_(False); {STEP}",
        "weight.copy_(master) → weight.copy_(master); weight.data = weight.data.float()",
        "weight.copy_(master) → weight.copy_(master); weight -= lr * weight.grad",
    ],
    "7.5": [
        by_clipping(1.0),
        "return (scale * 2, 0) → return (min(scale * 2, 2.0**24), 0)",
        "return scale / 2, 0 → return max(scale / 2, 1e-6), 0",
        "optimizer.param_groups → optimizer.param_groups[1:]",
        f"{DIVIDE} → gradient.div_(scale if gradient.isfinite().all() else 1)",
        f"{DIVIDE} → gradient.div_(scale).nan_to_num_(0.0, 0.0, 0.0)",
        f"{DIVIDE} → gradient.div_(scale); optimizer.step()",
    ],
    "7.6": [
        leaves_the_cache_off,
        f"{RETURN} → return model.eval()(x)",
        "torch.no_grad(), →\nreturn model(x) → return model(x).detach()",
        f"{RETURN} → return model(x.bfloat16())",
        f"{RETURN} → return model(x).float()",
    ],
}
