# The image of every pod, and of a whole service in one container (docs/operate/install-and-start.md builds and runs it).
#
# Python packages are installed by the hashes of configs/image/requirements.txt. The base image is named by its tag, until
# `make pin-image` writes the digest below that the tag has then; or a build names one for itself:
#   docker build --build-arg PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:… .
#
# Weights come by a volume (/models), or baked in from an image, or from a folder given as a build context, that has /models:
#   docker build --build-context weights=./weights --build-arg MODELS=weights .
#
# torch comes with its CUDA libraries, 5 GB of them. Where there is no GPU, an index with CPU builds makes a small image; that
# torch is installed by the hash that you give (the index shows it beside the file), or without one by version alone:
#   docker build --build-arg CPU_TORCH_INDEX=https://… --build-arg CPU_TORCH_SHA256=… .
#
# In a company's network: HTTPS_PROXY as a build argument, and these secrets, each of which may be left out. pip.conf names an
# index, and `cert = /run/secrets/ca`; apt.conf may name a proxy and `Acquire::https::CaInfo`.
#   docker build --secret id=pip,src=pip.conf --secret id=ca,src=ca.crt --secret id=apt,src=apt.conf .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG MODELS=no-models

FROM scratch AS no-models
WORKDIR /models

# hadolint ignore=DL3006
FROM ${MODELS} AS models

FROM ${PYTHON_IMAGE} AS build
ARG CPU_TORCH_INDEX=""
ARG CPU_TORCH_SHA256=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY configs/image/requirements.txt /tmp/requirements.txt
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \
    if [ -n "$CPU_TORCH_INDEX" ]; then \
      grep -oE '^torch==[0-9.]+' /tmp/requirements.txt \
        | sed "s/\$/${CPU_TORCH_SHA256:+ --hash=sha256:$CPU_TORCH_SHA256}/" > /tmp/torch.txt; \
      awk '/^[a-z]/ {drop = /^(torch|triton|cuda-|nvidia-)/} !drop' /tmp/requirements.txt > /tmp/without-cuda.txt; \
      pip install --require-hashes --no-deps -r /tmp/without-cuda.txt; \
      pip install --no-deps --index-url "$CPU_TORCH_INDEX" -r /tmp/torch.txt; \
    else \
      pip install --require-hashes --no-deps -r /tmp/requirements.txt; \
    fi
# Triton compiles one C module at its first launch. It is compiled here (47 kB in the image), because a compiler with its
# headers would take 192 MiB there, by Debian's Installed-Size of gcc, libc6-dev and what they need.
COPY configs/image/build_triton_module.py serve_app/engine/triton_module.py /tmp/
# The compiler stays in this stage: whichever version Debian has now is the one with its fixes.
# hadolint ignore=DL3008
RUN --mount=type=secret,id=apt,target=/etc/apt/apt.conf.d/99build --mount=type=secret,id=ca \
    if [ -z "$CPU_TORCH_INDEX" ]; then \
      apt-get update \
      && apt-get install --yes --no-install-recommends gcc libc6-dev \
      && rm -rf /var/lib/apt/lists/* \
      && python /tmp/build_triton_module.py /tmp/triton_module.py; \
    fi
COPY . /opt/atelier
RUN test -f /opt/atelier/serve_app/web/guide/site/llms.txt || { echo 'No guide for /guide: run "make guide" first' >&2; exit 1; }
RUN pip install --no-deps --no-build-isolation --no-index --editable /opt/atelier \
 && python -m compileall -q /opt/atelier

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="atelier" \
      org.opencontainers.image.description="Self-hosted text-to-image generation with many LoRA adapters"
RUN useradd --uid 1000 --user-group --no-create-home --home-dir /tmp atelier \
 && install --directory --owner 1000 --group 1000 --mode 0700 /var/lib/atelier
COPY --from=models /models /models
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/atelier /opt/atelier
# Nothing is written outside /tmp, /dev/shm and /var/lib/atelier, so that the root file system can be read-only. Kernels are
# compiled into /tmp/.triton, which may therefore not be mounted `noexec`.
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    ATELIER_DATA_DIR=/var/lib/atelier
WORKDIR /opt/atelier
USER 1000:1000
VOLUME /var/lib/atelier
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
CMD ["atelier", "up", "--host", "0.0.0.0"]
