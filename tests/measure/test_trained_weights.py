"""Which weights are trained is asked of the optimizers too: a GAN freezes its critic in a part of
each step.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradmem_lib import MemoryTracker, diagnose

WIDE = "Weights are wider than needed"
FOR_NOBODY = "Gradients are computed for no optimizer"
COPIES = "The weights are there more than once"


def wide(features: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, 2048), nn.ReLU(), nn.Linear(2048, 512))


def names_of_causes(tracker: MemoryTracker) -> list[str]:
    return [cause.name for cause in diagnose(tracker).causes]


@pytest.mark.parametrize("zeros", [False, True], ids=["grad is dropped", "grad is zeroed"])
def test_a_critic_that_is_frozen_in_turns_is_trained(zeros):
    generator, critic = nn.Linear(16, 64), wide()
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.01)
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.01)
    model = nn.ModuleList([generator, critic])
    with MemoryTracker(model, [of_critic, of_generator], live=False) as tracker:
        for _ in range(3):
            critic.requires_grad_(True)
            critic(generator(torch.randn(8, 16)).detach()).mean().backward()
            of_critic.step()
            of_critic.zero_grad(set_to_none=not zeros)
            critic.requires_grad_(False)
            critic(generator(torch.randn(8, 16))).mean().backward()
            of_generator.step()
            of_generator.zero_grad()
    assert not {WIDE, FOR_NOBODY} & set(names_of_causes(tracker))


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("tracked_is_wrapped", [True, False])
def test_the_tracked_model_under_another_name_is_no_other_model(tracked_is_wrapped):
    model = wide()
    wrapper = Wrapper(model)
    tracked = model if tracked_is_wrapped else wrapper
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    copy = []
    with MemoryTracker(tracked, optimizer, live=False) as tracker:
        for step in range(4):
            wrapper(torch.randn(8, 64)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.randn(8, 64))
            if step == 1:
                copy = [parameter.detach().clone() for parameter in model.parameters()]
    (cause,) = [cause for cause in diagnose(tracker).causes if cause.name == COPIES]
    assert "calls another model" not in cause.remedy
    del copy
