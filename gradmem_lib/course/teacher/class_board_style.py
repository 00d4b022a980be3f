"""The style of a class's board."""

from __future__ import annotations

from ...view.style import ALARM, COLORS

INK = "#1d2330"
MUTED = "#5b6473"
PAPER = "#ffffff"  # a page of its own is light everywhere
STYLE = f"""
:root {{ color-scheme: light; --jp-layout-color0: {PAPER}; }}
body {{ margin: 0 auto; padding: 1rem; max-width: 1240px; color: {INK}; background: {PAPER};
  font: 16px/1.45 system-ui, sans-serif; }}
h1 {{ font-size: 1.5rem; margin: 0; }}
h2 {{ font-size: 1.15rem; margin: 1.8rem 0 .4rem; }}
h3 {{ font-size: 1rem; margin: 0; }}
p {{ margin: .3rem 0; max-width: 75ch; overflow-wrap: anywhere; }}
.note {{ color: {MUTED}; font-size: .875rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }}
th, td {{ padding: .2rem .5rem; text-align: left; }}
thead th {{ border-bottom: 2px solid {INK}; vertical-align: bottom; }}
tbody tr {{ border-bottom: 1px solid #dde2ea; }} .n {{ text-align: center; white-space: nowrap; }}
tbody th {{ font-weight: 400; min-width: 6rem; max-width: 18rem; overflow-wrap: break-word; }}
th.who {{ position: sticky; left: 0; background: {PAPER}; max-width: 11rem; }}
thead .n {{ white-space: normal; max-width: 6rem; vertical-align: bottom; }}
.two {{ display: flex; flex-wrap: wrap; gap: 0 3rem; }}
section {{ max-width: 100%; flex: 0 1 auto; }} section p {{ max-width: 34rem; }}
.here {{ outline: 2px solid {ALARM}; outline-offset: -2px; font-weight: 700; }}
.cards {{ display: grid; gap: 1.4rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)); }}
a {{ color: {COLORS["parameters"]}; }}
.large {{ font-size: 1.4rem; }}
.large h3, .large .note {{ font-size: inherit; }}
.large svg {{ max-width: 100% !important; }}
"""
