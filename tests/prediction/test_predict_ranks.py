"""predict(ranks=...): one rank's memory without processes, against trackers on real ranks."""

import contextlib
import sys
from itertools import product

import pytest
import torch
import torch.distributed as dist
from support.nightly import ALL, each
from support.predicted import config
from support.ranked import measured_here, predicted_for
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from gradmem_lib import MemoryTracker, Recipe, predict
from gradmem_lib.compat.fake_ranks import fake_process_group
from gradmem_lib.course import run_ranks
from gradmem_lib.model.configs import skeleton
from gradmem_lib.names import SHARDING
from gradmem_lib.prediction.question import CannotTrace

FAMILIES = ("llama", "gpt2", "mixtral", "t5")
ADAPTERS = {"lora_rank": 4, "precision": "bf16"}
VARIANTS = (
    {},
    {"checkpointing": "per-layer"},
    ADAPTERS,
    {"accumulation": 2},
    {"precision": "float32-master"},
    ADAPTERS | {"quantized_base": True, "checkpointing": "per-layer"},
)
WHOLE_GRID = [
    (family, {"sharding": how} | more)
    for family, how, more in product(FAMILIES, SHARDING, VARIANTS)
]
GRID = each(17, WHOLE_GRID)  # in steps in which every family, every way and every variant comes


# Four ranks every night.
@pytest.mark.parametrize("ranks", each(2, [2, 4]))
def test_a_predicted_rank_is_the_tracked_one(ranks):
    narrow = {"precision": "autocast-bf16", "lora_rank": 4, "quantized_base": True}
    more = [{"offload": "parameters"}, {"optimizer": "adamw-fused"}, narrow]
    cases = GRID + [("llama", {"sharding": "fsdp"} | fields) for fields in more]
    measured = run_ranks(measured_here, cases, ranks=ranks, seconds=600)
    for i, (family, fields) in enumerate(cases):
        for rank in range(ranks) if ALL else (i % ranks,):
            assert predicted_for(family, fields, ranks, rank) == measured[rank][i], (
                family,
                fields,
                rank,
            )


def test_the_numbers_that_ranks_add_up_take_memory_in_a_prediction_too(spy):
    reduced = spy(dist, "all_reduce")
    asked = {"batch_size": 2, "seq_len": 8, "target": "cpu", "ranks": 2}
    predict(config("llama"), recipe=Recipe(sharding="ddp"), full=True, **asked)
    tensors = [call.args[0] for call in reduced.call_args_list]
    assert (torch.float64, 8) in [(tensor.dtype, tensor.nbytes) for tensor in tensors]


@pytest.mark.parametrize("full", each(2, [False, True]))
def test_offloaded_shards_are_not_on_the_card(full):
    cfg, recipe = config("gqa", 8), Recipe(sharding="fsdp", offload="parameters")
    asked = {"batch_size": 2, "seq_len": 8, "target": "cuda", "ranks": 2}
    there, here = (
        predict(cfg, recipe=r, full=full, **asked) for r in (recipe, Recipe(sharding="fsdp"))
    )
    for category in ("parameters", "gradients", "optimizer"):
        assert there.current.by_category[category] == 0 and there.peak.by_category["gradients"] == 0
    assert there.current.by_category["other"] == here.current.by_category["other"]
    kept = sum(here.current.by_category[c] for c in ("parameters", "optimizer"))
    assert there.peak_by_phase["forward"] < here.peak_by_phase["forward"] - 0.9 * kept
    # Each rank sends its half up for forward, its layers' half once more for backward, and its half
    # of the gradients down.
    model = skeleton(cfg)
    whole, layers = (
        sum(p.nbytes for p in part.parameters()) for part in (model, model.model.layers)
    )
    assert (
        there.offload_traffic_bytes == (2 * whole + layers) // 2 and here.offload_traffic_bytes == 0
    )


@pytest.mark.parametrize(
    "recipe, sizes, sentence",
    [
        (Recipe(), {"ranks": 2}, "Give how many and which one"),
        (Recipe(sharding="fsdp"), {}, "Give how many and which one"),
        (Recipe(sharding="fsdp"), {"ranks": 2, "rank": 2}, "0 to ranks - 1"),
        (Recipe(sharding="ddp"), {"ranks": 0}, "Give how many and which one"),
        (Recipe(sharding="ddp"), {"ranks": 2.0}, "Give how many and which one"),
    ],
)
def test_what_does_not_fit_is_refused(recipe, sizes, sentence):
    with pytest.raises(ValueError, match=sentence):
        predict(config("llama"), batch_size=2, seq_len=8, recipe=recipe, **sizes)


def test_no_group_is_left_also_after_an_error():
    hook = sys.excepthook
    asked = {"batch_size": 2, "seq_len": 8, "recipe": Recipe(sharding="fsdp"), "ranks": 4}
    predict(config("llama"), **asked)
    assert not dist.is_initialized()

    def fails(model, batch):
        raise KeyError("in the loss")

    with pytest.raises(CannotTrace, match="in the loss"):
        predict(config("llama"), loss=fails, **asked)
    assert not dist.is_initialized() and sys.excepthook is hook


def the_groups() -> list:
    """What torch knows of process groups."""
    tables = (
        dict(vars(c10d)[f"_{name}"])
        for name in ("pg_map", "pg_names", "pg_group_ranks", "tags_to_pg")
    )
    return [
        dist.is_initialized(),
        c10d.GroupMember.WORLD,
        c10d._world.group_count,
        sys.excepthook,
        *tables,
    ]


@pytest.mark.parametrize("inside", [False, True])
def test_a_group_that_exists_is_put_aside_and_given_back(inside):
    if inside:
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
        dist.new_group([0, 1])
    try:
        before = the_groups()
        with contextlib.suppress(ZeroDivisionError), fake_process_group(5, 4) as mesh:
            assert (dist.get_world_size(), dist.get_rank(), mesh.size()) == (5, 4, 5)
            assert [dist.get_process_group_ranks(group) for group in c10d._world.pg_map] == [
                list(range(5))
            ]
            model = nn.Linear(2, 2)
            with MemoryTracker(live=False) as tracker:
                parallel = DistributedDataParallel(model, process_group=mesh.get_group())
            assert tracker.peak.total == 24, "nothing is sent to ranks that are not there"
            with MemoryTracker(live=False):
                for _ in range(3):
                    parallel(torch.ones(1, 2)).sum().backward()
            assert not parallel._has_rebuilt_buckets, "their order is the first one"
            raise ZeroDivisionError
        assert the_groups() == before and torch.distributed.Reducer is not None
        assert torch.distributed.Reducer.__module__.startswith("torch"), "DDP is torch's own again"
    finally:
        if inside:
            dist.destroy_process_group()
