# with-secrets.sh VARIABLE=SECRET ... -- COMMAND
# Runs the command with the content of each secret in its variable, so that neither compose.yaml nor `docker inspect` shows it.
set -eu
while [ "$1" != -- ]; do
  value=$(cat "/run/secrets/${1#*=}")
  export "${1%%=*}=$value"
  shift
done
shift
exec "$@"
