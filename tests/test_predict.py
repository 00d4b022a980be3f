"""The prediction is the tracker's measurement, byte for byte, and short traces say what the full one says."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    BertConfig,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    Qwen3Config,
    ViTConfig,
)

from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.prediction import allocator, cuda_kernels, fakes
from gradmem_lib.prediction import configs as configs_module
from gradmem_lib.prediction import predict as predict_module
from gradmem_lib.prediction.configs import example_batch, model_class
from gradmem_lib.prediction.extrapolation import repeated_layers
from gradmem_lib.prediction.predict import clear_cache, predict
from gradmem_lib.prediction.question import CannotTrace
from gradmem_lib.techniques.lora import LoRALinear
from gradmem_lib.techniques.losses import chunked_cross_entropy
from gradmem_lib.techniques.optimizers import AdamW8bit, MasterAdamW
from gradmem_lib.training.prepare import prepare
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.training.step import step

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
TEXT = SIZES | {"vocab_size": 128, "max_position_embeddings": 64}
BATCH, SEQ = 4, 16


def config(family: str, layers: int = 3):
    layers += layers % 2 if family == "gemma3" else 0
    n = {"num_hidden_layers": layers}
    return {
        "llama": lambda: LlamaConfig(**TEXT, **n),
        "gqa": lambda: LlamaConfig(**TEXT, **n, num_key_value_heads=2),
        "tied": lambda: LlamaConfig(**TEXT, **n, tie_word_embeddings=True),
        "qwen3": lambda: Qwen3Config(**TEXT, **n, num_key_value_heads=2, head_dim=16),
        "gemma": lambda: GemmaConfig(**TEXT, **n, num_key_value_heads=1, head_dim=16),
        "gpt2": lambda: GPT2Config(
            vocab_size=128,
            n_embd=64,
            n_layer=layers,
            n_head=4,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
        ),
        "bert": lambda: BertConfig(**TEXT, **n),
        "vit": lambda: ViTConfig(**SIZES, **n, image_size=32, patch_size=8, num_labels=10),
        "gemma3": lambda: Gemma3TextConfig(
            **TEXT,
            **n,
            num_key_value_heads=1,
            head_dim=16,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        ),
    }[family]()


FAMILIES = ("llama", "gqa", "tied", "qwen3", "gemma", "gpt2", "bert", "vit")
EVERYWHERE = {
    "float32": Recipe(),
    "bf16-eager-fused": Recipe(precision="bf16", attention="eager", optimizer="adamw-fused"),
    "autocast-foreach": Recipe(precision="autocast-bf16", optimizer="adamw-foreach"),
    "master-per-layer": Recipe(precision="float32-master", checkpointing="per-layer"),
    "segments": Recipe(precision="bf16", checkpointing=2, optimizer="adamw-foreach"),
    "fp16-every-second": Recipe(precision="autocast-fp16", every_n_layers=2, optimizer="adamw-fused"),
    "lora-per-layer": Recipe(lora_rank=4, checkpointing="per-layer", precision="autocast-bf16"),
    "in-backward": Recipe(in_backward=True, optimizer="sgd", momentum=0.9, attention="eager"),
}
MORE = {
    "adafactor": Recipe(optimizer="adafactor", precision="bf16"),
    "adafactor-torch": Recipe(optimizer="adafactor-torch", precision="bf16"),
    "8-bit": Recipe(optimizer="adamw-8bit", precision="bf16"),
    "sgd": Recipe(optimizer="sgd"),
    "master-foreach": Recipe(precision="float32-master", optimizer="adamw-foreach"),
    "master-fused": Recipe(precision="float32-master", optimizer="adamw-fused"),
    "accumulation": Recipe(accumulation=2, checkpointing="per-layer"),
    "accumulation-fp16": Recipe(accumulation=4, precision="autocast-fp16"),
    "sqrt": Recipe(checkpointing="sqrt", precision="bf16"),
    "best": Recipe(checkpointing="best"),
    "schedule": Recipe(checkpointing=[2, 1], optimizer="sgd"),
    "frozen-base": Recipe(frozen_base=True),
    "lora-targets": Recipe(lora_rank=2, lora_targets=["q_proj", "v_proj"], precision="bf16"),
    "chunked": Recipe(chunked_loss=True, precision="bf16"),
    "chunked-autocast-lora": Recipe(chunked_loss=True, precision="autocast-bf16", lora_rank=2),
    "in-backward-adafactor-torch": Recipe(in_backward=True, optimizer="adafactor-torch", precision="bf16"),
    "in-backward-adamw": Recipe(in_backward=True, precision="bf16", checkpointing="per-layer"),
}
CASES = [(f, r) for f in FAMILIES for r in EVERYWHERE] + [("llama", r) for r in MORE]
CASES += [("gemma3", r) for r in ("float32", "bf16-eager-fused", "autocast-foreach", "master-per-layer")]


def measured(cfg, recipe: Recipe, batch_size: int = BATCH, seq_len: int | None = SEQ) -> MemoryTracker:
    """The second step of a real run."""
    run = prepare(model_class(cfg)(copy.deepcopy(cfg)), recipe)
    batch = example_batch(run.model, batch_size, seq_len)
    step(run.model, run.optimizer, batch, recipe)
    with MemoryTracker(run.model, run.optimizer, live=False) as tracker:
        step(run.model, run.optimizer, batch, recipe)
    run.undo.close()
    return tracker


def assert_same(predicted, tracker) -> None:
    assert predicted.peak == tracker.peak
    assert predicted.peak_by_phase == tracker.peak_by_phase
    assert predicted.current.by_category == tracker.current.by_category
    assert predicted.timeline.rows[:, 2].max() == tracker.timeline.rows[:, 2].max()
    timeline, at = predicted.timeline, predicted.timeline.peak_index
    assert {name: n[at] for name, n in timeline.by_category.items()} == predicted.peak.by_category


@pytest.mark.parametrize(("family", "name"), CASES, ids=lambda value: value)
def test_predicted_is_tracked(family, name):
    recipe = (EVERYWHERE | MORE)[name]
    assert_same(predict(config(family), batch_size=BATCH, seq_len=SEQ, recipe=recipe, target="cpu"),
                measured(config(family), recipe))  # fmt: skip


def test_enough_cases():
    assert len(CASES) >= 60


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
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


# --- short traces -----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llama", Recipe(precision="bf16")),
        ("llama", Recipe(checkpointing="per-layer", accumulation=2)),
        ("tied", Recipe(precision="autocast-bf16", optimizer="adamw-foreach", checkpointing="per-layer")),
        ("qwen3", Recipe(in_backward=True, attention="eager")),
        ("gpt2", Recipe(precision="float32-master", chunked_loss=True)),
        ("vit", Recipe(lora_rank=4, optimizer="adamw-8bit", precision="autocast-fp16")),
        ("bert", Recipe(precision="bf16", optimizer="adafactor")),
        ("llama", Recipe(precision="bf16", optimizer="adafactor-torch", in_backward=True)),
    ],
)
def test_short_traces_say_what_the_full_one_says(family, recipe, target):
    ask = {"batch_size": BATCH, "seq_len": SEQ, "recipe": recipe, "target": target}
    short, full = predict(config(family, 9), **ask), predict(config(family, 9), **ask, full=True)
    assert short.traced_layers and not full.traced_layers
    assert np.array_equal(short.timeline.rows, full.timeline.rows)
    assert (short.peak, short.peak_by_phase) == (full.peak, full.peak_by_phase)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("recipe", "layers", "traced"),
    [
        (Recipe(checkpointing=2), 17, (5, 7)),  # 2, 2, ..., 1
        (Recipe(every_n_layers=2, optimizer="sgd"), 17, (5, 7)),
        (Recipe(checkpointing=3, optimizer="adamw-foreach", accumulation=5), 20, (8, 11)),
        (Recipe(checkpointing=4, precision="bf16", lora_rank=2), 24, (8, 12)),
        (Recipe(checkpointing="sqrt", precision="autocast-bf16"), 36, (12, 18)),
    ],
)
def test_segments_are_repeated_whole(recipe, layers, traced, target):
    ask = {"batch_size": 2 * recipe.accumulation, "seq_len": 8, "recipe": recipe, "target": target}
    short, full = predict(config("llama", layers), **ask), predict(config("llama", layers), **ask, full=True)
    assert short.traced_layers == traced
    assert np.array_equal(short.timeline.rows, full.timeline.rows)
    assert (short.peak, short.peak_by_phase) == (full.peak, full.peak_by_phase)


ACCUMULATED = [
    ("llama", Recipe(precision="bf16", optimizer="adamw-foreach")),
    ("gqa", Recipe(precision="autocast-fp16", checkpointing="per-layer")),
    ("tied", Recipe(chunked_loss=True, lora_rank=2)),
    ("gpt2", Recipe(precision="float32-master", checkpointing=[2, 1])),
    ("vit", Recipe(precision="autocast-bf16")),
]


@pytest.mark.parametrize("k", [4, 8])
@pytest.mark.parametrize(("family", "recipe"), ACCUMULATED)
def test_micro_batches_that_are_alike_are_traced_once(family, recipe, k):
    recipe = replace(recipe, accumulation=k)
    predicted = predict(config(family), batch_size=2 * k, seq_len=SEQ, recipe=recipe, target="cpu")
    assert_same(predicted, measured(config(family), recipe, batch_size=2 * k))
    question = replace(predicted._question, target="cuda")
    assert predict_module._step_parts(question, None)[1] == k - predict_module.FEW
    for target in ("cpu", "cuda"):
        ask = {"batch_size": 2 * k, "seq_len": SEQ, "recipe": recipe, "target": target}
        few, full = predict(config(family), **ask), predict(config(family), **ask, full=True)
        assert np.array_equal(few.timeline.rows, full.timeline.rows)


def test_micro_batches_that_are_not_alike_are_all_traced(monkeypatch):
    """As where the third one did something else than the second."""
    traced = predict_module._trace

    def odd(question, layers, micro_batches=None):
        trace = traced(question, layers, micro_batches)
        rows = trace.rows.copy()
        rows[trace.starts[5] + 3 :, predict_module.TOTAL] += micro_batches is not None
        return replace(trace, rows=rows)

    ask = {"batch_size": 5, "seq_len": SEQ, "recipe": Recipe(accumulation=5), "target": "cpu"}
    full = predict(config("llama"), **ask, full=True)
    monkeypatch.setattr(predict_module, "_trace", odd)
    assert np.array_equal(predict(config("llama"), **ask).timeline.rows, full.timeline.rows)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llama", Recipe(precision="autocast-bf16", optimizer="adamw-foreach")),
        ("gpt2", Recipe(precision="bf16", attention="eager", checkpointing=2)),
        ("qwen3", Recipe(lora_rank=2, precision="bf16", quantized_base=True, chunked_loss=True)),
        ("vit", Recipe(optimizer="adafactor", accumulation=2)),
    ],
)
def test_remembered_results_are_those_of_pytorchs_fake_tensors(family, recipe, target, monkeypatch):
    ask = {"batch_size": BATCH, "seq_len": SEQ, "recipe": recipe, "target": target, "full": True}
    clear_cache()
    quick = predict(config(family), **ask).timeline.rows
    clear_cache()
    monkeypatch.setattr(fakes.QuickFakeMode, "_key", lambda self, func, args, kwargs: None)
    assert np.array_equal(quick, predict(config(family), **ask).timeline.rows)


def _operations(x, n):
    """Results of operations that are easy to take for one another."""
    yield x + 1
    yield x + x
    yield n * 2
    yield n * 2.0
    yield n * True
    yield x.half() + 1
    yield x.t()
    yield x.t() + 1
    yield x[1:]
    yield x[1:].sum(0)
    yield x.view(-1)[3:9]
    yield x.expand(2, *x.shape)
    yield torch.zeros(3, 4)
    yield torch.zeros(3, 4, dtype=torch.bfloat16)
    yield x.clone().add_(1)
    yield x.clone().resize_(2, 2)
    yield x.clone().unsqueeze_(0)
    yield from x.split(2)
    yield torch.nn.functional.layer_norm(x, x.shape[1:])


def test_remembered_results_have_the_form_of_real_ones():
    def forms():
        tensors = torch.ones(4, 6), torch.ones(4, 6, dtype=torch.int64)
        base = tensors[0].untyped_storage()._cdata
        return [
            (
                t.shape, t.stride(), t.dtype, t.storage_offset(), t.untyped_storage().nbytes(),
                t.untyped_storage()._cdata == base,
            )
            for t in _operations(*tensors)
        ]  # fmt: skip

    real = forms()
    fakes.forget()
    for _ in range(3):
        with fakes.QuickFakeMode():
            assert forms() == real


def test_sqrt_is_repeated_where_its_segments_are_equal():
    assert predict_module._unit(Recipe(checkpointing="sqrt"), 64)[0] == 8
    assert predict_module._unit(Recipe(checkpointing="best"), 64) is None
    assert predict_module._unit(Recipe(checkpointing=[4, 4, 1]), 9) is None


class Uneven(nn.Module):
    """Eleven blocks, of which the seventh is wider."""

    def __init__(self, odd: int | None = 7):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, width := 48 if i == odd else 32), nn.ReLU(), nn.Linear(width, 16))
            for i in range(11)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def test_falls_back_where_layers_differ():
    ask = {"batch_size": BATCH, "seq_len": SEQ, "target": "cpu"}
    alternating = Gemma3TextConfig(
        **TEXT, num_hidden_layers=10, num_key_value_heads=1, head_dim=16, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 5,
    )  # fmt: skip
    assert predict(alternating, **ask).traced_layers == ()
    assert predict(config("llama", 9), **ask, recipe=Recipe(checkpointing=[5, 3, 1])).traced_layers == ()
    assert predict(config("llama", 9), **ask, recipe=Recipe(checkpointing="best")).traced_layers == ()
    assert predict(config("llama", 6), **ask).traced_layers == ()  # two short traces would be more work
    assert repeated_layers(Uneven()) is None
    assert len(repeated_layers(Uneven(odd=None))) == 11


@pytest.mark.parametrize("odd", [7, None])
def test_any_module(odd):
    model, x = Uneven(odd), torch.randn(8, 16)
    before = {name: (p.data_ptr(), p._version) for name, p in model.named_parameters()}
    predicted = predict(model, batch=x, target="cpu")
    assert before == {name: (p.data_ptr(), p._version) for name, p in model.named_parameters()}
    assert bool(predicted.traced_layers) == (odd is None)
    assert predicted.peak == predict(model, batch=torch.empty(8, 16, device="meta"), target="cpu").peak
    run = prepare(model, Recipe())
    step(run.model, run.optimizer, x, Recipe())
    with MemoryTracker(run.model, run.optimizer, live=False) as tracker:
        step(run.model, run.optimizer, x, Recipe())
    assert_same(predicted, tracker)


def test_a_loss_of_ones_own_and_a_batch_by_name():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    batch = {"x": torch.randn(6, 8), "y": torch.randint(0, 4, (6,))}

    def loss(model, micro):
        return nn.functional.cross_entropy(model(micro["x"]), micro["y"])

    recipe = Recipe(accumulation=3, optimizer="adamw-foreach")
    predicted = predict(model, batch=batch, loss=loss, recipe=recipe, target="cpu")
    run = prepare(copy.deepcopy(model), recipe)
    step(run.model, run.optimizer, batch, recipe, loss=loss)
    with MemoryTracker(run.model, run.optimizer, live=False) as tracker:
        step(run.model, run.optimizer, batch, recipe, loss=loss)
    assert_same(predicted, tracker)


def test_a_real_model_is_predicted_and_left_alone():
    cfg = config("tied", 9)
    model = model_class(cfg)(cfg)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    attention = model.config._attn_implementation
    predicted = predict(
        model, batch_size=BATCH, seq_len=SEQ, recipe=Recipe(lora_rank=2, precision="bf16"), target="cpu"
    )
    assert predicted.traced_layers == (3, 4)
    assert (
        predicted.peak
        == predict(
            cfg, batch_size=BATCH, seq_len=SEQ, recipe=Recipe(lora_rank=2, precision="bf16"), target="cpu"
        ).peak
    )
    assert model.config._attn_implementation == attention
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_shared_storage_is_counted_once():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))
            whole = torch.randn(100)
            self.register_buffer("head", whole[:10])
            self.register_buffer("tail", whole[10:])

        def forward(self, x):
            return (x @ self.weight).sum() + self.head.sum() * self.tail.sum()

    model, x = Views(), torch.randn(4, 8)
    predicted = predict(model, batch=x, target="cpu", recipe=Recipe(optimizer="sgd"))
    run = prepare(model, Recipe(optimizer="sgd"))
    with MemoryTracker(run.model, run.optimizer, live=False) as tracker:
        step(run.model, run.optimizer, x, Recipe(optimizer="sgd"))
    assert_same(predicted, tracker)


# --- what must not happen ----------------------------------------------------------------------------


def test_nothing_is_left_behind():
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    reads, x = Reads(), torch.randn(4, 4)
    before = (
        set(AttentionInterface._global_mapping),
        set(AttentionMaskInterface._global_mapping),
        masking_utils.find_packed_sequence_indices,
        torch.random.get_rng_state().tolist(),
    )
    cfg = config("llama")
    given = cfg.to_json_string()
    for target in ("cpu", "cuda"):
        predict(cfg, batch_size=2, seq_len=8, target=target, recipe=Recipe(precision="autocast-bf16"))
    with pytest.raises(CannotTrace):
        predict(reads, batch=x, target="cpu")
    after = (
        set(AttentionInterface._global_mapping),
        set(AttentionMaskInterface._global_mapping),
        masking_utils.find_packed_sequence_indices,
        torch.random.get_rng_state().tolist(),
    )
    assert before == after
    assert cfg.to_json_string() == given
    assert not _get_current_dispatch_mode_stack() and not torch.overrides._get_current_function_mode_stack()
    assert MemoryTracker._running is None
    assert type(torch.empty(1)) is torch.Tensor


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y.sum() if y.sum().item() > 0 else -y.sum()


def patched() -> dict:
    """The functions that a trace for a card replaces."""
    places = [*cuda_kernels._autocast_functions(), (torch.nn.functional, "scaled_dot_product_attention")]
    return {(home, name): getattr(home, name) for home, name in [*places, (torch.nn.functional, "dropout")]}


def test_functions_come_back_after_a_trace_for_a_card():
    before, own = patched(), set(vars(torch.Tensor))
    ask = {"target": "cuda", "recipe": Recipe(precision="autocast-bf16")}
    with cuda_kernels.kernels(torch.bfloat16):
        assert sum(function is not before[place] for place, function in patched().items()) > 20
    predict(config("gpt2"), batch_size=2, seq_len=8, **ask)
    assert patched() == before and set(vars(torch.Tensor)) == own
    with pytest.raises(CannotTrace):
        predict(Reads(), batch=torch.randn(4, 4), **ask)
    assert patched() == before and set(vars(torch.Tensor)) == own


class Selects(Reads):
    def forward(self, x):
        y = self.linear(x)
        return y[y > 0].sum()


@pytest.mark.parametrize(("model", "operation"), [(Reads(), "_local_scalar_dense"), (Selects(), "nonzero")])
def test_what_cannot_be_traced_is_named(model, operation):
    with pytest.raises(CannotTrace, match=operation) as error:
        predict(model, batch=torch.randn(4, 4), target="cpu")
    assert "test_predict.py" in str(error.value) and "MemoryTracker" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"precision": "fp8"}, "choose one of"),
        ({"optimizer": "adam"}, "choose one of"),
        ({"attention": "flash"}, "choose one of"),
        ({"checkpointing": "all"}, "list of segment lengths"),
        ({"checkpointing": 0}, "at least 1"),
        ({"every_n_layers": 0}, "at least 1"),
        ({"every_n_layers": 2, "checkpointing": "per-layer"}, "give one"),
        ({"accumulation": 0}, "at least 1"),
        ({"in_backward": True, "accumulation": 2}, "choose one of the two"),
        ({"in_backward": True, "precision": "autocast-fp16"}, "autocast-bf16"),
        ({"lora_rank": 0}, "nothing to train"),
        ({"lora_rank": 2.5}, "whole number"),
        ({"lora_targets": ["q_proj"]}, "lora_rank"),
        ({"lora_rank": 4, "frozen_base": True}, "leave frozen_base out"),
        ({"momentum": 0.9}, "sgd"),
        ({"momentum": 1.5, "optimizer": "sgd"}, "below 1"),
        ({"precision": "float32-master", "optimizer": "sgd"}, "choose an AdamW"),
        ({"precision": "float32-master", "optimizer": "adamw-8bit"}, "adamw"),
        ({"chunked_loss": 1024}, "True or False"),
    ],
)
def test_impossible_recipes(settings, says):
    with pytest.raises(ValueError, match=says):
        Recipe(**settings)


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        ({"seq_len": 100}, "beyond the 64 positions"),
        ({"seq_len": None}, "number of tokens"),
        ({"batch_size": 0}, "at least 1"),
        ({"batch_size": 3, "recipe": Recipe(accumulation=2)}, "multiple of 2"),
        ({"target": "mps"}, "'cpu' or 'cuda'"),
        ({"recipe": Recipe(lora_rank=2, lora_targets="query")}, "'q_proj'"),
    ],
)
def test_questions_that_make_no_sense(ask, says):
    with pytest.raises(ValueError, match=says):
        predict(config("llama"), **({"batch_size": 2, "seq_len": 8, "target": "cpu"} | ask))


def test_questions_about_the_wrong_model(tmp_path):
    ask = {"batch_size": 2, "seq_len": 8, "target": "cpu"}
    with pytest.raises(ValueError, match="tied"):
        predict(config("gpt2"), **ask, recipe=Recipe(frozen_base=True))
    with pytest.raises(ValueError, match="leave chunked_loss out"):
        predict(config("bert"), **ask, recipe=Recipe(chunked_loss=True))
    with pytest.raises(ValueError, match="batch="):
        predict(nn.Linear(2, 2), **ask)
    with pytest.raises(ValueError, match="scalar"):
        predict(nn.Linear(2, 2), batch=torch.randn(2, 2), target="cpu")
    with pytest.raises(ValueError, match="without a tensor"):
        predict(nn.Linear(2, 2), batch={}, target="cpu")
    with pytest.raises(ValueError, match=r"config\.json"):
        predict(tmp_path, **ask)
    with pytest.raises(TypeError, match="transformers config"):
        predict(42, **ask)
    with pytest.raises(TypeError, match="Recipe"):
        predict(config("llama"), **ask, recipe="bf16")


def test_an_unknown_model_without_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="no model is known as 'nobody/nothing'"):
        predict("nobody/nothing", batch_size=1, seq_len=8)


def test_without_a_way_to_the_hub_its_client_is_not_asked(monkeypatch):
    asked = []

    def from_pretrained(name, local_files_only=False):
        asked.append(local_files_only)
        raise OSError("not here")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for proxies, calls in (({}, [True]), ({"https": "http://proxy"}, [True, False])):
        asked.clear()
        monkeypatch.setattr(configs_module, "getproxies", lambda proxies=proxies: proxies)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://127.0.0.1:9")
        with pytest.raises(ValueError, match="not here"):
            predict("nobody/nothing", batch_size=1, seq_len=8)
        assert asked == calls


def test_a_local_folder(tmp_path):
    config("qwen3").save_pretrained(tmp_path)
    ask = {"batch_size": 2, "seq_len": 8, "target": "cpu"}
    assert (
        predict(tmp_path, **ask).peak
        == predict(config("qwen3"), **ask).peak
        == predict(str(tmp_path), **ask).peak
    )


# --- the answer ----------------------------------------------------------------------------------------


def test_prediction_looks_like_a_tracker():
    prediction = predict(config("llama"), batch_size=2, seq_len=8, target="cpu")
    assert prediction.target == "cpu"
    assert (
        len(prediction.timeline)
        and prediction.timeline.totals[prediction.timeline.peak_index] == prediction.peak.total
    )
    assert f"{prediction.peak.total:,}" in prediction._repr_html_()
    assert prediction.plot().axes
    assert sum(prediction.peak.by_category.values()) == prediction.peak.total


def test_the_second_answer_comes_from_the_cache(monkeypatch):
    clear_cache()
    ask = {"batch_size": 2, "seq_len": 8, "target": "cpu"}
    first = predict(config("llama"), **ask)
    monkeypatch.setattr(predict_module, "traced", None)
    again = predict(config("llama"), **ask)
    assert again.peak == first.peak
    with pytest.raises(TypeError):
        predict(config("llama"), **(ask | {"seq_len": 9}))


# --- what the recipe does to real tensors --------------------------------------------------------------


def losses(recipe: Recipe, steps: int = 12, lr: float = 3e-3) -> list[float]:
    torch.manual_seed(0)
    cfg = config("llama", 2)
    run = prepare(model_class(cfg)(cfg), recipe, lr=lr)
    batch = example_batch(run.model, 4, 16)
    return [step(run.model, run.optimizer, batch, recipe).item() for _ in range(steps)]


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(optimizer="adamw-8bit"),
        Recipe(precision="float32-master"),
        Recipe(precision="float32-master", optimizer="adamw-foreach"),
        Recipe(precision="autocast-fp16"),
        Recipe(precision="autocast-bf16"),
        Recipe(in_backward=True),
        Recipe(accumulation=2),
        Recipe(chunked_loss=True),
        Recipe(checkpointing=1),
    ],
)
def test_recipes_train_alike(recipe):
    expected, got = losses(Recipe()), losses(recipe)
    exact = recipe.precision == "float32" and recipe.optimizer == "adamw"
    assert got == pytest.approx(expected, rel=1e-4 if exact else 3e-2)
    assert got[-1] < got[0] - 0.5


def test_accumulation_counts_labels():
    """Micro-batches with different numbers of labels still add up to the whole batch's gradient."""
    cfg = config("llama", 2)
    torch.manual_seed(0)
    model = model_class(cfg)(cfg)
    batch = example_batch(model, 4, 16)
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, 3:] = -100
    gradients = []
    for recipe in (Recipe(optimizer="sgd"), Recipe(optimizer="sgd", accumulation=4)):
        run = prepare(copy.deepcopy(model), recipe, lr=1.0)
        loss = step(run.model, run.optimizer, batch, recipe)
        gradients.append(
            (loss, [p - q for p, q in zip(model.parameters(), run.model.parameters(), strict=True)])
        )
    assert gradients[0][0].item() == pytest.approx(gradients[1][0].item(), rel=1e-5)
    for a, b in zip(gradients[0][1], gradients[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bits8", [True, False])
def test_8bit_states_take_what_bitsandbytes_documents(bits8):
    n = 5000 if bits8 else 4095
    p = nn.Parameter(torch.randn(n))
    p.grad = torch.randn(n)
    optimizer = AdamW8bit([p])
    optimizer.step()
    nbytes = sum(t.nbytes for t in optimizer.state[p].values() if isinstance(t, torch.Tensor))
    blocks = -(-n // 256)
    assert nbytes == (2 * n + 2 * 4 * blocks + 2 * 4 * 256 if bits8 else 2 * 4 * n)


def test_master_weights_keep_small_updates():
    """An update of 1/1000 of a bf16 weight is lost, and a thousand of them are not."""
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([p], lr=1e-3, weight_decay=0)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert p[0].item() == pytest.approx(0.9, abs=0.01)


def test_chunked_cross_entropy_is_cross_entropy():
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 12, requires_grad=True), torch.randn(30, 12, requires_grad=True)
    labels = torch.randint(0, 30, (50,))
    labels[::7] = -100
    grads = []
    for loss in (
        nn.functional.cross_entropy(hidden @ weight.T, labels),
        chunked_cross_entropy(hidden, weight, labels, 16),
    ):
        grads.append((loss.detach(), *torch.autograd.grad(loss * 3, (hidden, weight))))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_lora_starts_at_the_base_and_merges():
    torch.manual_seed(0)
    for base in (nn.Linear(6, 10), transformers.pytorch_utils.Conv1D(10, 6)):
        layer, x = LoRALinear(base, 3), torch.randn(4, 6)
        assert torch.equal(layer(x), base(x))
        assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["A", "B"]
        nn.init.normal_(layer.B)
        expected = layer(x)
        torch.testing.assert_close(layer.merged()(x), expected)


# --- what a card does otherwise -------------------------------------------------------------------------


def on_card(family: str, **settings):
    return predict(config(family), batch_size=BATCH, seq_len=SEQ, target="cuda", recipe=Recipe(**settings))


def test_cuda_counts_whole_blocks():
    prediction = on_card("gpt2", precision="bf16", checkpointing="per-layer")
    assert not (prediction.timeline.rows[:, 2:] % 512).any()
    on_cpu = predict(
        config("gpt2"), batch_size=BATCH, seq_len=SEQ, target="cpu", recipe=Recipe(precision="bf16")
    )
    assert prediction.peak.by_category["parameters"] > on_cpu.peak.by_category["parameters"]


def test_step_counters_stay_on_the_host_unless_fused():
    plain, fused = (on_card("llama", optimizer=name).current.by_category for name in ("adamw", "adamw-fused"))
    tensors = sum(1 for _ in model_class(config("llama"))(config("llama")).parameters())
    assert fused["optimizer"] - plain["optimizer"] == 512 * tensors


def test_cuda_lines_beside_the_tensors():
    prediction = on_card("llama", precision="bf16")
    reserved = prediction.replay_allocator()
    assert reserved >= prediction.peak.total and reserved % allocator.SMALL_SEGMENT == 0
    assert prediction.workspace and prediction.context
    on_cpu = predict(config("llama"), batch_size=BATCH, seq_len=SEQ, target="cpu")
    assert on_cpu.replay_allocator() is on_cpu.workspace is on_cpu.context is None


def test_the_allocators_rules():
    MiB = 2**20
    assert allocator.replayed([1]) == 2 * MiB
    assert allocator.replayed([MiB, MiB]) == 2 * MiB  # one small segment, split
    assert allocator.replayed([MiB, MiB, 512]) == 4 * MiB
    assert allocator.replayed([2 * MiB]) == 20 * MiB  # a large one serves up to 10 MiB
    assert allocator.replayed([9 * MiB, 9 * MiB]) == 20 * MiB
    assert allocator.replayed([11 * MiB]) == 12 * MiB  # its own segment, in whole 2 MiB
    assert allocator.replayed([12 * MiB, -1, 12 * MiB]) == 12 * MiB  # a freed block serves again
    assert allocator.replayed([12 * MiB, -1, 11 * MiB, MiB + 1]) == 32 * MiB  # 1 MiB left is not split off
    assert allocator.replayed([9 * MiB, 9 * MiB, -1, -2, 16 * MiB]) == 20 * MiB  # free neighbours merge
    assert allocator.replayed([9 * MiB, 9 * MiB, -1, 16 * MiB]) == 36 * MiB


def test_the_allocator_keeps_its_books():
    """Random requests: blocks never overlap, and all free memory merges back into whole segments."""
    rng = np.random.default_rng(0)
    blocks, live = allocator.Allocator(), {}
    for _ in range(2000):
        if live and rng.random() < 0.5:
            blocks.free(live.pop(list(live)[rng.integers(len(live))]))
        else:
            live[len(live), rng.random()] = blocks.allocate(int(2 ** rng.uniform(3, 25)))
    spans = sorted((a, a + blocks._blocks[a][0]) for a in live.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for address in live.values():
        blocks.free(address)
    assert sum(block[0] for block in blocks._blocks.values()) == blocks.reserved
    assert all(block[3] is None and block[4] is None for block in blocks._blocks.values())
