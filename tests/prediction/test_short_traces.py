"""Short traces of random models against full ones and real steps: several lists of layers, kinds of
layers that take turns, random depths, batch sizes and recipes.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import transformers
from support.families import tiny_config
from support.nightly import ALL, each
from support.predicted import assert_same, measured

from gradmem_lib.prediction.predict import predict, source_of
from gradmem_lib.prediction.question import CannotTrace
from gradmem_lib.training.recipe import Recipe

# Families, and the names of their numbers of layers.
DEPTHS = {
    "llama": ["num_hidden_layers"],
    "bert": ["num_hidden_layers"],
    "gpt2": ["n_layer"],
    "opt": ["num_hidden_layers"],
    "vit": ["num_hidden_layers"],
    "gemma2": ["num_hidden_layers"],
    "qwen3_moe": ["num_hidden_layers"],
    "mamba": ["num_hidden_layers"],
    "whisper": ["encoder_layers", "decoder_layers"],
    "bart": ["encoder_layers", "decoder_layers"],
    "marian": ["encoder_layers", "decoder_layers"],
    "pegasus": ["encoder_layers", "decoder_layers"],
    "t5": ["num_layers", "num_decoder_layers"],
    "clip": [],
}
RECIPES = {
    "float32": {},
    "bf16": {"precision": "bf16", "optimizer": "adamw-fused"},
    "foreach": {"optimizer": "adamw-foreach", "precision": "autocast-bf16"},
    "8 bits": {"optimizer": "adamw-8bit", "precision": "bf16"},
    "adafactor": {"optimizer": "adafactor-torch", "precision": "bf16"},
    "momentum": {"optimizer": "sgd", "momentum": 0.9},
    "masters": {"precision": "float32-master"},
    "in backward": {"in_backward": True},
    "accumulated": {"accumulation": 4},
    "per layer": {"checkpointing": "per-layer"},
    "first 5": {"checkpointing": "first-5", "precision": "bf16"},
    "pairs of layers": {"checkpointing": 2},
    "sqrt": {"checkpointing": "sqrt"},
    "one in two": {"every_n_layers": 2},
    "attention": {"checkpointing": "attention"},
    "moved": {"offload": "activations", "checkpointing": "per-layer"},
    "lora": {"lora_rank": 2, "precision": "bf16"},
    "eager": {"attention": "eager"},
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


def both(config, recipe, rows=2, seq_len=16, target="cpu", **more):
    ask = {"batch_size": rows, "seq_len": seq_len, "recipe": recipe, "target": target, **more}
    return predict(config, **ask), predict(config, **ask, full=True)


def assert_equal(short, full) -> None:
    assert not full.traced_layers
    assert (short.peak, short.peak_by_phase) == (full.peak, full.peak_by_phase)
    assert short.current == full.current
    assert short.offload_traffic_bytes == full.offload_traffic_bytes
    assert np.array_equal(short.timeline.rows, full.timeline.rows)


@pytest.mark.parametrize(
    ("family", "depths", "recipe", "layers"),
    [
        ("whisper", (12, 12), "per layer", (6, 7, 7)),
        *each(
            4,
            [
                ("bart", (12, 12), "float32", (6, 7, 7)),
                ("whisper", (4, 12), "8 bits", (7, 8)),
                ("whisper", (12, 4), "float32", (7, 8)),
                ("marian", (14, 8), "adafactor", (6, 7, 7)),
                ("pegasus", (11, 11), "moved", (6, 7, 7)),
                ("t5", (13, 12), "float32", (6, 7, 7)),
                ("gemma2", (16,), "eager", (4, 6)),
            ],
        ),
    ],
)
def test_each_list_of_layers_is_shortened(family, depths, recipe, layers):
    short, full = both(deep(family, *depths), Recipe(**RECIPES[recipe]))
    assert short.traced_layers == layers
    assert_equal(short, full)


@pytest.mark.parametrize(
    ("family", "depths", "target"),
    [
        ("whisper", (8, 7), "cuda"),
        *each(3, [("bart", (9, 9), "cpu"), ("t5", (8, 9), "cpu"), ("pegasus", (7, 8), "cuda")]),
    ],
)
def test_the_first_layers_of_two_lists_are_predicted_from_shared_short_traces(
    family, depths, target
):
    """With k in the first list, at its end, and in the second list."""
    source = source_of(deep(family, *depths))
    remembered = []
    for k in (4, 5, depths[0], depths[0] + 3):
        recipe = Recipe(precision="bf16", optimizer="adamw-fused", checkpointing=f"first-{k}")
        short, full = both(source, recipe, target=target)
        assert short.traced_layers
        assert_equal(short, full)
        if target == "cuda":
            assert short.replay_allocator() == full.replay_allocator()
        remembered.append(len(source.short_traces))
    assert remembered[1] == remembered[0]


@pytest.mark.parametrize(
    ("hidden", "recipe", "is_short"),
    [
        # norms of half a block each, two in a layer
        (64, {}, True),
        (64, {"checkpointing": "first-5"}, True),
        # in bf16, the two norms are half a block together
        (64, {"precision": "bf16"}, False),
        (32, {}, False),
        # adapters of all layers fill blocks together, and those of one layer do not
        (48, {"lora_rank": 1, "lora_targets": ("q_proj",), "precision": "bf16"}, False),
        *each(2, [(64, {"lora_rank": 16}, True), (96, {"lora_rank": 1}, False)]),
    ],
)
def test_layers_that_fill_whole_blocks_of_ddps_bucket_are_traced_shortly(hidden, recipe, is_short):
    config = deep("llama", 14)
    config.hidden_size, config.head_dim = hidden, hidden // config.num_attention_heads
    config.num_key_value_heads, config.intermediate_size = config.num_attention_heads, 80
    recipe = Recipe(**{"precision": "autocast-bf16", "sharding": "ddp", **recipe})
    short, full = both(config, recipe, rows=2, target="cuda", ranks=2)
    assert bool(short.traced_layers) == is_short
    assert_equal(short, full)
    assert short.replay_allocator() == full.replay_allocator()


def test_an_encoder_and_a_decoder_are_predicted_as_tracked():
    config, recipe = deep("whisper", 12, 12), Recipe(checkpointing="per-layer")
    short = predict(config, batch_size=1, seq_len=16, recipe=recipe, target="cpu")
    assert short.traced_layers
    assert_same(short, measured(config, recipe, 1, 16))


def test_segments_of_lists_of_different_lengths_are_traced_in_full():
    short, full = both(deep("bart", 16, 9), Recipe(checkpointing="sqrt"))
    assert short.traced_layers == ()
    assert_equal(short, full)


@pytest.mark.parametrize("seed", range(80 if ALL else 4))
def test_random_models_and_recipes(seed):
    """With another seed each night."""
    transformers.logging.set_verbosity_error()
    dice = random.Random(f"{seed} {random.random() if ALL else 0}")
    family = dice.choice(list(DEPTHS))
    depths = [dice.randint(2, 14) for _ in DEPTHS[family]]
    options = dict(RECIPES[dice.choice(list(RECIPES))])
    options.setdefault("attention", None)
    recipe = Recipe(**options)
    rows, tokens = dice.randint(1, 3) * recipe.accumulation, dice.randint(4, 32)
    target = dice.choice(["cpu", "cuda"])
    case = family, depths, options, rows, tokens, target
    try:
        short, full = both(deep(family, *depths), recipe, rows, tokens, target)
    except (ValueError, CannotTrace) as refusal:
        assert len(str(refusal)) > 50, case
        return
    assert short.peak == full.peak, case
    assert_equal(short, full)
    if target == "cpu":
        assert_same(short, measured(deep(family, *depths), recipe, rows, tokens))
