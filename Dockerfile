# docker build -t lockstep --build-arg REVISION=$(git rev-parse HEAD) .     how to run it: README.md
# BASE may be an image that has torch, which it keeps: pytorch/pytorch:..., nvcr.io/nvidia/pytorch:...
# This one has a digest, and requirements.lock the sha256 of every package: a later build installs the same.
ARG BASE=python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea
FROM ${BASE}

# torch.compile wants a C++ compiler at run time, triton one for C; torchrun --numa-binding wants numactl.
# Versions are the base's: Debian keeps no older ones to pin.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libc6-dev numactl && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY requirements.txt requirements.lock ./
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN --mount=type=cache,target=/root/.cache/pip \
    if python3 -c "import torch" 2>/dev/null; then \
        grep -vE "^torch(vision)?[>=]" requirements.txt > missing.txt && \
        python3 -m pip install --requirement missing.txt && rm missing.txt; \
    else python3 -m pip install --require-hashes --no-deps --requirement requirements.lock; fi

COPY train.py launch.sh ./
COPY ask ask
COPY data data
COPY engine engine
COPY extras extras
COPY models models
COPY utils utils
# Any user id may run it (docker run -u, Kubernetes): nothing else is written.
# LOGNAME: python asks for the user's name, and some ids have none.
ENV HOME=/cache XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface TORCH_HOME=/cache/torch LOGNAME=lockstep \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor TRITON_CACHE_DIR=/cache/triton
RUN mkdir --mode=1777 /cache runs && chmod -R a+rX . && python3 -m compileall -q .
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Lockstep" \
      org.opencontainers.image.description="Trains image classifiers and BERT on one process or many" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
USER 1000:1000
STOPSIGNAL SIGTERM
ENTRYPOINT ["./launch.sh"]
