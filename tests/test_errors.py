"""Errors: the class tree, the suggestions, and the message about a package that is missing."""

from __future__ import annotations

import ast
import copy
import inspect
import io
import pickle
import re
import subprocess
import sys
import traceback
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torchhook
from torchhook import errors
from torchhook.errors import closest, require, suggestion

patient = settings(deadline=None)  # the machine may be busy

NAMES = ["conv1", "bn1", "relu", "layer1.0.conv1", "layer1.0.relu", "layer4.1.relu", "layer4.1.bn2", "fc"]


def error_classes() -> list[type]:
    found = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]
    return [c for c in found if issubclass(c, BaseException)]


@pytest.mark.parametrize(
    ("error", "builtins"),
    [
        (errors.SelectorError, (ValueError, AttributeError)),
        (errors.MissingRecordError, (KeyError,)),
        (errors.NeverRanError, (errors.MissingRecordError, KeyError)),
        (errors.AmbiguousCallError, (LookupError, ValueError)),
        (errors.RecordingFileError, (ValueError,)),
        (errors.EditError, (ValueError,)),
        (errors.TransformError, (ValueError,)),
        (errors.SessionError, (RuntimeError,)),
        (errors.TargetError, (ValueError, IndexError)),
        (errors.MissingExtraError, (ImportError,)),
    ],
)
def test_every_error_is_also_the_builtin_that_a_caller_would_catch(error: type, builtins: tuple[type, ...]) -> None:
    for builtin in builtins:
        with pytest.raises(builtin, match=r"^what happened$"):
            raise error("what happened")
    assert issubclass(error, errors.TorchHookError)


def test_whatever_is_outside_the_error_tree_is_a_warning_for_users() -> None:
    outside = {c for c in error_classes() if not issubclass(c, errors.TorchHookError)}
    assert errors.NeverRanWarning in outside
    assert all(issubclass(c, UserWarning) and c.__name__.endswith("Warning") for c in outside)


def test_the_files_docstring_names_every_class_with_its_builtins() -> None:
    tree = errors.__doc__ or ""
    for cls in error_classes():
        line = next((line for line in tree.splitlines() if re.search(rf"\b{cls.__name__}\b", line)), None)
        assert line is not None, f"{cls.__name__} is not in the tree"
        stated = re.search(r"\(([\w, ]+)\)", line)
        own = [b.__name__ for b in cls.__bases__ if b.__module__ == "builtins"]
        if stated:
            assert stated[1].split(", ") == own


# -- the page of an error ------------------------------------------------------------------------------


def addresses(text: str) -> list[str]:
    return re.findall(r"^About \w+: (\S+)$", text, re.MULTILINE)


def raised(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, None))


def an_error(kind: Any, text: str = "what happened, and what to do.") -> BaseException:
    made: BaseException = kind(text)
    return made


@pytest.mark.parametrize("kind", [c for c in error_classes() if issubclass(c, errors.TorchHookError)])
def test_a_traceback_ends_with_the_address_of_the_errors_page(kind: type) -> None:
    error = an_error(kind)
    assert str(error) == "what happened, and what to do."  # the message itself is what it was
    assert f"{error}" == str(error)
    for again in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        shown = raised(again)
        assert shown.splitlines()[-2].endswith(": what happened, and what to do.")
        [address] = addresses(shown)
        assert shown.rstrip().endswith(address)
        page = Path(unquote(urlparse(address).path))
        assert page.name == f"{kind.__name__}.md"
        assert page.read_text("utf-8").startswith(f"# {kind.__name__}\n")


