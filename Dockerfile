# megarl for NVIDIA GPUs. Not yet run on a GPU. The pins are those of the `gpu` extra in pyproject.toml;
# tests/test_packaging.py compares them.
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

RUN apt-get update && apt-get install -y --no-install-recommends git libnuma1 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/megarl PATH=/opt/megarl/bin:$PATH PIP_NO_CACHE_DIR=1
RUN python3.12 -m venv $VIRTUAL_ENV && pip install "setuptools>=77,<81" wheel pybind11 ninja packaging

RUN pip install torch==2.13.0 vllm==0.32.0
# Transformer Engine compiles its torch extension against the torch above.
RUN pip install --no-build-isolation "transformer-engine[core-cu13,pytorch]==2.20.2"
RUN pip install megatron-core==0.19.2

WORKDIR /megarl
COPY . .
RUN pip install --no-build-isolation --editable ".[gpu]"
ENTRYPOINT ["megarl"]
