"""The life of whatever is opened and closed: inert before, closed for good after, and never dropped in silence."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchhook as th
from tests.oracle import hooks_on, warned
from torchhook._core.openable import Openable
from torchhook.errors import NeverOpenedWarning, SelectorError, SessionError

TOOLS: dict[str, Callable[[nn.Module], Any]] = {
    "guard": th.guard,
    "watch": th.watch,
    "gradient clip": lambda model: th.clip_gradients(model, 0.5),
}
X = torch.ones(2, 4)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def traces(model: nn.Module) -> list[Any]:
    return [*hooks_on(model), *(hook for p in model.parameters() for hook in (p._backward_hooks or {}).values())]


@pytest.mark.parametrize("kind", TOOLS)
def test_a_tool_is_inert_until_it_is_opened_and_gone_when_it_is_closed(kind: str) -> None:
    model = net()
    tool = TOOLS[kind](model)
    assert traces(model) == []
    assert tool.open() is tool
    assert traces(model) != []
    model(X).sum().backward()
    tool.close()
    tool.close()
    assert traces(model) == []


@pytest.mark.parametrize("kind", TOOLS)
def test_a_with_block_gives_the_tool_itself(kind: str) -> None:
    model = net()
    tool = TOOLS[kind](model)
    with tool as inside:
        assert inside is tool
        model(X).sum().backward()
    assert traces(model) == []


@pytest.mark.parametrize("kind", TOOLS)
def test_it_is_removed_as_a_handle_of_pytorch_is(kind: str) -> None:
    model = net()
    tool = TOOLS[kind](model).open()
    model(X).sum().backward()
    tool.remove()
    assert traces(model) == []


@pytest.mark.parametrize("kind", TOOLS)
def test_one_that_was_never_opened_says_so_when_it_is_dropped_at_the_line_that_dropped_it(kind: str) -> None:
    model = net()
    with pytest.warns(NeverOpenedWarning, match=f"^a {kind} was dropped without ever being opened") as caught:
        TOOLS[kind](model)
    assert [w.filename for w in caught] == [__file__]
    assert traces(model) == []


@pytest.mark.parametrize("kind", TOOLS)
def test_closing_is_no_opening(kind: str) -> None:
    """A tool that lived from its creation would have worked here; the one that did not must say so."""
    with pytest.warns(NeverOpenedWarning):
        TOOLS[kind](net()).close()


@pytest.mark.parametrize("kind", TOOLS)
def test_one_that_was_opened_is_dropped_in_silence_closed_or_not(kind: str) -> None:
    model = net()
    with warned() as seen:
        with TOOLS[kind](model) as tool:
            model(X).sum().backward()
        del tool
        tool = TOOLS[kind](model).open()
        model(X).sum().backward()
        del tool
        gc.collect()
    assert seen == []
    assert traces(model) == []


@pytest.mark.parametrize("kind", TOOLS)
def test_opening_twice_is_an_error_that_says_what_to_do(kind: str) -> None:
    model = net()
    tool = TOOLS[kind](model)
    with tool:
        model(X).sum().backward()
        with pytest.raises(SessionError, match=f"^a {kind} opens once, and this one is open already"):
            tool.open()
        assert traces(model) != []
    with pytest.raises(SessionError, match=f"^a {kind} opens once, and this one was closed. Make a new one"):
        tool.open()
    with pytest.raises(SessionError, match="was closed"):
        tool.__enter__()
    assert traces(model) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: th.guard(net(), exclude="layer9"),
        lambda: th.guard(net(), action="stop"),  # type: ignore[arg-type]
        lambda: th.watch(net(), "layer9"),
        lambda: th.watch(net(), every=0),
        lambda: th.watch(net(), threads="some"),  # type: ignore[arg-type]
        lambda: th.clip_gradients(net()),
        lambda: th.clip_gradients("net", 1.0),  # type: ignore[arg-type]
    ],
)
def test_one_that_could_not_be_made_only_says_why(make: Callable[[], Any]) -> None:
    with warned() as seen:
        with pytest.raises((ValueError, TypeError, SelectorError)):
            make()
        gc.collect()
    assert seen == []


class Half(Openable):
    _kind = "half"

    def __init__(self) -> None:
        raise ZeroDivisionError

    def _start(self) -> None: ...

    def _stop(self, error: BaseException | None) -> None: ...


class Failing(Half):
    def __init__(self) -> None:
        self._made()
        self.tries = 0

    def _start(self) -> None:
        self.tries += 1
        raise KeyError("mine")


def test_half_an_object_has_no_life_to_report() -> None:
    with warned() as seen, pytest.raises(ZeroDivisionError):
        Half()
    assert seen == []


def test_an_opening_that_fails_passes_its_own_error_and_was_one() -> None:
    with warned() as seen:
        one = Failing()
        with pytest.raises(KeyError, match="mine"):
            one.open()
        with pytest.raises(SessionError, match="was closed"):
            one.open()
        assert one.tries == 1
        del one
    assert seen == []


READINGS = {
    "guard": [lambda g: g.findings, lambda g: g.table()],
    "watch": [
        lambda w: w.last,
        lambda w: w.history,
        lambda w: w.alarms,
        lambda w: w.table(),
        lambda w: w.flush(),
        lambda w: w.paused().__enter__(),
        lambda w: w.step(),
    ],
}


@pytest.mark.parametrize("kind", READINGS)
def test_what_was_never_opened_has_nothing_to_say_and_says_that(kind: str) -> None:
    model = net()
    tool = TOOLS[kind](model)
    model(X)
    for read in READINGS[kind]:
        with pytest.raises(SessionError, match=f"this {kind} is not open yet"):
            read(tool)
    assert "not open yet" in repr(tool)
    assert "not open yet" in tool._repr_html_()
    with tool:
        model(X).sum().backward()
    for read in READINGS[kind][:4]:
        read(tool)


MADE = {
    "a guard": "th.guard(model)",
    "a watch": "th.watch(model)",
    "a gradient clip": "th.clip_gradients(model, 1.0)",
    "th.capture": "th.capture(model, '(model)')",
    "th.edit": "th.edit(model, {'(model)': th.edits.scale(2.0)})",
}


@pytest.mark.parametrize("opened", [False, True])
def test_what_a_script_never_opened_is_said_when_it_ends_at_the_line_that_made_it(opened: bool, tmp_path: Path) -> None:
    lines = ["import torch, torchhook as th", "model = torch.nn.Linear(1, 1)", "kept = []"]
    lines += [f"kept.append({made})" for made in MADE.values()]
    lines += ["kept.append(kept)"]  # goes with the interpreter only
    if opened:
        lines += ["for one in kept[:5]:", "    with one: model(torch.ones(1, 1)).sum().backward()"]
    script = tmp_path / "script.py"
    script.write_text("\n".join(lines))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert "Exception ignored" not in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith(str(script))]
    assert len(said) == (0 if opened else len(MADE))
    for number, (what, line) in enumerate(zip(MADE, said, strict=False), start=4):
        assert re.match(rf".*script.py:{number}: NeverOpenedWarning: .*{what}.* was never opened, so it did no", line)
