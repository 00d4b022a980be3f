"""A plan for a model with adapters in it: those are trained, and every option needs what a tracked
step of that model does.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from support.families import tiny_config
from support.nightly import each
from support.predicted import assert_same, config, tracked
from transformers import LlamaForCausalLM
from view.test_printed_code import ROWS, TOKENS, Gradients, Rows, model_of, run

from gradmem_lib import Recipe, plan, predict
from gradmem_lib.model.classes import model_class
from gradmem_lib.model.configs import find_model
from gradmem_lib.model.inputs import example_batch
from gradmem_lib.planning.held import resident_bytes
from gradmem_lib.planning.work import count, with_adapters
from gradmem_lib.techniques.lora import add_lora
from gradmem_lib.techniques.quantized import quantize_base
from gradmem_lib.view.plan_code import plan_code

peft = pytest.importorskip("peft")
BF16 = torch.bfloat16
ASKED = {"seq_len": TOKENS, "global_batch": 4, "target": "cpu"}


def wrapped(family: str = "llama", dtype: torch.dtype = BF16, kind: str = "LoraConfig", **options):
    try:
        cfg = config(family, layers=4)
    except KeyError:
        cfg = tiny_config(family)
    torch.manual_seed(0)
    base = model_class(cfg)(cfg).to(dtype)
    settings = (
        {"target_modules": "all-linear"} | ({"r": 4} if kind == "LoraConfig" else {}) | options
    )
    return peft.get_peft_model(base, getattr(peft, kind)(**settings))


def planned(model, card, **changes):
    return plan(model, card=card, **ASKED | {"seq_len": TOKENS} | changes)


def assert_tracked(made, model) -> None:
    """The best option and every sixth of the others (every night all of them), by category at
    every moment, beside a step of the very model.
    """
    for option in each(6, (*made.fits, *made.refused)):
        given = copy.deepcopy(model)
        dtype = option.recipe.weight_dtype
        batch = example_batch(
            given if dtype is None else copy.deepcopy(model).to(dtype),
            ASKED["global_batch"],
            TOKENS,
        )
        assert_same(option.prediction, tracked(given, batch, option.recipe))
        assert str(option).startswith("lora, ") and option.recipe.lora_rank is None


def llama():
    return LlamaForCausalLM(config("llama", layers=4)).to(BF16)


def added_by_transformers():
    model = llama()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    return model


def added_by_us():
    model = llama()
    add_lora(model, 3, ("q_proj", "up_proj"))
    return model


LAYOUTS = {
    "llama": ("560 KB", {}),
    "some layers, several ranks": (
        "620 KB",
        {
            "layers_to_transform": [2, 3],
            "rank_pattern": {"q_proj": 7},
            "target_modules": ["q_proj", "up_proj"],
        },
    ),
    "by add_lora": ("620 KB", added_by_us),
    "gpt2": ("800 KB", {"family": "gpt2", "dtype": torch.float32}),
    "DoRA, and a whole head": ("620 KB", {"use_dora": True, "modules_to_save": ["lm_head"]}),
    "by transformers": ("620 KB", added_by_transformers),
    "bert": ("700 KB", {"family": "bert", "target_modules": ["query", "value"], "r": 3}),
    "embedding and head": (
        "620 KB",
        {"target_modules": ["q_proj", "lm_head", "embed_tokens"], "lora_dropout": 0.1},
    ),
    "t5": ("900 KB", {"family": "t5", "r": 2, "lora_dropout": 0.1}),
}


@pytest.mark.parametrize("name", each(9, LAYOUTS))
def test_every_option_needs_what_a_tracked_step_of_the_model_does(name):
    card, how = LAYOUTS[name]
    model = wrapped(**how) if isinstance(how, dict) else how()
    before = {n: (p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()}
    made = planned(model, card)
    assert made.method == "lora" and len(made.fits) + len(made.refused) >= 2
    assert_tracked(made, model)
    assert before == {n: (p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()}


def test_the_models_own_dtypes_come_first():
    """The adapters are float32 and the base bf16: no named precision has that, and nothing is
    rounded by keeping it.
    """
    model = wrapped(r=1, target_modules=["q_proj"])
    made = planned(model, "4 MB")
    assert made.best.recipe.precision is None and "lora, precision=None, adamw-fused" in str(made)
    assert "    precision=None,\n" in made.code
    same = planned(wrapped(dtype=torch.float32), "4 MB")
    assert None not in {o.recipe.precision for o in (*same.fits, *same.refused)}


def test_what_lies_on_the_card_is_counted_by_the_model_itself():
    model = wrapped(r=5, target_modules=["q_proj"])
    work = with_adapters(count(find_model(model)[0]), model)
    held = resident_bytes(work, Recipe(precision=None, optimizer="adamw-fused"))
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert held == {
        "parameters": sum(p.nbytes for p in model.parameters()),
        "gradients": trained,
        "optimizer": 2 * trained,
    }
    made = planned(model, sum(held.values()) - 1)
    assert any(
        "lora, precision=None" in str(out) and out.needs == sum(held.values())
        for out in made.ruled_out
    )


def test_several_cards():
    model = wrapped(dtype=torch.float32)
    made = planned(model, "4 MB", cards=2)
    assert {o.recipe.sharding for o in (*made.fits, *made.refused)} <= {"ddp", "fsdp"} and made.best
    asked = {
        "batch_size": 2,
        "seq_len": TOKENS,
        "recipe": made.best.recipe,
        "target": "cpu",
        "ranks": 2,
    }
    assert predict(model, **asked).peak == made.best.prediction.peak


@pytest.mark.parametrize("name", each(2, ["LlamaForCausalLM", "BertForSequenceClassification"]))
def test_the_printed_code_trains_the_models_own_adapters(name, tmp_path):
    model = peft.get_peft_model(model_of(name), peft.LoraConfig(r=3, target_modules="all-linear"))
    made = plan(model, card="1 GiB", seq_len=TOKENS, global_batch=ROWS, target="cpu")
    whole, rows, gradients = copy.deepcopy(model), Rows(name).rows, Gradients()
    whole(**rows).loss.backward()
    option = replace(made.best, recipe=Recipe(optimizer="sgd", accumulation=ROWS), micro_batch=1)
    text = plan_code(option, model, made.config, "cpu")
    assert "model =" not in text and "lora_rank" not in text
    run(text, tmp_path, model=copy.deepcopy(model), train_dataset=Rows(name), callbacks=[gradients])
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    assert wanted.keys() == gradients.found.keys() and all("lora_" in n for n in wanted)
    for parameter, gradient in wanted.items():
        torch.testing.assert_close(
            gradients.found[parameter], gradient, rtol=2e-5, atol=2e-6, msg=parameter
        )


def checkpointed():
    model = wrapped()
    model.gradient_checkpointing_enable()
    return model


def in_4_bits():
    model = added_by_us()
    quantize_base(model)
    return model


def compiled():
    model = wrapped()
    model.compile()
    return model


def frozen():
    return wrapped().requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "asked", "error", "says"),
    [
        (wrapped, {"method": "full"}, ValueError, "This one has method='full'"),
        (wrapped, {"method": "qlora"}, ValueError, "This one has method='qlora'"),
        (lambda: wrapped(kind="AdaLoraConfig", total_step=9), {}, ValueError, "one has ADALORA"),
        (in_4_bits, {}, ValueError, "This one has a base in 4 bits"),
        (frozen, {}, ValueError, "nothing to train"),
        (checkpointed, {}, RuntimeError, "checkpointed already"),
        (compiled, {}, RuntimeError, "compiled"),
    ],
)
def test_what_plan_cannot_train_is_refused_in_a_sentence(make, asked, error, says):
    with pytest.raises(error, match=says):
        planned(make(), "4 MB", **asked)
