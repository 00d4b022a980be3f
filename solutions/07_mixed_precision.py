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
# # 07 · Mixed precision
#
# *60 minutes: sections 1 to 8, with exercises 7.1 and 7.3 to 7.5. 25 more are optional. You need: lesson 01, and the
# terms of lessons 02 and 03.*
#
# "Train in 16 bits, it takes half the memory." Which half, and what happens to the numbers? In this lesson you lose
# gradients, updates and sums, and build the repairs. After this lesson you can
#
# - say what bf16 and float16 each lose, and which operation autocast computes in which;
# - write rounding by chance, a master copy and a loss scaler;
# - say from which batch on autocast saves memory, and what each flag of `Trainer` does.
#
# Everything was measured or predicted on a CPU, nothing on a card (a GPU).

# %%
import os

import torch

from gradmem_lib import CARDS, Recipe, Waterfall, check, known_model, operation_dtypes
from gradmem_lib import predict, predict_first, prepare, step
from gradmem_lib.course import claims, models, texts, trainer_dtypes

# %% [markdown]
# Here is a run that has failed: Llama-2-13B, every weight trained by AdamW, one row of 2,048 tokens, on a card of 80 GB.
# In the next picture the line is the card. The first bar is float32. The others are three ways to train in 16 bits, which
# this lesson explains. Which of them takes half?

# %%
chart = Waterfall(budget=CARDS["H100 80GB"].nbytes, title="Llama-2-13B, 2,048 tokens")
asked = {"batch_size": 1, "seq_len": 2048, "target": "cuda"}
for precision in ("float32", "autocast-bf16", "bf16", "float32-master"):
    recipe = Recipe(precision=precision, optimizer="adamw-fused")
    peak = predict(known_model("Llama-2-13B")[1], recipe=recipe, **asked).peak
    chart.add(precision, peak, aside=True)
chart

# %% [markdown]
# Only bf16 everywhere takes half, and it does not fit either. <!-- holds: round(chart.bars[2].total
# / chart.bars[0].total, 2) == 0.5 and all(bar.total > chart.budget for bar in chart.bars) --> The other two need no
# less than float32. <!-- holds: min(chart.bars[1].total, chart.bars[3].total) >= chart.bars[0].total -->
# Lesson 09 keeps fewer bytes of weights and states, and lesson 10 divides them among eight cards. Here you find out
# what the numbers lose in each bar.
#
# ## 1 · Two formats of 16 bits
#
# A number has a sign, an *exponent*, which sets the range, and a *fraction*, which sets the precision.
#
# | dtype | exponent bits | fraction bits | largest | smallest above 0 |
# |---|---|---|---|---|
# | float32 | 8 | 23 | 3.4e38 | 1.4e-45 |
# | bf16 | 8 | 7 | 3.4e38 | 9.2e-41 |
# | float16 | 5 | 10 | {{torch.finfo(torch.float16).max:,.0f}} | 6.0e-8 |
#
# <!-- holds: [f"{torch.finfo(d).tiny * torch.finfo(d).eps:.1e}" for d in (torch.float32, torch.bfloat16, torch.float16)]
# == ["1.4e-45", "9.2e-41", "6.0e-08"] -->
#
# bf16 is float32 with 16 fraction bits cut off. float16 gives up range instead. So float16 should lose *small
# gradients*, and bf16 should lose *small changes*.
#
# ### Exercise 7.1 · what a dtype loses
#
# ●○○ · 3 minutes · trains: counting numbers too small or too large for a dtype
#
# Write `lost(gradients, dtype, scale)`: multiply by `scale`, then store in `dtype`. Return the share of the nonzero
# numbers that is then 0, inf or nan.
#
# <details><summary>Hint 1: store</summary>
#
# `(gradients * scale).to(dtype)`. What is not finite: `~stored.isfinite()`.
#
# <details><summary>Hint 2: the share</summary>
#
# Numbers that were zero already lose nothing. Leave them out of both counts.
#
# </details></details>


# %%
def lost(gradients, dtype, scale):
    """The share, from 0 to 1. gradients: a float32 tensor."""
    ### BEGIN SOLUTION
    stored = (gradients * scale).to(dtype)
    nonzero = gradients != 0
    gone = (stored == 0) | ~stored.isfinite()
    return (gone & nonzero).sum().item() / nonzero.sum().item()
    ### END SOLUTION


lost = check("7.1", lost)

