#!/bin/sh
# Builds on the farm with `bko-install build`. Everything that it needs comes
# from variables: `bko-install credentials --format env` prints them.
#
#   IMAGE=registry.example.org/shop:1 ./build.sh [further options of `bko-install build`]
set -eu

exec "${BKO_INSTALL:-bko-install}" build --tag "$IMAGE" --push "$@" "${CONTEXT:-.}"
