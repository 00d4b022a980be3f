"""``plan``: the ways to train a model that fit a card."""

from __future__ import annotations

from ..units import format_bytes
from .cards import CARDS, Card, find_card
from .cost import count, resident_bytes
from .models import find_model
from .options import METHODS, Option
from .report import Plan
from .search import Search


def plan(
    model_or_config,
    *,
    card: Card | str | int,
    seq_len: int | None = None,
    global_batch: int,
    method: str = "full",
    target: str = "cuda",
) -> Plan:
    """The ways to train ``model_or_config`` that fit ``card``, fastest first by estimate, and why faster ones do not.

    Args:
        model_or_config: a transformers config, a model, a folder with a config, or a hub id.
        card: a name such as ``"RTX 4090"`` (see ``CARDS``), or its memory: ``"24 GiB"``, or bytes.
        seq_len: tokens in a row; not needed for images.
        global_batch: rows of one optimizer step; the plan cuts them into micro-batches.
        method: ``"full"``, ``"lora"`` (rank 16 on all linear layers but the head), ``"qlora"``, or ``"any"`` of them.
        target: ``"cuda"``, or ``"cpu"``: live bytes as ``MemoryTracker`` counts them, against its budget.

    Tried are precisions (mixed, or bf16 throughout), optimizers (AdamW fused, 8-bit AdamW, torch's Adafactor, after backward
    or in it), checkpoints (none, one layer in two, all), the loss whole or in chunks, and every micro-batch that divides the global
    batch. Attention is always fused where the model can: eager needs more bytes and more time. ``float32-master`` is not
    tried: it holds as many bytes as mixed precision, and needs an optimizer of its own.

    Raises ``ValueError`` for an unknown card, model or method, and for sizes that the model cannot take.
    """
    _check(method, global_batch)
    found = find_card(card)
    config, title = find_model(model_or_config)
    work = count(config)
    if not work.patches and (isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 1):
        raise ValueError(f"seq_len={seq_len!r}: give the number of tokens in a row, at least 1, such as 2048")
    search = Search(work, found, None if work.patches else seq_len, global_batch, target)
    methods = list(METHODS) if method == "any" else [method]
    ruled = [out for name in methods for out in search.run(name)]
    fits, refused = search.ordered(), search.options(fits=False)
    advice: list[str] = []
    if not fits:
        refused += search.lightest(methods)
        advice = _advice(search, methods, min(refused, key=lambda o: o.needs))
    return Plan(
        title=title,
        card=found,
        seq_len=search.seq_len,
        global_batch=global_batch,
        method=method,
        target=target,
        fits=fits,
        refused=sorted(refused, key=lambda o: o.needs),
        ruled_out=ruled,
        advice=advice,
        predictions=search.predictions,
        given=model_or_config,
        config=config,
    )


def _check(method: str, global_batch: int) -> None:
    if method not in (*METHODS, "any"):
        raise ValueError(
            f"method={method!r} is not known: choose one of {', '.join(map(repr, (*METHODS, 'any')))}"
        )
    if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < 1:
        raise ValueError(
            f"global_batch={global_batch!r}: give a whole number of rows, at least 1, such as 16"
        )


def _advice(search: Search, methods: list[str], closest: Option) -> list[str]:
    """What would fit: another method, a smaller global batch, shorter rows, or a larger card."""
    advice = []
    for method in METHODS:
        if method in methods or methods == ["qlora"]:
            continue
        rungs = [search.ladder(family)[-1] for family in search.families(method)]
        lightest = min(rungs, key=lambda r: sum(resident_bytes(search.work, r).values()))
        option = search.option(lightest, method, search.smallest(lightest))
        if option.fits:
            advice.append(f"method={method!r} would fit: {option} needs {format_bytes(option.needs)}.")
            break
    if closest.recipe.in_backward and search.global_batch > 1:
        for rows in reversed([m for m in search.micro_batches if m < search.global_batch]):
            smaller = Search(search.work, search.card, search.seq_len, rows, search.target)
            option = smaller.option(closest.recipe, closest.method, rows)
            if option.fits:
                advice.append(
                    f"global_batch={rows} would fit, by the same recipe: it needs {format_bytes(option.needs)}. An optimizer that "
                    "steps in backward cannot accumulate, so its batch goes through in one piece."
                )
                break
    for seq_len in [] if search.work.patches else (search.seq_len // 2, search.seq_len // 4):
        if seq_len < 1:
            break
        shorter = Search(search.work, search.card, seq_len, search.global_batch, search.target)
        option = shorter.option(closest.recipe, closest.method, closest.micro_batch)
        if option.fits:
            advice.append(
                f"seq_len={seq_len} would fit, by the same recipe: it needs {format_bytes(option.needs)}."
            )
            break
    larger = [c for c in CARDS.values() if c.nbytes >= closest.needs]
    if larger:
        card = min(larger, key=lambda c: c.nbytes)
        advice.append(f"{card.name} would do: {format_bytes(card.nbytes)}.")
    else:
        advice.append(f"No card of the table has {format_bytes(closest.needs)}: this model needs several.")
    return advice
