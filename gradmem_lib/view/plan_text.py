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
from .template import html_from, text_from

TEXT = """\
{{ plan.title }} on {{ several }}{{ plan.card.name }} ({{ "{:,}".format(plan.card.nbytes) }} \
bytes{{ each }}), global batch {{ plan.global_batch }} {{ rows }}, method {{ plan.method }}, \
target {{ plan.target }}
{% if plan.margin %}
Margin: {{ "{:.1%}".format(plan.margin) }} of what a recipe needs stays free, since a prediction \
for a card may be off by as much.
{% endif %}
{% if plan.example is not none %}
A row: {{ row_text(plan.example) }}.
{% endif %}
{% for note in plan.notes %}
{{ wrapped(note, "") }}
{% endfor %}

{% if plan.fits and plan.target == "cpu" %}
Fits, in the order of the times on a card. The order on a CPU may be another one: its
times are not estimated. On some CPUs bf16 is many times slower than float32:
gradmem doctor says so.
{% elif plan.fits %}
Fits, fastest first. Times are estimates, from counted operations and bytes moved; of those \
within 10 %
of each other, the recipe that changes training least comes first.
{% else %}
Nothing fits. Closest:
{% endif %}
{% for line in table %}
{{ line }}
{% endfor %}
{% if not plan.fits %}

{{ wrapped("It " + plan.closest.why_not() + ".") }}
{% elif terms %}
The time of the first one, in us/{{ plan.unit }}: {{ terms }}.
{% endif %}
{% if plan.fits and plan.network is not none %}
Each machine is assumed to send {{ "{:g}".format(8 * plan.network / 1e9) }} Gbit/s to the others.
{% endif %}
{% if plan.fits and plan.cards > 1 %}
Start the code of the first one {{ launch(plan.cards, plan.machines) }}
{% endif %}
{% for line in plan.advice %}
{{ wrapped(line, "  * ") }}
{% endfor %}
{% if faster is not none %}

{{ which }} does not fit: {{ faster }}
{{ wrapped("It " + faster.why_not() + ".") }}
{% endif %}
{% if plan.ruled_out %}

Ruled out without a prediction:
{% for why, kinds in ruled_out.items() %}
{{ wrapped(kinds | join("; ") + ": " + why + ".", "  * ") }}
{% endfor %}
{% endif %}
"""


def plan_text(plan: Plan) -> str:
    several, each = (f"{plan.cards} x ", " each") if plan.cards > 1 else ("", "")
    if plan.machines > 1:
        several = f"{plan.machines} machines of {several}"
    faster = plan.next_faster
    which = "A faster one of another kind"
    if faster is not None and plan.is_of_the_best_ones_kind(faster):
        which = "The next faster one of the same kind"
    ruled_out: dict[str, list[str]] = {}
    for out in plan.ruled_out:
        ruled_out.setdefault(out.why, []).append(str(out))
    text = text_from(
        TEXT,
        plan=plan,
        several=several,
        each=each,
        rows="rows" if plan.seq_len is None else f"x {plan.seq_len:,} tokens",
        table=_table(plan.fits or [plan.closest], plan),
        terms=_terms_of(plan),
        faster=faster,
        which=which,
        ruled_out=ruled_out,
        row_text=row_text,
        launch=launch,
        wrapped=_wrapped,
    )
    return text.removesuffix("\n")


def _terms_of(plan: Plan) -> str:
    """What the estimated time of the first recipe consists of."""
    if not plan.fits or plan.fits[0].cost is None or plan.target == "cpu":
        return ""
    terms = []
    for name, seconds in asdict(plan.fits[0].cost).items():
        if seconds:
            terms.append(f"{name.replace('_', ' ')} {1e6 * seconds:,.2f}")
    return ", ".join(terms)


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
