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
# *20 minutes: sections 1 to 5, with exercise 0.1. You need: a PyTorch training loop you could write yourself.*
#
# At the end of this course you can say, before you run it, how many bytes a fine-tuning run will need, and make it fit
# the card (the GPU) you own. You will build each technique by hand, and watch real memory. A laptop
# without a GPU is enough: the bytes are real there too.
#
# <!-- picture: first run -->
#
# The course begins with an error that somebody met on a card:
#
# ```
# CUDA out of memory. Tried to allocate 36.00 MiB. GPU 0 has a total capacity of 39.56 GiB of which 2.81 MiB is
# free. Process 16368 has 39.55 GiB memory in use. Of the allocated memory 38.05 GiB is allocated by PyTorch, and
# 1021.72 MiB is reserved by PyTorch but unallocated.
# ```
#
# Which of these numbers can you change?
#
# Every lesson goes through the same five moves:
#
# 1. **claim**: a sentence about memory, often one you have read somewhere;
# 2. **predict**: you commit to a number;
# 3. **run**: the bytes are counted in front of you;
# 4. **explain**: why the number is what it is;
# 5. **exercise**: you write the code that computes it, and your code is checked at once.
#
# <details><summary>How the minutes at the top are counted</summary>
#
# The minutes at the top of a lesson allow you 130 words of text a minute, 40 words of code, a minute for each guess and
# each claim, and one and a half times what an exercise states. Optional parts are counted apart.
#
# </details>
#
# Run the cells from top to bottom, each with Shift+Enter. The next one tests your setup.

# %% tags=["nbval-ignore-output"]
from gradmem_lib import doctor

doctor()

# %% [markdown]
# `ok` needs nothing from you. `warn` means that the course runs with a limit. `missing` has to be fixed, and the arrow
# below it says how. After a fix, restart the kernel (the ⟳ button above) and run this cell again.
#
# ## 1 · Watch a training loop
#
# You will train a tiny Llama: the architecture of the large ones, with 4 blocks and random weights. The training loop
# is the usual one. (`foreach=False` makes AdamW update one parameter after the other: lesson 02 measures what that
# saves.) The second cell counts the parameters.

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
        optimizer.zero_grad()


# %%
n = sum(p.numel() for p in model.parameters())
print(f"{n:,} parameters, each a {model.dtype}")

# %% [markdown]
# A number in float32 takes 4 bytes. How many bytes do all parameters take? The next cell shows a box: type your guess
# into it and press Enter. `3000000`, `3e6` and `3 MB` are three ways to type the same number. Your guess is kept on
# this machine. (A KiB is 1024 bytes, a MiB is 1024 KiB, and a GiB is 1024 MiB. MB and GB are powers of ten: 10⁶ and
# 10⁹ bytes.)

# %%
guess = predict_first("0.a", "How many bytes do the parameters of this model take?")

# %% [markdown]
# Now run the next cell and watch the picture. The cell trains for 12 steps, and the batch grows twice: after
# step 4 from one sequence to two, and after step 8 to four. **What grows with the batch, and what stays as it is?**

# %%
with MemoryTracker(
    model, optimizer, title="12 steps, and the batch doubles twice"
) as tracker:
    for batch in (1, 2, 4):
        train(batch, steps=4)

# %% [markdown]
# The picture is a saw, and each tooth is one training step. (The strip at the top numbers the steps. Dashed lines mark
# new batch sizes.) **Parameters**, **gradients** and the **optimizer**'s memory do not depend on the batch. (That memory
# appears in the first step.) Two things grow: the **activations**, which forward keeps for backward,
# and the **temporaries** on top of them, in short spikes.

# %%
guess.reveal(formula=4 * n, measured=tracker.peak.by_category["parameters"])

# %% [markdown]
# Your guess, the formula, and the counted bytes stand side by side. A wrong guess costs nothing.
#
# ## 2 · Read the picture
#
# `show()` draws it again. Put the pointer on any byte: the line below names its tensor, its module and its life. A click
# keeps it lit, and the wheel zooms. Here is a single step, drawn afterwards (`live=False`):

# %%
with MemoryTracker(model, optimizer, live=False, title="one step, four sequences") as step:
    train(batch=4)
step.show()

# %% [markdown]
# The picture shows PyTorch's operations from left to right, in the order in which they ran. From bottom to top it
# stacks the bytes that are alive, by **category**:
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
# The strip along the top gives the **phase**: forward, backward, optimizer step. The next cell prints the peak's
# bytes, phase and categories:

