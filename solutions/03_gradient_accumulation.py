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
# # 03 · Gradient accumulation
#
# *60 minutes: sections 1 to 8, with exercises 3.3, 3.4 and 3.7. 89 more are optional. You need: lesson 01, and the training
# loop of lesson 00.*
#
# <!-- picture: first run -->
#
# The batch you want does not fit. So you cut it into pieces, run them one by one, and step once. That is
# two lines of code, and one of them is usually wrong. Afterwards you can
#
# - say which bytes follow the micro-batch and which do not;
# - divide by the right number, so that the result is the full batch's gradient;
# - put stepping, zeroing, clipping and logging in their places, to the last incomplete window;
# - find out whether your trainer gets it right, and fix it.

# %%
import torch
from torch import nn

from gradmem_lib import (
    MemoryTracker,
    accumulate_gradients,
    check,
    count_targets,
    next_token_loss,
    predict_first,
    split,
)
from gradmem_lib.course import claims, models, text_batch, texts

# %% [markdown]
# ## 1 · Three batches
#
# | name | what it is | what it decides |
# |---|---|---|
# | **micro-batch** | what goes through the model at once | activations |
# | **mini-batch**, or **window** | all micro-batches of one GPU between two updates | how long an update takes |
# | **global batch** | the mini-batches of all GPUs together | what the model learns from an update |
#
# When you read "batch size", ask: *how much goes through at once?*
#
# ## 2 · What shrinks, and what does not
#
# Here is a tiny Llama and 16 sequences of 64 tokens, of which 63 are predicted. `split` cuts them into micro-batches,
# and `update` runs these. The micro-batches between two updates form a **window**. "4 × 4" is a window of 4
# micro-batches of 4 sequences.

# %%
model = models.tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
ids = torch.randint(0, 8192, (16, 64), generator=torch.Generator().manual_seed(0))
batch = {"input_ids": ids, "labels": ids}


def update(size):
    for micro in split(batch, size):
        loss, _ = next_token_loss(model, micro)  # summed over the predicted tokens
        (loss / (16 * 63)).backward()
    optimizer.step()
    optimizer.zero_grad()


update(16)  # Adam's states are there from now on

# %%
question = "4 × 4 instead of 16 at once: by how much does the peak fall?"
guess_b = predict_first("3.b", question, unit="percent")

# %% [markdown]
# The dashed outline has 16 at once. Watch the activations, then the gradients:

# %%
runs = {}
for size in (16, 4):
    title = f"{size} at once"
    with MemoryTracker(model, optimizer, live=False, title=title) as runs[size]:
        update(size)
runs[4].show(beside=runs[16])

# %% [markdown]
# The activations climb four times, each time by a quarter of what the outline climbs. The gradients
# arrive with the first backward and **stay**: the next forwards run on top of them.
# Most bytes of each:

# %%
peaks, names = {}, ("activations", "gradients", "optimizer")
print(" " * 7, *(f"{name:>11}" for name in names), "peak")
for size in (16, 8, 4, 2, 1):
    with MemoryTracker(model, optimizer, live=False) as tracker:
        update(size)
    lines, peaks[size] = tracker.timeline.by_category, tracker.peak.total
    most = [f"{max(lines[name]):>11,}" for name in names]
    print(
        f"{16 // size:>2} × {size:<2}", *most, f"{peaks[size]:,}", "in", tracker.peak.phase
    )

# %%
guess_b.reveal(measured=round(100 * (1 - peaks[4] / peaks[16])))

# %% [markdown]
# The activations shrink with the micro-batch, and the other two columns do not. At first the peak follows the
# activations. Then it moves into backward, then into the optimizer's step, where no activation is left.
#
# <details><summary>Why is the first peak in forward?</summary>
#
# `next_token_loss` cuts the logits' last position off, where a transformers model shifts the labels (lesson 01). So three
# large tensors are alive at the end of forward: the logits, their copy without the last position, and the log-softmax. In
# backward three are alive as well, but all of them lack that position. One sequence alone needs no copy.
#
# </details>
#
# The price is time: each matrix product is cut into smaller ones. In our record
# (`benchmarks/results`), on one thread of a CPU, 4 micro-batches took no longer than one, and 16 took longer. So cut no further
# than you must, and measure.

# %%
claims.show("C09")

# %% [markdown]
# ## 3 · Is it the same gradient?
#
# `backward()` *adds* to `.grad`. The gradient of a sum is the sum of the gradients. So if the full batch's loss is a
# mean over 4 micro-batches, each contributes a quarter. For K micro-batches, every tutorial has this line:
# `loss = loss / K`.
#
# The next cells test it on four sequences of 64 tokens, in float64, so that rounding hides nothing.


