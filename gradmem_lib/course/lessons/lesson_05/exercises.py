"""Lesson 05's exercises, in the order of the lesson."""

import copy  # noqa: F401 (for a mistake of 5.5)
import math

import torch
import torch.nn.functional as F
from torch import nn

from ....techniques.accumulation import split
from ....techniques.checkpointing import checkpoint_layers
from ....techniques.lora import LoRALinear
from ....techniques.losses import count_targets
from ...judge.exercise import Exercise, measured
from ...machine.compat import enable_checkpointing
from ...material import models
from ..shared.hf_trainer import quiet_arguments
from ..shared.residual_net import labelled_rows, residual_net
from ..shared.settings import (
    bigram_loss,
    bigrams,
    gradients_of,
    have_graphs,
    quietly,
    rows,
    seeded,
    sgd,
    text_batch,
    tiny_llama,
    trained_of,
    weights_of,
    with_large_gradients,
)

# 5.2


def switch_on(model) -> None:
    """Checkpoint every layer of ``model``, in place, so that a training step does run
    them again.
    """
    model.train()
    enable_checkpointing(model, {"use_reentrant": False})


CHECKPOINTING_CARD = "5 MiB"


def checkpointing_setting():
    """A tiny Llama of six layers as ``from_pretrained`` leaves a model, and token ids (4, 64)."""
    model = tiny_llama(6, 256)
    model.config.use_cache = True
    with seeded(1):
        return model.eval(), torch.randint(256, (4, 64))


@quietly
def checkpointing_cases(answer):
    model, ids = checkpointing_setting()
    answer(model)

    def step():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item()

    run = measured(step, CHECKPOINTING_CARD, model=model)
    yield "a step on token ids, the loss", run.value
    yield "a step on token ids, the gradients", gradients_of(model)
    yield "a step on token ids, the peak", run
    # Tells apart the ways to one peak.
    mode = model.training if run.over else None
    yield "a peak that is too high, and the mode of the model", mode

    model, ids = checkpointing_setting()
    vectors = model.get_input_embeddings()(ids).detach()
    answer(model)
    model(inputs_embeds=vectors.to(model.dtype), labels=ids).loss.backward()
    name = "a step on vectors (inputs_embeds), the gradients of the layers"
    yield name, gradients_of(model.model.layers)


SWITCH = Exercise(
    "5.2",
    switch_on,
    checkpointing_cases,
    """
    model.train() →
        the model is in eval mode, as from_pretrained leaves it, and no layer runs again: each
        layer checks its switch and the mode, and saves no memory without telling you. Call
        model.train().
    enable_checkpointing(model, {"use_reentrant": False}) →
        no layer of this model checkpoints. Train mode and the cache do not switch it on, and a
        field of the config, an attribute of the model, TrainingArguments or a copy do not reach
        the layers of this model: call the model's method.
    False → True
        use_reentrant=True trains on token ids, because transformers lets the embedding's output
        require a gradient; with input vectors that require none, no layer gets a gradient:
        use_reentrant=False.
    False}) → False}); model.bfloat16()
        the weights have been rounded to bf16, which changes the model: checkpointing changes no
        number.
    False}) → False}, every_n_layers=2)
        only half of the layers run again, which saves too little for this card: leave
        every_n_layers at 1.
    """,
    changes="model.train model.hook model.config model.checkpointing",
)

# 5.6


def add_adapters(model, names, rank, lr):
    """Freeze ``model``, put a ``LoRALinear`` around every layer whose last name is in ``names``;
    AdamW for what is trained.
    """
    model.requires_grad_(False)
    for path, layer in list(model.named_modules()):
        parent, _, own = path.rpartition(".")
        if own in names:
            setattr(model.get_submodule(parent), own, LoRALinear(layer, rank))
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=lr)


LORA_CARD = "4.5 MiB"


def lora_setting():
    """A tiny Llama of three layers, not tied, and token ids (2, 24)."""
    with seeded(3):
        ids = torch.randint(2048, (2, 24))
    return tiny_llama(3, 2048), ids


