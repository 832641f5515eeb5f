"""Writes docs/lora-formats.md: every format of adapters that the tests compare, and its largest error.

    python -m tests.engine.format_table

It runs the rows of `test_adapter_formats.py`, `test_z_image_adapters.py` and `test_flux2_klein_adapters.py` at every
weight, in one process (about two minutes).
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from serve_app.settings import ROOT
from tests.engine.latent_comparison import EVERY_WEIGHT, TOLERANCE, compared

DOCUMENT = ROOT / "docs" / "lora-formats.md"
BASES: Mapping[str, str] = {
    "sd": "SD 1",
    "sd2": "SD 2",
    "sdxl": "SDXL",
    "z_image": "Z-Image",
    "flux2_klein": "FLUX.2 klein",
}
WRITERS: Mapping[str, str] = {
    "test_what_sd_scripts_saved_gives_what_sd_scripts_made": "sd-scripts",
    "test_a_peft_folder_gives_what_peft_makes": "PEFT, a folder",
    "test_what_diffusers_saves_gives_what_peft_makes": "diffusers",
    "test_dora_under_other_names_gives_what_peft_makes": "PEFT, renamed",
    "test_what_lycoris_saves_gives_what_lycoris_makes": "LyCORIS",
    "test_what_musubi_tuner_saved_gives_the_merged_result": "musubi-tuner",
    "test_every_spelling_gives_the_merged_result": "a merge by hand",
    "test_every_spelling_of_lokr_gives_the_product": "a merge by hand",
}
"""Whose own result a row is compared with, by the test that does it."""
_TESTS = [
    str(Path(__file__).with_name(f"test_{name}.py"))
    for name in ("adapter_formats", "z_image_adapters", "flux2_klein_adapters")
]
_TEST = re.compile(r"::(test_\w+)\[(.+)-every-weight\]")
_ROW = re.compile(r"(.+)-(sd|sd2|sdxl|z_image|flux2_klein)(?:-(\w+))?")
_INTRODUCTION = f"""# Formats of LoRA files

Each row is a format that the tests write, read and draw with on tiny random models of the five architectures, at the
weights {", ".join(f"{weight:g}" for weight in EVERY_WEIGHT)}. A number is the largest error against what the first
column names, of {TOLERANCE:g} allowed, of the latents, and for the transformers of one step's velocity; the adapters
change them by more than 0.01. An empty cell was not tried.

The first column says how a row was proven. With a tool's name, that tool's own code wrote the file and made what ours
is compared with. sd-scripts and musubi-tuner are on no package index: their files lie beside the tests, with the recipe
that made them. "A merge by hand" is a set of names: the tensors are written under them by the test, as the tool's
source or people's reports spell them (ai-toolkit, OneTrainer, ComfyUI, VideoX-Fun, diffusion-pipe and DiffSynth-Studio
cannot be installed here); its changes are merged into the base's weights with the formula of LoRA. "PEFT, renamed" are
such names for what PEFT's own layers make; the conversion to kohya's names is diffusers' code.

