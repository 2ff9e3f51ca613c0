#!/bin/sh
# Issues each service a certificate, in its own folder in the working directory, if it has none or if half of its
# lifetime is over. Services read new files by themselves; redis/health.sh tells Redis.
#   issue.sh [DAYS]
set -eu
paceline certs renew . client-prometheus --host redis --host redis-blobs --days "${1:-30}"
# Redis and Prometheus run as other users, which are in the group of these files.
chmod 640 redis/key.pem client-prometheus/key.pem