# %%
def take_gradient(model):
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return found


def gradient(model, batch, k):
    for micro in split(batch, len(batch["labels"]) // k):
        loss, count = next_token_loss(model, micro)
        mean = loss / count  # what a model returns as its loss
        (mean / k).backward()
    return take_gradient(model)


def relative_error(found, right):
    return ((found - right).norm() / right.norm()).item()


# %%
exact = models.tiny_gpt2(layers=2, hidden=32, heads=2, vocab=64, dtype=torch.float64)
equal = text_batch(64, 64, 64, 64, vocab=64)
error = relative_error(gradient(exact, equal, 4), gradient(exact, equal, 1))
print("equal lengths, loss / K: relative error below 1e-12:", error < 1e-12)

# %% [markdown]
# The two gradients agree to twelve digits: here accumulation *is* the full batch. Real sequences have
# different lengths.
#
# ## 4 · The trap
#
# Take sequences of 8, 16, 64 and 128 tokens, one in each micro-batch. The full batch gives each of the
# {{count_targets(ragged["labels"])}} predicted *tokens* the same weight. `loss / K` gives each *micro-batch* the same weight.

# %%
question = "loss / K: the first sequence's tokens count how many times too much?"
guess_c = predict_first("3.c", question, unit="times")

# %%
for n in (7, 15, 63, 127):  # the first token is not predicted
    factor = 212 / (4 * n)
    print(f"one of {n:>3}: 1/212 in the full batch, 1/{4 * n} by loss / K, × {factor:.2f}")
guess_c.reveal(measured=round(212 / 28, 2), what="computed")

# %% [markdown]
# A token of the longest sequence counts less than half. How long is the gradient's error, as a share of the right
# gradient?

# %%
ragged = text_batch(8, 16, 64, 128, vocab=64)
right = gradient(exact, ragged, 1)
error = relative_error(gradient(exact, ragged, 4), right)
print(f"unequal lengths: relative error {error:.2f}")
print(count_targets(ragged["labels"]), "predicted tokens")

# %% [markdown]
# The error is larger than the gradient. No exception is raised, and the loss still goes down. Popular libraries
# trained like this until autumn 2024.
#
# Is it as bad with a pretrained model and real text? Try SmolLM2 on a sequence of 16 tokens (the rest has the label
# -100, which the loss skips) and one of 128:

# %%
smol, tokenizer = models.smollm2()
ids = texts.batch(tokenizer, batch_size=2, seq_len=128)
real = {"input_ids": ids, "labels": ids.clone()}
real["labels"][0, 16:] = -100
error = relative_error(gradient(smol, real, 2), gradient(smol, real, 1))
print(f"SmolLM2, 16 and 128 tokens, loss / K: relative error {error:.1f}")

# %% [markdown]
# It is. The way out is to **add up sums, and divide by one number**: the number of items in the whole window. For a
# language model the items are the tokens that are *predicted*. `count_targets(labels)` counts them. It leaves out labels
# of -100, and the first label of each row, which no position predicts. (Exercise 3.2, which is optional, writes it.)
#
# ### Exercise 3.3 · the right divisor
#
# ●●○ · 8 minutes · trains: the gradient of a mean, taken piece by piece
#
# Write `accumulate(micro_batches, loss_and_count)`. `micro_batches` is a list of anything. For each,
# `loss_and_count(micro)` gives the **summed** loss (a tensor) and the number of items (an int,
# perhaps 0). Leave the gradient of the mean over *all* items in `.grad`, and return that mean. Keep one
# graph (one micro-batch's activations) at a time.
#
# <details><summary>Hint 1: the total first</summary>
#
# You need the total before the first `backward()`. Ask for all counts first, in a pass of its own.
#
# <details><summary>Hint 2: the gradient</summary>
#
# What part of the mean over all items is this micro-batch's sum? Call `backward()` on that part, before the next forward.
#
# <details><summary>Hint 3: in code</summary>
#
# `(loss / total).backward()` for each micro-batch. The sum of all `loss.item()`, divided by the total, is what you return.
#
# </details></details></details>


# %%
def accumulate(micro_batches, loss_and_count):
    ### BEGIN SOLUTION
    total = sum(loss_and_count(micro)[1] for micro in micro_batches)
    loss_sum = 0.0
    for micro in micro_batches:
        loss, _ = loss_and_count(micro)
        (loss / total).backward()
        loss_sum += loss.item()
    return loss_sum / total
    ### END SOLUTION


accumulate = check("3.3", accumulate)

# %%
claims.show("C10")

# %% [markdown]
# ## 5 · Asking for the total without a second pass
#
# Your function may run every forward twice, only to count. You can count the labels alone, which costs nothing. Or you
# divide by the first micro-batch's count, and rescale the gradients at the end. `accumulate_gradients` counts
# labels if you pass `count_items`, and rescales gradients if you do not:

# %%
loss, items = accumulate_gradients(
    split(ragged, 1), lambda micro: next_token_loss(exact, micro)
)
print(items, "items; exact:", relative_error(take_gradient(exact), right) < 1e-12)

# %% [markdown]
# ## 6 · The loop around it
#
# When do you step, and when do you zero? With 7 micro-batches in windows of 3, the last window has one micro-batch. It
# is an update like the others, over fewer items.
#
# ### Exercise 3.4 · the whole loop, and what is left at its end
#
# ●●○ · 8 minutes · trains: when to step, when to zero, and the last incomplete window
#
# Write `train(model, optimizer, micro_batches, window, loss_and_count)`. `micro_batches` is a list, or an iterator that
# does not fit into memory: hold one window of it, and one graph. Update after every `window` micro-batches, and once
# more for what is left. Return a list: each update's mean loss, without its graph.
#
# <details><summary>Hint 1: use what you have</summary>
#
# `accumulate(held, loss_and_count)` does one window, if you hand it a list of its micro-batches.
#
# <details><summary>Hint 2: windows from a stream</summary>
#
# `from itertools import islice`. With `rest = iter(micro_batches)`, `list(islice(rest, window))` takes the next window,
# or what is left of it. At the end the list is empty.
#
# </details></details>


# %%
def train(model, optimizer, micro_batches, window, loss_and_count):
    ### BEGIN SOLUTION
    from itertools import islice

    losses, rest = [], iter(micro_batches)
    while held := list(islice(rest, window)):
        losses.append(accumulate(held, loss_and_count))
        optimizer.step()
        optimizer.zero_grad()
    return losses
    ### END SOLUTION


train = check("3.4", train)

# %% [markdown]
# Three more things happen once a window:
#
# - **Clipping** needs the complete gradient: after the last backward, before the step. With a `GradScaler` (for
#   float16), `scaler.unscale_(optimizer)` comes before it.
# - **Logging** uses the same division as training. A loop that logs the last micro-batch's `loss / K` shows a loss that is K times too small.
# - **Several processes** exchange their gradients. `DistributedDataParallel` does it in every backward, unless its
#   `no_sync()` switches that off.

# %% [markdown]
# ### Exercise 3.7 · a batch of 64 where 16 do not fit
#
# ●●○ · 5 minutes · trains: choosing a micro-batch by its bytes, and letting go of each graph
#
# Write `train_64(model, optimizer, batch, loss_and_count)`: **one** update of a small Llama on all 64 rows of `batch`
# (a dict of tensors), on a card of 8 MiB, and with exactly the gradient of the full batch. Return the mean loss over
# all tokens. The sequences have unequal lengths. `split(batch, size)` cuts a batch. The model, AdamW's states and the
# gradients need room as well.
#
# <details><summary>Hint 1: how small?</summary>
#
# Sixteen are too many. Halve.
#
# <details><summary>Hint 2: it still does not fit?</summary>
#
# A loss that you keep keeps its graph. Call `backward()` for each micro-batch, and keep only `loss.item()` for the log.
#
# <details><summary>Hint 3: all of it</summary>
#
# You have everything already: `accumulate` on `list(split(batch, 8))`, then a step and a zero. The list is needed
# because `accumulate` reads its argument twice, and what `split` returns can be read only once.
#
# </details></details></details>


# %%
def train_64(model, optimizer, batch, loss_and_count):
    ### BEGIN SOLUTION
    loss, _ = accumulate_gradients(split(batch, 8), loss_and_count)
    optimizer.step()
    optimizer.zero_grad()
    return loss
    ### END SOLUTION


train_64 = check("3.7", train_64)

# %%
from gradmem_lib.course import CARD, batch_setting

llama, adamw, sixty_four = batch_setting()
with MemoryTracker(llama, adamw, budget=CARD, title="64 sequences on that card") as tracker:
    train_64(llama, adamw, sixty_four, lambda micro: next_token_loss(llama, micro))
print(f"peak {tracker.peak.total:,} of {tracker.budget:,} bytes")

# %% [markdown]
# ## 7 · What Trainer does
#
# Hugging Face's `Trainer` accumulates for you. It counts the labels of the window and gives the number to the model as
# `num_items_in_batch`, and the model divides by it. Does every model? Take one update on four examples, once as one
# batch and once in 4 accumulation steps. `trainer_factors` runs these lines twice, with a K of 1 and of 4:
#
# ```
# args = TrainingArguments(per_device_train_batch_size=4 // K, gradient_accumulation_steps=K, ...)
# Trainer(model, args, train_dataset=four_examples).train()
# ```
#
# It returns the logged loss and gradient's norm of 4 steps, divided by those of one batch.

# %%
question = "A BERT classifier: the gradient of 4 steps / that of one batch?"
guess_e = predict_first("3.e", question, unit="times")

# %%
from gradmem_lib.course import trainer_factors

bert = "BertForSequenceClassification"
kinds = ("LlamaForCausalLM", "LlamaForSequenceClassification", bert)
for kind in kinds:
    print(f"{kind:<32}", trainer_factors(kind, steps=4))
guess_e.reveal(measured=trainer_factors(bert, steps=4)["grad_norm"])

# %% [markdown]
# The causal language model is exact, also with unequal lengths. The classifiers are off by **exactly the number of
# accumulation steps**.
#
# `Trainer` sees `**kwargs` in the model's `forward`, concludes that the model divides by the item count, and does not
# divide itself. The classifier ignores the count and returns a plain mean. So nobody divides. You may never notice:
# Adam and clipping hide a gradient's size. `model.accepts_loss_kwargs = False`, set before the `Trainer` is
# built, tells it the truth. Then `Trainer` divides by the accumulation steps itself. Exercise 3.8 asks any model
# whether it needs this.
#
# ## 8 · What you can now do
#
# - **Activations and the loss's temporaries follow the micro-batch.** Gradients are as large as ever, and live longer.
# - **Sum, then divide once**, by the items of the whole window: predicted tokens, without padding, after the shift.
# - **`loss / K` is right only for equal counts.** With lengths that differ, it is another objective.
# - **Step, zero, clip and log once a window**, the last incomplete one included.
# - **A trainer may not do what you think.** Compare one update at 1 and at K steps.
#
# Take lesson 00's last run with lesson 02's fused step, and add accumulation:

# %%
from gradmem_lib.course import first_run

first_run(optimizer="adamw-fused", accumulation=4)

# %% [markdown]
# The error fell from 400.6 MiB to 155.4. What is left above the residents belongs to four sequences. Lesson 04 makes
# the activations of a sequence smaller.
#
# ## Optional: two processes
#
# Lesson 10, about several cards, does not need this section.
#
# On several GPUs each process accumulates its own window, and `DistributedDataParallel` (DDP) takes the **mean of the
# processes' gradients**. The next script runs in two processes, with the ranks 0 and 1. Rank 0 gets the
# sequences of 8 and 16 tokens, and rank 1 those of 64 and 128:

# %%
setting = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from gradmem_lib import accumulate_gradients, count_targets, next_token_loss, split
from gradmem_lib.course import models, text_batch

dist.init_process_group("gloo")
model = models.tiny_gpt2(layers=2, hidden=32, heads=2, vocab=64, dtype=torch.float64)
ddp = DistributedDataParallel(model)
ragged = list(split(text_batch(8, 16, 64, 128, vocab=64), 1))
mine = ragged[:2] if dist.get_rank() == 0 else ragged[2:]
"""

# %%
from gradmem_lib.course import torchrun

report = """
if dist.get_rank() == 0:
    print(*torch.cat([p.grad.flatten() for p in model.parameters()]).tolist())
dist.destroy_process_group()
"""


def error_of(loop):
    numbers = map(float, torchrun(setting + loop + report, processes=2).split())
    return relative_error(torch.tensor([*numbers], dtype=torch.float64), right)


# %% [markdown]
# Suppose each process divides by its own tokens, 22 and 190. How far is the result from the gradient of all {{count_targets(ragged["labels"])}}?

# %%
question = "Each process divides by its own tokens, 22 and 190: relative error?"
guess_f = predict_first("3.f", question, unit="")

# %%
loop = """
items = sum(count_targets(micro["labels"]) for micro in mine)  # change this line
for micro in mine:
    loss, _ = next_token_loss(ddp, micro)
    (loss / items).backward()
"""
error = round(error_of(loop), 2)
print("relative error:", error)

# %%
guess_f.reveal(measured=error)

# %% [markdown]
# It is the trap of section 4: the mean gives both processes the same weight.
#
# **Now you.** Change the marked line so that the error becomes 0, and run its cell again. Try `items = {{count_targets(ragged["labels"])}}` first. Why
# is the error 0.5 then?
#
# <details><summary>Answer</summary>
#
# DDP averages over the processes, so it divides by 2 once more: with `items = {{count_targets(ragged["labels"])}}` the gradient is half as long as it
# should be. `items = {{count_targets(ragged["labels"])}} / 2` is right. A real script adds up the counts of all processes with `dist.all_reduce`, and
# divides the sum by `dist.get_world_size()`.
#
# </details>
#
# The loop has a second flaw. DDP exchanges gradients in *every* backward, and once a window is enough.
# `ddp.no_sync()` switches the exchange off: put forward and backward of all micro-batches but the last in it.
# `accumulate_gradients(..., model=ddp)` does that, divides by the count of all processes, and multiplies by their
# number:

# %%
loop = "accumulate_gradients(mine, lambda micro: next_token_loss(ddp, micro), model=ddp)"
print("accumulate_gradients: error below 1e-12:", error_of(loop) < 1e-12)

# %% [markdown]
# ## Optional: a puzzle of padding
#
# A micro-batch is as long as its longest row: the others are padded, and padding takes bytes like tokens. A puzzle has two
# targets: bytes, and a price in time. The price is counted, so it is the same on every machine. When both are met, the
# check passes. It also says what the best known choice takes.
#
# ### Exercise 3.11 · ten rows in few micro-batches
#
# ●●○ · 6 minutes · optional · trains: what padding costs, and what runs beside gradients
#
# Ten rows have 60, 12, 128, 33, 90, 7, 117, 30, 64 and 16 tokens. Cut them into micro-batches, for one gradient of a
# small Llama: a list of lists of these numbers, in the order in which they run, such as `[[60, 12], [128], ...]`. Weights,
# gradients and activations may peak at **5.2 MiB**, in **5 micro-batches**. Four are possible.
#
# <details><summary>Hint 1: padding</summary>
#
# A micro-batch takes as many bytes as its rows times its longest row. So put rows of similar lengths together.
#
# <details><summary>Hint 2: the order</summary>
#
# In the first forward no gradient exists yet. Which micro-batch should run there?
#
# </details></details>

# %%
from gradmem_lib.course import CUTTING

cuts = [[117, 90], [128], [33, 30, 16, 12], [64, 60, 7]]  # SOLUTION
check("3.11", cuts)
CUTTING.show(cuts)

# %% [markdown]
# ## Optional: what accumulation cannot make equal
#
# In the sections above nothing in the model looked across the batch. **Batch normalization** does: it takes its mean and
# variance over the *micro-batch*, so the model is trained on statistics of fewer examples. Language models use layer or
# RMS norm, so you meet this trap mostly in vision. **Dropout** draws new random numbers in each forward. That is no
# mistake: another full batch would draw other masks. The next claim also speaks of checkpointing (lesson 04).

# %%
claims.show("C30")

# %% [markdown]
# ## Optional: dropout and drop path
#
# Dropout draws new numbers in each forward. **Drop path** does so too: for some rows it leaves out a whole branch of a
# block (stochastic depth, Huang et al. 2016). Here is a classifier in plain PyTorch with both. The next two cells
# compute its gradient in three ways, from the same random state: all rows in one forward, in 4 pieces, and in one
# forward with a checkpoint on each block.

# %%
from gradmem_lib import checkpoint_layers
from gradmem_lib.course import labelled_rows, residual_net

net, labelled = residual_net(dtype=torch.float64), labelled_rows(16, dtype=torch.float64)


def classify(micro):
    outputs = net(micro["x"])
    loss = nn.functional.cross_entropy(outputs, micro["labels"], reduction="sum")
    return loss, len(outputs)


def gradient_of(pieces, seed=0):
    torch.manual_seed(seed)
    accumulate_gradients(split(labelled, 16 // pieces), classify)
    return take_gradient(net)


# %%
whole = gradient_of(pieces=1)
print(f"in 4 pieces: error {relative_error(gradient_of(pieces=4), whole):.2f}")
with checkpoint_layers(net.blocks, every=1):
    print(f"checkpoints: error {relative_error(gradient_of(pieces=1), whole):.2f}")
print(f"other seed:  error {relative_error(gradient_of(pieces=1, seed=1), whole):.2f}")
net.eval()
error = relative_error(gradient_of(pieces=4), gradient_of(pieces=1))
print("evaluation mode, in 4 pieces: error below 1e-12:", error < 1e-12)

# %% [markdown]
# Checkpoints are exact: the second run of a block draws the numbers of its first. Accumulation is off, because each piece
# draws numbers of its own. It is off about as far as the full batch with another seed. So neither is wrong: both are
# gradients of the same model with other masks. **"The same gradient" means: the same for the same masks, and the same on
# average over all masks.** The last line is how you test a loop: with all masks switched off.
#
# ### Exercise 3.9 · a fair test of your loop
#
# ●●○ · 6 minutes · optional · trains: comparing gradients where layers draw random numbers
#
# Write `fair_error(model, batch, accumulate)`: the relative error of the gradient in pieces of 3 rows, compared with one
# forward of all rows. `accumulate(pieces)` leaves the gradient of a list of pieces in `.grad`, and `split(batch, 3)` cuts
# the batch. Dropout and drop path must not disturb the comparison. Afterwards each module is in the mode in which it was,
# and no gradient is left.
#
# <details><summary>Hint 1: what disturbs?</summary>
#
# The layers that draw numbers do so in training mode alone.
#
# <details><summary>Hint 2: the modes afterwards</summary>
#
# `model.train()` puts *every* module into training mode, and some part may have been in evaluation mode before.
# `module.training` is a mode that you can note, and set.
#
# <details><summary>Hint 3: in code</summary>
#
# `modes = {module: module.training for module in model.modules()}`, then `model.eval()`. Measure twice, with
# `model.zero_grad()` before each and after the last. Then set each `module.training` to its mode.
#
# </details></details></details>


# %%
def fair_error(model, batch, accumulate):
    ### BEGIN SOLUTION
    modes = {module: module.training for module in model.modules()}
    model.eval()
    gradients = []
    for pieces in ([batch], list(split(batch, 3))):
        model.zero_grad()
        accumulate(pieces)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    model.zero_grad()
    for module, mode in modes.items():
        module.training = mode
    once, cut = gradients
    return ((cut - once).norm() / once.norm()).item()
    ### END SOLUTION


fair_error = check("3.9", fair_error)

# %% [markdown]
# ## Optional: losses that compare rows
#
# A search model learns to find the answer to a question. Its loss compares each question with *all* answers of the
# batch: the right answer must be more similar to the question than the 15 others. Random tokens stand for text here.

# %%
import torch.nn.functional as F

from gradmem_lib import accumulate_through_embeddings

encoder = exact.transformer
ids = torch.randint(0, 64, (16, 2, 32), generator=torch.Generator().manual_seed(0))
pairs = {"question": ids[:, 0], "answer": ids[:, 1]}


def embed(micro):  # (rows, hidden) for questions, and for answers
    both = (micro["question"], micro["answer"])
    return tuple(encoder(each).last_hidden_state[:, -1] for each in both)


def contrast(questions, answers):
    similar = F.normalize(questions, dim=-1) @ F.normalize(answers, dim=-1).T
    return F.cross_entropy(similar / 0.1, torch.arange(len(similar)))


# %% [markdown]
# In pieces of 4, each question is compared with 3 others instead of 15. That is an easier task, and no divisor makes it
# the same one. But the loss sees a row only through its *embedding*, which is small. So there is another way, with two
# passes through the model, in steps 1 and 3 (GradCache, Gao et al. 2021):
#
# 1. Embed all rows, piece by piece, without keeping activations.
# 2. The loss of all embeddings gives the gradient of each embedding.
# 3. Embed each piece again, with activations, and start its backward at these gradients.


# %%
def at_once():
    contrast(*embed(pairs)).backward()


def in_pieces():
    def loss_and_count(micro):
        return contrast(*embed(micro)), len(micro["answer"])

    accumulate_gradients(split(pairs, 4), loss_and_count, reduction="mean")


def in_two_passes():
    accumulate_through_embeddings(list(split(pairs, 4)), embed, contrast)


# %%
gradients = {}
for way in (at_once, in_pieces, in_two_passes):
    with MemoryTracker(encoder, live=False) as tracker:
        way()
    gradients[way] = take_gradient(encoder)
    error = relative_error(gradients[way], gradients[at_once])
    print(f"{way.__name__:<13} peak {tracker.peak.total:>10,}, error {error:.2f}")

# %% [markdown]
# The pieces miss the gradient by half of its length. The two passes give the exact gradient, and need hardly more memory than
# the pieces: the embeddings, and what the loss keeps of them. The price is a second forward. For a loss of your own,
# `check_pieces_add_up` says whether pieces are allowed.
#
# ## Optional: a window that keeps its graphs
#
# Nothing later needs this section. The script below accumulates: `backward` runs after each micro-batch, and frees its
# graph. The script also returns the mean entropy of the predictions, which says how unsure the model is. The window has
# 16 micro-batches. On a card of 2 MiB, the memory runs out in the seventh. The numbers at the ends of the lines are for
# the exercise.

# %%
from torch.nn.functional import cross_entropy

from gradmem_lib import BudgetExceeded, split
from gradmem_lib.course import window_setting


# %%
def with_entropy(model, optimizer, batch):  # 1
    entropy, rows = 0.0, len(batch[1])  # 2
    for x, y in split(batch, 8):  # 3
        logits = model(x)  # 4
        loss = cross_entropy(logits, y, reduction="sum") / rows  # 5
        loss.backward()  # 6
        p = logits.softmax(-1)  # 7
        entropy = entropy - (p * p.log()).sum() / rows  # 8
    optimizer.step()  # 9
    optimizer.zero_grad()  # 10
    return entropy.item()  # 11


# %% [markdown]
# ### Exercise 3.10 · a window that keeps its graphs
#
# ●●○ · 6 minutes · optional · trains: finding the graph that no backward frees
#
# Write `window_leak()`. It returns two things: the number of the line that keeps tensors which no later line needs, and
# the fixed script, a function with the same arguments. The fixed script returns the same entropy, trains the same
# weights, and stays within 2 MiB.
#
# <details><summary>Hint 1: which graph?</summary>
#
# `backward` frees the graph that it goes through. Which tensor of the script has a graph that no `backward` goes
# through?
#
# <details><summary>Hint 2: until when?</summary>
#
# A sum of tensors with graphs has a graph itself, and refers to all of theirs. A sum of numbers does not.
#
# </details></details>


# %%
def window_leak():
    """(the number of the line, the fixed script)."""
    raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_03/exercises_leak.py


window_leak = check("3.10", window_leak)

# %% [markdown]
# Which line did you name? Now run the script as it was, and read what the error says:

# %%
net, net_sgd, batch = window_setting()
try:
    with MemoryTracker(net, net_sgd, budget="2 MiB", live=False):
        with_entropy(net, net_sgd, batch)
except BudgetExceeded as error:
    print(error)

# %% [markdown]
# The error says which lines *made* the tensors, and which name *keeps* them. Six entropies are alive, and the error counts
# five forwards. It counts from one backward to the next. The sixth entropy was made after the sixth backward, so it
# belongs to the seventh forward.

# %% [markdown]
# ## Optional: more practice
#
# Recipes give the global batch in tokens. A well-known recipe updates on 524,288 of them. You have a card that holds
# micro-batches of 4 sequences of 2048 tokens.

# %%
question = "524,288 tokens an update, 4 × 2048 at once: how many micro-batches?"
guess_a = predict_first("3.a", question, unit="micro-batches")

# %% [markdown]
# ### Exercise 3.1 · from tokens per update to micro-batches
#
# ●○○ · 4 minutes · optional · trains: micro-batch, accumulation and GPUs, with remainders
#
# Write `plan_window(tokens_per_update, micro_batch, seq_len, gpus)`. It returns two numbers: how many micro-batches
# each GPU needs so that an update sees *at least* that many tokens, and how many tokens the update then sees.
#
# <details><summary>Hint 1: at once</summary>
#
# `gpus` cards work at the same time, each on `micro_batch` sequences of `seq_len` tokens.
#
# <details><summary>Hint 2: remainders</summary>
#
# "At least" means that you round up: `math.ceil`, or `-(-a // b)`.
#
# </details></details>


# %%
def plan_window(tokens_per_update, micro_batch, seq_len, gpus):
    ### BEGIN SOLUTION
    at_once = micro_batch * seq_len * gpus
    steps = -(-tokens_per_update // at_once)
    return steps, steps * at_once
    ### END SOLUTION


plan_window = check("3.1", plan_window)

# %%
guess_a.reveal(formula=524_288 / (4 * 2048), measured=plan_window(524_288, 4, 2048, 1)[0])


# %% [markdown]
# ### Exercise 3.2 · what counts as an item
#
# ●○○ · 5 minutes · optional · trains: padding, -100 and the causal shift
#
# Write `count_targets(labels)`: how many tokens a causal language model predicts, given labels of shape
# (batch, sequence). A label of -100 is ignored. The model's output at position t is compared with the label at t + 1.
#
# <details><summary>Hint 1: the shift</summary>
#
# Which label is never compared with anything? No position comes before the first one.
#
# <details><summary>Hint 2: in code</summary>
#
# Cut the first column off, then count what is not -100.
#
# </details></details>


# %%
def count_targets(labels):
    ### BEGIN SOLUTION
    return int((labels[:, 1:] != -100).sum())
    ### END SOLUTION


count_targets = check("3.2", count_targets)

# %% [markdown]
# ### Exercise 3.8 · fix a Trainer run
#
# ●●○ · 6 minutes · optional · trains: asking a model whether it uses the number of items
#
# Write `mended(model, batch)`. If the model ignores `num_items_in_batch`, set `model.accepts_loss_kwargs = False`, and
# `Trainer` will divide by the accumulation steps itself. If the model uses the number, leave it alone. Return the
# model. Do not decide by the model's name: ask the model, which may have dropout. Set the attribute on this
# model, not on its class.
#
# <details><summary>Hint 1: how to ask</summary>
#
# Call `model(**batch, num_items_in_batch=torch.tensor(n))` with two different n, and compare the losses. Do it in eval
# mode: dropout would make any two losses differ.
#
# </details>


# %%
def mended(model, batch):
    ### BEGIN SOLUTION
    model.eval()
    few = model(**batch, num_items_in_batch=torch.tensor(1)).loss
    many = model(**batch, num_items_in_batch=torch.tensor(1000)).loss
    model.train()
    if few.item() == many.item():
        model.accepts_loss_kwargs = False
    return model
    ### END SOLUTION


mended = check("3.8", mended)

# %%
for kind in kinds:
    print(f"{kind:<32}", trainer_factors(kind, steps=4, prepare=mended))

# %% [markdown]
# All factors are 1 now. `Trainer` takes the mean of the micro-batches' means, which is right for classifiers whose
# micro-batches have equally many examples. A language model would have section 4's error again.
#
# There is a second question: **does the loss that your `Trainer` computes use the number?** A `compute_loss` of your
# own that returns a mean ignores it: the Llama's gradient is then 4.8 times too large. Return the sum, divided by
# `num_items_in_batch`. With several processes, multiply it by `self.accelerator.num_processes`: the number counts the
# items of all of them, their gradients are averaged, and `Trainer` makes up for that in its own `compute_loss` alone.
#
# A loss that is a mean of something else, such as rows, stays as it is. Write `loss_is_scaled_for_ga = False` into your
# class, and `Trainer` divides by the number of micro-batches. `check_accumulation(trainer)` tells you before you train
# whether the result is right.

# %% [markdown]
# ### Exercise 3.5 · the loss to log
#
# ●○○ · 3 minutes · optional · trains: weighting what is logged as what is trained
#
# Models often return *means*. Write `window_loss(means, counts)`: the mean loss of all items of a window, from each
# micro-batch's mean loss and its number of items.
#
# <details><summary>Hint</summary>
#
# Mean times count is the sum. Add up, then divide once.
#
# </details>


# %%
def window_loss(means, counts):
    ### BEGIN SOLUTION
    return sum(mean * n for mean, n in zip(means, counts, strict=True)) / sum(counts)
    ### END SOLUTION


window_loss = check("3.5", window_loss)

# %% [markdown]
# ### Exercise 3.6 · clipping, in its place
#
# ●●○ · 5 minutes · optional · trains: clipping the gradient of the update, not its parts
#
# Write `clipped_update(model, optimizer, micro_batches, loss_and_count, max_norm)`: one update on a list of
# micro-batches, with its gradient clipped to `max_norm`. Return the norm before clipping, as a float. Keep one graph
# at a time.
#
# <details><summary>Hint 1: the function</summary>
#
# `nn.utils.clip_grad_norm_(model.parameters(), max_norm)` clips in place and returns the norm.
#
# <details><summary>Hint 2: the place</summary>
#
# The gradient is complete after the last backward. Clip there, then step, then zero.
#
# </details></details>


# %%
def clipped_update(model, optimizer, micro_batches, loss_and_count, max_norm):
    ### BEGIN SOLUTION
    accumulate(micro_batches, loss_and_count)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()
    ### END SOLUTION


clipped_update = check("3.6", clipped_update)
