#!/bin/sh
# Builds on the farm with curl and docker buildx alone: asks for a daemon, builds,
# and gives the daemon back however the build ends. Everything that it needs comes
# from variables, those of docs/build.md: `bko-install credentials --format env`
# prints them. What only `bko-install build` can do is refused.
#
#   BUILDKIT_OPERATOR_REPO=github.com/acme/shop ./build-curl.sh --push --tag registry.example.org/shop:1 .
#
# The arguments are those of `docker buildx build`.
set -eu
umask 077

fail() {
    echo "error: $1" >&2
    exit 2
}
# A variable without the white space around it; unset, empty and blank are the same.
given() {
    eval "value=\${BUILDKIT_OPERATOR_$1:-}"
    printf %s "$value" | sed -e 's/^[[:space:]]*//' -e 's/[[:space:]]*$//'
}
need() {
    found=$(given "$1")
    [ -n "$found" ] || fail "BUILDKIT_OPERATOR_$1 is not set: \`bko-install credentials --format env\` prints it"
    printf %s "$found"
}
# A token goes into a header as it is.
secret() {
    found=$(given "$1")
    case $found in
    *[[:space:]]* | /*) fail "BUILDKIT_OPERATOR_$1 is not the token alone: want no white space, no \"Bearer\", no path" ;;
    esac
    printf %s "$found"
}

url=$(need BUILDD_URL)
url=${url%/}
# Each by itself: of several in one line, only the last may fail.
token=$(secret TOKEN)
identity=$(secret ID_TOKEN)
admin=$(secret ADMIN_TOKEN)
audience=$(given OIDC_AUDIENCE)
repo=$(given REPO)
[ -n "$repo" ] || fail "BUILDKIT_OPERATOR_REPO is not set: want a repository such as github.com/acme/shop"
# The password of a checkout's URL is nobody's business.
repo=$(printf %s "$repo" | sed 's#^\([hH][tT][tT][pP][sS]*://\)[^/@]*@#\1#')
name=$(given NAME) target=$(given TARGET)
[ -z "$(given SECRETS)" ] ||
    fail "BUILDKIT_OPERATOR_SECRETS is for \`bko-install build\`: here, unset it and pass --secret id=NAME,env=VARIABLE"

case $(given UNTRUSTED | tr '[:upper:]' '[:lower:]') in
'' | 0 | f | false | n | no | off) untrusted=false ;;
1 | t | true | y | yes | on) untrusted=true ;;
*) fail "BUILDKIT_OPERATOR_UNTRUSTED: want true or false" ;;
esac

arch=$(given ARCH)
arch=${arch#linux/}
case ${arch:-$(uname -m)} in
arm64 | aarch64) arch=arm64 ;;
amd64 | x86_64) arch=amd64 ;;
*) fail "BUILDKIT_OPERATOR_ARCH: want amd64 or arm64; several at once are for \`bko-install build\`" ;;
esac

patience=$(given ROUTE_WAIT)
patience=${patience:-300}
number=${patience%[smh]}
case $number in
'' | *[!0-9]* | 0?* | ????????*) fail "BUILDKIT_OPERATOR_ROUTE_WAIT: want seconds, or a number with s, m or h, such as 5m" ;;
esac
case $patience in
*m) patience=$((number * 60)) ;;
*h) patience=$((number * 3600)) ;;
*) patience=$number ;;
esac

host=$(given GATEWAY_HOST) port=$(given GATEWAY_PORT) ip=$(given GATEWAY_IP)
case $host in *[!a-zA-Z0-9.-]*) fail "BUILDKIT_OPERATOR_GATEWAY_HOST: want a domain such as builds.example.org" ;; esac
case $port in *[!0-9]* | ??????*) fail "BUILDKIT_OPERATOR_GATEWAY_PORT: want 1 to 65535" ;; esac
case $ip in
*[!0-9a-fA-F.:]*) fail "BUILDKIT_OPERATOR_GATEWAY_IP: want an IPv4 or IPv6 address" ;;
*:*) ip="[$ip]" ;;
esac

work=$(mktemp -d)
builder=bko-$$-$(basename "$work" | tr -cd 'a-zA-Z0-9')
pid='' key='' build=''

# Whom the API shall take us for: a token, or an identity of this job, made anew
# for every call since it lives for minutes. In a file: others see command lines.
authorize() {
    bearer=${token:-$identity}
    if [ -z "$bearer" ] && [ -n "${ACTIONS_ID_TOKEN_REQUEST_URL:-}" ]; then
        printf 'Authorization: Bearer %s\n' "$ACTIONS_ID_TOKEN_REQUEST_TOKEN" >"$work/request"
        bearer=$(curl -fsS --retry 3 -H @"$work/request" \
            "$ACTIONS_ID_TOKEN_REQUEST_URL&audience=${audience:-buildkit-operator}" |
            sed -n 's/.*"value" *: *"\([^"]*\)".*/\1/p')
    fi
    printf 'Authorization: Bearer %s\n' "$bearer" >"$work/authorization"
    [ -z "$admin" ] || printf 'X-Buildkit-Operator-Admin-Token: %s\n' "$admin" >>"$work/authorization"
}

