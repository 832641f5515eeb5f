"""Planted defects of the job scripts, and the run that must find each of them.

A check that cannot fail is a defect: every line of the protocol that protects something is broken here once, and the
scenarios and model runs of `tests/stores` have to notice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from redis.exceptions import ResponseError

from serve_app.jobs.queue import Fairness
from tests.accounts.auth_scenario import run_auth_scenario
from tests.jobs.job_model import run_model
from tests.jobs.logical_queue import LogicalQueue, model_settings, roomy_settings
from tests.jobs.scenarios import SCENARIOS, Scenario

SCRIPTS = Path(__file__).parents[2] / "serve_app" / "stores" / "scripts"
SEEDS = range(40)
AUTH_SCRIPTS = ("window", "caller", "poll", "api_key", "create_key", "roll_key", "limit_key")
"""Scripts whose defects the authentication scenario has to notice."""
DEFECTS = (AssertionError, ResponseError, TypeError, ValueError, KeyError, IndexError)
"""How a planted defect shows itself: a broken promise, a script that stops, an answer that makes no sense."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """In `file`, the text `old`, which occurs once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str

    def rewrite(self, name: str, text: str) -> str:
        return text.replace(self.old, self.new)


MUTANTS: tuple[Mutant, ...] = (
    # the fence and the lease
    Mutant("a late write of another attempt is taken", "queue", "and job.attempt == attempt end", "end"),
    Mutant("a late write to an ended job is taken", "queue", "job and job.state == 'running' and job", "job and job"),
    Mutant("claim does not raise the fence", "claim", "'attempt', 1)\n  redis", "'attempt', 0)\n  redis"),
    Mutant("claim sets no lease", "claim", "redis.call('ZADD', K('lease:' .. kind), now + lease_ms, job.id)", ""),
    Mutant("a lease ends at once", "claim", "now + lease_ms, job.id", "now, job.id"),
    Mutant("heartbeat does not extend", "heartbeat", "now + lease_ms, job_id", "now + 1, job_id"),
    Mutant(
        "heartbeat loses the lease",
        "heartbeat",
        "redis.call('ZADD', K('lease:' .. job.kind), now + lease_ms, job_id)",
        "",
    ),
    Mutant(
        "heartbeat forgets the worker",
        "heartbeat",
        "redis.call('ZADD', K('workers:' .. job.kind), now, job.worker)",
        "",
    ),
    Mutant("heartbeat hides the cancel", "heartbeat", "if job.cancel then return 'cancel' end\n", ""),
    Mutant(
        "progress falls", "heartbeat", "num(redis.call('HGET', K('job:' .. job_id), 'progress'), 0), math", "0, math"
    ),
    Mutant("progress reaches 100 too soon", "heartbeat", "math.min(progress, 99)", "progress"),
    # accept
    Mutant("no limit for all", "acceptance", "if waiting >= max_queued", "if false"),
    Mutant("one job over the limit", "acceptance", "if waiting >= max_queued", "if waiting > max_queued"),
    Mutant("no limit for an account", "acceptance", "0) >= max_unfinished", "0) >= math.huge"),
    Mutant("one job over an account's limit", "acceptance", "0) >= max_unfinished", "0) > max_unfinished"),
    Mutant("only one kind counts as waiting", "acceptance", "ipairs(KINDS)", "ipairs({'generation'})"),
    Mutant(
        "idempotency is not remembered",
        "accept",
        "redis.call('HSET', idempotency_key, 'job', job_id, 'body', body_digest)",
        "",
    ),
    Mutant("any body is a replay", "accept", "if previous[2] ~= body_digest then", "if false then"),
    Mutant("idempotency keys never go", "accept", "redis.call('PEXPIRE', idempotency_key, idempotency_ms)", ""),
    Mutant("a key is everyone's", "accept", "K('idempotency:' .. account .. ':'", "K('idempotency:' .. ':'"),
    Mutant("a repeated accept writes again", "accept", "if redis.call('EXISTS', K('job:' .. job_id)) == 1", "if false"),
    # who may use an adapter, asked at the accept, the claim, each heartbeat and the commit
    Mutant("a denial is ignored", "queue", "if grant then return", "if grant == 'allow' then return"),
    Mutant("a grant is ignored", "queue", "if grant then return", "if grant == 'deny' then return"),
    Mutant("a grant outlives its LoRA", "queue", "if not record[1] then return false end", ""),
    Mutant("what is open to all is refused", "queue", "record[2] == '1' or ", ""),
    Mutant("an owner is refused", "queue", " or record[1] == account then", " then"),
    Mutant("an offer to an account is ignored", "queue", "K('loras_offered:' .. account)", "K('loras_offered:')"),
    Mutant("an offer to a name is ignored", "queue", "K('loras_offered:' .. name)", "K('loras_offered:')"),
    Mutant("a grant is everyone's", "queue", "K('grants:' .. account)", "K('grants:')"),
    Mutant("accept does not ask", "accept", "if not may_use_adapter(account, adapter) then", "if false then"),
    Mutant("a job is in no group", "accept", "group = redis.call('HGET', K('lora:' .. adapter), 'sha256')", ""),
    Mutant("claim does not ask", "claim", "if keeps_adapter(job) then", "if true then"),
    Mutant("an upscale needs an adapter", "queue", "return job.adapter == '' or may_use", "return may_use"),
    Mutant("a job that claim ended stays queued", "claim", "    dequeue(job)\n    end_forbidden", "    end_forbidden"),
    Mutant("claim ends any number of jobs", "claim", " or ended == MAX_ENDED", ""),
    Mutant("heartbeat does not ask", "heartbeat", "keeps_adapter(job) and 'ok'", "'ok'"),
    Mutant("finish does not ask", "finish", "not keeps_adapter(job)", "false"),
    Mutant("accept is not counted live", "acceptance", "redis.call('HINCRBY', K('unfinished'), account, 1)", ""),
    Mutant("accept adds no work", "acceptance", "redis.call('HINCRBY', K('load:' .. kind), 'work', work)", ""),
    Mutant("accept adds no demand", "acceptance", "'accepted_work', work)", "'accepted_work', 0)"),
    Mutant("accept is not counted", "acceptance", "redis.call('HINCRBY', K('count'), 'accepted', 1)", ""),
    Mutant("the account's index never goes", "acceptance", "redis.call('PEXPIRE', account_jobs, index_ms)", ""),
    Mutant("accept forgets the rate_token", "acceptance", "if rate_token ~= ''", "if false"),
    Mutant("accept forgets the version", "acceptance", "'version', version, ", ""),
    Mutant("accept does not queue", "acceptance", "enqueue(written)", ""),
    # the queue
    Mutant(
        "the group index is not kept",
        "queue",
        "redis.call('ZREM', K('group:' .. job.kind .. ':' .. job.group), job.id)",
        "",
    ),
    Mutant("a group's first place goes stale", "queue", "redis.call('ZREM', K('groups:' .. kind), group)", ""),
    Mutant("ready jobs are not counted down", "queue", "'ready', sign)", "'ready', 1)"),
    Mutant("ready work is not counted down", "queue", "'ready_work', sign * job.work", "'ready_work', job.work"),
    Mutant(
        "a waiting job does not age",
        "queue",
        "redis.call('ZADD', K('age:' .. job.kind), job.waiting_since, job.id)\n  count_ready",
        "count_ready",
    ),
    Mutant(
        "a claimed job goes on ageing",
        "queue",
        "redis.call('ZREM', K('age:' .. job.kind), job.id)\n  count_ready",
        "count_ready",
    ),
    Mutant(
        "a claimed job goes on ageing in its plan",
        "queue",
        "count_ready(job, -1)\n  stop_waiting(job)",
        "count_ready(job, -1)",
    ),
    Mutant(
        "a claimed job goes on waiting in its LoRA's index",
        "queue",
        "job.adapter ~= '' then redis.call('ZREM'",
        "false then redis.call('ZREM'",
    ),
    Mutant(
        "a LoRA's waiting jobs are not found",
        "queue",
        "redis.call('ZADD', waiting_of(job.adapter), job.sequence, job.id)",
        "",
    ),
    Mutant(
        "the index of a LoRA's waiting jobs stays",
        "queue",
        "redis.call('PEXPIRE', waiting_of(job.adapter), WAITING_LIFE)",
        "",
    ),
    Mutant(
        "a requeued job of a withdrawn LoRA waits on",
        "queue",
        "if not keeps_adapter(job) then withdraw(job.adapter) end",
        "",
    ),
    Mutant("a denial ends no waiting job", "grant_lora", "if decision == 'deny' then withdraw(lora) end", ""),
    Mutant("a withdrawn LoRA's waiting jobs wait on", "reap", "return moved + end_withdrawn()", "return moved"),
    Mutant("a denial ends everyone's waiting jobs", "reap", "elseif not keeps_adapter(job) then", "else"),
    Mutant("one look ends all waiting jobs of a LoRA", "reap", "'WITHSCORES', 'LIMIT', 0, most)", "'WITHSCORES')"),
    Mutant("the reaper looks at the same jobs again", "reap", "'(' .. looked_at", "'-inf'"),
    Mutant("a claimed job stays in its LoRA's index", "reap", "redis.call('ZREM', waiting_of(lora), waiting[i])", ""),
    Mutant("a job that the reaper ended stays queued", "reap", "      remove_waiting(job)\n", ""),
    Mutant(
        "a requeued dead letter of a withdrawn LoRA waits on",
        "requeue_dead",
        "if not keeps_adapter(queued) then withdraw(queued.adapter) end",
        "",
    ),
    Mutant(
        "a canceled job goes on ageing in its plan",
        "queue",
        "then return end\n  stop_waiting(job)",
        "then return end",
    ),
    Mutant(
        "an account without waiting jobs keeps its virtual time",
        "queue",
        "if redis.call('EXISTS', queue_of(job)) == 0 then",
        "if false then",
    ),
    Mutant(
        "an account's debt is forgotten",
        "queue",
        "if vtime > global_vtime(kind) then redis.call('ZADD'",
        "if false then redis.call('ZADD'",
    ),
    Mutant(
        "an account comes back at zero",
        "queue",
        "local vtime = math.max(global_vtime(kind), ",
        "local vtime = math.max(0, ",
    ),
    Mutant(
        "debts outlive an empty queue",
        "queue",
        "if redis.call('EXISTS', K('vtime:' .. kind)) == 1 then\n    if",
        "if true then\n    if",
    ),
    Mutant("credit can be saved up", "queue", "math.max(global, vtime + seconds)", "vtime + seconds"),
    Mutant("a correction misses an idle account", "queue", "if ahead > global and", "if false and"),
    Mutant("a lost attempt stays charged", "queue", "charge(job.kind, job.account, -job.charge / job.queue_share)", ""),
    Mutant("a request is never given back", "queue", "if job.rate_token == '' then", "if true then"),
    Mutant("an ended job stays live", "queue", "redis.call('HINCRBY', K('unfinished'), job.account, -1) <= 0", "false"),
    Mutant(
        "an account's counter is left at zero",
        "queue",
        "redis.call('HDEL', K('unfinished'), job.account)",
        "redis.call('PING')",
    ),
    Mutant(
        "an ended job's work stays",
        "queue",
        "'work', -job.work)\n  redis.call('HINCRBY', K('count')",
        "'work', 0)\n  redis.call('HINCRBY', K('count')",
    ),
    Mutant("an ended job never goes", "queue", "redis.call('PEXPIRE', K('job:' .. job.id), retention_ms)", ""),
    Mutant("an end is not counted", "queue", "redis.call('HINCRBY', K('count'), state, 1)", ""),
    Mutant("a failed job is no dead letter", "queue", "redis.call('ZADD', K('dead'), now, job.id)", ""),
    Mutant("a canceled wait stays delayed", "queue", "redis.call('ZREM', K('delay:' .. job.kind), job.id)\n", "\n"),
    Mutant("a due retry stays delayed", "queue", "redis.call('ZREM', K('delay:' .. kind), id)", ""),
    Mutant(
        "a retry comes too soon", "queue", "K('delay:' .. kind), '-inf', now,", "K('delay:' .. kind), '-inf', '+inf',"
    ),
    # claim
    Mutant(
        "a repeated claim gives more",
        "claim",
        "== nonce then return repeat_last_claim()",
        "== 'never' then return repeat_last_claim()",
    ),
    Mutant("a nonce is everyone's", "claim", "K('claim:' .. kind .. ':' .. worker)", "K('claim:' .. kind .. ':')"),
    Mutant("skips are unbounded", "claim", "head.skips >= max_skips", "false"),
    Mutant("one skip too many", "claim", "head.skips >= max_skips", "head.skips > max_skips"),
    Mutant("passing over is unbounded in time", "claim", "now - head.skipped_at >= max_wait_ms", "false"),
    Mutant("skips are not counted", "claim", "redis.call('HINCRBY', K('job:' .. head.id), 'skips', 1)", ""),
    Mutant("the lead is unbounded", "claim", "global) - global > allowed_lead()", "global) - global > math.huge"),
    Mutant("held adapters are not preferred", "claim", "local other = job_of_resident_group(global)", "local other"),
    Mutant(
        "the newest held adapter comes first",
        "claim",
        "best[place - 1].sequence > sequence",
        "best[place - 1].sequence < sequence",
    ),
    Mutant(
        "the newest job of a group comes first",
        "claim",
        "redis.call('ZRANGE', K('group:' .. kind .. ':' .. near.group), 0, NEAR - 1)",
        "redis.call('ZREVRANGE', K('group:' .. kind .. ':' .. near.group), 0, NEAR - 1)",
    ),
    Mutant("owners are not respected", "claim", "if owner ~= worker and is_alive and", "if false and"),
    Mutant("few owners are remembered", "owners", "local MAX_OWNERS = 32", "local MAX_OWNERS = 8"),
    Mutant("a saturated owner keeps its claim", "claim", "num(capacity_of[n], 0) > 0", "true"),
    Mutant("a dead owner keeps its claim", "claim", "now - seen[n] < worker_life_ms", "true"),
    Mutant("an owner is waited for without end", "claim", "or now - job.waiting_since >= owner_wait_ms", ""),
    Mutant("nothing else is taken meanwhile", "claim", "other = job_without_owner(global)", "other = nil"),
    Mutant("claim is not charged", "claim", "charge(kind, job.account, cost / job.queue_share)", "local _ = cost"),
    Mutant("shares are ignored", "claim", "cost / job.queue_share", "cost"),
    Mutant("virtual time stands still", "claim", "    set_global_vtime(kind, global)\n", ""),
    Mutant(
        "a worker's capacity is not counted down",
        "claim",
        "capacity = capacity - job.num_images",
        "capacity = capacity - 1",
    ),
    Mutant("tries are not counted", "claim", "'tries', 1)", "'tries', 0)"),
    Mutant(
        "a vanished record blocks the queue",
        "claim",
        "if job then return job, tonumber(first[2]) end",
        "if true then return job, tonumber(first[2]) end",
    ),
    # quarantine: jobs that lost two workers
    Mutant("losses are not counted", "reap", "'losses', 1)", "'losses', 0)"),
    Mutant("nothing is ever quarantined", "queue", "local QUARANTINE_LOSSES = 2 ", "local QUARANTINE_LOSSES = 99 "),
    Mutant(
        "quarantined jobs run together",
        "claim",
        "while capacity > 0 and not (is_quarantine_worker and #claimed > 0) do",
        "while capacity > 0 do",
    ),
    Mutant(
        "others are put beside a quarantined job",
        "claim",
        "if not is_empty then return nil, true end",
        "if not is_empty then return nil, false end",
    ),
    Mutant("a quarantined job is put beside others", "claim", "if not is_empty then return nil, true end", ""),
    Mutant("every worker takes quarantined jobs", "claim", "if chosen ~= worker then", "if not are_waiting then"),
    Mutant("a quarantine worker is never released", "claim", "    redis.call('DEL', quarantine_worker)\n", ""),
    Mutant(
        "a heartbeat does not extend the quarantine worker's time",
        "heartbeat",
        "redis.call('PEXPIRE', quarantine_worker, lease_ms)",
        "redis.call('PING')",
    ),
    Mutant("a quarantine worker seems to have capacity", "claim", "if is_quarantine_worker then capacity = 0 end", ""),
    Mutant("what a worker runs is not recorded", "claim", "redis.call('SADD', claimed_key(kind, worker), job.id)", ""),
    Mutant(
        "what a worker ran is not removed", "queue", "redis.call('SREM', claimed_key(job.kind, job.worker), job.id)", ""
    ),
    Mutant(
        "the list of a worker's jobs stays",
        "claim",
        "redis.call('PEXPIRE', claimed_key(kind, worker), CLAIMED_LIFE)",
        "",
    ),
    Mutant("a requeued job is quarantined", "queue", "'losses', 'skips'", "'skips'"),
    # finish, fail, release, reap, cancel, requeue
    Mutant("finish ignores a cancel", "finish", "if job.cancel then", "if false then"),
    Mutant("a repeated finish is not known", "finish", "if job.state == 'completed' then return 'duplicate' end", ""),
    Mutant("finish keeps the lease", "finish", "drop_lease(job)", ""),
    Mutant("images lead nowhere", "finish", "in ipairs(image_ids) do", "in ipairs({}) do"),
    Mutant("image names never go", "finish", "job_id, 'PX', retention_ms)", "job_id)"),
    Mutant(
        "an account's virtual time is not corrected",
        "finish",
        "charge(job.kind, job.account, (seconds - job.charge) / job.queue_share)",
        "",
    ),
    Mutant("nothing is measured", "finish", "\nmeasure_speed()\n", "\n"),
    Mutant("usage is not counted", "finish", "\ncount_usage()\n", "\n"),
    Mutant("usage counts jobs, not images", "finish", "'images:' .. source, #image_ids", "'images:' .. source, 1"),
    Mutant("usage is everyone's", "finish", "K('usage:' .. job.account", "K('usage:' .. 'all'"),
    Mutant("usage never goes", "finish", "redis.call('PEXPIRE', usage, USAGE_LIFE)", ""),
    Mutant("the busy speed is the average", "finish", "BUSY_FALL or BUSY_RISE", "BUSY_FALL or BUSY_FALL"),
    Mutant("the busy speed never falls", "finish", "BUSY_FALL or BUSY_RISE", "BUSY_RISE or BUSY_RISE"),
    Mutant("only the last measurement counts", "finish", "local SMOOTHING = 0.8", "local SMOOTHING = 0"),
    Mutant("a failure is tried without end", "fail", "not retry or job.tries >= max_attempts", "not retry"),
    Mutant("one try too many", "fail", "job.tries >= max_attempts", "job.tries > max_attempts"),
    Mutant("a hopeless failure is tried again", "fail", "if not retry or job", "if job"),
    Mutant(
        "a retry is lost",
        "queue",
        "redis.call('ZADD', K('delay:' .. job.kind), math.floor(now + pause_ms), job.id)",
        "",
    ),
    Mutant("a retry does not pause", "queue", "math.floor(now + pause_ms)", "now"),
    Mutant("pauses do not grow", "fail", "first_pause_ms * 2 ^ (job.tries - 1)", "first_pause_ms"),
    Mutant(
        "a delayed job does not age",
        "queue",
        "redis.call('ZADD', K('age:' .. job.kind), job.waiting_since, job.id)\nend",
        "end",
    ),
    Mutant("a failure ignores a cancel", "fail", "if job.cancel then", "if false then"),
    Mutant("a release costs a try", "release", "redis.call('HINCRBY', K('job:' .. job_id), 'tries', -1)", ""),
    Mutant("a released job is lost", "release", "else enqueue(job) end", "end"),
    Mutant("a released job does not pause", "release", "if pause_ms > 0 then", "if false then"),
    Mutant("a lost lease ignores a cancel", "reap", "if job.cancel then", "if false then"),
    Mutant("a poison job comes back for ever", "reap", "job.tries < max_attempts", "true"),
    Mutant("lost leases give up early", "reap", "job.tries < max_attempts", "job.tries + 1 < max_attempts"),
    Mutant("a lost job is not queued", "reap", "    enqueue(job)\n", ""),
    Mutant(
        "leases end before their time",
        "reap",
        "K('lease:' .. kind), '-inf', now,",
        "K('lease:' .. kind), '-inf', '+inf',",
    ),
    Mutant("an expired job is charged to the plan", "reap", "  refund_request(job)\n", ""),
    Mutant(
        "jobs wait for ever",
        "reap",
        "moved = moved + reap_leases(kind) + promote_due(kind, limit) + expire_waiting(kind)",
        "moved = moved + reap_leases(kind) + promote_due(kind, limit)",
    ),
    Mutant("dead workers count", "reap", "  remove_dead_workers(kind)\n", ""),
    Mutant("dead letters stay", "reap", "redis.call('ZREMRANGEBYSCORE', K('dead'), '-inf', now - retention_ms)", ""),
    Mutant("anyone may cancel", "cancel", "account ~= '' and job.account ~= account", "false"),
    Mutant("a canceled job is still queued", "cancel", "  remove_waiting(job)\n", ""),
    Mutant(
        "a running job cannot be canceled",
        "cancel",
        "redis.call('HSETNX', K('job:' .. job_id), 'cancel', now)",
        "redis.call('PING')",
    ),
    Mutant("any job can be requeued", "requeue_dead", "job.state ~= 'failed'", "false"),
    Mutant("a requeued job still expires from Redis", "requeue_dead", "redis.call('PERSIST', K('job:' .. job_id))", ""),
    Mutant("a requeued job has no tries left", "queue", "'rate_token', 'tries',", "'rate_token',"),
    Mutant(
        "a requeued job is not counted unfinished",
        "requeue_dead",
        "redis.call('HINCRBY', K('unfinished'), job.account, 1)",
        "",
    ),
    Mutant(
        "a requeued job expires at once", "requeue_dead", "'state', 'queued', 'waiting_since', now", "'state', 'queued'"
    ),
    # authentication
    Mutant("a forged digest passes", "caller", "if key[1] == key_digest then", "if key[1] then"),
    Mutant("a revoked key passes", "caller", "or key[4] or", "or"),
    Mutant("an expired key passes", "caller", " or num(key[6], math.huge) <= now", ""),
    Mutant(
        "a key passes on any interface",
        "caller",
        "if not string.find(key[3], interface, 1, true) then return refused('other_interface') end",
        "",
    ),
    Mutant("a disabled account passes", "caller", "not account[1] or account[2]", "not account[1]"),
    Mutant("a key without an account passes", "caller", "not account[1] or account[2]", "account[2]"),
    Mutant("one request too many", "window", "used >= limit", "used > limit"),
    Mutant("requests are not counted", "window", "redis.call('ZADD', window, ends, rate_token)", ""),
    Mutant("the window has no end", "window", "if not first[1] then redis.call('PEXPIREAT', window, ends) end", ""),
    Mutant("each request moves the window's end", "window", "num(first[2], now + window_ms)", "now + window_ms"),
    Mutant("polls are counted", "window", "if rate_token == '' or", "if"),
    Mutant("a repeated request counts twice", "window", " or redis.call('ZSCORE', window, rate_token)", ""),
    Mutant(
        "A and B share a window", "window", "K('rate:' .. account_id .. ':' .. interface)", "K('rate:' .. account_id)"
    ),
    Mutant("an unopened window ends at once", "window", "num(first[2], now + window_ms)", "num(first[2], now)"),
    Mutant("everyone is on the lowest plan", "window", "if plans[i] == name then", "if false then"),
    Mutant("a key's limit is ignored", "window", "    used = limit - left\n", ""),
    Mutant("a key's requests are not counted", "window", "redis.call('ZADD', key_window, ends, rate_token)", ""),
    Mutant("a key's limit is over its plan's", "window", "math.min(limit, key_limit)", "key_limit"),
    Mutant("a key's window has no end", "window", "redis.call('PEXPIREAT', key_window, ends)", ""),
    Mutant("a rolled key has no limit", "roll_key", "tonumber(old[10])", "nil"),
    Mutant("an ended key is limited again", "limit_key", " or num(key[3], math.huge) <= now", ""),
    Mutant("the last use is never known", "caller", "now - num(key[5], 0) >= USED_EVERY", "false"),
    Mutant("a key may do everything", "caller", "key[7] or ''", "''"),
    Mutant("a key may use every adapter", "caller", "key[8] or ''", "''"),
    # the life of a key
    Mutant("a key never expires", "api_key", "'expires', now + life_ms", "'expires', now + 10 * life_ms"),
    Mutant(
        "a key is made for nobody", "create_key", "if redis.call('EXISTS', K('account:' .. account)) == 0", "if false"
    ),
    Mutant("a key is made twice", "create_key", "if redis.call('EXISTS', K('key:' .. key_id)) == 0", "if true"),
    Mutant("any number of keys", "create_key", ">= max_keys", "> max_keys"),
    Mutant("a key is rolled twice", "roll_key", "if redis.call('EXISTS', K('key:' .. new_id)) == 1", "if false"),
    Mutant(
        "a rolled key goes on", "roll_key", "redis.call('HSET', old_key, 'expires', math.min(ends, now + grace_ms))", ""
    ),
    Mutant("rolling lengthens a key's life", "roll_key", "math.min(ends, now + grace_ms)", "now + grace_ms"),
    Mutant("the grace is not given", "roll_key", "math.min(ends, now + grace_ms)", "now"),
    Mutant("a revoked key is rolled", "roll_key", "or old[6] or", "or"),
    Mutant("an expired key is rolled", "roll_key", " or ends <= now", ""),
    Mutant("a rolled key's successor never expires", "roll_key", "tonumber(old[4])", "false"),
    Mutant("a rolled key may do everything", "roll_key", "old[7], old[8]", "nil, old[8]"),
    Mutant("a rolled key may use every adapter", "roll_key", "old[7], old[8]", "old[7], nil"),
    # the poll
    Mutant("another account's job is shown", "poll", "job.account ~= caller[2] or", ""),
    Mutant("a job is shown on any interface", "poll", " or (job_interface ~= '' and job.variant ~= job_interface)", ""),
    Mutant("a job is hidden where any interface will do", "poll", "job_interface ~= '' and job", "job"),
)
"""Each breaks one promise. `QUICK` runs in every check, all of them in the soak."""

