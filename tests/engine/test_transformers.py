"""Each transformer family draws what diffusers' own pipeline draws, from a folder and from a file, in any company."""

import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve_app.domain.errors import FailureCode
from serve_app.engine import AdapterFile, Checkpoint, Engine, RunRequest
from serve_app.engine.families.autoencoder import begun
from serve_app.engine.families.weights import part_bytes
from serve_app.engine.run import Conditioning
from tests.engine import (
    simulated_device,
    tiny_anima,
    tiny_flux1,
    tiny_flux2_klein,
    tiny_krea2,
    tiny_models,
    tiny_qwen_image21,
    tiny_z_image,
)
from tests.engine.conftest import EXACT_FLOAT32
from tests.engine.original_checkpoint import copy_config
from tests.engine.run_engine import ONE_AT_A_TIME, begun_at_random, final_latents, finish, load, same_alone, start
from tests.engine.tiny_models import diffusers, transformers
from tests.engine.tiny_transformers import (
    ANIMA,
    FLUX1,
    FLUX2_KLEIN,
    KREA_2,
    QWEN_IMAGE21,
    TINY_TRANSFORMERS,
    Z_IMAGE,
    TinyTransformer,
)

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("tiny", TINY_TRANSFORMERS, ids=str)]
TOLERANCE = 1e-4
OPTIONS = replace(EXACT_FLOAT32, max_rows=8, adapter_slots=10)
REQUEST = RunRequest(run_id="r", prompt="a red cat", seed=3, steps=2, guidance=1.0, width=64, height=64)
WORDS = "a red cat sits on an old wall in the rain and looks at the lights of the town below"
Written = Callable[[TinyTransformer, str], Path]


@pytest.fixture
def folder(tiny: TinyTransformer, written: Written) -> Path:
    """The family's first variant."""
    return written(tiny, next(iter(tiny.variants)))


def noise(height: int, width: int) -> np.ndarray:
    return np.random.RandomState(0).randint(0, 256, (height, width, 3), np.uint8)


def seen(one: RunRequest) -> RunRequest:
    """Return a request with its picture as the engine takes it; diffusers' pipeline takes the picture itself."""
    if one.image is None:
        return one
    return replace(one, image=begun(Image.fromarray(one.image), None, one.width, one.height, is_seen=True)[0])


CASES = [
    replace(REQUEST, run_id="plain", steps=4),
    replace(REQUEST, run_id="guided", guidance=4.0, negative_prompt="dull", steps=4),
    replace(REQUEST, run_id="wide", width=96, prompt=WORDS, seed=5),
    replace(REQUEST, run_id="wide guided", width=96, negative_prompt=WORDS, guidance=2.5, steps=20),
    replace(
        REQUEST, run_id="partly", guidance=4.0, negative_prompt="dull", steps=5, guidance_start=0.2, guidance_end=0.7
    ),
    replace(REQUEST, run_id="odd", width=72, height=60, prompt=WORDS * 8, guidance=3.0),
    replace(REQUEST, run_id="odd plain", width=72, height=60, prompt="", steps=20),
]
"""One prompt has more than the 512 tokens that are read."""
PICTURES = [
    replace(REQUEST, run_id="looking", guidance=4.0, image=noise(64, 64)),
    replace(REQUEST, run_id="looking at another shape", width=96, image=noise(100, 230)),
]
LARGE = [replace(REQUEST, run_id="looking at a large one", steps=1, image=noise(1100, 1300))]
"""A picture that is shrunk first; its pixels take the two VAEs ten seconds."""


@pytest.mark.parametrize("which", ["first", "second", pytest.param("large", marks=pytest.mark.soak)])
def test_prompts_steps_and_pixels_are_those_of_diffusers(tiny: TinyTransformer, which: str, written: Written) -> None:
    """The second variant is drawn in those cases alone in which its shape, schedule and guidance differ."""
    variant = list(tiny.variants)[which == "second"]
    cases = {"first": CASES + PICTURES, "second": [CASES[1], CASES[-1]], "large": LARGE}[which]
    reference, model = tiny.reference(written(tiny, variant)), load(written(tiny, variant))
    family: Any = model.family
    decoded: list[Tensor] = []
    for vae in (family.vae, reference.pipeline.vae):
        vae.decoder.register_forward_hook(lambda _module, _inputs, output: decoded.append(output.squeeze(2)))
    for one in [each for each in cases if tiny.sees_pictures or each.image is None]:
        encoded = model.encode(seen(one))
        assert encoded is not None
        assert encoded.rows == 1 + tiny.is_guided(variant, one)
        prompts = [one.negative_prompt, one.prompt][-encoded.rows :]
        for row, prompt in zip(encoded.context, prompts, strict=True):
            expected = reference.caption(prompt)
            assert (row[: len(expected)] - expected).abs().max() < TOLERANCE
            assert not row[len(expected) :].any()
        run, steps = start(model, seen(one)), list[Tensor]()
        while not run.is_done:
            model.runner.denoise([run])
            steps.append(run.latents)
        image, expected = model.decode(run), reference.image(one)
        assert len(steps) == len(reference.trace) == one.steps
        for made, step in zip(steps, reference.trace, strict=True):
            assert (made - step).abs().max() < TOLERANCE, one
        ours, theirs = decoded
        assert (ours - theirs.view(ours.shape)).abs().max() < TOLERANCE
        decoded.clear()
        top, left = (expected.shape[0] - one.height) // 2, (expected.shape[1] - one.width) // 2
        assert image.shape == (one.height, one.width, 3)
        cut = expected[top : top + one.height, left : left + one.width].astype(int)
        assert abs(image.astype(int) - cut).max() <= 1


