"""What lesson 11 says of its puzzles: settings, comparisons, and the sums below a card."""

from __future__ import annotations

import re

import pytest
import torch
from support.lesson_text import Lesson
from torch import nn

from gradmem_lib import MemoryTracker, Recipe, known_model, prepare, step
from gradmem_lib.course import models, puzzle
from gradmem_lib.prediction.configs import skeleton
from gradmem_lib.units import GiB

BF16 = {"precision": "bf16", "optimizer": "adamw-fused"}
LORA = BF16 | {"lora_rank": 16}
QLORA = LORA | {"quantized_base": True}
AGAIN, CHUNKS = {"checkpointing": "per-layer"}, {"chunked_loss": True}
SEVERAL = {2: "two", 8: "eight"}
PUZZLES = [
    "11.2",
    "11.3",
    "11.4",
    "11.5",
    "11.6",
    "11.7",
    "11.8",
    "11.9",
    "11.10",
    "11.11",
    "11.12",
]


@pytest.fixture(scope="module")
def said() -> Lesson:
    return Lesson("11")


def weigh(id: str, answer: dict):
    one = puzzle(id)
    return one.weigh(one.recipe(answer))


@pytest.mark.parametrize("id", PUZZLES)
def test_the_settings_of_the_puzzles(said, id):
    one = puzzle(id)
    card, size = re.fullmatch(r"(.*) (\d+)GB", one.card).groups()
    cards = f"an {card}" if one.cards == 1 else f"{SEVERAL[one.cards]} {card}s"
    rows = f"{one.rows} rows of" if one.rows > 1 else "one row of"
    setting = rows + f" {one.tokens:,} tokens, {cards} of {size} GB."
    section = said.text.partition(f"### Exercise {id} ·")[2].partition("<details>")[0]
    section = section.replace("*", "")  # some numbers are set in bold
    assert setting in section
    if id in ("11.2", "11.7", "11.8", "11.9", "11.10", "11.11", "11.12"):
        assert f"{one.model}, {setting}" in section
    for condition, words in {
        "no weight is kept in 4 bits": "No weight is kept in 4 bits.",
        "no layer runs twice": "No layer runs twice: checkpoints are not allowed.",
    }.items():
        assert (words in section) == (condition in one.condition)


def test_the_first_puzzle_is_half_a_gib(said):
    one = puzzle("11.1")
    assert said.says(f"{one.model}, {one.rows} rows of {one.tokens} tokens, 512 MiB.")
    assert weigh("11.1", LORA | CHUNKS | {"accumulation": 2}).spare >= 0


def test_what_the_stars_are_for(said):
    one = puzzle("11.3")
    best = one.best()[1].seconds
    assert said.says("With 70 % of the planner's speed it has ★★, and with 95 % it has ★★★.")
    assert [one.stars(best / share) for share in (0.7, 0.69, 0.95, 0.94)] == [
        "★★☆",
        "★☆☆",
        "★★★",
        "★★☆",
    ]
    assert said.says("If it is faster than the planner's, `check` says so.")
    assert one.stars(best / 1.1) == "★★★, you beat the planner"


def test_adapters_of_rank_16_on_every_linear_layer(said):
    one = puzzle("11.4")
    assert said.says("Adapters have at least rank 16 and are on every linear layer.")
    assert not one.broken(one.recipe(LORA))
    assert one.broken(one.recipe(LORA | {"lora_rank": 15}))
    assert one.broken(one.recipe(LORA | {"lora_targets": ("q_proj",)}))


def _measured_peak(checkpointing: str | None) -> float:
    """The peak of an update of adapters on a Llama of 8 layers, in MiB, after a first update."""
    torch.manual_seed(0)
    model = models.tiny_llama(layers=8, hidden=256, heads=4, intermediate=688, vocab=257)
    recipe = Recipe("bf16", "adamw-fused", lora_rank=16, checkpointing=checkpointing)
    model, optimizer, _ = prepare(model, recipe)
    ids = torch.randint(0, 257, (4, 256))
    batch = {"input_ids": ids, "labels": ids}
    step(model, optimizer, batch, recipe)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        step(model, optimizer, batch, recipe)
    return tracker.peak.total / 2**20


