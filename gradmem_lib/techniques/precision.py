"""Training in 16 bits: float32 master weights, stochastic rounding, and a scaled loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..compat.fake_tensors import has_numbers
from .adam import AdamW, adam_step

SLICE = 2**18  # numbers of a tensor that a step copies to float32 at a time


class KeepsStateDtypes(AdamW):
    """An AdamW whose ``load_state_dict`` keeps the saved dtypes of the states.

    torch casts states to the parameter's dtype: a float32 copy of the weights would be rounded to
    bf16, and 8-bit codes would become bf16 numbers. Copies and pickles keep the original's
    switches.
    """

    def __getstate__(self) -> dict:
        own = ("foreach", "fused", "generator", "_codes")
        return super().__getstate__() | {
            name: value for name, value in vars(self).items() if name in own
        }

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, index in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(index, {}).items():
                    if isinstance(value, Tensor) and name != "step":
                        self.state[p][name] = value.to(p.device, copy=True)


class MasterAdamW(KeepsStateDtypes):
    """AdamW for bf16 parameters that keeps the exact weights, and its moments, in float32.

    A bf16 weight has 8 bits of precision: an update below 1/256 of it would be lost. Here updates
    go to the float32 copy, and the parameter is that copy, rounded. If
    ``prepare`` has rounded it to bf16, the copy starts from the weights before that. It updates one
    parameter at a time, so that only one float32 gradient exists; ``foreach`` and ``fused`` need
    all of them at once.
    """

    def __init__(
        self, *arguments: Any, foreach: bool = False, fused: bool = False, **settings: Any
    ):
        super().__init__(*arguments, **settings)
        self.foreach, self.fused = foreach, fused

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            for p in with_gradient:
                if "step" not in self.state[p]:
                    self._make_state(p, self.state[p])
            if self.foreach or self.fused:
                self._update_masters(with_gradient, group)
            else:
                for p in with_gradient:
                    self._update_masters([p], group)
        return loss

    def _make_state(self, p: Tensor, state: dict) -> None:
        """``state`` may have a master: ``prepare`` knows the weights from before their rounding."""
        wide = torch.promote_types(p.dtype, torch.float32)
        master = state.get("master")
        # Others may have been loaded or received since then.
        if master is None or (has_numbers(p) and not torch.equal(master.to(p), p)):
            master = p.detach()
        state["step"] = torch.zeros((), device=p.device) if self.fused else torch.tensor(0.0)
        state["master"] = master.to(p.device, wide)
        state["exp_avg"] = torch.zeros_like(state["master"])
        state["exp_avg_sq"] = torch.zeros_like(state["master"])

    def _update_masters(self, parameters: list[Tensor], group: dict) -> None:
        from torch.optim.adamw import adamw

        states = [self.state[p] for p in parameters]
        masters, m, v, steps = (
            [s[k] for s in states] for k in ("master", "exp_avg", "exp_avg_sq", "step")
        )
        gradients = [p.grad.to(master.dtype) for p, master in zip(parameters, masters, strict=True)]
        (beta1, beta2), settings = (
            group["betas"],
            {k: group[k] for k in ("lr", "eps", "weight_decay")},
        )
        adamw(
            masters,
            gradients,
            m,
            v,
            [],
            steps,
            foreach=self.foreach,
            fused=self.fused,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            **settings,
        )
        for p, master in zip(parameters, masters, strict=True):
            p.copy_(master)


def stochastic_round(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round ``x`` (float32, any shape) to bf16: to one of its two neighbours, to the nearer one
    with the higher probability.

    The mean over many roundings is ``x`` itself. So if many updates are each too small for a bf16
    weight, the right share of them takes effect (Gupta et al. 2015). A bf16 number is the upper
    half of a float32 number. A random lower half is added: the larger the lower half of ``x``, the
    more often the sum carries into the upper half.
    """
    noise = torch.randint(
        0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator
    )
    return noise.add_(x.view(torch.int32)).bitwise_and_(-1 << 16).view(torch.float32).bfloat16()


class StochasticAdamW(KeepsStateDtypes):
    """AdamW for bf16 parameters that computes in float32 and rounds weights and both moments
    stochastically. It needs 8 bytes a parameter (with its gradient), as in pure bf16, and no update
    is lost on average.

    ``generator``: the source of random numbers, by default torch's own for the device. With several
    processes, give each a generator with the same seed: else their copies of the weights drift
    apart. Parameters in other dtypes are updated as usual.
    """

    def __init__(self, *arguments: Any, generator: torch.Generator | None = None, **settings: Any):
        super().__init__(*arguments, **settings)
        self.generator = generator

    def _update(self, p: Tensor, state: dict, group: dict) -> None:
        if p.dtype != torch.bfloat16:
            return super()._update(p, state, group)
        # One slice at a time, so that the float32 copies stay small for a large embedding.
        tensors = [
            torch.atleast_1d(t) for t in (p.detach(), p.grad, state["exp_avg"], state["exp_avg_sq"])
        ]
        rows = max(1, SLICE * len(tensors[0]) // max(1, p.numel()))
        for weight, grad, m, v in zip(*(t.split(rows) for t in tensors), strict=True):
            exact = weight.float(), grad.float(), m.float(), v.float()
            adam_step(*exact, float(state["step"]), group)
            for narrow, wide in ((weight, exact[0]), (m, exact[2]), (v, exact[3])):
                narrow.copy_(stochastic_round(wide, self.generator))
        return None


class GradScaler:
    """Keeps float16 gradients from rounding to zero: it multiplies the loss by ``factor``, and
    divides the gradients by it.

    If a gradient is not finite, ``factor`` was too large: the step is skipped and ``factor`` is
    halved. After ``growth_interval`` good steps in a row, ``factor`` is doubled. The names are
    those of ``torch.amp.GradScaler``.
    """

    def __init__(self, init_scale: float = 2.0**16, growth_interval: int = 2000):
        self.factor, self.growth_interval = init_scale, growth_interval
        self.good_steps = 0
        # Since the last update: whether the divided gradients are finite, and who has stepped.
        self.finite: dict[Optimizer, bool] = {}
        self.stepped = set[Optimizer]()

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.factor

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients in place, so that they can be clipped before ``step``.

        Raises ``RuntimeError`` if they are divided already.
        """
        if optimizer in self.finite:
            raise RuntimeError(
                "these gradients are divided already: call unscale_() once before a step, and "
                "update() after it"
            )
        largest = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None and gradient.numel():
                    gradient.div_(self.factor)
                    largest.append(torch.linalg.vector_norm(gradient, torch.inf))
        self.finite[optimizer] = all(norm.isfinite().item() for norm in largest)

    def step(self, optimizer: Optimizer) -> None:
        """Divide the gradients, if ``unscale_`` has not, then step unless one is not finite."""
        if optimizer in self.stepped:
            raise RuntimeError("call update() after each step of an optimizer")
        if optimizer not in self.finite:
            self.unscale_(optimizer)
        self.stepped.add(optimizer)
        if self.finite[optimizer]:
            optimizer.step()

    def update(self) -> None:
        finite = all(self.finite.values())
        self.finite.clear()
        self.stepped.clear()
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.factor /= 2
        elif self.good_steps == self.growth_interval:
            self.factor, self.good_steps = self.factor * 2, 0

    def get_scale(self) -> float:
        return self.factor
