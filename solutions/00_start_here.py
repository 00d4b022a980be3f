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
# # 00 · Start here
#
# *10 minutes. You need: a PyTorch training loop you could write yourself.*
#
# At the end of this course you can say, before running it, how many bytes a fine-tuning run will need, and make it fit
# the card you own. You will build each technique by hand, and watch what it does to real memory while it does it. A
# laptop without a GPU is enough: the bytes are real there too.
#
# Every lesson goes through the same five moves:
#
# 1. **claim**: a sentence about memory, often one you have read somewhere;
# 2. **predict**: you commit to a number;
# 3. **run**: the bytes are counted in front of you;
# 4. **explain**: why the number is what it is;
# 5. **exercise**: you write the piece of code that knows it, and it is checked at once.
#
# Run the cells from top to bottom, each with Shift+Enter. First: does everything work here?

# %% tags=["nbval-ignore-output"]
from gradmem_lib import doctor

doctor()

# %% [markdown]
# `ok` needs nothing from you. `warn` means that the course runs with a limit. `missing` is to be mended, and the arrow
# below it says how. After mending something, restart the kernel (the ⟳ button above) and run this cell again.
#
# ## 1 · Watch a training loop
#
# Our guinea pig is a tiny Llama: the architecture of the large ones, with 4 blocks and random weights. The training
# loop is the usual one.

# %%
import torch

from gradmem_lib import BudgetExceeded, MemoryTracker, check, predict_first
from gradmem_lib.course import models

model = models.tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
ids = torch.randint(0, 8192, (16, 128), generator=torch.Generator().manual_seed(0))