def test_elementwise_checkpoints_keep_more_with_adapters(said):
    assert said.says('`"elementwise"` keeps every product\'s result, and each adapter adds two.')
    without, elementwise = (_measured_peak(way) for way in (None, "elementwise"))
    assert said.says(
        "With adapters on every linear layer, the peak of a Llama of 8 small layers *grew* from "
        f"{without:.0f} to {elementwise:.0f} MiB."
    )
    plain, more = (
        weigh("11.4", LORA | CHUNKS | {"accumulation": 8, "checkpointing": way})
        for way in (None, "elementwise")
    )
    assert more.held["activations"] > plain.held["activations"]


def test_the_worked_example(said):
    steps = [BF16 | {"accumulation": 8}]
    for change in (AGAIN, CHUNKS):
        steps.append(steps[-1] | change)
    steps.append(BF16 | CHUNKS | {"accumulation": 8, "optimizer": "adamw-8bit"})
    first, again, chunks, eight_bits = (weigh("11.0", step) for step in steps)
    assert said.says("Train every one of them on a card of 12 GB.")
    assert puzzle("11.0").card == "RTX 3060 12GB"
    assert said.says("The bar is longer than the card.") and first.spare < 0
    assert said.says("The activations fell to a quarter, and it is still not enough.")
    share = again.held["activations"] / first.held["activations"]
    assert share == pytest.approx(1 / 4, abs=0.02) and again.spare < 0
    assert said.says("2 GiB at the beginning of backward.") and again.phase == "backward"
    assert said.says("At that moment each has 8 bytes of temporaries.")
    words = known_model("Llama-3.2-1B")[1].vocab_size
    assert again.held["temporaries"] == pytest.approx(8 * 2048 * words, rel=0.01)
    assert again.held["temporaries"] == pytest.approx(2 * GiB, rel=0.03)
    more = eight_bits.held["activations"] - chunks.held["activations"]
    assert said.says(f"activations would need some {more / GiB:.1f} GiB more")
    assert said.says("The largest part is now the optimizer's states.")
    assert max(chunks.held, key=chunks.held.get) == "optimizer"
    assert said.says("Keep them in 8 bits, and run no layer twice:")
    assert eight_bits.held["optimizer"] < 0.6 * chunks.held["optimizer"] and eight_bits.spare >= 0
    assert said.says("The largest part that an option can shrink comes next, one change at a time.")
    assert said.says(
        "the activations can shrink without changing the update. Run every layer again"
    )
    assert first.needs > again.needs > chunks.needs


def test_a_7b_on_a_card_of_12_gb(said):
    frozen = weigh("11.4", LORA | AGAIN | {"accumulation": 8})
    small = weigh("11.5", QLORA | {"accumulation": 8})
    room = small.room
    assert said.says("The weights in bf16 are more than the card.")
    assert frozen.held["parameters"] > room
    left = room - small.held["parameters"]
    assert said.says(f"In 4 bits they leave {left / GiB:.0f} GiB.")


def test_what_a_saved_byte_costs(said):
    assert said.says("Cards differ, and saved bytes cost time: layers run twice")
    once, twice = (
        weigh("11.4", LORA | {"accumulation": 8}),
        weigh("11.4", LORA | AGAIN | {"accumulation": 8}),
    )
    assert twice.seconds > once.seconds and twice.needs < once.needs
    decoded = weigh("11.4", QLORA | {"accumulation": 8})
    assert decoded.seconds > once.seconds and decoded.needs < once.needs


def test_larger_pieces_are_faster(said):
    assert said.says("Between one row and eight there are others, and larger pieces are faster.")
    seconds = [
        weigh("11.7", LORA | AGAIN | CHUNKS | {"accumulation": pieces}).seconds for pieces in (8, 4)
    ]
    assert seconds[0] > seconds[1]


