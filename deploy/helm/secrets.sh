#!/bin/sh
# Prints the Secrets that the chart's pods mount: the token, Redis' password, and a certificate for each service.
#   secrets.sh FOLDER RELEASE [DAYS] | kubectl apply --namespace NAMESPACE --filename -
# FOLDER keeps the authority's key, the token and the password; call it again to renew the certificates. NAME=... is
# the chart's value `secrets`.
set -eu
folder=$1 release=$2 days=${3:-7} name=${NAME:-paceline}
mkdir -p "$folder"
chmod 700 "$folder"
cd "$folder"
for secret in token redis_password; do
  if [ ! -s "$secret" ]; then head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' > "$secret"; fi
done

print() { # NAME FILE ...
  printf -- '---\napiVersion: v1\nkind: Secret\nmetadata: {name: %s}\ntype: Opaque\ndata:\n' "$1"
  shift
  for file; do printf '  %s: %s\n' "$(basename "$file")" "$(base64 < "$file" | tr -d '\n')"; done
}

paceline certs init . >&2
for role in controller learner rollout reward client redis; do
  if [ "$role" = redis ]; then set -- --host "$release-redis"; else set --; fi
  paceline certs issue . "$role" --days "$days" "$@" >&2
done
# Redis loads its append-only file with the permissions of `default`, as whom nobody can log in.
printf 'user default off resetpass allkeys allchannels +@all\n%s\n' "$(PACELINE_REDIS_PASSWORD_FILE=redis_password paceline certs acl)" > redis/users.acl
print "$name" token redis_password
for role in controller learner rollout reward client; do
  print "$name-tls-$role" "$role/ca.pem" "$role/cert.pem" "$role/key.pem"
done
print "$name-tls-redis" redis/ca.pem redis/cert.pem redis/key.pem redis/users.acl
