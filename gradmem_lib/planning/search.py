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
from ..hf_names import CHECKPOINTING_METHODS
from ..measure.timeline import BY, PHASE
from ..names import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    OPTIMIZER_STEP,
    PARAMETERS,
    PRECISIONS,
    SELECTIVE,
    SHARDING,
)
from ..optimizers import OPTIMIZERS as ROWS
from ..prediction.predict import predict
from ..prediction.question import CannotTrace
from ..training.recipe import Recipe
from ..units import format_bytes
from . import cost
from .cards import Card
from .options import EQUAL_TIME, OPTIMIZERS, Option, RuledOut, ordered

# Checkpoints, each with less memory than the one before. Older transformers cannot checkpoint one
# layer in two.
_HALF = []
if checkpointing_name(PreTrainedModel) == CHECKPOINTING_METHODS[0]:
    _HALF = [{"every_n_layers": 2}]
CHECKPOINTS: list[dict] = [{}, *_HALF, {"checkpointing": "per-layer"}]
# Alternatives to these, once the fastest recipe is known: recompute parts of layers, or offload
# activations.
ALTERNATIVES: list[dict] = [{"checkpointing": part} for part in SELECTIVE]
ALTERNATIVES.append({"offload": "activations"})
MAX_ALTERNATIVES = 2  # only the fastest of these, since each takes a prediction


