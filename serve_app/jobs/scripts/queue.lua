-- include record
-- include store/add_to
-- include loras/pools
-- include webhooks
-- include image_uses
-- Where jobs wait and what waiting costs: an account's queue, the index of its weights, the accounts' virtual time, the
-- running totals. Work is counted in whole thousandths of a unit, so that totals stay exact; virtual time is in seconds
-- of one worker.
local LOW_PRIORITY = 1e12   -- added to a job's sequence: it waits behind all others of its account
local RECENT = 10000        -- newest jobs kept in the operator's index
-- A LoRA's waiting jobs are indexed for this many ms after the last of them came, far beyond any wait.
local WAITING_LIFE = 30 * 86400000

local function global_vtime(pool) return num(redis.call('GET', K('global_vtime:' .. pool)), 0) end

local function set_global_vtime(pool, vtime)
  redis.call('SET', K('global_vtime:' .. pool), string.format('%.17g', vtime))
end

-- Packed bytes are stored in fields of PART; beyond LONGEST_IN_PARTS, Redis's own table costs less than many fields.
local PART, LONGEST_IN_PARTS = 63, 1024

-- Return what the code packs of a job (serve_app/jobs/compact_form.py) as fields `prefix` and a number, each before its
-- value.
local function packed_fields(prefix, packed)
  local size, fields = #packed <= LONGEST_IN_PARTS and PART or #packed, {}
  for start = 1, #packed, size do
    fields[#fields + 1] = prefix .. (start - 1) / size
    fields[#fields + 1] = string.sub(packed, start, start + size - 1)
  end
  return fields
end

-- Bytes of Redis that an account's jobs of one interface take, by the day of their accept: the accept adds a job's, a
-- deletion subtracts them, and those of a day go when none of its jobs can be left.
local DAY = 86400000 -- ms

local function stored_of(account, variant) return K('stored:' .. account .. ':' .. variant) end

local function count_stored(job, bytes)
  local stored, day = stored_of(job.account, job.variant), math.floor(job.created / DAY)
  if redis.call('HINCRBY', stored, day, bytes) <= 0 then redis.call('HDEL', stored, day) end
end

local MEASURES = K('measures') -- the operator's numbers, a field each: serve_app/domain/metrics.py

local function observe_job(metric, pool, ms)
  local JOB_SECONDS = {0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600}
  local bucket = '+Inf'
  for i = #JOB_SECONDS, 1, -1 do
    if ms <= JOB_SECONDS[i] * 1000 then bucket = JOB_SECONDS[i] end
  end
  redis.call('HINCRBY', MEASURES, metric .. '|' .. pool .. '|' .. bucket, 1)
  redis.call('HINCRBYFLOAT', MEASURES, metric .. '|' .. pool .. '|sum', string.format('%.3f', ms / 1000))
end

local function plan_age_of(job) return K('plan_age:' .. job.pool .. ':' .. job.plan) end

local function waiting_of(index) return K('lora_jobs:' .. index) end

-- What a waiting job is indexed by, to be found when a LoRA is withdrawn or a base model moves: its LoRAs, and the base
-- model that it names.
local function indexes_of(job)
  local indexes = {unpack(job.adapters)}
  if job.base then indexes[#indexes + 1] = 'base:' .. job.base end
  return indexes
end

-- Put a job that waits or backs off into the indexes other than the queues: those of its plan, its LoRAs, and of the
-- time by which it must have been started once. Samples that the service draws by itself have no plan.
local function start_waiting(job)
  if job.plan ~= '' then redis.call('ZADD', plan_age_of(job), job.waiting_since, job.id) end
  for _, index in ipairs(indexes_of(job)) do
    redis.call('ZADD', waiting_of(index), job.sequence, job.id)
    redis.call('PEXPIRE', waiting_of(index), WAITING_LIFE)
  end
  if job.start_by and job.attempt == 0 then redis.call('ZADD', K('start_by:' .. job.pool), job.start_by, job.id) end
end

local function stop_waiting(job)
  if job.plan ~= '' then redis.call('ZREM', plan_age_of(job), job.id) end
  for _, index in ipairs(indexes_of(job)) do redis.call('ZREM', waiting_of(index), job.id) end
  if job.start_by then redis.call('ZREM', K('start_by:' .. job.pool), job.id) end
end

local function queue_of(job) return K('queue:' .. job.pool .. ':' .. job.account) end

local function refresh_weights(pool, weights)
  local first = redis.call('ZRANGE', K('group:' .. pool .. ':' .. weights), 0, 0, 'WITHSCORES')
  if first[1] then
    redis.call('ZADD', K('groups:' .. pool), first[2], weights)
  else
    redis.call('ZREM', K('groups:' .. pool), weights)
  end
end

-- An account that had nothing waiting comes back no earlier than the global virtual time, and no earlier than it had
-- run ahead.
local function activate_account(pool, account)
  if redis.call('ZSCORE', K('vtime:' .. pool), account) then return end
  local ahead = redis.call('ZSCORE', K('idle_vtime:' .. pool), account)
  if ahead then redis.call('ZREM', K('idle_vtime:' .. pool), account) end
  redis.call('ZADD', K('vtime:' .. pool), math.max(global_vtime(pool), num(ahead, 0)), account)
end

-- When no account waits any more, all are even again: the global virtual time moves past everyone's (start-time fair
-- queuing). The account's own counts with the `seconds` that it is charged.
local function deactivate_account(pool, account, seconds)
  local vtime = math.max(global_vtime(pool), num(redis.call('ZSCORE', K('vtime:' .. pool), account), 0) + seconds)
  redis.call('ZREM', K('vtime:' .. pool), account)
  if redis.call('EXISTS', K('vtime:' .. pool)) == 1 then
    if vtime > global_vtime(pool) then redis.call('ZADD', K('idle_vtime:' .. pool), vtime, account) end
    return
  end
  local ahead = redis.call('ZREVRANGE', K('idle_vtime:' .. pool), 0, 0, 'WITHSCORES')
  if ahead[1] then redis.call('DEL', K('idle_vtime:' .. pool)) end
  set_global_vtime(pool, math.max(vtime, num(ahead[2], 0)))
end

-- Count a job that waits in a queue from now on, or no more; `amounts` of its pool's load are counted with it.
local function count_ready(job, sign, amounts)
  amounts = amounts or {}
  for _, each in ipairs({'ready', sign, 'ready_work', sign * job.work}) do amounts[#amounts + 1] = each end
  add_to(K('load:' .. job.pool), amounts)
end

local function enqueue(job, amounts)
  start_waiting(job)
  redis.call('ZADD', K('age:' .. job.pool), job.waiting_since, job.id)
  count_ready(job, 1, amounts)
  if job.losses >= QUARANTINE_LOSSES then
    redis.call('ZADD', K('quarantine:' .. job.pool), job.sequence, job.id)
    return
  end
  redis.call('ZADD', queue_of(job), job.sequence, job.id)
  if job.weights ~= '' then
    redis.call('ZADD', K('group:' .. job.pool .. ':' .. job.weights), job.sequence, job.id)
    redis.call('ZADD', K('groups:' .. job.pool), 'LT', job.sequence, job.weights)
  end
  activate_account(job.pool, job.account)
end

-- Move an account's virtual time; a credit never takes it behind the global one, so that no account can save up
-- service.
local function charge(pool, account, seconds)
  local vtime = redis.call('ZSCORE', K('vtime:' .. pool), account)
  local global = global_vtime(pool)
  if vtime then
    redis.call('ZADD', K('vtime:' .. pool), math.max(global, vtime + seconds), account)
    return
  end
  local known = redis.call('ZSCORE', K('idle_vtime:' .. pool), account)
  local ahead = num(known, global) + seconds
  if ahead > global and redis.call('EXISTS', K('vtime:' .. pool)) == 1 then
    redis.call('ZADD', K('idle_vtime:' .. pool), ahead, account)
  elseif known then
    redis.call('ZREM', K('idle_vtime:' .. pool), account)
  end
end

-- Take a job out of its queue, and charge its account `seconds`; false when it was in none.
local function dequeue(job, seconds)
  local is_quarantined = job.losses >= QUARANTINE_LOSSES
  local index = is_quarantined and K('quarantine:' .. job.pool) or queue_of(job)
  if redis.call('ZREM', index, job.id) == 0 then return false end
  redis.call('ZREM', K('age:' .. job.pool), job.id)
  count_ready(job, -1)
  stop_waiting(job)
  if job.weights ~= '' and not is_quarantined then
    redis.call('ZREM', K('group:' .. job.pool .. ':' .. job.weights), job.id)
    refresh_weights(job.pool, job.weights)
  end
  if not is_quarantined and redis.call('EXISTS', queue_of(job)) == 0 then
    deactivate_account(job.pool, job.account, seconds or 0)
  elseif seconds then
    charge(job.pool, job.account, seconds)
  end
  return true
end

-- Let a job wait for its next attempt; it goes on ageing meanwhile.
local function back_off(job, pause_ms)
  start_waiting(job)
  redis.call('ZADD', K('delay:' .. job.pool), math.floor(now + pause_ms), job.id)
  redis.call('ZADD', K('age:' .. job.pool), job.waiting_since, job.id)
end

-- The jobs that a worker runs: a quarantined one goes only to a worker that runs none.
local function claimed_key(pool, worker) return K('claimed:' .. pool .. ':' .. worker) end

-- Every script that ends an attempt calls this first: writes that free memory are allowed on a full server, and so is
-- what follows.
local function drop_lease(job)
  redis.call('ZREM', K('lease:' .. job.pool), job.id)
  redis.call('SREM', claimed_key(job.pool, job.worker), job.id)
end

-- Take a queued job from where it is, in its queue or backing off.
local function remove_waiting(job)
  if dequeue(job) then return end
  stop_waiting(job)
  redis.call('ZREM', K('delay:' .. job.pool), job.id)
  redis.call('ZREM', K('age:' .. job.pool), job.id)
end

local function promote_due(pool, limit)
  local due = redis.call('ZRANGEBYSCORE', K('delay:' .. pool), '-inf', now, 'LIMIT', 0, limit)
  for _, id in ipairs(due) do
    redis.call('ZREM', K('delay:' .. pool), id)
    local job = read_job(id)
    if job and job.state == 'queued' then enqueue(job) end
  end
  return #due
end

-- Give back what was charged for an attempt that made no images.
local function refund_charge(job)
  charge(job.pool, job.account, -job.charge / job.queue_share)
  redis.call('HDEL', K('job:' .. job.id), 'charge')
end

-- Let the reaper end a job that waits again although its account may no longer use its adapters.
local function look_at_waiting(job)
  for _, adapter in ipairs(job.adapters) do
    if not may_use_adapter(job.account, adapter) then withdraw(adapter) end
  end
end

-- Let a job that is in no queue wait in the pool that the catalog wants it in now.
local function change_pool(job)
  local wanted = wanted_pool(job)
  if wanted == job.pool then return end
  redis.call('HINCRBY', K('load:' .. job.pool), 'work', -job.work)
  redis.call('HINCRBY', K('load:' .. wanted), 'work', job.work)
  redis.call('HSET', K('job:' .. job.id), 'kind', wanted)
  job.pool = wanted
end

local function requeue(job)
  redis.call('HSET', K('job:' .. job.id), 'state', 'queued')
  redis.call('HINCRBY', K('count'), 'requeued', 1)
  refund_charge(job)
  change_pool(job)
  look_at_waiting(job)
end

-- Subtract the request from the plan's count, if its window is still open: the fault was the service's.
local function refund_request(job)
  if job.rate_token == '' then return end
  local window = K('rate:' .. job.account .. ':' .. job.variant)
  redis.call('ZREM', window, job.rate_token)
  redis.call('ZREM', window .. ':' .. job.key, job.rate_token)
end

-- Return the fields that nobody reads once a job has ended. A failed one may be queued again, and keeps what it needs
-- to wait; of a completed one, the state says that its progress is 100.
local function fields_over(state)
  local over = {'waiting_since', 'rate_token', 'tries', 'losses', 'skips', 'skipped_at', 'charge', 'worker', 'cancel'}
  if state == 'failed' then return over end
  if state == 'completed' then over[#over + 1] = 'progress' end
  return {'version', 'kind', 'group', 'work', 'shown', 'queue_share', 'num_images', 'sequence', 'plan', 'sample',
    'request_id', 'traceparent', 'base', 'start_by', 'ends', unpack(over)}
end

-- End a job; `fields` are written with its state, each name before its value.
local function end_job(job, state, retention_ms, fields)
  tell_webhooks(job, state)
  redis.call('HDEL', K('job:' .. job.id), unpack(fields_over(state)))
  redis.call('HSET', K('job:' .. job.id), 'state', state, 'finished', now - job.created, unpack(fields or {}))
  redis.call('PEXPIRE', K('job:' .. job.id), retention_ms)
  for _, image_id in ipairs(job.pictures) do use_image(image_id, job.id, now + retention_ms, retention_ms) end
  if redis.call('HINCRBY', K('unfinished'), job.account, -1) <= 0 then
    redis.call('HDEL', K('unfinished'), job.account)
  end
  redis.call('HINCRBY', K('load:' .. job.pool), 'work', -job.work)
  redis.call('HINCRBY', K('count'), state, 1)
  if state == 'completed' then observe_job('job_seconds', job.pool, now - job.waiting_since) end
end

local function end_failed(job, code, message, retention_ms)
  refund_charge(job)
  refund_request(job)
  end_job(job, 'failed', retention_ms, {'code', code, 'message', message})
  redis.call('HINCRBY', MEASURES, 'job_failures|' .. job.pool .. '|' .. code, 1)
  redis.call('ZADD', K('dead'), now, job.id)
end

local function end_canceled(job, retention_ms)
  if job.state == 'running' then refund_charge(job) end
  end_job(job, 'canceled', retention_ms)
end

local function end_forbidden(job, retention_ms)
  end_failed(job, 'lora_unavailable', 'The account may no longer use this LoRA.', retention_ms)
end
