"""Stores with gs:// and az:// URIs: a bucket of Google Cloud Storage, a container of Azure Blob Storage."""

import contextlib
import os
import re
import threading
import uuid
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar, cast

import obstore
from obstore import exceptions as failures
from obstore.store import AzureStore, GCSStore

from vitline.infra.environment.certificates import own_certificates
from vitline.infra.settings import changed_environment, variables_with_end
from vitline.infra.stores import remote_store
from vitline.infra.stores.remote_store import Answer, OtherRange, RemoteStore, Span, Written
from vitline.infra.stores.store import Listed, StoreFailed, checked_key

if TYPE_CHECKING:  # obstore has no such names when it runs
    from obstore.store import ClientConfig, RetryConfig

T = TypeVar("T")
Client = AzureStore | GCSStore

_PAGE = 1000  # objects
_LONGEST_REQUEST = "30m"  # SILENCE_S ends one that hangs
_REPEATS: "RetryConfig" = {"max_retries": 8, "retry_timeout": timedelta(minutes=5)}
_STATUS, _CODE = re.compile(r"status code: (\d{3})"), re.compile(r"<Code>(\w+)</Code>")
# A message ends with the names of its errors, after "Debug source".
_WRONG_RANGE = re.compile(r"NotPartial|NoContentRange|ParseContentRange|InvalidContentRange|UnexpectedRange")
_CAUSE = re.compile(r'message: "([^"]+)"|InvalidCertificate\(\s*(\w+)')
_BEYOND_THE_END = "StartTooLarge"
_WRONG_CERTIFICATE = "InvalidCertificate"
_VARIABLES = ("GOOGLE_", "AZURE_")
_environment = threading.Lock()
"""Held while a client reads the environment."""


