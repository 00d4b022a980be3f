"""Lesson 09's answer: what adapters under a checkpoint need, with each of torch's two kinds and in
each way of switching them on.
"""

from ....techniques.lora import LoRALinear, add_lora
from ...ledger import Finding, answers
from ...ledger.finding import each, none, yes
from ...machine.compat import enable_checkpointing
from ..shared.claim_runs import checkpoint_by_hand, error_of, silent, tiny, token_ids, tracked_step


def adapters_step(*, reentrant: bool, enable: bool, by_hand: bool = False) -> int:
    """For a tiny Llama with LoRA on every linear layer: adapters that get a gradient.

    ``enable``: whether the embedding's output requires a gradient; ``by_hand``: torch's
    ``checkpoint`` around each layer, in place of transformers' switch.
    """
    model = tiny()
    add_lora(model, 4)
    with silent():
        if by_hand:
            checkpoint_by_hand(reentrant, model)
        else:
            enable_checkpointing(model, {"use_reentrant": reentrant})
        if enable:
            model.enable_input_require_grads()
        else:
            model.disable_input_require_grads()  # both ways of switching on have called enable
        error_of(lambda: tracked_step(model, token_ids()))  # an error where none learns
    adapters = [module for module in model.modules() if isinstance(module, LoRALinear)]
    return sum(module.B.grad is not None for module in adapters)


def _switch_does_it() -> bool:
    """Whether transformers' own switch makes the embedding's output require a gradient, adapters or
    not.
    """
    model = tiny().requires_grad_(False)
    with silent():
        enable_checkpointing(model, {"use_reentrant": True})
    return model.get_input_embeddings()(token_ids()).requires_grad


@answers("C44")
def input_require_grads() -> Finding:
    learn = {}
    for kind in (False, True):
        learn[kind, "without"] = adapters_step(reentrant=kind, enable=False)
        learn[kind, "with"] = adapters_step(reentrant=kind, enable=True)
    by_hand = adapters_step(reentrant=True, enable=False, by_hand=True)
    return Finding(
        own=none("adapters learning without it, use_reentrant=False", learn[False, "without"]),
        where=none("the same, use_reentrant=True", learn[True, "without"]),
        beyond=yes("transformers' switch leaves the call to you", not _switch_does_it()),
        says="""
            only if: the checkpoints are reentrant and not made by transformers' switch, which
                makes the call itself.
            holds: Without it no adapter gets a gradient.
            fails: Every adapter gets its gradient without it, whichever kind of checkpoint is
                used.
            why: A reentrant checkpoint looks only at its inputs. If no input requires a
                gradient, as after a frozen embedding, its output requires none, even if weights
                inside are trained. The document's own kind, use_reentrant=False, follows the graph.
                Since transformers' activation_checkpointing_enable asks for the embedding's
                gradient itself, the call matters only where torch's reentrant checkpoint is written
                by hand. PEFT also asks for it, when it wraps a model whose checkpoints are on.
            """,
        figures=each("use_reentrant={}, {} it: adapters with a gradient, of 28", learn)
        | {"torch's checkpoint by hand, reentrant, without it: adapters with a gradient": by_hand},
    )
