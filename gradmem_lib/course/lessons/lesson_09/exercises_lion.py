"""Lesson 09's exercise about an optimizer that keeps one state, and walks by a sign."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....measure.tracker import MemoryTracker
from ...judge.compare import difference
from ...judge.exercise import Exercise, Mistake, Seen
from ..shared.settings import flat


class Lion(torch.optim.Optimizer):
    """A step of ``lr`` along the sign of a blend of momentum and gradient (Chen et al. 2023,
    algorithm 2): one state.
    """

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
    """A wrong ``Lion``, by what it does to one parameter: ``step(p, m, gradient, group,
    defaults)``.
    """

    @torch.no_grad()
    def every(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    step(p, m, p.grad, group, self.defaults)

    return type("Lion", (Lion,), {"step": every})


@torch.no_grad()
def _keeps_the_blend(p, m, g, group, defaults):
    beta1, beta2 = group["betas"]
    blend = m.lerp(g, 1 - beta1)
    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * blend.sign())
    m.lerp_(blend, 1 - beta2)


@torch.no_grad()
def _decays_inside(p, m, g, group, defaults):
    beta1, beta2 = group["betas"]
    direction = m.lerp(g, 1 - beta1) + group["weight_decay"] * p
    p.sub_(group["lr"] * direction.sign())
    m.lerp_(g, 1 - beta2)


def _one(*, early=False, swapped=False, sign=torch.sign, blend=True, decay=True, own=True):
    def step(p, m, g, group, defaults):
        lr, decays = group["lr"] if own else defaults["lr"], group["weight_decay"]
        beta1, beta2 = reversed(group["betas"]) if swapped else group["betas"]
        g = g if decay else g + decays * p
        if early:
            m.lerp_(g, 1 - beta2)
        p.mul_(1 - lr * decays if decay else 1)
        direction = g
        if early:
            direction = m
        elif blend:
            direction = m.lerp(g, 1 - beta1)
        p.sub_(lr * sign(direction))
        if not early:
            m.lerp_(g, 1 - beta2)

    return _lion(step)


def _observe_lion(candidate):
    generator = torch.Generator().manual_seed(3)
    shapes = ((40, 10), (30,), (20, 5))
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    narrow = nn.Parameter(torch.randn(64, generator=generator).bfloat16())
    groups = [
        {"params": weights[:1]},
        {"params": [*weights[1:], narrow], "lr": 0.03, "weight_decay": 0.5},
    ]
    optimizer = candidate(groups, lr=0.1, betas=(0.8, 0.95))
    found, begin, changed = {}, flat(weights), 0
    for number in range(1, 7):
        for i, p in enumerate((*weights, narrow)):
            if number != 2 or i != 1:
                size = (3.0, 1.0, -0.4)[number % 3]
                p.grad = (torch.randn(p.shape, generator=generator) + size).to(p.dtype)
            else:
                p.grad = None
        before, gradients = (
            flat(weights),
            [p.grad if p.grad is None else p.grad.clone() for p in weights],
        )
        optimizer.step()
        now = flat(weights)
        changed += sum(
            g is not None and (p.grad is None or not torch.equal(p.grad, g))
            for p, g in zip(weights, gradients, strict=True)
        )
        if number in (1, 2, 6):
            found[f"after step {number}"] = {"weights": now}
        if number == 1:
            kept = [
                t
                for p in weights
                for t in optimizer.state.get(p, {}).values()
                if isinstance(t, Tensor) and t.numel() > 1
            ]
            found["step 1"] = {
                "how far the weights of the first group go": (now - before)[:400].abs(),
                "what is kept": flat(kept),
            }
    held = {
        p: [
            t
            for t in optimizer.state.get(p, {}).values()
            if isinstance(t, Tensor) and t.numel() > 1
        ]
        for p in (*weights, narrow)
    }
    resumed = _resumed(candidate, groups, optimizer)
    copies = _copies_elsewhere(candidate)
    still = nn.Parameter(torch.ones(3))
    optimizer = candidate([still], lr=0.1, betas=(0.8, 0.95))
    still.grad = torch.tensor([0.0, 1.0, -1.0])
    optimizer.step()
    after_one = still.detach().clone()
    still.grad = torch.zeros(3)
    optimizer.step()
    return Seen(
        {
            _ZERO: {"weights": after_one},
            "gradients that step() has changed": changed,
            "self.state": {
                "tensors a parameter": [len(tensors) for tensors in held.values()],
                "bytes": [sum(t.nbytes for t in tensors) for tensors in held.values()],
            },
            **found,
            _RESUMED: {"weights": resumed},
            _ELSEWHERE: copies,
            _ALL_ZERO: {"weights": still.detach()},
        },
        begin=begin,
    )


def _resumed(candidate, groups, optimizer) -> torch.Tensor:
    """The weights after one more step by another optimizer, of copies of the weights, that has made
    a step before it loads the states of this one.
    """
    copied = []
    for group in groups:
        copied.append(
            group | {"params": [nn.Parameter(p.detach().clone()) for p in group["params"]]}
        )
    resumed = candidate(copied, lr=0.1, betas=(0.8, 0.95))
    weights = [p for group in copied for p in group["params"]]
    given = [p.detach().clone() for p in weights]
    for p in weights:
        p.grad = torch.ones_like(p)
    resumed.step()
    resumed.load_state_dict(optimizer.state_dict())
    for p, before in zip(weights, given, strict=True):
        p.data.copy_(before)
        # About 0 and as large as the momentum: so the step depends on both.
        p.grad = torch.linspace(-3, 3, p.numel()).view_as(p).to(p.dtype)
    resumed.step()
    return flat(p for p in weights if p.dtype == torch.float32)


def _copies_elsewhere(candidate) -> int:
    """How many tensors as large as the weight are alive after two steps, beside the weight, its
    gradient and ``self.state``.
    """
    weight = nn.Parameter(torch.ones(64, 64))
    optimizer = candidate([weight], lr=0.1, betas=(0.8, 0.95))
    with MemoryTracker(live=False) as tracker:
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        held = [weight, weight.grad, *optimizer.state[weight].values()]
        storages = [t.untyped_storage() for t in held if isinstance(t, Tensor)]
        known = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return (tracker.current.total - sum(known.values())) // weight.nbytes


_ZERO = "a number whose gradient is 0"
_ALL_ZERO = "a whole gradient of 0, in the step after it"
_ELSEWHERE = "tensors as large as a weight, beside self.state"
_RESUMED = "a step after load_state_dict, by an optimizer that has stepped before"


def _momentum_of(share: float) -> str:
    """What to say of a momentum that has this share of the first gradient, where 1 - beta2 = 0.05
    is right and beta1 is 0.8.
    """
    known = (
        (
            0,
            (
                "is still 0 after a step, as if it were never updated: m.lerp(…) makes a new "
                "tensor, and m.lerp_(…) changes m."
            ),
        ),
        (
            0.2,
            (
                "takes 1 - beta1 of the gradient: use beta1 for the step's blend, and beta2 for "
                "the momentum that is kept."
            ),
        ),
        (
            0.95 * 0.2 + 0.05,
            (
                "is blended twice: the step's blend by beta1 is a new tensor, m.lerp(…), and m "
                "changes only by beta2."
            ),
        ),
        (
            0.95,
            (
                "takes beta2 of the gradient: it keeps beta2 of itself, and takes 1 - beta2 of the "
                "gradient."
            ),
        ),
        (
            1,
            (
                "is the whole gradient after a step: it starts at zeros, and takes 1 - beta2 of "
                "the gradient."
            ),
        ),
        (0.01, 'is made by the default betas: read group["betas"].'),
    )
    says = next((says for wrong, says in known if abs(share - wrong) < 1e-3), "")
    return (
        f"the momentum {says}"
        if says
        else (
            "another momentum is kept: it starts at zeros, and becomes beta2 * m + (1 - beta2) * "
            "g, from the old m."
        )
    )


def _explain_lion(got, expected):
    says = _why_state(got, expected)
    if says:
        return says
    if got["gradients that step() has changed"]:
        return (
            "step() changes gradients: it may only read p.grad, and the caller calls zero_grad()."
        )
    begin = expected.notes["begin"]
    first, second = (
        got[step]["weights"] - expected[step]["weights"]
        for step in ("after step 1", "after step 2")
    )
    says = _why_still(got, begin) or _why_first(got, expected, first, begin)
    if says:
        return says
    kept, momentum = (seen["step 1"]["what is kept"] for seen in (got, expected))
    if difference(kept, momentum, 1e-3):
        return _why_momentum(kept, momentum)
    if second[:400].abs().max() > 1e-3:
        return (
            "the step takes the sign of another blend: beta1 * m + (1 - beta1) * g, with m from "
            "before it is updated."
        )
    if second[400:430].abs().max() > 1e-3:
        return (
            "a parameter changes in a step in which its p.grad is None: leave it as it is, and do "
            "not shrink it either."
        )
    weights, before = (got[step]["weights"] for step in ("after step 2", "after step 1"))
    if torch.equal(weights[430:], before[430:]):
        return "a parameter without a gradient stops the loop: skip only this parameter."
    return _why_zeros(got, expected) or _why_later(got, expected) or _why_outside(got, expected)


def _why_later(got, expected) -> str | None:
    """What is said if the weights differ only in later steps, and only those of the parameter that
    had no gradient in step 2.
    """
    last = got["after step 6"]["weights"] - expected["after step 6"]["weights"]
    of_the_parameter = last[400:430].abs().max() > 1e-3
    of_others = max(last[:400].abs().max(), last[430:].abs().max()) > 1e-3
    if of_the_parameter and not of_others:
        return (
            "in a step in which p.grad is None, something changes that this parameter's later "
            "steps read: leave its momentum as it is."
        )
    return None


def _why_zeros(got, expected) -> str | None:
    """What is said of a number whose gradient is 0, and of a parameter that has only such ones."""
    once, wanted = (seen[_ZERO]["weights"] for seen in (got, expected))
    if once[0].isnan() and torch.equal(once[1:], wanted[1:]):
        return (
            "a number whose blend is 0 becomes nan, as 0 / 0 is: take blend.sign(), which is 0 "
            "there."
        )
    if torch.equal(once, wanted) and torch.equal(got[_ALL_ZERO]["weights"], once):
        return (
            "a parameter whose whole gradient is 0 does not move: its momentum still moves it, so "
            "skip it only where p.grad is None."
        )
    return None


def _why_outside(got, expected) -> str | None:
    """What is said of a momentum, or a copy of it, that is not in ``self.state`` alone."""
    is_right_until_then = not difference(got["after step 6"], expected["after step 6"])
    if is_right_until_then and difference(got[_RESUMED], expected[_RESUMED]):
        return (
            "the momentum is not in self.state alone: after load_state_dict your optimizer still "
            "uses its old momentum. Read it from self.state[p] in each step, and change it there."
        )
    if got[_ELSEWHERE]:
        return (
            "another tensor as large as the weight stays alive after the step, outside of "
            "self.state: one momentum is all that Lion keeps."
        )
    return None


def _why_state(got, expected) -> str | None:
    """What is said of the tensors in ``self.state``."""
    tensors, wanted = (seen["self.state"]["tensors a parameter"] for seen in (got, expected))
    if not any(tensors):
        return (
            "self.state has no tensor for a parameter, so a checkpoint forgets the momentum: "
            "keep it in self.state[p]."
        )
    if tensors[0] and not any(tensors[1:]):
        return (
            "only one group moves: self.param_groups is a list, and each of its groups has "
            "parameters."
        )
    if max(tensors) > 1:
        return (
            f"{max(tensors)} tensors of state are kept for a parameter: Lion needs one, the "
            "momentum."
        )
    if got["self.state"] != expected["self.state"] and tensors == wanted:
        return (
            "the state of a bf16 parameter has another dtype than the parameter: "
            "torch.zeros_like(p) keeps it."
        )
    return None


_FAR = "how far the weights of the first group go"


def _why_still(got, begin) -> str | None:
    """What is said where no weight of the first group moves in the first step."""
    if got["step 1"][_FAR].any():
        return None
    if not torch.equal(got["after step 6"]["weights"][:400], begin[:400]):
        return (
            "nothing moves in the first step, where m is 0: take the sign of the blend, which "
            "includes the gradient."
        )
    return "no weight has moved: `p = …` names a new tensor; change p in place, as p.sub_(…) does."


def _why_first(got, expected, off, begin) -> str | None:
    """What is said of the weights after the first step. ``off``: what is too much in each weight,
    which was ``begin``. The second group begins at 400.
    """
    if off[:400].abs().max() > 1e-3:
        return _why_step(got, expected, off[:400] / begin[:400])
    if off[400:].abs().max() > 1e-6:
        return _why_decay(off[400:], begin[400:])
    return None


def _why_step(got, expected, share) -> str:
    """What is said of the first group, which has no decay. ``share``: by which share of itself
    each weight is off.
    """
    far, wanted = (seen["step 1"][_FAR] for seen in (got, expected))
    if (share - share[0]).abs().max() < 1e-3:
        return "p shrinks in a group without decay: the factor 1 - lr * weight_decay is 1 there."
    if difference(far, wanted) and (far - far[0]).abs().max() < 1e-4:
        return (
            f"each weight moves by {far[0]:.3g} where lr is 0.1: a step is lr times a sign, "
            "and nothing else."
        )
    if difference(far, wanted):
        return "the weights do not move by lr: a step is lr times a sign, and nothing else."
    return "the weights move in the wrong direction: subtract the sign."


def _why_decay(off, begin) -> str:
    """What is said of the second group, which has lr 0.03 and a decay of 0.5."""
    share = off / begin
    if (share - 0.03 * 0.5).abs().max() < 1e-3:
        return (
            "p does not shrink: multiply it by 1 - lr * weight_decay before the step by the sign."
        )
    if (share - share[0]).abs().max() < 1e-3:
        return (
            "p shrinks by the wrong factor: use 1 - lr * weight_decay, with both numbers "
            "from its own group."
        )
    if (off - 0.03 * 0.5 * (begin - 1)).abs().max() < 1e-3:
        return (
            "lr * weight_decay itself is subtracted: subtract this share of p, by p.mul_(1 "
            "- lr * weight_decay)."
        )
    if off.abs().max() - off.abs().min() < 1e-6:
        return "p must shrink first, and then move by the sign."
    return "the second group moves wrongly: read lr and weight_decay from its own `group`."


def _why_momentum(kept, momentum) -> str:
    share = (kept @ momentum / momentum.square().sum()).item()
    if not difference(kept, share * momentum, 1e-3):
        return _momentum_of(0.05 * share)
    if (kept.abs() - kept[0].abs()).abs().max() < 1e-4:
        return (
            "the momentum takes the gradient's sign: it becomes beta2 * m + (1 - beta2) * "
            "g, with g itself."
        )
    return (
        "another momentum is kept: it starts at zeros, and becomes beta2 * m + (1 - beta2) "
        "* g, from the old m."
    )


EXERCISES = (
    Exercise(
        id="9.3",
        title="Lion: a sign, and one state",
        difficulty=2,
        minutes=4,
        trains="what an optimizer keeps, and what its update needs",
        reference=Lion,
        observe=_observe_lion,
        explain=_explain_lion,
        tolerance=1e-4,
        raises=(
            (
                r"KeyError",
                (
                    "self.state[p] is empty at first: make the momentum there, as "
                    'self.state[p].setdefault("exp_avg", torch.zeros_like(p)) does.'
                ),
            ),
            (
                r"must match the size",
                "parameters have different shapes: each has its own momentum, in self.state[p].",
            ),
            (
                r"NoneType",
                (
                    "skip a parameter whose p.grad is None. self.state[p] has no momentum before "
                    "the first step, and .get(…) gives None there: make it, and keep it in "
                    "self.state[p]."
                ),
            ),
            (
                r"expected dtype \w+ for .* but got dtype",
                (
                    "one of the parameters is in bf16, and its momentum has another dtype: "
                    "torch.zeros_like(p) has the parameter's."
                ),
            ),
            (
                r"no attribute 'param",
                (
                    "an optimizer's parameters are in self.param_groups: for group in "
                    'self.param_groups, for p in group["params"].'
                ),
            ),
        ),
        mistakes=(
            Mistake(
                "momentum first",
                _one(early=True),
                (
                    "the momentum is updated before the step: the step takes the sign of a blend "
                    "of the old momentum by beta1; use beta2 for the momentum that is kept."
                ),
            ),
            Mistake(
                "swapped",
                _one(swapped=True),
                (
                    "the betas are swapped: use beta1 for the step's blend, beta2 for the momentum "
                    "that is kept."
                ),
            ),
            Mistake(
                "no sign",
                _one(sign=lambda blend: blend),
                (
                    "the blend itself is subtracted: Lion takes its sign, so that every weight "
                    "moves by lr."
                ),
            ),
            Mistake(
                "gradient alone",
                _one(blend=False),
                "only the gradient decides the sign: momentum has no effect.",
            ),
            Mistake(
                "decay in the gradient",
                _one(decay=False),
                (
                    "the decay is added to the gradient, but only the sign is used: shrink p "
                    "itself, as AdamW does."
                ),
            ),
            Mistake(
                "decay inside the sign",
                _lion(_decays_inside),
                (
                    "the decay is inside the sign, so it can only turn a step round: shrink p "
                    "itself, before the step."
                ),
            ),
            Mistake(
                "keeps the blend",
                _lion(_keeps_the_blend),
                (
                    "the step's blend goes into the momentum that is kept: m becomes beta2 * m + "
                    "(1 - beta2) * g, with the gradient itself."
                ),
            ),
            Mistake(
                "one rate",
                _one(own=False),
                "every group steps by the same rate: read lr from its group.",
            ),
        ),
    ),
)
