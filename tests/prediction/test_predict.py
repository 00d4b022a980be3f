"""The prediction is the tracker's measurement, byte for byte; what cannot be predicted is refused,
and nothing is left behind.
"""

from __future__ import annotations

import logging
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from support.nightly import each
from support.predicted import (
    BATCH,
    RECIPES,
    SEQ,
    adapted,
    assert_same,
    config,
    measured,
    recipe_of,
    tracked,
)
from torch import nn

from gradmem_lib import MemoryTracker, Recipe, known_model, predict
from gradmem_lib.model.classes import model_class
from gradmem_lib.prediction import cuda_kernels
from gradmem_lib.prediction.question import CannotTrace

# Each recipe on one family, and each optimizer and way on others: tied weights, biases, transposed
# matrices, layers that take turns, pictures.
FAMILIES = ("gqa", "tied", "qwen3", "gemma", "gpt2", "bert", "vit", "gemma3")
TABLE = [*product(["llama"], RECIPES), *product(FAMILIES, list(RECIPES)[:16])]
TABLE.remove(("gemma3", "segments"))  # its layers get unlike masks: segments of several are refused


@pytest.mark.parametrize(("family", "name"), each(11, TABLE), ids=lambda value: value)
def test_predicted_is_tracked(family, name):
    recipe = recipe_of(name)
    assert_same(
        predict(config(family), batch_size=BATCH, seq_len=SEQ, recipe=recipe, target="cpu"),
        measured(config(family), recipe),
    )


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


def patched() -> dict:
    """The functions that a trace for a card replaces, and all of a tensor's."""
    places = [(F, "scaled_dot_product_attention"), (F, "dropout"), *cuda_kernels.IN_FLOAT32]
    return dict(vars(torch.Tensor)) | {place: getattr(*place) for place in places}


def test_nothing_is_left_behind():
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    def state():
        names = {*AttentionInterface._global_mapping, *AttentionMaskInterface._global_mapping}
        seen = masking_utils.find_packed_sequence_indices, logging.root.manager.disable
        return names, seen, torch.random.get_rng_state().tolist(), patched()

    model, cfg = nn.Linear(4, 4), config("llama")
    before = state()
    given = cfg.to_json_string()
    with cuda_kernels.kernels(torch.bfloat16):
        own = before[-1]
        assert sum(function is not own.get(place) for place, function in patched().items()) > 20
    mixed = Recipe(precision="autocast-bf16")
    for target in ("cpu", "cuda"):
        predict(cfg, batch_size=2, seq_len=8, target=target, recipe=mixed)
        with pytest.raises(CannotTrace):
            predict(model, batch=torch.ones(4, 4), loss=reads, target=target, recipe=mixed)
        assert state() == before
    assert cfg.to_json_string() == given
    assert (
        not _get_current_dispatch_mode_stack()
        and not torch.overrides._get_current_function_mode_stack()
    )
    assert MemoryTracker._running is None
    assert type(torch.empty(1)) is torch.Tensor


LLAMA, LINEAR = config("llama"), nn.Linear(2, 2)
BAD = [
    (LLAMA, {"seq_len": 100}, ValueError, "beyond the 64 positions"),
    (LLAMA, {"seq_len": None}, ValueError, "number of tokens"),
    (LLAMA, {"seq_len": 1}, ValueError, "rows one token long"),
    (LLAMA, {"batch_size": 0}, ValueError, "at least 1"),
    (LLAMA, {"batch_size": 3, "recipe": Recipe(accumulation=2)}, ValueError, "multiple of 2"),
    (LLAMA, {"target": "mps"}, ValueError, "choose one of 'cpu', 'cuda'"),
    (LLAMA, {"recipe": Recipe(lora_rank=2, lora_targets="query")}, ValueError, "'q_proj'"),
    (LLAMA, {"recipe": Recipe(precision=None)}, ValueError, "name a precision"),
    (LLAMA, {"recipe": "bf16"}, TypeError, "Recipe"),
    (config("bert"), {"recipe": Recipe(chunked_loss=True)}, ValueError, "leave chunked_loss"),
    (LINEAR, {}, ValueError, "batch="),
    (LINEAR, {"batch": torch.randn(2, 2)}, ValueError, "scalar"),
    (LINEAR, {"batch": {}}, ValueError, "without a tensor"),
    (42, {}, TypeError, "transformers config"),
]


@pytest.mark.parametrize(("model", "more", "error", "says"), BAD)
def test_questions_that_make_no_sense(model, more, error, says):
    asked = {"batch_size": 2, "seq_len": 8} if "batch" not in more else {}
    with pytest.raises(error, match=says):
        predict(model, **asked | {"target": "cpu"} | more)


def test_models_by_name_without_a_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked = {"batch_size": 1, "seq_len": 8, "target": "cpu"}
    by_name = predict("SmolLM2-135M", **asked)
    assert by_name.peak == predict(known_model("SmolLM2-135M")[1], **asked).peak
    assert by_name.title.startswith("SmolLM2-135M")
    with pytest.raises(
        ValueError, match=r"no model is known as 'nobody/nothing'.*Give a well-known name, such as"
    ):
        predict("nobody/nothing", **asked)


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
