# Proximo on NVIDIA GPUs. In the top folder of the project: docker build -f docker/cuda.Dockerfile -t proximo:cuda .
# docs/images.md says how to run it. torch brings the libraries of CUDA; the host brings the driver.
FROM python:3.11-slim-bookworm

# Triton and torch.compile (run.compile: inductor) need a compiler at run time; the kernels in C for CPUs use it too.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# For a driver that is older than torch's CUDA, give the address that pytorch.org shows for Pip and an older CUDA.
ARG PIP_EXTRA_INDEX_URL=""
WORKDIR /opt/proximo
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir --constraint constraints.txt ".[low-memory,maths,serve]"

# Runs, caches and kernels belong to a user without rights, below /work.
RUN useradd --create-home --uid 1000 proximo && mkdir /work && chown proximo /work
USER 1000
WORKDIR /work
ENV HF_HOME=/work/cache/huggingface XDG_CACHE_HOME=/work/cache
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENTRYPOINT ["proximo"]
CMD ["--help"]
