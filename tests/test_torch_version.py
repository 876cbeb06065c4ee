"""A torch that is too old is refused, one that nobody has tried is warned of, and the others are not mentioned."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchhook._torch import releases
from torchhook.errors import TorchVersionError, TorchVersionWarning


def imported_beside(version: str) -> list[str]:
    """What a process prints that imports the library beside a torch which says that it is of some version."""
    code = f"""
import warnings, torch
torch.__version__ = torch.torch_version.TorchVersion({version!r})
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        import torchhook; import torchhook as again
    except Exception as error:
        print(type(error).__name__, error)
for w in caught:
    print(w.category.__name__, w.filename, w.lineno, w.message)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.shows("Versions: a warning of a torch that nobody has tried")
@pytest.mark.slow
def test_a_torch_that_nobody_has_tried_is_warned_about_once_at_the_users_import() -> None:
    (said,) = imported_beside("2.16.0a0+git1234")
    # The line of the program that imports the library, not one of the library's or of Python's own.
    assert said.startswith("TorchVersionWarning <string> 7 torch 2.16.0a0+git1234 is newer than any"), said


@pytest.mark.shows("Versions: torch before 2.6", error="TorchVersionError")
@pytest.mark.slow
def test_a_torch_that_is_too_old_is_refused_at_the_import() -> None:
    assert imported_beside("2.5.1+cpu") == [
        'TorchVersionError TorchHook needs torch 2.6 or newer, and this is torch 2.5.1+cpu: pip install "torch>=2.6"'
    ]


@pytest.mark.parametrize("found", ["2.16.0", "2.20.1+cu140", "3.0.0.dev20300101"])
def test_every_later_release_is_newer_than_what_was_tried(found: str) -> None:
    with pytest.warns(TorchVersionWarning, match=rf"^torch {re.escape(found)} is newer .*\(up to 2\.15\)"):
        releases.check(found)


@pytest.mark.parametrize("found", [torch.__version__, "2.6.0", "2.15.3+cu132", "our-own-build"])
def test_a_torch_that_was_tried_is_taken_without_a_word(found: str) -> None:
    releases.check(found)  # warnings are errors here


@pytest.mark.parametrize("found", ["2.5.1", "2.5.0a0+git1234", "1.13.1"])
def test_every_release_before_the_oldest_is_refused(found: str) -> None:
    with pytest.raises(TorchVersionError, match=rf"needs torch 2\.6 or newer, and this is torch {re.escape(found)}"):
        releases.check(found)


def test_the_torch_of_these_tests_is_not_newer_than_what_the_library_says_was_tried() -> None:
    """Whoever runs the suite on a newer one writes it down, where it is said to users."""
    assert tuple(map(int, torch.__version__.split(".")[:2])) <= releases.NEWEST_TESTED


def test_the_oldest_torch_is_the_one_that_is_installed_with_the_package() -> None:
    pyproject = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert f'"torch>={".".join(map(str, releases.OLDEST))}"' in pyproject
