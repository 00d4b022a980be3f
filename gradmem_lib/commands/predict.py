"""``gradmem predict``: the peak of a training step, without running it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..prediction.loop import Loop
from ..training.recipe import Recipe
from .model_step import answer
from .readers import count, one_of, rank
from .step_options import MODEL, add_step_options, chosen


def add(commands) -> None:
    predict = commands.add_parser("predict", help="the peak of a training step, without running it")
    option = predict.add_argument
    option("model", help=MODEL)
    option(
        "--batch-size", type=count, required=True, metavar="N", help="rows of one optimizer step"
    )
    add_step_options(option)
    option(
        "--ranks",
        type=count,
        metavar="N",
        help="of so many ranks that train together (with --sharding), one",
    )
    option("--rank", type=rank, default=0, metavar="R", help="which one of them, from 0")
    option(
        "--target",
        type=one_of(("cpu", "cuda")),
        metavar="T",
        help="cpu or cuda (the default where there is a card)",
    )
    option("--json", action="store_true", help="print JSON")
    predict.set_defaults(
        run=answer, command=_predict, says="reading the model and predicting its step ..."
    )


def _predict(options: argparse.Namespace) -> int:
    title, prediction = predicted(options)
    ranks = options.ranks or 1
    if options.json:
        print(json.dumps(as_dict(title, prediction, ranks), indent=2))
    else:
        print(as_text(title, prediction, ranks))
    return 0


def predicted(options: argparse.Namespace) -> tuple[str, Any]:
    """The model's title, and the prediction of the step that the options describe."""
    from ..model.configs import find_model
    from ..prediction.predict import predict

    config, title = find_model(options.model)
    prediction = predict(
        config,
        batch_size=options.batch_size,
        seq_len=options.seq_len,
        recipe=chosen(Recipe, options),
        target=options.target,
        ranks=options.ranks,
        rank=options.rank,
        loop=chosen(Loop, options),
    )
    return title, prediction


def as_dict(title: str, prediction, ranks: int) -> dict:
    """A prediction as JSON has it."""
    from ..planning.held import overhead_of_prediction

    peak = prediction.peak
    beyond = overhead_of_prediction(prediction, cards=ranks)
    return {
        "model": title,
        "target": prediction.target,
        "peak": {"total": peak.total, "phase": peak.phase, "by_category": peak.by_category},
        "peak_by_phase": prediction.peak_by_phase,
        "between_steps": prediction.current.total,
        "moved": prediction.offload_traffic_bytes,
        "beyond_the_peak": beyond,
        "needs": peak.total + sum(beyond.values()),
    }


def as_text(title: str, prediction, ranks: int) -> str:
    """A prediction as a table, with a line above each sum."""
    from ..planning.held import overhead_of_prediction
    from ..units import format_bytes

    peak = prediction.peak
    beyond = overhead_of_prediction(prediction, cards=ranks)
    live = "peak, live bytes"
    rows = [(category, n) for category, n in peak.by_category.items() if n]
    rows.append((live, peak.total))
    if prediction.offload_traffic_bytes:
        rows.append(("moved", prediction.offload_traffic_bytes))
    if beyond:
        rows += beyond.items()
        rows.append(("needs", peak.total + sum(beyond.values())))
    width = max(len(name) for name, _ in rows)
    phase = peak.phase.replace("_", " ")
    lines = [f"{title}, predicted for {prediction.target}; the peak is in {phase}"]
    for name, n in rows:
        if name in (live, "needs"):
            lines.append("  " + "-" * (width + 33))
        lines.append(f"  {name:{width}} {n:>20,} {format_bytes(n):>11}")
    return "\n".join(lines)
