#!/bin/sh
# Starts Redis with TLS only, and with one user, `paceline`; certs/issue.sh has written the user and the certificate.
set -eu
files=/run/tls
exec redis-server --aclfile "$files/users.acl" --dir /data --bind '* -::*' \
  --port 0 --tls-port 6379 --tls-auth-clients yes \
  --tls-ca-cert-file "$files/ca.pem" --tls-cert-file "$files/cert.pem" --tls-key-file "$files/key.pem" \
  --appendonly yes --appendfsync everysec --save '' \
  --maxmemory "${REDIS_MAX_MEMORY:-1gb}" --maxmemory-policy noeviction
