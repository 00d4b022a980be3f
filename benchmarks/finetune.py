"""Fine-tuning SmolLM2-135M on real text three ways, on the CPU: naive, with Hugging Face's
defaults, and ours.

    python benchmarks/finetune.py [--steps 16]
    python benchmarks/finetune.py --dry-run    with a tiny model; writes nothing

Each way is a fresh model in the same process, trained by ``Trainer`` on the same rows in the same
order, with the same tracker on it. What an 8B would need on a card is predicted, which needs none.
"""

from __future__ import annotations

import copy
import gc
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import transformers
from shared import parser, record, settings, words

from gradmem_lib.model.known import known_model
from gradmem_lib.prediction import allocator
from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.units import GiB, format_bytes

BATCH, SEQ_LEN = 8, 128  # of the CPU part: rows of one optimizer step, tokens in a row
HELD_OUT = 16
NAIVE_RATE = 5e-5  # TrainingArguments' default
OUR_RATE = 1e-3  # LoRA's, by common practice an order of magnitude above full fine-tuning's
QUARTER, ONE_PERCENT = 0.25, 1.01
COMBINED = Recipe(precision="bf16", optimizer="adamw-8bit", lora_rank=16, chunked_loss=True)
NAIVE, DEFAULTS, OURS = "naive", "HF defaults, checkpointing, accumulation", "ours"


# An 8B on a card: what torchtune's documentation publishes for Llama-3.1-8B at 2 x 2048 on one card
# (taken as GiB), Hugging Face's way, and ours.
ROWS_8B, TOKENS_8B = 2, 2048
TORCHTUNE = {"full fine-tuning": 18.9, "LoRA": 16.2, "QLoRA": 7.4}
HF_WAY = Recipe(precision="bf16", optimizer="adamw-fused", checkpointing="per-layer")
OUR_WAY = replace(HF_WAY, chunked_loss=True)


def candidates() -> list[Recipe]:
    """The combined recipe's forms, by how much is computed again, then by how small the
    micro-batches are.
    """
    pieces = [n for n in range(1, BATCH + 1) if BATCH % n == 0]
    return [
        replace(COMBINED, checkpointing=c, accumulation=n)
        for c in (None, "per-layer")
        for n in pieces
    ]


def first_that_fits(forms: Sequence[Recipe], needs: Callable[[Recipe], int], room: float) -> Recipe:
    """The first that is predicted to need at most ``room`` bytes, else the one that needs least."""
    for form in forms:
        if needs(form) <= room:
            return form
    return min(forms, key=needs)


def cases_8b() -> list[tuple[str, str, Recipe]]:
    """What is trained, whose way it is, and the recipe."""
    found = [("full fine-tuning", "HF defaults", HF_WAY)]
    for optimizer in ("adafactor-torch", "sgd"):
        recipe = replace(OUR_WAY, optimizer=optimizer, in_backward=True)
        found.append(("full fine-tuning", "ours", recipe))
    for family, quantized in (("LoRA", False), ("QLoRA", True)):
        for rank in (8, 16):
            low = {"lora_rank": rank, "quantized_base": quantized}
            found.append((family, "HF defaults", replace(HF_WAY, **low)))
            for pieces in (2, 1):
                found.append((family, "ours", replace(OUR_WAY, accumulation=pieces, **low)))
    return found


def predicted_for_card() -> list[dict]:
    """Live bytes of the tensors and cuBLAS's workspace.

    Neither what the allocator holds beyond, nor what a kernel takes and returns: writing a 4-bit
    matrix out does.
    """
    config, found = known_model("Llama-3.1-8B")[1], []
    for family, way, recipe in cases_8b():
        live = predict(
            config, batch_size=ROWS_8B, seq_len=TOKENS_8B, recipe=recipe, target="cuda"
        ).peak.total
        needs, target = live + allocator.workspace(), TORCHTUNE[family]
        found.append(
            {
                "family": family,
                "way": way,
                "recipe": settings(recipe),
                "live bytes": live,
                "live bytes and workspace": needs,
                "torchtune GiB": target,
                "at most torchtune's": needs <= target * GiB,
            }
        )
        said = " ".join(words(recipe, "precision", "checkpointing"))
        print(f"{family} {way} {said:<70} {needs / GiB:6.2f} GiB, torchtune {target}", flush=True)
    return found


def cpu_data(dry: bool, steps: int):
    """(make a fresh model, training rows, held-out rows)."""
    from gradmem_lib.course.material import models, texts

    class Noted(texts.Rows):
        """Rows that note in which order they were asked for."""

        def __getitem__(self, index):
            self.__dict__.setdefault("order", []).append(index)
            return super().__getitem__(index)

    if dry:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 512, (BATCH * steps + HELD_OUT, SEQ_LEN), generator=generator)
        train, held_out = ids[:-HELD_OUT], texts.Rows(ids[-HELD_OUT:])
        tiny = {"layers": 2, "hidden": 64, "heads": 4, "intermediate": 96, "vocab": 512}
        return lambda: models.tiny_llama(**tiny), lambda: Noted(train), held_out
    _, tokenizer = models.smollm2()
    train, held_out = texts.datasets(
        tokenizer, seq_len=SEQ_LEN, rows=BATCH * steps, held_out=HELD_OUT
    )
    return lambda: models.smollm2()[0], lambda: Noted(train.ids), held_out


@torch.no_grad()
def loss_on(model, rows) -> float:
    """Mean loss of ``rows``, four at a time."""
    model.eval()
    losses = [model(input_ids=ids, labels=ids).loss * len(ids) for ids in rows.ids.split(4)]
    model.train()
    return float(sum(losses)) / len(rows)


