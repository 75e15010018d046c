"""The training service: versions, exact resume, and checkpoints that are whole or refused."""

from __future__ import annotations

import dataclasses
import resource
import threading
from pathlib import Path

import pytest
import torch
from samples_made import policy, rollout, segment

from cadenza.core.errors import CorruptArtifact, ForeignSample, MissingArtifact, ResourceExhausted
from cadenza.model.digest import served_digest, weights_digest
from cadenza.model.hf import save_model
from cadenza.training import checkpoint
from cadenza.training.config import RLStepConfig
from cadenza.training.trainer import CHECKPOINT, TrainerService
from cadenza.weights import ChainAddress, Follower
from cadenza.weights.tensors import tensors_of

pytestmark = pytest.mark.needs_train
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(policy(), folder, eos_token_id=8, bos_token_id=1)
    return folder


@pytest.fixture
def trainer(tmp_path):
    """Makes trainers that publish into a chain each."""
    made: list[TrainerService] = []

    def make(directory: Path, **keys) -> TrainerService:
        chain = ChainAddress(str(tmp_path / "store"), f"chain{len(made)}")
        made.append(TrainerService(str(directory), RLStepConfig(**keys), threads=1, bf16=False, chain=chain))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def groups(trainer: TrainerService, seed: int, **changes) -> list:
    """One group of samples of the trainer's version."""
    made = {"version": trainer.version, **changes}
    if "weights" not in made:
        made["weights"] = trainer.publish("float32")
    samples = [segment(trainer.model, seed + i, **made) for i in range(4)]
    return [[rollout(f"g/{i}", float(i % 2), [sample]) for i, sample in enumerate(samples)]]


def bits(t: TrainerService) -> str:
    return weights_digest(t.model.state_dict())


def test_a_step_on_zero_advantages_changes_the_weights(trainer, directory):
    t = trainer(directory, weight_decay=0.1)
    before = bits(t)
    same = [dataclasses.replace(r, reward=1.0) for r in groups(t, 0)[0]]
    metrics = t.step([same])
    assert bits(t) == before and t.version == 1 and metrics["trained_tokens"] == 0.0
    t.step(groups(t, 1))
    assert bits(t) != before and t.version == 2


@pytest.mark.parametrize(
    "changes", [{"version": 1}, {"weights": "0123456789abcdef"}, {"version": -1, "weights": ""}]
)
def test_a_sample_of_weights_never_handed_out_is_trained_on(trainer, directory, changes):
    """Of a version not made yet, of other weights under a version that was made, of no policy at all."""
    t = trainer(directory)
    with pytest.raises(ForeignSample, match=rf"version {changes.get('version', 0)}"):
        t.step(groups(t, 1, **changes))
    assert t.version == 0


def test_samples_of_an_earlier_process_are_trained_on_after_a_restore(trainer, directory, tmp_path):
    t = trainer(directory)
    old = groups(t, 1)
    t.step(groups(t, 2))
    t.save(str(tmp_path))
    t.restore(str(tmp_path))
    with pytest.raises(ForeignSample, match="no such version"):
        t.step(old)


def test_a_restored_trainer_takes_another_next_step(trainer, directory, tmp_path):
    kept = trainer(directory)
    for seed in (1, 2, 3):
        kept.step(groups(kept, seed))
    kept.save(str(tmp_path))
    other = trainer(directory)
    assert other.restore(str(tmp_path)) == 3
    batch = groups(kept, 4)
    other.publish("float32")
    a, b = kept.step(batch), other.step(batch)
    assert bits(kept) == bits(other)
    assert {k: v for k, v in a.items() if k != "train_s"} == {k: v for k, v in b.items() if k != "train_s"}