class ObjectStore(RemoteStore):
    """A prefix of a bucket. obstore finds address and credentials in variables whose names begin with GOOGLE_ or AZURE_, or in the
    identity of the machine. With a URI `gs+NAME://` or `az+NAME://` it takes only the variables that end with _NAME, as in
    AZURE_STORAGE_ACCOUNT_KEY_NAME, in capitals, with _ for what no variable may have. A tag is the generation of an object of Google, and
    the ETag of one of Azure.

    A killed `writer` leaves parts that readers do not see, and that nothing here can list. Azure deletes them after a week; a
    bucket of Google needs a lifecycle rule for that (`AbortIncompleteMultipartUpload`).
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        scheme, _, rest = uri.partition("://")
        self._scheme, _, self._name = scheme.partition("+")
        self._bucket, _, prefix = rest.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        variables = {
            "gs": "GOOGLE_APPLICATION_CREDENTIALS",
            "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY",
        }
        found = variables[self._scheme].replace(",", f"{_end_of(self._name)},") + _end_of(self._name)
        self.settings_of_access = f"the bucket, and its credentials ({found}, or the identity of this machine)"

    @classmethod
    def at(cls, uri: str) -> Self:
        return cls(uri)

    @property
    def _service(self) -> Hashable:
        return self._scheme, self._name, self._bucket

    @property
    def _url(self) -> str:
        return {"gs": "https://storage.googleapis.com", "az": "https://blob.core.windows.net"}[self._scheme]

    def size(self, key: str) -> int:
        size: int = self._call("head", key)["size"]
        return size

    def write(self, key: str, data: bytes) -> None:
        self._call("put", key, data, use_multipart=False)

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[BinaryIO]:
        signature, path = uuid.uuid4().hex, self._prefix + checked_key(key)

        def once(request: Callable[[], T]) -> T:
            return self._retried("put_object", self.uri_of(key), request, repeat=False)

        upload = once(
            lambda: obstore.open_writer(
                self._client(repeats=True),
                path,
                attributes={"writer": signature},
                buffer_size=remote_store.PART_BYTES,
                max_concurrency=remote_store.PARTS_IN_FLIGHT,
            )
        )
        yield cast(BinaryIO, _Writing(lambda data: once(lambda: upload.write(data))))
        try:
            once(upload.close)
        except StoreFailed:  # an earlier try finished it, but its reply was lost
            with contextlib.suppress(FileNotFoundError):
                if self._signed(key)[0] == signature:
                    return
            raise

    def scan(self, prefix: str = "") -> Iterator[Listed]:
        folder, _, name = prefix.rpartition("/")
        folder = self._prefix + (f"{folder}/" if folder else "")
        # obstore lists whole folders, so those names are passed over that come before `name`, and after it.
        after = folder + name[:-1] if name else None
        pages: Iterator[Sequence[Any]] | None = None

        def page() -> Sequence[Any] | None:
            nonlocal pages
            pages = pages or iter(obstore.list(self._client(), folder or None, offset=after, chunk_size=_PAGE))
            try:
                return next(pages, None)
            except Exception:
                pages = None
                raise

        while found := self._retried("list_objects", f"{self.uri}/{prefix}", page):
            for entry in found:
                child = entry["path"][len(folder) :].split("/", 1)[0]
                if child.startswith(name):
                    yield Listed(entry["path"][len(self._prefix) :], entry["size"], entry["e_tag"] or entry["version"])
                elif child > name:
                    return
            after = found[-1]["path"]

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._call("delete", key)

    def _client(self, repeats: bool = False) -> Client:
        _check_not_forked()
        try:
            return client_of(os.getpid(), self._scheme, self._name, self._bucket, repeats)
        except (failures.BaseError, OSError) as error:
            raise _Unusable(_message(error)) from error

    def _call(self, operation: str, key: str, *arguments: Any, **options: Any) -> Any:
        path, function = self._prefix + checked_key(key), getattr(obstore, operation)
        return self._retried(
            f"{operation}_object", self.uri_of(key), lambda: function(self._client(), path, *arguments, **options)
        )

    async def _fetch(self, key: str, span: Span | None) -> tuple[bytes, str, int | None]:
        start, end = span or (0, None)
        wanted = {"range": {"offset": start} if end is None else (start, end)} if span else {}
        try:
            reply = await obstore.get_async(self._client(), self._prefix + key, options=cast(Any, wanted))
        except failures.GenericError as error:
            if span and (self._answer(error).status == 416 or _BEYOND_THE_END in str(error)):
                return b"", "", 0
            if _WRONG_RANGE.search(str(error)):
                raise OtherRange(_message(error)) from error
            raise
        first, last = reply.range
        return bytes(await reply.bytes_async()), self._tag(reply.meta), last - first

    async def _size_now(self, key: str) -> int:
        return (await obstore.head_async(self._client(), self._prefix + key))["size"]

    def _put(self, key: str, data: bytes, signature: str, tag: str | None) -> str:
        mode = "create" if tag is None else {"version" if self._scheme == "gs" else "e_tag": tag}
        return self._tag(self._call("put", key, data, mode=mode, attributes={"writer": signature}))

    def _signed(self, key: str) -> tuple[str, str]:
        there = self._call("get", key, options={"head": True})
        return there.attributes.get("writer", ""), self._tag(there.meta)

    def _tag(self, of: Any) -> str:
        return str(of["version"] if self._scheme == "gs" else of["e_tag"])

    def _answer(self, error: Exception) -> Answer:
        text, why = str(error), _message(error)
        if isinstance(error, failures.AlreadyExistsError | failures.PreconditionError):
            return Answer(412, why=why)
        status, code = _STATUS.search(text), _CODE.search(text)
        if status or isinstance(
            error, FileNotFoundError
        ):  # obstore's reply to a delete of several objects has no status
            return Answer(int(status[1]) if status else 404, code[1] if code else "", why=why)
        if isinstance(error, _Unusable):
            return Answer(refused=True, why=why)
        wrong_certificate = _WRONG_CERTIFICATE in text
        lost = isinstance(error, failures.BaseError | OSError) and not wrong_certificate
        return Answer(lost=lost, of_certificate=wrong_certificate, why=why)


class _Unusable(Exception):
    """No client can be made with the settings."""


class _Writing(Written):
    """A file whose bytes go to an upload."""

    def __init__(self, send: Callable[[bytes], object]) -> None:
        self._send = send

    def take(self, data: memoryview) -> None:
        self._send(bytes(data))


def _message(error: Exception) -> str:
    """A message in one line: its first part, and the cause at the end of its second one, a tree of Rust's errors."""
    said, _, tree = str(error).partition("\n\nDebug source")
    causes = [
        message or certificate for message, certificate in _CAUSE.findall(tree) if message not in said or certificate
    ]
    return " ".join([*said.split(), *(f"({cause})" for cause in causes[-1:])])


_first_user: int | None = None
"""The process that has used obstore first."""


def _check_not_forked() -> None:
    """Raises _Unusable in the fork of a process that has used obstore: its threads are not there, and every request would hang."""
    global _first_user
    _first_user = _first_user or os.getpid()
    if _first_user != os.getpid():
        raise _Unusable(
            "not supported: stores with gs:// and az:// URIs in a process forked from one that has used them; spawn it"
        )


def _end_of(name: str) -> str:
    """How the variables for stores of this name end."""
    return name and "_" + re.sub(r"\W", "_", name).upper()


@lru_cache
def client_of(pid: int, scheme: str, name: str, bucket: str, repeats: bool) -> Client:
    """One client for all threads of a process. `pid` makes a forked child create its own."""
    options: ClientConfig = {
        "allow_http": True,  # where the variables name such an address
        "connect_timeout": "10s",
        "read_timeout": f"{remote_store.SILENCE_S}s",
        "timeout": _LONGEST_REQUEST,
    }
    if certificates := own_certificates():
        options["root_certificate"] = certificates
    kind: type[Client] = GCSStore if scheme == "gs" else AzureStore
    theirs = variables_with_end(_VARIABLES, _end_of(name)) if name else {}
    with _environment, changed_environment(**theirs):
        return kind(bucket, client_options=options, retry_config=_REPEATS if repeats else {"max_retries": 0})
