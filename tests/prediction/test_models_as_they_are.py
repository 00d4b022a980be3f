"""Models of transformers as their owner has them: their mode and their switches, what was edited by
hand, and what is set around them. They are predicted as they are, or refused; no layer's answer is
taken for another's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from support.families import OLDER
from support.predicted import (
    assert_predicted,
    assert_same,
    config,
    mean_square,
    measured,
    tracked,
    tracked_loop,
)
from torch import nn
from transformers import (
    AutoModelForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama import modeling_llama

from gradmem_lib import Recipe, predict
from gradmem_lib.course import models
from gradmem_lib.prediction.question import CannotTrace, Source
from gradmem_lib.techniques.checkpointing import checkpoint_layers
from gradmem_lib.training.prepare import prepare

AS_IT_IS = Recipe(precision=None, attention=None)
RECIPE = Recipe(attention=None, optimizer="sgd")
ASK = {"batch_size": 8, "seq_len": 12, "target": "cpu"}


def llama(layers: int = 8) -> LlamaForCausalLM:
    return models.tiny_llama(layers=layers, hidden=32, heads=2, intermediate=48, vocab=61)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(96).view(8, 12) % 58 + 3
    return {"input_ids": ids, "labels": ids}


def fewer_are_called(model):
    model.config.num_hidden_layers = 6


def one_layer_twice(model):
    model.model.layers[6] = model.model.layers[4]


def one_is_passed_over(model):
    model.model.layers[5].forward = lambda hidden_states, **more: hidden_states


def one_part_keeps_more(model):
    down = model.model.layers[5].mlp.down_proj

    def forward(self, x):
        return nn.functional.linear(x.exp().log1p(), self.weight)

    down.forward = types.MethodType(forward, down)


def one_has_another_class(model):
    class Wide(type(model.model.layers[5].mlp)):
        def forward(self, x):
            return super().forward(x) * torch.sigmoid(x)

    model.model.layers[5].mlp.__class__ = Wide


EDITS = (
    fewer_are_called,
    one_layer_twice,
    one_is_passed_over,
    one_part_keeps_more,
    one_has_another_class,
)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_an_edited_model_is_predicted_as_it_is(edit):
    model = llama()
    assert Source(model, "", is_user_module=True).lists
    edit(model)
    assert_predicted(model, batch(), RECIPE)


class Own(LlamaForCausalLM):
    """People's own model on transformers' base class: the last layers see half of the tokens."""

    def forward(self, input_ids, labels):
        hidden = self.model.embed_tokens(input_ids)
        rotary = self.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        for i, layer in enumerate(self.model.layers):
            if i == 6:
                hidden, rotary = hidden[:, ::2], tuple(part[:, ::2] for part in rotary)
            hidden = layer(hidden, position_embeddings=rotary)
        return nn.functional.cross_entropy(
            self.lm_head(hidden).flatten(0, 1), labels[:, ::2].flatten()
        )


def test_a_class_of_ones_own_is_traced_whole():
    model = Own(llama().config)
    assert isinstance(model.model, LlamaModel)
    assert Source(model, "", is_user_module=True).lists == []
    assert_predicted(model, batch(), RECIPE)


def checkpointed() -> nn.Module:
    model = llama(3)
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    return model


def with_dropout() -> nn.Module:
    small = config("bert", 2)
    small._attn_implementation = "eager"
    return AutoModelForMaskedLM.from_config(small)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (checkpointed, "checkpointing is on and does"),
        (with_dropout, "dropout does nothing"),
    ],
)
def test_the_mode_stays(make, says, training):
    model = make().train(training)
    found = predict(model, batch=batch(), recipe=AS_IT_IS, target="cpu")
    assert found.peak == tracked_loop(model, batch()).peak
    assert all(module.training == training for module in model.modules())
    assert (says in " ".join(found.notes)) != training


@pytest.mark.parametrize("every", [1, [1, 2]])
def test_checkpoints_on_a_model_are_predicted(every):
    model = llama(3).train()
    model.config.use_cache = False
    checkpoint_layers(model.model.layers, every=every)
    assert predict(model, **ASK).peak == tracked_loop(model, batch()).peak


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_cache_that_is_on_is_predicted(use_cache):
    cfg = llama(3).config
    cfg.num_key_value_heads, cfg.use_cache, cfg._attn_implementation = 1, use_cache, "eager"
    model = LlamaForCausalLM(cfg)
    predicted = predict(model, **ASK, recipe=Recipe(attention=None))
    without = predict(cfg, **ASK, recipe=Recipe(attention=None))
    assert predicted.peak == tracked_loop(model, batch()).peak
    assert (predicted.peak == without.peak) == (not use_cache)  # a recipe's own step has none


def test_a_recipes_step_has_no_cache_in_a_decoder_with_a_config_of_its_own():
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
    )
    assert model.decoder.config.use_cache
    prepare(model, RECIPE)
    assert not model.config.use_cache and not model.decoder.config.use_cache


class Wider(modeling_llama.LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x.sin().sin().sin())  # each keeps its input


def wider_cross_entropy(x, *args, own=F.cross_entropy, **kwargs):
    return own(x * 1.0, *args, **kwargs)


@pytest.mark.parametrize("change", ["default dtype", "patched layer", "patched function"])
def test_what_is_set_around_a_step_is_part_of_the_question(change, monkeypatch):
    cfg = llama().config
    before = predict(cfg, **ASK).peak
    if change == "default dtype":
        torch.set_default_dtype(torch.float64)
    elif change == "patched layer":
        monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", Wider)
    else:
        monkeypatch.setattr(F, "cross_entropy", wider_cross_entropy)
    try:
        changed = predict(cfg, **ASK).peak
        assert changed == measured(cfg, batch_size=8, seq_len=12).peak
    finally:
        torch.set_default_dtype(torch.float32)
    assert changed != before


def test_autocast_belongs_into_the_recipe():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="leave that block"):
        predict(config("llama"), **ASK)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_prediction_is_of_training_wherever_it_is_asked_for(around):
    model, x = nn.Linear(64, 64), torch.randn(32, 64)
    with around():
        predicted = predict(model, batch=x, loss=mean_square, target="cpu")
    assert_same(predicted, tracked(model, x, loss=mean_square))


def test_what_a_first_step_leaves_in_a_module_is_there_before_the_second():
    """Rotary frequencies of long sequences, which a first long one makes."""
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 2.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope["original_max_position_embeddings"] = 8
    cfg = config("llama").to_dict() | {"rope_scaling" if OLDER else "rope_parameters": rope}
    cfg = LlamaConfig(**cfg)
    if OLDER:  # reads how long the row is
        with pytest.raises(CannotTrace, match=r"reads a tensor's value.*rope"):
            predict(cfg, **ASK)
        return
    assert_same(predict(cfg, **ASK), measured(cfg, batch_size=8, seq_len=12))


PLAIN = """
import torch
from gradmem_lib.prediction.predict import predict

