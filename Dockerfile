# docker build -t redline .
# docker run --rm --gpus all --user "$(id -u):$(id -g)" -v "$PWD:/work" redline train     (no --gpus: on the CPU)
# torch's own wheels bring CUDA; the host needs the NVIDIA driver and its container toolkit. Several GPUs: --ipc=host.
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends make g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/redline
COPY Makefile pyproject.toml constraints.txt README.md LICENSE ./
COPY scripts scripts
COPY src src
ARG EXTRAS="data finetune low-bit remote"
RUN make setup EXTRAS="${EXTRAS}"
# Runs, caches and whatever is fetched lie in /work, so that they outlive the container.
ENV PATH=/opt/redline/.venv/bin:${PATH} HOME=/work USER=redline
WORKDIR /work
ENTRYPOINT ["redline"]
CMD ["doctor"]
