"""Every way to train one model in several processes, against one process on the same rows."""

import os

import pytest
from sharded import distances
from torch import nn

from gradmem_lib import Recipe
from gradmem_lib.course import run_ranks
from gradmem_lib.names import SHARDING
from gradmem_lib.techniques.sharding import shard

CLOSE = 1e-12
FAMILIES = ("llama", "gpt2", "qwen2", "mixtral", "t5", "bert", "whisper", "vit")
QLORA = {"lora_rank": 2, "quantized_base": True}


def case(family: str, how: str, clip: float = 0.0, **fields) -> tuple[str, list]:
    """A name, and the family, the recipe's fields and how it is trained."""
    more = [f"{name}={value}" for name, value in fields.items()] + ["clipped"] * bool(clip)
    return ", ".join([family, how, *more]), [family, {"sharding": how} | fields, {"clip": clip}]


def cases(ways: list[dict], families=("llama",), hows=tuple(SHARDING)) -> dict[str, list]:
    return dict(case(family, how, **way) for family in families for how in hows for way in ways)


PIECES = {"accumulation": 2}
TWO = (
    cases([PIECES], ("llama", "gpt2", "t5", "mixtral"))
    | cases([{"clip": 1e-3}, {"lora_rank": 2}, {"checkpointing": "per-layer"}, QLORA | {"checkpointing": "per-layer"}])
    | cases(
        [
            {"checkpointing": (1, 1)}, {"checkpointing": "attention", "accumulation": 2}, {"every_n_layers": 2}, {"in_backward": True},
            {"offload": "activations"}, {"offload": "boundaries", "checkpointing": "sqrt"}, {"offload": "parameters", "clip": 1e-3},
            {"optimizer": "sgd", "momentum": 0.9}, {"optimizer": "adamw-foreach"}, {"optimizer": "adamw-fused"},
        ],
        hows=("fsdp",),
    )
    | cases([{"optimizer": "adafactor"}, {"optimizer": "adafactor-torch"}, {"optimizer": "adamw-8bit"}], hows=("zero1",))
)  # fmt: skip
FOUR = cases([PIECES], ("qwen2",)) | cases([{"clip": 1e-3, **PIECES, **QLORA}], hows=("fsdp",))
if os.environ.get("GRADMEM_ALL"):
    TWO |= cases([{}, PIECES], FAMILIES)
    FOUR |= TWO


@pytest.fixture(scope="module")
def on_two():
    return run_ranks(distances, TWO)[0]


@pytest.fixture(scope="module")
def on_four():
    return run_ranks(distances, FOUR, ranks=4)[0]


@pytest.mark.parametrize("name", TWO)
def test_on_two_ranks_gradients_and_weights_are_one_processs(on_two, name):
    assert isinstance(on_two[name], float) and on_two[name] <= CLOSE, on_two[name]


@pytest.mark.parametrize("name", FOUR)
def test_on_four_ranks_gradients_and_weights_are_one_processs(on_four, name):
    assert isinstance(on_four[name], float) and on_four[name] <= CLOSE, on_four[name]


def test_without_a_process_group_the_sentence_says_torchrun():
    with pytest.raises(ValueError, match="torchrun --nproc-per-node=2"):
        shard(nn.Sequential(nn.Linear(2, 2)), "fsdp")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sharding": "zero3"}, "choose one of 'ddp', 'zero1', 'zero2', 'fsdp'"),
        ({"sharding": "ddp", "in_backward": True}, "choose sharding='fsdp'"),
        ({"sharding": "fsdp", "chunked_loss": True}, "leave it out with sharding='fsdp'"),
        ({"sharding": "fsdp", "optimizer": "adafactor"}, "some of the rows"),
        ({"sharding": "zero2", "optimizer": "adamw-8bit"}, "choose sharding='zero1'"),
        ({"sharding": "fsdp", "checkpointing": "best"}, "choose checkpointing='per-layer'"),
        ({"sharding": "ddp", "optimizer": "adamw-stochastic", "precision": "bf16"}, "rounded its own way"),
        ({"sharding": "zero2", "offload": "parameters"}, "choose sharding='fsdp'"),
    ],
)
def test_what_does_not_go_together_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        Recipe(**fields)
