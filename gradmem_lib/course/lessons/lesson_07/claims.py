"""Lesson 07's answer: what ``fp16=True`` halves, and what ``Trainer``'s flags do to weights,
gradients and states.

A tiny Llama is trained for two steps with each of them; larger models are predicted for a CUDA
card, as in ``lesson_05_switches``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ....training.memory_callback import MemoryCallback
from ...ledger import Finding, answers, bert_large
from ...ledger.finding import about, each
from ..shared.claim_runs import as_rows, error_of, name_of, predicted, silent, token_ids, trio
from ..shared.hf_trainer import quiet_arguments
from ..shared.settings import tiny_llama

PARTS = ("products", "weights", "gradients", "states", "weights after an evaluation")


def trainer_dtypes(dtype: torch.dtype = torch.float32, **flags: Any) -> tuple:
    """The dtype of each of ``PARTS`` of a tiny Llama loaded in ``dtype``, after two steps of a
    plain ``Trainer`` on the CPU with ``flags`` as ``TrainingArguments``, and an evaluation; and the
    second step's peak in bytes.
    """
    from transformers import Trainer

    model = tiny_llama(1, 512, dtype=dtype)
    head, seen = model.lm_head, {}

    def look(module, given, out) -> None:
        seen.setdefault("products", out.dtype)

    head.register_forward_hook(look)
    head.weight.register_post_accumulate_grad_hook(lambda p: seen.update(gradients=p.grad.dtype))
    rows = as_rows(token_ids(16))
    with (
        silent(),
        quiet_arguments(max_steps=2, **flags) as arguments,
        MemoryCallback(live=False) as memory,
    ):
        trainer = Trainer(
            model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[memory]
        )
        trainer.train()
        seen["weights"] = head.weight.dtype
        seen["states"] = trainer.optimizer.state[head.weight]["exp_avg"].dtype
        trainer.evaluate()
    seen["weights after an evaluation"] = head.weight.dtype
    return {part: name_of(seen[part]) for part in PARTS}, memory.by_step[2].total


def _peaks(predict: Callable, **recipe):
    """A step's peak in float32 and with fp16."""
    return tuple(predict(precision=p, **recipe).peak.total for p in ("float32", "autocast-fp16"))


@answers("C11")
def fp16_halves() -> Finding:
    small = partial(predicted, "SmolLM2-135M", 8, 1024)
    at = {run.name: bert_large.replayed(run)["today"].live for run in bert_large.RUNS}
    own, plain, bert = (
        "Llama-2-7B, rows of 2048 accumulated, checkpointed",
        "SmolLM2-135M, 8 x 1024, every weight",
        "BERT-large, 1 x 4, checkpointing",
    )
    peaks = {
        own: _peaks(trio),
        bert: (at["1 x 4, checkpointing"], at["1 x 4, checkpointing, fp16"]),
        plain: _peaks(small),
        "SmolLM2-135M, 8 x 1024, LoRA": _peaks(small, lora_rank=16),
    }
    ratio = {name: half / full for name, (full, half) in peaks.items()}
    dtypes = {}
    for flag in ("bf16", "fp16", "bf16_full_eval"):  # on the CPU, where fp16 changes nothing
        found, _ = trainer_dtypes(**{flag: True})
        dtypes |= {(part, flag): dtype for part, dtype in found.items()}
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.float().sum()).backward()
    refused = error_of(lambda: scaler.unscale_(torch.optim.SGD([weight])))
    return Finding(
        own=about("7B checkpointed, fp16 / float32", "0.5×", ratio[own]),
        where=about("SmolLM2, 8 x 1024, no checkpoints", "0.5×", ratio[plain]),
        beyond=about("BERT-large, 1 x 4 checkpointed", "0.5×", ratio[bert]),
        says=f"""
            only if: nearly everything is activations, as in a small model without checkpoints;
                autocast shrinks nothing else.
            fails: fp16=True means autocast: only activations shrink, and in its own example,
                which checkpoints, the memory grows.
            holds: Its own example needs half.
            why: fp16=True means autocast. Weights, gradients and Adam's states stay in float32, and
                a float16 copy of the weights is added. BERT-large, checkpointed and with one row at
                a time, needs {ratio[bert] - 1:.0%} more. Hugging Face's table, which C13 and C14
                quote, shows this, too: 6,775 MB without fp16, 7,275 with it. On a CPU, fp16=True
                changes nothing.
            needs: a card to see it run; the bytes are predicted
            """,
        figures=each("{}: peak in float32 / with fp16", peaks, "{:,} / {:,}")
        | each("{} with {}=True on the CPU", dtypes)
        | {"the loss scaler, given weights in float16": refused},
    )
