"""The question of one ``plan``: a model's work, the card, and the batch that the cards share."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..names import SHARDING
from ..training.recipe import Recipe
from .cards import NETWORK, Card
from .cost import Cost, cost_per_token
from .held import NCCL, overhead_bytes, resident_bytes
from .work import Work


@dataclass(eq=False)
class Question:
    """What a plan is asked, and what follows from it for any recipe. ``rows`` are those of a card:
    a recipe's ``accumulation`` says how they are cut.
    """

    work: Work
    card: Card
    seq_len: int | None
    global_batch: int
    target: str
    cards: int = 1
    margin: float = 0.0
    machines: int = 1
    network: float = NETWORK

    @property
    def has_adapters(self) -> bool:
        return self.work.has_adapters

    @cached_property
    def rows(self) -> int:
        return self.global_batch // (self.cards * self.machines)

    @property
    def ranks(self) -> int | None:
        """The processes of a machine, as ``predict`` takes them."""
        return self.cards if self.cards > 1 else None

    @cached_property
    def units(self) -> int:
        """The tokens of a row, if costs are those of tokens."""
        return self.work.units_of_row(self.seq_len)

    @cached_property
    def available(self) -> float:
        """The bytes for live tensors and the allocator, if all processes are one group."""
        overhead = {}
        if self.target == "cuda":
            overhead = overhead_bytes(0, self.card.capability, 0, self.cards)
        return self.card.nbytes / (1 + self.margin) - sum(overhead.values())

    def available_for(self, recipe: Recipe) -> float:
        """The bytes that ``recipe`` has for live tensors and the allocator."""
        if self.target == "cuda" and self.is_hybrid(recipe):
            return self.available - NCCL
        return self.available

    def is_hybrid(self, recipe: Recipe) -> bool:
        """Whether the cards of each of several machines share a copy of the model."""
        return self.machines > 1 and SHARDING[recipe.sharding].weights

    def micro_batch(self, recipe: Recipe) -> int:
        """The rows of one forward on a card."""
        return self.rows // recipe.accumulation

    def inputs(self, recipe: Recipe) -> dict[str, Any]:
        """The arguments of ``predict`` for the rows of a card."""
        return self.work.inputs(self.rows, self.seq_len, recipe)

    def residents(self, recipe: Recipe) -> dict[str, int]:
        return resident_bytes(self.work, recipe, self.cards)

    def resident_sum(self, recipe: Recipe) -> int:
        """The bytes of weights, gradients and states together."""
        return sum(self.residents(recipe).values())

    def cost(self, recipe: Recipe, offload_bytes: float | None = None) -> Cost:
        """The estimated time of a token, with the lower bound of what is offloaded for ``None``."""
        return cost_per_token(
            self.work,
            recipe,
            self.card,
            self.micro_batch(recipe),
            self.units,
            offload_bytes=offload_bytes,
            cards=self.cards,
            machines=self.machines,
            network=self.network,
        )

    def seconds(self, recipe: Recipe, offload_bytes: float | None = None) -> float:
        return self.cost(recipe, offload_bytes).seconds
