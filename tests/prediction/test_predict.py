"""The prediction is the tracker's measurement, byte for byte; what cannot be predicted is refused,
and nothing is left behind.
"""

from __future__ import annotations

import logging
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.nightly import each
from support.predicted import (
    BATCH,
    SEQ,
    assert_same,
    config,
    measured,
    tracked,
)
from torch import nn
from transformers import LlamaConfig

from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.prediction.configs import model_class
from gradmem_lib.prediction.predict import predict
from gradmem_lib.prediction.question import CannotTrace
from gradmem_lib.techniques.lora import add_lora
from gradmem_lib.training.recipe import Recipe

FAMILIES = ("llama", "gqa", "tied", "qwen3", "gemma", "gpt2", "bert", "vit")
EVERYWHERE = {
    "float32": Recipe(),
    "bf16-eager-fused": Recipe(precision="bf16", attention="eager", optimizer="adamw-fused"),
    "autocast-foreach": Recipe(precision="autocast-bf16", optimizer="adamw-foreach"),
    "master-per-layer": Recipe(precision="float32-master", checkpointing="per-layer"),
    "segments": Recipe(precision="bf16", checkpointing=2, optimizer="adamw-foreach"),
    "fp16-every-second": Recipe(
        precision="autocast-fp16", every_n_layers=2, optimizer="adamw-fused"
    ),
    "lora-per-layer": Recipe(lora_rank=4, checkpointing="per-layer", precision="autocast-bf16"),
    "in-backward": Recipe(in_backward=True, optimizer="sgd", momentum=0.9, attention="eager"),
}
MORE = {
    "adafactor": Recipe(optimizer="adafactor", precision="bf16"),
    "adafactor-torch": Recipe(optimizer="adafactor-torch", precision="bf16"),
    "8-bit": Recipe(optimizer="adamw-8bit", precision="bf16"),
    "stochastic": Recipe(optimizer="adamw-stochastic", precision="bf16"),
    "stochastic-accumulated": Recipe(
        optimizer="adamw-stochastic", precision="bf16", accumulation=2
    ),
    "sgd": Recipe(optimizer="sgd"),
    "momentum": Recipe(optimizer="sgd", momentum=0.9),
    "master-foreach": Recipe(precision="float32-master", optimizer="adamw-foreach"),
    "master-fused": Recipe(precision="float32-master", optimizer="adamw-fused"),
    "accumulation": Recipe(accumulation=2, checkpointing="per-layer"),
    "accumulation-fp16": Recipe(accumulation=4, precision="autocast-fp16"),
    "sqrt": Recipe(checkpointing="sqrt", precision="bf16"),
    "best": Recipe(checkpointing="best"),
    "schedule": Recipe(checkpointing=[2, 1], optimizer="sgd"),
    "attention": Recipe(checkpointing="attention", attention="eager"),
    "mlp": Recipe(checkpointing="mlp", precision="autocast-bf16"),
    "elementwise": Recipe(checkpointing="elementwise", precision="bf16"),
    "lora-targets": Recipe(lora_rank=2, lora_targets=["q_proj", "v_proj"], precision="bf16"),
    "chunked": Recipe(chunked_loss=True, precision="bf16"),
    "chunked-autocast-lora": Recipe(chunked_loss=True, precision="autocast-bf16", lora_rank=2),
    "in-backward-adafactor-torch": Recipe(
        in_backward=True, optimizer="adafactor-torch", precision="bf16"
    ),
    "in-backward-adamw": Recipe(in_backward=True, precision="bf16", checkpointing="per-layer"),
}
# States and the step's temporaries of each optimizer on more families: tied weights, biases,
# transposed matrices, pictures.
OPTIMIZERS_OF = ("adafactor", "adafactor-torch", "8-bit", "stochastic", "sgd", "momentum")
TABLE = [
    *product(FAMILIES, EVERYWHERE),
    *product(["llama"], MORE),
    *product(("tied", "gpt2", "bert", "vit"), OPTIMIZERS_OF),
    *product(["gemma3"], list(EVERYWHERE)[:4]),
]


@pytest.mark.parametrize(("family", "name"), each(11, TABLE), ids=lambda value: value)
def test_predicted_is_tracked(family, name):
    recipe = (EVERYWHERE | MORE)[name]
    assert_same(
        predict(config(family), batch_size=BATCH, seq_len=SEQ, recipe=recipe, target="cpu"),
        measured(config(family), recipe),
    )


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_configurations(data):
    draw = data.draw
    heads = draw(st.sampled_from([2, 4]))
    cfg = LlamaConfig(
        vocab_size=draw(st.integers(60, 300)),
        hidden_size=heads * 2 * draw(st.integers(3, 12)),
        intermediate_size=draw(st.integers(16, 200)),
        num_hidden_layers=draw(st.integers(1, 8)),
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from([1, heads])),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        attention_dropout=draw(st.sampled_from([0.0, 0.1])),
        max_position_embeddings=64,
    )
    recipe = Recipe(
        precision=draw(st.sampled_from(["float32", "bf16", "autocast-bf16", "float32-master"])),
        optimizer=draw(st.sampled_from(["adamw", "adamw-foreach", "adamw-fused"])),
        attention=draw(st.sampled_from(["fused", "eager"])),
        checkpointing=draw(st.sampled_from([None, "per-layer", 1, 2])),
        lora_rank=draw(st.sampled_from([None, 3])),
        accumulation=draw(st.sampled_from([1, 2])),
        chunked_loss=draw(st.booleans()),
    )
    sizes = {"batch_size": 2 * draw(st.integers(1, 3)), "seq_len": draw(st.integers(2, 40))}
    predicted = predict(cfg, **sizes, recipe=recipe, target="cpu")
    assert_same(predicted, measured(cfg, recipe, *sizes.values()))


