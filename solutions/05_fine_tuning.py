# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 · Fine-tuning, all of it combined
#
# *60 to 75 minutes, of which your machine computes some twelve. You need: lessons 01, 03 and 04.*
#
# You have one task, one card that is too small for it, and everything that you have built so far. You will bring a real
# fine-tuning run of Hugging Face's `Trainer` under a quarter of its memory, one technique at a time, and see what each
# of them is worth. Some are worth nothing here. After this lesson you can
#
# - read from a breakdown which technique comes next, and which will do nothing;
# - say for each what it costs: in time, in exactness, in what is trained;
# - tell the switches of `transformers` that do something from those that are ignored.

# %%
import gc
import math
import os
import time
import warnings

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from gradmem_lib import BudgetExceeded, check, predict_first
from gradmem_lib.course import claims, models, texts

# %%
from gradmem_lib import (
    LoRALinear,
    MemoryCallback,
    Recipe,
    Waterfall,
    arguments,
    count_targets,
    make_trainer,
    merge_adapters,
    plan,
    predict,
    split,
)

# %% [markdown]
# ## 1 · The task
#
# SmolLM2-135M writes English. You will train it to write *Python's language reference*. Rows have 128 tokens, and an
# update sees 8 rows. Another 8 rows come from topics that the model never trains on.

# %%
model, tokenizer = models.smollm2()
config = model.config
training, held_out = texts.datasets(tokenizer, seq_len=128, rows=256, held_out=8)
train_rows = list(training)
print(tokenizer.decode(train_rows[0]["input_ids"][:60]))

# %% [markdown]
# First, let the model continue a sentence, before you train it. You will compare later.


# %% tags=["nbval-ignore-output"]
def complete(model, prompt="If the object is a class instance,"):
    inputs = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=24, do_sample=False, use_cache=True)
    return tokenizer.decode(out[0])


before = complete(model)
print(before)

# %% [markdown]
# Twenty updates are a fine-tuning in miniature, and enough to see it work. (The course's own tests set the environment
# variable `GRADMEM_SIZE=ci`, which stops after two. No byte below depends on it.)

# %%
SIZE = os.environ.get("GRADMEM_SIZE", "full")
STEPS = {"full": 20, "ci": 2}[SIZE]

# %% [markdown]
# ## 2 · The card
#
# The **naive run** is plain AdamW in float32, with the batch in one piece. What will a step need? You can do most of
# this sum since lesson 01: weights, gradients and two states, each 4 bytes, for 134,515,008 parameters. And the
# activations?

# %%
question = "SmolLM2, AdamW, float32, 8 × 128 tokens at once: the peak of a step?"
guess_a = predict_first("5.a", question)

# %% [markdown]
# Your card has **0.8 GiB**. A `Recipe` holds every decision about memory, and `make_trainer` makes a `Trainer` that
# follows it. The budget is the one that you know from the tracker.

# %%
BUDGET = "0.8 GiB"
trainer = make_trainer(
    model,
    Recipe(),
    batch_size=8,
    train_dataset=train_rows,
    max_steps=1,
    budget=BUDGET,
    progress=False,
    title="naive, on the small card",
)
try:
    trainer.train()
except BudgetExceeded as error:
    print(error)

# %% [markdown]
# Not even the first forward fits. The trainer stopped and the model is as it was. So you can ask how well the model
# does on the rows that it will never see. (The loss is in nats per token.)

# %% tags=["nbval-ignore-output"]
loss_before = trainer.evaluate(held_out)["eval_loss"]
print(f"held-out loss before: {loss_before:.2f}")
del model, trainer

# %% [markdown]
# ## 3 · Where the bytes are
#
# Your laptop is larger than that card, so measure the naive run without a budget. First come three helpers. This
# callback takes the time of a step:


# %%
class Clock(TrainerCallback):
    """The seconds of the last step."""

    def on_step_begin(self, args, state, control, **more):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **more):
        self.seconds = time.perf_counter() - self.began


# %% [markdown]
# To know the bytes of a step, one step is enough, if AdamW has its states already. This callback makes them by a step
# on gradients of zero, which changes no weight:


# %%
class States(TrainerCallback):
    def on_train_begin(self, args, state, control, model, optimizer, **more):
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()


# %% [markdown]
# `train` loads SmolLM2 again, trains it by a recipe, and returns the trainer with the seconds of its last step.


# %%
def train(recipe, rows, steps, **more):
    gc.collect()  # a Trainer refers to itself: free the last one first
    torch.manual_seed(0)  # adapters start from random numbers
    model, _ = models.smollm2(dtype=recipe.weight_dtype)
    clock = Clock()
    callbacks = [clock, States()] if steps == 1 else [clock]
    fixed = {"train_sampling_strategy": "sequential", "logging_steps": 1}
    fixed |= {"eval_dataset": held_out, "callbacks": callbacks, "live": False}
    fixed |= {"train_dataset": rows, "max_steps": steps} | more
    trainer = make_trainer(model, recipe, batch_size=8, **fixed)
    trainer.train()
    return trainer, clock.seconds


