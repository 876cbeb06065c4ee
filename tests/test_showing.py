"""What a notebook shows: whatever a function returns has a text of its own, and HTML that a browser can read."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchhook as th
from tests.language_models import ENDS, made
from torchhook import types

VOID = {"img", "br", "input", "meta", "link"}


class Page(HTMLParser):
    """Reads HTML strictly: what is opened is closed, in order; collects the texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.tags: list[str] = []
        self.attributes: list[dict[str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.append(dict(attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def image_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


def images(folder: Path) -> Path:
    pillow = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (folder / "photos" / name).mkdir(parents=True)
        for i in range(2 if name == "cat" else 1):
            pillow.new("RGB", (8, 8)).save(folder / "photos" / name / f"{i}.png")
    return folder / "photos"


def bad() -> nn.Sequential:
    model = net()
    nn.init.constant_(model[2].weight, float("nan"))
    return model


def findings() -> th.types.Guard:
    model = bad()
    with th.guard(model, action="record") as guard:
        model(torch.ones(1, 3))
    return guard


def watched(**options: Any) -> th.types.Watch:
    model = net()
    with th.watch(model, **options) as watch:
        model(torch.ones(2, 3)).sum().backward()
    return watch


def recorded() -> th.types.Recording:
    return th.run(net(), torch.ones(2, 3), capture="0")[1]


def session() -> th.types.Session:
    made = th.capture(net(), "0", "2:input", edit={"1": th.edits.zero()})
    made.run(torch.ones(2, 3))
    return made


def clip() -> th.types.GradientClip:
    made = th.clip_gradients(net(), norm=2.0)
    made.open()
    made.close()
    return made


def features(folder: Path) -> th.types.Features:
    return th.extract(net(), torch.ones(4, 3), "0", folder / "features", progress=False)


def tokens(folder: Path) -> th.types.Tokens:
    store = th.extract(nn.Sequential(nn.Linear(3, 4)), torch.ones(4, 5, 3), "0", folder / "tokens", progress=False)
    return store.tokens("0")


def statistics() -> th.types.Statistics:
    return th.statistics(nn.Sequential(nn.Linear(3, 4)), torch.ones(4, 5, 3), "0")


def written() -> tuple[nn.Module, torch.Tensor]:
    model = made("gpt2", vocab_size=30, n_embd=16, n_layer=2, n_head=2, **ENDS)
    return model, torch.arange(5)[None]


def lens() -> th.types.Lens:
    model, ids = written()
    return th.lens(model, th.run(model, ids, capture="@resid_post.*")[1])


def swept() -> th.types.Sweep:
    return th.sweep(
        net(), torch.ones(1, 3), torch.zeros(1, 3), lambda out: out[0, 0], sites="0", dim=None, progress=False
    )


def differing() -> th.types.DiffRow:
    other = net()
    nn.init.zeros_(other[0].weight)
    nn.init.constant_(other[0].bias, 9.0)
    return next(iter(th.diff(net(), other, torch.ones(1, 3))))


def read_again(folder: Path) -> tuple[Any, Any]:
    """What a file makes of an object, and of what it cannot hold."""
    rec = types.Recording("Net")
    rec.opened(types.Site("0")).append((0, 0, Pair("first", Pair)))
    pair = th.load(rec.save(folder / "pair"))["0"]
    return pair, pair.second


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any


def told(folder: Path) -> th.types.EditSite:
    """What an edit is told."""
    seen: list[Any] = []
    th.run(net(), torch.ones(1, 3), edit={"0": lambda value, site: seen.append(site)})
    return seen[0]


# One of each, and words that its text and its HTML must hold.
SHOWN: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "Alarm": (lambda folder: types.Alarm(3, "0", "dead", "step 3: '0': 4 of 4 units <b>"), ["dead", "step 3", "<b>"]),
    "Alarms": (lambda folder: types.Alarms(window=7), ["window", "7"]),
    "CAM": (lambda folder: th.cam(image_net(), torch.rand(2, 3, 8, 8), [1, 2]), ["gradcam", "[1, 2]", "2×8×8"]),
    "Column": (lambda folder: features(folder)["0"], ["4 rows", "F32(4)"]),
    "Diff": (lambda folder: th.diff(net(), net(), torch.ones(1, 3)), ["all the same"]),
    "DiffRow": (lambda folder: differing(), ["'0'", "differs", "at most"]),
    "EditSite": (told, ["0"]),
    "Estimate": (
        lambda folder: th.extract(net(), torch.ones(4, 3), "0", folder / "store", dry_run=True, progress=False),
        ["4 rows"],
    ),
    "FeatureDataset": (lambda folder: features(folder).dataset(ids=True), ["4 rows of", "0 F32(4)", "ids"]),
    "FeatureList": (lambda folder: th.FeatureLayers(net(), ["0"])(torch.ones(1, 3))[0], []),
    "Features": (features, ["4 rows"]),
    "Finding": (lambda folder: findings().findings[0], ["2.weight", "NaN"]),
    "GradientClip": (lambda folder: clip(), ["norm up to 2", "closed", "Sequential"]),
    "Guard": (lambda folder: findings(), ["guard", "1 found", "closed"]),
    "ImageFolder": (lambda folder: types.ImageFolder(images(folder), size=8), ["3 images of 2 classes"]),
    "Layer": (lambda folder: th.layers(net())["0"], ["'0'", "Linear", "16"]),
    "Layers": (lambda folder: th.layers(net()), ["Linear", "ReLU"]),
    "Lens": (lambda folder: lens(), ["@resid_post.1"]),
    "Loaded": (lambda folder: read_again(folder)[0], ["Pair", "first"]),
    "Op": (lambda folder: th.ops(net(), torch.ones(1, 3))[0], ["0", "linear"]),
    "Opaque": (lambda folder: read_again(folder)[1], ["type", "Pair"]),
    "Ops": (lambda folder: th.ops(net(), torch.ones(1, 3)), ["0/linear", "(1, 4)"]),
    "PagePath": (lambda folder: th.report(net(), torch.ones(1, 3), folder / "page.html", repeats=1), []),
    "Record": (lambda folder: recorded().records()[0], ["0", "(2, 4)", "float32", "cpu"]),
    "Recording": (lambda folder: recorded(), ["(2, 4)"]),
    "Roles": (lambda folder: th.roles(*written()), ["@embed", "transformer.wte"]),
    "Session": (lambda folder: session(), ["session on Sequential", "3 sites", "closed"]),
    "Site": (lambda folder: types.Site("layer4", port="grad"), []),
    "SiteStatistics": (lambda folder: statistics()["0"], ["20 values"]),
    "Snapshot": (lambda folder: watched().history[-1], ["step 0"]),
    "Statistics": (lambda folder: statistics(), ["kurtosis", "4 rows"]),
    "Stopped": (lambda folder: th.run(net(), torch.ones(1, 3), capture="0", stop=True)[0], ["stopped at '0'"]),
    "StoreReport": (lambda folder: features(folder).verify(), ["every byte as it was written"]),
    "Sweep": (lambda folder: swept(), ["0"]),
    "Table": (lambda folder: recorded().table(), ["Recording of Sequential", "(2, 4)"]),
    "TokenLoader": (lambda folder: tokens(folder).loader(8, shuffle=True), ["3 batches of 8 tokens", "epoch 0"]),
    "TokenStream": (
        lambda folder: th.stream(net(), torch.ones(4, 5, 3), "0", buffer=16, batch=4),
        ["tokens of 0", "batches of 4"],
    ),
    "Tokens": (tokens, ["20 tokens", "float32"]),
    "Watch": (lambda folder: watched(), ["watch", "3 sites"]),
}


def test_the_objects_shown_here_are_all_there_are() -> None:
    assert SHOWN.keys() == set(types.__all__)


@pytest.mark.parametrize("name", SHOWN)
def test_every_result_has_a_text_of_its_own_that_is_short(name: str, tmp_path: Path) -> None:
    make, words = SHOWN[name]
    value = make(tmp_path)
    assert isinstance(value, getattr(types, name))
    text = repr(value)
    assert "object at 0x" not in text
    assert "tensor(" not in text or name == "FeatureList"  # which prints as the list that it is
    assert max(map(len, text.splitlines())) <= 200
    assert [word for word in words if word not in text and word not in str(value)] == []


# Strings, rows and lists are shown as such.
PLAIN = {"Site", "EditSite", "DiffRow", "FeatureList", "Layer", "Loaded", "Op", "Opaque"}


@pytest.mark.parametrize("name", sorted(SHOWN.keys() - PLAIN))
def test_every_result_is_shown_as_html_in_a_notebook(name: str, tmp_path: Path) -> None:
    make, words = SHOWN[name]
    value = make(tmp_path)
    page = Page(value._repr_html_())
    assert page.attributes[0]["class"] == "torchhook"
    words = [word for word in words if name != "Watch"]  # its table is that of the step
    assert [word for word in words if word not in page.text] == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: th.capture(net(), "0"),
        lambda: th.edit(net(), {"0": th.edits.zero()}),
        lambda: th.guard(net()),
        lambda: th.watch(net()),
        lambda: th.clip_gradients(net(), 1.0),
    ],
)
def test_what_is_not_open_yet_says_so_and_can_be_shown(make: Callable[[], Any]) -> None:
    made = make()
    assert "not open yet" in repr(made)
    assert "not open yet" in Page(made._repr_html_()).text
    with made:
        assert "open" in repr(made)
        assert "not open" not in repr(made)
        Page(made._repr_html_())
        with pytest.warns(th.errors.NeverRanWarning) if not isinstance(made, types.GradientClip) else _nothing():
            made.close()


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


def test_a_session_lists_its_sites_what_is_done_there_and_how_often_they_ran() -> None:
    page = Page(session()._repr_html_())
    assert page.text.split() == [
        *["session", "on", "Sequential:", "3", "sites,", "closed"],
        *["site", "calls", "1", "edited", "1", "0", "read", "1", "2:input", "read", "1"],
    ]


def test_a_finding_shows_the_tensors_around_it_in_numbers() -> None:
    finding = findings().findings[0]
    page = Page(finding._repr_html_())
    assert finding.headline in page.text.replace("  ", " ")
    assert "8 NaN" in page.text
    assert finding._advice() in page.text


def test_a_snapshot_and_its_watch_show_the_same_statistics_as_they_are_kept() -> None:
    watch = watched(statistics=["mean", "histogram", "grad_norm"])
    snapshot = watch.history[-1]
    table = snapshot.table()
    assert table.columns == ["site", "mean", "grad_norm"]
    assert table.rows == watch.table().rows
    row = next(row for row in table.rows if row[0] == "0")
    assert row[1] == f"{snapshot.sites['0']['mean']:.4g}"


def test_maps_are_shown_as_a_picture_where_there_is_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = th.cam(image_net(), torch.rand(6, 3, 8, 8), 1)
    page = Page(seen._repr_html_())
    [source] = [attributes["src"] for tag, attributes in zip(page.tags, page.attributes, strict=True) if tag == "img"]
    assert str(source).startswith("data:image/png;base64,iVBORw0KGgo")
    assert "2 more examples" in page.text
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "img" not in Page(seen._repr_html_()).tags


# -- the page of a report ----------------------------------------------------------------------------------


def test_a_report_is_a_path_like_any_other(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    path = th.report(net(), torch.ones(1, 3), out, repeats=1)
    assert isinstance(path, Path)
    assert path == out
    assert out == path
    assert hash(path) == hash(out)
    assert os.fspath(path) == str(path) == str(out)
    assert (path.parent / "other.txt") == tmp_path / "other.txt"
    for again in (pickle.loads(pickle.dumps(path)), copy.copy(path), copy.deepcopy(path)):
        assert again == path
        assert type(again) is type(path)
    assert Path(path).read_text("utf-8") == path.read_text("utf-8")


def test_a_notebook_shows_the_page_in_a_frame_and_anything_else_as_a_path(tmp_path: Path) -> None:
    path = th.report(net(), torch.ones(1, 3), tmp_path / "page.html", repeats=1)
    page = Page(path._repr_html_() or "")
    assert page.tags == ["iframe"]
    assert page.attributes[0]["srcdoc"] == path.read_text("utf-8")
    assert types.PagePath(tmp_path)._repr_html_() is None
    path.unlink()
    assert path._repr_html_() is None