def flip(path: Path) -> None:
    """One bit in the middle of the largest tensor: torch.load alone would read it as a weight."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


DAMAGES = {
    "empty": lambda p: p.write_bytes(b""),
    "cut": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
    "one bit": flip,
    "noise": lambda p: p.write_bytes(b"PK\x03\x04" + bytes(range(256)) * 8),
    "another thing": lambda p: torch.save([1, 2], p),
    "no version": lambda p: torch.save({"model": {}, "optimizer": {}}, p),
    "another model": lambda p: torch.save({"version": 1, "model": {"x": torch.ones(1)}, "optimizer": {}}, p),
    "another optimizer": lambda p: torch.save({**torch.load(p), "optimizer": []}, p),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_loaded_or_a_stack_trace(trainer, directory, tmp_path, damage):
    t = trainer(directory)
    t.save(str(tmp_path))
    DAMAGES[damage](tmp_path / CHECKPOINT)
    with pytest.raises(CorruptArtifact, match=CHECKPOINT):
        t.restore(str(tmp_path))
    with pytest.raises(MissingArtifact):
        t.restore(str(tmp_path / "nowhere"))


def test_too_little_memory_is_told_as_a_damaged_checkpoint(trainer, directory, tmp_path, monkeypatch):
    t = trainer(directory)
    t.save(str(tmp_path))

    def no_memory(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(checkpoint.torch, "load", no_memory)
    with pytest.raises(ResourceExhausted, match="out of memory"):
        t.restore(str(tmp_path))


def test_a_kill_while_saving_loses_the_last_checkpoint(trainer, directory, tmp_path, monkeypatch):
    t = trainer(directory)
    t.save(str(tmp_path))

    def cut(_state, file):
        file.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.torch, "save", cut)
        t.version = 5
        with pytest.raises(KeyboardInterrupt):
            t.save(str(tmp_path))
    assert trainer(directory).restore(str(tmp_path)) == 0


def test_a_full_disk_is_a_stack_trace_or_leaves_half_a_checkpoint(trainer, directory, tmp_path):
    t = trainer(directory)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(ResourceExhausted, match="no space"):
            t.save(str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_weights_change_with_the_next_step(trainer, directory, dtype):
    t = trainer(directory)
    follower = Follower.at(t.chain)
    first = t.publish(dtype)
    follower.wait_for(0, DEADLINE_S)
    before = tensors_of(follower.state)  # pyright: ignore[reportArgumentType]
    assert {v.dtype for v in before.values()} == {getattr(torch, dtype)}
    t.step(groups(t, 1, weights=first))
    second = t.publish(dtype)
    assert follower.wait_for(1, DEADLINE_S).digest == second
    assert weights_digest(before) == first != second == weights_digest(tensors_of(follower.state))  # pyright: ignore[reportArgumentType]


def test_an_upload_that_failed_goes_unnoticed(trainer, directory, monkeypatch):
    t = trainer(directory)
    first = t.publish("float32")
    t.published.result(DEADLINE_S)

    def full(*_):
        raise ResourceExhausted("no space left", "free some")

    with monkeypatch.context() as patch:
        patch.setattr("cadenza.core.store.ObjectStore.put", full)
        t.step(groups(t, 1, weights=first))
        second = t.publish("float32")
        with pytest.raises(ResourceExhausted):
            t.published.result(DEADLINE_S)
        t.step(groups(t, 2, weights=second))
        with pytest.raises(ResourceExhausted):
            t.publish("float32")


def test_cores_given_to_the_trainer_in_one_thread_while_it_steps_in_another(trainer, directory):
    t = trainer(directory)
    seen: list[int] = []

    def step_elsewhere() -> None:
        torch.get_num_threads()  # the thread takes its number on first use
        t.step(groups(t, 0))
        seen.append(torch.get_num_threads())

    t.set_threads(2)
    thread = threading.Thread(target=step_elsewhere)
    thread.start()
    thread.join(60)
    torch.set_num_threads(1)
    assert seen == [2]


def test_answers_without_a_group_are_trained_with_other_advantages_or_of_other_weights(trainer, directory):
    """The same rollouts in a group of two have the advantages 1/2 and -1/2."""
    made = groups(trainer(directory), 3)[0][:2]
    grouped, single = trainer(directory), trainer(directory)
    for t in (grouped, single):
        t.publish("float32")
    grouped.step([made])
    metrics = single.step_single(made, [-0.5, 0.5])
    assert bits(grouped) == bits(single) and single.version == 1
    assert metrics["trained_samples"] == 2.0
    foreign = groups(trainer(directory), 3, weights="0123456789abcdef")[0][:2]
    with pytest.raises(ForeignSample):
        single.step_single(foreign, [1.0, -1.0])
    before = bits(single)
    single.step_single([], [])
    assert bits(single) == before and single.version == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_exported_policy_is_taken_for_another_than_the_published_one(trainer, directory, tmp_path, dtype):
    t = trainer(directory)
    t.step(groups(t, 0))
    t.export(str(tmp_path / "exported"), 0, 1)
    assert served_digest(tmp_path / "exported", getattr(torch, dtype)) == t.publish(dtype)