# %% [markdown]
# `trainer.memory` is a `MemoryCallback`, which any `Trainer` takes. Its `by_step` has the peak of each step. The next
# cells put the last step's peak beside what `predict` says without running anything:


# %%
def last_peak(trainer):
    return trainer.memory.by_step[trainer.state.global_step]


def compare(expected, measured):
    print(f"{'at the peak':<14}{'predicted':>16}{'measured':>16}{'difference':>12}")
    for name in (*measured.by_category, "total"):
        p, m = (dict(s.by_category, total=s.total)[name] for s in (expected, measured))
        if p or m:
            print(f"{name:<14}{p:>16,}{m:>16,}{m - p:>+12,}")
    print(f"in {measured.phase}")


# %% [markdown]
# Every bar of the next chart is a run of this notebook.

# %%
chart = Waterfall(budget=BUDGET, title="SmolLM2-135M, 8 × 128 tokens an update")


def predicted(**changes):
    recipe = Recipe(**changes)
    return predict(config, batch_size=8, seq_len=128, recipe=recipe, target="cpu").peak


def bar(name, changes, run=None, aside=False, **more):
    trainer, seconds = run or train(Recipe(**changes), train_rows, 1, **more)
    measured = last_peak(trainer)
    compare(predicted(**changes), measured)
    chart.add(name, measured, seconds=seconds, tokens=8 * 128, aside=aside)
    return chart


# %% [markdown]
# The naive run trains for all its steps, because you will need its losses. It is the longest wait of the lesson, some
# minutes. You can think about section 4's question meanwhile.

# %%
curve_rows = train_rows
if SIZE == "ci":  # the first of the two steps on four tokens a row
    short = [{name: ids[:4] for name, ids in row.items()} for row in train_rows[:8]]
    curve_rows = short + train_rows[:16]


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


naive = train(Recipe(), curve_rows, STEPS, learning_rate=5e-5)
naive_losses = losses(naive[0])
naive_after = naive[0].evaluate()["eval_loss"]
naive_sentence = complete(naive[0].model)
naive_peak = last_peak(naive[0])

# %%
bar("naive", {}, run=naive)

# %%
del naive
guess_a.reveal(formula=predicted().total, measured=naive_peak.total)
print(f"a quarter of it: {naive_peak.total // 4:,} bytes; the card: {chart.budget:,}")

# %% [markdown]
# Almost every part is predicted to the byte. The smallest one, "other", is some kilobytes off: `predict` feeds one
# tensor as inputs and as labels, while a `DataLoader` makes two and prefetches one more micro-batch. You will see these
# kilobytes in every run below. (The 4 or 8 bytes of activations are losses that `Trainer` keeps for its log.)
#
# ## 4 · Which first?
#
# More than half of the peak is activations and the logits' temporaries. You know two techniques that shrink those:
# accumulation and checkpointing. **Decide from the breakdown, before you read on:** which of them would you take first?
# Will you need both? Will both be enough?

# %%
question = "Cut into 8 micro-batches of one row, how many per cent lower is the peak?"
guess_b = predict_first("5.b", question, unit="percent")

# %% [markdown]
# If the batch is cut into 8, that half should almost vanish. But lesson 03 showed something else. Here are all four
# ways, predicted:

# %%
cut, rerun = {"accumulation": 8}, {"checkpointing": "per-layer"}
orders = {"naive": {}, "cut": cut, "checkpoints": rerun, "both": cut | rerun}
for name, changes in orders.items():
    peak = predicted(**changes)
    row = [f"{name} {n / 2**20:,.0f}" for name, n in peak.by_category.items() if n > 2**20]
    print(f"{name:<12}{peak.total:>14,}  MiB:", ", ".join(row))

# %% [markdown]
# The naive peak is at the *beginning* of backward, where no gradient exists. Accumulation keeps the gradients of the
# earlier micro-batches, 513 MiB of them. Checkpoints move the peak to the *end* of backward, where all gradients are
# there as well. So checkpointing alone comes out lower than accumulation here, and both together no lower than
# accumulation alone. The rest is what neither of them changes: weights, gradients, states.
#
# Which is the better buy? Checkpointing costs up to a third more work, whatever the batch. What accumulation costs
# depends on the micro-batch: little where one row keeps the machine busy, a lot where rows are short, as here. But the
# card decides first. The planner says what fits on yours, with all weights trained:

# %%
print(plan(config, card=BUDGET, seq_len=128, global_batch=8, target="cpu"))

# %% [markdown]
# Read it from the end. Float32 is ruled out before any activation is counted. So is autocast, which changes neither
# weights nor states, and so is bf16 with AdamW. (8-bit AdamW passes that sum and fails the prediction.) What is left is
# an optimizer with almost no states, Adafactor. With it *either* technique is enough: one row at a time without
# checkpoints, or all rows at once with checkpoints and with the loss in chunks, because no checkpoint shrinks the
# logits.
#
# So the question of which comes first concerns the part of the peak that the two can change, *after* the rest fits.
# Lesson 06 has a chart for that decision.

