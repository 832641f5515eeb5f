"""Rows of the audit log: who did what to which account, when and where from, without any secret."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

OWNER, ANYONE = "owner", "anyone"
"""Two actors: somebody signed in to the console as the account, and somebody who could not sign in as it."""


def operator(user: str) -> str:
    """Name an operator as actor: the system's user of a command, or an operator of the pages.

    Acts from the pages have an address too.
    """
    return f"operator:{user}"


def api_key(key_id: str) -> str:
    """Name the actor of a request with a key."""
    return f"key:{key_id}"


def user(user_id: str) -> str:
    """Name an invited user of the account as actor in the console."""
    return f"user:{user_id}"


def account(pseudonym: str) -> str:
    """Name an account as the actor, where it shares a LoRA with another account or ends the sharing."""
    return f"account:{pseudonym}"


class Act(StrEnum):
    """An act that is recorded."""

    SIGNED_IN = "signed_in"
    SIGN_IN_FAILED = "sign_in_failed"
    SIGNED_OUT = "signed_out"
    SIGNED_OUT_EVERYWHERE = "signed_out_everywhere"
    SESSION_ENDED = "session_ended"
    OTHER_SESSIONS_ENDED = "other_sessions_ended"
    USER_INVITED = "user_invited"
    USER_REMOVED = "user_removed"
    KEY_CREATED = "key_created"
    KEY_ROLLED = "key_rolled"
    KEY_CHANGED = "key_changed"
    KEY_REVOKED = "key_revoked"
    LORA_ADDED = "lora_added"
    LORA_CHANGED = "lora_changed"
    LORA_REMOVED = "lora_removed"
    LORA_GRANTED = "lora_granted"
    LORA_REVOKED = "lora_revoked"
    WEBHOOK_ADDED = "webhook_added"
    WEBHOOK_CHANGED = "webhook_changed"
    WEBHOOK_ROLLED = "webhook_rolled"
    WEBHOOK_REMOVED = "webhook_removed"
    ACCOUNT_CREATED = "account_created"
    ACCOUNT_DISABLED = "account_disabled"
    ACCOUNT_ENABLED = "account_enabled"
    ACCOUNT_DELETED = "account_deleted"
    PLANS_CHANGED = "plans_changed"
    PASSWORD_SET = "password_set"
    SIGN_IN_LINK_MADE = "sign_in_link_made"
    JOB_CANCELED = "job_canceled"
    JOB_REQUEUED = "job_requeued"
    JOB_DROPPED = "job_dropped"
    JOB_DELETED = "job_deleted"
    IMAGE_DELETED = "image_deleted"
    OPERATOR_CREATED = "operator_created"
    OPERATOR_DELETED = "operator_deleted"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditRow:
    """One act. `subject` is the id of what was acted on.

    `log` is the account's pseudonym; `address` is the caller's, if known.
    """

    time: datetime
    log: str
    actor: str
    act: Act | str
    subject: str
    address: str


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts, as the audit log names them, and from where, if that is known."""

    name: str
    address: str = ""
