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
# *60 minutes. You need: lesson 01, and the training loop of lesson 00.*
#
# The batch that you want does not fit. So you cut it into pieces, run them one after the other, and step once. That is
# two lines of code, and one of them is usually wrong. After this lesson you can
#
# - say which bytes follow the micro-batch and which do not, before you cut anything;
# - divide by the right number, so that the result is exactly the full batch's gradient;
# - put stepping, zeroing, clipping and logging in their places, to the last incomplete window;
# - find out whether the trainer that you use gets it right, and fix it if it does not.

# %%
import torch
import torch.nn.functional as F
from torch import nn

from gradmem_lib import (
    MemoryTracker,
    accumulate_gradients,
    check,
    next_token_loss,
    predict_first,
    split,
)
from gradmem_lib.course import claims, models, texts

# %% [markdown]
# ## 1 · Three batches
#
# | name | what it is | what it decides |
# |---|---|---|
# | **micro-batch** | what goes through the model at once | activations |
# | **mini-batch** | all micro-batches of one GPU between two updates | how long an update takes |
# | **global batch** | the mini-batches of all GPUs together | what the model learns from an update |
#
# Some documents call the first of them mini-batch. When you read "batch size", ask: *how much goes through at once?*
#
# Recipes give the global batch in tokens. A well-known recipe updates on 524,288 of them. You have a card that holds
# micro-batches of 4 sequences of 2048 tokens.

# %%
question = "524,288 tokens an update, in micro-batches of 4 × 2048: how many?"
guess_a = predict_first("3.a", question, unit="micro-batches")

# %% [markdown]
# ### Exercise 3.1 · from tokens per update to micro-batches
#
# ●○○ · 4 minutes · trains: micro-batch, accumulation and GPUs, with remainders
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
print("on 8 GPUs:             ", plan_window(524_288, 4, 2048, 8))
print("500,000 tokens, 1 GPU:", plan_window(500_000, 4, 2048, 1))
claims.show("C34")

# %% [markdown]
# ## 2 · What shrinks, and what does not
#
# Here is a tiny Llama and 16 sequences of 64 tokens. They run first in one go, then in four micro-batches of 4. The
# micro-batches between two updates form a **window**.

# %%
model = models.tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
ids = torch.randint(0, 8192, (16, 64), generator=torch.Generator().manual_seed(0))
batch = {"input_ids": ids, "labels": ids}


def update(micro_size):
    for micro in split(batch, micro_size):
        loss_sum, _ = next_token_loss(model, micro)  # and the number of its tokens
        (loss_sum / (16 * 63)).backward()
    optimizer.step()
    optimizer.zero_grad()


update(16)  # Adam's states are there from now on

# %%
question = "Four micro-batches of 4 instead of 16 at once: by how much does the peak fall?"
guess_b = predict_first("3.b", question, unit="percent")

# %% [markdown]
# The next picture has both windows. Watch the activations first. Then look for the gradients between the micro-batches.

# %%
with MemoryTracker(model, optimizer, title="16 at once, then 4 × 4") as tracker:
    update(16)
    peak_of_one = tracker.peak.total
    tracker.reset_peak()
    update(4)
    peak_of_four = tracker.peak.total

# %%
print(f"16 at once: {peak_of_one:>12,} bytes at the peak")
print(f"4 × 4:      {peak_of_four:>12,} bytes")
guess_b.reveal(measured=round(100 * (1 - peak_of_four / peak_of_one)))

# %% [markdown]
# In the right half, the activations climb four times to a quarter of their height. The gradients arrive with the first
# backward and **stay**: the second, third and fourth forward run on top of them. The next table counts each part:

# %%
columns = ("activations", "gradients", "optimizer")
print(" " * 8 + "".join(f"{name:>14}" for name in (*columns, "peak")) + "  peak in")
for size in (16, 8, 4, 2, 1):
    with MemoryTracker(model, optimizer, live=False) as small:
        update(size)
    lines = small.timeline.by_category
    row = [max(lines[name]) for name in columns] + [small.peak.total]
    print(
        f"{16 // size:>2} × {size:<3}" + "".join(f"{n:>14,}" for n in row),
        "",
        small.peak.phase,
    )

