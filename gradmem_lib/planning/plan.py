"""``plan``: the ways to train a model that fit a card."""

from collections.abc import Callable

from ..names import check_choice
from ..units import check_positive_int, format_bytes
from .cards import CARDS, Card, find_card
from .cost import count, with_adapters
from .margin import check_margin
from .models import find_model
from .options import METHODS
from .report import Plan
from .search import Search


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
) -> Plan:
    """The ways to train ``model_or_config`` that fit ``card``, fastest first by estimate, and why
    faster ways do not fit.

    Args:
        model_or_config: a transformers config, a model, a folder with a config, or a hub id.
        card: a name such as ``"RTX 4090"`` (see ``CARDS``), or its memory: ``"24 GiB"``, or bytes.
        seq_len: tokens in a row.
        global_batch: rows of one optimizer step, on all cards together. The plan cuts them into
            micro-batches.
        method: ``"full"`` (the default), ``"lora"`` (rank 16 on all linear layers but the head),
            ``"qlora"``, or ``"any"``. A model that has LoRA already (from PEFT or ``add_lora``)
            trains it: its only method, and its default, is ``"lora"``.
        target: ``"cuda"``, or ``"cpu"``: live bytes as ``MemoryTracker`` counts them, against its
            budget.
        cards: the number of such cards in one machine that train together. Each key of ``SHARDING``
            is tried.
        margin: the share of the needed bytes that has to stay free besides, since a prediction for
            a card may be off. ``None``: as much as published runs were off (3 %; 4.5 % for several
            cards), and 0 for target "cpu", whose bytes are exact. ``0``: none.
        notify: called with a sentence after each prediction.

    It tries precisions (mixed, or bf16 for all), optimizers (AdamW fused, 8-bit AdamW, torch's
    Adafactor; steps in backward if nothing else fits), checkpoints (none, one layer in two, all),
    the loss whole or in chunks, and every micro-batch that divides the global batch. To replace the
    checkpoints of the best recipe, it tries as few layers as fit, parts of each layer, or the
    host's memory, if these are faster. If nothing fits, it moves the inputs of checkpoints to the
    host, or the shards of several cards. Attention is fused if the model can: eager attention needs
    more bytes and more time. On one card, ``float32-master`` is not tried, since it holds as many
    bytes as mixed precision, and ``adamw-stochastic`` as many as AdamW in bf16. On several cards,
    the loss is not in chunks, and only AdamW steps in backward.

    Raises ``ValueError`` for an unknown card, model or method, for sizes that the model cannot
    take, and for a model with frozen weights or with other weights than its config's;
    ``RuntimeError`` for one that is checkpointed or compiled already.
    """
    check_choice("method", method, (None, *METHODS, "any"))
    check_choice("target", target, ("cuda", "cpu"))
    global_batch = check_positive_int("global_batch", global_batch, 16, "rows")
    if global_batch % check_positive_int("cards", cards, 2, "cards"):
        raise ValueError(
            f"global_batch={global_batch} is not dealt evenly to {cards} cards: give a multiple"
        )
    found = find_card(card)
    config, title = find_model(model_or_config)
    work = with_adapters(count(config), model_or_config, method)
    seq_len = check_positive_int("seq_len", seq_len, 2048, "tokens in a row")
    margin = check_margin(margin, target, cards)
    search = Search(work, found, seq_len, global_batch, target, cards, margin=margin)
    if notify is not None:
        search.notify = notify
    method = "lora" if search.has_adapters else method or "full"
    methods = list(METHODS) if method == "any" else [method]
    search.find(methods)
    if fits := search.fits():
        search.next_faster(fits[0])
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
        refused=search.refused(),
        ruled_out=search.ruled_out,
        given=model_or_config,
        config=config,
        advice=[] if fits else _advice(search, methods),
    )


def _advice(search: Search, methods: list[str]) -> list[str]:
    """Suggestions that would fit: another method, a smaller global batch, shorter rows, a larger
    card, or more cards.
    """
    refused = search.refused()
    closest, advice = refused[0], []

    def first(name: str, values: list[int], recipe, more: str = "") -> None:
        for value in values:
            names = ("seq_len", "global_batch", "target", "cards", "margin")
            sizes = {n: getattr(search, n) for n in names}
            other = Search(search.work, search.card, **sizes | {name: value})
            candidate = recipe or other.least_resident_recipes(methods[-1:])[0]
            if other.may_fit(candidate) and (option := other.option(candidate)).fits:
                same = ", by the same recipe" if recipe else ""
                line = (
                    f"{name}={value} would fit{same}: {option} needs {format_bytes(option.needs)}."
                )
                advice.append(line + more)
                return

    for method in () if search.has_adapters else METHODS[METHODS.index(methods[-1]) + 1 :]:
        candidate = search.least_resident_recipes([method])[0]
        if search.may_fit(candidate) and (option := search.option(candidate)).fits:
            advice.append(
                f"method={method!r} would fit: {option} needs {format_bytes(option.needs)}."
            )
            break
    if in_backward := [option for option in refused if option.recipe.in_backward]:
        fewer = range(search.global_batch - search.cards, 0, -search.cards)
        rows = [n for n in fewer if search.global_batch % n == 0]
        why = (
            " An optimizer that steps in backward cannot accumulate: its batch goes through in "
            "one piece."
        )
        first("global_batch", rows, in_backward[0].recipe, why)
    first("seq_len", [n for n in (search.seq_len // 2, search.seq_len // 4) if n], closest.recipe)
    card = min(
        (c for c in CARDS.values() if c.nbytes >= closest.needs + closest.kept_free),
        key=lambda c: c.nbytes,
        default=None,
    )
    no_card = f"No card of the table has {format_bytes(closest.needs)}: this model needs several."
    advice.append(f"{card.name} would do: {format_bytes(card.nbytes)}." if card else no_card)
    first(
        "cards", [n for n in (2, 4, 8) if n > search.cards and search.global_batch % n == 0], None
    )
    return advice
