"""Prompts of any length reach the denoiser whole."""

from pathlib import Path

import numpy as np
import pytest
import torch

from serve_app.engine import Engine, RunRequest
from serve_app.engine.base_model import BaseModel
from serve_app.engine.families.clip_text import tokenize
from serve_app.engine.families.unet import UNetFamily
from tests.engine.conftest import EXACT_FLOAT32
from tests.engine.run_engine import finish, start
from tests.engine.tiny_models import WINDOW


def test_a_long_prompt_is_cut_into_windows_and_every_token_is_kept(sd: Path) -> None:
    encoder = UNetFamily.load(sd, EXACT_FLOAT32).encoders["text_encoder"]
    begin, end = encoder.tokenizer.bos_token_id, encoder.tokenizer.eos_token_id
    words = "abcdefghijklmnopqrstuvwxyz" * 2
    chunks = tokenize(encoder, " ".join(words))
    assert [len(chunk) for chunk in chunks] == [WINDOW] * 4
    assert all(chunk[0] == begin and end in chunk for chunk in chunks)
    kept = [token for chunk in chunks for token in chunk if token not in (begin, end)]
    assert kept == encoder.tokenizer(" ".join(words)).input_ids[1:-1]


@pytest.mark.slow
def test_the_last_word_of_a_long_prompt_changes_the_image(engine: Engine) -> None:
    words = ["red"] * 40
    prompts = [" ".join(words), " ".join([*words[:-1], "cat"])]
    ended = finish(engine, [RunRequest(run_id=p, prompt=p, steps=3, width=64, height=64) for p in prompts])
    images = [ended[prompt].image for prompt in prompts]
    assert not np.array_equal(*images)  # pyright: ignore[reportArgumentType]


def test_the_shorter_side_is_padded_with_empty_chunks(sd: Path) -> None:
    model = BaseModel.load("m", sd, EXACT_FLOAT32, lambda: None)
    run = start(model, RunRequest(run_id="k", prompt="a " * 30, negative_prompt="b", steps=2, width=64, height=64))
    empty = start(model, RunRequest(run_id="e", prompt="", steps=2, width=64, height=64))
    assert run.conditioning.context.shape[1] == 3 * WINDOW
    assert torch.equal(run.conditioning.context[0, WINDOW : 2 * WINDOW], empty.conditioning.context[1])
