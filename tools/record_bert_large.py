"""Writes bert_large.json: the nine runs of the BERT-large table, replayed from today's software to
that of 2022. It takes some minutes.

    python tools/record_bert_large.py
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.optim import Optimizer

from gradmem_lib.compat.operators import softmax_backward
from gradmem_lib.course.ledger.bert_large import (
    BATCH_SIZE,
    RECORD,
    RUNS,
    SOURCE,
    STAGES,
    Replayed,
    Run,
    batch,
    model,
)
from gradmem_lib.measure.timeline import TOTAL
from gradmem_lib.prediction import allocator, cuda_kernels, fakes
from gradmem_lib.prediction.copies import fake_copy
from gradmem_lib.prediction.recorders import CudaRecorder
from gradmem_lib.training.prepare import prepare
from gradmem_lib.training.step import step
from gradmem_lib.units import MiB


class SoftmaxOf2022(torch.autograd.Function):
    """Until PyTorch 1.11 (pull request 65242) softmax kept its input for backward as well, of which
    only the dtype was used.
    """

    @staticmethod
    def forward(ctx, x):
        out = torch.softmax(x, -1)
        ctx.save_for_backward(out, x)
        return out

    @staticmethod
    def backward(ctx, grad):
        out, x = ctx.saved_tensors
        return softmax_backward(grad, out, -1, x.dtype)


class AdamWOf2022(Optimizer):
    """The memory of transformers' own AdamW, then the Trainer's default: one temporary of a
    parameter's size (torch's: two).
    """

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            if not state:
                state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
            state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
            state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            p.addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-1e-4)


def replay(run: Run, stage: str = STAGES[-1]) -> Replayed:
    """A cold start: the weights, then two steps, with every request answered by the allocator's
    rules.

    ``stage``: one of ``STAGES``. Two micro-batches stand for four: the second is like the third
    and fourth.
    """
    of_2022 = STAGES[1 : STAGES.index(stage) + 1]
    recipe, rows = run.recipe, BATCH_SIZE
    if recipe.accumulation > 1:
        recipe, rows = replace(recipe, accumulation=2), 2 * BATCH_SIZE // recipe.accumulation
    with ExitStack() as stack:
        if "softmax input" in of_2022:
            stack.enter_context(
                patch.object(F, "softmax", lambda x, dim, **_: SoftmaxOf2022.apply(x))
            )
        # before the model is made, whose layers remember the function
        if "GELU in float32" in of_2022:
            stack.enter_context(patch.object(F, "gelu", cuda_kernels.in_float32(F.gelu)))
        mode = stack.enter_context(fakes.QuickFakeMode())
        mode.value = 1.0  # of labels that are counted; BERT reads none
        prepared = prepare(fake_copy(model()), recipe)
        stack.callback(prepared.undo.close)
        optimizer = prepared.optimizer
        if "old AdamW" in of_2022 and recipe.optimizer == "adamw":
            optimizer = AdamWOf2022(prepared.model.parameters())
        if "gradients zeroed" in of_2022:
            for owner in (optimizer, prepared.model):  # both are asked to let gradients go
                owner.zero_grad = _zeroing(owner)
        stack.enter_context(cuda_kernels.kernels(recipe.autocast_dtype))
        with CudaRecorder(prepared.model, optimizer) as recorder:
            for _ in range(2):
                step(prepared.model, optimizer, batch(rows, "cpu"), recipe)
        trace = recorder.trace()
    return Replayed(int(trace.rows[:, TOTAL].max()), allocator.replayed(trace.requests))


def _zeroing(owner: Optimizer | torch.nn.Module) -> Callable:
    zero_grad = owner.zero_grad
    return lambda set_to_none=True: zero_grad(set_to_none=False)


def write_record(path: Path = RECORD, say: Callable[[str], None] = print) -> None:
    """Replay every run at every stage, and keep the bytes."""
    found = {}
    for run in RUNS:
        stages = {stage: replay(run, stage)._asdict() for stage in STAGES}
        found[run.name] = stages
        say(f"{run.name}: {stages['old AdamW']['reserved'] / MiB:,.0f} MiB reserved, as of 2022")
    record = {"source": SOURCE, "torch": torch.__version__.partition("+")[0], "replayed": found}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_record()
