"""Short traces against full ones: several lists of layers, and kinds of layers that take turns."""

from __future__ import annotations

import pytest
from support.families import tiny_config
from support.nightly import each
from support.predicted import assert_short_is_full

from gradmem_lib.prediction.predict import source_of
from gradmem_lib.training.recipe import Recipe

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


@pytest.mark.parametrize(
    ("family", "depths", "recipe", "layers"),
    each(
        5,
        [
            ("whisper", (12, 12), {"checkpointing": "per-layer"}, (6, 7, 7)),
            ("gemma2", (16,), {"attention": "eager"}, (4, 6)),
            ("whisper", (4, 12), {"optimizer": "adamw-8bit", "precision": "bf16"}, (7, 8)),
            ("whisper", (12, 4), {}, (7, 8)),
            ("bart", (12, 12), {}, (6, 7, 7)),
            ("marian", (14, 8), {"optimizer": "adafactor-torch", "precision": "bf16"}, (6, 7, 7)),
            (
                "pegasus",
                (11, 11),
                {"offload": "activations", "checkpointing": "per-layer"},
                (6, 7, 7),
            ),
            ("t5", (13, 12), {}, (6, 7, 7)),
            # segments of lists of different lengths
            ("bart", (16, 9), {"checkpointing": "sqrt"}, ()),
        ],
    ),
)
def test_each_list_of_layers_is_shortened(family, depths, recipe, layers):
    short = assert_short_is_full(deep(family, *depths), recipe=Recipe(**recipe), **ASK)
    assert short.traced_layers == layers


@pytest.mark.parametrize(
    ("family", "depths", "target"),
    each(
        4,
        [
            ("whisper", (8, 7), "cuda"),
            ("bart", (9, 9), "cpu"),
            ("t5", (8, 9), "cpu"),
            ("pegasus", (7, 8), "cuda"),
        ],
    ),
)
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


@pytest.mark.parametrize(
    ("hidden", "recipe", "is_short"),
    each(
        3,
        [
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
        ],
    ),
)
def test_layers_that_fill_whole_blocks_of_ddps_bucket_are_traced_shortly(hidden, recipe, is_short):
    config = deep("llama", 14)
    config.hidden_size, config.head_dim = hidden, hidden // config.num_attention_heads
    config.num_key_value_heads, config.intermediate_size = config.num_attention_heads, 80
    recipe = Recipe(**{"precision": "autocast-bf16", "sharding": "ddp", **recipe})
    asked = ASK | {"recipe": recipe, "target": "cuda", "ranks": 2}
    assert bool(assert_short_is_full(config, **asked).traced_layers) == is_short
