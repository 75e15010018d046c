"""Progress goes to a terminal as bars, to a log as few plain lines, and nowhere when a script listens."""

import io
import re

from rich.console import Console

from cadenza.core.progress import LineProgress, Progress, TerminalProgress, clock, make_progress


def test_a_bar_that_is_set_never_tells_the_time_left_or_prints_every_digit():
    stream = io.StringIO()
    with LineProgress(stream, interval_s=0.0).bar("rl, per cent", 100) as bar:
        bar.set(40.0)
        bar.set(100 * 2 / 3)
    first, second = stream.getvalue().splitlines()
    assert "left" not in first, "what an earlier process did says nothing of the pace"
    assert second.startswith("rl, per cent: 66.7/100, ") and " left" in second


def test_a_log_gets_plain_lines_without_control_characters():
    stream = io.StringIO()
    progress = LineProgress(stream, interval_s=0.0)
    progress.line("sft: started")
    with progress.bar("sft", total=4) as bar:
        bar.set(2)
        bar.advance(loss=1.23456)
    text = stream.getvalue()
    time = r"\d+:\d\d"
    lines = rf"sft: started\nsft: 2/4, {time}\nsft: 3/4, {time}, {time} left  loss=1\.235\n"
    assert re.fullmatch(lines, text)
    assert "\x1b" not in text


def test_a_log_is_not_flooded():
    stream = io.StringIO()
    with LineProgress(stream, interval_s=60).bar("rl", total=1000) as bar:
        for _ in range(1000):
            bar.advance()
    assert stream.getvalue() == ""


def test_a_bar_inside_a_bar_shares_the_terminal():
    stream = io.StringIO()
    progress = TerminalProgress(Console(file=stream, force_terminal=True, width=100))
    with progress.bar("outer", total=2) as outer, progress.bar("inner") as inner:
        inner.advance(loss=0.5)
        outer.advance()
        progress.line("[not markup]")
    with progress.bar("again", total=1) as bar:
        bar.set(1)
    assert "outer" in stream.getvalue() and "[not markup]" in stream.getvalue()


def test_quiet_prints_nothing_and_a_pipe_is_no_terminal(capsys):
    assert type(make_progress(quiet=True)) is Progress
    with make_progress(quiet=True).bar("x") as bar:
        bar.advance()
        bar.set(3)
    assert isinstance(make_progress(stream=io.StringIO()), LineProgress)
    assert capsys.readouterr() == ("", "")


def test_clock_reads_as_people_write_it():
    assert [clock(s) for s in (0, 61, 3725.9)] == ["0:00", "1:01", "1:02:05"]
