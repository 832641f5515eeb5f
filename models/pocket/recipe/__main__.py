"""Runs the recipe's stages in order: `python -m models.pocket.recipe [stage …]`.

Each stage goes on from its last checkpoint.
"""

import argparse
from collections.abc import Callable

from .adopt import adopt_published
from .agreement import train_agreement
from .autoencoder import train_autoencoder, trained_autoencoder
from .export import export_pipeline, write_checksums
from .lora import train_loras
from .plan import Plan
from .text import train_text_encoder
from .unet import train_unet, trained_models
from .upscaler import train_upscalers


def publish(_: Plan) -> None:
    """Write the pipeline from the checkpoints' averaged weights, then the checksums of all files."""
    unet, text_encoder = trained_models()
    export_pipeline(unet, trained_autoencoder(), text_encoder)
    write_checksums()


STAGES: dict[str, Callable[[Plan], None]] = {
    "autoencoder": train_autoencoder,
    "text": train_text_encoder,
    "unet": train_unet,
    "agreement": train_agreement,
    "loras": train_loras,
    "upscalers": train_upscalers,
    "publish": publish,
}

ON_REQUEST: dict[str, Callable[[Plan], None]] = {"adopt": adopt_published}
"""No part of a whole run: it makes the others go on from the published folder."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m models.pocket.recipe", description=__doc__)
    parser.add_argument(
        "stages",
        nargs="*",
        metavar="stage",
        help=f"any of: {', '.join((*STAGES, *ON_REQUEST))} (all but the last when none is named)",
    )
    parser.add_argument("--share", type=float, default=1.0, help="scale every length of the plan, for trials")
    options = parser.parse_args()
    plan = Plan() if options.share == 1.0 else Plan().shortened(options.share)
    for stage in options.stages or STAGES:
        (STAGES | ON_REQUEST)[stage](plan)


if __name__ == "__main__":
    main()
