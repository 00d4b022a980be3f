"""Adapters are PEFT's: what is saved loads there, and models that peft has made are taken
everywhere or refused.
"""

from __future__ import annotations

import copy
import json
from functools import partial

import pytest
import torch
from support.families import tiny_config
from support.predicted import assert_same, config, tracked
from support.trainers import SEQ, classifier, rows, small, trainer_for
from transformers import LlamaForSequenceClassification

from gradmem_lib import LoRALinear, Recipe, merge_adapters, predict, prepare
from gradmem_lib.course import models
from gradmem_lib.model.classes import model_class
from gradmem_lib.techniques.lora import add_lora
from gradmem_lib.techniques.quantized import quantize_base
from gradmem_lib.training.adapters import adapters_of, save_adapters

peft = pytest.importorskip("peft")


def gpt2():
    return models.tiny_gpt2(layers=2, hidden=64, heads=2, vocab=512, positions=SEQ)


def logits(model, ids):
    pair = {"decoder_input_ids": ids} if getattr(model.config, "is_encoder_decoder", False) else {}
    with torch.no_grad():
        return model.eval()(input_ids=ids, **pair).logits


def assert_peft_loads(model, fresh, folder):
    """Save the adapters of ``model``, load them into ``fresh`` with peft, and compare."""
    ids = torch.randint(3, 90, (2, 12))
    expected = logits(model, ids)
    save_adapters(model, folder)
    loaded = peft.PeftModel.from_pretrained(fresh, folder)
    torch.testing.assert_close(logits(loaded, ids), expected, rtol=0, atol=1e-5)
    return loaded


