"""Lesson 02's puzzle: tensors that take their foreach step together."""

import torch
from torch import nn

from ....measure.tracker import MemoryTracker
from ...judge.exercise import Exercise
from ...learner.bargains import Bargain, parts_of

SIZES = (44, 42, 37, 29, 23, 21, 17, 14, 9)  # KiB of each parameter


def in_groups(choice):
    """A foreach step of AdamW, group by group: its tracker, and the number of groups."""
    groups = parts_of(choice, SIZES)
    weights = nn.ParameterDict({str(size): torch.zeros(256 * size) for size in SIZES})
    for p in weights.values():
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(
        [{"params": [weights[str(size)] for size in group]} for group in groups], foreach=True
    )
    optimizer.step()  # makes the states
    with MemoryTracker(weights, optimizer, live=False) as tracker:
        optimizer.step()
    return tracker, len(groups)


PACKING = Bargain([[44, 21, 14], [42, 37], [29, 23, 17, 9]], in_groups, "1 MiB", 4, "groups")

IN_GROUPS = Exercise(
    "2.7",
    PACKING.best,
    PACKING.cases,
    """
    [[44, 42, 37, 29, 23, 21, 17, 14, 9]]
        one group is a plain foreach step: its temporaries are a copy of all weights.
    [[44, 42], [37, 29], [23, 21, 17, 14], [9]]
        the first group is too large: its temporaries are a copy of the group, and 79 KiB are left
        for them.
    [[44], [42], [37], [29], [23], [21], [17], [14], [9]]
        it fits, but each tensor takes its step alone, as in a plain loop: that is a launch of all
        kernels for each.
    """,
    afterwards=PACKING.compared,
)