How strongly a layer acts is told by the file's alpha, by PEFT's configuration (in `adapter_config.json` or in
diffusers' metadata), or by metadata called `lora_alpha`, `network_alpha` or `alpha`, also with a component before them;
"Dynamic" there means that each layer has its own, and a layer without one is refused. A file is refused where two of these differ, where the configuration's rank, `rank_pattern` or `use_dora` is not the
file's, and where one part of a layer, or one folder's adapter, is there twice. A layer under two names is read where
both say the same. One layer's parts may be spelled differently, as diffusers' advanced trainers spell them: dots in one
name and underscores in the other, also `$$` for dots.

DoRA has two rules at weights other than 1. Magnitudes called `magnitude` (ai-toolkit), `lora_magnitude_vector` (PEFT) or
`weight_m_wdecomp` (the method's authors) get PEFT's, whatever their factors are called; `dora_scale` gets that of
LyCORIS, unless it is a plain list of numbers, as diffusers leaves PEFT's. VeLoRA and MonteCLoRA of PEFT are LoRA but in
training: what they keep for it is not used.

Z-Image's queries, keys and values are one layer to ComfyUI and to those who train with its code (`attention.qkv`), and
three to diffusers. A change of the one is divided by outputs, with DoRA's magnitudes, at the rank that each part has: a
converter that writes three changes beside zeros, at three times the rank, costs no more than the three. For this model
diffusers' own loader is no measure: it leaves some of these names out, and DoRA with them.

FLUX.2 klein's double blocks have the same two ways (`double_blocks.0.img_attn.qkv` and `txt_attn.qkv`), and its last
modulation has its halves in another order in the original code than in diffusers, whose loader leaves them so; here
each half goes where its name says. Names of its text encoder are Qwen3's, as those of Z-Image's are.

## What is refused

Each of these is refused by its name, with the family that it is for where its shapes or names tell it:

- full-weight differences, norms, OFT, BOFT, GLoRA, biases, ComfyUI's `set_weight`, LoRAs of text embeddings, PEFT's
  IA³, VeRA, AdaLoRA, `modules_to_save` and its other methods; any other part of a layer, by what it is called;
- quantized weights: 4 bits (nf4), integers, and float8 with scales beside it (float8 without them is read);
- LoRAs of another base model's family or size, and of those that are not served: FLUX.1, SD 3, Qwen-Image, Wan, the
  SDXL refiner, other diffusion transformers and video models, and those of cloneofsimo's trainer;
- networks that are no LoRA: ControlNet, ControlNet-LLLite, IP-Adapter, T2I-Adapter, AnimateDiff, hypernetworks,
  upscalers, textual inversions, VAEs, whole checkpoints;
- pickles (`.bin`, `.pt`, `.ckpt`), shards, folders in folders, empty tensors;
- GGUF, archives (zip, RAR, 7z, tar), compressed files, pictures, and what a failed download leaves: a web page, JSON,
  text, zeros, a pointer of Git LFS.

The upload page, `/v1/loras`, `atelier loras` and a worker that loads the file say the same. A safetensors file is known
by its header alone, whatever its first bytes are.

A layer's rank is at most `max_rank` of the generators (128 unless set, 256 at most), so that slots stay small. A LoHa
of dimension d has the rank d², a LoKr the product of its factors' ranks; neither exceeds the smaller side of the layer,
since the change is kept as a whole from there on, exactly. On layers of 320 channels or more a LoHa of dimension 12 is
therefore beyond 128: the message tells the file's own dimension.

## LoKr's whole factors

ai-toolkit writes LoKr with whole factors unless `lokr_full_rank: false` is set, and so does LyCORIS where the dimension
is high: that is rank 3840 on Z-Image. A linear layer keeps such factors as they are, wherever they take less time than
a LoRA of the product's rank, and applies them as two small products; DoRA acts on them as on a LoRA. Rows whose name
ends with "as factors" are computed so. Layers that were trained as one (`qkv`) may be divided anywhere.

They may have as many numbers as a LoRA of `max_rank`. On Z-Image ai-toolkit's own choice of the factors (-1) is as
large as rank 2 and takes as long as rank 100, factors of 16 are 8 to 11 and 160 to 210, and factors of 8 are 31 to 44
and 280 to 380; factors of 4 are refused in its feed-forward layers, unless `max_rank` is 175 or more. A convolution
keeps no factors: its LoKr is a LoRA, at the product's rank.

## Several LoRAs in one image

The engine takes several LoRAs for one image, each with a weight of its own, in any order:
`engine.generate("…", adapters={{neon: 0.8, ink: -0.5}})`. What each changes in the base alone is added: ranks are
concatenated, and gains (DoRA, IA³) become one. PEFT differs where it holds several DoRAs, since it lets each scale what
those before it have changed. The sum is one adapter, which takes one slot and whose rank is the sum of theirs: beyond
`max_rank` it is refused. So are gains of one layer's outputs and inputs together, which are no single gain, and in one
layer two LoKrs that are applied by their factors, or such a LoKr beside another's gain. The largest error of a latent
is 6e-06, compared with the changes that PEFT's and LyCORIS' own layers make, added.

## What fits two families

A file of the first text encoder alone fits SD 1 and SDXL alike (both have CLIP-L); one of self-attention and
feed-forward layers alone fits SD 1 and SD 2, and SDXL where it is of the blocks that all have. Only its metadata
(`ss_base_model_version`, `modelspec.architecture`, PEFT's `base_model_name_or_path`) say which it is for. Without them
it is taken, and what was found in it ends with "it fits SD 1 as well". So does a file of Qwen3-4B alone, which fits
Z-Image and FLUX.2 klein 4B alike.

`python -m tests.engine.format_table` writes this page; tests hold its rows to those of
`tests/engine/test_adapter_formats.py`, `test_z_image_adapters.py` and `test_flux2_klein_adapters.py` beside it.

| compared with | format | {" | ".join(BASES.values())} |
|---|---|{"---|" * len(BASES)}
"""


class Format(NamedTuple):
    """A row of the table."""

    writer: str
    name: str


def main() -> int:
    status = pytest.main(
        ["-q", "-n", "0", "-p", "no:randomly", "-m", "soak or not soak", "-k", "every-weight", *_TESTS]
    )
    if status:
        return int(status)
    errors: dict[Format, dict[str, float]] = {}
    for test, error in compared.items():
        if found := _TEST.search(test):
            name, base = of_row(found[2])
            errors.setdefault(Format(WRITERS[found[1]], name), {})[base] = error
    DOCUMENT.write_text(_INTRODUCTION + "".join(_line(each, errors[each]) for each in sorted(errors)), encoding="utf-8")
    return 0


def of_row(row_id: str) -> tuple[str, str]:
    """Return the format and the base model of a row such as `without q_proj-sdxl-text_encoder_2`."""
    found = _ROW.fullmatch(row_id)
    assert found is not None, row_id
    part = "" if found[3] in (None, "unet") else f", {found[3].replace('_', ' ')}"
    return found[1].replace("_", " ") + part, found[2]


def documented() -> set[tuple[str, str, str]]:
    """Writer, format and base model of every number in the document."""
    lines = DOCUMENT.read_text(encoding="utf-8").partition("|---|")[2].splitlines()[1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {
        (writer, name, base)
        for writer, name, *errors in cells
        for base, error in zip(BASES, errors, strict=True)
        if error and float(error) <= TOLERANCE
    }


def rows_of(rows: Mapping[str, Sequence[Any]]) -> set[tuple[str, str, str]]:
    """Return the same of the rows by the test that they are of."""
    ids = ((test, str(row.id)) for test, each in rows.items() for row in each)
    return {
        (WRITERS[test], *of_row(row_id.removesuffix("-every-weight")))
        for test, row_id in ids
        if row_id.endswith("-every-weight")
    }


def _line(each: Format, errors: Mapping[str, float]) -> str:
    cells = (f"{errors[base]:.0e}" if base in errors else "" for base in BASES)
    return f"| {each.writer} | {each.name} | {' | '.join(cells)} |\n"


if __name__ == "__main__":
    sys.exit(main())
