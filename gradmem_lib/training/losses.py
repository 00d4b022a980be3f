"""The loss of a step: the number of items that it is the mean of, and whether chunks of logits give
the same loss.
"""

import math
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compat.dispatch_modes import without_modes
from ..compat.fake_tensors import has_numbers
from ..compat.modules import hook_counts
from ..hf_names import INPUTS_OF_THE_LOSS
from ..model.classes import predicts_next_token
from ..model.wrappers import inside_peft, without_wrappers
from ..names import IGNORED
from ..techniques.asking import as_in_evaluation
from ..techniques.losses import CHUNK_TOKENS, PLAIN, LogitForm, loss_in_chunks
from .item_rules import Rule, count_by, labels, predicted_tokens
from .tiny import VOCABULARY, tiny_model

Numbers = tuple[float, float]


def usual_rule(model: nn.Module) -> Rule:
    """What most models of this kind count, before the model is asked (``find_rule``)."""
    return predicted_tokens if predicts_next_token(model) else labels


def count_items(model: nn.Module, batch: Any, rule: Rule | None = None) -> int | float:
    """The number of items in the mean loss of ``batch``, by ``rule`` or by the usual one: the
    labels that are not -100, after the shift if ``model`` is a causal language model; the number of
    rows if ``labels`` is missing or holds numbers for a regression.
    """
    return count_by(rule or usual_rule(model), model, batch)


def check_pieces(model: nn.Module, batch: Any, how: str) -> None:
    """Raise ``ValueError`` if ``how`` cuts a batch whose flags, or the model's, say that losses of
    pieces do not add up to the batch's. What they do not say, ``find_rule`` asks the model.
    """
    config = getattr(without_wrappers(model), "config", None)
    given = {}
    if isinstance(batch, Mapping):
        given = {key: value for key, value in batch.items() if value is not None}
    found = []
    if given.get("return_loss"):
        found.append("return_loss=True (a loss that compares rows)")
    if "num_items_in_batch" in given:
        found.append("num_items_in_batch")
    # The loss that balances a mixture's experts is small, and compares all tokens of a batch.
    routed = getattr(getattr(config, "text_config", config), "output_router_logits", False)
    if given.get("output_router_logits", routed):
        found.append("output_router_logits=True")
    if found:
        raise ValueError(
            "use accumulation=1 and no sharding, with checkpointing to save memory; or give step a "
            f"loss= that is a mean over labels or rows: {how} cuts the batch, and with "
            f"{' and '.join(found)} the loss is no such mean"
        )


