"""Lesson 08's exercises that are numbers: when moving is faster, how many layers to recompute, and
a key-value cache.
"""

from __future__ import annotations

import math
from functools import cache, partial

import torch

from ....measure.tracker import MemoryTracker
from ....techniques.checkpointing import checkpoint_layers
from ....units import parse_bytes
from ...judge.compare import plain
from ...judge.exercise import Exercise, HiddenCase, Mistake, Seen, calls, measure
from ...judge.hints import shares
from ...material import models
from ..shared.settings import quietly


def break_even(nbytes, operations, bandwidth, speed):
    """How many times as long moving ``nbytes`` away and back takes as computing them again, by so
    many ``operations``.
    """
    return (2 * nbytes / bandwidth) / (operations / speed)


def _explain_break_even(got, expected):
    if all(isinstance(value, bool) for value in got.values()):
        return "return a number, not yes or no: how many times as long moving takes."
    return None


LAYERS = 8
RECOMPUTE_CARD = "2.07 MB"  # fits a step with 5 layers of 8 run again, and none with fewer
MOST_CALLS = 8  # of peak, for up to 64 layers; halving needs 7


def layers_to_recompute(peak, layers, budget):
    """The smallest k from 0 to ``layers`` with ``peak(k)`` at most ``budget``; ``peak`` never grows
    with k.
    """
    low, high = 0, layers
    while low < high:
        middle = (low + high) // 2
        if peak(middle) <= budget:
            high = middle
        else:
            low = middle + 1
    return low


def _search(
    *, fits=lambda found, budget: found <= budget, low=0, below=0, result=lambda k, layers: k
):
    def wrong(peak, layers, budget):
        first, last = low, layers - below
        while first < last:
            middle = (first + last) // 2
            first, last = (first, middle) if fits(peak(middle), budget) else (middle + 1, last)
        return result(first, layers)

    return wrong


def _scan(peak, layers, budget):
    return next(k for k in range(layers + 1) if peak(k) <= budget)


def _straight(peak, layers, budget):
    return max(0, math.ceil((peak(0) - budget) / (peak(0) - peak(layers)) * layers))


def recompute_setting():
    """A GPT-2 of 8 layers, the second model, and token ids (4, 32)."""
    model = models.tiny_gpt2(layers=LAYERS, hidden=32, heads=2, positions=32, vocab=64)
    return model.train(), torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))


def train(model, ids, k: int) -> None:
    """A forward and a backward in which the first ``k`` layers run again, each by itself."""
    schedule = [1] * k + [LAYERS - k] if k < LAYERS else 1
    with checkpoint_layers(model, schedule):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


@cache
def recomputed_peak(k: int) -> int:
    """The peak of such a step in bytes, measured."""
    model, ids = recompute_setting()
    with MemoryTracker(model, live=False) as tracker:
        train(model, ids, k)
    return tracker.peak.total


# What each layer saves when it runs again, and what a step needs with none.
_UNEVEN = [90] * 6 + [10] * 20 + [55] * 5 + [3] * 32
_SAVES = {
    "30 equal layers": ([40] * 30, 2000, 2000 - 40 * 11),
    "63 unequal layers": (_UNEVEN, 3000, 2300),
    "5 layers, room for all": ([7] * 5, 100, 100),
    "9 layers, no room for any": ([7] * 9, 200, 200 - 63),
    HiddenCase("40 layers"): ([5, 80] * 20, 4000, 4000 - 913),
}


def _whole(k):
    """A number of layers of any kind as Python's, where it is whole."""
    k = plain(k)
    return int(k) if isinstance(k, float) and k.is_integer() else k