# %% [markdown]
# ## 5 · Micro-batches
#
# `Trainer` has two names for your decision: `per_device_train_batch_size` and `gradient_accumulation_steps`. The global
# batch is their product, times the number of GPUs. Nothing reminds you of that when you change one of the three.

# %% [markdown]
# ### Exercise 5.1 · the same batch on one card
#
# ●○○ · 5 minutes · trains: rows, accumulation and GPUs, and what must not change with them
#
# Someone trained with these `TrainingArguments` on several GPUs. You have one card, which takes at most `fits` rows at
# a time. Write `on_one_card(arguments, gpus, fits)`: the same fields for the *same global batch* on your card, as few
# micro-batches as possible, all of the same size. An evaluation shall take its rows by the micro-batch too. All other
# fields stay what they need to be: which of them count micro-batches?
#
# <details><summary>Hint 1: the global batch</summary>
#
# Every GPU takes `per_device_train_batch_size` rows, `gradient_accumulation_steps` times, before there is one update.
#
# <details><summary>Hint 2: when `fits` does not divide it</summary>
#
# For 24 rows where 5 fit, it is 4 × 6: the largest size that fits and leaves no remainder.
#
# <details><summary>Hint 3: the other fields</summary>
#
# `max_steps` and `warmup_steps` count optimizer steps, and the learning rate belongs to the global batch. Neither
# changes.
#
# </details></details></details>


