"""Hugging Face's ``Trainer`` in one update of a tiny model: what exercise 3.8 and two lessons look
at.
"""

import contextlib
import io
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from ....names import IGNORED
from .settings import gradients_of, seeded

TINY = dict(
    vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
)


def trainer_setting(kind: str):
    """A tiny model and four training examples: ``"BertForSequenceClassification"``,
    ``"LlamaForSequenceClassification"`` or ``"LlamaForCausalLM"``, whose examples have 4, 6, 10 and
    16 tokens.
    """
    import transformers

    config = transformers.BertConfig(
        **TINY, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    if kind.startswith("Llama"):
        config = transformers.LlamaConfig(**TINY, pad_token_id=0)
    with seeded():
        model = getattr(transformers, kind)(config)
    with seeded():
        ids = torch.randint(1, 100, (4, 16))
    examples = [{"input_ids": row, "labels": i % 2} for i, row in enumerate(ids)]
    if kind.endswith("ForCausalLM"):
        examples = [
            {"input_ids": row, "labels": row.masked_fill(torch.arange(16) >= n, IGNORED)}
            for row, n in zip(ids, (4, 6, 10, 16), strict=True)
        ]
    return model, examples


@contextlib.contextmanager
def quiet_arguments(**given: Any) -> Any:
    """``TrainingArguments`` for the CPU that print, write and report nothing; the random numbers
    outside stay what they are.
    """
    from transformers import TrainingArguments

    fixed = dict(save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True)
    fixed |= dict(remove_unused_columns=False)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        torch.random.fork_rng(devices=[]),  # Trainer seeds the global generator
    ):
        yield TrainingArguments(output_dir=folder, **fixed, **given)


def trainer_logs(model, examples, accumulation_steps: int) -> dict[str, float]:
    """What Hugging Face's ``Trainer`` logs, ``loss`` and ``grad_norm``, in its one update on four
    examples.
    """
    from transformers import Trainer, default_data_collator

    with quiet_arguments(
        per_device_train_batch_size=len(examples) // accumulation_steps,
        gradient_accumulation_steps=accumulation_steps,
        num_train_epochs=1,
        max_grad_norm=1e9,  # it logs the norm, and clips nothing
        logging_steps=1,
    ) as arguments:
        trainer = Trainer(
            model=model, args=arguments, train_dataset=examples, data_collator=default_data_collator
        )
        trainer.train()
    return {name: trainer.state.log_history[0][name] for name in ("loss", "grad_norm")}


def trainer_factors(
    kind: str, steps: int, prepare: Callable = lambda model, batch: model
) -> dict[str, float]:
    """How many times larger ``Trainer`` logs ``loss`` and ``grad_norm`` in ``steps`` accumulation
    steps than in one.

    ``prepare(model, batch)`` returns the model of the run in steps; all that differ by rounding
    only are 1.0.
    """
    from transformers import default_data_collator

    once = trainer_logs(*trainer_setting(kind), accumulation_steps=1)
    model, examples = trainer_setting(kind)
    model = prepare(model, default_data_collator(examples))
    cut = trainer_logs(model, examples, accumulation_steps=steps)
    return {name: round(cut[name] / once[name], 3) for name in once}


def one_batch(model, batch) -> dict[str, float]:
    """``loss`` and ``grad_norm`` of one batch, with nothing between the model and autograd."""
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.item(), "grad_norm": gradients_of(model).norm().item()}
