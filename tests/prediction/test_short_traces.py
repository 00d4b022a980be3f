"""Short traces against full ones: segments, several lists of layers, kinds of layers that take
turns, and layers whose gradients share a storage.
"""

from __future__ import annotations

import pytest
import torch
from support.families import tiny_config
from support.nightly import each
from support.predicted import assert_short_is_full, config

from gradmem_lib import Loop, Recipe
from gradmem_lib.model.classes import model_class
from gradmem_lib.prediction.predict import source_of
from gradmem_lib.techniques.lora import add_lora

ASK = {"batch_size": 2, "seq_len": 16, "target": "cpu"}
# Families, and the names of their numbers of layers.
DEPTHS = {
    "llama": ["num_hidden_layers"],
    "gemma2": ["num_hidden_layers"],
    "whisper": ["encoder_layers", "decoder_layers"],
    "bart": ["encoder_layers", "decoder_layers"],
    "marian": ["encoder_layers", "decoder_layers"],
    "pegasus": ["encoder_layers", "decoder_layers"],
    "t5": ["num_layers", "num_decoder_layers"],
}


def deep(family: str, *depths: int):
    config = tiny_config(family)
    if getattr(config, "layer_types", None):  # made from the number of layers
        config = type(config)(**{**config.to_dict(), "layer_types": None, **named(family, depths)})
    for name, n in named(family, depths).items():
        setattr(config, name, n)
    return config


def named(family: str, depths) -> dict[str, int]:
    return dict(zip(DEPTHS[family], depths, strict=True))


def adapted():
    """Adapters in float32 on a base in bf16, as PEFT makes them."""
    shape = config("llama", 9)
    model = model_class(shape)(shape).to(torch.bfloat16)
    add_lora(model, 2, ("q_proj",))
    return model


SGD, CUDA = {"optimizer": "sgd"}, {"target": "cuda"}
OFFLOADED = {"offload": "activations", "checkpointing": "per-layer"}
TORCHS = {"optimizer": "adafactor-torch", "precision": "bf16"}
RANKS = {"ranks": 3, "rank": 2}
# A model, a recipe, what is asked besides, and the numbers of layers that are traced.
CASES = [
    # segments of 2, 2, ..., 1
    (config("llama", 13), {"checkpointing": 2}, {}, (5, 7)),
    (deep("whisper", 12, 12), {"checkpointing": "per-layer"}, {}, (6, 7, 7)),
    # clipping stacks a norm of each parameter: that is one storage that grows with the layers
    (config("llama", 9), SGD, {"loop": Loop(clips=True)}, ()),
    (adapted(), {"precision": None}, CUDA, (3, 4)),
    (deep("gemma2", 16), {"attention": "eager"}, {}, (4, 6)),
    (config("llama", 9), SGD, {"loop": Loop(keeps="outputs")}, (3, 4)),
    (config("gqa", 16), {"sharding": "ddp"}, RANKS, (3, 4, 5)),
    (config("llama", 36), {"checkpointing": "sqrt", "precision": "autocast-bf16"}, CUDA, (12, 18)),
    (config("llama", 13), {"every_n_layers": 2, "optimizer": "sgd"}, CUDA, (5, 7)),
    (
        config("llama", 19),
        {"checkpointing": 3, "optimizer": "adamw-foreach", "accumulation": 2},
        {},
        (7, 10),
    ),
    (config("llama", 12), {"checkpointing": 2, "precision": "bf16", "lora_rank": 2}, {}, (4, 6)),
    (config("gqa", 16), {"sharding": "fsdp", "checkpointing": "per-layer"}, RANKS, (3, 4)),
    (deep("pegasus", 11, 11), OFFLOADED, {}, (6, 7, 7)),
    (deep("whisper", 12, 4), {}, {}, (7, 8)),
    (deep("bart", 12, 12), {}, {}, (6, 7, 7)),
    (deep("marian", 14, 8), TORCHS, {}, (6, 7, 7)),
    (deep("whisper", 4, 12), {"optimizer": "adamw-8bit", "precision": "bf16"}, {}, (7, 8)),
    (deep("t5", 13, 12), {}, {}, (6, 7, 7)),
    # segments of lists of different lengths
    (deep("bart", 16, 9), {"checkpointing": "sqrt"}, {}, ()),
]


@pytest.mark.parametrize(("source", "fields", "more", "layers"), each(3, CASES))
def test_few_layers_say_what_all_say(source, fields, more, layers):
    recipe = Recipe(**fields)
    asked = ASK | {"batch_size": 2 * recipe.accumulation, "recipe": recipe} | more
    assert assert_short_is_full(source, **asked).traced_layers == layers


# At least three layers of each kind are kept, so the first list has three more than the second k.
FIRST_LAYERS = [
    ("whisper", (8, 7), "cuda"),
    ("bart", (9, 9), "cpu"),
    ("t5", (8, 9), "cpu"),
    ("pegasus", (8, 8), "cuda"),
]


@pytest.mark.parametrize(("family", "depths", "target"), each(4, FIRST_LAYERS))
def test_the_first_layers_of_two_lists_are_predicted_from_shared_short_traces(
    family, depths, target
):
    """With k in the first list, at its end, and in the second list."""
    source = source_of(deep(family, *depths))
    remembered = []
    for k in (4, 5, depths[0], depths[0] + 3):
        recipe = Recipe(precision="bf16", optimizer="adamw-fused", checkpointing=f"first-{k}")
        asked = ASK | {"recipe": recipe, "target": target}
        assert assert_short_is_full(source, **asked).traced_layers
        remembered.append(len(source.short_traces))
    assert remembered[1] == remembered[0]


IN_BLOCKS = [
    # norms of half a block each, two in a layer
    (64, {}, True),
    (64, {"checkpointing": "first-5"}, True),
    # adapters of all layers fill blocks together, and those of one layer do not
    (48, {"lora_rank": 1, "lora_targets": ("q_proj",), "precision": "bf16"}, False),
    (64, {"lora_rank": 16}, True),
    # in bf16, the two norms are half a block together
    (64, {"precision": "bf16"}, False),
    (32, {}, False),
    (96, {"lora_rank": 1}, False),
]


@pytest.mark.parametrize(("hidden", "recipe", "is_short"), each(3, IN_BLOCKS))
def test_layers_that_fill_whole_blocks_of_ddps_bucket_are_traced_shortly(hidden, recipe, is_short):
    config = deep("llama", 14)
    config.hidden_size, config.head_dim = hidden, hidden // config.num_attention_heads
    config.num_key_value_heads, config.intermediate_size = config.num_attention_heads, 80
    recipe = Recipe(**{"precision": "autocast-bf16", "sharding": "ddp", **recipe})
    asked = ASK | {"recipe": recipe, "target": "cuda", "ranks": 2}
    assert bool(assert_short_is_full(config, **asked).traced_layers) == is_short