@quietly
def adapter_cases(answer):
    model, _ = lora_setting()
    # The head is in none of the layers. No layer is called "up_", which is a part of a name.
    names = ("o_proj", "lm_head", "up_")
    paths = [path for path, _ in model.named_modules() if path.rpartition(".")[2] in names]
    optimizer = answer(model, names, 3, 0.1)
    named = [model.get_submodule(path) for path in paths]
    adapters = [layer for layer in model.modules() if isinstance(layer, LoRALinear)]
    right = [layer for layer in adapters if layer in named]
    yield f"names {names}, layers of these names that are a LoRALinear", len(right)
    yield f"names {names}, other layers that are one", len(adapters) - len(right)
    yield "the scale of each adapter", [layer.scale for layer in adapters]
    trained = trained_of(model)
    yield "how many numbers require a gradient", sum(p.numel() for p in trained)
    matrices = [adapters[0].A, adapters[-1].B]
    for matrix in matrices:
        nn.init.ones_(matrix)
    for gradient in (1.0, -0.5, 0.0):
        for matrix in matrices:
            matrix.grad = torch.full_like(matrix, gradient)
        optimizer.step()
    name = "a number of A and one of B, from 1 by AdamW with lr 0.1 and the gradients 1, -0.5 and 0"
    yield name, [matrix[0, 0] for matrix in matrices]
    yield from trained_adapter_cases(answer)


def trained_adapter_cases(answer):
    """Two updates of a model with adapters around other layers."""
    model, ids = lora_setting()
    with torch.no_grad():
        logits = model(input_ids=ids).logits

    def train():
        optimizer = answer(model, ("q_proj", "v_proj"), 4, 0.01)
        with torch.no_grad():
            unchanged = torch.equal(model(input_ids=ids).logits, logits)
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids).loss
            if loss.requires_grad:  # not where the adapters hang beside the layers
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return unchanged

    run = measured(train, LORA_CARD, model=model)
    yield "whether the logits are as before, until the first update", run.value
    yield "two updates, the peak", run


ADAPTERS = Exercise(
    "5.6",
    add_adapters,
    adapter_cases,
    """
    setattr(model.get_submodule(parent), own, → setattr(model, path,
        the adapters hang on the model itself, beside the layers: setattr needs the parent,
        model.get_submodule(parent), and the last part of the name.
    model.requires_grad_(False) →
        the adapters are there, but the rest of the model is trained too: freeze it before you add
        them.
    if own in names → if isinstance(layer, nn.Linear)
        every linear layer has an adapter, even the output layer with its large vocabulary: wrap
        only the named layers.
    return → [p.data.normal_() for name, p in model.named_parameters() if ".B" in name]; return
        the model has changed before its first update: B must start at zero, as LoRALinear leaves
        it, so that training starts from the base.
    p.requires_grad] → p.requires_grad and len(p) == rank]
        the optimizer has A but not B: B stays zero, so the product stays zero, and so does A's
        gradient.
    model.requires → optimizer = torch.optim.AdamW(model.parameters(), lr=lr); model.requires
    return torch.optim.AdamW(trained, lr=lr) → return optimizer
        the optimizer does not have A and B: it was made before the adapters, or got only weights
        that are frozen.
    trained = → model.requires_grad_(False); trained =
        nothing requires a gradient when the optimizer is made, so it gets an empty list: freeze
        first, then put each LoRALinear into its layer's parent (compare the last part of the
        path), and make the optimizer last.
    """,
    changes="model.requires_grad model.hook",
)

# 5.7


def held_out_loss(model, rows) -> float:
    """The mean loss over all predicted tokens of ``rows``, within the card; ``model`` is left as it
    was.
    """
    model.eval()
    total = 0.0
    with torch.no_grad():
        for micro in split(rows, 4):
            loss = model(**micro, use_cache=False).loss
            total += loss.item() * count_targets(micro["labels"])
    model.train()
    return total / count_targets(rows["labels"])


EVAL_CARD = "2.5 MiB"


def evaluation_setting():
    """A tiny GPT-2 with dropout and a key-value cache, in the middle of its training, and 18 rows
    of unequal lengths.
    """
    model = models.tiny_gpt2(layers=4, hidden=64, heads=4, positions=64, vocab=256, dropout=0.1)
    model.config.use_cache = True
    # rows that differ in their loss, as after training
    with_large_gradients(model.get_input_embeddings(), 20)
    return model, text_batch(*(2 + i * i % 61 for i in range(17)), 64, vocab=256)


@quietly
def evaluation_cases(answer):
    model, rows = evaluation_setting()
    run = measured(lambda: answer(model, rows), EVAL_CARD, model=model)
    yield "18 rows of unequal lengths, the mean loss over predicted tokens", run.value
    yield "18 rows of unequal lengths, the peak", run


