"""What lesson 08 says in figures and comparisons that none of its cells prints."""

import operator

import pytest
import torch
from support.paths import ROOT
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from gradmem_lib import (
    BUSES,
    MemoryTracker,
    Recipe,
    accounting,
    checkpoint_layers,
    checkpoint_parts,
    count_operations,
    find_card,
    fit,
    known_model,
    predict,
)
from gradmem_lib.course.lessons.lesson_08 import exercises as lesson_08
from gradmem_lib.course.machine.compat import enable_checkpointing
from gradmem_lib.course.material import models
from gradmem_lib.units import GiB, MiB
from gradmem_lib.view.frontier import unbeaten

SOURCE = ROOT / "solutions" / "08_recompute_or_move.py"
TEXT = " ".join(SOURCE.read_text(encoding="utf-8").replace("#", " ").split())
SEVEN = accounting.SHAPES["Llama-2-7B"]


def forward(tokens: int) -> float:
    return 2 * tokens * sum(SEVEN.matrices.values()) + 2 * tokens**2 * SEVEN.hidden


def test_the_frontier_of_a_model_of_smollm2s_proportions():
    model = models.tiny_llama(layers=9, hidden=192, heads=3, kv_heads=1, intermediate=512, vocab=64)
    ids = torch.randint(0, 64, (1, 64), generator=torch.Generator().manual_seed(0))

    def step():
        model.zero_grad()
        model.model(input_ids=ids).last_hidden_state.square().mean().backward()

    def point():
        with MemoryTracker(model, live=False) as tracker:
            step()
        return max(tracker.timeline.by_category["activations"]), count_operations(step)

    points = {"nothing": point()}
    for part in ("attention", "mlp", "elementwise"):
        with checkpoint_parts(model, part):
            points[part] = point()
    for name, every in {"every layer": 1, "√n": "sqrt"}.items():
        with checkpoint_layers(model, every):
            points[name] = point()
    enable_checkpointing(
        model,
        {
            "use_reentrant": False,
            "context_fn": lambda: create_selective_checkpoint_contexts(
                lesson_08.every_second_product()
            ),
        },
    )
    points["every second product"] = point()
    best = unbeaten(points)
    assert "elementwise" in best and "every layer" in best
    policy = points["every second product"]
    assert "Your policy is on it, and beats the MLP alone on both axes" in TEXT
    assert "every second product" in best and all(map(operator.lt, policy, points["mlp"]))
    assert "√n is not on it" in TEXT and "√n" not in best
    assert "Attention alone is not on it either" in TEXT and "attention" not in best
    assert "Two fifths of the bytes are gone" in TEXT
    assert points["elementwise"][0] / points["nothing"][0] == pytest.approx(0.6, abs=0.03)
    assert points["elementwise"][1] == points["nothing"][1]


@pytest.mark.parametrize("budget", [1.0, 0.2, 0.0])
def test_what_the_tracker_watches_keeps_what_torch_compile_keeps(budget):
    """But for the input, which the caller holds."""
    import torch._functorch.config as config
    from functorch.compile import aot_module, min_cut_rematerialization_partition, nop

    x = torch.randn(256, 64, requires_grad=True)

    def saved(compiled) -> int:
        found = {}

        def pack(tensor):
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            out = compiled(x)
        weights = {p.untyped_storage().data_ptr() for p in chain.parameters()}
        del out
        return sum(n for key, n in found.items() if key not in weights)

    chain = models.chain(6, width=64, keeps=5)
    torch._dynamo.reset()
    with config.patch(activation_memory_budget=budget):
        ours = aot_module(chain, nop, partition_fn=min_cut_rematerialization_partition)
        theirs = torch.compile(chain, backend="aot_eager")
        assert saved(ours) == saved(theirs)


def test_what_a_boundary_and_an_mlp_are_of_a_layer():
    everything = accounting.block_activations(SEVEN, 1, 2048)
    assert "less than a twentieth of the bytes" in TEXT
    assert 20 < sum(everything.values()) / (2 * 2048 * SEVEN.hidden) < 30
    mlp = sum(accounting.mlp_activations(SEVEN, 1, 2048).values())
    assert "Two thirds of its bytes are the MLP's" in TEXT
    assert mlp / sum(everything.values()) == pytest.approx(2 / 3, abs=0.03)


