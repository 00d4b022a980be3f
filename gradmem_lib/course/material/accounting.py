"""Where a training step's bytes go, in closed form: parameters, gradients, optimizer, activations,
logits.

Every function takes plain numbers and returns plain numbers of bytes, so that a formula can be read
beside the lesson that derives it. Batches are ``batch_size`` x ``seq_len`` tokens. The library
itself counts, with ``predict``.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ... import names
from ...names import CATEGORIES, PrecisionSpec
from ...optimizers import OptimizerSpec
from ...techniques.schedules import segments_for
from ...units import check_positive_int
from .shapes import SHAPES as SHAPES
from .shapes import Shape as Shape

FLOAT32, INT64 = 4, 8  # bytes of one number


class _Choices(Mapping):
    """The rows of an option that have a closed form, by their names in names.py.

    Raises ``ValueError`` for any other name.
    """

    def __init__(self, what: str, rows: Mapping):
        self.what, self.rows = what, rows

    def known(self) -> list[str]:
        found = []
        for name, row in self.rows.items():
            if not isinstance(row, OptimizerSpec) or row.closed_form is not None:
                found.append(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.known())

    def __len__(self) -> int:
        return len(self.known())

    def __getitem__(self, name: str) -> Any:
        if name not in self.known():
            raise ValueError(
                f"{self.what} is {name!r}, which has no closed form: choose one of "
                f"{', '.join(map(repr, self))}, or let predict() count it"
            )
        return self.rows[name]


PRECISIONS = _Choices("precision", names.PRECISIONS)
OPTIMIZERS = _Choices("optimizer", names.OPTIMIZERS)
_ATTENTION = _Choices("attention", names.ATTENTION)


def _optimizer(name: str | None, momentum: float) -> OptimizerSpec | None:
    """The optimizer's row; ``None`` for a step without an optimizer.

    ``momentum`` is for SGD, as in a recipe.
    """
    row = None if name is None else OPTIMIZERS[name]
    if momentum and (row is None or not row.takes_momentum):
        takers = [repr(other) for other in OPTIMIZERS if OPTIMIZERS[other].takes_momentum]
        raise ValueError(
            f"momentum={momentum!r} belongs to {' or '.join(takers)}, not to optimizer={name!r}: "
            "leave it out"
        )
    return row


def bytes_per_parameter(
    precision: str = "bf16", optimizer: str | None = "adamw", momentum: float = 0.0
) -> dict[str, int]:
    """Bytes that one parameter keeps through training, as ``parameters``, ``gradients`` and
    ``optimizer``.

    The float32 master copy counts as optimizer: AdamW then makes 2 + 2 + (4 + 4 + 4) = 16 bytes, as
    in ZeRO (Rajbhandari et al. 2020, section 3.1). Implementations that also turn the gradients
    into float32 need up to 4 more during the step. ``optimizer=None`` keeps nothing.
    """
    p, row = PRECISIONS[precision], _optimizer(optimizer, momentum)
    states = 0
    if row is not None:
        states = p.master + round(row.bytes_of_states(p.state, momentum))  # whole in closed forms
    return {"parameters": p.weight, "gradients": p.gradient, "optimizer": states}


def resident_bytes(
    shape: Shape, precision: str = "bf16", optimizer: str | None = "adamw", momentum: float = 0.0
) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer states (AdamW's step counters
    included): exact.
    """
    per = bytes_per_parameter(precision, optimizer, momentum)
    resident = {category: n * shape.parameters for category, n in per.items()}
    row = _optimizer(optimizer, momentum)
    if row is not None and row.closed_form.counters:
        resident["optimizer"] += FLOAT32 * shape.tensors
    return resident