# %% [markdown]
# Try it on one number in twenty of SmolLM2's gradients. (The course's tests set `GRADMEM_SIZE=ci`, for shorter runs.)

# %%
SIZE = os.environ.get("GRADMEM_SIZE", "full")
ROWS, SEQ, STEPS, LAYERS = {"full": (2, 64, 8, 30), "ci": (2, 4, 1, 1)}[SIZE]
model, tokenizer = models.smollm2()
training, held_out = texts.datasets(tokenizer, seq_len=SEQ, rows=16, held_out=4)


def batch(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


batches = [
    batch([training[i + n] for i in range(ROWS)]) for n in range(0, STEPS * ROWS, ROWS)
]

# %% tags=["nbval-ignore-output"]
model.train()(**batches[0]).loss.backward()
gradients = torch.cat([p.grad.flatten()[::20] for p in model.parameters()])
for share in (0.5, 0.01):
    print(f"{share:.0%} of them are below {gradients.abs().quantile(share):.0e}")

# %% [markdown]
# What is below half of float16's smallest number becomes 0.

# %%
question = "How many per cent of SmolLM2's gradients become 0 in float16?"
guess_a = predict_first("7.a", question, unit="percent")

# %% tags=["nbval-ignore-output"]
for scale in (1, 2**12, 2**16, 2**24):
    shares = [100 * lost(gradients, d, scale) for d in (torch.float16, torch.bfloat16)]
    print(f"scale {scale:>10,}   float16 loses {shares[0]:.4f} %   bf16 {shares[1]:.4f} %")
guess_a.reveal(measured=round(100 * lost(gradients, torch.float16, 1), 1))

# %% [markdown]
# float16 drops the smallest gradients, unless they are multiplied by a large number first. If that number is too large,
# others overflow. bf16 needs no scale.
#
# ## 2 · What autocast computes in what
#
# Under `torch.autocast` weights stay float32. A list says which operations get their inputs in bf16, and which in
# float32. The next cell runs one small Llama block with its loss, and prints the dtypes of every operation:

# %%
del model, gradients
block = models.tiny_llama(layers=1, hidden=64, heads=4, intermediate=172, vocab=512)
ids = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(0))


def forward():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return block(input_ids=ids, labels=ids).loss


for (name, given, made), times in sorted(operation_dtypes(forward).items()):
    print(f"{name[:28]:<30}{given:>9} -> {made:<10}{times:>3} times")

# %% [markdown]
# - **bf16**: the matrix products (`mm`) and attention, which are on autocast's list. Operations on no list follow their
#   input: `silu` gets the bf16 result of a product.
# - **float32**: the norm's `pow`, `mean` and `rsqrt`, the residual additions and the loss (`log_softmax`).
# - `to_copy` is the price: a bf16 copy of each of the eight matrices, of the six inputs that are not bf16 already, and
#   of attention's queries and keys, which the rotation by float32 numbers has made float32. The logits are copied back to float32.
#
# This is autocast on the CPU. By [PyTorch's documentation](https://docs.pytorch.org/docs/stable/amp.html) CUDA's list
# also names `softmax` and `layer_norm` for float32.
#
# ## 3 · bf16 loses updates
#
# Between 1 and 2 there are 128 bf16 numbers, with gaps of 1/128. If you add less than half a gap, nothing changes.
# In lesson 02, this stalled AdamW's second moment v. What about the weights? AdamW's first step moves each weight by about
# one learning rate. Half of SmolLM2's weights have a magnitude above
# {{torch.cat([p.detach().flatten()[::100] for p in models.smollm2()[0].parameters()]).abs().median():.2f}}.

# %%
question = "One AdamW step at 1e-5 on SmolLM2 in bf16: how many per cent of weights move?"
guess_b = predict_first("7.b", question, unit="percent")

# %% tags=["nbval-ignore-output"]
model = models.smollm2(dtype=torch.bfloat16)[0].train()
model(**batches[0]).loss.backward()
for rate in (1e-4, 1e-6, 1e-5):
    moved = 0
    for p in model.parameters():
        copy = torch.nn.Parameter(p.detach().clone())
        copy.grad = p.grad
        torch.optim.AdamW([copy], lr=rate, weight_decay=0.0).step()
        moved += (copy != p).sum().item()
    share = 100 * moved / model.num_parameters()
    print(f"rate {rate}: {share:.1f} % moved")
guess_b.reveal(measured=round(share, 1))

# %% [markdown]
# Only weights near 0 moved: gaps are small there.
# Sums suffer too. Add 1.0 a thousand times:

