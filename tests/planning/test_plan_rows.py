"""Plans for models whose rows are more than tokens: pictures, spectrograms, and modules of one's
own with a batch.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.families import OLDER, tiny_config
from support.nightly import ALL, each
from support.own_models import CLASS, NOISE, Diffusion, class_loss, noise_loss, rows_of
from support.plans import assert_code_needs_what_was_predicted
from support.predicted import assert_same, measured, tracked
from torch import nn

from gradmem_lib import Recipe, find_card, plan
from gradmem_lib.model.description import Description
from gradmem_lib.planning.bounds import bound_by_sizes
from gradmem_lib.planning.options import METHODS
from gradmem_lib.planning.rows import count_row, rows_like
from gradmem_lib.planning.search import Search
from gradmem_lib.planning.work import count
from gradmem_lib.prediction.question import CannotTrace

ROWS, LABELS = 4, 6
FAMILIES = ["vit", "dinov2", "whisper", "resnet", "swin", "beit", "clip"]


def search_of(family: str) -> Search:
    work = count(tiny_config(family), LABELS)
    return Search(work, find_card("1 GiB"), LABELS, ROWS, "cpu")


def recipes_of(search: Search) -> list[Recipe]:
    """All recipes that the search may try, in an order of chance that is always the same."""
    found = []
    for method in METHODS:
        for family in search.families(method):
            for line in search.lines(family):
                found += line
    random.Random(0).shuffle(found)
    return found


@pytest.mark.parametrize("family", each(4, FAMILIES))
def test_each_recipe_of_a_plan_is_predicted_to_the_byte_or_refused(family):
    """Two of some hundred recipes each time, and every night a hundred. The lower bound, by
    which the search leaves recipes out, is none that a recipe stays below.
    """
    if OLDER:
        pytest.skip("its recipes are others")
    search = search_of(family)
    recipes = recipes_of(search)
    assert len(recipes) > 100
    pieces = {recipe.accumulation for recipe in recipes}
    assert pieces == ({1} if family == "clip" else {1, 2, 4})  # CLIP's loss compares rows
    for recipe in recipes[: 100 if ALL else 2]:
        try:
            predicted = search.option(recipe).prediction
        except (ValueError, CannotTrace) as refusal:
            assert len(str(refusal)) > 50
            continue
        torch.manual_seed(0)
        assert_same(predicted, measured(tiny_config(family), recipe, ROWS, LABELS))
        # States of factored optimizers and of 8 bits are counted roughly there.
        assert bound_by_sizes(search, recipe) <= 1.01 * predicted.peak.total


def test_a_line_of_pictures_is_kept_up_to_its_last_recipe_that_fits():
    """Pictures have no ``seq_len``, and the size of a layer's input is not known."""
    config = tiny_config("vit")
    config.architectures = ["ViTForImageClassification"]
    search = Search(count(config), find_card("1 GiB"), None, ROWS, "cpu", margin=0.0)
    less, more = Recipe(checkpointing="per-layer"), Recipe()
    small, large = (search.option(recipe).prediction.peak.total for recipe in (less, more))
    assert small < large
    search.available = large - 1
    assert search._without_last_that_do_not_fit([less, more]) == [less]
    search.available = small - 1
    assert search._without_last_that_do_not_fit([more, less]) == []


def test_what_a_picture_passes_is_counted_as_by_hand():
    config = tiny_config("vit")
    config.architectures = ["ViTForImageClassification"]
    work = count(config)
    width, inside, tokens = config.hidden_size, config.intermediate_size, 4 * 4 + 1
    layer = tokens * (4 * width * width + 2 * width * inside)
    patches = 16 * width * 3 * 8 * 8
    head = width * config.num_labels
    assert work.row.products == 2 * layer + patches + head and work.row.head == 0
    assert work.row.attended == 2 * tokens * 4 * width * width
    assert work.row.attention == 2 * (2 * 2 * tokens * tokens * width)  # scores, and their sums
    assert len(work.row.layers) == 2
    assert work.row.layers[0] == pytest.approx((layer / work.row.products, 0.5), rel=0.01)


