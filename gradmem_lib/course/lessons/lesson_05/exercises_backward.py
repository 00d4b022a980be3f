"""Lesson 05's exercise about steps in backward, under Hugging Face's ``Trainer``."""

from __future__ import annotations

import torch

from ...judge.compare import difference
from ...judge.exercise import Exercise, Mistake, Seen, measure
from ..shared.hf_trainer import quiet_arguments
from ..shared.settings import flat, quietly
from .settings import BACKWARD_CARD, backward_setting


def step_in_backward(model, lr, steps):
    """Step each trained parameter of ``model`` as soon as its gradient is complete, by a rate that
    falls from ``lr`` to 0 in so many ``steps``, and free the gradient; return what ``Trainer``
    takes for an optimizer.
    """
    from transformers import get_scheduler
    from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

    optimizers = {p: torch.optim.AdamW([p], lr=lr) for p in model.parameters() if p.requires_grad}
    schedules = {p: get_scheduler("linear", optimizers[p], 0, steps) for p in optimizers}

    def step_and_free(p):
        optimizers[p].step()
        schedules[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step_and_free)
    return LayerWiseDummyOptimizer(optimizer_dict=optimizers, lr=lr)


def _hooked(hook, handle="register_post_accumulate_grad_hook", scheduled=True):
    """A wrong ``step_in_backward``: ``hook(optimizers, p)`` in backward."""

    def wrong(model, lr, steps):
        from transformers import get_scheduler
        from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

        trained = [p for p in model.parameters() if p.requires_grad]
        optimizers = {p: torch.optim.AdamW([p], lr=lr) for p in trained}
        schedules = {
            p: get_scheduler("linear", optimizers[p], 0, steps) for p in trained if scheduled
        }

        def in_backward(p):
            hook(optimizers, p)
            if scheduled:
                schedules[p].step()

        for p in trained:
            getattr(p, handle)(lambda _, p=p: in_backward(p))
        return LayerWiseDummyOptimizer(optimizer_dict=optimizers, lr=lr)

    return wrong


def _step_and_free(optimizers, p):
    optimizers[p].step()
    optimizers[p].zero_grad()


def _step(optimizers, p):
    optimizers[p].step()


def _anew(optimizers, p):
    optimizers[p].step()
    optimizers[p].state.clear()
    p.grad = None


def _the_last_one(optimizers, p):
    _step_and_free(optimizers, list(optimizers)[-1])


def _after_backward(model, lr, steps):
    return torch.optim.AdamW(model.parameters(), lr=lr)


_ORDINARY = (
    "this is an ordinary AdamW: Trainer steps after backward, and all gradients wait for it."
)
_WAITS = (
    "the weights are right, but every gradient waits for the end of backward: free each one "
    "in its hook, after the step."
)


_OTHERS = "tied weights, a frozen layer, another rate and schedule"


@quietly
def _observe(candidate):
    from transformers import Trainer, TrainerCallback

    class Waiting(TrainerCallback):
        """Gradients that are there when ``Trainer`` would step, and whether a weight has moved by
        the first such time.
        """

        def __init__(self, norms: list[float]):
            self.norms = norms  # of the weights before; a copy of them would lie on the card

        def on_pre_optimizer_step(self, args, state, control, model=None, **more):
            self.left = sum(p.grad is not None for p in model.parameters())
            if state.global_step == 0:
                self.moved = self.norms != [p.norm().item() for p in model.parameters()]

    in_backward: list[bool] = []

    def train(tied: bool, lr: float, steps: int):
        model, rows = backward_setting(tied)
        before = [p.detach().clone() for p in model.parameters()]
        waiting = Waiting([p.norm().item() for p in before])

        def run():
            optimizer = candidate(model, lr, steps)
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(
                    "Trainer takes an optimizer: return LayerWiseDummyOptimizer(lr=lr), not "
                    f"{type(optimizer).__name__}"
                )
            fixed = {"per_device_train_batch_size": 1, "max_steps": 3, "max_grad_norm": 0.0}
            with quiet_arguments(**fixed) as arguments:
                given = {"train_dataset": rows, "callbacks": [waiting]}
                Trainer(model, arguments, optimizers=(optimizer, None), **given).train()

        measured = measure(run, budget=BACKWARD_CARD, model=model)
        in_backward.append(waiting.moved)
        after = list(model.parameters())
        return measured, {
            "parameters that have moved": sum(
                not torch.equal(p, w) for p, w in zip(after, before, strict=True)
            ),
            "gradients that wait": waiting.left,
            "weights": flat(after),
        }

    measured, three = train(False, 1e-3, 3)
    cases = {"three updates": three, "the card": measured, _OTHERS: train(True, 3e-4, 6)[1]}
    return Seen(cases, in_backward=in_backward)


def _explain(got, expected):
    mine, right = got["three updates"], expected["three updates"]
    moved = mine["parameters that have moved"]
    if mine["gradients that wait"] and not any(got.notes["in_backward"]):
        return _ORDINARY
    if not moved:
        return "no weight has moved: when the optimizers step, there is no gradient."
    if moved < right["parameters that have moved"]:
        says = (
            f"{moved} of {right['parameters that have moved']} parameters move: each one that "
            "is trained needs its own optimizer, and a hook that steps this one."
        )
        if moved == 1:
            says += (
                " A function that is defined in a loop sees the loop's last value: use the "
                "parameter that the hook is given."
            )
        return says
    if not mine["gradients that wait"] and difference(mine["weights"], right["weights"]):
        return (
            "every parameter moves, but not as under torch's AdamW with its defaults and a rate "
            "that falls linearly from lr to 0."
        )
    others = got[_OTHERS], expected[_OTHERS]
    if not difference(mine["weights"], right["weights"]) and difference(
        *(each["weights"] for each in others)
    ):
        return (
            "the weights are right for one learning rate and number of steps, but not for "
            "others: use both `lr` and `steps`."
        )
    return None


EXERCISES = (
    Exercise(
        id="5.9",
        title="a Trainer that steps in backward",
        difficulty=3,
        minutes=8,
        trains="hooks that step and free, and what Trainer may no longer do itself",
        reference=step_in_backward,
        observe=_observe,
        explain=_explain,
        changes=("model.hook",),
        raises=(
            (
                "doesn't require gradient",
                (
                    "a hook was put on a frozen parameter, which gets no gradient: use only "
                    "parameters with requires_grad."
                ),
            ),
        ),
        mistakes=(
            Mistake(
                "after backward",
                _after_backward,
                _ORDINARY,
            ),
            Mistake("kept", _hooked(_step), _WAITS),
            Mistake(
                "before it is there",
                _hooked(_step, handle="register_hook"),
                (
                    "no optimizer has stepped on a gradient: step in a hook of "
                    "register_post_accumulate_grad_hook, which is called when .grad is there; a "
                    "hook of register_hook is called before .grad is written."
                ),
            ),
            Mistake(
                "new each time",
                _hooked(_anew),
                (
                    "the moments of earlier steps are gone: make one optimizer for each parameter, "
                    "once, and not in the hook."
                ),
            ),
            Mistake(
                "no schedule",
                _hooked(_step_and_free, scheduled=False),
                (
                    "the learning rate never falls: Trainer's schedule changes only the dummy "
                    "optimizer, so step a schedule for each real optimizer in its hook."
                ),
            ),
            Mistake(
                "the last one",
                _hooked(_the_last_one),
                (
                    "every hook steps only the last parameter: a function defined in a loop sees "
                    "the loop's last value, so use the parameter that the hook is given."
                ),
            ),
        ),
    ),
)