def test_whose_bus_is_which():
    says = "here PCIe 3 for the T4, PCIe 5 for the H100, and PCIe 4 for the others."
    assert f"Take the column of your card's bus: {says}" in TEXT
    cards = ("T4 16GB", "RTX 3060 12GB", "RTX 4090 24GB", "A100 80GB", "H100 80GB")
    generations = (3, 4, 4, 4, 5)
    for card, generation in zip(cards, generations, strict=True):
        assert find_card(card).bus == BUSES[f"PCIe {generation}"]


def test_on_a_slow_card_moving_can_win_and_on_a_fast_one_only_over_nvlink():
    everything = sum(accounting.block_activations(SEVEN, 1, 2048).values())

    def ratio(card: str, bus: float) -> float:
        return (2 * everything / bus) / (forward(2048) / (find_card(card).half / 2))

    assert "On a slow card moving can win" in TEXT
    assert ratio("RTX 3060 12GB", find_card("RTX 3060 12GB").bus) < 1
    own = find_card("RTX 4090 24GB").bus
    assert "Over PCIe 4 they take" in TEXT and own == BUSES["PCIe 4"]
    for card in ("RTX 4090 24GB", "A100 80GB", "H100 80GB"):
        assert [name for name, bus in BUSES.items() if ratio(card, bus) < 1.1] == ["NVLink-C2C"]


def test_the_run_of_32768_tokens():
    config = known_model("Llama-2-7B")[1]
    config.max_position_embeddings = 32768
    recipe = {
        "precision": "bf16",
        "optimizer": "adamw-fused",
        "lora_rank": 16,
        "checkpointing": "per-layer",
    }
    sizes = {"batch_size": 1, "seq_len": 32768, "target": "cuda"}
    peak = predict(config, recipe=Recipe(**recipe), **sizes).peak
    assert f"{peak.total / GiB:.0f} GiB do not fit on a card of 24" in TEXT
    stay, move = (
        predict(config, recipe=Recipe(**recipe, chunked_loss=True, offload=offload), **sizes)
        for offload in (None, "boundaries")
    )
    moved = move.offload_traffic_bytes // 2  # one way
    assert moved == 32 * 2 * 32768 * 4096 and f"({moved / GiB:.0f} GiB, as in the table)" in TEXT
    assert "Then the peak is in the backward of a layer, and **the checkpoints' boundaries" in TEXT
    assert "boundaries are the largest part of the activations**." in TEXT
    assert "**Move** the boundaries, once they are most of what is left." in TEXT
    assert stay.peak.phase == "backward" and moved > stay.peak.by_category["activations"] / 2
    fall = {part: n - move.peak.by_category[part] for part, n in stay.peak.by_category.items()}
    assert (
        "Activations fall by less than 8 GiB" in TEXT
        and "to a moment with more of them and fewer temporaries" in TEXT
    )
    layer = moved // 32  # of which one is on the card in either case, and is recomputed from
    assert 0 < fall["activations"] < 31 * layer and fall["temporaries"] > GiB
    assert stay.peak.total - move.peak.total < 31 * layer
    over, once = moved / BUSES["PCIe 4"], 32 * forward(32768) / (find_card("RTX 4090").half / 2)
    assert f"Over PCIe 4 they take {over:.1f} s each way, and a forward takes {once:.1f} s." in TEXT


def test_lora_on_nine_layers_needs_what_it_says():
    config = known_model("SmolLM2-135M")[1]
    config.num_hidden_layers = 9
    ask = {"batch_size": 2, "seq_len": 128, "target": "cpu"}
    peak = predict(config, recipe=Recipe(lora_rank=8), **ask).peak.total
    assert f"which needs {peak / MiB:.0f} MiB" in TEXT
    assert "A run that is 5 % too large often needs checkpoints on a few layers only." in TEXT
    assert (
        fit(config, int(peak / 1.05), recipe=Recipe(lora_rank=8), **ask).checkpointing == "first-3"
    )