# %%
del model, p, copy
total = torch.zeros((), dtype=torch.bfloat16)
for _ in range(1000):
    total += 1.0
print("a thousand times 1.0 in bf16:", total.item())

# %% [markdown]
# From 256 to 512 a gap is 2. So 257 lies in the middle between 256 and 258. A tie goes to the number whose last fraction
# bit is 0, here 256. Accumulation is such a sum, since the gradients of bf16 weights are bf16. (An optional section
# repairs the sum.) Here you repair the update, in two ways.
#
# The first way costs no bytes: round *up or down by chance* (*stochastic rounding*), so that the mean is right. If an
# update is a tenth of a gap, it moves one weight in ten by a whole gap.
#
# ### Exercise 7.3 · rounding by chance
#
# ●●○ · 5 minutes · trains: a rounding whose mean is right
#
# Write `round_by_chance(x, generator)`. It returns the float32 tensor `x` in bf16. Each element becomes one of the
# two bf16 numbers beside it. The nearer one has the greater chance, so that the mean of many roundings is `x`. All
# random numbers come from `generator`.
#
# <details><summary>Hint 1: bits</summary>
#
# A bf16 number is the upper 16 bits of a float32 number. `x.view(torch.int32)` shows the bits as an integer.
#
# <details><summary>Hint 2: the carry</summary>
#
# Add a random integer from 0 to 2¹⁶ − 1: the larger the lower half is, the more often it carries into the upper half.
# Then clear the lower half.
#
# <details><summary>Hint 3: the calls</summary>
#
# `torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, generator=generator)` makes the integers. `& -(1 << 16)` clears
# the lower half, and `.view(torch.float32)` shows the bits as numbers again.
#
# </details></details></details>


# %%
def round_by_chance(x, generator):
    ### BEGIN SOLUTION
    low = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, generator=generator)
    upper = (x.view(torch.int32) + low) & -(1 << 16)
    return upper.view(torch.float32).bfloat16()
    ### END SOLUTION


round_by_chance = check("7.3", round_by_chance)

# %% [markdown]
# Now 10,000 weights of 1.0 take a hundred updates of 0.001, about an eighth of a gap each. They should arrive at 1.1:

# %%
generator = torch.Generator().manual_seed(0)
nearest = chance = torch.ones(10_000, dtype=torch.bfloat16)
for _ in range(100):
    nearest = (nearest.float() + 0.001).bfloat16()
    chance = round_by_chance(chance.float() + 0.001, generator)
print(f"nearest {nearest.float().mean():.2f}   by chance {chance.float().mean():.2f}")

# %% [markdown]
# Only rounding by chance arrives. The second way keeps the exact weights beside the rounded ones, for 4 bytes a
# parameter.
#
# ### Exercise 7.4 · a float32 master copy
#
# ●○○ · 4 minutes · trains: which of two copies is updated, and which one is rounded
#
# The model computes with bf16 weights. Beside each weight tensor there is a float32 tensor, its **master**. Write
# `master_step(weights, masters, lr)`, one step of plain gradient descent. A weight without a gradient stays as it is.
# Budget: **3.0 MB** in all, so make float32 copies of one tensor at a time.
#
# <details><summary>Hint 1: the order</summary>
#
# The master takes the update in float32. Then `weight.copy_(master)` rounds it. All of it under `torch.no_grad()`.
#
# <details><summary>Hint 2: digits are missing</summary>
#
# `lr * weight.grad` is a bf16 number. `weight.grad.float()` comes first.
#
# </details></details>


# %%
def master_step(weights, masters, lr):
    """Change weights and masters (lists of tensors) in place."""
    raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_07/exercises.py


master_step = check("7.4", master_step)

# %% [markdown]
# The course's recipes have both repairs: `precision="float32-master"`, and `optimizer="adamw-stochastic"` with
# `precision="bf16"`, which also rounds AdamW's moments by chance, so v no longer stalls.
#
# ## 4 · float16 needs a scaled loss
#
# A **scaler** multiplies the loss by a factor, divides the gradients by it, and watches for overflow. It looks for the
# largest factor that works.
#
# ### Exercise 7.5 · a scaler by hand
#
# ●●● · 6 minutes · trains: when a step is skipped, and how the scale finds its size
#
# The gradients come from a loss that was multiplied by `scale`. Write `scaled_step(optimizer, scale, good, patience)`:
# divide all gradients by `scale`, in place. If all are finite, step. Else skip the step and halve the scale. `good`
# counts the steps taken in a row. When it reaches `patience`, double the scale and begin again at 0.
#
# <details><summary>Hint 1: all gradients</summary>
#
# `optimizer.param_groups` is a list of dicts. `group["params"]` has the parameters, of which some have no gradient.
#
# <details><summary>Hint 2: NaN</summary>
#
# It is not finite either: `gradient.isfinite().all()`.
#
# <details><summary>Hint 3: the order</summary>
#
# One loop divides all gradients. Only after it, one `if` asks whether all of them are finite, and decides about the step.
#
# </details></details></details>


