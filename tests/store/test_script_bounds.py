"""No script's work grows with what it does not name: Redis counts the commands of each in a world and one ten times it.

A script stops every other caller while it runs, and so may call a thousand commands at most.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from serve_app.accounts.audit import LOGS_AT_ONCE
from serve_app.accounts.audit import LOOKED_AT_ONCE as AUDIT_ROWS
from serve_app.accounts.sessions import LISTED_AT_ONCE
from serve_app.jobs.history import FAILED_AT_ONCE, LOOKED_AT_ONCE
from serve_app.jobs.queue import REAPED_AT_ONCE
from serve_app.loras.applied_catalog import LORAS_AT_ONCE, ROWS_AT_ONCE
from serve_app.loras.stored_weights import REMOVED_AT_ONCE
from serve_app.operations.housekeeping import BATCH
from serve_app.store.keys import GROWS_WITH, KEY_MAP, PREFIX, redis_key
from serve_app.store.script import Argument, load_script
from serve_app.webhooks.delivery import AT_ONCE, PER_ACCOUNT
from serve_app.webhooks.endpoints import LISTED, LOOKED_AT, MOST_ENDPOINTS
from tests.store.test_script import SCRIPTS
from tests.support import plain_redis, volatile_redis

MOST_COMMANDS = 1_000
FEW = 600
"""The smaller world has this many of everything: more than any page or batch of a script."""

WORLD = """
local n, K = tonumber(ARGV[1]), function(name) return KEYS[1] .. name end
local time = redis.call('TIME')
local now = time[1] * 1000
local function put(family, ...) redis.call('HSET', K(family), ...) end
local function add(family, ...) redis.call('ZADD', K(family), ...) end

local function job(id, account, state, ...)
  put('job:' .. id, 'state', state, 'kind', 'generation', 'account', account, 'group', 'held', 'attempt', 1, 'tries', 9,
    'work', 1000, 'sequence', 1, 'waiting_since', now, 'variant', 'a', 'created', now, 'adapter', 'lora_000001',
    'worker', 'w', ...)
end

