#!/bin/sh
# Starts Redis with TLS only, and with the user `paceline`; `paceline certs renew` has written user and certificate. A
# user `renewer`, whose password stays in this container, is for health.sh.
# After SIGTERM it serves on while a service of the run is connected, which may be finishing a step.
set -eu
# Port 6379 is 18EB, an established connection 01.
is_connected() {
  cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | awk '$2 ~ /:18EB$/ && $4 == "01" { n++ } END { exit !n }'
}

serve_on() {
  seconds=$((${PACELINE_STOP_GRACE_S:-0} - 30))
  while [ "$seconds" -gt 0 ] && is_connected; do
    sleep 1
    seconds=$((seconds - 1))
  done
}

# Set before there is a server, which may be told to end as soon as it runs.
trap 'serve_on; kill "$!" || true' TERM
trap 'kill "$!" || true' INT

files=/run/tls
(
  umask 077
  head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' > /tmp/renewer
  cksum "$files"/*.pem > /tmp/stamp
  cat "$files/users.acl" > /tmp/users.acl
  echo "user renewer on #$(sha256sum < /tmp/renewer | cut -c 1-64) -@all +config|set" >> /tmp/users.acl
)
redis-server --aclfile /tmp/users.acl --dir /data --bind '* -::*' \
  --port 0 --tls-port 6379 --tls-auth-clients yes \
  --tls-ca-cert-file "$files/ca.pem" --tls-cert-file "$files/cert.pem" --tls-key-file "$files/key.pem" \
  --appendonly yes --appendfsync everysec --save '' \
  --maxmemory "${REDIS_MAX_MEMORY:-1gb}" --maxmemory-policy noeviction &

# A signal interrupts `wait`, which has the server's code the next time, and 127 once it has told it.
code=0
wait "$!" || code=$?
while [ "$code" -gt 128 ]; do
  before=$code code=0
  wait "$!" || code=$?
  [ "$code" -ne 127 ] || exit "$before"
done
exit "$code"
