-- Where jobs wait and what waiting costs: an account's queue, its group's index, the turn of accounts, the running totals.
-- Work is counted in whole thousandths of a unit, so that totals stay exact; virtual time is in seconds of one worker.
local KINDS = {'generation', 'upscale'}
local SUSPECT = 2     -- workers lost with a job before it must run alone: then only the one at fault meets the attempt cap
local RECENT = 10000 -- newest jobs kept in the operator's index

local function clock_of(kind) return num(redis.call('GET', K('clock:' .. kind)), 0) end

local function set_clock(kind, virtual) redis.call('SET', K('clock:' .. kind), string.format('%.17g', virtual)) end

local function read_job(id)
  local field = redis.call('HMGET', K('job:' .. id), 'state', 'kind', 'account', 'group', 'attempt', 'tries', 'work',
    'weight', 'sequence', 'since', 'charge', 'cancel', 'variant', 'receipt', 'skips', 'skipped_at', 'images_asked', 'worker',
    'losses')
  if not field[1] then return nil end
  return {
    id = id, state = field[1], kind = field[2], account = field[3], group = field[4], attempt = num(field[5], 0),
    tries = num(field[6], 0), work = num(field[7], 0), weight = num(field[8], 1), sequence = num(field[9], 0),
    since = num(field[10], 0), charge = num(field[11], 0), cancel = field[12], variant = field[13],
    receipt = field[14] or '', skips = num(field[15], 0), skipped_at = tonumber(field[16]),
    images = num(field[17], 1), worker = field[18], losses = num(field[19], 0),
  }
end

local function queue_of(job) return K('queue:' .. job.kind .. ':' .. job.account) end

local function refresh_group(kind, group)
  local first = redis.call('ZRANGE', K('group:' .. kind .. ':' .. group), 0, 0, 'WITHSCORES')
  if first[1] then
    redis.call('ZADD', K('groups:' .. kind), first[2], group)
  else
    redis.call('ZREM', K('groups:' .. kind), group)
  end
end

-- An account that had nothing waiting comes back no earlier than the clock, and no earlier than it had run ahead.
local function give_turn(kind, account)
  if redis.call('ZSCORE', K('turn:' .. kind), account) then return end
  local virtual = math.max(clock_of(kind), num(redis.call('ZSCORE', K('idle:' .. kind), account), 0))
  redis.call('ZREM', K('idle:' .. kind), account)
  redis.call('ZADD', K('turn:' .. kind), virtual, account)
end

-- When nobody waits any more, all are even again: the clock moves past everyone (start-time fair queuing).
local function end_turn(kind, account)
  local virtual = num(redis.call('ZSCORE', K('turn:' .. kind), account), 0)
  redis.call('ZREM', K('turn:' .. kind), account)
  if redis.call('EXISTS', K('turn:' .. kind)) == 1 then
    if virtual > clock_of(kind) then redis.call('ZADD', K('idle:' .. kind), virtual, account) end
    return
  end
  local ahead = redis.call('ZREVRANGE', K('idle:' .. kind), 0, 0, 'WITHSCORES')
  redis.call('DEL', K('idle:' .. kind))
  set_clock(kind, math.max(clock_of(kind), virtual, num(ahead[2], 0)))
end

local function count_ready(job, sign)
  redis.call('HINCRBY', K('load:' .. job.kind), 'ready', sign)
  redis.call('HINCRBY', K('load:' .. job.kind), 'ready_work', sign * job.work)
end

local function put_in_queue(job)
  redis.call('ZADD', K('age:' .. job.kind), job.since, job.id)
  count_ready(job, 1)
  if job.losses >= SUSPECT then
    redis.call('ZADD', K('suspect:' .. job.kind), job.sequence, job.id)
    return
  end
  redis.call('ZADD', queue_of(job), job.sequence, job.id)
  if job.group ~= '' then
    redis.call('ZADD', K('group:' .. job.kind .. ':' .. job.group), job.sequence, job.id)
    refresh_group(job.kind, job.group)
  end
  give_turn(job.kind, job.account)
end

local function take_from_queue(job)
  local was_suspect = redis.call('ZREM', K('suspect:' .. job.kind), job.id) == 1
  if not was_suspect and redis.call('ZREM', queue_of(job), job.id) == 0 then return false end
  redis.call('ZREM', K('age:' .. job.kind), job.id)
  count_ready(job, -1)
  if was_suspect then return true end
  if job.group ~= '' then
    redis.call('ZREM', K('group:' .. job.kind .. ':' .. job.group), job.id)
    refresh_group(job.kind, job.group)
  end
  if redis.call('EXISTS', queue_of(job)) == 0 then end_turn(job.kind, job.account) end
  return true
