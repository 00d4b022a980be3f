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
# *60 minutes: sections 1 to 12, with exercises 5.2 and 5.6. 95 more are optional. You need: lessons 01, 03 and 04.*
#
# <!-- picture: first run -->
#
# You have one task, and a card that is too small for it. You will change a real fine-tuning run of Hugging Face's
# `Trainer`, one technique at a time, until it needs less than a quarter of the memory.
# <!-- holds: final.peak.total < naive.peak.total / 4 --> After this lesson you can
#
# - read from a breakdown which technique comes next, and which will do nothing;
# - say what each of them costs;
# - tell the switches that do something from those that are ignored.

# %%
import torch
from transformers import Trainer, TrainerCallback

from gradmem_lib import BudgetExceeded, LoRALinear, MemoryCallback, Recipe, Waterfall
from gradmem_lib import arguments, check, count_targets, make_trainer, merge_adapters
from gradmem_lib import predict, predict_first, split
from gradmem_lib.course import claims, models, quiet_arguments, runs, texts

# %% [markdown]
# ## 1 · The task
#
# SmolLM2-135M writes English. You will train it to write *Python's language reference*: sixteen updates, of
# {{runs.BATCH}} rows of {{runs.SEQ_LEN}} tokens each. <!-- holds: runs.LONG.updates == runs.LONG.held_out == 16 -->
# Another 16 rows are from topics that it never trains on. (The notebook in `solutions/` makes one update and
# evaluates one row, so its times and losses say little. Its peaks are those of the full runs.)

# %%
model, tokenizer = models.smollm2()
config, size = model.config, runs.size()
training, held_out = texts.datasets(
    tokenizer, seq_len=128, rows=128, held_out=size.held_out
)
print(tokenizer.decode(training.ids[1, :60]))

# %% [markdown]
# ## 2 · The card
#
# The **naive run** is plain AdamW in float32, with the batch in one piece. Weights, gradients and two states are 4
# bytes each, for {{naive.model.num_parameters():,}} parameters. What do the activations add?

# %%
guess_a = predict_first("5.a", "the naive run's peak?")

# %% [markdown]
# Your card has **0.8 GiB**. A `Recipe` holds every decision about memory, and `make_trainer` makes a `Trainer` that
# follows it. `Recipe()` is the naive run. Does it fit?

# %%
BUDGET = "0.8 GiB"
given = {"batch_size": 8, "train_dataset": training, "budget": BUDGET}
try:
    make_trainer(model, Recipe(), title="naive", **given).train()
except BudgetExceeded as error:
    print(error)

# %% [markdown]
# Not even the first forward fits.
#
# ## 3 · Where the bytes are
#
# Measure the naive run without a budget. `runs.train` loads SmolLM2 and trains it through `make_trainer`. `bar` draws
# the last step's peak, and compares it with what `predict` says without running anything:

# %%
chart = Waterfall(budget=BUDGET, title="SmolLM2-135M, 8 × 128 tokens an update")


def predicted(**changes):
    recipe = Recipe(**changes)
    return predict(config, batch_size=8, seq_len=128, recipe=recipe, target="cpu").peak


def bar(name, changes, run=None, aside=False, **more):
    run = run or runs.train(Recipe(**changes), training, **more)
    for what, peak in (("predicted", predicted(**changes)), ("measured", run.peak)):
        print(f"{what:<10}{peak.total / 2**20:>8,.1f} MiB, in {peak.phase}")
    return chart.add(name, run.peak, seconds=run.seconds, tokens=run.tokens, aside=aside)


# %% [markdown]
# The naive run makes all its updates, because you will need its losses. It takes some minutes.

# %%
longer = {"updates": size.updates, "whole": True, "learning_rate": 5e-5}
naive = runs.train(Recipe(), training, **longer)
bar("naive", {}, run=naive)

# %%
guess_a.reveal(formula=predicted().total, measured=naive.peak.total)

