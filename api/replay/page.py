"""The page of a replay: one HTML file without scripts, which loads nothing."""

from __future__ import annotations

import base64
import hashlib
from html import escape

from .outcome import Outcome, Played, Side
from .report import call_text, facts, summary, title

STYLE = """
:root {
  color-scheme: light dark;
  --bg: light-dark(#fdfdfc, #121315); --pane: light-dark(#f5f5f3, #18191c);
  --line: light-dark(#e0e0dc, #2d2f34); --dim: light-dark(#55585d, #b0b3b9);
  --ink: light-dark(#17181a, #eeeeec); --good: light-dark(#0c7a4d, #3fcf8e);
  --bad: light-dark(#b3261e, #ff9a92); --bad-soft: light-dark(#fbd9d6, #5a2622);
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem; max-width: 76rem; background: var(--bg); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif;
}
h1 { font-size: 1.4rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 0; }
p, ul { margin: .3rem 0; color: var(--dim); }
ul { padding-left: 1.2rem; }
section {
  border: 1px solid var(--line); border-radius: .6rem; margin: .8rem 0; padding: .7rem 1rem;
}
section.equal, section.same { border-left: 4px solid var(--good); }
section.changed, section.parted, section.new { border-left: 4px solid var(--bad); }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: .8rem; margin-top: .6rem; }
@media (max-width: 44rem) { .sides { grid-template-columns: 1fr; } }
h3 { font-size: .85rem; margin: 0 0 .2rem; color: var(--dim); font-weight: 600; }
pre {
  margin: 0; padding: .6rem .7rem; background: var(--pane); border-radius: .4rem; font-size: .86rem;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
pre .rest { color: var(--dim); }
mark { background: var(--bad-soft); color: var(--bad); border-radius: .2rem; font-weight: 700; }
details > summary { cursor: pointer; color: var(--dim); }
"""


def page(outcome: Outcome) -> str:
    """Return the page. All texts of the conversation are escaped."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'"
    heading = f"Session {escape(outcome.session)}"
    changes = "".join(f"<li>{escape(each)}</li>" for each in outcome.changes)
    lines = "".join(f"<li>{escape(each)}</li>" for each in summary(outcome))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{heading}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{heading}</h1>\n<p>Replayed with {escape(outcome.model)}</p>\n"
        + (f"<h2>Changed</h2>\n<ul>{changes}</ul>\n" if changes else "")
        + f"<h2>Result</h2>\n<ul>{lines}</ul>\n"
        + "".join(map(_turn, outcome.turns))
        + "</body>\n</html>\n"
    )


def _turn(turn: Played) -> str:
    texts = [*turn.notes, *map(call_text, turn.calls)]
    notes = "".join(f"<li>{escape(each)}</li>" for each in texts)
    listed = f"<ul>{notes}</ul>" if notes else ""
    heading = f"<h2>{escape(title(turn))}</h2>\n<p>{escape(facts(turn))}</p>"
    if turn.recorded is None or turn.position is None:
        answer = f"<pre>{_text(turn.now)}</pre>" if turn.now.text else ""
        body = f"<details><summary>the answer</summary>{answer}</details>" if answer else ""
    else:
        body = (
            f'<div class="sides"><div><h3>recorded</h3><pre>{_text(turn.recorded)}</pre></div>'
            f"<div><h3>now</h3><pre>{_text(turn.now)}</pre></div></div>"
        )
    return f'<section class="{turn.kind}">\n{heading}{listed}{body}\n</section>\n'


def _text(side: Side) -> str:
    marked = f"<mark>{escape(side.token)}</mark>" if side.token else ""
    rest = f'<span class="rest">{escape(side.rest)}</span>' if side.rest else ""
    return escape(side.same) + marked + rest + (" ..." if side.is_cut else "")