# %%
def on_one_card(arguments, gpus, fits):
    """A new dict, arguments | {...}, in which you set per_device_train_batch_size,
    gradient_accumulation_steps and per_device_eval_batch_size."""
    ### BEGIN SOLUTION
    train, steps = "per_device_train_batch_size", "gradient_accumulation_steps"
    batch = arguments[train] * arguments[steps] * gpus
    micro = max(m for m in range(1, fits + 1) if batch % m == 0)
    new = {train: micro, steps: batch // micro, "per_device_eval_batch_size": micro}
    return arguments | new
    ### END SOLUTION


on_one_card = check("5.1", on_one_card)

# %% [markdown]
# Now run the second bar, with as many steps as the naive one:

# %%
accumulated = train(Recipe(**cut), curve_rows, STEPS, learning_rate=5e-5)
cut_losses = losses(accumulated[0])
cut_peak = last_peak(accumulated[0])
bar("micro-batches, 8 × 1", cut, run=accumulated)

# %%
del accumulated
guess_b.reveal(measured=round(100 * (1 - cut_peak.total / naive_peak.total)))

# %% [markdown]
# ### On the same curve?
#
# Both runs must train the same thing. Here are the two loss curves, step by step:

# %% tags=["nbval-ignore-output"]
print("step    whole batch    8 × 1")
for step, pair in enumerate(zip(naive_losses, cut_losses, strict=True), 1):
    print(f"{step:>4}{pair[0]:>15.4f}{pair[1]:>9.4f}")

# %%
apart = max(abs(a - b) for a, b in zip(naive_losses, cut_losses, strict=True))
print(f"{len(cut_losses)} steps, everywhere less than 0.005 apart: {apart < 0.005}")

# %% [markdown]
# They differ only by rounding. `Trainer` divides by the tokens of the whole window, as you did in lesson 03.
#
# ## 6 · Checkpointing
#
# Next comes a checkpoint a layer on top of it: Trainer's `activation_checkpointing=True`. How much lower is the peak?

# %%
question = "A checkpoint on each of the 30 layers: how many MiB lower is the peak?"
guess_c = predict_first("5.c", question, unit="MiB")

# %%
picture = {"live": None, "title": "8 micro-batches, a checkpoint a layer"}
bar("+ checkpointing", cut | rerun, **picture)

# %%
checkpointed = chart.bars[-1]
lower = predicted(**cut).total - predicted(**cut | rerun).total
measured_lower = cut_peak.total - checkpointed.total
guess_c.reveal(formula=lower / 2**20, measured=round(measured_lower / 2**20, 1))

# %% [markdown]
# **It does not move.** The peak is at the end of backward, where activations are almost gone and all gradients and
# states are there. The temporaries are three tables of 49,152 × 576 numbers. The embedding is the output layer as well,
# so its next gradient is two tables and their sum. No activation is left that a checkpoint could save. You pay for the
# second forward all the same.
#
# Still, leave it on, and remember this moment: later you will switch it off, and it will matter.
#
# ### The switch and its names
#
# Since version 5.23 transformers calls it `activation_checkpointing`. The older name warns, and will be removed in
# version 6:

# %%
fields = TrainingArguments.__dataclass_fields__
print([name for name in fields if "checkpointing" in name])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    TrainingArguments(output_dir="out", gradient_checkpointing=True)
print(caught[0].message)

# %% [markdown]
# The next cell prints what a recipe becomes in the words of `TrainingArguments`. `make_trainer` passes this on, and
# `plan` prints the same:

# %%
for name, value in arguments(Recipe(**cut | rerun), micro_batch=1).items():
    print(f"{name} = {value!r}")

# %% [markdown]
# Older code also sets `model.config.use_cache = False`, and a warning appears when that line is missing. A cache keeps
# keys and values of earlier tokens, for generating. Training has no use for it. Does it cost anything?

# %%
claims.show("C43")

# %% [markdown]
# You cannot spell a flag wrong in `TrainingArguments` without an error. But some of what the documents advise is
# accepted and does something else, or nothing:

# %%
claims.show("C46", "C47", "C56")

# %% [markdown]
# To be sure, always run one step and look: `MemoryCallback` puts `by_step` into any `Trainer`. And a switch that is on
# may still do nothing. Checkpointing has a second condition, which is easy to miss.

# %% [markdown]
# ### Exercise 5.2 · checkpointing that happens
#
# ●●○ · 6 minutes · trains: making sure that a switch has switched something
#
# `model` is a small Llama as `from_pretrained` leaves it. Write `switch_on(model)`: afterwards a training step on the
# model must stay under **5 MiB**, where it takes 10.0 MiB now, and every gradient must be what it was. (The check takes
# two steps: on token ids, and on vectors given as `inputs_embeds`, as models of pictures and soft prompts do.)
#
# <details><summary>Hint 1: the switch</summary>
#
# `model.activation_checkpointing_enable()`. Its old name, `gradient_checkpointing_enable`, works until version 6.
#
# <details><summary>Hint 2: nothing has changed</summary>
#
# A layer runs its checkpoint `if self.gradient_checkpointing and self.training`. What does `from_pretrained` leave?
#
# <details><summary>Hint 3: the second step has no gradients</summary>
#
# `use_reentrant=True` is the trap of exercise 4.3. The default is `False` now.
#
# </details></details></details>


# %%
def switch_on(model):
    """Change model in place; nothing needs to be returned."""
    ### BEGIN SOLUTION
    model.train()
    model.activation_checkpointing_enable()
    ### END SOLUTION


switch_on = check("5.2", switch_on)

# %% [markdown]
# ## 7 · The loss stays right
#
# Two things must not change with the micro-batch. The first is what counts as a *step*. Schedules and warm-ups count
# updates, and so do `max_steps`, `warmup_steps` and `logging_steps`. In a loop of your own, you have to count them.

# %% [markdown]
# ### Exercise 5.3 · a schedule in optimizer steps
#
# ●●○ · 8 minutes · trains: counting updates, not micro-batches, in a loop that accumulates
#
# Write one epoch with a learning rate that climbs from 0 during the first part `warmup` of the updates (0.25: a
# quarter), then falls in a line to 0. `micro_batches` is a list. `accumulate(some)` runs forward and backward on a list
# of them. Every `window` of them make one update, and what is left makes a last one.
#
# <details><summary>Hint 1: how long is the schedule?</summary>
#
# `get_linear_schedule_with_warmup(optimizer, warm-up steps, all steps)`: steps are calls of `schedule.step()`. How many
# updates are in the epoch, the last incomplete one included?
#
# <details><summary>Hint 2: the order</summary>
#
# The schedule sets the first learning rate when it is made. So the order is: accumulate, optimizer, schedule, zero.
#
# </details></details>

# %%
from transformers import get_linear_schedule_with_warmup


def train_epoch(optimizer, micro_batches, window, warmup, accumulate):
    """Nothing to return: the check watches the learning rate of each update."""
    ### BEGIN SOLUTION
    updates = math.ceil(len(micro_batches) / window)
    schedule = get_linear_schedule_with_warmup(optimizer, round(warmup * updates), updates)
    for start in range(0, len(micro_batches), window):
        accumulate(micro_batches[start : start + window])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    ### END SOLUTION


train_epoch = check("5.3", train_epoch)

# %% [markdown]
# The second thing is the loss, in the log and in what is trained.

# %% [markdown]
# ### Exercise 5.4 · the loss in the log
#
# ●●○ · 6 minutes · trains: logging what is trained, and holding on to nothing for it
#
# `window` is a list of micro-batches, dicts for the model, and `model(**micro).loss` is a micro-batch's *mean*. Write
# `train_and_log(model, window)`: leave in `.grad` the gradient of the mean loss over all predicted tokens of the
# window, and return that mean for the log. The budget of **1.4 MB** allows one micro-batch's logits at a time.
#
# <details><summary>Hint 1: shares</summary>
#
# A micro-batch predicts `count_targets(micro["labels"])` tokens, and the window predicts the sum of these numbers. What
# part of the window's mean is this micro-batch's mean?
#
# <details><summary>Hint 2: the log</summary>
#
# Add up what you call `backward` on. As numbers: `.item()`.
#
# </details></details>


# %%
def train_and_log(model, window):
    """The window's mean loss, a float; neither steps nor zeroes."""
    ### BEGIN SOLUTION
    counts = [count_targets(micro["labels"]) for micro in window]
    logged = 0.0
    for micro, count in zip(window, counts, strict=True):
        loss = model(**micro).loss * (count / sum(counts))
        loss.backward()
        logged += loss.item()
    return logged
    ### END SOLUTION


train_and_log = check("5.4", train_and_log)

# %% [markdown]
# And if the model does not cooperate? You met the trap in lesson 03: transformers' classifiers take the number of items
# and ignore it, and `Trainer` relies on it. The next cells compare 4 accumulation steps with one batch, for one update
# on four examples. A plain `Trainer` comes first, then `make_trainer`:

# %%
from gradmem_lib.course import trainer_logs, trainer_setting


def by_recipe(kind, steps):
    patient, examples = trainer_setting(kind)
    fixed = {"max_steps": 1, "max_grad_norm": 1e9, "logging_steps": 1, "progress": False}
    fixed |= {"batch_size": 4, "train_dataset": examples, "live": False}
    ours = make_trainer(patient, Recipe(accumulation=steps), **fixed)
    ours.train()
    return ours.state.log_history[0]


# %%
classifiers = ("LlamaForSequenceClassification", "BertForSequenceClassification")
for kind in ("LlamaForCausalLM", *classifiers):
    plain = [trainer_logs(*trainer_setting(kind), accumulation_steps=n) for n in (1, 4)]
    ours = [by_recipe(kind, n) for n in (1, 4)]
    for name in ("loss", "grad_norm"):
        print(f"{kind:<31}{name:<11}", end="")
        print(f"Trainer × {plain[1][name] / plain[0][name]:.3f}", end="   ")
        print(f"make_trainer × {ours[1][name] / ours[0][name]:.3f}")

# %% [markdown]
# The trainer of this course does not ask whether a model divides. It takes the mean that the model returns, and weights
# it by the micro-batch's share of the labels. With a plain `Trainer`, set `model.accepts_loss_kwargs = False`.
#
# ## 8 · Precision
#
# "Turn on `bf16=True`, it halves the memory." Every tutorial has this flag. What does it halve?

# %%
question = "bf16=True on top of this run: how many per cent lower is the peak?"
guess_d = predict_first("5.d", question, unit="percent")

# %%
bar("or: bf16=True", cut | rerun | {"precision": "autocast-bf16"}, aside=True)

# %%
guess_d.reveal(measured=round(100 * (1 - chart.bars[-1].total / checkpointed.total)))
claims.show("C11")

# %% [markdown]
# The flag is *autocast*: matrices are multiplied in bf16, and weights, gradients and states stay in float32. Where
# activations are the peak it helps. Here the peak moved into forward, where autocast keeps a bf16 copy of every weight.
#
# `fp16=True` is the same with float16, and needs a card. What does it do without one? The next cells put
# `MemoryCallback` into a plain `Trainer`:

# %%
ids = torch.randint(0, 8192, (32, 64), generator=torch.Generator().manual_seed(0))
tiny_rows = [{"input_ids": row, "labels": row} for row in ids]


def plain_trainer(model, **flags):
    fixed = {"output_dir": "out", "max_steps": 2, "use_cpu": True, "disable_tqdm": True}
    fixed |= {"report_to": "none", "save_strategy": "no"}
    with MemoryCallback(live=False) as memory:
        args = TrainingArguments(**fixed, **flags)
        plain = Trainer(model, args, train_dataset=tiny_rows, callbacks=[memory])
        plain.remove_callback(PrinterCallback)
        plain.train()
    return plain, memory


# %%
for dtype in (torch.float32, torch.bfloat16):
    for flags in ({}, {"fp16": True}, {"bf16": True}):
        plain, memory = plain_trainer(models.tiny_llama(dtype=dtype), **flags)
        state = plain.optimizer.state[next(plain.model.parameters())]
        row = f"loaded in {dtype}, {flags!s:<14} AdamW's states: {state['exp_avg'].dtype},"
        print(row.replace("torch.", ""), f"peak {memory.by_step[2].total:>11,}")

# %% [markdown]
# These six lines show two traps. **On the CPU `fp16=True` does nothing**, and says nothing. And the last three lines
# are equal, because transformers loads a checkpoint in the dtype in which it was saved, which is bf16 for most. Then
# the *weights* are in bf16, and so are AdamW's states, whatever the flag says. That is less memory, but an update much
# smaller than 1/256 of its weight is rounded away.

# %% [markdown]
# ### Exercise 5.5 · a checkpoint in bf16, states in float32
#
# ●●○ · 6 minutes · trains: knowing where autocast ends and a model's own dtype begins
#
# `model` comes from a checkpoint in bf16, as most do today. Write `train_mixed(model, batches, lr)`: one AdamW update
# for each batch, on this very model. Matrices are to be multiplied in bf16. Weights, gradients and AdamW's states are
# to be float32. The learning rate is 1e-5: in bf16, about six weights in seven of this model would not move at all.
#
# <details><summary>Hint 1: what does autocast cast?</summary>
#
# It casts the inputs of some operations, while they run. It never casts the weights themselves, nor what the optimizer
# makes.
#
# <details><summary>Hint 2: when?</summary>
#
# `model.float()` casts in place. AdamW makes its states in its first `step()`, in the dtype that the weights have then.
#
# </details></details>


# %%
def train_mixed(model, batches, lr):
    """Train model in place, a batch an update; return the optimizer.
    Autocast: torch.autocast("cpu", dtype=torch.bfloat16)."""
    ### BEGIN SOLUTION
    model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer
    ### END SOLUTION


train_mixed = check("5.5", train_mixed)

# %% [markdown]
# To halve everything, load the model in bf16 and train it so: weights, gradients and states. You know the price,
# rounded updates. Frozen weights do not pay it, because nothing updates them. Section 10 adds adapters, which start
# near zero and pay little.

# %%
recipe = cut | rerun | {"precision": "bf16"}
bar("+ all in bf16", recipe)

# %% [markdown]
# ## 9 · The optimizer
#
# The longest part of the bar is AdamW's states. There are two ways to have less of them:
#
# - **8-bit AdamW** keeps the same two moments in one byte a number, with a scale for each block of numbers.
# - **Adafactor** keeps sums of rows and of columns instead of the second moment, and no first moment.
#
# Which of them will have the lower peak? First guess the size of Adafactor's states:

# %%
question = "Adafactor's states for 134,515,008 parameters: how many bytes?"
guess_e = predict_first("5.e", question)

# %%
recipe |= {"optimizer": "adamw-8bit"}
bar("+ 8-bit AdamW", recipe)

# %%
bar("or: Adafactor", recipe | {"optimizer": "adafactor"}, aside=True)

# %%
guess_e.reveal(measured=chart.bars[-1].by_category["optimizer"])

# %% [markdown]
# Adafactor's states are one and a half MiB, and its peak is the higher of the two. It is *in the optimizer's step* now:
# transformers' Adafactor makes float32 copies of a tensor while it updates it, and the largest tensor, the embedding,
# is a fifth of this model. The algorithm does not need these copies. PyTorch has an Adafactor too. It makes one copy,
# in the weights' own dtype:

# %%
every_weight = cut | {"precision": "bf16", "optimizer": "adafactor-torch"}
full = train(Recipe(**every_weight), curve_rows, STEPS, learning_rate=1e-3, budget=BUDGET)
full_after = full[0].evaluate()["eval_loss"]
bar("or: torch's Adafactor", every_weight, run=full, aside=True)

# %%
del full

# %% [markdown]
# **It fits**, with every weight trained, for all the steps. (In bf16 a large weight does not move in each of them.
# Checkpoints were left out: they cost time, and would lower this peak by less than one MiB.) The two optimizers have
# the same name and come from the same paper, and they need different bytes. To know an optimizer's memory, look at what
# its step does.
#
# `optim="adafactor"` is transformers' own. Torch's has no name in `TrainingArguments`. `make_trainer` knows it, and a
# plain `Trainer` takes it through `optimizer_cls_and_kwargs`. Two of its defaults do not suit fine-tuning:
#
# - Its learning rate is relative to the typical size of a tensor's weights, and the default 0.01 is for training from
#   nothing. T5 was fine-tuned with 0.001.
# - By default `eps` is the dtype's machine epsilon. In bf16 that is 1/128, larger than almost every gradient, and then
#   nothing is normalized. A recipe sets it to `1e-16`.
#
# As long as all gradients wait for the optimizer, little can be saved below this. In bf16, weights and gradients alone
# are 513 MiB. An optimizer that steps *during* backward and frees each gradient at once goes lower still. Then
# accumulation is impossible.
#
# ## 10 · LoRA
#
# The next idea is to train fewer weights. LoRA (low-rank adaptation) freezes the matrix W of a linear layer and adds
# two thin ones, **A** and **B**:
#
# $$\text{output} = W x + \frac{\alpha}{r}\, B\,(A\,x)$$
#
# A maps the input to r numbers, and B maps these to the output. r is the **rank**, and the number **alpha** sets how
# much the addition counts (`LoRALinear` takes 2 r unless you say otherwise). A starts random and B starts at zero, so
# the model begins as it was. Only A and B are trained: what is frozen needs no gradient and no state.
#
# The next bar adds LoRA of rank 16 on each linear layer to the bar with 8-bit AdamW:

# %%
question = "LoRA of rank 16 on every linear layer: the peak in bytes?"
guess_f = predict_first("5.f", question)

# %%
recipe |= {"lora_rank": 16}
bar("+ LoRA, rank 16", recipe)

# %%
lora = chart.bars[-1]
guess_f.reveal(formula=predicted(**recipe).total, measured=lora.total)

# %% [markdown]
# **It is less than half of the card.** Gradients and states are twenty MiB together. Activations and logits have come
# back: beside frozen weights they are the peak now. So switch the checkpoints off, and see whether they are still worth
# nothing:

# %%
bar("without checkpointing", recipe | {"checkpointing": None}, aside=True)

# %% [markdown]
# The switch that moved nothing in section 6 moves the peak here. A technique works on one part, and that part is at the
# peak or it is not.

# %% [markdown]
# ### Exercise 5.6 · adapters with something to train
#
# ●●○ · 8 minutes · trains: the order of freezing, adding and handing to the optimizer
#
# Write `add_adapters(model, names, rank, lr)`: freeze the model, replace each layer called by one of `names` (such as
# `"q_proj"`) by `LoRALinear(layer, rank)`, and return an AdamW for all that is trained. Two steps of it must stay under
# **4.5 MiB**. With every weight trained they take 7.3 MiB.
#
# <details><summary>Hint 1: a layer's place</summary>
#
# `model.named_modules()` gives paths: `"model.layers.0.self_attn.q_proj"`. `path.rpartition(".")` is `(parent, ".",
# own)`. Make a `list` of them first, since the model changes while you go through it.
#
# <details><summary>Hint 2: replacing it</summary>
#
# `setattr(model.get_submodule(parent), own, LoRALinear(layer, rank))`
#
# <details><summary>Hint 3: the order</summary>
#
# Freeze, add, and then look which parameters have `requires_grad`.
#
# </details></details></details>


# %%
def add_adapters(model, names, rank, lr):
    """Change model in place; return the optimizer."""
    ### BEGIN SOLUTION
    model.requires_grad_(False)
    for path, layer in list(model.named_modules()):
        parent, _, own = path.rpartition(".")
        if own in names:
            setattr(model.get_submodule(parent), own, LoRALinear(layer, rank))
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=lr)
    ### END SOLUTION


