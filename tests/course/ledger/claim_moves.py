"""What an answer of the ledger measures with, what that would have to give instead, and the verdict
then.
"""

import re
from types import SimpleNamespace

from gradmem_lib.course.material.shapes import SHAPES


def stub(value):
    return lambda *args, **kwargs: value


def tracker(peak: int):
    """A tracker whose figures depend on nothing."""
    timeline = SimpleNamespace(
        by_category={"activations": [peak, 0], "gradients": [0, peak], "parameters": [1, 1]},
        phases=["forward", "backward"],
    )
    return SimpleNamespace(
        timeline=timeline, peak=SimpleNamespace(total=2 * peak, by_category={"activations": peak})
    )


def predicted(peak: int):
    return stub(SimpleNamespace(peak=SimpleNamespace(total=peak)))


# An answer, what of a lesson it measures with, the verdict if that gives something else, and what.
MOVES = """
C11  07.claims._peaks               does not hold  stub((10, 9))
C44  09.claims.adapters_step        holds          lambda enable, **_: 2 * enable
C44  09.claims.adapters_step        does not hold  stub(2)
C02  01.claims._destroyed           does not hold  stub(0.0)
C02  01.claims._destroyed           holds          lambda dtype: dtype.itemsize == 2
C08  03.claims._update              holds          lambda rows, k: tracker(100 // k)
C10  03.claims._gradient_error      does not hold  stub(0.5)
C10  03.claims._gradient_error      holds          stub(0.0)
C16  03.claims_time._published      does not hold  stub(0.9)
C22  03.claims._update              does not hold  lambda rows, k, seq_len: tracker(100)
C29  03.claims_time._work           does not hold  lambda k: (1, k)
C30  03.claims._accumulated_error   holds          stub(0.0)
C31  03.claims_time.learning_rates  holds          stub((1, {k: k / 4 for k in (1, 2, 4, 8)}))
C35  03.claims._logged              does not hold  stub(0.25)
C35  03.claims._logged              holds          stub(1.0)
C19  04.claims.chain                does not hold  lambda n, keeps, every: (1000 * n, n, n)
C26  04.claims.llama_bytes          holds          lambda every: 100 // every
C28  04.claims._best_equal          does not hold  lambda n, keeps: (1, n)
C20  04.claims_price.llama_work     does not hold  stub(0.5)
C39  04.claims_price._longest       does not hold  lambda card, checkpointing: card
C40  04.claims_price.chain          does not hold  stub((1, 128, 1))
C50  04.claims_price.share_left     holds          stub(0.5)
C45  08.claims.part_of_the_saving   does not hold  stub(0.5)
C45  08.claims.part_of_the_saving   holds          stub(0.7)
C45  08.claims.extra_work           does not hold  stub(0.2)
C48  08.claims.taken_off            does not hold  stub(0.5)
C48  08.claims.taken_off            holds          stub(0.85)
C47  08.claims.switched_on          holds          stub("no layer")
C53  08.claims.SHAPES               does not hold  SHAPES | {"Llama-2-70B": SHAPES["Llama-2-13B"]}
C55  06.claims.trio                 does not hold  predicted(10**12)
C17  10.claims.on_a_card            does not hold  stub(26 * 10**9)
C49  10.claims.second_step          does not hold  lambda mode, *_, **__: (9 + (mode is True), 1, 0)
C57  06.claims._times               holds          stub({"accumulated": 2.0, "checkpointed": 1.0})
"""
NAMES = {"stub": stub, "tracker": tracker, "predicted": predicted, "SHAPES": SHAPES}


def moves() -> list[tuple]:
    """The claim, the full name of what is replaced, the verdict, and the value in its place."""
    found = []
    for line in MOVES.strip().splitlines():
        claim_id, name, verdict, value = re.split(" {2,}", line)
        full_name = f"gradmem_lib.course.lessons.lesson_{name}"
        found.append((claim_id, full_name, verdict, eval(value, NAMES)))
    return found