# %% [markdown]
# The prediction leaves out nothing but token ids, here and below.
# <!-- holds: 0 < naive.peak.total - predicted().total < 2**18 -->
#
# ## 4 · Which first?
#
# The next cell prints the naive peak's parts, in MiB, without those below one MiB:


# %%
def parts(**changes):
    found = predicted(**changes).by_category.items()
    return {part: n >> 20 for part, n in found if n >> 20}


print(parts())

# %% [markdown]
# More than half of the peak is activations and the logits' temporaries.
# <!-- holds: naive.peak.by_category["activations"] + naive.peak.by_category["temporaries"] > naive.peak.total / 2 -->
# Accumulation shrinks both, checkpointing the activations alone. **Which of the two would you take first?**

# %%
guess_b = predict_first("5.b", "8 micro-batches: how many per cent lower?", unit="percent")

# %% [markdown]
# The next cell predicts each alone:

# %%
cut, rerun = {"accumulation": 8}, {"checkpointing": "per-layer"}
for changes in (cut, rerun):
    print(changes, parts(**changes))

# %% [markdown]
# The naive peak is at the *beginning* of backward, where no gradient exists. Accumulation keeps 513 MiB of gradients of
# earlier micro-batches. Both move the peak to the *end* of backward, where all gradients exist.
#
# Neither makes weights, gradients or states smaller, so add those up first. In float32, weights and gradients alone,
# 513 MiB each, are more than the card. So neither technique makes this run fit. Where either is enough, they differ in
# time:

# %%
claims.show("C57")

# %% [markdown]
# So take micro-batches first, unless rows are very short, or one row alone is too much. They cost little time where one
# row keeps the machine busy. Checkpointing adds a forward of the layers. That is up to a third of a step's work, and up
# to half where the weights are frozen, because backward is shorter then. Our recorded runs took 1.23 to 1.50 times as
# long.
#
# ## 5 · Micro-batches
#
# In `Trainer`, the global batch is `per_device_train_batch_size` × `gradient_accumulation_steps` × the number of GPUs.
# (Exercise 5.1, at the end, moves such a run to one card.)
#
# The second bar is the run in micro-batches, with the same number of updates:

# %%
pieces = runs.train(Recipe(**cut), training, **longer)
bar("micro-batches, 8 × 1", cut, run=pieces)

# %%
guess_b.reveal(measured=round(100 * (1 - pieces.peak.total / naive.peak.total)))
apart = [abs(a - b) for a, b in zip(naive.losses, pieces.losses, strict=True)]
print(f"updates: {len(apart)}, all losses within 0.005: {max(apart) < 0.005}")

# %% [markdown]
# The losses differ only by rounding: `Trainer` divides by the tokens of the whole window, as you did in lesson 03. (A
# plain `Trainer` on a classifier needs `accepts_loss_kwargs = False`; `make_trainer` does not.) In a loop of
# your own, schedule and log are your job: exercises 5.3 and 5.4.
#
# ## 6 · Checkpointing
#
# Next comes a checkpoint on each of the 30 layers, on top of the micro-batches:

# %%
guess_c = predict_first("5.c", "30 checkpoints: how many MiB lower?", unit="MiB")

# %%
bar("+ checkpointing", cut | rerun, live=None, title="8 × 1, a checkpoint a layer")

# %%
checkpointed = chart.bars[-1].total
guess_c.reveal(measured=round((pieces.peak.total - checkpointed) / 2**20, 1))

# %% [markdown]
# **The peak does not move.** <!-- holds: round((pieces.peak.total - checkpointed) / 2**20, 1) == 0 -->
# It is at the end of backward, where activations are almost gone. The temporaries there are three times
# {{config.vocab_size:,}} × {{config.hidden_size}} numbers.
# <!-- holds: chart.bars[2].by_category["temporaries"] == 3 * 4 * config.vocab_size * config.hidden_size -->
# The embedding is the output layer as well, so each micro-batch computes two gradients
# for it, and then their sum. Leave the checkpoints on: when you switch them off later, the peak will move.
#
# `arguments` writes this recipe as `TrainingArguments` (the switch was `gradient_checkpointing` before transformers
# 5.23):