# %%
print(step.peak)

# %% [markdown]
# The peak is at the beginning of backward: everything that forward saved is still alive, and there is no gradient yet,
# so the line names none. These bytes are exact: they are counted tensor by tensor. If you run the cell
# again, they are the same.
#
# ## 3 · An exercise, and the three things it can say
#
# `check` checks an exercise and prints one line. Here is its line for an exercise that you have not begun. That is no
# failure: later cells use the course's own solution, and the notebook still runs to its end.


# %%
def not_begun(shape, bytes_per_element):
    raise NotImplementedError


_ = check("0.1", not_begun)

# %% [markdown]
# If an answer is wrong, `check` says what is wrong with it, and later cells use our solution until yours passes. It knows
# common mistakes by name. Here is one that we made on purpose:


# %%
def wrong(shape, bytes_per_element):
    return sum(shape) * bytes_per_element


_ = check("0.1", wrong)

# %% [markdown]
# The third thing that `check` can say is that you have passed. Your own answer will print that line.
#
# ### Exercise 0.1 · the bytes of one tensor
#
# ●○○ · 2 minutes · trains: turning a shape and a dtype into bytes
#
# Write `tensor_bytes(shape, bytes_per_element)`: the bytes of a tensor of that shape. `tensor_bytes((2, 3), 4)` is 24.
# Replace the line `raise NotImplementedError`, run the cell, and read what it says. The hints open one by one.
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
    raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_00/exercises.py


tensor_bytes = check("0.1", tensor_bytes)

# %% [markdown]
# Every sum in this course is made of such products. For instance, the batch that we train on is 16 sequences of 128
# token numbers, each stored in 8 bytes:

# %%
print(
    f"{tensor_bytes((16, 128), 8):,} bytes by the formula, {ids.nbytes:,} bytes by PyTorch"
)

# %% [markdown]
# ## 4 · Run out of memory, on purpose
#
# A `budget` turns your machine into a card of that size. The first allocation that goes past it raises
# `BudgetExceeded`, as CUDA would raise its `OutOfMemoryError`. But `BudgetExceeded` says who holds what. The next cell
# sets a budget of 192 MiB. It trains on two sequences, which fit, and then on sixteen:

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
# Read the error from the top. It begins with the bytes over the budget, and `live` includes the refused tensor. Then it
# names the operation that asked, with its module and phase, and what the memory holds. The last lines say what could
# help, the cheapest first, and what could not: later lessons explain those words. `BudgetExceeded` is an ordinary
# exception, so the kernel and the model are still there:

# %%
print(f"{before:,} bytes live before the failure, {after:,} bytes after it")

# %% [markdown]
# Nothing was left behind. Now **lower `batch` until the step fits**: change the number, then run the next two
# cells. What is the largest batch that this card can train?

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
    optimizer.zero_grad()  # a failed backward leaves gradients behind

# %% [markdown]
# Four sequences fit, and five do not. You will often work like this: go past the limit, read who holds what,
# change one thing, try again. A smaller batch is only the first thing to change.
#
# Now suppose that an update needs all sixteen sequences, on a card of 48 MiB. `first_run` trains this model on them
# without a budget. It prints the highest moment of each phase, and compares the peak with the card:

# %%
from gradmem_lib.course import first_run

first_run()

# %% [markdown]
# Lessons 01 to 05 return to this run, the one in the picture at the top.
#
# Back to the error at the top. The 36 MiB are only the request that came last. What you can change is the 38.05 GiB of
# live tensors, and the rest of this course is about them. Lesson 06 reads the other numbers.
#
# ## 5 · Where things are kept
#
# Your answers and guesses are kept in one small file on this machine. The list of `doctor()`, at the top, says where.
# Here are two lines for any notebook cell. The first shows your progress. The second begins again, and keeps the old
# file beside the new one:
#
# ```
# %run -m gradmem_lib progress
# %run -m gradmem_lib progress --reset
# ```
#
# <details><summary>Two things that you can set from outside</summary>
#
# Set them before JupyterLab starts, or with `%env` in the notebook's first cell.
#
# | variable | what it does |
# |---|---|
# | `GRADMEM_LIVE=0` | no moving pictures: quicker, and good for a slow connection |
# | `GRADMEM_PROGRESS=/some/file.json` | keeps your progress in that file |
#
# </details>
#
# Next: **[01 · Memory accounting](01_memory_accounting.ipynb)**, where you learn to predict every layer of the picture.
