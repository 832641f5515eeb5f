"""The UNet and its training: a curriculum from small latents to large ones, on cached latents."""

import random
import time

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer

from .autoencoder import LATENT_CHANNELS, trained_autoencoder
from .latents import cached_latents, scene_number
from .layout import AttentionGuide, LayoutReader, focus_on_objects
from .plan import Phase, Plan
from .scenes import Scene
from .text import WIDTH, FactReader, build_text_encoder, load_tokenizer, tokens_of
from .training import AveragedWeights, Checkpoint, Optimizers, Progress, pick_device, warm_then_cosine
from .velocity import Forward, VelocityLoss, random_pictures, with_twins, words_for

TEXT_RATE = 0.3
"""The text encoder, trained before, learns at this share of the UNet's rate."""
FACTS_SHARE = 0.05
"""The text stage's loss counts this much beside the UNet's, so that no fact fades from the text while the UNet
learns."""
LAYOUT_SHARE, LOOKS_SHARE = 0.02, 0.1
"""The side tasks' losses (`layout.py`) count this much. A share of 0.3 gave the layout's gradient a norm of 28 where
the diffusion loss had 2.2 (12 pictures of 512², published UNet, a head fitted anew): clipped and by Muon, which takes
directions, it led the steps."""
AVERAGE_DECAY = 0.99


def build_unet() -> UNet2DConditionModel:
    """Build the UNet, which text reaches by cross attention and pooled into the time embedding.

    By the latter it learns colors soonest.
    """
    return UNet2DConditionModel(
        sample_size=32,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=(48, 96, 128),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=WIDTH,
        attention_head_dim=(2, 3, 4),
        norm_num_groups=16,
        addition_embed_type="text",
        addition_embed_type_num_heads=4,
    )