add_adapters = check("5.6", add_adapters)

# %% [markdown]
# ## 11 · The loss in chunks, and room to spend
#
# The temporaries of the bar are two tables of gradients of the logits, 49,152 float32 numbers a token each. A third
# such table, which the loss saved, is among the activations. `chunked_loss` never has more than 128 tokens of them.

# %%
recipe |= {"chunked_loss": True}
bar("+ loss in chunks", recipe)

# %% [markdown]
# There is one table less. The other two count as activations now, because this loss makes its gradient in forward
# already. One row is one chunk, so there is no more to save here. But now logits do not grow with the micro-batch, and
# more than half of the card is free. Unused memory can buy time. The next table predicts how many rows at a time fit:

# %%
print(f"{'rows at a time':<18}{'checkpointed':>14}{'not':>16}{'whole loss, not':>18}")
for pieces in (8, 2, 1):
    ways = ({}, {"checkpointing": None}, {"checkpointing": None, "chunked_loss": False})
    needs = [predicted(**recipe | {"accumulation": pieces} | way).total for way in ways]
    marks = [f"{n:,}{' *' if n <= chart.budget else '  '}" for n in needs]
    print(f"{8 // pieces:<14}{marks[0]:>18}{marks[1]:>16}{marks[2]:>18}")
print("* within the budget")

