"""Channel weights by trying: how the score changes when the input is seen through a channel, or goes without it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from tqdm import tqdm

from torchhook._cam.inputs import Subject
from torchhook._cam.methods import ablationcam_weights, scorecam_weights
from torchhook._cam.result import stretch, upsample
from torchhook._core import calling
from torchhook._core.index import Index
from torchhook._core.session import Session
from torchhook._core.targets import Target
from torchhook._recording.address import Site
from torchhook._values import tree
from torchhook._values.layout import Layout
from torchhook._values.targets import Scores

Trial = Callable[[int, Tensor], Tensor]
"""Takes an example and some of its channels, returns a score for each."""


def score_weights(model: nn.Module, subject: Subject, score: Scores, maps: Tensor, chunks: Chunks) -> Tensor:
    """The weights of Score-CAM: each channel, stretched to [0, 1], is a mask on the input."""

    def trial(example: int, channels: Tensor) -> Tensor:
        masks = stretch(upsample(maps[example, channels], subject.size))
        image = subject.image[example, None] * masks[:, None].to(subject.image.dtype)
        return score(calling.call(model, subject.copies(example, len(channels), image)), example)

    # A channel that was not tried has no share in the softmax.
    return scorecam_weights(chunks.run(trial, maps, torch.full(maps.shape[:2], -torch.inf)).to(maps))


def ablation_weights(
    model: nn.Module,
    index: Index,
    target: Target,
    subject: Subject,
    score: Scores,
    before: Tensor,
    layout: Layout,
    leaf: str,
    maps: Tensor,
    chunks: Chunks,
) -> Tensor:
    """The weights of Ablation-CAM: each channel is set to zero where it passes."""

    def trial(example: int, channels: Tensor) -> Tensor:
        def without(value: Tensor) -> Tensor:
            batch = layout.batch if layout.kind == "tokens" else 0
            # A copy: the same tensor may go on elsewhere, as in a residual connection.
            rows = value.movedim(batch, 0).movedim(layout.channels, 1).clone()
            rows[torch.arange(len(channels), device=channels.device), channels] = 0
            return rows.movedim(1, layout.channels).movedim(0, batch)

        def edit(value: object, site: Site) -> object:
            return tree.put(value, leaf, without)

        session = Session(model, index=index, warn=False)  # for each trial, because a session opens once
        session.edit(target, edit)
        with session:
            output = calling.call(model, subject.copies(example, len(channels)))
        return score(output, example)

    before = before[:, None].cpu()
    # A channel that was not tried keeps the score, and so has no weight.
    scores = chunks.run(trial, maps, before.expand(maps.shape[:2]).clone())
    return ablationcam_weights(before.to(scores), scores).to(maps)


class Chunks:
    """So many channels at a time, of the strongest so many."""

    def __init__(self, size: int, channels: int | None, progress: bool) -> None:
        for name, number in (("batch", size), ("channels", channels)):
            if number is not None and number < 1:
                raise ValueError(f"{name}={number}: give a positive number.")
        self._size, self._channels, self._progress = size, channels, progress

    def run(self, trial: Trial, maps: Tensor, scores: Tensor) -> Tensor:
        """Fill ``scores`` (examples × channels) by trying channel after channel."""
        kept = maps.shape[1] if self._channels is None else min(self._channels, maps.shape[1])
        strength = maps.flatten(2).square().sum(-1)
        todo = [(example, strength[example].topk(kept).indices.sort().values) for example in range(len(maps))]
        with torch.no_grad(), tqdm(total=kept * len(maps), desc="channels", disable=not self._progress) as bar:
            for example, channels in todo:
                for some in channels.split(self._size):
                    scores[example, some.cpu()] = trial(example, some).to(scores)
                    bar.update(len(some))
        return scores
