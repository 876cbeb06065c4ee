"""The door: what is done about a finding, what is left alone, and what is refused."""

from __future__ import annotations

import linecache
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.guard.faults import FAULTS, Apply, around, one_zero, ones
from tests.oracle import warned
from torchhook._guard.api import guard
from torchhook.errors import GuardWarning, NeverRanWarning, TorchHookError


def test_warn_warns_once_for_each_site() -> None:
    model = around(lambda x: x.log())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with guard(model, action="warn") as g:
            for _ in range(3):
                assert not model(one_zero(True)).isfinite().all()
    assert [w.category for w in seen] == [GuardWarning]
    assert "'1/log#0' made 2 -Inf" in str(seen[0].message)
    assert g.findings[0].times == 3


class Logs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()  # this line


class Roots(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x).sqrt()


def test_a_warning_points_at_the_users_line_forward_and_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    logs, model = nn.Sequential(nn.Identity(), Logs()), nn.Sequential(Roots(), nn.Identity())
    with warned() as seen:
        with guard(logs, action="warn"):
            logs(-torch.ones(2))
        with guard(model, action="warn"):
            model(x).sum().backward()  # this one too
        with guard(model):
            pass  # and the end of this block
    assert [w.category for w in seen] == [GuardWarning, GuardWarning, NeverRanWarning]
    assert {w.filename for w in seen} == {__file__}
    lines = [linecache.getline(__file__, w.lineno) for w in seen]
    assert "# this line" in lines[0]
    assert "# this one too" in lines[1]


def test_the_error_is_an_arithmetic_error_and_pickles() -> None:
    model = around(lambda x: x.log())
    with pytest.raises(ArithmeticError) as caught:
        with guard(model):
            model(one_zero(True))
    assert isinstance(caught.value, TorchHookError)
    twin = pickle.loads(pickle.dumps(caught.value))
    assert (str(twin), twin.finding) == (str(caught.value), caught.value.finding)


def test_a_handle_guards_until_it_is_closed() -> None:
    model = around(lambda x: x.log())
    g = guard(model).open()
    model(one_zero(False))
    g.close()
    g.close()
    model(one_zero(True))
    assert g.findings == []


def test_what_is_excluded_is_not_judged() -> None:
    model = nn.Sequential(Apply(lambda x: x.log()), Apply(lambda x: x.nan_to_num(0, 0, 0)), nn.Linear(4, 4))
    for exclude in ("0", "0/log"):
        with guard(model, exclude=exclude) as g:
            model(one_zero(True))
        assert g.findings == []


def test_gradients_can_be_left_alone() -> None:
    case = FAULTS["root at 0"]
    model = case.model(True)
    with guard(model, backward=False) as g:
        case.loss(model(ones())).backward()
    assert g.findings == []
    assert not model[0].weight.grad.isfinite().all()


def test_a_guard_that_saw_nothing_says_so() -> None:
    with pytest.warns(
        NeverRanWarning, match="the guard saw nothing: the model was not called while the session was open"
    ):
        with guard(nn.Linear(4, 4)):
            pass


@pytest.mark.parametrize("wrong", [{"action": "stop"}, {"allow": "nan"}])
def test_a_wrong_option_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="use "):
        guard(nn.Linear(4, 4), **wrong)
