#!/bin/sh
# Starts Redis with TLS only, with the user `paceline` and the certificate that `paceline certs renew` has written, and
# with a user `renewer` for health.sh, whose password stays in this container. REDIS_APPEND_ONLY=no: nothing is kept on
# disk.
# After SIGTERM it continues to serve while a service of the run, which may be finishing a step, is connected.
set -eu
# 18EB is port 6379, and 01 an established connection.
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

# Set before the server starts, because it may be told to end as soon as it runs.
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
  --appendonly "${REDIS_APPEND_ONLY:-yes}" --appendfsync everysec --save '' \
  --maxmemory "${REDIS_MAX_MEMORY:-1gb}" --maxmemory-policy noeviction &

# A signal interrupts `wait`; the next `wait` returns the server's code, and further ones return 127.
code=0
wait "$!" || code=$?
while [ "$code" -gt 128 ]; do
  before=$code code=0
  wait "$!" || code=$?
  [ "$code" -ne 127 ] || exit "$before"
done
exit "$code"
