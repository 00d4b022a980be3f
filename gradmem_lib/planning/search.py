"""The search for the fastest recipe that fits.

Recipes come in *lines*. Those of a line differ only in how many layers run again in backward: each
is slower than the one before it, and needs fewer bytes. So the fastest one that fits is found by
bisection. Lines of the fewest bytes are searched first, and those that move something to the host
last. Then a line whose recipes are all slower than the best one so far need not be searched, and
neither need one whose bytes are too many by their lower bound. What is left is predicted, so
nothing that is faster is missed.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from ..compat.transformers_models import checkpointing_name
from ..hf_names import CHECKPOINTING_METHODS
from ..measure.timeline import BY, PHASE
from ..names import (
    ACTIVATIONS,
    FORWARD,
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
from ..techniques.layers import find_layers
from ..techniques.schedules import first_layers
from ..techniques.selective import find_parts
from ..training.recipe import Recipe
from ..units import format_bytes
from .cards import NETWORK, Card
from .cost import Cost, cost_per_token
from .held import (
    NCCL,
    copied_bytes,
    input_bytes_per_token,
    overhead_bytes,
    overhead_of_prediction,
    resident_bytes,
    saved_by_forward_per_token,
    saved_bytes_per_token,
)
from .options import EQUAL_TIME, OPTIMIZERS, Option, RuledOut, ordered
from .work import LORA_RANK, Work

# One layer in two is checkpointed. Older transformers cannot do that.
_HALF = []
if checkpointing_name(PreTrainedModel) == CHECKPOINTING_METHODS[0]:
    _HALF = [{"every_n_layers": 2}]
PER_LAYER = {"checkpointing": "per-layer"}
# Offload activations, for a card.
OFFLOADED = {"offload": "activations"}
# Or offload the inputs of layers that run again.
INPUTS_OFFLOADED = {"offload": "boundaries"}
# In a line of at most so many recipes, the fastest one is predicted first. In a longer line, the
# slowest one is: if it does not fit, none does.
SHORT_LINE = 3


class Search:
    """The question of one ``plan``, and what has been found so far. A recipe's ``accumulation``
    says how the rows of a card are cut. A *family* is a recipe for one card without accumulation,
    checkpoints and a chunked loss.
    """

    def __init__(
        self,
        work: Work,
        card: Card,
        seq_len: int | None,
        global_batch: int,
        target: str,
        cards: int = 1,
        *,
        margin: float = 0.0,
        machines: int = 1,
        network: float = NETWORK,
    ):
        self.work, self.card, self.target, self.cards = work, card, target, cards
        self.margin = margin
        self.machines, self.network = machines, network
        self.has_adapters = work.adapter_parameters is not None
        self.seq_len, self.global_batch = seq_len, global_batch
        self.rows = global_batch // (cards * machines)
        self.units = work.units_of_row(seq_len)  # tokens of a row, if costs are those of tokens
        self.chunked = work.chunked and cards == 1  # chunks bypass the code that averages gradients
        self.schedules = self._schedules()
        self.alternatives = self._alternatives()
        self.ruled_out: list[RuledOut] = []
        self.notify: Callable[[str], None] | None = None
        self._known: dict[Recipe, Option] = {}
        # The bytes for live tensors and the allocator, if all processes are one group.
        overhead = {}
        if target == "cuda":
            overhead = overhead_bytes(0, card.capability, 0, cards)
        self.available = card.nbytes / (1 + margin) - sum(overhead.values())

    # An option that changes training more has to be faster by this factor than one that changes it
    # less.
    equal_time = EQUAL_TIME

    def allows(self, recipe: Recipe) -> bool:
        """Whether ``recipe`` may be tried."""
        return True

    def _schedules(self) -> list[dict]:
        """How many layers run again: none, the first k, all. Each needs less memory than the one
        before.
        """
        if not self.work.has_layers:
            return [{}]
        firsts: list[dict] = _HALF
        if self._layers_are_listed():
            firsts = [{"checkpointing": f"first-{k}"} for k in range(1, self.work.layers)]
        return [{}, *firsts, PER_LAYER]

    def _alternatives(self) -> list[dict]:
        """What keeps fewer activations in another way than by layers that run again."""
        alternatives = self._parts() if self.work.has_layers else []
        if self._layers_are_listed():
            alternatives += _HALF
        if self.target == "cuda":
            alternatives.append(OFFLOADED)
        return alternatives

    def _parts(self) -> list[dict]:
        """The parts of each layer that can run again: those that all layers have."""
        lists = find_layers(self.work.source.skeleton, self.work.named)
        layers = [layer for several, _ in lists.values() for layer in several]
        found = []
        for part, spec in SELECTIVE.items():
            # What keeps products is recomputed in the whole layer, which is there in any case.
            if spec.keeps_products or all(_has_part(layer, part) for layer in layers):
                found.append({"checkpointing": part})
        return found

    def _layers_are_listed(self) -> bool:
        """Whether the layers can run again one by one."""
        try:
            return bool(find_layers(self.work.source.skeleton, self.work.named))
        except ValueError:
            return False

    def option(self, recipe: Recipe) -> Option:
        """``recipe``, predicted.

        The allocator's replay may take seconds, so it runs only if its result matters.
        """
        if recipe not in self._known:
            ranks = self.cards if self.cards > 1 else None
            inputs = self.work.inputs(self.rows, self.seq_len, recipe)
            prediction = predict(
                self.work.source, recipe=recipe, target=self.target, ranks=ranks, **inputs
            )
            replay = prediction.peak.total <= self._available_for(recipe)
            parts = overhead_of_prediction(
                prediction, self.card.capability, replay, self.cards, self._is_hybrid(recipe)
            )
            tokens = self.rows * self.units
            estimate = self.cost(recipe, prediction.offload_traffic_bytes / tokens)
            rows = self.rows // recipe.accumulation
            option = Option(
                recipe,
                rows,
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
            self._known[recipe] = option
            if self.notify is not None:
                self.notify(self._progress())
        return self._known[recipe]

    def _is_hybrid(self, recipe: Recipe) -> bool:
        """Whether the cards of each of several machines share a copy of the model."""
        return self.machines > 1 and SHARDING[recipe.sharding].weights

    def _available_for(self, recipe: Recipe) -> float:
        """The bytes that ``recipe`` has for live tensors and the allocator."""
        if self.target == "cuda" and self._is_hybrid(recipe):
            return self.available - NCCL
        return self.available

    def _progress(self) -> str:
        """What has been found so far, in a sentence."""
        number = len(self._known)
        predicted = f"{number} recipe{'s' if number > 1 else ''} predicted"
        found = self.fits()
        if not found:
            return f"{predicted}, and none fits yet"
        time = f"{1e6 * found[0].seconds:.1f} us/{self.work.unit}"
        return f"{predicted}; the best so far: {time}, {found[0]}"

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
        return self.cost(recipe, offload_bytes).seconds

    def cost(self, recipe: Recipe, offload_bytes: float | None = None) -> Cost:
        """The estimated time of a token, with the lower bound of what is offloaded for ``None``."""
        return cost_per_token(
            self.work,
            recipe,
            self.card,
            self.rows // recipe.accumulation,
            self.units,
            offload_bytes=offload_bytes,
            cards=self.cards,
            machines=self.machines,
            network=self.network,
        )

    def families(self, method: str) -> Iterator[Recipe]:
        """Precisions and optimizers, starting with those that change training least.

        Steps in backward come last.
        """
        attention = "fused" if self.work.fused else "eager"
        base = Recipe(attention=attention, optimizer=OPTIMIZERS[0], layers=self.work.named)
        mixed = "autocast-bf16" if self.card.bf16 else "autocast-fp16"
        precisions: list[str | None] = [mixed, "bf16"]
        if self.target != "cuda":
            precisions.insert(0, "float32")
        if method == "full":
            for in_backward in (False, True):
                for precision in precisions:
                    how = {"precision": precision, "in_backward": in_backward}
                    for optimizer in self._optimizers(in_backward, precision):
                        yield replace(base, optimizer=optimizer, **how)
            return
        rank = None if self.has_adapters else LORA_RANK
        frozen, trained = self.work.bytes_per_number
        if method == "qlora":
            precisions = ["bf16"]
        elif frozen != trained:  # the adapters have a dtype of their own: keep both as they are
            precisions.insert(0, None)
        for precision in precisions:
            yield replace(
                base, precision=precision, lora_rank=rank, quantized_base=method == "qlora"
            )

    def _optimizers(self, in_backward: bool, precision: str | None) -> Sequence[str]:
        """The optimizers that can train all weights in this way."""
        if not in_backward:
            return OPTIMIZERS
        if PRECISIONS[precision].scaled:  # a recipe refuses it
            return []
        if self.cards == 1:
            return OPTIMIZERS
        if not self.work.has_layers:  # each card steps its part of a weight, and none is in parts
            return []
        return [name for name in OPTIMIZERS if ROWS[name].steps_shards]

    def lines(self, family: Recipe) -> list[list[Recipe]]:
        """The family's recipes with its own kind of loss, in lines: those of a line need less
        memory one after the other, and take more time. Lines of the fewest bytes come first.
        """
        pieces = [n for n in range(self.rows, 0, -1) if self.rows % n == 0]
        if family.in_backward or self.work.uncut:
            pieces = [1]
        shardings: list[str | None] = [None]
        if self.cards > 1:
            shardings = list(SHARDING)
        if self.machines > 1:
            shardings.remove("zero1")  # which has no copy in each machine
        adapts = self.work.adapts(family)
        lines: list[list[Recipe]] = []
        for sharding in shardings:
            if sharding in ("zero1", "zero2") and adapts:
                continue  # with adapters, these shard little
            if sharding and SHARDING[sharding].weights and not self.work.has_layers:
                continue  # weights are gathered layer by layer
            precision = _precision(family, not adapts and sharding)
            for n in pieces:
                same = {"sharding": sharding, "precision": precision, "accumulation": n}
                lines.append(_possible(family, [same | how for how in self.schedules]))
                if self.target == "cuda":
                    offloaded = [same | how | INPUTS_OFFLOADED for how in self.schedules]
                    lines.append(_possible(family, offloaded))
                lines += [[one] for one in _possible(family, [same | a for a in self.alternatives])]
        allowed = [[recipe for recipe in line if self.allows(recipe)] for line in lines]
        return sorted(filter(None, allowed), key=self._rank_of_line)

    def _rank_of_line(self, line: list[Recipe]) -> tuple:
        """Less for lines of fewer bytes: shards, small micro-batches, and several schedules.

        What offloads comes last, since it is slow: another line often makes it unnecessary.
        """
        recipe = line[-1]
        held = sum(self.residents(recipe).values())
        return held, recipe.offload is not None, -recipe.accumulation, len(line) == 1

    def variants(self, family: Recipe) -> list[Recipe]:
        """The family's recipes with its own kind of loss, fastest first."""
        return sorted(chain.from_iterable(self.lines(family)), key=self.seconds)

    def residents(self, recipe: Recipe) -> dict[str, int]:
        return resident_bytes(self.work, recipe, self.cards)

    def least_resident_variant(self, family: Recipe) -> Recipe:
        """The slowest of the family's variants with the fewest resident bytes. It moves nothing to
        the host.
        """
        variants = [variant for variant in self.variants(family) if variant.offload is None]
        return min(
            reversed(variants),
            key=lambda variant: sum(self.residents(variant).values()),
        )

    def find(self, methods: list[str]) -> None:
        """Try all that a plan tries. What changes training less comes first."""
        best: Option | None = None
        for method in methods:
            for family in self.families(method):
                best = self._search(family, best) or best
        if best is None:
            self._try_host_offload(methods)
            if found := self.fits():
                self._try_larger_micro_batches(found[0])

    def _search(self, family: Recipe, best: Option | None) -> Option | None:
        """The fastest recipe of ``family`` that fits, if it is faster than ``best``, which changes
        training less. A family that cannot be predicted is ``ruled_out``.
        """
        limit = best.seconds / self.equal_time if best else math.inf
        smallest = self.least_resident_variant(family)
        held = sum(self.residents(smallest).values())
        if held > self.card.nbytes:
            shown = smallest if self.cards > 1 else family
            why = self._describe_excess(smallest)
            self.ruled_out.append(RuledOut(shown, held, why, self.has_adapters))
            return None
        try:
            return self._fastest(family, limit)
        except CannotTrace as error:
            if not self._known and self._error_of_plain_step is not None:
                raise self._error_of_plain_step from error
            self.ruled_out.append(RuledOut(family, held, str(error), self.has_adapters))
            return None

    def _fastest(self, family: Recipe, limit: float) -> Option | None:
        """The family's fastest recipe that fits and takes less than ``limit`` seconds a token.

        Of two that are as fast, it is the one whose loss is whole.
        """
        losses = [True, False] if self.chunked else [False]
        lines: list[list[Recipe]] = []
        for chunked in losses:
            lines += self.lines(replace(family, chunked_loss=chunked))
        bar = limit, False  # seconds and chunks of the recipe to beat
        best: Option | None = None
        not_traced: CannotTrace | None = None
        # If the fastest of all fits, there is nothing to search.
        fastest = min((line[0] for line in lines), key=self._time_and_chunks)
        # What offloads comes last: it needs the fewest bytes, and is slow.
        lines.sort(key=lambda line: line[0].offload is not None)
        for line in [[fastest], *lines]:
            moves_nothing = best is not None and best.recipe.offload is None
            if moves_nothing and line[0].offload == INPUTS_OFFLOADED["offload"]:
                continue
            faster = [recipe for recipe in line if self._time_and_chunks(recipe) < bar]
            try:
                found = self._first_that_fits(faster)
            except ValueError:  # the model has no such part, or its layers cannot run one by one
                continue
            except CannotTrace as error:
                if not self._known and self._error_of_plain_step is not None:
                    raise  # no recipe can be predicted
                not_traced = error  # others of the family may be predicted
                continue
            if found and (found.seconds, found.recipe.chunked_loss) < bar:
                best, bar = found, (found.seconds, found.recipe.chunked_loss)
        if best is None and not_traced is not None:
            raise not_traced
        return best

    @cached_property
    def _error_of_plain_step(self) -> CannotTrace | None:
        """Why not even a step without any technique can be predicted; ``None`` if it can be."""
        attention = "fused" if self.work.fused else "eager"
        recipe = Recipe(precision=None, attention=attention)
        inputs = self.work.inputs(self.rows, self.seq_len, recipe)
        try:
            predict(self.work.source, recipe=recipe, target=self.target, **inputs)
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
            if not kept or least_before > self._available_for(known.recipe):
                return []
            if self._live_bytes(kept[-1]) >= needed:  # those before it need even more
                return []
        return kept

    def _bytes_of_inputs(self, recipe: Recipe) -> float:
        """The bytes of the inputs of all layers: more than a checkpoint adds."""
        if self.work.row is not None:
            return math.inf  # not counted where a row is more than tokens: nothing follows
        tokens = self.units * (self.rows // recipe.accumulation)
        return tokens * input_bytes_per_token(self.work, recipe)

    def _live_bytes(self, recipe: Recipe) -> int:
        return self.option(recipe).prediction.peak.total

    def _live_bytes_fit(self, recipe: Recipe) -> bool:
        return self.may_fit(recipe) and self._live_bytes(recipe) <= self._available_for(recipe)

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
        """The slowest recipe that is faster than ``best`` and differs from it only in how many
        layers run again; or, if there is none, in the micro-batch. It does not fit.
        """
        plain = replace(
            best.recipe, accumulation=1, checkpointing=None, every_n_layers=None, offload=None
        )
        faster: list[Recipe] = []
        for line in self.lines(plain):
            recipe = line[-1]
            if recipe.sharding == plain.sharding and len(line) > 1:
                faster += [one for one in line if self.seconds(one) < best.seconds]
        cut = best.recipe.accumulation
        faster.sort(key=lambda one: (one.accumulation != cut, -self.seconds(one)))
        for recipe in faster:
            with suppress(ValueError, CannotTrace):
                return self.option(recipe)
        return None

    def may_fit(self, recipe: Recipe) -> bool:
        """Whether ``recipe`` might fit, by its lower bounds.

        One percent is added for states that are counted roughly.
        """
        bounds = [self._lower_bound(recipe, known) for known in (None, *self._known.values())]
        return max(bounds) <= 1.01 * self._available_for(recipe)

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
            checkpointed = replace(recipe, checkpointing="per-layer", every_n_layers=None)
            for offloaded in _possible(checkpointed, offloads):
                if self.allows(offloaded):
                    self.option(offloaded)

    def _lower_bound(self, recipe: Recipe, known: Option | None = None) -> float:
        """A lower bound for the live bytes of ``recipe``.

        It comes from the sizes, or from a ``known`` option that saves as much or more memory; it is
        0 if ``known`` says nothing of ``recipe``.
        """
        if known is None:
            return self._bound_by_sizes(recipe)
        if not self._comparable(known.recipe, recipe):
            return 0
        return self._bound_by_known(recipe, known)

    def _bound_by_sizes(self, recipe: Recipe) -> float:
        held = self.residents(recipe)
        tokens = self.units * (self.rows // recipe.accumulation)
        # In one piece, gradients are made while activations are freed.
        gradients = held["gradients"] if recipe.accumulation > 1 else 0
        before = held["parameters"] + held["optimizer"] + gradients
        saved = tokens * saved_bytes_per_token(self.work, recipe)
        saved_by_forward = tokens * saved_by_forward_per_token(self.work, recipe)
        end_of_forward = before + saved_by_forward + copied_bytes(self.work, recipe)
        in_forward_or_backward = max(before + saved, end_of_forward)
        after_backward = sum(held.values())
        return max(in_forward_or_backward, after_backward)

    def _bound_by_known(self, recipe: Recipe, known: Option) -> float:
        """A lower bound from the timeline of ``known``, to which ``recipe`` is comparable.

        At each moment, bytes other than parameters, gradients and states are assumed to shrink with
        the micro-batch. For a larger micro-batch they are assumed to stay, and where a forward
        ends, there is what it saves for the additional rows. If the optimizers differ, the
        optimizer's step is left out.
        """
        rows = known.prediction.timeline.rows  # one for each moment
        other_states = (known.recipe.optimizer, known.recipe.sharding) != (
            recipe.optimizer,
            recipe.sharding,
        )
        if other_states:
            rows = rows[rows[:, PHASE] != OPTIMIZER_STEP]
        trains_head = not self.work.adapts(recipe)
        if trains_head and known.recipe.chunked_loss and not recipe.chunked_loss:
            # A chunk's products for the head's gradient may be more than all logits are.
            rows = rows[rows[:, PHASE] != FORWARD]
        by = rows[:, BY]
        states, gradients = by[:, OPTIMIZER], by[:, GRADIENTS]
        if other_states:
            # Those of the known one say nothing: they may be far above their count by sizes, since
            # 8-bit AdamW keeps small tensors' states in float32.
            states = self.residents(recipe)["optimizer"]
        if recipe.accumulation > 1:
            # From the second micro-batch on, all gradients exist from the beginning, except those
            # that are about to be sharded.
            gradients = min(gradients.max(), self.residents(recipe)["gradients"])
        elif known.recipe.accumulation > 1:
            gradients = 0  # in one piece, there may be none before backward makes them
        smaller = min(1, known.recipe.accumulation / recipe.accumulation)
        scaled = smaller * by[:, ACTIVATIONS:].sum(axis=1)  # activations, and all that come after
        needed = by[:, PARAMETERS] + states + gradients + scaled
        in_forward = np.flatnonzero(rows[:, PHASE] == FORWARD)
        more_rows = self.rows // recipe.accumulation - known.micro_batch
        if len(in_forward) and more_rows > 0:
            # A forward ends where most is saved.
            end = in_forward[by[in_forward, ACTIVATIONS].argmax()]
            saved = saved_by_forward_per_token(self.work, recipe)
            needed[end] += more_rows * self.units * saved
        return needed.max()

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
        if kinds[0] != kinds[1]:
            return False
        if recipe.chunked_loss and not known.chunked_loss:
            return False  # the known one has logits that the other does not
        return _keeps_no_more(known, recipe)

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


def _has_part(layer: nn.Module, part: str) -> bool:
    try:
        return bool(find_parts(layer, part))
    except ValueError:  # there is none
        return False


def _keeps_no_more(known: Recipe, recipe: Recipe) -> bool:
    """Whether ``known`` runs again all that ``recipe`` does, and holds nothing else for it."""
    way_of_known = (known.checkpointing, known.every_n_layers)
    way_of_recipe = (recipe.checkpointing, recipe.every_n_layers)
    if way_of_known == way_of_recipe:
        return True
    if recipe.checkpointing in SELECTIVE:
        return False  # a part that runs again may take less than a whole layer that does
    # k of "first-k", or None for another way
    k_of_known = first_layers(known.checkpointing)
    k_of_recipe = first_layers(recipe.checkpointing)
    if known.checkpointing == "per-layer":
        # transformers' checkpoints of all layers hold a little more than ours of the first ones
        return k_of_recipe is None
    if k_of_known is None:
        return False
    if k_of_recipe is not None:
        return k_of_recipe <= k_of_known
    runs_nothing_again = way_of_recipe == (None, None)
    return runs_nothing_again


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
