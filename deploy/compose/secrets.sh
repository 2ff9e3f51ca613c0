#!/bin/sh
# Makes the secrets that compose.yaml mounts, where they are missing.
set -eu
cd "$(dirname "$0")"
mkdir -p secrets
chmod 700 secrets
for name in token redis_password; do
  if [ ! -s "secrets/$name" ]; then
    # The containers' users must be able to read the file; the folder keeps others on this machine out.
    head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' > "secrets/$name"
    chmod 444 "secrets/$name"
  fi
done
