#!/bin/bash
# The main job on this host, told to a person: `make demo`.
#   host.sh EXECUTABLE
# Runs a farm in a folder of its own, on ports of its own, and leaves nothing behind.
set -euo pipefail
executable=$(realpath "$1")
repository=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
state=$work/state repo=github.com/acme/hello

fail() { echo "error: $1" >&2; sed 's/^/  /' "$work/up.log" >&2; exit 1; }
finish() {
    # Twice: nobody waits for what is left of a demo.
    if [ -n "${farm:-}" ] && kill -INT "$farm" 2>/dev/null; then
        sleep 0.5
        kill -INT "$farm" 2>/dev/null || true
        wait "$farm" || true
    fi
    # The rest of an ordinary user's cache belongs to its subordinate users.
    rm -rf "$work" 2>/dev/null || rootlesskit rm -rf "$work" || true
}
trap finish EXIT

now() { date +%s%N; }
since() { awk -v from="$1" -v to="$(now)" 'BEGIN { printf "%.2f", (to - from) / 1e9 }'; }

# Stands for busybox of a registry, as an OCI layout, so that nothing is fetched.
base=$work/base arch=$(uname -m | sed 's/x86_64/amd64/; s/aarch64/arm64/')
mkdir -p "$work/root/bin" "$work/root/tmp" "$base/blobs/sha256"
cp "$(command -v busybox)" "$work/root/bin/busybox"
for program in sh cat id uname mkdir tee; do ln -s busybox "$work/root/bin/$program"; done
blob() { # FILE: moves it among the blobs; prints digest and size
    local digest
    digest=$(sha256sum "$1" | cut -d' ' -f1)
    mv "$1" "$base/blobs/sha256/$digest"
    printf '"digest":"sha256:%s","size":%s' "$digest" "$(stat -c %s "$base/blobs/sha256/$digest")"
}
tar --create --file "$work/layer" --directory "$work/root" --owner=0 --group=0 .
layer=$(blob "$work/layer")
printf '{"architecture":"%s","os":"linux","config":{"Env":["PATH=/bin"]},"rootfs":{"type":"layers","diff_ids":[%s]}}' \
    "$arch" "$(sed 's/"digest":\("[^"]*"\).*/\1/' <<<"$layer")" >"$work/config"
type=application/vnd.oci.image
printf '{"schemaVersion":2,"mediaType":"%s.manifest.v1+json","config":{"mediaType":"%s.config.v1+json",%s},"layers":[{"mediaType":"%s.layer.v1.tar",%s}]}' \
    $type $type "$(blob "$work/config")" $type "$layer" >"$work/manifest"
printf '{"schemaVersion":2,"manifests":[{"mediaType":"%s.manifest.v1+json",%s,"annotations":{"org.opencontainers.image.ref.name":"latest"}}]}' \
    $type "$(blob "$work/manifest")" >"$base/index.json"
printf '{"imageLayoutVersion":"1.0.0"}' >"$base/oci-layout"

build() {
    "$executable" build --state-dir "$state" --repo $repo --progress plain "$repository/examples/hello" -- \
        --build-context "docker.io/library/busybox:1.37=oci-layout://$base:latest" >"$work/build.log" 2>&1 ||
        { cat "$work/build.log" >&2; fail "the build failed"; }
}
cached() { grep -q '^#[0-9]* CACHED' "$work/build.log" || { cat "$work/build.log" >&2; fail "the build is not cached"; }; }

echo "A farm runs on this host: bko-install up"
: >"$work/up.log"
began=$(now)
"$executable" up --state-dir "$state" --listen lo:21234 --daemon-port 21235 --api-listen 127.0.0.1:21280 \
    --metrics-addr 127.0.0.1:21281 >"$work/up.log" 2>&1 &
farm=$!
until grep -q '^The farm is up' "$work/up.log"; do
    kill -0 "$farm" 2>/dev/null || fail "the farm did not come up"
    sleep 0.02
done
up=$(since "$began")

echo "Building examples/hello there: bko-install build, with docker buildx …"
began=$(now); build; cold=$(since "$began")
began=$(now); build; cached; warm=$(since "$began")
# Its daemon says a moment after the client that a build has ended.
for _ in $(seq 50); do
    "$executable" ps --state-dir "$state" >"$work/ps"
    grep -q '^  build' "$work/ps" || break
    sleep 0.1
done
cat "$work/ps"

echo "Sending its daemon to zero, as if it had been idle; its cache stays …"
key=$("$executable" key --repo $repo | awk '$1 == "key" { print $2 }')
"$executable" --quiet stop --state-dir "$state" "$key"
while pgrep -f "$state/daemons/$key/" >/dev/null; do sleep 0.05; done
began=$(now); build; cached; woken=$(since "$began")

printf '\n%-52s%8s\n' "what happened" seconds
printf '%-52s%8s\n' "up: from nothing to a farm that serves" "$up" \
    "cold build: daemon started, built" "$cold" \
    "warm build: the same again, cached" "$warm" \
    "build from zero: daemon woken, still cached" "$woken"
echo
echo "Next: $1 up, and in another terminal, in a checkout of yours: $1 build ."