# %%
def scaled_step(optimizer, scale, good, patience):
    """Return the next scale, and the next good."""
    ### BEGIN SOLUTION
    groups = optimizer.param_groups
    gradients = [p.grad for g in groups for p in g["params"] if p.grad is not None]
    for gradient in gradients:
        gradient.div_(scale)
    if not all(gradient.isfinite().all() for gradient in gradients):
        return scale / 2, 0
    optimizer.step()
    return (scale * 2, 0) if good + 1 == patience else (scale, good + 1)
    ### END SOLUTION


scaled_step = check("7.5", scaled_step)

# %% [markdown]
# PyTorch's scaler, `torch.amp.GradScaler`, does the same. Its name for `patience` is `growth_interval`, which is
# {{torch.amp.GradScaler("cpu").get_growth_interval():,}} by default. Watch it begin with too large a scale:

# %%
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
for number in range(1, 5):
    before, weight = scaler.get_scale(), block.lm_head.weight.detach().clone()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = block(input_ids=ids, labels=ids).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    skipped = torch.equal(weight, block.lm_head.weight)
    print(
        f"step {number}: scale {before:>9,.0f}   skipped {skipped!s:<6} then {scaler.get_scale():,.0f}"
    )

# %% [markdown]
# A skipped first step is normal. A learning-rate schedule must not count that step.
#
# ## 5 · Six recipes on SmolLM2
#
# This takes some minutes, most of them for float16 if your CPU does not compute it directly. Every recipe has the same
# start, rows and learning rate (1e-5). The bytes are predicted for this batch. "Held out" is the loss on rows that no
# recipe trains on.

# %%
recipes = {
    "float32": Recipe(),
    "autocast bf16": Recipe(precision="autocast-bf16"),
    "autocast float16": Recipe(precision="autocast-fp16"),
    "all bf16": Recipe(precision="bf16"),
    "bf16, master": Recipe(precision="float32-master"),
    "bf16, by chance": Recipe(precision="bf16", optimizer="adamw-stochastic"),
}

# %%
config = models.smollm2()[0].config
for name, recipe in recipes.items():
    ask = {"batch_size": ROWS, "seq_len": SEQ, "target": "cpu"}
    at = predict(config, recipe=recipe, **ask).peak
    states = at.by_category["optimizer"]
    print(f"{name:<18}peak {at.total:>14,}   states {states:>14,}   in {at.phase}")

# %% tags=["nbval-ignore-output"]
test = batch(list(held_out))
for name, recipe in recipes.items():
    torch.manual_seed(0)  # for the rounding by chance
    model = models.smollm2(dtype=recipe.weight_dtype)[0]
    del model.model.layers[LAYERS:]
    optimizer = prepare(model, recipe, lr=1e-5).optimizer
    scaler = torch.amp.GradScaler("cpu") if "float16" in name else None
    losses = [step(model, optimizer, b, recipe, scaler=scaler).item() for b in batches]
    with torch.no_grad():
        after = model(**test, use_cache=False).loss.item()
    print(f"{name:<18}held out {after:.3f}   losses {' '.join(f'{x:.2f}' for x in losses)}")
    del model, optimizer

# %% [markdown]
# Autocast and the master copy hold 16 bytes a parameter, as float32 does (the master is one of the states). The master's
# peak also has the embedding's gradient in float32. Rounding by chance costs no more than all bf16.
#
# A few small updates change the losses little. In the stored notebook (one short update of a model cut to one
# layer, hence high losses), all six losses are within 0.5 % of each other. The difference is in the
# weights. At this rate, rounding to the nearest moves {{share:.1f}} % of all bf16 weights (section 3). The masters hold
# every update, but a bf16 weight changes only when its master has moved by half a gap. Over many updates a master moves
# that far, even if its updates have random signs. With rounding by chance, each weight moves as far as it should
# on average, from the first update on.
#
# ## 6 · What it saves, and from which batch on
#
# Autocast's residents are those of float32. It makes activations smaller and adds copies of weights. Four rows of 128
# tokens in float32 peak with {{predict(config, recipe=Recipe(), batch_size=4, seq_len=128, target="cpu").peak.by_category["activations"] / 2**20:.0f}} MiB of activations. The weights are {{predict(config, recipe=Recipe(), batch_size=4, seq_len=128, target="cpu").peak.by_category["parameters"] / 2**20:.0f}} MiB.
# What gets smaller, and what is added?