# %% [markdown]
# Four rows at a time fit without a checkpoint, so no layer runs twice, and there are two passes instead of eight.
# (Without chunks four rows would not fit.) AdamW may have its plain states back, too: for adapters, 8 bits save almost
# nothing. This recipe now trains for all its steps, **under the budget**:

# %%
recipe |= {"accumulation": 2, "checkpointing": None, "optimizer": "adamw"}
rate = 1e-3  # adapters start at zero, and take larger steps than good weights
final = train(
    Recipe(**recipe),
    curve_rows,
    STEPS,
    learning_rate=rate,
    budget=BUDGET,
    live=None,
    title="all of it, on the small card",
)
bar("2 × 4, no checkpoints", recipe, run=final)

# %% [markdown]
# The peak is less than a quarter of the naive one. On most machines it is also the fastest bar, because no layer runs
# twice and frozen weights need no gradients. The times are your machine's, with the tracker watching. On a card each
# technique has another price.
#
# ## 12 · Did it learn the same?
#
# A quarter of the memory is worth nothing if the model is worse. The rows that nobody trained on decide that. But an
# evaluation has to fit the card as well.

# %% [markdown]
# ### Exercise 5.7 · an evaluation within the card
#
# ●●○ · 8 minutes · trains: what an evaluation holds, and what it must leave as it was
#
# Training fits. Then comes the first evaluation, and the card is full. Write `held_out_loss(model, rows)`: the mean
# loss over all predicted tokens of 18 rows of unequal lengths, under **2.5 MiB**. The model is a small GPT-2 with
# dropout in the middle of its training, and its config is as `from_pretrained` leaves it.
#
# <details><summary>Hint 1: what an evaluation needs to hold</summary>
#
# It needs the weights, one layer at a time, and the logits of one piece. It needs no graph, and nothing from earlier
# layers.
#
# <details><summary>Hint 2: still too much</summary>
#
# `split(rows, size)` cuts rows. And a language model keeps the keys and values of all layers for tokens to come, unless
# it is called with `use_cache=False`.
#
# <details><summary>Hint 3: the number, and the model afterwards</summary>
#
# Weight each piece by `count_targets(micro["labels"])`. `model.eval()` before, `model.train()` after.
#
# </details></details></details>


