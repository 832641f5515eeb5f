"""Trains the eight style LoRAs on filtered scenes over the frozen UNet, each from nothing or from the adopted one."""

import random
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import CLIPTextModel

from .autoencoder import trained_autoencoder
from .export import ADAPTER, export_lora, lora_config
from .latents import cached_latents, scene_number
from .layout import FOCUS
from .plan import Phase, Plan
from .styles import STYLES
from .text import load_tokenizer, tokens_of
from .training import Checkpoint, Progress, pick_device, warm_then_cosine
from .unet import trained_models
from .velocity import Forward, VelocityLoss, random_pictures, twins_among, with_twins, words_for

AGREEMENT = 40.0
"""What a squared difference between the predictions with and without words counts, up to `SETTLED`, from there on less, and from
`OPEN` on no more than for the UNet: guidance 7.5 shows it 42-fold. Outlines were told from the base on 13 prompts of 20 after
320 steps without it, on 20 after 450 more with it."""
SETTLED, OPEN = 500, 700


def train_loras(plan: Plan) -> None:
    device = pick_device(plan.threads)
    autoencoder = trained_autoencoder().to(device, memory_format=torch.channels_last)
    unet, text_encoder = trained_models()
    unet.to(device, memory_format=torch.channels_last)
    text_encoder.to(device)
    torch.manual_seed(plan.seed)
    unet.add_adapter(lora_config(plan.lora_rank), adapter_name=ADAPTER)
    untrained = {name: value.clone() for name, value in get_peft_model_state_dict(unet, adapter_name=ADAPTER).items()}
    compiles = plan.lora_steps * len(STYLES) >= plan.compile_from
    forward: Any = torch.compile(unet, dynamic=False) if compiles else unet
    phase = Phase(
        "lora", plan.lora_sizes, plan.lora_pictures, plan.lora_steps, plan.lora_batch, plan.lora_rate, middle=0.5
    )
    for style in STYLES:
        checkpoint = Checkpoint(f"lora-{style}")
        state = checkpoint.load() or {"adapter": untrained}
        if "finished" in state:
            continue
        torch.manual_seed(plan.seed)
        styled, plain = (
            [cached_latents(autoencoder, plan, phase, size, look) for size in phase.sizes] for look in (style, None)
        )
        set_peft_model_state_dict(unet, state["adapter"], adapter_name=ADAPTER)
        _train_one(plan, phase, style, unet, forward, text_encoder, styled, plain)
        export_lora(style, unet, plan.lora_rank)
        checkpoint.save(finished=True)


def _train_one(
    plan: Plan,
    phase: Phase,
    style: str,
    unet: UNet2DConditionModel,
    forward: Forward,
    text_encoder: CLIPTextModel,
    styled: list[Tensor],
    plain: list[Tensor],
) -> None:
    """On latents of the same scenes with the style and without, a tensor for each size of the phase. Captions never name the
    style: it belongs to the weights, and their scale alone says how much of it shows."""
    device, tokenizer = unet.device, load_tokenizer()
    loss = StyleLoss(device)
    parameters = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=phase.rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    progress = Progress(f"lora {style}", phase.steps)
    for step in range(phase.steps):
        rng = random.Random(f"{plan.seed} {style} step {step}")
        chosen = random_pictures(rng, phase.pictures, phase.batch)
        words = words_for(rng, [scene_number(n, phase.name, plan.seed) for n in chosen], phase.batch)
        size = step % len(styled)
        batch = with_twins(styled[size][chosen], phase.batch).to(device).float()
        focus = focus_on_style(batch, with_twins(plain[size][chosen], phase.batch).to(device).float())
        with torch.no_grad():
            embeddings = text_encoder(tokens_of(tokenizer, words).to(device)).last_hidden_state
        error = loss(forward, batch, embeddings, phase.middle, focus)
        optimiser.zero_grad()
        error.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimiser.param_groups:
            group["lr"] = warm_then_cosine(step, phase.steps, phase.rate, warmup=20)
        optimiser.step()
        progress.report(step, error.item())


class StyleLoss:
    """The diffusion loss, and that words change nothing once the picture is all but decided, of which styles need more than the
    UNet: a pattern that words weaken a little is gone under guidance, and a colour that they still ask for comes back."""

    def __init__(self, device: torch.device) -> None:
        self.velocity = VelocityLoss(device)

    def __call__(self, forward: Forward, latents: Tensor, embeddings: Tensor, middle: float, focus: Tensor) -> Tensor:
        """Of latents (rows, 8, height, width), the last of them twins of the first without words, and their focus by cells."""
        seen: list[tuple[Tensor, Tensor]] = []

        def kept(noisy: Tensor, timesteps: Tensor, embeddings: Tensor, **options: Any) -> tuple[Tensor]:
            predicted = forward(noisy, timesteps, embeddings, **options)
            seen.append((timesteps, predicted[0].float()))
            return predicted

        error = self.velocity(kept, latents, embeddings, middle, focus)
        ((timesteps, predicted),) = seen
        rows, twins = len(latents), twins_among(len(latents))
        share = ((OPEN - timesteps[:twins]) / (OPEN - SETTLED)).clamp(0.0, 1.0)
        difference = ((predicted[:twins] - predicted[rows - twins :]).square().mean(1) * focus[:twins]).mean((1, 2))
        return error + AGREEMENT * (share * difference).sum() / rows


def focus_on_style(styled: Tensor, plain: Tensor) -> Tensor:
    """Weights of the cells in the loss, of latents (rows, 8, height, width), with a mean of 1: what the style changes weighs
    as much in all as the whole picture. A shadow is a twentieth of one: (rows, height, width)."""
    change = (styled - plain).square().mean(1)
    return (1 - FOCUS) + FOCUS * change / change.mean((1, 2), keepdim=True).clamp(min=1e-6)
