"""Domain errors: a code and a message for the caller. No HTTP status: the API layer has the table."""

from enum import StrEnum
from typing import ClassVar


class AtelierError(Exception):
    """An error a caller may see. `message` never echoes a secret or a whole input."""

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidParameter(AtelierError):
    """A field breaks its rule; the message names the field and its valid range."""

    code = "invalid_parameter"


class InvalidJson(AtelierError):
    code = "invalid_json"


class AmbiguousCredentials(AtelierError):
    code = "ambiguous_credentials"


class Unauthorized(AtelierError):
    code = "unauthorized"


class Forbidden(AtelierError):
    code = "forbidden"


class NotFound(AtelierError):
    code = "not_found"


class MethodNotAllowed(AtelierError):
    code = "method_not_allowed"


class IdempotencyConflict(AtelierError):
    code = "idempotency_conflict"


class JobUnfinished(AtelierError):
    """Only a job that has ended can be deleted."""

    code = "job_unfinished"


class RequestTimeout(AtelierError):
    code = "request_timeout"


class PayloadTooLarge(AtelierError):
    code = "payload_too_large"


class UnsupportedMediaType(AtelierError):
    code = "unsupported_media_type"


class RateLimitExceeded(AtelierError):
    code = "rate_limit_exceeded"


class PollLimitExceeded(RateLimitExceeded):
    """One key polls far faster than any client needs; it touches no plan's count."""


class TooManyTries(RateLimitExceeded):
    """Passwords of one account are tried too fast: after `retry_after_s` seconds the next is looked at."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"Too many attempts. Wait {retry_after_s} s.")
        self.retry_after_s = retry_after_s


class TooManyUploads(RateLimitExceeded):
    """The account has as many uploads under way as one may have."""


class QueueFull(AtelierError):
    """The queue, or the account's part of it, is full; try again after `retry_after_s` seconds."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int = 5) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooManyKeys(AtelierError):
    """The account has as many working API keys as it may have."""

    code = "too_many_keys"


class LoraQuotaExceeded(AtelierError):
    """The account owns as many LoRAs, or as many bytes of them, as its plans allow."""

    code = "lora_quota_exceeded"


class ImageQuotaExceeded(AtelierError):
    """The account's uploaded images take as many bytes as they may."""

    code = "image_quota_exceeded"


class StoreUnavailable(AtelierError):
    """Redis or the object storage cannot be reached: nothing was accepted, hence nothing is lost."""

    code = "unavailable"


class Overloaded(StoreUnavailable):
    """More requests are open than the connections to Redis can carry: nothing was accepted.

    Redis itself answers.
    """

    code = "overloaded"


class WaitEnded(StoreUnavailable):
    """A request can wait no longer for its job: its process is about to end, or it has waited for too long."""


class UnreadableRecord(StoreUnavailable):
    """This version of the code cannot read a stored record: it is damaged, or a newer version wrote it."""

    def __init__(self, message: str = "this job's record cannot be read by this version of the service") -> None:
        super().__init__(message)


class AdapterUnavailable(AtelierError):
    """An adapter's file is missing, unreadable, of an unaccepted form, or not the catalog's."""

    code = "lora_unavailable"


class FailureCode(StrEnum):
    """The recorded reason why a job ended without images."""

    GENERATION_FAILED = "generation_failed"
    TIMEOUT = "timeout"
    CANCELED = "canceled"
    EXPIRED = "expired"
    LORA_UNAVAILABLE = "lora_unavailable"
    OUT_OF_MEMORY = "out_of_memory"
