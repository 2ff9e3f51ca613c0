#!/bin/sh
# Whether Redis answers; while it loads its data it does not.
REDISCLI_AUTH=$(cat /run/secrets/redis_password)
export REDISCLI_AUTH
[ "$(redis-cli --no-auth-warning --user paceline ping)" = PONG ]
