# docker build -t lockstep . && docker run --gpus all --ipc=host -v DATA:/data:ro -v RUNS:/app/runs lockstep --data /data
ARG BASE=python:3.12-slim
FROM ${BASE}
WORKDIR /app
COPY requirements.txt ./
RUN --mount=type=cache,target=/root/.cache/pip pip install --requirement requirements.txt
COPY train.py launch.sh ./
COPY data data
COPY models models
COPY utils utils
RUN useradd --uid 1000 --create-home lockstep && mkdir runs && chown 1000 runs
USER 1000
ENTRYPOINT ["./launch.sh"]