def test_a_real_model_is_predicted_and_left_alone():
    cfg = config("tied", 9)
    model = model_class(cfg)(cfg)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    attention = model.config._attn_implementation
    recipe = Recipe(lora_rank=2, precision="bf16")
    ask = {"batch_size": BATCH, "seq_len": SEQ, "recipe": recipe, "target": "cpu"}
    predicted = predict(model, **ask)
    assert predicted.traced_layers == (3, 4) and predicted.peak == predict(cfg, **ask).peak
    assert model.config._attn_implementation == attention
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def reads(model, x):
    return model(x).sum() * model(x).sum().item()


def test_nothing_is_left_behind():
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    def state():
        names = {*AttentionInterface._global_mapping, *AttentionMaskInterface._global_mapping}
        seen = masking_utils.find_packed_sequence_indices, logging.root.manager.disable
        return names, seen, torch.random.get_rng_state().tolist()

    model, cfg = nn.Linear(4, 4), config("llama")
    before = state()
    given = cfg.to_json_string()
    for target in ("cpu", "cuda"):
        predict(
            cfg, batch_size=2, seq_len=8, target=target, recipe=Recipe(precision="autocast-bf16")
        )
    with pytest.raises(CannotTrace):
        predict(model, batch=torch.ones(4, 4), loss=reads, target="cpu")
    assert state() == before
    assert cfg.to_json_string() == given
    assert (
        not _get_current_dispatch_mode_stack()
        and not torch.overrides._get_current_function_mode_stack()
    )
    assert MemoryTracker._running is None
    assert type(torch.empty(1)) is torch.Tensor


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        ({"seq_len": 100}, "beyond the 64 positions"),
        ({"seq_len": None}, "number of tokens"),
        ({"seq_len": 1}, "rows one token long"),
        ({"batch_size": 0}, "at least 1"),
        ({"batch_size": 3, "recipe": Recipe(accumulation=2)}, "multiple of 2"),
        ({"target": "mps"}, "choose one of 'cpu', 'cuda'"),
        ({"recipe": Recipe(lora_rank=2, lora_targets="query")}, "'q_proj'"),
    ],
)
def test_questions_that_make_no_sense(ask, says):
    with pytest.raises(ValueError, match=says):
        predict(config("llama"), **({"batch_size": 2, "seq_len": 8, "target": "cpu"} | ask))


@pytest.mark.parametrize(
    ("model", "more", "error", "says"),
    [
        (config("bert"), {"recipe": Recipe(chunked_loss=True)}, ValueError, "leave chunked_loss"),
        (config("llama"), {"recipe": Recipe(precision=None)}, ValueError, "name a precision"),
        (config("llama"), {"recipe": "bf16"}, TypeError, "Recipe"),
        (nn.Linear(2, 2), {}, ValueError, "batch="),
        (42, {}, TypeError, "transformers config"),
    ],
)
def test_questions_about_the_wrong_model(model, more, error, says):
    with pytest.raises(error, match=says):
        predict(model, batch_size=2, seq_len=8, target="cpu", **more)


def test_a_batch_without_rows_and_a_loss_without_a_number():
    with pytest.raises(ValueError, match="scalar"):
        predict(nn.Linear(2, 2), batch=torch.randn(2, 2), target="cpu")
    with pytest.raises(ValueError, match="without a tensor"):
        predict(nn.Linear(2, 2), batch={}, target="cpu")


def test_an_unknown_model_without_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("nobody/nothing", "Llama-2-70B"):
        with pytest.raises(
            ValueError, match=rf"no model is known as '{name}'.*such as known_model\('Llama-2-7B'\)"
        ):
            predict(name, batch_size=1, seq_len=8)


def adapted(layers: int = 3) -> nn.Module:
    """Adapters in float32 on a base in bf16, as PEFT makes them."""
    cfg = config("llama", layers)
    model = model_class(cfg)(cfg).to(torch.bfloat16)
    add_lora(model, 2, ("q_proj",))
    return model


MIXED = {
    "plain": Recipe(precision=None),
    "accumulated": Recipe(
        precision=None, accumulation=4, optimizer="adamw-foreach", checkpointing="per-layer"
    ),
    "8-bit in backward": Recipe(
        precision=None, in_backward=True, optimizer="adamw-8bit", chunked_loss=True
    ),
}


@pytest.mark.parametrize("recipe", MIXED.values(), ids=MIXED)
def test_a_module_is_taken_in_the_dtypes_that_it_has(recipe):
    model = adapted()
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    ids = torch.randint(0, 128, (BATCH, SEQ))
    predicted = predict(model, batch={"input_ids": ids, "labels": ids}, recipe=recipe, target="cpu")
    tracker = tracked(model, {"input_ids": ids, "labels": ids}, recipe)
    assert_same(predicted, tracker)
    assert {name: p.dtype for name, p in model.named_parameters()} == dtypes
    adapters = [p for p in model.parameters() if p.requires_grad]
    assert len(adapters) == 6 and all(p.dtype == torch.float32 for p in adapters)
    assert tracker.current.by_category["parameters"] == sum(p.nbytes for p in model.parameters())
    if recipe == MIXED["plain"]:  # two states in float32, and a step counter
        assert tracker.current.by_category["optimizer"] == sum(2 * p.nbytes + 4 for p in adapters)
