"""The package as it is published: what is in it, what it needs, and that its tests pass where it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKED = "import sys; sys.modules.update(dict.fromkeys({}, None)); "
WITHOUT = BLOCKED.format('("rich", "typer", "click", "matplotlib", "PIL", "jinja2", "pandas", "transformers", "timm")')
# Few and quick, and from every side: names, files, the command, a picture, a store.
SUBSET = [
    "tests/test_public.py",
    "tests/recording/test_names.py",
    "tests/cli/test_errors.py",
    "tests/extract/test_inputs.py",
    "tests/report/test_render.py",
]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=500,
        check=False,
    )


# -- what it needs -------------------------------------------------------------------------------------


def test_the_library_needs_none_of_the_packages_of_its_extras() -> None:
    done = python("-c", f"{WITHOUT} import torchhook, torchhook.demo; print(len(torchhook.__all__))")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_command_without_its_packages_says_what_to_install(missing: str) -> None:
    line = BLOCKED.format(f'("{missing}",)') + "from torchhook.__main__ import main; main()"
    done = python("-c", line)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"torchhook: {missing} is needed for this and is not installed: pip install ")
    assert done.stderr.rstrip().endswith('(torchhook\'s extra "cli")')


# -- what is in it ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("build", "hatchling", "twine"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    out = tmp_path_factory.mktemp("dist")
    done = python("-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def files_of_the_package() -> set[str]:
    """Every file below ``src``, as far as it is not made by running it."""
    found = (path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT / "src").as_posix() for path in found if not path.match("*.egg-info/*")}


@pytest.mark.slow
def test_the_source_and_the_wheel_are_whole_and_pass_twine(built: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    done = python("-m", "twine", "check", "--strict", str(wheel), str(source))
    assert done.returncode == 0, done.stdout + done.stderr
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == files_of_the_package()
    assert "torchhook/py.typed" in names
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in files_of_the_package()} <= inside
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "tests/conftest.py"} <= inside


@pytest.mark.slow
def test_the_tests_pass_against_the_installed_wheel(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    done = python("-m", "pip", "install", "--no-deps", "--quiet", "--target", str(tmp_path), str(wheel))
    assert done.returncode == 0, done.stderr
    # In front of a checkout that is installed for editing.
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    where = python("-c", "import torchhook; print(torchhook.__file__)", PYTHONPATH=path).stdout
    assert where.startswith(str(tmp_path)), where
    command = tmp_path / "bin" / "torchhook"
    shown = subprocess.run(
        [command, "--version"], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert wheel.name.startswith(f"torchhook-{shown.stdout.strip()}-"), shown.stderr
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *SUBSET, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout[-3000:]


# -- its types -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_public_name_has_a_known_type() -> None:
    pytest.importorskip("pyright", reason="pyright is not installed")
    done = python("-m", "pyright", "--pythonpath", sys.executable, "--verifytypes", "torchhook", "--ignoreexternal")
    if "Type completeness score" not in done.stdout:
        pytest.skip(f"pyright could not run here: {done.stdout[-200:]}{done.stderr[-200:]}")
    assert "Type completeness score: 100%" in done.stdout, done.stdout[-3000:]
