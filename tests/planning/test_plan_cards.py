"""A plan for several cards: what they send each other, what each holds, and the way that
is found.
"""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from support.nightly import ALL
from support.operations import Operations
from support.paths import ROOT
from support.predicted import tiny
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from gradmem_lib import CARDS, Recipe, find_card, known_model, prepare, step
from gradmem_lib.course import run_ranks
from gradmem_lib.course.machine.run_ranks import loopback_only
from gradmem_lib.planning.cost import seconds_per_token, sent_bytes
from gradmem_lib.planning.held import resident_bytes
from gradmem_lib.planning.options import Option, describe
from gradmem_lib.planning.search import Search
from gradmem_lib.planning.work import count
from gradmem_lib.view.plan_code import plan_code

SENT = [
    Recipe(sharding="ddp", accumulation=2, precision="autocast-bf16", lora_rank=16),
    Recipe(sharding="zero1", precision="bf16", lora_rank=16),
    Recipe(sharding="zero2", precision="bf16", accumulation=2),
    Recipe(sharding="fsdp", checkpointing="per-layer"),
    Recipe(sharding="fsdp", precision="float32-master", accumulation=2),
]


COLLECTIVES = ("c10d::broadcast_", "c10d::_allgather_base_", "c10d::_reduce_scatter_base_")


def sent_by(ran: Operations) -> int:
    """Bytes that broadcasts, gathers and scatters are of, but for a rotary embedding's few
    frequencies.
    """
    total = 0
    for func, args, *_ in ran.seen:
        if func.name() in COLLECTIVES:
            tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
            nbytes = max(t.nbytes for t in tensors)  # of a gather or a scatter, the whole
            total += nbytes * (nbytes > 1000)
    return total


def sent_by_a_rank(recipe: Recipe, ranks: int) -> float:
    """Bytes that the second step sends around a ring of ``ranks``."""
    torch.manual_seed(0)
    model, optimizer, undo = prepare(tiny(layers=3), recipe)
    buckets = []

    def hook(state, bucket):
        buckets.append(bucket.buffer().nbytes)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    if not recipe.fully_sharded:
        model.register_comm_hook(None, hook)
    ids = torch.randint(0, 512, (2, 8))
    with undo:
        step(model, optimizer, {"input_ids": ids, "labels": ids}, recipe)
        buckets.clear()
        with Operations() as ran:
            step(model, optimizer, {"input_ids": ids, "labels": ids}, recipe)
    # DDP's buckets are added up and cut, and gathered again.
    return (2 * sum(buckets) + sent_by(ran)) * (ranks - 1) / ranks


def test_bytes_sent_are_those_of_real_ranks():
    work = count(tiny(layers=3).config)
    found = run_ranks(lambda: [sent_by_a_rank(recipe, 2) for recipe in SENT])[0]
    assert found == [sent_bytes(work, recipe, 2) for recipe in SENT]


def test_seconds_on_two_cards_by_hand():
    """Llama-2-7B on two RTX 4090, 4 x 2 rows of 2,048 tokens each: what one card takes, and gathers
    and sums over PCIe 4.
    """
    work, card = count(known_model("Llama-2-7B")[1]), CARDS["RTX 4090 24GB"]
    parameters, root = 6_738_415_616, 2 * 131_072_000 + 4096
    alone = Recipe(precision="bf16", optimizer="adamw-fused", accumulation=4)
    # weights, gradients and states in the optimizer's step
    step_bytes = (3 * 2 + 4 * 2) * parameters
    rows = 4 * 2 * 2048

    def found(**changes):
        return seconds_per_token(work, replace(alone, **changes), card, 2, 2048, cards=2)

    one = seconds_per_token(work, alone, card, 2, 2048)
    link = 0.8 * 31.5e9 * rows
    half = step_bytes / 2 / 1008e9 / rows  # of the step is the other card's
    assert found(sharding="ddp") == pytest.approx((one + 2 * parameters / link) / 2)
    assert found(sharding="zero1") == pytest.approx((one - half + 3 * parameters / link) / 2)
    assert found(sharding="zero2") == pytest.approx((one - half + 4 * 2 * parameters / link) / 2)
    assert found(sharding="fsdp") == pytest.approx(
        (one - half + 4 * (3 * parameters - root) / link) / 2
    )


