#!/bin/sh
# Whether Redis answers; while it loads its data it does not.
REDISCLI_AUTH=$(cat /run/secrets/redis_password)
export REDISCLI_AUTH
files=/run/tls
[ "$(redis-cli --no-auth-warning --user paceline --tls --cacert "$files/ca.pem" --cert "$files/cert.pem" \
  --key "$files/key.pem" ping)" = PONG ]
