# megarl for NVIDIA GPUs (CUDA 13, Python 3.12). Not yet built: docs/install.md.
#
#     docker build -t megarl:cuda .
#
# Every Python package is pinned in locks/gpu-py312.txt, which tests/project/test_packaging.py holds to the `gpu` extra. Layers go
# from what changes least to what changes most: a change of the sources rebuilds the last one, of some megabytes.
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Not pinned: Ubuntu's mirrors drop a version when its security update comes, and the build would end there.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends git libnuma1 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
# CUDA_HOME: else a build takes the lock's nvcc, which is newer than the CUDA of torch and of the headers.
ENV VIRTUAL_ENV=/opt/megarl PATH=/opt/megarl/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    CUDA_HOME=/usr/local/cuda

WORKDIR /megarl
COPY locks/gpu-py312.txt locks/
RUN python3.12 -m venv "$VIRTUAL_ENV" \
    && grep -E '^(setuptools|wheel|pybind11|ninja|packaging)==' locks/gpu-py312.txt >/tmp/packages \
    && pip install --no-deps --requirement /tmp/packages
# torch with CUDA's libraries: the largest layer, the same for every version of megarl with this torch.
RUN grep -E '^(torch|triton|nvidia-.*|cuda-.*)==' locks/gpu-py312.txt >/tmp/packages \
    && pip install --no-deps --requirement /tmp/packages
RUN grep -v '^transformer-engine' locks/gpu-py312.txt >/tmp/packages \
    && pip install --no-deps --no-build-isolation --requirement /tmp/packages
# Transformer Engine compiles its torch extension against the torch above; without its NCCL kernels for experts, which want
# a newer NCCL than torch has, and which megarl does not use.
RUN grep '^transformer-engine' locks/gpu-py312.txt >/tmp/packages \
    && NVTE_FRAMEWORK=pytorch NVTE_WITH_NCCL_EP=0 pip install --no-deps --no-build-isolation --requirement /tmp/packages

COPY . .
RUN pip install --no-deps --no-build-isolation --editable .
ENTRYPOINT ["megarl"]
