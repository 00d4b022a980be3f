"""Every way to train one model in several processes, against one process on the same rows."""

import json
from pathlib import Path

import pytest
from torch import nn

from gradmem_lib import Recipe
from gradmem_lib.course.processes import torchrun
from gradmem_lib.names import SHARDING
from gradmem_lib.techniques.sharding import shard

CLOSE = 1e-12
# By name: the family, the recipe's fields, and how it is trained.
TWO = {
    f"{family}, {how}": [family, {"sharding": how}, {}] for family in ("llama", "gpt2") for how in SHARDING
}


def on_ranks(ranks: int, cases: dict) -> dict:
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import sharded; sharded.main({cases!r})"
    return json.loads(torchrun(script, ranks).splitlines()[-1])


@pytest.fixture(scope="module")
def on_two():
    return on_ranks(2, TWO)


@pytest.mark.parametrize("name", TWO)
def test_gradients_and_weights_are_one_processs(on_two, name):
    assert isinstance(on_two[name], float) and on_two[name] <= CLOSE, on_two[name]


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
        ({"sharding": "ddp", "optimizer": "adamw-stochastic", "precision": "bf16"}, "rounded its own way"),
        ({"sharding": "zero2", "offload": "parameters"}, "choose sharding='fsdp'"),
    ],
)
def test_what_does_not_go_together_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        Recipe(**fields)