@quietly
def _observe_layers(candidate):
    found: dict = {}
    counts = []
    for name, (saves, start, budget) in _SAVES.items():
        called: list[int] = []

        def peak(k, saves=saves, start=start, called=called):
            k = _whole(k)
            called.append(k)
            if len(called) > 1000:
                raise RuntimeError(
                    "peak was called 1,000 times: the range of your search does not get smaller"
                )
            if not 0 <= k <= len(saves):
                raise RuntimeError(
                    f"peak({k}) was called for a model of {len(saves)} layers: k goes from 0 to "
                    "`layers`"
                )
            return start - sum(saves[:k])

        answer = plain(candidate(peak, len(saves), budget))
        counts.append(len(called))
        found[name] = {
            "layers": answer,
            f"calls of peak beyond {MOST_CALLS}": max(0, len(called) - MOST_CALLS),
        }
    k = plain(candidate(lambda k: recomputed_peak(_whole(k)), LAYERS, parse_bytes(RECOMPUTE_CARD)))
    found["a GPT-2 of 8 layers"] = {"layers": k}
    if isinstance(k, int) and 0 <= k <= LAYERS:
        model, ids = recompute_setting()
        step = measure(lambda: train(model, ids, k), budget=RECOMPUTE_CARD, model=model)
        found["the card, with that many"] = type(step)(None, step.peak, step.budget)
    return Seen(found, calls=counts)


def _explain_layers(got, expected):
    ks, wanted = (
        [case["layers"] for case in seen.values() if isinstance(case, dict)]
        for seen in (got, expected)
    )
    counts = [*(len(s[0]) for s in _SAVES.values()), LAYERS]
    # A test for less than the budget may end one beyond the last layer.
    one_beyond = all(k in (right, right + 1) for k, right in zip(ks, wanted, strict=True))
    if any(k > layers for k, layers in zip(ks, counts, strict=True)) and not one_beyond:
        return (
            "this is more than the number of layers: return a number of layers, not peak's bytes."
        )
    if all(k == 0 for k in ks):
        return "no layer runs again, for any budget: where peak(0) is over the budget, some must."
    gaps = [k - right for k, right in zip(ks, wanted, strict=True)]
    if any(gaps) and all(k + right == n for k, right, n in zip(ks, wanted, counts, strict=True)):
        return "this is the number of layers that do not run again: return the number that do."
    if min(gaps) >= 0 and max(gaps) == 1:
        return (
            "one layer too many runs again: return the smallest number that fits, and a peak of "
            "exactly the budget fits."
        )
    if max(gaps) <= 0 and min(gaps) == -1:
        return "one layer is missing: the step still does not fit, but it fits with the next k."
    if not any(gaps):
        return (
            f"the number is right, but it took more than {MOST_CALLS} calls of peak: halve the "
            "range each time, and call peak once for each middle."
        )
    return (
        "the search ends in the wrong place: where the middle fits, the answer is there or "
        "below it; where not, it is above it."
    )


def kv_cache(config, rows, tokens, bytes_per_number):
    """Bytes of the keys and values of ``rows`` sequences of ``tokens`` tokens, over all layers."""
    width = config.num_key_value_heads * config.head_dim
    return 2 * config.num_hidden_layers * width * rows * tokens * bytes_per_number


def _cache(
    *,
    both=2,
    heads="num_key_value_heads",
    size=lambda config: config.head_dim,
    layers=True,
    rows=True,
    positions=lambda tokens: tokens,
    each=lambda bytes_per_number: bytes_per_number,
):
    def wrong(config, rows_, tokens, bytes_per_number):
        if heads == "one":
            number = 1
        elif heads == "sharing":
            number = config.num_attention_heads // config.num_key_value_heads
        else:
            number = getattr(config, heads)
        width = number * size(config)
        count = (config.num_hidden_layers if layers else 1) * (rows_ if rows else 1)
        return both * count * width * positions(tokens) * each(bytes_per_number)

    return wrong


def _with_queries(config, rows, tokens, bytes_per_number):
    heads = config.num_attention_heads
    queries = config.num_hidden_layers * heads * config.head_dim * rows * tokens * bytes_per_number
    return kv_cache(config, rows, tokens, bytes_per_number) + queries


