"""A recipe on transformers' ``Trainer``: same bytes as predicted, same steps as ``step``, and what
contradicts it refused.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.nightly import each
from support.trainers import ROWS, SEQ, Classified, classifier, rows, small, trainer_for
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from gradmem_lib import make_trainer, merge_adapters
from gradmem_lib.course.material import texts
from gradmem_lib.names import CATEGORIES
from gradmem_lib.optimizers import RELATIVE_RATE
from gradmem_lib.prediction.predict import predict
from gradmem_lib.techniques.lora import LoRALinear
from gradmem_lib.training.prepare import make_optimizer, prepare
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.training.step import step
from gradmem_lib.training.trainer_arguments import CHECKPOINTING_ARGUMENT, arguments

pytestmark = pytest.mark.usefixtures("interruptible")
RECIPES = {
    "naive": Recipe(),
    "accumulation": Recipe(accumulation=4),
    "per-layer": Recipe(accumulation=4, checkpointing="per-layer"),
    "every second layer": Recipe(accumulation=4, every_n_layers=2),
    "segments": Recipe(checkpointing=(2, 1)),
    "autocast": Recipe(accumulation=2, precision="autocast-bf16"),
    "bf16": Recipe(accumulation=2, precision="bf16"),
    "master": Recipe(accumulation=2, precision="float32-master"),
    "8-bit": Recipe(accumulation=2, precision="bf16", optimizer="adamw-8bit"),
    "adafactor": Recipe(accumulation=2, optimizer="adafactor"),
    "adafactor-torch": Recipe(accumulation=2, optimizer="adafactor-torch", precision="bf16"),
    "foreach": Recipe(optimizer="adamw-foreach"),
    "fused": Recipe(optimizer="adamw-fused"),
    "momentum": Recipe(optimizer="sgd", momentum=0.9),
    "LoRA": Recipe(accumulation=4, precision="bf16", lora_rank=4, checkpointing="per-layer"),
    "QLoRA": Recipe(accumulation=4, precision="bf16", lora_rank=4, quantized_base=True),
    "chunks": Recipe(accumulation=2, chunked_loss=True),
    "chunks in autocast": Recipe(accumulation=2, precision="autocast-bf16", chunked_loss=True),
    "all": Recipe(
        accumulation=4,
        precision="bf16",
        optimizer="adamw-8bit",
        lora_rank=4,
        checkpointing="per-layer",
        chunked_loss=True,
    ),
}


@pytest.mark.parametrize("name", each(2, RECIPES))
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


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(accumulation=4),
        Recipe(accumulation=2, checkpointing="sqrt"),
        Recipe(accumulation=4, precision="bf16", optimizer="adamw-8bit", lora_rank=4),
        Recipe(accumulation=2, chunked_loss=True, optimizer="adamw-fused"),
        Recipe(accumulation=4, precision="float32-master"),
    ],
    ids=str,
)
def test_it_takes_the_steps_of_recipe_step(recipe, tmp_path):
    data = rows(3 * ROWS)
    by_hand = small()
    torch.manual_seed(0)
    model, optimizer, undo = prepare(by_hand, recipe, lr=1e-3)
    if not recipe.optimizer.startswith("sgd"):
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
    losses = []
    for start in range(0, 3 * ROWS, ROWS):
        ids = data.ids[start : start + ROWS]
        losses.append(step(model, optimizer, {"input_ids": ids, "labels": ids}, recipe).item())
    undo.close()
    other = small()
    torch.manual_seed(0)
    trainer = trainer_for(other, recipe, tmp_path, in_order=True, train_dataset=data, max_steps=3)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, rel=1e-6)
    for (name, ours), theirs in zip(other.named_parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_accumulation_is_right_for_models_that_ignore_the_count(tmp_path):
    def gradient(accumulation):
        seen = {}

        class Look(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
                seen["gradient"] = model.classifier.weight.grad.clone()

        recipe = Recipe(optimizer="sgd", accumulation=accumulation)
        trainer = trainer_for(
            classifier(),
            recipe,
            tmp_path,
            train_dataset=Classified(8),
            max_steps=1,
            callbacks=[Look()],
        )
        trainer.train()
        return seen["gradient"], trainer.state.log_history[0]["loss"]

    whole, loss = gradient(1)
    cut, cut_loss = gradient(4)
    assert torch.allclose(cut, whole, rtol=1e-5, atol=1e-8)
    assert cut_loss == pytest.approx(loss, rel=1e-5)
    # The trap that this avoids: the same model under Trainer itself.
    model = classifier()
    args = TrainingArguments(
        str(tmp_path / "plain"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=1,
        optim="sgd",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
    )
    plain = Trainer(model, args, train_dataset=Classified(8))
    plain.train()
    assert plain.state.log_history[0]["loss"] == pytest.approx(4 * loss, rel=1e-4)


def test_labels_that_do_not_count_do_not_weigh(tmp_path):
    class Ragged(texts.Rows):
        def __getitem__(self, index):
            labels = self.ids[index].clone()
            labels[: 5 * index if index < ROWS - 1 else SEQ] = -100  # and the last row has none
            return {"input_ids": self.ids[index], "labels": labels}

    losses = {}
    for accumulation in (1, ROWS):
        trainer = trainer_for(
            small(),
            Recipe(accumulation=accumulation),
            tmp_path,
            train_dataset=Ragged(rows(ROWS).ids),
            max_steps=1,
        )
        trainer.train()
        losses[accumulation] = trainer.state.log_history[0]["loss"]
    assert losses[ROWS] == pytest.approx(losses[1], rel=1e-5)


def test_evaluation_is_the_mean_and_keeps_no_logits(tmp_path):
    model, held = small(), rows(6)
    trainer = trainer_for(model, Recipe(accumulation=4), tmp_path, eval_dataset=held)
    found = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        expected = model.eval()(input_ids=held.ids, labels=held.ids).loss.item()
    assert found == pytest.approx(expected, rel=1e-5)
    assert trainer.args.prediction_loss_only and trainer.args.per_device_eval_batch_size == 2
    for model, metrics in ((small(), {"compute_metrics": lambda found: {}}), (classifier(), {})):
        assert not trainer_for(model, Recipe(), tmp_path, **metrics).args.prediction_loss_only


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_adafactor_does_not_depend_on_how_large_gradients_are(dtype):
    numbers = torch.Generator().manual_seed(0)
    start, direction = torch.randn(2, 64, 32, generator=numbers).to(dtype)
    ends = []
    for size in (1.0, 2.0**-20):
        weight = nn.Parameter(start.clone())
        optimizer = make_optimizer([weight], Recipe(optimizer="adafactor-torch"), lr=0.1)
        weight.grad = direction * size
        weight.grad[0] = 0  # as a token that is not in the batch
        optimizer.step()
        ends.append(weight.detach())
    assert (
        torch.equal(*ends)
        and torch.equal(ends[0][0], start[0])
        and not torch.equal(ends[0][1:], start[1:])
    )


def test_torchs_adafactor_has_a_rate_that_is_relative_to_the_weights(tmp_path):
    recipe = Recipe(optimizer="adafactor-torch")
    given = {
        "batch_size": 2,
        "train_dataset": rows(),
        "output_dir": str(tmp_path),
        "max_steps": 1,
        "progress": False,
    }
    assert make_trainer(small(), recipe, **given).args.learning_rate == RELATIVE_RATE
    assert make_trainer(small(), recipe, learning_rate=1e-4, **given).args.learning_rate == 1e-4
    model = small()
    before = [p.detach().clone() for p in model.parameters()]
    trainer = make_trainer(model, recipe, lr_scheduler_type="constant", **given)
    trainer.train()
    pairs = zip(before, model.parameters(), strict=True)
    moved = [float((p.detach() - was).norm() / was.norm()) for was, p in pairs]
    assert min(moved) > 0 and max(moved) == pytest.approx(RELATIVE_RATE, rel=0.05)


def test_merged_adapters_are_an_ordinary_model(tmp_path):
    model = small()
    trainer_for(model, Recipe(lora_rank=4), tmp_path).train()
    ids = rows(2).ids
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
    merge_adapters(model)
    assert not any(isinstance(module, LoRALinear) for module in model.modules())
    model.save_pretrained(tmp_path / "saved")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=ids).logits, expected, atol=1e-5)


def test_a_second_lora_on_the_same_model_is_refused(tmp_path):
    model, recipe = small(), Recipe(lora_rank=4)
    trainer_for(model, recipe, tmp_path)
    with pytest.raises(ValueError, match="has LoRA already"):
        trainer_for(model, recipe, tmp_path)
    trainer_for(merge_adapters(model), recipe, tmp_path)


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


def test_arguments_are_transformers_own():
    every = replace(RECIPES["all"], chunked_loss=False)
    found = arguments(every, 2)
    assert found["per_device_train_batch_size"] == 2 and found["gradient_accumulation_steps"] == 4
    assert found[CHECKPOINTING_ARGUMENT] is True
    assert set(found) <= set(TrainingArguments.__dataclass_fields__)
    assert arguments(Recipe(precision="autocast-fp16"), 1)["fp16"] is True
    kwargs = arguments(Recipe(every_n_layers=2), 1)[f"{CHECKPOINTING_ARGUMENT}_kwargs"]
    assert kwargs == {"use_reentrant": False, "every_n_layers": 2}


def test_no_argument_asks_for_what_is_not_installed(tmp_path):
    """The 8-bit optimizer is the library's own, and Trainer would look for bitsandbytes."""
    names = {
        "adamw": "adamw_torch",
        "adamw-8bit": "adamw_torch",
        "adamw-fused": "adamw_torch_fused",
        "sgd": "sgd",
    }
    for ours, theirs in names.items():
        assert trainer_for(small(), Recipe(optimizer=ours), tmp_path).args.optim == theirs


@pytest.mark.parametrize(
    ("recipe", "given", "says"),
    [
        (Recipe(in_backward=True), {}, "prepare(model, recipe)"),
        (Recipe(accumulation=3), {}, "equal micro-batches"),
        (Recipe(precision="autocast-fp16"), {}, "fp16=True"),
        (Recipe(), {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4"),
        (Recipe(), {"per_device_train_batch_size": 1}, "per_device_train_batch_size=1"),
        (Recipe(), {"bf16": True}, "bf16=True"),
        (Recipe(), {"gradient_checkpointing": True}, "gradient_checkpointing=True"),
        (Recipe(), {"optim": "sgd"}, "optim='sgd'"),
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
    class Bare(texts.Rows):
        def __getitem__(self, index):
            return {"input_ids": self.ids[index]}

    trainer = trainer_for(small(), Recipe(), tmp_path, train_dataset=Bare(rows().ids))
    with pytest.raises(
        ValueError, match=r"NoneType where a scalar loss was expected: put labels into the batch"
    ):
        trainer.train()
