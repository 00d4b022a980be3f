"""``plan``: the ways to train a model that fit a card."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..model.classes import is_own_module
from ..model.configs import find_model
from ..names import check_choice
from ..prediction.second_process import second_process
from ..prediction.short_traces import trace_few_parts
from ..training.adapters import has_adapters
from ..training.recipe import Recipe
from ..units import check_positive_int, format_bytes
from .cards import CARDS, NETWORK, Card, find_card
from .margin import check_margin
from .options import METHODS, Option, rounds_weights
from .report import Plan
from .search import Search
from .work import Work, count, with_adapters


def plan(
    model_or_config: object,
    *,
    card: Card | str | int,
    seq_len: int | None = None,
    global_batch: int,
    method: str | None = None,
    target: str = "cuda",
    cards: int = 1,
    margin: float | None = None,
    notify: Callable[[str], None] | None = None,
    batch: Any = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    machines: int = 1,
    network: float | None = None,
) -> Plan:
    """The ways to train ``model_or_config`` that fit ``card``, fastest first by estimate, and why
    faster ways do not fit.

    Args:
        model_or_config: a transformers config, a model, a folder with a config, or a hub id; with
            ``batch``, any module in training mode.
        card: a name such as ``"RTX 4090"`` (see ``CARDS``), or its memory: ``"24 GiB"``, or bytes.
        seq_len: tokens in a row; of a speech model's labels; none for pictures.
        global_batch: rows of one optimizer step, on all cards together. The plan cuts them into
            micro-batches.
        method: ``"full"`` (the default), ``"lora"`` (rank 16 on all linear layers but the head),
            ``"qlora"``, or ``"any"``. A model that has LoRA already (from PEFT or ``add_lora``)
            trains it: its only method, and its default, is ``"lora"``.
        target: ``"cuda"``, or ``"cpu"``: live bytes as ``MemoryTracker`` counts them, against its
            budget.
        cards: the number of such cards in one machine that train together. Each key of ``SHARDING``
            is tried; with several machines, each but ``"zero1"``.
        margin: the share of the needed bytes that has to stay free besides, since a prediction for
            a card may be off. ``None``: as much as published runs were off (3 %; 4.5 % for several
            cards), and 0 for target "cpu", whose bytes are exact. ``0``: none.
        notify: called with a sentence after each prediction.
        batch: one row or more of what the model takes, with labels, as ``predict`` takes it; then
            ``seq_len`` is left out. For modules that are not transformers models, and for inputs
            that a config does not tell: an encoder and a decoder of unlike lengths, pictures with a
            text. The plan assumes rows of these sizes, whose floating-point inputs have the dtype
            of the weights.
        loss: ``loss(model, micro_batch)`` returns the scalar to minimise, if the model's output
            does not have it; with ``batch`` only.
        machines: how many machines have ``cards`` such cards. Each has a whole copy of the model:
            on every card (``"ddp"``), or over its cards by hybrid sharding (HSDP: ``"fsdp"`` or
            ``"zero2"`` over a mesh of two dimensions). A card then holds the same tensors as on one
            machine. With hybrid sharding, NCCL has buffers for a second group of processes.
        network: bytes a second that a machine sends to the others, each way. ``None``: 100 Gbit/s.

    It tries precisions (mixed, or bf16 for all), optimizers (AdamW fused, 8-bit AdamW, torch's
    Adafactor; each also with steps in backward), the loss whole or in chunks, every micro-batch
    that divides the global batch, and what is recomputed: nothing, the first k layers for each k,
    all layers, one layer in two, or a part of each layer; or activations wait in the host's memory.
    The first answer is the fastest of all that fit, by estimate, with three exceptions. A recipe
    that changes training more than another one has to be faster by more than 10 %, since a time is
    an estimate. The inputs of checkpoints are moved to the host only if nothing of the same kind
    fits that moves nothing, and the shards of several cards only if nothing else fits. Attention is
    fused if the model can: eager attention needs more bytes and more time. On one card,
    ``float32-master`` is not tried, since it holds as many bytes as mixed precision, and
    ``adamw-stochastic`` as many as AdamW in bf16. On several cards, the loss is not in chunks, and
    only AdamW steps in backward.

    Where a row is more than tokens, times are those of a row. If the loss compares rows with each
    other, the batch goes through in one piece. Layers run again in transformers models, in an
    ``nn.Sequential``, and in the outermost lists of other modules: where a forward shows that each
    layer is called, computes from its arguments and weights alone, and changes nothing that it has
    not made (as batch norms change their statistics). The plan says which lists it leaves alone.

    Raises ``ValueError`` for an unknown card, model or method, for sizes that the model cannot
    take, and for a model with frozen weights or with other weights than its config's;
    ``RuntimeError`` for one that is checkpointed or compiled already.
    """
    check_choice("method", method, (None, *METHODS, "any"))
    check_choice("target", target, ("cuda", "cpu"))
    global_batch = check_positive_int("global_batch", global_batch, 16, "rows")
    _check_cards(global_batch, cards, machines, network)
    found = find_card(card)
    if isinstance(batch, Mapping):
        batch = dict(batch)
    _check_batch(batch, seq_len, loss)
    if batch is not None and is_own_module(model_or_config):
        config, title = None, type(model_or_config).__name__
        _check_own_module(model_or_config, method)
        work = count(None, seq_len, batch, loss, module=model_or_config)
    else:
        config, title = find_model(model_or_config)
        work = count(config, seq_len, batch, loss)
    work = with_adapters(work, model_or_config, method)
    if work.uncut and cards > 1:
        several, one = f"cards={cards}", "cards=1"
        if machines > 1:
            several, one = f"cards={cards} of machines={machines}", "cards=1 and machines=1"
        raise ValueError(
            f"{several} share a batch between them, and this one must stay in one piece: give "
            f"{one}. {work.uncut}"
        )
    if work.row is None:
        seq_len = check_positive_int("seq_len", seq_len, 2048, "tokens in a row")
    elif batch is None and work.source.skeleton.main_input_name == "pixel_values":
        seq_len = None  # a row is a picture
    margin = check_margin(margin, target, cards)
    search = Search(
        work,
        found,
        seq_len,
        global_batch,
        target,
        cards,
        margin=margin,
        machines=machines,
        network=NETWORK if network is None else network,
    )
    search.notify = notify
    method = "lora" if search.has_adapters else method or "full"
    methods = _methods(method, work, title)
    _ = search.losses  # asks a tiny copy, so once, before there is a second process
    with second_process(work.source, trace_few_parts):
        fits, refused, advice = _find(search, methods)
    return Plan(
        title=title,
        card=found,
        seq_len=seq_len,
        global_batch=global_batch,
        method=method,
        target=target,
        cards=cards,
        margin=margin,
        fits=fits,
        refused=refused,
        ruled_out=search.ruled_out,
        given=model_or_config,
        config=config,
        advice=advice,
        unit=work.unit,
        example=work.example,
        loss=loss,
        notes=_notes(search),
        machines=machines,
        network=search.network if machines > 1 else None,
    )


def _find(search: Search, methods: list[str]) -> tuple[list[Option], list[Option], list[str]]:
    """The recipes that fit, those that do not, and what would fit if none of them does."""
    search.find(methods)
    fits = search.fits()
    if fits:
        search.next_faster(fits[0])  # if it does not fit, it is one of those that are refused
        return search.fits(), search.refused(), []
    refused = search.refused()
    # Last, since advice predicts other methods, whose recipes are no part of the answer.
    return fits, refused, _advice(search, methods)


def _methods(method: str, work: Work, title: str) -> list[str]:
    """The methods to try. Raises ``ValueError`` for LoRA without linear layers."""
    if work.linear_widths:
        return list(METHODS) if method == "any" else [method]
    if method in ("lora", "qlora"):
        raise ValueError(
            f"method={method!r} adds to linear layers, and {title} has none: choose method='full'"
        )
    return ["full"]


def _check_cards(global_batch: int, cards: int, machines: int, network: float | None) -> None:
    """Raises ``ValueError`` unless the rows can be dealt to all cards of all machines."""
    check_positive_int("cards", cards, 2, "cards")
    check_positive_int("machines", machines, 2, "machines")
    all_cards = cards * machines
    if machines > 1 and cards == 1:
        raise ValueError(
            f"machines={machines} are planned where each has two cards or more: give cards=, the "
            "number of cards in each machine, or machines=1"
        )
    if network is not None:
        is_number = isinstance(network, int | float) and not isinstance(network, bool)
        if machines == 1 or not is_number or not 0 < network < math.inf:
            raise ValueError(
                f"network={network!r} is how many bytes a second a machine sends to the others: "
                "give a number above 0, such as 12.5e9 for 100 Gbit/s, with machines=2 or more"
            )
    if global_batch % all_cards:
        raise ValueError(
            f"global_batch={global_batch} is not dealt evenly to {all_cards} cards: give a multiple"
        )


def _check_batch(batch: Any, seq_len: int | None, loss: Any) -> None:
    if batch is None and loss is not None:
        raise ValueError("loss= is for a batch that is given: give batch= too, a row or more")
    if batch is not None and seq_len is not None:
        raise ValueError(
            f"seq_len={seq_len} and batch= both say how long a row is: leave seq_len out"
        )


def _check_own_module(module: nn.Module, method: str | None) -> None:
    """Raise ``ValueError`` for a module that the printed code would train in another way."""
    name = type(module).__name__
    if not all(part.training for part in module.modules()):
        raise ValueError(
            f"this {name}, or a part of it, is in eval mode, and the code of a plan trains all of "
            "it in training mode: call model.train() first, or predict each recipe with "
            "predict(model, batch=..., recipe=Recipe(...))"
        )
    lora = has_adapters(module) or method in ("lora", "qlora")
    if not lora and not all(p.requires_grad for p in module.parameters()):
        raise ValueError(
            f"plan trains all weights, and in this {name} some are frozen: predict each recipe "
            "with predict(model, batch=..., recipe=Recipe(...))"
        )


ROUNDED = (
    "The weights of the first recipe are in bf16 alone: every update below 1/512 of a weight is "
    "lost to rounding. Recipe(precision='float32-master') keeps such updates, and "
    "Recipe(precision='bf16', optimizer='adamw-stochastic') keeps them on average. gradmem predict "
    "says how many bytes each of these needs."
)


def _notes(search: Search) -> list[str]:
    """What a reader of the plan should know about the model."""
    notes = []
    if search.work.uncut:
        notes.append(f"The batch goes through in one piece: {search.work.uncut}.")
    if search.work.named:
        names = [_words_of(one) for one in search.work.named]
        notes.append(f"Checkpoints are those of the layers in {', '.join(names)}.")
    elif not search.work.has_layers:
        notes.append(
            "No checkpoints are tried: this module has no list of layers that keep more than their "
            "inputs and may run again. To predict some of its layers all the same: predict(model, "
            "batch=..., recipe=Recipe(checkpointing='per-layer', layers='blocks'))."
        )
    notes += search.work.problems
    predicted = [*search.fits(), *search.refused()]
    if predicted:  # the best one, or the closest
        best = predicted[0].recipe
        if best.lora_rank is None and not search.has_adapters and rounds_weights(best):
            notes.append(ROUNDED)
        notes += [f"{note}." for note in predicted[0].prediction.notes]
    return notes


def _words_of(one: str | tuple[str, ...]) -> str:
    """A list of layers by its name, or by the names of its layers."""
    return one if isinstance(one, str) else f"({', '.join(one)})"


def _advice(search: Search, methods: list[str]) -> list[str]:
    """Suggestions that would fit: another method, a smaller global batch, shorter rows, a larger
    card, or more cards.
    """
    refused = search.refused()
    closest = refused[0].replayed()
    advice = _another_method(search, methods[-1])
    in_backward = [option for option in refused if option.recipe.in_backward]
    if in_backward:
        all_cards = search.cards * search.machines
        fewer = range(search.global_batch - all_cards, 0, -all_cards)
        rows = [n for n in fewer if search.global_batch % n == 0]
        for line in _first_that_fits(search, "global_batch", rows, in_backward[0].recipe):
            why = (
                "An optimizer that steps in backward cannot accumulate: its batch goes through in "
                "one piece."
            )
            advice.append(f"{line} {why}")
    if search.work.row is None:
        shorter = [n for n in (search.seq_len // 2, search.seq_len // 4) if n]
        advice += _first_that_fits(search, "seq_len", shorter, closest.recipe)
    advice.append(_larger_card(closest))
    if search.work.uncut:
        return advice
    more = [n for n in (2, 4, 8) if n > search.cards]
    more = [n for n in more if search.global_batch % (n * search.machines) == 0]
    return advice + _first_that_fits(search, "cards", more, None, methods[-1])


def _another_method(search: Search, method: str) -> list[str]:
    """The first method after ``method`` that would fit."""
    if search.has_adapters or not search.work.linear_widths:
        return []
    for other in METHODS[METHODS.index(method) + 1 :]:
        recipe = search.least_resident_recipes([other])[0]
        if not search.may_fit(recipe):
            continue
        option = search.option(recipe)
        if option.fits:
            return [f"method={other!r} would fit: {option} needs {format_bytes(option.needs)}."]
    return []


def _first_that_fits(
    search: Search, name: str, values: list[int], recipe: Recipe | None, method: str = ""
) -> list[str]:
    """The first of ``values`` for the search's size ``name`` with which ``recipe`` would fit; for
    ``None``, the recipe of ``method`` that holds the fewest bytes.
    """
    for value in values:
        other = replace(search, **{name: value})
        candidate = recipe or other.least_resident_recipes([method])[0]
        if not other.may_fit(candidate):
            continue
        option = other.option(candidate)
        if option.fits:
            same = ", by the same recipe" if recipe else ""
            needs = format_bytes(option.needs)
            return [f"{name}={value} would fit{same}: {option} needs {needs}."]
    return []


def _larger_card(closest: Option) -> str:
    """The smallest card of the table that has room for ``closest``."""
    needed = closest.needs + closest.kept_free
    large_enough = [card for card in CARDS.values() if card.nbytes >= needed]
    if not large_enough:
        return f"No card of the table has {format_bytes(needed)}: this model needs several."
    card = min(large_enough, key=lambda card: card.nbytes)
    return f"{card.name} would do: {format_bytes(card.nbytes)}."
