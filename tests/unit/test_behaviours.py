"""docs/behaviours.md names tests: each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "behaviours.md").read_text(encoding="utf-8")


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(\w+/test_\w+\.py)::(\w+)`", PAGE))
    assert len(named) > 80
    assert len(re.findall("::", PAGE)) == len(re.findall(r"`\w+/test_\w+\.py::test_\w+`", PAGE)), "misspelt"
    missing = [
        f"{file}::{name}"
        for file, name in sorted(named)
        if not (path := ROOT / "tests" / file).is_file() or not re.search(rf"^def {name}\(", path.read_text(), re.M)
    ]
    assert not missing


def test_every_behaviour_has_an_answer() -> None:
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("|")]
    answers = [row for row in rows if row[0].strip() not in ("behaviour", "---")]
    assert len(answers) == 230  # the peer's tests at that tag
    assert all(len(row) == 2 and row[1].strip() and "TODO" not in row[1] for row in answers)
