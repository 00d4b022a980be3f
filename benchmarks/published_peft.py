"""Peaks that others measured on real cards, predicted without one: PEFT's comparison of methods
(July 2026, one L40S).

    python benchmarks/published.py peft          needs peft (pip install --no-deps peft==0.19.1);
    four minutes, no card

Llama-3.2-3B in bf16, 4 rows a step, each padded to the longest of its batch;
``method_comparison/MetaMathQA`` in PEFT's repository has the loop and the results. What that loop
does otherwise than a ``Recipe``, all of it taken from its source:

- adapters are in float32 on a base in bf16 (a LayerNorm's copy stays in bf16):
  ``Recipe(precision=None)``;
- ``use_cache`` is left on, and the model's output is kept until the next one comes: logits, keys
  and values of all layers;
- gradients are freed when the next step begins, not when a step ends;
- rows of a batch have different lengths, so their mask hides tokens: attention then runs a kernel
  that takes a mask, and keeps it;
- batches come in groups of twenty, the longest first, and the allocator's cache is emptied after
  ten steps.

Two lengths are not published: the mean padded length, and the one behind the 99th percentile of
what was reserved. Both are found from one method (LayerNorm tuning), and have to be right for all
others. Nothing else is fitted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gradmem_lib.course.ledger import published
from gradmem_lib.prediction.allocator import Allocator, workspace
from gradmem_lib.prediction.predict import Prediction, predict
from gradmem_lib.training.recipe import Recipe

ROWS, LONGEST = 4, 768
SHORT = 150  # tokens of the last batches before the cache is emptied: the shortest ten of a group
L40S = (8, 9)
SOURCE = "PEFT, Llama-3.2-3B, L40S, 2026"
LLAMA_3B = dict(
    vocab_size=128_256,
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=28,
    num_attention_heads=24,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
    max_position_embeddings=131_072,
)


@dataclass(frozen=True)
class Row:
    """What was published, in bytes: ``allocated`` after a step, on average; ``reserved``: the 99th
    percentile over all steps.
    """

    adapter: tuple[str, dict] | None
    trained: int
    allocated: int
    reserved: int


PEFT = {
    "LayerNorm tuning": Row(("LNTuningConfig", {}), 175_104, 6_778_767_174, 19_144_900_608),
    "LoRA, rank 32 on q, v": Row(
        ("LoraConfig", {"r": 32, "target_modules": ["q_proj", "v_proj"]}),
        9_175_040,
        6_924_458_053,
        20_120_076_288,
    ),
    "IA3": Row(("IA3Config", {}), 286_720, 6_779_483_963, 20_931_674_112),
    "every weight": Row(None, 3_212_749_824, 26_064_369_608, 37_345_097_154),
}


def model_of(row: Row) -> torch.nn.Module:
    """The method's own module, without memory."""
    import peft

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA_3B)).to(torch.bfloat16)
        if row.adapter is not None:
            kind, options = row.adapter
            model = peft.get_peft_model(
                model, getattr(peft, kind)(task_type="CAUSAL_LM", **options)
            )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == row.trained, f"{trained:,} numbers are trained here, and {row.trained:,} were"
    return model


@dataclass(frozen=True)
class Step:
    """A predicted step on rows of one length, and what it asks of the allocator."""

    prediction: Prediction
    requests: tuple[int, ...]

    @property
    def gradients(self) -> set[int]:
        """Requests that are gradients: there before the optimizer's first request, and freed after
        its last one.
        """
        places = [i for i, request in enumerate(self.requests) if request >= 0]
        last = max(i for i in places if self.requests[i] > 512)
        first = 1 + max(
            i for i, r in enumerate(self.requests[:last]) if r < 0 and places[-1 - r] < i - 1
        )
        return {-1 - r for r in self.requests[last:] if r < 0 and places[-1 - r] < first}


def step_of(model: torch.nn.Module, tokens: int) -> Step:
    ids = torch.zeros(ROWS, tokens, dtype=torch.long, device="meta")
    mask = torch.ones(ROWS, tokens, dtype=torch.long)
    mask[1:, -1] = 0  # which tokens are hidden does not matter, only that some are
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    kept: dict[str, Any] = {}

    def loss(model, batch):
        kept["outputs"] = model(**batch)
        return kept["outputs"].loss

    recipe = Recipe(precision=None, optimizer="adamw-foreach", attention="fused")
    found = predict(model, batch=batch, loss=loss, recipe=recipe, target="cuda")
    return Step(found, found.requests())


def allocated_after(step: Step, trained: int) -> int:
    """Bytes after a step: gradients are still there, and a workspace each for forward and
    backward.
    """
    asked = [r for r in step.requests if r >= 0]
    gradients = sum(asked[n] for n in step.gradients)
    return step.prediction.current.total + gradients + workspace(L40S)


def reserved_by(short: Step, long: Step) -> int:
    """Bytes reserved after a long step that follows short ones and an emptied cache."""
    allocator = Allocator()
    for _ in range(2):
        allocator.allocate(workspace(L40S) // 2)
    same = takewhile(
        lambda pair: pair[0] == pair[1] >= 0, zip(short.requests, long.requests, strict=False)
    )
    residents = [allocator.allocate(request) for request, _ in same]
    late: list[int] = []
    kept: list[int] = []
    for step in (short, short, long):
        for address in late:
            allocator.free(address)
        addresses, late = list(residents), []
        for request in step.requests[len(residents) :]:
            if request >= 0:
                addresses.append(allocator.allocate(request))
            elif -1 - request in step.gradients:
                late.append(addresses[-1 - request])
            else:
                allocator.free(addresses[-1 - request])
        for address in kept:
            allocator.free(address)
        freed = {-1 - request for request in step.requests if request < 0}
        kept = [a for n, a in enumerate(addresses) if n >= len(residents) and n not in freed]
        if step is short:
            allocator.empty_cache()
    return allocator.reserved


def lengths(name: str) -> tuple[float, int]:
    """(mean padded length, the length behind the 99th percentile), as one method's two published
    figures say.
    """
    row, model = PEFT[name], model_of(PEFT[name])
    short, middle = step_of(model, SHORT), step_of(model, 2 * SHORT)
    a, b = (allocated_after(step, row.trained) for step in (short, middle))
    mean = SHORT + SHORT * (row.allocated - a) / (b - a)
    tokens = range(2 * SHORT, LONGEST + 1)
    longest = bisect_right(
        tokens, row.reserved, key=lambda n: reserved_by(short, step_of(model, n))
    )
    return mean, tokens[longest - 1]


def rows() -> Iterator[published.Row]:
    source = next(iter(PEFT))
    mean, longest = lengths(source)
    print(f"From {source}: {mean:.1f} tokens on average, {longest} behind the 99th percentile")
    for name, row in PEFT.items():
        model = model_of(row)
        short, usual, long = (step_of(model, n) for n in (SHORT, round(mean), longest))
        after = allocated_after(usual, row.trained)
        yield published.Row(SOURCE, name, "allocated after a step, mean", row.allocated, after)
        yield published.Row(
            SOURCE, name, "reserved, 99th percentile", row.reserved, reserved_by(short, long)
        )
