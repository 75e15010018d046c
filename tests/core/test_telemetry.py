"""Metrics survive kill -9: whole lines before the torn one are read, and the next process starts a new line."""

import os
import threading

import numpy as np
import pytest

from cadenza.core.errors import CorruptArtifact
from cadenza.core.telemetry import Telemetry, read_lines


def test_a_torn_last_line_is_passed_over_and_closed_off_by_the_next_process(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Telemetry(path) as telemetry:
        telemetry.log("step", loss=1.0)
    with path.open("ab") as file:
        file.write(b'{"t": 1, "kind": "step", "lo')
    assert [r["loss"] for r in read_lines(path)] == [1.0]
    with Telemetry(path, stage="rl") as telemetry:
        telemetry.log("step", loss=0.5)
    records = list(read_lines(path, "step"))
    assert [r["loss"] for r in records] == [1.0, 0.5]
    assert records[1]["stage"] == "rl"


def test_lines_of_many_threads_and_two_writers_do_not_mix(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Telemetry(path) as one, Telemetry(path) as two:
        threads = [
            threading.Thread(
                target=lambda w=writer, n=number: [w.log("x", n=n, text="é" * 50) for _ in range(100)]
            )
            for number, writer in enumerate((one, two, one, two))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(r["n"] for r in read_lines(path)) == [n for n in range(4) for _ in range(100)]


def test_what_is_not_a_number_is_written_as_null_and_arrays_as_lists(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Telemetry(path) as telemetry:
        telemetry.log(
            "x", bad=float("nan"), list=[np.float32(np.inf), 1], array=np.arange(2), nested={"a": np.int64(3)}
        )
    (record,) = read_lines(path)
    assert (record["bad"], record["list"], record["array"], record["nested"]) == (
        None,
        [None, 1],
        [0, 1],
        {"a": 3},
    )


def test_a_line_that_never_was_a_record_is_told(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "x"}\nhello\n')
    with pytest.raises(CorruptArtifact, match=r"line 2 of .*metrics\.jsonl"):
        list(read_lines(path))


def test_a_missing_file_has_no_lines(tmp_path):
    assert list(read_lines(tmp_path / "none.jsonl")) == []


def test_closing_twice_keeps_the_descriptor_of_somebody_else_open(tmp_path):
    telemetry = Telemetry(tmp_path / "a.jsonl")
    telemetry.close()
    other = os.open(tmp_path / "b", os.O_CREAT | os.O_RDWR)
    telemetry.close()
    os.fstat(other)
    os.close(other)
