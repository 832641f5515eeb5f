"""Hands Triton its one C module, which launches kernels, where there is no C compiler.

Triton compiles it at the first launch, once for each cache. The image has no compiler: when it is built,
`configs/image/build_triton_module.py` compiles the module into its environment.
"""

import hashlib
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import triton
from triton import knobs

NO_COMPILER = "Triton has no C compiler: install gcc and libc6-dev, or build its module as the image does"
DRIVER = Path(triton.__file__).parent / "backends" / "nvidia" / "driver.c"


def built_module(source: bytes) -> Path:
    """Return where the module of such a source is, or will be: another version of Triton finds none."""
    name = f"cuda_utils-{hashlib.sha256(source).hexdigest()[:16]}{sysconfig.get_config_var('EXT_SUFFIX')}"
    return Path(sys.prefix) / "lib" / "atelier" / name


def find_module() -> None:
    """Let Triton take the module of this environment. Raises RuntimeError where it could not compile one either."""
    if not built_module(DRIVER.read_bytes()).exists():
        if not any((os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang"))):
            raise RuntimeError(NO_COMPILER)
        return

    def impl(name: str, source: str, *_: object) -> str:
        return str(built_module(Path(source).read_bytes()).resolve(strict=True))

    knobs.build.impl = impl
