"""A recipe on transformers' ``Trainer``: same bytes as predicted, same steps as ``step``. It takes
what ``Trainer`` takes, or says why not; what it writes loads anywhere; rows of text of any lengths.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.families import tiny_config, with_dropout
from support.gradients import error, gradient
from support.trainers import (
    ROWS,
    SEQ,
    LastGradient,
    classifier,
    plain_arguments,
    rows,
    small,
    trainer_for,
)
from torch import nn
from transformers import (
    BertLMHeadModel,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from gradmem_lib import (
    LoRALinear,
    MemoryCallback,
    Recipe,
    arguments,
    make_trainer,
    merge_adapters,
    predict,
)
from gradmem_lib.names import CATEGORIES
from gradmem_lib.optimizers import RELATIVE_RATE
from gradmem_lib.training import trainer as of_trainer
from gradmem_lib.training.text_rows import collate_text
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


# make_trainer takes what Trainer takes, or says why not; what it writes loads anywhere.


def test_a_lora_run_goes_on_from_a_checkpoint(tmp_path):
    model, recipe = small(), Recipe(lora_rank=4)
    trainer_for(model, recipe, tmp_path, save_strategy="steps", save_steps=1).train()
    again = trainer_for(small(), recipe, tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    for ours, theirs in zip(again.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("kernel", "moves", "seen"), [(True, False, False), (True, True, True)])
def test_losses_are_shown_but_where_nothing_moves(kernel, moves, seen, tmp_path, monkeypatch):
    monkeypatch.setattr(of_trainer, "in_kernel", lambda: kernel)
    monkeypatch.setattr(of_trainer, "live_enabled", lambda: moves)
    trainer = trainer_for(small(), Recipe(), tmp_path, progress=None)
    kinds = {type(callback) for callback in trainer.callback_handler.callbacks}
    assert trainer.args.disable_tqdm is not seen
    assert bool(kinds & {ProgressCallback, PrinterCallback}) == seen


def test_two_cards_without_a_group_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match=r"2 cards are in sight.*CUDA_VISIBLE_DEVICES=0"):
        trainer_for(small(), Recipe(), tmp_path)


def test_what_happens_between_steps_is_in_no_steps_peak(tmp_path):
    class Between(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            torch.zeros(10**7)

    trainer = trainer_for(small(), Recipe(optimizer="sgd"), tmp_path, callbacks=[Between()])
    trainer.train()
    first, second = (trainer.memory.by_step[n].total for n in (1, 2))
    assert trainer.memory.peak.total > 4 * 10**7 and second < 1.1 * first < 2 * 10**7


def collated(rows):
    ids = nn.utils.rnn.pad_sequence(
        [row["ids"] for row in rows], batch_first=True, padding_value=-100
    )
    return {"input_ids": ids.clamp(min=0), "attention_mask": (ids != -100).long(), "labels": ids}


class Words:
    def save_pretrained(self, folder):
        Path(folder, "words").touch()


def test_it_takes_a_collator_and_a_tokenizer(tmp_path):
    rows = [{"ids": torch.arange(1, 6 + 5 * i)} for i in range(8)]  # of unequal lengths
    given = {"train_dataset": rows, "remove_unused_columns": False, "max_steps": 1}
    given |= {"data_collator": collated, "processing_class": Words()}
    losses = []
    for accumulation in (1, 4):
        trainer = trainer_for(small(), Recipe(accumulation=accumulation), tmp_path, **given)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    expected = small().train()(**collated(rows)).loss.item()
    assert losses == pytest.approx([expected, expected], rel=1e-5)
    trainer.save_model()
    assert (tmp_path / "out" / "words").exists()


@pytest.mark.parametrize("ours", [True, False])
def test_auto_find_batch_size_answers_a_budget_with_fewer_rows(ours, tmp_path):
    least, most = (
        predict(small(), batch_size=n, seq_len=SEQ, recipe=Recipe(), target="cpu").peak.total
        for n in (7, 8)
    )
    budget = (least + most) // 2
    if ours:
        trainer = trainer_for(small(), Recipe(), tmp_path, budget=budget, auto_find_batch_size=True)
        trainer.train()
        memory = trainer.memory
    else:
        given = {"per_device_train_batch_size": 8, "auto_find_batch_size": True}
        args = plain_arguments(tmp_path, optim="adamw_torch", **given)
        with MemoryCallback(live=False, budget=budget) as memory:
            trainer = Trainer(small(), args, train_dataset=rows(), callbacks=[memory])
            trainer.train()
    assert trainer.state.global_step == 2 and sorted(memory.by_step) == [1, 2]
    assert least // 2 < memory.peak.total <= budget
    assert trainer._train_batch_size == 7


def test_a_loss_that_is_not_finite_makes_no_step(tmp_path):
    model, data = small(), rows()
    with torch.no_grad():
        model.get_input_embeddings().weight[data.ids[5, 0]] = torch.nan
    before = copy.deepcopy(model.state_dict())
    trainer = trainer_for(model, Recipe(accumulation=2), tmp_path, in_order=True)
    with pytest.raises(ValueError, match=r"look for rows .*so none was made"):
        trainer.train()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0, equal_nan=True)


# Rows of text of unequal lengths, without labels: each weighs as much as its tokens.


LENGTHS = (3, 17, 8, 2, 30, 5, 11, 8)
# Without the mask, BERT, which looks both ways, would read the padding.
MODELS = {"llama": LlamaForCausalLM, "gpt2": GPT2LMHeadModel, "bert": BertLMHeadModel}


def texts(with_mask: bool) -> list[dict]:
    generator = torch.Generator().manual_seed(3)
    rows = []
    for length in LENGTHS:
        rows.append({"input_ids": torch.randint(1, 96, (length,), generator=generator).tolist()})
        if with_mask:
            rows[-1]["attention_mask"] = [1] * length
    return rows


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("with_mask", [False, True])
def test_unequal_rows_without_labels_train_as_each_row_alone(family, with_mask, tmp_path):
    torch.manual_seed(0)
    model = MODELS[family](with_dropout(tiny_config(family), 0.0))
    alone, rows = copy.deepcopy(model), texts(with_mask)
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        loss = alone(input_ids=ids, labels=ids).loss * (ids.numel() - 1)
        (loss / (sum(LENGTHS) - len(LENGTHS))).backward()
    last, given = LastGradient(), {"train_dataset": rows, "max_steps": 1}
    trainer_for(model, Recipe(accumulation=2), tmp_path, callbacks=[last], **given).train()
    assert error(last.found, gradient(alone)) <= 1e-5


def test_other_rows_are_collated_as_before():
    equal = collate_text([{"input_ids": [1, 2], "labels": [3, 4]}] * 2)
    assert equal.keys() == {"input_ids", "labels"}
    assert equal["input_ids"].tolist() == [[1, 2]] * 2 and equal["labels"].tolist() == [[3, 4]] * 2
    assert "pixel_values" in collate_text([{"input_ids": [1], "pixel_values": [0.5]}])
    assert "attention_mask" not in collate_text([{"input_ids": [1, 2]}, {"input_ids": [3, 4]}])