def test_prompts_and_guidance_change_what_is_drawn(tiny: TinyTransformer, folder: Path) -> None:
    """This guards the test before: with weights too small, a caption would change nothing that it could see.

    A picture is seen in its own shape: stretched to another, it draws something else.
    """
    model = load(folder)
    others = [
        replace(REQUEST, prompt=WORDS),
        replace(REQUEST, guidance=4.0, negative_prompt="dull"),
        replace(REQUEST, steps=4),
    ]
    plain, *made = (final_latents(model, [one])["r"] for one in (REQUEST, *others))
    changes = [float((each - plain).abs().max()) for each in made]
    assert min(changes) > 100 * TOLERANCE, changes
    if tiny.sees_pictures:
        picture = noise(48, 192)
        stretched = np.asarray(Image.fromarray(picture).resize((64, 64), Image.Resampling.LANCZOS))
        shapes = [final_latents(model, [replace(REQUEST, image=each)])["r"] for each in (picture, stretched)]
        assert (shapes[0] - shapes[1]).abs().max() > 100 * TOLERANCE
    with pytest.raises(ValueError, match="prompt_weights: are for CLIP's text encoders"):
        model.encode(replace(REQUEST, prompt_weights=True))


def test_what_of_a_text_is_beyond_the_models_tokens_is_told(tiny: TinyTransformer, folder: Path) -> None:
    """Without so many characters at its end a prompt says the same, and with one less it does not."""
    model, long = load(folder), WORDS * 16

    def encoded(prompt: str, guidance: float = 1.0) -> Conditioning:
        made = model.encode(replace(REQUEST, prompt=prompt, negative_prompt=long, guidance=guidance))
        assert made is not None
        return made

    beyond, _ = encoded(long).unread
    assert 0 < beyond < len(long)
    assert encoded("a cat", guidance=2.0).unread == (0, beyond)
    whole, cut, shorter = (encoded(long[: len(long) - less]) for less in (0, beyond, beyond + 1))
    assert (cut.unread, shorter.unread) == ((0, 0), (0, 0))
    assert torch.equal(whole.context, cut.context)
    assert not torch.equal(whole.context, shorter.context)


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_adapters_act_as_in_peft(tiny: TinyTransformer, part: str, folder: Path, tmp_path: Path) -> None:
    targets, text = (tiny.linears, False) if part == "transformer" else (("none",), True)
    tensors = tiny_models.random_lora(folder, rank=4, seed=1, targets=targets, denoiser="transformer", text=text)
    adapter = tiny_models.write_adapter(tmp_path / "lora.safetensors", tensors)
    negated = {name: -each if "lora_B" in name else each for name, each in tensors.items()}
    other = tiny_models.write_adapter(tmp_path / "other.safetensors", negated)
    model, reference = load(folder), tiny.reference(folder)
    one = replace(REQUEST, prompt=WORDS, guidance=1.0 if text else 3.0, width=96)
    made = plain = reference.latents(one)
    reference.adapt(tensors)
    for scale in (0.0, 0.5, 1.0, -0.5):
        made = final_latents(model, [replace(one, adapter=adapter, scale=scale)])["r"]
        reference.scale(scale)
        expected = reference.latents(one)
        assert (made - expected).abs().max() < TOLERANCE
        assert bool(scale) == bool((expected - plain).abs().max() > 100 * TOLERANCE)
    assert not torch.equal(final_latents(model, [replace(one, adapter=other, scale=-0.5)])["r"], made)


