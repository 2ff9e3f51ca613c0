#!/usr/bin/env bash
# Builds the images for compose.yaml on this machine. Needs Docker with BuildKit (20.10, or newer with the plugin
# buildx), but no registry.
#
#   deploy/compose/build.sh [IMAGE ...]      default: controller reward learner rollout redis
#                                            prints steps to stderr and a line per image to stdout
#   deploy/compose/build.sh prometheus       if the image of profile observability cannot be pulled
#
# BASE_IMAGE     base of all images: Debian or Ubuntu with packages for Python 3.11 or 3.12. If the default cannot be
#                pulled, debootstrap makes one, which needs root (default: debian:bookworm-slim)
# VARIANT        variant of learner and rollout: cpu or cuda (default: cpu)
# REQUIREMENTS   lock file (default: requirements/VARIANT.txt)
# TORCH_INDEX    where pip finds torch if its own index does not have this build (default: PyTorch's index for VARIANT)
# TAG            tag of learner and rollout (default: VARIANT)
# PIP_CONF       pip.conf, used only in the build, if pip's own index is not enough
# CA_BUNDLE      certificates that pip trusts, only in the build
# BUILD_NETWORK  network of the build, for example host (default: Docker's own)
# DOCKER         Docker's command (default: docker)
set -euo pipefail
cd "$(dirname "$0")/../.."
docker=${DOCKER:-docker}
base=${BASE_IMAGE:-debian:bookworm-slim}
variant=${VARIANT:-cpu}
tag=${TAG:-$variant}
requirements=${REQUIREMENTS:-requirements/$variant.txt}
case $variant in
  cpu) builds=cpu ;;
  cuda) builds=cu130 ;;
  *) echo "build.sh: VARIANT=$variant must be cpu or cuda" >&2; exit 2 ;;
esac
[ -f "$requirements" ] || { echo "build.sh: there is no lock file $requirements" >&2; exit 2; }
torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/$builds}
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
packages=(--build-arg "REQUIREMENTS=$requirements")
[ -z "${PIP_CONF:-}" ] || packages+=(--secret "id=pip_conf,src=$PIP_CONF")
[ -z "${CA_BUNDLE:-}" ] || packages+=(--secret "id=ca_bundle,src=$CA_BUNDLE")

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
# "dirty" if the tree differs from the commit.
revision=$(git describe --always --dirty --abbrev=12 --exclude '*' 2> /dev/null || echo unknown)
arguments+=(--build-arg "VERSION=$version" --build-arg "REVISION=$revision")

[ $# -gt 0 ] || set -- controller reward learner rollout redis
for image in "$@"; do
  began=$SECONDS
  name=paceline/$image:local
  options=("${packages[@]}" --file "services/$image/Dockerfile" .)
  case $image in
    redis | prometheus) options=("deploy/compose/$image") ;;
    controller | reward) ;;
    learner | rollout)
      name=paceline/$image:$tag
      options=(--build-arg "VARIANT=$variant" --build-arg "TORCH_INDEX=$torch_index" "${options[@]}")
      ;;
    *) echo "build.sh: $image must be controller, reward, learner, rollout, redis or prometheus" >&2; exit 2 ;;
  esac
  echo "building $name" >&2
  "$docker" build --progress plain "${arguments[@]}" --tag "$name" "${options[@]}" >&2
  bytes=$("$docker" image inspect --format '{{.Size}}' "$name")
  echo "$name  $((bytes / 1000000)) MB  $((SECONDS - began)) s"
done
