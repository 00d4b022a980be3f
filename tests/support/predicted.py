"""Small models, and a real step beside a predicted one: shared by the tests of predictions."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_
from transformers import (
    BertConfig,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    ViTConfig,
)

from gradmem_lib.course.material import models
from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.model.classes import model_class
from gradmem_lib.model.inputs import example_batch
from gradmem_lib.prediction.loop import Loop
from gradmem_lib.prediction.predict import predict
from gradmem_lib.techniques.lora import add_lora
from gradmem_lib.training.prepare import cast_weights, prepare
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.training.step import step

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
TEXT = SIZES | {"vocab_size": 128, "max_position_embeddings": 64}


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


# Fields of recipes, by a name. Attention is as the model has it, where nothing is said.
RECIPES = {
    "float32": {},
    "bf16-eager-fused": {"precision": "bf16", "attention": "eager", "optimizer": "adamw-fused"},
    "autocast-per-layer": {
        "precision": "autocast-bf16",
        "optimizer": "adamw-foreach",
        "checkpointing": "per-layer",
    },
    "lora": {"lora_rank": 2, "precision": "bf16"},
    "accumulated": {"accumulation": 2, "optimizer": "sgd", "attention": "fused"},
    "in-backward": {"in_backward": True, "precision": "bf16"},
    "master-per-layer": {"precision": "float32-master", "checkpointing": "per-layer"},
    "segments": {"precision": "bf16", "checkpointing": 2, "optimizer": "adamw-foreach"},
    "fp16-every-second": {
        "precision": "autocast-fp16",
        "every_n_layers": 2,
        "optimizer": "adamw-fused",
    },
    "lora-per-layer": {"lora_rank": 4, "checkpointing": "per-layer", "precision": "autocast-bf16"},
    "in-backward-momentum": {"in_backward": True, "optimizer": "sgd", "momentum": 0.9},
    "adafactor": {"optimizer": "adafactor", "precision": "bf16"},
    "adafactor-torch": {"optimizer": "adafactor-torch", "precision": "bf16"},
    "8-bit": {"optimizer": "adamw-8bit", "precision": "bf16"},
    "stochastic": {"optimizer": "adamw-stochastic", "precision": "bf16"},
    "momentum": {"optimizer": "sgd", "momentum": 0.9},
    "foreach": {"optimizer": "adamw-foreach", "precision": "autocast-bf16"},
    "master-foreach": {"precision": "float32-master", "optimizer": "adamw-foreach"},
    "master-fused": {"precision": "float32-master", "optimizer": "adamw-fused"},
    "accumulated-fp16": {"accumulation": 4, "precision": "autocast-fp16"},
    "sqrt": {"checkpointing": "sqrt", "precision": "bf16"},
    "best": {"checkpointing": "best"},
    "first-2": {"checkpointing": "first-2", "precision": "bf16"},
    "attention": {"checkpointing": "attention", "attention": "eager"},
    "mlp": {"checkpointing": "mlp", "precision": "autocast-bf16"},
    "elementwise": {"checkpointing": "elementwise", "precision": "bf16"},
    "moved": {"offload": "activations", "checkpointing": "per-layer"},
    "chunked": {"chunked_loss": True, "precision": "bf16"},
    "chunked-autocast-lora": {
        "chunked_loss": True,
        "precision": "autocast-bf16",
        "lora_rank": 2,
    },
    "in-backward-adafactor-torch": {
        "in_backward": True,
        "optimizer": "adafactor-torch",
        "precision": "bf16",
    },
}


def tiny(**sizes) -> LlamaForCausalLM:
    """A Llama that counts and steps in milliseconds."""
    usual = {"layers": 2, "hidden": 64, "heads": 4, "intermediate": 172, "vocab": 512}
    return models.tiny_llama(**usual | sizes)


def recipe_of(name: str) -> Recipe:
    return Recipe(**{"attention": None} | RECIPES[name])


BATCH, SEQ = 4, 16


def adapted(layers: int = 3):
    """Adapters in float32 on a base in bf16, as PEFT makes them."""
    cfg = config("llama", layers)
    model = model_class(cfg)(cfg).to(torch.bfloat16)
    add_lora(model, 2, ("q_proj",))
    return model


def tracked(model, batch, recipe: Recipe | None = None, loss=None) -> MemoryTracker:
    """The second step of a real run, which changes ``model``."""
    recipe = recipe or Recipe()
    run = prepare(model, recipe)
    step(run.model, run.optimizer, batch, recipe, loss=loss)
    with MemoryTracker(run.model, run.optimizer, live=False) as tracker:
        step(run.model, run.optimizer, batch, recipe, loss=loss)
    run.undo.close()
    return tracker


def measured(
    cfg, recipe: Recipe | None = None, batch_size: int = BATCH, seq_len: int | None = SEQ
) -> MemoryTracker:
    """The second step of a real run of the model of ``cfg``."""
    model = model_class(cfg)(copy.deepcopy(cfg))
    trained = model
    if recipe is not None and recipe.weight_dtype is not None:
        trained = copy.deepcopy(model)  # from whose weights the masters start
        cast_weights(model, recipe.weight_dtype)  # for pictures and sounds in that dtype
    return tracked(trained, example_batch(model, batch_size, seq_len), recipe)


def assert_same(predicted, tracker) -> None:
    assert predicted.peak == tracker.peak
    assert predicted.peak_by_phase == tracker.peak_by_phase
    assert predicted.current.by_category == tracker.current.by_category
    timeline, at = predicted.timeline, predicted.timeline.peak_index
    assert {name: n[at] for name, n in timeline.by_category.items()} == predicted.peak.by_category
    # At every moment under the category that a storage turned out to belong to.
    ours, theirs = timeline.by_category, tracker.timeline.by_category
    assert {name: max(ours[name]) for name in ours} == {name: max(theirs[name]) for name in theirs}


def assert_short_is_full(source, **ask):
    """Short traces say what the full one says, also of the allocator. Returns both."""
    short, full = predict(source, **ask), predict(source, **ask, full=True)
    assert not full.traced_layers
    assert (short.peak, short.peak_by_phase) == (full.peak, full.peak_by_phase)
    assert short.current == full.current
    assert short.offload_traffic_bytes == full.offload_traffic_bytes
    assert np.array_equal(short.timeline.rows, full.timeline.rows)
    assert short.replay_allocator() == full.replay_allocator()
    return short, full


PLAIN = Loop()


def tracked_loop(model, batch: dict, loop: Loop = PLAIN) -> MemoryTracker:
    """The third step of a loop that is written out."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    outputs = loss = None

    def one_step():
        nonlocal outputs, loss
        if loop.zero_grad == "before forward":
            optimizer.zero_grad()
        # what the last step kept lives until the new outputs are there
        outputs = model(**batch)
        loss = outputs.loss
        if loop.keeps != "outputs":
            outputs = None
        if loop.zero_grad == "before backward":
            optimizer.zero_grad()
        loss.backward()
        if loop.clips:
            clip_grad_norm_(model.parameters(), 1.0)
        if loop.keeps != "loss":
            loss = None
        optimizer.step()
        if loop.zero_grad == "after step":
            optimizer.zero_grad()

    for _ in range(2):
        one_step()
    with MemoryTracker(model, optimizer, live=False) as tracker:
        one_step()
    return tracker


def mean_square(model, x):
    """A loss for modules that return a tensor."""
    return model(x).square().mean()


def assert_predicted(model, batch, recipe=None, loss=None, then=lambda: None) -> None:
    """``then`` is called between the prediction and the step of the same model."""
    predicted = predict(model, batch=batch, recipe=recipe, loss=loss, target="cpu")
    then()
    assert_same(predicted, tracked(model, batch, recipe, loss))
