#!/bin/sh
# Makes the database at the first start, then runs the server.
set -eu
if [ ! -d "$PGDATA" ]; then
  printf %s "$POSTGRES_PASSWORD" > /tmp/password
  initdb --username "$POSTGRES_USER" --pwfile /tmp/password --auth-local=trust --auth-host=scram-sha-256
  rm /tmp/password
  echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
  pg_ctl start --wait --options "-c listen_addresses=''"
  createdb --username "$POSTGRES_USER" "$POSTGRES_DB"
  pg_ctl stop --wait
fi
unset POSTGRES_PASSWORD
exec postgres -c "listen_addresses=*"