def test_one_number_is_far_larger_than_in_section_4(said):
    assert said.says("one number is far larger than in section 4: words, then tokens.")
    words, seven = (known_model(puzzle(id).model)[1].vocab_size for id in ("11.7", "11.3"))
    tokens = max(puzzle(f"11.{i}").tokens for i in (3, 4, 5, 6))
    assert said.says("### Exercise 11.7 · 128,256 words") and words == 128_256 >= 4 * seven
    assert puzzle("11.8").tokens >= 8 * tokens


def test_the_boundaries_of_32768_tokens(said):
    config, tokens = known_model(puzzle("11.8").model)[1], puzzle("11.8").tokens
    hidden, layers = config.hidden_size, config.num_hidden_layers
    assert said.says(f"{tokens:,} tokens × {hidden:,} numbers × 2 bytes, times {layers} layers.")
    with_all, moved = (
        weigh("11.8", QLORA | AGAIN | CHUNKS | more) for more in ({}, {"offload": "boundaries"})
    )
    boundaries = tokens * hidden * 2 * layers
    assert with_all.held["activations"] > boundaries
    assert moved.held["activations"] < with_all.held["activations"]


def test_the_experts_of_a_mixture_are_no_linear_layers(said):
    model = skeleton(known_model(puzzle("11.9").model)[1])
    every = sum(p.numel() for p in model.model.layers.parameters())
    linear = sum(
        module.weight.numel()
        for module in model.model.layers.modules()
        if isinstance(module, nn.Linear)
    )
    assert said.says("Here, 4 bits are for linear layers, and experts are no linear layers.")
    assert linear < every / 10


def test_which_way_of_running_again_takes_the_most_time(said):
    nothing = weigh("11.9", LORA | {"accumulation": 8})
    assert said.says(f"One row at a time is {-nothing.spare / GiB:.0f} GiB too long.")
    assert said.says("Running every layer again gives back enough, and takes the most time.")
    every = weigh("11.9", LORA | AGAIN | {"accumulation": 8})
    best, weighed = puzzle("11.9").best()
    assert every.spare >= 0 and every.seconds > 1.3 * weighed.seconds
    assert said.says("The toolbox has a row that repeats less.")
    assert best.checkpointing == "elementwise"


def test_the_puzzle_that_is_carried_out(said):
    ((predicted,),) = said.figures(r"^predicted ([\d,]+) bytes")
    ((measured,),) = said.figures(r"^measured +([\d,]+) bytes, in")
    assert said.says("The prediction is right to the byte, and the model trains within half a GiB.")
    assert predicted == measured <= GiB / 2 and said.answer("11.a") == 0
    assert said.says("So is the budget: one byte above 512 MiB would be an error.")
    assert puzzle("11.1").best()[1].room == GiB / 2


def test_in_most_puzzles_weights_gradients_and_states_are_more_than_half(said):
    assert said.says(
        "In most puzzles, weights, gradients and states are more than half of the bytes"
    )
    large = []
    for id in ["11.1", *PUZZLES[:-1]]:
        weighed = puzzle(id).best()[1]
        kept = sum(weighed.held.get(name, 0) for name in ("parameters", "gradients", "optimizer"))
        large.append(kept > weighed.needs / 2)
    assert len(large) == 11 and sum(large) > len(large) / 2


def test_checkpoints_do_not_change_the_update():
    from gradmem_lib import checkpoint_layers
    from gradmem_lib.course import models

    model = models.tiny_llama(layers=2, hidden=16, heads=2, intermediate=32, vocab=16)
    ids = torch.arange(8).view(1, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with checkpoint_layers(model, 1):
        model(input_ids=ids, labels=ids).loss.backward()
    for old, p in zip(plain, model.parameters(), strict=True):
        assert torch.equal(old, p.grad)