# %% [markdown]
# One column moves, and the peak follows it for a while. Then the peak moves into backward, and at last into the
# optimizer's step, where no activation is left to save.
#
# Why is it in *forward* at first, when lesson 01 had the peak of the loss in backward? The model's own loss shifts the
# labels. `next_token_loss` cuts the last position off the logits instead, and that makes a copy. So when forward ends,
# three tensors as wide as the vocabulary are alive: the logits, their copy, and the log-softmax. Backward has three as
# well, one position shorter.
#
# Three claims can be settled now, and a fourth that says "only the mini-batch is in memory":

# %%
claims.show("C08", "C09", "C22", "C18")

# %% [markdown]
# ## 3 · Is it the same gradient?
#
# `backward()` *adds* to `.grad`. The gradient of a sum is the sum of the gradients. So if the full batch's loss is a
# mean over 4 micro-batches, each of them contributes a quarter. Every tutorial has that line: `loss = loss / K`.
#
# The next cells test it on four sequences of 64 tokens each. They use float64, so that rounding does not hide anything.


# %%
def padded(lengths, vocab=64):
    """Random sequences of these lengths in one batch; after a sequence's end, labels are -100."""
    shape = (len(lengths), max(lengths))
    ids = torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(0))
    ended = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    labels = ids.masked_fill(ended, -100)
    return {"input_ids": ids, "attention_mask": (~ended).long(), "labels": labels}


def take_gradient(model):
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return gradient


def relative_error(gradient, right):
    return ((gradient - right).norm() / right.norm()).item()


# %%
exact = models.tiny_gpt2(layers=2, hidden=32, heads=2, vocab=64, dtype=torch.float64)


def full_gradient(batch):
    loss, count = next_token_loss(exact, batch)
    (loss / count).backward()
    return take_gradient(exact)