FORMS = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "scaled fp8": torch.float8_e4m3fn,
    "fp8 scaled by output": torch.float8_e4m3fn,
}  # fmt: skip
PREFIX = "model.diffusion_model."
FILES = [("float32", ""), ("bfloat16", PREFIX), ("scaled fp8", PREFIX), ("fp8 scaled by output", "")]
MORE_FILES = [(form, prefix) for form in FORMS for prefix in ("", PREFIX) if (form, prefix) not in FILES]


def stored(form: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's weight as a file of this form holds it, and its scale."""
    scale = torch.tensor({"scaled fp8": 2**-9, "fp8 scaled by output": 2**-8}.get(form, 1.0))
    if form == "fp8 scaled by output":
        scale = scale / (1 + torch.arange(len(weight)) % 2)
    return (weight / scale.reshape(-1, 1)).to(FORMS[form]), scale


@pytest.mark.parametrize(
    ("form", "prefix"), [*FILES, *(pytest.param(*each, marks=pytest.mark.soak) for each in MORE_FILES)]
)
def test_a_file_makes_the_latents_of_its_folder(
    tiny: TinyTransformer, form: str, prefix: str, folder: Path, tmp_path: Path
) -> None:
    """The folder's weights are rounded as the file's first."""
    rounded = Path(shutil.copytree(folder, tmp_path / "folder"))
    for whole in (rounded / part / "diffusion_pytorch_model.safetensors" for part in tiny.held):
        weights = load_file(whole)
        for name, weight in weights.items():
            if name.endswith(".weight") and weight.dim() == 2:
                kept, scale = stored(form, weight)
                weights[name] = kept.float() * scale.reshape(-1, 1)
        save_file(weights, whole)
    unread = {prefix + name: weight for name, weight in tiny.unread.items()}
    tensors = tiny.original_weights(rounded, prefix) | unread
    for name, weight in list(tensors.items()):
        if name.endswith(".weight") and weight.dim() == 2:
            tensors[name], scale = stored(form, weight)
            if "scaled" in form:
                tensors[name.replace(".weight", ".scale_weight" if prefix else ".weight_scale")] = scale
                tensors[name.replace(".weight", ".comfy_quant")] = torch.zeros(3, dtype=torch.uint8)
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    config = copy_config(folder, tmp_path / "config")
    lora = tiny_models.write_lora(
        tmp_path / "lora.safetensors", folder, rank=4, seed=1, text=True, denoiser="transformer",
        targets=tiny.some_linears[0],
    )  # fmt: skip
    requests = [replace(REQUEST, guidance=2.0), replace(REQUEST, run_id="lora", adapter=lora)]
    expected = final_latents(load(rounded), requests)
    vae, encoder, tokenizer = (folder / part for part in ("vae", "text_encoder", "tokenizer"))
    if (folder / "text_encoder_2").is_dir():
        encoder = tokenizer = folder
    if not tokenizer.is_dir():
        tokenizer, vae = folder / "processor", vae / "diffusion_pytorch_model.safetensors"
    checkpoints = [
        Checkpoint(file, config, vae=vae, text_encoder=encoder, tokenizer=tokenizer),
        Checkpoint(file, config, vae=folder, text_encoder=folder),
        Checkpoint(file, folder),
        Checkpoint(rounded / "transformer" / "diffusion_pytorch_model.safetensors", folder),
    ]
    for checkpoint in checkpoints if form == "float32" else checkpoints[:1]:
        if form == "float32":
            weighed = [sum(part_bytes(each, torch.float32).values()) for each in (rounded, checkpoint)]
            said = sum(weight.nbytes for weight in unread.values()) if checkpoint.path == file else 0
            assert weighed[1] - weighed[0] == said
        made = final_latents(load(checkpoint), requests)
        for key, latents in expected.items():
            assert torch.equal(made[key], latents), (checkpoint, key)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_file_of_all_parts_has_the_numbers_of_its_folder(
    tiny: TinyTransformer, dtype: str, folder: Path, tmp_path: Path
) -> None:
    """Some stay in float32, and what reads no text is left out. Its memory is counted for the part that it is."""
    save_file(tiny.whole_file(folder), tmp_path / "all.safetensors")
    given: dict[str, Any] = {} if tiny.vae_names else {"vae": folder}
    whole = Checkpoint(tmp_path / "all.safetensors", copy_config(folder, tmp_path / "config"), **given)
    weighed, expected = (part_bytes(each, torch.float32) for each in (whole, folder))
    assert all(0 <= weighed[part] - size <= 4 for part, size in expected.items())  # a `logit_scale`
    models = [load(each, replace(EXACT_FLOAT32, dtype=dtype, exact=False)) for each in (whole, folder)]
    numbers = [
        [
            (name, each)
            for module in model.family.modules
            for name, each in (*module.named_parameters(), *module.named_buffers())
        ]
        for model in models
    ]
    for (name, ours), (_, theirs) in zip(*numbers, strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name
    if dtype == "bfloat16":  # not every CPU multiplies in float16
        made, drawn = (final_latents(model, [replace(REQUEST, image=noise(64, 64))])["r"] for model in models)
        assert torch.equal(made, drawn)


def another(folder: Path, into: Path, part: str, module: Any) -> Path:
    """Copy a folder with another part in it."""
    shutil.copytree(folder, into)
    shutil.rmtree(into / part)
    module.save_pretrained(into / part)
    return into


def other_encoder(folder: Path, into: Path, **changes: Any) -> Path:
    """Copy a folder with a text encoder of another shape in it."""
    kind = getattr(transformers, json.loads((folder / "text_encoder" / "config.json").read_text())["architectures"][0])
    config = transformers.Qwen3Config.from_pretrained(folder / "text_encoder").to_dict()
    return another(folder, into, "text_encoder", kind(transformers.Qwen3Config.from_dict({**config, **changes})))


Sources = Sequence[tuple[Path | Checkpoint, str]]
Spoilt = Sequence[tuple[Mapping[str, Tensor | None], str]]


def misfits_of_z_image(written: Written, sd: Path, file: Path) -> tuple[Sources, Spoilt]:
    turbo, base = written(Z_IMAGE, "turbo"), written(Z_IMAGE, "base")
    vae = tiny_models.tiny_vae(**tiny_z_image.VAE | {"latent_channels": 4})
    wider = other_encoder(turbo, file.with_name("encoder"), hidden_size=48)
    omni = Path(shutil.copytree(turbo, file.with_name("omni")))
    described = json.loads((omni / "transformer" / "config.json").read_text())
    (omni / "transformer" / "config.json").write_text(json.dumps(described | {"siglip_feat_dim": 16}))
    bare = Path(shutil.copytree(turbo, file.with_name("bare")))
    shutil.rmtree(bare / "text_encoder")
    sources: Sources = [
        (another(turbo, file.with_name("vae"), "vae", vae), "takes 16 channels and the VAE makes 4: name .* `vae:`"),
        (Checkpoint(turbo, vae=sd), "takes 16 channels and the VAE makes 4"),
        (wider, "captions 32 wide and the text encoder makes 48: .* `text_encoder:`"),
        (Checkpoint(turbo, text_encoder=wider), r"text_encoder: .*is not of the architecture at .*turbo"),
        (Checkpoint(turbo, text_encoder=file.with_name("none")), "text_encoder: .*none: holds no config.json"),
        (Checkpoint(turbo, tokenizer=file.with_name("none")), "tokenizer: .*none: holds no tokenizer_config.json"),
        (Checkpoint(file, base), "cap_embedder.1.bias is 32 instead of 48"),
        (Checkpoint(file, sd), "is a Z-Image, and its config a Stable Diffusion"),
        (Checkpoint(sd, text_encoder=turbo), "text_encoder: Stable Diffusion comes with its own"),
        (omni, "transformer"),
        (bare, "has no text_encoder"),
    ]
    return sources, [
        ({"layers.9.attention.qkv.weight": torch.ones(3, 2)}, "no part of its architecture reads: layers.9"),
        ({"layers.0.attention.qkv.weight": torch.ones(3, 2)}, "layers.0.attention.to_q.weight is 1 × 2 instead of"),
        ({"x_pad_token": None}, "lacks weights .* x_pad_token"),
        ({"x_pad_token": torch.ones(1, 32, dtype=torch.uint8)}, "x_pad_token is quantized as uint8"),
        ({"lora_unet_layers_0_attention_qkv.lora_down.weight": torch.ones(2, 2)}, "is a LoRA"),
        ({"text_encoders.t5xxl.transformer.shared.weight": torch.ones(2, 2)}, "reads: text_encoder_2.shared.weight"),
        ({"all_x_embedder.2-1.weight": torch.ones(2, 2)}, "holds all_x_embedder.2-1.weight twice, under diffusers'"),
    ]


def misfits_of_flux2_klein(written: Written, sd: Path, file: Path) -> tuple[Sources, Spoilt]:
    base, z_image = written(FLUX2_KLEIN, "base"), written(Z_IMAGE, "turbo")
    shorter = other_encoder(base, file.with_name("encoder"), num_hidden_layers=26, layer_types=None)
    config = dict(tiny_flux2_klein.tiny_vae().config)
    plain = {name: value for name, value in config.items() if not name.startswith("batch_norm")}
    plain_vae = another(base, file.with_name("vae"), "vae", diffusers.AutoencoderKL.from_config(plain))
    sources: Sources = [
        (Checkpoint(base, vae=sd), "takes 8 channels and the VAE makes 4: name .* `vae:`"),
        (Checkpoint(base, vae=plain_vae), "the VAE is not FLUX.2's"),
        (Checkpoint(base, vae=file), "vae: .*describes, because AutoencoderKLFlux2 is read from folders alone"),
        (shorter, "has 26 layers, and the transformer reads 27: .* `text_encoder:`"),
        (Checkpoint(base, text_encoder=z_image), "text_encoder: .*is not of the architecture at"),
        (
            Checkpoint(file, written(FLUX2_KLEIN, "distilled")),
            "lacks weights that the architecture of its config has: transformer_blocks.1",
        ),
        (Checkpoint(file, sd), "is a FLUX.2, and its config a Stable Diffusion; .* folder of FLUX.2"),
        (Checkpoint(file, z_image), "is a FLUX.2, and its config a Z-Image; .* folder of FLUX.2"),
    ]
    return sources, [
        ({"single_blocks.9.linear1.weight": torch.ones(3, 2)}, "no part of its architecture reads: single_blocks.9"),
        ({"double_blocks.0.img_attn.qkv.weight": torch.ones(3, 2)}, "attn.to_q.weight is 1 × 2 instead of 32 × 32"),
        ({"single_blocks.0.linear3.weight": torch.ones(3, 2)}, "no part of its architecture reads: single_blocks.0"),
        ({"guidance_in.in_layer.weight": torch.ones(3, 2)}, "no part of its architecture reads: guidance_in"),
        ({"double_blocks.0.img_mod.lin.weight": torch.ones(3, 2)}, "is a FLUX.1, and its config a FLUX.2"),
        ({"txt_in.weight": None}, "lacks weights .* context_embedder"),
        (
            {"transformer_blocks.0.attn.to_q.weight": torch.ones(2, 2)},
            "holds transformer_blocks.0.attn.to_q.weight twice",
        ),
    ]


def misfits_of_anima(written: Written, sd: Path, file: Path) -> tuple[Sources, Spoilt]:
    base, z_image = written(ANIMA, "base"), written(Z_IMAGE, "turbo")
    wider = other_encoder(base, file.with_name("encoder"), hidden_size=24)
    video = Path(shutil.copytree(base, file.with_name("video")))
    described = json.loads((video / "transformer" / "config.json").read_text())
    (video / "transformer" / "config.json").write_text(json.dumps(described | {"patch_size": [2, 2, 1]}))
    bare, talkative = (Path(shutil.copytree(base, file.with_name(name))) for name in ("bare", "talkative"))
    shutil.rmtree(bare / "text_conditioner")
    brief = Path(shutil.copytree(base, file.with_name("brief")))
    described = json.loads((brief / "text_conditioner" / "config.json").read_text())
    (brief / "text_conditioner" / "config.json").write_text(json.dumps(described | {"min_sequence_length": 64}))
    words = tiny_anima.t5_tokenizer()
    words.add_tokens([f"word{i}" for i in range(9)])
    words.save_pretrained(talkative / "t5_tokenizer")
    sources: Sources = [
        (Checkpoint(base, vae=z_image), "holds AutoencoderKL, not a VAE such as AutoencoderKLQwenImage"),
        (wider, "takes states 16 wide .*; the text encoder makes 24, .* `text_encoder:`"),
        (Checkpoint(base, text_encoder=z_image), "text_encoder: .*is not of the architecture at"),
        (talkative, "the t5_tokenizer has 107 tokens, and the conditioner knows 98"),
        (Checkpoint(file, written(ANIMA, "other")), "no part of its architecture reads: blocks.1"),
        (Checkpoint(file, sd), "is an Anima, and its config a Stable Diffusion; .* folder of Anima"),
        (Checkpoint(file, z_image), "is an Anima, and its config a Z-Image"),
        (video, "the transformer is of a Cosmos that draws videos"),
        (bare, "has no text_conditioner"),
        (brief, "fills captions to 64 tokens, not 512"),
    ]
    return sources, [
        ({"net.blocks.9.mlp.layer1.weight": torch.ones(3, 2)}, "no part of its architecture reads: net.blocks.9"),
        ({"blocks.0.mlp.layer1.weight": torch.ones(3, 2)}, "ff.net.0.proj.weight is 3 × 2 instead of 64 × 32"),
        ({"llm_adapter.blocks.7.mlp.0.bias": torch.ones(3)}, "no part of its architecture reads: blocks.7"),
        ({"llm_adapter.embed.weight": None}, "lacks weights .* embed.weight"),
        ({"t_embedding_norm.weight": None}, "lacks weights .* time_embed.norm"),
    ]


def misfits_of_krea2(written: Written, sd: Path, file: Path) -> tuple[Sources, Spoilt]:
    base, z_image = written(KREA_2, "base"), written(Z_IMAGE, "turbo")
    encoder = transformers.Qwen3VLModel(tiny_krea2.qwen3_vl(layers=4))
    sources: Sources = [
        (Checkpoint(base, vae=z_image), "holds AutoencoderKL, not a VAE such as AutoencoderKLQwenImage"),
        (Checkpoint(base, vae=file), "vae: .*no part of its architecture reads"),
        (Checkpoint(base, tokenizer=z_image), "tokens of what stands before a prompt instead of 34: .* `tokenizer:`"),
        (
            another(base, file.with_name("encoder"), "text_encoder", encoder),
            "has 4 layers, and the transformer reads 3 of them, 2, 3, 5: .* `text_encoder:`",
        ),
        (Checkpoint(file, written(KREA_2, "turbo")), "no part of its architecture reads: blocks.1"),
        (Checkpoint(file, sd), "is a Krea 2, and its config a Stable Diffusion; .* folder of Krea 2"),
    ]
    return sources, [
        ({"blocks.9.attn.wq.weight": torch.ones(3, 2)}, "no part of its architecture reads: blocks.9"),
        ({"blocks.0.attn.wq.weight": torch.ones(3, 2)}, "attn.to_q.weight is 3 × 2 instead of 64 × 64"),
        ({"last.modulation.lin": None}, "lacks weights .* final_layer.scale_shift_table"),
        ({"img_in.weight": torch.ones(3, 2)}, "holds img_in.weight twice, under diffusers' name"),
    ]


def misfits_of_flux1(written: Written, sd: Path, file: Path) -> tuple[Sources, Spoilt]:
    dev, schnell = written(FLUX1, "dev"), written(FLUX1, "schnell")
    fill = tiny_flux1.write_flux1(file.with_name("fill"), in_channels=384)
    wide = transformers.T5EncoderModel(transformers.T5Config.from_dict({**tiny_flux1.t5().to_dict(), "d_model": 16}))
    sources: Sources = [
        (fill, "takes 384 channels instead of 64: it is FLUX.1 Fill"),
        (
            another(dev, file.with_name("t5"), "text_encoder_2", wide),
            "captions 24 wide of a T5, .* text_encoder_2 makes 16",
        ),
        (Checkpoint(dev, vae=sd), "takes 16 channels and the VAE makes 4: name .* `vae:`"),
        (Checkpoint(dev, text_encoder=dev / "text_encoder_2"), "text_encoder: .*is not of the architecture at"),
        (Checkpoint(dev, tokenizer=file.with_name("none")), "tokenizer: .*none: holds no tokenizer_config.json"),
        (Checkpoint(file, schnell), "no part of its architecture reads: guidance_in"),
        (Checkpoint(file, sd), "is a FLUX.1, and its config a Stable Diffusion; .* folder of FLUX.1"),
        (Checkpoint(file, written(FLUX2_KLEIN, "base")), "is a FLUX.1, and its config a FLUX.2"),
    ]
    return sources, [
        ({"img_in.weight": torch.ones(32, 384)}, "takes 384 channels instead of 64: it is FLUX.1 Fill"),
        ({"img_in.weight": torch.ones(32, 128)}, "takes 128 channels instead of 64: it is FLUX.1 Depth or Canny"),
        ({"single_blocks.9.linear1.weight": torch.ones(7, 2)}, "no part of its architecture reads: single_blocks.9"),
        ({"single_blocks.0.linear1.weight": torch.ones(7, 2)}, "attn.to_q.weight is 1 × 2 instead of 32 × 32"),
        ({"double_blocks.0.img_mod.lin.weight": None}, "lacks weights .* transformer_blocks.0.norm1.linear.weight"),
        ({"distilled_guidance_layer.in_proj.weight": torch.ones(2, 2)}, "is a Chroma, for which there is no family"),
        ({"double_stream_modulation_img.lin.weight": torch.ones(2, 2)}, "is a FLUX.2, and its config a FLUX.1"),
        (
            {"transformer_blocks.0.attn.to_q.weight": torch.ones(2, 2)},
            "holds transformer_blocks.0.attn.to_q.weight twice",
        ),
    ]


def misfits_of_qwen_image21(written: Written, sd: Path, file: Path) -> tuple[Sources, Spoilt]:
    base, z_image = written(QWEN_IMAGE21, "base"), written(Z_IMAGE, "turbo")
    wide = Path(shutil.copytree(base, file.with_name("wide")))
    described = json.loads((wide / "text_encoder" / "config.json").read_text())
    described["text_config"]["hidden_size"] = 48
    kind = transformers.Qwen3VLConfig.from_dict(described)
    transformers.Qwen3VLForConditionalGeneration(kind).save_pretrained(wide / "text_encoder")
    block = "transformer_blocks.0.img_mlp"
    sources: Sources = [
        (Checkpoint(base, vae=sd), "holds AutoencoderKL, not a VAE such as AutoencoderKLQwenImage21"),
        (
            another(base, file.with_name("narrow"), "vae", tiny_qwen_image21.tiny_vae(4)),
            "takes 8 channels of AutoencoderKLQwenImage21 and the VAE makes 4: .* `vae:`",
        ),
        (Checkpoint(base, vae=file), "vae: .*no part of its architecture reads"),
        (wide, "captions 32 wide and the text encoder makes 48: name the Qwen3-VL .* `text_encoder:`"),
        (Checkpoint(base, text_encoder=wide), "text_encoder: .*is not of the architecture at"),
        (Checkpoint(base, text_encoder=z_image), "text_encoder: .*is not of the architecture at"),
        (Checkpoint(file, written(QWEN_IMAGE21, "levels")), "no part of its architecture reads: transformer_blocks.1"),
        (Checkpoint(file, z_image), "is a Qwen-Image 2.1, and its config a Z-Image; .* folder of Qwen-Image 2.1"),
    ]
    return sources, [
        ({f"{block}.gate_up.weight": torch.ones(4, 2)}, "gate_layer.weight is 2 × 2 instead of 96 × 32"),
        (
            {"transformer_blocks.0.img_mod.1.weight": torch.ones(3, 2)},
            "no part of its architecture reads: transformer_b",
        ),
        ({"txt_in.text_norm.weight": None}, "lacks weights .* txt_in.text_norm"),
        ({"vae.conv1.bias": torch.ones(16)}, r"lacks weights .* encoder\.conv_in\.weight"),
        ({"lora_unet_img_in.lora_down.weight": torch.ones(2, 2)}, "is a LoRA"),
    ]


MISFITS = {
    Z_IMAGE: misfits_of_z_image,
    FLUX2_KLEIN: misfits_of_flux2_klein,
    FLUX1: misfits_of_flux1,
    KREA_2: misfits_of_krea2,
    ANIMA: misfits_of_anima,
    QWEN_IMAGE21: misfits_of_qwen_image21,
}


def test_parts_that_do_not_fit_are_refused_by_name(
    tiny: TinyTransformer, folder: Path, written: Written, sd: Path, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    save_file(tiny.original_weights(folder), file)
    sources, spoilt = MISFITS[tiny](written, sd, file)
    of_any = [(Checkpoint(folder, clip_skip=1), "clip_skip")]
    if tiny is not FLUX1:
        of_any += [(Checkpoint(folder, tokenizer=sd), "(name|is a CLIPTokenizer).* `tokenizer:`")]
    for source, message in (*sources, *of_any):
        with pytest.raises((ValueError, OSError), match=message):
            load(source)
    for changes, message in spoilt:
        tensors = {**tiny.original_weights(folder), **changes}
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
        with pytest.raises(ValueError, match=message):
            load(Checkpoint(file, folder))


@pytest.fixture
def loras(tiny: TinyTransformer, written: Written, tmp_path: Path) -> list[AdapterFile]:
    """Some linears, every linear, and the text encoder too, of ranks in three buckets."""
    first, second, third = tiny.some_linears
    kinds = ((4, first, False), (20, tiny.linears, False), (6, second, True), (12, third, False))
    return [
        tiny_models.write_lora(
            tmp_path / f"{i}.safetensors", written(tiny, tiny.mixed), rank=rank, seed=i, targets=targets,
            denoiser="transformer", text=text, size=0.1,
        )
        for i, (rank, targets, text) in enumerate(kinds)
    ]  # fmt: skip


def mixed(tiny: TinyTransformer, count: int, loras: list[AdapterFile], chance: random.Random) -> list[RunRequest]:
    """Return runs of every bucket, with and without guidance, adapters and pictures, of three sizes.

    The pictures that are looked at have as many tokens each, in other shapes.
    """
    requests = [
        RunRequest(
            run_id=f"{i}", prompt=(WORDS * 6)[: chance.choice((9, 30, 90, 200, 480))], seed=chance.randrange(2**32),
            negative_prompt=(WORDS * 3)[: chance.choice((0, 0, 5, 150))], adapter=chance.choice([*loras, None]),
            scale=chance.choice((0.3, 1.0, -0.5)), steps=chance.randint(1, 4), guidance=chance.choice((1.0, 3.5, 5.0)),
            width=chance.choice((64, 64, 96)), height=chance.choice((64, 60)),
            guidance_start=(0.0, 0.0, 0.4)[i % 3], guidance_end=(1.0, 0.6)[i % 2],
        )
        for i in range(count)
    ]  # fmt: skip
    if tiny.needs_negative:
        requests = [
            one if one.negative_prompt else replace(one, guidance_start=0.0, guidance_end=1.0) for one in requests
        ]
    if not tiny.sees_pictures:
        return [begun_at_random(one, chance) for one in requests]
    pictures = [None, None, noise(64, 32), noise(32, 64), noise(16, 128)]
    return [replace(one, image=chance.choice(pictures)) for one in requests]


def test_mixed_runs_have_the_bytes_that_they_have_alone(
    tiny: TinyTransformer, written: Written, loras: list[AdapterFile]
) -> None:
    chance = random.Random(1)
    requests = mixed(tiny, 16, loras, chance)
    same, widest = same_alone(written(tiny, tiny.mixed), replace(OPTIONS, max_runs=12), requests, chance)
    assert same == len(requests)
    assert widest > OPTIONS.max_rows // 2, "how many draw together is the processor's choice"


@pytest.mark.parametrize("device", ["cpu", simulated_device.NAME])
def test_neighbours_of_other_captions_and_pictures_change_no_bit(
    tiny: TinyTransformer, device: str, written: Written, loras: list[AdapterFile]
) -> None:
    """On a GPU all passes have one shape. Of the last company each caption's `z`s are tokens: 1, 30 and 300 of them."""
    simulated_device.register()
    model = load(written(tiny, tiny.mixed), replace(OPTIONS, device=device, adapter_memory=2**26))
    picture = noise(64, 32) if tiny.sees_pictures else None
    one = replace(REQUEST, prompt=WORDS[:20], adapter=loras[1], image=picture)
    others = [replace(one, run_id=f"{i}", prompt=WORDS[:i], adapter=loras[i % 4], seed=i) for i in (0, 5, 30, 7)]
    if tiny.sees_pictures:
        others = [replace(each, image=noise(*((32, 64), (16, 128))[i % 2])) for i, each in enumerate(others)]
    alone, passes = final_latents(model, [one])["r"], list[int]()
    model.denoiser.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0].shape[0]))
    for company in ([*others, one], [one, *reversed(others)], [one]):
        assert torch.equal(final_latents(model, company)["r"], alone)
    assert device == "cpu" or {*passes} == {OPTIONS.max_rows}
    counted = [
        replace(one, run_id=f"{i}", prompt="z" * i, negative_prompt="z" * (301 - i), guidance=3.0) for i in (1, 30, 300)
    ]
    together = final_latents(model, counted)
    assert all(torch.equal(final_latents(model, [each])[each.run_id], together[each.run_id]) for each in counted)


