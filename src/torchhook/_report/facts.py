"""What a report knows, as plain data: nothing here holds a tensor or a module."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchhook._words import listed


# The scripts and the template of the page read these fields by name: what is renamed here, Python does not miss there.
# Numbers that are not finite become null on the way, so that None and NaN look the same to a script.
@dataclasses.dataclass
class Numbers:
    """Statistics of one tensor; all but the counts are of its finite values."""

    elements: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    norm: float | None
    zeros: float
    """The share of values that are exactly zero."""
    nans: int
    infs: int
    counts: list[int]
    """A histogram from ``low`` to ``high``; the outermost bins hold what lies beyond."""
    low: float
    high: float
    without_zeros: bool
    """Whether the histogram leaves the zeros out, because they would hide the rest."""
    dead: int = 0
    channels: int = 0


@dataclasses.dataclass
class Sprite:
    """Small pictures side by side in one PNG."""

    # All in one, cut by the style of the page: alone, each would bring a palette of its own, 768 bytes.
    uri: str
    columns: int
    width: int
    height: int
    labels: list[str]
    what: str
    title: str = "Feature maps"


@dataclasses.dataclass
class Call:
    """One call of a layer."""

    shape: str
    dtype: str
    device: str
    nbytes: int
    order: int
    """Its place among all calls, in the order in which they returned."""
    leaf: str = ""
    """Which tensor of a nested value the numbers and pictures are of."""
    value: Numbers | None = None
    gradient: Numbers | None = None
    maps: Sprite | None = None
    attention: list[Sprite] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Weight:
    """One parameter or buffer that a layer owns itself."""

    name: str
    shape: str
    dtype: str
    trainable: bool
    rms: float | None
    gradient: float | None


@dataclasses.dataclass
class LayerFacts:
    """One module and what passed it."""

    path: str
    type: str
    # A place in the list of layers, -1 for the model itself; so is ``shared_with``.
    parent: int
    depth: int
    settings: str
    parameters: int
    weights: list[Weight]
    runs: bool
    """False for containers that have no forward."""
    shared_with: int | None = None
    ran: int = 0
    outputs: list[str] = dataclasses.field(default_factory=list)
    """The shapes that its calls gave, each once, also those of calls that are not shown."""
    seconds: float | None = None
    own: float | None = None
    """Its seconds without those of the layers that it called."""
    calls: list[Call] = dataclasses.field(default_factory=list)
    silent: str = ""
    """Why it never ran."""
    idle: str = ""
    """Why that it never ran changes nothing."""

    @property
    def output(self) -> str:
        """The shape of its first call's output, and how many others there were."""
        return listed(self.outputs, most=1)


@dataclasses.dataclass
class Issue:
    """One kind of trouble, and the layers that have it, each with a note."""

    kind: str
    title: str
    advice: str
    # Places again, not layers: ``asdict`` would copy each layer into every finding.
    layers: list[tuple[int, str]]


@dataclasses.dataclass
class Picture:
    """The input as an image, and the class activation map over it."""

    uri: str
    width: int
    height: int
    overlay: str = ""
    caption: str = ""


@dataclasses.dataclass
class Times:
    """Seconds of one forward pass: plain, and with a clock at every layer."""

    plain: float | None
    clocked: float | None
    own: float
    """In layers that hold no others, of the clocked pass: the rest is what the others do themselves."""


@dataclasses.dataclass
class Token:
    """One token of the input, and how much the score depends on it, from 0 to 1."""

    text: str
    weight: float | None = None


@dataclasses.dataclass
class Page:
    """Everything that a report shows."""

    title: str
    model: str
    about: list[tuple[str, str]]
    layers: list[LayerFacts]
    findings: list[Issue]
    input: str
    output: str
    score: str
    picture: Picture | None = None
    tokens: list[Token] = dataclasses.field(default_factory=list)
    classes: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    """The most likely classes with their shares."""
    choices: str = "the most likely classes"
    """What these are."""
    banner: str = ""
    """What has to be known before anything else is read."""
    times: Times | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """As dicts, lists, numbers and strings."""
        return dataclasses.asdict(self)
