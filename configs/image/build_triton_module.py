"""Compiles Triton's C module into this environment, a step of the Dockerfile.

python build_triton_module.py serve_app/engine/triton_module.py     # the file that finds the module at run time
"""

import os
import runpy
import subprocess
import sys
import sysconfig
import tempfile

engine = runpy.run_path(sys.argv[1])
source = engine["DRIVER"]
module = engine["built_module"](source.read_bytes())
module.parent.mkdir(parents=True, exist_ok=True)
includes = [f"-I{folder}" for folder in (source.parent / "include", sysconfig.get_path("include"))]
with tempfile.TemporaryDirectory() as folder:
    # The driver that the module links to is on machines with a card alone: here a library without content has its name.
    cuda, links = f"{folder}/libcuda.so.1", [f"-L{folder}", "-Wl,--no-as-needed", "-l:libcuda.so.1"]
    for options in (
        ["-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull, "-o", cuda],
        [str(source), "-O3", "-Wno-psabi", *includes, *links, "-o", str(module)],
    ):
        subprocess.run([os.environ.get("CC", "gcc"), "-shared", "-fPIC", *options], check=True)
print(module)  # noqa: T201
