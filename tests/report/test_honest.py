"""What a report says is true: findings, the banner, names, times."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.language_models import ENDS, made
from tests.report.nets import Photo, Text
from torchhook._report.collect import collect
from torchhook._report.facts import Page
from torchhook._report.render import render

X = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[5, 9, 2, 14, 7, 3]])


def gpt2() -> nn.Module:
    return made("gpt2", n_layer=2, n_positions=16, **ENDS)


def kinds(page: Page) -> list[str]:
    return [finding.kind for finding in page.findings]


@pytest.mark.parametrize(("dead", "expected"), [(1, []), (12, []), (13, ["act"]), (128, ["act"])])
def test_dead_channels_are_a_finding_from_a_tenth_on(dead: int, expected: list[str]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act = nn.Conv2d(3, 128, 1), nn.ReLU()
            with torch.no_grad():
                self.conv.bias.fill_(10.0)[:dead] = -100.0

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.conv(x))

    page = collect(Net().eval(), X, gradients=False)
    found = [page.layers[i].path for finding in page.findings if finding.kind == "dead" for i, _ in finding.layers]
    # The model itself passes on what its ReLU made, and is not counted again.
    assert found == expected
    assert page.layers[2].calls[0].value is not None
    assert page.layers[2].calls[0].value.dead == dead


def test_a_dropout_that_fused_attention_does_not_call_is_no_finding() -> None:
    page = collect(gpt2(), IDS)
    dropout = next(layer for layer in page.layers if layer.path == "transformer.h.0.attn.attn_dropout")
    assert (dropout.ran, dropout.silent) == (0, "")
    assert "dropout" in dropout.idle
    assert "silent" not in kinds(page)


def test_a_projection_that_multihead_attention_reads_without_a_call_is_no_finding() -> None:
    page = collect(Text().eval(), IDS)
    projection = next(layer for layer in page.layers if layer.path == "encoder.self_attn.out_proj")
    assert (projection.ran, projection.silent) == (0, "")
    assert "pytorch#78109" in projection.idle
    assert "silent" not in kinds(page)


def test_classes_have_the_names_that_a_config_knows() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=50,
        id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1},
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    page = collect(model, IDS)
    assert {name for name, _ in page.classes} == {"cat (0)", "dog (1)"}
    assert {name for name, _ in collect(model, IDS, labels={1: "Hund"}).classes} == {"class 0", "Hund (1)"}
    model.config.id2label = {0: "LABEL_0", 1: "LABEL_1"}  # made up by the config
    assert {name for name, _ in collect(model, IDS).classes} == {"class 0", "class 1"}


def test_a_language_model_gives_tokens_and_no_feature_maps() -> None:
    page = collect(gpt2(), IDS)
    assert page.choices == "the most likely next tokens"
    assert all(name.startswith("token ") for name, _ in page.classes)
    titles = {call.maps.title for layer in page.layers for call in layer.calls if call.maps is not None}
    assert titles == {"Values"}
    block = next(layer for layer in page.layers if layer.path == "transformer.h.0")
    assert block.calls[0].maps is not None
    assert block.calls[0].maps.what == "6 tokens (down) × 32 channels (across)"


def test_a_sequence_that_is_no_text_has_positions_and_channels() -> None:
    page = collect(nn.Sequential(nn.Conv1d(4, 8, 3)), torch.rand(1, 4, 12))
    maps = page.layers[1].calls[0].maps
    assert maps is not None
    assert (maps.title, maps.what) == ("Values", "8 channels (down) × 10 positions (across)")


def test_the_times_are_of_one_run_and_add_up() -> None:
    page = collect(Photo().eval(), X, cam=None)
    assert page.times is not None
    assert page.times.plain is not None
    assert page.times.plain > 0
    assert page.times.clocked == page.layers[0].seconds
    assert 0 < page.times.own <= (page.times.clocked or 0)
    for i, layer in enumerate(page.layers):
        inside = sum(other.seconds or 0 for other in page.layers if other.parent == i)
        assert layer.seconds is None or inside <= layer.seconds
    # The heading and the tables write a time in the same way.
    assert dict(page.about)["forward"] == f"{page.times.plain * 1e3:.2f} ms"


def test_shapes_of_a_layer_that_is_used_several_times_are_counted() -> None:
    class Shrinks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.head = nn.ReLU(), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            for width in (8, 8, 6, 5, 4, 2):
                x = self.act(x[:, :width])
            return self.head(x)

    page = collect(Shrinks().eval(), torch.ones(1, 9), gradients=False)
    assert [layer.output for layer in page.layers] == ["(1, 3)", "(1, 8) and 4 more", "(1, 3)"]
    html = render(page)
    assert '"shape":"(1, 8) and 4 more"' in html
    assert "<td>(1, 8) and 4 more</td>" in html


class Clock(nn.Module):
    """Takes so many seconds itself, before and after the layers in it, by a clock that only its like move."""

    now = 0.0

    def __init__(self, takes: float, **inside: nn.Module) -> None:
        super().__init__()
        self.takes = takes
        for name, module in inside.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        Clock.now += self.takes / 2
        for module in self._modules.values():  # a shared one is a child twice
            x = module(x)
        Clock.now += self.takes / 2
        return x


def test_what_a_layer_with_children_computes_itself_is_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: Clock.now)
    twice = Clock(1.0)
    model = Clock(0.25, conv=Clock(8.0, pad=Clock(0.5)), block=Clock(0.125, first=twice, again=twice), last=Clock(2.0))
    page = collect(model.eval(), torch.ones(1, 3), gradients=False)
    own = {layer.path: layer.own for layer in page.layers if layer.shared_with is None}
    expected = {"": 0.25, "conv": 8.0, "conv.pad": 0.5, "block": 0.125, "block.first": 2.0, "last": 2.0}
    assert own == expected
    assert {layer.path: layer.seconds for layer in page.layers}["conv"] == 8.5
    assert page.times is not None
    # 0.5 + 2 + 2 in layers without children, of 12.875 in all.
    assert (page.times.clocked, page.times.own) == (12.875, 4.5)


def test_a_trained_model_of_torchvisions_is_told_by_the_names_of_its_classes() -> None:
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    names = models.ShuffleNet_V2_X0_5_Weights.DEFAULT.meta["categories"]
    model, x = models.shufflenet_v2_x0_5().eval(), torch.rand(1, 3, 32, 32)
    options = {"gradients": False, "attention": False, "cam": None, "repeats": 1}
    made = collect(model, x, **options)
    assert made.banner.startswith("Random weights")
    assert all(name.startswith("class ") for name, _ in made.classes)  # of random weights, none has a meaning
    with torch.no_grad():
        model.conv1[1].weight.add_(0.1)
        model.fc.bias.copy_(torch.randn(1000))
        model.fc.bias[285] = 1e3
    made = collect(model, x, **options)
    assert made.banner == ""
    assert made.classes[0][0] == f"{names[285]} (285)"
    assert any("torchvision" in note for note in made.notes)
    assert collect(model, x, labels={285: "Hund"}, **options).classes[0][0] == "Hund (285)"