put('account:me', 'name', 'my-name', 'created', now)
redis.call('SET', K('name:my-name'), 'me')
put('catalog', 'base_models', '[{"id": "base"}]')
for i = 1, n do
  local id = string.format('%06d', i) -- so that both worlds have the same order
  local account = 'acct_' .. id
  -- accounts: others, and what one of them has
  put('account:' .. account, 'name', account, 'created', now)
  redis.call('SET', K('name:' .. account), account)
  add('accounts', now, account)
  put('accounts_removing', account, '[]')
  if i <= 599 then -- 99 that work and as many others as are kept
    add('keys:me', i, 'key_' .. id)
    put('key:key_' .. id, 'digest', 'd', 'account', 'me', 'name', 'k', 'interfaces', 'ab',
      'user', i > 50 and 'user_000001' or '')
    if i > 99 then put('key:key_' .. id, 'revoked', '1') end
  end
  add('users:me', i, 'user_' .. id)
  put('user:me:user_' .. id, 'name', 'user-' .. id, 'created', now)
  redis.call('SADD', K('sessions:me'), 's' .. id)
  put('session:s' .. id, 'holder', 'account:me:user_' .. id, 'ends', now * 2, 'credential_version', i % 2 .. '.0')
  add('audit_logs', now, id)
  redis.call('XADD', K('audit:' .. id), '*', 'action', 'other', 'entry', i)
  redis.call('XADD', K('audit:mine'), '*', 'action', 'other', 'entry', i)
  add('rate:me:a', now * 2, id)
  put('usage:me:1', id, 1)
  put('measures', id, 1)
  -- jobs: waiting, backing off, running, lost and failed
  for _, owner in ipairs({account, 'me'}) do
    local job_id = 'waiting_' .. owner .. id
    job(job_id, owner, 'queued', 'sequence', i)
    if owner == 'me' and i < 4 then put('job:' .. job_id, 'adapter', 'lora_000002') end -- which it may not use
    add('queue:generation:' .. owner, i, job_id)
    add('group:generation:held', i, job_id)
    add('group:generation:w' .. id, i, job_id)
    add('groups:generation', i, 'w' .. id)
    add('age:generation', owner == 'me' and 0 or now, job_id)
    add('start_by:generation', 0, job_id)
    add('lora_jobs:lora_000001', i, job_id)
    add('vtime:generation', owner == 'me' and 0 or i, owner)
    add('idle_vtime:generation', i, 'idle_' .. id)
    job('lost_' .. owner .. id, owner, 'running')
    add('lease:generation', owner == 'me' and 0 or 1, 'lost_' .. owner .. id)
    job('delayed_' .. owner .. id, owner, 'queued')
    add('delay:generation', 0, 'delayed_' .. owner .. id)
    job('failed_' .. owner .. id, owner, 'failed', 'code', 'code_' .. i % 3)
    add('dead', now + i, 'failed_' .. owner .. id)
    add('recent', i, job_id)
    put('unfinished', owner, 4)
  end
  add('jobs:me', now + i, 'waiting_me' .. id)
  if i <= 400 then put('stored:me:a', i, 1) end
  add('workers:generation', 0, 'gone_' .. id)
  add('workers:generation', now, 'w_' .. id)
  put('capacity:generation', 'w_' .. id, 1)
  put('gauges:generation', 'w_' .. id, '{}')
  redis.call('SADD', K('claimed:generation:w'), 'lost_me' .. id)
  if i <= 32 then add('owner:generation:w000001', now, 'w_' .. id) end
  if i <= 8192 then redis.call('RPUSH', K('recent_adapters:generation'), 'lora_' .. id) end
  put('deletions', id, '{"call": "other"}')
  -- pictures
  add('uploads:me', i, 'img_' .. id)
  add('uploads_due', 0, 'img_' .. id)
  put('upload:img_' .. id, 'account', 'me', 'sha256', id, 'uri', '', 'day', 99999999, 'counted', 1)
  redis.call('SET', K('upload_of:me:' .. id), 'img_' .. id)
  put('uploaded:me', 1, 1)
  add('image_uses:img_000001', now * 2, 'failed_me' .. id)
  -- LoRAs: everyone's, the account's own, and those that others share
  local lora = 'lora_' .. id
  put('lora:' .. lora, 'source', 'registered', 'owner', 'me', 'accounts', '[]', 'sha256', 'sha', 'file', 'file:///sha',
    'base_model', 'base', 'bytes', 1, 'order', i, 'open', '1')
  for _, index in ipairs({'loras', 'loras_open', 'loras_owned:me', 'loras_offered:me', 'loras_offered:my-name'}) do
    add(index, i, lora)
  end
  redis.call('SADD', K('loras_stored:sha'), lora)
  put('grants:me', lora, i % 2 == 1 and 'allow' or 'deny')
  put('grants:' .. account, 'lora_000001', 'allow')
  redis.call('SADD', K('granted:lora_000001'), account)
  redis.call('SADD', K('catalog_rows'), 'row_' .. id)
  put('lora:row_' .. id, 'source', 'file', 'owner', '', 'accounts', '[]', 'base_model', 'base', 'order', i)
  add('loras', i, 'row_' .. id)
  put('catalog_digests', 'file:///' .. id, '[]')
  add('loras_changed', i, lora)
  add('loras_unused', 0, 'file:///' .. id)
  add('loras_removing', 0, 'file:///' .. id)
  add('loras_sampling', now, lora)
  put('loras_samples', lora, id)
  add('loras_withdrawn', 0, 'lora_000001')
  add('weights_in_use:sha', now * 2, id)
  put('lora_use:1', lora, 1)
  -- webhooks
  if i <= 10 then
    add('webhooks:me', i, 'ep' .. i)
    put('webhook:me:ep' .. i, 'url', 'https://example.com', 'events', '', 'salt', 's', 'pepper', 1)
  end
  for _, owner in ipairs({account, 'me'}) do
    local state = i % 2 == 0 and 'waiting' or 'failed'
    put('webhook_delivery:' .. owner .. ':ep1:m' .. id, 'state', state, 'until', now * 2, 'tries', 0)
    add('webhook_due:' .. owner, i % 3 == 0 and 0 or now * 2, 'ep1:m' .. id)
    add('webhooks_due', 0, owner)
  end
  if i <= 100 then
    add('webhook_log:me:ep10', i, 'm' .. id)
    put('webhook_delivery:me:ep10:m' .. id, 'state', 'failed')
  end
