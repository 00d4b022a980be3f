"""Where a training step's bytes go, in closed form: parameters, gradients, optimizer, activations, logits.

Every function takes plain numbers and returns plain numbers of bytes, so that a formula can be read beside
the lesson that derives it. T stands for batch_size x seq_len tokens, h for the hidden size, f for the MLP's
intermediate size, a for heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..names import ATTENTION, CATEGORIES
from ..names import OPTIMIZERS as SPELLED
from .schedules import segments_for
from .shapes import SHAPES as SHAPES
from .shapes import Shape as Shape

FLOAT32, INT64 = 4, 8  # bytes of one number


@dataclass(frozen=True)
class Precision:
    """Bytes of one number in each role. ``residual`` and ``compute`` are the widths of activations:
    between the blocks' linear layers, and inside them. ``master`` is the extra float32 copy of the weights
    that some recipes keep; ``narrow`` names the dtype of 2 bytes, where there is one."""

    weight: int
    gradient: int
    state: int
    residual: int
    compute: int
    master: int = 0
    narrow: str = "bf16"

    @property
    def autocast(self) -> bool:
        return self.residual != self.compute


# In closed form: the precisions of names.py, and those of its optimizers that need no look at single tensors.
PRECISIONS: dict[str, Precision] = {
    "float32": Precision(4, 4, 4, 4, 4),
    "bf16": Precision(2, 2, 2, 2, 2),
    "autocast-bf16": Precision(4, 4, 4, 4, 2),
    "autocast-fp16": Precision(4, 4, 4, 4, 2, narrow="float16"),
    "float32-master": Precision(2, 2, 4, 2, 2, master=4),
}


@dataclass(frozen=True)
class Optimizer:
    """``states``: numbers kept per parameter. ``whole_model``, ``tensors``: what the step makes, as copies of the
    model or of its largest tensor."""

    states: int
    counters: bool = False
    whole_model: int = 0
    tensors: int = 0


# Adam's denominator: "foreach", which is torch.optim.AdamW's choice on CUDA, makes it for all parameters at once, the
# plain loop twice for one tensor at a time.
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(2, counters=True, tensors=2),
    "adamw-foreach": Optimizer(2, counters=True, whole_model=1),
    "adamw-fused": Optimizer(2, counters=True),
    "sgd": Optimizer(0),
}


def _pick(table: dict, name: str | None, what: str):
    if name not in table:
        choices = ", ".join(map(repr, table))
        if name in SPELLED:
            raise ValueError(
                f"{what}={name!r} has no closed form, since its states go by single tensors: predict() counts it, or "
                f"choose one of {choices}"
            )
        raise ValueError(f"{what} is {name!r}: choose one of {choices}")
    return table[name]


def _precision(name: str) -> Precision:
    return _pick(PRECISIONS, name, "precision")


def _optimizer(name: str | None, momentum: float = 0.0) -> Optimizer:
    """``None`` is a step without an optimizer; ``momentum`` is SGD's, as in a recipe."""
    if name is None:
        return Optimizer(0)
    found = _pick(OPTIMIZERS, name, "optimizer")
    if momentum and name != "sgd":
        raise ValueError(
            f"momentum={momentum!r} with optimizer={name!r}: it belongs to 'sgd', so leave it out"
        )
    return Optimizer(1) if momentum else found


def bytes_per_parameter(
    precision: str = "bf16", optimizer: str | None = "adamw", momentum: float = 0.0
) -> dict[str, int]:
    """Bytes that one parameter keeps through training, as ``parameters``, ``gradients`` and ``optimizer``.

    The float32 master copy counts as optimizer: AdamW then makes 2 + 2 + (4 + 4 + 4) = 16 bytes, as in ZeRO
    (Rajbhandari et al. 2020, section 3.1). Implementations that also turn the gradients into float32 need up
    to 4 more during the step. ``optimizer=None`` keeps nothing.
    """
    p, o = _precision(precision), _optimizer(optimizer, momentum)
    master = 0 if optimizer is None else p.master
    return {"parameters": p.weight, "gradients": p.gradient, "optimizer": master + o.states * p.state}


