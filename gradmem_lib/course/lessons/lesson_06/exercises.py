"""Lesson 06's exercises, in the order of their ids: an error's numbers, fewer rows, two models that
nobody prepared, a 7B on one card, the next technique, and an evaluation that collects.
"""

from functools import cache, lru_cache

import torch
import torch.nn.functional as F
from torch import nn

from ....names import IGNORED
from ....techniques.accumulation import split
from ....techniques.checkpointing import checkpoint_layers
from ....training.recipe import Recipe
from ....units import GiB, MiB, format_bytes
from ...judge.compare import Measured, describe, plain_int
from ...judge.exercise import Exercise, Hidden, Unusable, calls, measured
from ..shared.leaks import leak_cases, new_net
from ..shared.residual_net import block
from ..shared.settings import (
    gradients_of,
    gradients_of_updates,
    quietly,
    seeded,
    sgd,
    with_large_gradients,
)

# 6.1


def read_error(asked, total, free, process, allocated, idle) -> dict:
    """What an out-of-memory error says between the lines, from its six numbers (bytes)."""
    return {
        "context": process - allocated - idle,
        "others": total - free - process,
        "in_pieces": free + idle >= asked,
    }


# The message that the lesson begins with, as it is printed, in the order of ``read_error``.
REAL_MESSAGE = (
    24 * MiB,
    round(7.60 * GiB),
    round(15.38 * MiB),
    round(2.19 * GiB),
    round(217.80 * MiB),
    round(8.20 * MiB),
)

# Fewer bytes are free than are asked for, as in every such error.
ERROR = Exercise(
    "6.1",
    read_error,
    calls(
        (12, 100, 5, 60, 30, 9),  # free and idle bytes together are enough
        (12, 100, 5, 70, 30, 2),  # they are too few
        (12, 100, 5, 65, 40, 7),  # they are enough to the byte
        (12, 100, 5, 50, 20, 15),  # the idle bytes alone are enough
        REAL_MESSAGE,
        hidden=[(3072, 24_210, 2180, 22_030, 20_100, 900)],
    ),
    """
    process - allocated - idle → process - allocated
        the context is too large by the idle blocks: PyTorch has reserved these from the driver too.
    process - allocated - idle → total - free - allocated - idle
        the context includes the memory of other processes: begin with what this process has in use.
    total - free - process → total - free
        the others' memory includes this process: subtract what this process has in use.
    total - free - process → total - free - allocated
        the others' memory includes this process's context and idle blocks: this process holds more
        than its allocated bytes.
    free + idle >= asked → idle >= asked
        in_pieces uses only the idle blocks: the free bytes of the card can be added to them.
    free + idle >= asked → free >= asked
        in_pieces is always False here, as `free >= asked` is in every out-of-memory error: add the
        idle blocks of this process to the free bytes.
    free + idle >= asked → free + idle > asked
        free and idle bytes may be exactly as many as were requested: that is enough, so compare
        with >=.
    free + idle >= asked → free + idle < asked
        in_pieces is turned round: the bytes are there, in pieces, where free and idle bytes
        together are at least what was requested.
    """,
)

# 6.2


def with_rows(moments, rows, new) -> float:
    """The peak with ``new`` rows, from the highest moment of each phase with ``rows`` (bytes by
    category).
    """
    peaks = []
    for phase, parts in moments.items():
        peak = 0
        for name, nbytes in parts.items():
            of_batch = name in ("activations", "temporaries", "other")
            if of_batch and phase != "optimizer_step":
                nbytes = nbytes * new / rows
            peak += nbytes
        peaks.append(peak)
    return max(peaks)


CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "other")

PHASES = ("forward", "backward", "optimizer_step")

# Rows and new rows, and what is not 0 in the three moments.
PEAKS = """
    shown  8 4   backward activations 80
    shown  8 4   forward activations 80
    shown  8 4   forward other 80
    shown  8 4   backward temporaries 80
    shown  8 4   optimizer_step temporaries 80
    shown  8 4   backward parameters 80
    shown  8 4   backward gradients 80
    shown  8 4   forward optimizer 80
    shown  8 2   backward activations 24 backward optimizer 7 optimizer_step gradients 9
    shown  6 15  backward activations 24 backward optimizer 7 optimizer_step gradients 9
    shown  3 2   backward activations 24 backward optimizer 7 optimizer_step gradients 9
    shown  4 2   forward activations 50 backward activations 70 optimizer_step gradients 60
    shown  2 6   forward activations 70 backward gradients 40 backward activations 40
    hidden 16 4  forward other 4 backward activations 600 optimizer_step optimizer 200
    hidden 6 12  forward other 400 backward temporaries 420 optimizer_step temporaries 90
"""


