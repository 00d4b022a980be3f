"""The loss of a step: the number of items that it is the mean of, and whether chunks of logits give
the same loss.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.data_parallel import inside_wrapper
from ..compat.dispatch_modes import without_modes
from ..compat.fake_tensors import FakeTensor
from ..compat.modules import hook_counts
from ..compat.transformers_models import inside_peft
from ..hf_names import INPUTS_OF_THE_LOSS
from ..names import IGNORED
from ..techniques.losses import CHUNK_TOKENS, loss_in_chunks
from .item_rules import Rule, count_by, labels, predicted_tokens
from .tiny import VOCABULARY, tiny_model


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
    config = getattr(inside_peft(inside_wrapper(model)), "config", None)
    given = {}
    if isinstance(batch, Mapping):
        given = {key: value for key, value in batch.items() if value is not None}
    found = []
    if given.get("return_loss"):
        found.append("return_loss=True")
    if "num_items_in_batch" in given:
        found.append("num_items_in_batch")
    if getattr(config, "ctc_loss_reduction", None) == "sum":
        found.append("ctc_loss_reduction='sum'")
    # The loss that balances a mixture's experts is small, and compares all tokens of a batch.
    routed = getattr(getattr(config, "text_config", config), "output_router_logits", False)
    if given.get("output_router_logits", routed):
        found.append("output_router_logits=True")
    if _answers_beyond_the_row(given):
        found.append("answers beyond the row")
    if found:
        raise ValueError(
            f"{how} and {' and '.join(found)}: a loss that compares rows with each other, or is "
            "no mean over labels or rows, differs in pieces. Use accumulation=1 and no sharding, "
            "with checkpointing to save memory; or give step a loss= that is such a mean"
        )


def _answers_beyond_the_row(given: Mapping) -> bool:
    """Whether a question's answer was cut off: the loss leaves it out."""
    width = math.inf
    for key in ("inputs_embeds", "input_ids"):
        if key in given:
            width = given[key].shape[1]
    for key in ("start_positions", "end_positions"):
        if key in given:
            beyond = given[key].max() >= width
            if not isinstance(beyond, FakeTensor) and beyond:
                return True
    return False


def predicts_next_token(model: nn.Module) -> bool:
    """Whether ``model`` is what transformers makes of its config as a causal language model, or a
    subclass of it. Vision-language models are; encoder-decoder pairs are not.
    """
    model = inside_peft(inside_wrapper(model))
    config = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return False
    # Imported only if needed: it takes a second.
    from transformers.models.auto import modeling_auto

    for name in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):
        mapping = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING", {})
        for kind in type(config).__mro__:  # a config may be a subclass too
            if kind in mapping and isinstance(model, mapping[kind]):
                return True
    return False


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
    check_chunked_loss(model)
    return loss_in_chunks(inside_peft(model), batch)


def check_chunked_loss(model: nn.Module) -> None:
    """Raise ``ValueError`` for a model whose own loss is not ``chunked_loss``."""
    inside = inside_peft(model)
    why = chunked_loss_refusal(type(inside), getattr(inside, "config", None)) or _model_difference(
        model, inside
    )
    if why is not None:
        raise ValueError(f"{why}: leave chunked_loss out")


def _model_difference(model: nn.Module, inside: nn.Module) -> str | None:
    """A part of the model's loss that chunks would leave out; ``None`` if there is none.

    It is something that the class and the config of the model ``inside`` do not show.
    """
    head = inside.get_output_embeddings()
    hooked = any(hook_counts(head)) or "forward" in vars(head)
    if inside is not model and "forward" in vars(type(model.base_model)):
        return f"{type(model.base_model).__name__} adds something to the model's loss"  # AdaLoRA
    if type(head) is not nn.Linear or head.bias is not None or hooked:
        return (
            "there is an adapter on the output layer, a bias, a hook or a forward of its own, "
            "and chunks take its matrix alone"
        )
    own = not inside.loss_function.__module__.startswith("transformers.")
    return "the model was given a loss_function of its own" if own else None


_refusals: dict[tuple[type, str], str | None] = {}


def chunked_loss_refusal(cls: type, config: Any) -> str | None:
    """The reason why a model of class ``cls`` with ``config`` has a loss other than
    ``chunked_loss``; ``None`` if they agree.

    It runs both, with their gradients, on a tiny copy of the model, once for each config: about a
    second. An output layer that is more than a matrix (a bias, scaled or capped logits) gives
    another loss, and so does a model that adds something (a router's loss). A model of which no
    tiny copy can be made is refused too.
    """
    if not hasattr(config, "to_json_string") or not issubclass(cls, nn.Module):
        return (
            f"chunked_loss is for transformers' causal language models, and {cls.__name__} is none"
        )
    key = (cls, config.to_json_string(use_diff=False))
    if key not in _refusals:
        # Modes that watch, replace or record the caller's operations must not act on these.
        modes, autocast = without_modes(), torch.autocast("cpu", enabled=False)
        with modes, torch.enable_grad(), autocast, torch.random.fork_rng([]):
            _refusals[key] = _compare_losses(cls, config)
    return _refusals[key]


def _compare_losses(cls: type, config: Any) -> str | None:
    for heads in (2, 8):  # some models need more heads
        try:
            own, chunks = _both_losses(cls, config, heads)
            break
        except Exception as error:  # the model's own code may raise anything
            message = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    else:
        return (
            f"no tiny copy of {cls.__name__} could be trained to see whether chunks have its "
            f"loss ({message})"
        )
    if all(
        math.isclose(a, b, rel_tol=limit)
        for a, b, limit in zip(own, chunks, (1e-5, 1e-3), strict=True)
    ):
        return None
    return (
        f"the loss of {cls.__name__} with this config is more than a cross-entropy of hidden "
        f"states times its output matrix (on a tiny copy of it {own[0]:.4f}, in chunks "
        f"{chunks[0]:.4f}: a bias, scaled or capped logits, or a router's loss)"
    )


def _both_losses(cls: type, config: Any, heads: int) -> list[tuple[float, float]]:
    """The loss and the norm of its gradient, by the model's own code and in chunks."""
    torch.manual_seed(0)
    model = tiny_model(cls, config, heads).train()
    head = model.get_output_embeddings()
    # Logits so large that a cap would change them, and a bias that is not 0.
    for parameter in head.parameters():
        parameter.data.normal_(std=5 / head.weight.shape[1] ** 0.5)
    ids = torch.randint(3, VOCABULARY, (2, CHUNK_TOKENS * 5 // 8), device="cpu")  # two chunks
    targets = ids.masked_fill(torch.rand(ids.shape, device="cpu") < 0.2, IGNORED)
    found = []
    for loss_of in (lambda model, batch: model(**batch).loss, loss_in_chunks):
        torch.manual_seed(1)  # dropout
        loss = loss_of(model, {"input_ids": ids, "labels": targets})
        loss.backward()
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None]
        )
        found.append((loss.item(), norm.item()))
        model.zero_grad(set_to_none=True)
    return found
