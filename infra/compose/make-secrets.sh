#!/bin/sh
# make-secrets.sh HOST: makes passwords, keys and certificates in secrets/, and .env, beside this file. HOST is the name or address by which
# people reach this machine. What exists already stays, so another HOST only gets a new certificate.
set -eu
test $# = 1 || { echo "usage: make-secrets.sh HOST, the name or address by which people reach this machine" >&2; exit 2; }
cd "$(dirname "$0")"
# Compose mounts the files as they are, and containers run as other users: the folder keeps others on this machine out.
umask 022
mkdir -p secrets
chmod 700 secrets
for name in mlflow_password mlflow_session_key postgres_password ray_token store_secret_key; do
  test -s secrets/$name.txt || openssl rand -hex 32 >secrets/$name.txt
done
test -s secrets/prefect_login.txt || echo "admin:$(openssl rand -hex 32)" >secrets/prefect_login.txt
test -s .env || echo "COMPOSE_PROFILES=s3
RAY_WORKER_CPUS=$(nproc)" >.env
sed -i '/^VITLINE_HOST=/d' .env
echo "VITLINE_HOST=$1" >>.env

ec="-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
test -s secrets/authority.crt || openssl req -x509 $ec -days 3650 -subj "/CN=vitline" \
  -addext basicConstraints=critical,CA:TRUE,pathlen:0 -addext keyUsage=critical,keyCertSign,cRLSign \
  -keyout secrets/authority.key -out secrets/authority.crt
case $1 in *:* | *[!0-9.]*) kind=DNS ;; *) kind=IP ;; esac
openssl req -x509 $ec -days 825 -subj "/CN=$1" -CA secrets/authority.crt -CAkey secrets/authority.key \
  -addext basicConstraints=critical,CA:FALSE -addext extendedKeyUsage=serverAuth \
  -addext "subjectAltName=$kind:$1,DNS:localhost,IP:127.0.0.1" -keyout secrets/proxy.key -out secrets/proxy.crt
chmod 644 secrets/*.txt secrets/*.crt secrets/proxy.key
echo "made secrets/ and .env for $1; people need secrets/authority.crt"