def _norm_items(
    shape: Shape, which: str, tokens: int, p: PrecisionSpec, readers: int
) -> dict[str, int]:
    """The tensors that a norm saves, and its output, which ``readers`` linear layers share."""
    numbers = tokens * shape.hidden
    if shape.norm == "layer":
        items = {
            f"{which} norm: input": p.residual * numbers,
            f"{which} norm: mean and 1/std": 2 * p.residual * tokens,
        }
    else:
        # Llama's norm squares its input in float32: under bf16 it saves a float32 copy instead of
        # the input.
        items = {
            f"{which} norm: input in float32": FLOAT32 * numbers,
            f"{which} norm: 1/rms": FLOAT32 * tokens,
            f"{which} norm: normalised input": p.residual * numbers,
        }
    # Autocast caches its bf16 copies of weights, but casts an activation again for every layer that
    # reads it.
    copies = readers if p.autocast else 1
    name = f"{which}: input of {readers} linear layer{'s' if readers > 1 else ''}"
    return items | {name: copies * p.compute * numbers}


def attention_activations(
    shape: Shape,
    batch_size: int,
    seq_len: int,
    *,
    precision: str = "bf16",
    attention: str = "fused",
) -> dict[str, int]:
    """Bytes saved for backward by the attention half of one block (its norm included), tensor by
    tensor.
    """
    p, tokens = PRECISIONS[precision], batch_size * seq_len
    scored = _ATTENTION[attention].keeps_scores
    w = p.compute
    # If heads share keys and values, eager attention copies these once for each head.
    kv = shape.hidden if scored else shape.kv_hidden
    items = _norm_items(shape, "attention", tokens, p, readers=1 if shape.positions else 3)
    items |= {
        "attention: query": w * tokens * shape.hidden,
        "attention: key": w * tokens * kv,
        "attention: value": w * tokens * kv,
    }
    if not scored:
        items["attention: log-sum-exp"] = FLOAT32 * shape.heads * tokens
    else:
        # Llama asks for a float32 softmax, autocast imposes one; GPT-2 in pure bf16 stays in bf16.
        float32_softmax = shape.norm == "rms" or p.autocast or w == FLOAT32
        scores = shape.heads * tokens * seq_len
        items["attention: softmax"] = (FLOAT32 if float32_softmax else w) * scores
        if float32_softmax and w != FLOAT32:
            items[f"attention: softmax in {p.narrow}"] = w * scores
    return items | {"attention: result, input of the output layer": w * tokens * shape.hidden}


def mlp_activations(
    shape: Shape, batch_size: int, seq_len: int, *, precision: str = "bf16"
) -> dict[str, int]:
    """Bytes saved for backward by the MLP half of one block (its norm included), tensor by tensor.

    GPT-2's GELU is written out in transformers as 0.5 x (1 + tanh(...)), so it saves four tensors
    where one operator would save its input alone.
    """
    p, tokens = PRECISIONS[precision], batch_size * seq_len
    plain = "x, x / 2, tanh, 1 + tanh, gelu(x)"
    saved = "gate, silu(gate), up, silu(gate) x up" if shape.gated else plain
    items = _norm_items(shape, "mlp", tokens, p, readers=2 if shape.gated else 1)
    return items | {
        f"mlp: {name}": p.compute * tokens * shape.intermediate for name in saved.split(", ")
    }


def _copies(p: PrecisionSpec, of: str, entries: int) -> dict[str, int]:
    """The 16-bit copies of weights that autocast makes, and keeps for backward."""
    return {f"{p.narrow} {of}": p.compute * entries} if p.autocast else {}


def block_activations(
    shape: Shape,
    batch_size: int,
    seq_len: int,
    *,
    precision: str = "bf16",
    attention: str = "fused",
) -> dict[str, int]:
    """Bytes that autograd saves for the backward of one block, tensor by tensor; parameters are not
    counted.

    Exact for transformers' ``LlamaDecoderLayer`` and ``GPT2Block`` (dropout 0, no padding mask) on
    the CPU, eager and fused (SDPA) attention. The rotary tables are shared by all blocks: see
    ``model_activations``. Under autocast the last entry is the 16-bit copies of the weights that
    backward reads. On CUDA, LayerNorm keeps its statistics in float32, and autocast runs ``pow`` in
    float32: GPT-2 differs there.
    """
    items = attention_activations(
        shape, batch_size, seq_len, precision=precision, attention=attention
    )
    items |= mlp_activations(shape, batch_size, seq_len, precision=precision)
    return items | _copies(
        PRECISIONS[precision], "copies of the weights", sum(shape.matrices.values())
    )


