"""The status line: rewritten in place where somebody watches, never left half shown, and a plain line in a file."""

from __future__ import annotations

import io
import sys

import pytest
from ipykernel.iostream import OutStream

from explorer.status import StatusLine


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)


@pytest.mark.usefixtures("terminal")
def test_stages_overwrite_each_other_and_the_last_word_stays(capsys: pytest.CaptureFixture[str]) -> None:
    with StatusLine("model") as line:
        line("a long first stage")
        line("short")
        line.bar(0.5, "half")
        line.say("ready")
        assert line.seconds >= 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and out.endswith("\n")
    shown = out[:-1].split("\r")[1:]
    assert [text.rstrip() for text in shown] == [
        "model: a long first stage ...",
        "model: short ...",
        "model: [##########..........]  50% half",
        "ready",
    ]
    assert len(shown[1]) == len(shown[0].rstrip())  # nothing of a longer stage shows behind a shorter one


@pytest.mark.usefixtures("terminal")
def test_counting_ends_with_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    with StatusLine("collect") as line:
        line.count(3, None)
        line.count(4, 9)
    assert capsys.readouterr().out == "\rcollect: 3\rcollect: 4 of 9\n"


@pytest.mark.usefixtures("terminal")
def test_an_error_clears_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), StatusLine("boot") as line:
        line("stage")
        _ = 1 / 0
    assert capsys.readouterr().out == "\rboot: stage ...\r" + " " * 15 + "\r"


def test_a_file_gets_the_lines_that_stay(capsys: pytest.CaptureFixture[str]) -> None:
    with StatusLine("model") as line:
        line("loading")
        line.bar(0.5, "half")
        line.say("a remark")
        line("first pass")
        line.say("ready")
    with StatusLine("collect") as line:
        line.count(3, 9)
        line.count(9, 9)
    with pytest.raises(ZeroDivisionError), StatusLine("boot") as line:
        line("stage")
        _ = 1 / 0
    assert capsys.readouterr().out == "a remark\nready\ncollect: 9 of 9\n"


def test_a_notebook_is_rewritten_though_it_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cell(io.StringIO):
        __module__ = OutStream.__module__

    cell = Cell()
    monkeypatch.setattr(sys, "stdout", cell)
    with StatusLine("model") as line:
        line("loading")
        line.say("ready")
    assert cell.getvalue().split("\r") == ["", "model: loading ...", "ready".ljust(18) + "\n"]