end

-- What a worker holds, by name: a suspect goes only to one that holds nothing.
local function held_by(kind, worker) return K('held:' .. kind .. ':' .. worker) end

-- First in every script that ends an attempt: writes that free memory are allowed on a full server, and so is what follows.
local function release(job)
  redis.call('ZREM', K('lease:' .. job.kind), job.id)
  redis.call('SREM', held_by(job.kind, job.worker), job.id)
end

-- A queued job is either in its queue or backing off.
local function stop_waiting(job)
  if take_from_queue(job) then return end
  redis.call('ZREM', K('delay:' .. job.kind), job.id)
  redis.call('ZREM', K('age:' .. job.kind), job.id)
end

local function promote_due(kind, limit)
  local due = redis.call('ZRANGEBYSCORE', K('delay:' .. kind), '-inf', now, 'LIMIT', 0, limit)
  for _, id in ipairs(due) do
    redis.call('ZREM', K('delay:' .. kind), id)
    local job = read_job(id)
    if job and job.state == 'queued' then put_in_queue(job) end
  end
  return #due
end

-- Move an account's virtual time; credit never takes it behind the clock, so that nobody can save up turns.
local function charge(kind, account, seconds)
  local virtual = redis.call('ZSCORE', K('turn:' .. kind), account)
  local clock = clock_of(kind)
  if virtual then
    redis.call('ZADD', K('turn:' .. kind), math.max(clock, virtual + seconds), account)
    return
  end
  local ahead = num(redis.call('ZSCORE', K('idle:' .. kind), account), clock) + seconds
  if ahead > clock and redis.call('EXISTS', K('turn:' .. kind)) == 1 then
    redis.call('ZADD', K('idle:' .. kind), ahead, account)
  else
    redis.call('ZREM', K('idle:' .. kind), account)
  end
end

-- What was charged for an attempt that came to nothing goes back.
local function uncharge(job)
  charge(job.kind, job.account, -job.charge / job.weight)
  redis.call('HDEL', K('job:' .. job.id), 'charge')
end

local function requeue(job)
  redis.call('HSET', K('job:' .. job.id), 'state', 'queued')
  redis.call('HINCRBY', K('count'), 'requeued', 1)
  uncharge(job)
end

-- The fault was ours: the request counted against the plan goes back, if its window is still open.
local function give_back_request(job)
  if job.receipt == '' then return end
  redis.call('ZREM', K('counted:' .. job.account .. ':' .. job.variant), job.receipt)
end

local function end_job(job, state, retention)
  redis.call('HSET', K('job:' .. job.id), 'state', state, 'finished', now)
  redis.call('PEXPIRE', K('job:' .. job.id), retention)
  if redis.call('HINCRBY', K('live'), job.account, -1) <= 0 then redis.call('HDEL', K('live'), job.account) end
  redis.call('HINCRBY', K('load:' .. job.kind), 'work', -job.work)
  redis.call('HINCRBY', K('count'), state, 1)
end

local function end_failed(job, code, message, retention)
  redis.call('HSET', K('job:' .. job.id), 'code', code, 'message', message)
  uncharge(job)
  give_back_request(job)
  end_job(job, 'failed', retention)
  redis.call('ZADD', K('dead'), now, job.id)
end

local function end_canceled(job, retention)
  if job.state == 'running' then uncharge(job) end
  redis.call('HSET', K('job:' .. job.id), 'code', 'canceled', 'message', 'canceled on request')
  end_job(job, 'canceled', retention)
end

local function is_held(job, attempt) return job and job.state == 'running' and job.attempt == attempt end

-- Counted for the operator: it must stay near zero. pcall, because a full server refuses to count.
local function fenced()
  redis.pcall('HINCRBY', K('count'), 'fenced', 1)
  return 'fenced'
end

-- The record and what an estimate needs: {id, fields, {pace, ready, ready work, all work, workers, accounts waiting, place, now}}.
local function snapshot(id)
  local fields = redis.call('HGETALL', K('job:' .. id))
  if #fields == 0 then return {} end
  local job = read_job(id)
  local load = redis.call('HMGET', K('load:' .. job.kind), 'pace', 'ready', 'ready_work', 'work')
  local place = redis.call('ZRANK', queue_of(job), id)
  return {id, fields, {load[1] or '', load[2] or '0', load[3] or '0', load[4] or '0',
    redis.call('ZCARD', K('workers:' .. job.kind)), redis.call('ZCARD', K('turn:' .. job.kind)), place or -1, now}}
end
