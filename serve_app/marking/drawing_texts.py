"""Writes a drawing's settings as the web UIs of A1111 and InvokeAI do, which read them from a file again."""

import json
from collections.abc import Mapping

from serve_app.domain.requests import GenerationRequest
from serve_app.domain.samplers import SigmaSpacing, parse_sampler

A1111, INVOKEAI = "parameters", "invokeai_metadata"
"""The keywords of the text chunks of a PNG in which the two look; A1111 reads the EXIF of a JPEG or WebP."""
_A1111_NAMES: Mapping[str, str] = {
    "euler": "Euler", "euler-a": "Euler a", "heun": "Heun", "dpm2": "DPM2", "dpm2-a": "DPM2 a", "lms": "LMS",
    "ddim": "DDIM", "pndm": "PLMS", "dpm++2m": "DPM++ 2M", "dpm++2m-sde": "DPM++ 2M SDE",
    "dpm++sde": "DPM++ SDE", "unipc": "UniPC", "lcm": "LCM",
}  # fmt: skip
"""Others keep our name, which A1111 passes over: its `DPM++ 2S a` adds noise, and `dpm++2s` does not."""
_SPACINGS = {SigmaSpacing.KARRAS: "Karras", SigmaSpacing.EXPONENTIAL: "Exponential", SigmaSpacing.BETA: "Beta"}


def drawing_texts(request: GenerationRequest, index: int, generator: str) -> Mapping[str, str]:
    """Return keyword → text for image `index` of a request, drawn by the program `generator`."""
    return {
        A1111: _a1111(request, request.seeds[index], generator),
        INVOKEAI: json.dumps(_invokeai(request, request.seeds[index], generator), ensure_ascii=False),
    }


def _a1111(request: GenerationRequest, seed: int, generator: str) -> str:
    loras = "".join(f" <lora:{lora.id}:{lora.weight:g}>" for lora in request.loras)
    negative = f"\nNegative prompt: {request.negative_prompt}" if request.negative_prompt else ""
    sampler, spacing = _sampler(request)
    rows = {
        "Steps": request.steps,
        "Sampler": _A1111_NAMES.get(sampler, sampler),
        "Schedule type": spacing and _SPACINGS.get(spacing, ""),
        "CFG scale": f"{request.guidance_scale:g}",
        "Skip Early CFG": f"{request.guidance_start:g}" if request.guidance_start else "",
        "Guidance end": f"{request.guidance_end:g}" if request.guidance_end not in (None, 1) else "",
        "Seed": str(seed),
        "Size": f"{request.width}x{request.height}",
        "Model": request.base_model,
        "Denoising strength": f"{request.strength:g}" if request.image else "",
        "Version": generator,
    }
    return f"{request.prompt}{loras}{negative}\n" + ", ".join(f"{name}: {row}" for name, row in rows.items() if row)


def _invokeai(request: GenerationRequest, seed: int, generator: str) -> Mapping[str, object]:
    sampler, spacing = _sampler(request)
    scheduler = sampler.replace("dpm++", "dpmpp_").replace("dpm2", "kdpm_2").replace("-", "_")
    known = {
        "generation_mode": "img2img" if request.image else "txt2img",
        "positive_prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "width": request.width,
        "height": request.height,
        "seed": seed,
        "cfg_scale": request.guidance_scale,
        "steps": request.steps,
        "scheduler": f"{scheduler}_k" if spacing is SigmaSpacing.KARRAS else scheduler,
        "strength": request.strength if request.image else None,
        "model": _model(request.base_model, "main") if request.base_model else None,
        "loras": [{"model": _model(lora.id, "lora"), "weight": lora.weight} for lora in request.loras],
        "app_version": generator,
    }
    return {name: value for name, value in known.items() if value not in (None, "", [])}


def _model(name: str, kind: str) -> Mapping[str, str]:
    return {"key": name, "hash": "", "name": name, "base": "any", "type": kind}


def _sampler(request: GenerationRequest) -> tuple[str, SigmaSpacing | None]:
    """Return the sampler and its spacing; empty where the request names none."""
    return parse_sampler(request.sampler) if request.sampler else ("", None)