def resident_bytes(
    shape: Shape, precision: str = "bf16", optimizer: str | None = "adamw", momentum: float = 0.0
) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer states of a model (AdamW's step counters included):
    exact."""
    per = bytes_per_parameter(precision, optimizer, momentum)
    resident = {category: n * shape.parameters for category, n in per.items()}
    resident["optimizer"] += FLOAT32 * shape.tensors * _optimizer(optimizer, momentum).counters
    return resident


def _norm_items(shape: Shape, which: str, tokens: int, p: Precision, readers: int) -> dict[str, int]:
    """What a norm and the linear layers that read it save. ``readers``: how many linear layers share its
    output."""
    h, wide, narrow = shape.hidden, p.residual, p.compute
    if shape.norm == "layer":
        items = {
            f"{which} norm: input": wide * tokens * h,
            f"{which} norm: mean and 1/std": 2 * wide * tokens,
        }
    else:
        # Llama's norm squares its input in float32: under bf16 it saves a float32 copy instead of the input.
        items = {
            f"{which} norm: input in float32": FLOAT32 * tokens * h,
            f"{which} norm: 1/rms": FLOAT32 * tokens,
            f"{which} norm: normalised input": wide * tokens * h,
        }
    # Autocast caches its bf16 copies of weights, but casts an activation anew for every layer that reads it.
    copies = readers if p.autocast else 1
    name = f"{which}: input of {readers} linear layer{'s' if readers > 1 else ''}"
    return items | {name: copies * narrow * tokens * h}


def attention_activations(
    shape: Shape, batch_size: int, seq_len: int, *, precision: str = "bf16", attention: str = "fused"
) -> dict[str, int]:
    """Bytes saved for backward by the attention half of one block (its norm included), tensor by tensor."""
    p, tokens = _precision(precision), batch_size * seq_len
    _pick(ATTENTION, attention, "attention")
    w = p.compute
    # Eager attention copies keys and values that heads share, once for each head.
    kv = shape.kv_hidden if attention == "fused" else shape.hidden
    scores = batch_size * shape.heads * seq_len**2
    items = _norm_items(shape, "attention", tokens, p, readers=1 if shape.positions else 3)
    items |= {
        "attention: query": w * tokens * shape.hidden,
        "attention: key": w * tokens * kv,
        "attention: value": w * tokens * kv,
    }
    if attention == "fused":
        items["attention: log-sum-exp"] = FLOAT32 * batch_size * shape.heads * seq_len
    else:
        # Llama asks for a float32 softmax, autocast imposes one; GPT-2 in pure bf16 stays in bf16.
        float32_softmax = shape.norm == "rms" or p.autocast or w == FLOAT32
        items["attention: softmax"] = (FLOAT32 if float32_softmax else w) * scores
        if float32_softmax and w != FLOAT32:
            items[f"attention: softmax in {p.narrow}"] = w * scores
    return items | {"attention: result, input of the output layer": w * tokens * shape.hidden}


def mlp_activations(
    shape: Shape, batch_size: int, seq_len: int, *, precision: str = "bf16"
) -> dict[str, int]:
    """Bytes saved for backward by the MLP half of one block (its norm included), tensor by tensor.

    GPT-2's GELU is written out in transformers as 0.5 x (1 + tanh(...)), so it saves four tensors where one
    operator would save its input alone.
    """
    p, tokens = _precision(precision), batch_size * seq_len
    wide = p.compute * tokens * shape.intermediate
    names = (
        ("gate", "silu(gate)", "up", "silu(gate) x up")
        if shape.gated
        else ("x", "x / 2", "tanh", "1 + tanh", "gelu(x)")
    )
    items = _norm_items(shape, "mlp", tokens, p, readers=2 if shape.gated else 1)
    return items | {f"mlp: {name}": wide for name in names}


def _copies(p: Precision, of: str, entries: int) -> dict[str, int]:
    """The 16-bit copies of weights that autocast makes, and keeps for backward."""
    return {f"{p.narrow} {of}": p.compute * entries} if p.autocast else {}


def block_activations(
    shape: Shape, batch_size: int, seq_len: int, *, precision: str = "bf16", attention: str = "fused"
) -> dict[str, int]:
    """Bytes that autograd saves for the backward of one block, tensor by tensor; parameters are not counted.

    Exact for transformers' ``LlamaDecoderLayer`` and ``GPT2Block`` (dropout 0, no padding mask) on the CPU,
    eager and fused (SDPA) attention. The rotary tables are shared by all blocks: see ``model_activations``.
    Under autocast the last entry is the 16-bit copies of the weights that backward reads. On CUDA,
    LayerNorm keeps its statistics in float32, and autocast runs ``pow`` in float32: GPT-2 differs there.
    """
    p = _precision(precision)
    items = attention_activations(shape, batch_size, seq_len, precision=precision, attention=attention)
    items |= mlp_activations(shape, batch_size, seq_len, precision=precision)
    return items | _copies(p, "copies of the weights", sum(shape.matrices.values()))


def logits_bytes(shape: Shape, batch_size: int, seq_len: int, *, precision: str = "bf16") -> dict[str, int]:
    """Bytes around the loss of a causal language model, for T x vocab logits.

    ``saved``: what waits for backward: the log-softmax, always in float32 since transformers upcasts the
    logits.
    ``forward peak``: the logits, their float32 copy when they are bf16, and the log-softmax.
    ``backward peak``: the log-softmax, the gradient with respect to it, and the gradient of the float32
    logits. A caller that keeps the model's output object keeps the logits too: ``logits`` more bytes until it
    lets go.
    """
    p, entries = _precision(precision), batch_size * seq_len * shape.vocab
    float32_copy = 0 if p.compute == FLOAT32 else FLOAT32
    return {
        "logits": p.compute * entries,
        "saved": FLOAT32 * entries,
        "forward peak": (p.compute + float32_copy + FLOAT32) * entries,
        "backward peak": 3 * FLOAT32 * entries,
    }


def head_activations(
    shape: Shape, batch_size: int, seq_len: int, *, precision: str = "bf16"
) -> dict[str, int]:
    """Bytes saved between the last block and the loss: final norm, output layer, log-softmax, labels."""
    p, tokens = _precision(precision), batch_size * seq_len
    items = _norm_items(shape, "final", tokens, p, readers=1)
    items |= _copies(p, "copy of the output layer", shape.embedding_parameters)
    saved = logits_bytes(shape, batch_size, seq_len, precision=precision)["saved"]
    return items | {
        "loss: log-softmax in float32": saved,
        "loss: labels": INT64 * tokens,
        "loss: label count": FLOAT32,
    }


def segment_lengths(layers: int, checkpointing: str | int | None) -> list[int]:
    """Blocks in each recomputed segment, first to last; empty without checkpointing.

    ``checkpointing`` as in a recipe: ``None``, ``"per-layer"``, ``"sqrt"`` or the blocks in a segment (the last one may
    be shorter).
    """
    if checkpointing is None:
        return []
    if checkpointing not in ("per-layer", "sqrt") and (
        not isinstance(checkpointing, int)
        or isinstance(checkpointing, bool)
        or not 1 <= checkpointing <= layers
    ):
        raise ValueError(
            f"checkpointing is {checkpointing!r}: choose None, 'per-layer', 'sqrt' or a number of blocks from 1 to {layers}"
            + (", or let predict() measure which segments are best" if checkpointing == "best" else "")
        )
    return segments_for(1 if checkpointing == "per-layer" else checkpointing, layers)


def model_activations(
    shape: Shape,
    batch_size: int,
    seq_len: int,
    *,
    precision: str = "bf16",
    attention: str = "fused",
    checkpointing: str | int | None = None,
) -> dict[str, int]:
    """Bytes that autograd holds when the loss has been computed, by part of the model; parameters are not
    counted.

    Exact, like ``block_activations``, without checkpointing. With it, ``blocks`` is the inputs that
    checkpointing keeps: one for each segment. Under eager attention the causal mask is an input too, kept
    once for all of them.
    """
    p, tokens = _precision(precision), batch_size * seq_len
    lengths = segment_lengths(shape.layers, checkpointing)
    mask = {}
    if lengths:
        blocks = len(lengths) * p.residual * tokens * shape.hidden
        if attention == "eager":
            mask["causal mask"] = p.residual * batch_size * seq_len**2
    else:
        one = block_activations(shape, batch_size, seq_len, precision=precision, attention=attention)
        blocks = shape.layers * sum(one.values())
    positions = INT64 * seq_len if shape.positions else 2 * p.residual * seq_len * shape.head_dim
    head = head_activations(shape, batch_size, seq_len, precision=precision)
    return {"token ids": INT64 * tokens, "positions": positions, "blocks": blocks} | mask | head


@dataclass(frozen=True)
class Estimate:
    """Bytes at each moment of a training step, by category. The peak is the largest moment."""

    shape: Shape
    moments: dict[str, dict[str, int]]

    @property
    def moment(self) -> str:
        """The name of the moment where the peak is expected (the first of equals)."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes at the peak, in the tracker's categories."""
        return dict(self.moments[self.moment])

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.by_category.values())


