# An image for GPUs whose driver is 580 or newer (CUDA 13), with the versions of constraints.txt. It was never built:
# no machine of this project has GPUs. The packages of torch, triton and bitsandbytes contain what they need of CUDA;
# triton compiles its launcher with gcc and Python's header files.
FROM python:3.12-slim
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends g++ gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /workspace
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -e '.[bitsandbytes]'
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENTRYPOINT ["python", "-u", "-m", "torch.distributed.run"]