end
redis.call('SET', K('loras_revision'), n)
put('loras_log', 'last', n, 'from', 0)
"""


class Call(NamedTuple):
    """A script's arguments, but for those that `COMMON` has; `answers` is what the script answers in the end.

    It shows that the script did its work. What a number is not given is a million.
    """

    args: Mapping[str, Any] = {}
    answers: Any = None


JOB: Mapping[str, Any] = {
    "id": "new", "loras": [["lora_000003", "1"]], "work": 1000, "queue_share": 1, "num_images": 1, "pool": "generation",
    "request": "r", "rate_token": "r", "prices": {},
}  # fmt: skip
ROW: Mapping[str, Any] = {
    "owner": "", "accounts": "[]", "open": "1", "source": "file", "base_model": "base", "sha256": "s",
}  # fmt: skip
MODELS = '[{"id": "base", "group": "other"}]'
ROWS = json.dumps([{"id": f"new_{number}", "order": 1, "digest": "d", "record": ROW} for number in range(ROWS_AT_ONCE)])
OF_ONE_CALLER = (
    "quarantine", "plan_age", "preview", "preview_watched", "claim", "measured", "image", "idempotency",
    "shared_waiters", "sign_in", "sign_in_tries", "sign_in_link", "throttle", "operator", "operators",
    "operator_session", "operator_sessions", "operator_sign_in_link",
)  # fmt: skip
"""Families of which a script reads one key or entry by its name."""
COMMON: Mapping[str, Argument] = {
    "account": "me", "account_id": "me", "holder": "account:me", "name": "my-name", "lora": "lora_000001",
    "owner": "me", "pool": "generation", "worker": "w", "variant": "a", "interface": "a", "plans": ["p", 10**9, 10**6],
    "key_id": "key_000001", "key_digest": "d", "endpoint": "ep1", "message": "m000001",
    "image_id": "img_000001", "realm": "",
    "id": "me", "user": "user_000001", "attempt": 1, "uri": "file:///1", "job_id": "waiting_me000001",
    "token_digest": "s000002",
    "since": None, "after_ms": None, "until_ms": None, "weights": "w000001",
}  # fmt: skip


def _owned(client: Any) -> str:
    return hashlib.sha1(" ".join(client.zrange(redis_key("loras_owned", "me"), 0, -1)).encode()).hexdigest()


CALLS: Mapping[str, Call] = {
    "accounts/append_audit": Call({"log": "mine", "entry": "new", "max_rows": 10**5, "life_ms": 10**9}, 1),
    "accounts/authenticate": Call({"rate_token": "t"}, ["ok"]),
    "accounts/count_owner": Call({"rate_token": "u"}, ["ok"]),
    "accounts/create_account": Call({"account": "new", "name": "new"}, "ok"),
    "accounts/create_key": Call({"key_id": "new", "max_keys": 100}, ["digest"]),
    "accounts/create_sign_in_link": Call({"name": "sign_in_link:x", "purpose": "welcome", "life_ms": 10**6}, 1),
    "accounts/create_user": Call({"user": "new", "name": "new-user", "most": 10**6}, "ok"),
    "accounts/disable_account": Call({"account": "acct_000005"}),
    "accounts/find_account": Call({"id_or_name": "my-name"}, ["me"]),
    "accounts/find_user": Call({"id_or_name": "my-name"}, ["me"]),
    "accounts/forget_sign_in": Call({"counted_at": "sign_in:me:address_0"}),
    "accounts/limit_key": Call({"key_id": "key_000002"}, ["digest"]),
    "accounts/list_sessions": Call({"digests": [f"s{i:06}" for i in range(1, LISTED_AT_ONCE + 1)]}),
    "accounts/open_session": Call({"token_digest": "new", "idle_ms": 10**6, "life_ms": 10**6}),
    "accounts/recent_audit": Call(
        {"action": "rare", "most": AUDIT_ROWS, "logs": [f"{number:06}" for number in range(1, LOGS_AT_ONCE + 1)]}
    ),
    "accounts/remove_user": Call({}, 1),
    "accounts/roll_key": Call({"old_id": "key_000004", "new_id": "rolled", "max_keys": 100}, ["digest"]),
    "accounts/session": Call({"token_digest": "s000004"}, ["me"]),
    "accounts/set_password": Call({}, "0.1"),
    "accounts/sign_in": Call({"name": "my-name", "source": "address_0", "life_ms": 10**6}, [0]),
    "accounts/sign_in_link": Call({"name": "sign_in_link:x"}),
    "jobs/accept": Call({"new": json.dumps(JOB), "max_queued": 10**9, "max_unfinished": 10**9}, ["ok"]),
    "jobs/add_owner": Call(),
    "jobs/add_upload": Call(
        {"image_id": "new", "record": '{"sha256": "new", "uri": ""}', "max_bytes": 10**12}, ["added"]
    ),
    "jobs/cancel": Call({"job_id": "waiting_me000003"}, "canceled"),
    "jobs/changes": Call({"known": ["waiting_me000001", ""]}, [["waiting_me000001", "queued 1 0 0", []]]),
    "jobs/claim": Call({"nonce": "n", "capacity": 8, "max_skips": 4, "max_lead": 1, "default_seconds_per_unit": 1}),
    "jobs/delete_image": Call({"job_id": "failed_me000001", "rest": "x", "uris": "[]"}, "img_000001"),
    "jobs/delete_job": Call(
        {"job_id": "failed_me000002", "uris": "[]", "image_ids": ["img_000002"]}, "failed_me000002"
    ),
    "jobs/delete_upload": Call({"image_id": "img_000003"}, "img_000003"),
    "jobs/fail": Call({"job_id": "lost_me000004", "code": "c"}, "ok"),
    "jobs/find_accepted": Call({"loras": '[["lora_000002"]]'}),
    "jobs/finish": Call({"job_id": "lost_me000006", "result": "r", "image_ids": ["new_image"]}, "ok"),
    "jobs/heartbeat": Call(
        {"job_id": "lost_me000008", "lease_ms": 10**6, "progress": 5, "attempts": ["lost_me000008", 1, 5]}
    ),
    "jobs/image_opens": Call({"name": "failed_me000001"}, 1),
    "jobs/list_dead": Call({"code": "none", "limit": 50, "most": FAILED_AT_ONCE}),
    "jobs/list_jobs": Call({"state": "failed", "limit": 50, "most": LOOKED_AT_ONCE}),
    "jobs/list_uploads": Call({"limit": 50, "most": LOOKED_AT_ONCE}),
    "jobs/poll": Call(),
    "jobs/read": Call({}, ["waiting_me000001"]),
    "jobs/reap": Call({"limit": REAPED_AT_ONCE, "max_attempts": 1}, REAPED_AT_ONCE),
    "jobs/recent_adapters": Call({"draws": [1, 2]}),
    "jobs/release": Call({"job_id": "lost_me000400", "pause_ms": 0}, "requeued"),
    "jobs/remove_due_uploads": Call({"limit": BATCH}, BATCH),
    "jobs/requeue_dead": Call({"job_id": "failed_me000005"}, 1),
    "jobs/take_sample": Call({"worker_life_ms": 60_000, "every_ms": 1, "life_ms": 10**9}),
    "loras/apply_catalog": Call({"new_base_models": MODELS, "widths": "{}"}, ["", "base\n"]),
    "loras/apply_rows": Call({"rows": ROWS, "gone": [f"row_{number:06}" for number in range(1, ROWS_AT_ONCE + 1)]}, []),
    "loras/due_weights": Call({"limit": REMOVED_AT_ONCE, "life_ms": 10**6}),
    "loras/end_catalog": Call({"new_base_models": MODELS}, 1),
    "loras/grant_lora": Call({"decision": "deny", "lora": "lora_000005"}, 1),
    "loras/hold_weights": Call({"uri": "new", "life_ms": 10**6}, 1),
    "loras/list_loras": Call({"followed": 10, "own_known": None}),
    "loras/read_lora": Call(),
    "loras/register_lora": Call(
        {"lora": "new", "order": "1", "record": json.dumps({**ROW, "owner": "me"}), "owned": _owned}, ["added"]
    ),
    "loras/release_weights": Call(),
    "loras/remove_lora": Call({}, ["removed"]),
    "loras/update_lora": Call({"lora": "lora_000007", "fields": '{"name": "n"}'}, 1),
    "loras/withdraw_moved": Call({"moved": "base\n", "loras": [f"row_{number:06}" for number in range(LORAS_AT_ONCE)]}),
    "operations/begin_removal": Call({"account": "acct_000007", "removal": "[]"}, "[]"),
    "operations/remove_account": Call({"account": "acct_000009"}, 1),
    "store/add_measures": Call({"source": "s", "sequence": 1, "life_ms": 10**6, "amounts": ["x", 1]}),
    "webhooks/claim_deliveries": Call({"limit": AT_ONCE, "per_account": PER_ACCOUNT, "under_way": ["me 8"]}),
    "webhooks/create_webhook": Call({"endpoint": "new", "most": MOST_ENDPOINTS + 1}, ["url"]),
    "webhooks/delete_webhook": Call({"endpoint": "ep10"}, 1),
    "webhooks/list_deliveries": Call({"most": LISTED, "looked_at": LOOKED_AT}),
    "webhooks/redeliver": Call({"message": "m000003"}, ["state"]),
    "webhooks/roll_webhook": Call({"endpoint": "ep2", "salt": "new"}, ["url"]),
    "webhooks/settle_delivery": Call({"message": "m000004", "outcome": "delivered", "kept": LISTED}, "delivered"),
    "webhooks/test_webhook": Call({"endpoint": "ep3", "message": "new"}, ["job"]),
    "webhooks/update_webhook": Call({"endpoint": "ep4", "fields": '{"url": "u"}'}, ["url"]),
}  # fmt: skip


def _args(name: str, client: Any) -> dict[str, Argument]:
    unnamed: dict[str, Argument] = {"text": "", "number": 10**6, "flag": False, "list": []}
    given: dict[str, Any] = {name: each(client) if callable(each) else each for name, each in CALLS[name].args.items()}
    return {
        each.name: given.get(each.name, COMMON.get(each.name, unnamed[each.type]))
        for each in load_script(name).parameters
    }


@pytest.fixture(scope="module", params=[FEW, pytest.param(10_000, marks=pytest.mark.soak)])
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    with volatile_redis() as url:
        for database, size in enumerate((request.param, 10 * request.param)):
            with plain_redis(url, db=database, socket_timeout=600) as client:
                client.eval(WORLD, 1, PREFIX, size)
        yield url


def _count(url: str, database: int, name: str) -> int:
    """Return how many commands one call of the script calls."""
    script = load_script(name)
    with plain_redis(url, db=database) as client:
        args = script.encode(_args(name, client))
        client.config_resetstat()
        answer = client.eval(script.text, 1, PREFIX, *args)
        calls = sum(row["calls"] for row in client.info("commandstats").values()) - 1
    expected = CALLS[name].answers
    if expected is not None:
        assert (answer[: len(expected)] if isinstance(expected, list) else answer) == expected
    return calls


def test_every_script_has_a_row_and_every_family_that_grows_is_in_the_worlds(server: str) -> None:
    assert CALLS.keys() == set(SCRIPTS)
    families = [family for each in GROWS_WITH.values() for family in each.split()]
    assert sorted(families) == sorted(known.name.removesuffix(":*") for known in KEY_MAP)
    with plain_redis(server, db=1) as client:
        made = {str(name).removeprefix(PREFIX).partition(":")[0] for name in client.scan_iter(count=10_000)}
    of_one_caller = {*GROWS_WITH["nothing"].split(), *GROWS_WITH["groups of base models"].split(), *OF_ONE_CALLER}
    assert set(families) - made <= of_one_caller


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_calls_as_many_commands_in_a_world_that_is_ten_times_as_large(server: str, name: str) -> None:
    assert _count(server, 0, name) == _count(server, 1, name) <= MOST_COMMANDS
