"""Strings that would be more than strings if anybody let them."""

from __future__ import annotations

HOSTILE = [
    "<script>alert(1)</script>", "</style><script>alert(1)</script>", "\"><img src=x onerror=alert(1)>", "' onload='x",
    "javascript:alert(1)", "{{ 7 * 7 }}", "{% for x in y %}", "]]>", "<!--", "-->", "&lt;script&gt;", "\x00\x08\x1b[31m",
    "\ud800", "\u202egnp.exe", "﷽" * 40, "真批次<b>", "a" * 3000, "\n\n", "<svg onload=alert(1)>", "</td></table><h1>x",
    "<iframe src=//evil>", "<base href=//evil>", "<meta http-equiv=refresh content=0>", "<a href='data:text/html,x'>",
    "%3Cscript%3E",
]  # fmt: skip
MIDDLES = ("img src=//x", "object", "/title", "form", "x y=")
HOSTILE += [f"{a}{b}{c}" for a in ("<", "&", '"') for b in MIDDLES for c in (">", ";", "'", "\\", "/>")]
