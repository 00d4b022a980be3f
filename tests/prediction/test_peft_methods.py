"""The methods of PEFT: short traces, the full trace and the tracker agree to the byte, or a refusal
says why.

A few methods each time, every night all of them.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product

import pytest
import torch
import transformers
from support.nightly import each
from support.predicted import assert_same, assert_short_is_full, config, tracked
from transformers import AutoModelForCausalLM

from gradmem_lib import Recipe, predict
from gradmem_lib.prediction.question import CannotTrace

peft = pytest.importorskip("peft")

LAYERS = 9
AS_IT_IS = Recipe(precision=None, attention=None)
RECIPES = [
    AS_IT_IS,
    replace(AS_IT_IS, checkpointing="per-layer"),
    replace(AS_IT_IS, accumulation=2, optimizer="adamw-foreach"),
]
LINEAR = {"target_modules": ["q_proj", "v_proj"]}
TASK = {"task_type": "CAUSAL_LM"}
# By a name of ours: the name of the config's class, and its settings.
EXACT = {
    "LoRA": ("LoraConfig", LINEAR | {"r": 2}),
    "LoRA with dropout": ("LoraConfig", LINEAR | {"r": 2, "lora_dropout": 0.1}),
    "LoRA with biases": ("LoraConfig", LINEAR | {"r": 2, "bias": "all"}),
    "LoRA of the embedding": ("LoraConfig", {"r": 2, "target_modules": ["embed_tokens", "q_proj"]}),
    "LoRA beside a trained head": (
        "LoraConfig",
        {"r": 2, "target_modules": "all-linear", "modules_to_save": ["lm_head"]},
    ),
    "LoRA of layers that stand twice": (
        "LoraConfig",
        LINEAR | {"r": 2, "layer_replication": [[0, 5], [2, LAYERS]]},
    ),
    "DoRA": ("LoraConfig", LINEAR | {"r": 2, "use_dora": True}),
    "AdaLoRA": (
        "AdaLoraConfig",
        LINEAR | {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 2, "total_step": 9},
    ),
    "BOFT": ("BOFTConfig", LINEAR | {"boft_block_size": 4}),
    "C3A": ("C3AConfig", LINEAR | {"block_size": 8}),
    "DeLoRA": ("DeloraConfig", LINEAR | {"r": 2}),
    "FourierFT": ("FourierFTConfig", LINEAR | {"n_frequency": 10}),
    "GraLoRA": ("GraloraConfig", LINEAR | {"r": 4}),
    "HRA": ("HRAConfig", LINEAR | {"r": 2}),
    "HiRA": ("HiraConfig", LINEAR | {"r": 2}),
    "IA3": ("IA3Config", LINEAR | {"feedforward_modules": []}),
    "LoHa": ("LoHaConfig", LINEAR | {"r": 2}),
    "LoKr": ("LoKrConfig", LINEAR | {"r": 2}),
    "MiSS": ("MissConfig", LINEAR | {"r": 2}),
    "OFT": ("OFTConfig", LINEAR | {"r": 0, "oft_block_size": 8}),
    "PVeRA": ("PveraConfig", LINEAR | {"r": 4}),
    "RandLoRA": ("RandLoraConfig", LINEAR | {"r": 4}),
    "RoAd": ("RoadConfig", LINEAR),
    "VeRA": ("VeraConfig", LINEAR | {"r": 4}),
    "LayerNorm tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    "trainable tokens": ("TrainableTokensConfig", {"token_indices": [1, 2]}),
    "prompts in the layers": (
        "AdaptionPromptConfig",
        TASK | {"adapter_len": 4, "adapter_layers": 3},
    ),
}
# And what a refusal of its step says.
REFUSED = {
    "activated LoRA": (
        "LoraConfig",
        LINEAR | TASK | {"r": 2, "alora_invocation_tokens": [5, 6]},
        "size depends on values",
    ),
    "OSF": ("OSFConfig", LINEAR, "has a hook"),
    "VB-LoRA": (
        "VBLoRAConfig",
        LINEAR | {"r": 2, "num_vectors": 8, "vector_length": 16},
        "reads a tensor's value",
    ),
    "Poly": ("PolyConfig", LINEAR | {"r": 2}, "task_ids"),
    "SHiRA": ("ShiraConfig", LINEAR | {"r": 2}, "only dense ones"),
    "prompt tuning": ("PromptTuningConfig", TASK | {"num_virtual_tokens": 4}, "trains a prompt"),
    "prefix tuning": ("PrefixTuningConfig", TASK | {"num_virtual_tokens": 4}, "trains a prompt"),
}


def model_of(kind: str, settings: dict) -> torch.nn.Module:
    if not hasattr(peft, kind):
        pytest.skip(f"this peft has no {kind}")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config("llama", LAYERS))
    base.config.use_cache = False
    return peft.get_peft_model(base, getattr(peft, kind)(**settings))


def batch() -> dict:
    tokens = torch.randint(3, 60, (4, 16))
    return {"input_ids": tokens, "labels": tokens}


# in steps in which every recipe comes
@pytest.mark.parametrize(("name", "recipe"), each(20, product(EXACT, RECIPES)))
def test_a_method_is_predicted_to_the_byte(name, recipe):
    model = model_of(*EXACT[name])
    ask = {"batch": batch(), "recipe": recipe}
    short, _ = assert_short_is_full(model, **ask, target="cpu")
    assert_same(short, tracked(copy.deepcopy(model), **ask))


def test_lily_compares_rows_so_that_its_batch_is_not_cut():
    """Its router averages over all tokens of a batch."""
    settings = LINEAR | {"r": 4, "stride_A": 3, "num_B": 2}
    model, tokens = model_of("LilyConfig", settings), batch()
    for recipe in RECIPES[:2]:
        predicted = predict(model, batch=tokens, recipe=recipe, target="cpu")
        assert_same(predicted, tracked(copy.deepcopy(model), tokens, recipe))
    ask = {"batch": tokens, "recipe": RECIPES[2]}
    with pytest.raises(ValueError, match="no mean over labels or rows"):
        predict(model, **ask, target="cpu")
    with pytest.raises(ValueError, match="no mean over labels or rows"):
        tracked(model, **ask)


@pytest.mark.parametrize("name", each(2, REFUSED))
def test_a_method_that_cannot_be_predicted_is_refused_in_a_sentence(name):
    kind, settings, says = REFUSED[name]
    with pytest.raises((ValueError, CannotTrace), match=says):
        predict(model_of(kind, settings), batch=batch(), recipe=AS_IT_IS, target="cpu")
