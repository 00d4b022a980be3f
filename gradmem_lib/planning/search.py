"""The search for the fastest recipe that fits.

Each recipe of a line is slower than the one before it, and needs fewer bytes. So the fastest one
that fits is found by bisection. Lines of the fewest bytes are searched first. Then a line whose
recipes are all slower than the best one so far need not be searched, and neither need one whose
bytes are too many by their lower bound. What is left is predicted.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from ..prediction.predict import Prediction, predict
from ..prediction.question import CannotTrace
from ..training.recipe import Recipe
from ..units import format_bytes
from .bounds import bound_by_known, bound_by_saved, bound_by_sizes
from .candidates import INPUTS_OFFLOADED, PER_LAYER, Candidates, possible
from .held import input_bytes_per_token, overhead_of_prediction
from .options import EQUAL_TIME, Option, RuledOut, changes, ordered

# In a line of at most so many recipes, the fastest one is predicted first. In a longer line, the
# slowest one is: if it does not fit, none does.
SHORT_LINE = 3


@dataclass(eq=False)
class Search(Candidates):
    """The question of one ``plan``, and what has been found so far. ``replace`` asks another
    question, of which nothing is found yet.
    """

    ruled_out: list[RuledOut] = field(default_factory=list, init=False)
    notify: Callable[[str], None] | None = field(default=None, init=False)
    _known: dict[Recipe, Option] = field(default_factory=dict, init=False)

    # An option that changes training more has to be faster by this factor than one that changes it
    # less.
    equal_time = EQUAL_TIME

    def option(self, recipe: Recipe) -> Option:
        """``recipe``, predicted.

        The allocator's replay may take seconds, so it runs only if its result matters.
        """
        if recipe in self._known:
            return self._known[recipe]
        prediction = self.predict(recipe, self.ranks)
        replay = prediction.peak.total <= self.available_for(recipe)
        option = self.option_of(recipe, prediction, replay)
        self._known[recipe] = option
        if self.notify is not None:
            self.notify(self._progress())
        return option

    def predict(self, recipe: Recipe, ranks: int | None = None) -> Prediction:
        inputs = self.inputs(recipe)
        return predict(self.work.source, recipe=recipe, target=self.target, ranks=ranks, **inputs)

    def option_of(self, recipe: Recipe, prediction: Prediction, replay: bool) -> Option:
        """The option of a predicted recipe. ``replay``: what the allocator reserves is counted, and
        not estimated.
        """
        parts = overhead_of_prediction(
            prediction, self.card.capability, replay, self.cards, self.is_hybrid(recipe)
        )
        estimate = self.cost(recipe, prediction.offload_traffic_bytes / (self.rows * self.units))
        return Option(
            recipe,
            self.micro_batch(recipe),
            estimate.seconds,
            self.card.nbytes,
            prediction,
            parts,
            self.cards,
            self.has_adapters,
            self.margin,
            estimate,
            self.machines,
        )

    def _progress(self) -> str:
        """What has been found so far, in a sentence."""
        number = len(self._known)
        predicted = f"{number} recipe{'s' if number > 1 else ''} predicted"
        found = self.fits()
        if not found:
            return f"{predicted}, and none fits yet"
        time = f"{1e6 * found[0].seconds:.1f} us/{self.work.unit}, "
        if self.target == "cpu":  # the rates behind it are a card's
            time = ""
        return f"{predicted}; the best so far: {time}{found[0]}"

    def fits(self) -> list[Option]:
        """The predicted options that fit, in order, each recipe with its largest micro-batch."""
        by_size = sorted(self._known.values(), key=lambda o: o.micro_batch)
        return ordered(
            list({replace(o.recipe, accumulation=1): o for o in by_size if o.fits}.values())
        )

    def refused(self) -> list[Option]:
        """The predicted options that do not fit, by needed bytes."""
        return sorted((o for o in self._known.values() if not o.fits), key=lambda o: o.needs)

    def find(self, methods: list[str]) -> None:
        """Try all that a plan tries: first what stays on the card, then what moves activations to
        the host. Only what may be the first answer is predicted.
        """
        families = []
        for family in chain.from_iterable(map(self.families, methods)):
            if self._may_hold(family):
                families.append(family)
        families = self._in_order(families)
        fastest: dict[Recipe, Option] = {}  # of each family
        not_traced: dict[Recipe, CannotTrace] = {}
        for offloads in (False, True):
            for family in families:
                try:
                    self._search(family, offloads, fastest)
                except CannotTrace as error:
                    self._check_plain_step(error)
                    not_traced[family] = error
        self._search_what_is_much_faster(families, fastest)
        for family, error in not_traced.items():
            if family not in fastest:
                self._rule_out(family, self.least_resident_variant(family), str(error))
        if not fastest:
            self._try_host_offload(methods)
            if fits := self.fits():
                self._try_larger_micro_batches(fits[0])

    def _in_order(self, families: list[Recipe]) -> list[Recipe]:
        """``families``, fastest first, since the first ones found rule out most of the others.

        Of those that differ from the fastest one in the optimizer alone, and may be about as fast,
        the one that changes training least is searched first.
        """
        seconds = {family: self._least_seconds(family) for family in families}
        fastest = min(families, key=seconds.__getitem__, default=None)

        def order(family: Recipe) -> tuple:
            other = replace(family, optimizer=fastest.optimizer)
            if other == fastest and seconds[family] <= self.equal_time * seconds[fastest]:
                return 0, changes(family)
            return 1, seconds[family]

        return sorted(families, key=order)

    def _least_seconds(self, family: Recipe) -> float:
        """The seconds a token of the family's fastest recipe that stays on the card and may fit."""
        seconds = math.inf
        for chunked in self.losses:
            for recipe in self.variants(replace(family, chunked_loss=chunked)):
                if recipe.offload is None and self.may_fit(recipe):
                    seconds = min(seconds, self.seconds(recipe))
                    break
        return seconds

    def _may_hold(self, family: Recipe) -> bool:
        """Whether the card can hold weights, gradients and states. If not, it is ``ruled_out``."""
        smallest = self.least_resident_variant(family)
        if self.resident_sum(smallest) <= self.card.nbytes:
            return True
        shown = smallest if self.cards > 1 else family
        self._rule_out(shown, smallest, self._describe_excess(smallest))
        return False

    def _rule_out(self, shown: Recipe, smallest: Recipe, why: str) -> None:
        held = self.resident_sum(smallest)
        self.ruled_out.append(RuledOut(shown, held, why, self.has_adapters))

    def _search(self, family: Recipe, offloads: bool, fastest: dict[Recipe, Option]) -> None:
        """Put the family's fastest recipe that fits into ``fastest``, if it may be the first
        answer.
        """
        limit = self._limit(family, fastest)
        found = self._fastest(family, limit, offloads, fastest.get(family))
        if found is not None:
            fastest[family] = found

    def _search_what_is_much_faster(
        self, families: list[Recipe], fastest: dict[Recipe, Option]
    ) -> None:
        """Search families that were left out, if they may be faster than the first answer by more
        than 10 %: then it is not the first answer.

        B may be left out since it changes training more than A and is a little faster. C, which
        changes less than both and is a little slower than A, would then stand before A. But if it
        is much slower than B, A is the answer.
        """
        for family in families:
            fits = self.fits()
            if family in fastest or not fits:
                continue
            much_faster = fits[0].seconds / self.equal_time
            if self._least_seconds(family) >= much_faster:
                continue
            with suppress(CannotTrace):
                found = self._fastest(family, much_faster, offloads=False)
                if found is not None:
                    fastest[family] = found

    def _limit(self, family: Recipe, fastest: dict[Recipe, Option]) -> float:
        """The seconds a token that a recipe of ``family`` has to be below to be the first answer,
        by the ``fastest`` ones of the others.
        """
        limit = math.inf
        for other, option in fastest.items():
            factor = 1.0
            if changes(other) < changes(family):
                factor = 1 / self.equal_time
            elif changes(other) > changes(family):
                factor = self.equal_time
            if other != family:
                limit = min(limit, factor * option.seconds)
        return limit

    def _fastest(
        self, family: Recipe, limit: float, offloads: bool, best: Option | None = None
    ) -> Option | None:
        """The family's fastest recipe that fits, if it takes less than ``limit`` seconds a token
        and is faster than ``best``; else ``best``. Of two that are as fast, it is the one whose
        loss is whole.

        ``offloads``: only recipes that move something to the host are tried, or only the others.
        Raises ``CannotTrace`` if no recipe can be predicted, or if some can't and no other fits.
        """
        lines = self._lines_that(offloads, family, best)
        if not lines:
            return best
        bar = limit, False  # seconds and chunks of the recipe to beat
        if best is not None:
            bar = min(bar, (best.seconds, best.recipe.chunked_loss))
        not_traced: CannotTrace | None = None
        # If the fastest of all fits, there is nothing to search.
        fastest = min((line[0] for line in lines), key=self._time_and_chunks)
        for line in [[fastest], *lines]:
            faster = [recipe for recipe in line if self._time_and_chunks(recipe) < bar]
            try:
                found = self._first_that_fits(faster)
            except ValueError:  # the model has no such part, or its layers cannot run one by one
                continue
            except CannotTrace as error:
                self._check_plain_step(error)
                not_traced = error  # others of the family may be predicted
                continue
            if found and (found.seconds, found.recipe.chunked_loss) < bar:
                best, bar = found, (found.seconds, found.recipe.chunked_loss)
        if best is None and not_traced is not None:
            raise not_traced
        return best

    def _lines_that(
        self, offloads: bool, family: Recipe, best: Option | None
    ) -> list[list[Recipe]]:
        """The family's lines with either loss that move something to the host, or that do not. The
        inputs of checkpoints are moved only if there is no ``best`` one yet.
        """
        lines: list[list[Recipe]] = []
        for chunked in self.losses:
            for line in self.lines(replace(family, chunked_loss=chunked)):
                offload = line[0].offload
                has_use = best is None or offload != INPUTS_OFFLOADED["offload"]
                if (offload is not None) == offloads and has_use:
                    lines.append(line)
        return lines

    def _check_plain_step(self, error: CannotTrace) -> None:
        """After ``error``: raise ``CannotTrace`` if no recipe can be predicted."""
        if not self._known and self._error_of_plain_step is not None:
            raise self._error_of_plain_step from error

    @cached_property
    def _error_of_plain_step(self) -> CannotTrace | None:
        """Why not even a step without any technique can be predicted; ``None`` if it can be."""
        try:
            self.predict(Recipe(precision=None, attention=self.attention))
        except CannotTrace as error:
            return error
        return None

    def _time_and_chunks(self, recipe: Recipe) -> tuple[float, bool]:
        return self.seconds(recipe), recipe.chunked_loss

    def _first_that_fits(self, line: list[Recipe]) -> Option | None:
        """The first recipe of ``line`` that fits. Each needs less than the one before it."""
        if line and len(line) <= SHORT_LINE and self._fits(line[0]):
            return self.option(line[0])
        line = self._without_last_that_do_not_fit(line)
        if line and self._fits(line[0]):  # often all of them fit
            return self.option(line[0])
        start = bisect_left(line, True, key=self._live_bytes_fit)
        # What the allocator reserves besides does not shrink evenly: try one after the other.
        for recipe in line[start:]:
            option = self.option(recipe)
            if option.fits:
                return option
        return None

    def _without_last_that_do_not_fit(self, line: list[Recipe]) -> list[Recipe]:
        """``line`` up to its last recipe whose live bytes fit. It is empty if there is none.

        Only the last ones may need a little more than those before them, since a checkpoint keeps
        its input.
        """
        kept = list(line)
        while kept and not self._live_bytes_fit(kept[-1]):
            known = self._known.get(kept.pop())
            if known is None:  # refused by a lower bound
                return []
            needed = known.prediction.peak.total
            least_before = needed - self._bytes_of_inputs(known.recipe)
            if not kept or least_before > self.available_for(known.recipe):
                return []
            if self._live_bytes(kept[-1]) >= needed:  # those before it need even more
                return []
        return kept

    def _bytes_of_inputs(self, recipe: Recipe) -> float:
        """The bytes of the inputs of all layers: more than a checkpoint adds."""
        if self.work.row is not None:
            return math.inf  # not counted where a row is more than tokens: nothing follows
        tokens = self.units * self.micro_batch(recipe)
        return tokens * input_bytes_per_token(self.work, recipe)

    def _live_bytes(self, recipe: Recipe) -> int:
        return self.option(recipe).prediction.peak.total

    def _live_bytes_fit(self, recipe: Recipe) -> bool:
        return self.may_fit(recipe) and self._live_bytes(recipe) <= self.available_for(recipe)

    def _fits(self, recipe: Recipe) -> bool:
        return self.may_fit(recipe) and self.option(recipe).fits

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
        """Of the recipes that are faster than ``best`` and differ from it only in what runs again,
        the slowest one; or, if there is none, of those that differ in the micro-batch too, the one
        of the fewest bytes by its lower bounds. It offloads nothing, and does not fit.
        """
        plain = replace(
            best.recipe, accumulation=1, checkpointing=None, every_n_layers=None, offload=None
        )
        same_cut: list[Recipe] = []
        others: list[Recipe] = []
        for recipe in chain.from_iterable(self.lines(plain)):
            of_its_kind = recipe.sharding == plain.sharding and recipe.offload is None
            if of_its_kind and self.seconds(recipe) < best.seconds:
                if recipe.accumulation == best.recipe.accumulation:
                    same_cut.append(recipe)
                else:
                    others.append(recipe)
        same_cut.sort(key=self.seconds, reverse=True)
        for recipe in [*same_cut, *sorted(others, key=self._least_bytes)]:
            with suppress(ValueError, CannotTrace):
                return self.option(recipe)
        return None

    def may_fit(self, recipe: Recipe) -> bool:
        """Whether ``recipe`` might fit, by its lower bounds.

        One percent is added for states that are counted roughly.
        """
        return self._least_bytes(recipe) <= 1.01 * self.available_for(recipe)

    def _least_bytes(self, recipe: Recipe) -> float:
        """A lower bound for its live bytes, by its sizes and by what was predicted so far."""
        bounds = [bound_by_sizes(self, recipe)]
        for known in self._known.values():
            bounds += [bound_by_known(self, recipe, known), bound_by_saved(self, recipe, known)]
        return max(bounds)

    def _try_host_offload(self, methods: list[str]) -> None:
        """Last resort: offload parameter shards to the host. Or, so that a plan can say what is
        missing, the inputs of checkpoints.
        """
        offloads = [INPUTS_OFFLOADED]
        if self.cards > 1:
            offloads.append({"offload": "parameters", "sharding": "fsdp"})
        for recipe in self.least_resident_recipes(methods):
            # predicted in any case, so that a plan can say what is missing
            if self.option(recipe).fits or self.target != "cuda" or self.available <= 0:
                continue
            checkpointed = replace(recipe, every_n_layers=None, **PER_LAYER)
            for offloaded in possible(checkpointed, offloads):
                if self.allows(offloaded):
                    self.option(offloaded)

    def _describe_excess(self, recipe: Recipe) -> str:
        """Describe which of weights, gradients and states exceed the card."""
        names = {"parameters": "weights", "optimizer": "optimizer states"}
        held = []
        total = 0
        for category, nbytes in self.residents(recipe).items():
            if nbytes and total <= self.card.nbytes:
                held.append(f"{names.get(category, category)} ({format_bytes(nbytes)})")
                total += nbytes
        more = format_bytes(total - self.card.nbytes)
        return f"{' and '.join(held)} alone are {more} more than the card has"
