"""The doctor names a mend for everything that is missing, and never falls ill itself."""

from pathlib import Path

import pytest

from cadenza.pipelines import doctor


def test_a_healthy_line_has_no_mend_and_a_failing_one_has(tmp_path):
    for check in doctor.examine(tmp_path):
        assert check.state in ("ok", "warn", "fail")
        assert check.found
        assert (check.state == "ok") == (check.mend == ""), check


@pytest.mark.parametrize("package", ["torch", "numba", "ray"])
def test_a_missing_package_names_the_extra(monkeypatch, package):
    monkeypatch.setattr("cadenza.core.machine.installed", lambda name: None)
    check = {"torch": doctor._torch, "numba": doctor._numba, "ray": doctor._ray}[package]()
    assert (check.state, check.found) == ("fail", "not installed") and "[train]" in check.mend


def test_a_broken_torch_is_told_by_its_own_last_line(monkeypatch):
    monkeypatch.setattr("cadenza.core.machine.installed", lambda name: "9.9")
    monkeypatch.setattr(doctor, "TORCH_PROBE", "raise ImportError('libgomp.so.1: cannot open')")
    check = doctor._torch()
    assert check.state == "fail" and "libgomp.so.1" in check.found


def test_a_numba_that_cannot_compile_is_told_by_its_own_last_line(monkeypatch):
    monkeypatch.setattr("cadenza.core.machine.installed", lambda name: "9.9")
    monkeypatch.setattr(doctor, "NUMBA_PROBE", "raise ImportError('Numba needs NumPy 2.4 or less')")
    check = doctor._numba()
    assert check.state == "fail" and "Numba needs NumPy" in check.found
    assert "--force-reinstall numba" in check.mend


def test_too_little_memory_and_disk_fail(monkeypatch, tmp_path):
    monkeypatch.setattr("cadenza.core.machine.available_memory_bytes", lambda: 10**9)
    monkeypatch.setattr("cadenza.core.machine.free_disk_bytes", lambda path: 10**8)
    assert doctor._memory().state == "fail"
    assert doctor._disk(tmp_path / "runs").state == "fail"


def test_the_disk_check_makes_no_folder(tmp_path):
    doctor._disk(Path(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []
