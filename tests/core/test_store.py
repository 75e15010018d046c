"""Objects come back as they were stored, locally and in a remote kind of store, and never half written."""

import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.core.errors import ConfigError, CorruptArtifact, MissingArtifact, ResourceExhausted
from cadenza.core.store import ObjectStore


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    return ObjectStore(tmp_path if request.param == "local" else f"memory://{tmp_path.name}")


def test_an_object_comes_back_by_key_and_digest(store):
    digest = store.put("weights/1/delta.bin", b"abc")
    assert store.get("weights/1/delta.bin", digest) == b"abc"
    assert store.exists("weights/1/delta.bin")
    assert store.keys("weights/") == ["weights/1/delta.bin"]
    store.delete("weights/1/delta.bin")
    store.delete("weights/1/delta.bin")
    assert not store.exists("weights/1/delta.bin")
    assert store.keys() == []


def test_another_content_than_was_stored_is_refused(store):
    digest = store.put("a", b"abc")
    store.put("a", b"abd")
    with pytest.raises(CorruptArtifact, match=r"object a in .* is not what was stored"):
        store.get("a", digest)


def test_a_missing_object_is_named(store):
    with pytest.raises(MissingArtifact, match="no object b/c"):
        store.get("b/c")


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../up", "a/../../b", "a/.hidden"])
def test_a_key_never_leaves_the_store(store, key):
    with pytest.raises(ValueError, match="not an object key"):
        store.put(key, b"")


def test_an_unknown_kind_of_store_is_refused_in_one_line():
    with pytest.raises(ConfigError, match="cannot use object store nosuch://x"):
        ObjectStore("nosuch://x")


def test_a_full_disk_leaves_the_old_object(tmp_path):
    store = ObjectStore(tmp_path)
    digest = store.put("a", b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(ResourceExhausted):
            store.put("a", b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.get("a", digest) == b"old"
    assert store.keys() == ["a"]


@given(st.binary(max_size=200))
def test_any_bytes_survive(tmp_path_factory, data):
    store = ObjectStore(tmp_path_factory.getbasetemp() / "store")
    assert store.get("x", store.put("x", data)) == data
