"""Side tasks of the UNet's training, which teach it what is where in the picture.

It learns which shape or part and which color cover each cell of the latents, and to ask the text what is at each
place.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from diffusers import UNet2DConditionModel
from PIL import ImageDraw
from torch import Tensor, nn
from torch.nn import functional

from .drawing import OVERSAMPLING, draw_flat, draw_parts, draw_thing
from .scenes import COLORS, LANDSCAPES, PARTS, PLACES_OF_PARTS, POSITIONS, SHAPES, Scene, Thing
from .text import places_of

KINDS = 1 + len(SHAPES) + len(PARTS)
FOCUS = 0.5
"""The objects' share of the diffusion loss's weight beside the whole picture's."""
SHADED = 0.8
"""About as dark as drawings make a landscape's shaded parts."""


def kind_cover(scene: Scene, columns: int, rows: int) -> Tensor:
    """Return how much of each cell each shape or landscape part covers.

    (KINDS, rows, columns), the uncovered rest first, with sums of 1.
    """
    things = [(1 + SHAPES.index(thing.shape), thing) for thing in scene.things]
    parts = {part: number for number, part in enumerate(PARTS, 1 + len(SHAPES))}
    return _cover(scene, things, parts, KINDS, columns, rows)


def color_cover(scene: Scene, columns: int, rows: int) -> Tensor:
    """Return how much of each cell each color covers: (colors, rows, columns).

    The background's color counts too, and a shaded part's as the color it is a shade of.
    """
    width, height = columns * OVERSAMPLING, rows * OVERSAMPLING
    drawn = np.asarray(draw_flat(scene, width, height)).reshape(-1, 3)
    _, first, same = np.unique(drawn @ (1 << 16, 1 << 8, 1), return_index=True, return_inverse=True)
    known = np.array([*COLORS.values()]) * np.array([1.0, SHADED])[:, None, None]
    nearest = np.square(drawn[first, None, None] - known).sum(-1).min(1).argmin(1)
    return _shares(torch.from_numpy(nearest[same].reshape(height, width)), len(COLORS))


def place_cover(scene: Scene, columns: int, rows: int) -> Tensor:
    """Return the same by places, the rest and objects without a place first: (1 + places, rows, columns)."""
    numbers = {place: number for number, place in enumerate(POSITIONS, 1)}
    things = [(numbers[at], thing) for at, thing in places_of(scene)]
    parts = {part: numbers[place] for part, place in PLACES_OF_PARTS.items()}
    return _cover(scene, things, parts, 1 + len(POSITIONS), columns, rows)


def focus_on_objects(scene: Scene, columns: int, rows: int) -> Tensor:
    """Return the weights of the cells in the diffusion loss: (rows, columns), with a mean of 1.

    The objects, or a landscape's parts, and the cells about them, each as much as the other, weigh as much in all as
    the whole picture. Four cells in five are plain background, soon learned, and what is wrong with a small object
    hardly counts beside them.
    """
    parts = LANDSCAPES.get(scene.landscape or "", ())
    one_by_one = [([(1, thing)], {}) for thing in scene.things] + [([], {part: 1}) for part in parts]
    covers = [_cover(scene, things, named, 2, columns, rows)[1:] for things, named in one_by_one]
    near = [functional.max_pool2d(cover, 3, stride=1, padding=1)[0] for cover in covers]
    return (1 - FOCUS) + FOCUS * torch.stack([spot / spot.mean() for spot in near]).mean(dim=0)


def _cover(
    scene: Scene, things: list[tuple[int, Thing]], parts: dict[str, int], classes: int, columns: int, rows: int
) -> Tensor:
    """Return the cover of cells by the numbers of the things and of the landscape's parts.

    Those not named count as the rest, 0.
    """
    big = (columns * OVERSAMPLING, rows * OVERSAMPLING)
    image = draw_parts(scene, parts, *big)
    canvas = ImageDraw.Draw(image)
    for kind, thing in things:
        draw_thing(canvas, thing, *big, fill=kind)
    return _shares(torch.from_numpy(np.array(image)).long(), classes)