# %%
question = "Four rows of 128 tokens: how many MiB does autocast take off float32's peak?"
guess_c = predict_first("7.c", question, unit="MiB")


# %%
def peak(rows, precision):
    ask = {"batch_size": rows, "seq_len": 128, "target": "cpu"}
    return predict(config, recipe=Recipe(precision=precision), **ask).peak.total / 2**20


print("rows    float32   autocast   all bf16   (MiB)")
saved = []
for rows in (1, 4, 5, 8, 32):
    full, cast, narrow = (peak(rows, p) for p in ("float32", "autocast-bf16", "bf16"))
    print(f"{rows:>4}{full:>11,.0f}{cast:>11,.0f}{narrow:>11,.0f}")
    saved.append(full - cast)
guess_c.reveal(measured=round(saved[1]))

# %% [markdown]
# - **One row.** The peak is at the end of backward, where activations are almost gone. Autocast changes nothing.
#   <!-- holds: round(saved[0]) == 0 -->
# - **Four rows.** The peak is at the beginning of backward, and autocast needs *more* there: its bf16 copies of the
#   weights are larger than what it saves in activations. <!-- holds: saved[1] < 0 -->
# - **From five rows on** it saves, and more with every row. <!-- holds: 0 < saved[2] < saved[3] < saved[4] -->
#
# All bf16 halves the residents at any batch. <!-- holds: round(peak(1, "float32") / peak(1, "bf16"), 3) == 2 -->
# From four rows on, the peak falls by less than half, since the loss stays float32.
# <!-- holds: all(peak(n, "bf16") > peak(n, "float32") / 2 for n in (4, 8, 32)) -->
#
# ## 7 · The same through `Trainer`
#
# `trainer_dtypes` takes two steps of a plain `Trainer` on the CPU, and evaluates. It returns the dtypes of what the last
# layer computes, and of its weights, gradients and states. What does each flag change?

# %%
for loaded in (torch.float32, torch.bfloat16):
    plain, _ = trainer_dtypes(loaded)
    print(f"loaded in {loaded}, no flag: all {' and '.join(set(plain.values()))}")
    for flag in ("bf16", "fp16", "bf16_full_eval"):
        dtypes, _ = trainer_dtypes(loaded, **{flag: True})
        changed = [f"{part} {name}" for part, name in dtypes.items() if name != plain[part]]
        print(f"    {flag}=True: {', '.join(changed) or 'changes nothing'}")

# %% [markdown]
# - `bf16=True` is section 2's autocast: `Trainer` uses the library `accelerate`, which wraps the model's forward in it.
# - `fp16=True` on the CPU is accepted and changes nothing.
# - `bf16_full_eval=True` casts the *weights* when you call `evaluate()`, and leaves them in bf16. So save first.
# - In training, weights, gradients and states have the dtype in which the model is **loaded**. On one card, no flag changes that.
#
# A claim that many guides make:

# %%
claims.show("C11")

