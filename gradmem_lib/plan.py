"""The recipe that fits a card: which ways of training a model on so many bytes there are, and what each costs in time.

Memory is predicted (``predict`` runs the step without memory behind its tensors); time is *estimated*, from the operations
that a step must do and the bytes that it must move. The search is short because needs only ever shrink along three chains:
a smaller micro-batch, a loss in chunks, more layers run twice.
"""

from __future__ import annotations

import copy
import html
import math
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from . import cuda
from .accounting import SHAPES, Shape
from .predict import Prediction, predict
from .recipe import ADAFACTOR_EPS, RELATIVE_RATE, Recipe, model_class, predicts_next_token
from .units import GiB, format_bytes, parse_bytes

METHODS = {
    "full": "every weight is trained",
    "lora": "low-rank additions are trained on a frozen model",
    "qlora": "the same, and the frozen model is kept in 4 bits",
}
# By how far they are from plain AdamW. transformers' own Adafactor needs more than torch's, and no less time.
OPTIMIZERS = ("adamw-fused", "adamw-8bit", "adafactor-torch")
LORA_RANK = 16
EQUAL_TIME = 1.10  # what an estimate of time cannot tell apart
ROUGHLY, ALLOCATOR_ROUGHLY = "allocator, about", 0.05
OPERATIONS_KEPT = (
    0.5  # of a data sheet's operations a second, what training steps reach on most cards, roughly
)
_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Card:
    """``nbytes``: what the driver lets a program have. ``half`` and ``single``: operations a second in 16 and 32 bits;
    ``bandwidth``: bytes a second. ``capability``: CUDA's compute capability."""

    name: str
    nbytes: int
    half: float
    single: float
    bandwidth: float
    capability: tuple[int, int] = (8, 9)

    @property
    def bf16(self) -> bool:
        """Whether it multiplies bf16 matrices at the rate ``half``; older cards do only float16 so."""
        return self.capability >= (8, 0)


def _card(name: str, gib: float, half: float, single: float, bandwidth: float, capability: float) -> Card:
    major, minor = divmod(round(10 * capability), 10)
    return Card(name, round(gib * GiB), half * _TERA, single * _TERA, bandwidth * _GIGA, (major, minor))


# Memory: what PyTorch's out-of-memory message calls the total capacity of such a card on Linux, to two digits. The nominal
# figure is in GiB too, and the driver keeps 1 to 4 % of it. Rates: the makers' data sheets, dense matrices, float32 sums.
CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        _card("RTX 2060 6GB", 5.79, 26, 6.5, 336, 7.5),
        _card("RTX 3070 8GB", 7.76, 41, 20, 448, 8.6),
        _card("RTX 3080 10GB", 9.78, 60, 30, 760, 8.6),
        _card("RTX 3060 12GB", 11.75, 25, 13, 360, 8.6),
        _card("T4 16GB", 14.75, 65, 8.1, 320, 7.5),
        _card("V100 16GB", 15.75, 125, 15.7, 900, 7.0),
        _card("RTX 4060 Ti 16GB", 15.60, 44, 22, 288, 8.9),
        _card("RTX 3090 24GB", 23.69, 71, 36, 936, 8.6),
        _card("RTX 4090 24GB", 23.64, 165, 83, 1008, 8.9),
        _card("RTX 5090 32GB", 31.36, 210, 105, 1792, 12.0),
        _card("A100 40GB", 39.39, 312, 19.5, 1555, 8.0),
        _card("A100 80GB", 79.15, 312, 19.5, 2039, 8.0),
        _card("H100 80GB", 79.10, 989, 67, 3350, 9.0),
        _card("H200 141GB", 139.80, 989, 67, 4800, 9.0),
    )
}
_UNNAMED = CARDS["RTX 4090 24GB"]  # whose rates a card has of which only the bytes are known


