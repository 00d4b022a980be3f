"""Adam and AdamW written out: two moving averages for every parameter, updated in place.

For a gradient g, at step t = 1, 2, ...:

    m = beta1 * m + (1 - beta1) * g                 first moment: where the gradient points
    v = beta2 * v + (1 - beta2) * g * g             second moment: how large it usually is
    p = p - lr * m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps)

Adam: Kingma and Ba 2015, algorithm 1. AdamW takes weight decay out of the gradient and applies it
to the parameter itself: Loshchilov and Hutter 2019, algorithm 2. Both follow ``torch.optim``'s
plain loop operation by operation, so trajectories and checkpoints are interchangeable. They need
less memory: a step makes one temporary, as large as the parameter that is being updated.
"""

from collections.abc import Callable, Iterable
from math import sqrt

import torch
from torch import Tensor
from torch.optim import Optimizer


class Adam(Optimizer):
    """Adam, with weight decay (if any) added to the gradient.

    For each parameter that has had a gradient, it keeps ``exp_avg`` (m) and ``exp_avg_sq`` (v),
    with the parameter's shape and dtype, and ``step``, one float32 number. That is 8 bytes for each
    number of a parameter in float32, 4 in bf16, and 4 more for each tensor. The first ``step()``
    allocates them.

    Args:
        params: parameters, or dicts with ``"params"`` and settings of their own, as for any
            ``torch.optim`` optimizer.
        lr: the learning rate, at least 0.
        betas: the share of their old values that m and v keep, each at least 0 and below 1.
        eps: added to the root of v, at least 0.
        weight_decay: at least 0. By default 0 in Adam, 0.01 in AdamW.

    Raises ``ValueError`` for settings outside these ranges, in any group. ``state_dict`` is that of
    ``torch.optim``.
    """

    decoupled, default_decay = False, 0.0

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
    ):
        decay = self.default_decay if weight_decay is None else weight_decay
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay}
        super().__init__(params, defaults | {"decoupled_weight_decay": self.decoupled})

    def add_param_group(self, param_group: dict) -> None:
        """Add parameters with settings of their own.

        Raises ``ValueError`` for settings that this optimizer cannot use.
        """
        if isinstance(param_group, dict):
            self._check_group(self.defaults | param_group)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict) -> None:
        """The last part of ``load_state_dict``.

        Raises ``ValueError`` for settings that this optimizer cannot use.
        """
        for group in state["param_groups"]:
            # As in torch.optim: AdamW always decouples, and Adam continues as the optimizer that
            # wrote the checkpoint.
            group["decoupled_weight_decay"] = self.decoupled or group.get(
                "decoupled_weight_decay", False
            )
            self._check_group(group)
        super().__setstate__(state)

    def _check_group(self, group: dict) -> None:
        """``ValueError`` for settings out of range, and for options of ``torch.optim`` (in a
        checkpoint) that are not here.
        """
        for setting, example in (("lr", 0.001), ("eps", 1e-8), ("weight_decay", 0.01)):
            if not group[setting] >= 0:  # written this way, it also refuses nan
                raise ValueError(
                    f"{setting}={group[setting]}: it must be at least 0, for example {example}"
                )
        betas = group["betas"]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"betas={betas}: give two numbers from 0 to below 1, such as (0.9, 0.999)"
            )
        for option in ("amsgrad", "maximize", "differentiable"):
            if group.get(option):
                raise ValueError(
                    f"{option}=True is not in this {type(self).__name__}, and without it training "
                    "would go on differently: use "
                    f"torch.optim.{'AdamW' if self.decoupled else 'Adam'}"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update every parameter that has a gradient. Returns what ``closure`` returns, if there is
        one.

        Raises ``RuntimeError`` for a sparse gradient, before anything has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = [
            (p, group) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        for p, _ in updates:
            if p.grad.layout != torch.strided:
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} has a sparse gradient, and Adam's "
                    "moments are dense: make the gradient dense (nn.Embedding(sparse=False)), or "
                    "give it to torch.optim.SparseAdam"
                )
        for p, group in updates:
            if not (state := self.state[p]):
                self._init_state(p, state)
            state["step"] += 1
            self._update(p, state, group)
        return loss

    def _init_state(self, p: Tensor, state: dict) -> None:
        # Counters stay on the CPU: reading one from a card would make every step wait for the card.
        state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)

    def _update(self, p: Tensor, state: dict, group: dict) -> None:
        # A separate method, so that its temporary is freed before the next parameter's is made.
        tensors = p, p.grad, state["exp_avg"], state["exp_avg_sq"]
        if p.is_complex():  # two real numbers each
            tensors = tuple(map(torch.view_as_real, tensors))
        adam_step(*tensors, float(state["step"]), group)


def adam_step(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, t: float, group: dict) -> None:
    """Update a weight and its moments in place at step ``t``: four tensors of one shape, and a
    group's settings.
    """
    lr, decay, (beta1, beta2) = float(group["lr"]), group["weight_decay"], group["betas"]
    if decay and group["decoupled_weight_decay"]:
        p.mul_(1 - lr * decay)
    elif decay:
        grad = grad.add(p, alpha=decay)
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    del grad  # with decay it is a temporary, and the next line makes another one

    denominator = v.sqrt().div_(sqrt(1 - beta2**t)).add_(group["eps"])
    p.addcdiv_(m, denominator, value=-lr / (1 - beta1**t))


class AdamW(Adam):
    """Adam with decoupled weight decay: each step first subtracts ``lr * weight_decay`` times the
    parameter, and the moments do not contain the decay. Everything else is as for ``Adam``.
    """

    decoupled, default_decay = True, 0.01
