"""Loads diffusers' pipeline of a base model from a folder or a single file, and never from a network."""

import importlib
import json
import logging
import operator
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from diffusers.loaders.single_file_utils import (
    SingleFileComponentError,
    convert_wan_vae_to_diffusers,
    create_diffusers_clip_model_from_ldm,
)
from safetensors.torch import load_file

from serve_app.engine.families.single_file import (
    Convert,
    fitted,
    of_wan_vae,
    read_parts,
    read_single_file,
    refuse_unread,
    unread_by,
)
from serve_app.model_folder import index_file, is_modular, read_index

_LIBRARIES = ("diffusers.utils.logging", "transformers.utils.logging")
_MISLEADING = {
    "diffusers.pipelines.pipeline_utils": "Expected types for",  # our VAE may be a tiny one, and text encoders come without their heads
    "transformers.utils.import_utils": "ImageProcessor` requires torchvision",  # nothing here processes images by it
    "transformers.modeling_utils": "visual.",  # a text encoder's eyes are left out
}
"""Warnings that would mislead are dropped: a part of each one's text, by the logger that emits it."""


@contextmanager
def quiet_loading() -> Generator[None]:
    """Hide progress bars and misleading warnings of diffusers and transformers until the end of the block."""
    libraries: list[Any] = [importlib.import_module(name) for name in _LIBRARIES]
    with_bars = [library for library in libraries if library.is_progress_bar_enabled()]
    loggers = [logging.getLogger(name) for name in _MISLEADING]
    for library in with_bars:
        library.disable_progress_bar()
    for logger in loggers:
        logger.addFilter(_is_not_misleading)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_not_misleading)
        for library in with_bars:
            library.enable_progress_bar()


def _is_not_misleading(record: logging.LogRecord) -> bool:
    return _MISLEADING[record.name] not in record.getMessage()


diffusers: Any = importlib.import_module("diffusers")  # its lazy modules and config objects have no usable types
transformers: Any = importlib.import_module("transformers")

PLAYGROUND_DATA = 0.5
"""The standard deviation of Playground 2.5's latents, after its own mean and deviation are taken out of the VAE's."""