def find_card(card: Card | str | int) -> Card:
    """The card called so (upper or lower case, "4090" for "RTX 4090 24GB"), or one of so many bytes: ``"24 GiB"`` or an int.

    ``ValueError`` for a name that no card or more than one has.
    """
    if isinstance(card, Card):
        return card
    name = _plain(card) if isinstance(card, str) else ""
    try:
        nbytes = parse_bytes(card)
    except ValueError:
        nbytes = None
    if name and (nbytes is None or name.isdigit()):
        names = [known for known in CARDS if name in _plain(known)]
        exact = [known for known in names if name in (_plain(known), _plain(known.rpartition(" ")[0]))]
        if len(names) == 1 or len(exact) == 1:
            return CARDS[(exact or names)[0]]
        if names and nbytes is None:
            raise ValueError(f"card={card!r} may be {' or '.join(map(repr, names))}: say which")
    if nbytes is None:
        raise ValueError(
            f"no card is known as {card!r}: give its memory, such as card='24 GiB', or one of {', '.join(CARDS)}"
        )
    return replace(_UNNAMED, name=format_bytes(nbytes), nbytes=nbytes)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla|card", "", name.lower())


# --- models by name --------------------------------------------------------------------------------------

# Shapes of well-known models: the id that they have on the hub, and the positions that they were made for. Their sizes are
# those of ``accounting.SHAPES`` where it has them.
_MODELS = {
    "tiny Llama": ("", 2048),
    "SmolLM2-135M": ("HuggingFaceTB/SmolLM2-135M-Instruct", 8192),
    "GPT-2": ("openai-community/gpt2", 1024),
    "GPT-2 XL": ("openai-community/gpt2-xl", 1024),
    "BERT-large": ("google-bert/bert-large-uncased", 512),
    "Llama-3.2-1B": ("meta-llama/Llama-3.2-1B", 131072),
    "Llama-2-7B": ("meta-llama/Llama-2-7b-hf", 4096),
    "Llama-3.1-8B": ("meta-llama/Llama-3.1-8B", 131072),
    "Llama-2-13B": ("meta-llama/Llama-2-13b-hf", 4096),
    "Llama-2-70B": ("meta-llama/Llama-2-70b-hf", 4096),
}
_MORE_SHAPES = {"Llama-3.1-8B": Shape("Llama-3.1-8B", 128256, 4096, 32, 32, 8, 14336)}


def known_model(name: str) -> tuple[str, Any, str] | None:
    """(name, config, hub id) of a well-known model, in whatever way its name is written; ``None`` for others.

    The config has the model's sizes and needs no network. Names: those of ``_MODELS``.
    """
    for known, (hub_id, positions) in _MODELS.items():
        if re.sub(r"[^a-z0-9]", "", name.lower()) in (
            re.sub(r"[^a-z0-9]", "", n.lower()) for n in (known, hub_id) if n
        ):
            return known, _shape_config(known, positions), hub_id
    return None


def _shape_config(name: str, positions: int):
    if name == "BERT-large":
        from transformers import BertConfig

        return BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
        )
    # The hub's GPT-2s are trained with dropout, and its masks take memory.
    return (_MORE_SHAPES.get(name) or SHAPES[name]).config(positions=positions, dropout=0.1)


# --- the model, as far as counting goes -------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Work:
    """A model's sizes, counted on its skeleton. ``matrices``: entries of linear layers but the ``head``'s; ``biggest``: entries
    of the largest parameter; ``scores``: heads x head size, summed over layers, of which attention makes its products."""

    config: Any
    parameters: int
    sizes: tuple[tuple[int, ...], ...]
    matrices: int
    head: int
    adapters: int
    layers: int
    scores: int
    causal: bool
    chunked: bool
    vocabulary: int
    fused: bool
    images: bool

    @property
    def biggest(self) -> int:
        return max(map(math.prod, self.sizes))