# %%
def held_out_loss(model, rows):
    """The mean loss, a float. rows: a dict for the model. Leave it in train mode."""
    ### BEGIN SOLUTION
    model.eval()
    total = 0.0
    with torch.no_grad():
        for micro in split(rows, 4):
            loss = model(**micro, use_cache=False).loss
            total += loss.item() * count_targets(micro["labels"])
    model.train()
    return total / count_targets(rows["labels"])
    ### END SOLUTION


held_out_loss = check("5.7", held_out_loss)

# %%
rows = {
    name: torch.stack([row[name] for row in held_out]) for name in ("input_ids", "labels")
}
tuned = final[0].model
final_after = held_out_loss(tuned, rows)

# %% tags=["nbval-ignore-output"]
print(f"held-out loss: {loss_before:.2f}; after {STEPS} updates")
print(f"    naive                            {naive_after:.2f}")
print(f"    every weight, torch's Adafactor  {full_after:.2f}")
print(f"    all of it                        {final_after:.2f}")
sentences = {"before": before, "naive": naive_sentence, "all of it": complete(tuned)}
for name, sentence in sentences.items():
    print(f"\n--- {name}\n{sentence}")

# %% [markdown]
# (This notebook is stored with runs of two updates, which change little. Yours made twenty.)
#
# After twenty updates, all three losses are clearly below the start. The differences between them say little: eight
# rows, and three learning rates of which none was tuned. You may conclude *not worse*. Why LoRA, then, if every weight
# can be trained in as many bytes? Most of LoRA's bar is room that you chose to spend. It needs only half of it, and it
# is the faster one.
#
# ### Keep it
#
# Adapters can be written into the weights. What remains is an ordinary model without adapters, which anyone can load
# without this course.

