"""One recipe has one optimizer, whoever makes it: the groups of prepare and make_trainer, what a
step does with gradients besides adding them up, and what masters start from.
"""

from __future__ import annotations

import tempfile
from functools import partial

import pytest
import torch
from support.trainers import rows, small, trainer_for
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from transformers import GPT2Config, GPT2LMHeadModel

from gradmem_lib import (
    GradScaler,
    LoRALinear,
    Recipe,
    make_trainer,
    merge_adapters,
    prepare,
    step,
)

RATE, FALLING = 1e-3, 4
LLAMA = {"layers": 1, "hidden": 32, "intermediate": 48, "vocab": 64}


def head_faster(name, parameter):
    return {"lr": 0.5} if "head" in name else None


@pytest.mark.parametrize(
    "model",
    [
        GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2)),
        nn.Sequential(nn.Embedding(8, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
    ],
    ids=["GPT-2", "own"],
)
def test_decay_is_for_matrices_alone(model):
    """Found by their shapes: biases and the weights of norms are vectors."""
    together = prepare(model, Recipe(attention=None), weight_decay=0.1).optimizer.param_groups
    assert len(together) == 2
    each = prepare(model, Recipe(attention=None, in_backward=True), weight_decay=0.1)
    each.undo.close()
    for groups in (together, [group for one in each.optimizer for group in one.param_groups]):
        found = {p: group["weight_decay"] for group in groups for p in group["params"]}
        assert found == {p: 0.1 * (p.dim() > 1) for p in model.parameters()}


def test_a_setting_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"'adamw' has no learning_rate: .*choose among lr, betas"):
        prepare(small(**LLAMA), Recipe(), groups=lambda name, p: {"learning_rate": 1.0})


def falling(number: int) -> float:
    return 1 - number / FALLING


TRAINED = [
    {"checkpointing": "sqrt", "offload": "boundaries", "optimizer": "sgd"},
    {"precision": "bf16", "optimizer": "adamw-8bit", "lora_rank": 4},
    {"precision": "float32-master", "chunked_loss": True},
]


@pytest.mark.parametrize("fields", TRAINED, ids=str)
def test_step_trains_as_make_trainer_to_the_bit(fields, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    recipe = Recipe(accumulation=2, attention="eager", **fields)
    settings = {"weight_decay": 0.1, "groups": head_faster}
    data, theirs, ours = rows(FALLING * 8, 12, 64), small(**LLAMA), small(**LLAMA)
    torch.manual_seed(0)
    trainer = trainer_for(
        theirs,
        recipe,
        tmp_path,
        in_order=True,
        train_dataset=data,
        max_steps=FALLING,
        max_grad_norm=0.5,
        learning_rate=RATE,
        lr_scheduler_type="linear",
        **settings,
    )
    trainer.train()
    if recipe.offload:
        assert trainer.offload_hooks.bytes > 0 and not list(tmp_path.glob("gradmem-*"))
    torch.manual_seed(0)
    made = prepare(ours, recipe, lr=RATE, **settings)
    scheduler = LambdaLR(made.optimizer, falling)
    losses = []
    for number in range(FALLING):
        ids = data.ids[8 * number : 8 * number + 8]
        batch = {"input_ids": ids, "labels": ids}
        loss = step(ours, made.optimizer, batch, recipe, max_grad_norm=0.5, scheduler=scheduler)
        losses.append(loss.item())
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, rel=1e-6)
    for (where, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q), where


@pytest.mark.parametrize("scaler", [GradScaler(), torch.amp.GradScaler("cpu")])
def test_a_skipped_step_is_none_for_the_schedule_either(scaler):
    """And gradients are clipped after they are unscaled."""
    model, recipe = nn.Linear(1, 1, bias=False), Recipe(precision=None, optimizer="sgd")
    nn.init.ones_(model.weight)
    made = prepare(model, recipe, lr=1.0)
    scheduler = StepLR(made.optimizer, 1, 0.5)
    given = {"scaler": scaler, "scheduler": scheduler, "max_grad_norm": 1.0}
    rates = []
    for factor in (torch.inf, 3.0):
        batch = torch.tensor([[factor]])
        step(model, made.optimizer, batch, recipe, loss=lambda m, x: m(x).mean(), **given)
        rates.append(scheduler.get_last_lr()[0])
    assert rates == [1.0, 0.5]
    assert model.weight.item() == pytest.approx(0.0, abs=1e-5)  # clipping adds 1e-6 to the norm


