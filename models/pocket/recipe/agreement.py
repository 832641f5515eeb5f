"""Trains the UNet's last stage: late in denoising it predicts the same with and without words.

Guidance multiplies what words change. Where a picture is all but decided they change nothing that is true, and what the
two predictions still differ by breaks colors and outlines up. The UNet learns from itself as it was, not from
pictures, so that its targets have no noise.
"""

import copy
import random
import time

import torch
from torch import Tensor

from .autoencoder import trained_autoencoder
from .latents import cached_latents, scene_number
from .layout import focus_on_objects
from .plan import Plan
from .text import load_tokenizer, tokens_of
from .training import (
    AveragedWeights,
    Checkpoint,
    Optimizers,
    Progress,
    half_precision,
    noise_schedule,
    pick_device,
    warm_then_cosine,
)
from .unet import AVERAGE_DECAY, trained_models
from .velocity import Forward, focused, words_for

SETTLED, OPEN = 350, 500
"""Up to the first timestep words shall change nothing, from the second on as much as before, between them ever more.
(Of 48 pairs drawn at guidance 7.5, both objects were right in 46 %; with guidance left out up to t = 200, 300 or 400 in
69, 73, 77 %.)"""
KEEPING, AGREEMENT = 4.0, 40.0
"""What a squared departure counts: that of either prediction, and, below `OPEN`, that of their difference, which
guidance 7.5 multiplies by 42."""
EARLY_SHARE = 0.75
"""So many of the noise levels lie below `OPEN`."""


class AgreementLoss:
    """The loss of a student against its teacher.

    It measures how far the student is from the teacher's prediction with words, and from the difference that words
    shall make.
    """

    def __init__(self, teacher: Forward, device: torch.device) -> None:
        self.teacher, self.device, self.schedule = teacher, device, noise_schedule()

    def __call__(
        self, student: Forward, latents: Tensor, timesteps: Tensor, embeddings: Tensor, focus: Tensor
    ) -> Tensor:
        """Compute the loss.

        `latents` are (rows, 8, height, width) with `timesteps` and `focus` by row; `embeddings` are those of the
        captions, then as many of no words: (2 rows, tokens, width).
        """
        noisy = self.schedule.add_noise(latents, torch.randn_like(latents), timesteps).repeat(2, 1, 1, 1)
        noisy, both = noisy.contiguous(memory_format=torch.channels_last), timesteps.repeat(2)
        with half_precision(self.device):
            with torch.no_grad():
                known, blind = self.teacher(noisy, both, embeddings, return_dict=False)[0].float().chunk(2)
            conditional, unconditional = student(noisy, both, embeddings, return_dict=False)[0].float().chunk(2)
        open_share = ((timesteps - SETTLED) / (OPEN - SETTLED)).clamp(0.0, 1.0)[:, None, None, None]
        cells = focused(focus, timesteps)
        kept = ((conditional - known).square().mean(1) * cells).mean((1, 2))
        agreed = ((conditional - unconditional - open_share * (known - blind)).square().mean(1) * cells).mean((1, 2))
        return (KEEPING * kept + torch.where(timesteps < OPEN, AGREEMENT, KEEPING) * agreed).mean()


class AgreementTraining:
    """The UNet as trained, the same once more as its teacher, and the averaged weights."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.phase = plan, plan.phases[-1]
        self.device = pick_device(plan.threads)
        torch.manual_seed(plan.seed)
        self.tokenizer = load_tokenizer()
        self.unet, self.text_encoder = trained_models("unet")
        self.unet.to(self.device, memory_format=torch.channels_last)
        self.text_encoder.to(self.device)
        self.loss = AgreementLoss(copy.deepcopy(self.unet), self.device)
        self.parameters = list(self.unet.requires_grad_(True).parameters())
        self.optimizers = Optimizers(self.unet, ("conv_in", "conv_out"))
        self.average = AveragedWeights(self.parameters, AVERAGE_DECAY)
        self.checkpoint = Checkpoint("agreed")
        self.step = 0
        if state := self.checkpoint.load():
            self.unet.load_state_dict(state["unet"])
            self.optimizers.load_state_dict(state["optimizers"])
            self.average.average = [value.to(self.device) for value in state["average"][: len(self.parameters)]]
            self.step = state["step"]

    def run(self) -> None:
        plan, phase = self.plan, self.phase
        if self.step >= plan.agreement_steps:
            return
        autoencoder = trained_autoencoder().to(self.device, memory_format=torch.channels_last)
        latents = {size: cached_latents(autoencoder, plan, phase, size) for size in phase.sizes}
        compiles = plan.agreement_steps >= plan.compile_from
        student: Forward = torch.compile(self.unet, dynamic=False) if compiles else self.unet
        progress, saved = Progress("agreement", plan.agreement_steps, self.step), time.monotonic()
        for step in range(self.step, plan.agreement_steps):
            rng = random.Random(f"{plan.seed} agreement step {step}")
            chosen = rng.choices(range(phase.pictures), k=phase.batch // 2)
            batch = latents[phase.sizes[step % len(phase.sizes)]][chosen]
            progress.report(step, self.descend(student, step, batch.to(self.device).float(), chosen, rng))
            self.step = step + 1
            if time.monotonic() - saved > plan.save_seconds:
                self.save()
                saved = time.monotonic()
        self.save()

    def descend(self, student: Forward, step: int, batch: Tensor, chosen: list[int], rng: random.Random) -> float:
        rows, columns = batch.shape[2:]
        scenes = [scene_number(n, self.phase.name, self.plan.seed) for n in chosen]
        words = words_for(rng, scenes, 2 * len(scenes))
        with torch.no_grad():
            embeddings = self.text_encoder(tokens_of(self.tokenizer, words).to(self.device)).last_hidden_state
        focus = torch.stack([focus_on_objects(scene, columns, rows) for scene in scenes]).to(self.device)
        loss = self.loss(student, batch, early_timesteps(len(batch)).to(self.device), embeddings, focus)
        rate = warm_then_cosine(step, self.plan.agreement_steps, self.plan.agreement_rate)
        self.optimizers.descend(loss, self.parameters, rate)
        self.average.update(step)
        return loss.item()

    def save(self) -> None:
        self.checkpoint.save(
            unet=self.unet.state_dict(),
            optimizers=self.optimizers.state_dict(),
            average=[*self.average.average, *self.text_encoder.parameters()],
            step=self.step,
        )


def train_agreement(plan: Plan) -> None:
    AgreementTraining(plan).run()


def early_timesteps(count: int) -> Tensor:
    """Return timesteps (count,) in 0..999, spread evenly over their distribution.

    `EARLY_SHARE` of them are below `OPEN`.
    """
    spread = (torch.rand(1) + torch.randperm(count) / count) % 1
    early, late = spread / EARLY_SHARE * OPEN, OPEN + (spread - EARLY_SHARE) / (1 - EARLY_SHARE) * (1000 - OPEN)
    return torch.where(spread < EARLY_SHARE, early, late).long().clamp(max=999)
