"""What a plan may try: precisions and optimizers, and ways to keep fewer bytes.

Recipes come in *families* and *lines*. A family is a recipe for one card without accumulation,
checkpoints and a chunked loss. The recipes of a line differ only in how many layers run again in
backward: each is slower than the one before it, and needs fewer bytes.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain

from torch import nn
from transformers import PreTrainedModel

from ..compat.transformers_models import checkpointing_name
from ..hf_names import CHECKPOINTING_METHODS
from ..names import PRECISIONS, SELECTIVE, SHARDING
from ..optimizers import OPTIMIZERS as ROWS
from ..techniques.selective import find_parts
from ..training.recipe import Recipe
from .options import OPTIMIZERS
from .question import Question
from .work import LORA_RANK

# One layer in two is checkpointed. Older transformers cannot do that.
_HALF = []
if checkpointing_name(PreTrainedModel) == CHECKPOINTING_METHODS[0]:
    _HALF = [{"every_n_layers": 2}]
PER_LAYER = {"checkpointing": "per-layer"}
# Offload activations, for a card.
OFFLOADED = {"offload": "activations"}
# Or offload the inputs of layers that run again.
INPUTS_OFFLOADED = {"offload": "boundaries"}


class Candidates(Question):
    """The recipes that a plan may try for its question."""

    def allows(self, recipe: Recipe) -> bool:
        """Whether ``recipe`` may be tried."""
        return True

    @cached_property
    def losses(self) -> list[bool]:
        """Whether the loss may be in chunks. Chunks bypass the code that averages gradients over
        the cards.
        """
        if self.cards == 1 and self.work.chunked:
            return [True, False]
        return [False]

    @property
    def attention(self) -> str:
        return "fused" if self.work.sized.fused else "eager"

    @cached_property
    def _layers(self) -> list[nn.Module]:
        """The layers that can run again one by one."""
        return self.work.blocks if self.work.has_layers else []

    @cached_property
    def schedules(self) -> list[dict]:
        """How many layers run again: none, the first k, all. Each needs less memory than the one
        before.
        """
        if not self._layers:
            return [{}]
        firsts = [{"checkpointing": f"first-{k}"} for k in range(1, self.work.layers)]
        return [{}, *firsts, PER_LAYER]

    @cached_property
    def alternatives(self) -> list[dict]:
        """What keeps fewer activations in another way than by layers that run again."""
        found: list[dict] = []
        if self._layers:
            found = [*self._parts(), *_HALF]
        if self.target == "cuda":
            found.append(OFFLOADED)
        return found

    def _parts(self) -> list[dict]:
        """The parts of each layer that can run again: those that all layers have."""
        found = []
        for part, spec in SELECTIVE.items():
            # What keeps products is recomputed in the whole layer, which is there in any case.
            if spec.keeps_products or all(_has_part(layer, part) for layer in self._layers):
                found.append({"checkpointing": part})
        return found

    def families(self, method: str) -> Iterator[Recipe]:
        """Precisions and optimizers, starting with those that change training least.

        Steps in backward come last.
        """
        base = Recipe(attention=self.attention, optimizer=OPTIMIZERS[0], layers=self.work.named)
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
            # Autocast makes all but the matrices in 4 bits wider: only where bf16 is slow.
            precisions = ["bf16"] if self.card.bf16 else [mixed, "bf16"]
        elif frozen != trained:
            # the adapters have a dtype of their own: keep both as they are
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
        lines: list[list[Recipe]] = []
        for same in self._cuts(family):
            lines.append(possible(family, [same | how for how in self.schedules]))
            if self.target == "cuda":
                offloaded = [same | how | INPUTS_OFFLOADED for how in self.schedules]
                lines.append(possible(family, offloaded))
            lines += [[one] for one in possible(family, [same | a for a in self.alternatives])]
        allowed = [[recipe for recipe in line if self.allows(recipe)] for line in lines]
        return sorted(filter(None, allowed), key=self._rank_of_line)

    def _cuts(self, family: Recipe) -> Iterator[dict]:
        """How the cards share the model, and into how many pieces each cuts its rows."""
        pieces = [n for n in range(self.rows, 0, -1) if self.rows % n == 0]
        if family.in_backward or self.work.uncut:
            pieces = [1]
        adapts = self.work.adapts(family)
        for sharding in self._shardings(adapts):
            gathers_weights = sharding is not None and SHARDING[sharding].weights
            precision = _precision(family, gathers_weights and not adapts)
            for n in pieces:
                yield {"sharding": sharding, "precision": precision, "accumulation": n}

    def _shardings(self, adapts: bool) -> list[str | None]:
        """The ways to share the model. ``adapts``: only adapters are trained."""
        if self.cards == 1:
            return [None]
        found: list[str | None] = []
        for sharding, spec in SHARDING.items():
            if sharding == "zero1" and self.machines > 1:
                continue  # it has no copy in each machine
            if sharding in ("zero1", "zero2") and adapts:
                continue  # with adapters, these shard little
            if spec.weights and not self.work.has_layers:
                continue  # weights are gathered layer by layer
            found.append(sharding)
        return found

    def _rank_of_line(self, line: list[Recipe]) -> tuple:
        """Less for lines of fewer bytes: shards, small micro-batches, and several schedules."""
        return self.resident_sum(line[-1]), -line[-1].accumulation, len(line) == 1

    def variants(self, family: Recipe) -> list[Recipe]:
        """The family's recipes with its own kind of loss, fastest first."""
        return sorted(chain.from_iterable(self.lines(family)), key=self.seconds)

    def least_resident_variant(self, family: Recipe) -> Recipe:
        """The slowest of the family's variants with the fewest resident bytes. It moves nothing to
        the host.
        """
        by_bytes = defaultdict[float, list[Recipe]](list)
        for recipe in chain.from_iterable(self.lines(family)):
            if recipe.offload is None:
                by_bytes[self.resident_sum(recipe)].append(recipe)
        lightest = by_bytes[min(by_bytes)]
        return max(reversed(lightest), key=self.seconds)

    def least_resident_recipes(self, methods: list[str]) -> list[Recipe]:
        """The recipes with the fewest resident bytes.

        One steps after backward; another one, if there is one, steps in backward.
        """
        least: dict[bool, Recipe] = {}
        for family in chain.from_iterable(map(self.families, methods)):
            recipe = self.least_resident_variant(replace(family, chunked_loss=self.losses[0]))
            best = least.setdefault(family.in_backward, recipe)
            if self.resident_sum(recipe) < self.resident_sum(best):
                least[family.in_backward] = recipe
        return list(least.values())


def _has_part(layer: nn.Module, part: str) -> bool:
    try:
        return bool(find_parts(layer, part))
    except ValueError:  # there is none
        return False


def possible(recipe: Recipe, changes: Iterable[dict]) -> list[Recipe]:
    """``recipe`` with each of ``changes`` that is possible for it."""
    found = []
    for change in changes:
        with suppress(ValueError):
            found.append(replace(recipe, **change))
    return found


def _precision(family: Recipe, gathers_weights: bool) -> str | None:
    """Mixed precision by autocast; if weights are gathered, by gathering them in bf16, which sends
    and holds half the bytes.
    """
    if family.precision not in ("autocast-bf16", "float32-master"):
        return family.precision
    if gathers_weights and ROWS[family.optimizer].master is not None:
        return "float32-master"
    return "autocast-bf16"
