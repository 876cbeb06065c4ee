"""Addresses and names: the grammar both ways, and modules under their original paths."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from torchhook._core.index import walk
from torchhook._recording.address import PORTS, Calls, Site, parse

patient = settings(deadline=None)  # the machine may be busy

COMPONENTS = st.from_regex(r"[A-Za-z_0-9]{1,5}", fullmatch=True)
PATHS = st.lists(COMPONENTS, max_size=4).map(".".join)
ODD = st.text(alphabet="ab.1/#:", min_size=1, max_size=8)
"""Names that hold the marks of the grammar."""
OPS = st.none() | st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
ENDS = st.none() | st.integers(-(10**6), 10**6)
RANGES = st.builds(Calls, ENDS, ENDS).filter(lambda calls: calls != Calls())
CALLS = st.none() | st.integers(-(10**6), 10**6) | RANGES
PORT = st.sampled_from(PORTS)


def spelled(path: str, op: str | None, call: int | Calls | None, port: str) -> str:
    """The grammar of the design, written out once more."""
    text = path
    if op is not None:
        text += "/" + op
    if call is not None:
        text += "#"
        ends = (call.start, call.stop) if isinstance(call, Calls) else (call,)
        text += ":".join("" if end is None else f"{end:d}" for end in ends)
    return text if port == "output" else text + ":" + port


@patient
@given(PATHS, OPS, CALLS, PORT)
def test_an_address_reads_back_as_the_site_it_was_written_from(path, op, call, port) -> None:
    address = spelled(path, op, call, port)
    assert str(Site(path, op, call, port)) == address
    assert parse(address).parts == (path, op, call, port)


@patient
@given(ODD | PATHS, OPS, CALLS, PORT)
def test_a_name_with_marks_in_it_reads_back_when_it_is_known(path, op, call, port) -> None:
    address = spelled(path, op, call, port)
    assert parse(address, {path}).parts == (path, op, call, port)


@patient
@given(ODD, OPS, CALLS, PORT, st.sets(ODD, max_size=6))
def test_among_known_names_the_longest_that_fits_wins(path, op, call, port, others) -> None:
    address = spelled(path, op, call, port)
    found = parse(address, {path, *others})
    assert str(found) == address
    assert found.path in {path, *others}
    assert len(found.path) >= len(path)


@patient
@given(st.text(alphabet="ab.1-/#:outpig", max_size=12))
def test_whatever_is_read_is_written_back_to_the_same_address(address: str) -> None:
    assume(not address.endswith(":output"))  # the default port is not written
    assert str(parse(address)) == address


@patient
@given(st.text(alphabet="ab.1-/#:outpig", max_size=12), st.sets(ODD, max_size=4))
def test_reading_twice_changes_nothing(address: str, known: set[str]) -> None:
    site = parse(address, known)
    assert parse(str(site), {site.path}) == site


@pytest.mark.parametrize(
    ("address", "site"),
    [
        ("", Site("")),
        ("layer1.0.bn2", Site("layer1.0.bn2")),
        ("features:input", Site("features", port="input")),
        ("features:output", Site("features")),
        ("layer4:grad", Site("layer4", port="grad")),
        ("layer4:grad_input", Site("layer4", port="grad_input")),
        ("layer4.1.relu#1", Site("layer4.1.relu", call=1)),
        ("blocks.3.attn/sdpa:input", Site("blocks.3.attn", "sdpa", None, "input")),
        ("layer1.0/add_", Site("layer1.0", "add_")),
        ("a/b#2:grad", Site("a", "b", 2, "grad")),
        (":input", Site("", port="input")),
        ("#3", Site("", call=3)),
        ("/relu", Site("", "relu")),
        ("a:b", Site("a:b")),
        ("a#b", Site("a#b")),
        ("a#-1", Site("a", call=-1)),
        ("a#1:", Site("a", call=Calls(1, None))),
        ("a#:2", Site("a", call=Calls(None, 2))),
        ("a#0:3", Site("a", call=Calls(0, 3))),
        ("a#-3:", Site("a", call=Calls(-3, None))),
        ("a#:-1", Site("a", call=Calls(None, -1))),
        ("a#1:input", Site("a", call=1, port="input")),
        ("a#1::input", Site("a", call=Calls(1, None), port="input")),
        ("a#:2:grad", Site("a", call=Calls(None, 2), port="grad")),
        ("a#-1:grad", Site("a", call=-1, port="grad")),
        ("a/b#1::grad", Site("a", "b", Calls(1, None), "grad")),
        ("#1:", Site("", call=Calls(1, None))),
        ("(model)#1:", Site("", call=Calls(1, None))),
        ("a#", Site("a#")),
        ("a#:", Site("a#:")),
        ("a#-", Site("a#-")),
        ("a#:-", Site("a#:-")),
        ("a#1:2:3", Site("a#1:2:3")),
        ("a#1-2", Site("a#1-2")),
        ("a#--1", Site("a#--1")),
        ("a#1::", Site("a#1::")),
        ("a/", Site("a/")),
        ("a/b/relu", Site("a/b", "relu")),
    ],
)
def test_the_grammar_by_example(address: str, site: Site) -> None:
    assert parse(address) == site


def test_a_site_without_its_call_is_the_same_site_otherwise() -> None:
    assert Site("a", "op", 3, "input").every_call == Site("a", "op", None, "input")
    site = Site("a")
    assert site.every_call is site


@patient
@given(RANGES, st.integers(0, 12))
def test_a_range_means_the_calls_that_a_slice_does(calls: Calls, ran: int) -> None:
    some = Calls(*(end if end is None else end % 13 for end in (calls.start, calls.stop)))
    wanted = list(range(ran))[some.start : some.stop]
    assert [call for call in range(ran) if call in some] == wanted
    assert [call for call in range(ran) if Site("a", call=some).means(call)] == wanted


@patient
@given(st.none() | st.integers(-4, 4), st.none() | st.integers(-4, 4))
def test_a_range_is_empty_if_no_number_of_calls_is_enough(start: int | None, stop: int | None) -> None:
    assert Calls(start, stop).is_empty == (not any(list(range(ran))[start:stop] for ran in range(12)))


def test_a_site_says_whether_its_calls_are_counted_from_the_last() -> None:
    assert [Site("a", call=call).counts_back for call in (None, 0, 3, -1)] == [False, False, False, True]
    ranges = [Calls(1), Calls(None, 2), Calls(-2), Calls(None, -1), Calls(0, -1), Calls(-3, 5)]
    assert [Site("a", call=calls).counts_back for calls in ranges] == [False, False, True, True, True, True]


def test_a_site_with_a_range_survives_copies_and_pickles() -> None:
    site = Site("a", "op", Calls(1), "input")
    for other in (copy.deepcopy(site), pickle.loads(pickle.dumps(site))):
        assert other == site == "a/op#1::input"
        assert other.parts == site.parts


def names(model: nn.Module) -> list[str]:
    return [path for path, _ in walk(model)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)
        self.block = nn.Sequential(nn.ReLU(), nn.ModuleList([nn.Linear(2, 2)]))
        self.nothing = None


def test_a_plain_model_is_walked_as_pytorch_names_it() -> None:
    model = Net()
    model.register_module("empty", None)
    assert list(walk(model)) == list(model.named_modules())


def test_a_shared_module_comes_under_each_of_its_names() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU()))
    model.append(model[0])
    model[1].append(model[0])
    assert list(walk(model)) == list(model.named_modules(remove_duplicate=False))
    assert names(model) == ["", "0", "1", "1.0", "1.1", "2"]


def test_a_module_that_contains_itself_does_not_walk_for_ever() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].owner = model
    assert names(model) == ["", "0"]


def wrappers() -> list[tuple[str, object]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def compiled(module: nn.Module) -> nn.Module:
        return torch.compile(module, backend="eager")  # type: ignore[return-value]

    return [
        ("torch.compile", compiled),
        ("DataParallel", nn.DataParallel),
        ("checkpoint_wrapper", checkpoint_wrapper),
        ("compiled DataParallel", lambda m: compiled(nn.DataParallel(m))),
        ("checkpointed compiled", lambda m: checkpoint_wrapper(compiled(m))),
    ]


@pytest.mark.shows("Wrappers: torch.compile, DataParallel and checkpoint_wrapper do not show in names")
@pytest.mark.parametrize("wrap", [pytest.param(w, id=n) for n, w in wrappers()])
@pytest.mark.parametrize("where", ["model", "leaf", "block"])
def test_wrappers_never_show_in_names(wrap, where: str) -> None:
    model = Net()
    expected = list(model.named_modules())
    if where == "leaf":
        model.conv = wrap(model.conv)
    elif where == "block":
        model.block = wrap(model.block)
    wrapped = wrap(model) if where == "model" else model
    assert list(walk(wrapped)) == expected  # the same names, and the modules inside the wrappers


@pytest.mark.shows("Wrappers: DistributedDataParallel, FSDP1 and offloading do not show in names")
@pytest.mark.parametrize(
    ("kind", "home", "attribute"),
    [
        ("FullyShardedDataParallel", "torch.distributed.fsdp.fully_sharded_data_parallel", "_fsdp_wrapped_module"),
        ("DistributedDataParallel", "torch.nn.parallel.distributed", "module"),
        ("OffloadWrapper", "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "_checkpoint_wrapped_module"),
    ],
)
def test_wrappers_that_need_a_process_group_are_known_by_class_name(kind: str, home: str, attribute: str) -> None:
    like = type(kind, (nn.Module,), {"__module__": home})
    own = type("Own" + kind, (like,), {"__module__": "somebody"})  # a subclass of one is one
    for cls in (like, own):
        wrapper = cls()
        wrapper.add_module(attribute, Net())
        assert names(wrapper) == [n for n, _ in Net().named_modules()]


@pytest.mark.parametrize("attribute", ["module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_a_users_own_attribute_keeps_its_name_whatever_it_is_called(attribute: str) -> None:
    model = nn.Module()
    model.add_module(attribute, nn.Sequential(nn.ReLU()))
    assert names(model) == ["", attribute, f"{attribute}.0"]


def test_a_users_own_class_called_like_a_wrapper_is_none() -> None:
    mine = type("DataParallel", (nn.Module,), {"__module__": "my.torch.code"})()
    mine.module = nn.ReLU()
    assert names(mine) == ["", "module"]


def test_what_else_a_wrapper_holds_keeps_its_name() -> None:
    wrapper = nn.DataParallel(nn.Sequential(nn.ReLU()))
    wrapper.probe = nn.Identity()
    assert names(wrapper) == ["", "0", "probe"]