def test_what_save_model_writes_is_loaded_by_peft(tmp_path):
    fresh = gpt2()
    model = copy.deepcopy(fresh)
    trainer = trainer_for(model, Recipe(lora_rank=4), tmp_path, learning_rate=0.05)
    trainer.train()
    saved = tmp_path / "saved"
    trainer.save_model(str(saved))
    names = {path.name for path in saved.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((saved / "adapter_config.json").read_text())
    loaded = peft.PeftModel.from_pretrained(fresh, saved)
    loaded.save_pretrained(tmp_path / "theirs")
    theirs = json.loads((tmp_path / "theirs" / "adapter_config.json").read_text())
    theirs["target_modules"] = config["target_modules"]  # in another order
    assert config.items() <= theirs.items() and config["inference_mode"] is True
    assert type(loaded) is peft.PeftModelForCausalLM
    ids = rows(2).ids
    assert torch.allclose(logits(loaded, ids), logits(model, ids), atol=1e-5)
    assert not torch.allclose(logits(gpt2(), ids), logits(model, ids), atol=1e-2)


def random_additions(model):
    for module in model.modules():
        if isinstance(module, LoRALinear):
            torch.nn.init.normal_(module.B, std=0.1)
    return model


@pytest.mark.parametrize(("family", "bits"), [("t5", 32), ("mixtral", 32), ("llama", 4)])
def test_adapters_of_other_families_and_on_4_bits_load_too(family, bits, tmp_path):
    torch.manual_seed(0)
    fresh = model_class(tiny_config(family))(tiny_config(family))
    model = copy.deepcopy(fresh)
    add_lora(model, 3)
    if bits == 4:
        quantize_base(model)
        with torch.no_grad():
            for name, module in adapters_of(model).items():
                fresh.get_submodule(name).weight.copy_(module.base.dequantized())
    assert_peft_loads(random_additions(model), fresh, tmp_path)


def test_what_peft_would_compute_otherwise_is_not_saved(tmp_path):
    mamba = model_class(tiny_config("mamba"))(tiny_config("mamba"))
    add_lora(mamba, 2)
    with pytest.raises(ValueError, match=r"was not run .*: run it once"):
        save_adapters(mamba, tmp_path)
    mamba(torch.randint(3, 90, (2, 6)))
    with pytest.raises(ValueError, match=r"mixer\.dt_proj is multiplied without a call"):
        save_adapters(mamba, tmp_path)
    llama = small()
    add_lora(llama, 2)
    llama.model.norm.requires_grad_(True)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is trained too"):
        save_adapters(llama, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_new_heads_addition_alone_is_no_adapter(tmp_path):
    model = LlamaForSequenceClassification(config("llama"))
    add_lora(model, 3, ("score",))
    with pytest.raises(
        ValueError, match=r"no addition to a pretrained layer in this .*, only \['score'\]"
    ):
        save_adapters(model, tmp_path)


def wrapped(base=small, kind="LoraConfig", dtype=torch.float32, **options):
    torch.manual_seed(0)
    settings = {"r": 4, "target_modules": "all-linear"} if kind == "LoraConfig" else {}
    settings |= {"task_type": "CAUSAL_LM"} | options
    return peft.get_peft_model(base().to(dtype), getattr(peft, kind)(**settings))


BATCH = {"input_ids": torch.randint(0, 512, (4, 16)), "labels": torch.randint(0, 512, (4, 16))}
OPTIONS = {"lora_alpha": 16, "lora_dropout": 0.3, "target_modules": ["q_proj", "mlp.up_proj"]}


def trained_numbers(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def ours_and_theirs(dtype):
    """Two models with the same numbers."""
    theirs = wrapped(dtype=dtype, **OPTIONS)
    torch.manual_seed(0)
    ours = small().to(dtype)
    named = {"lora_alpha": 16, "lora_dropout": 0.3, "lora_targets": OPTIONS["target_modules"]}
    recipe = Recipe(precision=None, attention=None, lora_rank=4, **named)
    prepare(ours, recipe)
    random_additions(ours)
    with torch.no_grad():
        for name, module in adapters_of(ours).items():
            their = theirs.base_model.model.get_submodule(name)
            their.lora_A["default"].weight.copy_(module.A)
            their.lora_B["default"].weight.copy_(module.B)
    return ours, theirs, recipe


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alpha_dropout_and_targets_are_pefts(dtype):
    ours, theirs, recipe = ours_and_theirs(dtype)
    outputs = []
    for model in (ours, theirs):
        model.train()
        torch.manual_seed(3)  # dropout
        outputs.append(model(**BATCH))
        outputs[-1].loss.backward()
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    assert trained_numbers(ours) == trained_numbers(theirs)
    for name, module in adapters_of(ours).items():
        their = theirs.base_model.model.get_submodule(name)
        assert module.A.grad.any() and module.B.grad.any()
        assert torch.equal(module.A.grad, their.lora_A["default"].weight.grad)
        assert torch.equal(module.B.grad, their.lora_B["default"].weight.grad)
    ids = rows(2).ids
    assert torch.equal(logits(ours, ids), logits(theirs, ids))  # dropout is off
    # The bytes, measured in both and predicted.
    plain = Recipe(precision=None, attention=None)
    peaks = [tracked(model.train(), BATCH, plain).peak for model in (ours, theirs)]
    assert peaks[0] == peaks[1]
    fresh = small().to(dtype)
    predicted = predict(copy.deepcopy(fresh), batch=BATCH, recipe=recipe, target="cpu")
    assert_same(predicted, tracked(fresh, BATCH, recipe))


def test_alpha_and_dropout_are_saved_for_peft(tmp_path):
    ours, _, _ = ours_and_theirs(torch.float32)
    config = assert_peft_loads(ours, small(), tmp_path).peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 16, 0.3)
    next(iter(adapters_of(ours).values())).dropout = 0.1
    with pytest.raises(ValueError, match=r"same rank, scale and dropout.*0\.1\) and .*0\.3\)"):
        save_adapters(ours, tmp_path)


def test_a_peft_model_is_trained_by_make_trainer_and_saved_as_its_own(tmp_path):
    model = wrapped(lambda: small(vocab=512))
    recipe = Recipe(precision=None, chunked_loss=True, accumulation=2, checkpointing=[2, 1])
    trainer = trainer_for(model, recipe, tmp_path, learning_rate=0.05)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = peft.PeftModel.from_pretrained(wrapped().unload(), tmp_path / "saved")
    ids = rows(2).ids
    wanted = logits(model, ids)
    assert torch.allclose(logits(loaded, ids), wanted, atol=1e-5)
    assert torch.allclose(logits(merge_adapters(model), ids), wanted, atol=1e-5)


@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_a_merged_half_of_tied_weights_leaves_the_other_also_when_loaded(targets, tmp_path):
    model = wrapped(partial(small, tied=True), target_modules=targets)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    ids = rows(2).ids
    wanted = logits(model, ids)
    merged = merge_adapters(model)
    assert torch.allclose(logits(merged, ids), wanted, atol=1e-5)
    merged.save_pretrained(tmp_path)
    loaded = type(merged).from_pretrained(tmp_path)
    assert torch.allclose(logits(loaded, ids), wanted, atol=1e-5)


# Attention keeps its matrix under another name than a linear layer does.
ATTENTION = torch.nn.ModuleDict({"attention": torch.nn.MultiheadAttention(16, 2)})


@pytest.mark.parametrize(("model", "target"), [(classifier(), "query"), (ATTENTION, "attention")])
def test_what_has_no_head_and_what_has_no_plain_weight_is_merged(model, target):
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=[target]))
    assert type(merge_adapters(adapted)) is type(model)


def test_a_trained_prompt_is_no_weight_to_merge():
    with pytest.raises(ValueError, match=r"^write what was trained with model.save_pretrained"):
        merge_adapters(wrapped(kind="PrefixTuningConfig", num_virtual_tokens=3))


@pytest.mark.parametrize(
    ("options", "recipe", "says"),
    [
        ({}, Recipe(lora_rank=4), "has LoRA already"),
        ({"kind": "PromptTuningConfig", "num_virtual_tokens": 3}, Recipe(), "trains a prompt"),
        (
            {"target_modules": ["lm_head", "q_proj"]},
            Recipe(chunked_loss=True),
            "adapter on the output layer",
        ),
        ({"kind": "AdaLoraConfig", "total_step": 9}, Recipe(chunked_loss=True), "adds something"),
    ],
)
def test_what_cannot_be_taken_is_refused_in_a_sentence(options, recipe, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        prepare(wrapped(**options), recipe)
    with pytest.raises(ValueError, match=says):
        trainer_for(wrapped(**options), recipe, tmp_path)
