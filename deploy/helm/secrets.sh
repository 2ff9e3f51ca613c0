#!/bin/sh
# Prints the Secrets that the chart's pods mount: the token, Redis' password, and a certificate for each service.
#   secrets.sh FOLDER RELEASE [DAYS] | kubectl apply --namespace NAMESPACE --filename -
# FOLDER keeps the authority's key, the token and the password. Call the script again to renew certificates after half
# of their lifetime. NAME=... is the chart's value `secrets`.
set -eu
folder=$1 release=$2 days=${3:-30} name=${NAME:-paceline}
sh "$(dirname "$0")/../compose/secrets.sh" "$folder"
cd "$folder"
stores=""
for number in 0 1 2 3 4 5 6 7; do stores="$stores --host $release-blobs-$number.$release-blobs"; done
# shellcheck disable=SC2086
PACELINE_REDIS_PASSWORD_FILE=redis_password paceline certs renew . --host "$release-redis" $stores --days "$days" >&2

print() { # NAME FILE ...
  printf -- '---\napiVersion: v1\nkind: Secret\nmetadata: {name: %s}\ntype: Opaque\ndata:\n' "$1"
  shift
  for file; do printf '  %s: %s\n' "$(basename "$file")" "$(base64 < "$file" | tr -d '\n')"; done
}

print "$name" token redis_password
for role in controller learner rollout reward client; do
  print "$name-tls-$role" "$role/ca.pem" "$role/cert.pem" "$role/key.pem"
done
print "$name-tls-redis" redis/ca.pem redis/cert.pem redis/key.pem redis/users.acl
