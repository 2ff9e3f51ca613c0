#!/usr/bin/env bash
# Builds the images for compose.yaml on this machine; needs Docker with BuildKit (20.10 or newer), no registry.
#
#   deploy/compose/build.sh [IMAGE ...]      controller reward learner rollout redis; default: all
#
# BASE_IMAGE     what all images stand on: Debian or Ubuntu with Python 3.11 or 3.12 among its packages. Where it
#                cannot be pulled, it is made by debootstrap, which needs root (default: debian:bookworm-slim)
# VARIANT        cpu or cuda (default: cpu); cuda wants BASE_IMAGE with CUDA's libraries, and REQUIREMENTS
# REQUIREMENTS   lock file (default: requirements/cpu.txt)
# TAG            of the images (default: VARIANT)
# PIP_CONF       pip.conf for the build alone, where pip's own index is not enough
# CA_BUNDLE      certificates that pip trusts in the build alone
# BUILD_NETWORK  network of the build, say host (default: the engine's own)
# DOCKER         the engine's command (default: docker)
set -euo pipefail
cd "$(dirname "$0")/../.."
docker=${DOCKER:-docker}
base=${BASE_IMAGE:-debian:bookworm-slim}
variant=${VARIANT:-cpu}
tag=${TAG:-$variant}
export DOCKER_BUILDKIT=1

make_base() {
  local tree
  tree=$(mktemp -d)
  trap 'rm -rf "$tree"' RETURN
  debootstrap --variant=minbase --include=ca-certificates bookworm "$tree" "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" >&2
  rm -rf "$tree"/var/cache/apt/archives/*.deb "$tree"/var/lib/apt/lists/*
  tar --directory "$tree" --create . | "$docker" import - "$1" >&2
}

if ! "$docker" image inspect "$base" > /dev/null 2>&1 && ! "$docker" pull --quiet "$base" > /dev/null 2>&1; then
  [ -z "${BASE_IMAGE:-}" ] || { echo "build.sh: there is no image $base, and it cannot be pulled" >&2; exit 2; }
  base=paceline/base:bookworm
  if ! "$docker" image inspect "$base" > /dev/null 2>&1; then
    command -v debootstrap > /dev/null || {
      echo "build.sh: no image can be pulled; install debootstrap, or set BASE_IMAGE to an image that is here" >&2
      exit 2
    }
    make_base "$base"
  fi
fi

arguments=(--build-arg "BASE_IMAGE=$base")
[ -z "${BUILD_NETWORK:-}" ] || arguments+=(--network "$BUILD_NETWORK")
packages=(--build-arg "REQUIREMENTS=${REQUIREMENTS:-requirements/cpu.txt}")
[ -z "${PIP_CONF:-}" ] || packages+=(--secret "id=pip_conf,src=$PIP_CONF")
[ -z "${CA_BUNDLE:-}" ] || packages+=(--secret "id=ca_bundle,src=$CA_BUNDLE")

[ $# -gt 0 ] || set -- controller reward learner rollout redis
for image in "$@"; do
  began=$SECONDS
  if [ "$image" = redis ]; then
    "$docker" build --quiet "${arguments[@]}" --tag "paceline/redis:local" deploy/compose/redis > /dev/null
    name=paceline/redis:local
  else
    variants=()
    case $image in learner | rollout) variants=(--build-arg "VARIANT=$variant") ;; esac
    name=paceline/$image:$tag
    case $image in controller | reward) name=paceline/$image:local ;; esac
    "$docker" build --quiet "${arguments[@]}" "${packages[@]}" "${variants[@]}" \
      --file "services/$image/Dockerfile" --tag "$name" . > /dev/null
  fi
  bytes=$("$docker" image inspect --format '{{.Size}}' "$name")
  echo "$name  $((bytes / 1000000)) MB  $((SECONDS - began)) s"
done
