"""Each rule for clients in proto/README.md names its scripts, and each script has a rule."""

import re

from .test_conformance import CLIENTS, SCRIPTS

PAGE = CLIENTS.parent / "proto/README.md"
_RULE = re.compile(r"^(\d+)\. (.*(?:\n {3,}\S.*)*)", re.MULTILINE)
_SCRIPT = re.compile(r"\[(\w+)\]\(\.\./clients/conformance/(\w+)\.json\)")


def faults(page: str, scripts: set[str]) -> list[str]:
    """List the mistakes in the numbered rules of a page."""
    rules = [(int(match[1]), _SCRIPT.findall(match[2])) for match in _RULE.finditer(page)]
    found = [] if [n for n, _ in rules] == list(range(1, len(rules) + 1)) else ["rules miscounted"]
    named = set()
    for number, links in rules:
        if not links:
            found.append(f"rule {number} names no script")
        found += [f"rule {number}: {text} links to {name}" for text, name in links if text != name]
        named |= {name for _, name in links}
    found += [f"no such script: {name}" for name in sorted(named - scripts)]
    return found + [f"no rule names {name}" for name in sorted(scripts - named)]


def test_each_rule_has_its_script_and_each_script_its_rule() -> None:
    page = PAGE.read_text()
    assert len(_RULE.findall(page)) >= 20
    assert not faults(page, {path.stem for path in SCRIPTS})


def test_a_wrong_page_is_found() -> None:
    base = "../clients/conformance"
    page = (
        f"1. Ask. [one]({base}/one.json)\n2. Wait\n   long.\n"
        f"4. Go. [two]({base}/gone.json)\n\n[three]({base}/three.json)\n"
    )
    assert faults(page, {"one", "three"}) == [
        "rules miscounted",
        "rule 2 names no script",
        "rule 4: two links to gone",
        "no such script: gone",
        "no rule names three",
    ]
