"""A file is whole or not there, and a full disk is one typed failure that loses nothing."""

import resource
import subprocess
import sys

import pytest

from cadenza.core.errors import ConfigError, CorruptArtifact, MissingArtifact, ResourceExhausted
from cadenza.core.files import (
    copy_file,
    is_disk_full,
    read_json,
    require_folder,
    require_writable,
    unusable_path,
    write_bytes,
    write_json,
)


def test_a_written_file_is_whole_and_leaves_no_temporary(tmp_path):
    write_json(tmp_path / "a.json", {"é": [1]})
    assert read_json(tmp_path / "a.json") == {"é": [1]}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_write_keeps_the_old_file_and_no_temporary(tmp_path):
    path = tmp_path / "a.bin"
    write_bytes(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(ResourceExhausted, match=r"no space left to write .*a\.bin; free disk space"):
            write_bytes(path, b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]


@pytest.mark.needs_root
def test_a_full_file_system_is_told_apart_from_other_errors(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)], check=True)
    try:
        with pytest.raises(ResourceExhausted):
            write_bytes(tmp_path / "a", b"x" * 200_000)
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    with pytest.raises(FileNotFoundError):
        write_bytes(tmp_path / "no" / "such", b"x")


def test_a_full_disk_is_recognized_where_a_library_lost_the_error_number():
    inner = RuntimeError("I/O error: No space left on device (os error 28)")
    outer = ValueError("could not save")
    outer.__cause__ = inner
    assert is_disk_full(outer)
    assert not is_disk_full(ValueError("no space in this argument"))


def test_json_that_is_cut_short_names_the_file(tmp_path):
    (tmp_path / "a.json").write_text('{"a": ')
    with pytest.raises(CorruptArtifact, match=r"a\.json is not JSON"):
        read_json(tmp_path / "a.json")


def test_a_place_that_cannot_be_written_is_found_when_the_work_is_done(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write .*choose another"):
        require_writable(tmp_path / "file" / "x.json", "choose another")
    require_writable(tmp_path / "new" / "x.json", "choose another")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_in_the_way_of_a_file_is_told_as_a_hidden_temporary_file(tmp_path):
    (tmp_path / "recipe.toml").mkdir()
    with pytest.raises(IsADirectoryError) as failure:
        write_bytes(tmp_path / "recipe.toml", b"new")
    told = unusable_path(failure.value)
    assert told is not None and told.cause == f"cannot use {tmp_path}/recipe.toml: Is a directory"


def test_a_copy_vanishes_into_a_folder_of_its_name(tmp_path):
    (tmp_path / "a").write_bytes(b"new")
    (tmp_path / "report.html").mkdir()
    with pytest.raises(ConfigError, match=r"report\.html is a folder where a file belongs; move it away"):
        copy_file(tmp_path / "a", tmp_path / "report.html")
    assert list((tmp_path / "report.html").iterdir()) == []
    copy_file(tmp_path / "a", tmp_path / "new" / "a")
    assert (tmp_path / "new" / "a").read_bytes() == b"new"


def test_a_missing_folder_is_named_with_what_it_should_have_been(tmp_path):
    with pytest.raises(MissingArtifact, match=r"no model directory at .*nix; train one"):
        require_folder(tmp_path / "nix", "model directory", "train one")
    assert require_folder(tmp_path, "model directory", "") == tmp_path


def test_the_package_imports_without_torch(command_environment):
    code = (
        "import sys, cadenza.core.files, cadenza.core.telemetry, cadenza.core.rundb, cadenza.core.store, "
        "cadenza.core.progress, cadenza.core.machine, cadenza.core.deadlines; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'ray')))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=command_environment, check=False).returncode == 0
