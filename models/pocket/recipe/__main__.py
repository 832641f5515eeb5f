"""`python -m models.pocket.recipe [stage …]`: runs the stages in order; each goes on from its last checkpoint."""

import argparse
from collections.abc import Callable

from .autoencoder import train_autoencoder
from .plan import Plan

STAGES: dict[str, Callable[[Plan], None]] = {
    "autoencoder": train_autoencoder,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m models.pocket.recipe", description=__doc__)
    parser.add_argument("stages", nargs="*", help=f"any of: {', '.join(STAGES)} (all when none is named)")
    parser.add_argument("--share", type=float, default=1.0, help="scale every length of the plan, for trials")
    options = parser.parse_args()
    plan = Plan() if options.share == 1.0 else Plan().shortened(options.share)
    for stage in options.stages or STAGES:
        STAGES[stage](plan)


if __name__ == "__main__":
    main()
