"""Each family of transformers models with six recipes: the prediction is the tracker's measurement,
or a refusal in a sentence.

A few cases run each time, all of them every night.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
import transformers
from support.families import FAMILIES, OLDER, tiny_config
from support.nightly import each
from support.predicted import RECIPES, assert_same, measured, recipe_of

from gradmem_lib import predict
from gradmem_lib.prediction.question import CannotTrace

NAMES = list(RECIPES)[:6]
CASES = each(35, product(FAMILIES, NAMES))  # in steps in which every recipe comes
ROWS, TOKENS = 2, 16

EVERY = " ".join(NAMES)
# What is refused, with which recipes, of which families; other cases are exact.
ROWS_OF_REFUSED = [
    ("reads a tensor's value", EVERY, "jetmoe longformer led"),
    ("fails in its prediction", "bf16-eager-fused lora in-backward", "xglm openai-gpt fnet"),
    ("without overflow", "autocast-per-layer", "deberta"),
    (
        "does not support (activation|gradient) checkpointing",
        "autocast-per-layer",
        "openai-gpt ctrl jetmoe albert mpnet squeezebert xlnet convnext resnet mobilenet_v2 regnet",
    ),
    (
        "has no fused attention",
        "accumulated",
        "convnext falcon_mamba fnet gemma2 gpt_oss longt5 mamba mamba2 mobilenet_v2 regnet resnet "
        "switch_transformers",
    ),
    ("return_loss=True", "accumulated", "siglip clip"),  # a loss that compares rows
    ("give batch=", EVERY, "wav2vec2 hubert"),
]
REFUSED: dict[tuple[str, str], str] = {}
for why, recipes, families in ROWS_OF_REFUSED:
    for case in product(families.split(), recipes.split()):
        REFUSED[case] = why


def reads_a_number(config) -> bool:
    """Whether each forward decides by a random number which layers run, also where all do."""
    names = vars(config)
    return any(name.endswith("layerdrop") for name in names) and config.model_type not in (
        "wav2vec2",
        "hubert",
    )


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_family_is_predicted_to_the_byte_or_refused(family, name):
    transformers.logging.set_verbosity_error()
    if OLDER and family == "zamba2":
        pytest.skip("transformers 5.17 refuses its own config of two layers")
    config, recipe, why = tiny_config(family), recipe_of(name), REFUSED.get((family, name))
    if OLDER and (family, name) == ("gemma2", "accumulated"):
        why = None  # it takes fused attention there
    if OLDER and reads_a_number(config):
        why = "reads a tensor's value"
    if why is not None:
        with pytest.raises((ValueError, CannotTrace), match=why) as refusal:
            predict(config, batch_size=ROWS, seq_len=TOKENS, recipe=recipe, target="cpu")
        assert len(str(refusal.value)) > 50
        return
    predicted = predict(config, batch_size=ROWS, seq_len=TOKENS, recipe=recipe, target="cpu")
    torch.manual_seed(0)
    assert_same(predicted, measured(config, recipe, ROWS, TOKENS))