def segment_lengths(layers: int, checkpointing: str | int | None) -> list[int]:
    """Blocks in each recomputed segment, first to last; none without checkpointing.

    ``ValueError`` for "best".
    """
    if checkpointing is None:
        return []
    whole = type(checkpointing) is int and 1 <= checkpointing <= layers
    if not whole and checkpointing not in ("per-layer", "sqrt"):
        raise ValueError(
            f"checkpointing is {checkpointing!r}: choose None, 'per-layer', 'sqrt' or a number of "
            f"blocks from 1 to {layers}, or let predict() count it"
        )
    return segments_for(checkpointing, layers)


def model_activations(
    shape: Shape,
    batch_size: int,
    seq_len: int,
    *,
    precision: str = "bf16",
    attention: str = "fused",
    checkpointing: str | int | None = None,
) -> dict[str, int]:
    """Bytes that autograd holds when the loss has been computed, by part of the model, without
    parameters.

    Exact, like ``block_activations``, without checkpointing. With it (as in a recipe), ``blocks``
    is the inputs that checkpointing keeps: one for each segment. Under eager attention the causal
    mask is an input too, kept once for all of them.
    """
    p, tokens = PRECISIONS[precision], batch_size * seq_len
    lengths = segment_lengths(shape.layers, checkpointing)
    block = block_activations(shape, batch_size, seq_len, precision=precision, attention=attention)
    kept = len(lengths) * p.residual * tokens * shape.hidden
    items = {
        "token ids": INT64 * tokens,
        "positions": INT64 * seq_len
        if shape.positions
        else 2 * p.residual * seq_len * shape.head_dim,
        "blocks": kept or shape.layers * sum(block.values()),
    }
    if lengths and attention == "eager":
        items["causal mask"] = p.residual * tokens * seq_len
    items |= _norm_items(shape, "final", tokens, p, readers=1)
    items |= _copies(p, "copy of the output layer", shape.embedding_parameters)
    return items | {
        "loss: log-softmax in float32": FLOAT32 * tokens * shape.vocab,
        "loss: labels": INT64 * tokens,
        "loss: label count": FLOAT32,
    }


def kv_cache_bytes(shape: Shape, batch_size: int, tokens: int, bytes_per_number: int = 2) -> int:
    """Bytes of the keys and values that a causal model keeps for ``batch_size`` rows of ``tokens``
    tokens; heads that share a key and a value have one. Exact for transformers' ``DynamicCache``.
    """
    return 2 * shape.layers * batch_size * tokens * shape.kv_hidden * bytes_per_number


class Estimate(NamedTuple):
    """The name of the moment where a step's peak is expected (the first of equals), and its bytes
    in the tracker's categories.
    """

    moment: str
    by_category: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_category.values())