def count(config) -> Work:
    """Count the parameters and matrices of ``config``'s model, without memory for it."""
    from .recipe import _linear_sizes

    with torch.device("meta"):
        model = model_class(config)(copy.deepcopy(config))
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = [_linear_sizes(m) for m in model.modules() if m is not head and _linear_sizes(m)]
    text = config.get_text_config()
    hidden, layers = getattr(text, "hidden_size", 0), getattr(text, "num_hidden_layers", 0)
    heads = getattr(text, "num_attention_heads", 1)
    plain_head = (
        head is not None
        and predicts_next_token(model)
        and getattr(head, "bias", None) is None
        and not getattr(text, "final_logit_softcapping", None)
    )
    return Work(
        config=config,
        parameters=sum(p.numel() for p in model.parameters()),
        sizes=tuple(tuple(p.shape) for p in model.parameters()),
        matrices=sum(i * o for i, o in linear),
        head=math.prod(head.weight.shape) if isinstance(head, nn.Linear) else 0,
        adapters=sum(LORA_RANK * (i + o) for i, o in linear),
        layers=layers,
        scores=layers * heads * (getattr(text, "head_dim", None) or hidden // heads),
        causal=predicts_next_token(model),
        chunked=plain_head,
        vocabulary=head.weight.shape[0] if isinstance(head, nn.Linear) else 0,
        fused=bool(getattr(model, "_supports_sdpa", True)),
        images=getattr(model, "main_input_name", "") == "pixel_values",
    )


def resident_bytes(work: Work, recipe: Recipe) -> dict[str, int]:
    """Bytes that no cut of the batch makes smaller: weights, gradients (all alive at the end of a backward, unless the
    optimizer steps in it), optimizer states."""
    width = recipe.weight_dtype.itemsize
    weights = width * work.parameters
    trained, sizes = work.parameters, work.sizes
    if recipe.lora_rank:
        trained, sizes = work.adapters, ()
        weights += width * work.adapters
        if getattr(recipe, "quantized_base", False):
            weights += round((0.5 + 1 / 64) * work.matrices) - width * work.matrices
    states = {"adamw-8bit": 2 + 8 / 256, "sgd": 0}.get(recipe.optimizer, 2 * width) * trained
    if recipe.optimizer.startswith("adafactor"):
        own = 4 if recipe.optimizer == "adafactor" else width
        states = sum(own * (sum(s[-2:]) * math.prod(s[:-2]) if len(s) > 1 else math.prod(s)) for s in sizes)
    return {
        "parameters": weights,
        "gradients": 0 if recipe.in_backward else width * trained,
        "optimizer": round(states),
    }


def seconds_per_token(work: Work, recipe: Recipe, card: Card, micro_batch: int, seq_len: int) -> float:
    """The estimated time of a training step, by token: operations in matrix products at half the data sheet's rate, and bytes of
    weights, gradients and states at its bandwidth, one after the other.

    Elementwise work, launching kernels and waiting are left out. It serves to put recipes in order, not to plan a night.
    """
    tokens = micro_batch * seq_len
    attention = 4 * seq_len * work.scores / (2 if work.causal else 1)
    layers = 2 * work.matrices + attention
    forward = layers + 2 * work.head
    again = _run_again(work, recipe)
    if recipe.lora_rank:
        forward += 2 * work.adapters
        backward = forward + attention + 2 * work.adapters
    else:
        backward = 2 * forward
    half = recipe.precision != "float32" and (card.bf16 or recipe.precision == "autocast-fp16")
    operations = (forward + backward + again * layers) / (
        OPERATIONS_KEPT * (card.half if half else card.single)
    )

    width = recipe.weight_dtype.itemsize
    passes = 2 + again
    read = width * work.parameters
    if recipe.autocast_dtype:
        read += (2 + 2) * (work.matrices + work.head)
    if getattr(recipe, "quantized_base", False):
        read += (0.5 + 2) * work.matrices
    trained = work.adapters if recipe.lora_rank else work.parameters
    micro = passes * read + 3 * width * trained
    # Weights are read and written, gradients read; then the states. Adafactor's dozen operations on float32 copies of a
    # tensor read or write it 17 times, those of torch's Adafactor 14 times.
    states = {"adamw-8bit": 4, "adafactor": 17 * 4, "adafactor-torch": 14 * width, "sgd": 0}.get(
        recipe.optimizer, 4 * width
    )
    step = (3 * width + states) * trained
    moved = (micro + step / recipe.accumulation) / tokens
    return operations + moved / card.bandwidth


def _run_again(work: Work, recipe: Recipe) -> float:
    """The part of the layers whose forward runs twice."""
    if recipe.every_n_layers and work.layers:
        return -(-work.layers // recipe.every_n_layers) / work.layers
    return 1.0 if recipe.checkpointing is not None else 0.0


# --- what a recipe needs -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One way to train: a recipe with its micro-batch, what it needs, and what it takes.

    ``needs`` is in bytes, ``parts`` are its parts beyond the live bytes of the prediction (empty for target "cpu"), ``spare``
    is what the card has left (negative: what it lacks). ``seconds`` is the estimated time of one token.
    """

    recipe: Recipe
    method: str
    micro_batch: int
    seconds: float
    card_bytes: int
    prediction: Prediction
    parts: dict[str, int]
    needs: int

    @property
    def spare(self) -> int:
        return self.card_bytes - self.needs

    @property
    def fits(self) -> bool:
        return self.spare >= 0

    def __str__(self) -> str:
        return describe(self.recipe, self.method, self.micro_batch)

    def why_not(self) -> str:
        """What stands in the way, in bytes."""
        peak = self.prediction.peak
        parts = {n: b for n, b in peak.by_category.items() if b >= 0.02 * peak.total} | self.parts
        held = ", ".join(
            f"{name} {format_bytes(n)}" for name, n in sorted(parts.items(), key=lambda p: -p[1])
        )
        phase = peak.phase.replace("_", " ")
        return f"needs {format_bytes(-self.spare)} more than there is: at the peak, in {phase}, {held}"

    def to_dict(self) -> dict:
        peak = self.prediction.peak
        return {
            "method": self.method,
            "recipe": {k: v for k, v in asdict(self.recipe).items()},
            "micro_batch": self.micro_batch,
            "needs": self.needs,
            "spare": self.spare,
            "estimated_seconds_per_token": self.seconds,
            "peak": {"total": peak.total, "phase": peak.phase, **peak.by_category},
            "beyond_the_peak": dict(self.parts),
        }


@dataclass(frozen=True)
class RuledOut:
    """A kind of recipe that was not predicted, since ``needs`` bytes that it cannot do without are too many already."""

    recipe: Recipe
    method: str
    needs: int
    why: str

    def __str__(self) -> str:
        return describe(self.recipe, self.method, None)


def describe(recipe: Recipe, method: str, micro_batch: int | None) -> str:
    """A recipe in a line."""
    words = [method, recipe.precision, recipe.optimizer + (" in backward" if recipe.in_backward else "")]
    if recipe.every_n_layers:
        words.append(f"checkpoint 1 layer in {recipe.every_n_layers}")
    elif recipe.checkpointing is not None:
        words.append(
            "checkpoint every layer" if recipe.checkpointing == "per-layer" else "checkpoint segments"
        )
    if recipe.chunked_loss:
        words.append("loss in chunks")
    if micro_batch is not None:
        words.append(f"micro-batch {micro_batch} x {recipe.accumulation}")
    return ", ".join(words)


def beyond(
    prediction: Prediction, capability: tuple[int, int] = (8, 0), replay: bool = True
) -> dict[str, int]:
    """What a card must hold beside the live bytes, in bytes; empty for target "cpu".

    ``replay``: follow the allocator through the whole step (seconds for a deep model); else its part is a rough one.
    """
    if prediction.target == "cpu":
        return {}
    total = prediction.peak.total
    if replay:
        allocator = {"allocator, reserved and free": max(prediction.reserved - total, 0)}
    else:
        allocator = {ROUGHLY: round(ALLOCATOR_ROUGHLY * total)}
    return {
        **allocator,
        "cuBLAS workspace": cuda.workspace(capability),
        "CUDA context": cuda.CONTEXT,
    }


# --- the search ----------------------------------------------------------------------------------------


class _Search:
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
        if not self.work.images:
            return self.seq_len
        side, patch = self.work.config.image_size, self.work.config.patch_size
        return (side // patch) ** 2 + 1

    # Which recipes there are -----------------------------------------------------------------------------

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

    # Which of them fit -----------------------------------------------------------------------------------

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
        """Index of the first rung that fits with the smallest micro-batch; ``None`` where none does.

        The search starts where a rough guess puts it, and goes from there to where fitting ends or begins.
        """

        def fits(i: int) -> bool:
            return self._fits(rungs[i], method, self.smallest(rungs[i]))

        if not rungs:
            return None
        guesses = [self._guess(rung) <= self.card.nbytes for rung in rungs]
        i = guesses.index(True) if True in guesses else len(rungs) - 1
        if fits(i):
            while i > 0 and fits(i - 1):
                i -= 1
        # What was left to another recipe's prediction is made sure of.
        while i < len(rungs) and not (
            fits(i) and self.option(rungs[i], method, self.smallest(rungs[i])).fits
        ):
            i += 1
        return i if i < len(rungs) else None

    def _guess(self, recipe: Recipe) -> float:
        """Bytes of the smallest micro-batch, roughly: what linear layers take and return, and the logits thrice."""
        work, width = self.work, 4 if recipe.precision == "float32" else 2
        tokens = self.tokens * self.smallest(recipe)
        kept = max(1 - _run_again(work, recipe), 1 / max(work.layers, 1))
        layers = width * kept * work.adapters / LORA_RANK
        logits = 0 if recipe.chunked_loss else (width + 8) * work.vocabulary
        return sum(resident_bytes(work, recipe).values()) + tokens * (layers + logits)

    def largest(self, recipe: Recipe, method: str) -> Option | None:
        """The recipe with the largest micro-batch that fits; ``None`` where none does."""
        sizes = [m for m in self.micro_batches if m >= self.smallest(recipe)]
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
            if about < 0.97 * self.card.nbytes or about > doubt * self.card.nbytes:
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
        """What ``recipe`` needs, from what one with another optimizer or micro-batch does: rather too much than too little.

        Forward and backward are the same for all optimizers that step after them, but for the states that lie beside them.
        At each moment, what is neither parameter, gradient nor state is taken to grow with the micro-batch.
        """
        rows = known.prediction.timeline.rows
        states = [resident_bytes(self.work, r)["optimizer"] for r in (known.recipe, recipe)]
        fixed = rows[:, 3] + rows[:, 5] + states[1] - states[0]
        gradients, grows = rows[:, 4], rows[:, 6:].sum(axis=1)
        if known.recipe.accumulation == 1 and micro_batch < self.global_batch:
            gradients = gradients.max()  # from the second micro-batch on they are all there
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
            index = self.first_fit(rungs, method)
            found: Option | None = None
            for rung in rungs[len(rungs) if index is None else index :]:
                if found is None or self._ideal(rung) * EQUAL_TIME < found.seconds:
                    options = [o for o in (found, self.largest(rung, method)) if o is not None]
                    found = min(options, key=lambda o: o.seconds, default=None)
            if found is not None and (best is None or found.seconds * EQUAL_TIME < best.seconds):
                best = found
        return ruled

    def _ideal(self, recipe: Recipe) -> float:
        """Its time if the whole batch fitted at once."""
        return seconds_per_token(self.work, recipe, self.card, self.global_batch, self.tokens)

    def ordered(self) -> list[Option]:
        """What fits and is worth having, best first; each is made sure of, and that a larger micro-batch of the best does not
        fit."""
        while True:
            found = _ordered(_worthwhile(self.options(fits=True)))
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


def _ordered(options: list[Option]) -> list[Option]:
    """By estimated time; of those within 10 % of each other, the one that changes training least comes first."""
    rest, ordered = sorted(options, key=lambda o: o.seconds), []
    while rest:
        equal = [o for o in rest if o.seconds <= rest[0].seconds * EQUAL_TIME]
        ordered += sorted(equal, key=lambda o: (_changes(o), o.seconds))
        rest = rest[len(equal) :]
    return ordered


def _worthwhile(options: list[Option]) -> list[Option]:
    """Without those that another one beats in time and bytes alike, and changes training no more than they do."""

    def beaten(o: Option, by: Option) -> bool:
        pairs = [
            *zip(_changes(by)[:3], _changes(o)[:3], strict=True),
            (by.seconds, o.seconds),
            (by.needs, o.needs),
        ]
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    return [o for o in options if not any(beaten(o, by) for by in options)]


def _changes(option: Option) -> tuple[int, ...]:
    """How far the result of training is from that of plain AdamW on float32 weights, as far as it can be put in order."""
    recipe = option.recipe
    return (
        list(METHODS).index(option.method),
        OPTIMIZERS.index(recipe.optimizer),
        recipe.precision == "bf16",
        recipe.in_backward,
        recipe.chunked_loss,
    )


def _every_n_layers_known() -> bool:
    from transformers import PreTrainedModel

    return hasattr(PreTrainedModel, "activation_checkpointing_enable")


# --- the answer ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Plan:
    """What fits a card, fastest first by estimate, and what does not and why. Bytes everywhere.

    Attributes: ``fits`` and ``refused`` (``Option``s that were predicted), ``ruled_out`` (not predicted: weights, gradients and
    states alone are too much), ``advice`` (where nothing fits: what would), ``predictions`` (how many it took).
    """

    title: str
    card: Card
    seq_len: int | None
    global_batch: int
    method: str
    target: str
    fits: list[Option]
    refused: list[Option]
    ruled_out: list[RuledOut]
    advice: list[str]
    predictions: int
    given: Any

    @property
    def best(self) -> Option | None:
        """The fastest option, ``None`` where nothing fits."""
        return self.fits[0] if self.fits else None

    @property
    def closest(self) -> Option:
        """The option that needs least of all that were predicted and do not fit; ``best`` where something fits."""
        return self.best or min(self.refused, key=lambda o: o.needs)

    @property
    def next_cheaper(self) -> Option | None:
        """The slowest of the options that would be faster than ``best``, and do not fit."""
        faster = [o for o in self.refused if self.best and o.seconds < self.best.seconds]
        return max(faster, key=lambda o: o.seconds, default=None)

    @property
    def code(self) -> str:
        """Python that trains by ``best``; empty where nothing fits. ``train_dataset`` is yours."""
        return code(self.best, self.given, self.target) if self.best else ""

    def __str__(self) -> str:
        rows = f"{self.seq_len:,} tokens" if self.seq_len else "images"
        lines = [
            f"{self.title} on {self.card.name} ({self.card.nbytes:,} bytes), global batch {self.global_batch} x {rows}, "
            f"method {self.method}, target {self.target}",
            "",
        ]
        if self.fits:
            lines += [
                "Fits, fastest first. Times are estimates, from counted operations and bytes moved; of those within 10 %"
            ]
            lines += ["of each other, the recipe that changes training least comes first."]
            lines += _table(self.fits)
        else:
            lines += ["Nothing fits. Closest:", *_table([self.closest])]
            lines += ["", _wrapped(f"It {self.closest.why_not()}.")]
        lines += [_wrapped(line, "  * ") for line in self.advice]
        cheaper = self.next_cheaper
        if cheaper is not None:
            lines += [
                "",
                f"The next faster one does not fit: {cheaper}",
                _wrapped(f"It {cheaper.why_not()}."),
            ]
        if self.ruled_out:
            lines += ["", "Ruled out without a prediction:"]
            for why in dict.fromkeys(out.why for out in self.ruled_out):
                kinds = "; ".join(str(out) for out in self.ruled_out if out.why == why)
                lines.append(_wrapped(f"{kinds}: {why}.", "  * "))
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {
            "model": self.title,
            "card": asdict(self.card),
            "seq_len": self.seq_len,
            "global_batch": self.global_batch,
            "method": self.method,
            "target": self.target,
            "fits": [o.to_dict() for o in self.fits],
            "refused": [o.to_dict() | {"why": o.why_not()} for o in self.refused],
            "ruled_out": [
                {"recipe": str(o), "needs_at_least": o.needs, "why": o.why} for o in self.ruled_out
            ],
            "closest": self.closest.to_dict(),
            "advice": self.advice,
            "code": self.code,
        }


def _table(options: list[Option]) -> list[str]:
    lines = [f"  {'us/token':>8} {'needs':>10} {'spare':>10}   recipe"]
    for o in options:
        spare = ("-" if o.spare < 0 else "") + format_bytes(abs(o.spare))
        lines.append(f"  {o.seconds * 1e6:8.2f} {format_bytes(o.needs):>10} {spare:>10}   {o}")
    return lines


def _wrapped(text: str, bullet: str = "  ") -> str:
    return textwrap.fill(text, 110, initial_indent=bullet, subsequent_indent=" " * len(bullet))


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
    if method not in (*METHODS, "any"):
        raise ValueError(
            f"method={method!r} is not known: choose one of {', '.join(map(repr, (*METHODS, 'any')))}"
        )
    if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < 1:
        raise ValueError(
            f"global_batch={global_batch!r}: give a whole number of rows, at least 1, such as 16"
        )
    found = find_card(card)
    config, title = find_model(model_or_config)
    work = count(config)
    if not work.images and (isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 1):
        raise ValueError(f"seq_len={seq_len!r}: give the number of tokens in a row, at least 1, such as 2048")
    search = _Search(work, found, None if work.images else seq_len, global_batch, target)
    methods = list(METHODS) if method == "any" else [method]
    ruled = [out for name in methods for out in search.run(name)]
    fits, refused = search.ordered(), search.options(fits=False)
    advice: list[str] = []
    if not fits:
        if not refused:
            lightest = min(ruled, key=lambda out: out.needs)
            rung = search.ladder(lightest.recipe)[-1]
            refused = [search.option(rung, lightest.method, search.smallest(rung))]
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
    )


def find_model(given) -> tuple[Any, str]:
    from .predict import _config, _title

    if isinstance(given, nn.Module):
        config = getattr(given, "config", None)
        if config is None:
            raise ValueError(
                f"{type(given).__name__} has no config: plan is for transformers models. For other modules, predict each recipe "
                "with predict(model, batch=..., recipe=Recipe(...))"
            )
        config = copy.deepcopy(config)
        config.architectures = [type(given).__name__]
        return config, type(given).__name__
    known = known_model(given) if isinstance(given, str) and not os.path.exists(given) else None
    if known is not None:
        return known[1], known[0]
    config = _config(given)
    return config, _title(given, config)


def _advice(search: _Search, methods: list[str], closest: Option) -> list[str]:
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
            smaller = _Search(search.work, search.card, search.seq_len, rows, search.target)
            option = smaller.option(closest.recipe, closest.method, rows)
            if option.fits:
                advice.append(
                    f"global_batch={rows} would fit, by the same recipe: it needs {format_bytes(option.needs)}. An optimizer that "
                    "steps in backward cannot accumulate, so its batch goes through in one piece."
                )
                break
    for seq_len in [] if search.work.images else (search.seq_len // 2, search.seq_len // 4):
        if seq_len < 1:
            break
        shorter = _Search(search.work, search.card, seq_len, search.global_batch, search.target)
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


# --- code that runs ------------------------------------------------------------------------------------------


def code(option: Option, given, target: str = "cuda") -> str:
    """Python that trains the model by ``option``, with transformers' ``Trainer`` where it can. ``train_dataset`` is yours."""
    recipe = option.recipe
    lines = _model_lines(recipe, given)
    if recipe.in_backward:
        lines = [] if isinstance(given, nn.Module) else lines  # prepare does the rest
        return "\n".join(_loop(option, lines, _auto_class(given), target)) + "\n"
    imports, names, lora = [], [], []
    if any(line.startswith("cast_weights") for line in lines):
        names.append("cast_weights")
    if any("find_model(" in line for line in lines):
        imports.append("from gradmem_lib.plan import find_model")
    if recipe.lora_rank:
        names.append("add_lora")
        lora.append(f"add_lora(model, {recipe.lora_rank})")
    if recipe.quantized_base:
        imports.append("from gradmem_lib.quantized import quantize_base")
        lora.append("quantize_base(model)")
    trainer, loss = "Trainer", []
    if recipe.chunked_loss:
        trainer = "ChunkedLoss"
        names.append("chunked_loss")
        loss = [
            "class ChunkedLoss(Trainer):",
            "    def compute_loss(self, model, inputs, num_items_in_batch=None, **ignored):",
            "        with self.accelerator.autocast():",
            "            return chunked_loss(model, inputs, num_items_in_batch)",
            "",
            "",
        ]
    return (
        "\n".join(
            [
                "import torch",
                f"from transformers import {_auto_class(given)}, Trainer, TrainingArguments",
                *([f"from gradmem_lib.recipe import {', '.join(sorted(names))}"] if names else []),
                *imports,
                "",
                *([""] if loss else []),
                *loss,
                *lines,
                *lora,
                *_training_arguments(option, target),
                *_trainer_lines(trainer, recipe),
                "trainer.train()",
            ]
        )
        + "\n"
    )


def _trainer_lines(name: str, recipe: Recipe) -> list[str]:
    given = "model=model, args=args, train_dataset=train_dataset"
    if recipe.optimizer != "adafactor-torch":
        return [f"trainer = {name}({given})"]
    return [
        f"trainer = {name}(",
        f"    {given},",
        "    optimizer_cls_and_kwargs=(",
        "        torch.optim.Adafactor,",
        f'        {{"lr": args.learning_rate, "eps": {ADAFACTOR_EPS}, "foreach": False}},',
        "    ),",
        ")",
    ]


def _auto_class(given) -> str:
    name = model_class(find_model(given)[0]).__name__
    for end in ("MaskedLM", "ImageClassification", "SequenceClassification", "TokenClassification"):
        if name.endswith(end):
            return f"AutoModelFor{end}"
    return "AutoModelForCausalLM"


def _model_lines(recipe: Recipe, given) -> list[str]:
    dtype = str(recipe.weight_dtype)
    attention = {"fused": "sdpa", None: "sdpa"}.get(recipe.attention, recipe.attention)
    if isinstance(given, nn.Module):
        cast = [] if recipe.weight_dtype == torch.float32 else [f"cast_weights(model, {dtype})"]
        return [*cast, f'model.set_attn_implementation("{attention}")', "model.config.use_cache = False"]
    source, config = "from_config(config", []
    if isinstance(given, (str, os.PathLike)):
        known = known_model(given) if isinstance(given, str) and not os.path.exists(given) else None
        if known and not known[2]:
            config = [f'config, _ = find_model("{known[0]}")']
        else:
            source = f'from_pretrained("{known[2] if known else os.fspath(given)}"'
    return [
        *config,
        f'model = {_auto_class(given)}.{source}, dtype={dtype}, attn_implementation="{attention}")',
        "model.config.use_cache = False",
    ]


def _training_arguments(option: Option, target: str) -> list[str]:
    from .finetune import arguments

    chosen = {"output_dir": "out"} | arguments(option.recipe, option.micro_batch)
    if option.recipe.optimizer == "adafactor-torch":
        chosen["learning_rate"] = RELATIVE_RATE
    if target == "cpu":
        chosen["use_cpu"] = True
    shown = (f'"{v}"' if isinstance(v, str) else repr(v) for v in chosen.values())
    return ["args = TrainingArguments(", *(f"    {k}={v}," for k, v in zip(chosen, shown, strict=True)), ")"]


def _loop(option: Option, model: list[str], auto_class: str, target: str) -> list[str]:
    """For an optimizer in backward, which ``Trainer`` does not have: ``recipe.prepare`` and ``recipe.step``."""
    shown = ", ".join(
        f"{name}={getattr(option.recipe, name)!r}"
        for name in Recipe.__dataclass_fields__
        if getattr(option.recipe, name) != getattr(Recipe(), name)
    )
    device = "cuda" if target == "cuda" else "cpu"
    rate = RELATIVE_RATE if option.recipe.optimizer == "adafactor-torch" else 1e-5
    return [
        "import torch",
        "from torch.utils.data import DataLoader",
        f"from transformers import {auto_class}, default_data_collator",
        *(
            ["from gradmem_lib.plan import find_model"]
            if any("find_model(" in line for line in model)
            else []
        ),
        "from gradmem_lib.recipe import Recipe, prepare, step",
        "",
        *model,
        f"recipe = Recipe({shown})",
        f'model, optimizer, undo = prepare(model.to("{device}"), recipe, lr={rate})',
        f"for batch in DataLoader(train_dataset, {option.micro_batch}, shuffle=True, collate_fn=default_data_collator):",
        f'    loss = step(model, optimizer, {{k: v.to("{device}") for k, v in batch.items()}}, recipe)',
    ]