def train(batch, steps=1):
    for _ in range(steps):
        loss = model(input_ids=ids[:batch], labels=ids[:batch]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


# %%
n = sum(p.numel() for p in model.parameters())
print(f"{n:,} parameters, each a {model.dtype}")

# %% [markdown]
# A number in float32 takes 4 bytes. So, before anything runs: type your guess into the box, as `25000000` or `25e6`
# or `24 MiB`, and press Enter. It is kept for you, and nobody else sees it.

# %%
guess = predict_first("0.a", "How many bytes do the parameters of this model take?")

# %% [markdown]
# Now run the next cell and keep your eyes on the picture. It trains for 30 steps, and the batch grows twice: from one
# sequence to two, then to four. **What grows with it, and what stays as it is?**

# %%
with MemoryTracker(
    model, optimizer, title="30 steps, and the batch doubles twice"
) as tracker:
    for batch in (1, 2, 4):
        train(batch, steps=10)

# %% [markdown]
# Each tooth of the saw is one training step. **Parameters**, **gradients** and the **optimizer**'s memory, which appears
# in the first step and stays, do not care about the batch. What grows are the **activations**, which forward keeps for
# backward, and on top of them, in short spikes, the **temporaries**.
#
# When the cell ends, a still picture takes the place of the moving one, so that a saved notebook shows it too.

# %%
guess.reveal(formula=4 * n, measured=tracker.peak.by_category["parameters"])

# %% [markdown]
# That was a prediction: your guess, the formula, and what was counted, side by side. A wrong guess costs nothing.
#
# ## 2 · Read the picture
#
# A tracker remembers what it saw. `show()` draws it again, and this picture can be asked: move the mouse over it, or
# click it and use the arrow keys. **P** jumps to the peak. Here is a single step, so that you can see inside.

# %%
with MemoryTracker(model, optimizer, live=False, title="one step, four sequences") as step:
    train(batch=4)
step.show()

# %% [markdown]
# From left to right are the operations of PyTorch, in the order in which they ran. From bottom to top are the bytes
# that are alive, by **category**:
#
# | category | what it is |
# |---|---|
# | parameters | the weights |
# | gradients | one number for each weight, from backward to `zero_grad` |
# | optimizer | what AdamW remembers about each weight |
# | activations | what forward saves because backward needs it |
# | temporaries | made by one operation, gone a few operations later |
# | other | what has no better name here, such as the batch itself |
#
# The strip along the top gives the **phase**: forward, backward, optimizer step. In words, the peak is:

# %%
print(step.peak)

# %% [markdown]
# These are exact bytes, counted tensor by tensor and not estimated. Run the cell again, and they are the same.
#
# ## 3 · An exercise, and the three things it can say
#
# Exercises are checked by `check`, which prints one line. An exercise that you have not begun is no failure: later
# cells then use the course's own solution, and the notebook still runs to its end.


# %%
def not_begun(shape, bytes_per_element):
    raise NotImplementedError


_ = check("0.1", not_begun)

# %% [markdown]
# A wrong answer is told what is wrong with it. Here is one, written by us. If it is a mistake that many make, `check`
# knows it by name.


# %%
def wrong(shape, bytes_per_element):
    return sum(shape) * bytes_per_element


_ = check("0.1", wrong)

# %% [markdown]
# The third line is yours to see.
#
# ### Exercise 0.1 · the bytes of one tensor
#
# ●○○ · 2 minutes · trains: turning a shape and a dtype into bytes
#
# Write `tensor_bytes(shape, bytes_per_element)`: the bytes of a tensor of that shape. `tensor_bytes((2, 3), 4)` is
# 24. Replace the line `raise NotImplementedError`, run the cell, and read what it says. Hints open one by one.
#
# <details><summary>Hint 1: from shape to elements</summary>
#
# A 2 × 3 tensor has 2 · 3 elements: the sides are multiplied. Each element takes `bytes_per_element` bytes.
#
# <details><summary>Hint 2: any number of sides</summary>
#
# `math.prod` multiplies all the numbers of a tuple. With a loop, start from 1. A tensor of shape `()` is a single
# number, and `math.prod(())` is 1.
#
# </details></details>

# %%
import math


def tensor_bytes(shape, bytes_per_element):
    ### BEGIN SOLUTION
    return math.prod(shape) * bytes_per_element
    ### END SOLUTION


tensor_bytes = check("0.1", tensor_bytes)

# %% [markdown]
# All the sums of this course are made of this one. The batch we train on, for instance, is 16 sequences of 128 token
# numbers, which are stored in 8 bytes each:

# %%
print(
    f"{tensor_bytes((16, 128), 8):,} bytes by your formula, {ids.nbytes:,} bytes by PyTorch"
)

# %% [markdown]
# ## 4 · Run out of memory, on purpose
#
# A `budget` turns your machine into a card of that size. The first allocation that goes past it raises
# `BudgetExceeded`, as CUDA would raise its `OutOfMemoryError`. But this one says who holds what. Take a card of
# 192 MiB. Two sequences fit. Then we try sixteen:

# %%
card = "192 MiB"

with MemoryTracker(model, optimizer, budget=card, title="2 sequences, then 16") as tracker:
    train(batch=2)
    before = tracker.current.total
    try:
        train(batch=16)
    except BudgetExceeded as error:
        print(error)
    after = tracker.current.total

# %% [markdown]
# Read it from the top: how many bytes too many; which operation asked for them, in which module and phase; who is
# there already; and, in the last line, what could help. This is an ordinary Python exception. The kernel lives on, and
# so does the model:

# %%
print(f"{before:,} bytes live before the failure, {after:,} bytes after it")

# %% [markdown]
# Nothing was left behind. Now repair it: **lower `batch` until the step fits.** Change the number, then run this cell
# and the next. What is the largest batch that this card can train?

# %%
batch = 16

# %% tags=["solution-only"]
batch = 4

# %%
try:
    with MemoryTracker(
        model, optimizer, budget=card, title=f"a batch of {batch}"
    ) as tracker:
        train(batch)
    print(f"{batch} fits: the peak is {tracker.peak.total:,} of {tracker.budget:,} bytes")
except BudgetExceeded as error:
    phase = error.snapshot.phase
    print(f"{batch} does not fit: no room in {phase} for {error.asked:,} bytes more")
    optimizer.zero_grad(set_to_none=True)  # a failed backward leaves gradients behind

# %% [markdown]
# Same kernel, same model, same optimizer. That is how you will work here: go past the limit, read who holds what, change
# one thing, try again. A smaller batch is only the first thing to change, and this course is about the others.
#
# ## 5 · Where things are kept
#
# What you solve and guess is kept in one small file on this machine; the doctor's list above says where. The wrong answer
# that we wrote in section 3 is in it too, as a first try. In any notebook cell, the first of these lines shows it. The
# second begins again, and keeps the old file beside the new one:
#
# ```
# %run -m gradmem_lib progress
# %run -m gradmem_lib progress --reset
# ```
#
# In a terminal where the course's environment is active, the same is `python -m gradmem_lib progress`.
#
# Two things can be set from outside, before JupyterLab starts, or with `%env` in a first cell:
#
# | variable | what it does |
# |---|---|
# | `GRADMEM_LIVE=0` | no moving pictures: quicker, and good for a slow connection |
# | `GRADMEM_PROGRESS=/some/file.json` | keeps your progress in that file |
#
# Next: **[01 · Memory accounting](01_memory_accounting.ipynb)**, where you learn to predict every layer of the picture.