model, batch = torch.nn.Linear(8, 1), torch.rand(2, 8)
loss = lambda m, x: m(x).square().mean()
print(predict(model, batch=batch, loss=loss, target="cpu").peak.total)
"""


def test_a_plain_module_needs_no_library_of_others(tmp_path):
    """With a torchvision and a transformers that cannot be imported."""
    for name in ("torchvision", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('does not fit this torch')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", PLAIN],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-500:]
    found = predict(nn.Linear(8, 1), batch=torch.rand(2, 8), loss=mean_square, target="cpu")
    assert int(done.stdout) == found.peak.total


def test_the_scores_that_adaloras_loop_keeps_are_in_a_note():
    peft = pytest.importorskip("peft")
    options = {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 2, "total_step": 9}
    adapter = peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], **options)
    model = peft.get_peft_model(llama(2), adapter)
    [note] = predict(model, batch=batch(), recipe=AS_IT_IS, target="cpu").notes
    model(**batch()).loss.backward()
    model.base_model.update_and_allocate(0)
    allocator = model.base_model.rankallocator
    tables = allocator.ipt, allocator.exp_avg_ipt, allocator.exp_avg_unc
    kept = sum(tensor.nbytes for table in tables for tensor in table.values())
    assert kept > 0
    assert f"keeps {kept:,} bytes" in note