UNNEEDED = ("safety_checker", "feature_extractor", "image_encoder")
_WITH_WEIGHTS = ("unet", "transformer", "vae", "text_encoder", "text_encoder_2", "text_conditioner")
_SECOND = ("text_encoder_2", "tokenizer_2")
_UNET_PARTS = ("unet", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler")
DIT_PARTS = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
_OF_LANGUAGE = r"^(model\.)?language_model\."
"""How names of a Qwen3-VL's language model begin in files of the whole."""


class Checkpoint(NamedTuple):
    """Where a base model lies, and what its files do not say or say wrongly."""

    path: Path
    """A diffusers folder, or a safetensors file in the layout of the architecture's original code."""
    config: Path | None = None
    """A file is described by a diffusers folder of the same architecture, whose configs, tokenizers and scheduler are
    read, and of its weights those of parts that files of this architecture never hold. None means the folder of the
    file's name beside it."""
    vae: Path | None = None
    """Another VAE than the checkpoint's: a folder of diffusers' or a safetensors file."""
    sampler: str = ""
    """The sampler of runs that name none, such as `dpm++2m-karras`; empty means the options' or the checkpoint's own."""
    clip_skip: int = 0
    """How many of the text encoders' last layers a prompt leaves out, as diffusers' pipelines count them."""
    text_encoder: Path | None = None
    """Another text encoder for a diffusion transformer: its folder, or that of a pipeline."""
    tokenizer: Path | None = None
    """Another tokenizer for a diffusion transformer: its folder, or that of a pipeline."""
    precision: str = ""
    """`fp8` computes the denoiser's large products in float8 (see `engine/float8.py`); empty means the options' dtype.
    """


Source = Path | Checkpoint
"""Origin of a base model. A path is a checkpoint about which nothing else is said."""


def as_checkpoint(source: Source) -> Checkpoint:
    return source if isinstance(source, Checkpoint) else Checkpoint(source)


def name_of(source: Source) -> str:
    """Name a base model that was given no name after its file or folder."""
    path = as_checkpoint(source).path
    return path.stem if path.suffix == ".safetensors" else path.name


def pipeline_class(source: Source) -> str:
    """Name of diffusers' pipeline class for a base model. Raises OSError when its folder or file is missing."""
    file, folder = _file_and_folder(source)
    if file is not None:
        if file.suffix != ".safetensors" or not file.is_file():
            raise FileNotFoundError(f"{file}: no such safetensors file")
        if not index_file(folder).is_file():
            raise FileNotFoundError(
                f"{file}: a single file does not describe its contents, and {folder} holds no model_index.json. "
                "Give as its config a diffusers folder of the same architecture, or put one there; its weights are not "
                "needed"
            )
    return str(read_index(folder).get("_class_name"))


def make_part(folder: Path, name: str) -> Any:
    """Make a module as a diffusers folder describes it, without its weights, on torch's default device.

    Raises OSError where the folder does not describe it.
    """
    library, class_name = read_index(folder)[name]
    config = json.loads((folder / name / "config.json").read_text(encoding="utf-8"))
    if library == "diffusers":
        return getattr(diffusers, class_name).from_config(config)
    model = getattr(transformers, class_name)
    return model(model.config_class.from_dict(config))


def load_pipeline(source: Source, dtype: torch.dtype) -> Any:
    """Load diffusers' pipeline of a Stable Diffusion.

    Raises OSError when a file is missing, ValueError when one is of another architecture, holds what nobody reads, or
    lacks a part.
    """
    file, folder = _file_and_folder(source)
    for name in ("text_encoder", "tokenizer"):
        if getattr(as_checkpoint(source), name) is not None:
            raise ValueError(f"{name}: Stable Diffusion comes with its own; leave this field out")
    is_xl = "XL" in read_index(folder)["_class_name"]
    with quiet_loading():
        given = _given_parts(source, folder, dtype)
        wanted = [name for name in _UNET_PARTS if name not in given and (is_xl or name not in _SECOND)]
        parts = _classes(folder, wanted)
        if file is not None:
            given |= _load_file(file, folder, parts, dtype, given)
        pipeline = _assemble(folder, parts, given, dtype)
    latent, taken = getattr(pipeline.vae.config, "latent_channels", 4), pipeline.unet.config.in_channels
    if latent != taken:
        raise ValueError(
            f"{folder}: the UNet takes {taken} channels and the VAE makes {latent}: a UNet for inpainting or editing "
            "cannot draw from a prompt alone, and another VAE does not suit it; give the model that it was made from"
        )
    return pipeline


def load_dit_pipeline(source: Source, dtype: torch.dtype, convert: Convert, wanted: Sequence[str] = DIT_PARTS) -> Any:
    """Load the `wanted` parts of a diffusion transformer's pipeline, some of which its single files may hold.

    `convert` is a function from the transformer's names in such files to diffusers' own. Raises as `load_pipeline`.
    """
    file, folder = _file_and_folder(source)
    with quiet_loading():
        given = _given_parts(source, folder, dtype)
        index = read_index(folder)
        parts = [*wanted, *(name for name in _SECOND if name in index)]
        unneeded = {*given, "processor"} if "tokenizer" in given else given
        parts = _classes(folder, [name for name in parts if name not in unneeded])
        if file is not None:
            held = read_parts(file, dtype, str(index["_class_name"]))
            refuse_unread(file, [f"{part}.{name}" for part in held.keys() - {*parts, *given} for name in held[part]])
            for part, weights in held.items():
                if part in given:
                    continue
                if part in ("transformer", "text_conditioner"):
                    names = convert if part == "transformer" else dict
                    given[part] = _part_of(file, folder, part, weights, names, dtype)
                elif part == "vae":
                    given[part] = _vae_of(file, folder, weights, dtype)
                else:
                    given[part] = _encoder_of(file, folder, part, weights, dtype)
        return _assemble(folder, parts, given, dtype)


def _part_of(
    file: Path, folder: Path, part: str, weights: dict[str, torch.Tensor], convert: Convert, dtype: torch.dtype
) -> Any:
    """Return a module of diffusers as `folder` describes it, with the weights of a file."""
    with torch.device("cpu" if part == "text_conditioner" else "meta"):  # it computes numbers that are not saved
        made = make_part(folder, part)
    made.load_state_dict(fitted(file, weights, made, convert, dtype), assign=True)
    return made


def _encoder_of(file: Path, folder: Path, part: str, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """Return what reads texts of the text encoder that `folder` describes, with the weights of a file."""
    with torch.device("meta"):
        described = language_model(make_part(folder, part))
    encoder, info = type(described).from_pretrained(
        None, config=described.config, state_dict=weights, dtype=dtype, output_loading_info=True
    )
    refuse_unread(file, sorted(info["unexpected_keys"]))
    if info["missing_keys"] or info["mismatched_keys"]:
        raise ValueError(f"{file}: its {part} is not of the architecture at {folder / part}")
    return encoder


def language_model(encoder: Any) -> Any:
    """Return what of a text encoder reads a text: no layer that makes words of it, and none that looks at pictures."""
    encoder = getattr(encoder, "model", encoder)
    return getattr(encoder, "language_model", encoder)


def _given_parts(source: Source, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Return the parts that the base model names besides its file or folder."""
    checkpoint = as_checkpoint(source)
    given: dict[str, Any] = {}
    if checkpoint.vae is not None:
        given["vae"] = _load_vae(checkpoint.vae, folder, dtype)
    for kind, load in (("text_encoder", partial(_load_encoder, dtype=dtype)), ("tokenizer", _load_tokenizer)):
        if (path := getattr(checkpoint, kind)) is not None:
            given |= {part: load(path, folder, part) for part in named_parts(path, kind, read_index(folder))}
    return given


def named_parts(path: Path, kind: str, index: Mapping[str, Any]) -> list[str]:
    """Return which of a pipeline's text encoders or tokenizers a path is for: all that its folders are called after.

    A folder of one alone is the first.
    """
    return [part for part in (kind, f"{kind}_2") if part in index and (path / part).is_dir()] or [kind]


def _subfolder(path: Path, part: str) -> Path:
    """Return a part's own folder, where `path` may be that of a whole pipeline."""
    return path / part if (path / part).is_dir() else path


def _load_tokenizer(path: Path, folder: Path, part: str) -> Any:
    del folder
    path = next((path / name for name in (part, "processor") if (path / name).is_dir()), path)
    if not (path / "tokenizer_config.json").is_file():
        raise FileNotFoundError(f"tokenizer: {path}: holds no tokenizer_config.json; name a tokenizer's folder")
    return transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)


def _load_encoder(path: Path, folder: Path, part: str, dtype: torch.dtype) -> Any:
    """Load a text encoder of the class and the shape that `folder` describes; of a Qwen3-VL, what reads texts."""
    path = _subfolder(path, part)
    if not (path / "config.json").is_file() or not list(path.glob("*.safetensors")):
        raise FileNotFoundError(
            f"text_encoder: {path}: holds no config.json with .safetensors files; name a text encoder's folder"
        )
    with torch.device("meta"):
        described = make_part(folder, part)
    other = ValueError(f"text_encoder: {path}: is not of the architecture at {folder / part}")
    own: dict[str, Any] = {"variant": variant_of(path.parent, [path.name])}
    if described.config.model_type == "qwen3_vl":
        described = language_model(described)
        whole = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if "text_config" not in whole:
            raise other
        own |= {"config": type(described.config).from_dict(whole["text_config"]), "key_mapping": {_OF_LANGUAGE: ""}}
    try:
        encoder, info = type(described).from_pretrained(
            str(path), local_files_only=True, use_safetensors=True, dtype=dtype, output_loading_info=True, **own
        )
    except (ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"text_encoder: {path}: cannot be read: {error}") from error
    shapes = ({name: tensor.shape for name, tensor in one.state_dict().items()} for one in (encoder, described))
    if info["missing_keys"] or operator.ne(*shapes):
        raise other
    return encoder


def _assemble(folder: Path, parts: Mapping[str, str], given: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return the pipeline of the parts given and those of the folder, by the names of their classes."""
    variant = variant_of(folder, [name for name in parts if name in _WITH_WEIGHTS and name not in given])
    index = read_index(folder)
    # diffusers would load a modular one's parts from where the index says, which may be a network, and a processor's
    # pipeline with what looks at pictures
    if is_modular(folder) or "processor" in index:
        own = {
            "tokenizer" if name == "processor" else name: _load_part(folder, name, kind, dtype, variant)
            for name, kind in parts.items()
            if name not in given
        }
        return SimpleNamespace(config=index, **own, **given)
    unneeded = {name: None for name in UNNEEDED if name in index}
    return diffusers.DiffusionPipeline.from_pretrained(
        str(folder), local_files_only=True, use_safetensors=True, dtype=dtype, variant=variant, **unneeded, **given
    )


def _load_part(folder: Path, name: str, kind: str, dtype: torch.dtype, variant: str | None) -> Any:
    if name == "processor":
        return _load_tokenizer(folder, folder, name)
    if kind.startswith("Qwen3VL"):
        return _load_encoder(folder, folder, name, dtype)
    of_diffusers = hasattr(diffusers, kind)
    options: dict[str, Any] = {"local_files_only": True}
    if name in _WITH_WEIGHTS:
        number_type = {"torch_dtype" if of_diffusers else "dtype": dtype}
        options |= {"use_safetensors": True, "variant": variant, **number_type}
    return getattr(diffusers if of_diffusers else transformers, kind).from_pretrained(str(folder / name), **options)


def _file_and_folder(source: Source) -> tuple[Path | None, Path]:
    """Return the single file, or None, and the folder that describes it or holds the weights."""
    path, config = as_checkpoint(source)[:2]
    if config is None and path.suffix != ".safetensors":
        return None, path
    return path, config or path.with_suffix("")


def _classes(folder: Path, wanted: Sequence[str]) -> dict[str, str]:
    """Return the class of each part that is wanted. Raises ValueError for one missing."""
    index = read_index(folder)
    found = {name: index[name][1] for name in wanted if index.get(name) and index[name][1]}
    if missing := [name for name in wanted if name not in found or not (folder / name).is_dir()]:
        cure = "name one with `vae:` in the catalog" if missing == ["vae"] else "put the whole folder there"
        is_refiner = "text_encoder" in missing and "text_encoder_2" in found
        what = " (an SDXL refiner, which only repaints, has none)" if is_refiner else ""
        raise ValueError(f"{folder}: has no {', no '.join(missing)}{what}; {cure}")
    return found


def variant_of(folder: Path, parts: Sequence[str]) -> str | None:
    """Return the variant of the weights, such as `fp16`, where a part has no others; None where each has plain ones."""
    variants: set[str] = set()
    for part in parts:
        stems = [file.stem for file in (folder / part).glob("*.safetensors")]
        if not stems:
            raise FileNotFoundError(
                f"{folder / part}: holds no .safetensors file; weights in .bin or .ckpt may run code and are not read: "
                "convert them (diffusers' save_pretrained writes safetensors)"
            )
        if all("." in stem for stem in stems):
            variants |= {stem.split(".")[1].split("-")[0] for stem in stems}
    return "fp16" if "fp16" in variants else min(variants, default=None)


def _load_vae(path: Path, folder: Path, dtype: torch.dtype) -> Any:
    """Load a VAE from diffusers' folder of it, from a pipeline's, or from a file that `folder`'s config describes."""
    if path.suffix == ".safetensors":
        if not path.is_file():
            raise FileNotFoundError(f"vae: {path}: no such safetensors file")
        try:
            return _vae_of(path, folder, load_file(path), dtype)
        except ValueError as error:
            raise ValueError(f"vae: {error}") from error
    path = _subfolder(path, "vae")
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"vae: {path}: holds no config.json; name a diffusers folder of a VAE, or a .safetensors file"
        )
    name = str(json.loads((path / "config.json").read_text(encoding="utf-8")).get("_class_name"))
    described = _class_of_vae(folder)
    if not name.startswith("Autoencoder") or ("QwenImage" in described and name != described):
        raise ValueError(f"vae: {path}: holds {name}, not a VAE such as {described or 'AutoencoderKL'}")
    variant = variant_of(path.parent, [path.name])
    return getattr(diffusers, name).from_pretrained(
        str(path), local_files_only=True, use_safetensors=True, torch_dtype=dtype, variant=variant
    )


def _class_of_vae(folder: Path) -> str:
    """Return the class of the VAE that a folder describes; empty where it describes none."""
    return (read_index(folder).get("vae") or ("", ""))[1] or ""


def _vae_of(file: Path, folder: Path, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """Return the VAE that `folder` describes, with the weights of a file under their original names."""
    described = _class_of_vae(folder)
    if described == "AutoencoderKLQwenImage":
        return _part_of(file, folder, "vae", weights, convert_wan_vae_to_diffusers, dtype)
    if described == "AutoencoderKLQwenImage21":
        return _part_of(file, folder, "vae", weights, of_wan_vae, dtype)
    if described not in ("", "AutoencoderKL"):
        raise ValueError(
            f"{file}: cannot be the VAE that {folder / 'vae'} describes, because {described} is read from folders "
            "alone; name diffusers' folder of it"
        )
    try:
        vae = diffusers.AutoencoderKL.from_single_file(
            weights, config=str(folder), subfolder="vae", local_files_only=True, torch_dtype=dtype
        )
    except (ValueError, KeyError, AttributeError, OSError, NotImplementedError, SingleFileComponentError) as error:
        raise ValueError(f"{file}: is not of the VAE that {folder / 'vae'} describes: {error}") from error
    if _lacks_numbers(vae):
        raise ValueError(f"{file}: lacks weights that the VAE at {folder / 'vae'} has")
    return vae


def _load_file(
    file: Path, config: Path, classes: Mapping[str, str], dtype: torch.dtype, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the scheduler and the models of a single file."""
    unet = diffusers.UNet2DConditionModel.load_config(str(config), subfolder="unet")
    modules = {name: class_name for name, class_name in classes.items() if name in _WITH_WEIGHTS}
    weights, markers = read_single_file(file, modules, unet, dtype)
    loaded: dict[str, Any] = {}
    options: dict[str, Any] = {"config": str(config), "local_files_only": True, "torch_dtype": dtype}
    incomplete = ValueError(f"{file}: lacks weights that the architecture at {config} has")
    try:
        for part, name in modules.items():
            if hasattr(diffusers, name):
                loaded[part] = getattr(diffusers, name).from_single_file(weights, subfolder=part, **options)
                refuse_unread(file, unread_by(part, loaded[part], weights))
            else:
                encoder = getattr(transformers, name)
                loaded[part] = create_diffusers_clip_model_from_ldm(encoder, weights, subfolder=part, **options)
    except NotImplementedError as error:  # torch raises it for weights that were never filled in
        raise incomplete from error
    except (ValueError, KeyError, AttributeError, SingleFileComponentError) as error:
        raise ValueError(f"{file}: is not of the architecture at {config}: {error}") from error
    if any(_lacks_numbers(module) for module in loaded.values()):
        raise incomplete
    own = getattr(diffusers, classes["scheduler"]).from_pretrained(str(config), subfolder="scheduler")
    scheduler = _as_marked(markers, own, {**given, **loaded}["vae"])
    return loaded | {"scheduler": scheduler}


def _as_marked(markers: Mapping[str, torch.Tensor], own: Any, vae: Any) -> Any:
    """Return the scheduler that a file's markers ask for, and make the VAE one of its latents.

    Raises ValueError on a marker without the other one of its pair.
    """
    for pair in (("edm_mean", "edm_std"), ("edm_vpred.sigma_min", "edm_vpred.sigma_max")):
        if len(markers.keys() & set(pair)) == 1:
            raise ValueError(f"the file has one of {' and '.join(pair)} without the other; give the whole checkpoint")
    if "edm_mean" in markers:  # Playground 2.5
        mean, std = (markers[name].float().flatten().tolist() for name in ("edm_mean", "edm_std"))
        vae.register_to_config(latents_mean=mean, latents_std=std, scaling_factor=PLAYGROUND_DATA)
        return own if hasattr(own, "precondition_outputs") else diffusers.EDMDPMSolverMultistepScheduler()
    if "edm_vpred.sigma_max" in markers:  # CosXL
        sigmas = {name: float(markers[f"edm_vpred.{name}"]) for name in ("sigma_min", "sigma_max")}
        asked = {"prediction_type": "v_prediction", "sigma_data": 1.0, "sigma_schedule": "exponential", **sigmas}
        return diffusers.EDMEulerScheduler(**asked)
    asked = {"prediction_type": "v_prediction"} if "v_pred" in markers else {}
    asked |= {"rescale_betas_zero_snr": True} if "ztsnr" in markers else {}
    if not asked:
        return own
    config: dict[str, Any] = {**own.config, **asked}
    # diffusers leaves out what its books call a default: a folder need not name what the file asks for.
    config["_use_default_values"] = [name for name in config.get("_use_default_values", []) if name not in asked]
    return type(own).from_config(config)


def _lacks_numbers(component: torch.nn.Module) -> bool:
    return any(weight.is_meta for weight in component.parameters())
