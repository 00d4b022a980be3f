"""Lesson 05's leak: a checkpoint that is still in memory while the resumed run trains."""

import io
from functools import partial

import torch
import torch.nn.functional as F

from ...judge.exercise import Exercise
from ..shared.leaks import leak_cases, new_net
from ..shared.settings import adamw, seeded

RESUME_BUDGET = "3.75 MiB"
ROWS, OUTPUTS, BATCHES, DONE = 16, 1000, 6, 2


def resume_setting(batches: int = BATCHES, done: int = DONE) -> tuple:
    """A new model and its AdamW, the open checkpoint of a run after ``done`` batches, and all
    batches of that run.
    """
    with seeded(5):
        inputs = torch.randn(batches, ROWS, 64)
        targets = torch.randn(batches, ROWS, OUTPUTS)
    given = list(zip(inputs, targets, strict=True))
    net = new_net(OUTPUTS)
    optimizer = adamw(net)
    train_on(net, optimizer, given[:done])
    file = io.BytesIO()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
    torch.save(state, file)
    file.seek(0)
    fresh = new_net(OUTPUTS)
    return fresh, adamw(fresh), file, given


def train_on(model, optimizer, batches):
    """One step on each batch; the losses."""
    losses = []
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# 5.11


def resume_leak():
    """The line that keeps the checkpoint alive, and a script that lets it go."""

    def fixed(model, optimizer, file, batches):
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        rest = batches[saved["step"] :]
        del saved
        return train_on(model, optimizer, rest)

    return 2, fixed


LEAK = Exercise(
    "5.11",
    resume_leak,
    leak_cases(
        line=2,
        setting=resume_setting,
        size=BATCHES,
        budget=RESUME_BUDGET,
        outside=200_000,  # the weights alone are 566 kB
        other=partial(resume_setting, done=1),
        where=" and a checkpoint after the first one",
    ),
    """
    del saved →
        the loaded weights are still there while the model trains: a name refers to them until the
        function returns, unless it is deleted before the training. The loaded states are no copy,
        since the optimizer uses these very tensors.
    saved["model"]) → saved["model"], assign=True)
        assign=True gives the model the loaded tensors, and the optimizer still updates the ones
        from before: the model no longer learns.
    saved = torch.load(file) → torch.load(file); saved = torch.load(file)
        torch.load begins where the file object stands, and an earlier load or read has moved it
        on. Load once, or call file.seek(0) before the next load (what PyTorch says about
        weights_only is another matter).
    optimizer.load_state_dict(saved["optimizer"]) →
        the loaded states never reach the optimizer: AdamW begins with moments of zero, and the
        updates are different.
    batches[saved["step"] :] → batches
        the run begins with the first batch again: read the step of the checkpoint before you
        delete it.
    return 2 → return 3
        line 3 copies the loaded weights into the model's own, and keeps nothing: look for the name
        through which the loaded ones stay alive.
    return 2 → return 4
        line 4 gives the loaded states to the optimizer, which uses these very tensors: they are no
        second copy. Look for what is there twice.
    return 2 → return 5
        line 5 trains, and it needs a number of the checkpoint, but no tensor: look for the name
        that keeps the whole checkpoint until then.
    """,
)