EVALUATION = Exercise(
    "5.7",
    held_out_loss,
    evaluation_cases,
    """
    torch.no_grad() → torch.enable_grad()
        gradients are on, so every layer's activations are kept for a backward that never comes:
        torch.no_grad().
    model.train() →
        the loss is right, but the model is left in eval mode: training continues without dropout,
        and checkpointing saves no memory; call model.train().
    model.eval() →
        dropout is on, so a part of the activations is zero in this loss: call model.eval() first.
    loss.item() * count_targets(micro["labels"]) → loss.item()
    count_targets(rows["labels"]) → 5
        this is a mean of means: rows of few tokens, and the last, smaller piece, count as much as
        full ones; weight by predicted tokens.
    count_targets(micro["labels"]) → (micro["labels"] != -100).sum().item()
    count_targets(rows["labels"]) → (rows["labels"] != -100).sum().item()
        position 0 of each row is counted, and nothing predicts it: count labels[:, 1:], as
        count_targets does.
    split(rows, 4) → split({name: part[:16] for name, part in rows.items()}, 4)
    count_targets(rows["labels"]) → count_targets(rows["labels"][:16])
        the last rows are dropped: 18 rows are four pieces of 4 and one of 2.
    split(rows, 4) → [rows]
        all 18 rows go through at once: cut them into pieces, as in training.
    , use_cache=False →
        the key-value cache is on, as from_pretrained leaves it: keys and values of every layer
        are kept until the last layer has run. Here give use_cache=False.
    """,
)

# 5.1


