#!/bin/sh
# Issues each service a certificate, in a folder of its own in the working directory, where it has none or half of
# its days are over. Services read new files by themselves, Redis is told of them by redis/health.sh.
#   issue.sh [DAYS]
set -eu
paceline certs renew . client-prometheus --host redis --days "${1:-30}"
# Redis and Prometheus run as other users, who are in the group of these files.
chmod 640 redis/key.pem client-prometheus/key.pem