@pytest.mark.parametrize("backport", [True, False], ids=["with exceptiongroup", "without"])
@pytest.mark.parametrize("thread", [True, False], ids=["in a thread", "in the program"])
def test_an_error_that_nobody_catches_is_printed_with_its_page(thread: bool, backport: bool) -> None:
    if backport:
        pytest.importorskip("exceptiongroup")  # on Python 3.10, it prints what traceback prints elsewhere
    call = "threading.Thread(target=fail).start()" if thread else "fail()"
    program = f"""
import threading
{"import exceptiongroup" if backport else ""}
from torchhook import errors
def fail():
    raise errors.MissingRecordError("no 'fc'")
{call}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "torchhook.errors.MissingRecordError: no 'fc'\n" in done.stderr
    assert len(addresses(done.stderr)) == 1


def test_notebooks_and_rich_show_the_page_too() -> None:
    error = errors.MissingRecordError("no 'fc'")
    ultratb = pytest.importorskip("IPython.core.ultratb")
    shown = ultratb.ListTB().text(type(error), error, [])
    assert shown.count("errors/MissingRecordError.md") == 1
    rich = pytest.importorskip("rich.console")
    console = rich.Console(file=io.StringIO(), width=400)
    console.print(pytest.importorskip("rich.traceback").Traceback.from_exception(type(error), error, None))
    assert "errors/MissingRecordError.md" in console.file.getvalue()


def test_a_class_derived_from_an_error_leads_to_the_page_of_the_one_above_it() -> None:
    class Mine(errors.EditError):
        pass

    assert errors.about(Mine) == errors.about(errors.EditError)


@pytest.mark.parametrize("kind", [c for c in error_classes() if not issubclass(c, errors.TorchHookError)])
def test_a_warning_is_printed_with_the_address_of_its_page(kind: type[Warning]) -> None:
    warning = kind("what looks wrong.")
    assert str(warning) == "what looks wrong."
    shown = warnings.formatwarning(warning, kind, "train.py", 3, "model(x)")  # type: ignore[arg-type]
    [address] = addresses(shown)
    assert Path(unquote(urlparse(address).path)).is_file()
    assert shown.startswith(f"train.py:3: {kind.__name__}: what looks wrong.\nAbout ")


def test_where_the_site_has_an_address_links_lead_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "SITE", "https://example.org/docs/")
    errors._about.cache_clear()
    try:
        # As ``use_directory_urls: false`` names pages.
        assert errors.about(errors.EditError) == "About EditError: https://example.org/docs/errors/EditError.html"
    finally:
        errors._about.cache_clear()


def test_the_address_of_the_site_is_one_in_all_places() -> None:
    root = Path(__file__).parent.parent
    package = re.search(r'^Documentation = "(.*)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    site = re.search(r"^site_url: *(\S+)", (root / "mkdocs.yml").read_text(), re.MULTILINE)
    assert [found[1] if found else "" for found in (package, site)] == [errors.SITE] * 2
    assert "use_directory_urls: false" in (root / "mkdocs.yml").read_text()
    assert not errors.SITE or re.fullmatch(r"https://\S+/", errors.SITE)


def test_a_missing_record_shows_its_message_and_not_a_repr_of_it() -> None:
    assert str(errors.MissingRecordError("no 'fc'")) == "no 'fc'"
    assert str(errors.MissingRecordError()) == ""


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("layer4.1.rel", ["layer4.1.relu", "layer1.0.relu", "layer4.1.bn2"]),
        ("FC", ["fc"]),
        ("Conv1", ["conv1", "layer1.0.conv1", "bn1"]),
        ("relu", ["relu", "layer1.0.relu", "layer4.1.relu"]),
        ("zzz", []),
        ("", []),
    ],
)
def test_closest_names_come_best_first(written: str, expected: list[str]) -> None:
    assert closest(written, NAMES) == expected


def test_closest_gives_no_more_than_the_limit_and_no_name_twice() -> None:
    assert closest("relu", [*NAMES, *NAMES], limit=2) == ["relu", "layer1.0.relu"]


@patient
@given(st.text(), st.lists(st.text(), max_size=8), st.integers(1, 5))
def test_closest_only_ever_offers_known_names(name: str, known: list[str], limit: int) -> None:
    found = closest(name, known, limit)
    assert set(found) <= set(known)
    assert len(found) == len(set(found)) <= limit


@patient
@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=8))
def test_closest_finds_a_name_that_is_known_to_the_letter(known: list[str]) -> None:
    name = known[0]
    assert name.casefold() in [n.casefold() for n in closest(name, known)]


def test_suggestion_offers_close_names_or_else_the_first_six() -> None:
    assert suggestion("layer4.1.relo", NAMES) == "Closest: 'layer4.1.relu', 'layer1.0.relu', 'layer4.1.bn2'."
    assert suggestion("zzz", ["a", "b"]) == "There are: 'a', 'b'."
    assert suggestion("zzz", list("abcdefgh")) == "There are: 'a', 'b', 'c', 'd', 'e', 'f' and 2 more."
    assert suggestion("zzz", list("abcdef")) == "There are: 'a', 'b', 'c', 'd', 'e', 'f'."


def test_suggestion_never_offers_the_empty_name_of_the_model_itself() -> None:
    assert suggestion("zzz", ["", "a"]) == "There are: 'a'."
    assert suggestion("zzz", [""]) == ""
    assert suggestion("zzz", []) == ""


def test_require_gives_the_module_or_says_how_to_get_it() -> None:
    assert require("json", "viz").dumps([]) == "[]"
    with pytest.raises(errors.MissingExtraError) as caught:
        require("no_such_package_at_all", "viz")
    assert str(caught.value) == (
        "no_such_package_at_all is needed for this and is not installed: pip install matplotlib pillow "
        '(torchhook\'s extra "viz")'
    )
    assert isinstance(caught.value.__cause__, ImportError)


def normal(package: str) -> str:
    return package.replace("_", "-")


def extras() -> dict[str, set[str]]:
    """The packages of each extra, as pyproject.toml has them: an extra may name others."""
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    listed = text.split("[project.optional-dependencies]")[1].split("\n[project.scripts]")[0]
    lists = re.findall(r"^(\w+) = \[(.*?)\]$", listed, re.MULTILINE | re.DOTALL)
    plain = {extra: re.findall(r'"([^"]+)"', body) for extra, body in lists}

    def packages(extra: str) -> set[str]:
        found: set[str] = set()
        for line in plain[extra]:
            others = re.fullmatch(r"torchhook\[([\w,]+)\]", line)
            own = {normal(re.split("[<>=]", line)[0])}
            found |= set().union(*map(packages, others[1].split(","))) if others else own
        return found

    return {extra: packages(extra) for extra in plain}


def required() -> set[tuple[str, str]]:
    """Every package and extra that the sources require by name."""
    calls = [
        node
        for path in Path(torchhook.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require"
    ]
    pairs = [[a.value for a in call.args if isinstance(a, ast.Constant)] for call in calls]
    return {(pair[0], pair[1]) for pair in pairs if len(pair) == 2}


def message(package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> str:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, package, None)
        with pytest.raises(errors.MissingExtraError) as caught:
            require(package, extra)
    return str(caught.value)


def test_every_extra_that_is_required_is_told_by_the_packages_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = required()
    assert {("matplotlib", "viz"), ("jinja2", "report"), ("ray", "ray")} <= pairs
    for package, extra in sorted(pairs):
        told = re.search(r"pip install (.*) \(torchhook's extra \"(\w+)\"\)$", message(package, extra, monkeypatch))
        assert told is not None
        assert {normal(name.strip('"')) for name in told[1].split()} == extras()[extra]
        assert told[2] == extra


def test_without_an_installed_torchhook_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", absent)
    for package, extra in sorted(required()):
        told = re.search(r"pip install (\S+) \(torchhook's extra", message(package, extra, monkeypatch))
        assert told is not None
        # datasets brings pyarrow; Ray's own extra cannot be told from the name of its module
        assert normal(told[1]) in {*extras()[extra], "pyarrow", "ray"}


def test_nothing_tells_users_to_install_the_other_package_of_this_name() -> None:
    root = Path(__file__).parent.parent
    pages = [root / "README.md", *(root / "docs").glob("*.md"), *(root / "src").rglob("*.py")]
    assert [p.name for p in pages if re.search(r"pip install (-U )?\"?torchhook(?! @)", p.read_text())] == []
