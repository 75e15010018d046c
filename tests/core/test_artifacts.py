"""An artifact appears whole, and a change of one byte in it is found."""

import pytest

from cadenza.core.artifacts import MANIFEST, discard, publish, read_manifest, verify, verify_if_artifact
from cadenza.core.errors import CorruptArtifact, MissingArtifact
from cadenza.core.files import read_json, write_json


@pytest.fixture
def artifact(tmp_path):
    partial = tmp_path / "sft.partial"
    (partial / "deep").mkdir(parents=True)
    (partial / "weights.bin").write_bytes(b"\x00" * 100)
    (partial / "deep" / "note.txt").write_text("hello")
    manifest = publish(partial, tmp_path / "sft", {"figures": {"loss": 1.5}})
    assert not partial.exists()
    return tmp_path / "sft", manifest


def test_a_published_artifact_verifies_and_keeps_what_its_maker_recorded(artifact):
    folder, manifest = artifact
    assert verify(folder) == manifest
    assert manifest.about == {"figures": {"loss": 1.5}}
    assert sorted(manifest.files) == ["deep/note.txt", "weights.bin"]


def test_the_digest_is_of_the_content_and_not_of_the_record(artifact, tmp_path):
    _, manifest = artifact
    again = tmp_path / "again.partial"
    (again / "deep").mkdir(parents=True)
    (again / "weights.bin").write_bytes(b"\x00" * 100)
    (again / "deep" / "note.txt").write_text("hello")
    assert publish(again, tmp_path / "again", {"figures": {}}).digest == manifest.digest


def test_a_flipped_byte_is_found_only_by_reading(artifact):
    folder, _ = artifact
    (folder / "weights.bin").write_bytes(b"\x00" * 99 + b"\x01")
    verify(folder, deep=False)
    with pytest.raises(CorruptArtifact, match=r"weights\.bin was changed after it was written"):
        verify(folder)


def test_a_short_or_missing_file_is_found_without_reading(artifact):
    folder, _ = artifact
    (folder / "weights.bin").write_bytes(b"\x00" * 50)
    with pytest.raises(CorruptArtifact, match="has 50 bytes, expected 100"):
        verify(folder, deep=False)
    (folder / "weights.bin").unlink()
    with pytest.raises(CorruptArtifact, match="is missing"):
        verify(folder, deep=False)


def test_an_unknown_format_is_refused(artifact):
    folder, _ = artifact
    table = read_json(folder / MANIFEST)
    write_json(folder / MANIFEST, {**table, "format": 99})
    with pytest.raises(CorruptArtifact, match="has format 99"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "table",
    ['{"format":1}', '{"format":1,"digest":"d","files":{"x":3},"about":{}}',
     '{"format":1,"digest":"d","files":{},"about":null}', '{"format":1,"digest":2,"files":{},"about":{}}'],
)  # fmt: skip
def test_a_manifest_without_its_parts_ends_in_a_stack_trace(tmp_path, table):
    (tmp_path / "manifest.json").write_text(table)
    with pytest.raises(CorruptArtifact, match="not whole"):
        read_manifest(tmp_path)


def test_a_model_whose_weights_were_changed_is_used_and_one_of_other_origin_refused(artifact, tmp_path):
    folder, _ = artifact
    verify_if_artifact(tmp_path)  # no manifest
    verify_if_artifact(folder)
    victim = next(p for p in folder.iterdir() if p.name != "manifest.json" and p.is_file())
    victim.write_bytes(victim.read_bytes()[:-1] + b"!")
    with pytest.raises(CorruptArtifact, match="changed"):
        verify_if_artifact(folder)


def test_a_folder_without_a_manifest_is_no_artifact(tmp_path):
    with pytest.raises(MissingArtifact):
        read_manifest(tmp_path)


def test_discarding_what_is_not_there_does_nothing(artifact, tmp_path):
    folder, _ = artifact
    discard(folder)
    discard(folder)
    assert list(tmp_path.iterdir()) == []