class UnetTraining:
    """Trains the UNet through all phases of the curriculum.

    It holds the UNet, the text encoder, their averaged weights and the optimizer.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.device = pick_device(plan.threads)
        torch.manual_seed(plan.seed)
        self.tokenizer = load_tokenizer()
        self.unet, self.text_encoder = starting_models(self.tokenizer)
        self.unet.to(self.device, memory_format=torch.channels_last)
        self.text_encoder.to(self.device)
        self.reader = FactReader(self.unet.add_embedding.proj.out_features).to(self.device).requires_grad_(False)
        self.reader.load_state_dict(Checkpoint("text").require()["reader"])
        self.layout = LayoutReader(self.unet).to(self.device)
        self.guide = AttentionGuide(self.unet)
        self.parameters = [*self.unet.parameters(), *self.text_encoder.parameters()]
        self.optimizers = Optimizers(
            self.unet,
            ("conv_in", "conv_out"),
            helpers=self.layout.parameters(),
            slow=self.text_encoder.parameters(),
            share=TEXT_RATE,
        )
        self.average = AveragedWeights(self.parameters, AVERAGE_DECAY)
        self.loss = VelocityLoss(self.device)
        self.forward: Forward = self.unet
        self.checkpoint = Checkpoint("unet")
        self.phase, self.step = 0, 0
        self.resume()

    def run(self) -> None:
        autoencoder = trained_autoencoder().to(self.device, memory_format=torch.channels_last)
        for i, phase in enumerate(self.plan.phases):
            if i < self.phase:
                continue
            latents = {size: cached_latents(autoencoder, self.plan, phase, size) for size in phase.sizes}
            self.forward = (
                torch.compile(self.unet, dynamic=False) if phase.steps >= self.plan.compile_from else self.unet
            )
            scenes = [scene_number(n, phase.name, self.plan.seed) for n in range(phase.pictures)]
            self.run_phase(phase, latents, scenes)
            self.phase, self.step = i + 1, 0
            self.save()

    def run_phase(self, phase: Phase, latents: dict[tuple[int, int], Tensor], scenes: list[Scene]) -> None:
        progress = Progress(f"unet {phase.name}", phase.steps, self.step)
        saved = time.monotonic()
        for step in range(self.step, phase.steps):
            rng = random.Random(f"{self.plan.seed} {phase.name} step {step}")
            size = phase.sizes[step % len(phase.sizes)]
            chosen = random_pictures(rng, phase.pictures, phase.batch)
            batch = with_twins(latents[size][chosen], phase.batch).to(self.device).float()
            progress.report(step, self.descend(phase, step, batch, [scenes[n] for n in chosen], rng))
            self.step = step + 1
            if time.monotonic() - saved > self.plan.save_seconds:
                self.save()
                saved = time.monotonic()

    def descend(self, phase: Phase, step: int, batch: Tensor, scenes: list[Scene], rng: random.Random) -> float:
        rows, columns = batch.shape[2:]
        words = words_for(rng, scenes, len(batch))
        embeddings = self.text_encoder(tokens_of(self.tokenizer, words).to(self.device)).last_hidden_state
        focus = with_twins(torch.stack([focus_on_objects(scene, columns, rows) for scene in scenes]), len(batch))
        loss = self.loss(self.forward, batch, embeddings, phase.middle_at(step), focus.to(self.device))
        conditional = embeddings[: len(scenes)]
        loss = loss + LAYOUT_SHARE * self.layout.loss(scenes)
        loss = loss + LOOKS_SHARE * self.guide.loss(conditional, scenes, columns, rows)
        loss = loss + FACTS_SHARE * self.reader.loss(self.unet.add_embedding(conditional), conditional, scenes)
        self.optimizers.descend(loss, self.parameters, warm_then_cosine(step, phase.steps, phase.rate))
        self.average.update(step if self.phase == 0 else 10**6)
        return loss.item()

    def save(self) -> None:
        self.checkpoint.save(
            unet=self.unet.state_dict(),
            text_encoder=self.text_encoder.state_dict(),
            layout=self.layout.state_dict(),
            optimizers=self.optimizers.state_dict(),
            average=self.average.average,
            phase=self.phase,
            step=self.step,
        )
        Checkpoint("agreed").path.unlink(missing_ok=True)  # was made of earlier weights

    def resume(self) -> None:
        if state := self.checkpoint.load():
            self.unet.load_state_dict(state["unet"])
            self.text_encoder.load_state_dict(state["text_encoder"])
            self.layout.load_state_dict(state["layout"])
            self.optimizers.load_state_dict(state["optimizers"])
            self.average.average = [value.to(self.device) for value in state["average"]]
            self.phase, self.step = state["phase"], state["step"]


def train_unet(plan: Plan) -> None:
    UnetTraining(plan).run()


def starting_models(tokenizer: CLIPTokenizer) -> tuple[UNet2DConditionModel, CLIPTextModel]:
    """Return the UNet and the text encoder with which training starts.

    The UNet is untrained or adopted, and pools text as the text stage learned to; the encoder is that stage's.
    """
    unet, text_encoder = build_unet(), build_text_encoder(tokenizer)
    if adopted := Checkpoint("adopted").load():
        unet.load_state_dict(adopted["unet"])
    state = Checkpoint("text").require()
    unet.add_embedding.load_state_dict(state["pooling"])
    text_encoder.load_state_dict(state["encoder"])
    return unet, text_encoder


def trained_models(stage: str = "agreed") -> tuple[UNet2DConditionModel, CLIPTextModel]:
    """Return the UNet and text encoder of the stage's checkpoint, with averaged weights."""
    tokenizer = load_tokenizer()
    unet, text_encoder = build_unet(), build_text_encoder(tokenizer)
    average = Checkpoint(stage).require()["average"]
    with torch.no_grad():
        torch._foreach_copy_([*unet.parameters(), *text_encoder.parameters()], average)
    return unet.eval().requires_grad_(False), text_encoder.eval().requires_grad_(False)
