"""predict(ranks=...) for modules of people's own, against trackers on real ranks."""

from __future__ import annotations

from itertools import product

import pytest
from support.nightly import each
from support.own_ranked import MODULES, measured_here, predicted_for

from gradmem_lib.course import run_ranks

WHOLE = ("ddp", "zero1")  # what leaves the weights whole takes any module
WHOLE_GRID = [
    (name, {"sharding": how, "accumulation": pieces})
    for name, how, pieces in product(MODULES, WHOLE, (1, 2))
]
CASES = each(3, WHOLE_GRID)  # in steps in which every module and every way comes
# What no rank can shard is not predicted.
UNLIKE = each(3, product(MODULES, [{"sharding": "fsdp"}, {"sharding": "zero2"}]))


def test_a_predicted_rank_of_an_own_module_is_the_tracked_one_or_refused():
    measured = run_ranks(measured_here, CASES + UNLIKE, ranks=2, seconds=600)
    for i, (name, fields) in enumerate(CASES):
        rank = i % 2
        assert predicted_for(name, fields, 2, rank) == measured[rank][i], (name, fields, rank)
    for (name, fields), found in zip(UNLIKE, measured[0][len(CASES) :], strict=True):
        with pytest.raises(ValueError, match="there are no layers in this") as caught:
            predicted_for(name, fields, 2, 0)
        assert found == f"ValueError: {caught.value}", name
