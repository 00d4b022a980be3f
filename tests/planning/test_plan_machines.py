"""A plan for several machines: each has a copy of the model, and its cards may share it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.predicted import tiny
from torch.distributed import init_device_mesh

from gradmem_lib import (
    CARDS,
    MemoryTracker,
    Recipe,
    find_card,
    known_model,
    plan,
    predict,
    prepare,
    step,
)
from gradmem_lib.course import run_ranks
from gradmem_lib.planning.cards import NETWORK
from gradmem_lib.planning.cost import cost_per_token, sent_between_machines
from gradmem_lib.planning.held import NCCL
from gradmem_lib.planning.options import Option
from gradmem_lib.planning.search import Search
from gradmem_lib.planning.work import count
from gradmem_lib.view.plan_code import launch, plan_code

HYBRID = [
    Recipe(optimizer="adamw", sharding="fsdp"),
    Recipe(optimizer="adamw", sharding="zero2", accumulation=2),
    Recipe(precision="bf16", optimizer="adamw", sharding="fsdp", checkpointing="per-layer"),
    Recipe(precision="float32-master", optimizer="adamw", sharding="fsdp"),
]


def rows_of(rank: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    ids = torch.randint(0, 512, (2, 16))
    return {"input_ids": ids, "labels": ids}


def peaks_here() -> list[int]:
    """The peak of two steps by each recipe, on two machines with two cards each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    peaks = []
    for recipe in HYBRID:
        torch.manual_seed(0)
        model, optimizer, undo = prepare(tiny(), recipe, mesh=mesh)
        with undo, MemoryTracker(model, optimizer, live=False) as tracker:
            for _ in range(2):
                step(model, optimizer, rows_of(dist.get_rank()), recipe)
        peaks.append(tracker.peak.total)
    for how in ("ddp", "zero1"):
        with pytest.raises(ValueError, match=f"has 2 dimensions, and sharding={how!r} takes 1"):
            prepare(tiny(), Recipe(sharding=how), mesh=mesh)
    return peaks


def test_two_machines_of_two_cards_need_what_one_machine_does():
    config = tiny().config
    asked = {"batch_size": 2, "seq_len": 16, "ranks": 2, "target": "cpu"}
    predicted = [predict(config, recipe=recipe, **asked).peak.total for recipe in HYBRID]
    assert run_ranks(peaks_here, ranks=4) == [predicted] * 4


def test_what_machines_send_each_other_by_hand():
    """Llama-2-7B in bf16: the gradients of 6.7 billion weights, summed over four machines."""
    work = count(known_model("Llama-2-7B")[1])
    gradients = 2 * 6_738_415_616
    recipe = Recipe(precision="bf16", accumulation=3)
    for sharding, times in (("ddp", 1), ("zero2", 3), ("fsdp", 3)):
        sent = sent_between_machines(work, replace(recipe, sharding=sharding), 4)
        assert sent == pytest.approx(2 * 3 / 4 * times * gradients)
    adapters = Recipe(precision="bf16", sharding="fsdp", lora_rank=16)
    assert sent_between_machines(work, adapters, 2) < 0.01 * gradients


@pytest.mark.parametrize("network", [NETWORK, 1.25e9])
def test_seconds_on_two_machines_by_hand(network):
    """What the cards of one machine take, for half of the rows, and the sum over the network."""
    work, card = count(known_model("Llama-2-7B")[1]), CARDS["H100 80GB"]
    recipe = Recipe(precision="bf16", sharding="fsdp", accumulation=2)
    one = cost_per_token(work, recipe, card, 4, 2048, cards=8)
    two = cost_per_token(work, recipe, card, 4, 2048, cards=8, machines=2, network=network)
    sent = 2 * 2 * 6_738_415_616  # half of the gradients, in two directions, twice
    of_a_card = sent / (0.8 * network) / (2 * 4 * 2048)
    assert two.between_machines == pytest.approx(of_a_card / 16)
    assert two.seconds == pytest.approx(one.seconds / 2 + of_a_card / 16)


@pytest.mark.parametrize(("sharding", "groups"), [("ddp", 1), ("zero2", 2), ("fsdp", 2)])
def test_a_recipe_has_room_beside_the_buffers_of_its_groups(sharding, groups):
    work = count(known_model("SmolLM2-135M")[1])
    recipe = Recipe(precision="bf16", optimizer="adamw-fused", sharding=sharding)

    def search(nbytes: int) -> Search:
        card = replace(find_card("T4"), nbytes=nbytes)
        return Search(work, card, 16, 8, "cuda", 2, machines=2)

    option = search(2**34).option(recipe)
    assert option.parts["NCCL (estimate)"] == groups * NCCL
    needed = option.needs - option.parts["allocator's idle blocks"]
    assert search(needed)._live_bytes_fit(recipe)
    assert not search(needed - 1)._live_bytes_fit(recipe)


def test_a_search_deals_the_rows_to_all_cards_of_all_machines():
    work = count(known_model("Llama-2-7B")[1])
    search = Search(work, find_card("H100"), 2048, 64, "cuda", 8, machines=2)
    assert search.rows == 4
    ways = {way.sharding for family in search.families("full") for way in search.variants(family)}
    assert ways == {"ddp", "zero2", "fsdp"}


def test_the_printed_code_of_several_machines():
    config = known_model("Llama-2-7B")[1]
    recipe = Recipe(precision="bf16", optimizer="adamw-fused", sharding="fsdp")
    option = Option(recipe, 2, 0.0, 0, None, {}, cards=8, machines=2)
    assert str(option).endswith("micro-batch 2 x 1 x 8 cards x 2 machines")
    code = plan_code(option, "llama 2 7b", config, "cuda")
    assert code.startswith(
        "# Save this as train.py, and start it on each machine with: torchrun --nnodes=2 "
        "--nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=FIRST:29500 --rdzv-id=1 train.py "
        "(FIRST is the name of the first machine)\n"
    )
    assert 'mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("copies", "shards"))' in code
    copies = replace(option, recipe=replace(recipe, sharding="ddp", in_backward=False))
    assert "make_trainer" in plan_code(copies, "llama 2 7b", config, "cuda")


def test_a_plan_for_two_machines_says_how_to_start_it():
    config = tiny().config
    asked = {"card": "1 GiB", "seq_len": 16, "global_batch": 8, "target": "cpu", "cards": 2}
    one, two = plan(config, **asked), plan(config, machines=2, **asked)
    for said in (
        f"on 2 machines of 2 x {two.card.name}",
        launch(2, 2),
        "Each machine is assumed to send 100 Gbit/s to the others.",
    ):
        assert said in str(two)
    assert "machines" not in str(one)
    assert (two.machines, two.network, one.machines, one.network) == (2, NETWORK, 1, None)
    assert two.best.micro_batch * two.best.recipe.accumulation == 2
