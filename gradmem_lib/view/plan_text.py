"""A plan as text and as JSON: the recipes that fit, fastest first, and why the others do not.

Also a prediction's table.
"""

import textwrap
from dataclasses import asdict

from ..planning.options import Option, method_of
from ..planning.report import Plan
from ..prediction.predict import Prediction
from ..units import format_bytes
from .plan_code import launch, row_text
from .template import html_from


def plan_text(plan: Plan) -> str:
    several, each = (f"{plan.cards} x ", " each") if plan.cards > 1 else ("", "")
    if plan.machines > 1:
        several = f"{plan.machines} machines of {several}"
    lines = [
        f"{plan.title} on {several}{plan.card.name} ({plan.card.nbytes:,} bytes{each}), global "
        f"batch {plan.global_batch} {_rows_of(plan)}, method {plan.method}, target {plan.target}",
        *_about_the_margin(plan.margin),
        *_about_the_rows(plan),
        "",
    ]
    if plan.fits:
        lines += [
            *_about_the_order(plan.target),
            *_table(plan.fits, plan),
            *_terms_of(plan.fits[0], plan),
            *_about_the_network(plan.network),
        ]
        if plan.cards > 1:
            lines.append(f"Start the code of the first one {launch(plan.cards, plan.machines)}")
    else:
        lines += ["Nothing fits. Closest:", *_table([plan.closest], plan)]
        lines += ["", _wrapped(f"It {plan.closest.why_not()}.")]
    lines += [_wrapped(line, "  * ") for line in plan.advice]
    faster = plan.next_faster
    if faster is not None:
        which = "A faster one of another kind"
        if plan.is_of_the_best_ones_kind(faster):
            which = "The next faster one of the same kind"
        lines += [
            "",
            f"{which} does not fit: {faster}",
            _wrapped(f"It {faster.why_not()}."),
        ]
    if plan.ruled_out:
        lines += ["", "Ruled out without a prediction:"]
    for why in dict.fromkeys(out.why for out in plan.ruled_out):
        kinds = "; ".join(str(out) for out in plan.ruled_out if out.why == why)
        lines.append(_wrapped(f"{kinds}: {why}.", "  * "))
    return "\n".join(lines)


def _rows_of(plan: Plan) -> str:
    return "rows" if plan.seq_len is None else f"x {plan.seq_len:,} tokens"


def _about_the_rows(plan: Plan) -> list[str]:
    lines = [_wrapped(note, "") for note in plan.notes]
    if plan.example is not None:
        lines.insert(0, f"A row: {row_text(plan.example)}.")
    return lines


def _about_the_order(target: str) -> list[str]:
    """What comes first among the recipes that fit. The rates behind the times are a card's."""
    if target == "cpu":
        return [
            "Fits, in the order of the times on a card. The order on a CPU may be another one: its",
            "times are not estimated.",
        ]
    return [
        (
            "Fits, fastest first. Times are estimates, from counted operations and bytes "
            "moved; of those within 10 %"
        ),
        "of each other, the recipe that changes training least comes first.",
    ]


def _terms_of(option: Option, plan: Plan) -> list[str]:
    """What the estimated time of ``option`` consists of."""
    if option.cost is None or plan.target == "cpu":
        return []
    terms = []
    for name, seconds in asdict(option.cost).items():
        if seconds:
            terms.append(f"{name.replace('_', ' ')} {1e6 * seconds:,.2f}")
    return [f"The time of the first one, in us/{plan.unit}: {', '.join(terms)}."]


def _about_the_margin(margin: float) -> list[str]:
    if not margin:
        return []
    return [
        f"Margin: {margin:.1%} of what a recipe needs stays free, since a prediction for a card "
        "may be off by as much."
    ]


def _about_the_network(network: float | None) -> list[str]:
    if network is None:
        return []
    return [f"Each machine is assumed to send {8 * network / 1e9:g} Gbit/s to the others."]


def plan_dict(plan: Plan) -> dict:
    """Plain values for JSON."""
    return {
        "model": plan.title,
        "card": asdict(plan.card),
        "cards": plan.cards,
        "machines": plan.machines,
        "network": plan.network,
        "seq_len": plan.seq_len,
        "global_batch": plan.global_batch,
        "method": plan.method,
        "target": plan.target,
        "margin": plan.margin,
        "fits": [_option_dict(o, plan.unit) for o in plan.fits],
        "refused": [_option_dict(o, plan.unit) | {"why": o.why_not()} for o in plan.refused],
        "ruled_out": [
            {"recipe": str(o), "needs_at_least": o.needs, "why": o.why} for o in plan.ruled_out
        ],
        "closest": _option_dict(plan.closest, plan.unit),
        "notes": plan.notes,
        "advice": plan.advice,
        "code": plan.code,
    }


def _option_dict(option: Option, unit: str) -> dict:
    peak = option.prediction.peak
    return {
        "method": method_of(option.recipe, option.has_adapters),
        "recipe": asdict(option.recipe),
        "micro_batch": option.micro_batch,
        "needs": option.needs,
        "spare": option.spare,
        "kept_free": option.kept_free,
        f"estimated_seconds_per_{unit}": option.seconds,
        "estimated_terms": None if option.cost is None else asdict(option.cost),
        "peak": {"total": peak.total, "phase": peak.phase, **peak.by_category},
        "beyond_the_peak": dict(option.parts),
        "moved": option.prediction.offload_traffic_bytes,
    }


def _table(options: list[Option], plan: Plan) -> list[str]:
    """The options, one a line; those of a CPU without times."""
    rows = [f"{'needs':>10} {'spare':>10}   recipe"]
    times = [f"{'us/' + plan.unit:>8} "]
    for o in options:
        spare = ("-" if o.spare < 0 else "") + format_bytes(abs(o.spare))
        rows.append(f"{format_bytes(o.needs):>10} {spare:>10}   {o}")
        times.append(f"{o.seconds * 1e6:8.2f} ")
    if plan.target == "cpu":
        times = [""] * len(rows)
    return [f"  {time}{row}" for time, row in zip(times, rows, strict=True)]


def _wrapped(text: str, bullet: str = "  ") -> str:
    return textwrap.fill(text, 110, initial_indent=bullet, subsequent_indent=" " * len(bullet))


TABLE = """
<table>
  <thead><tr>
    <th style='text-align:left'>bytes, predicted for {{ target }}</th>
    <th>at the peak ({{ peak.phase }})</th>
  </tr></thead>
  <tbody>
    {% for name, nbytes in peak.by_category.items() %}
      <tr><td style='text-align:left'>{{ name }}</td><td>{{ "{:,}".format(nbytes) }}</td></tr>
    {% endfor %}
    <tr><th style='text-align:left'>total</th><th>{{ "{:,}".format(peak.total) }}</th></tr>
    {% if moved %}
      <tr><td style='text-align:left'>moved</td><td>{{ "{:,}".format(moved) }}</td></tr>
    {% endif %}
  </tbody>
</table>
"""


def prediction_table(prediction: Prediction) -> str:
    """A table of a prediction's peak by category, for a notebook."""
    moved = prediction.offload_traffic_bytes
    return html_from(TABLE, target=prediction.target, peak=prediction.peak, moved=moved)