# %%
print(arguments(Recipe(**cut | rerun), micro_batch=1))

# %% [markdown]
# Older code also sets `use_cache=False`. Is that needed?

# %%
claims.show("C43")

# %% [markdown]
# ### Exercise 5.2 · checkpointing that happens
#
# ●●○ · 6 minutes · trains: making sure that a switch has switched something
#
# A switch may be on and do nothing. `model` is a small Llama as `from_pretrained` leaves it. Write `switch_on(model)`:
# afterwards a training step must stay under **5 MiB**, which is too little for it now, with the same gradients. (The
# check takes two steps: on token ids, and on vectors, given as `inputs_embeds`.)
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
# ## 7 · Precision
#
# "Turn on `bf16=True`, it halves the memory." What does it halve? (A bar called "or: …" stands aside: later bars do not
# build on it.)

# %%
guess_d = predict_first("5.d", "bf16=True: how many per cent lower?", unit="percent")

# %%
bar("or: bf16=True", cut | rerun | {"precision": "autocast-bf16"}, aside=True)

# %%
guess_d.reveal(measured=round(100 * (1 - chart.bars[-1].total / checkpointed)))
claims.show("C11")

# %% [markdown]
# This flag is *autocast*, as the claim's `fp16=True` is: matrices are multiplied in 16 bits, and weights, gradients and
# states stay in float32. Where activations are nearly all of the peak, autocast helps. Here the peak moved into forward,
# where autocast keeps a bf16 copy of every weight.
#
# What matters more is the dtype in which the model was *loaded*. `MemoryCallback` measures any `Trainer`. Here are a
# tiny Llama's peaks, loaded in either dtype, without the flag and with it:

# %%
ids = torch.randint(0, 8192, (64, 16), generator=torch.Generator().manual_seed(0))
tiny_rows = texts.Rows(ids)
for dtype in (torch.float32, torch.bfloat16):
    for flag in (False, True):
        llama = models.tiny_llama(dtype=dtype)
        with (
            quiet_arguments(max_steps=2, bf16=flag) as args,
            MemoryCallback(live=False) as memory,
        ):
            Trainer(llama, args, train_dataset=tiny_rows, callbacks=[memory]).train()
        print(f"loaded in {dtype}, bf16={flag}: {memory.by_step[2].total:,}")

# %% [markdown]
# The last two lines are equal. transformers loads a model in the dtype in which it was saved, mostly bf16. Weights,
# gradients *and* AdamW's states then have this dtype, whatever the flag says. But in bf16 an update much smaller than
# 1/256 of its weight is rounded away. (Exercise 5.5 keeps all three in float32.)
#
# To halve everything, train in bf16 throughout, and accept the rounded updates:
# <!-- holds: round(chart.bars[4].total / checkpointed, 2) == 0.5 -->

# %%
recipe = cut | rerun | {"precision": "bf16"}
bar("+ all in bf16", recipe)

# %% [markdown]
# ## 8 · The optimizer
#
# The longest part of the bar is AdamW's states. **8-bit AdamW** keeps the same two moments in one byte a number: one of
# 256 values, times a scale that a block of neighbours shares. These states are half as large as in bf16, and rounded.
# <!-- holds: round(chart.bars[5].by_category["optimizer"] / chart.bars[4].by_category["optimizer"], 1) == 0.5 -->
# Lesson 09 builds them.
#
# **Adafactor** keeps no first moment. Of the second it keeps only the sum of each row and of each column, so it has
# almost no states. Which of the two optimizers has the lower peak?

# %%
recipe |= {"optimizer": "adamw-8bit"}
bar("+ 8-bit AdamW", recipe)

# %%
bar("or: Adafactor", recipe | {"optimizer": "adafactor"}, aside=True)

