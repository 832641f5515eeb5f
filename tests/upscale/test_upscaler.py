"""Enlarging: exact size, no seams, weights by their published names, and a name for what is missing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from serve_app.upscale.upscaler import CompactNetwork, Upscaler, cut


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def weights(folder: Path, name: str, scale: int, width: int = 8, depth: int = 2) -> Path:
    torch.manual_seed(0)
    network = CompactNetwork(width, depth, scale)
    save_file({key: value.contiguous() for key, value in network.state_dict().items()}, folder / f"{name}.safetensors")
    return folder


@pytest.mark.parametrize("factor", [2, 4])
def test_without_weights_lanczos_gives_the_size(factor: int) -> None:
    assert Upscaler.load(None).upscale(picture(30, 50), factor).shape == (30 * factor, 50 * factor, 3)


@pytest.mark.slow
def test_tiles_join_to_what_the_whole_picture_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upscaler = Upscaler.load(weights(tmp_path, "x4", 4))
    source = picture(150, 170)
    whole = upscaler.upscale(source, 4)
    monkeypatch.setattr("serve_app.upscale.upscaler.TILE_SIDE", 64)
    seen: list[tuple[int, int]] = []
    tiled = upscaler.upscale(source, 4, on_progress=lambda done, total: seen.append((done, total)))
    assert whole.shape == (600, 680, 3)
    assert abs(tiled.astype(int) - whole).max() <= 1
    assert seen[-1] == (len(seen), len(seen))
    assert len(seen) > 1


def test_the_weights_of_the_asked_factor_are_used(tmp_path: Path) -> None:
    weights(weights(tmp_path, "x2", 2), "x4", 4)
    upscaler = Upscaler.load(tmp_path)
    assert sorted(upscaler.networks) == [2, 4]
    assert upscaler.upscale(picture(20, 20), 2).shape == (40, 40, 3)
    assert upscaler.upscale(picture(20, 20), 4).shape == (80, 80, 3)


def test_a_factor_without_weights_is_made_from_the_next(tmp_path: Path) -> None:
    assert Upscaler.load(weights(tmp_path, "x4", 4)).upscale(picture(20, 30), 2).shape == (40, 60, 3)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no upscaler weights"):
        Upscaler.load(tmp_path)


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    save_file({"conv_first.weight": torch.zeros(8, 3, 3, 3)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="compact network"):
        Upscaler.load(tmp_path)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (64, 64), (65, 200), (1000, 3)])
def test_tiles_cover_every_pixel_once_or_more(height: int, width: int) -> None:
    covered = np.zeros((height, width), int)
    for tile in cut(height, width, side=64, overlap=16):
        covered[tile.top : tile.top + tile.height, tile.left : tile.left + tile.width] += 1
    assert covered.min() >= 1
