"""Turns pixels into latents and latents into pixels, with the VAE of any family, one image a call.

So an image's bits never depend on other images.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from serve_app.domain.families import reference_size
from serve_app.engine.run import EncodedImage, RunRequest


class Autoencoder:
    """A VAE with its family's scaling: what the VAE takes and gives is latents / `factor` · `deviation` + `mean`.

    `mean` and `deviation` are numbers or [channels, 1, 1]. `patch` cells per side of the VAE's latents are one of the
    family's. A run begins from what the VAE is surest of where it is `sure`, otherwise from some of what it may be.
    """

    def __init__(
        self,
        vae: Any,
        *,
        factor: float = 1.0,
        deviation: Tensor | float = 1.0,
        mean: Tensor | float = 0.0,
        patch: int = 1,
        sure: bool = False,
    ) -> None:
        self._vae, self._factor, self._deviation, self._mean, self._patch = vae, factor, deviation, mean, patch
        self._sure = sure

    def decode(self, latents: Tensor, request: RunRequest) -> np.ndarray:
        """Return the image of latents [channels, …] as uint8 [height, width, 3] of the request's size.

        Its middle is kept where it is larger. Where the mask is black it is the request's image to the pixel, and
        where the mask is grey a blend of both. Raises FloatingPointError on numbers that are not finite.
        """
        cells = latents / self._factor * self._deviation + self._mean
        whole = torch.pixel_shuffle(cells[None], self._patch)
        pixels = self._vae.decode(whole.to(self._vae.dtype), return_dict=False)[0][0].float()
        if not bool(pixels.isfinite().all()):  # clamped, such pixels would be a black image
            raise FloatingPointError("the decoded image has numbers that are not finite")
        eight_bit = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
        top, left = (eight_bit.shape[0] - request.height) // 2, (eight_bit.shape[1] - request.width) // 2
        drawn = np.ascontiguousarray(eight_bit[top : top + request.height, left : left + request.width])
        if request.image is None or request.mask is None:
            return drawn
        opacity = request.mask[..., None].astype(np.uint32)
        return ((drawn * opacity + request.image * (255 - opacity) + 127) // 255).astype(np.uint8)

    def encode(self, request: RunRequest, shape: tuple[int, ...]) -> EncodedImage:
        """Encode the request's image, and its mask, into latents of this shape.

        An image that is smaller than its latents' is continued by its edges. Raises ValueError where either is not of
        the request's size, FloatingPointError on numbers that are not finite.
        """
        assert request.image is not None
        image = self._whole(request.image, request, shape, channels=(3,))
        encoded = self._vae.encode((image / 255 * 2 - 1).to(self._vae.dtype))
        is_tiny = hasattr(encoded, "latents")  # a tiny autoencoder gives latents, and others their mean and deviation
        mean = self._scaled(encoded.latents if is_tiny else encoded.latent_dist.mean, self._mean)
        if not bool(mean.isfinite().all()):
            raise FloatingPointError("the encoded image has numbers that are not finite")
        return EncodedImage(
            mean,
            None if is_tiny or self._sure else self._scaled(encoded.latent_dist.std),
            None if request.mask is None else self._mask(request.mask, request, shape),
        )

    def _scaled(self, raw: Tensor, mean: Tensor | float = 0.0) -> Tensor:
        return (torch.pixel_unshuffle(raw.float(), self._patch)[0] - mean) / self._deviation * self._factor

    def _mask(self, mask: np.ndarray, request: RunRequest, shape: tuple[int, ...]) -> Tensor:
        """Return 1 for each cell that is redrawn and 0 for others, [1, …], as diffusers' pipelines take them."""
        drawn = (self._whole(mask, request, shape, channels=()) / 255 >= 0.5).float()
        return F.interpolate(drawn, size=shape[1:], mode="nearest")[0]

    def _whole(
        self, pixels: np.ndarray, request: RunRequest, shape: tuple[int, ...], *, channels: tuple[int, ...]
    ) -> Tensor:
        """Return uint8 pixels of the request's size as float32 [1, channels, …], continued to the size of the latents."""
        if pixels.shape != (request.height, request.width, *channels) or pixels.dtype != np.uint8:
            what = "image" if channels else "mask"
            raise ValueError(
                f"{what}: must be uint8 {[request.height, request.width, *channels]} for an image of this size, not "
                f"{pixels.dtype} {list(pixels.shape)}"
            )
        side = self._patch * 2 ** (len(self._vae.config.block_out_channels) - 1)
        down, along = (cells * side - own for cells, own in zip(shape[1:], pixels.shape[:2], strict=True))
        whole = torch.tensor(pixels, device=self._vae.device).reshape(*pixels.shape[:2], -1).permute(2, 0, 1).float()
        return F.pad(whole[None], (along // 2, along - along // 2, down // 2, down - down // 2), mode="replicate")


def begun(
    image: Image.Image | None, mask: Image.Image | None, width: int, height: int, *, is_seen: bool
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return what a run of this size takes of a picture, and of a mask that is laid over the whole of it.

    Both are scaled, as diffusers' pipelines scale images, and cut at two ends where the size has other proportions. A
    picture that `is_seen` as a whole keeps its own size, as far as the model takes it. A mask is 255 where it
    is white.
    """
    if is_seen and image is not None:
        return _reference(image.convert("RGB")), mask and np.asarray(mask.convert("L"))
    frame = (image or mask or Image.new("L", (width, height))).size
    scale = min(frame[0] / width, frame[1] / height)
    left, top = (max(0.0, (side - own * scale) / 2) for side, own in zip(frame, (width, height), strict=True))
    box = (left / frame[0], top / frame[1], 1 - left / frame[0], 1 - top / frame[1])

    def fitted(picture: Image.Image, by: Image.Resampling) -> np.ndarray:
        part = tuple(edge * side for edge, side in zip(box, picture.size * 2, strict=True))
        return np.asarray(picture.resize((width, height), by, box=part))  # pyright: ignore

    return (
        image and fitted(image.convert("RGB"), Image.Resampling.LANCZOS),
        mask and fitted(mask.convert("L"), Image.Resampling.BILINEAR),  # LANCZOS would make black lighter near white
    )


def _reference(image: Image.Image) -> np.ndarray:
    """Return a picture as diffusers' `Flux2ImageProcessor` gives it to the VAE: reduced, then cut at its edges."""
    reduced, (width, height) = reference_size(*image.size)
    if reduced != image.size:
        image = image.resize(reduced, Image.Resampling.LANCZOS)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return np.asarray(image.crop((left, top, left + width, top + height)))
