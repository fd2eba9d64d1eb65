"""S3 through fsspec: a file system without retries, and what its errors mean.

This module is imported at the first request, because s3fs is an optional package whose import takes a second.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

import aiohttp
import s3fs
from botocore import exceptions, parsers
from fsspec.asyn import sync_wrapper
from fsspec.exceptions import FSTimeoutError

from megatron.errors import one_line

# Largest time between two bytes of an answer. `Retries.request_s` limits the whole request.
_READ_TIMEOUT_S = 60
_CONNECT_TIMEOUT_S = 10
_MAX_CONNECTIONS = 64

_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
# Transient error codes of answers whose status does not show it: 400, 409, or 200 for
# CompleteMultipartUpload.
_TRANSIENT_CODES = frozenset(
    {
        *("SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "RequestLimitExceeded"),
        *("Throttling", "ThrottlingException", "TooManyRequestsException", "OperationAborted"),
        # The body was damaged or truncated on its way.
        *("BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"),
    }
)
_ACCESS_CODES = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "AccessDenied"})
_CREDENTIAL_ERRORS = (
    exceptions.NoCredentialsError,
    exceptions.PartialCredentialsError,
    exceptions.UnknownCredentialError,
    exceptions.NoAuthTokenError,
    exceptions.TokenRetrievalError,
    exceptions.SSOError,
    exceptions.ProfileNotFound,
    exceptions.ConfigParseError,
)
_TRANSIENT_ERRORS = (
    exceptions.HTTPClientError,
    exceptions.ConnectionError,
    exceptions.IncompleteReadError,
    exceptions.ChecksumError,
    exceptions.FlexibleChecksumError,
    exceptions.CredentialRetrievalError,  # the credentials of a role come over the network
    exceptions.MetadataRetrievalError,
    parsers.ResponseParserError,
    aiohttp.ClientError,
    TimeoutError,
    ConnectionError,
)
_CHECK_CREDENTIALS = (
    "check the credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the role of the "
    "node) and their permissions for the bucket"
)


class S3FileSystem(s3fs.S3FileSystem):
    """s3fs with one attempt per request, because `ObjectStore` retries. Listings and instances are not
    cached."""

    retries = 1

    async def _delete_objects(self, bucket: str, keys: list[str]) -> None:
        """Deletes up to 1,000 objects. Unlike s3fs's own method it reports objects that could not be
        deleted."""
        objects = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        answer = await self._call_s3("delete_objects", Bucket=bucket, Delete=objects)
        for failed in answer.get("Errors") or ():
            if failed.get("Code") != "NoSuchKey":
                raise exceptions.ClientError({"Error": failed}, "DeleteObjects")

    delete_objects = sync_wrapper(_delete_objects)


def open_file_system() -> S3FileSystem:
    """Returns a file system of this process. Endpoint, region and credentials come from the environment and
    from the files that all AWS programs read."""
    config = {
        "retries": {"total_max_attempts": 1},
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "read_timeout": _READ_TIMEOUT_S,
        "max_pool_connections": _MAX_CONNECTIONS,
    }
    # One GET per read: with a higher max_concurrency, s3fs first sends a request for the size.
    return S3FileSystem(
        skip_instance_cache=True, use_listings_cache=False, max_concurrency=1, config_kwargs=config
    )


@dataclass(frozen=True)
class Failure:
    """The meaning of a failed request."""

    cause: str
    errno: int = errno.EIO
    """ENOENT: the object, the bucket or the upload does not exist. EACCES: credentials or permissions are
    wrong."""
    is_transient: bool = False
    code: str = ""
    """S3's error code, such as NoSuchBucket; "" if there was no answer."""


def read_failure(error: Exception, limit_s: float) -> Failure | None:
    """Returns what the error of a request means; None for a programming error. limit_s: the time limit of the
    request, in seconds."""
    # For an answer with an error code s3fs raises an OSError, whose cause is the answer.
    answer = error if isinstance(error, exceptions.ClientError) else error.__cause__
    if isinstance(answer, exceptions.ClientError):
        return _read_answer(answer)
    cause = one_line(f"{type(error).__name__}: {error}")
    if isinstance(error, _CREDENTIAL_ERRORS):
        return Failure(f"{one_line(error)}: {_CHECK_CREDENTIALS}", errno.EACCES)
    if isinstance(error, FSTimeoutError):
        return Failure(f"no end after {limit_s:g} s", is_transient=True)
    if isinstance(error, _TRANSIENT_ERRORS):
        # A wrong TLS certificate stays wrong, so a retry is useless.
        return Failure(cause, is_transient="CERTIFICATE_VERIFY_FAILED" not in str(error))
    if isinstance(error, FileNotFoundError):
        return Failure("no such object", errno.ENOENT)
    # botocore raises ValueError for an endpoint or a bucket name that cannot be in a URL.
    if isinstance(error, (exceptions.BotoCoreError, OSError, ValueError)):
        return Failure(cause)
    return None


def _read_answer(answer: exceptions.ClientError) -> Failure:
    status = answer.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = str(answer.response.get("Error", {}).get("Code") or "")
    message = answer.response.get("Error", {}).get("Message") or ""
    # The answer to a HEAD has no body. Its code is the HTTP status.
    cause = one_line(f"{status} {code if code != str(status) else ''}".strip() + f": {message}")
    if status in _TRANSIENT_STATUS or code in _TRANSIENT_CODES:
        return Failure(cause, is_transient=True, code=code)
    if status in (401, 403) or code in _ACCESS_CODES:
        return Failure(f"{cause}: {_CHECK_CREDENTIALS}", errno.EACCES, code=code)
    if code == "NoSuchBucket":
        return Failure("the bucket does not exist", errno.ENOENT, code=code)
    if status == 404:
        return Failure("no such object", errno.ENOENT, code=code)
    return Failure(cause, code=code)
