-- include queue
-- args: limit:number, max_attempts:number, queue_age_ms:number, retention_ms:number, worker_life_ms:number
-- reap: everything whose time is over: leases, pauses, jobs that waited too long, workers not seen, old dead letters; `limit` of
-- each. Returns how many jobs moved.
local function lose_lease(job)
  if job.cancel then
    end_canceled(job, retention_ms)
  elseif job.tries < max_attempts then
    job.losses = redis.call('HINCRBY', K('job:' .. job.id), 'losses', 1)
    requeue(job)
    enqueue(job)
  else
    end_failed(job, 'generation_failed', 'the job was lost with its worker too many times', retention_ms)
  end
end

local function expire(job)
  remove_waiting(job)
  redis.call('HSET', K('job:' .. job.id), 'code', 'expired', 'message', 'the job waited longer than the limit')
  refund_request(job)
  end_job(job, 'expired', retention_ms)
end

local function reap_leases(kind)
  local due = redis.call('ZRANGEBYSCORE', K('lease:' .. kind), '-inf', now, 'LIMIT', 0, limit)
  for _, id in ipairs(due) do
    redis.call('ZREM', K('lease:' .. kind), id)
    local job = read_job(id)
    if job and job.state == 'running' then
      drop_lease(job)
      lose_lease(job)
    end
  end
  return #due
end

local function expire_waiting(kind)
  local due = redis.call('ZRANGEBYSCORE', K('age:' .. kind), '-inf', now - queue_age_ms, 'LIMIT', 0, limit)
  for _, id in ipairs(due) do
    redis.call('ZREM', K('age:' .. kind), id)
    local job = read_job(id)
    if job and job.state == 'queued' then expire(job) end
  end
  return #due
end

local function remove_dead_workers(kind)
  local gone = redis.call('ZRANGEBYSCORE', K('workers:' .. kind), '-inf', now - worker_life_ms, 'LIMIT', 0, limit)
  for _, worker in ipairs(gone) do
    redis.call('ZREM', K('workers:' .. kind), worker)
    redis.call('HDEL', K('capacity:' .. kind), worker)
  end
end

local moved = 0
for _, kind in ipairs(KINDS) do
  moved = moved + reap_leases(kind) + promote_due(kind, limit) + expire_waiting(kind)
  remove_dead_workers(kind)
end
redis.call('ZREMRANGEBYSCORE', K('dead'), '-inf', now - retention_ms)
return moved
