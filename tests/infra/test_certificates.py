"""VITLINE_CA: trusted beside the public authorities by all clients, also those of jobs; what a person has set counts before it."""

import os
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import certifi
import pytest

from vitline.infra.environment.certificates import VARIABLES, authority_of_jobs, own_certificates, trust_own_authority
from vitline.infra.local.access.mutual_tls import make_certificates
from vitline.infra.ray_jobs import checked_env
from vitline.infra.settings import Settings


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with an authority of one's own; none of the variables is set."""
    for name in ("VITLINE_CA", *VARIABLES):
        monkeypatch.setenv(name, "")  # so that the test's end takes back what was set
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return Path(make_certificates(tmp_path)[0])


def test_all_clients_trust_the_own_authority_and_the_public_ones(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(authority.parent)
    monkeypatch.setenv("VITLINE_CA", authority.name)
    trust_own_authority()
    assert os.environ["VITLINE_CA"] == str(authority)  # a child may run in another folder
    (made,) = authority.parent.glob("vitline-authorities-*")
    assert {os.environ[name] for name in VARIABLES} == {str(made)}
    trusted = ssl.create_default_context(cafile=str(made))
    public = ssl.create_default_context(cafile=certifi.where())
    assert len(trusted.get_ca_certs()) == len(public.get_ca_certs()) + 1
    assert (own_certificates() or b"").startswith(authority.read_bytes())
    made.unlink()  # as by a cleaner of old files
    trust_own_authority()
    assert made.exists()


def test_what_a_variable_names_stays_trusted_and_a_missing_file_is_left_to_its_client(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = authority.with_name("theirs.pem")
    theirs.write_text("of a company\n")
    monkeypatch.setenv("VITLINE_CA", str(authority))
    monkeypatch.setenv("SSL_CERT_FILE", str(theirs))
    monkeypatch.setenv("AWS_CA_BUNDLE", "/missing.pem")
    trust_own_authority()
    trust_own_authority()
    assert Path(os.environ["SSL_CERT_FILE"]).read_text() == f"{authority.read_text()}\nof a company\n"
    assert os.environ["AWS_CA_BUNDLE"] == "/missing.pem"


def test_a_job_gets_the_certificates_and_its_processes_use_them(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert authority_of_jobs() == {}
    monkeypatch.setenv("VITLINE_CA", str(authority))
    sent = checked_env(authority_of_jobs())
    authority.unlink()  # it is not on the node
    code = "import os, vitline.infra.settings as s; s.Settings(); print(os.environ['SSL_CERT_FILE'])"
    path = subprocess.run([sys.executable, "-c", code], env=os.environ | sent, capture_output=True, text=True).stdout
    assert sent["VITLINE_CA"] in Path(path.strip()).read_text()
    assert stat.S_IMODE(Path(path.strip()).stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [None, "", "not a certificate"])
def test_a_file_without_certificates_is_refused(
    authority: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    authority.unlink() if content is None else authority.write_text(content)
    monkeypatch.setenv("VITLINE_CA", str(authority))
    trust_own_authority()
    assert not any(os.environ[name] for name in VARIABLES)
    with pytest.raises(ValueError, match=rf"^VITLINE_CA is {authority}, which is no PEM file with certificates"):
        Settings()


def test_a_file_with_more_certificates_in_the_shared_folder_is_not_used(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITLINE_CA", str(authority))
    trust_own_authority()
    made = Path(os.environ["SSL_CERT_FILE"])
    made.write_text(made.read_text() + authority.read_text())
    for name in VARIABLES:  # as in another process
        monkeypatch.setenv(name, "")
    trust_own_authority()
    assert Path(os.environ["SSL_CERT_FILE"]).read_text().count(authority.read_text()) == 1