def rows_cases(answer):
    for line in PEAKS.strip().splitlines():
        shown, rows, new, *peaks = line.split()
        moments = {phase: dict.fromkeys(CATEGORIES, 0) for phase in PHASES}
        for phase, name, nbytes in zip(peaks[::3], peaks[1::3], peaks[2::3], strict=True):
            moments[phase][name] = int(nbytes)
        kind = Hidden if shown == "hidden" else str
        case = kind(f"{rows} rows, {new} new, and at the peaks the bytes {' '.join(peaks)}")
        yield case, answer(moments, int(rows), int(new))


ROWS = Exercise(
    "6.2",
    with_rows,
    rows_cases,
    """
    new / rows → rows / new
        the factor is upside down: it is new / rows.
    nbytes * new / rows → nbytes
        the number of rows has no effect on your answer.
    , "other" →
        `other` is not scaled: it holds the token ids, and they belong to the batch too.
    "temporaries",  →
        the temporaries of forward and backward are not scaled: they are the logits' gradients,
        which grow with the rows.
    of_batch and phase != "optimizer_step" → True
        everything is scaled, weights and states too: they do not depend on the batch.
    of_batch and phase != "optimizer_step" → of_batch
        the optimizer's step is scaled: its temporaries are as large as the weights it works on.
    nbytes * new / rows → nbytes * (new // rows)
        the factor is rounded to a whole number: divide by /, which gives a fraction.
    max(peaks) → sum(peaks)
        the moments are added: they come one after another, so the highest one counts.
    """,
)

# 6.3

CLASSIFIER_CARD, T5_CARD = "22 MiB", "10.5 MB"


class Classifier(nn.Module):
    """Images (batch, 3, 32, 32) to 10 scores: 64 patches each, eight blocks, and a mean."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, 4)
        self.blocks = nn.ModuleList(block(64) for _ in range(8))
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)  # (batch, 64 patches, 64)
        for each in self.blocks:
            x = each(x)
        return self.head(x.mean(1))


def adamw_with_states(model: nn.Module) -> torch.optim.Optimizer:
    """A step on gradients of zero, without weight decay, makes the states and moves nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def classifier_setting() -> tuple:
    """The classifier after a first step, its AdamW, 30 images and their labels."""
    with seeded(6):
        model, images = Classifier(), torch.randn(30, 3, 32, 32)
    return model, adamw_with_states(model), images, torch.arange(30) % 10