def _shares(kinds: Tensor, classes: int) -> Tensor:
    return functional.avg_pool2d(functional.one_hot(kinds, classes).permute(2, 0, 1).float(), OVERSAMPLING)


class LayoutReader(nn.Module):
    """Reads the layout from the features that the last but one up block passes on.

    They have the latents' full resolution. A star's error against a circle lies in a few cells of its edge, a small
    part of the diffusion loss; here every cell of it counts. From nothing, 400 steps with it reach what takes 480
    without at the noise where shapes are decided (measured). The same idea as aligning features to a recognizer's
    (REPA, Yu et al. 2024), whose answers we can draw. Colors are read as names, so that red for orange is as wrong as
    red for green; their latents lie less than half as far apart. In the trained UNet the features' standard deviations
    are 97 to 301: without the norm every step shook the answers.
    """

    def __init__(self, unet: UNet2DConditionModel) -> None:
        super().__init__()
        block: Any = unet.up_blocks[-2]
        width = block.resnets[-1].out_channels
        self.head = nn.Sequential(
            nn.GroupNorm(1, width, affine=False), nn.Conv2d(width, KINDS + len(COLORS), kernel_size=1)
        )
        self.features: list[Tensor] = []
        block.register_forward_hook(self._keep)

    def _keep(self, block: nn.Module, arguments: Any, features: Tensor) -> None:
        self.features[:] = [features]

    def loss(self, scenes: list[Scene]) -> Tensor:
        """Return mean cross entropies over the cells of the scenes, the first rows just forwarded."""
        scores = self.head(self.features.pop()[: len(scenes)].float())
        rows, columns = scores.shape[-2:]
        loss = torch.zeros((), device=scores.device)
        kinds, colors = scores.split((KINDS, len(COLORS)), dim=1)
        for cover, said in ((kind_cover, kinds), (color_cover, colors)):
            truth = torch.stack([cover(scene, columns, rows) for scene in scenes]).to(scores.device)
            loss = loss - (truth * said.log_softmax(dim=1)).sum(dim=1).mean()
        return loss


class AttentionGuide:
    """Teaches the first head of every cross attention to look at the token of its place.

    From where an object or a landscape's part is, that is the token that says what is at that place (`FactReader`), and
    from elsewhere the last token, which says the rest. Without it the UNet soon knew where two objects belong, and gave
    both the mean of their colors (seen in its predictions at high noise).
    """

    def __init__(self, unet: UNet2DConditionModel) -> None:
        self.layers: list[Any] = [layer for name, layer in unet.named_modules() if name.endswith("attn2")]
        self.asking: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(partial(self._keep, i), with_kwargs=True)

    def _keep(self, i: int, layer: nn.Module, arguments: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        self.asking[i] = arguments[0]

    def loss(self, embeddings: Tensor, scenes: list[Scene], columns: int, rows: int) -> Tensor:
        """Return the mean cross entropy over layers and tokens.

        The scenes are the first rows just forwarded, on latents of `rows` by `columns`.
        """
        cover = torch.stack([place_cover(scene, columns, rows) for scene in scenes]).to(embeddings.device)
        losses: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            asking = self.asking.pop(i)[: len(scenes)].float()
            width = layer.to_q.out_features // layer.heads
            queries, keys = layer.to_q(asking)[..., :width], layer.to_k(embeddings)[..., :width]
            looks = (queries @ keys.transpose(1, 2) * layer.scale).log_softmax(dim=2)[..., -cover.shape[1] :].flip(2)
            there = functional.avg_pool2d(cover, round((columns * rows / asking.shape[1]) ** 0.5)).flatten(2)
            missed = -(there.transpose(1, 2) * looks).sum((0, 1)) / there.sum((0, 2)).clamp(min=1e-3)
            losses.append(missed.mean())
        return torch.stack(losses).mean()
