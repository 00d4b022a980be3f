"""One table that leads from the parts of a peak to the next technique, made from the rules of
``diagnose``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..measure.diagnosis import TECHNIQUES, Diagnosis
from ..names import PHASES
from ..units import format_bytes, parse_bytes
from .diagnosis import diagnose
from .style import COLORS
from .template import html_from

PARTS = ("activations", "temporaries", "gradients", "optimizer", "parameters")
# (words, one of its phases, its parts) of each group of columns
GROUPS = (
    ("peak in forward or backward", "backward", PARTS),
    ("in the optimizer's step", "optimizer_step", PARTS[1:]),
)
OF_PART = {"layers": ", of the layers", "outside": ""}
PAGE = """
<table aria-label='{{ title }}' style='white-space:nowrap'>
  <thead>
    <tr>
      <td></td>
      {% for group, phase, parts in groups %}
        {% set look = "text-align:left;padding-left:1em" %}
        <th scope='colgroup' colspan='{{ parts | length }}' style='{{ look }}'>{{ group }}</th>
      {% endfor %}
    </tr>
    <tr>
      <td></td>
      {% for group, phase, parts in groups %}
        {% for part in parts %}
          {% set opacity = 1 if phase in now else 0.6 %}
          <th scope='col' style='writing-mode:vertical-rl;opacity:{{ opacity }}'>
            {{ part }}{% if found and phase in now %}{{ " " }}{{ shown(peak[part]) }}{% endif %}
          </th>
        {% endfor %}
      {% endfor %}
      <th scope='col' style='text-align:left;vertical-align:bottom'>its price</th>
      {% if found %}<th scope='col' style='vertical-align:bottom'>at best</th>{% endif %}
    </tr>
  </thead>
  <tbody>
    {% for technique in techniques %}
      <tr>
        <th scope='row' style='text-align:left;white-space:normal'>
          {{ technique.name }}{{ of_part.get(technique.part, "") }}
        </th>
        {% for group, phase, parts in groups %}
          {% for part in parts %}
            <td style='text-align:center'>
              {% if phase in technique.shrinks.get(part, ()) %}
                {% set look = "color:" + colors[part] + ";opacity:" %}
                <span style='{{ look }}{{ 1 if phase in now else 0.3 }}' title='{{ part }}'>⬤</span>
              {% endif %}
            </td>
          {% endfor %}
        {% endfor %}
        <td style='text-align:left;white-space:normal;min-width:11em'>{{ technique.price }}</td>
        {% if found %}
          {% set lowest = found.lowest[technique.name] %}
          <td>{{ shown(lowest) }}{% if lowest <= capacity %}{{ " " }}<b>✓</b>{% endif %}</td>
        {% endif %}
      </tr>
    {% endfor %}
  </tbody>
</table>
"""


@dataclass(frozen=True)
class Decisions:
    """The table; a notebook shows it. ``found``: of a run, if there is one; ``capacity``: the bytes
    that a peak may reach.
    """

    found: Diagnosis | None
    capacity: int

    def __repr__(self) -> str:
        return "Decisions"  # the same in every run, since notebook tests compare it

    def _repr_html_(self) -> str:
        now, peak = PHASES, {}
        if self.found is not None:
            peak = self.found.peak.by_category
            is_step = self.found.peak.phase == "optimizer_step"
            now = ("optimizer_step",) if is_step else ("backward",)
        return html_from(
            PAGE,
            title="Which technique can shrink which part of a peak, and its price",
            found=self.found,
            capacity=self.capacity,
            now=now,
            peak=peak,
            groups=GROUPS,
            techniques=TECHNIQUES,
            of_part=OF_PART,
            colors=COLORS,
            shown=format_bytes,
        )


def show_decisions(run: Any = None, card: int | str | None = None) -> Decisions:
    """A row for each technique: the parts of a peak that it can shrink, in each phase, and its
    price.

    With ``run`` (as for ``diagnose``), each row also has the lowest peak that the technique can
    reach, and a mark if that fits ``card`` bytes.
    """
    found = None if run is None else diagnose(run)
    return Decisions(found, -1 if card is None else parse_bytes(card))
