# te_fsdp with real TransformerEngine, from PyPI's packages and Debian's compiler; docs/install.md has the commands.
# SETUP=cpu makes the image of a laptop instead: torch for the CPU, TransformerEngine emulated.
FROM python:3.12-slim-bookworm AS build
ARG SETUP=gpu
ARG MAX_JOBS=4
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN VENV=/opt/te_fsdp scripts/setup.sh
# setup.sh installs the checkout in place; the image takes the package alone.
RUN /opt/te_fsdp/bin/pip install --no-deps --force-reinstall .

FROM python:3.12-slim-bookworm
# Triton, which torch.compile and TransformerEngine use, compiles a launcher for its kernels when they first run.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/te_fsdp /opt/te_fsdp
ENV PATH=/opt/te_fsdp/bin:$PATH
RUN useradd --create-home trainer
USER trainer
WORKDIR /home/trainer
CMD ["te-fsdp", "env"]
