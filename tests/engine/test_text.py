"""Prompts of any length reach the denoiser whole, and their weights act as in compel."""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serve_app.domain.prompt_weights import literal
from serve_app.engine import Engine, EngineOptions, RunRequest
from serve_app.engine.families.clip_text import tokenize
from serve_app.engine.families.unet import UNetFamily
from tests.engine.conftest import EXACT_FLOAT32
from tests.engine.run_engine import finish, load, start
from tests.engine.tiny_models import WINDOW, write_lora

compel: Any = importlib.import_module("compel")  # pyright would read every model of transformers for its types: 44 s


def test_a_long_prompt_is_cut_into_windows_and_every_token_is_kept(sd: Path) -> None:
    encoder = UNetFamily.load(sd, EXACT_FLOAT32).encoders["text_encoder"]
    begin, end = encoder.tokenizer.bos_token_id, encoder.tokenizer.eos_token_id
    words = "abcdefghijklmnopqrstuvwxyz" * 2
    chunks = [chunk.ids for chunk in tokenize(encoder, literal(" ".join(words)))]
    assert [len(chunk) for chunk in chunks] == [WINDOW] * 4
    assert all(chunk[0] == begin and end in chunk for chunk in chunks)
    kept = [token for chunk in chunks for token in chunk if token not in (begin, end)]
    assert kept == encoder.tokenizer(" ".join(words)).input_ids[1:-1]


def test_the_shorter_side_is_padded_with_empty_chunks(sd: Path) -> None:
    model = load(sd, EXACT_FLOAT32)
    run = start(model, RunRequest(run_id="k", prompt="a " * 30, negative_prompt="b", steps=2, width=64, height=64))
    empty = start(model, RunRequest(run_id="e", prompt="", steps=2, width=64, height=64))
    assert run.conditioning.context.shape[1] == 3 * WINDOW
    assert torch.equal(run.conditioning.context[0, WINDOW : 2 * WINDOW], empty.conditioning.context[1])


TOLERANCE = 1e-4
WEIGHTED = {
    "a (red:1.5) cat": "a (red)1.5 cat",
    "(a (red) [big] cat:1.2)": "(a (red)1.1 (big)0.9090909 cat)1.2",
    "the (sad:0.3) (old:0.6) cat (by:1.4)": "the (sad)0.3 (old)0.6 cat (by)1.4",
    "(gone:0) cat": "(gone)0.0 cat",
    "a cat of (words over chunks:0.5) and (more yet:1.3)": "a cat of (words over chunks)0.5 and (more yet)1.3",
    "a cat": "a cat",
}
"""Prompts in our syntax and compel's."""


@pytest.mark.parametrize(
    ("name", "hidden_states"),
    [
        ("sd", compel.ReturnedEmbeddingsType.LAST_HIDDEN_STATES_NORMALIZED),
        ("sdxl", compel.ReturnedEmbeddingsType.PENULTIMATE_HIDDEN_STATES_NON_NORMALIZED),
    ],
)
def test_weights_act_as_in_compel(name: str, hidden_states: Any, request: pytest.FixtureRequest) -> None:
    family = UNetFamily.load(request.getfixturevalue(name), EXACT_FLOAT32)
    references: list[Any] = [
        compel.Compel(
            tokenizer=encoder.tokenizer,
            text_encoder=encoder.model,
            returned_embeddings_type=hidden_states,
            truncate_long_prompts=False,
            split_long_text_mode=compel.SplitLongTextMode.BRUTAL,
        )
        for encoder in family.encoders.values()
    ]
    for prompt, theirs in WEIGHTED.items():
        asked = RunRequest(run_id="w", prompt=prompt, negative_prompt=prompt, prompt_weights=True)
        with torch.inference_mode():
            encoded = family.encode(asked, "")
            expected = torch.cat([reference(theirs) for reference in references], dim=-1)
        assert encoded.context.shape == (2, *expected.shape[1:])
        assert (encoded.context - expected).abs().max() <= TOLERANCE, prompt


def test_weighted_and_literal_runs_of_one_text_keep_their_own_bytes_in_company(small_sd: Path, tmp_path: Path) -> None:
    texts = ["a (red:1.8) cat", "a [red] cat"]
    asked = [
        RunRequest(run_id=f"{text} {weights}", prompt=text, negative_prompt=other, prompt_weights=weights, steps=2,
                   width=64, height=64)
        for text, other in zip(texts, reversed(texts), strict=True) for weights in (True, False)
    ]  # fmt: skip
    options = EngineOptions(device="cpu", dtype="float32", max_rows=8)
    with Engine.load(small_sd, options, findings=tmp_path) as engine:
        together = [np.asarray(ended.image).tobytes() for _, ended in sorted(finish(engine, asked).items())]
    with Engine.load(small_sd, options, findings=tmp_path) as engine:
        alone = [
            np.asarray(finish(engine, [one])[one.run_id].image).tobytes()
            for one in sorted(asked, key=attrgetter("run_id"))
        ]
    assert together == alone
    assert len(set(alone)) == len(asked)


def test_a_short_text_is_encoded_between_the_pieces_of_a_long_one_and_both_keep_their_bytes(
    small_sd: Path, tmp_path: Path
) -> None:
    lora = write_lora(tmp_path / "one.safetensors", small_sd, rank=4, seed=1, text=True)
    words = " ".join(f"(word {n}:0.5) and so on" for n in range(32))
    long = RunRequest(run_id="long", prompt=words + " a b c" * 500, prompt_weights=True)
    short = RunRequest(run_id="short", prompt="a cat", adapter=lora)

    def encoded(asked: Sequence[RunRequest]) -> dict[str, torch.Tensor]:
        """Return the contexts of runs that are added together, in the order in which they were encoded."""
        found: dict[str, torch.Tensor] = {}
        with Engine.load(small_sd, EXACT_FLOAT32, findings=tmp_path) as engine:
            finish(engine, [replace(short, run_id="reads the LoRA", prompt="a dog", steps=1, width=64, height=64)])
            for each in asked:
                engine.add(each)
            while len(found) < len(asked):
                changes = engine.live.changes
                for waiting in engine.live.waiting():
                    if waiting.conditioning is not None:
                        found.setdefault(waiting.request.run_id, waiting.conditioning.context)
                engine.live.wait_for_change(changes, within_s=1.0)
        return found

    together = encoded([long, short])
    assert list(together) == ["short", "long"]
    for each in (long, short):
        assert torch.equal(encoded([each])[each.run_id], together[each.run_id])
