#!/bin/sh
# Succeeds if Redis answers; while it loads its data, it does not. First tells Redis if its certificate has changed.
REDISCLI_AUTH=$(cat /run/secrets/redis_password)
export REDISCLI_AUTH
files=/run/tls
stamp=$(cksum "$files"/*.pem)
if [ -e /tmp/renewer ] && [ "$stamp" != "$(cat /tmp/stamp)" ]; then
  # The former certificate may have expired.
  said=$(REDISCLI_AUTH=$(cat /tmp/renewer) redis-cli --no-auth-warning --user renewer --tls --insecure \
    --cert "$files/cert.pem" --key "$files/key.pem" config set tls-cert-file "$files/cert.pem")
  if [ "$said" = OK ]; then echo "$stamp" > /tmp/stamp; fi
fi
[ "$(redis-cli --no-auth-warning --user paceline --tls --cacert "$files/ca.pem" --cert "$files/cert.pem" \
  --key "$files/key.pem" ping)" = PONG ]