def trainer_of(way: str, model, recipe: Recipe, rows, folder: str, *, steps: int, memory):
    """A ``Trainer`` of ``way``.

    Ours brings a ``MemoryCallback`` of its own; the others get ``memory``.
    """
    from gradmem_lib.training.trainer import make_trainer
    from gradmem_lib.training.trainer_arguments import CHECKPOINTING_ARGUMENT

    common = {"max_steps": steps, "logging_strategy": "no"}
    if way == OURS:
        return make_trainer(
            model,
            recipe,
            batch_size=BATCH,
            train_dataset=rows,
            output_dir=folder,
            live=False,
            progress=False,
            learning_rate=OUR_RATE,
            **common,
        )
    cut = {"per_device_train_batch_size": BATCH}
    if way == DEFAULTS:
        cut = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": BATCH}
        cut[CHECKPOINTING_ARGUMENT] = True
    arguments = transformers.TrainingArguments(
        folder,
        **common,
        **cut,
        learning_rate=NAIVE_RATE,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[memory])
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def trained_on_cpu(way: str, recipe: Recipe, fresh, rows, held_out, *, steps: int) -> dict:
    """One way from a fresh model to its held-out loss."""
    from gradmem_lib.course.material.smollm2_runs import Clock
    from gradmem_lib.training.memory_callback import MemoryCallback

    model, clock, own = fresh(), Clock(), MemoryCallback(live=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(way, model, recipe, rows, folder, steps=steps, memory=own)
        before = loss_on(model, held_out)
        trainer.add_callback(clock)
        with own:
            trainer.train()
    memory = trainer.memory if way == OURS else own
    # the first makes the optimizer's states
    median = statistics.median(clock.seconds[1:] or clock.seconds)
    return {
        "peak bytes": memory.peak.total,
        "at the peak": memory.peak.by_category,
        "phase of the peak": memory.peak.phase,
        "seconds a step, median": round(median, 3),
        "tokens/s": round(BATCH * SEQ_LEN / median, 2),
        "held-out loss before": round(before, 4),
        "held-out loss after": round(loss_on(model, held_out), 4),
        "learning rate": trainer.args.learning_rate,
    }


def three_ways(dry: bool, steps: int) -> dict:
    """The CPU part's results."""
    fresh, train_rows, held_out = cpu_data(dry, steps)
    config = copy.deepcopy(fresh().config)

    def needs(recipe: Recipe) -> int:
        return predict(
            config, batch_size=BATCH, seq_len=SEQ_LEN, recipe=recipe, target="cpu"
        ).peak.total

    plain = needs(Recipe())
    ours = first_that_fits(candidates(), needs, QUARTER * plain)
    predicted = {
        NAIVE: plain,
        DEFAULTS: needs(Recipe(checkpointing="per-layer", accumulation=BATCH)),
        OURS: needs(ours),
    }
    found, orders = {}, []
    for way, says in predicted.items():
        gc.collect()
        rows = train_rows()
        found[way] = trained_on_cpu(way, ours, fresh, rows, held_out, steps=steps)
        found[way]["predicted bytes"] = says
        orders.append(rows.order)
        print(shown_way(way, found[way]), flush=True)
    return {
        "what": (
            f"Trainer on {'a tiny model' if dry else 'SmolLM2-135M'}, {BATCH} x {SEQ_LEN} "
            "tokens a step"
        ),
        "steps": steps,
        "our recipe": settings(ours),
        "ways": found,
        "to naive": {way: ratios(result, found[NAIVE]) for way, result in found.items()},
        "holds": held(found[NAIVE], found[OURS])
        | {"same rows in the same order": all(o == orders[0] for o in orders)},
    }


def ratios(result: dict, naive: dict) -> dict[str, float]:
    return {name: round(result[name] / naive[name], 4) for name in ("peak bytes", "tokens/s")}


def held(naive: dict, ours: dict) -> dict[str, bool]:
    """What the course promises of the combined recipe."""
    loss = "held-out loss after"
    return {
        "peak at most a quarter of naive's": ours["peak bytes"] <= QUARTER * naive["peak bytes"],
        "held-out loss within 1 % of naive's": ours[loss] <= ONE_PERCENT * naive[loss],
    }


def shown_way(way: str, result: dict) -> str:
    return (
        f"{way:<42} {format_bytes(result['peak bytes']):>10} (predicted "
        f"{format_bytes(result['predicted bytes'])})  {result['tokens/s']:8.1f} tokens/s  held-out "
        f"loss {result['held-out loss before']} -> {result['held-out loss after']}"
    )


def main(arguments: list[str] | None = None) -> None:
    command = parser(__doc__)
    command.add_argument("--steps", type=int, default=16, help="optimizer steps of each way")
    command.add_argument("--dry-run", action="store_true", help="a tiny model; writes nothing")
    options = command.parse_args(arguments)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    found = three_ways(options.dry_run, options.steps)
    for name, ok in found["holds"].items():
        print(f"{name}: {'yes' if ok else 'NO'}")
    if options.dry_run:
        return
    what = (
        "Llama-3.1-8B, 2 x 2048 tokens a step: predicted live bytes of the tensors and cuBLAS's "
        "workspace"
    )
    print(f"For a card, {what}")
    on_card = {"what": what, "cases": predicted_for_card()}
    record("finetune", found | {"predicted for a card": on_card})


if __name__ == "__main__":
    main()
