"""Every key of Redis: its name, its type, its time to live."""

from collections.abc import Mapping
from typing import NamedTuple

PREFIX = "{job:0}:"
"""Every key begins with this hash tag, so that on a cluster all keys of a script share a slot."""


class Key(NamedTuple):
    """One family of keys: its name, its Redis type, its expiry, and what it holds.

    The name is the part after the prefix, with `*` for what varies. What is permanent, a bounded index or a record that
    only an operator removes, may lack a time to live.
    """

    name: str
    type: str
    life: str
    holds: str


WAITING, LINK = "permanent: empty when nothing waits", "24 h, or its only use"

KEY_MAP: tuple[Key, ...] = (
    Key("job:*", "hash", "permanent while live, then retention", "the record of a job"),
    Key("queue:*", "zset", WAITING, "pool:account → waiting job ids by sequence"),
    Key("group:*", "zset", WAITING, "pool:digest of weights → waiting job ids by sequence"),
    Key("groups:*", "zset", WAITING, "pool → weights with waiting jobs, by their first sequence"),
    Key("vtime:*", "zset", WAITING, "pool → accounts with waiting jobs by virtual time"),
    Key("idle_vtime:*", "zset", "permanent: trimmed", "pool → accounts with nothing waiting, ahead of virtual time"),
    Key("global_vtime:*", "string", "permanent: one number", "pool → virtual time in seconds of one worker"),
    Key("age:*", "zset", WAITING, "pool → waiting and delayed job ids by accept time (ms)"),
    Key("start_by:*", "zset", WAITING, "pool → waiting job ids by when they must have been started once (ms)"),
    Key("delay:*", "zset", WAITING, "pool → job ids backing off, by due time (ms)"),
    Key("lease:*", "zset", "permanent: empty when nothing runs", "pool → running job ids by lease deadline (ms)"),
    Key("pools", "set", "permanent: until nothing is left of them", "pools of groups, save `default`: `pools.lua`"),
    Key("quarantine:*", "zset", WAITING, "pool → waiting jobs that lost two workers, by sequence"),
    Key("quarantine_worker:*", "string", "the lease", "pool → the worker that runs quarantined jobs one at a time"),
    Key("claimed:*", "set", "a day after the last claim", "pool:worker → ids of the jobs it runs"),
    Key("load:*", "hash", "permanent: seven numbers", "pool → waiting and accepted work, seconds for a unit of it"),
    Key("workers:*", "zset", "permanent: trimmed by age", "pool → workers by when they were last seen (ms)"),
    Key("capacity:*", "hash", "permanent: trimmed with workers", "pool → images that each worker can still start"),
    Key("owner:*", "zset", "10 min after the last claim", "pool:digest of weights → workers that loaded them, by time"),
    Key(
        "recent_adapters:*", "list", "a day after the last job", "pool → LoRA ids (and bases) of the latest 8,192 jobs"
    ),
    Key("claim:*", "hash", "twice the lease", "pool:worker → nonce of its last claim and what it was given"),
    Key("unfinished", "hash", "permanent: a field per account with unfinished jobs", "account → jobs not yet ended"),
    Key("job_sequence", "string", "permanent: one number", "order of acceptance"),
    Key("count", "hash", "permanent: one per event", "jobs accepted, ended, requeued, lease_expired, fenced ever"),
    Key("plan_age:*", "zset", WAITING, "pool:interface:plan → its part of `age`"),
    Key("measures", "hash", "permanent: a field per metric and labels", "what all processes have measured since ever"),
    Key("measured:*", "string", "an hour", "process → the last of its measurements that was added"),
    Key("gauges:*", "hash", "10 minutes after the last worker's", "pool → what each worker last said of itself (JSON)"),
    Key("dead", "zset", "permanent: trimmed by retention", "failed job ids by time, for the operator"),
    Key("recent", "zset", "permanent: newest 10,000", "job ids by accept time (ms), for the operator"),
    Key("stored:*", "hash", "retention", "account:interface → day (since 1970) of accept → bytes that its jobs take"),
    Key("jobs:*", "zset", "retention after the last accept", "account → job ids by accept or requeue (ms)"),
    Key("image:*", "string", "retention", "image id → job id"),
    Key("upload:*", "hash", "permanent: until due", "image id → an uploaded image: account, object, size, expiry (ms)"),
    Key("upload_of:*", "string", "permanent: until due", "account:SHA-256 of an upload's PNG → image id"),
    Key("uploads:*", "zset", "permanent: until due", "account → ids of its uploads by creation (ms)"),
    Key("uploads_due", "zset", "permanent: empty in the end", "uploads by when to look whether they are needed (ms)"),
    Key("uploaded:*", "hash", "permanent: empty in the end", "account → day of expiry or 99999999 → bytes of uploads"),
    Key("image_uses:*", "zset", "30 days or retention", "image id → jobs and calls that need it, until when (ms)"),
    Key("preview:*", "hash", "30 s after a write", "job id → image index → step and PNG so far; `stored`: writes"),
    Key("preview_watched:*", "string", "10 s", "job id of a job that a page shows or somebody listens to"),
    Key("idempotency:*", "hash", "idempotency life (24 h)", "account:variant, `loras`, `images`:digest → id, digests"),
    Key("shared_waiters:*", "set", "a day after the last", "account:variant:digest of a call's key → who waits"),
    Key("rate:*", "zset", "the plan's window", "account:variant[:key] → counted requests by when they leave it (ms)"),
    Key("usage:*", "hash", "400 days", "account:day (since 1970) → images, work, ms of a worker; each by key:LoRA"),
    Key("lora_use:*", "hash", "31 days", "day (since 1970) → LoRA id → images made with it, for operators"),
    Key("account:*", "hash", "permanent", "an account: name, plans, password hash"),
    Key("accounts", "zset", "permanent", "account ids by creation (ms)"),
    Key("copied", "string", "permanent: one number", "when Redis was last copied whole (ms)"),
    Key("accounts_removing", "hash", "permanent: empty in the end", "account → its name, who deletes it since when"),
    Key("name:*", "string", "permanent", "account name → account id; name of an invited user → account id:user id"),
    Key("user:*", "hash", "permanent", "account:user → an invited user: name, role, password hash"),
    Key("users:*", "zset", "permanent", "account → ids of its invited users by creation (ms)"),
    Key("key:*", "hash", "permanent", "an API key: digest, account, interfaces, expiry; never the secret"),
    Key("keys:*", "zset", "permanent", "account → key ids by creation (ms)"),
    Key("session:*", "hash", "idle 30 min, at most 12 h", "digest of a token → holder, end, browser, address"),
    Key("sessions:*", "set", "12 h", "account → digests of its sessions"),
    Key("sign_in:*", "hash", "an hour after the last try", "account or unknown_<digest>:source → tries, next try (ms)"),
    Key("sign_in_tries:*", "string", "an hour after the last try", "account or unknown_<digest> → tries everywhere"),
    Key("sign_in_link:*", "string", LINK, "digest of a link's token → purpose:holder:version"),
    Key("operator:*", "hash", "permanent", "an operator of the web pages: password hash, its changes, creation (ms)"),
    Key("operators", "zset", "permanent", "operators' names by creation (ms)"),
    Key("operator_session:*", "hash", "idle 15 min, at most 8 h", "digest of a token → holder, end, browser, address"),
    Key("operator_sessions:*", "set", "8 h", "operator → digests of its sessions"),
    Key("operator_sign_in_link:*", "string", LINK, "digest of a link's token → purpose:holder:version"),
    Key("throttle:*", "string", "the limit's window", "what is limited:digest of a form or account → tries"),
    Key("starting:*", "string", "15 s", "pool → how far a worker is that starts"),
    Key("start_failure:*", "string", "an hour", "pool → why the last worker that tried could not start"),
    Key("grants:*", "hash", "permanent", "account → LoRA id → allow or deny, over the LoRA's record"),
    Key("granted:*", "set", "permanent: until the LoRA is removed", "LoRA id → accounts with a grant or denial"),
    Key("lora:*", "hash", "permanent", "a LoRA: name, weights, base model, owner, to whom it is offered"),
    Key("loras", "zset", "permanent", "LoRA ids by creation (µs; those of one ms in the file's order)"),
    Key("loras_open", "zset", "permanent", "ids of LoRAs that everyone may use, by creation (µs)"),
    Key("loras_owned:*", "zset", "permanent", "account → ids of the LoRAs that it owns, by creation (µs)"),
    Key("loras_offered:*", "zset", "permanent", "account id or name → ids of LoRAs offered to it, by creation (µs)"),
    Key("loras_stored:*", "set", "permanent", "digest of weights → registered LoRA ids that have them"),
    Key("weights_in_use:*", "zset", "an hour after the last hold", "digest of weights → who stores them, by end (ms)"),
    Key("loras_unused", "zset", "permanent: empty in the end", "URI of stored weights → when to look (ms)"),
    Key("loras_removing", "zset", "permanent: trimmed by age", "URI of stored weights → end of their removal (ms)"),
    Key("loras_sampling", "zset", "permanent: trimmed by age, a day", "LoRA id → when its sample was asked for (ms)"),
    Key("lora_jobs:*", "zset", "30 days after the last", "LoRA id, or base:base model → waiting job ids by sequence"),
    Key("loras_withdrawn", "zset", "permanent: until reaped", "names of `lora_jobs` by the last job looked at"),
    Key("loras_revision", "string", "permanent", "how many times LoRAs or grants have changed"),
    Key("loras_log", "hash", "permanent: two numbers", "from which and to which revision `loras_changed` goes"),
    Key("loras_changed", "zset", "permanent: newest 10,000", "LoRA id → revision of its last change"),
    Key("loras_samples", "hash", "permanent", "LoRA id → the job that drew its sample"),
    Key("loras_sampled", "string", "10 s", "a sample was begun, and the next waits"),
    Key("catalog", "hash", "permanent", "when the catalog file was applied, base models, widths, rows set aside"),
    Key("catalog_rows", "set", "permanent", "LoRA ids that the catalog file holds"),
    Key("catalog_digests", "hash", "permanent: of the file's rows", "weight file → its version and SHA-256"),
    Key("webhook:*", "hash", "permanent", "account:endpoint → where its webhooks go, and of what its secrets are made"),
    Key("webhooks:*", "zset", "permanent", "account → ids of its endpoints by creation (ms)"),
    Key("webhook_delivery:*", "hash", "7 days", "account:endpoint:message → its job, state, attempts and last answer"),
    Key("webhook_due:*", "zset", WAITING, "account → endpoint:message by the next attempt (ms)"),
    Key("webhook_log:*", "zset", "7 days after the last", "account:endpoint → newest 100 messages by their end (ms)"),
    Key("webhooks_due", "zset", WAITING, "accounts with deliveries that wait, by the next attempt or before it (ms)"),
    Key("deletions", "hash", "permanent: until looked for once more", "deleted job or image id → its objects"),
    Key("audit:*", "stream", "audit life (a year) after its last row", "an account's pseudonym → what was done to it"),
    Key("audit_logs", "zset", "permanent: trimmed by age", "pseudonyms with an audit log, by their last row (ms)"),
    Key("sweep_lock", "string", "the sweeper's interval", "who is looking for orphaned objects"),
)
"""Every key there is. The key-leak test walks the server and fails on anything else."""