# %%
import tempfile

from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
merged = merge_adapters(tuned).eval()
with tempfile.TemporaryDirectory() as folder:
    merged.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
same = [
    torch.equal(a, b) for a, b in zip(merged.parameters(), loaded.parameters(), strict=True)
]
kind = type(loaded).__name__
print(f"{kind} in {loaded.dtype}, {len(same)} tensors, all the same: {all(same)}")
del final, tuned, merged, loaded

# %% [markdown]
# ### Stop, and go on
#
# A run of hours will be interrupted. The notebook's stop button sends `KeyboardInterrupt`. The course's trainer then
# finishes its step, saves, and stops. The next cells train a tiny Llama with a callback that presses the button in step
# 3 of 6:

# %%
import signal


class Stop(TrainerCallback):
    def on_step_begin(self, args, state, control, **more):
        if state.global_step == 2:
            signal.raise_signal(signal.SIGINT)


def six_steps(folder, callbacks=()):
    fixed = {"batch_size": 8, "max_steps": 6, "live": False, "progress": False}
    fixed |= {"train_dataset": tiny_rows * 2, "callbacks": list(callbacks)}
    small = models.tiny_llama(layers=2, hidden=32, heads=2, intermediate=64)
    return make_trainer(small, Recipe(accumulation=2), output_dir=folder, **fixed)


# %%
with tempfile.TemporaryDirectory() as folder:
    through = six_steps(folder)
    through.train()
    try:
        six_steps(folder, [Stop()]).train()
    except KeyboardInterrupt as stopped:
        print(str(stopped).replace(folder, "out"))
    resumed = six_steps(folder)
    resumed.train(resume_from_checkpoint=True)
pairs = zip(through.model.parameters(), resumed.model.parameters(), strict=True)
same = all(torch.equal(a, b) for a, b in pairs)
step = resumed.state.global_step
print(f"after step {step}, the same as without a stop, to the bit: {same}")

# %% [markdown]
# A checkpoint holds the weights, the optimizer's states, the schedule, the place in the data and, for dropout, the
# random state. If one of them were missing, the last line would not say True. To save a checkpoint now and then, use
# `save_strategy="steps", save_steps=100`.

# %% [markdown]
# ## 13 · What you can now do
#
# - **Look where the peak is**, in which phase and of which category. Then choose.
# - **Weights, gradients and states come first.** If they exceed the card, no batch is small enough: use bf16, fewer
#   states, LoRA, or a step in backward.
# - **An optimizer is its states *and* its step.** The same name can have other temporaries.
# - **Accumulation** shrinks activations and keeps the gradients. It costs little as long as a micro-batch keeps the
#   card busy. **Checkpointing** shrinks activations, costs a forward, and is worth nothing where they are not the peak.
# - **`bf16=True` is autocast.** What halves the memory is the dtype in which the model was *loaded*, states included.
# - **The global batch, the schedule and the logged loss** must not change with the micro-batch. Compare one update at 1
#   and at K steps.
# - **Spend what is left.** A recipe that leaves half the card empty gives time away.
# - **Measure a switch** before you rely on it.
#
# Next is lesson 06: your error message, your model, your card. And `LEDGER.md` has every claim that these lessons put to
# the test, with its figures. If you find a wrong one, its test will tell you where.