class Search:
    """The question of one ``plan``, and what has been found so far. A recipe's ``accumulation``
    says how the rows of a card are cut. A *family* is a recipe for one card without accumulation,
    checkpoints and a chunked loss.
    """

    def __init__(
        self,
        work: cost.Work,
        card: Card,
        seq_len: int,
        global_batch: int,
        target: str,
        cards: int = 1,
        *,
        margin: float = 0.0,
    ):
        self.work, self.card, self.target, self.cards = work, card, target, cards
        self.margin = margin
        self.has_adapters = work.adapter_parameters is not None
        self.seq_len, self.global_batch, self.rows = seq_len, global_batch, global_batch // cards
        self.chunked = work.chunked and cards == 1  # chunks bypass the code that averages gradients
        self.ruled_out: list[RuledOut] = []
        self._known: dict[Recipe, Option] = {}
        # The bytes for live tensors and the allocator.
        overhead = cost.overhead_bytes(0, card.capability, 0, cards) if target == "cuda" else {}
        self.available = card.nbytes / (1 + margin) - sum(overhead.values())

    def option(self, recipe: Recipe) -> Option:
        """``recipe``, predicted.

        The allocator's replay may take seconds, so it runs only if its result matters.
        """
        if recipe not in self._known:
            ranks = self.cards if self.cards > 1 else None
            sizes = {"batch_size": self.rows, "seq_len": self.seq_len, "ranks": ranks}
            prediction = predict(self.work.source, recipe=recipe, target=self.target, **sizes)
            replay = prediction.peak.total <= self.available
            capability = self.card.capability
            parts = cost.overhead_of_prediction(prediction, capability, replay, self.cards)
            tokens = self.rows * self.seq_len
            seconds = self.seconds(recipe, prediction.offload_traffic_bytes / tokens)
            rows = self.rows // recipe.accumulation
            more = self.cards, self.has_adapters, self.margin
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

    def seconds(self, recipe: Recipe, offload_bytes: float | None = None) -> float:
        sizes = self.rows // recipe.accumulation, self.seq_len, offload_bytes, self.cards
        return cost.seconds_per_token(self.work, recipe, self.card, *sizes)

    def families(self, method: str) -> Iterator[Recipe]:
        """Precisions and optimizers, starting with those that change training least.

        Steps in backward come last.
        """
        base = Recipe(attention="fused" if self.work.fused else "eager", optimizer=OPTIMIZERS[0])
        mixed = "autocast-bf16" if self.card.bf16 else "autocast-fp16"
        precisions = [mixed, "bf16"] if self.target == "cuda" else ["float32", mixed, "bf16"]
        if method != "full":
            rank = None if self.has_adapters else cost.LORA_RANK
            frozen, trained = self.work.bytes_per_number
            as_it_is = [None] if frozen != trained else []
            for precision in ["bf16"] if method == "qlora" else as_it_is + precisions:
                yield replace(
                    base, precision=precision, lora_rank=rank, quantized_base=method == "qlora"
                )
            return
        for in_backward in (False, True):
            for precision in precisions:
                optimizers = OPTIMIZERS
                if in_backward and self.cards > 1:  # each card steps a part of each weight
                    optimizers = [name for name in OPTIMIZERS if ROWS[name].steps_shards]
                if in_backward and PRECISIONS[precision].scaled:  # a recipe refuses it
                    optimizers = []
                for optimizer in optimizers:
                    yield replace(
                        base, precision=precision, optimizer=optimizer, in_backward=in_backward
                    )

    def variants(self, family: Recipe) -> list[Recipe]:
        """The family's recipes with its own kind of loss, fastest first.

        The last needs the fewest bytes of those in pieces.
        """
        pieces = [n for n in range(1, self.rows + 1) if self.rows % n == 0]
        adapts = self.work.adapts(family)
        variants = [
            {
                "sharding": sharding,
                "precision": _precision(family, not adapts and sharding),
                "accumulation": n,
                **checkpointing,
            }
            for sharding in (SHARDING if self.cards > 1 else (None,))
            if sharding not in ("zero1", "zero2") or not adapts  # with adapters, these shard little
            for checkpointing in CHECKPOINTS
            for n in (pieces[:1] if family.in_backward else pieces)
        ]
        return sorted(_possible(family, variants), key=self.seconds)

    def residents(self, recipe: Recipe) -> dict[str, int]:
        return cost.resident_bytes(self.work, recipe, self.cards)

    def least_resident_variant(self, family: Recipe) -> Recipe:
        """The slowest of the family's variants with the fewest resident bytes."""
        return min(
            reversed(self.variants(family)),
            key=lambda variant: sum(self.residents(variant).values()),
        )

    def run(self, method: str) -> None:
        """Look for the fastest variant of each family.

        Families that cannot be, or need not be, predicted are ``ruled_out``.
        """
        best: Option | None = None
        for family in self.families(method):
            if family.in_backward and best is not None and not best.recipe.in_backward:
                continue
            smallest = self.least_resident_variant(family)
            held = sum(self.residents(smallest).values())
            if held > self.card.nbytes:
                shown = smallest if self.cards > 1 else family
                why = self._describe_excess(smallest)
                self.ruled_out.append(RuledOut(shown, held, why, self.has_adapters))
                continue
            try:
                best = self._fastest(family, best) or best
                if self.chunked:
                    best = self._fastest(replace(family, chunked_loss=True), best) or best
            except CannotTrace as error:
                self.ruled_out.append(RuledOut(family, held, str(error), self.has_adapters))

    def _fastest(self, family: Recipe, best: Option | None) -> Option | None:
        """The first of the family's variants that fits.

        If a ``best`` exists, which changes training less, it must be faster.
        """
        limit = best.seconds / EQUAL_TIME if best else math.inf
        variants = (variant for variant in self.variants(family) if self.seconds(variant) < limit)
        return next((self.option(variant) for variant in variants if self._fits(variant)), None)

    def _fits(self, recipe: Recipe) -> bool:
        return self.may_fit(recipe) and self.option(recipe).fits

    def find(self, methods: list[str]) -> None:
        """Try all that a plan tries."""
        for name in methods:
            self.run(name)
        if found := self.fits():
            self.refine(found[0])
        else:
            self._try_host_offload(methods)
        if found := self.fits():
            self._try_larger_micro_batches(found[0])

    def refine(self, best: Option) -> None:
        """Replace the checkpoints of ``best`` by fewer ones or by offloading.

        This happens if the replacement is faster and fits.
        """
        plain = replace(best.recipe, checkpointing=None, every_n_layers=None)
        if best.recipe == plain:
            return
        schedules = [f"first-{k}" for k in range(1, self.work.layers)]
        for n in [1] if plain.in_backward else range(best.recipe.accumulation, self.rows + 1):
            if self.rows % n != 0:
                continue
            variants = [replace(plain, accumulation=n, checkpointing=k) for k in schedules]
            variants = [variant for variant in variants if self.seconds(variant) < best.seconds]
            # raised if layers cannot be recomputed one by one
            with suppress(ValueError, CannotTrace):
                fewest = self._fewest(
                    variants, self._known.get(replace(plain, accumulation=n)), best
                )
                best = self.option(variants[fewest]) if fewest < len(variants) else best
        variants = _possible(plain, ALTERNATIVES[: None if self.target == "cuda" else -1])
        faster = [
            w
            for w in sorted(variants, key=self.seconds)
            if self.seconds(w) * EQUAL_TIME < best.seconds
        ]
        for variant in faster[:MAX_ALTERNATIVES]:
            with suppress(ValueError, CannotTrace):  # raised for a model without such a part
                if self._fits(variant) and self.option(variant).seconds < best.seconds:
                    return

    def _fewest(self, variants: list[Recipe], not_recomputed: Option | None, best: Option) -> int:
        """The index of the first of ``variants`` (1, 2, ... recomputed layers) that fits.

        First guess: between ``not_recomputed`` and ``best``.
        """
        low, high = 0, len(variants)
        share = 0.5
        if not_recomputed and not not_recomputed.fits:
            missing = not_recomputed.needs - self.card.nbytes
            share = missing / (not_recomputed.needs - best.needs)
        recomputed = cost.recompute_fraction(self.work, best.recipe)
        guess = math.ceil(share * recomputed * self.work.layers) - 1
        for variant in (guess, guess - 1, guess + 1):
            if low <= variant < high:
                low, high = (low, variant) if self._fits(variants[variant]) else (variant + 1, high)
        return bisect_left(variants, True, low, high, key=self._fits)

    def _try_larger_micro_batches(self, best: Option) -> None:
        """Try larger micro-batches if ``best`` offloads something.

        Its number of micro-batches was chosen without offloading.
        """
        if not best.recipe.offload:
            return
        for pieces in range(best.recipe.accumulation - 1, 0, -1):
            if self.rows % pieces != 0:
                continue
            # fewer pieces are larger micro-batches: stop at the first that does not fit
            if not self._fits(replace(best.recipe, accumulation=pieces)):
                return

    def next_faster(self, best: Option) -> Option | None:
        """The slowest of the variants that are faster than ``best``.

        They differ from it only in accumulation and checkpoints.
        """
        family = replace(
            best.recipe, accumulation=1, checkpointing=None, every_n_layers=None, offload=None
        )
        sharding, limit = family.sharding, best.seconds
        variants = [
            w for w in self.variants(family) if w.sharding == sharding and self.seconds(w) < limit
        ]
        return self.option(variants[-1]) if variants else None

    def may_fit(self, recipe: Recipe) -> bool:
        """Whether ``recipe`` might fit, by its lower bounds.

        One percent is added for states that are counted roughly.
        """
        bounds = [self._lower_bound(recipe, known) for known in (None, *self._known.values())]
        return max(bounds) <= 1.01 * self.available

    def least_resident_recipes(self, methods: list[str]) -> list[Recipe]:
        """The recipes with the fewest resident bytes.

        One steps after backward; another one, if there is one, steps in backward.
        """
        families = [
            replace(f, chunked_loss=self.chunked) for m in methods for f in self.families(m)
        ]
        found = []
        for in_backward in (False, True):
            variants = []
            for family in families:
                if family.in_backward == in_backward:
                    variants.append(self.least_resident_variant(family))
            found += sorted(variants, key=lambda variant: sum(self.residents(variant).values()))[:1]
        return found

    def _try_host_offload(self, methods: list[str]) -> None:
        """Last resort: offload checkpoint inputs or parameter shards to the host."""
        offloads = [{"offload": "boundaries"}]
        if self.cards > 1:
            offloads.append({"offload": "parameters", "sharding": "fsdp"})
        for recipe in self.least_resident_recipes(methods):
            # predicted in any case, so that a plan can say what is missing
            if self.option(recipe).fits or self.target != "cuda" or self.available <= 0:
                continue
            checkpointed = replace(recipe, checkpointing="per-layer", every_n_layers=None)
            for offloaded in _possible(checkpointed, offloads):
                self.option(offloaded)

    def _lower_bound(self, recipe: Recipe, known: Option | None = None) -> float:
        """A lower bound for the live bytes of ``recipe``.

        It comes from the sizes, or from a ``known`` option that saves as much or more memory. At
        each moment, bytes other than parameters, gradients and states are assumed to shrink with
        the micro-batch. If the optimizers differ, the optimizer's step is left out.
        """
        if known is None:
            held = self.residents(recipe)
            tokens = self.seq_len * (self.rows // recipe.accumulation)
            # In one piece, gradients are made while activations are freed.
            gradients = held["gradients"] if recipe.accumulation > 1 else 0
            saved = tokens * cost.saved_bytes_per_token(self.work, recipe)
            in_forward = held["parameters"] + held["optimizer"] + gradients + saved
            return max(sum(held.values()), in_forward)
        if not self._comparable(known.recipe, recipe):
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
        scaled = by[:, ACTIVATIONS:].sum(axis=1) * min(
            1, known.recipe.accumulation / recipe.accumulation
        )
        return (fixed + gradients + scaled).max()

    def _comparable(self, known: Recipe, recipe: Recipe) -> bool:
        """Whether the bytes of ``known`` give a lower bound for those of ``recipe``.

        The two may differ in the micro-batch, in the optimizer (if it steps after backward), and in
        that ``known`` saves more memory.
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
        fractions = [cost.recompute_fraction(self.work, r) for r in (known, recipe)]
        saves = fractions[0] >= fractions[1]
        # products are no measure there
        if {known.checkpointing, recipe.checkpointing} & {*SELECTIVE}:
            saves = known.checkpointing in (recipe.checkpointing, "per-layer")
        return kinds[0] == kinds[1] and saves and known.chunked_loss >= recipe.chunked_loss

    def _describe_excess(self, recipe: Recipe) -> str:
        """Describe which of weights, gradients and states exceed the card."""
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
    gathered = bool(sharding) and SHARDING[sharding].weights
    if gathered and ROWS[family.optimizer].master is not None:
        return "float32-master"
    return "autocast-bf16"
