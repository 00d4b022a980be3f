"""Answers to exercises 8.2 and 9.3 that heard too little; see answers_numbers.py."""

import torch
from torch.utils.flop_counter import FlopCounterMode

RIGHT, WRONG = {}, {}
FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _count(step, formula):
    with FlopCounterMode(display=False, custom_mapping={FUSED: formula} if formula else {}) as counter:
        step()
    return counter.get_total_flops()


def _repeated(of, *, first=True):
    """``of(rows, heads, queries, size, keys)``: the formula; ``first``: whether the plain step's counter has it."""

    def formula(query, key, value, *args, out_val=None, **kwargs):
        return of(*query, key[2])

    return lambda plain, again: _count(again, formula) - _count(plain, first and formula)


def _exact(rows, heads, queries, size, keys):
    return 4 * rows * heads * queries * size * keys


def _with(formula):
    return lambda plain, again: _count(again, formula) - _count(plain, formula)


def _not_called(plain, again):
    counters = []
    for step in (plain, again):
        with FlopCounterMode(display=False, custom_mapping={FUSED: lambda *_, **__: 0}) as counter:
            step()
        counters.append(counter)
    return counters[1].get_total_flops - counters[0].get_total_flops


WRONG["8.2"] = {
    "fewer arguments": (_with(lambda query, key, value, *args: 0), r"\*\*kwargs"),
    "shapes of shapes": (_with(lambda query, *rest, **kwargs: query.shape[0]), "shapes already"),
    "no return": (_with(lambda *shapes, **kwargs: None), "returns nothing"),
    "the number itself": (_with(4), "without calling it"),
    "total not called": (_not_called, "call it"),
    "keys squared": (_repeated(lambda b, h, q, d, k: 4 * b * h * k * k * d), "squares the keys"),
    "size for keys": (_repeated(lambda b, h, q, d, k: 4 * b * h * q * d * d), r"key\[2\]"),
    "a quarter": (_repeated(lambda b, h, q, d, k: b * h * q * d * k), "a quarter"),
    "softmax too": (_repeated(lambda b, h, q, d, k: _exact(b, h, q, d, k) + b * h * q * k), "has to make 3,600, and makes 3,750"),
    "one counter with it": (_repeated(_exact, first=False), "one of the two counters"),
}  # fmt: skip


def _lion(momentum=lambda self, p: self.state[p].setdefault("exp_avg", torch.zeros_like(p)), *,
          decay=lambda p, lr, share: p.mul_(1 - lr * share), blend=lambda m, g, beta: m.lerp(g, 1 - beta),
          move=lambda p, blend, lr: p.sub_(lr * blend.sign()), keep=lambda m, g, beta: m.lerp_(g, 1 - beta),
          groups=lambda self: self.param_groups, betas=None):  # fmt: skip
    """A ``Lion``, by its parts."""

    def init(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super(made, self).__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in groups(self):
            for p in (p for p in group["params"] if p.grad is not None):
                m, (beta1, beta2) = momentum(self, p), betas or group["betas"]
                decay(p, group["lr"], group["weight_decay"])
                move(p, blend(m, p.grad, beta1), group["lr"])
                keep(m, p.grad, beta2)

    made = type("Lion", (torch.optim.Optimizer,), {"__init__": init, "step": step})
    return made


WRONG["9.3"] = {
    "no momentum made": (_lion(lambda self, p: self.state[p]["exp_avg"]), "empty at first"),
    "one momentum for all": (_lion(lambda self, p: self.state.setdefault("m", torch.zeros_like(p))), "momentum of its own"),
    "never updated": (_lion(keep=lambda m, g, beta: m.lerp(g, 1 - beta)), "never updated"),
    "beta2 of the gradient": (_lion(keep=lambda m, g, beta: m.lerp_(g, beta)), "takes beta2 of the gradient"),
    "a sum": (_lion(keep=lambda m, g, beta: m.mul_(beta).add_(g)), "the whole gradient"),
    "kept by beta1": (_lion(blend=lambda m, g, beta: m.lerp_(g, 1 - beta), keep=lambda m, g, beta: m), "takes 1 - beta1"),
    "default betas": (_lion(betas=(0.9, 0.99)), r"group\["),
    "sign in the momentum": (_lion(keep=lambda m, g, beta: m.lerp_(g.sign(), 1 - beta)), "takes the gradient's sign"),
    "old momentum alone": (_lion(blend=lambda m, g, beta: m), "first step"),
    "no lr": (_lion(move=lambda p, blend, lr: p.sub_(blend.sign())), "moves by 1 where lr is 0.1"),
    "less, whatever p is": (_lion(decay=lambda p, lr, share: p.sub_(lr * share)), "itself is subtracted"),
    "shrinks by lr": (_lion(decay=lambda p, lr, share: p.mul_(1 - lr)), "without decay"),
    "first group": (_lion(groups=lambda self: self.param_groups[:1]), "one group alone"),
}  # fmt: skip