def no_list() -> nn.Module:
    """Its parts are too small to run again."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1))


def pair_loss(model, batch):
    noisy, noise = batch
    return F.mse_loss(model(noisy), noise)


OWN = {
    "diffusion": (lambda: Diffusion(2), NOISE, noise_loss),
    "no list": (no_list, (torch.zeros(1, 3, 16, 16), torch.zeros(1, 3, 16, 16)), pair_loss),
    "layers": (
        lambda: nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))),
        (torch.zeros(1, 32), CLASS),
        class_loss,
    ),
}


@pytest.mark.parametrize("name", each(2, OWN))
def test_the_code_for_a_module_of_ones_own_runs_and_needs_what_was_predicted(name):
    build, batch, loss = OWN[name]
    asked = {"global_batch": ROWS, "batch": batch, "loss": loss, "target": "cpu"}
    made = plan(build(), card="1 GiB", method="full" if name == "no list" else "lora", **asked)
    assert not made.ruled_out  # also in bf16, the batch has the dtype of the weights
    assert ("No checkpoints are tried" in str(made)) == (name == "no list")
    rows = rows_of(batch, ROWS, made.best.recipe.weight_dtype)
    assert_code_needs_what_was_predicted(made, build(), rows, loss)


def test_an_encoder_and_a_decoder_may_have_unlike_lengths():
    config = tiny_config("t5")
    ids = torch.zeros(1, 12, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids[:, :5]}
    asked = {"card": "1 GiB", "global_batch": ROWS, "target": "cpu", "method": "qlora"}
    made = plan(config, batch=batch, **asked)
    assert "input_ids 12, labels 5" in str(made) and made.seq_len is None
    model = transformers.T5ForConditionalGeneration(config)
    found = tracked(model, rows_of(batch, ROWS), made.best.recipe)
    assert found.peak == made.best.prediction.peak
    more = plan(config, batch={"input_ids": ids, "labels": ids}, **asked)
    assert more.best.needs > made.best.needs and more.best.seconds > made.best.seconds


def test_a_loss_that_compares_rows_is_planned_for_in_one_piece():
    asked = {"card": "1 GiB", "seq_len": LABELS, "global_batch": ROWS, "method": "qlora"}
    made = plan(tiny_config("clip"), target="cpu", **asked)
    assert "in one piece" in str(made) and "a loss that compares rows" in str(made)
    assert "| {'return_loss': True}" in made.code and "make_trainer" not in made.code
    for machines, says in ((1, "cards=2 share .*a loss that compares rows"), (2, "and machines=1")):
        with pytest.raises(ValueError, match=says):
            plan(tiny_config("clip"), cards=2, machines=machines, **asked)


@pytest.mark.parametrize("several", [{}, {"cards": 2, "machines": 2}])
def test_nothing_fits_a_module_whose_layers_have_no_known_parts(several):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
    batch = torch.zeros(1, 32), CLASS
    asked = {"card": "1 KiB", "target": "cpu", "global_batch": 16}
    made = plan(model, batch=batch, loss=class_loss, **asked, **several)
    assert "Nothing fits. Closest:" in str(made) and made.best is None and not made.code
    assert made.fits == [] and any("RTX 2060" in line for line in made.advice)


CONFIG = {"batch": None, "loss": None}


def half_frozen() -> nn.Module:
    model = Diffusion()
    model.blocks.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "changes", "says"),
    [
        (lambda: Diffusion().eval(), {}, "in eval mode"),
        (half_frozen, {}, "some are frozen"),
        (Diffusion, {"seq_len": 8}, "leave seq_len out"),
        (Diffusion, {"batch": None}, "loss= is for a batch"),
        (Diffusion, {"loss": None}, "fails .*TypeError"),
        (Diffusion, {"batch": {"latents": torch.zeros(1, 3, 8, 8)}}, "fails .*KeyError"),
        (Diffusion, {"batch": {"a": torch.zeros(1), "b": torch.zeros(2)}}, "same number of rows"),
        (no_list, {"batch": OWN["no list"][1], "loss": pair_loss, "method": "lora"}, "has none"),
        (lambda: nn.Linear(2, 2), CONFIG, "has no config"),
        (lambda: tiny_config("wav2vec2"), CONFIG | {"seq_len": 8}, "give batch="),
        (lambda: tiny_config("whisper"), CONFIG, "seq_len=None"),
    ],
)
def test_what_a_plan_of_rows_refuses(model, changes, says):
    _, batch, loss = OWN["diffusion"]
    asked = {"card": "1 GiB", "global_batch": ROWS, "batch": batch, "loss": loss} | changes
    with pytest.raises(ValueError, match=says):
        plan(model(), **asked)


def test_counting_a_row_does_not_change_the_module():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    batch = torch.zeros(1, 3, 8, 8), torch.zeros(1, dtype=torch.int64)
    passed = count_row(Description(model), batch, class_loss)
    assert passed.products == 36 * 4 * 3 * 9 + 144 * 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_are_repeated_with_their_masks():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    batch = {"x": torch.zeros(2, 3), "mask": mask, "again": mask, "scale": torch.tensor(2.0)}
    rows = rows_like(batch, 4, torch.bfloat16)
    assert rows["mask"].tolist() == [[1, 1, 0], [1, 0, 0]] * 2 and rows["again"] is rows["mask"]
    assert rows["x"].is_meta and rows["x"].shape == (4, 3) and rows["x"].dtype == torch.bfloat16
    assert rows["scale"] is batch["scale"]
