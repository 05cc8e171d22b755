"""The certificate with which a pod of a RayCluster speaks to the others: Ray's token does not protect its gRPC ports.

    python -P -m vitline.infra.kubernetes.ray_certificate --authority FOLDER --folder FOLDER --name ADDRESS --name HOST

A pod has its address only once it exists, so an init container signs a certificate for it. Ray's own containers never see the key of the
authority.
"""

import argparse
from pathlib import Path

from vitline.infra.local.access.mutual_tls import read_authority, write_certificate


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -P -m vitline.infra.kubernetes.ray_certificate", description=__doc__)
    parser.add_argument("--authority", type=Path, required=True, help="folder with tls.crt and tls.key, as of a secret")
    parser.add_argument("--folder", type=Path, required=True, help="where authority.pem, part.pem and part.key go")
    parser.add_argument("--name", action="append", required=True, help="address or host name of the pod; repeatable")
    given = parser.parse_args()
    certificate, key = read_authority(given.authority / "tls.crt", given.authority / "tls.key")
    write_certificate(given.folder, certificate, key, [*given.name, "127.0.0.1", "localhost"])


if __name__ == "__main__":
    main()
