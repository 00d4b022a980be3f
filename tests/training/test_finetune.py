"""A recipe on transformers' ``Trainer``: same bytes as predicted, same steps as ``step``, and what
contradicts it refused.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.trainers import ROWS, SEQ, classifier, rows, small, trainer_for
from torch import nn
from transformers import TrainingArguments, default_data_collator

from gradmem_lib import LoRALinear, Recipe, arguments, make_trainer, merge_adapters, predict
from gradmem_lib.names import CATEGORIES
from gradmem_lib.optimizers import RELATIVE_RATE
from gradmem_lib.training.trainer_arguments import CHECKPOINTING_ARGUMENT

pytestmark = pytest.mark.usefixtures("interruptible")
RECIPES = {
    "every second layer": Recipe(accumulation=4, every_n_layers=2),
    "master": Recipe(accumulation=2, precision="float32-master"),
    "QLoRA": Recipe(accumulation=4, precision="bf16", lora_rank=4, quantized_base=True),
    "all": Recipe(
        accumulation=4,
        precision="bf16",
        optimizer="adamw-8bit",
        lora_rank=4,
        checkpointing="per-layer",
        chunked_loss=True,
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_trainers_peak_is_the_predicted_one(name, tmp_path):
    recipe = RECIPES[name]
    expected = predict(small(), batch_size=ROWS, seq_len=SEQ, recipe=recipe, target="cpu").peak
    trainer = trainer_for(small(), recipe, tmp_path)
    trainer.train()
    measured = trainer.memory.by_step[2]
    assert measured.phase == expected.phase
    micro = 8 * ROWS * SEQ // recipe.accumulation
    for category in CATEGORIES:
        more = measured.by_category[category] - expected.by_category[category]
        if category == "other":
            # The rows are views of one tensor, which is seen; labels get a tensor of their own;
            # accelerate's loader has the next micro-batch ready. The rest is counts of labels:
            # recipe.step keeps one of each row.
            more -= 8 * rows().ids.numel() + (recipe.accumulation + 2) * micro
            assert -8 * ROWS <= more <= 64
        else:
            assert 0 <= more <= 16, category  # the loss and its weight


def test_evaluation_keeps_no_logits_where_nobody_asks_for_them(tmp_path):
    args = trainer_for(small(), Recipe(accumulation=4), tmp_path, eval_dataset=rows(6)).args
    assert args.prediction_loss_only and args.per_device_eval_batch_size == 2
    for model, metrics in ((small(), {"compute_metrics": lambda found: {}}), (classifier(), {})):
        assert not trainer_for(model, Recipe(), tmp_path, **metrics).args.prediction_loss_only


def test_torchs_adafactor_has_a_rate_that_is_relative_to_the_weights(tmp_path):
    recipe, model = Recipe(optimizer="adafactor-torch"), small()
    given = {"batch_size": 2, "train_dataset": rows(), "output_dir": str(tmp_path), "max_steps": 1}
    assert make_trainer(small(), recipe, learning_rate=1e-4, **given).args.learning_rate == 1e-4
    before = [p.detach().clone() for p in model.parameters()]
    make_trainer(model, recipe, lr_scheduler_type="constant", progress=False, **given).train()
    pairs = zip(before, model.parameters(), strict=True)
    moved = [float((p.detach() - was).norm() / was.norm()) for was, p in pairs]
    assert min(moved) > 0 and max(moved) == pytest.approx(RELATIVE_RATE, rel=0.05)


def test_four_bits_are_not_merged_into(tmp_path):
    model = small()
    trainer_for(model, Recipe(lora_rank=4, quantized_base=True, precision="bf16"), tmp_path)
    # The first layer in 16 bits: what is refused is refused before anything changes.
    first = next(module for module in model.modules() if isinstance(module, LoRALinear))
    first.base = nn.Linear(first.base.in_features, first.base.out_features, bias=False).bfloat16()
    nn.init.ones_(first.B)
    before = first.base.weight.clone()
    with pytest.raises(ValueError, match="4 bits"):
        merge_adapters(model)
    assert torch.equal(first.base.weight, before)


def test_arguments_are_transformers_own(tmp_path):
    every = replace(RECIPES["all"], chunked_loss=False)
    found = arguments(every, 2)
    assert found["per_device_train_batch_size"] == 2 and found["gradient_accumulation_steps"] == 4
    assert found[CHECKPOINTING_ARGUMENT] is True
    assert set(found) <= set(TrainingArguments.__dataclass_fields__)
    assert arguments(Recipe(precision="autocast-fp16"), 1)["fp16"] is True
    # The 8-bit optimizer is the library's own, and Trainer would look for bitsandbytes.
    eight = trainer_for(small(), Recipe(optimizer="adamw-8bit"), tmp_path)
    assert eight.args.optim == arguments(Recipe(), 1)["optim"] == "adamw_torch"
    kwargs = arguments(Recipe(every_n_layers=2), 1)[f"{CHECKPOINTING_ARGUMENT}_kwargs"]
    assert kwargs == {"use_reentrant": False, "every_n_layers": 2}


LORA = Recipe(lora_rank=4, precision="bf16")


@pytest.mark.parametrize(
    ("recipe", "given", "says"),
    [
        (Recipe(in_backward=True), {}, "prepare(model, recipe)"),
        (Recipe(accumulation=3), {}, "equal micro-batches"),
        (Recipe(precision="autocast-fp16"), {}, "fp16=True"),
        (Recipe(sharding="fsdp"), {}, "into DDP without a word, and on cards accelerate's plugin"),
        (Recipe(sharding="zero1"), {}, "prepare(model, recipe) and step"),
        (Recipe(sharding="ddp"), {}, "torchrun --nproc-per-node=2"),
        (Recipe(), {"fsdp": "full_shard"}, "turn FSDP into DDP without a word"),
        (Recipe(), {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4"),
        (Recipe(), {"gradient_checkpointing": True}, "gradient_checkpointing=True"),
        (Recipe(), {"optim": "sgd"}, "optim='sgd'"),
        (LORA, {"model_init": small}, "make_trainer, since the recipe has changed this model"),
        (LORA, {"optimizers": (None, None)}, "make_trainer, since the recipe makes the optimizer"),
        (LORA, {"torch_empty_cache_steps": 1}, "its own step knows nothing of it"),
        (LORA, {"deepspeed": {"zero_optimization": {"stage": 2}}}, "its own step knows nothing"),
    ],
)
def test_what_contradicts_the_recipe_is_an_error_and_changes_nothing(recipe, given, says, tmp_path):
    model = small()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError) as caught:
        trainer_for(model, recipe, tmp_path, **given)
    assert says in str(caught.value)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_recipe_is_wanted(tmp_path):
    with pytest.raises(TypeError, match="give a Recipe"):
        trainer_for(small(), {"precision": "bf16"}, tmp_path)


def test_rows_without_labels_are_named(tmp_path):
    given = {"train_dataset": [{"input_ids": ids} for ids in rows().ids]}
    given["data_collator"] = default_data_collator  # the trainer's own adds labels
    trainer = trainer_for(small(), Recipe(), tmp_path, **given)
    with pytest.raises(ValueError, match=r"put labels into the batch.*NoneType where a scalar"):
        trainer.train()
