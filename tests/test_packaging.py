"""The package as it is published: what is in it, what it needs, and that its tests pass where it is installed."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import torchhook

ROOT = Path(__file__).parents[1]
BLOCKED = "import sys; sys.modules.update(dict.fromkeys({}, None)); "
WITHOUT = BLOCKED.format('("rich", "typer", "click", "matplotlib", "PIL", "jinja2", "pandas", "transformers", "timm")')
# Few and quick, and from every side: names, files, the command, a picture, a store.
SUBSET = [
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
    pages = {f"torchhook/_pages/errors/{page.name}" for page in (ROOT / "docs" / "errors").glob("*.md")}
    assert {name for name in names if ".dist-info/" not in name} == files_of_the_package() | pages
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
    link = python("-c", "from torchhook import errors; print(errors.about(errors.EditError))", PYTHONPATH=path).stdout
    assert (tmp_path / "torchhook" / "_pages" / "errors" / "EditError.md").as_uri() in link
    command = tmp_path / "bin" / "torchhook"
    shown = subprocess.run(
        [command, "--version"], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert wheel.name.startswith(f"torchhook-{shown.stdout.strip()}-"), shown.stderr
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *SUBSET, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout[-3000:]


# -- its types -------------------------------------------------------------------------------------------


def _with_pyright(path: str) -> str:
    found = importlib.util.find_spec("pyright")
    assert found is not None
    assert found.origin is not None
    return os.pathsep.join([path, str(Path(found.origin).parents[1])])


@pytest.mark.slow
def test_every_public_name_has_a_known_type() -> None:
    pytest.importorskip("pyright", reason="pyright is not installed")
    # Where torch is has to be said: of a package that is verified, only its own folder is looked for.
    path = os.pathsep.join(str(Path(str(module.__file__)).parents[1]) for module in (torchhook, torch))
    done = python("-m", "pyright", "--verifytypes", "torchhook", "--ignoreexternal", PYTHONPATH=_with_pyright(path))
    if "Type completeness score" not in done.stdout:
        pytest.skip(f"pyright could not run here: {done.stdout[-200:]}{done.stderr[-200:]}")
    assert "Type completeness score: 100%" in done.stdout, done.stdout[-3000:]


def test_the_versions_of_python_that_are_named_are_those_that_are_allowed() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    named = [int(minor) for minor in re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', text)]
    (least,) = re.findall(r'requires-python = ">=3\.(\d+)"', text)
    assert named == list(range(int(least), named[-1] + 1))
    assert f'target-version = "py3{least}"' in text
    assert named[-1] >= 13


def test_no_named_tuple_is_generic() -> None:
    """Python 3.10 refuses such a class when it is made, and with it the import of the library."""
    bases = [
        {getattr(base, "id", getattr(getattr(base, "value", None), "id", "")) for base in node.bases}
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    assert len(bases) > 100
    assert [names for names in bases if {"NamedTuple", "Generic"} <= names] == []
