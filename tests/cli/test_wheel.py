"""The built wheel works in an empty environment without torch, with its recipes, migrations and licence inside."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_carries_everything_that_is_not_code(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    shipped = ROOT / "src" / "cadenza"
    expected = [
        path.relative_to(ROOT / "src").as_posix()
        for path in shipped.rglob("*")
        # Compiled kernels and bytecode are made where they run.
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert set(expected) <= set(names)
    for needed in ("cadenza/pipelines/recipes/demo.toml", "cadenza/core/migrations/versions/0001_initial.py"):
        assert needed in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "runs/")) for name in names)


@pytest.fixture(scope="module")
def light(wheel, tmp_path_factory) -> Path:
    """An environment with the wheel and its light base alone."""
    environment = tmp_path_factory.mktemp("light") / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=300)
    python = environment / "bin" / "python"
    # Our pip installs into the other environment: quicker than giving it one of its own.
    pip = [sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True, timeout=300)
    return environment


def cadenza(environment: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [environment / "bin" / "cadenza", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.needs_network
def test_the_wheel_runs_in_an_empty_environment_without_torch(light, tmp_path):
    python = light / "bin" / "python"
    absent = "import importlib.util as u, sys; sys.exit(any(map(u.find_spec, ('torch', 'ray', 'numba'))))"
    assert subprocess.run([python, "-c", absent], check=False).returncode == 0
    assert cadenza(light, tmp_path, "--help").returncode == 0
    dry = cadenza(light, tmp_path, "train", "demo", "--dry-run")
    assert dry.returncode == 0 and dry.stdout.startswith('name = "demo"'), dry.stderr
    runs = cadenza(light, tmp_path, "runs")
    assert (runs.returncode, runs.stderr.startswith("error: no runs in ")) == (3, True)
    migrated = "from cadenza.core.rundb import RunDatabase; RunDatabase.open('a.db').close()"
    assert subprocess.run([python, "-c", migrated], cwd=tmp_path, check=False).returncode == 0


LIGHT_RECIPE = """
name = "light"

[[stage]]
name = "tasks"
kind = "cadenza.pipelines.tasks_stage:Tasks"
splits.train = { count = 2 }
"""


@pytest.mark.slow
@pytest.mark.needs_network
@pytest.mark.needs_namespaces
def test_a_recipe_without_a_model_needs_no_torch(light, tmp_path):
    (tmp_path / "light.toml").write_text(LIGHT_RECIPE)
    done = cadenza(light, tmp_path, "train", "./light.toml", "--json")
    assert done.returncode == 0, done.stderr
    (stage,) = json.loads(done.stdout)["stages"]
    assert stage["figures"] == {"train": 2, "train_validated": 2}
