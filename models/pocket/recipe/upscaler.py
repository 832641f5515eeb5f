"""Super-resolution by Real-ESRGAN's compact network (Wang et al. 2021), trained on the pocket model's world."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class CompactUpscaler(nn.Module):
    """SRVGGNetCompact: convolutions at low resolution, one pixel shuffle, added to the enlarged input. RGB in 0..1."""

    def __init__(self, scale: int, features: int = 32, layers: int = 8) -> None:
        super().__init__()
        self.scale = scale
        body: list[nn.Module] = [nn.Conv2d(3, features, 3, 1, 1), nn.PReLU(features)]
        for _ in range(layers):
            body += [nn.Conv2d(features, features, 3, 1, 1), nn.PReLU(features)]
        body.append(nn.Conv2d(features, 3 * scale**2, 3, 1, 1))
        self.body = nn.ModuleList(body)

    def forward(self, picture: Tensor) -> Tensor:
        hidden = picture
        for layer in self.body:
            hidden = layer(hidden)
        enlarged = functional.interpolate(picture, scale_factor=self.scale, mode="nearest")
        return functional.pixel_shuffle(hidden, self.scale) + enlarged
