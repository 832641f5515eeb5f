"""Qwen's VAE makes of an image what diffusers makes of a video's only frame, on any thread."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from serve_app.engine.families.qwen_vae import of_images
from tests.engine.tiny_qwen_vae import tiny_qwen_vae

TOLERANCE = 1e-4


@torch.inference_mode()
def test_one_image_is_a_video_of_one_frame_and_two_threads_may_draw_at_once() -> None:
    torch.manual_seed(0)
    vae = tiny_qwen_vae()
    pictures, latents = torch.randn(4, 3, 64, 96), torch.randn(4, 16, 8, 12)
    encoded = [vae.encode(each[None, :, None]).latent_dist for each in pictures]
    decoded = [vae.decode(each[None, :, None]).sample[:, :, 0] for each in latents]
    weights = sum(weight.numel() for weight in vae.parameters())
    made = of_images(vae)
    assert sum(weight.numel() for weight in made.parameters()) < weights / 2

    @torch.inference_mode()
    def differences(i: int) -> list[Tensor]:
        again, drawn = made.encode(pictures[i : i + 1]).latent_dist, made.decode(latents[i : i + 1]).sample
        pairs = [(again.mean, encoded[i].mean), (again.std, encoded[i].std), (drawn.clamp(-1, 1), decoded[i])]
        return [(ours - theirs.view(ours.shape)).abs().max() for ours, theirs in pairs]

    with ThreadPoolExecutor(2) as threads:
        assert max(float(each) for some in threads.map(differences, [0, 1, 2, 3] * 2) for each in some) < TOLERANCE
    assert min(each.std() for each in decoded) > 100 * TOLERANCE