def _half_block_backward(
    half: str, shape: Shape, batch_size: int, seq_len: int, precision: str, attention: str
) -> tuple[int, int, int]:
    """At the largest moment of half a block's backward: saved bytes already freed, temporaries, finished
    gradients."""
    p, tokens = PRECISIONS[precision], batch_size * seq_len
    if half == "mlp":  # the product before the last matrix is gone itself, three gradients as wide are alive
        wide = p.compute * tokens * shape.intermediate
        return wide, 3 * wide, p.gradient * shape.matrices["down"]
    items = attention_activations(shape, batch_size, seq_len, precision=precision, attention=attention)
    narrow = f"attention: softmax in {p.narrow}"
    gone = (narrow, "attention: value", "attention: result, input of the output layer")
    mlp = mlp_activations(shape, batch_size, seq_len, precision=precision)
    freed = sum(mlp.values()) + sum(items.get(name, 0) for name in gone)
    # Backward of softmax: one gradient as wide as the softmax comes in, another goes out.
    temporaries = 2 * items.get("attention: softmax", 0) + p.compute * tokens * shape.hidden
    done = sum(n for name, n in shape.matrices.items() if name in ("gate", "up", "down", "attention output"))
    return freed, temporaries, p.gradient * done


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
) -> Estimate:
    """The peak of one ordinary training step: forward, backward, optimizer step,
    ``zero_grad(set_to_none=True)``.

    Exact: parameters, gradients, optimizer states, saved activations, the logits' spike. Approximate:
    temporaries inside a block's backward and inside the optimizer, and the order in which backward frees one
    tensor before making the next. Not counted: dropout masks, allocator rounding and caching, workspaces, the
    CUDA context. The step is a second or later one (Adam's states exist). The model's output object is
    dropped, as in ``loss = model(...).loss``. Raises ``ValueError`` for a name that the tables above do not
    list and for sizes below 1.
    """
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}: give a whole number of at least 1")
    options = {"precision": precision, "attention": attention}
    p, o = _precision(precision), _optimizer(optimizer, momentum)
    resident = resident_bytes(shape, precision, optimizer, momentum)
    saved = model_activations(shape, batch_size, seq_len, checkpointing=checkpointing, **options)
    spike = logits_bytes(shape, batch_size, seq_len, precision=precision)
    block = block_activations(shape, batch_size, seq_len, **options)
    stored = sum(saved.values()) - saved["token ids"]
    residual = p.residual * batch_size * seq_len * shape.hidden
    lengths = segment_lengths(shape.layers, checkpointing)
    # Autocast casts every weight once on the way forward; checkpointing drops the copies when autocast ends.
    copies = shape.layers * block.get(f"{p.narrow} copies of the weights", 0) if lengths else 0
    # (activations, gradients, temporaries)
    moments = {
        "loss, forward": (stored + copies + spike["forward peak"] - spike["saved"], 0, 0),
        "loss, backward": (stored, 0, spike["backward peak"] - spike["saved"]),
    }
    for where, alive, blocks in _entering(shape, saved, block, lengths, residual):
        for half in ("mlp", "attention"):
            freed, temporaries, done = _half_block_backward(half, shape, batch_size, seq_len, **options)
            # An untied output layer's gradient is final at once; a tied table's waits for the embedding's.
            table = p.gradient * shape.embedding_parameters
            final, waiting = (0, table) if shape.tied else (table, 0)
            finished = final + blocks * p.gradient * shape.block_parameters + done
            moments[f"{where}, {half} backward"] = (alive - freed, finished, temporaries + waiting + residual)
    # The two gradients of a tied table are both alive while their sum is made.
    summed = 2 * p.gradient * shape.embedding_parameters if shape.tied else residual
    moments["embedding, backward"] = (0, resident["gradients"], summed)
    if optimizer is not None:
        made = o.whole_model * shape.parameters + o.tensors * shape.largest_tensor
        moments["optimizer step"] = (0, resident["gradients"], p.state * made)
    fixed = resident | {"other": saved["token ids"]}
    return Estimate(shape, {name: _by_category(fixed, *parts) for name, parts in moments.items()})


def _by_category(fixed: dict[str, int], activations: int, gradients: int, temporaries: int) -> dict[str, int]:
    now = {"gradients": gradients, "activations": activations, "temporaries": temporaries}
    return {name: (fixed | now)[name] for name in CATEGORIES}


def _entering(
    shape: Shape, saved: dict[str, int], block: dict[str, int], lengths: list[int], residual: int
) -> list[tuple[str, int, int]]:
    """When backward enters a block: which, the activations alive, and blocks whose gradients are finished."""
    one, shared = sum(block.values()), saved["positions"] + saved.get("causal mask", 0)
    # The input that checkpointing keeps is the block's first saved tensor, unless it saves a float32 copy of it.
    copied = block.get("attention norm: input in float32", 0) > residual
    last, first = (lengths[-1], lengths[0]) if lengths else (0, 1)
    kept = residual * bool(lengths and copied)
    return [
        ("last block", shared + saved["blocks"] - residual * bool(lengths) + kept + last * one, 0),
        ("first segment", shared + kept + first * one, shape.layers - first),
        ("first block", shared + kept + one, shape.layers - 1),
    ]