# %% [markdown]
# <details><summary>And TF32 and FP8?</summary>
#
# You will meet these names on cards. They are not measured here. With *TF32* a card multiplies float32 numbers with 10
# fraction bits. It saves time and no bytes ([PyTorch's notes](https://docs.pytorch.org/docs/stable/notes/cuda.html)).
# *FP8* has 8 bits ([Micikevicius et al. 2022](https://arxiv.org/abs/2209.05433)). Matrix products take FP8 inputs,
# while weights and states stay wider, so it saves more time than bytes.
#
# </details>
#
# ## 8 · What you can now do
#
# - **float16 loses small gradients, bf16 loses small changes.** The first needs a scaler. The second needs float32
#   weights, masters or sums, or rounding by chance.
# - **Autocast is a list of operations.** Weights, gradients and states stay float32, and the copies have their price.
# - **The dtype that you load is the one that you train**, whatever the flag says.
# - **16 bits alone do not repair the first run.** In bf16 the 13B needs {{chart.bars[2].total / 2**30:.0f}} GiB, and the card
#   has {{chart.budget / 2**30:.0f}}. Lessons 09 and 10 make it fit.
#
# ## Optional: a puzzle of rounding
#
# A puzzle has two targets: bytes, and a price in time. The price is counted, so it is the same on every machine. Here it is the
# calls of SmolLM2's 30 layers: each micro-batch calls each layer once, and a checkpoint calls its layer once more.
#
# ### Exercise 7.7 · no update is lost
#
# ●●○ · 5 minutes · optional · trains: which repair of bf16 costs no bytes
#
# Train every weight of SmolLM2 on 8 rows of 128 tokens, so that **no update is lost**: bf16 weights that are rounded to the
# nearest are not allowed. Join some of the options below with `|`, and add `{"accumulation": 2}` or `{"checkpointing":
# "first-8"}` (the first 8 layers) as you like. The predicted peak may be **1.6 GiB**, and the update may take **60 calls** of
# layers. Fewer are possible.
#
# <details><summary>Hint 1: the numbers</summary>
#
# Section 5's table has the recipes. Which of them keeps as few bytes as all bf16, and loses nothing on average?
#
# <details><summary>Hint 2: the calls</summary>
#
# Checkpoints on all layers call each twice. How many layers are enough?
#
# </details></details>

# %%
from gradmem_lib.course import UNROUNDED

bf16, master = {"precision": "bf16"}, {"precision": "float32-master"}
fused, chance = {"optimizer": "adamw-fused"}, {"optimizer": "adamw-stochastic"}
way = bf16 | chance | {"checkpointing": "first-19"}  # SOLUTION
check("7.7", way)
UNROUNDED.show(way)

# %% [markdown]
# ## Optional: sums in float32
#
# Section 3 added 1.0 a thousand times in bf16, and the sum stopped at 256. A sum of micro-batches' gradients can stop in
# the same way. So keep the sums in float32.
#
# ### Exercise 7.2 · float32 sums of bf16 gradients
#
# ●●○ · 5 minutes · optional · trains: hooks on parameters, and which sums need more than 8 bits
#
# Write `float32_sums(parameters)`: return a list of float32 tensors of zeros, one for each bf16 parameter, to which
# every backward adds the gradient. Nothing may stay in `.grad`. Budget for two backwards: **2.45 MB**, which holds the
# weights, the sums and all gradients.
#
# <details><summary>Hint 1: when</summary>
#
# `p.register_post_accumulate_grad_hook(f)` calls `f(p)` when `p.grad` is complete.
#
# <details><summary>Hint 2: which sum</summary>
#
# A function that is made in a loop sees the loop's last value. A default argument, `def add(p, total=total):`, keeps
# its own. A hook must return nothing.
#
# </details></details>


# %%
def float32_sums(parameters):
    raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_07/exercises.py


float32_sums = check("7.2", float32_sums)

# %% [markdown]
# ## Optional: autocast's cache
#
# How long do autocast's copies of the weights live? It *caches* each of them until the `with` block ends. In training the
# graph holds most of them anyway. Without a graph, the cache alone does.
#
# ### Exercise 7.6 · autocast without its copies
#
# ●●○ · 4 minutes · optional · trains: how long autocast keeps a bf16 copy of a weight
#
# `model` is an `nn.Sequential` of 16 float32 blocks. Write `features(model, x)`: its output under bf16 autocast,
# without a graph, within **4.9 MB**. The weights alone are 4.2 MB, and stay float32.
#
# <details><summary>Hint 1: the graph</summary>
#
# `torch.no_grad()`.
#
# <details><summary>Hint 2: the copies</summary>
#
# `torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)`, or a `with` block for each layer.
#
# </details></details>


# %%
def features(model, x):
    ### BEGIN SOLUTION
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return model(x)
    ### END SOLUTION


features = check("7.6", features)

# %% [markdown]
# The cache has a trap. What if a weight changes inside, as in a loop within *one* `with`?

# %%
layer, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
    old = layer(x)
    layer.weight.add_(1.0)
    print("the new weight is seen inside:", not torch.equal(old, layer(x)))
with torch.autocast("cpu", dtype=torch.bfloat16):
    print("and in a new block:", not torch.equal(old, layer(x)))

# %% [markdown]
# The cache gave the old weight. So open autocast for each forward, and keep the optimizer outside.
