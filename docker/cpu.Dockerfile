# Proximo on a CPU. In the top folder of the project: docker build -f docker/cpu.Dockerfile -t proximo .
# docs/images.md says how to run it.
FROM python:3.11-slim-bookworm

# gcc compiles the kernels in C for the processor that the container runs on, at their first use.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# Give the address that pytorch.org shows for Pip and CPU; without it, torch comes with several GB of CUDA.
ARG PIP_EXTRA_INDEX_URL=""
WORKDIR /opt/proximo
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir --constraint constraints.txt ".[maths,serve]"

# Runs, caches and kernels belong to a user without rights, below /work.
RUN useradd --create-home --uid 1000 proximo && mkdir /work && chown proximo /work
USER 1000
WORKDIR /work
ENV HF_HOME=/work/cache/huggingface XDG_CACHE_HOME=/work/cache
ENTRYPOINT ["proximo"]
CMD ["--help"]
