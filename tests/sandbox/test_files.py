"""Files: no path, link or race takes the host's hand out of /work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.sandbox import PathRefused
from cadenza.sandbox.guest import files

needs_namespaces = pytest.mark.needs_namespaces


@needs_namespaces
def test_written_file_reads_back_byte_for_byte(sandbox, run):
    data = bytes(range(256)) * 5000
    run(sandbox.write("new/deep/file.bin", data))
    assert run(sandbox.read("new/deep/file.bin")) == data
    run(sandbox.write("new/deep/file.bin", b"short"))
    assert run(sandbox.read("/work/new/deep/file.bin")) == b"short"


@needs_namespaces
def test_layer_on_the_host_is_never_written(sandbox, run, repo):
    run(sandbox.write("shop.py", b"changed"))
    run(sandbox.exec(["sh", "-c", "rm -rf pkg; echo x > link; mkdir pkg"]))
    assert (repo / "shop.py").read_text().startswith("def total")
    assert (repo / "pkg" / "one.py").exists()


@needs_namespaces
@pytest.mark.parametrize("path", ["/etc/passwd", "../etc/passwd", "pkg/../../etc/passwd", "a\0b"])
def test_path_outside_work_is_refused(sandbox, run, path):
    for call in (sandbox.read(path), sandbox.write(path, b""), sandbox.list(path), sandbox.remove(path)):
        with pytest.raises(PathRefused):
            run(call)


@needs_namespaces
def test_link_out_of_work_is_refused_in_every_operation(sandbox, run):
    run(sandbox.exec(["sh", "-c", "ln -s /etc l; ln -s ../../etc r; ln -s /proc/1/root p; ln -s /tmp t"]))
    for call in (
        sandbox.read("l/hostname"),
        sandbox.read("l/passwd"),
        sandbox.read("r/passwd"),
        sandbox.list("l"),
        sandbox.list("p"),
        sandbox.write("t/planted", b"x"),
        sandbox.remove("t/x"),
    ):
        with pytest.raises(PathRefused):
            run(call)


@needs_namespaces
def test_dangling_link_is_not_written_through(sandbox, run):
    run(
        sandbox.exec(["sh", "-c", "ln -s /tmp/nowhere out; ln -s nowhere in; ln -s loop loop; ln -s nodir d"])
    )
    for path in ("out", "in", "loop", "d/file"):
        with pytest.raises(PathRefused):
            run(sandbox.write(path, b"x"))
    assert run(sandbox.exec(["ls", "/tmp/nowhere", "nowhere"])).rc != 0


@needs_namespaces
def test_link_that_stays_below_work_is_followed(sandbox, run):
    run(sandbox.exec(["sh", "-c", "ln -s /work/pkg/one.py absolute"]))
    assert run(sandbox.read("link")).startswith(b"def total")
    assert run(sandbox.read("absolute")) == b"ONE = 1\n"


@needs_namespaces
def test_special_file_does_not_block_the_agent(sandbox, run):
    run(sandbox.exec(["mkfifo", "fifo"]))
    with pytest.raises(PathRefused):
        run(sandbox.read("fifo"))
    with pytest.raises((PathRefused, OSError)):
        run(sandbox.write("fifo", b"x"))
    with pytest.raises(IsADirectoryError):
        run(sandbox.read("pkg"))


@needs_namespaces
def test_missing_file_is_the_usual_error(sandbox, run):
    for call in (sandbox.read("nope"), sandbox.remove("nope"), sandbox.list("nope")):
        with pytest.raises(FileNotFoundError):
            run(call)


@needs_namespaces
def test_listing_is_recursive_sorted_and_does_not_follow_links(sandbox, run):
    run(sandbox.exec(["sh", "-c", "ln -s / everything"]))
    names = [
        "everything",
        "link",
        "pkg/__init__.py",
        "pkg/deep/two.py",
        "pkg/one.py",
        "shop.py",
        "test_shop.py",
    ]
    assert run(sandbox.list()) == names
    assert run(sandbox.list("pkg")) == [name for name in names if name.startswith("pkg/")]


@needs_namespaces
def test_remove_takes_the_link_and_not_its_target(sandbox, run):
    run(sandbox.remove("link"))
    run(sandbox.remove("pkg"))
    assert run(sandbox.list()) == ["shop.py", "test_shop.py"]
    with pytest.raises(PathRefused):
        run(sandbox.remove("."))


@given(st.text(alphabet="ab./\0", max_size=12))
def test_no_text_of_dots_and_slashes_names_a_place_outside(path):
    try:
        name = files.relative(path)
    except files.Refused:
        return
    assert not name.startswith(("/", "../")) and name != ".." and "/../" not in name