# %% [markdown]
# Adafactor's peak is higher, and it is *in the optimizer's step*. While transformers' Adafactor updates a tensor, it makes
# float32 copies of it, and the embedding is a fifth of this model.
# <!-- holds: chart.bars[6].total > chart.bars[5].total and chart.bars[6].phase == "optimizer_step"
# and round(config.vocab_size * config.hidden_size / naive.model.num_parameters(), 1) == 0.2 -->
# PyTorch's Adafactor makes one copy, in the weights' dtype. The next cell makes all updates with PyTorch's, without
# checkpoints, under the budget:

# %%
every_weight = cut | {"precision": "bf16", "optimizer": "adafactor-torch"}
longer = {"updates": size.updates, "budget": BUDGET, "learning_rate": 1e-3}
full = runs.train(Recipe(**every_weight), training, **longer)
bar("or: torch's Adafactor", every_weight, run=full, aside=True)

# %% [markdown]
# **The run fits**, with every weight trained. (With checkpoints the peak would be at the end of backward, and
# less than one MiB lower.
# <!-- holds: 0 < predicted(**every_weight).total - predicted(**every_weight | rerun).total < 2**20 -->)
# An optimizer's memory is its states *and* what its step does.
#
# <details><summary>In a plain <code>Trainer</code></summary>
#
# A plain `Trainer` takes torch's Adafactor through `optimizer_cls_and_kwargs`. Change two of its defaults. One is the
# learning rate, 0.01. It is relative to the typical size of a tensor's weights, and T5, trained with Adafactor, was
# fine-tuned with 0.001. The other is `eps`, by default the dtype's machine epsilon. In bf16 that is 1/128, larger than
# almost every gradient, so nothing would be normalized. A recipe sets `1e-16`.
#
# </details>
#
# **A step in backward** can go lower still. Each parameter gets an optimizer of its own, and a hook steps it and frees
# the gradient at once. Exercise 5.9, at the end, does this in `Trainer`. The price: no gradient is left to accumulate or to clip.
#
# ## 9 · LoRA
#
# Next, train fewer weights. LoRA (low-rank adaptation) freezes a linear layer's matrix W and adds two
# thin ones, **A** and **B**:
#
# $$\text{output} = W x + \frac{\alpha}{r}\, B\,(A\,x)$$
#
# A maps the input to r numbers, and B maps these to the output. r is the **rank**, and **alpha** sets how much the
# addition counts (`LoRALinear`'s default is 2 r). A starts random and B at zero, so the model begins as it was.
# Only A and B are trained: what is frozen needs no gradient and no state. Here every linear layer but the output's
# gets rank 16:

# %%
recipe |= {"lora_rank": 16}
bar("+ LoRA, rank 16", recipe)

# %% [markdown]
# **The peak is less than half of the card.** <!-- holds: chart.bars[8].total < chart.budget / 2 -->
# Gradients and states are a thin line in the bar, so activations and logits decide the peak again. Are the checkpoints
# still worth nothing?

# %%
bar("or: no checkpoints", recipe | {"checkpointing": None}, aside=True)

# %% [markdown]
# The switch that moved nothing in section 6 moves the peak here. A technique works on one part, and that part is at the
# peak or it is not.
#
# The longest part now is the frozen weights. In **4 bits** (QLoRA) each is one of 16 values, times a scale that its
# block of 64 weights shares. To multiply, a layer's weights are written out in bf16 and freed again. Lesson 06
# needs this for a 7B, and lesson 09 builds it.

# %% [markdown]
# ### Exercise 5.6 · adapters with something to train
#
# ●●○ · 8 minutes · trains: the order of freezing, adding and handing to the optimizer
#
# Write `add_adapters(model, names, rank, lr)`: freeze the model, replace each layer called by one of `names` (such as
# `"q_proj"`) by `LoRALinear(layer, rank)`, and return an AdamW for all that is trained, with `lr` and otherwise its
# defaults. Two steps must stay under **4.5 MiB**. With every weight trained they do not fit.
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
# ## 10 · The loss in chunks, and room to spend
#
# With LoRA the temporaries are two tables with a number for each logit: {{config.vocab_size:,}} float32 numbers a token.
# <!-- holds: chart.bars[8].by_category["temporaries"] == 2 * 4 * 128 * config.vocab_size -->
# A third such table is among the activations (lesson 01, section 3).
# <!-- holds: 1 < chart.bars[8].by_category["activations"] / (4 * 128 * config.vocab_size) < 1.3 -->
# `chunked_loss` computes the loss *and* its gradients in forward, for {{runs.SEQ_LEN}} tokens at a time (here a whole row).
# Then two tables are enough:
# <!-- holds: abs((chart.bars[8].total - chart.bars[10].total) / (4 * 128 * config.vocab_size) - 1) < 0.02 -->

# %%
recipe |= {"chunked_loss": True}
bar("+ loss in chunks", recipe)

# %% [markdown]
# Now logits do not grow with the micro-batch, and more than half of the card is free.
# <!-- holds: chart.bars[10].total < chart.budget / 2 --> Unused memory can buy
# time. What fits without checkpoints?

