"""Errors: the class tree, the suggestions, and the message about a package that is missing."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from importlib import metadata
from pathlib import Path

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
        (errors.AmbiguousCallError, (LookupError,)),
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