def on_one_card(arguments: dict, gpus: int, fits: int) -> dict:
    """``arguments`` of a run on ``gpus`` cards, for one card that takes at most ``fits`` rows at a
    time.
    """
    train, steps = "per_device_train_batch_size", "gradient_accumulation_steps"
    batch = arguments[train] * arguments[steps] * gpus
    micro = max(m for m in range(1, fits + 1) if batch % m == 0)
    new = {train: micro, steps: batch // micro, "per_device_eval_batch_size": micro}
    return arguments | new


def card_cases(answer):
    for train, steps, gpus, fits in (
        (4, 4, 8, 2),
        (12, 2, 1, 7),
        (7, 1, 1, 4),  # one row at a time alone divides this batch
        (2, 8, 2, 16),  # more rows fit than a GPU of the run had
    ):
        given = {
            "per_device_train_batch_size": train,
            "gradient_accumulation_steps": steps,
            "per_device_eval_batch_size": 32,
            "max_steps": 600,
            "learning_rate": 2e-5,
        }
        name = f"{train} rows at a time, accumulation {steps}, GPUs: {gpus}, where {fits} rows fit"
        yield name, answer(given, gpus, fits)


ONE_CARD = Exercise(
    "5.1",
    on_one_card,
    card_cases,
    """
    batch // micro → arguments[steps]
        the global batch has changed: with the same accumulation it is another one; rows at a time
        x accumulation must stay what it was on all GPUs.
    * gpus →
        this forgets the other GPUs: each of them had rows of its own, and one card now has to
        work through them all.
    max(m for m in range(1, fits + 1) if batch % m == 0) → fits
        rows get lost: where the micro-batch does not divide the batch, take the largest one that
        does and fits.
    max(m for m in range(1, fits + 1) if batch % m == 0) → fits
    batch // micro → math.ceil(batch / micro)
        the batch has grown: where the micro-batch does not divide it, take the largest one that
        does and fits.
    max(m for m in range(1, fits + 1) if batch % m == 0) → 1
        the batch is right, but one row at a time is slower than necessary: take as many as fit.
    max(m for m in range(1, fits + 1) if batch % m == 0) → math.gcd(batch, fits)
        the batch is right, but this takes a divisor of `fits`: any number up to `fits` will do
        that divides the batch, and the largest one makes the fewest micro-batches.
    , "per_device_eval_batch_size": micro →
        training fits, but the evaluation still takes the old number of rows at a time: set
        per_device_eval_batch_size too.
    """,
)

# 5.10


def same_step(model, optimizer, batch) -> float:
    """One update on all rows of ``batch``, with a checkpoint on each block; the loss."""
    with checkpoint_layers(model.blocks, every=1):
        loss = F.cross_entropy(model(batch["x"]), batch["labels"])
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


RANDOM_CARD = "1.1 MiB"


def random_setting():
    """A residual net with dropout and drop path in training mode, its SGD, and 64 labelled rows."""
    model = residual_net(blocks=12, width=32)
    return model, sgd(model), labelled_rows(64, width=32)


def random_cases(answer):
    model, optimizer, batch = random_setting()
    # The seed is set inside, so that all that is drawn comes from the answer.
    torch.default_generator.manual_seed(5)
    run = measured(
        lambda: answer(model, optimizer, batch), RANDOM_CARD, model=model, optimizer=optimizer
    )
    # The loss first: where it is right, forward is.
    yield "the loss of a plain step from the same random state", run.value
    yield "the weights after a plain step from the same random state", weights_of(model)
    yield "whether a gradient is left behind", bool(gradients_of(model).any())
    yield "whether the loss has a graph", have_graphs(run.value)
    yield "the peak", run


SAME_STEP = Exercise(
    "5.10",
    same_step,
    random_cases,
    """
    with checkpoint_layers(model.blocks, every=1) → if True
        the step is right, and too large for the card: what forward keeps of 12 blocks has to be
        smaller.
    model(batch["x"]) → torch.cat([model(rows) for rows in batch["x"].split(16)])
        this is another update: each piece is a forward of its own, and draws other numbers for
        dropout and drop path. Keep all rows together.
    loss = → model.eval(); loss =
    optimizer.step() → model.train(); optimizer.step()
        the model is in evaluation mode: then it trains without dropout and drop path.
    loss = → torch.manual_seed(0); loss =
        this sets a seed of its own, so dropout and drop path draw other numbers than the plain
        step does: set no seed.
    optimizer.step() →
        the weights have not moved: call optimizer.step() once, after backward.
    optimizer.zero_grad() →
        gradients are left behind: call optimizer.zero_grad() after the step.
    """,
)

# 5.3


def train_epoch(optimizer, micro_batches, window, warmup, accumulate) -> None:
    """An update after every ``window`` micro-batches and one for the rest; the rate climbs for the
    first part ``warmup`` of the updates, then falls linearly.
    """
    from transformers import get_linear_schedule_with_warmup

    updates = math.ceil(len(micro_batches) / window)
    schedule = get_linear_schedule_with_warmup(optimizer, round(warmup * updates), updates)
    for start in range(0, len(micro_batches), window):
        accumulate(micro_batches[start : start + window])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def schedule_cases(answer):
    # Parts of 5 whole windows, 6 updates and 21 micro-batches: rounded or cut off, the same.
    for n, window, warmup in ((40, 4, 0.2), (21, 4, 0.5)):
        model = bigrams()
        optimizer = sgd(model, 0.01, momentum=0.5)
        rates: list[float] = []

        def accumulate(some, model=model):
            loss, count = bigram_loss(model)(torch.stack(list(some)))
            (loss / count).backward()

        def note(optimizer, *_, rates=rates):
            rates.append(float(optimizer.param_groups[0]["lr"]))

        optimizer.register_step_pre_hook(note)
        answer(optimizer, list(rows(*[4] * n)), window, warmup, accumulate)
        name = f"{n} micro-batches, window {window} and warmup {warmup}"
        yield f"{name}, how many updates the optimizer makes", len(rates)
        yield f"{name}, the learning rate of each update", torch.tensor(rates)
        yield f"{name}, the weights afterwards", weights_of(model)


SCHEDULE = Exercise(
    "5.3",
    train_epoch,
    schedule_cases,
    """
    schedule.step() → [schedule.step() for _ in micro_batches[start : start + window]]
        the schedule steps with every micro-batch: it ends after a part of the updates, and the
        others have a learning rate of 0.
    updates = math.ceil(len(micro_batches) / window) → updates = len(micro_batches)
        the schedule's length and warm-up are counted in micro-batches, but it steps with the
        updates: the learning rate rises too slowly, and the epoch ends before it has fallen.
    , updates) → , len(micro_batches))
        the schedule's length is counted in micro-batches, so the learning rate never falls to its
        end: count updates.
    round(warmup * updates) → warmup
        the warm-up is passed as a fraction of 1, but it is counted in steps: multiply it by the
        number of updates.
    schedule.step() →
    optimizer.step() → schedule.step(); optimizer.step()
        each update has the learning rate of the next one, as if the schedule stepped before the
        optimizer: optimizer first, so that the first rate is used.
    math.ceil(len(micro_batches) / window) → len(micro_batches) // window
        the schedule's length leaves out the last update: a window that is not full makes an
        update too, so round up.
    optimizer.zero_grad() →
        the gradients of one update are still there in the next: optimizer.zero_grad() is missing.
    accumulate(micro → [accumulate([some]) for some in micro
    window]) → window]]
        accumulate is called for each micro-batch by itself, and adds up their means: pass the
        whole window, a list.
    """,
    changes="optimizer.lr",
)

# 5.4


def train_and_log(model, window) -> float:
    """Leave the gradient of the mean loss over the window's predicted tokens; return that mean, to
    be logged.
    """
    counts = [count_targets(micro["labels"]) for micro in window]
    logged = 0.0
    for micro, count in zip(window, counts, strict=True):
        loss = model(**micro).loss * (count / sum(counts))
        loss.backward()
        logged += loss.item()
    return logged


LOG_CARD = "1.4 MB"


def log_setting():
    """A tiny Llama and a window of six micro-batches of unequal lengths."""
    lengths = [(32, 30), (4, 3), (9, 5), (17, 6), (28, 20), (2, 32)]
    window = [text_batch(*each, vocab=512, seed=seed) for seed, each in enumerate(lengths)]
    model = models.tiny_llama(layers=2, hidden=32, heads=2, intermediate=64, vocab=512)
    with_large_gradients(model.lm_head, 30)
    return model, window


@quietly
def log_cases(answer):
    model, window = log_setting()
    run = measured(lambda: answer(model, window), LOG_CARD, model=model)
    yield "micro-batches of unequal lengths, the gradient", gradients_of(model)
    yield "the loss that is returned", run.value
    yield "whether the loss has a graph", have_graphs(run.value)
    yield "the peak", run


LOG = Exercise(
    "5.4",
    train_and_log,
    log_cases,
    """
    * (count / sum(counts)) →
        gradient and log are K times too large: every micro-batch's mean must be weighted by its
        share of the tokens, which add up to 1.
    logged += → logged =
        the gradient is right, but the log has what was left in `loss`: the last micro-batch's
        part of the window's loss.
    += loss.item() → += loss.item() * sum(counts) / count / len(window)
        the gradient is right, but the log is a mean of means: a micro-batch of few tokens counts
        as much as one of many.
    count / sum(counts)) → 1 / len(window))
        the losses are divided by K, or weighted by their rows. So gradient and log are a mean of
        means: weight each micro-batch by its share of the tokens.
    count_targets(micro["labels"]) → (micro["labels"] != -100).sum().item()
        position 0 of each row is counted, and nothing predicts it: count labels[:, 1:], as
        count_targets does.
    count_targets(micro["labels"]) → micro["labels"].numel()
        padding has weight here: a micro-batch's share is its predicted tokens, not all of its
        labels.
    loss.item() → loss
        the number is right, but it is a tensor with a graph: it keeps 4 bytes a loss after
        backward, and all activations if backward has not run, as in an evaluation; log
        loss.item().
    loss.backward() →
    loss.item() → loss
    return logged → logged.backward(); return logged.item()
        one backward at the end keeps every micro-batch's graph until then: call backward for each.
    """,
)

# 5.5


def train_mixed(model, batches, lr):
    """One AdamW update for each batch, in place: matrices multiplied in bf16, weights and states in
    float32; the optimizer.
    """
    model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def bf16_setting():
    """A tiny Llama whose weights are bf16, its head tied to its embedding, and three batches."""
    model = models.tiny_llama(layers=2, hidden=32, heads=2, intermediate=64, vocab=128, tied=True)
    batches = [text_batch(16, 16, vocab=128, seed=seed) for seed in range(3)]
    return model.to(torch.bfloat16), batches


@quietly
def dtype_cases(answer):
    model, batches = bf16_setting()
    optimizer = answer(model, batches, 0.01)
    states = [t.dtype for state in optimizer.state.values() for t in state.values()]
    yield "dtypes of the weights", words(p.dtype for p in model.parameters())
    yield "dtypes of the optimizer's states", words(states)
    yield "the weights after three updates with lr 0.01", weights_of(model)


def words(dtypes) -> str:
    return " and ".join(sorted(set(map(str, dtypes))))


MIXED = Exercise(
    "5.5",
    train_mixed,
    dtype_cases,
    """
    model.float() →
        weights and AdamW's states are bf16: autocast (bf16=True) chooses the dtype of operations,
        and does not change a checkpoint's weights; call model.float() first.
    model.float() → model.half()
        half() is float16, not float32: each number still has two bytes, and small gradients
        become 0.
    model.float() →
    optimizer.zero_grad() → optimizer.zero_grad(); model.float()
        model.float() comes after the first update: AdamW has already made its states in bf16, and
        the mixture of dtypes raises an error; cast first.
    model.float() → model = copy.deepcopy(model).float()
        this trains a copy, and the given model has not changed: model.float() casts in place.
    with torch.autocast("cpu", dtype=torch.bfloat16) → if True
        weights and states are float32, and so is everything else: forward runs outside
        torch.autocast.
    optimizer.zero_grad() →
        the gradients include those of earlier batches: call optimizer.zero_grad() after each step.
    """,
    changes="model.train model.config",
)

# 5.9


def step_in_backward(model, lr, steps):
    """Step each trained parameter of ``model`` as soon as its gradient is complete, by a rate that
    falls from ``lr`` to 0 in so many ``steps``, and free the gradient; return what ``Trainer``
    takes for an optimizer.
    """
    from transformers import get_scheduler
    from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers = {p: torch.optim.AdamW([p], lr=lr) for p in trained}
    schedules = {p: get_scheduler("linear", optimizers[p], 0, steps) for p in trained}

    def step_and_free(p):
        optimizers[p].step()
        schedules[p].step()
        optimizers[p].zero_grad()

    for p in trained:
        p.register_post_accumulate_grad_hook(step_and_free)
    return LayerWiseDummyOptimizer(optimizer_dict=optimizers, lr=lr)


BACKWARD_CARD = "6 MiB"


def backward_setting(tied):
    """A tiny Llama of eight layers, and three rows for ``Trainer``; ``tied``: two layers, one
    embedding, the first layer frozen.
    """
    model = tiny_llama(2 if tied else 8, 256, tied=tied)
    model.model.layers[0].requires_grad_(not tied)
    with seeded(4):
        ids = torch.randint(256, (3, 16))
    return model, [{"input_ids": row, "labels": row} for row in ids]


def two_weights(answer):
    """Two weights of 1 whose gradients are 1, after each of two updates: for pen and paper."""
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    answer(model, 0.1, 4)
    for update in ("first", "second"):
        model(torch.ones(1, 1)).backward()
        model.zero_grad()  # as Trainer does: it finds nothing where a hook has freed
        name = f"two weights of 1, their gradients 1, lr 0.1 and 4 steps, after the {update} update"
        yield name, [p.item() for p in model.parameters()]


@quietly
def backward_cases(answer):
    from transformers import Trainer

    yield from two_weights(answer)
    for tied, lr, steps in ((False, 1e-3, 3), (True, 3e-4, 6)):
        model, rows = backward_setting(tied)

        def train(model=model, rows=rows, lr=lr, steps=steps):
            optimizer = answer(model, lr, steps)
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(
                    "Trainer takes an optimizer: return LayerWiseDummyOptimizer(lr=lr), not "
                    f"{type(optimizer).__name__}"
                )
            fixed = {"per_device_train_batch_size": 1, "max_steps": 3, "max_grad_norm": 0.0}
            with quiet_arguments(**fixed) as arguments:
                optimizers = (optimizer, None)
                Trainer(model, arguments, train_dataset=rows, optimizers=optimizers).train()

        run = measured(train, BACKWARD_CARD, model=model)
        name = f"lr {lr:g} and {steps} steps"
        if tied:
            name += ", tied weights and a frozen layer"
        yield f"{name}, the weights after three updates", weights_of(model)
        yield f"{name}, the peak", run


IN_BACKWARD = Exercise(
    "5.9",
    step_in_backward,
    backward_cases,
    """
    p.register_post_accumulate_grad_hook(step_and_free) → pass
    return LayerWise → return torch.optim.AdamW(trained, lr=lr); return LayerWise
        this is an ordinary AdamW: Trainer steps after backward, and all gradients wait for it.
    optimizers[p].zero_grad() →
        the weights are right, but every gradient waits for the end of backward: free each one in
        its hook, after the step.
    post_accumulate_grad_hook(step_and_free) → hook(lambda _, p=p: step_and_free(p))
        no optimizer has stepped on a gradient: .grad is there in a hook of
        register_post_accumulate_grad_hook, until zero_grad(). In a hook of register_hook it is not
        written yet.
    schedules[p].step() →
        the learning rate never falls: Trainer's schedule changes only the dummy optimizer, so step
        a schedule for each real optimizer in its hook.
    step_and_free(p): → step_and_free(_):
        every hook steps only the last parameter: a function defined in a loop sees the loop's last
        value, so use the parameter that the hook is given.
    """,
    changes="model.hook",
)