def t5_setting() -> tuple:
    """A small T5 after a first step, its AdamW, and 16 pairs of 96 tokens and up to 32, the rest of
    the labels -100.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=64,
        d_kv=16,
        d_ff=256,
        num_layers=3,
        num_heads=4,
        vocab_size=512,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    with seeded(6):
        model = T5ForConditionalGeneration(config).train()
        ids, labels = torch.randint(1, 512, (16, 96)), torch.randint(1, 512, (16, 32))
    lengths = torch.tensor([32 - 2 * row for row in range(16)])
    labels = labels.masked_fill(torch.arange(32) >= lengths[:, None], IGNORED)
    return model, adamw_with_states(model), {"input_ids": ids, "labels": labels}


def train_small(model, optimizer, images, labels) -> float:
    """One update on all images, in micro-batches; the mean loss."""
    mean = 0.0
    for x, y in split((images, labels), 8):
        loss = F.cross_entropy(model(x), y, reduction="sum") / len(labels)
        loss.backward()
        mean += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return mean


def update_cases(answer, setting, head: str, card: str, mean: str):
    """One update of the model of ``setting()`` within ``card``. ``mean``: what its loss is."""
    model, _, *batch = setting()
    with_large_gradients(model.get_submodule(head), 30)
    optimizer = sgd(model, 1e-3)
    updates = gradients_of_updates(model, optimizer)
    loss = answer(model, optimizer, *batch)
    yield "steps of the given optimizer", len(updates)
    yield f"the gradient at the step, which is that of {mean}", updates[:]
    yield "the loss that is returned", loss
    yield "numbers other than 0 in the gradients afterwards", gradients_of(model).count_nonzero()
    answer(model, optimizer, *batch)  # what stays on the model may stop a second update
    yield "the gradient of a second update, from the weights that the first one left", updates[1:]
    model, optimizer, *batch = setting()
    run = measured(lambda: answer(model, optimizer, *batch), card, model=model, optimizer=optimizer)
    peak = run.peak
    if run.over:  # a mistake has a few bytes more in one form than in another
        peak = run.budget + 1 + round(run.over, -5)
    yield f"one update within {card}", Measured(None, peak, run.budget, run.says)


def classifier_cases(answer):
    mean = "the mean loss over all 30 images"
    yield from update_cases(answer, classifier_setting, "head", CLASSIFIER_CARD, mean)
    model, *rest = classifier_setting()
    answer(model.eval(), *rest)
    yield "a model in eval mode, whether it is in training mode afterwards", model.training


SMALL = Exercise(
    "6.3",
    train_small,
    classifier_cases,
    """
    labels), 8) → labels), 30)
        the activations of all layers, for all 30 images, are in memory at once: nothing is made
        smaller yet.
    labels), 8) → labels), 15)
        two halves are not half the memory: weights, gradients and states stay, and the first half's
        gradients stay in memory; cut further.
    / len(labels) → / len(y) / 4
        every micro-batch has the same weight in the gradient (loss / K, a mean of means): the last
        one has 6 images, and the others have 8; weight each by its images.
    / len(labels) → / len(y)
        this adds up the means of the micro-batches: with 4 of them the gradient is about 4 times
        too large.
    optimizer.step() →
    optimizer.zero_grad() →
    mean += loss.item() → mean += loss.item(); optimizer.step(); optimizer.zero_grad()
        4 updates are made with this batch: the exercise asks for one, on all 30 images.
    loss.backward() →
    mean += loss.item() → mean = mean + loss
    optimizer.step() → mean.backward(); optimizer.step()
    return mean → return mean.item()
        backward runs once, after all forwards: until then the graph of every piece is kept. Call
        backward on each piece before the next forward.
    split((images, labels), 8) → zip(images.split(8)[:3], labels.split(8))
        the last images are left out, because 8 does not divide their number: the last piece is
        smaller.
    optimizer.step() → nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step()
        the gradient is clipped to a length of 1, and the exercise asks for no clipping.
    """,
    tolerance=1e-4,
    changes="model.config model.hook",
)

# 6.4


def train_t5(model, optimizer, batch) -> float:
    """One update on all pairs, checkpointed and in micro-batches; the mean loss over all target
    tokens.
    """
    targets = (batch["labels"] != IGNORED).sum()
    total = 0.0
    with checkpoint_layers(model, 1):
        for micro in split(batch, 4):
            share = (micro["labels"] != IGNORED).sum() / targets
            loss = model(**micro).loss * share
            loss.backward()
            total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


@quietly
def t5_cases(answer):
    mean = "the mean loss over all target tokens"
    yield from update_cases(answer, t5_setting, "lm_head", T5_CARD, mean)


T5 = Exercise(
    "6.4",
    train_t5,
    t5_cases,
    """
    with checkpoint_layers(model, 1) → if True
    batch, 4) → batch, 16)
        the activations of all layers, for all 16 rows, are in memory at once: nothing is made
        smaller yet.
    batch, 4) → batch, 16)
        the checkpoints are there, but all rows go through at once: what a layer needs while it
        runs, and the logits, grow with the rows; cut the batch as well.
    with checkpoint_layers(model, 1) → if True
        4 rows at a time are still too many where every layer keeps its activations.
    batch, 4) → batch, 8)
    checkpoint_layers(model, → checkpoint_layers(model.encoder.block,
        the decoder's layers keep their activations: an encoder and a decoder are two lists, and
        each needs its checkpoints.
    (micro["labels"] != IGNORED).sum() / targets → 1 / 4
        every micro-batch has the same weight, and the rows have unequal numbers of target tokens:
        weight each micro-batch by its own.
    (batch["labels"] != → (batch["labels"][:, 1:] !=
    (micro["labels"] != → (micro["labels"][:, 1:] !=
        position 0 of each row is left out of the counts: a T5 shifts its decoder's inputs, not its
        labels; count all labels except -100.
    optimizer.step() →
    optimizer.zero_grad() →
    total += loss.item() → total += loss.item(); optimizer.step(); optimizer.zero_grad()
        4 updates are made with this batch: the exercise asks for one, on all 16 rows.
    optimizer.step() → nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step()
        the gradient is clipped to a length of 1, and the exercise asks for no clipping.
    """,
    tolerance=1e-4,
    changes="model.config model.hook",
)

# 6.5

MODEL_7B, CARD_7B, TOKENS_7B, BATCH_7B = "Llama-2-7B", "RTX 4090 24GB", 2048, 8


@cache
def sizes_7b():
    """The model's config, its sizes and its card."""
    from ....model.known import known_model
    from ....planning.cards import find_card
    from ....planning.work import count

    config = known_model(MODEL_7B)[1]
    return config, count(config), find_card(CARD_7B)


@lru_cache
def on_card(recipe: Recipe, micro_batch: int):
    """What ``recipe`` needs for the exercise's 7B, as ``plan``'s ``Option``: with ``needs``,
    ``spare`` (bytes) and ``why_not()``.

    The allocator's part is the rough one that ``plan`` begins with.
    """
    from ....planning.cost import seconds_per_token
    from ....planning.held import overhead_of_prediction
    from ....planning.options import Option
    from ....prediction.predict import predict

    config, work, card = sizes_7b()
    prediction = predict(
        config,
        batch_size=micro_batch * recipe.accumulation,
        seq_len=TOKENS_7B,
        recipe=recipe,
        target="cuda",
    )
    parts = overhead_of_prediction(prediction, card.capability, replay=False)
    seconds = seconds_per_token(work, recipe, card, micro_batch, TOKENS_7B)
    return Option(recipe, micro_batch, seconds, card.nbytes, prediction, parts)


def recipe_7b() -> tuple[Recipe, int]:
    """A recipe that trains every weight of a 7B on a card of 24 GB, and the rows of a
    micro-batch.
    """
    recipe = Recipe(
        precision="bf16",
        optimizer="adafactor-torch",
        in_backward=True,
        checkpointing="per-layer",
        chunked_loss=True,
    )
    return recipe, 8


def needs_7b(recipe: Recipe, micro_batch: int) -> Measured:
    """The bytes that a recipe needs, beside those of the card. What stays is counted first: nothing
    has to be predicted where this alone is too much.
    """
    from ....planning.held import resident_bytes

    _, work, card = sizes_7b()
    stays = resident_bytes(work, recipe)
    if sum(stays.values()) > card.nbytes:
        words = ", ".join(f"{name} {format_bytes(n)}" for name, n in stays.items())
        says = f"What stays is too much before the first token: {words}."
        return Measured(None, sum(stays.values()), card.nbytes, says)
    option = on_card(recipe, micro_batch)
    if option.fits:
        return Measured(None, 0, card.nbytes, "")
    return Measured(None, option.needs, card.nbytes, f"The recipe {option.why_not()}.")


@quietly
def cases_7b(answer):
    match answer():
        case [Recipe() as recipe, micro_batch]:
            micro_batch = plain_int(micro_batch)
        case _:
            raise Unusable("return two things, the recipe and the rows of a micro-batch: recipe, 1")
    if type(micro_batch) is not int or micro_batch < 1:
        raise Unusable(
            "the rows of a micro-batch must be a whole number, at least 1, not "
            f"{describe(micro_batch)}"
        )
    rows = micro_batch * recipe.accumulation
    yield "rows of an update, micro-batch times accumulation", rows
    yield "whether every weight is trained, without LoRA", recipe.lora_rank is None
    needs = Measured(None, 0, 0, "")
    if rows == BATCH_7B and recipe.lora_rank is None:  # else nothing has to be predicted
        needs = needs_7b(recipe, micro_batch)
    yield f"what has to fit on an {CARD_7B}", needs


SEVEN_B = Exercise(
    "6.5",
    recipe_7b,
    cases_7b,
    """
    in_backward=True, → accumulation=8,
    recipe, 8 → recipe, 1
        weights and gradients alone do not fit: they take 12.55 GiB each in bf16, and accumulation
        keeps the gradients from one micro-batch to the next, however small it is; step in backward,
        so that no gradient waits.
    adafactor-torch → adamw-fused
        each gradient is freed after its step, but AdamW's states stay: with the weights they do not
        fit on the card; choose an optimizer that keeps next to nothing.
    in_backward=True, → lora_rank=16,
        LoRA freezes the weights and trains adapters, but here every weight must be trained: leave
        lora_rank out.
    precision="bf16" → precision="autocast-bf16"
        the weights alone are 25.10 GiB in float32, and autocast does not change that;
        precision='bf16' halves them.
    checkpointing="per-layer" → checkpointing=None
        the weights fit, but the activations of 32 layers do not: checkpointing='per-layer'.
    chunked_loss=True → chunked_loss=False
        weights and checkpoints fit, but the logits of all rows, their copies and their gradient do
        not: chunked_loss=True makes them piece by piece.
    in_backward=True, → in_backward=True, accumulation=8,
        Recipe refuses in_backward together with accumulation: a gradient that is freed cannot be
        added to; with in_backward all 8 rows go at once.
    """,
)

# 6.6


def next_technique(phase, parts, rows, card) -> str:
    """The first technique that may bring the peak within ``card`` bytes, or "none"."""
    takes = {"micro-batches": 0, "checkpointing": 0}
    states = parts["optimizer"]
    if phase == "optimizer_step":
        states += parts["temporaries"]
    else:
        takes["checkpointing"] = parts["activations"]
        if rows > 1:
            takes["micro-batches"] = parts["activations"] + parts["temporaries"]
    takes["8-bit states"] = states
    takes["LoRA"] = states + parts["gradients"]
    takes["QLoRA"] = takes["LoRA"] + parts["parameters"]
    enough = [name for name in takes if sum(parts.values()) - takes[name] <= card]
    return enough[0] if enough else "none"


# Phase; bytes of parameters, gradients, optimizer, activations and temporaries; rows; card; and
# which requirement it is for.
BREAKDOWNS = """
    backward         6   0  12  30  12    8  24  micro-batches take activations and temporaries
    backward         6   0  12  30  12    8  18  what is left may be exactly as much as the card has
    backward         6   0  12  30  12    1  30  one row cannot be cut
    backward        10   0  10  20   4    2  30  two rows can be cut, and the cheapest comes first
    backward        10   4  20   4  12    1  36  checkpointing leaves the logits' gradients
    optimizer_step  10  10  20   0  14    8  41  micro-batches leave the step's temporaries
    optimizer_step  12  12  12  20   1    4  40  8-bit states leave the gradients
    optimizer_step  10  10   8   0   6    8  12  LoRA takes the step's temporaries too
    backward        10  10  20   4  12    4  38  8-bit states count whole
    optimizer_step  10  10   4   0   4    8   9  LoRA leaves the frozen weights
    optimizer_step  10  10  10   0  10    8   5  QLoRA takes the weights beside what LoRA takes
    backward        20  10  10   0  30    1  24  no technique is enough
    backward        10   0  10  10   0    8  12  each technique is asked by itself
    forward         12   2   4  30   1    1  20  checkpointing helps in forward too
    forward         10   2   8  14   8    4  20  micro-batches take the temporaries of forward too
    forward         12   2  14   2   1    4  18  8-bit states help in forward too
    forward         12   8  10   2   1    4  16  LoRA takes the gradients in forward too
    forward         14   2   6   2   1    4   6  QLoRA helps in forward too
    forward         12   2  10   4   6    1  20  8-bit states and LoRA leave those of forward
    backward        10   0  20  12   2    1  33  hidden
    backward        13   9   6   2   1    1  16  hidden
    backward         4   4   8  10  10    3  26  hidden
    forward         10   2   8  24   3   16  30  hidden
    optimizer_step  12  12  12   1   1    4  24  hidden
    optimizer_step  10  10   8   0   4    8  15  hidden
    optimizer_step  10  10   8   0  12    8  22  hidden
    backward        10  10  10  10  10    1  19  hidden
"""


def next_cases(answer):
    for line in BREAKDOWNS.strip().splitlines():
        phase, *numbers, shows = line.split(maxsplit=8)
        *parts, rows, card = map(int, numbers)
        given = dict(zip(CATEGORIES, parts, strict=False))
        kind = Hidden if shows == "hidden" else str
        case = f"{phase} with {given}, rows = {rows} and card = {card}: {shows}"
        yield kind(case), answer(phase, given, rows, card)


NEXT = Exercise(
    "6.6",
    next_technique,
    next_cases,
    """
    ["8-bit states"] = states → ["8-bit states"] = 0.75 * states
        8-bit states leave a quarter here. So they do in life, but the question is what can be
        enough at best: count each marked part whole.
    <= card → < card
        what is left may be exactly `card`: at most means <=.
    enough[0] → max(enough, key=takes.get)
        this takes what saves most: take the first one that can be enough, since they are in the
        order of their price.
    if rows > 1 → if True
        micro-batches of one row are cut again: one row cannot be cut.
    ["checkpointing"] = → ["checkpointing"] = parts["temporaries"] +
        checkpointing removes temporaries here: those are the logits' gradients, and running layers
        again does not make them smaller.
    takes["LoRA"] = states → takes["LoRA"] = parts["parameters"] + states
    takes["LoRA"] + parts["parameters"] → takes["LoRA"]
        LoRA removes the weights here: they are frozen but stay in memory; only QLoRA makes them
        smaller.
    states += parts["temporaries"] →
        the temporaries of the optimizer's step are not made smaller here: 8-bit states, LoRA and
        QLoRA make them smaller too, as the chart marks.
    if phase == "optimizer_step" → if False
        the phase has no effect: in the optimizer's step the temporaries belong to the step, and
        neither smaller micro-batches nor checkpoints change them.
    """,
)

# 6.7

EVALUATION_BUDGET = "1 MiB"
CLASSES, BATCHES, LAST = 1000, 40, 5


def evaluation_leak_setting(batches: int = BATCHES) -> tuple:
    """A small classifier of 1,000 classes in training mode, and batches of 16 rows with their
    labels, about half of which it finds; the last one has 5.
    """
    net = new_net(CLASSES)
    n = (batches - 1) * 16 + LAST
    with seeded(6), torch.no_grad():
        x = torch.randn(n, 64)
        found = net(x).argmax(-1)
        wrong = torch.rand(n) < torch.linspace(0, 1, n)
    labels = torch.where(wrong, CLASSES - 1 - found, found)
    return net, list(zip(x.split(16), labels.split(16), strict=True))


def with_dropout(batches: int):
    """The same with dropout, so that an evaluation in training mode has another accuracy."""
    net, given = evaluation_leak_setting(batches)
    net.body.insert(2, nn.Dropout(0.5))
    return net, given


def logits_leak():
    """The line that keeps the logits, and an evaluation that keeps one number of each row."""

    def fixed(model, batches):
        model.eval()
        outputs = []
        with torch.no_grad():
            for x, _ in batches:
                outputs.append(model(x).argmax(-1))
        predictions = torch.cat(outputs)
        labels = torch.cat([y for _, y in batches])
        model.train()
        return (predictions == labels).float().mean().item()

    return 7, fixed


LEAK = Exercise(
    "6.7",
    logits_leak,
    leak_cases(
        line=7,
        setting=evaluation_leak_setting,
        size=BATCHES,
        budget=EVALUATION_BUDGET,
        outside=600_000,  # the logits of one batch as a list of Python's numbers are about 520 kB
        other=with_dropout,
        where=" and dropout",
    ),
    """
    model(x).argmax(-1) → model(x)
    torch.cat(outputs) → torch.cat(outputs).argmax(-1)
        1,000 numbers of every row are still kept until the end. The accuracy needs one of them, the
        largest's place: logits.argmax(-1), before the list. Here the model is on the CPU, where
        .cpu() moves nothing.
    return 7 → return 6
        line 6 makes the logits of one batch: the next batch's would take their place, if nothing
        else kept them.
    return 7 → return 8
        line 8 copies all logits into one tensor, which doubles them, but they have been kept
        before: look for the line that does so.
    return 7 → return 4
        no graph is recorded, thanks to line 4: look for what is there after each batch.
    argmax(-1) → argmax(0)
    torch.cat(outputs) → torch.cat(outputs)[: sum(len(y) for _, y in batches)]
        argmax(0) looks along the rows, and finds the best row of each class: the best class of each
        row is argmax(-1).
    model.train() →
        the model is left in eval mode: what the script does at its end belongs to it.
    model.eval() →
        the model stays in training mode: a model with dropout then has another accuracy, at random.
        Line 2 of the script keeps nothing, so leave it there.
    predictions = torch.cat(outputs) → hits = [p == y for p, (_, y) in zip(outputs, batches)]
    (predictions == labels).float() → torch.stack([one.float().mean() for one in hits])
        this is the mean of the batches' shares: the last batch has fewer rows, so weight each by
        its rows.
    """,
)