def gradient_by_k(batch, k):
    for micro in split(batch, len(batch["labels"]) // k):
        loss, count = next_token_loss(exact, micro)
        mean = loss / count  # what a model returns as its loss
        (mean / k).backward()
    return take_gradient(exact)


# %%
equal = padded([64, 64, 64, 64])
error = relative_error(gradient_by_k(equal, k=4), full_gradient(equal))
print("equal lengths, loss / K: relative error below 1e-12:", error < 1e-12)

# %% [markdown]
# The two gradients agree to twelve digits: here accumulation *is* the full batch. In real data, sequences have
# different lengths.
#
# ## 4 · The trap
#
# Take sequences of 8, 16, 64 and 128 tokens, one in each micro-batch. How far off will `loss / K` be, compared with the
# length of the right gradient? (0 is exact, 0.01 is one per cent, 1 is as long as the gradient itself.)

# %%
question = "Lengths 8, 16, 64, 128 and loss / K: relative error of the gradient?"
guess_c = predict_first("3.c", question, unit="")

# %%
ragged = padded([8, 16, 64, 128])
right = full_gradient(ragged)
by_k = gradient_by_k(ragged, k=4)
guess_c.reveal(measured=round(relative_error(by_k, right), 2))

# %% [markdown]
# The error is larger than the gradient. Why? `loss / K` gives each *micro-batch* the same weight. The full batch gives
# each *token* the same weight. The next table shows how much more a token counts if it is in a short sequence:

# %%
counts = [int((labels[1:] != -100).sum()) for labels in ragged["labels"]]
print("  predicted   weight of a token in the full batch   by loss / K   factor")
for n in counts:
    full, k = 1 / sum(counts), 1 / 4 / n
    print(f"{n:>11}{full:>38.4f}{k:>14.4f}{k / full:>9.2f}")

# %% [markdown]
# A token of the shortest sequence counts 7.6 times as much as it should, and a token of the longest less than half. No
# error is raised, and the loss goes down all the same. Popular libraries trained like this until the autumn of 2024.
#
# Is it as bad with a pretrained model and real text? Try SmolLM2 on a sequence of 16 tokens and one of 128:


# %%
def real_error(lengths):
    smol, tokenizer = models.smollm2()
    ids = texts.batch(tokenizer, batch_size=len(lengths), seq_len=max(lengths))
    ended = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    real = {"input_ids": ids, "labels": ids.masked_fill(ended, -100)}
    total = int((real["labels"][:, 1:] != -100).sum())
    found = []
    for divisor in (lambda count: total, lambda count: count * len(lengths)):
        for micro in split(real, 1):
            loss, count = next_token_loss(smol, micro)
            (loss / divisor(count)).backward()
        found.append(take_gradient(smol))
    return relative_error(found[1], found[0])


# %%
print(f"SmolLM2, 16 and 128 tokens, loss / K: relative error {real_error([16, 128]):.1f}")

# %% [markdown]
# It is. The way out is to **add up sums, and divide by one number**: the items of the whole window. For a language
# model the items are the tokens that are *predicted*.
#
# ### Exercise 3.2 · what counts as an item
#
# ●○○ · 5 minutes · trains: padding, -100 and the causal shift
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
# What if you forget the shift, and so get the count a little wrong? The direction stays right. The length is off by a
# factor that depends on how short the sequences are:

# %%
with_shift = count_targets(ragged["labels"])
without = int((ragged["labels"] != -100).sum())
print(f"{with_shift} tokens are predicted, {without} labels are not -100")
print(f"gradient too small by a factor of {without / with_shift:.4f}")

# %% [markdown]
# ### Exercise 3.3 · the right divisor
#
# ●●○ · 8 minutes · trains: the gradient of a mean, taken piece by piece
#
# Write `accumulate(micro_batches, loss_and_count)`. `micro_batches` is a list. For each of them,
# `loss_and_count(micro)` gives two things: the **summed** loss (a tensor) and the number of items (an int, which may be
# 0). Leave the gradient of the mean over *all* items in `.grad`, and return that mean as a float.
#
# <details><summary>Hint 1: the total first</summary>
#
# You need the total before the first `backward()`. The simplest way asks for all counts first, in a pass of its own.
#
# <details><summary>Hint 2: the gradient</summary>
#
# `(loss / total).backward()` for each micro-batch. Nothing else is divided.
#
# <details><summary>Hint 3: the returned loss</summary>
#
# Add up `loss.item()`, and divide that sum by the total as well.
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
mean = accumulate(list(split(ragged, 1)), lambda micro: next_token_loss(exact, micro))
error = relative_error(take_gradient(exact), right)
print("tokens as items: relative error below 1e-12:", error < 1e-12)
claims.show("C10")

# %% [markdown]
# ## 5 · Asking for the total without a second pass
#
# Your function runs every forward twice, only to count. There are two ways around it. You can count the labels alone,
# which costs nothing. Or you do not need the total at all until the end, and correct the gradients then, once and in
# place. `accumulate_gradients` does either:


# %%
def loss_and_count(micro):
    return next_token_loss(exact, micro)


total = count_targets(ragged["labels"])
known = accumulate_gradients(split(ragged, 1), loss_and_count, total_items=total)
print(known.items, "items; exact:", relative_error(take_gradient(exact), right) < 1e-12)

stream = (micro for micro in split(ragged, 1))  # of a length that is not known
corrected = accumulate_gradients(stream, loss_and_count)
print(corrected.items, "items; exact:", relative_error(take_gradient(exact), right) < 1e-12)

# %% [markdown]
# How many micro-batches may there be? Does the peak grow with their number?

# %%
for k in (1, 2, 3, 20):
    micro_batches = ({name: tensor[:1] for name, tensor in batch.items()} for _ in range(k))
    with MemoryTracker(model, live=False) as small:
        accumulate_gradients(micro_batches, lambda micro: next_token_loss(model, micro))
    model.zero_grad()
    print(f"{k:>3} micro-batches: {small.peak.total:>12,} bytes")

# %% [markdown]
# From the second micro-batch on, it does not grow by a byte. A single one needs less, because no gradients are there
# yet during its forward.
#
# ## 6 · The loop around it
#
# When do you step, and when do you zero? And what about the end of the epoch, if 7 micro-batches do not fill windows of
# 3? The last window has one micro-batch. It is an update like the others, over fewer items.
#
# ### Exercise 3.4 · the whole loop, and what is left at its end
#
# ●●○ · 8 minutes · trains: when to step, when to zero, and the last incomplete window
#
# Write `train(model, optimizer, micro_batches, window, loss_and_count)`. `micro_batches` is any iterable, also a
# generator. Update after every `window` micro-batches, and once more for whatever is left. Return each update's mean
# loss.
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
# ### Exercise 3.5 · the loss to log
#
# ●○○ · 3 minutes · trains: weighting what is logged as what is trained
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

# %%
pairs = [next_token_loss(exact, micro) for micro in split(ragged, 1)]
means, counts = [loss.item() / n for loss, n in pairs], [n for _, n in pairs]
print("each micro-batch's mean:         ", [f"{mean:.3f}" for mean in means])
print(f"averaged without weights:         {sum(means) / 4:.3f}")
print(f"sum over count:                   {window_loss(means, counts):.3f}")
print(f"the last one, logged after / K:   {means[-1] / 4:.3f}")

# %% [markdown]
# The means of the untrained model are almost alike, so the first two results differ little. The last line is what a
# loop shows that divides by K and logs afterwards: a loss that looks four times as good as it is.

# %%
claims.show("C35")

# %% [markdown]
# ### Exercise 3.6 · clipping, in its place
#
# ●●○ · 5 minutes · trains: clipping the gradient of the update, not its parts
#
# Write `clipped_update(model, optimizer, micro_batches, loss_and_count, max_norm)`: one update on a list of
# micro-batches, with its gradient clipped to `max_norm`. Return the norm before clipping, as a float.
#
# <details><summary>Hint 1: the function</summary>
#
# `nn.utils.clip_grad_norm_(model.parameters(), max_norm)` clips in place and returns the norm that it found.
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

# %% [markdown]
# With a `GradScaler` (for float16) the order is: all backwards on scaled losses, `scaler.unscale_(optimizer)`, clip,
# `scaler.step(optimizer)`, `scaler.update()`. `accumulate_gradients(..., scaler=scaler)` does the first of these.
#
# ## 7 · What "equal" cannot mean
#
# So far nothing in the model looked across the batch. Batch normalisation does: it takes its mean and variance over the
# *micro-batch*. Dropout does not, but it draws new random numbers in each forward. The next cells compare one batch of
# 32 with four micro-batches of 8:


# %%
def error_of_four(norm):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(), nn.Linear(8, 1)).double()
    x, y = torch.randn(32, 4, dtype=torch.float64), torch.randn(32, 1, dtype=torch.float64)
    F.mse_loss(net(x), y).backward()
    one = take_gradient(net)
    for x_part, y_part in zip(x.split(8), y.split(8), strict=True):
        (F.mse_loss(net(x_part), y_part, reduction="sum") / 32).backward()
    return relative_error(take_gradient(net), one)


