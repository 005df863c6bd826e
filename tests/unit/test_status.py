"""The status line: rewritten in place, and never left half shown."""

from __future__ import annotations

import pytest

from explorer.status import StatusLine


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


def test_counting_ends_with_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    with StatusLine("collect") as line:
        line.count(3, None)
        line.count(4, 9)
    assert capsys.readouterr().out == "\rcollect: 3\rcollect: 4 of 9\n"


def test_an_error_clears_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), StatusLine("boot") as line:
        line("stage")
        _ = 1 / 0
    assert capsys.readouterr().out == "\rboot: stage ...\r" + " " * 15 + "\r"