@pytest.mark.parametrize(
    "recipe, parameters, gradients, optimizer",
    [  # bytes of a weight on each of four cards
        (Recipe(precision="bf16", sharding="ddp"), 2, 2, 4),
        (Recipe(precision="bf16", sharding="zero1"), 2, 2, 1),
        (Recipe(precision="bf16", sharding="zero2"), 2, 0.5, 1),
        (Recipe(precision="bf16", sharding="fsdp"), 0.5, 0.5, 1),
        (Recipe(precision="float32-master", sharding="zero2"), 2, 1, 2),
        (Recipe(precision="float32-master", sharding="fsdp"), 1, 1, 2),
        (Recipe(precision="bf16", sharding="fsdp", offload="parameters"), 0, 0, 0),
    ],
    ids=lambda value: describe(value) if isinstance(value, Recipe) else None,
)
def test_residents_of_one_of_four_cards_by_hand(recipe, parameters, gradients, optimizer):
    work = count(known_model("Llama-2-7B")[1])
    held = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}
    assert resident_bytes(work, recipe, 4) == {
        name: n * work.parameters for name, n in held.items()
    }


def test_ways_over_several_cards_go_together():
    search = Search(count(known_model("Llama-2-7B")[1]), find_card("4090"), 2048, 8, "cuda", 2)
    mixed, eight_bits = [
        next(f for f in search.families("full") if f.optimizer == o)
        for o in ("adamw-fused", "adamw-8bit")
    ]
    precisions = {(way.sharding, way.precision) for way in search.variants(mixed)}
    cut, whole = "float32-master", "autocast-bf16"
    assert precisions == {("ddp", whole), ("zero1", whole), ("zero2", cut), ("fsdp", cut)}
    assert {way.sharding for way in search.variants(eight_bits)} == {"ddp", "zero1"}
    assert {way.accumulation for way in search.variants(mixed)} == {1, 2, 4}
    assert (
        search.least_resident_variant(mixed).sharding == "fsdp"
        and search.least_resident_variant(eight_bits).sharding == "zero1"
    )
    lora = next(iter(search.families("lora")))
    assert {way.sharding for way in search.variants(lora)} == {
        "ddp",
        "fsdp",
    }  # zero2: more bytes than ddp, held and sent
    in_backward = [f for f in search.families("full") if f.in_backward]
    assert {f.optimizer for f in in_backward} == {"adamw-fused"}
    assert {way.sharding for f in in_backward for way in search.variants(f)} == {"zero2", "fsdp"}


FEW = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=512,
)


def test_the_next_faster_way_is_cut_over_the_cards_as_the_best_one_is():
    search = Search(count(FEW), find_card("1 GiB"), 64, 4, "cuda", 2)
    # in one piece, nothing run again
    whole = Recipe(precision="bf16", optimizer="sgd", sharding="fsdp")
    assert search.seconds(replace(whole, sharding="ddp")) < search.seconds(whole)
    assert search.next_faster(search.option(whole)) is None
    slower = replace(whole, checkpointing="per-layer", accumulation=2)
    assert search.next_faster(search.option(slower)).recipe.sharding == "fsdp"


