"""Planted defects of the job scripts, and the run that must find each of them.

A check that cannot fail is a defect: every line of the protocol that protects something is broken here once, and the
stories and games of `tests/stores` have to notice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from redis.exceptions import ResponseError

from serve_app.stores.jobs import Fairness
from tests.stores.gate_story import tell_the_gates_story
from tests.stores.logical import Bench, model_settings, story_settings
from tests.stores.scenarios import SCENARIOS, Scenario
from tests.stores.world import play

SCRIPTS = Path(__file__).parents[2] / "serve_app" / "stores" / "scripts"
SEEDS = range(40)
AT_THE_GATE = ("caller", "poll", "keys", "make_key", "roll_key")
"""Scripts whose defects the gate's story has to notice."""
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
    Mutant("claim sets no lease", "claim", "redis.call('ZADD', K('lease:' .. kind), now + lease, job.id)", ""),
    Mutant("a lease ends at once", "claim", "now + lease, job.id", "now, job.id"),
    Mutant("beat does not extend", "beat", "now + lease, id", "now + 1, id"),
    Mutant("beat loses the lease", "beat", "redis.call('ZADD', K('lease:' .. job.kind), now + lease, id)", ""),
    Mutant("beat forgets the worker", "beat", "redis.call('ZADD', K('workers:' .. job.kind), now, job.worker)", ""),
    Mutant("beat hides the cancel", "beat", "job.cancel and 'cancel' or 'ok'", "'ok'"),
    Mutant("progress falls", "beat", "num(redis.call('HGET', K('job:' .. id), 'progress'), 0), math", "0, math"),
    Mutant("progress reaches 100 too soon", "beat", "math.min(progress, 99)", "progress"),
    # accept
    Mutant("no limit for all", "accept", "if waiting >= cap", "if false"),
    Mutant("one job over the limit", "accept", "if waiting >= cap", "if waiting > cap"),
    Mutant("no limit for an account", "accept", "0) >= account_cap", "0) >= math.huge"),
    Mutant("one job over an account's limit", "accept", "0) >= account_cap", "0) > account_cap"),
    Mutant("only one kind counts as waiting", "accept", "ipairs(KINDS)", "ipairs({'generation'})"),
    Mutant("idempotency is not remembered", "accept", "redis.call('HSET', once, 'job', id, 'body', body)", ""),
    Mutant("any body is a replay", "accept", "if before[2] ~= body then", "if false then"),
    Mutant("idempotency keys never go", "accept", "redis.call('PEXPIRE', once, idempotency_life)", ""),
    Mutant("a key is everyone's", "accept", "K('idem:' .. account .. ':'", "K('idem:' .. ':'"),
    Mutant("a repeated accept writes again", "accept", "if redis.call('EXISTS', K('job:' .. id)) == 1", "if false"),
    Mutant(
        "a denial is not heard", "accept", "granted == 'deny' or not (granted or is_open)", "not (granted or is_open)"
    ),
    Mutant("a grant is not heard", "accept", "not (granted or is_open)", "not is_open"),
    Mutant("the file is not heard", "accept", "not (granted or is_open)", "false"),
    Mutant("a grant is everyone's", "accept", "K('grants:' .. account)", "K('grants:')"),
    Mutant("accept is not counted live", "accept", "redis.call('HINCRBY', K('live'), account, 1)", ""),
    Mutant("accept adds no work", "accept", "redis.call('HINCRBY', K('load:' .. kind), 'work', work)", ""),
    Mutant("accept is not counted", "accept", "redis.call('HINCRBY', K('count'), 'accepted', 1)", ""),
    Mutant("the account's index never goes", "accept", "redis.call('PEXPIRE', own, index_life)", ""),
    Mutant("accept forgets the receipt", "accept", "if receipt ~= ''", "if false"),
    Mutant("accept does not queue", "accept", "put_in_queue(read_job(id))", ""),
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
    Mutant("a waiting job does not age", "queue", "redis.call('ZADD', K('age:' .. job.kind), job.since, job.id)", ""),
    Mutant(
        "a claimed job goes on ageing",
        "queue",
        "redis.call('ZREM', K('age:' .. job.kind), job.id)\n  count_ready",
        "count_ready",
    ),
    Mutant(
        "an empty account keeps its turn", "queue", "if redis.call('EXISTS', queue_of(job)) == 0 then", "if false then"
    ),
    Mutant(
        "an account's debt is forgotten",
        "queue",
        "if virtual > clock_of(kind) then redis.call('ZADD'",
        "if false then redis.call('ZADD'",
    ),
    Mutant(
        "an account comes back at zero",
        "queue",
        "local virtual = math.max(clock_of(kind), ",
        "local virtual = math.max(0, ",
    ),
    Mutant(
        "debts outlive an empty queue",
        "queue",
        "if redis.call('EXISTS', K('turn:' .. kind)) == 1 then\n    if",
        "if true then\n    if",
    ),
    Mutant("credit can be saved up", "queue", "math.max(clock, virtual + seconds)", "virtual + seconds"),
    Mutant("a correction misses an idle account", "queue", "if ahead > clock and", "if false and"),
    Mutant("a lost attempt stays charged", "queue", "charge(job.kind, job.account, -job.charge / job.weight)", ""),
    Mutant("a request is never given back", "queue", "if job.receipt == '' then", "if true then"),
    Mutant("an ended job stays live", "queue", "redis.call('HINCRBY', K('live'), job.account, -1) <= 0", "false"),
    Mutant(
        "an account's counter is left at zero",
        "queue",
        "redis.call('HDEL', K('live'), job.account)",
        "redis.call('PING')",
    ),
    Mutant(
        "an ended job's work stays",
        "queue",
        "'work', -job.work)\n  redis.call('HINCRBY', K('count')",
        "'work', 0)\n  redis.call('HINCRBY', K('count')",
    ),
    Mutant("an ended job never goes", "queue", "redis.call('PEXPIRE', K('job:' .. job.id), retention)", ""),
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
        "== nonce then return same_again()",
        "== 'never' then return same_again()",
    ),
    Mutant("a nonce is everyone's", "claim", "K('claim:' .. kind .. ':' .. worker)", "K('claim:' .. kind .. ':')"),
    Mutant("skips are unbounded", "claim", "head.skips >= max_skips", "false"),
    Mutant("one skip too many", "claim", "head.skips >= max_skips", "head.skips > max_skips"),
    Mutant("passing over is unbounded in time", "claim", "now - head.skipped_at >= max_wait", "false"),
    Mutant("skips are not counted", "claim", "redis.call('HINCRBY', K('job:' .. head.id), 'skips', 1)", ""),
    Mutant("the lead is unbounded", "claim", "clock) - clock > lead_allowed()", "clock) - clock > math.huge"),
    Mutant("held adapters are not preferred", "claim", "local other = of_a_resident_group(clock)", "local other"),
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
    Mutant("owners are not respected", "claim", "if seen and now - seen < worker_life and num", "if false and num"),
    Mutant("a saturated owner keeps its claim", "claim", "num(redis.call('HGET', rooms, owner), 0) > 0", "true"),
    Mutant("a dead owner keeps its claim", "claim", "now - seen < worker_life", "true"),
    Mutant("an owner is waited for without end", "claim", "or now - job.since >= owner_wait", ""),
    Mutant("nothing else is taken meanwhile", "claim", "other = of_no_owner(clock)", "other = nil"),
    Mutant("claim is not charged", "claim", "charge(kind, job.account, cost / job.weight)", "local _ = cost"),
    Mutant("weights are ignored", "claim", "cost / job.weight", "cost"),
    Mutant("the clock stands still", "claim", "    set_clock(kind, clock)\n", ""),
    Mutant("the room of a worker is not kept", "claim", "room = room - job.images", "room = room - 1"),
    Mutant("tries are not counted", "claim", "'tries', 1)", "'tries', 0)"),
    Mutant(
        "a vanished record blocks the queue",
        "claim",
        "if job then return job, tonumber(turn[2]) end",
        "if true then return job, tonumber(turn[2]) end",
    ),
    # jobs that lost two workers
    Mutant("losses are not counted", "reap", "'losses', 1)", "'losses', 0)"),
    Mutant("nothing is ever suspect", "queue", "local SUSPECT = 2 ", "local SUSPECT = 99 "),
    Mutant(
        "suspects run together", "claim", "while room > 0 and not (is_apart and #given > 0) do", "while room > 0 do"
    ),
    Mutant(
        "others are put beside a suspect",
        "claim",
        "if not is_empty then return nil, true end",
        "if not is_empty then return nil, false end",
    ),
    Mutant("a suspect is put beside others", "claim", "if not is_empty then return nil, true end", ""),
    Mutant("every worker takes suspects", "claim", "if on_duty ~= worker then", "if not waits then"),
    Mutant("a worker stays apart for ever", "claim", "    redis.call('DEL', duty)\n", ""),
    Mutant(
        "a beat does not keep its worker apart",
        "beat",
        "redis.call('PEXPIRE', K('alone:' .. job.kind), lease)",
        "redis.call('PING')",
    ),
    Mutant("a worker apart seems to have room", "claim", "if is_apart then room = 0 end", ""),
    Mutant("what a worker holds is not kept", "claim", "redis.call('SADD', held_by(kind, worker), job.id)", ""),
    Mutant(
        "what a worker held is not let go", "queue", "redis.call('SREM', held_by(job.kind, job.worker), job.id)", ""
    ),
    Mutant("the names a worker held stay", "claim", "redis.call('PEXPIRE', held_by(kind, worker), HELD_LIFE)", ""),
    Mutant("a revived job is suspect", "revive", "'losses', ", ""),
    # finish, fail, hand back, reap, cancel, revive
    Mutant("finish ignores a cancel", "finish", "if job.cancel then", "if false then"),
    Mutant("a repeated finish is not known", "finish", "if job.state == 'completed' then return 'duplicate' end", ""),
    Mutant("finish keeps the lease", "finish", "release(job)", ""),
    Mutant("images lead nowhere", "finish", "for i = 6, #ARGV do", "for i = 7, #ARGV do"),
    Mutant("image names never go", "finish", "id, 'PX', retention)", "id)"),
    Mutant(
        "a turn is not corrected", "finish", "charge(job.kind, job.account, (seconds - job.charge) / job.weight)", ""
    ),
    Mutant("nothing is measured", "finish", "\nmeasure()\n", "\n"),
    Mutant("only the last measurement counts", "finish", "local MEMORY = 0.8", "local MEMORY = 0"),
    Mutant("a failure is tried without end", "fail", "not retry or job.tries >= allowed", "not retry"),
    Mutant("one try too many", "fail", "job.tries >= allowed", "job.tries > allowed"),
    Mutant("a hopeless failure is tried again", "fail", "if not retry or job", "if job"),
    Mutant("a retry is lost", "fail", "redis.call('ZADD', K('delay:' .. job.kind), math.floor(now + pause), id)", ""),
    Mutant("a retry does not pause", "fail", "math.floor(now + pause)", "now"),
    Mutant("pauses do not grow", "fail", "first * 2 ^ (job.tries - 1)", "first"),
    Mutant("a delayed job does not age", "fail", "redis.call('ZADD', K('age:' .. job.kind), job.since, id)", ""),
    Mutant("a failure ignores a cancel", "fail", "if job.cancel then", "if false then"),
    Mutant("handing back costs a try", "hand_back", "redis.call('HINCRBY', K('job:' .. id), 'tries', -1)", ""),
    Mutant("a job handed back is lost", "hand_back", "requeue(job)\nput_in_queue(job)", "requeue(job)"),
    Mutant("a lost lease ignores a cancel", "reap", "if job.cancel then", "if false then"),
    Mutant("a poison job comes back for ever", "reap", "job.tries < allowed", "true"),
    Mutant("lost leases give up early", "reap", "job.tries < allowed", "job.tries + 1 < allowed"),
    Mutant("a lost job is not queued", "reap", "    put_in_queue(job)\n", ""),
    Mutant(
        "leases end before their time",
        "reap",
        "K('lease:' .. kind), '-inf', now,",
        "K('lease:' .. kind), '-inf', '+inf',",
    ),
    Mutant("an expired job is charged to the plan", "reap", "  give_back_request(job)\n", ""),
    Mutant(
        "jobs wait for ever",
        "reap",
        "moved = moved + run_out_of_lease(kind) + promote_due(kind, limit) + run_out_of_patience(kind)",
        "moved = moved + run_out_of_lease(kind) + promote_due(kind, limit)",
    ),
    Mutant("dead workers count", "reap", "  forget_workers(kind)\nend\n", "end\n"),
    Mutant("dead letters stay", "reap", "redis.call('ZREMRANGEBYSCORE', K('dead'), '-inf', now - retention)", ""),
    Mutant("anyone may cancel", "cancel", "account ~= '' and job.account ~= account", "false"),
    Mutant("a canceled job is still queued", "cancel", "  stop_waiting(job)\n", ""),
    Mutant(
        "a running job cannot be canceled",
        "cancel",
        "redis.call('HSETNX', K('job:' .. id), 'cancel', now)",
        "redis.call('PING')",
    ),
    Mutant("any job can be revived", "revive", "job.state ~= 'failed'", "false"),
    Mutant("a revived job still goes", "revive", "redis.call('PERSIST', K('job:' .. id))", ""),
    Mutant("a revived job has no tries left", "revive", "'finished', 'tries',", "'finished',"),
    Mutant("a revived job is not live", "revive", "redis.call('HINCRBY', K('live'), job.account, 1)", ""),
    Mutant("a revived job expires at once", "revive", "'state', 'queued', 'since', now", "'state', 'queued'"),
    # the gate
    Mutant("a forged digest passes", "caller", "held[1] ~= digest or", "not held[1] or"),
    Mutant("a revoked key passes", "caller", "or held[4] or", "or"),
    Mutant("an expired key passes", "caller", " or num(held[6], math.huge) <= now", ""),
    Mutant(
        "a key passes on any interface",
        "caller",
        "if not string.find(held[3], variant, 1, true) then return unknown() end",
        "",
    ),
    Mutant("a disabled account passes", "caller", "not account[1] or account[2]", "not account[1]"),
    Mutant("a key without an account passes", "caller", "not account[1] or account[2]", "account[2]"),
    Mutant("one request too many", "caller", "used >= limit", "used > limit"),
    Mutant("requests are not counted", "caller", "redis.call('ZADD', counted, ends, receipt)", ""),
    Mutant("the window has no end", "caller", "if used == 0 then redis.call('PEXPIREAT', counted, ends) end", ""),
    Mutant("each request moves the window's end", "caller", "num(first[2], now + window)", "now + window"),
    Mutant("polls are counted", "caller", "if receipt == '' or", "if"),
    Mutant("a repeated request counts twice", "caller", " or redis.call('ZSCORE', counted, receipt)", ""),
    Mutant(
        "A and B share a window", "caller", "K('counted:' .. held[2] .. ':' .. variant)", "K('counted:' .. held[2])"
    ),
    Mutant("an unopened window ends at once", "caller", "num(first[2], now + window)", "num(first[2], now)"),
    Mutant("everyone is on the lowest plan", "caller", "if ARGV[i] == name then", "if false then"),
    Mutant("the last use is never known", "caller", "if now - num(held[5], 0) >= USED_EVERY", "if false"),
    # the life of a key
    Mutant("a key never expires", "keys", "'expires', now + life", "'expires', now + 10 * life"),
    Mutant(
        "a key is made for nobody", "make_key", "if redis.call('EXISTS', K('account:' .. account)) == 0", "if false"
    ),
    Mutant("a key is made twice", "make_key", "if redis.call('EXISTS', K('key:' .. id)) == 0", "if true"),
    Mutant("a key is rolled twice", "roll_key", "if redis.call('EXISTS', K('key:' .. id)) == 1", "if false"),
    Mutant("a rolled key goes on", "roll_key", "redis.call('HSET', old, 'expires', math.min(ends, now + ARGV[5]))", ""),
    Mutant("rolling lengthens a key's life", "roll_key", "math.min(ends, now + ARGV[5])", "now + ARGV[5]"),
    Mutant("the grace is not given", "roll_key", "math.min(ends, now + ARGV[5])", "now"),
    Mutant("a revoked key is rolled", "roll_key", "or held[6] or", "or"),
    Mutant("an expired key is rolled", "roll_key", " or ends <= now", ""),
    Mutant("a rolled key's successor never expires", "roll_key", "tonumber(held[4])", "false"),
    # the poll
    Mutant("another account's job is shown", "poll", "job.account ~= who[2] or", ""),
    Mutant("a job is shown on any interface", "poll", " or (variant ~= '' and job.variant ~= variant)", ""),
    Mutant("a job is hidden where any interface will do", "poll", "variant ~= '' and job", "job"),
)
"""Each breaks one promise. `QUICK` runs in every check, all of them in the soak."""