def test_what_steps_in_backward_has_schedulers_and_no_clipping():
    model, recipe = small(**LLAMA), Recipe(in_backward=True)
    made = prepare(model, recipe, lr=RATE)
    ids = torch.randint(0, 64, (1, 8))
    batch = {"input_ids": ids, "labels": ids}
    schedulers = [StepLR(optimizer, 1, 0.5) for optimizer in made.optimizer]
    step(model, made.optimizer, batch, recipe, scheduler=schedulers)
    assert {optimizer.param_groups[0]["lr"] for optimizer in made.optimizer} == {RATE / 2}
    with pytest.raises(ValueError, match="leave max_grad_norm out, or in_backward"):
        step(model, made.optimizer, batch, recipe, max_grad_norm=1.0)


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize("fields", [{"optimizer": "adamw-fused"}, {"in_backward": True}])
def test_a_master_starts_from_the_weights_that_were_given_or_loaded_since(fields, loaded):
    recipe, model = Recipe(precision="float32-master", **fields), small(**LLAMA)
    given = {where: p.detach().clone() for where, p in model.named_parameters()}
    optimizer = prepare(model, recipe, lr=0.0).optimizer
    if loaded:
        model.load_state_dict({name: torch.randn_like(t) for name, t in model.state_dict().items()})
        given = {where: p.detach().float() for where, p in model.named_parameters()}
    ids = torch.randint(0, 64, (1, 8))
    step(model, optimizer, {"input_ids": ids, "labels": ids}, recipe)  # which makes the states
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    states = {p: state for one in optimizers for p, state in one.state.items()}
    for where, parameter in model.named_parameters():
        assert torch.equal(states[parameter]["master"], given[where])
        assert torch.equal(parameter, given[where].bfloat16())


def test_merged_weights_are_the_nearest():
    torch.manual_seed(0)
    layer = LoRALinear(nn.Linear(256, 128, bias=False).bfloat16(), 8, dtype=torch.bfloat16)
    nn.init.normal_(layer.B, std=0.02)
    wide = [t.detach().double() for t in (layer.base.weight, layer.A, layer.B)]
    exact = wide[0] + layer.scale * wide[2] @ wide[1]
    merged = merge_adapters(nn.Sequential(layer))[0].weight
    # float32 is rounded to bf16 in turn: one in 65,536 may lie on the other side of the middle.
    assert (merged != exact.bfloat16()).float().mean() < 1e-3


def test_a_merged_head_leaves_the_embedding_as_it_is():
    model, ids = small(tied=True), torch.arange(9)[None]
    model.lm_head = LoRALinear(model.lm_head, 2)
    nn.init.normal_(model.lm_head.B)
    before = model(ids).logits
    merge_adapters(model)
    torch.testing.assert_close(model(ids).logits, before)


class HandsOn(torch.optim.AdamW):
    def __init__(self, params, lr, **settings):
        super().__init__(params, lr, **settings)


@pytest.mark.parametrize("made", [torch.optim.SGD, HandsOn, partial(HandsOn, eps=1e-6)])
def test_a_class_steps_one_parameter_after_another_as_its_prediction_does(made, tmp_path):
    recipe = Recipe(precision=None, optimizer=made)
    assert prepare(nn.Linear(1, 1), recipe).optimizer.defaults["foreach"] is False
    with pytest.raises(ValueError, match="give a class its settings as optimizer=functools"):
        make_trainer(small(layers=1), recipe, batch_size=1, output_dir=tmp_path, betas=(0.8, 0.9))
