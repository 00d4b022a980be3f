"""The classes of transformers, by a config."""

import copy

from torch import nn

from ..hf_names import PAIR_TABLES, TABLES
from .wrappers import inside_peft, without_wrappers


def model_class(config):
    """The class to train a model of ``config`` with: its first architecture, or else the usual
    class of its family.

    Encoder-decoder configs give a sequence-to-sequence model. Other configs give a masked or causal
    language model, a model of pairs of pictures and texts, an image classifier, or a speech model.
    """
    named = _named_class(config)
    if named is not None and not _is_picture_model_without_head(named, config):
        return named
    found = _usual_class(config) or named
    if found is None:
        raise ValueError(
            f"no training class is known for a {type(config).__name__}: language models, pairs of "
            "an encoder and a decoder, and image classifiers are. Name one in "
            "config.architectures, such as ['LlamaForSequenceClassification'], or build the module "
            "yourself and give it with batch={...}, a dict of example tensors (device='meta' "
            "costs no memory)"
        )
    return found


def _named_class(config):
    """The first class in ``config.architectures`` that transformers has; ``None`` if none is named.

    Raises ``ValueError`` if it has none of those that are named.
    """
    import transformers

    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if named is not None:
            return named
    if config.architectures:
        raise ValueError(
            f"the config is of {', '.join(config.architectures)}, which transformers does not "
            "have: name the class to train in config.architectures, set it to None for the "
            "family's usual class, or predict the model itself"
        )
    return None


def _is_picture_model_without_head(named, config) -> bool:
    """Whether class ``named`` has no loss, and the usual class of its family may take its place.

    A picture model's usual head is one linear layer. A language model without a head is not
    replaced: which head it gets decides its bytes.
    """
    from transformers.models.auto import modeling_auto as auto

    headless = auto.MODEL_MAPPING.get(type(config), None)
    return named is headless and named.main_input_name == "pixel_values"


def _usual_class(config):
    """The usual class to train a model of ``config``'s family with; ``None`` if none is known."""
    from transformers.models.auto import modeling_auto as auto

    tables = list(TABLES)
    if config.is_encoder_decoder:
        tables = [*PAIR_TABLES, *TABLES]
    for name in tables:
        table = getattr(auto, f"MODEL_FOR_{name}_MAPPING", {})
        if type(config) in table:
            found = table[type(config)]
            return found[0] if isinstance(found, (tuple, list)) else found
    return None


def predicts_next_token(model: nn.Module) -> bool:
    """Whether ``model`` is what transformers makes of its config as a causal language model, or a
    subclass of it. Vision-language models are; encoder-decoder pairs are not.
    """
    model = without_wrappers(model)
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


def is_own_module(given: object) -> bool:
    """Whether ``given`` is a module that transformers could not build from its config."""
    from transformers import PretrainedConfig

    if not isinstance(given, nn.Module):
        return False
    inside = inside_peft(given)
    config = getattr(inside, "config", None)
    if not isinstance(config, PretrainedConfig):
        return True
    config = copy.deepcopy(config)
    config.architectures = [type(inside).__name__]
    try:
        return model_class(config) is not type(inside)
    except ValueError:
        return True