# %%
for norm in (nn.LayerNorm(8), nn.BatchNorm1d(8), nn.BatchNorm1d(8).eval(), nn.Dropout(0.5)):
    error = error_of_four(norm)
    name = type(norm).__name__ + ("" if norm.training else ", eval mode")
    print(f"{name:<24}", "exact" if error < 1e-12 else f"relative error {error:.1f}")
claims.show("C30")

# %% [markdown]
# For dropout the difference is no mistake: another full batch would draw other masks, too. For batch normalisation it
# is a mistake, because the model is trained on statistics of 8 examples. Language models use layer or RMS norm, so you
# will meet this trap more often in vision.
#
# ## 8 · A larger batch: what about the learning rate?
#
# "Four times the batch, four times the learning rate." Is it so? The next cells run a problem small enough to run 64
# times: a noisy linear regression, one pass over 2048 examples. `error` is how far the weights end from the true ones.
# Which learning rate makes batch 16 end where batch 4 ends?

# %%
question = (
    "Adam at batch 16 ends where batch 4 ends, if the learning rate grows by what factor?"
)
guess_d = predict_first("3.d", question, unit="")

# %%
from gradmem_lib.course import learning_rates

print("error    batch 4   batch 16, rate × 1     × 2     × 4     × 8")
for name in ("SGD", "Adam"):
    found = learning_rates(name)
    row = "".join(f"{found[16, factor]:>8.2f}" for factor in (2, 4, 8))
    print(f"{name:<8}{found[4, 1]:>8.2f}{found[16, 1]:>21.2f}{row}")