GROWS_WITH: Mapping[str, str] = {
    "nothing": "job_sequence count loras_revision loras_log loras_sampled sweep_lock recent catalog copied",
    "groups of base models": "pools global_vtime load quarantine_worker starting start_failure recent_adapters",
    "workers": "workers capacity gauges claimed claim owner measured measures",
    "jobs that wait or run": "queue group groups age start_by delay lease quarantine plan_age lora_jobs preview"
    " preview_watched",
    "accounts with such jobs": "vtime idle_vtime unfinished",
    "jobs and pictures that are kept": "job jobs image dead stored image_uses upload upload_of uploads uploads_due"
    " uploaded deletions",
    "calls within a plan's window or a day": "idempotency shared_waiters rate throttle sign_in sign_in_tries",
    "accounts, their users, keys and links": "account accounts accounts_removing name user users key keys session"
    " sessions sign_in_link operator operators operator_session operator_sessions operator_sign_in_link",
    "accounts, by days or rows that are kept": "usage audit audit_logs",
    "LoRAs": "lora loras loras_open loras_owned loras_stored loras_unused loras_removing loras_sampling loras_withdrawn"
    " loras_changed loras_samples lora_use weights_in_use catalog_rows catalog_digests",
    "LoRAs that are shared, and with whom": "grants granted loras_offered",
    "endpoints, and deliveries of a week": "webhook webhooks webhook_delivery webhook_due webhook_log webhooks_due",
}
"""What the number of keys of a family, or of their entries, grows with. No script may
(`tests/store/test_script_bounds.py`)."""


def redis_key(family: str, *parts: str) -> str:
    """Return the full name of a key: `redis_key("job", job_id)`."""
    return PREFIX + ":".join((family, *parts))
