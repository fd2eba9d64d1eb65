# An image for GPUs, with the versions of constraints.txt. It was never built: no machine of this project has GPUs.
FROM nvidia/cuda:12.8.1-devel-ubuntu24.04
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        git ninja-build python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /workspace
COPY . .
RUN python3.12 -m venv .venv \
    && .venv/bin/pip install --no-cache-dir -c constraints.txt setuptools wheel \
    && .venv/bin/pip install --no-cache-dir -c constraints.txt torch --index-url https://download.pytorch.org/whl/cu128 \
    && .venv/bin/pip install --no-cache-dir -c constraints.txt --no-build-isolation -e '.[bitsandbytes,gpu]'
ENV PATH=/workspace/.venv/bin:$PATH
ENTRYPOINT ["python", "-u", "-m", "torch.distributed.run"]
