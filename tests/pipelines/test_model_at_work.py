"""``cadenza eval`` and ``cadenza agent`` on a real (untrained) model, real tasks and real sandboxes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza.core.errors import CadenzaError, ServiceDied
from cadenza.harness import Limits, save_limits
from cadenza.sandbox import SandboxGone
from cadenza.tasks.patch import PatchRefused
from cadenza.tokens import SessionLost

pytestmark = [pytest.mark.needs_train, pytest.mark.needs_namespaces]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A random model of a few thousand weights with a tokenizer, in Hugging Face layout."""
    import torch

    from cadenza.model.config import ModelConfig
    from cadenza.model.hf import save_model
    from cadenza.model.transformer import PolicyModel
    from cadenza.tokens import Tokenizer

    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["def total(values):\n    return sum(values)\n"] * 20, vocab_size=320)
    folder = tmp_path_factory.mktemp("model")
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16,
        n_experts=2, experts_per_token=1, d_expert=16, d_shared=16,
    )  # fmt: skip
    model = PolicyModel(config)
    for parameter in model.parameters():  # its memory is as it was found, and may hold no numbers
        torch.nn.init.normal_(parameter, std=0.02)
    save_model(
        model,
        folder,
        eos_token_id=tokenizer.id("<|end|>"),
        bos_token_id=tokenizer.id("<|bos|>"),
    )
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    from cadenza.tasks.generate import GeneratorConfig, generate_split

    folder = tmp_path_factory.mktemp("tasks") / "val"
    generate_split(GeneratorConfig.model_validate({"splits": {"val": {"count": 2}}}), "val", folder)
    return folder


@pytest.fixture
def cadenza(tmp_path, command_environment):
    def go(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "cadenza", *map(str, arguments)],
            env={**command_environment, "OMP_NUM_THREADS": "1"},
            cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    return go


def test_an_untrained_model_is_measured_and_every_trial_has_a_verdict(cadenza, model, tasks, tmp_path):
    done = cadenza(
        "eval", model, "--tasks", tasks, "--samples", 2, "--temperature", 1.0, "--json", "--out", "all.json"
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["tasks"] == 2 and figures["samples"] == 2
    assert 0.0 <= figures["pass@1"]["value"] <= 1.0
    assert sum(figures["ended"].values()) == 4, "what ended a trial is not told"
    assert figures["mean_contexts"] >= 1
    assert len(json.loads((tmp_path / "all.json").read_text())["records"]) == 4


def test_a_model_is_measured_under_other_limits_than_it_was_trained_under(cadenza, model, tasks, tmp_path):
    limited = Path(shutil.copytree(model, tmp_path / "limited"))
    save_limits(
        Limits(max_tokens_per_turn=5), limited
    )  # an untrained model's turns are as long as they may be
    tokens = []
    for policy in (model, limited):
        done = cadenza("eval", policy, "--tasks", tasks, "--temperature", 1.0, "--out", f"{policy.name}.json")
        assert done.returncode == 0, done.stderr
        body = json.loads((tmp_path / f"{policy.name}.json").read_text())
        tokens.append([row[body["record_fields"].index("tokens")] for row in body["records"]])
    assert min(tokens[0]) > 20 >= max(tokens[1])


def test_the_agent_works_on_a_copy_and_leaves_the_folder_alone(cadenza, model, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "total.py").write_text("def total(values):\n    return sum(values)\n")
    done = cadenza("agent", project, "--model", model, "--task", "fix total", "--temperature", 1.0, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["written"] == []
    assert (project / "total.py").read_text().startswith("def total")
    assert [path.name for path in project.iterdir()] == ["total.py"]


def test_a_corrupt_model_is_one_line(cadenza, model, tmp_path):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    (tmp_path / "project").mkdir()
    done = cadenza("agent", tmp_path / "project", "--model", broken, "--task", "x")
    assert done.returncode == 4, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and str(broken) in line


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (SandboxGone("killed"), ServiceDied),
        (SessionLost("ended"), ServiceDied),
        (PatchRefused("x.db is binary"), CadenzaError),
    ],
)
def test_what_ends_an_agent_is_a_stack_trace(monkeypatch, model, tmp_path, raised, told):
    from cadenza.pipelines import assist

    async def ends(*_, **__):
        raise raised

    monkeypatch.setattr(assist, "work_on", ends)
    with pytest.raises(CadenzaError, match="DIR is unchanged") as caught:
        assist.assist(tmp_path, "fix it", model)
    assert type(caught.value) is told and str(raised) in caught.value.cause


@pytest.mark.needs_root
def test_an_agent_without_namespaces_is_a_stack_trace(model, tmp_path, command_environment):
    (tmp_path / "a.py").write_text("x = 1\n")
    refuse = "echo 0 > /proc/sys/user/max_user_namespaces; exec "
    script = f"{refuse} {sys.executable} -m cadenza agent . --model {model} --task x"
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", script],
        env={**command_environment, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    assert "user.max_user_namespaces is 0" in done.stderr and len(done.stderr.splitlines()) == 1
