#!/bin/sh
# Issues each service a certificate, in a folder of its own in the working directory, where it has none or half of
# its days are over. Services read new files by themselves; Redis reads them when it starts.
#   issue.sh [DAYS]
set -eu
days=${1:-7}
paceline certs init .
for name in controller learner rollout reward client redis client-prometheus; do
  if [ -n "$(find "$name/cert.pem" -mmin "-$((days * 720))" 2> /dev/null)" ] && cmp -s ca.pem "$name/ca.pem"; then
    echo "$name keeps its certificate"
  elif [ "$name" = redis ]; then
    paceline certs issue . redis --days "$days" --host redis
  else
    paceline certs issue . "$name" --days "$days"
  fi
done
# Redis and Prometheus run as other users, who are in the group of these files.
# Nobody can log in as `default`; but Redis loads its append-only file with that user's permissions, and drops each
# transaction that these do not allow.
printf 'user default off resetpass allkeys allchannels +@all\n%s\n' "$(paceline certs acl)" > redis/users.acl.new
chmod 640 redis/key.pem client-prometheus/key.pem redis/users.acl.new
mv redis/users.acl.new redis/users.acl
