"""Pairs of a measured and a predicted size, one bar inside the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .style import COLORS
from .template import html_from

PAGE = """
<table style='white-space:nowrap'>
  <caption>{{ title }}</caption>
  <thead><tr>
    <th style='text-align:left'>in GB (10⁹ bytes)</th>
    <th scope='col'><span style='color:{{ colors.other }}'>■</span> measured</th>
    <th scope='col'><span style='color:{{ colors.parameters }}'>■</span> predicted</th>
    <th scope='col'>off</th>
    <td style='width:300px'></td>
  </tr></thead>
  {% for heading, pairs in groups.items() %}
    <tbody>
      <tr><th scope='rowgroup' colspan='5' style='text-align:left'>{{ heading }}</th></tr>
      {% for name, measured, predicted in pairs %}
        <tr>
          <td style='text-align:left'>{{ name }}</td>
          <td>{{ "%.2f" | format(measured / 1e9) }}</td>
          <td>{{ "%.2f" | format(predicted / 1e9) }}</td>
          <td>{{ off_by(measured, predicted) }}</td>
          <td>
            {% set outer = "height:12px;background:" + colors.other %}
            {% set inner = "height:6px;margin-top:-9px;background:" + colors.parameters %}
            <div style='width:{{ 100 * measured / most }}%;{{ outer }}'></div>
            <div style='width:{{ 100 * predicted / most }}%;{{ inner }}'></div>
          </td>
        </tr>
      {% endfor %}
    </tbody>
  {% endfor %}
</table>
"""


def off_by(measured: int, predicted: int) -> str:
    """The error of the predicted size: "+2.3%", "0.0%"."""
    words = f"{predicted / measured - 1:+.1%}"
    return "0.0%" if words[1:] == "0.0%" else words


def pairs_table(groups: Mapping[str, Sequence[tuple[str, int, int]]], title: str) -> str:
    """HTML that has, under each heading, its pairs (name, measured bytes, predicted bytes), with
    the error of the prediction.
    """
    most = max(max(sizes) for pairs in groups.values() for _, *sizes in pairs)
    return html_from(PAGE, groups=groups, title=title, most=most, off_by=off_by, colors=COLORS)