QUICK = MUTANTS[::14]


def source(mutant: Mutant) -> str:
    return (SCRIPTS / f"{mutant.file}.lua").read_text()


async def finding(mutant: Mutant, url: str, *, database: int = 4, seeds: range = SEEDS) -> str | None:
    """Return what notices the defect, with its complaint; None when the defect survives.

    It is a scenario's name or a model run's seed.
    """
    with TemporaryDirectory() as folder:
        if mutant.file in AUTH_SCRIPTS:
            return await _auth_complaint(mutant, f"{url}?db={database}", Path(folder))
        settings = model_settings(Path(folder))
        roomy = roomy_settings(Path(folder))

        def open_queue(fairness: Fairness | None = None) -> LogicalQueue:
            return LogicalQueue(url, roomy, fairness=fairness, rewrite=mutant.rewrite, database=database)

        for scenario in SCENARIOS:
            complaint = await _complaint(open_queue, scenario)
            if complaint is not None:
                return f"{scenario.__name__}: {complaint}"
        for seed in seeds:
            queue = LogicalQueue(url, settings, rewrite=mutant.rewrite, database=database)
            try:
                await run_model(queue, seed, moves=150)
            except DEFECTS as broken:
                return str(broken)
            finally:
                await queue.close()
    return None


async def _auth_complaint(mutant: Mutant, url: str, folder: Path) -> str | None:
    try:
        await run_auth_scenario(url, folder, mutant.rewrite)
    except DEFECTS as broken:
        return f"{type(broken).__name__} {broken}"
    return None


async def _complaint(queue: Callable[[Fairness | None], LogicalQueue], scenario: Scenario) -> str | None:
    opened: list[LogicalQueue] = []

    def keep(fairness: Fairness | None = None) -> LogicalQueue:
        opened.append(queue(fairness))
        return opened[-1]

    try:
        await scenario(keep)
    except DEFECTS as broken:
        return f"{type(broken).__name__} {broken}"
    finally:
        for one in opened:
            await one.close()
    return None
