# The image of this checkout; docs/containers.md says how to build and run it.
#
#   make image                                            tags it text-to-image-recipes:VERSION; BUILDER=podman or BUILDER=buildah instead of docker
#   make image OPTIONS='--build-arg EXTRAS=eval,fleet'    fewer packages; extras of setup.py
#
# BASE needs apt and Python 3.11 to 3.13 as its python3 (Ubuntu 24.04, Debian 12 or 13). PyTorch's wheels bring CUDA's libraries, so NVIDIA's smallest
# image does: it adds the check of the driver's version at the start, and the package for older drivers. The digest is the one that independent public
# repositories pin for this tag; the registry itself was not asked. To ask it, or to pin another image: docker buildx imagetools inspect IMAGE:TAG
ARG BASE=nvidia/cuda:13.0.2-base-ubuntu24.04@sha256:2ab6381d970b211fb93853796dc6707eb8a72575a375c422b17cf4d8b2641701

# hadolint ignore=DL3006
FROM ${BASE} AS system
# gcc and headers: Triton compiles a launcher for each of its kernels when a run starts; wget: KubeRay's probes ask with it. Security updates of the
# distribution come with each build, so no versions.
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev python3 python3-dev tini wget && \
    rm -rf /var/lib/apt/lists/*

# 7 GB, made again only if a version or a bound changes. setup.py wants a package to install; it gets an empty one, and /app takes its place.
FROM system AS deps
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install --yes --no-install-recommends python3-venv && \
    rm -rf /var/lib/apt/lists/* && \
    python3 -m venv /opt/venv && \
    python3 -m venv /opt/uv && \
    /opt/uv/bin/pip install --no-cache-dir "uv>=0.9,<1"
WORKDIR /deps
COPY setup.py pyproject.toml constraints.txt ./
COPY diffusion/__init__.py diffusion/
ARG EXTRAS=all
RUN /opt/uv/bin/uv pip install --no-cache --python /opt/venv/bin/python --constraint constraints.txt ".[${EXTRAS}]" && \
    /opt/uv/bin/uv pip uninstall --python /opt/venv/bin/python text-to-image-recipes

FROM system
COPY --from=deps /opt/venv /opt/venv
WORKDIR /app
# A user without a name in /etc/passwd needs HOME, and USER for PyTorch's caches. Without PYTHONUNBUFFERED the last lines before a kill are lost.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 \
    HOME=/home/recipes \
    USER=recipes
COPY . .
# The code belongs to root, whatever the checkout's umask was; any user may write into the other folders, also one that `docker run --user` names.
RUN chmod --recursive u=rwX,go=rX . && \
    install --directory --mode=1777 runs data "$HOME"
ARG VERSION=unknown
ARG COMMIT=unknown
# Checkpoints and reports say which commit made them; here is no .git to ask.
ENV GIT_COMMIT=${COMMIT}
LABEL org.opencontainers.image.title="text-to-image-recipes" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${COMMIT}"
# A number, because Kubernetes' runAsNonRoot cannot tell of a name.
USER 1000:1000
# Process 1 has no default actions: without an init, SIGTERM to a command that does not handle it would do nothing until SIGKILL.
ENTRYPOINT ["tini", "--"]
CMD ["composer", "--help"]