def estimate(
    shape: Shape,
    *,
    batch_size: int,
    seq_len: int,
    precision: str = "bf16",
    optimizer: str | None = "adamw",
    momentum: float = 0.0,
    attention: str = "fused",
    checkpointing: str | int | None = None,
    accumulated: bool = False,
) -> Estimate:
    """The peak of one ordinary step: forward, backward, optimizer step,
    ``zero_grad(set_to_none=True)``. ``accumulated``: an earlier micro-batch, of ``batch_size`` rows
    too, has left its gradients.

    Exact: parameters, gradients, optimizer states, saved activations, the logits' spike.
    Approximate: temporaries inside a block's backward and inside the optimizer, and the order in
    which backward frees one tensor before making the next. Not counted: dropout masks, allocator
    rounding and caching, workspaces, the CUDA context. The step is a second or later one (Adam's
    states exist). The model's output object is dropped, as in ``loss = model(...).loss``.
    ``ValueError`` for unknown names and for sizes below 1.
    """
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len)):
        check_positive_int(name, value, 8)
    p, row = PRECISIONS[precision], _optimizer(optimizer, momentum)
    resident = resident_bytes(shape, precision, optimizer, momentum)
    options = {"precision": precision, "attention": attention}
    saved = model_activations(shape, batch_size, seq_len, checkpointing=checkpointing, **options)
    block = block_activations(shape, batch_size, seq_len, **options)
    lengths = segment_lengths(shape.layers, checkpointing)
    moments: dict[str, dict[str, int]] = {}
    fixed = resident | {"other": saved["token ids"]}

    def moment(name: str, activations: int, gradients: int, temporaries: int) -> None:
        if accumulated:
            gradients = resident["gradients"]
        now = {"gradients": gradients, "activations": activations, "temporaries": temporaries}
        moments[name] = {category: (fixed | now)[category] for category in CATEGORIES}

    stored = sum(saved.values()) - saved["token ids"]
    # Autocast casts every weight once on the way forward; checkpointing drops the copies when
    # autocast ends.
    copies = shape.layers * block.get(f"{p.narrow} copies of the weights", 0) if lengths else 0
    # The log-softmax, in float32, is saved. In forward the logits are alive too, and their float32
    # copy; in backward its gradient, and that of the float32 logits.
    logits = batch_size * seq_len * shape.vocab
    in_forward = p.compute * logits + (0 if p.compute == FLOAT32 else FLOAT32 * logits)
    moment("loss, forward", stored + copies + in_forward, 0, 0)
    moment("loss, backward", stored, 0, 2 * FLOAT32 * logits)
    # An untied output layer's gradient is final at once; a tied table's waits for the embedding's.
    table = p.gradient * shape.embedding_parameters
    residual = p.residual * batch_size * seq_len * shape.hidden
    final, waiting = (0, table) if shape.tied else (table, 0)
    for name, activations, finished, temporaries in _backward(
        shape, saved, block, lengths, p, residual
    ):
        moment(name, activations, final + p.gradient * finished, temporaries + waiting + residual)
    # The two gradients of a tied table are both alive while their sum is made.
    moment("embedding, backward", 0, resident["gradients"], 2 * table if shape.tied else residual)
    if row is not None:
        form = row.closed_form
        made = form.whole_model * shape.parameters + form.tensors * shape.largest_tensor
        moment("optimizer step", 0, resident["gradients"], p.state * made)
    return Estimate(*max(moments.items(), key=lambda item: sum(item[1].values())))


def _backward(
    shape: Shape,
    saved: dict[str, int],
    block: dict[str, int],
    lengths: list[int],
    p: PrecisionSpec,
    residual: int,
) -> Iterator[tuple[str, int, int, int]]:
    """The largest moments in the backward of some blocks: live activations, parameters whose
    gradients are finished, and temporaries.
    """
    mlp = {name: n for name, n in block.items() if name.startswith("mlp")}
    # The product before the last matrix is freed already, and three gradients of its width are
    # alive.
    wide = mlp["mlp: silu(gate) x up" if shape.gated else "mlp: gelu(x)"]
    result = block["attention: result, input of the output layer"]
    freed = sum(mlp.values()) + block["attention: value"] + result
    freed += block.get(f"attention: softmax in {p.narrow}", 0)
    done = sum(n for name, n in shape.matrices.items() if name not in ("query", "key", "value"))
    # Backward of softmax: one gradient as wide as the softmax comes in, another goes out.
    softmax = 2 * block.get("attention: softmax", 0)
    halves = (
        ("mlp", wide, shape.matrices["down"], 3 * wide),
        ("attention", freed, done, softmax + result),
    )

    one, shared = sum(block.values()), saved["positions"] + saved.get("causal mask", 0)
    last, first = (lengths[-1], lengths[0]) if lengths else (0, 1)
    # The input that checkpointing keeps is the block's first saved tensor, unless it saves a
    # float32 copy of it.
    copied = block.get("attention norm: input in float32", 0) > residual
    kept = residual * bool(lengths and copied)
    for where, alive, before in (
        ("last block", saved["blocks"] - residual * bool(lengths) + last * one, 0),
        ("first segment", first * one, shape.layers - first),
        ("first block", one, shape.layers - 1),
    ):
        for half, gone, parameters, temporaries in halves:
            finished = before * shape.block_parameters + parameters
            yield f"{where}, {half} backward", shared + kept + alive - gone, finished, temporaries
