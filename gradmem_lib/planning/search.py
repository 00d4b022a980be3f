"""The search for recipes that fit: it starts with the fastest, and does not predict those that
surely need too much.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from transformers import PreTrainedModel

from ..compat import checkpointing_name
from ..measure.timeline import BY, PHASE
from ..names import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    OPTIMIZER_STEP,
    PARAMETERS,
    SELECTIVE,
    SHARDING,
)
from ..prediction.predict import predict
from ..prediction.question import CannotTrace
from ..training.recipe import Recipe
from ..units import format_bytes
from . import cost
from .cards import Card
from .options import EQUAL_TIME, OPTIMIZERS, Option, RuledOut, ordered

# Checkpoints, each with less memory than the one before. Older transformers cannot checkpoint one
# layer in two.
_HALF = (
    [{"every_n_layers": 2}]
    if checkpointing_name(PreTrainedModel) != "gradient_checkpointing"
    else []
)
CHECKPOINTS: list[dict] = [{}, *_HALF, {"checkpointing": "per-layer"}]
# Alternatives to these, once the fastest recipe is known: recompute parts of layers, or offload
# activations.
LESS: list[dict] = [*({"checkpointing": part} for part in SELECTIVE), {"offload": "activations"}]
TRIED = 2  # only the fastest of these, since each takes a prediction


class Search:
    """The question of one ``plan``, and what has been found so far. A recipe's ``accumulation``
    says how the rows of a card are cut. A *family* is a recipe for one card without accumulation,
    checkpoints and a chunked loss.
    """

    def __init__(
        self, work: cost.Work, card: Card, seq_len, global_batch: int, target: str, cards: int = 1
    ):
        self.work, self.card, self.target, self.cards = work, card, target, cards
        self.own = work.own is not None
        self.seq_len, self.global_batch, self.rows = seq_len, global_batch, global_batch // cards
        self.chunked = work.chunked and cards == 1  # chunks bypass the code that averages gradients
        self.ruled_out: list[RuledOut] = []
        self._known: dict[Recipe, Option] = {}
        # The bytes for live tensors and the allocator.
        beside = cost.beside(0, card.capability, 0, cards) if target == "cuda" else {}
        self.room = card.nbytes - sum(beside.values())

    def option(self, recipe: Recipe) -> Option:
        """``recipe``, predicted.

        The allocator's replay may take seconds, so it runs only if its result matters.
        """
        if recipe not in self._known:
            ranks = self.cards if self.cards > 1 else None
            sizes = {"batch_size": self.rows, "seq_len": self.seq_len, "ranks": ranks}
            prediction = predict(self.work.source, recipe=recipe, target=self.target, **sizes)
            replay = prediction.peak.total <= self.room
            parts = cost.beyond(prediction, self.card.capability, replay, self.cards)
            seconds = self.seconds(
                recipe, prediction.offload_traffic_bytes / (self.rows * self.seq_len)
            )
            rows, more = self.rows // recipe.accumulation, (self.cards, self.own)
            self._known[recipe] = Option(
                recipe, rows, seconds, self.card.nbytes, prediction, parts, *more
            )
        return self._known[recipe]

    def fits(self) -> list[Option]:
        """The predicted options that fit, in order, each recipe with its largest micro-batch."""
        by_size = sorted(self._known.values(), key=lambda o: o.micro_batch)
        return ordered(
            list({replace(o.recipe, accumulation=1): o for o in by_size if o.fits}.values())
        )

    def refused(self) -> list[Option]:
        """The predicted options that do not fit, by needed bytes."""
        return sorted((o for o in self._known.values() if not o.fits), key=lambda o: o.needs)

    def seconds(self, recipe: Recipe, moved: float | None = None) -> float:
        sizes = self.rows // recipe.accumulation, self.seq_len, moved, self.cards
        return cost.seconds_per_token(self.work, recipe, self.card, *sizes)

    def families(self, method: str) -> Iterator[Recipe]:
        """Precisions and optimizers, starting with those that change training least.

        Steps in backward come last.
        """
        base = Recipe(attention="fused" if self.work.fused else "eager", optimizer=OPTIMIZERS[0])
        mixed = "autocast-bf16" if self.card.bf16 else "autocast-fp16"
        precisions = [mixed, "bf16"] if self.target == "cuda" else ["float32", mixed, "bf16"]
        if method != "full":
            rank = None if self.own else cost.LORA_RANK
            as_it_is = [None] if self.work.widths[0] != self.work.widths[1] else []
            for precision in ["bf16"] if method == "qlora" else as_it_is + precisions:
                yield replace(
                    base, precision=precision, lora_rank=rank, quantized_base=method == "qlora"
                )
            return
        for in_backward in (False, True):
            for precision in precisions:
                # With several cards, each steps a part of each weight in backward: only AdamW can
                # do that.
                optimizers = OPTIMIZERS[:1] if in_backward and self.cards > 1 else OPTIMIZERS
                for optimizer in (
                    optimizers if not in_backward or precision != "autocast-fp16" else ()
                ):
                    yield replace(
                        base, precision=precision, optimizer=optimizer, in_backward=in_backward
                    )

    def ways(self, family: Recipe) -> list[Recipe]:
        """The family's recipes with its own kind of loss, fastest first.

        The last needs the fewest bytes of those in pieces.
        """
        pieces = [n for n in range(1, self.rows + 1) if self.rows % n == 0]
        adapts = self.work.adapts(family)
        ways = [
            {
                "sharding": how,
                "precision": _precision(family, not adapts and how),
                "accumulation": n,
                **less,
            }
            for how in (SHARDING if self.cards > 1 else (None,))
            if how not in ("zero1", "zero2") or not adapts  # with adapters, these shard little
            for less in CHECKPOINTS
            for n in (pieces[:1] if family.in_backward else pieces)
        ]
        return sorted(_possible(family, ways), key=self.seconds)

    def residents(self, recipe: Recipe) -> dict[str, int]:
        return cost.resident_bytes(self.work, recipe, self.cards)

    def leanest(self, family: Recipe) -> Recipe:
        """The slowest of the family's ways with the fewest residents."""
        return min(reversed(self.ways(family)), key=lambda way: sum(self.residents(way).values()))

    def run(self, method: str) -> None:
        """Look for the fastest way of each family.

        Families that cannot be, or need not be, predicted are ``ruled_out``.
        """
        best: Option | None = None
        for family in self.families(method):
            if family.in_backward and best is not None and not best.recipe.in_backward:
                continue
            leanest = self.leanest(family)
            held = sum(self.residents(leanest).values())
            if held > self.card.nbytes:
                shown = leanest if self.cards > 1 else family
                self.ruled_out.append(RuledOut(shown, held, self._too_many(leanest), self.own))
                continue
            try:
                best = self._fastest(family, best) or best
                if self.chunked:
                    best = self._fastest(replace(family, chunked_loss=True), best) or best
            except CannotTrace as error:
                self.ruled_out.append(RuledOut(family, held, str(error), self.own))

    def _fastest(self, family: Recipe, best: Option | None) -> Option | None:
        """The first of the family's ways that fits.

        If a ``best`` exists, which changes training less, it must be faster.
        """
        limit = best.seconds / EQUAL_TIME if best else math.inf
        ways = (way for way in self.ways(family) if self.seconds(way) < limit)
        return next((self.option(way) for way in ways if self._fits(way)), None)

    def _fits(self, recipe: Recipe) -> bool:
        return self.may_fit(recipe) and self.option(recipe).fits

    def find(self, methods: list[str]) -> None:
        """Try all that a plan tries."""
        for name in methods:
            self.run(name)
        if found := self.fits():
            self.refine(found[0])
        else:
            self.move(methods)
        if found := self.fits():
            self.join(found[0])

    def refine(self, best: Option) -> None:
        """Replace the checkpoints of ``best`` by fewer ones or by offloading, if that is faster and
        fits.
        """
        plain = replace(best.recipe, checkpointing=None, every_n_layers=None)
        if best.recipe == plain:
            return
        first = [f"first-{k}" for k in range(1, self.work.layers)]
        for n in [1] if plain.in_backward else range(best.recipe.accumulation, self.rows + 1):
            ways = [
                replace(plain, accumulation=n, checkpointing=k) for k in first if self.rows % n == 0
            ]
            ways = [way for way in ways if self.seconds(way) < best.seconds]
            # raised if layers cannot be recomputed one by one
            with suppress(ValueError, CannotTrace):
                fewest = self._fewest(ways, self._known.get(replace(plain, accumulation=n)), best)
                best = self.option(ways[fewest]) if fewest < len(ways) else best
        ways = _possible(plain, LESS[: None if self.target == "cuda" else -1])
        faster = [
            w for w in sorted(ways, key=self.seconds) if self.seconds(w) * EQUAL_TIME < best.seconds
        ]
        for way in faster[:TRIED]:
            with suppress(ValueError, CannotTrace):  # raised for a model without such a part
                if self._fits(way) and self.option(way).seconds < best.seconds:
                    return

    def _fewest(self, ways: list[Recipe], none: Option | None, some: Option) -> int:
        """The index of the first of ``ways`` (1, 2, ... recomputed layers) that fits.

        First guess: between ``none`` and ``some``.
        """
        low, high = 0, len(ways)
        part = (
            (none.needs - self.card.nbytes) / (none.needs - some.needs)
            if none and not none.fits
            else 0.5
        )
        near = math.ceil(part * cost.run_again(self.work, some.recipe) * self.work.layers) - 1
        for way in (near, near - 1, near + 1):
            if low <= way < high:
                low, high = (low, way) if self._fits(ways[way]) else (way + 1, high)
        return bisect_left(ways, True, low, high, key=self._fits)

    def join(self, best: Option) -> None:
        """Try larger micro-batches if ``best`` offloads something: the pieces were chosen without
        offloading.
        """
        fewer = [n for n in range(best.recipe.accumulation - 1, 0, -1) if self.rows % n == 0]
        all(self._fits(replace(best.recipe, accumulation=n)) for n in fewer if best.recipe.offload)

    def next_faster(self, best: Option) -> Option | None:
        """The slowest of the ways that are faster than ``best`` and differ from it only in pieces
        and checkpoints.
        """
        family = replace(
            best.recipe, accumulation=1, checkpointing=None, every_n_layers=None, offload=None
        )
        how, limit = family.sharding, best.seconds
        ways = [w for w in self.ways(family) if w.sharding == how and self.seconds(w) < limit]
        return self.option(ways[-1]) if ways else None

    def may_fit(self, recipe: Recipe) -> bool:
        """Whether ``recipe`` might fit, by its lower bounds.

        One percent is added for states that are counted roughly.
        """
        return (
            max(self._least(recipe, known) for known in (None, *self._known.values()))
            <= 1.01 * self.room
        )

    def lightest(self, methods: list[str]) -> list[Recipe]:
        """The recipes with the fewest residents: one that steps after backward, and one that steps
        in it, if there is one.
        """
        families = [
            replace(f, chunked_loss=self.chunked) for m in methods for f in self.families(m)
        ]
        found = []
        for in_backward in (False, True):
            ways = [
                self.leanest(family) for family in families if family.in_backward == in_backward
            ]
            found += sorted(ways, key=lambda way: sum(self.residents(way).values()))[:1]
        return found

    def move(self, methods: list[str]) -> None:
        """If nothing fits: try the lightest recipes, also with the inputs of checkpoints, or the
        shards of cards, on the host.
        """
        for recipe in self.lightest(methods):
            if not self.option(recipe).fits and self.target == "cuda" and self.room > 0:
                plain = replace(recipe, checkpointing="per-layer", every_n_layers=None)
                away = [{"offload": "boundaries"}, {"offload": "parameters", "sharding": "fsdp"}]
                list(map(self.option, _possible(plain, away[: 1 + (self.cards > 1)])))

    def _least(self, recipe: Recipe, known: Option | None = None) -> float:
        """A lower bound for the live bytes of ``recipe``: from its sizes, or from a ``known``
        option that saves as much or more.

        At each moment, bytes other than parameters, gradients and states are assumed to shrink with
        the micro-batch. If the optimizers differ, the optimizer's step is left out.
        """
        if known is None:
            held = self.residents(recipe)
            tokens = self.seq_len * (self.rows // recipe.accumulation)
            # In one piece, gradients are made while activations are freed.
            waiting = held["gradients"] if recipe.accumulation > 1 else 0
            kept = tokens * cost.kept_by_a_token(self.work, recipe)
            return max(sum(held.values()), held["parameters"] + held["optimizer"] + waiting + kept)
        if not self._alike(known.recipe, recipe):
            return 0
        rows = known.prediction.timeline.rows
        if (known.recipe.optimizer, known.recipe.sharding) != (recipe.optimizer, recipe.sharding):
            rows = rows[rows[:, PHASE] != OPTIMIZER_STEP]
        states = [self.residents(r)["optimizer"] for r in (known.recipe, recipe)]
        by = rows[:, BY]
        fixed, gradients = (
            by[:, PARAMETERS] + by[:, OPTIMIZER] + states[1] - states[0],
            by[:, GRADIENTS],
        )
        if recipe.accumulation > 1:
            # From the second micro-batch on, all gradients exist from the beginning, except those
            # that are about to be sharded.
            gradients = min(gradients.max(), self.residents(recipe)["gradients"])
        elif known.recipe.accumulation > 1:
            gradients = 0
        grows = by[:, ACTIVATIONS:].sum(axis=1) * min(
            1, known.recipe.accumulation / recipe.accumulation
        )
        return (fixed + gradients + grows).max()

    def _alike(self, known: Recipe, recipe: Recipe) -> bool:
        """Whether ``known`` differs only in its micro-batch, its optimizer (if that steps after
        backward), and in saving more.
        """
        # these differ only in states
        states = known.sharding == "ddp" and recipe.sharding == "zero1"
        kinds = [
            (
                r.precision,
                r.lora_rank,
                r.quantized_base,
                r.in_backward and r.optimizer,
                states or r.sharding,
                r.offload,
            )
            for r in (known, recipe)
        ]
        saves = cost.run_again(self.work, known) >= cost.run_again(self.work, recipe)
        # products are no measure there
        if {known.checkpointing, recipe.checkpointing} & {*SELECTIVE}:
            saves = known.checkpointing in (recipe.checkpointing, "per-layer")
        return kinds[0] == kinds[1] and saves and known.chunked_loss >= recipe.chunked_loss

    def _too_many(self, recipe: Recipe) -> str:
        """A text that says which of weights, gradients and states exceed the card."""
        names, held, sums = {"parameters": "weights", "optimizer": "optimizer states"}, [], 0
        for category, nbytes in self.residents(recipe).items():
            if nbytes and sums <= self.card.nbytes:
                held.append(f"{names.get(category, category)} {format_bytes(nbytes)}")
                sums += nbytes
        alone = (
            " and ".join(held) + " alone" + (f" are {format_bytes(sums)}" if len(held) > 1 else "")
        )
        return f"{alone}, and the card has {format_bytes(self.card.nbytes)}"


def _possible(recipe: Recipe, changes: Iterable[dict]) -> list[Recipe]:
    """``recipe`` with each of ``changes`` that is possible for it."""
    found = []
    for change in changes:
        with suppress(ValueError):
            found.append(replace(recipe, **change))
    return found


def _precision(family: Recipe, sharding: str | bool | None) -> str | None:
    """Mixed precision by autocast; if weights are gathered, by gathering them in bf16, which sends
    and holds half the bytes.
    """
    if family.precision not in ("autocast-bf16", "float32-master"):
        return family.precision
    cut = sharding in ("zero2", "fsdp") and family.optimizer == OPTIMIZERS[0]
    return "float32-master" if cut else "autocast-bf16"
