#!/bin/sh
# Starts Redis with one user, `paceline`, who sees the runs' keys only and has the commands that Paceline uses.
set -eu
hash=$(tr -d '\n' < /run/secrets/redis_password | sha256sum | cut -d ' ' -f 1)
umask 077
cat > /tmp/users.acl <<ACL
user default off
user paceline on #$hash ~paceline:* -@all +ping +hello +auth +client|setname +client|id +info +set +mget +unlink +type +scan +eval +evalsha +script|load +xadd +xack +xlen +xread +xreadgroup +xgroup +xinfo +xpending +xclaim +xtrim
ACL
exec redis-server --aclfile /tmp/users.acl --dir /data --bind '* -::*' --port 6379 \
  --appendonly yes --appendfsync everysec --save '' \
  --maxmemory "${REDIS_MAX_MEMORY:-1gb}" --maxmemory-policy noeviction