# %%
adam = learning_rates("Adam")
nearest = min((1, 2, 4, 8), key=lambda factor: abs(adam[16, factor] - adam[4, 1]))
guess_d.reveal(formula=4**0.5, measured=nearest)
claims.show("C31")

# %% [markdown]
# With SGD, four times the batch and four times the rate end where the small batch ended. Adam is matched by the root,
# twice the rate. Its step does not grow with the gradient. It grows as the gradient gets *less noisy*, and noise falls
# with the root of the batch. Both rules fail where the batch is so large that little noise is left.
#
# ## 9 · A batch of 64 where 16 do not fit
#
# Now you have a small Llama, 64 sequences of unequal lengths, and a card that is too small for 16 of them.

# %%
from gradmem_lib import BudgetExceeded
from gradmem_lib.course import CARD, batch_setting

llama, adamw, sixty_four = batch_setting()
sixteen = {name: tensor[:16] for name, tensor in sixty_four.items()}
print("the card for this exercise:", CARD)
try:
    with MemoryTracker(llama, adamw, budget=CARD, title="16 sequences on that card"):
        loss, count = next_token_loss(llama, sixteen)
        (loss / count).backward()
        adamw.step()
except BudgetExceeded as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# ### Exercise 3.7 · a batch of 64 where 16 do not fit
#
# ●●● · 10 minutes · trains: choosing a micro-batch by its bytes, and letting go of each graph
#
# Write `train_64(model, optimizer, batch, loss_and_count)`: **one** update on all 64 rows of `batch` (a dict of
# tensors), within the card, and with exactly the gradient of the full batch. Return the mean loss over all tokens.
# `split(batch, size)` cuts a batch. AdamW's states and the gradients need room as well.
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
# You have everything already: `accumulate`, or `accumulate_gradients`, on `split(batch, 8)`, then a step and a zero.
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
llama, adamw, sixty_four = batch_setting()
with MemoryTracker(llama, adamw, budget=CARD, title="64 sequences on that card") as tracker:
    loss = train_64(llama, adamw, sixty_four, lambda micro: next_token_loss(llama, micro))
print(f"loss {loss:.2f}, peak {tracker.peak.total:,} of {tracker.budget:,} bytes")

# %% [markdown]
# ## 10 · What Trainer does
#
# Hugging Face's `Trainer` accumulates for you. It counts the labels of the window and gives the number to the model as
# `num_items_in_batch`, and the model divides by it. Does every model? The next cells take one update on four examples,
# once as one batch and once in 4 accumulation steps, and compare the loss and the gradient's norm that `Trainer` logs.

# %%
question = "A BERT that classifies, 4 accumulation steps: how many times too large is its gradient?"
guess_e = predict_first("3.e", question, unit="times")

# %%
from gradmem_lib.course import trainer_logs, trainer_setting

