#!/bin/sh
# Creates the run's token and Redis' password in FOLDER, if they are missing.
#   secrets.sh [FOLDER]     default: the folder `secrets` beside this file, which compose.yaml mounts
set -eu
folder=${1:-$(dirname "$0")/secrets}
mkdir -p "$folder"
chmod 700 "$folder"
for name in token redis_password; do
  if [ ! -s "$folder/$name" ]; then
    # The containers' users must be able to read the file; the folder's mode keeps other users out.
    head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' > "$folder/$name"
    chmod 444 "$folder/$name"
  fi
done