@cache
def cache_configs() -> dict:
    """Configs of three models whose heads differ, by name."""
    from transformers import LlamaConfig, Qwen3Config

    sizes = (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    made = {
        "Llama-2-7B": (LlamaConfig, 32, 4096, 32, 32, 128),
        "Llama-2-70B": (LlamaConfig, 80, 8192, 64, 8, 128),
        "Qwen3-0.6B": (Qwen3Config, 28, 1024, 16, 8, 128),
    }
    return {
        name: kind(**dict(zip(sizes, each, strict=True))) for name, (kind, *each) in made.items()
    }


@quietly
def _observe_cache(candidate):
    found = {}
    for name, rows, tokens, width in (
        ("Llama-2-7B", 1, 2048, 2),
        ("Llama-2-70B", 32, 2048, 2),
        ("Qwen3-0.6B", 3, 500, 4),
    ):
        case = f"{name}, {rows} x {tokens:,} tokens, {width} bytes a number"
        found[case] = candidate(cache_configs()[name], rows, tokens, width)
    hidden = HiddenCase("70B in 8 bits")
    found[hidden] = candidate(cache_configs()["Llama-2-70B"], 5, 77, 1)
    return found


# What else a forward computes for each token, which no later token needs: how many numbers.
_NOT_KEPT = (
    ("logits", lambda config: config.vocab_size),
    ("hidden states", lambda config: config.hidden_size),
    ("hidden states", lambda config: config.hidden_size * config.num_hidden_layers),
)
# Of which tokens, and in how many bytes: those that are given, or always as many (float32, say).
_AMOUNTS = (
    lambda rows, tokens, width: rows * tokens * width,
    lambda rows, tokens, width: rows * tokens,
    lambda rows, tokens, width: rows * width,  # of each row's last token alone
    lambda rows, tokens, width: rows,
)


def _not_kept(numbers, amount, config, rows, tokens, width):
    return numbers(config) * amount(rows, tokens, width)


def _counted_too(got, expected) -> str:
    """What is said if something is added that is no key and no value."""
    for what, numbers in _NOT_KEPT:
        for amount in _AMOUNTS:
            found = shares(got, expected, _observe_cache(partial(_not_kept, numbers, amount)))
            if found is not None and found[0] == 1 and found[1] > 0:
                return (
                    f"the {what} are counted too: each token has its own, and no later token needs "
                    "them. Only keys and values are kept."
                )
    return ""


def _explain_cache(got, expected):
    """An answer that takes each number for one of so many bytes, whatever is given."""
    for each in (1, 2, 4, 8):
        if got == _observe_cache(_cache(each=lambda given, each=each: each)):
            return f"this assumes {each} bytes a number: use bytes_per_number."
    return _counted_too(got, expected)


EXERCISES = (
    Exercise(
        id="8.4",
        title="break-even",
        difficulty=1,
        minutes=2,
        trains="seconds on a bus against seconds of arithmetic",
        reference=break_even,
        observe=calls(
            (64_000_000, 2e12, 25e9, 80e12),
            (512_000_000, 3e12, 12e9, 40e12),
            (7_000_000, 9e11, 450e9, 500e12),
            hidden=((90_000_000, 4e11, 31e9, 150e12),),
        ),
        explain=_explain_break_even,
        mistakes=(
            Mistake(
                "one way",
                lambda n, o, b, s: n / b / (o / s),
                "the bytes cross the bus twice: away in forward, and back in backward.",
            ),
            Mistake(
                "inverse",
                lambda n, o, b, s: o / s / (2 * n / b),
                "this ratio is upside down: divide the seconds of moving by those of computing.",
            ),
            Mistake(
                "difference",
                lambda n, o, b, s: 2 * n / b - o / s,
                "this is a difference in seconds: return how many times as long moving takes.",
            ),
            Mistake(
                "swapped",
                lambda n, o, b, s: 2 * n / s / (o / b),
                (
                    "bandwidth and speed are swapped: divide bytes by bandwidth, and operations by "
                    "speed."
                ),
            ),
            Mistake(
                "share",
                lambda n, o, b, s: 2 * n / b / (2 * n / b + o / s),
                (
                    "this is moving's share of the sum of both: divide only by the seconds of "
                    "computing."
                ),
            ),
            Mistake(
                "both passes",
                lambda n, o, b, s: 4 * n / b / (o / s),
                "the bytes are counted too often: they cross the bus twice, away and back.",
            ),
        ),
    ),
    Exercise(
        id="8.5",
        title="as few layers as the budget allows",
        difficulty=2,
        minutes=4,
        trains="searching with few predictions, on a second model",
        reference=layers_to_recompute,
        observe=_observe_layers,
        explain=_explain_layers,
        raises=(
            (
                "slice indices must be integers",
                (
                    "peak was called with a number that is not whole: k is a number of layers, so "
                    "halve with //."
                ),
            ),
        ),
        mistakes=(
            Mistake(
                "one after another",
                _scan,
                (
                    "the number is right, but every k is tried in turn, which takes too many "
                    "calls of peak: halve the range each time."
                ),
            ),
            Mistake(
                "below",
                _search(fits=lambda found, budget: found < budget),
                "a peak equal to the budget fits: test for at most the budget, not for less.",
            ),
            Mistake(
                "all",
                lambda peak, layers, budget: layers,
                "all layers run again, for any budget: return the smallest number that fits.",
            ),
            Mistake(
                "straight line",
                _straight,
                (
                    "a straight line from peak(0) to peak(layers) assumes that all layers have the "
                    "same size: call peak for values in between."
                ),
            ),
            Mistake(
                "at least one",
                _search(low=1),
                "where the step fits as it is, the answer is 0: no layer has to run again.",
            ),
            Mistake(
                "never all",
                _search(below=1),
                "the answer may be all layers, the last one too: begin with high = layers.",
            ),
        ),
    ),
    Exercise(
        id="8.7",
        title="the key-value cache",
        difficulty=1,
        minutes=3,
        trains="what is kept of each token, and what grouped heads share",
        reference=kv_cache,
        observe=_observe_cache,
        explain=_explain_cache,
        mistakes=(
            Mistake(
                "keys alone", _cache(both=1), "only keys or only values are counted: both are kept."
            ),
            Mistake(
                "every head",
                _cache(heads="num_attention_heads"),
                (
                    "every query head is counted with its own keys and values: grouped heads share "
                    "them, so there are only num_key_value_heads."
                ),
            ),
            Mistake(
                "no heads",
                _cache(heads="one"),
                ("this is the cache of one key-value head: there are num_key_value_heads of them."),
            ),
            Mistake(
                "heads that share",
                _cache(heads="sharing"),
                (
                    "this counts the query heads that share a key-value head: the cache has one "
                    "key and one value for each of the num_key_value_heads."
                ),
            ),
            Mistake(
                "one layer",
                _cache(layers=False),
                "this is the cache of one layer: every layer has its own cache.",
            ),
            Mistake(
                "hidden / heads",
                _cache(size=lambda c: c.hidden_size // c.num_attention_heads),
                (
                    "a head is not always hidden_size / num_attention_heads wide: the config's "
                    "head_dim says."
                ),
            ),
            Mistake(
                "hidden / shared",
                _cache(size=lambda c: c.hidden_size // c.num_key_value_heads),
                (
                    "this assumes that all key-value heads together are hidden_size wide: sharing "
                    "makes fewer heads, not wider ones; head_dim is the width of one."
                ),
            ),
            Mistake(
                "one row",
                _cache(rows=False),
                "only one row is counted: each row has its own keys and values.",
            ),
            Mistake(
                "two bytes",
                _cache(each=lambda bytes_per_number: 2),
                "this assumes two bytes a number: use bytes_per_number.",
            ),
            Mistake(
                "numbers",
                _cache(each=lambda bytes_per_number: 1),
                "these are numbers, not bytes: multiply by bytes_per_number.",
            ),
            Mistake(
                "bits",
                _cache(each=lambda bytes_per_number: 8 * bytes_per_number),
                "these are bits: return bytes.",
            ),
            Mistake(
                "three",
                _cache(both=3),
                (
                    "three tensors are counted: the queries of earlier tokens are never needed "
                    "again, so only keys and values are cached."
                ),
            ),
            Mistake(
                "queries too",
                _with_queries,
                "queries are counted as well: those of earlier tokens are never needed again.",
            ),
            Mistake(
                "squared",
                _cache(positions=lambda tokens: tokens**2),
                (
                    "the tokens are squared: the cache has one key and one value for each token, "
                    "and no scores."
                ),
            ),
            Mistake(
                "one token",
                _cache(positions=lambda tokens: 1),
                "only one token is counted: every token so far has its own keys and values.",
            ),
            Mistake(
                "not the last",
                _cache(positions=lambda tokens: tokens - 1),
                "the last token is missing: its keys and values are kept too.",
            ),
            Mistake(
                "no width",
                _cache(size=lambda config: 1),
                ("the width of a head is missing: each key and each value has head_dim numbers."),
            ),
        ),
    ),
)
