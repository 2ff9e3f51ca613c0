#!/bin/sh
# Starts Redis with one user, `paceline`, who sees the runs' keys only and has the commands that Paceline uses.
set -eu
hash=$(tr -d '\n' < /run/secrets/redis_password | sha256sum | cut -d ' ' -f 1)
umask 077
cat > /tmp/users.acl <<ACL
user default off
user paceline on #$hash resetchannels ~paceline:* -@all +auth +hello +ping +select +info +set +mget +unlink +scan +type +eval +evalsha +xack +xadd +xclaim +xgroup +xinfo +xlen +xpending +xread +xreadgroup +xtrim
ACL
exec redis-server --aclfile /tmp/users.acl --dir /data --bind '* -::*' --port 6379 \
  --appendonly yes --appendfsync everysec --save '' \
  --maxmemory "${REDIS_MAX_MEMORY:-1gb}" --maxmemory-policy noeviction