def chunked_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of a causal language model on ``batch`` (token ids and labels, each (rows, tokens)),
    with logits in chunks: the mean over the predicted tokens. Raises ``ValueError`` for a model
    with a different loss.
    """
    tensors = isinstance(batch, Mapping) and all(
        isinstance(value, Tensor) for value in batch.values()
    )
    if (
        not tensors
        or "labels" not in batch
        or any(key.endswith(INPUTS_OF_THE_LOSS) for key in batch)
    ):
        raise ValueError(
            "chunked_loss takes a dict of tensors with 'labels' in it, and no flags or other "
            "labels, which could change the model's loss: leave chunked_loss out"
        )
    return loss_in_chunks(inside_peft(model), batch, check_chunked_loss(model))


def check_chunked_loss(model: nn.Module) -> LogitForm:
    """How ``model`` makes its logits. ``ValueError`` if its own loss is not ``chunked_loss``."""
    inside = inside_peft(model)
    form = form_or_refusal(type(inside), getattr(inside, "config", None))
    if isinstance(form, str):
        raise ValueError(f"leave chunked_loss out: {form}")
    why = _model_difference(model, inside, form)
    if why is not None:
        raise ValueError(f"leave chunked_loss out: {why}")
    return form


def _model_difference(model: nn.Module, inside: nn.Module, form: LogitForm) -> str | None:
    """A part of the model's loss that chunks would leave out; ``None`` if there is none.

    It is something that the class and the config of the model ``inside`` do not show.
    """
    head = inside.get_output_embeddings()
    hooked = any(hook_counts(head)) or "forward" in vars(head)
    if inside is not model and "forward" in vars(type(model.base_model)):
        return f"{type(model.base_model).__name__} adds something to the model's loss"  # AdaLoRA
    if type(head) is not nn.Linear or hooked:
        return (
            "there is an adapter on the output layer, a hook or a forward of its own, and chunks "
            "take its matrix and bias alone"
        )
    if not inside.loss_function.__module__.startswith("transformers."):
        return "the model was given a loss_function of its own"
    if form == PLAIN or not has_numbers(head.weight) or _asked.get(inside) == form:
        return None
    ids = torch.arange(8, device=head.weight.device)[None] % head.out_features
    with as_in_evaluation(inside):
        if not _makes(form, *_product_and_logits(inside, ids)):
            return "the model's logits are not those of its config"
    _asked[inside] = form
    return None


_forms: dict[tuple[type, str], LogitForm | str] = {}
_asked: WeakKeyDictionary[nn.Module, LogitForm] = WeakKeyDictionary()


def form_or_refusal(cls: type, config: Any) -> LogitForm | str:
    """How a model of class ``cls`` with ``config`` makes its logits; or the reason why its loss is
    not ``chunked_loss``.

    It runs both, with their gradients, on a tiny copy of the model, once for each config: about a
    second. The copy's logits show what it makes of its head's output. A model that adds something
    to the loss has another one (a router's loss), and so have other forms of logits. A model of
    which no tiny copy can be made is refused too.
    """
    if not hasattr(config, "to_json_string") or not issubclass(cls, nn.Module):
        return (
            f"chunked_loss is for transformers' causal language models, and {cls.__name__} is none"
        )
    key = (cls, config.to_json_string(use_diff=False))
    if key not in _forms:
        # Modes that watch, replace or record the caller's operations must not act on these.
        modes, autocast = without_modes(), torch.autocast("cpu", enabled=False)
        with modes, torch.enable_grad(), autocast, torch.random.fork_rng([]):
            _forms[key] = _compare_losses(cls, config)
    return _forms[key]


def _compare_losses(cls: type, config: Any) -> LogitForm | str:
    message = ""
    for heads in (2, 8):  # some models need more heads
        try:
            form, own, chunks = _both_losses(cls, config, heads)
        except Exception as error:  # the model's own code may raise anything
            message = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            continue
        for one, other, limit in zip(own, chunks, (1e-5, 1e-3), strict=True):
            if not math.isclose(one, other, rel_tol=limit):
                return (
                    f"the loss of {cls.__name__} with this config is more than a cross-entropy of "
                    "its head's output, scaled or capped by a number of the config (on a tiny copy "
                    f"of it {own[0]:.4f}, in chunks {chunks[0]:.4f})"
                )
        return form
    return (
        f"no tiny copy of {cls.__name__} could be trained to see whether chunks have its loss "
        f"({message})"
    )


def _both_losses(cls: type, config: Any, heads: int) -> tuple[LogitForm, Numbers, Numbers]:
    """The form of the logits; and the loss and the norm of its gradient, by the model's own code
    and in chunks.
    """
    torch.manual_seed(0)
    model = tiny_model(cls, config, heads).train()
    head = model.get_output_embeddings()
    # Logits so large that a cap would change them, and a bias that is not 0.
    for parameter in head.parameters():
        parameter.data.normal_(std=5 / head.weight.shape[1] ** 0.5)
    ids = torch.randint(3, VOCABULARY, (2, CHUNK_TOKENS * 5 // 8), device="cpu")  # two chunks
    targets = ids.masked_fill(torch.rand(ids.shape, device="cpu") < 0.2, IGNORED)
    form = _form_of_logits(model, ids, config)
    found = []
    for loss_of in (lambda model, batch: model(**batch).loss, partial(loss_in_chunks, form=form)):
        torch.manual_seed(1)  # dropout
        loss = loss_of(model, {"input_ids": ids, "labels": targets})
        loss.backward()
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None]
        )
        found.append((loss.item(), norm.item()))
        model.zero_grad(set_to_none=True)
    return form, *found


# The form of a model's logits.


@torch.no_grad()
def _form_of_logits(model: nn.Module, ids: Tensor, config: Any) -> LogitForm:
    """The form with a number of ``config`` that makes the logits of ``model``, or ``PLAIN``."""
    asked = deepcopy(model).eval()
    try:
        found = _product_and_logits(asked.double(), ids)
    except RuntimeError:  # some products of experts have no float64
        found = _product_and_logits(asked.float(), ids)
    forms = [PLAIN]
    for number in vars(config.get_text_config()).values():
        if isinstance(number, int | float) and number > 0:
            forms += [LogitForm(number), LogitForm(1 / number), LogitForm(cap=number)]
    for form in forms:
        if _makes(form, *found):
            return form
    return PLAIN


def _product_and_logits(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The output of the head, and what ``model`` makes of it."""
    hidden = model.base_model(input_ids=ids).last_hidden_state
    head = model.get_output_embeddings()
    product = F.linear(hidden, head.weight, head.bias)
    return product.flatten(), model(input_ids=ids).logits.flatten()


def _makes(form: LogitForm, product: Tensor, logits: Tensor) -> bool:
    """Whether this form of ``product`` is ``logits``, up to rounding."""
    eps = max(torch.finfo(t.dtype).eps for t in (product, logits))
    found, _ = form.of(product.to(torch.float64, copy=True))
    return bool((found - logits).abs().max() <= 8 * eps * logits.abs().max())