QUICK = MUTANTS[::14]


def source(mutant: Mutant) -> str:
    return (SCRIPTS / f"{mutant.file}.lua").read_text()


async def finding(mutant: Mutant, url: str, *, database: int = 4, seeds: range = SEEDS) -> str | None:
    """What notices the defect: a story's name or a game's seed with its complaint; None when it survives."""
    with TemporaryDirectory() as folder:
        if mutant.file in AT_THE_GATE:
            return await _gate_complaint(mutant, f"{url}?db={database}", Path(folder))
        settings = model_settings(Path(folder))
        roomy = story_settings(Path(folder))

        def story(fairness: Fairness | None = None) -> Bench:
            return Bench(url, roomy, fairness=fairness, rewrite=mutant.rewrite, database=database)

        for scenario in SCENARIOS:
            complaint = await _complaint(story, scenario)
            if complaint is not None:
                return f"{scenario.__name__}: {complaint}"
        for seed in seeds:
            game = Bench(url, settings, rewrite=mutant.rewrite, database=database)
            try:
                await play(game, seed, moves=150)
            except DEFECTS as broken:
                return str(broken)
            finally:
                await game.close()
    return None


async def _gate_complaint(mutant: Mutant, url: str, folder: Path) -> str | None:
    try:
        await tell_the_gates_story(url, folder, mutant.rewrite)
    except DEFECTS as broken:
        return f"{type(broken).__name__} {broken}"
    return None


async def _complaint(bench: Callable[[Fairness | None], Bench], scenario: Scenario) -> str | None:
    opened: list[Bench] = []

    def keep(fairness: Fairness | None = None) -> Bench:
        opened.append(bench(fairness))
        return opened[-1]

    try:
        await scenario(keep)
    except DEFECTS as broken:
        return f"{type(broken).__name__} {broken}"
    finally:
        for one in opened:
            await one.close()
    return None