# POST to a path, again when the farm says so, for so many seconds at most.
post() {
    path=$1 seconds=$2 body=$3
    set -- -sS --fail-with-body -H @"$work/authorization" -d "$body" \
        --retry 100 --retry-max-time "$seconds" --retry-connrefused
    case $url in https:*) set -- "$@" --cacert "$work/api-ca.pem" ;; esac
    if [ -n "$ip" ]; then
        case $url in *://api.*) set -- "$@" --connect-to "::$ip:" ;; esac
    fi
    curl "$@" "$url$path"
}

release() {
    status=$?
    trap - EXIT
    if [ -n "$build" ]; then
        docker buildx rm --keep-daemon "$builder" >/dev/null 2>&1 || true
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

# A certificate as PEM, as PEM in base64, or as the path of a file that holds
# either, which GitLab makes of it; some systems keep the lines of one in one.
pem() {
    found=$(need "$1")
    [ ! -f "$found" ] || found=$(cat "$found")
    case $found in
    *'-----BEGIN '*) ;;
    *) found=$(printf %s "$found" | tr -d '[:space:]' | base64 -d 2>/dev/null) || found='' ;;
    esac
    case $found in
    *'-----BEGIN '*) printf '%b\n' "$found" ;;
    *) fail "BUILDKIT_OPERATOR_$1 is neither PEM, nor PEM in base64, nor the path of a file" ;;
    esac
}
# The first of two names of a file that is there.
file() {
    for found in "$1" "$2"; do
        [ ! -f "$found" ] || { cat "$found" && return; }
    done
    fail "there is no \"$1\", nor \"$2\": BUILDKIT_OPERATOR_CLIENT_CERTS wants a folder with ca.pem, cert.pem and key.pem"
}
certs=$(given CLIENT_CERTS)
if [ -n "$certs" ]; then
    file "$certs/ca.pem" "$certs/ca.crt" >"$work/ca.pem"
    file "$certs/cert.pem" "$certs/tls.crt" >"$work/cert.pem"
    file "$certs/key.pem" "$certs/tls.key" >"$work/key.pem"
else
    pem CA >"$work/ca.pem"
    pem CERT >"$work/cert.pem"
    pem KEY >"$work/key.pem"
fi
if [ -n "$(given API_CA)" ]; then pem API_CA; else cat "$work/ca.pem"; fi >"$work/api-ca.pem"
# Beside those of the system, which curl would forget.
for found in "${SSL_CERT_FILE:-}" /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/cert.pem; do
    [ ! -f "$found" ] || { cat "$found" >>"$work/api-ca.pem" && break; }
done
# The builder need not see them.
unset BUILDKIT_OPERATOR_CA BUILDKIT_OPERATOR_CERT BUILDKIT_OPERATOR_KEY BUILDKIT_OPERATOR_API_CA \
    BUILDKIT_OPERATOR_TOKEN BUILDKIT_OPERATOR_ADMIN_TOKEN BUILDKIT_OPERATOR_ID_TOKEN

field() { printf %s "$answer" | sed -n "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p"; }
json() { printf %s "$1" | sed 's/[\\"]/\\&/g'; }

request="{\"repo\":\"$(json "$repo")\",\"name\":\"$(json "$name")\",\"target\":\"$(json "$target")\""
request="$request,\"arch\":\"$arch\",\"untrusted\":$untrusted}"
authorize
answer=$(post /route "$patience" "$request") || {
    echo "error: no daemon: ${answer:-no answer}" >&2
    exit 1
}
key=$(field key) build=$(field buildId) endpoint=$(field endpoint)
[ -n "$key" ] && [ -n "$build" ] && [ -n "$endpoint" ] || {
    echo "error: no daemon: is $url the address of the routing API?" >&2
    exit 1
}

# Where the daemon is, if not where the answer says.
endpoint=${endpoint#tcp://}
daemon=${endpoint%:*} port=${port:-${endpoint##*:}}
[ -z "$host" ] || daemon=${daemon%%.*}.$host
options="cacert=$work/ca.pem,cert=$work/cert.pem,key=$work/key.pem"
# DNS does not know the daemon's name: its certificate does.
[ -z "$ip" ] || options="$options,servername=$daemon"
docker buildx create --name "$builder" --driver remote --driver-opt "$options" "tcp://${ip:-$daemon}:$port" >/dev/null
[ -z "$target" ] || set -- --target "$target" "$@"
docker buildx build --builder "$builder" "$@" &
pid=$!
wait "$pid"