bert, classifier = "BertForSequenceClassification", "LlamaForSequenceClassification"
kinds = ("LlamaForCausalLM", bert, classifier)
one_batch, four_steps = {}, {}
for kind in kinds:
    one_batch[kind] = trainer_logs(*trainer_setting(kind), accumulation_steps=1)
    four_steps[kind] = trainer_logs(*trainer_setting(kind), accumulation_steps=4)
    for name, value in one_batch[kind].items():
        print(f"{kind:<32}{name:<10} × {four_steps[kind][name] / value:.3f}")
factor = four_steps[bert]["grad_norm"] / one_batch[bert]["grad_norm"]
guess_e.reveal(formula=4, measured=round(factor, 3))

# %% [markdown]
# The causal language model is exact, also with unequal lengths. The classifiers are off by **exactly the number of
# accumulation steps**, in what is logged and in what is trained. You can find the reason in their code:

# %%
import inspect

from transformers import BertForSequenceClassification

forward = BertForSequenceClassification.forward
source = inspect.getsource(forward)
print("**kwargs accepted: ", "kwargs" in inspect.signature(forward).parameters)
print("num_items_in_batch:", source.count("num_items_in_batch"), "times in its code")
print(next(line.strip() for line in source.splitlines() if "CrossEntropyLoss()" in line))

# %% [markdown]
# `Trainer` sees `**kwargs`, concludes that the model divides by the item count, and does not divide itself. The model
# ignores the count and returns a plain mean. So nobody divides. You may never notice: Adam divides by the gradient's
# size anyway, and clipping limits it. The attribute `accepts_loss_kwargs`, set before the `Trainer` is built, tells it
# the truth.
#
# ### Exercise 3.8 · fix a Trainer run
#
# ●●○ · 6 minutes · trains: asking a model whether it heeds the number of items
#
# Write `mended(model, batch)`. If the model ignores `num_items_in_batch`, set `model.accepts_loss_kwargs = False`, and
# `Trainer` will divide by the accumulation steps itself. If the model uses the number, leave it alone. Return the
# model. Do not decide by the model's name: ask the model.
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
from transformers import default_data_collator

for kind in kinds:
    patient, examples = trainer_setting(kind)
    patient = mended(patient, default_data_collator(examples))
    logged = trainer_logs(patient, examples, accumulation_steps=4)
    for name, value in one_batch[kind].items():
        print(f"{kind:<32}{name:<10} × {logged[name] / value:.3f}")

# %% [markdown]
# All factors are 1 now. `Trainer` takes the mean of the micro-batches' means. That is right for classifiers whose
# micro-batches have equally many examples. For a language model the same attribute would bring back the error of
# section 4.
#
# ## 11 · Two processes
#
# On several GPUs each process accumulates its own window, and `DistributedDataParallel` (DDP) takes the **mean of the
# processes' gradients**. That is the trap of section 4 once more, because the processes have different numbers of
# tokens.
#
# DDP also sends gradients in *every* backward, unless the backward runs inside its context manager `model.no_sync()`.
# Only the last micro-batch of a window needs the exchange. `accumulate_gradients(..., model=ddp)` does both: it uses
# `no_sync` for all micro-batches but the last, and it divides by the count of all processes.
#
# The next script runs in two processes at the same time, which have the ranks 0 and 1. Rank 0 gets one micro-batch with
# 7 predicted tokens, and rank 1 gets three with 205. How far off is the usual way, means of means?

# %%
question = "Two processes with 7 and 205 tokens, means of means: relative error?"
guess_f = predict_first("3.f", question, unit="")

# %%
script = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from gradmem_lib import accumulate_gradients, next_token_loss
from gradmem_lib.course import models

dist.init_process_group("gloo")
model = DistributedDataParallel(models.tiny_gpt2(layers=1, hidden=16, heads=2, vocab=64, dtype=torch.float64))
ids = torch.randint(0, 64, (4, 128), generator=torch.Generator().manual_seed(0))
labels = ids.masked_fill(torch.arange(128) >= torch.tensor([8, 16, 64, 128])[:, None], -100)
rows = [{"input_ids": ids[[i]], "labels": labels[[i]]} for i in range(4)]
mine = rows[:1] if dist.get_rank() == 0 else rows[1:]
"""

# %%
script += """
def error(gradient):  # against the full batch, without DDP
    model.module.zero_grad()
    loss, count = next_token_loss(model.module, {"input_ids": ids, "labels": labels})
    full = torch.autograd.grad(loss / count, list(model.parameters()))
    full = torch.cat([g.flatten() for g in full])
    return ((gradient - full).norm() / full.norm()).item()

