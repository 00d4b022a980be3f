"""Lesson 01's exercises: count what stays, what autograd saves, what the logits and attention need,
and fit three steps into a budget.
"""

from functools import cache

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ...judge.exercise import Exercise, calls, measured
from ..shared.settings import (
    adamw,
    gradients_of_updates,
    have_graphs,
    seeded,
    sgd,
    tiny_llama,
    weights_of,
)

# 1.1


def resident_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of parameters, gradients and AdamW's states of a model in training."""
    parameters = list(model.parameters())  # a tied weight comes once
    trained = [p for p in parameters if p.requires_grad]
    gradients = sum(p.numel() * p.element_size() for p in trained)
    return {
        "parameters": sum(p.numel() * p.element_size() for p in parameters),
        "gradients": gradients,
        "optimizer": 2 * gradients + 4 * len(trained),
    }


def small_mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), *between, nn.Linear(16, 4))


def resident_cases(answer):
    mlp = small_mlp()
    yield "an MLP in float32, Linear(8, 16) and Linear(16, 4)", answer(mlp)
    mlp[0].requires_grad_(False)
    yield "an MLP whose Linear(8, 16) is frozen, which needs bytes but no training", answer(mlp)
    mixed = small_mlp()
    mixed[1].bfloat16()
    yield "an MLP in which Linear(8, 16) is float32 and Linear(16, 4) is bf16", answer(mixed)
    tied = nn.ModuleDict({"embed": nn.Embedding(50, 8), "head": nn.Linear(8, 50, bias=False)})
    tied["head"].weight = tied["embed"].weight
    yield "a table of 50 × 8 under two names, which counts once", answer(tied)
    normed = small_mlp(nn.BatchNorm1d(16))
    yield "an MLP with a batch norm, whose buffers do not count", answer(normed)


RESIDENT = Exercise(
    "1.1",
    resident_bytes,
    resident_cases,
    """
    2 * gradients → gradients
        this counts one moment: Adam keeps two for every trained parameter.
    p.numel() * p.element_size() for p in trained → 4 * p.numel() for p in trained
    p.numel() * p.element_size() for p in parameters → 4 * p.numel() for p in parameters
        this counts 4 bytes for each number, whatever its dtype: ask each parameter for its
        element_size().
     if p.requires_grad →
        this gives frozen parameters a gradient and moments: they have neither.
    if p.requires_grad → if p.grad is not None
        no parameter has a gradient here: before the first backward each p.grad is None, so ask
        p.requires_grad.
    list(model.parameters()) → [p for _, p in model.named_parameters(remove_duplicate=False)]
        this counts a tied weight twice: it has two names and one storage.
     + 4 * len(trained) →
        the moments are right. AdamW also keeps a step counter, one float32 for each trained tensor.
    4 * len(trained) → 4 * sum(p.numel() for p in trained)
        this has one step counter for each number: it is one for each trained tensor.
    2 * gradients + 4 * len(trained) → 8 * sum(p.numel() for p in trained)
        8 bytes for each number are two moments in float32: PyTorch keeps them in the parameter's
        own dtype, and a step counter, one float32, for each trained tensor.
    """,
)

# 1.2


def saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the storages that ``model(x)`` saves for backward, each once, without the model's
    parameters.
    """
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    for parameter in model.parameters():
        saved.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(saved.values())


class ColumnsMultiplied(nn.Module):
    """Saves two views of its input, which begin at different addresses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (rows, columns); the result: (rows, 1)."""
        return x[:, 1:2] * x[:, 2:3]


def saved_cases(answer):
    mlp = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    yield (
        "what backward needs of one row through Linear(2, 3), ReLU, Linear(3, 2), ReLU and "
        "Linear(2, 1), each storage once",
        answer(mlp, torch.randn(1, 2)),
    )
    x = torch.randn(6, 4)
    sliced = nn.Sequential(nn.Linear(4, 8), ColumnsMultiplied())
    yield (
        "two slices of 6 × 8 results of Linear(4, 8), which keep their whole storage, once",
        answer(sliced, x),
    )
    # The first and the last parameter are saved here. Of Linear layers alone they are not.
    normed = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.LayerNorm(6))
    normed[1].weight = nn.Parameter(torch.randn(2, 6, 4)[1])
    yield (
        "weights of which one begins inside its storage, and none of which counts",
        answer(normed, x),
    )
    averaged = nn.Sequential(nn.Linear(4, 24), nn.BatchNorm1d(24), nn.Linear(24, 2)).eval()
    trained = torch.randn(6, 4, requires_grad=True)
    yield (
        "a batch norm, whose buffers are saved and count, as does an x that requires a gradient",
        answer(averaged, trained),
    )
    frozen = nn.Sequential(*small_mlp(nn.GELU()), nn.Tanh(), nn.Linear(4, 2))
    frozen[0].requires_grad_(False)
    frozen[-1].requires_grad_(False)  # and is saved, since a gradient passes through it
    yield (
        "a frozen first layer, so that GELU needs no backward and saves nothing, and a frozen last "
        "one, whose weight does not count",
        answer(frozen, torch.randn(5, 8)),
    )
    # A storage that nothing keeps is free at once, and the next one gets its address.
    deep = nn.Sequential(*[nn.Linear(64, 64), nn.GELU()] * 12).bfloat16()
    yield (
        "24 modules of one size in bf16, whose storages must stay alive until all are counted",
        answer(deep, torch.randn(16, 64).bfloat16()),
    )


SAVED = Exercise(
    "1.2",
    saved_bytes,
    saved_cases,
    """
    = storage.nbytes() → = saved.get(storage.data_ptr(), 0) + storage.nbytes()
        this counts a storage as often as it is saved: a ReLU and the Linear after it save the same
        one.
    saved.pop(parameter.untyped_storage().data_ptr(), None) →
        this counts the parameters too: they are saved, but they were there before and stay
        afterwards.
    = storage.nbytes() → = tensor.nbytes
        this counts the view: a saved slice keeps its whole storage alive.
    saved[storage.data_ptr()] → saved[tensor.data_ptr()]
        a storage counts once for each view that begins elsewhere in it: the key is
        tensor.untyped_storage().data_ptr(), not tensor.data_ptr().
    saved[storage → if not isinstance(tensor, nn.Parameter): saved[storage
    saved.pop(parameter.untyped_storage().data_ptr(), None) →
        a parameter's view is counted: what is saved of a weight may be its transpose, which is no
        nn.Parameter. Compare the storages.
    parameter.untyped_storage().data_ptr() → parameter.data_ptr()
        a parameter that begins inside its storage is counted: compare storages, by
        p.untyped_storage().data_ptr().
    saved.pop(parameter.untyped_storage().data_ptr(), None) →
    sum(saved.values()) → sum(saved.values()) - sum(p.nbytes for p in model.parameters())
        the bytes of all parameters are subtracted, but not all of them are saved. Leave out a saved
        storage that is a parameter's.
    = storage.nbytes() → = saved.get(storage.data_ptr(), 0) + tensor.nbytes
    saved.pop(parameter.untyped_storage().data_ptr(), None) →
        this adds up all saved tensors: a storage that is saved twice counts once, and parameters do
        not count, which were there before and stay afterwards.
    """,
)

# 1.3


def eager_surplus(batch: int, seq_len: int, heads: int) -> int:
    """Bytes that eager attention saves above fused attention, in one float32 block."""
    softmax = 4 * batch * heads * seq_len * seq_len
    log_sum_exp = 4 * batch * heads * seq_len
    return softmax - log_sum_exp


SURPLUS = Exercise(
    "1.3",
    eager_surplus,
    calls((2, 4, 3), (1, 128, 4), (8, 64, 3), hidden=[(5, 7, 2)]),
    """
    softmax = 4 * batch * heads → softmax = 4 * batch
    log_sum_exp = 4 * batch * heads → log_sum_exp = 4 * batch
        this counts one head: every head has scores of its own.
    softmax - log_sum_exp → softmax
        almost: fused attention saves something instead, one float32 (the log-sum-exp) for each row
        of scores.
    softmax - log_sum_exp → softmax + log_sum_exp
        the log-sum-exp is added: fused attention saves it instead of the softmax, so subtract it.
    log_sum_exp = 4 * batch * heads → log_sum_exp = 4 * batch
        the log-sum-exp is one number for each row of scores, and every head has rows of its own.
    return softmax → return 2 * softmax
        two squares are counted: autograd saves only the softmax.
    softmax - log_sum_exp → softmax / 2 + log_sum_exp / 2
        this counts the lower triangle: a causal mask fills the rest with zeros, and zeros take
        bytes too.
    softmax - log_sum_exp → (softmax - log_sum_exp) / 2
        this is half of it: each number has 4 bytes in float32, and the zeros above the diagonal
        take bytes too.
    softmax - log_sum_exp → log_sum_exp
        this grows with the sequence: the scores grow with its square.
    """,
)

# 1.4


def logits_spike(batch: int, seq_len: int, vocab: int) -> int:
    """Bytes around the loss when its backward begins, for a model of any precision: three float32
    tensors.
    """
    return 3 * 4 * batch * seq_len * vocab


SPIKE = Exercise(
    "1.4",
    logits_spike,
    calls((2, 3, 5), (1, 128, 49152), (2, 32, 1000), hidden=[(5, 7, 11)]),
    """
    3 * 4 → 4
        this counts one tensor: the loss's backward holds three of that shape at once.
    3 * 4 → 2 * 4
        this counts two tensors: the saved log-softmax, its gradient, and the gradient of the logits
        make three.
    3 * 4 → 3 * 2
        this takes 2 bytes a number: the loss is computed in float32, whatever the model's
        precision.
    3 * 4 → 3
        this counts numbers: each is a float32 of 4 bytes.
    batch * seq_len → batch * (seq_len - 1)
        this leaves out the last position: transformers shifts the labels, and the logits keep their
        length.
    * vocab → * vocab + 8 * batch * seq_len
        the labels are counted too: count only the three large tensors.
    """,
)

# 1.5


def bytes_per_parameter(recipe: str) -> int:
    """Bytes that training with AdamW keeps for each parameter: weight, gradient, both moments,
    master copy.
    """
    return {
        "float32": 4 + 4 + 8,
        "bf16": 2 + 2 + 4,
        "autocast-bf16": 4 + 4 + 8,
        "float32-master": 2 + 2 + 4 + 8,
    }[recipe]


def recipe_cases(answer):
    # Two recipes had other names at first, and an answer may have been written for those.
    names = {"autocast-bf16": "autocast", "float32-master": "float32 master"}
    for recipe in ("float32", "bf16", "autocast-bf16", "float32-master"):
        try:
            found = answer(recipe)
        except KeyError as error:
            try:
                found = answer(names.get(recipe, recipe))
            except KeyError:
                raise error from None
        yield f"the bytes that {recipe} keeps for a parameter", found


RECIPES = Exercise(
    "1.5",
    bytes_per_parameter,
    recipe_cases,
    """
    "bf16": 2 + 2 + 4 → "bf16": 2 + 2 + 8
        bf16 has 12 bytes here: PyTorch's moments have the parameters' dtype, so they are bf16 too.
    "autocast-bf16": 4 + 4 + 8 → "autocast-bf16": 2 + 2 + 4
        autocast-bf16 has 8 bytes here: autocast casts inside the forward pass, and keeps weights,
        gradients and moments in float32.
    "autocast-bf16": 4 + 4 + 8 → "autocast-bf16": 4 + 4 + 8 + 2
        autocast-bf16 has 18 bytes here: its bf16 copies live only while forward and backward run.
    2 + 2 + 4 + 8 → 2 + 2 + 8
        float32-master has 12 bytes here: it keeps a float32 copy of the weights (4) and both
        moments in float32 (8).
    2 + 2 + 4 + 8 → 4 + 4 + 4 + 8
        float32-master has 20 bytes here: the model's own weights and their gradients are bf16.
    "float32": 4 + 4 + 8 → "float32": 4 + 4 + 4
    "bf16": 2 + 2 + 4 → "bf16": 2 + 2 + 2
    "autocast-bf16": 4 + 4 + 8 → "autocast-bf16": 4 + 4 + 4
    2 + 2 + 4 + 8 → 2 + 2 + 4 + 4
        this counts one moment: Adam keeps two.
    "float32": 4 + 4 + 8 → "float32": 4 + 8
    "bf16": 2 + 2 + 4 → "bf16": 2 + 4
    "autocast-bf16": 4 + 4 + 8 → "autocast-bf16": 4 + 8
    2 + 2 + 4 + 8 → 2 + 4 + 8
        the gradient is missing: it is as large as the weight.
    "float32": 4 + 4 + 8 → "float32": 4 + 4
    "bf16": 2 + 2 + 4 → "bf16": 2 + 2
    "autocast-bf16": 4 + 4 + 8 → "autocast-bf16": 4 + 4
    2 + 2 + 4 + 8 → 2 + 2 + 4
        Adam's two moments are missing: each is as large as a weight or its master.
    """,
)

# 1.6


def train(model, optimizer, batches) -> list[float]:
    """The losses of one step on each batch of token ids, holding no more than the step needs."""
    losses = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del loss
    return losses


def train_setting() -> tuple:
    """The tiny Llama, its optimizer and three batches of exercise 1.6."""
    model = tiny_llama(2, 2048)
    with seeded(1):
        ids = torch.randint(2048, (3, 4, 64))
    return model, adamw(model, lr=0.01), list(ids)


@cache
def train_budget() -> int:
    """Bytes that the three steps of exercise 1.6 need, in whole KiB: the peak of a loop that keeps
    nothing but numbers.
    """
    model, optimizer, batches = train_setting()
    run = measured(lambda: train(model, optimizer, batches), 1, model=model, optimizer=optimizer)
    return -(-run.peak // 1024) * 1024  # room for losses that are kept as detached tensors


def train_cases(answer):
    for n in (1, 3):
        model, _, batches = train_setting()
        # AdamW would make a step of up to its rate of the rounding of a gradient that is nearly 0.
        optimizer = sgd(model, momentum=0.5)
        updates = gradients_of_updates(model, optimizer)
        losses = answer(model, optimizer, batches[:n])
        yield f"{n} batches, updates by the given optimizer", len(updates)
        yield f"{n} batches, the gradient in the last update, of the last batch alone", updates[-1]
        yield f"{n} batches, the losses, one of each batch", losses
        yield f"{n} batches, the weights afterwards", weights_of(model)
        yield f"{n} batches, whether a loss in the list still has its graph", have_graphs(losses)
    model, optimizer, batches = train_setting()
    logits = batches[0].numel() * model.config.vocab_size * 4
    yield (
        "three steps of AdamW within the budget",
        measured(
            lambda: answer(model, optimizer, batches),
            train_budget(),
            "tensors as large as a batch's logits",
            logits,
            model,
            optimizer,
        ),
    )


TRAIN = Exercise(
    "1.6",
    train,
    train_cases,
    """
    loss = model(input_ids=ids, labels=ids).loss → output = model(input_ids=ids, labels=ids)
    losses.append(loss.item()) → loss = output.loss; losses.append(loss.item())
        the logits are still alive in backward: a name for them, or for the model's output, keeps
        them.
    set_to_none=True → set_to_none=False
        the gradients stay, filled with zeros, through the next forward:
        zero_grad(set_to_none=True) frees them.
    loss.backward() → loss.backward(retain_graph=True)
    del loss →
        retain_graph=True keeps every saved activation until the loss itself is freed.
    optimizer.zero_grad(set_to_none=True) →
        without zero_grad the gradients of all batches add up, and they stay through the next
        forward.
    losses.append(loss.item()) →
    del loss → del loss; losses.append(model(input_ids=ids, labels=ids).loss.item())
        these are the losses after each update, by one more forward: a step's loss is the one that
        backward was called on.
    loss.backward() → loss.backward(); optimizer.zero_grad()
        the gradients are empty when optimizer.step() runs: backward() must come before the step,
        and zero_grad() after it.
    labels=ids).loss → labels=ids).loss / len(batches)
        the loss is divided by the number of batches: each batch has a step of its own, so nothing
        is accumulated.
    """,
)

# 1.7


def gpt2_block(batch: int, seq_len: int, hidden: int, heads: int) -> dict[str, int]:
    """Bytes of the storages that each module of a float32 block saves first.

    ``"attn"`` is the attention itself, between its linear layers.
    """
    tokens = batch * seq_len
    x = tokens * hidden
    rows = {
        "ln_1": x + 2 * tokens,  # its input, and for each token a mean and 1/std
        "attn.c_attn": x,
        "attn": 4 * x + tokens * heads,  # q, k, v, the result, and the log-sum-exp of each head
        "attn.c_proj": 0,  # its input is the attention's result
        "attn.resid_dropout": x,  # the mask
        "ln_2": x + 2 * tokens,
        "mlp.c_fc": x,
        "mlp.act": 4 * x,  # GELU's input
        "mlp.c_proj": 4 * x,  # and GELU's result
        "mlp.dropout": x,
    }
    return {name: 4 * numbers for name, numbers in rows.items()}


BLOCK = Exercise(
    "1.7",
    gpt2_block,
    calls((2, 8, 32, 4), (1, 12, 24, 3), hidden=[(3, 10, 40, 5)]),
    """
    "ln_1": x + 2 * tokens → "ln_1": 2 * x + tokens
    "ln_2": x + 2 * tokens → "ln_2": 2 * x + tokens
        this is the norm of a Llama: a LayerNorm keeps its input, and for each token a mean and
        1/std.
    "ln_1": x + 2 * tokens → "ln_1": x + tokens
    "ln_2": x + 2 * tokens → "ln_2": x + tokens
        one number a token is missing in the norms: a LayerNorm keeps a mean and 1/std for each.
    "attn.c_attn": x → "attn.c_attn": 3 * x
    "mlp.c_fc": x → "mlp.c_fc": 4 * x
        these are the outputs of the linear layers: a linear layer keeps its input.
    tokens * heads → tokens
        the log-sum-exp is one number for each head of each token: every head has a softmax of its
        own.
    4 * x + tokens * heads → 4 * x + tokens * heads * seq_len
        the attention has a square of scores here: fused attention keeps one log-sum-exp for each
        head of each token instead.
    "attn.c_proj": 0 → "attn.c_proj": x
        the attention's result is counted twice: it is one storage, and attn.c_proj saves nothing of
        its own.
    "mlp.act": 4 → "mlp.act": 8
        GELU's backward needs only its input: mlp.c_proj saves GELU's result, so it counts there.
    "attn.resid_dropout": x → "attn.resid_dropout": x / 4
    "mlp.dropout": x → "mlp.dropout": x / 4
        this counts one byte for each number of dropout's mask, as on CUDA: on the CPU the mask is
        float32.
    """,
)

# 1.8


def mlp_bytes(tokens: int, hidden: int, training: bool) -> int:
    """Bytes of the storages that the MLP of exercise 1.8 saves for backward, in float32 on the
    CPU.
    """
    x = tokens * hidden  # numbers that go into the MLP
    relu = 4 * x  # ReLU's result, which is the second Linear's input in evaluation mode
    numbers = x + relu
    if training:
        mask, dropped, last_mask = 4 * x, 4 * x, x
        numbers += mask + dropped + last_mask
    return 4 * numbers


DROPOUT = Exercise(
    "1.8",
    mlp_bytes,
    calls((8, 16, True), (8, 16, False), hidden=[(33, 6, True), (5, 24, False)]),
    """
    numbers += mask + dropped + last_mask →
        `training` has no effect: in training mode each dropout keeps its mask, and the first one
        makes a new tensor, which the second Linear keeps.
    if training → if True
        `training` has no effect: in evaluation mode dropout hands its input on, and keeps nothing.
    if training → if not training
        the two modes are exchanged: dropout keeps masks in training.
    += mask → += mask / 4
    + last_mask → + last_mask / 4
        this counts one byte for each number of a mask, as on CUDA: on the CPU the mask is float32.
    + dropped →
        in training mode the second Linear's input is missing: dropout makes a new tensor of ReLU's
        result, and both are kept.
    + last_mask →
        the second dropout's mask is missing: it has `hidden` numbers a token.
    x + relu → x + 2 * relu
        ReLU's input is counted too: its backward needs its result alone.
    numbers = x + relu → numbers = x + relu + x
        `hidden` numbers a token are too many in both modes: x counts once, and the output is not
        saved, since no backward needs it.
    """,
)