def test_what_moves_away_leaves_room_for_larger_micro_batches():
    # A 70B on two cards of 24 GB: one row at a time is what fits before anything moves; afterwards
    # two do, and weights travel once.
    away = {"checkpointing": "per-layer", "offload": "boundaries", "accumulation": 4}
    recipe = Recipe(precision="bf16", optimizer="adamw-fused", sharding="fsdp", **away)
    search = Search(count(FEW), find_card("4 GiB"), 2048, 8, "cuda", 2)
    search._try_larger_micro_batches(search.option(recipe))
    assert [option.recipe.accumulation for option in search.fits()] == [1]
    room = search.option(replace(recipe, accumulation=2)).needs
    tight = Search(count(FEW), find_card(room), 2048, 8, "cuda", 2)
    tight._try_larger_micro_batches(tight.option(recipe))
    assert [option.recipe.accumulation for option in tight.fits()] == [2]
    stays = Search(count(FEW), find_card("4 GiB"), 2048, 8, "cuda", 2)
    stays._try_larger_micro_batches(stays.option(replace(recipe, offload=None)))
    assert [option.recipe.accumulation for option in stays.fits()] == [4]


SCRIPT = """
import os, torch
from transformers import AutoConfig

torch.manual_seed(0)
config = AutoConfig.from_pretrained({folder!r})
ids = torch.arange(64).reshape(4, 16) * 7 % 96
train_dataset = [{{"input_ids": row, "labels": row}} for row in ids]
"""
SAVE = """
whole = {}
for n, p in model.named_parameters():
    p = p.full_tensor() if hasattr(p, "full_tensor") else p
    whole[n] = p.detach().clone()
torch.save(whole, f"{config._name_or_path}/" + os.environ["RANK"])
"""


PORTS = {"torchrun": "--master-port", "accelerate": "--main_process_port"}


def launched(starts: str, script: str, folder, monkeypatch) -> None:
    """Run ``script`` by one of the commands that it names itself, on a port of its own."""
    (folder / "train.py").write_text(script)
    commands = re.findall("start it with: (.*), or: (.*)", script)[0]
    (command,) = (words for words in map(shlex.split, commands) if words[0] == starts)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        command.insert(-2, f"{PORTS[starts]}={probe.getsockname()[1]}")
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name, value in (ours | loopback_only()).items():
        monkeypatch.setenv(name, value)
    program = Path(sys.executable).parent / command[0]
    done = subprocess.run(
        [program, *command[1:]], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]


# Each program, and every night each command that starts it.
STARTED = [("fsdp", "torchrun", 1), ("ddp", "run_ranks", 1), ("fsdp", "run_ranks", 2)]
EVERY_START = [*STARTED, *product(("ddp", "fsdp"), PORTS, (1,))]


@pytest.mark.parametrize("sharding, starts, machines", EVERY_START if ALL else STARTED)
def test_printed_code_on_two_cards_of_a_machine_steps_as_one_process_on_all_rows(
    sharding, starts, machines, tmp_path, monkeypatch
):
    ranks = 2 * machines
    config = tiny(layers=3, vocab=96).config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    recipe = Recipe(optimizer="sgd", sharding=sharding, accumulation=4 // ranks)
    option = Option(recipe, 1, 0.0, 0, None, {}, cards=2, machines=machines)
    text = plan_code(option, config, config, "cpu")
    more = (
        ", max_steps=1, max_grad_norm=0, learning_rate=1.0, live=False, progress=False, "
        f"output_dir={str(tmp_path)!r}"
    )
    text = text.replace("train_dataset=train_dataset", "train_dataset=train_dataset" + more)
    text = text.replace("mesh=mesh)", "mesh=mesh, lr=1.0)")
    start = SCRIPT.format(folder=str(tmp_path))
    script = start + text.removesuffix("destroy_process_group()\n") + SAVE
    if starts == "run_ranks":
        run_ranks(exec, script, {}, ranks=ranks)
    else:
        launched(starts, script, tmp_path, monkeypatch)
    space: dict = {}
    with torch.random.fork_rng():
        exec(start, space)
        model = LlamaForCausalLM(space["config"]).train()
    model(input_ids=space["ids"], labels=space["ids"]).loss.backward()
    for rank in range(ranks):
        found = torch.load(tmp_path / str(rank))
        for name, before in model.named_parameters():
            torch.testing.assert_close(
                found[name], before.detach() - before.grad, rtol=1e-5, atol=1e-6, msg=name
            )
