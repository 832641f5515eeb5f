"""What a style makes of a difference between two pictures, as far as that is linear."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .styles import DOTS

RIDGE = 1e-3
"""Each cell's fit has this ridge, which keeps it solvable where a number hardly varies."""


class StyleMap:
    """The best linear map from the latents of drawn scenes to those of the same scenes in the style.

    It maps each cell from its neighborhood of three by three, by its place in the pattern's period. It explains 93 to
    97 % of what differs between scenes in mosaic, confetti, stripes and sepia, 84 % in shadow, and 6 to 12 % in
    outline, neon and blueprint, which show where colors meet (80 pictures that it was not fitted on, 512²).
    """

    def __init__(self, plain: Tensor, styled: Tensor, device: torch.device | str = "cpu") -> None:
        """Fit to latents (pictures, 8, height, width) on the CPU, for differences on the device."""
        height, width = plain.shape[2:]
        self.period = max(1, min(height, width) // DOTS)
        around, styled = _neighborhoods(plain.float()), styled.float()
        inputs, outputs = around.shape[1], styled.shape[1]
        weights = torch.zeros(height, width, inputs, outputs)
        left = total = 0.0
        for row in range(self.period):
            for column in range(self.period):
                seen, shown = (
                    _centered(values[:, :, row :: self.period, column :: self.period]) for values in (around, styled)
                )
                ridge = RIDGE * len(seen) * torch.eye(inputs)
                best = torch.linalg.solve(seen.T @ seen + ridge, seen.T @ shown)
                weights[row :: self.period, column :: self.period] = best
                left += float((shown - seen @ best).square().sum())
                total += float(shown.square().sum())
        self.weights = weights.to(device)
        self.explained = 1 - left / max(total, 1e-9)

    def __call__(self, difference: Tensor) -> Tensor:
        """Return what a difference of plain latents (rows, 8, height, width) becomes in the style."""
        return torch.einsum("rihw,hwio->rohw", _neighborhoods(difference), self.weights)


def _neighborhoods(latents: Tensor) -> Tensor:
    """Return each cell's own numbers and those of its eight neighbors: (rows, 72, height, width)."""
    height, width = latents.shape[2:]
    padded = F.pad(latents, (1, 1, 1, 1), mode="replicate")
    return F.unfold(padded, 3).unflatten(2, (height, width))


def _centered(values: Tensor) -> Tensor:
    """(cells of all pictures, numbers), each number with a mean of 0."""
    rows = values.permute(0, 2, 3, 1).flatten(0, 2)
    return rows - rows.mean(0)
