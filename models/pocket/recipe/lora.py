"""Trains the eight style LoRAs on filtered scenes over the frozen UNet.

Each starts from nothing or from the adopted one.
"""

import copy
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
from .style_map import StyleMap
from .styles import STYLES
from .text import load_tokenizer, tokens_of
from .training import Checkpoint, Progress, pick_device, warm_then_cosine
from .unet import trained_models
from .velocity import (
    Forward,
    VelocityLoss,
    focused,
    noise_for,
    random_pictures,
    squared,
    twins_of,
    with_twins,
    words_for,
)

AGREEMENT = 40.0
"""What it counts that words change another thing than they should, squared: guidance 7.5 shows it 42-fold."""
LINEAR = 0.9
"""A style of whose pictures the map explains so much is linear: what words should change is known at every noise level.
Of shadows it explains 0.84, and not where they fall: 350 steps as if they were linear turned them from violet to
brown."""
SETTLED, OPEN = 400, 600
"""Under the other styles words should change what they change in the base where the style leaves the picture as it is,
and nothing elsewhere: up to the first timestep, and from the second on as the UNet's loss asks. With 500 and 700
outlines had gaps: words were not heard where they still tell a shape."""
UNCHANGED = 0.05
"""Mean squared difference of a cell's latents with the style and without, below which the style leaves it as it is."""

STRENGTHS = {"shadow": 1.25}
"""Styles that come out too faint are strengthened: shadows were brown rather than violet, and on six prompts
distinguished on four; so much stronger on all six, and on 20 of 20."""


def train_loras(plan: Plan) -> None:
    device = pick_device(plan.threads)
    autoencoder = trained_autoencoder().to(device, memory_format=torch.channels_last)
    unet, text_encoder = trained_models()
    unet.to(device, memory_format=torch.channels_last)
    text_encoder.to(device)
    torch.manual_seed(plan.seed)
    base: Any = copy.deepcopy(unet)
    unet.add_adapter(lora_config(plan.lora_rank), adapter_name=ADAPTER)
    untrained = {name: value.clone() for name, value in get_peft_model_state_dict(unet, adapter_name=ADAPTER).items()}
    compiles = plan.lora_steps * len(STYLES) >= plan.compile_from
    forward: Any = unet
    if compiles:
        base, forward = torch.compile(base, dynamic=False), torch.compile(forward, dynamic=False)
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
        _train_one(plan, phase, style, unet, forward, base, text_encoder, styled, plain)
        export_lora(style, unet, plan.lora_rank, strength=STRENGTHS.get(style, 1.0))
        checkpoint.save(finished=True)


def _train_one(
    plan: Plan,
    phase: Phase,
    style: str,
    unet: UNet2DConditionModel,
    forward: Forward,
    base: Forward,
    text_encoder: CLIPTextModel,
    styled: list[Tensor],
    plain: list[Tensor],
) -> None:
    """Train one style on latents of the same scenes with the style and without it.

    There is a tensor for each size of the phase. Captions never name the style: it belongs to the weights, and their
    scale alone says how much of it shows.
    """
    device, tokenizer = unet.device, load_tokenizer()
    losses = [StyleLoss(base, StyleMap(*latents, device), device) for latents in zip(plain, styled, strict=True)]
    parameters = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=phase.rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    progress = Progress(f"lora {style}", phase.steps)
    for step in range(phase.steps):
        rng = random.Random(f"{plan.seed} {style} step {step}")
        chosen = random_pictures(rng, phase.pictures, phase.batch)
        words = words_for(rng, [scene_number(n, phase.name, plan.seed) for n in chosen], phase.batch)
        size = step % len(styled)
        batch, bare = (with_twins(latents[size][chosen], phase.batch).to(device).float() for latents in (styled, plain))
        with torch.no_grad():
            embeddings = text_encoder(tokens_of(tokenizer, words).to(device)).last_hidden_state
        error = losses[size](forward, batch, bare, embeddings, phase.middle, focus_on_style(batch, bare))
        optimizer.zero_grad()
        error.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = warm_then_cosine(step, phase.steps, phase.rate, warmup=20)
        optimizer.step()
        progress.report(step, error.item())


class StyleLoss:
    """The diffusion loss, and a loss that keeps what words change under the style.

    Words shall change under the style what they change without it, seen through the style: a pattern that words weaken
    a little is gone under guidance, and a color that they still ask for comes back. What they change without the style
    is what the UNet without the LoRA predicts, on the same scenes drawn plainly under the same noise.
    """

    def __init__(self, base: Forward, style_map: StyleMap, device: torch.device) -> None:
        self.base, self.style_map = base, style_map
        self.velocity = VelocityLoss(device)
        self.is_linear = style_map.explained > LINEAR

    def __call__(
        self, forward: Forward, styled: Tensor, plain: Tensor, embeddings: Tensor, middle: float, focus: Tensor
    ) -> Tensor:
        """Compute the loss.

        Latents are (rows, 8, height, width), the last of them twins of the first without words, `plain` those of the
        same scenes drawn plainly, and `focus` weighs the cells.
        """
        noise, timesteps = noise_for(styled, middle)
        predicted = self.velocity.predicted(forward, styled, noise, timesteps, embeddings)
        cells = focused(focus, timesteps)
        error = self.velocity.error(predicted, styled, noise, timesteps, cells)
        conditional, unconditional = twins_of(predicted)
        with torch.no_grad():
            twins = [torch.cat(twins_of(rows)) for rows in (plain, noise, timesteps, embeddings)]
            known, blind = self.velocity.predicted(self.base, *twins).chunk(2)
        agreement = torch.full((len(conditional),), AGREEMENT, device=styled.device)
        if self.is_linear:
            expected = self.style_map(known - blind)
        else:
            error = error + self.velocity.disagreement(predicted, timesteps, cells)
            agreement *= ((OPEN - timesteps[: len(conditional)]) / (OPEN - SETTLED)).clamp(0.0, 1.0)
            left_alone = (styled - plain).square().mean(1, keepdim=True)[: len(conditional)] < UNCHANGED
            expected = (known - blind) * left_alone
        return error + (
            agreement * squared(conditional - unconditional - expected, cells[: len(conditional)])
        ).sum() / len(styled)


def focus_on_style(styled: Tensor, plain: Tensor) -> Tensor:
    """Return the weights of the cells in the loss: (rows, height, width), with a mean of 1.

    What the style changes weighs as much in all as the whole picture: a shadow is a twentieth of one. The latents are
    (rows, 8, height, width).
    """
    change = (styled - plain).square().mean(1)
    return (1 - FOCUS) + FOCUS * change / change.mean((1, 2), keepdim=True).clamp(min=1e-6)