def test_it_serves_beside_another_family_and_each_refuses_the_others_samplers(
    tiny: TinyTransformer, folder: Path, sd: Path
) -> None:
    one = replace(REQUEST, base_model="tiny", prompt=WORDS * 16)
    with Engine.load({"tiny": folder, "sd": sd}, ONE_AT_A_TIME) as engine:
        made = finish(engine, [one, replace(one, run_id="sd", base_model="sd")])
        flow = finish(engine, [replace(one, sampler="flow-euler")])["r"]
        for base_model, sampler in (("tiny", "ddim"), ("sd", "flow-euler")):
            failure = finish(engine, [replace(one, base_model=base_model, sampler=sampler)])["r"].failure
            assert failure is not None
            assert failure.code is FailureCode.GENERATION_FAILED
            assert sampler in failure.message
    assert np.array_equal(np.asarray(flow.image), np.asarray(made["r"].image))
    for run_id, source in (("r", folder), ("sd", sd)):
        with Engine.load(source, ONE_AT_A_TIME) as engine:
            again = finish(engine, [replace(one, base_model="")])["r"]
            assert np.array_equal(np.asarray(again.image), np.asarray(made[run_id].image))
            assert bool(again.unread.prompt) == bool(made[run_id].unread.prompt) == (run_id == "r")
    for source, sampler in ((folder, "dpm++2m-karras"), (sd, "flow-euler")):
        with pytest.raises(ValueError, match="flow-euler"):
            Engine.load(source, replace(ONE_AT_A_TIME, sampler=sampler))
