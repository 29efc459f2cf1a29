#!/bin/sh
# Builds on the farm with curl and docker buildx alone: asks for a daemon, builds,
# and gives the daemon back however the build ends. Everything that it needs comes
# from variables: `bko-install credentials --format env` prints them.
#
#   BUILDKIT_OPERATOR_REPO=github.com/acme/shop ./build-curl.sh --push --tag registry.example.org/shop:1 .
#
# The arguments are those of `docker buildx build`.
set -eu
umask 077

url=${BUILDKIT_OPERATOR_BUILDD_URL%/}
ip=${BUILDKIT_OPERATOR_GATEWAY_IP:-}
work=$(mktemp -d)
builder=bko-$$-$(basename "$work" | tr -cd 'a-zA-Z0-9')
pid='' key='' build=''

# A certificate as its text, or as the path of a file, which GitLab makes of it.
pem() { if [ -f "$1" ]; then cat "$1"; else printf '%s\n' "$1"; fi; }
pem "$BUILDKIT_OPERATOR_CA" >"$work/ca.pem"
pem "$BUILDKIT_OPERATOR_CERT" >"$work/cert.pem"
pem "$BUILDKIT_OPERATOR_KEY" >"$work/key.pem"

# Whom the API shall take us for: a token, or an identity of this job, made anew
# for every call since it lives for minutes. In a file: others see command lines.
authorize() {
    token=${BUILDKIT_OPERATOR_TOKEN:-${BUILDKIT_OPERATOR_ID_TOKEN:-}}
    if [ -z "$token" ] && [ -n "${ACTIONS_ID_TOKEN_REQUEST_URL:-}" ]; then
        printf 'Authorization: Bearer %s\n' "$ACTIONS_ID_TOKEN_REQUEST_TOKEN" >"$work/request"
        token=$(curl -fsS --retry 3 -H @"$work/request" \
            "$ACTIONS_ID_TOKEN_REQUEST_URL&audience=${BUILDKIT_OPERATOR_OIDC_AUDIENCE:-buildkit-operator}" |
            sed -n 's/.*"value" *: *"\([^"]*\)".*/\1/p')
    fi
    printf 'Authorization: Bearer %s\n' "$token" >"$work/authorization"
}

# POST to a path, again when the farm says so, for so many seconds at most.
post() {
    path=$1 seconds=$2 body=$3
    set -- -sS --fail-with-body -H @"$work/authorization" -d "$body" \
        --retry 100 --retry-max-time "$seconds" --retry-connrefused
    case $url in https:*) set -- "$@" --cacert "${BUILDKIT_OPERATOR_API_CA:-$work/ca.pem}" ;; esac
    if [ -n "$ip" ]; then
        case $url in *://api.*) set -- "$@" --connect-to "::$ip:" ;; esac
    fi
    curl "$@" "$url$path"
}

release() {
    status=$?
    trap - EXIT
    docker buildx rm --keep-daemon "$builder" >/dev/null 2>&1 || true
    if [ -n "$build" ]; then
        authorize && post /complete 30 "{\"key\":\"$key\",\"buildId\":\"$build\"}" || echo "warning: the build is not released" >&2
    fi
    rm -rf "$work"
    exit "$status"
}
stop() {
    [ -z "$pid" ] || { kill -s TERM "$pid" 2>/dev/null; wait "$pid" || true; }
    exit "$1"
}
trap release EXIT
trap 'stop 130' INT
trap 'stop 143' TERM

field() { printf %s "$answer" | sed -n "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p"; }
json() { printf %s "$1" | sed 's/[\\"]/\\&/g'; }

case ${BUILDKIT_OPERATOR_ARCH:-$(uname -m)} in
arm64 | aarch64) arch=arm64 ;;
*) arch=amd64 ;;
esac
request="{\"repo\":\"$(json "$BUILDKIT_OPERATOR_REPO")\",\"name\":\"$(json "${BUILDKIT_OPERATOR_NAME:-}")\",\"arch\":\"$arch\"}"
authorize
answer=$(post /route "${BUILDKIT_OPERATOR_ROUTE_WAIT:-300}" "$request") || {
    echo "error: no daemon: $answer" >&2
    exit 1
}
key=$(field key) build=$(field buildId) endpoint=$(field endpoint)

options="cacert=$work/ca.pem,cert=$work/cert.pem,key=$work/key.pem"
if [ -n "$ip" ]; then
    # DNS does not know the daemon's name: its certificate does.
    host=${endpoint#tcp://}
    options="$options,servername=${host%:*}" endpoint="tcp://$ip:${host##*:}"
fi
docker buildx create --name "$builder" --driver remote --driver-opt "$options" "$endpoint" >/dev/null
docker buildx build --builder "$builder" "$@" &
pid=$!
wait "$pid"