def gradient():
    return torch.cat([p.grad.flatten() for p in model.parameters()])
"""

# %%
script += """
result = accumulate_gradients(mine, lambda micro: next_token_loss(model, micro), model=model)
right = error(gradient())
for micro in mine:  # the usual way: a mean of means in each process, then the mean of both
    loss, count = next_token_loss(model.module, micro)
    (loss / count / len(mine)).backward()
usual = gradient()
dist.all_reduce(usual)
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} processes, {result.items} items")
    print("accumulate_gradients: relative error below 1e-12:", right < 1e-12)
    print(f"means of means: relative error {error(usual / 2):.1f}")
dist.destroy_process_group()
"""

# %%
from gradmem_lib.course import torchrun

printed = torchrun(script, processes=2)
print(printed, end="")
guess_f.reveal(measured=float(printed.split()[-1]))

# %% [markdown]
# In the usual way rank 0, with its 7 tokens, has the same weight as rank 1 with 205.
#
# **Now change the script** so that the usual way is right, too: first only `mine`, then the lengths. Which of the two
# can you do without?
#
# <details><summary>Answer</summary>
#
# You cannot do without the lengths. The usual way is right only if both processes have equally many micro-batches, and
# all micro-batches have equally many tokens. No sharing of 8, 16, 64 and 128 tokens gives that. Four rows of 128, two
# for each process, do. The next cell runs them.
#
# </details>

# %%
equal = script.replace("[8, 16, 64, 128]", "[128, 128, 128, 128]")
equal = equal.replace("rows[:1]", "rows[:2]").replace("rows[1:]", "rows[2:]")
print(torchrun(equal, processes=2), end="")

# %% [markdown]
# ## 12 · What it costs in time
#
# The same tokens go through the same matrix products. But there are more operations to start, and each is smaller. The
# next table was recorded once, on one machine (`benchmarks/accumulation.py`). Your machine has its own ratios.

# %%
from gradmem_lib.course import recorded

record = recorded()
print(record["what"])
print(f"{record['clock']}, {record['where']['device']}, {record['where']['date']}")
print(f"{'K':>4}{'accumulated':>14}{'an update each':>17}")
for k, ratio in record["accumulated"].items():
    each = record["stepped"].get(k)
    print(f"{k:>4}{ratio:>14.2f}" + (f"{each:>17.2f}" if each else ""))

# %%
claims.show("C16", "C29")

# %% [markdown]
# On the one thread of that record, moderate cuts cost nothing: a smaller micro-batch stays closer to the processor's
# caches. Only the smallest micro-batches take longer. A large GPU is the other extreme: a micro-batch that cannot fill
# it leaves it waiting. So take the largest micro-batch that fits, and measure before you believe a ratio.
#
# ## 13 · What you can now do
#
# - **Activations follow the micro-batch. Nothing else does.** Gradients are as large as ever, and live longer.
# - **Sum, then divide once**, by the items of the whole window: predicted tokens, without padding, after the shift.
# - **`loss / K` is right only for equal counts.** With lengths that differ, it is another objective.
# - **Step, zero, clip and log once a window**, the last incomplete one included.
# - **Batch norm sees micro-batches**, and a trainer may not do what you think. Compare one update at 1 and at K steps.
# - **Several processes**: exchange gradients once a window (`no_sync`), and divide by the count of all processes.
# - **Learning rate**: linear for SGD, the root for Adam, and only while the batch is noisy.
#
# Accumulation cannot help where one sequence does not fit. Lesson 04 makes the activations of a sequence smaller.
