"""The search for recipes that fit: short, because needs only ever shrink along three chains.

They are a smaller micro-batch, a loss in chunks, more layers run twice. The whole batch in one piece stands outside the first
chain: its gradients come into being while its activations go, and those of an accumulated batch lie beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ..prediction.predict import Prediction, predict
from ..prediction.question import CannotTrace
from ..training.recipe import Recipe
from ..units import format_bytes
from .cards import Card
from .cost import LORA_RANK, ROUGHLY, Work, beyond, resident_bytes, run_again, seconds_per_token
from .options import EQUAL_TIME, OPTIMIZERS, Option, RuledOut, ordered_options, worthwhile


class Search:
    """Everything that one ``plan`` has been asked, and what it has found out so far."""

    def __init__(self, work: Work, card: Card, seq_len: int | None, global_batch: int, target: str):
        self.work, self.card, self.seq_len, self.global_batch, self.target = (
            work,
            card,
            seq_len,
            global_batch,
            target,
        )
        self.micro_batches = [m for m in range(1, global_batch + 1) if global_batch % m == 0]
        self.predictions = 0
        self._known: dict[tuple[Recipe, int], Option] = {}
        self._replayed: set[tuple[Recipe, int]] = set()

    def predict(self, recipe: Recipe, micro_batch: int) -> Prediction:
        """Of one optimizer step."""
        self.predictions += 1
        return predict(
            self.work.config,
            batch_size=micro_batch * recipe.accumulation,
            seq_len=self.seq_len,
            recipe=recipe,
            target=self.target,
        )

    def option(self, recipe: Recipe, method: str, micro_batch: int) -> Option:
        """``recipe`` with the global batch cut into ``micro_batch`` rows, predicted."""
        recipe = replace(recipe, accumulation=self.global_batch // micro_batch)
        if (recipe, micro_batch) not in self._known:
            prediction = self.predict(recipe, micro_batch)
            parts = beyond(prediction, self.card.capability, replay=False)
            seconds = seconds_per_token(self.work, recipe, self.card, micro_batch, self.tokens)
            self._known[recipe, micro_batch] = Option(
                recipe=recipe,
                method=method,
                micro_batch=micro_batch,
                seconds=seconds,
                card_bytes=self.card.nbytes,
                prediction=prediction,
                parts=parts,
                needs=prediction.peak.total + sum(parts.values()),
            )
        return self._known[recipe, micro_batch]

    def confirmed(self, recipe: Recipe, method: str, micro_batch: int) -> Option:
        """The same, with the allocator replayed where a rough figure leaves doubt."""
        option = self.option(recipe, method, micro_batch)
        key = option.recipe, micro_batch
        slack = option.parts.get(ROUGHLY, 0)
        if self.target == "cpu" or key in self._replayed or option.needs - slack > self.card.nbytes:
            return option
        self._replayed.add(key)
        parts = beyond(option.prediction, self.card.capability) | option.parts
        parts.pop(ROUGHLY)
        needs = option.prediction.peak.total + sum(parts.values())
        self._known[key] = replace(option, parts=parts, needs=needs)
        return self._known[key]

    @property
    def tokens(self) -> int:
        """Tokens in a row: for images, patches and the class token."""
        return self.work.patches or self.seq_len

    def families(self, method: str) -> Iterator[Recipe]:
        """Precisions and optimizers, those first that change training least. Each is then tried with less and less memory."""
        attention = "fused" if self.work.fused else "eager"
        base = Recipe(attention=attention, optimizer="adamw-fused")
        if method == "qlora":
            yield replace(base, precision="bf16", lora_rank=LORA_RANK, quantized_base=True)
            return
        mixed = "autocast-bf16" if self.card.bf16 else "autocast-fp16"
        precisions = [mixed, "bf16"] if self.target == "cuda" else ["float32", mixed, "bf16"]
        if method == "lora":
            for precision in precisions:
                yield replace(base, precision=precision, lora_rank=LORA_RANK)
            return
        for in_backward in (False, True):
            for precision in precisions:
                if in_backward and precision == "autocast-fp16":
                    continue
                for optimizer in OPTIMIZERS:
                    yield replace(base, precision=precision, optimizer=optimizer, in_backward=in_backward)

    def ladder(self, family: Recipe) -> list[Recipe]:
        """The family's recipes from the fastest to the one that needs least, less memory at each step down."""
        every = _every_n_layers_known()
        rungs = []
        for how in ({}, {"every_n_layers": 2} if every else None, {"checkpointing": "per-layer"}):
            if how is None:
                continue
            rungs.append(replace(family, **how))
            if self.work.chunked:
                rungs.append(replace(family, **how, chunked_loss=True))
        return rungs

    def smallest(self, recipe: Recipe) -> int:
        """The smallest micro-batch that the recipe can be run with."""
        return self.global_batch if recipe.in_backward else 1

    def rule_out(self, family: Recipe, method: str) -> RuledOut | None:
        """Whether weights, gradients and states alone are too many bytes."""
        resident = resident_bytes(self.work, family)
        needs = sum(resident.values())
        if needs <= self.card.nbytes:
            return None
        names = {"parameters": "weights", "gradients": "gradients", "optimizer": "optimizer states"}
        held, sums = [], 0
        for category, nbytes in resident.items():
            if nbytes and sums <= self.card.nbytes:
                held.append(f"{names[category]} {format_bytes(nbytes)}")
                sums += nbytes
        alone = " and ".join(held) + " alone" + (f" are {format_bytes(sums)}" if len(held) > 1 else "")
        return RuledOut(family, method, needs, f"{alone}, and the card has {format_bytes(self.card.nbytes)}")

    def first_fit(self, rungs: list[Recipe], method: str) -> int | None:
        """Index of the first rung that fits with the smallest micro-batch, or the whole batch; ``None`` where none does.

        The search starts where a rough guess puts it, and goes from there to where fitting ends or begins.
        """

        def fits(i: int, sure: bool = False) -> bool:
            sizes = {self.smallest(rungs[i]), self.global_batch}
            return any(
                self._fits(rungs[i], method, m) and (not sure or self.option(rungs[i], method, m).fits)
                for m in sorted(sizes)
            )

        if not rungs:
            return None
        guesses = [self._guess(rung) <= self.card.nbytes for rung in rungs]
        i = guesses.index(True) if True in guesses else len(rungs) - 1
        if fits(i):
            while i > 0 and fits(i - 1):
                i -= 1
        # What was left to another recipe's prediction is made sure of.
        while i < len(rungs) and not fits(i, sure=True):
            i += 1
        return i if i < len(rungs) else None

    def _guess(self, recipe: Recipe) -> float:
        """Bytes of the smallest micro-batch, roughly: what linear layers take and return, and the logits thrice."""
        work, width = self.work, 4 if recipe.precision == "float32" else 2
        tokens = self.tokens * self.smallest(recipe)
        kept = max(1 - run_again(work, recipe), 1 / max(work.layers, 1))
        layers = width * kept * work.adapters / LORA_RANK
        logits = 0 if recipe.chunked_loss else (width + 8) * work.vocabulary
        return sum(resident_bytes(work, recipe).values()) + tokens * (layers + logits)

    def largest(self, recipe: Recipe, method: str) -> Option | None:
        """The recipe with the largest micro-batch that fits; ``None`` where none does."""
        whole = self.global_batch
        if self._fits(recipe, method, whole) and self.confirmed(recipe, method, whole).fits:
            return self.option(recipe, method, whole)
        sizes = [m for m in self.micro_batches if self.smallest(recipe) <= m < whole]
        low, high = -1, len(sizes)  # sizes[low] fits, sizes[high] does not
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(recipe, method, sizes[middle]):
                low = middle
            else:
                high = middle
        # So far it went by rough figures. Now the answer is made sure of.
        while (
            low + 1 < len(sizes)
            and self._fits(recipe, method, sizes[low + 1])
            and self.confirmed(recipe, method, sizes[low + 1]).fits
        ):
            low += 1
        while low >= 0 and not self.confirmed(recipe, method, sizes[low]).fits:
            low -= 1
        return self.option(recipe, method, sizes[low]) if low >= 0 else None

    def _fits(self, recipe: Recipe, method: str, micro_batch: int) -> bool:
        """Whether it fits: predicted, unless a prediction of one that is much alike leaves no doubt."""
        known = [
            option
            for option in self._known.values()
            if replace(option.recipe, optimizer=recipe.optimizer, accumulation=1) == recipe
            and (option.recipe.optimizer == recipe.optimizer or not recipe.in_backward)
        ]
        if known and all(
            o.micro_batch != micro_batch or o.recipe.optimizer != recipe.optimizer for o in known
        ):
            nearest = min(known, key=lambda o: abs(math.log(o.micro_batch / micro_batch)))
            line = self._on_a_line(known, recipe, micro_batch)
            about = self._about(nearest, recipe, micro_batch) if line is None else line
            doubt = 1.05 if nearest.micro_batch == micro_batch or line is not None else 1.2
            least = micro_batch == self.global_batch and nearest.recipe.accumulation > 1
            if about > doubt * self.card.nbytes or (about < 0.97 * self.card.nbytes and not least):
                return about < self.card.nbytes
        return self.option(recipe, method, micro_batch).fits

    def _on_a_line(self, known: list[Option], recipe: Recipe, micro_batch: int) -> float | None:
        """What ``recipe`` needs, if that grows by as much a row as between two of ``known``; ``None`` without two such."""
        same = [o for o in known if o.recipe.optimizer == recipe.optimizer and o.recipe.accumulation > 1]
        if len(same) < 2 or micro_batch == self.global_batch:
            return None
        a, b = sorted(same, key=lambda o: abs(math.log(o.micro_batch / micro_batch)))[:2]
        return b.needs + (a.needs - b.needs) * (micro_batch - b.micro_batch) / (a.micro_batch - b.micro_batch)

    def _about(self, known: Option, recipe: Recipe, micro_batch: int) -> float:
        """What ``recipe`` needs, from what one with another optimizer or micro-batch does: rather too much than too little, but for
        the whole batch in one piece, from one that was accumulated: that is the least that it needs.

        Forward and backward are the same for all optimizers that step after them, but for the states that lie beside them.
        At each moment, what is neither parameter, gradient nor state is taken to grow with the micro-batch.
        """
        rows = known.prediction.timeline.rows
        states = [resident_bytes(self.work, r)["optimizer"] for r in (known.recipe, recipe)]
        fixed = rows[:, 3] + rows[:, 5] + states[1] - states[0]
        gradients, grows = rows[:, 4], rows[:, 6:].sum(axis=1)
        if known.recipe.accumulation == 1 and micro_batch < self.global_batch:
            gradients = gradients.max()  # from the second micro-batch on they are all there
        elif known.recipe.accumulation > 1 and micro_batch == self.global_batch:
            gradients = 0  # in one piece they come while activations go
        return (fixed + gradients + grows * (micro_batch / known.micro_batch)).max() + sum(
            known.parts.values()
        )

    def run(self, method: str) -> list[RuledOut]:
        """Try the families of ``method``; what was predicted is in ``options``. Returns what was ruled out unpredicted."""
        ruled: list[RuledOut] = []
        best: Option | None = None
        for family in self.families(method):
            if family.in_backward and best is not None and not best.recipe.in_backward:
                continue
            out = self.rule_out(family, method)
            if out is not None:
                ruled.append(out)
                continue
            # A family that changes training more than the one before is worth a look only where it would be faster.
            rungs = [
                r for r in self.ladder(family) if best is None or self._ideal(r) * EQUAL_TIME < best.seconds
            ]
            try:
                index = self.first_fit(rungs, method)
            except CannotTrace as error:
                ruled.append(
                    RuledOut(family, method, sum(resident_bytes(self.work, family).values()), str(error))
                )
                continue
            found: Option | None = None
            for rung in rungs[len(rungs) if index is None else index :]:
                if found is None or self._ideal(rung) * EQUAL_TIME < found.seconds:
                    options = [o for o in (found, self.largest(rung, method)) if o is not None]
                    found = min(options, key=lambda o: o.seconds, default=None)
            if found is not None and (best is None or found.seconds * EQUAL_TIME < best.seconds):
                best = found
        return ruled

    def lightest(self, methods: list[str]) -> list[Option]:
        """What is left where nothing fits: the fewest residents, with an optimizer after backward and, where there is one, in it."""
        found: dict[bool, tuple[int, Recipe, str]] = {}
        for method in methods:
            for family in self.families(method):
                needs = sum(resident_bytes(self.work, family).values())
                if needs < found.get(family.in_backward, (math.inf,))[0]:
                    found[family.in_backward] = needs, self.ladder(family)[-1], method
        return [self.option(rung, method, self.smallest(rung)) for _, rung, method in found.values()]

    def _ideal(self, recipe: Recipe) -> float:
        """Its time if the whole batch fitted at once."""
        return seconds_per_token(self.work, recipe, self.card, self.global_batch, self.tokens)

    def ordered(self) -> list[Option]:
        """What fits and is worth having, best first; each is made sure of, and that a larger micro-batch of the best does not
        fit."""
        while True:
            found = ordered_options(worthwhile(self.options(fits=True)))
            if not found:
                return found
            best = found[0]
            made_sure_of = [self.confirmed(o.recipe, o.method, o.micro_batch) for o in found]
            confirmed = all(a is b for a, b in zip(found, made_sure_of, strict=True))
            larger = [m for m in self.micro_batches if m > best.micro_batch][:1]
            if confirmed and not any(self.confirmed(best.recipe, best.method, m).fits for m in larger):
                return found

    def options(self, *, fits: bool) -> list[Option]:
        """What was predicted and fits (each recipe with its largest known micro-batch), or does not (with its smallest)."""
        found: dict[Recipe, Option] = {}
        for option in self._known.values():
            if option.fits == fits:
                base = replace(option.recipe, accumulation=1)
                pick = max if fits else min
                found[base] = pick(found.get(base, option), option, key=lambda o: o.micro_batch)
        return list(found.values())


def _every_n_layers_known() -> bool:
    from transformers import PreTrainedModel

    return hasattr(PreTrainedModel, "activation_checkpointing_enable")