# %%
recipe |= {"checkpointing": None}
print("rows  loss in chunks  whole loss")
for rows in (1, 4, 8):
    way = recipe | {"accumulation": 8 // rows}
    needs = [predicted(**way | {"chunked_loss": chunks}) for chunks in (True, False)]
    print(f"{rows:>4}", *(f"{peak.total / 2**20:>10,.0f} MiB" for peak in needs))

# %% [markdown]
# Four rows at a time fit, if the loss is in chunks: two passes instead of eight, and no layer runs twice.
# <!-- holds: final.peak.total < chart.budget < min(needs[0].total,
# predicted(**recipe | {"chunked_loss": False}).total) --> This recipe
# makes all its updates, **under the budget**. (Its learning rate is section 8's. AdamW takes a larger one for adapters
# than for whole weights.)

# %%
recipe |= {"accumulation": 2}
final = runs.train(Recipe(**recipe), training, live=None, title="all of it", **longer)
bar("2 × 4, no checkpoints", recipe, run=final)

# %%
print(f"{final.peak.total / naive.peak.total:.1%} of the naive run's peak")

# %% [markdown]
# In our record of the full runs (`benchmarks/results`), this one makes
# 1.86 times the naive run's tokens a second.
#
# And lesson 00's last run? Lesson 04 left it 115.8 MiB too large. Add LoRA, then the loss in chunks:

# %%
from gradmem_lib.course import first_run

way = {"optimizer": "adamw-fused", "accumulation": 4, "checkpointing": "per-layer"}
first_run(**way, lora_rank=16)
first_run(**way, lora_rank=16, chunked_loss=True)

# %% [markdown]
# **It fits**, from an update that was 400.6 MiB too large. With LoRA alone the residents fit, and the logits of four
# sequences do not.
#
# ## 11 · Did it learn the same?
#
# The loss on the held-out rows says it. An evaluation has to fit the card as well. You may write one yourself
# (exercise 5.7), or go on with the course's.

# %% [markdown]
# ### Exercise 5.7 · an evaluation within the card
#
# ●●○ · 8 minutes · optional · trains: what an evaluation holds, and what it must leave as it was
#
# Write `held_out_loss(model, rows)`: the mean loss over all predicted tokens of 18 rows of unequal lengths, under
# **2.5 MiB**. The model is a small GPT-2 with dropout in the middle of its training, its config as `from_pretrained`
# leaves it.
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
    raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_05/exercises.py


held_out_loss = check("5.7", held_out_loss)

# %% tags=["nbval-ignore-output"]
rows = {"input_ids": held_out.ids, "labels": held_out.ids}
trained = {"before": model, "naive": naive.model}
trained |= {"every weight, torch's Adafactor": full.model, "all of it": final.model}
for name, model in trained.items():
    print(f"{held_out_loss(model, rows):.2f}  {name}")

# %% [markdown]
# In our record of sixteen updates, this loss fell from 3.01 to 2.76 (naive) and 2.71 (all of
# it), at 19.4% of the naive peak. Nothing was tuned, so all that you can conclude is *not worse*.
#
# ### Keep it
#
# Adapters merged into the weights leave an ordinary model, which anyone can load:

# %%
from tempfile import TemporaryDirectory

from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()


def same(a, b):
    return all(map(torch.equal, a.parameters(), b.parameters()))


merged = merge_adapters(final.model).eval()
with TemporaryDirectory() as folder:
    merged.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
print(type(loaded).__name__, loaded.dtype, same(merged, loaded))

# %% [markdown]
# The loaded weights are the same, to the bit.
#
# ### Stop, and go on
#
# The notebook's stop button raises `KeyboardInterrupt`. The course's trainer then finishes its step, saves, and stops.
# Here a callback presses the button in step 3 of 6:


# %%
import signal


class Stop(TrainerCallback):
    def on_step_begin(self, args, state, control, **more):
        if state.global_step == 2:  # counted from 0
            signal.raise_signal(signal.SIGINT)


def six_steps(folder, *callbacks):
    small = models.tiny_llama(layers=2, hidden=32, heads=2, intermediate=64)
    given = {"train_dataset": tiny_rows, "max_steps": 6, "callbacks": [*callbacks]}
    return make_trainer(
        small, Recipe(), batch_size=8, output_dir=folder, live=False, **given
    )


# %%
with TemporaryDirectory() as folder:
    through, resumed = six_steps(folder), six_steps(folder)
    through.train()
    try:
        six_steps(folder, Stop()).train()
    except KeyboardInterrupt as stopped:
        print(str(stopped).replace(folder, "out"))
    resumed.train(resume_from_checkpoint=True)
print("the same as without a stop, to the bit:", same(through.model, resumed.model))

# %% [markdown]
# A saved run holds the weights, the optimizer's states, the schedule, the place in the data and the random state.
# `save_strategy="steps", save_steps=100` makes one every 100 steps.
#
# ## 12 · What you can now do
#
# - **Look where the peak is**, in which phase and of which category. Then choose.
# - **Weights, gradients and states come first.** If they exceed the card, no batch is small enough.
# - **Accumulation and checkpointing** are worth nothing where neither activations nor logits are at the peak.
# - **`bf16=True` is autocast.** What halves the memory is the dtype in which the model was *loaded*.
# - **Spend what is left**, and **measure a switch** before you rely on it.
#
# Next is lesson 06: your error message, your model, your card.
#
# ## Optional: a puzzle of switches
#
# With adapters, lesson 00's run fits on its card of 48 MiB. Does it also fit with **every weight** trained, all in bf16? A
# puzzle has two targets: bytes, and a price in time. The price is counted, so it is the same on every machine. Here it is the
# calls of the model's four layers: each micro-batch calls each layer once, and a checkpoint calls its layer once more.
#
# ### Exercise 5.12 · every weight on 48 MiB
#
# ●●○ · 5 minutes · optional · trains: spending calls of layers where bytes are missing
#
# Write a dict with some of the options `optimizer`, `accumulation`, `checkpointing` (`"per-layer"`, or `"first-2"` for the
# first 2 layers), `chunked_loss` and `in_backward`. The predicted peak may be **48 MiB**, and the update may take **16 calls**
# of layers. Fewer are possible.
#
# <details><summary>Hint 1: what stays</summary>
#
# In bf16, weights and gradients are 28 MiB, and AdamW's states as much again. Section 8 has an optimizer that keeps almost
# none.
#
# <details><summary>Hint 2: fewer calls</summary>
#
# Micro-batches keep all gradients, and call every layer again. What if no gradient waits for the step?
#
# </details></details>

# %%
from gradmem_lib.course import SWITCHES

chunks = {"chunked_loss": True}
way = rerun | chunks | {"optimizer": "adafactor-torch", "in_backward": True}  # SOLUTION
found = check("5.12", way)
SWITCHES.show(way)

# %% [markdown]
# Now carry it out. (Without an answer of yours, the cell runs the best known one.)

# %%
first_run(precision="bf16", **found)

# %% [markdown]
# ## Optional: a checkpoint that stays
#
# Nothing later needs this section. Here is a loop without a trainer. `file` is the open checkpoint of a run that
# stopped after two of six batches. The run fits in 3.75 MiB if it starts from the beginning. Resumed, it does not.

# %%
import torch.nn.functional as F

from gradmem_lib import BudgetExceeded, MemoryTracker
from gradmem_lib.course import resume_setting


# %%
def train_on(model, optimizer, batches):
    losses = []
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# %%
def resume(model, optimizer, file, batches):  # 1
    saved = torch.load(file)  # 2
    model.load_state_dict(saved["model"])  # 3
    optimizer.load_state_dict(saved["optimizer"])  # 4
    return train_on(model, optimizer, batches[saved["step"] :])  # 5


# %% [markdown]
# ### Exercise 5.11 · a checkpoint that stays
#
# ●○○ · 5 minutes · optional · trains: knowing what a resumed run holds twice, and until when
#
# Write `resume_leak()`. It returns two things: the number of the line that keeps tensors which the training does not
# need, and the fixed script. The fixed script returns the same losses, trains the same weights, and stays within
# 3.75 MiB.
#
# <details><summary>Hint 1: what is copied?</summary>
#
# `model.load_state_dict` copies each loaded weight into the model's own. `optimizer.load_state_dict` uses the loaded
# states themselves, if dtype and device are right.
#
# <details><summary>Hint 2: until when?</summary>
#
# A function's name keeps its tensors until the function returns, or until `del`. Read first what you need of it later.
#
# </details></details>


# %%
def resume_leak():
    """(the number of the line, the fixed script)."""
    raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_05/exercises_leak.py


resume_leak = check("5.11", resume_leak)

# %% [markdown]
# Which line did you name? Now run the script as it was, and read what the error says:

# %%
net, net_adam, file, batches = resume_setting()
try:
    with MemoryTracker(net, net_adam, budget="3.75 MiB", live=False):
        resume(net, net_adam, file, batches)
except BudgetExceeded as error:
    print(error)

# %% [markdown]
# The error finds a second copy of the weights. Saving can make one, too: `copy.deepcopy(model)` for the best model, or a
# clone of each tensor of the state dict. Write such a copy to a file, or keep it on the host, and delete it.

# %% [markdown]
# ## Optional: more practice

# %% [markdown]
# ### Exercise 5.1 · the same batch on one card
#
# ●○○ · 5 minutes · optional · trains: rows, accumulation and GPUs, and what must not change with them
#
# Someone trained with `arguments`, a dict of `TrainingArguments`, on several GPUs. Your one card takes at most `fits`
# rows at a time. Write `on_one_card(arguments, gpus, fits)`: the same fields for the *same global batch* on your card,
# as few micro-batches as possible, all of the same size. The evaluation's batch is a micro-batch too. The other fields
# are `max_steps`, `warmup_steps` and `learning_rate`: change one only if it counts micro-batches.
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
# ### Exercise 5.10 · the same step on a smaller card
#
# ●●○ · 6 minutes · optional · trains: choosing between pieces and checkpoints where layers draw random numbers
#
# `model` is a residual net in plain PyTorch, with 12 `model.blocks`, dropout and drop path. `model(batch["x"])` gives the
# outputs, and `F.cross_entropy(outputs, batch["labels"])` the loss. Write `same_step(model, optimizer, batch)`: one update
# with all 64 rows, and the loss as a float. Leave no gradient behind, and the model in training mode. It must be the update
# that the plain step makes from the same random state, and stay under **1.1 MiB**. Micro-batches would fit. Are they the
# same update?
#
# <details><summary>Hint 1: who draws when?</summary>
#
# Dropout and drop path draw numbers in each forward. What does a micro-batch's forward draw, and what does a block draw
# that runs again under a checkpoint?
#
# <details><summary>Hint 2: one line around the step</summary>
#
# `checkpoint_layers` takes a model's list of layers, too. Forward belongs inside its `with`. Backward may stand inside
# or after it: a segment runs again as it ran first.
#
# </details></details>

# %%
from gradmem_lib import checkpoint_layers


def same_step(model, optimizer, batch):
    """One update; return the loss, a float."""
    ### BEGIN SOLUTION
    with checkpoint_layers(model.blocks, every=1):
        loss = F.cross_entropy(model(batch["x"]), batch["labels"])
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
    ### END SOLUTION


same_step = check("5.10", same_step)

# %% [markdown]
# ### Exercise 5.3 · a schedule in optimizer steps
#
# ●●○ · 8 minutes · optional · trains: counting updates, not micro-batches, in a loop that accumulates
#
# Write one epoch whose learning rate climbs from 0 during the first updates, then falls linearly to 0. The first update
# has a rate of 0, and the rate reaches 0 again after the last update. `warmup` is the share of these first updates: 0.25 is
# a quarter. `accumulate(some)` runs forward and backward on a list of micro-batches. Every `window` of `micro_batches` make
# one update, and what is left makes a last one.
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
import math

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
# ### Exercise 5.4 · the loss in the log
#
# ●●○ · 6 minutes · optional · trains: logging what is trained, and holding on to nothing for it
#
# `window` is a list of micro-batches, dicts for the model, and `model(**micro).loss` is a micro-batch's *mean*. Write
# `train_and_log(model, window)`: leave in `.grad` the gradient of the mean loss over all predicted tokens of the
# window, and return that mean. The budget of **1.4 MB** is too small for the logits of all micro-batches at once.
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
    raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_05/exercises.py


train_and_log = check("5.4", train_and_log)

# %% [markdown]
# ### Exercise 5.5 · a checkpoint in bf16, states in float32
#
# ●●○ · 6 minutes · optional · trains: knowing where autocast ends and a model's own dtype begins
#
# `model` was saved in bf16. Write `train_mixed(model, batches, lr)`: one AdamW update for each batch, on
# this very model, with matrices multiplied in bf16 and all else (weights, gradients, states) in float32. At the
# learning rate of 1e-5, most weights would not move in bf16.
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
    raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_05/exercises.py


train_mixed = check("5.5", train_mixed)

# %% [markdown]
# ### Exercise 5.9 · a Trainer that steps in backward
#
# ●●● · 8 minutes · optional · trains: hooks that step and free, and what Trainer may no longer do itself
#
# Write `step_in_backward(model, lr, steps)`: each trained parameter gets an AdamW of its own and a hook that steps it
# and frees the gradient. Each learning rate falls linearly from `lr` to 0. Return what goes into `Trainer(model, args,
# optimizers=(it, None))`. Three updates must stay under **6 MiB**, where one AdamW does not fit. (The check sets
# `max_grad_norm=0`.)
#
# <details><summary>Hint 1: the hook</summary>
#
# `p.register_post_accumulate_grad_hook(function)` calls `function(p)` when `p.grad` is complete. It is only for
# parameters that require a gradient.
#
# <details><summary>Hint 2: what to return</summary>
#
# `LayerWiseDummyOptimizer(optimizer_dict={p: its optimizer, ...}, lr=lr)`, which steps nothing. The hooks have done it.
#
# <details><summary>Hint 3: the rate</summary>
#
# `Trainer`'s linear learning-rate schedule changes the rate of the dummy alone. Your optimizers keep theirs, until
# `get_scheduler("linear", optimizer, 0, steps)` makes a schedule for each, and the hook calls its `step()`.
#
# </details></details></details>

# %%
from transformers import get_scheduler
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer


def step_in_backward(model, lr, steps):
    """Put hooks on model; return the optimizer for Trainer."""
    ### BEGIN SOLUTION
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
    ### END SOLUTION


step_in_backward = check("5.9", step_in_backward)
